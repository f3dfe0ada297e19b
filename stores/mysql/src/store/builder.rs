//! Options of the store, and its background tasks.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::StoreError;
use dlock::store::queue::{check_connections, check_timeout};
use dlock::{DEFAULT_TIMEOUT, Error};
#[cfg(feature = "tls")]
use mysql_async::Opts;
use mysql_async::OptsBuilder;
use tokio::runtime;
use tokio_util::sync::CancellationToken;

use super::{Inner, MysqlLocks, Setup};
use crate::connect::Connector;
use crate::step::Queue;
use crate::table::{self, Table};

/// The average interval between removals of the rows of available locks.
const SWEEP: Duration = Duration::from_secs(300);

/// Options of [`MysqlLocks`].
///
/// ```no_run
/// use dlock_mysql::{MysqlLocks, OptsBuilder};
/// use std::time::Duration;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let server = OptsBuilder::default().ip_or_hostname("db.internal").user(Some("shop")).db_name(Some("shop"));
/// let store = MysqlLocks::builder(server)
///     .table("shop.locks")
///     .connections(4)
///     .timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[must_use = "a builder does nothing until it connects"]
pub struct MysqlLocksBuilder {
    server: OptsBuilder,
    table: String,
    prefix: String,
    connections: usize,
    timeout: Duration,
}

impl MysqlLocksBuilder {
    pub(super) fn new(server: OptsBuilder) -> MysqlLocksBuilder {
        MysqlLocksBuilder {
            server,
            table: table::DEFAULT.to_owned(),
            prefix: String::new(),
            connections: 2,
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// Sets the table, with its database if it is in another one: `"app.locks"`. Letters, digits and `_`; `dlock_locks`
    /// by default.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// Sets a prefix of all keys, for services that share a table; none by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the most connections that operations use; 2 by default, at most 1000. Queued operations are sent together, so
    /// a few connections are enough for a whole process. Another connection is opened when all others are busy.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Sets how long one operation may take, including connecting; 1 s by default, at most a year.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Connects; see [`MysqlLocks::connect`].
    ///
    /// # Errors
    ///
    /// When the server cannot be reached, the server refuses, or an option is invalid.
    pub async fn connect(self) -> Result<MysqlLocks, Error> {
        let table = self
            .check()
            .map_err(|(option, reason)| Error::invalid_option(option, &reason))?;
        let opened = self.open(table).await;
        opened.map_err(StoreError::into_connect_error)
    }

    /// Connects with options from a URL.
    pub(crate) async fn open_by_url(self) -> Result<MysqlLocks, StoreError> {
        let table = self.check().map_err(StoreError::wrong_option)?;
        self.open(table).await
    }

    /// Returns the statements, or the option that is invalid.
    fn check(&self) -> Result<Table, (&'static str, String)> {
        check_connections(self.connections).map_err(|reason| ("connections", reason.to_owned()))?;
        check_timeout(self.timeout).map_err(|reason| ("timeout", reason.to_owned()))?;
        #[cfg(feature = "tls")]
        self.check_encryption()?;
        Table::new(&self.table).map_err(|reason| ("table", reason))
    }

    /// Checks that the driver can encrypt, if it is to.
    #[cfg(feature = "tls")]
    fn check_encryption(&self) -> Result<(), (&'static str, String)> {
        let is_encrypted = Opts::from(self.server.clone()).ssl_opts().is_some();
        match crate::tls::obstacle().filter(|_| is_encrypted) {
            Some(reason) => Err(("require_ssl", reason.to_owned())),
            None => Ok(()),
        }
    }

    async fn open(self, table: Table) -> Result<MysqlLocks, StoreError> {
        let runtime = runtime::Handle::current();
        let connector = Connector::new(self.server, self.timeout);
        let mut first = Some(connector.connect().await?);
        let queue = Arc::new(Queue::new(&*connector.address, connector.timeout));
        let setup = Arc::new(Setup {
            connector,
            table,
            queue: queue.clone(),
        });
        for _ in 0..self.connections {
            runtime.spawn(queue.serve(setup.clone(), first.take()));
        }
        let ended = CancellationToken::new();
        let inner = Arc::new(Inner {
            setup,
            prefix: self.prefix,
            _ended: ended.clone().drop_guard(),
        });
        let sweeping = sweep(Arc::downgrade(&inner));
        runtime.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = sweeping => {}
            }
        });
        Ok(MysqlLocks(inner))
    }
}

impl fmt::Debug for MysqlLocksBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options of the server hold a password.
        f.debug_struct("MysqlLocksBuilder")
            .field("table", &self.table)
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// Removes rows of available locks now and then, as long as the store exists.
async fn sweep(store: Weak<Inner>) {
    let mut is_told = false;
    loop {
        tokio::time::sleep(SWEEP.mul_f64(0.5 + fastrand::f64())).await;
        let Some(inner) = store.upgrade() else { return };
        let removed = MysqlLocks(inner).remove_free().await;
        match &removed {
            Err(error) if !is_told => {
                tracing::warn!(%error, "rows of free locks were not removed, trying again every few minutes");
            }
            Err(error) => tracing::debug!(%error, "rows of free locks were not removed"),
            Ok(_) => {}
        }
        is_told = removed.is_err();
    }
}
