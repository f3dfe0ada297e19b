//! The store, and its connections.

mod builder;
mod doctor;

use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::doctor::Diagnose;
use dlock::store::queue::{Connect, Link, Next};
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, Doubts, GrantId, Holder, Kind, Notifications, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::{Error, LockKey};
use futures_util::future::join_all;
use mysql_async::OptsBuilder;
use mysql_async::prelude::Queryable;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::DropGuard;

pub use self::builder::MysqlLocksBuilder;
use crate::connect::{Connector, LOCK_WAIT, Session, close};
use crate::failure;
use crate::perform::{Performing, Room};
use crate::row;
use crate::step::{Answer, KINDS, LONGEST_KEY, Page, Queue, Step, sendable};
use crate::table::Table;

/// The shortest and the longest interval in ms at which a waiter polls, random so that processes do not poll together.
const POLL: (u64, u64) = (50, 250);
/// How often an idle connection is checked.
const PING: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is checked before operations are sent on it: the driver does not notice that a
/// connection was closed, and operations sent on a closed one have an unknown outcome.
const IDLE: Duration = Duration::from_millis(100);
/// The time that the reply to a lock wait spends in transit.
const REPLY: Duration = Duration::from_millis(250);

/// Locks in a table. Cheap to clone; the connections close when the last clone, and every
/// [`LockClient`](dlock::LockClient) made of one, is gone.
///
/// ```no_run
/// use dlock::LockClient;
/// use dlock_mysql::{MysqlLocks, OptsBuilder};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let server = OptsBuilder::default().ip_or_hostname("db.internal").user(Some("shop")).db_name(Some("shop"));
/// let store = MysqlLocks::connect(server).await?;
/// store.create_table().await?; // or a migration with store.schema()
/// let client = LockClient::builder().store(store.clone()).build().await?;
/// let guard = client.lock("nightly-report").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct MysqlLocks(Arc<Inner>);

struct Inner {
    setup: Arc<Setup>,
    prefix: String,
    /// Stops the background tasks.
    _ended: DropGuard,
}

/// The state that all connections of a store share.
#[derive(Debug)]
struct Setup {
    connector: Connector,
    table: Table,
    queue: Arc<Queue>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.setup.queue.close();
    }
}

impl MysqlLocks {
    /// Connects with all options at their defaults. The table need not exist.
    ///
    /// The runtime in which this is called serves the connections from then on.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses.
    pub async fn connect(server: OptsBuilder) -> Result<MysqlLocks, Error> {
        MysqlLocks::builder(server).connect().await
    }

    /// Returns options for this server.
    pub fn builder(server: OptsBuilder) -> MysqlLocksBuilder {
        MysqlLocksBuilder::new(server)
    }

    /// Returns the SQL that creates the tables, for a migration. It may run more than once.
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.0.setup.table.schema
    }

    /// Creates the tables unless they exist. Any number of processes may do so at the same time. Needs the right to
    /// create tables.
    ///
    /// # Errors
    ///
    /// A failure of the store. Safe to repeat.
    pub async fn create_table(&self) -> Result<(), StoreError> {
        self.0.setup.connector.execute(self.schema()).await
    }

    /// Removes the rows of locks that have been available for a minute, in small batches, and returns how many were
    /// removed. This also happens in the background, every few minutes. Such a row does no harm, but takes up space.
    ///
    /// # Errors
    ///
    /// A failure of the store; some rows may have been removed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; some rows may have been removed.
    pub async fn remove_free(&self) -> Result<u64, StoreError> {
        const AT_ONCE: usize = 500;
        let Setup { connector, table, .. } = &*self.0.setup;
        // Uses its own connection: reading a large table takes longer than an operation.
        let mut session = connector.connect().await?;
        let at_once = AT_ONCE.min(session.packet / (3 * LONGEST_KEY));
        let mut removed = 0;
        loop {
            let step = timeout(30 * connector.timeout, sweep(&mut session, table, at_once));
            let found = match step.await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => return Err(failure::of_step(error).error),
                Err(_) => {
                    close(session.conn);
                    return Err(StoreError::unknown("free rows were not removed in time"));
                }
            };
            removed += found.1;
            // Without the second condition, rows that a transaction keeps locked would be found for ever.
            if found.0 < at_once || found.1 == 0 {
                let _ = session.conn.disconnect().await;
                return Ok(removed);
            }
        }
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

/// Removes rows that have been available for a minute. Returns how many were found, and how many removed. Each
/// statement is its own transaction: one that stays open because its process is paused would block every new row. The
/// token of a removed row is recorded first, for rows that are created later.
async fn sweep(
    session: &mut Session,
    table: &Table,
    most: usize,
) -> Result<(usize, u64), mysql_async::Error> {
    let conn = &mut session.conn;
    let rows: Vec<mysql_async::Row> = conn.query(table.free(most)).await?;
    let seen: Vec<Vec<u8>> = rows.iter().filter_map(row::bytes).collect();
    if seen.is_empty() {
        return Ok((0, 0));
    }
    let free: Vec<(Vec<u8>, i64)> = conn.query(table.unlocked(&seen)).await?;
    let Some(next) = free.iter().map(|(_, next)| *next).max() else {
        return Ok((seen.len(), 0));
    };
    let keys: Vec<Vec<u8>> = free.into_iter().map(|(key, _)| key).collect();
    conn.query_drop(table.raise_floor(next)).await?;
    conn.query_drop(table.remove(&keys)).await?;
    Ok((seen.len(), conn.affected_rows()))
}

impl Connect<Step> for Setup {
    type Session = Session;

    async fn connect(&self) -> Result<Session, StoreError> {
        self.connector.connect().await
    }

    async fn serve(&self, mut session: Session, link: &mut Link<Step>) -> Option<String> {
        link.is_ready();
        loop {
            let mut room = Room::new(session.packet);
            let due = match self.queue.next(Instant::now(), |job| room.has(job)) {
                Next::Send(jobs) => {
                    if session.used.elapsed() > IDLE
                        && let Err(trouble) = session.check(self.connector.timeout).await
                    {
                        jobs.into_iter().rev().for_each(|job| self.queue.put_back(job));
                        close(session.conn);
                        return Some(trouble);
                    }
                    let performing = Performing {
                        session: &mut session,
                        queue: &self.queue,
                        table: &self.table,
                        // A statement that waits for a row or a table gets its reply before this.
                        limit: self.connector.timeout.max(LOCK_WAIT) + REPLY,
                    };
                    if let Err(error) = performing.perform(jobs).await {
                        close(session.conn);
                        return Some(error.message);
                    }
                    session.used = Instant::now();
                    continue;
                }
                Next::End => {
                    let _ = timeout(self.connector.timeout, session.conn.disconnect()).await;
                    return None;
                }
                Next::Wait(due) => due,
            };
            let ping = Instant::now() + PING;
            tokio::select! {
                () = self.queue.woken() => continue,
                () = sleep_until(due.unwrap_or(ping).min(ping)) => {}
            }
            if due.is_some_and(|due| due <= ping) {
                continue;
            }
            if let Err(trouble) = session.check(self.connector.timeout).await {
                close(session.conn);
                return Some(trouble);
            }
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

impl Store for MysqlLocks {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(KINDS)
            .name("MySQL")
            .token_blocks(true)
            .min_hold(true)
            .notifications(Notifications::None)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let step = Step::acquire(self.name(&request.key), &request);
        expect!(self.step(step), Answer::Acquired)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let step = Step::release(self.name(&request.key), &request);
        expect!(self.step(step), Answer::Released)
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let steps: Vec<StoreFuture<Renewal>> = requests
            .iter()
            .map(|request| {
                let step = Step::renew(self.name(&request.key), request);
                expect!(self.step(step), Answer::Renewed) as StoreFuture<Renewal>
            })
            .collect();
        Box::pin(async move { Ok(join_all(steps).await) })
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let step = self.step(sendable(self.name(&key)).map(Step::Inspect));
        let holders = expect!(step, Answer::Holders) as StoreFuture<Vec<(LockKey, Holder)>>;
        Box::pin(async move { Ok(holders.await?.into_iter().map(|(_, holder)| holder).collect()) })
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        let prefix = format!("{}{prefix}", self.0.prefix);
        if prefix.len() > LONGEST_KEY {
            // No key begins with it, and the server takes no statement of any length.
            return Box::pin(ready(Ok(Vec::new())));
        }
        Box::pin(async move {
            let (mut found, mut after) = (Vec::new(), Some(Vec::new()));
            // Each page is a step of its own: other steps have their turns between them, and none takes as long as the whole.
            while let Some(last) = after {
                let step = self.step(Ok(Step::List(prefix.clone(), last)));
                let page: Page = expect!(step, Answer::Page).await?;
                found.extend(page.holders.into_iter().map(|(name, holder)| {
                    let key = name
                        .as_str()
                        .strip_prefix(&self.0.prefix)
                        .unwrap_or(name.as_str());
                    (LockKey::raw(key), holder)
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

    fn watch(self: Arc<Self>, _kind: Kind, _key: &LockKey, _grant: GrantId) -> Watch {
        Watch::polling(Duration::from_millis(fastrand::u64(POLL.0..=POLL.1)))
    }

    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        Some(self)
    }

    fn doubts(&self) -> Doubts {
        self.0.setup.queue.doubts()
    }
}

impl fmt::Debug for MysqlLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlLocks")
            .field("server", &self.0.setup.connector.address)
            .field("table", &self.0.setup.table.name)
            .finish_non_exhaustive()
    }
}
