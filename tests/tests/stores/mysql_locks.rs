//! Locks on MariaDB: what is promised, and what went wrong elsewhere.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, Outcome, Reason, Renewal, Store};
use dlock::{Error, HoldState, LockClient};
use dlock_mysql::MysqlLocks;
use dlock_tests::faults::{PATIENCE, answered, in_rounds, within};
use dlock_tests::mysql::Mysql;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use tokio::time::{Instant, sleep};

use crate::mysql_conformance::Table;
use crate::mysql_support::{client, connected, setting};
use crate::scenes::{LEASE, MS, Rows, SEC, ask, end, in_scenes, is_released, renewal, renewed, row, token};

in_scenes! { Table:
    /// Check, then write, makes two first holders; so does an insert that finds the row of another.
    fn of_many_processes_at_an_absent_or_expired_row_one_wins() = one_of_many_processes_wins(Mysql::shared());
    /// A token that is drawn before the row is locked goes back now and then.
    fn tokens_of_many_processes_never_go_back() = tokens_never_go_back(Mysql::shared());
    /// Renewing by name, or by an upsert, makes two holders.
    fn renewal_after_a_take_over_or_a_loss_of_all_rows_changes_nothing() = renewal_revives_no_lock(Mysql::shared());
    fn acquire_that_comes_late_takes_nothing() = late_acquire_takes_nothing(Mysql::shared());
    fn release_waits_until_a_late_acquire_can_do_nothing_any_more() = release_waits_for_a_late_acquire(Mysql::shared());
    /// Each verb, with its request or its reply lost: it tells truly what is known, and what follows is right.
    fn lost_requests_and_replies_leave_nothing_wrong() = lost_requests_and_replies_leave_nothing_wrong(Mysql::shared());
    fn lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told() = lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told(Mysql::shared());
    fn lost_renewals_cost_no_lock() = lost_renewals_cost_no_lock(Mysql::shared());
    fn what_waits_to_be_sent_goes_together() = what_waits_goes_together(Mysql::shared());
    /// The driver tells the failure of a statement only after the header of its reply, as it seems of the next one.
    fn key_that_the_server_refuses_costs_no_other_key() = refused_key_costs_no_other_key(Mysql::shared());
}

#[tokio::test]
async fn tokens_grow_though_rows_are_removed_and_the_clock_is_behind() {
    let setting = setting().await;
    let store = &setting.patient;
    // Far ahead of the clock.
    setting
        .sql("INSERT INTO {t} (k, fence, tokens) VALUES ('k', 5000000000000000, 9)")
        .await;
    let before = token(store.clone().acquire(ask("k", 1, LEASE)).await);
    assert_eq!(before, 5_000_000_000_000_009);
    assert_eq!(store.remove_free().await.unwrap(), 0, "it is held");
    assert!(is_released(&store.clone().release(end("k", 1)).await));
    assert_eq!(
        store.remove_free().await.unwrap(),
        0,
        "it is free for a moment only"
    );
    setting.expire().await;
    assert_eq!(store.remove_free().await.unwrap(), 1);
    assert_eq!(setting.number("SELECT COUNT(*) FROM {t}").await, 0);
    assert!(token(store.clone().acquire(ask("k", 2, LEASE)).await) > before);
}

/// In a transaction of its own it would hold up every new key, in all processes, for as long as it stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_stands_still_while_it_removes_rows_holds_up_nobody() {
    let setting = setting().await;
    let behind = setting.server.opts_at(setting.proxy.addr());
    let behind = connected(behind, &setting.table, PATIENCE).await;
    for (statement, number) in [
        ("FOR UPDATE SKIP LOCKED", 1),
        ("_floor` (one", 2),
        ("DELETE FROM", 3),
    ] {
        let (old, new) = (format!("old {number}"), format!("new {number}"));
        token(
            setting
                .patient
                .clone()
                .acquire(ask(&old, 10 + number, LEASE))
                .await,
        );
        assert!(is_released(
            &setting.patient.clone().release(end(&old, 10 + number)).await
        ));
        setting.expire().await;
        let held = setting.proxy.hold(1, move |request| request.runs(statement));
        let removing = tokio::spawn({
            let behind = behind.clone();
            async move { behind.remove_free().await }
        });
        held.caught().await;
        for (key, number) in [(&new, 20 + number), (&old, 30 + number)] {
            token(setting.patient.clone().acquire(ask(key, number, LEASE)).await);
        }
        held.release();
        within(PATIENCE, "the rows are removed", removing)
            .await
            .unwrap()
            .unwrap();
        for (key, number) in [(&new, 20 + number), (&old, 30 + number)] {
            let renewed = renewed(&setting.patient, key, number, LEASE).await.unwrap();
            assert_eq!(renewed, Renewal::Renewed, "{key}");
        }
    }
}

/// A key is what it is byte by byte: collations take `Key`, `kEy ` and `kéy` for one.
#[tokio::test]
async fn keys_differ_by_case_accents_and_spaces_at_the_end() {
    let setting = setting().await;
    let keys = ["key", "Key", "kéy", "key ", "key  ", "ke\u{301}y", "ключ", "鍵"];
    for (key, number) in keys.iter().zip(1..) {
        token(setting.patient.clone().acquire(ask(key, number, LEASE)).await);
    }
    for (key, number) in keys.iter().zip(1..) {
        let held = setting.patient.clone().inspect((*key).into()).await.unwrap();
        assert_eq!(held.len(), 1, "{key}");
        assert!(
            is_released(&setting.patient.clone().release(end(key, number)).await),
            "{key}"
        );
    }
}

/// Grants that are there and grants that are not share a statement.
#[tokio::test]
async fn each_grant_of_a_statement_is_renewed_or_gone_by_itself() {
    let setting = setting().await;
    let store = &setting.patient;
    for n in 1..=20 {
        token(store.clone().acquire(ask(&format!("k{n}"), n, LEASE)).await);
    }
    setting
        .sql("UPDATE {t} SET until_us = 1 WHERE k IN ('k3', 'k7')")
        .await;
    assert!(is_released(&store.clone().release(end("k11", 11)).await));
    let all = (1..=20).map(|n| renewal(&format!("k{n}"), n, LEASE)).collect();
    let replies = store.clone().renew(all).await.unwrap();
    for (reply, n) in replies.iter().zip(1..) {
        let expected = match n {
            3 | 7 | 11 => Renewal::Gone,
            _ => Renewal::Renewed,
        };
        assert!(matches!(reply, Ok(found) if *found == expected), "{n}: {reply:?}");
    }
}

/// `NOW` is the time at which a statement began: a lease that is counted from it is over after a long wait for the row.
#[tokio::test]
async fn lease_after_a_locked_row_is_whole() {
    let setting = setting().await;
    let store = &setting.patient;
    row(store, "k").await;
    let mut locked = setting.locked("k").await;
    let asked = tokio::spawn(store.clone().acquire(ask("k", 1, 700 * MS)));
    sleep(850 * MS).await;
    let committed = Instant::now();
    locked.query_drop("COMMIT").await.unwrap();
    token(asked.await.unwrap());
    let until = setting.number("SELECT until_us FROM {t}").await;
    let now = "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)";
    let left = until - setting.number(now).await;
    let passed = i64::try_from(committed.elapsed().as_micros()).unwrap();
    assert!(left + passed > 650_000, "{left} {passed}");
}

/// Dead-locks and time-outs of row locks are neither a loss nor a release; others have their rows in the meantime.
#[tokio::test]
async fn dead_locks_and_lock_waits_are_neither_a_loss_nor_a_release() {
    let setting = setting().await;
    for failure in [1213, 1205] {
        let here = client(&setting.patient).await;
        let guard = here.lock("k").acquire().await.unwrap();
        setting
            .sql(&format!(
                "CREATE TRIGGER {}_fails BEFORE UPDATE ON {{t}} FOR EACH ROW IF RAND() < 0.5 THEN \
                 SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {failure}, MESSAGE_TEXT = 'for a test'; END IF",
                setting.table
            ))
            .await;
        for n in 0..10 {
            let key = format!("k{n}");
            let other = within(PATIENCE, "acquired", here.lock(key).acquire())
                .await
                .unwrap();
            within(PATIENCE, "released", other.release()).await.unwrap();
        }
        let number = guard.fencing_token();
        assert_eq!(guard.state(), HoldState::Held, "{failure} {number}");
        within(PATIENCE, "released", guard.release()).await.unwrap();
        setting
            .sql(&format!("DROP TRIGGER {}_fails", setting.table))
            .await;
        assert_eq!(
            setting
                .number("SELECT COUNT(*) FROM {t} WHERE holder <> ''")
                .await,
            0
        );
    }
}

/// A transaction that keeps a row locked for long costs the locks of other keys some time, and nothing else.
#[tokio::test]
async fn row_that_is_locked_for_long_holds_up_no_other_key() {
    let setting = setting().await;
    let store = &setting.patient;
    row(store, "stuck").await;
    token(store.clone().acquire(ask("a", 1, LEASE)).await);
    token(store.clone().acquire(ask("stuck", 2, LEASE)).await);
    let mut locked = setting.locked("stuck").await;
    let both = vec![renewal("a", 1, LEASE), renewal("stuck", 2, LEASE)];
    let renewing = tokio::spawn(store.clone().renew(both));
    let other = token(store.clone().acquire(ask("b", 3, LEASE)).await);
    assert!(other > 0);
    let mut replies = renewing.await.unwrap().unwrap();
    // It was locked all the time: the renewal of the other one went alone.
    assert_eq!(replies.remove(0).unwrap(), Renewal::Renewed);
    let stuck = replies.remove(0);
    assert!(
        matches!(&stuck, Err(error) if error.outcome == Outcome::NotDone) || stuck.is_ok(),
        "{stuck:?}"
    );
    locked.query_drop("COMMIT").await.unwrap();
    assert_eq!(renewed(store, "stuck", 2, LEASE).await.unwrap(), Renewal::Renewed);
}

/// The time to keep it counts from the call. The server ends a wait for a row after a second.
#[tokio::test]
async fn release_that_another_transaction_delays_keeps_the_lock_no_longer() {
    let setting = setting().await;
    let store = &setting.patient;
    row(store, "k").await;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    let mut locked = setting.locked("k").await;
    let mut release = end("k", 1);
    release.keep_for = SEC;
    let delayed = tokio::spawn(store.clone().release(release));
    sleep(3 * SEC).await;
    assert!(!delayed.is_finished());
    locked.query_drop("COMMIT").await.unwrap();
    assert!(is_released(&delayed.await.unwrap()));
    token(store.clone().acquire(ask("k", 2, LEASE)).await);
}

/// The server ends its wait for the row after a second. The release of the lock is repeated, and that of no other one.
#[tokio::test]
async fn release_that_waited_too_long_for_its_row_is_repeated() {
    let setting = setting().await;
    let store = &setting.patient;
    let keys: Vec<String> = (0..8).map(|n| format!("k{n}")).collect();
    for (key, n) in keys.iter().zip(1..) {
        token(store.clone().acquire(ask(key, n, LEASE)).await);
    }
    let mut locked = setting.locked("k4").await;
    let releases = keys.iter().zip(1..);
    let releases = releases.map(|(key, n)| tokio::spawn(store.clone().release(end(key, n))));
    let mut releases: Vec<_> = releases.collect();
    let stuck = releases.remove(4);
    for release in releases {
        assert!(is_released(&release.await.unwrap()));
    }
    sleep(2 * SEC).await;
    assert!(!stuck.is_finished());
    locked.query_drop("COMMIT").await.unwrap();
    assert!(is_released(&stuck.await.unwrap()));
}

/// What waits to be sent goes together, also the release of a lock whose row a transaction keeps locked.
#[tokio::test]
async fn renewal_is_done_before_a_release_that_waits_for_its_row() {
    let setting = setting().await;
    let store = &setting.patient;
    token(store.clone().acquire(ask("a", 1, LEASE)).await);
    let until = "SELECT until_us FROM {t} WHERE k = 'a'";
    in_rounds("the renewal is done while its reply waits", async || {
        token(store.clone().acquire(ask("stuck", 2, LEASE)).await);
        let mut locked = setting.locked("stuck").await;
        let before = setting.number(until).await;
        let releasing = tokio::spawn(store.clone().release(end("stuck", 2)));
        let renewing = tokio::spawn(store.clone().renew(vec![renewal("a", 1, LEASE)]));
        within(PATIENCE, "renewed", async {
            while setting.number(until).await <= before {
                sleep(5 * MS).await;
            }
        })
        .await;
        sleep(200 * MS).await;
        let waits = !renewing.is_finished();
        locked.query_drop("COMMIT").await.unwrap();
        assert!(is_released(&releasing.await.unwrap()));
        let mut renewed = renewing.await.unwrap().unwrap();
        assert_eq!(renewed.remove(0).unwrap(), Renewal::Renewed);
        if waits { Ok(()) } else { Err("renewed by itself") }
    })
    .await;
}

/// The server waits for a row as long as the store for a reply, by default: a renewal that waits with the others costs all.
#[tokio::test]
async fn row_that_is_locked_costs_no_other_renewal_its_time_limit() {
    let setting = setting().await;
    let store = connected(setting.server.opts(), &setting.table, SEC).await;
    for (key, number) in [("a", 1), ("stuck", 2), ("b", 3)] {
        token(setting.patient.clone().acquire(ask(key, number, LEASE)).await);
    }
    let mut locked = setting.locked("stuck").await;
    in_rounds("the others are renewed in time", async || {
        let all = [("a", 1), ("stuck", 2), ("b", 3), ("gone", 4)];
        let all = all.map(|(key, number)| renewal(key, number, LEASE));
        let replies = store.clone().renew(all.to_vec()).await.unwrap();
        let found: Vec<Option<&Renewal>> = replies.iter().map(|reply| reply.as_ref().ok()).collect();
        let expected = [Renewal::Renewed, Renewal::Held, Renewal::Renewed, Renewal::Gone];
        match found == expected.each_ref().map(Some) {
            true => Ok(()),
            false => Err(replies),
        }
    })
    .await;
    locked.query_drop("COMMIT").await.unwrap();
    let stuck = renewed(&setting.patient, "stuck", 2, LEASE).await;
    assert_eq!(stuck.unwrap(), Renewal::Renewed);
}

/// A full batch of them would be looked at again and again.
#[tokio::test]
async fn removal_of_rows_ends_though_a_transaction_has_them_locked() {
    let setting = setting().await;
    setting
        .sql("INSERT INTO {t} (k) SELECT CONCAT('k', seq) FROM seq_1_to_600")
        .await;
    let mut conn = setting.server.client().await;
    conn.query_drop("BEGIN").await.unwrap();
    let lock = format!("SELECT k FROM `{}` FOR UPDATE", setting.table);
    let rows: Vec<Vec<u8>> = conn.query(lock).await.unwrap();
    assert_eq!(rows.len(), 600);
    let removed = within(10 * SEC, "it ends", setting.patient.remove_free()).await;
    assert_eq!(removed.unwrap(), 0);
    conn.query_drop("COMMIT").await.unwrap();
    assert_eq!(setting.patient.remove_free().await.unwrap(), 600);
}

/// A write for each lock and renewal makes renewals the largest user of a database.
#[tokio::test]
async fn ten_thousand_locks_are_renewed_by_few_statements() {
    let setting = setting().await;
    let store = connected(
        setting.server.opts_at(setting.proxy.addr()),
        &setting.table,
        PATIENCE,
    )
    .await;
    setting
        .sql(
            "INSERT INTO {t} (k, holder, kind, fence, tokens, until_us) \
             SELECT CONCAT('k', seq), CONCAT('00000000-0000-0000-0000-000000000007:', seq), 'lock', seq, 1, \
                    CAST((UNIX_TIMESTAMP() + 3600) * 1000000 AS SIGNED) FROM seq_1_to_10000",
        )
        .await;
    let all = (1..=10_000)
        .map(|n| renewal(&format!("k{n}"), n, LEASE))
        .collect();
    let replies = store.clone().renew(all).await.unwrap();
    assert!(
        replies.iter().all(|reply| matches!(reply, Ok(Renewal::Renewed))),
        "{:?}",
        replies[0]
    );
    let sent: usize = setting.proxy.requests().iter().map(Table::renewals).sum();
    assert!((40..=60).contains(&sent), "{sent} statements");
}

#[tokio::test]
async fn urls_open_it_and_mistakes_are_told() {
    let server = Mysql::shared().await;
    let table = format!("by_url_{:08x}", fastrand::u32(..));
    let url = |more: &str| format!("{}?table={table}&timeout=20s{more}", server.url_at(server.addr()));
    let open = async |url: String| {
        let builder = LockClient::builder().scheme(dlock_mysql::scheme()).url(url);
        builder.build().await
    };
    let missing = open(url("")).await.unwrap_err().to_string();
    assert!(
        missing.contains("1146") && missing.contains("create_table=true"),
        "{missing}"
    );
    let made = open(url("&create_table=true&lease=10s&name=shop&connections=1"))
        .await
        .unwrap();
    let guard = made.lock("k").acquire().await.unwrap();
    let same = open(url("").replace("mysql://", "mariadb://")).await.unwrap();
    assert!(same.lock("k").try_acquire().await.unwrap_err().is_busy());
    guard.release().await.unwrap();
    for (wrong, told) in [
        (url("&connections=0"), "connections"),
        (url("&connections=1001"), "more than 1000"),
        (url("&connections=x"), "connections"),
        (url("&tabel=x"), "tabel"),
        (url("&create_table=x"), "create_table must be true or false"),
        (url("&require_ssl=x"), "require_ssl must be true or false"),
        (format!("{}?table=a;b", server.url_at(server.addr())), "table"),
        ("mysql://u:secret@127.0.0.1".to_owned(), "database"),
    ] {
        let error = open(wrong.clone()).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::InvalidUrl { .. }), "{wrong}: {error:?}");
        assert!(text.contains(told) && !text.contains("secret"), "{wrong}: {text}");
    }
    let wrong = server.url_at(server.addr()).replace("dlock:", "dlock:wrong");
    let refused = open(wrong).await.unwrap_err().to_string();
    assert!(
        refused.contains("1045") && !refused.contains("wrong"),
        "{refused}"
    );
}

/// A process without the right to create the second table, or one that dies in between.
#[tokio::test]
async fn schema_that_was_half_created_is_completed() {
    let server = Mysql::shared().await;
    let name = format!("half_{:08x}", fastrand::u32(..));
    let mut admin = server.client().await;
    let grant = format!("CREATE, SELECT, INSERT, UPDATE, DELETE ON dlock.{name}");
    for sql in [
        format!("CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'pw'"),
        format!("GRANT {grant} TO {name}@'127.0.0.1'"),
    ] {
        admin.query_drop(sql).await.unwrap();
    }
    let addr = server.addr();
    let url = format!("mysql://{name}:pw@{addr}/dlock?table={name}&create_table=true&timeout=20s");
    let open = async || {
        let builder = LockClient::builder().scheme(dlock_mysql::scheme()).url(&url);
        builder.build().await
    };
    let denied = open().await.unwrap_err().to_string();
    assert!(denied.contains("1142") && denied.contains("_floor"), "{denied}");
    admin
        .query_drop(format!("GRANT {grant}_floor TO {name}@'127.0.0.1'"))
        .await
        .unwrap();
    let client = open().await.unwrap();
    client.lock("k").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn kinds_that_it_has_not_are_refused_with_the_store_named() {
    let server = Mysql::shared().await;
    let table = server.table().await;
    let store = server.locks(&table).connect().await.unwrap();
    let client = LockClient::builder().store(store).build().await.unwrap();
    let fair = client.fair_lock("k").acquire().await.unwrap_err();
    let semaphore = client.semaphore("s").permits(3).acquire().await.unwrap_err();
    for error in [fair, semaphore] {
        let text = error.to_string();
        assert!(text.contains("MySQL"), "{text}");
    }
    let fenced = client.fenced_lock("f").acquire().await.unwrap();
    assert!(fenced.fencing_token() > 0);
    fenced.release().await.unwrap();
}

#[tokio::test]
async fn user_needs_no_more_rights_than_the_page_names() {
    let setting = setting().await;
    let (table, user) = (&setting.table, format!("u{:08x}", fastrand::u32(..)));
    setting
        .sql(&format!("CREATE USER {user}@'127.0.0.1' IDENTIFIED BY 'pw'"))
        .await;
    let own = setting.server.opts().user(Some(&user)).pass(Some("pw"));
    let denied = || {
        MysqlLocks::builder(own.clone())
            .table(table)
            .timeout(PATIENCE)
            .connect()
    };
    let error = answered(denied).await;
    assert!(error.is_err(), "no right to the database");
    setting
        .sql(&format!(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON dlock.{table} TO {user}@'127.0.0.1'; \
             GRANT SELECT, INSERT, UPDATE ON dlock.{table}_floor TO {user}@'127.0.0.1'"
        ))
        .await;
    let store = connected(own, table, PATIENCE).await;
    let client = client(&store).await;
    let guard = client.lock("k").acquire().await.unwrap();
    assert_eq!(renewed_by(&client).await, 1);
    guard.release().await.unwrap();
    setting.expire().await;
    assert_eq!(store.remove_free().await.unwrap(), 1);
}

async fn renewed_by(client: &LockClient) -> usize {
    client.list("").await.unwrap().len()
}

/// A connection of the application's own, as it may have set it.
#[tokio::test]
async fn defaults_of_the_server_and_changes_by_others_make_no_difference() {
    let server = Mysql::start_with(
        &[
            "--sql-mode=",
            "--default-time-zone=-11:00",
            "--transaction-isolation=SERIALIZABLE",
            "--wait-timeout=1",
            "--autocommit=0",
        ],
        None,
    )
    .await;
    let table = server.table().await;
    let store = connected(server.opts(), &table, PATIENCE).await;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    let mut admin: Conn = server.client().await;
    admin
        .query_drop(
            "SET GLOBAL time_zone = '+13:00', GLOBAL sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,ORACLE', \
             GLOBAL sql_select_limit = 1",
        )
        .await
        .unwrap();
    // A process that starts after that, in another time zone.
    let after = connected(server.opts(), &table, PATIENCE).await;
    let busy = after.clone().acquire(ask("k", 2, LEASE)).await.unwrap();
    assert!(
        matches!(busy, AcquireReply::Busy(busy) if busy.remaining > Some(LEASE - 60 * SEC)),
        "{busy:?}"
    );
    assert_eq!(renewed(&after, "k", 1, LEASE).await.unwrap(), Renewal::Renewed);
    // Where one grant is gone, the rows of all are read.
    token(after.clone().acquire(ask("there", 1, LEASE)).await);
    let grants = ["gone", "k", "there"].map(|key| renewal(key, 1, LEASE));
    let renewals = after.clone().renew(grants.to_vec()).await.unwrap();
    let gone = renewals
        .iter()
        .map(|renewal| matches!(renewal, Ok(Renewal::Gone)));
    assert_eq!(gone.collect::<Vec<bool>>(), [true, false, false], "{renewals:?}");
    // Longer than the server keeps connections without work by default.
    let pids =
        "SELECT GROUP_CONCAT(ID ORDER BY ID) FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID()";
    let before: Option<String> = admin.query_first(pids).await.unwrap();
    sleep(Duration::from_millis(2500)).await;
    let mut admin = server.client().await;
    let kept: Option<String> = admin.query_first(pids).await.unwrap();
    assert_eq!(kept, before);
    assert!(is_released(&after.clone().release(end("k", 1)).await));
}

#[tokio::test]
async fn key_that_is_too_long_is_refused_and_not_cut_off() {
    let server = Mysql::shared().await;
    let table = server.table().await;
    let builder = server.locks(&table).prefix("p".repeat(900));
    let store = Arc::new(builder.connect().await.unwrap());
    let error = store
        .clone()
        .acquire(ask(&"k".repeat(200), 1, LEASE))
        .await
        .unwrap_err();
    assert_eq!((error.outcome, error.reason), (Outcome::NotDone, Reason::Refused));
    token(store.clone().acquire(ask(&"k".repeat(124), 1, LEASE)).await);
    // Longer than the server takes a statement.
    assert_eq!(store.clone().list("k".repeat(20 << 20)).await.unwrap(), []);
    assert_eq!(store.list("k".repeat(124)).await.unwrap().len(), 1);
}
