//! Locks on MariaDB whose server stops, is killed, only reads, is full, or has its clock set.

use std::sync::Arc;

use dlock::store::{AcquireReply, Outcome, Reason, ReleaseReply, Renewal, Store};
use dlock::{HoldState, Loss};
use dlock_mysql::MysqlLocks;
use dlock_tests::faults::{PATIENCE, answered, within};
use dlock_tests::mysql::Mysql;
use dlock_tests::{Swallow, eventually};
use futures_util::future::join_all;
use mysql_async::prelude::Queryable;
use tokio::time::{Instant, sleep};

use crate::mysql_conformance::Table;
use crate::mysql_support::{Setting, client, connected, setting_on};
use crate::scenes::{
    LEASE, MS, Rows, SEC, acquires_until_it_fails, ask,
    clock_that_jumps_lets_tokens_grow_and_the_holder_know, end, in_scenes, is_released, renewal, token,
};

in_scenes! { Table:
    fn holds_survive_a_kill_and_waiters_go_on() = holds_survive_a_restart_and_waiters_go_on(Mysql::start());
    fn holder_is_lost_before_the_lease_ends_when_the_server_stands_still() = holder_is_lost_before_the_lease_ends(Mysql::start());
    fn holder_that_is_cut_off_is_lost_before_another_one_has_its_lock() = holder_that_is_cut_off_is_lost_before_another_one_has_its_lock(Mysql::shared());
    fn broken_connections_cost_nothing_that_is_held() = broken_connections_cost_nothing_that_is_held(Mysql::shared());
    fn dropped_client_leaves_no_connection_and_no_lock() = dropped_client_leaves_no_connection_and_no_lock(Mysql::start());
    fn many_locks_of_a_client_are_renewed_by_few_statements() = many_locks_of_a_client_are_renewed_by_few_statements(Mysql::shared());
    fn conflicts_at_any_step_cost_no_lock_and_grant_none_twice() = conflicts_at_any_step_cost_no_lock_and_grant_none_twice(Mysql::shared());
}

/// Nothing is sent on its connection, and yet a holder soon learns that it broke.
#[tokio::test]
async fn broken_connection_is_noticed_without_a_step() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    let here = client(&setting.patient).await;
    let guard = here.lock("k").lease(LEASE).acquire().await.unwrap();
    setting.sql("TRUNCATE {t}").await;
    setting.server.restart().await;
    let loss = within(PATIENCE, "it is told", guard.lost()).await;
    assert_ne!(loss, Loss::Expired, "long before its lease ends");
}

/// An operator ends its connections. A step that was just sent on one has an unknown outcome, which is said.
#[tokio::test]
async fn killed_connections_cost_nothing_that_is_held() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    let store = connected(setting.server.opts(), &setting.table, 2 * SEC).await;
    let here = client(&store).await;
    let guard = here.lock("k").acquire().await.unwrap();
    for _ in 0..3 {
        let mut admin = setting.server.client().await;
        let pids: Vec<u64> = admin
            .query("SELECT ID FROM information_schema.PROCESSLIST WHERE ID <> CONNECTION_ID() AND USER = 'dlock'")
            .await
            .unwrap();
        for pid in pids {
            // It may be gone by now.
            let _ = admin.query_drop(format!("KILL {pid}")).await;
        }
        eventually("it goes on", async || match here.lock("other").acquire().await {
            Ok(other) => other.release().await.is_ok(),
            Err(error) => {
                assert!(!error.is_busy(), "{error}");
                false
            }
        })
        .await;
    }
    eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
    guard.release().await.unwrap();
}

/// The store of a user for whom `read_only` counts: rights of an administrator pass over it.
async fn of_ordinary_user(setting: &Setting) -> Arc<MysqlLocks> {
    setting
        .sql("CREATE USER app@'127.0.0.1' IDENTIFIED BY 'pw'; GRANT SELECT, INSERT, UPDATE ON dlock.* TO app@'127.0.0.1'")
        .await;
    let app = setting.server.opts().user(Some("app")).pass(Some("pw"));
    connected(app, &setting.table, PATIENCE).await
}

#[tokio::test]
async fn server_that_only_reads_is_told_and_used_again_when_it_writes() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    let store = of_ordinary_user(&setting).await;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    setting.sql("SET GLOBAL read_only = 1").await;
    let error = store.clone().acquire(ask("other", 2, LEASE)).await.unwrap_err();
    assert_eq!(
        (error.outcome, error.reason.clone()),
        (Outcome::NotDone, Reason::Unreachable)
    );
    assert!(error.message.contains("dlock needs the primary"), "{error}");
    let client = client(&store).await;
    let waiter = tokio::spawn(client.lock("other").acquire());
    sleep(300 * MS).await;
    setting.sql("SET GLOBAL read_only = 0").await;
    let guard = within(PATIENCE, "it writes again", waiter)
        .await
        .unwrap()
        .unwrap();
    guard.release().await.unwrap();
    assert!(is_released(&store.clone().release(end("k", 1)).await));
}

/// Each renewal breaks its connection, and each new connection asks for one.
#[tokio::test]
async fn server_that_only_reads_is_not_asked_for_connections_without_a_pause() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    let store = of_ordinary_user(&setting).await;
    let client = client(&store).await;
    let guard = client.lock("k").lease(LEASE).acquire().await.unwrap();
    setting.sql("SET GLOBAL read_only = 1").await;
    let other = store.clone().acquire(ask("other", 2, LEASE)).await;
    assert!(other.is_err(), "{other:?}");
    let connections = async || {
        let status =
            "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'CONNECTIONS'";
        setting
            .number(&format!("SELECT CAST(({status}) AS SIGNED)"))
            .await
    };
    let before = connections().await;
    sleep(3 * SEC).await;
    let made = connections().await - before;
    assert!((2..60).contains(&made), "{made} connections");
    setting.sql("SET GLOBAL read_only = 0").await;
    eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
    guard.release().await.unwrap();
}

/// What needs no more room goes on. A release may be refused where InnoDB wants free space for the change.
#[tokio::test]
async fn table_that_cannot_grow_fails_acquires_of_new_keys_and_no_renewal() {
    let setting = setting_on(Arc::new(Mysql::start_on_a_disk(120 << 20, &[]).await)).await;
    let store = &setting.patient;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    setting.server.fill_disk();
    let error = acquires_until_it_fails(store).await;
    assert_eq!(error.outcome, Outcome::NotDone, "{error}");
    assert_eq!(error.reason, Reason::RefusedForNow, "{error}");
    let renewals = store.clone().renew(vec![renewal("k", 1, LEASE)]).await.unwrap();
    assert!(matches!(renewals[..], [Ok(Renewal::Renewed)]), "{renewals:?}");
    let released = store.clone().release(end("k", 1)).await;
    if let Err(error) = &released {
        assert_eq!(error.outcome, Outcome::NotDone, "{error}");
        assert_eq!(error.reason, Reason::RefusedForNow, "{error}");
    }
    setting.server.free_disk();
    let again = store.clone().release(end("k", 1)).await;
    assert!(is_released(&again) || is_released(&released), "{again:?}");
    token(store.clone().acquire(ask("new", 11, LEASE)).await);
}

#[tokio::test]
async fn clock_of_the_server_that_jumps_lets_tokens_grow_and_the_holder_know() {
    clock_that_jumps_lets_tokens_grow_and_the_holder_know::<Table>(async |clock| {
        Mysql::start_with(&[], Some(clock)).await
    })
    .await;
}

/// Two operations on such keys fit into a packet.
#[tokio::test]
async fn requests_fit_into_small_packets_of_the_server() {
    let server = Mysql::start_with(&["--max-allowed-packet=8192"], None).await;
    let setting = setting_on(Arc::new(server)).await;
    let store = &setting.patient;
    let key = |n: u64| format!("{n:0512}");
    let acquires = (1..100).map(|n| store.clone().acquire(ask(&key(n), n, LEASE)));
    assert_eq!(join_all(acquires).await.into_iter().map(token).count(), 99);
    let renewals = (1..100).map(|n| renewal(&key(n), n, LEASE)).collect();
    let renewals = store.clone().renew(renewals).await.unwrap();
    let renewed = renewals
        .iter()
        .filter(|renewed| matches!(renewed, Ok(Renewal::Renewed)));
    assert_eq!(renewed.count(), 99, "{renewals:?}");
    let busy = (1..100).map(|n| store.clone().acquire(ask(&key(n), 100 + n, LEASE)));
    let busy = join_all(busy).await;
    assert!(
        busy.iter().all(|busy| matches!(busy, Ok(AcquireReply::Busy(_)))),
        "{busy:?}"
    );
    let releases = (1..100).map(|n| store.clone().release(end(&key(n), n)));
    assert!(join_all(releases).await.iter().all(is_released));
    setting.expire().await;
    assert_eq!(store.remove_free().await.unwrap(), 99);
}

#[tokio::test]
async fn server_whose_packets_are_too_small_is_refused() {
    let server = Mysql::start_with(&["--max-allowed-packet=4096"], None).await;
    let connecting = || MysqlLocks::builder(server.opts()).timeout(PATIENCE).connect();
    let error = answered(connecting).await.unwrap_err().to_string();
    assert!(error.contains("raise max_allowed_packet"), "{error}");
}

/// A statement that had to wait could not tell the time after that.
#[tokio::test]
async fn server_with_sysdate_is_now_is_refused() {
    let server = Mysql::start_with(&["--sysdate-is-now"], None).await;
    let connecting = || MysqlLocks::builder(server.opts()).timeout(PATIENCE).connect();
    let error = answered(connecting).await.unwrap_err().to_string();
    assert!(error.contains("sysdate-is-now"), "{error}");
}

/// The reply to a release that was carried out is lost with the server.
#[tokio::test]
async fn release_over_a_restart_ends_the_grant() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    let behind = setting.server.opts_at(setting.proxy.addr());
    let store = connected(behind, &setting.table, 2 * SEC).await;
    token(answered(|| store.clone().acquire(ask("k", 1, LEASE))).await);
    let fault = setting.proxy.swallow(1, Swallow::Hang, Table::releases);
    let released = tokio::spawn(async move { answered(|| store.clone().release(end("k", 1))).await });
    fault.swallowed().await;
    setting.server.kill();
    setting.server.restart().await;
    let released = released.await.unwrap();
    assert!(
        matches!(
            released,
            Ok(ReleaseReply::Released { .. } | ReleaseReply::NotHeld { .. })
        ),
        "{released:?}"
    );
    token(setting.patient.clone().acquire(ask("k", 2, LEASE)).await);
}

/// An `ALTER TABLE` locks the table as a whole. MySQL does not end a statement that waits for it when the client is gone, and
/// MariaDB looks once a second: a client that closes the connection and opens another one uses up all that the server accepts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn table_that_is_locked_costs_no_connections() {
    let setting = setting_on(Arc::new(Mysql::start().await)).await;
    // As a service has it: a statement waits as long as the client for its reply.
    let store = connected(setting.server.opts(), &setting.table, SEC).await;
    let here = client(&store).await;
    let guards = ["a", "b"].map(|key| here.lock(key).lease(LEASE).acquire());
    let guards: Vec<_> = join_all(guards).await.into_iter().map(Result::unwrap).collect();
    let mut admin = setting.server.client().await;
    let lock = format!("LOCK TABLES `{0}` WRITE, `{0}_floor` WRITE", setting.table);
    admin.query_drop(lock).await.unwrap();
    let begun = Instant::now();
    let ids = async || {
        let sql =
            "SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'dlock' AND ID <> CONNECTION_ID()";
        let ids: Vec<u64> = setting.server.client().await.query(sql).await.unwrap();
        ids
    };
    let before = ids().await;
    while begun.elapsed() < 8 * SEC {
        let keys = ["a", "b", "c", "d"].map(|key| store.clone().acquire(ask(key, 7, LEASE)));
        let renewals = store
            .clone()
            .renew(vec![renewal("a", 8, LEASE), renewal("b", 8, LEASE)]);
        for reply in tokio::join!(join_all(keys), renewals).0 {
            assert!(reply.is_err(), "{reply:?}");
        }
    }
    let after = ids().await;
    let new = after.iter().filter(|id| !before.contains(id)).count();
    assert!(
        after.len() <= before.len() + 1 && new <= 2,
        "{before:?}, then {after:?}"
    );
    admin.query_drop("UNLOCK TABLES").await.unwrap();
    for guard in guards {
        eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
        guard.release().await.unwrap();
    }
}
