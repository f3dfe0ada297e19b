//! Options of the store, and its background tasks.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dlock::store::StoreError;
use dlock::store::queue::{check_connections, check_timeout};
use dlock::{DEFAULT_TIMEOUT, Error};
use tokio::runtime;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Socket};
use tokio_util::sync::CancellationToken;

use super::job::Queue;
use super::link::Setup;
use super::pins::Pins;
use super::table::{self, Table};
use super::waiters::Waiters;
use super::{Inner, PostgresLocks};
use crate::connect::Connector;
use crate::pooler;
use crate::records::PostgresRecords;
use crate::sweeping::sweep;

/// The average interval between removals of the rows of available locks.
const SWEEP: Duration = Duration::from_secs(300);

/// Options of [`PostgresLocks`].
///
/// ```no_run
/// use dlock_postgres::PostgresLocks;
/// use std::time::Duration;
/// use tokio_postgres::NoTls;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = PostgresLocks::builder("postgres://shop@a,b/shop".parse()?, NoTls)
///     .table("app.locks")
///     .connections(4)
///     .timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[must_use = "a builder does nothing until it connects"]
#[derive(Debug)]
pub struct PostgresLocksBuilder<T> {
    config: Config,
    tls: T,
    table: String,
    prefix: String,
    connections: usize,
    timeout: Duration,
    listen: bool,
    records: Option<PostgresRecords>,
}

impl<T> PostgresLocksBuilder<T> {
    pub(super) fn new(config: Config, tls: T) -> PostgresLocksBuilder<T> {
        PostgresLocksBuilder {
            config,
            tls,
            table: table::DEFAULT.to_owned(),
            prefix: String::new(),
            connections: 2,
            timeout: DEFAULT_TIMEOUT,
            listen: true,
            records: None,
        }
    }

    /// Sets the table, with its schema, if any: `"app.locks"`. Letters, digits and `_`; case matters. `dlock_locks` by
    /// default.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// Sets a prefix of all keys, for services that share a table; none by default. As keys, it has no control characters.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the most connections that operations use; 2 by default, at most 1000. Queued operations are combined into one
    /// statement, so a few connections are enough for a whole process. Another connection is opened when all others are
    /// busy.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Sets how long one operation may take, including connecting; 1 s by default, at most a year.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the records of a client on this store ([`LockClient::records`](dlock::LockClient::records),
    /// [`LockClient::once`](https://github.com/dlock-rs/dlock/blob/main/docs/once.md)); none by default.
    pub fn records(mut self, records: PostgresRecords) -> Self {
        self.records = Some(records);
        self
    }

    /// Sets whether waiters are notified of releases by `LISTEN` and `NOTIFY` (the default), or poll four times a
    /// second. All processes must use the same value. Behind a transaction pooler, which is detected, waiters always
    /// poll.
    pub fn listen(mut self, listen: bool) -> Self {
        self.listen = listen;
        self
    }
}

impl<T> PostgresLocksBuilder<T>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    /// Connects; see [`PostgresLocks::connect`].
    ///
    /// # Errors
    ///
    /// When the server cannot be reached, the server refuses, or an option is invalid.
    pub async fn connect(self) -> Result<PostgresLocks, Error> {
        let table = self
            .check()
            .map_err(|(option, reason)| Error::invalid_option(option, &reason))?;
        let opened = self.open(table).await;
        opened.map_err(StoreError::into_connect_error)
    }

    /// Connects with options from a URL.
    pub(super) async fn open_by_url(self) -> Result<PostgresLocks, StoreError> {
        let table = self.check().map_err(StoreError::wrong_option)?;
        self.open(table).await
    }

    /// Returns the statements, or the option that is invalid.
    fn check(&self) -> Result<Table, (&'static str, String)> {
        check_connections(self.connections).map_err(|reason| ("connections", reason.to_owned()))?;
        check_timeout(self.timeout).map_err(|reason| ("timeout", reason.to_owned()))?;
        // One of them separates keys from ids in the names of waiters.
        if let Some(at) = self.prefix.find(char::is_control) {
            return Err(("prefix", format!("it has a control character at byte {at}")));
        }
        Table::new(&self.table).map_err(|reason| ("table", reason))
    }

    async fn open(self, table: Table) -> Result<PostgresLocks, StoreError> {
        let runtime = runtime::Handle::current();
        let connector = Connector::new(&self.config, self.tls, self.timeout);
        let (first, pooled) = pooler::connect(&connector).await?;
        if pooled {
            tracing::info!(
                server = %connector.address,
                "a transaction pooler is in between: nothing is prepared, and waiters ask for locks four times a second"
            );
        }
        let queue = Arc::new(Queue::new(&*connector.address, connector.timeout));
        let setup = Arc::new(Setup {
            connector,
            table: Arc::new(table),
            queue: queue.clone(),
            tell: self.listen,
            pooled: Arc::new(AtomicBool::new(pooled)),
            pins: Pins::default(),
        });
        let mut first = Some(first);
        for _ in 0..self.connections {
            runtime.spawn(queue.serve(setup.clone(), first.take()));
        }
        let ended = CancellationToken::new();
        let listens = self.listen && !pooled;
        let waiters = listens.then(|| Waiters::start(setup.clone(), ended.child_token(), &runtime));
        let inner = Arc::new(Inner {
            setup,
            waiters,
            prefix: self.prefix,
            records: self.records,
            _ended: ended.clone().drop_guard(),
        });
        let remove = async |inner| PostgresLocks(inner).remove_free().await;
        let sweeping = sweep(Arc::downgrade(&inner), SWEEP, "rows of free locks", remove);
        runtime.spawn(ended.run_until_cancelled_owned(sweeping));
        Ok(PostgresLocks(inner))
    }
}
