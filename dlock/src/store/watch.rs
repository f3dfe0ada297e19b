//! How waiters are notified of releases.

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::base::clock;
use crate::base::moment::{LONGEST_LEASE, Moment};

/// Notifications of one key, shared by all of its waiters in this process.
///
/// Dropping it ends the subscription if it was the last one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::store::Watch;
/// use std::time::Duration;
///
/// let mut watch = Watch::polling(Duration::from_millis(200));
/// watch.changed().await; // at once: look now
/// # }
/// ```
pub struct Watch {
    /// `None` when the subscription has ended.
    source: Option<Source>,
    /// The last value seen; `None` while the first check is due.
    seen: Option<u64>,
    /// Whether notifications were certain from the start.
    was_live: bool,
    in_process: bool,
    began: Moment,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// The source of notifications.
enum Source {
    /// A counter of notifications.
    Changes(watch::Receiver<u64>),
    /// The store sends no notifications: the waiter polls.
    Polls { next: Instant, every: Duration },
}

/// What a [`Watch`] received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notification {
    /// Something changed, or may have.
    Changed,
    /// Another process has taken the available lock.
    Taken,
}

/// The value of a watch counts the notifications below this, and above it how many times the lock was reported as
/// taken.
pub(crate) const TAKEN: u64 = 1 << 48;

impl Watch {
    /// Creates a watch over `changes`: each new value is a notification, and the value counts them. A receiver with an
    /// unseen notification ([`watch::Receiver::mark_changed`]) means "you are subscribed, check now". `on_drop` runs
    /// when the receiver is gone.
    pub(crate) fn new(
        changes: watch::Receiver<u64>,
        on_drop: impl FnOnce() + Send + Sync + 'static,
    ) -> Watch {
        // Read first: a notification that comes now is seen as the first one, or as a change.
        let value = *changes.borrow();
        let looks_now = changes.has_changed().unwrap_or(false);
        let seen = (!looks_now).then_some(value);
        Watch {
            source: Some(Source::Changes(changes)),
            seen,
            was_live: looks_now,
            in_process: false,
            began: Moment::now(),
            on_drop: Some(Box::new(on_drop)),
        }
    }

    /// Creates a watch for a store without notifications: it tells the waiter to check at once, and again after each
    /// interval. Each waiting process asks the store that often.
    #[must_use]
    pub fn polling(every: Duration) -> Watch {
        Watch {
            source: Some(Source::Polls {
                next: clock::now(),
                every,
            }),
            seen: None,
            was_live: true,
            in_process: false,
            began: Moment::now(),
            on_drop: None,
        }
    }

    /// A moment after it was requested. A server counts it for no release before.
    pub(crate) fn began(&self) -> Moment {
        self.began
    }

    /// Declares that the store is in this process: it counts each watch, until that is dropped. A server counts one
    /// subscription for the process, until its end has arrived there.
    pub(crate) fn of_store_in_process(mut self) -> Watch {
        self.in_process = true;
        self
    }

    /// Whether the store is in this process.
    pub(crate) fn is_in_process(&self) -> bool {
        self.in_process
    }

    /// Returns how many notifications there have been so far, including unseen ones: the value of the receiver.
    pub(crate) fn count(&self) -> u64 {
        match &self.source {
            Some(Source::Changes(changes)) => *changes.borrow() % TAKEN,
            _ => 0,
        }
    }

    /// Returns how many notifications have been seen.
    pub(crate) fn count_seen(&self) -> u64 {
        self.seen.map_or_else(|| self.count(), |seen| seen % TAKEN)
    }

    /// Whether the store has confirmed the subscription: before that, a release may not have counted it.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.was_live || self.count() > 0
    }

    /// Ends the subscription: from now on there are no notifications.
    pub(crate) fn end(&mut self) {
        self.source = None;
        if let Some(on_drop) = self.on_drop.take() {
            on_drop();
        }
    }

    /// Marks all notifications so far as seen.
    pub(crate) fn seen(&mut self) {
        if let Some(Source::Changes(changes)) = &mut self.source {
            self.seen = Some(*changes.borrow_and_update());
        }
    }

    /// Waits for a notification. The first means "subscribed, check now"; each later one "something changed, or may
    /// have changed unseen". Several at once count as one. Never returns when the store has ended.
    ///
    /// Cancel safe: the next call returns notifications that came in between.
    pub async fn changed(&mut self) {
        while self.notification().await != Notification::Changed {}
    }

    /// Waits for a notification, and distinguishes that the lock was taken.
    pub(crate) async fn notification(&mut self) -> Notification {
        let changes = match &mut self.source {
            Some(Source::Changes(changes)) => changes,
            Some(Source::Polls { next, every }) => {
                clock::sleep_until(*next).await;
                let now = clock::now();
                *next = now.checked_add(*every).unwrap_or(now + LONGEST_LEASE);
                return Notification::Changed;
            }
            None => return std::future::pending().await,
        };
        loop {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            let now = *changes.borrow_and_update();
            match self.seen.replace(now) {
                Some(before) if before == now => {}
                Some(before) if before % TAKEN == now % TAKEN => return Notification::Taken,
                _ => return Notification::Changed,
            }
        }
    }
}

/// Waits for the next notification of a subscription, if there is one. Returns how many there have been.
pub(crate) async fn changed(watch: &mut Option<Watch>) -> u64 {
    match watch {
        Some(watch) => {
            watch.changed().await;
            watch.count()
        }
        None => std::future::pending().await,
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::super::Hub;
    use super::*;

    /// Before that, the reply to a release may not count it.
    #[test]
    fn subscription_is_confirmed_once_notifications_are_certain() {
        for is_certain in [true, false] {
            let hub = Arc::new(Hub::default());
            let mut watch = hub.listen("k".into(), |_| is_certain, |_| ());
            assert_eq!(watch.is_confirmed(), is_certain);
            hub.confirm("k");
            watch.seen();
            assert!(watch.is_confirmed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn watch_that_polls_seldom_or_never_is_due_once() {
        for every in [LONGEST_LEASE, Duration::MAX] {
            let mut watch = Watch::polling(every);
            watch.changed().await;
            assert_eq!(watch.changed().now_or_never(), None);
        }
    }
}
