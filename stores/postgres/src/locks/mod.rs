//! Locks as rows with leases.

mod builder;
mod doctor;
mod job;
mod link;
mod perform;
mod permits;
mod pins;
mod scheme;
mod statements;
mod sweep;
mod table;
mod transaction;
mod waiters;
mod wave;

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use dlock::record::Records;
use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::doctor::Diagnose;
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, Doubts, GrantId, Holder, Kind,
    Notifications, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture,
    Watch,
};
use dlock::{Error, LockKey};
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::time::Instant;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Socket};
use tokio_util::sync::DropGuard;

pub use self::builder::PostgresLocksBuilder;
use self::job::{Answer, Ask, Counting, Page, Step, is_permit, lock_key, sendable};
use self::link::Setup;
pub use self::scheme::{scheme, scheme_with};
use self::sweep::Sweep;
pub use self::transaction::{HoldError, LockInError};
use self::waiters::Waiters;
use crate::records::PostgresRecords;

/// The supported kinds.
const KINDS: [Kind; 8] = [
    Kind::Mutex,
    Kind::Fair,
    Kind::Read,
    Kind::Write,
    Kind::Fenced,
    Kind::Permit,
    Kind::Unowned,
    Kind::Latch,
];
/// The most fencing tokens that one grant reserves.
const MOST_TOKENS: u32 = 1 << 16;

/// Locks in a table. Cheap to clone; the connections close when the last clone, and every
/// [`LockClient`](dlock::LockClient) made of one, is gone.
///
/// ```no_run
/// use dlock::LockClient;
/// use dlock_postgres::PostgresLocks;
/// use tokio_postgres::NoTls;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = PostgresLocks::connect("postgres://shop@db.internal/shop".parse()?, NoTls).await?;
/// store.create_table().await?; // or a migration with store.schema()
/// let client = LockClient::builder().store(store.clone()).build().await?;
/// let guard = client.lock("order:42").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresLocks(Arc<Inner>);

struct Inner {
    setup: Arc<Setup>,
    /// `None` if waiters poll.
    waiters: Option<Waiters>,
    prefix: String,
    records: Option<PostgresRecords>,
    /// Stops the background tasks.
    _ended: DropGuard,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.setup.queue.close();
    }
}

impl PostgresLocks {
    /// Connects with all options at their defaults. The table need not exist.
    ///
    /// The runtime in which this is called serves the connections from then on.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses.
    pub async fn connect<T>(config: Config, tls: T) -> Result<PostgresLocks, Error>
    where
        T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        PostgresLocks::builder(config, tls).connect().await
    }

    /// Returns options for the server in `config` and for the encryption: [`tokio_postgres::NoTls`], or a connector
    /// such as those of `postgres-native-tls` or `tokio-postgres-rustls`.
    pub fn builder<T>(config: Config, tls: T) -> PostgresLocksBuilder<T> {
        PostgresLocksBuilder::new(config, tls)
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

    /// Removes the rows of locks that have been available for a minute, in small batches, and returns how many were
    /// removed. Also removes the rows of readers whose leases expired a minute ago, and of waiters that died, which are
    /// not counted. This also happens in the background, every few minutes. Such a row does no harm, but takes up space.
    ///
    /// # Errors
    ///
    /// A failure of the store; some rows may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; some rows may have been removed.
    pub async fn remove_free(&self) -> Result<u64, StoreError> {
        Sweep::connect(&self.0.setup).await?.run().await
    }

    /// The key of a lock in the table.
    fn name(&self, key: &LockKey) -> Arc<str> {
        match self.0.prefix.as_str() {
            "" => key.as_str().into(),
            prefix => [prefix, key.as_str()].concat().into(),
        }
    }

    /// Queues an operation at once. The future only returns the reply.
    fn step(&self, step: Result<Step, StoreError>) -> StoreFuture<Answer> {
        match step {
            Ok(step) => self.0.setup.queue.ask(step),
            Err(error) => Box::pin(ready(Err(error))),
        }
    }
}

/// Unwraps the expected variant of an operation's reply.
macro_rules! expect {
    ($step:expr, $answer:path) => {{
        let step = $step;
        Box::pin(async move {
            match step.await? {
                $answer(reply) => Ok(reply),
                other => Err(StoreError::unknown(format!(
                    "the answer of another step came: {other:?}"
                ))),
            }
        })
    }};
}

impl Store for PostgresLocks {
    fn capabilities(&self) -> Capabilities {
        let notifications = match self.0.waiters {
            Some(_) => Notifications::Lossy,
            None => Notifications::None,
        };
        Capabilities::new(KINDS)
            .name("PostgreSQL")
            .token_blocks(true)
            .min_hold(true)
            .restores_positions(true)
            .limits(true)
            .notifications(notifications)
            .largest_set(usize::MAX)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let ask = Ask::new(self.name(&request.key), &request);
        expect!(self.step(ask.map(Step::Acquire)), Answer::Acquired)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let step = Step::release(self.name(&request.key), &request);
        expect!(self.step(step), Answer::Released)
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let (permits, others): (Vec<_>, Vec<_>) = requests
            .iter()
            .enumerate()
            .partition(|(_, request)| is_permit(request.kind));
        let steps: Vec<_> = others
            .into_iter()
            .map(|(at, request)| {
                let step = Step::renew(self.name(&request.key), request);
                let renewal = expect!(self.step(step), Answer::Renewed) as StoreFuture<Renewal>;
                async move { vec![(at, renewal.await)] }.boxed()
            })
            .chain(self.renew_permits(permits))
            .collect();
        Box::pin(async move {
            let mut renewals: Vec<_> = join_all(steps).await.into_iter().flatten().collect();
            renewals.sort_by_key(|(at, _)| *at);
            Ok(renewals.into_iter().map(|(_, renewal)| renewal).collect())
        })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let step = self.step(sendable(self.name(&key)).map(Step::Inspect));
        let holders = expect!(step, Answer::Holders) as StoreFuture<Vec<(String, Holder)>>;
        Box::pin(async move { Ok(holders.await?.into_iter().map(|(_, holder)| holder).collect()) })
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let prefix = format!("{}{prefix}", self.0.prefix);
        Box::pin(async move {
            let (mut found, mut after) = (Vec::new(), Some(String::new()));
            // Each page is a step of its own: other steps have their turns between them, and none takes as long as the whole.
            while let Some(last) = after {
                let step = self.step(Ok(Step::List(prefix.clone(), last)));
                let page: Page = expect!(step, Answer::Page).await?;
                found.extend(page.holders.into_iter().map(|(name, holder)| {
                    let key = name.strip_prefix(&self.0.prefix).unwrap_or(&name);
                    (lock_key(key), holder)
                }));
                after = page.last;
            }
            Ok(found)
        })
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let step = self.step(sendable(self.name(&key)).map(Step::Force));
        expect!(step, Answer::Forced)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        match &self.0.waiters {
            Some(waiters) if kind == Kind::Fair => waiters.watch(waiters::place(&self.name(key), grant)),
            Some(waiters) => waiters.watch(self.name(key)),
            None => Watch::polling(waiters::POLL),
        }
    }

    fn together(&self, kind: Kind, _key: &LockKey) -> Option<u32> {
        // A set of fair locks or permits would need positions in all of their queues.
        matches!(kind, Kind::Mutex | Kind::Read | Kind::Write | Kind::Fenced).then_some(0)
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        let asks = requests
            .iter()
            .map(|request| Ask::new(self.name(&request.key), request));
        let step = asks
            .collect::<Result<Vec<Ask>, StoreError>>()
            .map(Step::AcquireAll);
        expect!(self.step(step), Answer::AcquiredAll)
    }

    /// Names the transaction that holds the lock, if one was found.
    fn explain(&self, _kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        self.0.setup.pins.why(&self.name(key), Instant::now())
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        self.0.records.clone().map(Records::new)
    }

    fn no_records(&self) -> &'static str {
        "name their table: ?records=dlock_records in the URL, or PostgresLocksBuilder::records"
    }

    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        Some(self)
    }

    fn doubts(&self) -> Doubts {
        self.0.setup.queue.doubts()
    }
}

impl Counters for PostgresLocks {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        let step = Counting::new(self.name(&request.key), &request).map(Step::Count);
        expect!(self.step(step), Answer::Counted)
    }
}

impl fmt::Debug for PostgresLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresLocks")
            .field("server", &self.0.setup.connector.address)
            .field("table", &self.0.setup.table.name)
            .finish_non_exhaustive()
    }
}
