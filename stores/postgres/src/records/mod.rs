//! Records in a PostgreSQL table, whose completion can join the owner's own transaction.
//!
//! With every other store, an owner that dies after its effect but before its record leaves an unknown outcome. Here
//! effect and record can be one transaction ([`PostgresClaim::complete_in`]), the only case with exactly-once
//! semantics.
//!
//! ```no_run
//! use dlock::record::Records;
//! use dlock_postgres::PostgresRecords;
//! use tokio_postgres::NoTls;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let config = "postgres://shop@db.internal/shop".parse()?;
//! let store = PostgresRecords::connect(config, NoTls).await?; // or a TLS connector of your choice
//! store.create_table().await?; // or a migration with store.schema()
//! let records = Records::new(store.clone()); // for the idempotency layer
//! # Ok(()) }
//! ```
//!
//! # Requirements
//!
//! PostgreSQL 12 or newer, with the primary among the configured hosts; the rights to select, insert, update and delete
//! on the table and to use the sequence `<table>_fence`. The store has its own connections: some for operations, and
//! one more from the first waiter on. They prepare statements and listen: a transaction pooler in between is detected and
//! refused, a pool in session mode works.
//! Guarantees are as durable as the server's commits: with `synchronous_commit = off`, or when an asynchronous replica
//! takes over, the last moments may be lost, together with the effects that were committed with them.
//!
//! # Behaviour
//!
//! - Each operation is one statement and one round trip. All times are the server's (`clock_timestamp()`).
//! - No statement waits for a row that a transaction has locked. For all other requests such a claim is in progress;
//!   extending it is answered by [`OwnerReply::Held`](dlock::record::OwnerReply), at once or, when its lease is over, after a
//!   quarter of the lease and half of the timeout at most, and tried again soon, since after a rollback others take it
//!   over; completing, releasing or reading it from outside is retried until the
//!   transaction has ended.
//! - A broken connection is replaced, and operations in flight are sent again; an operation always ends within the
//!   timeout. After a failure with [`Outcome::Unknown`](dlock::store::Outcome::Unknown) the server may or may not have
//!   carried out the operation.
//! - Waiters are notified at once by `LISTEN` and `NOTIFY` on a channel with the table's name. If that is switched off
//!   ([`listen`](PostgresRecordsBuilder::listen)) or the connection is broken, waiters poll four times a second.
//!   Waiters for a result that [`complete_in`](PostgresClaim::complete_in) stored are notified when its owner reads it
//!   or completes it again; at the latest they find the result when the lease that they know of has ended.
//! - Fencing tokens come from a sequence. They increase across release, expiry and a clock that is set back, and even
//!   after the loss of the table, unless the clock was set back as well.
//! - Expired records are removed in the background, at most a thousand rows at a time, and fewer if responses are
//!   large: one statement takes about a twentieth of the timeout. Every process does this, without waiting for the
//!   others.
//! - Operations need the primary. A connection to a server that no longer accepts writes is replaced by one to the
//!   configured host that does (`postgres://a,b/shop`); the timeout is divided among the hosts.

mod builder;
mod lane;
mod notifications;
mod step;
mod sweep;
mod table;
mod transaction;

use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Socket};
use tokio_util::sync::DropGuard;

pub use self::builder::PostgresRecordsBuilder;
use self::lane::{Lane, Setup};
use self::notifications::RecordNotifications;
use self::step::{Answer, Step};
use self::sweep::SweepBatch;
pub use self::transaction::{CompleteError, PostgresClaim};
use crate::failure;
use dlock::Error;
use dlock::record::{
    ClaimReply, ClaimRequest, ClaimState, ClaimToken, ForgetReply, OwnerReply, RecordKey, RecordLook,
    RecordStore, SlotReply, SlotRequest,
};
use dlock::store::{StoreError, Watch};

/// Records in a table. Cheap to clone; the connections close when the last clone, and every
/// [`Records`](dlock::record::Records) made of one, is gone.
///
/// ```no_run
/// use dlock::record::Records;
/// use dlock_postgres::PostgresRecords;
/// use tokio_postgres::NoTls;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = PostgresRecords::connect("postgres://shop@db.internal/shop".parse()?, NoTls).await?;
/// store.create_table().await?;
/// let records = Records::new(store.clone()); // the store itself makes claims for transactions: `owned`
/// # let _ = records; Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresRecords(Arc<Inner>);

struct Inner {
    setup: Arc<Setup>,
    lanes: Vec<Lane>,
    notifications: RecordNotifications,
    batch: SweepBatch,
    /// Stops the background tasks.
    _ended: DropGuard,
}

impl PostgresRecords {
    /// Connects with all options at their defaults. The table need not exist.
    ///
    /// The runtime in which this is called serves the connections from then on.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses.
    pub async fn connect<T>(config: Config, tls: T) -> Result<PostgresRecords, Error>
    where
        T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        PostgresRecords::builder(config, tls).connect().await
    }

    /// Returns options for the server in `config` and for the encryption: [`tokio_postgres::NoTls`], or a connector
    /// such as those of `postgres-native-tls` or `tokio-postgres-rustls`.
    pub fn builder<T>(config: Config, tls: T) -> PostgresRecordsBuilder<T> {
        PostgresRecordsBuilder::new(config, tls)
    }

    /// Returns the SQL that creates the table and its related objects, for a migration. It may run more than once.
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.0.setup.table.schema
    }

    /// Creates the table and its related objects unless they exist. Any number of processes may do so at the same time.
    /// Needs the right to create tables, and the schema, if one was named.
    ///
    /// # Errors
    ///
    /// A failure of the store. Safe to repeat.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        self.0.setup.connector.create(self.schema()).await
    }

    /// Removes all rows whose retention has ended, in small batches, and returns how many were removed. This also
    /// happens in the background; see [`sweep_every`](PostgresRecordsBuilder::sweep_every).
    ///
    /// # Errors
    ///
    /// A failure of the store; some rows may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; some rows may have been removed.
    pub async fn remove_expired(&self) -> Result<u64, StoreError> {
        let Inner { lanes, batch, .. } = &*self.0;
        let mut removed = 0;
        loop {
            let (rows, begun) = (batch.rows(), Instant::now());
            match lanes[fastrand::usize(..lanes.len())]
                .step(Step::Sweep(rows))
                .await
            {
                Ok(Answer::Swept(some)) => {
                    removed += some;
                    if some < u64::from(rows) {
                        return Ok(removed);
                    }
                    batch.took(rows, begun.elapsed());
                }
                Ok(other) => return Err(strange(&other)),
                Err(error) if rows > 1 && failure::took_too_long(&error) => batch.took_too_long(rows),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns a claim for a transaction of its owner, which got it from [`claim`](dlock::record::Records::claim) with
    /// this token. The result is kept for `retention` after its completion.
    pub fn owned(&self, key: &RecordKey, token: &ClaimToken, retention: Duration) -> PostgresClaim {
        PostgresClaim {
            setup: self.0.setup.clone(),
            key: key.clone(),
            token: token.clone(),
            retention,
        }
    }

    /// Queues an operation at once, on the connection of its record.
    fn step(
        &self,
        key: &RecordKey,
        step: Step,
    ) -> impl Future<Output = Result<Answer, StoreError>> + Send + use<> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let lane = hasher.finish() % self.0.lanes.len() as u64;
        self.0.lanes[lane as usize].step(step)
    }

    /// Queues a change by the owner; if `notifications`, notifies the waiters in this process.
    fn change(
        &self,
        key: &RecordKey,
        step: Step,
        notifications: bool,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + use<> {
        let (answer, store, key) = (self.step(key, step), self.clone(), key.clone());
        async move {
            match answer.await? {
                Answer::Owner(reply) => {
                    if notifications && reply == OwnerReply::Done {
                        store.0.notifications.tell(&key);
                    }
                    Ok(reply)
                }
                other => Err(strange(&other)),
            }
        }
    }
}

impl RecordStore for PostgresRecords {
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Result<ClaimReply, StoreError>> + Send + 'static {
        let answer = self.step(&request.key.clone(), Step::Claim(request));
        async move {
            match answer.await? {
                Answer::Claim(reply) => Ok(reply),
                other => Err(strange(&other)),
            }
        }
    }

    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(&key.clone(), Step::Extend(key, token, lease, retention), false)
    }

    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(
            &key.clone(),
            Step::Complete(key, token, response, retention),
            true,
        )
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(&key.clone(), Step::GiveBack(key, token, true), true)
    }

    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        self.change(&key.clone(), Step::GiveBack(key, token, false), true)
    }

    fn read(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<ClaimState, StoreError>> + Send + 'static {
        let answer = self.step(&key, Step::Read(key.clone(), token));
        async move {
            match answer.await? {
                Answer::State(state) => {
                    if matches!(state, ClaimState::Completed { .. }) {
                        self.0.notifications.tell(&key);
                    }
                    Ok(state)
                }
                other => Err(strange(&other)),
            }
        }
    }

    fn claim_slot(
        self: Arc<Self>,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> impl Future<Output = Result<SlotReply, StoreError>> + Send + 'static {
        let answer = self.step(&request.key.clone(), Step::ClaimSlot(request, slot));
        async move {
            match answer.await? {
                Answer::Slot(reply) => Ok(reply),
                other => Err(strange(&other)),
            }
        }
    }

    fn inspect(
        self: Arc<Self>,
        key: RecordKey,
        response: bool,
    ) -> impl Future<Output = Result<RecordLook, StoreError>> + Send + 'static {
        let answer = self.step(&key, Step::Inspect(key.clone(), response));
        async move {
            match answer.await? {
                Answer::Look(look) => Ok(look),
                other => Err(strange(&other)),
            }
        }
    }

    fn forget(
        self: Arc<Self>,
        key: RecordKey,
    ) -> impl Future<Output = Result<ForgetReply, StoreError>> + Send + 'static {
        let answer = self.step(&key, Step::Forget(key.clone()));
        async move {
            match answer.await? {
                Answer::Forget(reply) => {
                    if reply == ForgetReply::Forgotten {
                        self.0.notifications.tell(&key);
                    }
                    Ok(reply)
                }
                other => Err(strange(&other)),
            }
        }
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.0.notifications.watch(key)
    }
}

impl fmt::Debug for PostgresRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresRecords")
            .field("server", &self.0.setup.connector.address)
            .field("table", &self.0.setup.table.name)
            .finish_non_exhaustive()
    }
}

fn strange(answer: &Answer) -> StoreError {
    StoreError::unknown(format!("the answer of another step came: {answer:?}"))
}
