//! The names that have listeners in this process, and their notifications.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::{TAKEN, Watch};
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::base::own_line::OwnLine;
use crate::base::waking::waking;

/// The listeners of a store in this process, by name: one entry for each name with listeners, and none when the last
/// one is gone.
///
/// A store gives each waiter a [`Watch`] from [`listen`](Self::listen), subscribes to a name at its server when the
/// first listener comes, and passes on the server's notifications. The memory store notifies through this directly; the
/// Redis store feeds it from one subscription.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::store::Hub;
/// use std::sync::Arc;
///
/// let hub = Arc::new(Hub::default());
/// let subscribe = |_name: &Arc<str>| false; // asked for, not confirmed yet
/// let unsubscribe = |_name: Arc<str>| {};
/// let mut watch = hub.listen("order:42".into(), subscribe, unsubscribe);
/// hub.confirm("order:42"); // the server says that the subscription is there
/// watch.changed().await; // "look now"
/// hub.tell("order:42"); // the server says that the lock was released
/// watch.changed().await;
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Hub {
    topics: Mutex<HashMap<Arc<str>, Topic>>,
    /// How many topics there are, changed under the mutex: without a listener, as is usual, notifying takes no mutex.
    count: OwnLine<AtomicUsize>,
}

#[derive(Debug)]
struct Topic {
    notifications: watch::Sender<u64>,
    /// Whether notifications are certain to arrive: a new listener may check once and then sleep.
    live: bool,
}

impl Hub {
    /// Listens for `name`. `first` runs, under the hub's mutex, for the first listener, and returns whether
    /// notifications are certain from now on; `last` runs likewise when the last listener is gone.
    pub fn listen(
        self: &Arc<Self>,
        name: Arc<str>,
        first: impl FnOnce(&Arc<str>) -> bool,
        last: impl FnOnce(Arc<str>) + Send + Sync + 'static,
    ) -> Watch {
        let mut topics = self.topics.lock();
        let topic = topics.entry(name.clone()).or_insert_with(|| Topic {
            notifications: watch::Sender::new(0),
            live: first(&name),
        });
        let mut changes = topic.notifications.subscribe();
        if topic.live {
            changes.mark_changed();
        }
        self.count.store(topics.len(), Ordering::Relaxed);
        drop(topics);
        let hub = self.clone();
        Watch::new(changes, move || {
            let mut topics = hub.topics.lock();
            if topics
                .get(&name)
                .is_some_and(|topic| topic.notifications.receiver_count() == 0)
            {
                topics.remove(&name);
                hub.count.store(topics.len(), Ordering::Relaxed);
                last(name);
            }
        })
    }

    /// Notifies the listeners of `name` of a change; returns how many there are.
    pub fn tell(&self, name: &str) -> usize {
        let notifications = self.notifications(name);
        // Not under the mutex: a waker may drop a listener.
        match notifications {
            Some(notifications) => {
                if !(broken!(NotificationToldOnce) && *notifications.borrow() > 1) {
                    waking(|| notifications.send_modify(|n| *n += 1));
                }
                notifications.receiver_count()
            }
            None => 0,
        }
    }

    /// Tells the listeners of `name` that another process has taken the available lock.
    pub fn taken(&self, name: &str) {
        let notifications = self.notifications(name);
        if let Some(notifications) = notifications {
            waking(|| notifications.send_modify(|n| *n = n.wrapping_add(TAKEN)));
        }
    }

    fn notifications(&self, name: &str) -> Option<watch::Sender<u64>> {
        // A listener asks after it was counted: if it has asked before the change that is told here, it is seen.
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let topics = self.topics.lock();
        topics.get(name).map(|topic| topic.notifications.clone())
    }

    /// Returns how many listeners `name` has.
    pub fn listeners(&self, name: &str) -> usize {
        (self.topics.lock().get(name)).map_or(0, |topic| topic.notifications.receiver_count())
    }

    /// Declares notifications of `name` certain from now on; its listeners check once.
    pub fn confirm(&self, name: &str) {
        let notifications = self.topics.lock().get_mut(name).map(|topic| {
            topic.live = true;
            topic.notifications.clone()
        });
        if let Some(notifications) = notifications {
            waking(|| notifications.send_modify(|n| *n += 1));
        }
    }

    /// Declares that notifications may have been missed: all listeners check. With `live` false, new listeners do not
    /// rely on silence until the next `confirm`.
    pub fn tell_all(&self, live: bool) {
        let mut topics = self.topics.lock();
        let all: Vec<_> = topics
            .values_mut()
            .map(|topic| {
                topic.live &= live;
                topic.notifications.clone()
            })
            .collect();
        drop(topics);
        for notifications in all {
            waking(|| notifications.send_modify(|n| *n += 1));
        }
    }

    /// Declares that notifications of these names may have been missed.
    #[cfg(feature = "redis")]
    pub(crate) fn doubt<'a>(&self, names: impl IntoIterator<Item = &'a Arc<str>>) {
        let mut topics = self.topics.lock();
        let mut all = Vec::new();
        for name in names {
            if let Some(topic) = topics.get_mut(name) {
                topic.live = false;
                all.push(topic.notifications.clone());
            }
        }
        drop(topics);
        for notifications in all {
            waking(|| notifications.send_modify(|n| *n += 1));
        }
    }

    /// Returns all names with listeners.
    pub fn names(&self) -> Vec<Arc<str>> {
        self.topics.lock().keys().cloned().collect()
    }

    /// Returns how many names have listeners.
    pub(crate) fn len(&self) -> usize {
        self.topics.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Wake};

    use super::*;

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker panics")
        }
    }

    #[test]
    fn panic_of_a_waker_is_not_that_of_the_store() {
        let hub = Arc::new(Hub::default());
        let mut watch = hub.listen("k".into(), |_| false, |_| ());
        let tell: [fn(&Hub); 4] = [
            |hub| assert_eq!(hub.tell("k"), 1),
            |hub| hub.confirm("k"),
            |hub| hub.taken("k"),
            |hub| hub.tell_all(true),
        ];
        for tell in tell {
            let waker = Arc::new(Panics).into();
            let mut changed = pin!(watch.changed());
            assert!(
                changed
                    .as_mut()
                    .poll(&mut Context::from_waker(&waker))
                    .is_pending()
            );
            tell(&hub);
            let waker = std::task::Waker::noop();
            let _ = changed.as_mut().poll(&mut Context::from_waker(waker));
        }
    }
}
