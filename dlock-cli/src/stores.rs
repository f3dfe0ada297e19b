//! The stores that the command knows by URL scheme.

use dlock::{LockClient, LockClientBuilder};

/// Creates a client of the store of this URL.
pub(crate) fn client(url: impl Into<String>) -> LockClientBuilder {
    let builder = LockClient::builder();
    #[cfg(feature = "etcd")]
    let builder = builder.scheme(dlock_etcd::scheme());
    #[cfg(feature = "mysql")]
    let builder = builder.scheme(dlock_mysql::scheme());
    #[cfg(feature = "postgres")]
    let builder = builder.scheme(dlock_postgres::scheme());
    #[cfg(feature = "zookeeper")]
    let builder = builder.scheme(dlock_zookeeper::scheme());
    builder.url(url)
}

/// Whether the locks of the store of this URL are inside of one process.
pub(crate) fn is_memory(url: &str) -> bool {
    url.split_once("://")
        .is_some_and(|(scheme, _)| scheme.eq_ignore_ascii_case("memory"))
}

/// Creates a client that only observes, and publishes nothing, whatever the URL of the services says.
pub(crate) fn onlooker(url: impl Into<String>) -> LockClientBuilder {
    client(url)
        .service_name("dlock-cli")
        .presence(false)
        .control(false)
}
