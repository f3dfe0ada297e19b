//! Encrypted connections to PostgreSQL and MariaDB, by their URLs.

use std::path::Path;
use std::time::Duration;

use dlock::{Error, LockClient};
use dlock_tests::faults::{PATIENCE, answered, within};
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::{Certificates, eventually};
use mysql_async::prelude::Queryable;

async fn open(url: &str) -> Result<LockClient, Error> {
    let builder = LockClient::builder()
        .scheme(dlock_mysql::scheme())
        .scheme(dlock_postgres::scheme());
    builder.url(url).timeout(PATIENCE).build().await
}

/// One client waits until another one releases the lock.
async fn is_handed_over(url: &str) {
    let (here, there) = (open(url).await.unwrap(), open(url).await.unwrap());
    let guard = here.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(async move { there.lock("k").acquire().await });
    guard.release().await.unwrap();
    let next = within(PATIENCE, "it is handed over", waiter)
        .await
        .unwrap()
        .unwrap();
    next.release().await.unwrap();
}

/// Each URL is refused with a message that has these words, and no password.
async fn are_refused(password: &str, urls: impl IntoIterator<Item = (String, &str)>) {
    for (url, words) in urls {
        let error = open(&url).await.map(|_| ()).expect_err(&url).to_string();
        assert!(error.contains(words), "{url}: {error}");
        assert!(!error.contains(password), "{error}");
    }
}

fn path(file: &Path) -> String {
    file.display().to_string()
}

#[tokio::test]
async fn encrypted_postgres_is_used_and_its_certificate_verified() {
    let (certificates, others) = (Certificates::new(), Certificates::new());
    let server = Postgres::start().await;
    let plain = format!("{}?create_table=true", server.url_at(server.addr()));
    open(&plain).await.expect("it is not encrypted yet");
    server.encrypt(&certificates).await;
    let (root, other) = (
        path(&certificates.file("root.pem")),
        path(&others.file("root.pem")),
    );
    let key = path(&certificates.file("server.key"));
    for mode in ["require", "verify-ca", "verify-full"] {
        is_handed_over(&format!(
            "{plain}&sslmode={mode}&sslrootcert={root}&records=dlock_records"
        ))
        .await;
    }
    let password = plain.split([':', '@']).nth(2).unwrap().to_owned();
    let refused = [
        (plain.clone(), "no encryption"),
        (format!("{plain}&sslmode=prefer"), "no encryption"),
        (format!("{plain}&sslmode=require"), "UnknownIssuer"),
        (
            format!("{plain}&sslmode=require&sslrootcert={other}"),
            "BadSignature",
        ),
        (
            format!("{plain}&sslmode=require&sslrootcert=/nowhere/root.pem"),
            "cannot be read",
        ),
        (
            format!("{plain}&sslmode=require&sslrootcert={key}"),
            "has no certificate",
        ),
        (
            format!("{plain}&sslmode=require&sslcert={root}"),
            "sslcert and sslkey go together",
        ),
        (format!("{plain}&sslrootcert={root}"), "sslmode=require"),
        (format!("{plain}&sslmode=always"), "verify-full"),
    ];
    are_refused(&password, refused).await;
    // The name of the server counts as well: the certificate is for localhost and 127.0.0.1.
    let renamed = plain.replace("127.0.0.1", "ip6-localhost");
    let hosted = format!("{renamed}&hostaddr=127.0.0.1&sslmode=require&sslrootcert={root}");
    are_refused(&password, [(hosted, "not valid for name")]).await;
}

/// The server waits for its standby, and does not notice that its client is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_without_a_reply_is_cancelled_on_an_encrypted_postgres() {
    let certificates = Certificates::new();
    let server = Postgres::start().await;
    let plain = format!("{}?create_table=true", server.url_at(server.addr()));
    open(&plain).await.expect("it is not encrypted yet");
    let db = server.client().await;
    server.encrypt(&certificates).await;
    let root = path(&certificates.file("root.pem"));
    let connecting = || {
        let builder = LockClient::builder().scheme(dlock_postgres::scheme());
        let url = format!("{plain}&sslmode=require&sslrootcert={root}");
        builder
            .url(url)
            .timeout(Duration::from_secs(1))
            .retry_for(Duration::from_millis(1))
            .build()
    };
    let client = answered(connecting).await.unwrap();
    for sql in [
        "ALTER SYSTEM SET synchronous_standby_names = 'nobody'",
        "SELECT pg_reload_conf()",
    ] {
        db.batch_execute(sql).await.unwrap();
    }
    let waiting = async || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        db.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let acquires = async {
        loop {
            let _ = client.lock(fastrand::u64(..).to_string()).try_acquire().await;
        }
    };
    tokio::select! {
        () = acquires => {}
        () = eventually("it waits", async || waiting().await > 0) => {}
    }
    eventually("it is cancelled", async || waiting().await == 0).await;
}

#[tokio::test]
async fn encrypted_mariadb_is_used_and_its_certificate_verified() {
    let (certificates, others) = (Certificates::naming(&["localhost"]), Certificates::new());
    let option = |name: &str, file: &str| format!("--{name}={}", path(&certificates.file(file)));
    let options = [
        option("ssl-ca", "root.pem"),
        option("ssl-cert", "server.pem"),
        option("ssl-key", "server.key"),
    ];
    let server = Mysql::start_with(&options.each_ref().map(String::as_str), None).await;
    let mut client = server.client().await;
    for sql in [
        "CREATE USER shop IDENTIFIED BY 'p4ssw0rd' REQUIRE SSL",
        "GRANT ALL ON *.* TO shop",
    ] {
        client.query_drop(sql).await.unwrap();
    }
    let own = server.url_at(server.addr()).replace("127.0.0.1", "localhost");
    let (_, rest) = own.split_once('@').unwrap();
    let plain = format!("mysql://shop:p4ssw0rd@{rest}?create_table=true");
    let (root, other) = (
        path(&certificates.file("root.pem")),
        path(&others.file("root.pem")),
    );
    is_handed_over(&format!("{plain}&require_ssl=true&ssl_ca={root}")).await;
    is_handed_over(&format!("{plain}&require_ssl=true&verify_ca=false")).await;
    let refused = [
        (plain.clone(), "shop"),
        (format!("{plain}&require_ssl=true"), "UnknownIssuer"),
        (format!("{plain}&require_ssl=true&ssl_ca={other}"), "BadSignature"),
        (
            format!("{plain}&require_ssl=true&ssl_ca=/nowhere/root.pem"),
            "No such file",
        ),
        (format!("{plain}&ssl_ca={root}"), "require_ssl=true"),
    ];
    are_refused("p4ssw0rd", refused).await;
    // The name of the server counts as well.
    let renamed = format!("{plain}&require_ssl=true&ssl_ca={root}").replace("localhost", "127.0.0.1");
    are_refused("p4ssw0rd", [(renamed, "not valid for name")]).await;
}
