//! Semaphores and latches on etcd: permits over processes, and what happens to them while requests are lost, processes end
//! and servers restart.

use std::sync::Arc;
use std::time::Instant;

use dlock::store::counter::{CounterReply, CounterStep};
use dlock::store::{AcquireRequest, GrantId, Kind, Outcome, ReleaseReply, ReleaseRequest, Renewal, Store};
use dlock::{Error, LockClient, MAX_AT_ONCE};
use dlock_etcd::TransactionError;
use dlock_tests::etcd::{Call, Etcd};
use dlock_tests::eventually;
use dlock_tests::faults::{PATIENCE, answered, are_few, some_at_a_time, within};
use futures_util::future::join_all;
use tokio::time::sleep;

use crate::etcd_conformance::Namespace;
use crate::etcd_support::{
    LEASE, SEC, Setting, acquires, ask, client, connected, granted, keys_of_permits, renewal, setting,
};
use crate::losses::{LOSSES, Loss};
use crate::scenes::{Permits, count, in_scenes, permits_are_shared, served, waits};

type Matches = fn(&Call) -> bool;

fn joins(call: &Call) -> bool {
    call.is("Txn") && call.has(" waits")
}

/// A look at a semaphore.
fn looks(call: &Call) -> bool {
    // The end of the range of positions.
    call.is("Txn") && call.has("\0y")
}

fn request(kind: Kind, number: u64, amount: u32) -> AcquireRequest {
    let mut request = AcquireRequest::new(kind, "k".into(), ask("k", number, LEASE).grant, LEASE);
    (request.permits, request.amount) = (Some(2), amount);
    request
}

fn gives_up(kind: Kind, grant: GrantId) -> ReleaseRequest {
    ReleaseRequest::new(kind, "k".into(), grant)
}

impl Setting {
    async fn keys(&self, letter: char) -> usize {
        keys_of_permits(&self.server, &self.namespace, letter).await
    }

    async fn has_positions(&self, count: usize) {
        let what = format!("{count} positions");
        eventually(&what, async || self.keys('x').await == count).await;
    }

    async fn no_permit_is_left(&self) {
        eventually("no permit is left", async || {
            self.keys('P').await == 0 && self.keys('x').await == 0
        })
        .await;
    }

    async fn neighbor(&self) -> LockClient {
        client(&self.patient_beside().await).await
    }

    async fn permits(&self) -> CounterReply {
        count(&self.patient, CounterStep::Permits).await
    }
}

impl Permits for Namespace {
    fn counts(call: &Call) -> bool {
        let replies = ["done ", "permits ", "number "];
        call.is("Txn") && replies.iter().any(|reply| call.has(reply))
    }

    fn takes_unowned(call: &Call) -> bool {
        call.has("taken ")
    }

    async fn positions(&self) -> usize {
        self.keys('x').await
    }

    async fn owned(&self) -> usize {
        self.keys('P').await
    }
}

in_scenes! { Namespace:
    fn waiter_for_several_permits_is_not_passed_over_and_one_for_more_than_there_are_blocks_no_other() = waiter_for_several_permits_is_not_passed_over(Etcd::shared());
    fn greater_total_is_told_and_a_smaller_one_takes_nothing_from_holders() = greater_total_is_told_and_a_smaller_one_takes_nothing(Etcd::shared());
    fn permits_of_a_process_that_is_cut_off_come_back_with_their_lease_and_it_is_told_before() = permits_of_a_process_that_is_cut_off_come_back(Etcd::shared());
    fn each_step_of_a_number_whose_request_or_reply_is_lost_is_carried_out_once() = steps_of_a_number_whose_request_or_reply_is_lost_are_carried_out_once(Etcd::shared());
    fn waiter_for_permits_that_gives_up_at_any_moment_leaves_nothing_and_delays_no_other() = waiter_for_permits_gives_up_at_any_moment(Etcd::shared());
    fn permits_their_total_and_a_latch_are_kept_when_the_server_restarts() = permits_their_total_and_a_latch_outlive_a_restart(Etcd::start());
    fn holders_of_permits_are_shown_and_forced_out_and_the_total_stays() = holders_of_permits_are_shown_and_forced_out(Etcd::shared());
    fn waiters_of_all_processes_go_on_when_a_latch_is_counted_down() = waiters_of_all_processes_go_on_when_a_latch_is_counted_down(Etcd::shared());
}

async fn processes_share_permits(with_limit: bool) {
    let setting = setting().await;
    let clients = join_all((0..12).map(async |_| setting.neighbor().await)).await;
    permits_are_shared(&clients, with_limit).await;
    setting.no_permit_is_left().await;
    let free = (!with_limit).then_some(5);
    let expected = CounterReply::Permits { free, held: 0 };
    // A request that was given up may still be granted, and is undone then.
    eventually("all are available", async || setting.permits().await == expected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_never_hold_more_permits_than_there_are() {
    processes_share_permits(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_never_hold_more_permits_than_their_limit() {
    processes_share_permits(true).await;
}

/// As another program may write it, or a person.
#[tokio::test]
async fn holder_of_more_permits_than_there_can_be_is_shown_as_the_most_there_can_be() {
    let setting = setting().await;
    let client = client(&setting.patient).await;
    let foreign = format!("{}q/foreign\0P0.0.1000000", setting.namespace);
    assert!(setting.server.put(&foreign, b"x held 1000").await);
    assert_eq!(client.holders("foreign").await.unwrap().len(), MAX_AT_ONCE);
    assert_eq!(client.list("foreign").await.unwrap().len(), MAX_AT_ONCE);
}

#[tokio::test]
async fn lost_requests_and_replies_of_permits_leave_nothing_wrong() {
    let setting = setting().await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let requests: [(&str, Matches); 3] = [
        ("a look", looks),
        ("a grant", acquires),
        ("a release", |call| {
            call.is("Txn") && !acquires(call) && !looks(call)
        }),
    ];
    let semaphore = there.semaphore("k").permits(2).lease(LEASE);
    semaphore.acquire().await.unwrap().release().await.unwrap();
    for (request, is) in requests {
        for loss in LOSSES {
            let what = format!("{request}, {loss:?}");
            let fault = loss.of(&setting.proxy, is);
            let waiting = here.semaphore("k").lease(LEASE);
            let two = within(PATIENCE, &what, waiting.acquire_many(2)).await.unwrap();
            assert_eq!(semaphore.available().await.unwrap(), 0, "{what}");
            within(PATIENCE, &what, two.release()).await.unwrap();
            assert!(fault.fired(), "{what}: no such request");
            eventually(&what, async || semaphore.available().await.unwrap() == 2).await;
        }
    }
    for loss in LOSSES {
        let what = format!("a join, {loss:?}");
        let one = semaphore.acquire().await.unwrap();
        let fault = loss.of(&setting.proxy, joins);
        let two = waits(&here, 2);
        setting.has_positions(1).await;
        assert!(fault.fired(), "{what}: no such request");
        one.release().await.unwrap();
        served(two).await.release().await.unwrap();
    }
    for loss in LOSSES {
        let what = format!("a waiter that gives up, {loss:?}");
        let one = semaphore.acquire().await.unwrap();
        let two = waits(&here, 2);
        setting.has_positions(1).await;
        // It is listened to, and looks no more.
        sleep(SEC / 2).await;
        let fault = loss.of(&setting.proxy, |call| {
            call.is("Txn") && !acquires(call) && !looks(call)
        });
        two.abort();
        setting.has_positions(0).await;
        assert!(fault.fired(), "{what}: no such request");
        one.release().await.unwrap();
    }
    setting.no_permit_is_left().await;
}

#[tokio::test]
async fn late_copies_of_requests_that_were_undone_take_nothing() {
    let setting = setting().await;
    // With its session made before.
    granted(answered(|| setting.hasty.clone().acquire(request(Kind::Permit, 1, 1))).await);
    for (kind, is) in [
        (Kind::Permit, acquires as Matches),
        (Kind::Unowned, |call| call.has("taken ")),
    ] {
        let number = 10 + kind as u64;
        let late = setting.proxy.hold(1, is);
        let error = setting
            .hasty
            .clone()
            .acquire(request(kind, number, 1))
            .await
            .unwrap_err();
        assert_eq!(error.outcome, Outcome::Unknown, "{error}");
        late.caught().await;
        let grant = ask("k", number, LEASE).grant;
        let undone = answered(|| setting.hasty.clone().release(gives_up(kind, grant))).await;
        assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
        late.release();
        late.swallowed().await;
        let expected = CounterReply::Permits {
            free: Some(1),
            held: 1,
        };
        assert_eq!(setting.permits().await, expected, "{kind}");
    }
    let mut waits = request(Kind::Permit, 30, 2);
    let waiter = ask("k", 31, LEASE).grant;
    waits.waiter = Some(waiter);
    let late = setting.proxy.hold(1, joins);
    setting.hasty.clone().acquire(waits.clone()).await.unwrap_err();
    late.caught().await;
    for grant in [waits.grant, waiter] {
        let undone = answered(|| setting.hasty.clone().release(gives_up(Kind::Permit, grant))).await;
        assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
    }
    late.release();
    late.swallowed().await;
    assert_eq!(setting.keys('x').await, 0);
}

/// Its caller then gives up the position that there may be.
#[tokio::test]
async fn request_to_join_that_has_no_reply_has_an_unknown_outcome() {
    let setting = setting().await;
    // With its session made before.
    granted(answered(|| setting.hasty.clone().acquire(request(Kind::Permit, 1, 1))).await);
    let waiter = ask("k", 31, LEASE).grant;
    for (loss, number) in [(Loss::Reply, 32), (Loss::Silence, 33)] {
        let mut waits = request(Kind::Permit, number, 2);
        waits.waiter = Some(waiter);
        let fault = loss.of(&setting.proxy, joins);
        let error = setting.hasty.clone().acquire(waits.clone()).await.unwrap_err();
        assert!(fault.fired(), "{loss:?}: no such request");
        assert_eq!(error.outcome, Outcome::Unknown, "{loss:?}: {error}");
        setting.has_positions(1).await;
        for grant in [waits.grant, waiter] {
            let undone = answered(|| setting.hasty.clone().release(gives_up(Kind::Permit, grant))).await;
            assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
        }
        setting.has_positions(0).await;
    }
}

/// The waiter asks again, and is served at once, before its request to join arrives.
#[tokio::test]
async fn request_to_join_that_comes_after_its_waiter_was_served_leaves_no_position() {
    let setting = setting().await;
    // With its session made before.
    granted(answered(|| setting.hasty.clone().acquire(request(Kind::Permit, 1, 1))).await);
    granted(setting.patient.clone().acquire(request(Kind::Permit, 2, 1)).await);
    let mut waits = request(Kind::Permit, 30, 2);
    waits.waiter = Some(ask("k", 31, LEASE).grant);
    let late = setting.proxy.hold(1, joins);
    setting.hasty.clone().acquire(waits.clone()).await.unwrap_err();
    late.caught().await;
    for (store, number) in [(&setting.hasty, 1), (&setting.patient, 2)] {
        let grant = ask("k", number, LEASE).grant;
        let released = answered(|| store.clone().release(gives_up(Kind::Permit, grant))).await;
        assert!(released.is_ok(), "{released:?}");
    }
    granted(answered(|| setting.hasty.clone().acquire(waits.clone())).await);
    late.release();
    late.swallowed().await;
    assert_eq!(setting.keys('x').await, 0);
}

#[tokio::test]
async fn undone_acquire_of_unowned_permits_gives_none_to_a_semaphore_that_was_deleted_and_set_anew() {
    let setting = setting().await;
    let semaphore = client(&setting.patient).await.unowned_semaphore("k");
    for (number, is_set) in [(1, true), (2, false)] {
        let request = request(Kind::Unowned, number, 2);
        let undo = gives_up(Kind::Unowned, request.grant);
        granted(setting.patient.clone().acquire(request).await);
        assert!(semaphore.delete().await.unwrap());
        if is_set {
            assert!(semaphore.try_set_permits(2).await.unwrap());
        }
        let undone = setting.patient.clone().release(undo).await;
        assert_eq!(undone.unwrap(), ReleaseReply::NotHeld { repeated: false });
        let free = is_set.then_some(2);
        let expected = CounterReply::Permits { free, held: 0 };
        assert_eq!(setting.permits().await, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_permits_are_renewed_by_few_requests() {
    let server = Arc::new(Etcd::start().await);
    let store = connected(server.builder("many/").timeout(PATIENCE)).await;
    let key = |number: u64| format!("k{}", number % 100);
    let acquires = (1..=10_000).map(|number| {
        let mut request = ask(&key(number), number, LEASE);
        (request.kind, request.permits) = (Kind::Permit, Some(100));
        store.clone().acquire(request)
    });
    for reply in some_at_a_time(acquires).await {
        granted(reply);
    }
    let (before, begun) = (server.requests().await, Instant::now());
    let renew = async |chunk: u64| {
        let requests = (1..=200).map(|number| {
            let number = chunk * 200 + number;
            let mut request = renewal(&key(number), number, LEASE);
            request.kind = Kind::Permit;
            request
        });
        for reply in store.clone().renew(requests.collect()).await.unwrap() {
            assert!(matches!(reply, Ok(Renewal::RenewedFor(_))), "{reply:?}");
        }
    };
    join_all((0..50).map(&renew)).await;
    let sent = server.requests().await - before;
    are_few(sent, begun);
}

/// The server itself compares: neither the holder nor its process knows of the loss before.
#[tokio::test]
async fn transaction_of_a_permit_or_a_term_is_carried_out_while_it_is_held() {
    let setting = setting().await;
    let (locks, other) = (&setting.patient, setting.neighbor().await);
    let client = client(locks).await;
    let written = format!("{}written", setting.namespace);
    let permit = client.semaphore("k").limit(3).acquire_many(2).await.unwrap();
    let term = client.leader("l").campaign().await.unwrap();
    let transactions = |value: &'static str| {
        let both = [("k", locks.transaction(&permit)), ("l", locks.transaction(&term))];
        both.map(|(key, transaction)| (key, transaction.unwrap().put(&*written, value)))
    };
    for (_, transaction) in transactions("held") {
        transaction.commit().await.unwrap();
    }
    for (key, late) in transactions("late") {
        assert!(other.force_release(key).await.unwrap());
        // Others have it by now, as many as it was.
        let next = match key {
            "k" => other.semaphore(key).limit(3).acquire_many(2).await.map(drop),
            _ => other.leader(key).campaign().await.map(drop),
        };
        next.unwrap();
        let lost = late.commit().await.unwrap_err();
        assert!(matches!(lost, TransactionError::Lost { .. }), "{key}: {lost:?}");
    }
    assert!(!permit.is_held() && !term.is_held(), "and their guards");
    let value = setting.server.keys(&written).await;
    assert_eq!(value, [(written.clone(), "held".to_owned())]);
}

/// What one of them has deleted, no other one changes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_race_count_a_latch_down_to_zero_once_and_bring_no_deleted_number_back() {
    let setting = setting().await;
    let mut processes = Vec::new();
    for _ in 0..4 {
        processes.push(setting.neighbor().await);
    }
    for round in 0..40 {
        let latch = processes[0].latch("l");
        assert!(latch.try_set_count(1).await.unwrap());
        let down = async |process: &LockClient| process.latch("l").count_down().await;
        let downs = join_all(processes.iter().map(down)).await;
        let zeros = downs.iter().filter(|down| matches!(down, Ok(0))).count();
        let open = downs
            .iter()
            .filter(|down| matches!(down, Err(Error::LatchOpen { .. })))
            .count();
        assert_eq!((zeros, open), (1, 3), "round {round}: {downs:?}");

        assert!(latch.try_set_count(9).await.unwrap());
        let (other, semaphore) = (processes[1].latch("l"), processes[0].semaphore("k"));
        let (deleted, _) = tokio::join!(latch.delete(), other.count_down());
        assert!(deleted.unwrap());
        assert_eq!(latch.count().await.unwrap(), 0, "round {round}");

        assert!(semaphore.try_set_permits(5).await.unwrap());
        let other = processes[1].semaphore("k");
        let (deleted, _, _) = tokio::join!(semaphore.delete(), other.remove_permits(1), other.try_acquire());
        assert!(deleted.unwrap());
        assert_eq!(setting.keys('A').await, 0, "round {round}");
    }
}
