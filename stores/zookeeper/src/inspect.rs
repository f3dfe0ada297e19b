//! Inspection: the holders of locks, for people and tools.

use dlock::LockKey;
use dlock::store::{GrantId, Holder, Kind, Reason, StoreError};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;

use crate::core::{Core, data as read, holders, names};
use crate::layout::leases_of;
use crate::names::{Node, Role, key_of_node, marked};
use crate::session::refused;
use crate::wire::{Code, Reply, Request};

/// How many locks of a list are read at a time.
const AT_ONCE: usize = 32;

impl Core {
    pub(crate) async fn inspect(&self, lock: &str) -> Result<Vec<Holder>, StoreError> {
        let held = self.held(lock).await?;
        let holders = held.iter().map(|(node, data)| holder(node, data));
        Ok(holders.chain(self.permits_held(lock).await?).collect())
    }

    /// Returns the holder of each permit of a semaphore.
    async fn permits_held(&self, semaphore: &str) -> Result<Vec<Holder>, StoreError> {
        let leases = self.lease_names(semaphore).await?;
        let looks = leases.iter().map(|lease| Request::Data {
            path: self.path_of(&leases_of(semaphore), lease),
            watch: false,
        });
        let mut holders = Vec::new();
        for (pending, lease) in self.session.ask_all(looks).into_iter().zip(&leases) {
            if let Some((data, _)) = read(pending).await? {
                holders.push(named(Kind::Permit, lease, &data));
            }
        }
        Ok(holders)
    }

    async fn lease_names(&self, semaphore: &str) -> Result<Vec<String>, StoreError> {
        let leases = self.session.ask(self.children(&leases_of(semaphore), false));
        let mut leases = names(leases).await?;
        leases.sort_unstable();
        Ok(leases)
    }

    /// Returns the nodes of the holders, with their data.
    async fn held(&self, lock: &str) -> Result<Vec<(Node, Vec<u8>)>, StoreError> {
        let nodes = self.nodes(lock).await?;
        let holders = holders(&nodes);
        let looks = holders.iter().map(|node| Request::Data {
            path: self.path_of(lock, &node.name),
            watch: false,
        });
        let mut found = Vec::new();
        for (pending, node) in self.session.ask_all(looks).into_iter().zip(holders) {
            match pending.answer().await?.reply {
                // It is first, and has not taken the lock yet.
                Ok(Reply::Data { data, .. }) if is_waiting(&data) => {}
                Ok(Reply::Data { data, .. }) => found.push((node.clone(), data)),
                // Released meanwhile.
                Err(Code::NO_NODE) => {}
                Ok(_) => return Err(StoreError::unknown("the answer of another request came")),
                Err(code) => return Err(refused(code, "to read the node of a holder")),
            }
        }
        Ok(found)
    }

    /// Lists the locks whose names, including the prefix of the store, begin with `prefix`, as far as this client may read
    /// them.
    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<(String, Holder)>, StoreError> {
        let path = self.root.clone();
        let sync = Request::Sync { path: path.clone() };
        let [_, children] = self
            .session
            .send([sync, Request::Children { path, watch: false }]);
        let names = match children.answer().await?.reply {
            Ok(Reply::Children(names)) => names,
            Err(Code::NO_NODE) => Vec::new(),
            Ok(_) => return Err(StoreError::unknown("the answer of another request came")),
            Err(code) => return Err(refused(code, "to list the locks")),
        };
        let keys = names.into_iter().filter_map(|name| {
            let key = key_of_node(&name).filter(|key| key.starts_with(prefix))?;
            Some(async move { (key, self.inspect(&name).await) })
        });
        let mut looks = stream::iter(keys).buffered(AT_ONCE);
        let mut found = Vec::new();
        while let Some((key, holders)) = looks.next().await {
            match holders {
                Ok(holders) => found.extend(holders.into_iter().map(|holder| (key.clone(), holder))),
                Err(error) if error.reason == Reason::Refused => {
                    tracing::warn!(key, %error, "a lock that this client may not read is left out of the list");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Deletes the nodes of all holders, of any client. Returns whether there was one.
    pub(crate) async fn force(&self, lock: &str) -> Result<bool, StoreError> {
        let held = self.held(lock).await?;
        let nodes = held.iter().map(|(node, _)| self.path_of(lock, &node.name));
        let leases = self.lease_names(lock).await?;
        let dir = leases_of(lock);
        let leases = leases.iter().map(|lease| self.path_of(&dir, lease));
        let deletes = nodes.chain(leases).map(|path| self.delete_path(path));
        let mut forced = false;
        for deleted in join_all(deletes).await {
            match deleted?.reply {
                Ok(_) => forced = true,
                Err(Code::NO_NODE) => {}
                Err(code) => return Err(refused(code, "to delete the node of a holder")),
            }
        }
        Ok(forced)
    }
}

/// Describes a holder by its node: dlock writes the id of the grant into it, Curator the address of its machine.
fn holder(node: &Node, data: &[u8]) -> Holder {
    let kind = match node.role {
        Role::Mutex => Kind::Mutex,
        Role::Read => Kind::Read,
        Role::Write => Kind::Write,
    };
    named(kind, &node.name, data)
}

fn named(kind: Kind, name: &str, data: &[u8]) -> Holder {
    let grant = std::str::from_utf8(data).ok().filter(|text| is_grant(text));
    let id = grant.or_else(|| marked(name)).unwrap_or(name);
    Holder::new(kind, id.to_owned(), 1, None).ending_with("its session with ZooKeeper")
}

/// What comes before the id of a grant in the node of a waiter for a fair lock.
const WAITS: &str = "waits ";

/// The data of a node that waits for a fair lock.
pub(crate) fn waiting(grant: GrantId) -> Vec<u8> {
    format!("{WAITS}{grant}").into_bytes()
}

pub(crate) fn is_waiting(data: &[u8]) -> bool {
    data.starts_with(WAITS.as_bytes())
}

/// Whether the text is the id of a grant: a UUID, a colon and a number.
fn is_grant(text: &str) -> bool {
    text.split_once(':').is_some_and(|(client, number)| {
        client.len() == 36 && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Creates a key, which may contain braces.
pub(crate) fn lock_key(name: &str) -> LockKey {
    LockKey::raw(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_named_by_what_is_known_of_them() {
        let name = "_c_0192f3a4-0000-4000-8000-000000000001-lock-0000000003";
        let node = Node::parse(name).unwrap();
        let grant = GrantId::from_parts(7, 42).to_string();
        assert_eq!(holder(&node, grant.as_bytes()).id, grant);
        assert_eq!(
            holder(&node, b"10.0.0.7").id,
            "0192f3a4-0000-4000-8000-000000000001"
        );
        assert!(is_waiting(&waiting(GrantId::from_parts(7, 42))) && !is_waiting(grant.as_bytes()));
        let plain = Node::parse("lock-0000000003").unwrap();
        assert_eq!(holder(&plain, b"").id, "lock-0000000003");
    }
}
