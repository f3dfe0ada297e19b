//! What clients publish about themselves for the person on call, and read about others.
//!
//! These entries carry no authority: no lock is granted, renewed or released because of one. A client writes a
//! *presence* entry while it holds or waits for something, reads its *mailbox*, and answers requests.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::{GrantId, StoreFuture, Watch};
use crate::LockKey;

/// The ability to keep small entries beside the locks, see [`Store::operations`](super::Store::operations).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::store::StoreError> {
/// use dlock::store::Store;
/// use dlock::store::operations::{EntryName, Operations};
/// use dlock::stores::memory::MemoryStore;
/// use std::{sync::Arc, time::Duration};
///
/// let store: Arc<dyn Operations> = Store::operations(Arc::new(MemoryStore::new())).expect("it keeps entries");
/// let name = EntryName::presence(0x0192_f3a4);
/// store.clone().put(name.clone(), b"here".to_vec(), Duration::from_secs(15), false).await?;
/// let entry = store.get(name).await?.expect("it was put there");
/// assert_eq!(entry.value, b"here");
/// # Ok(()) }
/// ```
pub trait Operations: Send + Sync + 'static {
    /// Writes an entry that expires after `ttl`. With `tell`, notifies those that [`watch`](Self::watch) it.
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()>;

    /// Reads an entry; `None` if there is none.
    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>>;

    /// Removes an entry.
    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()>;

    /// Adds a message to a mailbox, which expires after `ttl`, and notifies its owner; returns how many listeners
    /// received it. A message replaces another with the same `id`. A mailbox with [`MAILBOX`] messages refuses more.
    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64>;

    /// Empties a mailbox and returns its messages. After a failure whose outcome is unknown they may be lost.
    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>>;

    /// Returns the clients that have a presence entry. It scans all keys: meant for people and tools.
    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>>;

    /// Subscribes to an entry or a mailbox.
    fn watch(self: Arc<Self>, name: &EntryName) -> Watch;

    /// Adds an event to the audit log, of which the store keeps at least the last [`AUDITED`].
    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()>;

    /// Ends the hold of a key and wakes the waiters, if this is its only holder; returns whether it was. A key with
    /// other holders too fails with [`Reason::Refused`](super::Reason::Refused).
    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool>;

    /// Returns the connections of a client, as the servers see them; `None` if the store cannot tell, as where the client's user
    /// may not name its connections.
    fn connections(self: Arc<Self>, client: Uuid) -> StoreFuture<Option<Vec<Connection>>> {
        let _ = client;
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Returns the address of this process towards the store, if that needs no request.
    fn local_address(&self) -> Option<String> {
        None
    }
}

/// The maximum number of messages in a mailbox.
pub const MAILBOX: usize = 64;

/// How many events of the audit log a store keeps at least.
pub const AUDITED: usize = 10_000;

/// The name of an entry.
///
/// ```
/// use dlock::store::operations::EntryName;
///
/// let name = EntryName::presence(0x0192_f3a4_0000_7000_8000_0000_0000_0001);
/// assert_eq!(name.with_prefix("shop:"), "shop:dlock:client:0192f3a4-0000-7000-8000-000000000001");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EntryName(Of);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Of {
    Client {
        what: &'static str,
        client: Uuid,
    },
    Lock {
        what: &'static str,
        key: LockKey,
        grant: GrantId,
    },
}

impl EntryName {
    /// Returns the name of a client's presence entry.
    #[must_use]
    pub const fn presence(client: u128) -> EntryName {
        EntryName::of_client("client", Uuid::from_u128(client))
    }

    pub(crate) const fn of_client(what: &'static str, client: Uuid) -> EntryName {
        EntryName(Of::Client { what, client })
    }

    /// Returns the name of an entry beside a lock, in its slot: only a client that may write the lock may write it.
    pub(crate) fn of_grant(what: &'static str, key: LockKey, grant: GrantId) -> EntryName {
        EntryName(Of::Lock { what, key, grant })
    }

    /// Returns the name in a store whose names have a prefix.
    #[must_use]
    pub fn with_prefix(&self, prefix: &str) -> String {
        match &self.0 {
            Of::Client { what, client } => format!("{prefix}dlock:{what}:{client}"),
            Of::Lock { what, key, grant } => {
                let lock = format!("{prefix}{key}");
                match lock.contains('{') {
                    true => format!("{lock}:dlock:{what}:{grant}"),
                    false => format!("{{{lock}}}:dlock:{what}:{grant}"),
                }
            }
        }
    }
}

/// An entry as it was read.
///
/// ```
/// use dlock::store::operations::Entry;
/// use std::time::Duration;
///
/// let entry = Entry::new(b"here".to_vec(), Duration::from_secs(9));
/// assert_eq!(entry.remaining.as_secs(), 9);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// What was written.
    pub value: Vec<u8>,
    /// The time until it expires.
    pub remaining: Duration,
}

impl Entry {
    /// Creates an entry, for a store that keeps them.
    #[must_use]
    pub fn new(value: Vec<u8>, remaining: Duration) -> Entry {
        Entry { value, remaining }
    }
}

/// A connection of a client, as a server sees it.
///
/// ```
/// use dlock::store::operations::Connection;
/// use std::time::Duration;
///
/// let connection = Connection::new("checkout", "10.0.3.7:41234", Duration::from_secs(60), Duration::ZERO);
/// assert_eq!(connection.service, "checkout");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connection {
    /// The name of the service.
    pub service: String,
    /// Its address; behind proxies that of the last one.
    pub address: String,
    /// Time since it was connected.
    pub age: Duration,
    /// Time since it was last used.
    pub idle: Duration,
}

impl Connection {
    /// Creates a connection, for a store that shows them.
    #[must_use]
    pub fn new(
        service: impl Into<String>,
        address: impl Into<String>,
        age: Duration,
        idle: Duration,
    ) -> Connection {
        Connection {
            service: service.into(),
            address: address.into(),
            age,
            idle,
        }
    }
}
