//! The holder's node as a proof in other writes.

use dlock::store::{Bind, BoundGrant, StoreError};
use dlock::{Error, LockKey};
use futures_util::future::join_all;

use crate::session::refused;
use crate::store::ZookeeperLocks;
use crate::wire::{Change, Code, Mode, Reply, Request};

/// The node of a holder. A `multi` of any client that checks this node fails once the lock is lost.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::LockClient;
/// use dlock_zookeeper::ZookeeperLocks;
///
/// let locks = ZookeeperLocks::connect("zk1:2181", "/shop/locks").await?;
/// let client = LockClient::builder().store(locks.clone()).build().await?;
/// let guard = client.lock("order:42").acquire().await?;
/// for node in locks.nodes(&guard)? {
///     // Curator: client.transactionOp().check().withVersion(version).forPath(path)
///     println!("check {} {}", node.path, node.version);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderNode {
    /// The path of the node, which no other node ever has.
    pub path: String,
    /// The version of the node, which does not change while the lock is held.
    pub version: i32,
}

/// Writes that ZooKeeper makes atomically while a lock is held; see [`ZookeeperLocks::write_as`].
///
/// ```
/// use dlock_zookeeper::Writes;
///
/// let writes = Writes::new()
///     .set("/shop/leader", "10.0.0.7", None)
///     .create("/shop/terms/7", "begun")
///     .delete("/shop/terms/6", Some(0));
/// assert_eq!(writes.len(), 3);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Writes(Vec<Change>);

impl Writes {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Writes {
        Writes::default()
    }

    /// Sets the data of an existing node; with a version, only if the node has that version.
    #[must_use]
    pub fn set(mut self, path: impl Into<String>, data: impl Into<Vec<u8>>, version: Option<i32>) -> Writes {
        self.0.push(Change::Set {
            path: path.into(),
            data: data.into(),
            version: version.unwrap_or(-1),
        });
        self
    }

    /// Creates a persistent node, which must not exist.
    #[must_use]
    pub fn create(mut self, path: impl Into<String>, data: impl Into<Vec<u8>>) -> Writes {
        self.0.push(Change::Create {
            path: path.into(),
            data: data.into(),
            mode: Mode::Persistent,
        });
        self
    }

    /// Deletes a node without children; with a version, only if the node has that version.
    #[must_use]
    pub fn delete(mut self, path: impl Into<String>, version: Option<i32>) -> Writes {
        self.0.push(Change::Delete {
            path: path.into(),
            version: version.unwrap_or(-1),
        });
        self
    }

    /// Checks that a node exists; with a version, that the node has that version.
    #[must_use]
    pub fn check(mut self, path: impl Into<String>, version: Option<i32>) -> Writes {
        self.0.push(Change::Check {
            path: path.into(),
            version: version.unwrap_or(-1),
        });
        self
    }

    /// Returns the number of writes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no writes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Why a holder's writes were not made.
///
/// ```no_run
/// use dlock::LockGuard;
/// use dlock_zookeeper::{WriteError, Writes, ZookeeperLocks};
///
/// /// Whether this process leads still.
/// async fn publish(locks: &ZookeeperLocks, guard: &LockGuard) -> Result<bool, WriteError> {
///     match locks.write_as(guard, Writes::new().set("/shop/leader", "10.0.0.7", None)).await {
///         Ok(()) => Ok(true),
///         Err(WriteError::Lost { .. }) => Ok(false),
///         Err(error) => Err(error),
///     }
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The caller no longer holds the lock; nothing was written.
    #[error("lock \"{key}\" was lost: nothing was written")]
    #[non_exhaustive]
    Lost {
        /// The lock.
        key: LockKey,
    },
    /// The writes are larger than a request to the servers may be; nothing was sent. Write less at once, or raise
    /// `jute.maxbuffer` on all servers and [`largest_request`](crate::ZookeeperLocksBuilder::largest_request) here.
    #[error(
        "the writes take {bytes} bytes, and a request has up to {limit}; nothing was written: write less at once, or raise \
         jute.maxbuffer of the servers and largest_request"
    )]
    #[non_exhaustive]
    TooLarge {
        /// The size of the request.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// ZooKeeper refused one of the writes, for example because a version has changed; nothing was written.
    #[error("write {at} was refused ({reason}): nothing was written")]
    #[non_exhaustive]
    Refused {
        /// The index of the write, from 0.
        at: usize,
        /// The name of ZooKeeper's error: `BadVersion`, `NodeExists`, `NoNode`.
        reason: String,
    },
    /// The request failed; its `outcome` says whether the writes may have been made.
    #[error("the writes failed")]
    #[non_exhaustive]
    Failed {
        /// The cause.
        source: StoreError,
    },
}

impl ZookeeperLocks {
    /// Returns the nodes of a holder, for the `multi` of another client: one for each lock of a
    /// [`MultiGuard`](dlock::MultiGuard), and for each permit. After this call the lock is not handed off inside the process.
    ///
    /// A `multi` with a `check` of each node succeeds only while the lock is held: not after its session has expired,
    /// or after it was released or force-released.
    ///
    /// # Errors
    ///
    /// [`WriteError::Lost`] when the lock is lost.
    pub fn nodes(&self, guard: &impl Bind) -> Result<Vec<HolderNode>, WriteError> {
        let nodes: Result<Vec<_>, _> = bound(guard)?.iter().map(|grant| self.nodes_of(grant)).collect();
        Ok(nodes?.into_iter().flatten().collect())
    }

    /// Makes these writes as the holder of a lock: the lock is held while ZooKeeper makes them, or none is made. This
    /// does not depend on clocks: a process that was paused for an hour writes nothing. After this call the lock is not
    /// handed off inside the process.
    ///
    /// # Errors
    ///
    /// [`WriteError::Lost`] when the lock is lost, which its guard then reports; [`WriteError::TooLarge`] when the writes
    /// do not fit into a request, and nothing was sent; [`WriteError::Refused`] when one of the writes cannot be made, and
    /// [`WriteError::Failed`] otherwise: after a lost reply it is unknown whether the writes were made.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not undo the writes.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(client: dlock::LockClient, locks: dlock_zookeeper::ZookeeperLocks) -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock_zookeeper::Writes;
    ///
    /// let guard = client.lock("config").acquire().await?; // a client made of `locks`
    /// locks.write_as(&guard, Writes::new().set("/shop/config", "rate=7", None)).await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn write_as(&self, guard: &impl Bind, writes: Writes) -> Result<(), WriteError> {
        let bound = bound(guard)?;
        let nodes: Result<Vec<_>, WriteError> = bound.iter().map(|grant| self.nodes_of(grant)).collect();
        let Ok(nodes) = nodes else {
            return Err(found_lost(&bound).await);
        };
        let checks = nodes.iter().flatten().map(|node| Change::Check {
            path: node.path.clone(),
            version: node.version,
        });
        let mut changes: Vec<Change> = checks.collect();
        let checked = changes.len();
        changes.extend(writes.0);
        let session = &self.0.core.session;
        let request = Request::Multi(changes);
        let (bytes, limit) = (
            request.bytes(session.config().acl),
            session.config().largest_request,
        );
        if bytes > limit {
            return Err(WriteError::TooLarge { bytes, limit });
        }
        let failed = |source| WriteError::Failed { source };
        let answer = session.ask(request).answer().await;
        let codes = match answer.map_err(|no_reply| failed(no_reply.into()))?.reply {
            Ok(Reply::Multi(codes)) => codes,
            Ok(_) => return Err(failed(StoreError::unknown("the answer of another request came"))),
            Err(Code::SESSION_EXPIRED) => return Err(found_lost(&bound).await),
            Err(code) => return Err(failed(refused(code, "the writes"))),
        };
        let broken = |code: &Code| *code != Code::OK && *code != Code::ROLLED_BACK;
        match codes.iter().position(broken) {
            None => Ok(()),
            Some(at) if at < checked => Err(found_lost(&bound[owner(&nodes, at)..]).await),
            Some(at) => Err(WriteError::Refused {
                at: at - checked,
                reason: codes[at].to_string(),
            }),
        }
    }

    fn nodes_of(&self, bound: &BoundGrant) -> Result<Vec<HolderNode>, WriteError> {
        let core = &self.0.core;
        let held = core.holds(bound.grant, core.session.epoch());
        let nodes = held.ok_or_else(|| lost(&bound.key))?.into_iter();
        Ok(nodes
            .map(|(path, version)| HolderNode { path, version })
            .collect())
    }
}

/// The index of the grant that has the node at this index among all nodes.
fn owner(nodes: &[Vec<HolderNode>], at: usize) -> usize {
    let ends = nodes.iter().scan(0, |end, nodes| {
        *end += nodes.len();
        Some(*end)
    });
    ends.take_while(|end| *end <= at).count()
}

fn bound(guard: &impl Bind) -> Result<Vec<BoundGrant>, WriteError> {
    guard.bind().map_err(|error| match error {
        Error::Lost { key, .. } => WriteError::Lost { key },
        _ => lost(&LockKey::from("unknown")),
    })
}

/// Tells the guards of a loss that the server found, and names the first lock that is lost.
async fn found_lost(bound: &[BoundGrant]) -> WriteError {
    let confirmed = join_all(bound.iter().map(BoundGrant::confirm)).await;
    let lost_at = confirmed
        .iter()
        .position(|confirmed| matches!(confirmed, Err(Error::Lost { .. })));
    match bound.get(lost_at.unwrap_or(0)) {
        Some(grant) => lost(&grant.key),
        None => lost(&LockKey::from("unknown")),
    }
}

fn lost(key: &LockKey) -> WriteError {
    WriteError::Lost { key: key.clone() }
}
