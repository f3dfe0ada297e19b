//! Options of the store, and its background tasks.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, Socket};
use tokio_util::sync::CancellationToken;

use super::lane::{Lane, Setup};
use super::notifications::RecordNotifications;
use super::sweep::SweepBatch;
use super::table::{self, Table};
use super::{Inner, PostgresRecords};
use crate::connect::Connector;
use crate::pooler;
use crate::sweeping::sweep;
use dlock::store::queue::{check_connections, check_interval, check_timeout};
use dlock::store::{Reason, StoreError};
use dlock::{DEFAULT_TIMEOUT, Error};

/// Options of [`PostgresRecords`].
///
/// ```no_run
/// use dlock_postgres::PostgresRecords;
/// use std::time::Duration;
/// use tokio_postgres::NoTls;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let store = PostgresRecords::builder("postgres://shop@a,b/shop".parse()?, NoTls)
///     .table("app.idempotency")
///     .connections(8)
///     .timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[must_use = "a builder does nothing until it connects"]
#[derive(Debug)]
pub struct PostgresRecordsBuilder<T> {
    config: Config,
    tls: T,
    table: String,
    connections: usize,
    timeout: Duration,
    listen: bool,
    sweep_every: Option<Duration>,
}

impl<T> PostgresRecordsBuilder<T> {
    pub(super) fn new(config: Config, tls: T) -> PostgresRecordsBuilder<T> {
        PostgresRecordsBuilder {
            config,
            tls,
            table: table::DEFAULT.to_owned(),
            connections: 4,
            timeout: DEFAULT_TIMEOUT,
            listen: true,
            sweep_every: Some(Duration::from_secs(60)),
        }
    }

    /// Sets the table, with its schema, if any: `"app.idempotency"`. Letters, digits and `_`; case matters.
    /// `dlock_records` by default.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// Sets how many connections operations use; 4 by default, at most 1000. Operations on one record always use the same
    /// connection, and do not wait for each other's replies, so a few connections are enough for a whole process.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Sets how long one operation may take, including connecting; 1 s by default, at most a year.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets whether waiters for a record are notified by `LISTEN` and `NOTIFY` (the default), or poll four times a
    /// second. All processes must use the same value.
    pub fn listen(mut self, listen: bool) -> Self {
        self.listen = listen;
        self
    }

    /// Sets how often rows whose retention has ended are removed; every minute by default. With `None` you have to call
    /// [`PostgresRecords::remove_expired`].
    pub fn sweep_every(mut self, every: impl Into<Option<Duration>>) -> Self {
        self.sweep_every = every.into();
        self
    }
}

impl<T> PostgresRecordsBuilder<T>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    /// Connects; see [`PostgresRecords::connect`].
    ///
    /// # Errors
    ///
    /// When the server cannot be reached, the server refuses, or an option is invalid.
    pub async fn connect(self) -> Result<PostgresRecords, Error> {
        let table = self
            .check()
            .map_err(|(option, reason)| Error::invalid_option(option, &reason))?;
        let runtime = runtime::Handle::try_current().map_err(|_| Error::ClientClosed)?;
        let opened = self.open(table, runtime).await;
        opened.map_err(StoreError::into_connect_error)
    }

    /// Connects with options from a URL.
    pub(crate) async fn open_by_url(self) -> Result<PostgresRecords, StoreError> {
        let wrong = |(option, reason)| {
            StoreError::wrong_url(format!("the {option} of its records is invalid: {reason}"))
        };
        let table = self.check().map_err(wrong)?;
        self.open(table, runtime::Handle::current()).await
    }

    /// Returns the statements, or the option that is invalid.
    fn check(&self) -> Result<Table, (&'static str, String)> {
        check_connections(self.connections).map_err(|reason| ("connections", reason.to_owned()))?;
        check_timeout(self.timeout).map_err(|reason| ("timeout", reason.to_owned()))?;
        if let Some(every) = self.sweep_every {
            check_interval(every).map_err(|reason| ("sweep_every", reason.to_owned()))?;
        }
        Table::new(&self.table).map_err(|reason| ("table", reason))
    }

    async fn open(self, table: Table, runtime: runtime::Handle) -> Result<PostgresRecords, StoreError> {
        let setup = Arc::new(Setup {
            connector: Connector::new(&self.config, self.tls, self.timeout),
            table,
            tell: self.listen,
            trouble: Mutex::default(),
        });
        let (first, pooled) = pooler::connect(&setup.connector).await?;
        if pooled {
            return Err(StoreError::not_done(
                Reason::Unsupported,
                format!(
                    "a transaction pooler is in between at {}: records need the server's own address, or a pool in session \
                     mode",
                    setup.connector.address
                ),
            ));
        }
        let mut first = Some(first);
        let lanes = (0..self.connections)
            .map(|_| Lane::start(setup.clone(), first.take(), &runtime))
            .collect();
        let ended = CancellationToken::new();
        let notifications = RecordNotifications::start(setup.clone(), ended.child_token(), &runtime);
        let inner = Arc::new(Inner {
            batch: SweepBatch::new(setup.connector.timeout),
            setup,
            lanes,
            notifications,
            _ended: ended.clone().drop_guard(),
        });
        if let Some(every) = self.sweep_every {
            let remove = async |inner| PostgresRecords(inner).remove_expired().await;
            let sweeping = sweep(Arc::downgrade(&inner), every, "expired records", remove);
            runtime.spawn(ended.run_until_cancelled_owned(sweeping));
        }
        Ok(PostgresRecords(inner))
    }
}
