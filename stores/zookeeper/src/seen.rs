//! The last known state of the watched locks.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::names::{Node, Role};

/// The nodes whose removal the waiters of a lock wait for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    first: Option<String>,
    writer: Option<String>,
}

impl Seen {
    pub(crate) fn of<'a>(nodes: impl IntoIterator<Item = &'a Node> + Clone) -> Seen {
        let name = |node: &Node| node.name.clone();
        let mut writers = nodes.clone().into_iter().filter(|node| node.role == Role::Write);
        Seen {
            first: nodes.into_iter().next().map(name),
            writer: writers.next().map(name),
        }
    }
}

/// The locks that are watched.
#[derive(Debug, Default)]
pub(crate) struct Watches(Mutex<HashMap<Arc<str>, Seen>>);

/// What was removed since the last state.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Gone {
    pub(crate) first: bool,
    pub(crate) writer: bool,
}

impl Watches {
    /// Records the current state.
    pub(crate) fn see(&self, lock: &Arc<str>, seen: Seen) -> Gone {
        let mut watched = self.0.lock();
        let Some(before) = watched.get(lock) else {
            watched.insert(lock.clone(), seen);
            return Gone::default();
        };
        let gone = Gone {
            first: before.first.is_some() && before.first != seen.first,
            writer: before.writer.is_some() && before.writer != seen.writer,
        };
        watched.insert(lock.clone(), seen);
        gone
    }

    /// Records the state that an acquire saw, if the lock is watched: a conflicting node may be created and removed
    /// between two lists of the watch, and its removal must be reported nevertheless.
    pub(crate) fn meet(&self, lock: &Arc<str>, seen: Seen) -> Gone {
        let is_watched = self.0.lock().contains_key(lock);
        if is_watched {
            self.see(lock, seen)
        } else {
            Gone::default()
        }
    }

    pub(crate) fn forget(&self, lock: &str) {
        self.0.lock().remove(lock);
    }

    pub(crate) fn forget_all(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_gone_is_told() {
        let watches = Watches::default();
        let lock: Arc<str> = "k".into();
        let see = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let gone = watches.see(&lock, Seen::of(&Node::sorted(&names)));
            (gone.first, gone.writer)
        };
        let meet = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let gone = watches.meet(&lock, Seen::of(&Node::sorted(&names)));
            (gone.first, gone.writer)
        };
        assert_eq!(meet(&["lock-0000000000"]), (false, false));
        for (names, wanted) in [
            (&["lock-0000000001"][..], (false, false)),
            // an acquire, and its end
            (&["lock-0000000001", "lock-0000000002"], (false, false)),
            (&["lock-0000000001"], (false, false)),
            (&[], (true, false)),
            (&["__READ__0000000003"], (false, false)),
            (&["__READ__0000000003", "__WRIT__0000000004"], (false, false)),
            // a writer that gave up blocked only readers
            (&["__READ__0000000003"], (false, true)),
            (&["__WRIT__0000000005"], (true, false)),
            (
                &["__WRIT__0000000005", "__WRIT__0000000006", "__READ__0000000007"],
                (false, false),
            ),
            (&["__WRIT__0000000006"], (true, true)),
        ] {
            assert_eq!(see(names), wanted, "{names:?}");
        }
        // A node that existed only between two lists of the watch blocked an acquire.
        assert_eq!(see(&[]), (true, true));
        assert_eq!(meet(&["lock-0000000008"]), (false, false));
        assert_eq!(see(&[]), (true, false));
        // An acquire that meets a reader first reports that the writer is gone.
        assert_eq!(see(&["__WRIT__0000000009"]), (false, false));
        assert_eq!(meet(&["__READ__0000000010"]), (true, true));
        assert_eq!(see(&["__READ__0000000010"]), (false, false));
    }
}
