//! The watched nodes before those of waiters for fair locks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// After this time a waiter looks at the node before its own again, although nothing was told of it.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The waiter behind each watched node, by the path of the node.
#[derive(Debug, Default)]
pub(crate) struct Followers(Mutex<HashMap<String, Follower>>);

#[derive(Debug)]
struct Follower {
    topic: Arc<str>,
    before: Watched,
}

/// What is known of a watched node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watched {
    /// Nothing: it must be asked for.
    Unknown,
    /// It existed at that time, and its end will be told.
    There(Instant),
    Deleted,
}

impl Followers {
    /// Returns what this waiter knows of the node before its own. That the node was deleted is returned once.
    pub(crate) fn look(&self, path: &str, topic: &str) -> Watched {
        let mut followers = self.0.lock();
        match followers
            .get(path)
            .map(|follower| (&*follower.topic, follower.before))
        {
            Some((_, Watched::Deleted)) => {
                followers.remove(path);
                Watched::Deleted
            }
            Some((of, Watched::There(since))) if of == topic && since.elapsed() < LOOK_EVERY => {
                Watched::There(since)
            }
            _ => Watched::Unknown,
        }
    }

    /// Records that a waiter asks for the node before its own, and watches it.
    pub(crate) fn asks(&self, path: &str, topic: Arc<str>) {
        let before = Watched::Unknown;
        self.0.lock().insert(path.to_owned(), Follower { topic, before });
    }

    /// Records the reply that the node exists, unless its end was told before or the connection is another one.
    pub(crate) fn is_there(&self, path: &str, topic: &str) {
        if let Some(follower) = self.0.lock().get_mut(path)
            && *follower.topic == *topic
            && follower.before == Watched::Unknown
        {
            follower.before = Watched::There(Instant::now());
        }
    }

    pub(crate) fn remove(&self, path: &str) {
        self.0.lock().remove(path);
    }

    /// Forgets all watches: those of a connection end with it.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Records that the watch of a node has ended, and whether the node was deleted. Returns the topic of the waiter
    /// behind it if that does not know yet.
    pub(crate) fn changed(&self, path: &str, is_deleted: bool) -> Option<Arc<str>> {
        let mut followers = self.0.lock();
        let follower = followers
            .get_mut(path)
            .filter(|follower| follower.before != Watched::Deleted)?;
        follower.before = match is_deleted {
            true => Watched::Deleted,
            false => Watched::Unknown,
        };
        Some(follower.topic.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "/a/k/n";

    fn followers() -> Followers {
        let followers = Followers::default();
        followers.asks(PATH, "topic".into());
        followers
    }

    #[test]
    fn waiter_is_told_once_of_the_end_of_the_node_before_it() {
        let followers = followers();
        assert_eq!(followers.look(PATH, "topic"), Watched::Unknown);
        assert_eq!(followers.changed(PATH, false).as_deref(), Some("topic"));
        assert_eq!(followers.look(PATH, "topic"), Watched::Unknown);
        assert_eq!(followers.changed(PATH, true).as_deref(), Some("topic"));
        assert_eq!(followers.changed(PATH, true), None);
        assert_eq!(followers.changed("/a/k/other", true), None);
        assert_eq!(followers.look(PATH, "topic"), Watched::Deleted);
        assert_eq!(followers.look(PATH, "topic"), Watched::Unknown);
    }

    #[test]
    fn node_that_was_there_needs_no_look_until_something_is_told_or_time_has_passed() {
        let is_there =
            |followers: &Followers, topic| matches!(followers.look(PATH, topic), Watched::There(_));
        for is_deleted in [None, Some(false), Some(true)] {
            let followers = followers();
            followers.is_there(PATH, "topic");
            assert!(is_there(&followers, "topic") && !is_there(&followers, "another"));
            match is_deleted {
                None => followers.clear(),
                Some(is_deleted) => drop(followers.changed(PATH, is_deleted)),
            }
            assert!(!is_there(&followers, "topic"), "{is_deleted:?}");
        }
        let followers = followers();
        followers.is_there(PATH, "topic");
        let long_ago = Instant::now().checked_sub(LOOK_EVERY);
        followers.0.lock().get_mut(PATH).unwrap().before = Watched::There(long_ago.unwrap());
        assert!(!is_there(&followers, "topic"));
    }

    #[test]
    fn reply_does_not_undo_what_was_told_before() {
        let told = followers();
        told.changed(PATH, true);
        told.is_there(PATH, "topic");
        assert_eq!(told.look(PATH, "topic"), Watched::Deleted);
        let forgotten = followers();
        forgotten.clear();
        forgotten.is_there(PATH, "topic");
        assert_eq!(forgotten.look(PATH, "topic"), Watched::Unknown);
    }
}
