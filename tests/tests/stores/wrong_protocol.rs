//! A URL with TLS for a server without it, and the other way round: the error says what to change.

use dlock::LockClient;
use dlock_tests::etcd::Etcd;
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::{Certificates, Flavor, Server};

use crate::scenes::SEC;

#[tokio::test]
async fn url_with_tls_for_a_server_without_it_or_the_reverse_is_told_what_to_change() {
    let certificates = Certificates::new();
    let (etcd, encrypted_etcd) = (Etcd::shared().await, Etcd::start_encrypted(&certificates).await);
    let redis = Server::builder(Flavor::Redis).tls(&certificates).start().await;
    let (postgres, mysql) = (Postgres::shared().await, Mysql::shared().await);
    let encrypted = redis.announced();
    for (url, advice) in [
        (format!("etcds://{}", etcd.addr()), "use etcd://"),
        (format!("rediss://{}", redis.addr()), "use redis://"),
        (
            format!("{}?sslmode=require", postgres.url_at(postgres.addr())),
            "sslmode=disable",
        ),
        (
            format!("{}?require_ssl=true", mysql.url_at(mysql.addr())),
            "leave out require_ssl",
        ),
        (format!("etcd://{}", encrypted_etcd.addr()), "use etcds://"),
        (format!("redis://{encrypted}"), "use rediss://"),
        (format!("zookeeper://{encrypted}"), "its port for TLS"),
        (
            format!("zookeeper://{}", encrypted_etcd.addr()),
            "its port for TLS",
        ),
    ] {
        let builder = LockClient::builder()
            .scheme(dlock_etcd::scheme())
            .scheme(dlock_mysql::scheme())
            .scheme(dlock_postgres::scheme())
            .scheme(dlock_zookeeper::scheme());
        let built = builder.url(&url).timeout(SEC).build().await;
        let error = built.expect_err("the protocols differ").to_string();
        assert!(error.contains(advice), "{url}: {error}");
    }
}
