//! Semaphores and latches on PostgreSQL: permits over processes, and what happens to them while requests are lost, processes
//! end, transactions hold permits, and servers restart.

use std::sync::Arc;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, Store,
};
use dlock::{LockClient, MAX_AT_ONCE, Permit};
use dlock_postgres::HoldError;
use dlock_tests::faults::{PATIENCE, answered, in_rounds, within};
use dlock_tests::postgres::Postgres;
use dlock_tests::{NetFault, Request, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;

use crate::losses::{LOSSES, Loss};
use crate::postgres_conformance::Table;
use crate::postgres_network_support::{Setting, client, setting, setting_on};
use crate::scenes::{
    LEASE, MS, Permits, SEC, count, in_scenes, permits_are_shared, served, waits, waits_for,
};

impl Setting {
    async fn client(&self) -> LockClient {
        client(&self.store().await).await
    }

    async fn no_permit_is_left(&self) {
        eventually("no permit and no position is left", async || {
            let left =
                "SELECT (SELECT count(*) FROM {t}_permits WHERE owned) + (SELECT count(*) FROM {t}_waiters)";
            let held = "SELECT coalesce(sum(held), 0)::int8 FROM {t}";
            self.number(left).await == 0 && self.number(held).await == 0
        })
        .await;
    }
}

fn request(kind: Kind, number: u64, amount: u32) -> AcquireRequest {
    let mut request = AcquireRequest::new(kind, "k".into(), GrantId::from_parts(1, number), LEASE);
    (request.permits, request.amount) = (Some(2), amount);
    request
}

fn release(kind: Kind, grant: GrantId) -> ReleaseRequest {
    ReleaseRequest::new(kind, "k".into(), grant)
}

/// An acquire of permits, or what keeps the position of a waiter.
fn asks(request: &Request) -> bool {
    request.runs("-- Acquires permits")
}

fn releases(request: &Request) -> bool {
    request.runs("-- Releases permits")
}

fn renews(request: &Request) -> bool {
    request.runs("-- Lets permits last")
}

fn counts(request: &Request) -> bool {
    request.runs("-- Runs an operation on a semaphore")
}

impl Permits for Table {
    fn counts(request: &Request) -> bool {
        counts(request)
    }

    fn takes_unowned(request: &Request) -> bool {
        asks(request)
    }

    async fn positions(&self) -> usize {
        self.number("SELECT count(*) FROM {t}_waiters").await
    }

    async fn owned(&self) -> usize {
        let owned = self.number("SELECT count(*) FROM {t}_permits WHERE owned").await;
        owned + self.number("SELECT coalesce(sum(held), 0)::int8 FROM {t}").await
    }
}

in_scenes! { Table:
    fn waiter_for_several_permits_is_not_passed_over_and_one_for_too_many_blocks_no_other() = waiter_for_several_permits_is_not_passed_over(Postgres::shared());
    fn greater_total_is_told_and_a_smaller_one_takes_nothing_from_holders() = greater_total_is_told_and_a_smaller_one_takes_nothing(Postgres::shared());
    fn permits_of_a_process_that_is_cut_off_come_back_with_their_lease_and_it_is_told_before() = permits_of_a_process_that_is_cut_off_come_back(Postgres::shared());
    fn each_step_of_a_number_whose_request_or_reply_is_lost_is_carried_out_once() = steps_of_a_number_whose_request_or_reply_is_lost_are_carried_out_once(Postgres::shared());
    fn waiter_for_permits_that_gives_up_at_any_moment_leaves_nothing_and_delays_no_other() = waiter_for_permits_gives_up_at_any_moment(Postgres::shared());
    fn permits_their_total_and_a_latch_are_kept_when_the_server_restarts() = permits_their_total_and_a_latch_outlive_a_restart(Postgres::start());
    fn holders_of_permits_are_shown_and_forced_out_and_the_total_stays() = holders_of_permits_are_shown_and_forced_out(Postgres::shared());
    fn waiters_of_all_processes_go_on_when_a_latch_is_counted_down() = waiters_of_all_processes_go_on_when_a_latch_is_counted_down(Postgres::shared());
}

/// As an operator may enter it. A holder for each of two thousand million permits needs more memory than there is.
#[tokio::test]
async fn nonsensical_number_of_permits_ends_no_process_that_looks_at_them() {
    let setting = setting().await;
    let client = setting.client().await;
    let _permit = client.semaphore("k").permits(2).acquire().await.unwrap();
    let _beside = client.lock("other").acquire().await.unwrap();
    for (amount, shown) in [(i32::MAX, MAX_AT_ONCE), (-1, 0)] {
        let sql = format!("UPDATE {}_permits SET amount = {amount}", setting.table);
        setting.server.client().await.batch_execute(&sql).await.unwrap();
        let listed = client.list("").await.unwrap();
        let of = |name: &str| listed.iter().filter(|(key, _)| *key == name).count();
        assert_eq!((of("k"), of("other")), (shown, 1));
    }
}

/// In each level of isolation that a database may have by default.
async fn processes_share_permits(with_limit: bool) {
    for level in ["read committed", "serializable"] {
        let setting = setting().await;
        let mut config = setting.server.config();
        config.options(format!(
            "-c default_transaction_isolation={}",
            level.replace(' ', "\\ ")
        ));
        let stores = join_all((0..4).map(async |_| setting.connected(config.clone(), PATIENCE).await)).await;
        let clients = join_all(stores.iter().map(client)).await;
        permits_are_shared(&clients, with_limit).await;
        setting.no_permit_is_left().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_never_hold_more_permits_than_there_are() {
    processes_share_permits(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_never_hold_more_permits_than_their_limit() {
    processes_share_permits(true).await;
}

/// The row is available, so the background removes it at any moment.
#[tokio::test]
async fn number_is_set_though_the_row_is_removed_meanwhile() {
    let setting = setting().await;
    let sql = "CREATE SEQUENCE {t}_runs; \
               CREATE FUNCTION {t}_remove() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                 IF nextval('{t}_runs') % 2 = 1 THEN DELETE FROM {t} WHERE holder = ''; END IF; \
                 RETURN NULL; \
               END $$; \
               CREATE TRIGGER remove AFTER INSERT ON {t} FOR EACH STATEMENT EXECUTE FUNCTION {t}_remove()";
    let sql = sql.replace("{t}", &setting.table);
    setting.server.client().await.batch_execute(&sql).await.unwrap();
    let client = setting.client().await;
    assert!(client.semaphore("set").set_permits(3).await.unwrap());
    assert_eq!(client.semaphore("set").available().await.unwrap(), 3);
    client.semaphore("add").add_permits(3).await.unwrap();
    assert_eq!(client.semaphore("add").available().await.unwrap(), 3);
    assert!(client.latch("l").try_set_count(3).await.unwrap());
    assert_eq!(client.latch("l").count().await.unwrap(), 3);
}

/// Other steps lock it for a moment each, one after the other; the transaction that holds a permit does not lock it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_row_of_a_semaphore_is_tried_again_though_a_transaction_holds_a_permit() {
    let setting = setting().await;
    let store = setting.behind(PATIENCE).await;
    let semaphore = client(&store).await.semaphore("k").permits(3);
    let (mut db, mut beside) = (setting.server.client().await, setting.server.client().await);
    let permit = semaphore.acquire().await.unwrap();
    let holds = db.transaction().await.unwrap();
    store.hold_in(&holds, &permit.held()).await.unwrap();
    permit.release().await.unwrap();
    assert!(semaphore.try_acquire_many(3).await.unwrap_err().is_busy());
    let locks = beside.transaction().await.unwrap();
    let row = format!("SELECT FROM {} WHERE key = 'k' FOR UPDATE", setting.table);
    locks.execute(&row, &[]).await.unwrap();
    let before = setting.proxy.count(asks);
    assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
    let tries = setting.proxy.count(asks) - before;
    assert!(tries > 10, "{tries} tries");
    locks.rollback().await.unwrap();
    let one = semaphore.try_acquire().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 1);
    one.release().await.unwrap();
    let status = semaphore.status().await.unwrap().unwrap();
    assert_eq!((status.held, status.available), (1, 2));
    holds.rollback().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 3);
    let all = semaphore.try_acquire_many(3).await.unwrap();
    all.release().await.unwrap();
    setting.no_permit_is_left().await;
}

/// To make its row would wait for the transaction without a limit.
#[tokio::test]
async fn change_of_a_semaphore_is_told_that_a_transaction_has_its_name() {
    let setting = setting().await;
    let store = setting.store().await;
    let mut db = setting.server.client().await;
    let tx = db.transaction().await.unwrap();
    store.lock_in(&tx, "k").await.unwrap();
    let id = GrantId::from_parts(1, 1);
    let step = CounterStep::SetPermits {
        total: 2,
        only_unset: false,
    };
    let request = CounterRequest::new("k".into(), id, step);
    let counted = within(10 * SEC, "it is told", Counters::count(store.clone(), request)).await;
    let error = counted.unwrap_err();
    assert_eq!(error.outcome, Outcome::NotDone, "{error}");
    assert!(error.message.contains("an open transaction"), "{error}");
    tx.commit().await.unwrap();
    assert_eq!(count(&store, step).await, CounterReply::Done(true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_of_a_semaphore_waits_for_its_row_as_long_as_other_steps_have_it() {
    const TRIES: usize = 30;
    let setting = setting().await;
    let semaphore = client(&setting.behind(PATIENCE).await).await.semaphore("k");
    let store = setting.behind(PATIENCE).await;
    semaphore.set_permits(2).await.unwrap();
    let two = semaphore.acquire_many(2).await.unwrap();
    let mut beside = setting.server.client().await;
    for forces in [true, false] {
        let locks = beside.transaction().await.unwrap();
        let row = format!("SELECT FROM {} WHERE key = 'k' FOR UPDATE", setting.table);
        locks.execute(&row, &[]).await.unwrap();
        let before = setting.proxy.count(counts);
        let store = store.clone();
        let change = tokio::spawn(async move {
            if forces {
                return store.force_release("k".into()).await.unwrap();
            }
            count(&store, CounterStep::DeletePermits).await == CounterReply::Done(true)
        });
        eventually("it is tried again", async || {
            assert!(!change.is_finished(), "it was given up, forces: {forces}");
            setting.proxy.count(counts) - before > TRIES
        })
        .await;
        locks.rollback().await.unwrap();
        assert!(within(PATIENCE, "the change", change).await.unwrap());
    }
    assert!(two.release().await.unwrap_err().is_lost());
    setting.no_permit_is_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_requests_and_replies_of_permits_leave_nothing_wrong() {
    let setting = setting().await;
    let hasty = client(&setting.behind(600 * MS).await).await;
    let others = [setting.client().await, setting.client().await];
    assert!(others[0].semaphore("k").set_permits(2).await.unwrap());
    for loss in LOSSES {
        for step in ["acquire", "join", "poll", "grant", "renew", "release", "give up"] {
            let what = format!("{step}: {loss:?}");
            let round = async || one_is_lost(&setting, &hasty, &others, loss, step, &what).await;
            in_rounds(&what, round).await;
        }
    }
}

/// A waiter for all permits one of whose steps is lost, and the next one behind it. Fails if the step was over before it could
/// be lost.
async fn one_is_lost(
    setting: &Setting,
    hasty: &LockClient,
    others: &[LockClient],
    loss: Loss,
    step: &str,
    what: &str,
) -> Result<(), &'static str> {
    let held = match step {
        "acquire" => None,
        _ => Some(others[0].semaphore("k").acquire().await.unwrap()),
    };
    let joins = ["acquire", "join"]
        .contains(&step)
        .then(|| loss.of(&setting.proxy, asks));
    let waiting = match step {
        "renew" => waits_for(hasty.semaphore("k").lease(10 * SEC), 2),
        _ => waits(hasty, 2),
    };
    eventually(what, async || match &joins {
        Some(joins) => joins.fired(),
        None => setting.number("SELECT count(*) FROM {t}_waiters").await == 1,
    })
    .await;
    let fault = match step {
        "poll" | "grant" => loss.of(&setting.proxy, asks),
        "renew" => loss.of(&setting.proxy, renews),
        "release" | "give up" => loss.of(&setting.proxy, releases),
        _ => joins.expect("the request is lost"),
    };
    match step {
        "poll" => eventually(what, async || fault.fired()).await,
        "give up" => waiting.abort(),
        _ => {}
    }
    let next = {
        let semaphore = others[1].semaphore("k").wait(2 * PATIENCE);
        tokio::spawn(async move { semaphore.acquire().await?.release().await })
    };
    if let Some(held) = held {
        held.release().await.unwrap();
    }
    let slow = match within(PATIENCE, what, waiting).await {
        Ok(permit) if step == "renew" => !is_renewed(permit, &fault, what).await,
        Ok(permit) => {
            let busy = others[0].semaphore("k").try_acquire().await.unwrap_err();
            assert!(busy.is_busy() && permit.is_held(), "{what}");
            let released = within(PATIENCE, what, permit.release()).await;
            assert!(released.is_ok(), "{what}: {released:?}");
            false
        }
        Err(error) => {
            assert!(step == "give up" && error.is_cancelled(), "{what}: {error}");
            false
        }
    };
    within(PATIENCE, what, next).await.unwrap().unwrap();
    setting.no_permit_is_left().await;
    assert_eq!(others[0].semaphore("k").available().await.unwrap(), 2, "{what}");
    match fault.fired() && !slow {
        true => Ok(()),
        false => Err("it was over before"),
    }
}

/// Whether permits are still held when a step of their renewal was lost, which a slow machine misses. They are released.
async fn is_renewed(permit: Permit, fault: &NetFault, what: &str) -> bool {
    eventually(what, async || fault.fired() || !permit.is_held()).await;
    let renewed = answered(|| permit.ensure(SEC)).await.is_ok();
    let released = within(PATIENCE, what, permit.release()).await;
    assert!(!renewed || released.is_ok(), "{what}: {released:?}");
    renewed
}

/// A copy of a request that arrives after it was undone.
#[tokio::test]
async fn late_copies_of_requests_that_were_undone_take_nothing() {
    let setting = setting().await;
    let (hasty, patient) = (setting.behind(600 * MS).await, setting.store().await);
    let reply = patient.clone().acquire(request(Kind::Permit, 1, 1)).await;
    assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    let mut number = 1;
    for (kind, amount) in [(Kind::Permit, 1), (Kind::Unowned, 1), (Kind::Permit, 2)] {
        let late = setting.proxy.hold(1, asks);
        loop {
            number += 2;
            let mut wanted = request(kind, number, amount);
            let waiter = GrantId::from_parts(1, number + 1);
            wanted.waiter = (kind == Kind::Permit).then_some(waiter);
            let reply = hasty.clone().acquire(wanted.clone()).await;
            let sent = reply.is_err_and(|error| error.outcome == Outcome::Unknown);
            for grant in [wanted.grant, waiter] {
                let ended = answered(|| hasty.clone().release(release(kind, grant))).await;
                assert!(ended.is_ok(), "{ended:?}");
            }
            if sent {
                let again = hasty.clone().release(release(kind, wanted.grant)).await;
                assert_eq!(again.unwrap(), ReleaseReply::NotHeld { repeated: false });
                break;
            }
        }
        late.caught().await;
        late.release();
        late.delivered().await;
        for _ in 0..20 {
            sleep(10 * MS).await;
            let expected = CounterReply::Permits {
                free: Some(1),
                held: 1,
            };
            assert_eq!(count(&patient, CounterStep::Permits).await, expected, "{kind}");
            assert_eq!(setting.number("SELECT count(*) FROM {t}_waiters").await, 0);
        }
    }
}

/// The row of a semaphore that has only a limit stays for a while: it is not locked, but nothing is held.
#[tokio::test]
async fn acquire_that_did_not_arrive_is_undone_where_nothing_is_held() {
    let setting = setting().await;
    let (hasty, patient) = (setting.behind(600 * MS).await, setting.store().await);
    let limited = |number| {
        let mut wanted = request(Kind::Permit, number, 1);
        (wanted.permits, wanted.limit) = (None, Some(2));
        wanted
    };
    let first = limited(1);
    let reply = patient.clone().acquire(first.clone()).await;
    assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    patient.release(release(Kind::Permit, first.grant)).await.unwrap();
    assert_eq!(
        setting.number("SELECT count(*) FROM {t} WHERE holder = ''").await,
        1
    );
    let lost = setting.proxy.hold(1, asks);
    let mut number = 1;
    let grant = loop {
        number += 1;
        let wanted = limited(number);
        let reply = hasty.clone().acquire(wanted.clone()).await;
        if reply.is_err_and(|error| error.outcome == Outcome::Unknown) {
            break wanted.grant;
        }
        let _ = answered(|| hasty.clone().release(release(Kind::Permit, wanted.grant))).await;
    };
    let undone = async {
        loop {
            match hasty.clone().release(release(Kind::Permit, grant)).await {
                Ok(reply) => return reply,
                Err(_) => sleep(10 * MS).await,
            }
        }
    };
    let undone = within(PATIENCE, "undone", undone).await;
    assert_eq!(undone, ReleaseReply::NotHeld { repeated: false });
    drop(lost);
}

/// The process of a waiter is gone: the others go on when its position ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_waiter_for_several_permits_delays_others_by_seconds() {
    let setting = setting().await;
    let (store, holder, b) = (
        setting.store().await,
        setting.client().await,
        setting.client().await,
    );
    let one = holder.semaphore("k").permits(2).acquire().await.unwrap();
    let mut silent = request(Kind::Permit, 1, 2);
    silent.waiter = Some(GrantId::from_parts(1, 2));
    let reply = store.clone().acquire(silent).await;
    assert!(matches!(reply, Ok(AcquireReply::Busy(_))), "{reply:?}");
    assert!(holder.semaphore("k").try_acquire().await.unwrap_err().is_busy());
    served(waits(&b, 1)).await.release().await.unwrap();
    one.release().await.unwrap();
    assert_eq!(holder.semaphore("k").available().await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_permits_are_renewed_by_few_statements() {
    const COUNT: u64 = 10_000;
    let setting = setting().await;
    let store = setting.behind(PATIENCE).await;
    // Of one semaphore, and of many.
    for (names, prefix) in [(1, "one"), (COUNT / 10, "many")] {
        let key = |number: u64| format!("{prefix}{}", number % names);
        let number = |number: u64| GrantId::from_parts(names.into(), number);
        let rows = format!(
            "INSERT INTO {{t}} (key, holder, kind, until, number, held) \
             SELECT '{prefix}' || n, '#', 'permit', '9999-01-01', 0, {COUNT} / {names} FROM generate_series(0, {names} - 1) n; \
             INSERT INTO {{t}}_permits (key, holder, owned, amount, fence, tokens, until) \
             SELECT '{prefix}' || n % {names}, '{client}' || n, true, 1, n, 1, clock_timestamp() + interval '1 minute' \
             FROM generate_series(1, {COUNT}) n",
            client = number(0).to_string().trim_end_matches('0'),
        );
        let rows = rows.replace("{t}", &setting.table);
        setting.server.client().await.batch_execute(&rows).await.unwrap();
        let sent = || {
            setting
                .proxy
                .requests()
                .iter()
                .filter(|request| renews(request))
                .count()
        };
        let before = sent();
        let requests = (1..=COUNT).map(|n| RenewRequest::new(Kind::Permit, key(n).into(), number(n), LEASE));
        for reply in store.clone().renew(requests.collect()).await.unwrap() {
            assert_eq!(reply.unwrap(), Renewal::Renewed);
        }
        let sent = sent() - before;
        assert!((1..=60).contains(&sent), "{sent} statements, {names} names");
    }
}

/// No lease returns permits without an owner.
#[tokio::test]
async fn acquire_of_unowned_permits_that_was_undone_stays_undone_after_a_crash() {
    let setting = setting_on(Arc::new(Postgres::start().await)).await;
    let db = setting.server.client().await;
    for sql in [
        "ALTER SYSTEM SET wal_writer_delay = '10s'",
        "SELECT pg_reload_conf()",
    ] {
        db.batch_execute(sql).await.unwrap();
    }
    let store = setting.connected(setting.server.config(), 5 * SEC).await;
    let wanted = request(Kind::Unowned, 1, 1);
    let reply = store.clone().acquire(wanted.clone()).await;
    assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    let undone = store.clone().release(release(Kind::Unowned, wanted.grant)).await;
    assert!(matches!(undone, Ok(ReleaseReply::Released { .. })), "{undone:?}");
    setting.server.kill();
    setting.server.restart().await;
    let expected = CounterReply::Permits {
        free: Some(2),
        held: 0,
    };
    assert_eq!(count(&store, CounterStep::Permits).await, expected);
}

/// Permits that a transaction holds are given to nobody before its end, though they were released, or their lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_holds_permits_beyond_their_release_and_their_lease() {
    let setting = setting().await;
    let store = setting.store().await;
    let (here, there) = (client(&store).await, setting.client().await);
    let mut db = setting.server.client().await;
    for ends in ["release", "lease"] {
        let semaphore = here.semaphore("k").permits(1);
        let permit = match ends {
            "release" => semaphore.acquire().await.unwrap(),
            _ => semaphore.fixed_lease(SEC).acquire().await.unwrap(),
        };
        let tx = db.transaction().await.unwrap();
        store.hold_in(&tx, &permit).await.unwrap();
        let waiting = waits(&there, 1);
        let lost = match ends {
            "release" => {
                within(PATIENCE, "it does not wait", permit.release())
                    .await
                    .unwrap();
                None
            }
            _ => {
                within(PATIENCE, "the lease ends", permit.lost()).await;
                Some(permit)
            }
        };
        sleep(SEC).await;
        assert!(!waiting.is_finished(), "{ends}");
        let forced = there.force_release("k").await.unwrap_err();
        assert!(forced.to_string().contains("transaction"), "{forced}");
        tx.commit().await.unwrap();
        served(waiting).await.release().await.unwrap();
        if let Some(lost) = lost {
            let tx = db.transaction().await.unwrap();
            let refused = store.hold_in(&tx, &lost).await.unwrap_err();
            assert!(matches!(refused, HoldError::Lost { .. }), "{refused}");
        }
    }
    setting.no_permit_is_left().await;
}

/// Rows that nobody needs are removed: of replies, of permits without an owner, and of semaphores without a total.
#[tokio::test]
async fn rows_of_operations_and_of_unused_semaphores_are_removed() {
    let setting = setting().await;
    let store = setting.store().await;
    let here = client(&store).await;
    let unowned = here.unowned_semaphore("u").permits(3);
    unowned.acquire_many(2).await.unwrap();
    here.semaphore("s").try_set_permits(2).await.unwrap();
    let mut limited = request(Kind::Permit, 1, 1);
    (limited.permits, limited.limit) = (None, Some(1));
    let reply = store.clone().acquire(limited).await;
    assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
    assert!(here.lock("k").try_acquire().await.is_err());
    let past = format!(
        "UPDATE {0}_permits SET until = clock_timestamp() - interval '2 minutes'; \
         UPDATE {0}_replies SET until = clock_timestamp() - interval '1 second'",
        setting.table
    );
    setting.server.client().await.batch_execute(&past).await.unwrap();
    store.remove_free().await.unwrap();
    let left = "SELECT (SELECT count(*) FROM {t}_permits) + (SELECT count(*) FROM {t}_replies)";
    assert_eq!(setting.number(left).await, 0);
    here.lock("k")
        .try_acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    assert_eq!(unowned.available().await.unwrap(), 1);
    assert_eq!(here.semaphore("s").available().await.unwrap(), 2);
}
