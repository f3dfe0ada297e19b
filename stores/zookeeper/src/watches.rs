//! Notifies waiters when a lock may be available to them.
//!
//! Each lock with waiters has one watch, on the list of its nodes. A change of the list alone is not reported: each
//! acquire of a busy lock changes it twice, and waiters that notified each other of their attempts would never stop.
//! Waiters for write locks and plain locks are notified when the first node is gone, readers when the first writer is
//! gone.

use std::sync::Arc;
use std::time::Duration;

use crate::core::Core;
use crate::names::Node;
use crate::seen::{Gone, Seen};
use crate::session::NoReply;
use crate::wire::{Code, Reply, Request};
use dlock::store::Kind;

/// The pause before a refused watch is requested again.
const REFUSED: Duration = Duration::from_secs(1);

/// Waiters that wait for the same event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    All,
    Readers,
}

impl Class {
    fn of(kind: Kind) -> Class {
        match kind {
            Kind::Read => Class::Readers,
            _ => Class::All,
        }
    }

    fn topic(self, lock: &str) -> String {
        match self {
            Class::All => format!("all {lock}"),
            Class::Readers => format!("readers {lock}"),
        }
    }
}

/// The topic on which the waiters for a lock are notified.
pub(crate) fn topic(kind: Kind, lock: &str) -> String {
    Class::of(kind).topic(lock)
}

const CLASSES: [Class; 2] = [Class::All, Class::Readers];

fn is_of_class(topic: &str) -> bool {
    CLASSES.iter().any(|class| class.topic(lock_of(topic)) == topic)
}

fn lock_of(topic: &str) -> &str {
    topic.split_once(' ').map_or(topic, |(_, lock)| lock)
}

impl Core {
    /// Watches a lock, and notifies its waiters of nodes that are gone. Also confirms `topic`, if any: from now on its
    /// notifications are certain.
    pub(crate) async fn watch(&self, lock: Arc<str>, topic: Option<&str>) {
        let nodes = loop {
            if !self.is_waited_for(&lock) {
                self.watches.forget(&lock);
                return;
            }
            match self.watch_once(&lock).await {
                Ok(Some(nodes)) => break nodes,
                Ok(None) => {}
                // All watches are set again after the next connect.
                Err(_) => return,
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
        tokio::time::sleep(REFUSED).await;
        Ok(None)
    }

    fn is_waited_for(&self, lock: &str) -> bool {
        CLASSES
            .iter()
            .any(|class| self.hub.listeners(&class.topic(lock)) > 0)
    }

    /// Returns the topics with waiters and their locks, all of which must be watched again. Waiters for fair locks do
    /// that themselves.
    pub(crate) fn waited_for(&self) -> Vec<(Arc<str>, Arc<str>)> {
        self.watches.forget_all();
        let topics = self.hub.names().into_iter().filter(|topic| is_of_class(topic));
        topics.map(|topic| (Arc::from(lock_of(&topic)), topic)).collect()
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
    use dlock::store::GrantId;

    #[test]
    fn topics_name_their_locks() {
        for kind in [Kind::Mutex, Kind::Read] {
            let topic = topic(kind, "with space");
            assert_eq!(lock_of(&topic), "with space");
            assert!(is_of_class(&topic));
        }
        let position = position_topic("with space", GrantId::from_parts(1, 1));
        assert!(!is_of_class(&position));
        assert_ne!(topic(Kind::Read, "k"), topic(Kind::Write, "k"));
        assert_eq!(topic(Kind::Mutex, "k"), topic(Kind::Write, "k"));
    }
}
