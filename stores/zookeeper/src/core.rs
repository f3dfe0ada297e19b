//! State shared by all operations: the session, the paths, and the grants of this client.

use std::collections::HashSet;
use std::sync::Arc;

use dlock::store::{GrantId, Hub, Kind, Reason, StoreError};
use parking_lot::Mutex;
use tokio::runtime;

use crate::deletes::Deletes;
use crate::followers::Followers;
use crate::grants::{Grants, State};
use crate::names::{Counter, Node, Role, family_beside};
use crate::seen::Watches;
use crate::session::{Answer, Epoch, NoReply, PendingReply, Session, refused};
use crate::steps::Steps;
use crate::wire::{Code, Mode, Reply, Request, Stat};

/// How many locks are remembered at once.
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
    pub(crate) steps: Steps,
    /// Locks whose node existed recently, so that an acquire does not create it again.
    pub(crate) made: Remembered,
    /// Locks that others held when this client last asked, so that an acquire looks first.
    pub(crate) busy: Remembered,
}

/// The names of some locks.
#[derive(Default)]
pub(crate) struct Remembered(Mutex<HashSet<Arc<str>>>);

impl Remembered {
    pub(crate) fn has(&self, lock: &str) -> bool {
        self.0.lock().contains(lock)
    }

    pub(crate) fn add(&self, lock: &Arc<str>) {
        let mut locks = self.0.lock();
        if locks.len() >= REMEMBERED {
            locks.clear();
        }
        locks.insert(lock.clone());
    }

    pub(crate) fn forget(&self, lock: &str) {
        self.0.lock().remove(lock);
    }
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
            steps: Steps::default(),
            made: Remembered::default(),
            busy: Remembered::default(),
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
        self.delete_path(self.path_of(lock, &node.name)).await
    }

    pub(crate) async fn delete_path(&self, path: String) -> Result<Answer, NoReply> {
        self.deletes.delete(path).await
    }

    /// The nodes of a grant that is held in this session, with their versions.
    pub(crate) fn holds(&self, grant: GrantId, epoch: Epoch) -> Option<Vec<(String, i32)>> {
        let own = self.grants.get(grant).filter(|own| own.epoch == epoch)?;
        match &own.state {
            State::Held { node, version } => Some(vec![(self.path_of(&own.lock, &node.name), *version)]),
            State::Permits(amount) => {
                let leases = self.leases(&own, *amount).into_iter();
                Some(leases.map(|path| (path, 0)).collect())
            }
            _ => None,
        }
    }

    /// Creates the node of a key, and one below it, unless they exist.
    pub(crate) async fn make_below(&self, key: &str, name: &str) -> Result<(), StoreError> {
        let path = self.path_of(key, name);
        for _ in 0..2 {
            let there = Request::Exists {
                path: path.clone(),
                watch: false,
            };
            let below = self.container(&format!("{key}/{name}"));
            let [parent, made, there] = self.session.send([self.container(key), below, there]);
            let parent = parent.answer().await?.reply;
            let made = made.answer().await?.reply;
            // A client does not need the right to create a node that exists.
            if there.answer().await?.reply.is_ok() {
                return Ok(());
            }
            match (parent, made) {
                (Err(Code::NO_NODE), _) => self.make_root().await?,
                // The node of the key was removed in between.
                (_, Err(Code::NO_NODE)) => {}
                (Err(code), _) | (_, Err(code)) if code != Code::NODE_EXISTS => {
                    return Err(refused(code, &format!("to create {path}")));
                }
                _ => {}
            }
        }
        let message = format!("{path} was removed again and again");
        Err(StoreError::not_done(Reason::RefusedForNow, message))
    }

    /// The family of what a key holds, unless it is this counter.
    pub(crate) async fn other_family(
        &self,
        key: &str,
        counter: Counter,
    ) -> Result<Option<&'static str>, StoreError> {
        let names = names(self.session.ask(self.children(key, false))).await?;
        Ok(family_beside(&names, Some(counter)))
    }

    pub(crate) fn exhausted(&self, lock: &str) -> StoreError {
        let path = self.path(lock);
        let message =
            format!("{path} has given its last sequence number: delete it while no client uses the lock");
        StoreError::not_done(Reason::Refused, message)
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
    Ok(Node::sorted(&names(children).await?))
}

/// Returns the names in a list; empty if the parent does not exist.
pub(crate) async fn names(children: PendingReply) -> Result<Vec<String>, StoreError> {
    match children.answer().await?.reply {
        Ok(Reply::Children(names)) => Ok(names),
        Err(Code::NO_NODE) => Ok(Vec::new()),
        Ok(_) => Err(StoreError::unknown("the answer of another request came")),
        Err(code) => Err(refused(code, "to list the nodes of a lock")),
    }
}

/// Reads the reply to a request for data; `None` if the node does not exist.
pub(crate) async fn data(pending: PendingReply) -> Result<Option<(Vec<u8>, Stat)>, StoreError> {
    match pending.answer().await?.reply {
        Ok(Reply::Data { data, stat }) => Ok(Some((data, stat))),
        Err(Code::NO_NODE) => Ok(None),
        Ok(_) => Err(StoreError::unknown("the answer of another request came")),
        Err(code) => Err(refused(code, "to read a node of a semaphore or latch")),
    }
}

/// The error for a key that holds something else.
pub(crate) fn key_taken(family: &str) -> StoreError {
    StoreError::not_done(
        Reason::KeyTaken(family.to_owned()),
        format!("the key holds {family}"),
    )
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
