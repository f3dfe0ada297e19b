//! URLs of the store.

use std::sync::Arc;

use dlock::record::{RecordKey, RecordStore};
use dlock::store::{OpenRequest, Scheme, Store, StoreError};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, NoTls, Socket};

use super::{PostgresLocks, PostgresLocksBuilder};
use crate::failure;
use crate::records::{PostgresRecords, PostgresRecordsBuilder};
#[cfg(feature = "tls")]
use crate::tls;

/// The options that the driver parses; it reports invalid values itself.
const OF_THE_DRIVER: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "host",
    "hostaddr",
    "port",
    "options",
    "application_name",
    "sslnegotiation",
    "connect_timeout",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
];

/// Returns the scheme of `postgres://` and `postgresql://` URLs, for
/// [`LockClientBuilder::scheme`](dlock::LockClientBuilder::scheme).
///
/// Parameters in addition to those of `libpq` that the driver supports, and those of every store:
///
/// | parameter | default | |
/// |---|---|---|
/// | `table` | `dlock_locks` | see [`PostgresLocksBuilder::table`] |
/// | `connections` | 2; 4 for records | see [`PostgresLocksBuilder::connections`]; as many again for `records` |
/// | `listen` | `true` | see [`PostgresLocksBuilder::listen`]; also for `records` |
/// | `create_table` | `false` | whether the tables are created if they are missing |
/// | `records` | none | the table of the client's records, such as `dlock_records`; see [`PostgresRecords`] |
/// | `sslmode` | `disable` | `require`, `verify-ca` and `verify-full` encrypt, with the feature `tls`, and verify the server's certificate and its name; `prefer` is `disable` |
/// | `sslrootcert` | the system's | file with the certificate authority to trust, in PEM |
/// | `sslcert`, `sslkey` | | files with the client's certificate and its private key, in PEM |
///
/// ```no_run
/// # async fn example() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::builder()
///     .scheme(dlock_postgres::scheme())
///     .url("postgres://shop@db.internal/shop?lease=10s&create_table=true")
///     .build()
///     .await?;
/// # let _ = client; Ok(()) }
/// ```
#[must_use]
pub fn scheme() -> Scheme {
    Scheme::new(["postgres", "postgresql"], |mut request| async move {
        let (mode, root) = (ssl_mode(&mut request)?, request.take("sslrootcert"));
        let client = match (request.take("sslcert"), request.take("sslkey")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                return Err(StoreError::wrong_url(
                    "its options sslcert and sslkey go together",
                ));
            }
        };
        match mode {
            Some(SslMode::Require) => encrypted(request, root, client).await,
            _ if root.is_some() || client.is_some() => Err(StoreError::wrong_url(
                "its certificates are for sslmode=require, which encrypts",
            )),
            _ => open(request, NoTls, Some(SslMode::Disable)).await,
        }
    })
}

#[cfg(feature = "tls")]
async fn encrypted(
    request: OpenRequest,
    root: Option<String>,
    client: Option<(String, String)>,
) -> Result<Arc<dyn Store>, StoreError> {
    let client = client.as_ref().map(|(certificate, key)| (&**certificate, &**key));
    let connector = tls::connector(root.as_deref(), client).await?;
    open(request, connector, Some(SslMode::Require)).await
}

#[cfg(not(feature = "tls"))]
async fn encrypted(
    _request: OpenRequest,
    _root: Option<String>,
    _client: Option<(String, String)>,
) -> Result<Arc<dyn Store>, StoreError> {
    Err(StoreError::wrong_url(
        "sslmode=require needs the feature \"tls\" of dlock-postgres, or a connector: dlock_postgres::scheme_with",
    ))
}

/// Returns the scheme with encryption by this connector, such as those of `postgres-native-tls` or
/// `tokio-postgres-rustls`, which knows the certificates and verifies the server's. `sslmode` decides whether it is used; by
/// default it is if the server supports it. Without a connector, see the feature `tls` and [`scheme`].
///
/// ```no_run
/// # use tokio_postgres::NoTls as Connector;
/// # fn example(connector: Connector) {
/// let builder = dlock::LockClient::builder().scheme(dlock_postgres::scheme_with(connector));
/// # let _ = builder; }
/// ```
pub fn scheme_with<T>(tls: T) -> Scheme
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    Scheme::new(["postgres", "postgresql"], move |mut request| {
        let tls = tls.clone();
        async move {
            let mode = ssl_mode(&mut request)?;
            open(request, tls, mode).await
        }
    })
}

/// What `sslmode` says.
fn ssl_mode(request: &mut OpenRequest) -> Result<Option<SslMode>, StoreError> {
    let Some(mode) = request.take("sslmode") else {
        return Ok(None);
    };
    match &*mode {
        "disable" => Ok(Some(SslMode::Disable)),
        "prefer" => Ok(Some(SslMode::Prefer)),
        "require" | "verify-ca" | "verify-full" => Ok(Some(SslMode::Require)),
        _ => Err(StoreError::wrong_url(
            "its option sslmode is disable, prefer, require, verify-ca or verify-full",
        )),
    }
}

async fn open<T>(
    mut request: OpenRequest,
    tls: T,
    mode: Option<SslMode>,
) -> Result<Arc<dyn Store>, StoreError>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    let table = request.take("table");
    let records = request.take("records");
    let connections = request.take_parsed("connections", "a number such as 4")?;
    let listen = request.take_parsed("listen", "true or false")?;
    let create = request
        .take_parsed("create_table", "true or false")?
        .unwrap_or(false);
    let mut config = config(&mut request)?;
    request.finish()?;
    if let Some(mode) = mode {
        config.ssl_mode(mode);
    }
    if config.get_application_name().is_none() && !request.service_name.is_empty() {
        config.application_name(&request.service_name);
    }
    let records = match records {
        Some(table) => {
            let mut builder = PostgresRecords::builder(config.clone(), tls.clone()).table(table);
            if let Some(connections) = connections {
                builder = builder.connections(connections);
            }
            if let Some(listen) = listen {
                builder = builder.listen(listen);
            }
            Some(open_records(builder, &request, create).await?)
        }
        None => None,
    };
    let mut builder: PostgresLocksBuilder<T> = PostgresLocks::builder(config, tls)
        .prefix(&request.prefix)
        .timeout(request.timeout);
    if let Some(records) = records {
        builder = builder.records(records);
    }
    if let Some(table) = table {
        builder = builder.table(table);
    }
    if let Some(connections) = connections {
        builder = builder.connections(connections);
    }
    if let Some(listen) = listen {
        builder = builder.listen(listen);
    }
    let locks = builder.open_by_url().await?;
    let found = Arc::new(locks.clone()).inspect("dlock".into()).await;
    found_or_created(found, create, locks.create_table()).await?;
    Ok(Arc::new(locks))
}

/// Opens the table of records, and checks that it exists.
async fn open_records<T>(
    builder: PostgresRecordsBuilder<T>,
    request: &OpenRequest,
    create: bool,
) -> Result<PostgresRecords, StoreError>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    if !request.prefix.is_empty() {
        return Err(StoreError::wrong_url(
            "records have no prefix: give each service a table of its own by records=",
        ));
    }
    let records = builder.timeout(request.timeout).open_by_url().await?;
    let key = RecordKey::new("dlock").map_err(|error| StoreError::wrong_url(error.to_string()))?;
    let found = Arc::new(records.clone()).inspect(key, false).await;
    found_or_created(found, create, records.create_table()).await?;
    Ok(records)
}

/// Reports a missing table at once, not at the first lock, or creates it.
async fn found_or_created<T>(
    found: Result<T, StoreError>,
    create: bool,
    creating: impl Future<Output = Result<(), StoreError>>,
) -> Result<(), StoreError> {
    match found {
        Ok(_) => Ok(()),
        Err(error) if !failure::is_missing_table(&error) => Err(error),
        Err(_) if create => creating.await,
        Err(mut error) => {
            error
                .message
                .push_str(", or once with create_table=true in the URL");
            Err(error)
        }
    }
}

/// Lets the driver parse the URL.
fn config(request: &mut OpenRequest) -> Result<Config, StoreError> {
    let url = request.take_for_driver("postgres", &OF_THE_DRIVER);
    let parsed = url.parse::<Config>().map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        StoreError::wrong_url(cause.unwrap_or_else(|| error.to_string()))
    })?;
    if parsed.get_hosts().is_empty() && parsed.get_hostaddrs().is_empty() {
        return Err(StoreError::wrong_url(
            "it names no server, as in postgres://user@host/database",
        ));
    }
    Ok(parsed)
}
