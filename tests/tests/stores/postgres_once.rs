//! Work that is done once, whose effect and result are one transaction: the effect is there once, whatever crashes when.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use dlock::{Error, LockClient, OnFailure, Once, OnceError, OnceReply};
use dlock_postgres::{CompleteError, PostgresRecords};
use dlock_tests::faults::PATIENCE;
use dlock_tests::postgres::{Postgres, fresh_table};
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio_postgres::Client;

/// How long a crashed attempt blocks the next one.
const LEASE: Duration = Duration::from_secs(2);

/// Where a process crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Crash {
    BeforeTheEffect,
    AfterTheEffect,
    AfterTheCompletion,
    AfterTheCommit,
    Never,
}

/// A table of effects, beside one of records.
#[derive(Clone)]
struct Shop {
    server: Arc<Postgres>,
    table: String,
}

impl Shop {
    async fn new() -> Shop {
        let (server, table) = (Postgres::shared().await, fresh_table());
        let (store, _) = server.records(&table).await;
        store.create_table().await.unwrap();
        let sql = format!("CREATE TABLE {table}_sales (key text, attempt int)");
        server.client().await.batch_execute(&sql).await.unwrap();
        Shop { server, table }
    }

    async fn once(&self, key: &str) -> (PostgresRecords, Once) {
        let (store, records) = self.server.records(&self.table).await;
        let once = records.once(key).lease(LEASE).keep(1800 * LEASE);
        (store, once)
    }

    /// How many effects there are, and of which attempt.
    async fn sales(&self, key: &str) -> (i64, Option<i32>) {
        let sql = format!(
            "SELECT count(*), max(attempt) FROM {}_sales WHERE key = $1",
            self.table
        );
        let db = self.server.client().await;
        let row = db.query_one(&sql, &[&key]).await.unwrap();
        (row.get(0), row.get(1))
    }

    /// A process that sells what the key says, and stands still where it is to crash: then `reached` is told.
    async fn sell(
        &self,
        key: &str,
        crash: Crash,
        reached: Option<oneshot::Sender<()>>,
        wait: Option<Duration>,
    ) -> Result<OnceReply<u32>, OnceError<String>> {
        let (store, mut once) = self.once(key).await;
        if let Some(wait) = wait {
            once = once.wait(wait);
        }
        let mut db: Client = self.server.client().await;
        let sale = format!("INSERT INTO {}_sales VALUES ($1, $2)", self.table);
        let mut reached = reached;
        let mut at = async |step: Crash| {
            if step == crash {
                if let Some(reached) = reached.take() {
                    let _ = reached.send(());
                }
                std::future::pending::<()>().await;
            }
        };
        let work = async |claim: dlock::OnceClaim| {
            let attempt = claim.attempt();
            let tx = db.transaction().await.map_err(text)?;
            at(Crash::BeforeTheEffect).await;
            let number = i32::try_from(attempt).map_err(text)?;
            tx.execute(&sale, &[&key, &number]).await.map_err(text)?;
            at(Crash::AfterTheEffect).await;
            store
                .complete_once_in(&tx, &claim, &attempt)
                .await
                .map_err(text)?;
            at(Crash::AfterTheCompletion).await;
            tx.commit().await.map_err(text)?;
            at(Crash::AfterTheCommit).await;
            Ok(attempt)
        };
        once.run(work).await
    }

    /// The same as a process of its own, which crashes there: nothing of it runs on, and its connections break.
    fn crashes(&self, key: String, crash: Crash) {
        let shop = self.clone();
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let (reached, has_reached) = oneshot::channel();
                tokio::select! {
                    reply = shop.sell(&key, crash, Some(reached), None) => panic!("{key} went on: {reply:?}"),
                    Ok(()) = has_reached => {}
                }
            });
        });
        process.join().unwrap();
    }
}

fn text(error: impl Debug) -> String {
    format!("{error:?}")
}

/// What is judged: one effect for each key, of the attempt whose result is kept. An attempt that has committed is not
/// repeated, one that has not is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effect_is_there_once_whatever_crashes_between_the_steps() {
    let shop = Shop::new().await;
    let crashes = [
        Crash::BeforeTheEffect,
        Crash::AfterTheEffect,
        Crash::AfterTheCompletion,
        Crash::AfterTheCommit,
    ];
    let each = crashes
        .iter()
        .flat_map(|crash| (0..3).map(move |nth| (*crash, format!("{crash:?}-{nth}"))));
    let each: Vec<_> = each.collect();
    for (crash, key) in each.clone() {
        let shop = shop.clone();
        tokio::task::spawn_blocking(move || shop.crashes(key, crash))
            .await
            .unwrap();
    }
    // Each is asked for by two more processes.
    let again = each.iter().chain(&each).map(async |(crash, key)| {
        let reply = shop.sell(key, Crash::Never, None, Some(PATIENCE)).await;
        (*crash, key, reply.unwrap())
    });
    let mut ran = Vec::new();
    for (crash, key, reply) in join_all(again).await {
        let (count, attempt) = shop.sales(key).await;
        assert_eq!(count, 1, "{key}: {reply:?}");
        if matches!(reply, OnceReply::Ran(_)) {
            assert_ne!(crash, Crash::AfterTheCommit, "{key} was committed before");
            ran.push(key);
        }
        let result = reply.into_result().unwrap();
        assert_eq!(
            attempt,
            i32::try_from(result).ok(),
            "{key}: the result is that of the effect"
        );
        assert_eq!(result > 1, crash != Crash::AfterTheCommit, "{key}: {result}");
    }
    ran.sort();
    let all = ran.len();
    ran.dedup();
    assert_eq!(
        (ran.len(), all),
        (9, 9),
        "each that was not committed ran once more: {ran:?}"
    );
}

#[tokio::test]
async fn commit_whose_reply_is_lost_is_found_by_the_next_call() {
    let shop = Shop::new().await;
    for on_failure in [OnFailure::RunAgain, OnFailure::Keep, OnFailure::AtMost(1)] {
        let key = format!("{on_failure:?}");
        let (store, once) = shop.once(&key).await;
        let once = once.on_failure(on_failure);
        let mut db = shop.server.client().await;
        let sale = format!("INSERT INTO {}_sales VALUES ($1, 1)", shop.table);
        let lost = once
            .run(async |claim| {
                let tx = db.transaction().await.map_err(text)?;
                tx.execute(&sale, &[&key]).await.map_err(text)?;
                store.complete_once_in(&tx, &claim, &7).await.map_err(text)?;
                tx.commit().await.map_err(text)?;
                Err::<u32, _>("the reply was lost".to_owned())
            })
            .await;
        assert!(matches!(lost, Err(OnceError::Work(_))), "{lost:?}");
        let found = once.run(async |_| Err::<u32, _>("it runs again")).await;
        assert!(
            matches!(found, Ok(OnceReply::Earlier(7))),
            "{on_failure:?}: {found:?}"
        );
        assert_eq!(shop.sales(&key).await.0, 1);
    }
}

#[tokio::test]
async fn transaction_without_its_claim_or_with_too_large_a_result_changes_nothing() {
    let shop = Shop::new().await;
    let (store, once) = shop.once("k").await;
    let mut db = shop.server.client().await;
    let sale = format!("INSERT INTO {}_sales VALUES ('k', 1)", shop.table);
    let mut kept = None;
    let large = once
        .run(async |claim| {
            kept = Some(claim.clone());
            let tx = db.transaction().await.map_err(text)?;
            tx.execute(&sale, &[]).await.map_err(text)?;
            let large = "x".repeat(2 << 20);
            let error = store.complete_once_in(&tx, &claim, &large).await.unwrap_err();
            assert!(matches!(error, CompleteError::NotKept { .. }), "{error}");
            Err::<(), _>(error.to_string())
        })
        .await;
    assert!(matches!(large, Err(OnceError::Work(_))), "{large:?}");
    assert_eq!(shop.sales("k").await.0, 0);
    // The claim was given up with the failure.
    let claim = kept.unwrap();
    let tx = db.transaction().await.unwrap();
    tx.execute(&sale, &[]).await.unwrap();
    let lost = store.complete_once_in(&tx, &claim, &()).await.unwrap_err();
    assert!(lost.is_claim_lost(), "{lost}");
    drop(tx);
    assert_eq!(shop.sales("k").await.0, 0);
    assert!(matches!(
        once.run(async |_| Ok::<_, String>(())).await,
        Ok(OnceReply::Ran(()))
    ));
}

#[tokio::test]
async fn client_of_a_url_has_records_where_it_names_their_table() {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let url = |options: &str| format!("{}?table={table}_locks&{options}", server.url_at(server.addr()));
    let connect = async |options: &str| {
        let builder = LockClient::builder().scheme(dlock_postgres::scheme());
        builder.url(url(options)).timeout(PATIENCE).build().await
    };
    let without = connect("create_table=true").await.unwrap();
    let none = without.records().unwrap_err();
    assert!(
        matches!(none, Error::Unsupported { .. }) && none.to_string().contains("?records="),
        "{none}"
    );
    let records = format!("records={table}");
    let missing = connect(&records).await.unwrap_err().to_string();
    assert!(missing.contains("create_table=true"), "{missing}");
    let prefixed = connect(&format!("{records}&create_table=true&prefix=shop:")).await;
    let prefixed = prefixed.unwrap_err().to_string();
    assert!(prefixed.contains("records have no prefix"), "{prefixed}");
    let bad = connect("create_table=true&records=a;b")
        .await
        .unwrap_err()
        .to_string();
    assert!(bad.contains("records"), "{bad}");

    let a = connect(&format!("{records}&create_table=true")).await.unwrap();
    let b = connect(&records).await.unwrap();
    let ran = a.once("report").run(async |_| Ok::<_, String>(42)).await;
    assert!(matches!(ran, Ok(OnceReply::Ran(42))), "{ran:?}");
    let earlier = b.once("report").run(async |_| Ok::<_, String>(43)).await;
    assert!(matches!(earlier, Ok(OnceReply::Earlier(42))), "{earlier:?}");
    assert!(
        b.lock("report").try_acquire().await.is_ok(),
        "names of locks are others"
    );
}

/// The records of a URL connect as its locks do.
#[tokio::test]
async fn options_of_a_url_are_those_of_its_records_too() {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let url = server.url_at(server.addr());
    let url = format!("{url}?table={table}_locks&records={table}&create_table=true&application_name={table}");
    let connect = async |options: &str| {
        let builder = LockClient::builder().scheme(dlock_postgres::scheme());
        let builder = builder.url(format!("{url}&{options}")).timeout(PATIENCE);
        builder.build().await.unwrap()
    };
    let db = server.client().await;
    let counted = async |what: &str| {
        let sql =
            format!("SELECT count(*) FROM pg_stat_activity WHERE application_name = '{table}' AND {what}");
        db.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    let (a, b) = (
        connect("connections=1&listen=false").await,
        connect("connections=1&listen=false").await,
    );
    let ran = a.once("report").run(async |_| {
        let waiting = b.once("report").wait(Duration::from_millis(500));
        let waiting = waiting.run(async |_| Ok::<_, String>(())).await;
        assert!(!matches!(waiting, Ok(OnceReply::Ran(()))), "the first one runs");
        Ok::<_, String>(())
    });
    assert!(matches!(ran.await, Ok(OnceReply::Ran(()))));
    assert_eq!(counted("query LIKE 'LISTEN%'").await, 0, "it polls");
    // Of each client one for locks and one for records; a connection of locks that is not needed may end.
    let connected = counted("true").await;
    assert!((2..=4).contains(&connected), "{connected}");
}
