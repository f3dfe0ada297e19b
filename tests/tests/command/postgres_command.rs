//! Programs on PostgreSQL: the command `dlock`, and the example of a payment.

use dlock::LockClient;
use dlock_postgres::PostgresLocks;
use dlock_tests::faults::PATIENCE;
use dlock_tests::postgres::{Postgres, fresh_table};
use dlock_tests::{Running, bins, child, eventually};
use tokio_postgres::NoTls;

use crate::command_support::{
    hold_one_by_one_with_clocks_hours_apart, look, runs_lists_and_measures,
    runs_readers_together_and_a_writer_alone,
};

#[tokio::test]
async fn command_runs_lists_and_measures() {
    let server = Postgres::shared().await;
    let base = server.url_at(server.addr());
    let url = format!("{base}?table={}&lease=60s&timeout=20s", fresh_table());
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(2) && said.contains("create_table=true"), "{said}");
    let url = format!("{url}&create_table=true");
    let builder = || LockClient::builder().scheme(dlock_postgres::scheme());
    runs_lists_and_measures(&url, builder(), 0).await;
    runs_readers_together_and_a_writer_alone(&url).await;
    let (code, said) = look(&url, &["run", "--kind", "fair", "a job", "--", "echo", "done"]);
    assert!(code == Some(0) && said.contains("done"), "{said}");
    let client = builder().url(&url).build().await.unwrap();
    let guard = client.fair_lock("a job").acquire().await.unwrap();
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.contains("fair"), "{said}");
    let (code, said) = look(&url, &["show", "a job"]);
    assert!(
        code == Some(0) && said.contains("this store keeps no entries of clients"),
        "{said}"
    );
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_share_the_permits_of_a_semaphore() {
    let server = Postgres::shared().await;
    let base = server.url_at(server.addr());
    let url = format!(
        "{base}?table={}&lease=60s&timeout=20s&create_table=true",
        fresh_table()
    );
    let builder = LockClient::builder().scheme(dlock_postgres::scheme());
    let client = builder.url(&url).build().await.unwrap();
    let permit = client.semaphore("a job").permits(2).acquire().await.unwrap();
    let run = |wait: &'static str| {
        let wanted = [
            "run",
            "--kind",
            "semaphore=2",
            "--wait",
            wait,
            "a job",
            "--",
            "echo",
            "done",
        ];
        look(&url, &wanted)
    };
    let (code, said) = run("20s");
    assert!(code == Some(0) && said.contains("done"), "{said}");
    let other = client.semaphore("a job").acquire().await.unwrap();
    let (code, said) = run("1s");
    assert!(code != Some(0) && !said.contains("done"), "{said}");
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.matches("a job").count() == 2, "{said}");
    let (code, said) = look(&url, &["show", "a job"]);
    assert!(code == Some(0) && said.matches("held by").count() == 2, "{said}");
    let (code, said) = look(&url, &["run", "a job", "--", "echo", "done"]);
    assert!(code != Some(0) && said.contains("a semaphore"), "{said}");
    let (code, said) = look(&url, &["force-unlock", "a job"]);
    assert!(code == Some(0), "{said}");
    assert!(permit.release().await.unwrap_err().is_lost());
    assert!(other.release().await.unwrap_err().is_lost());
}

#[tokio::test]
async fn command_shows_a_lock_that_only_a_transaction_holds() {
    let server = Postgres::shared().await;
    let (base, table) = (server.url_at(server.addr()), fresh_table());
    let url = format!("{base}?table={table}&timeout=20s&create_table=true");
    let store = PostgresLocks::builder(server.config(), NoTls)
        .table(&table)
        .timeout(PATIENCE);
    let store = store.connect().await.unwrap();
    store.create_table().await.unwrap();
    let mut db = server.client().await;
    let tx = db.transaction().await.unwrap();
    store.lock_in(&tx, "a job").await.unwrap();
    let pid: i32 = tx.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let by = format!("transaction of process {pid}");
    for args in [&["list"][..], &["show", "a job"]] {
        let (code, said) = look(&url, args);
        assert!(
            code == Some(0) && said.contains("a job") && said.contains(&by),
            "{args:?}: {said}"
        );
    }
    tx.commit().await.unwrap();
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && !said.contains("a job"), "{said}");
}

#[tokio::test]
async fn command_runs_once_and_its_record_is_shown() {
    let server = Postgres::shared().await;
    let (base, table) = (server.url_at(server.addr()), fresh_table());
    let url = format!("{base}?table={table}&lease=60s&timeout=20s&create_table=true");
    let without = Running::script(&url, &["--once", "import"], "echo run")
        .all_ended()
        .await;
    assert_eq!(
        (without.status.code(), without.stdout.as_str()),
        (Some(2), ""),
        "{without:?}"
    );
    let url = format!("{url}&records={table}_records");
    for said in ["run\n", ""] {
        let ended = Running::script(&url, &["--once", "import"], "echo run")
            .all_ended()
            .await;
        assert_eq!(
            (ended.status.code(), ended.stdout.as_str()),
            (Some(0), said),
            "{ended:?}"
        );
    }
    let (code, said) = look(&url, &["record", "show", "import"]);
    assert!(code == Some(0) && said.contains("ended, "), "{said}");
    let forget = ["record", "forget", "import", "--reason", "again"];
    let (code, said) = look(&url, &forget);
    assert!(code == Some(2) && said.contains("E0019"), "no audit log: {said}");
    let (code, said) = look(&url, &[&forget[..], &["--no-audit"]].concat());
    assert!(code == Some(0) && said.contains("forgotten"), "{said}");
}

/// The lease is 1 s, and the first process stands still for three of them with its transaction open.
#[tokio::test]
async fn payment_that_stands_still_is_neither_lost_nor_overtaken() {
    let server = Postgres::start().await;
    let url = server.url_at(server.addr());
    let payment = |key: &str, more: &[&str]| {
        let mut command = child::command(bins::payment());
        command
            .args(["--url", &url, "--open", "100", "--lease", "1s", "--key", key])
            .args(more);
        command
    };
    let said = |output: std::process::Output| String::from_utf8(output.stdout).unwrap();
    let pay = |key: &str, more: &[&str]| said(bins::output(payment(key, more), PATIENCE));
    assert_eq!(pay("first", &[]), "paid 5, 95 left\n");
    assert_eq!(pay("first", &[]), "paid 5, 95 left (before)\n");
    let stalled = payment("second", &["--stall", "3s"]);
    let stalled = tokio::task::spawn_blocking(move || bins::output(stalled, PATIENCE));
    let db = server.client().await;
    eventually("it has the account", async || {
        let held = db
            .query("SELECT FROM dlock_locks_pins WHERE key = 'account:1'", &[])
            .await;
        held.is_ok_and(|rows| !rows.is_empty())
    })
    .await;
    let beside = payment("third", &["--amount", "10"]);
    let beside = tokio::task::spawn_blocking(move || bins::output(beside, PATIENCE));
    assert_eq!(said(stalled.await.unwrap()), "paid 5, 90 left\n");
    assert_eq!(said(beside.await.unwrap()), "paid 10, 80 left\n");
    let balance: i64 = db
        .query_one("SELECT balance FROM accounts", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(balance, 80);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_whose_clocks_are_hours_apart_never_hold_the_lock_at_once() {
    let server = Postgres::shared().await;
    let base = server.url_at(server.addr());
    let url = format!("{base}?table={}&create_table=true", fresh_table());
    let (code, said) = look(&url, &["list"]);
    assert_eq!(code, Some(0), "{said}");
    hold_one_by_one_with_clocks_hours_apart(&url).await;
}
