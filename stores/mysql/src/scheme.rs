//! URLs of the store.

use std::path::PathBuf;
use std::sync::Arc;

use dlock::store::{OpenRequest, Scheme, Store, StoreError};
use mysql_async::{Opts, OptsBuilder};

use crate::failure;
use crate::store::MysqlLocks;

/// The options that the driver parses; it reports invalid values itself.
const OF_THE_DRIVER: [&str; 5] = [
    "socket",
    "require_ssl",
    "verify_ca",
    "verify_identity",
    "built_in_roots",
];

/// Returns the scheme of `mysql://` and `mariadb://` URLs, for
/// [`LockClientBuilder::scheme`](dlock::LockClientBuilder::scheme).
///
/// Parameters in addition to those of every store:
///
/// | parameter | default | |
/// |---|---|---|
/// | `table` | `dlock_locks` | see [`MysqlLocksBuilder::table`](crate::MysqlLocksBuilder::table) |
/// | `connections` | 2 | see [`MysqlLocksBuilder::connections`](crate::MysqlLocksBuilder::connections) |
/// | `create_table` | `false` | whether the table is created if it is missing |
/// | `require_ssl` | `false` | whether connections are encrypted; needs the feature `tls` |
/// | `ssl_ca` | | file with a certificate authority to trust besides the built-in ones, in PEM |
/// | `verify_ca`, `verify_identity`, `built_in_roots` | `true` | what is verified on encrypted connections. `verify_identity=false` has no effect with `mysql_async` 0.37: a server of another name is refused |
/// | `socket` | | the path of a Unix socket, instead of host and port |
///
/// ```no_run
/// # async fn example() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::builder()
///     .scheme(dlock_mysql::scheme())
///     .url("mysql://shop:password@db.internal/shop?lease=30s&create_table=true")
///     .build()
///     .await?;
/// # let _ = client; Ok(()) }
/// ```
#[must_use]
pub fn scheme() -> Scheme {
    Scheme::new(["mysql", "mariadb"], open)
}

async fn open(mut request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
    let table = request.take("table");
    let connections = request.take_parsed("connections", "a number such as 4")?;
    let create = request
        .take_parsed("create_table", "true or false")?
        .unwrap_or(false);
    let server = server(&mut request)?;
    request.finish()?;
    let mut builder = MysqlLocks::builder(server)
        .prefix(&request.prefix)
        .timeout(request.timeout);
    if let Some(table) = table {
        builder = builder.table(table);
    }
    if let Some(connections) = connections {
        builder = builder.connections(connections);
    }
    let locks = builder.open_by_url().await?;
    // Reports a missing table at once, not at the first lock.
    match Arc::new(locks.clone()).inspect("dlock".into()).await {
        Ok(_) => {}
        Err(error) if !failure::is_missing_table(&error) => return Err(error),
        Err(_) if create => locks.create_table().await?,
        Err(mut error) => {
            error
                .message
                .push_str(", or once with create_table=true in the URL");
            return Err(error);
        }
    }
    Ok(Arc::new(locks))
}

/// Lets the driver parse the URL.
fn server(request: &mut OpenRequest) -> Result<OptsBuilder, StoreError> {
    let url = request.take_for_driver("mysql", &OF_THE_DRIVER);
    let opts = Opts::from_url(&url).map_err(|error| StoreError::wrong_url(failure::of_url(&error)))?;
    if opts.db_name().is_none_or(str::is_empty) {
        return Err(StoreError::wrong_url(
            "it names no database, as in mysql://user@host/database",
        ));
    }
    let encryption = opts.ssl_opts().cloned();
    let mut server = OptsBuilder::from_opts(opts);
    if let Some(file) = request.take("ssl_ca") {
        let Some(encryption) = encryption else {
            return Err(StoreError::wrong_url(
                "its ssl_ca is for require_ssl=true, which encrypts",
            ));
        };
        server = server.ssl_opts(encryption.with_root_certs(vec![PathBuf::from(file).into()]));
    }
    if !request.service_name.is_empty() {
        server = server.connect_attribute("program_name", &request.service_name);
    }
    Ok(server)
}
