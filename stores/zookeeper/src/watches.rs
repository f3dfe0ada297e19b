//! Notifies waiters when a lock may be available to them.
//!
//! Each lock with waiters has one watch, on the list of its nodes. A change of the list alone is not reported: each
//! acquire of a busy lock changes it twice, and waiters that notified each other of their attempts would never stop.
//! Waiters for write locks and plain locks are notified when the first node is gone, readers when the first writer is
//! gone.

use std::sync::Arc;
use std::time::Duration;

use crate::core::Core;
use crate::layout::{PERMITS, latch_of, leases_of, permits_topic, total_of};
use crate::names::Node;
use crate::seen::{Gone, Seen};
use crate::session::{Answer, NoReply};
use crate::wire::{Code, Reply, Request};
use dlock::store::Kind;
use tokio::time::sleep;

/// The pause before a refused watch is requested again.
const REFUSED: Duration = Duration::from_secs(1);

/// The pause before a watch is requested again that was not sent in time.
const NOT_SENT: Duration = Duration::from_millis(100);

/// Waiters that wait for the same event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    All,
    Readers,
    Permits,
    Latch,
}

impl Class {
    fn of(kind: Kind) -> Class {
        match kind {
            Kind::Read => Class::Readers,
            Kind::Permit => Class::Permits,
            Kind::Latch => Class::Latch,
            _ => Class::All,
        }
    }

    fn topic(self, lock: &str) -> String {
        format!("{}{lock}", self.prefix())
    }

    fn prefix(self) -> &'static str {
        match self {
            Class::All => "all ",
            Class::Readers => "readers ",
            Class::Permits => PERMITS,
            Class::Latch => "latch ",
        }
    }

    /// The class of a topic; `None` if it is that of a position.
    fn with(topic: &str) -> Option<Class> {
        CLASSES
            .into_iter()
            .find(|class| topic.starts_with(class.prefix()))
    }
}

/// A counter that has changed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Changes {
    Permits(String),
    Latch(String),
}

/// The topic on which the waiters for a lock are notified.
pub(crate) fn topic(kind: Kind, lock: &str) -> String {
    Class::of(kind).topic(lock)
}

const CLASSES: [Class; 4] = [Class::All, Class::Readers, Class::Permits, Class::Latch];

/// The nodes of a counter that its waiters watch; `None` for the topic of a lock.
fn counter_nodes(lock: &str, topic: &str) -> Option<Vec<String>> {
    match Class::with(topic)? {
        Class::Permits => Some([leases_of(lock), total_of(lock)].to_vec()),
        Class::Latch => Some(vec![latch_of(lock)]),
        Class::All | Class::Readers => None,
    }
}

fn lock_of(topic: &str) -> &str {
    topic.split_once(' ').map_or(topic, |(_, lock)| lock)
}

impl Core {
    /// Watches what a topic is about, and confirms it: from now on its notifications are certain.
    pub(crate) async fn watch(&self, lock: Arc<str>, topic: &str) {
        let Some(nodes) = counter_nodes(&lock, topic) else {
            return self.watch_lock(lock, Some(topic)).await;
        };
        for node in nodes {
            if self.watch_node(&self.path(&node), topic).await.is_none() {
                return;
            }
        }
        self.hub.confirm(topic);
    }

    /// Removes the watches of a counter without waiters: the change that would end them may never come.
    pub(crate) async fn unwatch(&self, lock: &str, topic: &str) {
        let nodes = counter_nodes(lock, topic).unwrap_or_default();
        // The watches for a new waiter are requested by the task that runs this, so their requests are sent later.
        if self.hub.listeners(topic) > 0 {
            return;
        }
        let requests = nodes.iter().map(|node| Request::Unwatch {
            path: self.path(node),
        });
        for pending in self.session.ask_all(requests) {
            // Refused if there is no watch. Watches also end with their connection.
            let _ = pending.answer().await;
        }
    }

    /// Watches a node of a counter while it is waited for, and returns whether it exists.
    async fn watch_node(&self, path: &str, topic: &str) -> Option<bool> {
        while self.hub.listeners(topic) > 0 {
            let path = path.to_owned();
            // The leases of a semaphore are children.
            let children = path.ends_with("/leases");
            let watch = |children| match children {
                true => Request::Children {
                    path: path.clone(),
                    watch: true,
                },
                false => Request::Exists {
                    path: path.clone(),
                    watch: true,
                },
            };
            let mut answer = self.session.ask(watch(children)).answer().await;
            let is_missing = |answer: &Answer| answer.reply == Err(Code::NO_NODE);
            if children && answer.as_ref().is_ok_and(is_missing) {
                // The last of those that waited has removed its watches.
                if self.hub.listeners(topic) == 0 {
                    return None;
                }
                answer = match self.session.ask(watch(false)).answer().await {
                    Ok(Answer { reply: Ok(_), .. }) => continue,
                    other => other,
                };
            }
            match answer.map(|answer| answer.reply) {
                Ok(Ok(_)) => return Some(true),
                Ok(Err(Code::NO_NODE)) => return Some(false),
                Ok(Err(code)) => {
                    tracing::warn!(%path, %code, "ZooKeeper refuses to watch a semaphore or latch");
                    sleep(REFUSED).await;
                }
                Err(NoReply::NotSent(_)) => sleep(NOT_SENT).await,
                // All watches are set again after the next connect.
                Err(NoReply::Lost(..)) => return None,
            }
        }
        None
    }

    /// Watches a counter again after a change, and notifies its waiters.
    pub(crate) async fn counter_changed(&self, path: &str, counter: Changes) {
        match counter {
            Changes::Permits(semaphore) => {
                self.watch_node(path, &permits_topic(&semaphore)).await;
                self.tell_permits(&semaphore);
            }
            Changes::Latch(latch) => {
                let topic = Class::Latch.topic(&latch);
                if self.watch_node(path, &topic).await == Some(false) {
                    self.hub.tell(&topic);
                }
            }
        }
    }

    /// Watches a lock, and notifies its waiters of nodes that are gone. Also confirms `topic`, if any.
    pub(crate) async fn watch_lock(&self, lock: Arc<str>, topic: Option<&str>) {
        let nodes = loop {
            if !self.is_waited_for(&lock) {
                self.watches.forget(&lock);
                return;
            }
            match self.watch_once(&lock).await {
                Ok(Some(nodes)) => break nodes,
                Ok(None) => {}
                // There may be no new connection: a request is also late after a stall of this process.
                Err(NoReply::NotSent(_)) => sleep(NOT_SENT).await,
                // All watches are set again after the next connect.
                Err(NoReply::Lost(..)) => return,
            }
        };
        self.tell(&lock, &self.watches.see(&lock, Seen::of(&nodes)));
        if let Some(topic) = topic {
            self.hub.confirm(topic);
        }
    }

    /// Notifies the waiters of what is gone.
    pub(crate) fn tell(&self, lock: &str, gone: &Gone) {
        if gone.first {
            self.hub.tell(&Class::All.topic(lock));
        }
        if gone.writer {
            self.hub.tell(&Class::Readers.topic(lock));
        }
    }

    /// Lists the nodes of a lock and watches the list; `None` if this must be repeated.
    async fn watch_once(&self, lock: &str) -> Result<Option<Vec<Node>>, NoReply> {
        let path = self.path(lock);
        let code = match self.session.ask(self.children(lock, true)).answer().await?.reply {
            Ok(Reply::Children(names)) => return Ok(Some(Node::sorted(&names))),
            // The node of the lock does not exist: its creation is watched.
            Err(Code::NO_NODE) => match self
                .session
                .ask(Request::Exists { path, watch: true })
                .answer()
                .await?
                .reply
            {
                Err(Code::NO_NODE) => return Ok(Some(Vec::new())),
                Ok(_) => return Ok(None),
                Err(code) => code,
            },
            Ok(_) => Code::OK,
            Err(code) => code,
        };
        tracing::warn!(lock, %code, "ZooKeeper refuses to watch a lock");
        sleep(REFUSED).await;
        Ok(None)
    }

    fn is_waited_for(&self, lock: &str) -> bool {
        [Class::All, Class::Readers]
            .iter()
            .any(|class| self.hub.listeners(&class.topic(lock)) > 0)
    }

    /// Returns the topics with waiters and their locks, all of which must be watched again. Waiters for fair locks do
    /// that themselves.
    pub(crate) fn waited_for(&self) -> Vec<(Arc<str>, Arc<str>)> {
        self.watches.forget_all();
        let topics = self
            .hub
            .names()
            .into_iter()
            .filter(|topic| Class::with(topic).is_some());
        topics.map(|topic| (Arc::from(lock_of(&topic)), topic)).collect()
    }

    /// The counter that has a node with this path, if any.
    pub(crate) fn counter_with(&self, path: &str) -> Option<Changes> {
        let (key, node) = path
            .strip_prefix(&self.root)?
            .strip_prefix('/')?
            .split_once('/')?;
        let name = format!("{key}/{node}");
        if [leases_of(key), total_of(key)].contains(&name) {
            return Some(Changes::Permits(key.to_owned()));
        }
        (name == latch_of(key)).then(|| Changes::Latch(key.to_owned()))
    }

    /// The lock whose node has this path, if any.
    pub(crate) fn watched(&self, path: &str) -> Option<Arc<str>> {
        let lock = path.strip_prefix(&self.root)?.strip_prefix('/')?;
        (!lock.contains('/')).then(|| lock.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::position_topic;
    use crate::session::Session;
    use dlock::store::GrantId;
    use futures_util::FutureExt;
    use tokio::time::timeout;

    /// A connection that stalls until the first requests are late.
    #[tokio::test]
    async fn watch_that_was_not_sent_in_time_is_set_later() {
        for kind in [Kind::Mutex, Kind::Permit] {
            let session = Arc::new(Session::unserved(Duration::from_millis(20)));
            let core = Core::new(session.clone(), "/locks".to_owned());
            let topic: Arc<str> = topic(kind, "k").into();
            let mut watch = core.hub.listen(topic.clone(), |_| false, |_| {});
            let serving = async {
                session.fails_late().await;
                loop {
                    session.answers(&Ok(Reply::Children(Vec::new())));
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let confirmed = async {
                core.watch("k".into(), &topic).await;
                watch.changed().await;
            };
            tokio::select! {
                () = serving => {}
                confirmed = timeout(Duration::from_secs(10), confirmed) => confirmed.unwrap(),
            }
        }
    }

    /// Its request for them may be sent already.
    #[tokio::test]
    async fn watches_of_a_counter_are_not_removed_from_a_later_waiter() {
        for kind in [Kind::Permit, Kind::Latch] {
            let session = Arc::new(Session::unserved(Duration::from_secs(60)));
            let core = Core::new(session, "/locks".to_owned());
            let topic: Arc<str> = topic(kind, "k").into();
            assert!(
                core.unwatch("k", &topic).now_or_never().is_none(),
                "not requested"
            );
            let _watch = core.hub.listen(topic.clone(), |_| false, |_| {});
            assert!(core.unwatch("k", &topic).now_or_never().is_some(), "requested");
        }
    }

    #[test]
    fn topics_name_their_locks() {
        for kind in [Kind::Mutex, Kind::Read, Kind::Permit, Kind::Latch] {
            let topic = topic(kind, "with space");
            assert_eq!(lock_of(&topic), "with space");
            assert!(Class::with(&topic).is_some());
        }
        let position = position_topic("with space", GrantId::from_parts(1, 1));
        assert!(Class::with(&position).is_none());
        assert_ne!(topic(Kind::Read, "k"), topic(Kind::Write, "k"));
        assert_eq!(topic(Kind::Mutex, "k"), topic(Kind::Write, "k"));
    }
}
