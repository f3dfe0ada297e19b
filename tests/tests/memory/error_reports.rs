//! What is printed and logged of an error.

use std::error::Error as StdError;
use std::{fmt, io};

use axum::response::IntoResponse;
use dlock::store::{Reason, StoreError};
use dlock::{Error, LockClient};
use dlock_etcd::EtcdLocks;
use dlock_mysql::{MysqlLocks, OptsBuilder};
use dlock_postgres::PostgresLocks;
use dlock_tests::Log;
use dlock_zookeeper::ZookeeperLocks;
use tokio_postgres::NoTls;

/// An error of a driver whose cause is a refusal.
#[derive(Debug)]
struct Driver(&'static str, io::Error);

impl Driver {
    fn refused(text: &'static str) -> Driver {
        Driver(text, io::Error::other("refused"))
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl StdError for Driver {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.1)
    }
}

#[test]
fn cause_that_the_message_has_is_not_told_again() {
    for (message, driver, causes) in [
        ("a:1: no connection: refused", "no connection", &[][..]),
        ("a:1: no connection", "no connection", &["refused"]),
        (
            "a:1: nobody is there",
            "no connection",
            &["no connection", "refused"],
        ),
    ] {
        for reason in [Reason::Unreachable, Reason::Refused] {
            let error = StoreError::not_done(reason, message).caused_by(Driver::refused(driver));
            let error = error.into_connect_error();
            let text = error.to_string();
            let chain: Vec<_> = [text.as_str()].iter().chain(causes).copied().collect();
            assert_eq!(format!("{:#}", anyhow::Error::new(error)), chain.join(": "));
        }
    }
}

#[test]
fn field_of_an_error_has_the_cause_even_if_its_text_is_told() {
    let error = StoreError::not_done(Reason::Refused, "a:1: no connection: refused");
    let error = error
        .caused_by(Driver::refused("no connection"))
        .into_connect_error();
    let Error::Refused { source, .. } = &error else {
        panic!("{error}");
    };
    let cause = source.as_ref().and_then(|source| source.downcast_ref::<Driver>());
    assert_eq!(cause.map(|cause| cause.0), Some("no connection"));
}

#[tokio::test]
async fn unreachable_server_is_told_once() {
    let mysql = OptsBuilder::default()
        .ip_or_hostname("127.0.0.1")
        .tcp_port(1)
        .db_name(Some("shop"));
    let postgres = "postgres://shop@127.0.0.1:1/shop".parse().unwrap();
    let errors = [
        LockClient::connect("redis://127.0.0.1:1").await.map(drop),
        MysqlLocks::connect(mysql).await.map(drop),
        PostgresLocks::connect(postgres, NoTls).await.map(drop),
        EtcdLocks::connect(["127.0.0.1:1"]).await.map(drop),
        ZookeeperLocks::connect("127.0.0.1:1", "/dlock").await.map(drop),
    ];
    for error in errors {
        let error = error.expect_err("no server is there");
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
        let text = format!("{:#}", anyhow::Error::new(error));
        let refusals = text.to_lowercase().matches("connection refused").count();
        assert!(refusals <= 1, "{text}");
    }
}

#[tokio::test]
async fn error_as_a_response_is_logged_by_what_it_means_for_the_operator() {
    let client = LockClient::memory();
    let _guard = client.lock("k").acquire().await.unwrap();
    let busy = client.lock("k").try_acquire().await.unwrap_err();
    let fixed = client
        .lock("fixed")
        .fixed_lease(std::time::Duration::from_millis(50));
    let fixed = fixed.acquire().await.unwrap();
    fixed.lost().await;
    let refused = StoreError::not_done(Reason::Refused, "the password is wrong");
    for (error, status, level) in [
        (Error::NoDefaultClient, 500, "ERROR"),
        (refused.into_connect_error(), 503, "WARN"),
        (fixed.check().unwrap_err(), 503, "WARN"),
        (Error::ClientClosed, 503, "WARN"),
        // Below what is shown by default.
        (busy, 423, ""),
    ] {
        let (log, text) = (Log::default(), error.to_string());
        let listening = log.listen();
        assert_eq!(error.into_response().status(), status, "{text}");
        drop(listening);
        for shown in ["ERROR", "WARN", "DEBUG"] {
            assert_eq!(log.count(shown), usize::from(shown == level), "{shown}: {text}");
        }
        assert_eq!(log.count(&text), usize::from(!level.is_empty()), "{text}");
    }
}
