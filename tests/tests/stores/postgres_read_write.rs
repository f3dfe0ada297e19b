//! Read-write locks on PostgreSQL: what one row for the lock and one for each reader must keep, beside transactions that hold
//! the lock, processes that die, and tables of an earlier version.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::Error;
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, ReleaseReply, ReleaseRequest, RenewRequest, Renewal,
    Store,
};
use dlock_postgres::{HoldError, LockInError, PostgresLocks};
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::postgres::{Pooler, Postgres, fresh_table};
use dlock_tests::{Clock, child, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;
use tokio_postgres::{Client, Config};

use crate::postgres_support::{Setting, client, connected, setting_on};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
/// No test waits for its end.
const LEASE: Duration = Duration::from_secs(300);

async fn setting() -> Setting {
    setting_on(Postgres::shared().await).await
}

impl Setting {
    async fn db(&self) -> Client {
        self.server.client().await
    }

    async fn sql(&self, text: &str) {
        let text = text.replace("{t}", &self.table);
        self.db().await.batch_execute(&text).await.unwrap();
    }

    async fn number(&self, text: &str) -> i64 {
        let text = text.replace("{t}", &self.table);
        self.db().await.query_one(&text, &[]).await.unwrap().get(0)
    }

    fn store(&self) -> Arc<PostgresLocks> {
        Arc::new(self.here.clone())
    }

    async fn ask(&self, kind: Kind, number: u64, lease: Duration) -> AcquireReply {
        let request = AcquireRequest::new(kind, "k".into(), id(number), lease);
        self.store().acquire(request).await.unwrap()
    }

    async fn takes(&self, kind: Kind, number: u64, lease: Duration) -> u64 {
        match self.ask(kind, number, lease).await {
            AcquireReply::Acquired(granted) => granted.first_token,
            other => panic!("{kind} was not granted: {other:?}"),
        }
    }

    /// The lease that is said to be in the way.
    async fn refuses(&self, kind: Kind, number: u64) -> Option<Duration> {
        match self.ask(kind, number, LEASE).await {
            AcquireReply::Busy(busy) => busy.remaining,
            other => panic!("{kind} is not kept out: {other:?}"),
        }
    }

    async fn gives(&self, kind: Kind, number: u64) -> bool {
        let request = ReleaseRequest::new(kind, "k".into(), id(number));
        matches!(
            self.store().release(request).await.unwrap(),
            ReleaseReply::Released { .. }
        )
    }

    async fn renews(&self, kind: Kind, number: u64, lease: Duration) -> Renewal {
        let request = RenewRequest::new(kind, "k".into(), id(number), lease);
        let replies = self.store().renew(vec![request]).await.unwrap();
        replies.into_iter().next().unwrap().unwrap()
    }

    async fn holders(&self, key: &str) -> Vec<Holder> {
        self.store().inspect(key.into()).await.unwrap()
    }

    /// Whether the other process finds the lock held by a transaction, whose end nobody knows.
    async fn is_pinned_for_writers(&self) -> bool {
        match self.other.rw_lock("k").write().try_acquire().await {
            Err(Error::NotAcquired { remaining: None, .. }) => true,
            Err(error) if error.is_busy() => false,
            Err(error) => panic!("{error}"),
            Ok(guard) => panic!("it has {guard:?}"),
        }
    }

    async fn lets(&self, kind: dlock::LockKind) -> bool {
        match self.other.lock("k").kind(kind).try_acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(error) if error.is_busy() => false,
            Err(error) => panic!("{error}"),
        }
    }

    async fn lets_writers(&self) -> bool {
        self.lets(dlock::LockKind::Write).await
    }

    async fn lets_readers(&self) -> bool {
        self.lets(dlock::LockKind::Read).await
    }
}

fn id(number: u64) -> GrantId {
    GrantId::from_parts(7, number)
}

#[tokio::test]
async fn release_and_renewal_of_a_reader_name_its_grant_and_touch_no_other() {
    let setting = setting().await;
    for number in [1, 2] {
        setting.takes(Kind::Read, number, LEASE).await;
    }
    // Neither by a foreign id, nor as another kind.
    assert!(!setting.gives(Kind::Read, 3).await);
    assert!(!setting.gives(Kind::Write, 1).await);
    assert_eq!(setting.renews(Kind::Read, 3, LEASE).await, Renewal::Gone);
    assert_eq!(setting.renews(Kind::Write, 1, LEASE).await, Renewal::Gone);
    assert!(setting.gives(Kind::Read, 1).await);
    assert!(!setting.gives(Kind::Read, 1).await, "released twice");
    assert_eq!(setting.renews(Kind::Read, 1, LEASE).await, Renewal::Gone);
    assert_eq!(setting.renews(Kind::Read, 2, LEASE).await, Renewal::Renewed);
    setting.refuses(Kind::Write, 4).await;
    assert!(setting.gives(Kind::Read, 2).await);
    setting.takes(Kind::Write, 5, LEASE).await;
    assert_eq!(setting.renews(Kind::Read, 2, LEASE).await, Renewal::Gone);
    assert!(!setting.gives(Kind::Read, 5).await);
    assert!(setting.gives(Kind::Write, 5).await);
}

/// The end that writers are told follows the readers that are left, in both directions.
#[tokio::test]
async fn writer_is_told_the_end_of_the_last_lease_that_is_left() {
    let setting = setting().await;
    setting.takes(Kind::Read, 1, LEASE).await;
    setting.takes(Kind::Read, 2, 60 * SEC).await;
    assert!(setting.refuses(Kind::Write, 3).await.unwrap() > 200 * SEC);
    assert!(setting.gives(Kind::Read, 1).await);
    assert!(setting.refuses(Kind::Write, 4).await.unwrap() <= 60 * SEC);
    assert_eq!(setting.renews(Kind::Read, 2, LEASE).await, Renewal::Renewed);
    assert!(setting.refuses(Kind::Write, 5).await.unwrap() > 200 * SEC);
    assert_eq!(setting.renews(Kind::Read, 2, 60 * SEC).await, Renewal::Renewed);
    assert!(setting.refuses(Kind::Write, 6).await.unwrap() <= 60 * SEC);
}

#[tokio::test]
async fn reader_that_expired_is_not_counted() {
    let setting = setting().await;
    setting.takes(Kind::Read, 1, 150 * MS).await;
    setting.takes(Kind::Read, 2, LEASE).await;
    sleep(300 * MS).await;
    assert_eq!(setting.renews(Kind::Read, 1, LEASE).await, Renewal::Gone);
    assert!(!setting.gives(Kind::Read, 1).await);
    assert_eq!(setting.holders("k").await.len(), 1);
    setting.refuses(Kind::Write, 3).await;
    assert!(setting.gives(Kind::Read, 2).await);
    setting.takes(Kind::Write, 4, LEASE).await;
    // Its row is there yet, and of another era.
    assert_eq!(setting.number("SELECT count(*) FROM {t}_readers").await, 1);
    assert_eq!(setting.holders("k").await.len(), 1);
}

/// The other process: it reads, and dies.
#[tokio::test]
#[ignore = "it is what a test starts as another process"]
async fn as_another_process() {
    let var = |name: &str| std::env::var(name).unwrap();
    let config: Config = var("READER_URL").parse().unwrap();
    let locks = connected(config, &var("READER_TABLE")).await;
    let client = client(&locks).await;
    let guard = client.rw_lock("k").read().lease(2 * SEC).acquire().await.unwrap();
    guard.check().unwrap();
    std::process::abort();
}

#[tokio::test]
async fn writer_is_kept_out_until_the_lease_of_a_killed_reader_ends() {
    let setting = setting().await;
    let reading = setting.one.rw_lock("k").read().acquire().await.unwrap();
    let mut command = child::command(std::env::current_exe().unwrap());
    let test = [
        "--exact",
        "postgres_read_write::as_another_process",
        "--ignored",
        "--nocapture",
    ];
    command
        .args(test)
        .env("READER_URL", setting.server.url_at(setting.server.addr()))
        .env("READER_TABLE", &setting.table)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let begun = Instant::now();
    let mut process = child::spawn(command).unwrap();
    eventually("the process is dead", || {
        std::future::ready(process.try_wait().unwrap().is_some())
    })
    .await;
    let died = Instant::now();
    let left = setting.number("SELECT count(*) FROM {t}_readers").await;
    assert_eq!(left, 2, "it died as a reader");
    reading.release().await.unwrap();
    assert!(!setting.lets_writers().await || begun.elapsed() >= 2 * SEC);
    let writing = within(
        PATIENCE,
        "the lease ends",
        setting.other.rw_lock("k").write().acquire(),
    );
    drop(writing.await.unwrap());
    assert!(begun.elapsed() >= 2 * SEC, "{:?}", begun.elapsed());
    assert!(
        died.elapsed() < 20 * SEC,
        "{:?}: much later than its lease",
        died.elapsed()
    );
}

/// Sixteen tasks of four processes; a counter shows whether two are inside that must not be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_that_race_never_overlap_and_tokens_of_writers_grow() {
    const WRITER: i64 = 1 << 32;
    let setting = setting().await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(client(&connected(setting.server.config(), &setting.table).await).await);
    }
    let inside = Arc::new(AtomicI64::new(0));
    let (written, together) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicI64::new(0)));
    let tasks = (0..16_usize).map(|task| {
        let lock = clients[task % 4].rw_lock("k");
        let (inside, written, together) = (inside.clone(), written.clone(), together.clone());
        tokio::spawn(async move {
            for round in 0..25_usize {
                let writes = (task + round) % 5 == 0;
                let side = if writes { lock.write() } else { lock.read() };
                let guard = within(PATIENCE, "it is served", side.acquire()).await.unwrap();
                let step = if writes { WRITER } else { 1 };
                let before = inside.fetch_add(step, Ordering::SeqCst);
                if writes {
                    assert_eq!(before, 0, "a writer is not alone");
                    let last = written.swap(guard.fencing_token(), Ordering::SeqCst);
                    assert!(guard.fencing_token() > last, "{last}");
                } else {
                    assert!(before < WRITER, "a reader is beside a writer");
                    assert!(guard.fencing_token() > written.load(Ordering::SeqCst));
                    together.fetch_max(before + 1, Ordering::SeqCst);
                }
                sleep(fastrand::u32(0..3) * MS).await;
                inside.fetch_sub(step, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        })
    });
    for done in join_all(tasks).await {
        done.unwrap();
    }
    assert!(together.load(Ordering::SeqCst) > 1, "readers share");
    assert!(setting.holders("k").await.is_empty());
}

/// Each finds the row locked by the others for a moment, and none of them is told that the lock is busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_come_at_once_are_all_admitted_at_their_first_request() {
    let setting = setting().await;
    let stores = join_all((0..8).map(|_| connected(setting.server.config(), &setting.table))).await;
    for round in 0..10 {
        let asks = stores.iter().zip(1..).map(|(store, number)| {
            let request = AcquireRequest::new(Kind::Read, "k".into(), id(round * 100 + number), LEASE);
            Arc::new(store.clone()).acquire(request)
        });
        let mut tokens: Vec<u64> = join_all(asks)
            .await
            .into_iter()
            .map(|reply| match reply.unwrap() {
                AcquireReply::Acquired(granted) => granted.first_token,
                other => panic!("{round}: {other:?}"),
            })
            .collect();
        tokens.sort_unstable();
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
        let ends = stores.iter().zip(1..).map(|(store, number)| {
            let request = ReleaseRequest::new(Kind::Read, "k".into(), id(round * 100 + number));
            Arc::new(store.clone()).release(request)
        });
        for reply in join_all(ends).await {
            assert!(matches!(reply.unwrap(), ReleaseReply::Released { .. }));
        }
        let count = |what: &str| format!("SELECT count(*) FROM {{t}}{what}");
        assert_eq!(setting.number(&count("_readers")).await, 0);
        assert_eq!(
            setting
                .number(&count(" WHERE read_until > clock_timestamp()"))
                .await,
            0
        );
    }
}

#[tokio::test]
async fn transaction_of_a_writer_keeps_readers_and_writers_out_beyond_its_lease_and_release() {
    for released in [false, true] {
        let setting = setting().await;
        let writer = setting.one.rw_lock("k").write();
        let mut db = setting.db().await;
        let tx = db.transaction().await.unwrap();
        let guard = writer.fixed_lease(1000 * MS).acquire().await.unwrap();
        setting.here.hold_in(&tx, &guard).await.unwrap();
        match released {
            true => guard.release().await.unwrap(),
            false => sleep(1000 * MS).await,
        }
        assert!(setting.is_pinned_for_writers().await, "{released}");
        assert!(!setting.lets_readers().await, "{released}");
        let error = setting.other.force_release("k").await.unwrap_err().to_string();
        assert!(error.contains("holds"), "{error}");
        tx.commit().await.unwrap();
        assert!(setting.lets_readers().await, "{released}");
        assert!(setting.lets_writers().await, "{released}");
    }
}

#[tokio::test]
async fn transaction_of_a_reader_keeps_writers_out_and_lets_readers_in() {
    for released in [false, true] {
        let setting = setting().await;
        let reader = setting.one.rw_lock("k").read();
        let mut db = setting.db().await;
        let tx = db.transaction().await.unwrap();
        let guard = reader.fixed_lease(3 * SEC).acquire().await.unwrap();
        setting.here.hold_in(&tx, &guard).await.unwrap();
        assert!(setting.lets_readers().await);
        match released {
            true => guard.release().await.unwrap(),
            false => sleep(3 * SEC).await,
        }
        assert!(setting.is_pinned_for_writers().await, "{released}");
        assert!(!setting.lets(dlock::LockKind::Mutex).await);
        assert!(setting.lets_readers().await, "{released}");
        assert!(setting.is_pinned_for_writers().await, "after another reader");
        let error = setting.other.force_release("k").await.unwrap_err().to_string();
        assert!(error.contains("holds"), "{error}");
        tx.commit().await.unwrap();
        assert!(setting.lets_writers().await, "{released}");
    }
}

/// A read that goes on after the write lock around it has ended does not let others beside the transaction of the writer.
#[tokio::test]
async fn read_nested_in_a_write_lock_lets_no_reader_beside_the_transaction_of_the_writer() {
    let setting = setting().await;
    let writing = setting.one.rw_lock("k").write().acquire().await.unwrap();
    let mut db = setting.db().await;
    let tx = db.transaction().await.unwrap();
    setting.here.hold_in(&tx, &writing).await.unwrap();
    let reading = writing.downgrade().await.unwrap();
    assert!(!setting.lets_readers().await);
    assert!(!setting.lets_writers().await);
    tx.commit().await.unwrap();
    assert!(setting.lets_readers().await);
    assert!(!setting.lets_writers().await);
    reading.release().await.unwrap();
    assert!(setting.lets_writers().await);
}

#[tokio::test]
async fn reader_that_others_came_after_is_not_held_in_a_transaction() {
    let setting = setting().await;
    let mut db = setting.db().await;
    for how in ["a writer", "a transaction", "force"] {
        let reader = setting.one.rw_lock("k").read();
        let guard = reader.lease(60 * SEC).acquire().await.unwrap();
        if how == "force" {
            assert!(setting.other.force_release("k").await.unwrap());
        } else {
            // Its lease is over on the server, of which it does not know.
            setting
                .sql("UPDATE {t} SET read_until = 'epoch'; UPDATE {t}_readers SET until = 'epoch'")
                .await;
            match how {
                "a writer" => assert!(setting.lets_writers().await),
                _ => {
                    let tx = db.transaction().await.unwrap();
                    setting.here.lock_in(&tx, "k").await.unwrap();
                    tx.commit().await.unwrap();
                }
            }
        }
        let tx = db.transaction().await.unwrap();
        let held = setting.here.hold_in(&tx, &guard).await;
        assert!(matches!(held, Err(HoldError::Lost { .. })), "{how}: {held:?}");
        drop(tx);
        drop(guard);
    }
}

#[tokio::test]
async fn transaction_that_is_a_lock_finds_readers_and_is_found_by_them() {
    let setting = setting().await;
    let mut db = setting.db().await;
    let guard = setting
        .one
        .rw_lock("k")
        .read()
        .lease(60 * SEC)
        .acquire()
        .await
        .unwrap();
    let tx = db.transaction().await.unwrap();
    let busy = setting.here.lock_in(&tx, "k").await;
    let Err(LockInError::Busy {
        remaining: Some(left),
        ..
    }) = busy
    else {
        panic!("{busy:?}");
    };
    assert!(left <= 60 * SEC, "{left:?}");
    let by_sql = format!("SELECT \"{}_lock_in\"('k')", setting.table);
    let token: Option<i64> = tx.query_one(&by_sql, &[]).await.unwrap().get(0);
    assert_eq!(token, None);
    let read = guard.fencing_token();
    guard.release().await.unwrap();
    let token = setting.here.lock_in(&tx, "k").await.unwrap();
    assert!(token > read, "{token} after {read}");
    assert!(!setting.lets_readers().await);
    tx.commit().await.unwrap();
    assert!(setting.lets_readers().await);
}

/// As other languages hold it.
#[tokio::test]
async fn token_of_a_reader_holds_the_lock_by_sql() {
    let setting = setting().await;
    let (one, two) = (
        setting.takes(Kind::Read, 1, LEASE).await,
        setting.takes(Kind::Read, 2, LEASE).await,
    );
    assert!(setting.gives(Kind::Read, 2).await);
    let mut db = setting.db().await;
    let hold = |token: u64| format!("SELECT \"{}_hold_in\"('k', {token})", setting.table);
    let error = db.batch_execute(&hold(two)).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "DLK01", "{error}");
    let tx = db.transaction().await.unwrap();
    tx.batch_execute(&hold(one)).await.unwrap();
    assert!(setting.gives(Kind::Read, 1).await);
    assert!(setting.is_pinned_for_writers().await);
    tx.commit().await.unwrap();
    // And that of a writer that reads as well.
    let guard = setting.one.rw_lock("k").write().local_handoffs(0);
    let guard = guard.acquire().await.unwrap();
    let held = guard.fencing_token();
    setting
        .sql("UPDATE {t} SET read_next = fence + 1000, read_until = clock_timestamp() + interval '1 hour'")
        .await;
    db.batch_execute(&hold(held)).await.unwrap();
}

#[tokio::test]
async fn writer_and_readers_are_shown_and_ended_by_force() {
    let setting = setting().await;
    let writing = setting.one.rw_lock("k").write().acquire().await.unwrap();
    let shown = setting.holders("k").await;
    assert_eq!(
        shown.iter().map(|holder| holder.kind).collect::<Vec<_>>(),
        [Kind::Write]
    );
    let reading = writing.downgrade().await.unwrap();
    let another = setting.other.rw_lock("k").read().acquire().await.unwrap();
    for shown in [
        setting.holders("k").await,
        (setting.other.list("").await.unwrap().into_iter())
            .inspect(|(key, _)| assert_eq!(key.as_str(), "k"))
            .map(|(_, holder)| holder)
            .collect(),
    ] {
        let is_reader =
            |holder: &Holder| holder.kind == Kind::Read && holder.holds == 1 && holder.remaining.is_some();
        assert!(shown.len() == 2 && shown.iter().all(is_reader), "{shown:?}");
    }
    // A waiter hears of it.
    let writer = tokio::spawn(setting.one.rw_lock("k").write().acquire());
    sleep(300 * MS).await;
    assert!(!writer.is_finished());
    assert!(setting.other.force_release("k").await.unwrap());
    let writing = within(PATIENCE, "the writer goes on", writer)
        .await
        .unwrap()
        .unwrap();
    assert!(writing.fencing_token() > another.fencing_token());
    let shown = setting.holders("k").await;
    assert_eq!(
        shown.iter().map(|holder| holder.kind).collect::<Vec<_>>(),
        [Kind::Write]
    );
    for reader in [reading, another] {
        let released = reader.release().await;
        assert!(released.is_err_and(|error| error.is_lost()), "force has ended it");
    }
    writing.check().expect("a reader's release ends no writer");
    assert!(setting.other.force_release("k").await.unwrap());
    assert!(!setting.other.force_release("k").await.unwrap(), "it is free");
}

#[tokio::test]
async fn rows_of_readers_are_removed_and_tokens_grow_all_the_same() {
    let setting = setting().await;
    // Far ahead of the clock.
    setting
        .sql("INSERT INTO {t} (key, read_next) VALUES ('k', 5000000000000000)")
        .await;
    let before = setting.takes(Kind::Read, 1, LEASE).await;
    assert_eq!(before, 5_000_000_000_000_000);
    setting
        .sql("UPDATE {t} SET until = clock_timestamp() - interval '2 minutes'")
        .await;
    assert_eq!(setting.here.remove_free().await.unwrap(), 0, "it is held");
    setting
        .sql(
            "UPDATE {t} SET read_until = clock_timestamp() - interval '2 minutes';
             UPDATE {t}_readers SET until = clock_timestamp() - interval '2 minutes'",
        )
        .await;
    assert_eq!(setting.here.remove_free().await.unwrap(), 1);
    assert_eq!(setting.number("SELECT count(*) FROM {t}_readers").await, 0);
    assert!(setting.takes(Kind::Write, 2, LEASE).await > before);
}

/// A table as the version before read-write locks made it, with a lock that is held.
#[tokio::test]
async fn schema_upgrades_a_table_of_the_version_before_and_waits_for_no_transaction_after_that() {
    let setting = setting().await;
    let guard = setting.one.lock("plain").acquire().await.unwrap();
    setting
        .sql(
            "DROP FUNCTION {t}_leave, {t}_extend; DROP TABLE {t}_readers;
             ALTER TABLE {t} DROP COLUMN era, DROP COLUMN read_next, DROP COLUMN read_until",
        )
        .await;
    setting.here.create_table().await.unwrap();
    let fresh = connected(setting.server.config(), &setting.table).await;
    let other = client(&fresh).await;
    assert!(other.lock("plain").try_acquire().await.unwrap_err().is_busy());
    let reading = other.rw_lock("k").read().acquire().await.unwrap();
    let mut db = setting.db().await;
    let tx = db.transaction().await.unwrap();
    fresh.hold_in(&tx, &reading).await.unwrap();
    within(PATIENCE, "it is made again", fresh.create_table())
        .await
        .unwrap();
    tx.commit().await.unwrap();
    reading.release().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn set_of_reads_and_writes_is_granted_as_a_whole_or_not_at_all() {
    let setting = setting().await;
    let set = |number: u64| {
        let request = |kind, key: &str, number| AcquireRequest::new(kind, key.into(), id(number), LEASE);
        let all = vec![
            request(Kind::Read, "a", number),
            request(Kind::Write, "b", number + 1),
            request(Kind::Mutex, "c", number + 2),
        ];
        setting.store().acquire_all(all)
    };
    let reader = setting.other.rw_lock("b").read().acquire().await.unwrap();
    let reply = set(10).await.unwrap();
    assert!(
        matches!(reply, dlock::store::AcquireAllReply::Busy { at: 1, .. }),
        "{reply:?}"
    );
    assert!(setting.holders("a").await.is_empty());
    reader.release().await.unwrap();
    let reply = set(20).await.unwrap();
    assert!(
        matches!(&reply, dlock::store::AcquireAllReply::Acquired { grants } if grants.len() == 3),
        "{reply:?}"
    );
    let reply = set(30).await.unwrap();
    assert!(
        matches!(reply, dlock::store::AcquireAllReply::Busy { at: 1, .. }),
        "{reply:?}"
    );
    assert_eq!(setting.holders("a").await.len(), 1);
}

/// As the defaults of a database may have it, where a transaction pooler lets nobody change them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stricter_isolation_by_default_makes_no_reader_fail_or_count_twice() {
    let server = Arc::new(Postgres::start().await);
    let database = server.config().get_dbname().unwrap().to_owned();
    let strict = format!("ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'");
    server.client().await.batch_execute(&strict).await.unwrap();
    let table = fresh_table();
    let maker = connected(server.config(), &table).await;
    maker.create_table().await.unwrap();
    let pooler = Pooler::start(&server, "transaction").await;
    let stores = join_all((0..4).map(|_| connected(server.config_at(pooler.addr()), &table))).await;
    let inside = Arc::new(AtomicI64::new(0));
    let tasks = stores.into_iter().zip(1..).map(|(store, process)| {
        let (store, inside) = (Arc::new(store), inside.clone());
        tokio::spawn(async move {
            let mut granted = 0;
            for n in 0..60 {
                let (kind, step) = match n % 4 {
                    0 => (Kind::Write, 1 << 32),
                    _ => (Kind::Read, 1),
                };
                let grant = id(process * 1000 + n);
                let request = AcquireRequest::new(kind, "k".into(), grant, LEASE);
                if let AcquireReply::Acquired(_) = store.clone().acquire(request).await.unwrap() {
                    let before = inside.fetch_add(step, Ordering::SeqCst);
                    assert!(
                        before < 1 << 32 && (kind == Kind::Read || before == 0),
                        "{before}"
                    );
                    granted += 1;
                    inside.fetch_sub(step, Ordering::SeqCst);
                    let released = store
                        .clone()
                        .release(ReleaseRequest::new(kind, "k".into(), grant));
                    let released = released.await.unwrap();
                    assert!(matches!(released, ReleaseReply::Released { .. }), "{released:?}");
                }
            }
            granted
        })
    });
    let granted: usize = join_all(tasks).await.into_iter().map(Result::unwrap).sum();
    assert!(granted > 0);
    let left = maker.clone();
    assert!(Arc::new(left).inspect("k".into()).await.unwrap().is_empty());
}

#[tokio::test]
async fn preference_of_writers_is_refused_with_what_there_is() {
    let setting = setting().await;
    let writer = setting.one.rw_lock("k").prefer_writers().write();
    let error = writer.acquire().await.unwrap_err();
    assert!(
        matches!(error, Error::Unsupported { .. }) && error.to_string().contains("PostgreSQL"),
        "{error}"
    );
}

#[tokio::test]
async fn table_in_a_schema_with_capital_letters_has_readers() {
    let server = Postgres::shared().await;
    let name = format!("public.{}", fresh_table().to_uppercase());
    let locks = connected(server.config(), &name).await;
    for _ in 0..2 {
        locks.create_table().await.unwrap();
        let client = client(&locks).await;
        let reading = client.rw_lock("k").read().acquire().await.unwrap();
        assert!(
            client
                .rw_lock("k")
                .write()
                .try_acquire()
                .await
                .unwrap_err()
                .is_busy()
        );
        reading.release().await.unwrap();
        let writing = client.rw_lock("k").write().acquire().await.unwrap();
        writing.release().await.unwrap();
    }
}

/// The time at which the last of them left counts for nothing then.
#[tokio::test]
async fn lock_that_readers_left_is_free_though_the_clock_goes_back() {
    let clock = Clock::new().expect("libfaketime");
    clock.set(4 * HOUR).expect("its file can be written");
    let s = setting_on(Arc::new(Postgres::start_by(Some(&clock)).await)).await;
    for (back, end) in [(3, "released"), (2, "expired"), (1, "transaction"), (0, "forced")] {
        let lease = if matches!(end, "expired" | "transaction") {
            MS
        } else {
            LEASE
        };
        s.takes(Kind::Read, 1, lease).await;
        match end {
            "released" => assert!(s.gives(Kind::Read, 1).await),
            "forced" => assert!(s.other.force_release("k").await.unwrap()),
            "expired" => {
                sleep(20 * MS).await;
                s.takes(Kind::Write, 2, LEASE).await;
                assert!(s.gives(Kind::Write, 2).await);
            }
            _ => {
                sleep(20 * MS).await;
                let mut db = s.db().await;
                let tx = db.transaction().await.unwrap();
                s.here.lock_in(&tx, "k").await.unwrap();
                tx.commit().await.unwrap();
            }
        }
        clock.set(back * HOUR).expect("its file can be written");
        eventually("the clock went back", async || {
            let ahead = "SELECT (extract(epoch FROM clock_timestamp()))::int8";
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap();
            s.number(ahead).await < (now + back * HOUR + HOUR / 2).as_secs() as i64
        })
        .await;
        s.takes(Kind::Write, 3, LEASE).await;
        assert!(s.gives(Kind::Write, 3).await, "{end}");
    }
}
