//! State shared by all operations: the session, the paths, and the grants of this client.

use std::collections::HashSet;
use std::sync::Arc;

use dlock::store::{Hub, Kind, Reason, StoreError};
use parking_lot::Mutex;
use tokio::runtime;

use crate::deletes::Deletes;
use crate::followers::Followers;
use crate::grants::Grants;
use crate::names::{Node, Role};
use crate::seen::Watches;
use crate::session::{Answer, NoReply, PendingReply, Session, refused};
use crate::wire::{Code, Mode, Reply, Request};

/// For how many locks the client remembers that their node exists.
const REMEMBERED: usize = 65_536;

pub(crate) struct Core {
    pub(crate) session: Arc<Session>,
    deletes: Deletes,
    /// The node that contains the nodes of the locks.
    pub(crate) root: String,
    pub(crate) grants: Grants,
    pub(crate) hub: Arc<Hub>,
    pub(crate) watches: Watches,
    pub(crate) followers: Followers,
    /// Locks whose node existed recently, so that an acquire does not create it again.
    made: Mutex<HashSet<Arc<str>>>,
}

impl Core {
    /// Must be called in the runtime that serves the store.
    pub(crate) fn new(session: Arc<Session>, root: String) -> Core {
        Core {
            deletes: Deletes::new(session.clone(), runtime::Handle::current()),
            session,
            root,
            grants: Grants::default(),
            hub: Arc::default(),
            watches: Watches::default(),
            followers: Followers::default(),
            made: Mutex::default(),
        }
    }

    /// The path of the node of a lock.
    pub(crate) fn path(&self, lock: &str) -> String {
        format!("{}/{lock}", self.root)
    }

    /// The path of a node inside the node of a lock.
    pub(crate) fn path_of(&self, lock: &str, name: &str) -> String {
        format!("{}/{lock}/{name}", self.root)
    }

    pub(crate) fn was_made(&self, lock: &str) -> bool {
        self.made.lock().contains(lock)
    }

    pub(crate) fn is_made(&self, lock: &Arc<str>) {
        let mut made = self.made.lock();
        if made.len() >= REMEMBERED {
            made.clear();
        }
        made.insert(lock.clone());
    }

    pub(crate) fn is_gone(&self, lock: &str) {
        self.made.lock().remove(lock);
    }

    /// Creates the node of a lock. The server removes it some time after its last child is gone.
    pub(crate) fn container(&self, lock: &str) -> Request {
        Request::Create {
            path: self.path(lock),
            data: Vec::new(),
            mode: Mode::Container,
        }
    }

    pub(crate) fn children(&self, lock: &str, watch: bool) -> Request {
        Request::Children {
            path: self.path(lock),
            watch,
        }
    }

    pub(crate) async fn delete(&self, lock: &str, node: &Node) -> Result<Answer, NoReply> {
        self.deletes.delete(self.path_of(lock, &node.name)).await
    }

    /// Creates the root and its parents.
    pub(crate) async fn make_root(&self) -> Result<(), StoreError> {
        let ends = self.root.match_indices('/').map(|(at, _)| at).skip(1);
        for end in ends.chain([self.root.len()]) {
            let path = self.root[..end].to_owned();
            // A node that exists is not created: that would need an additional right.
            let there = self.session.ask(Request::Exists {
                path: path.clone(),
                watch: false,
            });
            match there.answer().await?.reply {
                Ok(_) => continue,
                Err(Code::NO_NODE) => {}
                Err(code) => return Err(refused(code, &format!("to look for {path}"))),
            }
            let made = self.session.ask(Request::Create {
                path: path.clone(),
                data: Vec::new(),
                mode: Mode::Persistent,
            });
            match made.answer().await?.reply {
                Ok(_) | Err(Code::NODE_EXISTS) => {}
                Err(code) => return Err(refused(code, &format!("to create {path}"))),
            }
        }
        Ok(())
    }

    /// Lists the nodes of a lock after the server has caught up with the leader.
    pub(crate) async fn nodes(&self, lock: &str) -> Result<Vec<Node>, StoreError> {
        let sync = Request::Sync {
            path: self.path(lock),
        };
        let [sync, children] = self.session.send([sync, self.children(lock, false)]);
        if let Err(code) = sync.answer().await?.reply {
            return Err(refused(code, "to catch up"));
        }
        listed(children).await
    }
}

/// Returns the nodes of a list; empty if the node of the lock does not exist.
pub(crate) async fn listed(children: PendingReply) -> Result<Vec<Node>, StoreError> {
    match children.answer().await?.reply {
        Ok(Reply::Children(names)) => Ok(Node::sorted(&names)),
        Err(Code::NO_NODE) => Ok(Vec::new()),
        Ok(_) => Err(StoreError::unknown("the answer of another request came")),
        Err(code) => Err(refused(code, "to list the nodes of a lock")),
    }
}

/// The role of a kind; an error for kinds that this store does not support.
pub(crate) fn role(kind: Kind) -> Result<Role, StoreError> {
    match kind {
        Kind::Mutex | Kind::Fair | Kind::Fenced => Ok(Role::Mutex),
        Kind::Read => Ok(Role::Read),
        Kind::Write => Ok(Role::Write),
        kind => Err(StoreError::not_done(
            Reason::Unsupported,
            format!("ZooKeeper has no locks of kind {kind}"),
        )),
    }
}

/// The nodes that hold the lock, given in queue order. A waiter for a fair lock that is first has not taken it yet.
pub(crate) fn holders(nodes: &[Node]) -> &[Node] {
    let Some(first) = nodes.first() else {
        return &[];
    };
    let holds = |node: &&Node| match first.role {
        Role::Read => node.role == Role::Read,
        // Readers that are nested in a writer have its number.
        Role::Write | Role::Mutex => node.position == first.position,
    };
    &nodes[..nodes.iter().take_while(holds).count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writer_holds_with_the_readers_that_are_nested_in_it() {
        for (names, count) in [
            (&[][..], 0),
            (&["lock-0000000001", "lock-0000000002"], 1),
            (
                &["__READ__0000000001", "__READ__0000000002", "__WRIT__0000000003"],
                2,
            ),
            (&["__WRIT__0000000001", "__READ__0000000002"], 1),
            // Servers list children in no order.
            (
                &[
                    "_c_a-__READ__0000000001",
                    "_c_b-__WRIT__0000000001",
                    "__READ__0000000002",
                ],
                2,
            ),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let nodes = Node::sorted(&names);
            let holding = holders(&nodes);
            assert_eq!(holding.len(), count, "{names:?}");
            let writer = names.iter().any(|name| name.ends_with("__WRIT__0000000001"));
            assert_eq!(
                holding.first().is_some_and(|node| node.role == Role::Write),
                writer
            );
        }
    }
}
