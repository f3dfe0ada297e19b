//! Tables with many rows: no step takes as long as a look at all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::LockKey;
use dlock::store::{Holder, Store};
use dlock_postgres::PostgresLocks;
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, in_rounds, within};
use dlock_tests::postgres::{Postgres, fresh_table};
use tokio_postgres::{Config, NoTls};

use crate::mysql_support;
use crate::scenes::MS;

/// Servers are slow while other tests run.
const SHORT: Duration = Duration::from_millis(400);

struct Setting {
    server: Arc<Postgres>,
    table: String,
    locks: Arc<PostgresLocks>,
}

async fn setting(config: impl Fn(Config) -> Config, timeout: Duration) -> Setting {
    let server = Postgres::shared().await;
    let table = fresh_table();
    let connected = |timeout| {
        let builder = PostgresLocks::builder(config(server.config()), NoTls);
        builder.table(&table).connections(1).timeout(timeout).connect()
    };
    let patient = connected(PATIENCE).await.unwrap();
    patient.create_table().await.unwrap();
    Setting {
        locks: Arc::new(connected(timeout).await.unwrap()),
        server: server.clone(),
        table: table.clone(),
    }
}

impl Setting {
    async fn sql(&self, text: &str) {
        let text = text.replace("{t}", &self.table);
        self.server.client().await.batch_execute(&text).await.unwrap();
    }

    async fn number(&self, text: &str) -> i64 {
        let text = text.replace("{t}", &self.table);
        let row = self.server.client().await.query_one(&text, &[]).await;
        row.unwrap().get(0)
    }

    /// How many rows of a table statements have read, as far as the server has counted.
    async fn read(&self, table: &str) -> i64 {
        let text = "SELECT (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::int8 \
                    FROM pg_stat_all_tables WHERE relid = '{t}'::regclass";
        self.number(&text.replace("{t}", table)).await
    }

    /// Repeats a step until the server has counted the rows that 20 of them read, and returns how many rows one reads.
    async fn read_by_one(&self, table: &str, step: impl AsyncFn()) -> i64 {
        let before = self.read(table).await;
        for _ in 0..20 {
            step().await;
        }
        // A connection counts what it has read when it is idle, once a second at most.
        eventually("it is counted", async || {
            tokio::time::sleep(1100 * MS).await;
            step().await;
            self.read(table).await > before
        })
        .await;
        (self.read(table).await - before) / 20
    }
}

fn names(found: &[(LockKey, Holder)]) -> Vec<(&str, &str)> {
    found
        .iter()
        .map(|(key, holder)| (key.as_str(), holder.id.as_str()))
        .collect()
}

/// Here the server compiles each statement, as it does where it expects many rows: that takes longer than the statement.
#[tokio::test]
async fn statements_are_not_compiled() {
    const COMPILES: [&str; 4] = [
        "jit=on",
        "jit_above_cost=0",
        "jit_inline_above_cost=0",
        "jit_optimize_above_cost=0",
    ];
    let compiles = |mut config: Config| {
        config.options(COMPILES.map(|setting| format!("-c {setting}")).join(" "));
        config
    };
    let setting = setting(compiles, PATIENCE).await;
    setting
        .sql(
            "INSERT INTO {t} (key, until) \
             SELECT 'k' || n, clock_timestamp() - interval '2 minutes' FROM generate_series(1, 25000) n",
        )
        .await;
    let compiling = setting.server.client().await;
    let compiled = COMPILES.map(|setting| format!("SET {setting}")).join("; ");
    compiling.batch_execute(&compiled).await.unwrap();
    let other = format!(
        "SELECT key FROM {} WHERE key = 'k1' AND until > now()",
        setting.table
    );
    in_rounds(
        "it takes less time than a statement that is compiled",
        async || {
            let begun = Instant::now();
            for _ in 0..10 {
                let found = setting.locks.clone().inspect("k1".into()).await.unwrap();
                assert!(found.is_empty());
            }
            let ours = begun.elapsed();
            let begun = Instant::now();
            for _ in 0..10 {
                compiling.query(&other, &[]).await.unwrap();
            }
            let compiled = begun.elapsed();
            (ours < compiled).then_some(()).ok_or((ours, compiled))
        },
    )
    .await;
    assert_eq!(setting.locks.remove_free().await.unwrap(), 25_000);
    assert_eq!(setting.number("SELECT count(*) FROM {t}").await, 0);
}

#[tokio::test]
async fn removal_skips_rows_that_transactions_have_locked_and_ends() {
    let setting = setting(|config| config, PATIENCE).await;
    setting
        .sql(
            "INSERT INTO {t} (key, until, fence, tokens) \
             SELECT 'k' || n, clock_timestamp() - interval '2 minutes', n, 1 FROM generate_series(1, 12000) n",
        )
        .await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    let lock = format!("SELECT FROM {} WHERE fence <= 11000 FOR KEY SHARE", setting.table);
    assert_eq!(tx.execute(&lock, &[]).await.unwrap(), 11_000);
    within(PATIENCE, "it ends", setting.locks.remove_free())
        .await
        .unwrap();
    tx.commit().await.unwrap();
    let rest = setting.number("SELECT count(*) FROM {t}").await;
    assert!((11_000..=12_000).contains(&rest), "{rest}");
    let removed = setting.locks.remove_free().await.unwrap();
    assert_eq!(i64::try_from(removed).unwrap(), rest);
    assert_eq!(setting.number("SELECT max(fence) FROM {t}_floor").await, 12_001);
}

/// The server cancels a statement that takes longer than the store waits.
#[tokio::test]
async fn list_of_many_locks_is_read_in_pages() {
    let setting = setting(|config| config, SHORT).await;
    setting
        .sql(
            "INSERT INTO {t} (key, holder, kind, until) \
             SELECT 'a:' || n, 'h:' || n, 'lock', clock_timestamp() + interval '1 hour' FROM generate_series(1, 250000) n; \
             INSERT INTO {t} (key, holder, kind, until) \
             SELECT 'b:' || n, 'h:' || n, 'lock', clock_timestamp() + interval '1 hour' FROM generate_series(10001, 14000) n; \
             UPDATE {t} SET holder = '', until = 'epoch', read_until = clock_timestamp() + interval '1 hour' \
              WHERE key = 'b:12000'; \
             INSERT INTO {t}_readers (key, holder, era, fence, tokens, until) \
             SELECT 'b:12000', 'r:' || n, 0, n, 1, clock_timestamp() + interval '1 hour' FROM generate_series(1, 3) n; \
             UPDATE {t} SET holder = '#', kind = 'permit', number = 0, held = 2, until = 'infinity' WHERE key = 'b:12001'; \
             INSERT INTO {t}_permits (key, holder, owned, amount, fence, tokens, until) \
             VALUES ('b:12001', 'p:1', true, 2, 1, 1, clock_timestamp() + interval '1 hour'); \
             UPDATE {t} SET holder = '', until = 'epoch' WHERE key IN ('b:10001', 'b:14000'); \
             ANALYZE {t}",
        )
        .await;
    // A page that a busy machine holds up is no list that takes too long.
    let list = async |prefix: &str| {
        for _ in 0..9 {
            if let Ok(found) = setting.locks.clone().list(prefix.to_owned()).await {
                return found;
            }
        }
        setting.locks.clone().list(prefix.to_owned()).await.unwrap()
    };
    assert_eq!(list("a:").await.len(), 250_000);
    assert_eq!(list("").await.len(), 250_000 + 3998 + 2 + 1);
    assert!(list("a;").await.is_empty());
    assert!(list("c").await.is_empty());
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    assert!(setting.locks.lock_in(&tx, "b:14000").await.is_ok());
    let mut found = list("b:").await;
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    let (last, found) = found.split_last().unwrap();
    assert_eq!(last.0.as_str(), "b:14000");
    assert!(last.1.id.starts_with("transaction of process "), "{last:?}");
    let plain = (10_002..14_000).map(|n| vec![(format!("b:{n}"), format!("h:{n}"))]);
    let expected = plain.map(|plain| match plain[0].0.as_str() {
        "b:12000" => (1..=3)
            .map(|n| ("b:12000".to_owned(), format!("r:{n}")))
            .collect(),
        "b:12001" => vec![("b:12001".to_owned(), "p:1".to_owned()); 2],
        _ => plain,
    });
    let expected: Vec<(String, String)> = expected.flatten().collect();
    let expected: Vec<(&str, &str)> = expected.iter().map(|(key, id)| (&**key, &**id)).collect();
    assert_eq!(names(found), expected);
}

#[tokio::test]
async fn inspection_of_a_lock_reads_no_others() {
    let setting = setting(|config| config, PATIENCE).await;
    setting
        .sql(
            "INSERT INTO {t} (key, holder, kind, until) \
             SELECT 'k' || n, 'h:' || n, 'lock', clock_timestamp() + interval '1 hour' FROM generate_series(1, 20000) n; \
             INSERT INTO {t}_permits (key, holder, owned, amount, fence, tokens, until) \
             SELECT 's' || n, 'p:' || n, true, 1, 1, 1, clock_timestamp() + interval '1 hour' FROM generate_series(1, 20000) n; \
             ANALYZE {t}; ANALYZE {t}_permits",
        )
        .await;
    let inspect = async || {
        let holders = setting.locks.clone().inspect("k777".into()).await.unwrap();
        assert_eq!(holders.len(), 1);
        assert_eq!(holders[0].id, "h:777");
    };
    let read = setting.read_by_one(&setting.table, inspect).await;
    assert!(read < 100, "{read}");
    let permits = setting.read(&format!("{}_permits", setting.table)).await;
    assert!(permits < 20_000 * 4, "{permits}");
}

/// Each one has the row of the semaphore locked meanwhile.
#[tokio::test]
async fn acquire_of_a_busy_semaphore_reads_few_of_its_permits() {
    let setting = setting(|config| config, PATIENCE).await;
    let client = dlock::LockClient::builder().store((*setting.locks).clone());
    let client = client.build().await.unwrap();
    let semaphore = client.semaphore("s").permits(20_001);
    let permit = semaphore.try_acquire().await.unwrap();
    setting
        .sql(
            "INSERT INTO {t}_permits (key, holder, owned, amount, fence, tokens, until) \
             SELECT 's', 'p:' || n, true, 1, 1, 1, clock_timestamp() + interval '1 hour' FROM generate_series(1, 20000) n; \
             UPDATE {t} SET number = 0, held = 20001 WHERE key = 's'; ANALYZE {t}_permits",
        )
        .await;
    let busy = async || {
        let error = semaphore.try_acquire().await.unwrap_err();
        assert!(error.is_busy(), "{error}");
    };
    let permits = format!("{}_permits", setting.table);
    let read = setting.read_by_one(&permits, busy).await;
    assert!(read < 100, "{read}");
    // Those of processes that are gone come back.
    setting
        .sql("UPDATE {t}_permits SET until = clock_timestamp() - interval '1 s' WHERE holder LIKE 'p:1%'")
        .await;
    let next = semaphore.try_acquire().await.unwrap();
    let left = "SELECT count(*) FROM {t}_permits WHERE holder LIKE 'p:1%'";
    assert_eq!(setting.number(left).await, 0);
    next.release().await.unwrap();
    permit.release().await.unwrap();
}

#[tokio::test]
async fn list_on_mysql_is_read_in_pages() {
    let setting = mysql_support::setting().await;
    let far = "UNIX_TIMESTAMP() * 1000000 + 3600000000";
    for (key, from, to) in [
        ("a:", 1, 9),
        ("b:", 10_001, 13_000),
        ("b;", 1, 2),
        ("c:", 1, 2500),
    ] {
        setting
            .sql(&format!(
                "INSERT INTO {{t}} (k, holder, kind, until_us) \
                 SELECT CONCAT('{key}', seq), CONCAT('h:', seq), 'lock', {far} FROM seq_{from}_to_{to}"
            ))
            .await;
    }
    setting
        .sql("UPDATE {t} SET holder = '', until_us = 0 WHERE k IN ('b:10001', 'b:11000', 'b:13000')")
        .await;
    let list = async |prefix: &str| {
        let through = dlock_mysql::MysqlLocks::builder(setting.server.opts_at(setting.proxy.addr()));
        let through = through.table(&setting.table).timeout(PATIENCE).connect();
        let locks = Arc::new(through.await.unwrap());
        setting.proxy.forget();
        let found = locks.list(prefix.to_owned()).await.unwrap();
        let pages = setting.proxy.count(|request| request.runs("ORDER BY k LIMIT"));
        (found, pages)
    };
    let (found, pages) = list("b:").await;
    let expected: Vec<String> = (10_001..=13_000)
        .filter(|n| ![10_001, 11_000, 13_000].contains(n))
        .map(|n| format!("b:{n}"))
        .collect();
    let found: Vec<&str> = names(&found).into_iter().map(|(key, _)| key).collect();
    assert_eq!(found, expected);
    assert_eq!(pages, 4, "the last one is empty");
    let (all, pages) = list("").await;
    assert_eq!(all.len(), 9 + 2997 + 2 + 2500);
    assert_eq!(pages, 6);
    assert!(list("a;").await.0.is_empty());
    assert!(list("c:9999").await.0.is_empty());
}
