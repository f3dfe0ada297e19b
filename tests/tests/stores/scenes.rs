//! What is promised of locks in the rows of a table, whatever the server, and what went wrong elsewhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::store::{
    AcquireReply, AcquireRequest, GrantId, Kind, Outcome, Reason, ReleaseReply, ReleaseRequest, RenewRequest,
    Renewal, Store, StoreError,
};
use dlock::{HoldState, LockClient, LockGuard, Loss};
use dlock_tests::faults::{PATIENCE, answered, in_rounds, within};
use dlock_tests::{Direction, Gateway, Node, Swallow, eventually};
use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use tokio::time::sleep;

use crate::backend::{Asked, Backend};
use crate::losses::LOSSES;

mod clients;
mod full_disk;
mod permits;

pub(super) use clients::{
    clock_that_jumps_lets_tokens_grow_and_the_holder_know,
    conflicts_at_any_step_cost_no_lock_and_grant_none_twice, dropped_client_leaves_no_connection_and_no_lock,
    many_locks_of_a_client_are_renewed_by_few_statements,
};
pub(super) use full_disk::{Full, full_disk_is_told_and_grants_no_lock_twice};
pub(super) use permits::{
    Permits, count, greater_total_is_told_and_a_smaller_one_takes_nothing,
    holders_of_permits_are_shown_and_forced_out, permits_are_shared,
    permits_of_a_process_that_is_cut_off_come_back, permits_their_total_and_a_latch_outlive_a_restart,
    served, steps_of_a_number_whose_request_or_reply_is_lost_are_carried_out_once,
    waiter_for_permits_gives_up_at_any_moment, waiter_for_several_permits_is_not_passed_over,
    waiters_of_all_processes_go_on_when_a_latch_is_counted_down, waits, waits_for,
};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SEC: Duration = Duration::from_secs(1);
/// No test waits for its end.
pub(super) const LEASE: Duration = Duration::from_secs(300);
/// What one step of a hasty store may take.
const TIMEOUT: Duration = Duration::from_millis(600);

pub(super) fn ask(key: &str, number: u64, lease: Duration) -> AcquireRequest {
    AcquireRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number), lease)
}

pub(super) fn end(key: &str, number: u64) -> ReleaseRequest {
    ReleaseRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number))
}

pub(super) fn renewal(key: &str, number: u64, lease: Duration) -> RenewRequest {
    RenewRequest::new(Kind::Mutex, key.into(), GrantId::from_parts(7, number), lease)
}

pub(super) fn token(reply: Result<AcquireReply, StoreError>) -> u64 {
    match reply {
        Ok(AcquireReply::Acquired(granted)) => granted.first_token,
        other => panic!("not granted: {other:?}"),
    }
}

pub(super) fn is_released(reply: &Result<ReleaseReply, StoreError>) -> bool {
    matches!(reply, Ok(ReleaseReply::Released { .. }))
}

/// Acquires locks of new keys.
///
/// # Panics
/// When all of them are granted.
pub(super) async fn acquires_until_it_fails(store: &Arc<impl Store + ?Sized>) -> StoreError {
    for number in 1000..20_000 {
        let key = format!("new {number}");
        if let Err(error) = store.clone().acquire(ask(&key, number, LEASE)).await {
            return error;
        }
    }
    panic!("all locks were granted")
}

/// Makes the row of a key, which is free then.
pub(super) async fn row(store: &Arc<impl Store + ?Sized>, key: &str) {
    token(answered(|| store.clone().acquire(ask(key, 999_999, LEASE))).await);
    let released = answered(|| store.clone().release(end(key, 999_999))).await;
    assert!(released.is_ok(), "{released:?}");
}

pub(super) async fn renewed(
    store: &Arc<impl Store + ?Sized>,
    key: &str,
    number: u64,
    lease: Duration,
) -> Result<Renewal, StoreError> {
    let replies = store.clone().renew(vec![renewal(key, number, lease)]).await;
    replies.expect("each has a reply of its own").remove(0)
}

/// Sees that the lease of a hold runs out before this moment, from which on the server may grant its lock to another client.
///
/// # Panics
/// When it does not.
pub(super) async fn is_lost_before(over: Instant, guard: &LockGuard) {
    loop {
        // Before the guard is asked: what it says is true at this moment or later.
        let asked = Instant::now();
        if let Some(loss) = guard.lost().now_or_never() {
            assert_eq!(loss, Loss::Expired);
            assert!(!guard.is_held());
            return;
        }
        assert!(asked < over, "two clients may hold the lock");
        sleep(5 * MS).await;
    }
}

/// Makes a test of each scene, by the name that it has here, on a server that others use or one of its own.
macro_rules! in_scenes {
    ($on:ty: $($(#[$doc:meta])* fn $name:ident() = $scene:ident($server:expr);)*) => {
        $(
            $(#[$doc])*
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                crate::scenes::$scene::<$on>($server.await).await;
            }
        )*
    };
}
pub(super) use in_scenes;

/// A store that keeps locks in the rows of a table.
pub(super) trait Rows: Backend {
    fn releases(request: &Asked<Self>) -> bool;

    /// How many statements it has that renew leases.
    fn renewals(request: &Asked<Self>) -> usize;

    /// How many rows are so.
    fn count(&self, condition: &str) -> impl Future<Output = i64> + Send;

    /// How many connections clients have to the server, beside the one that asks.
    fn connections(&self) -> impl Future<Output = i64> + Send;

    /// From now on every third change of a row fails, by conflicts of all kinds.
    fn conflicts(&self) -> impl Future<Output = ()> + Send;

    /// From now on the row of this key can be neither made nor changed; that of each other key can.
    fn refuses(&self, key: Option<&str>) -> impl Future<Output = ()> + Send;

    /// Ends the leases of all locks.
    fn expire(&self) -> impl Future<Output = ()> + Send;
}

/// A store that forces a lock open by one request.
pub(super) trait Forces: Backend {
    fn forces(request: &Asked<Self>) -> bool;
}

/// A table, a hasty store behind a network, and a patient one beside it.
struct Setting<B: Backend> {
    backend: B,
    proxy: Gateway<B::Wire>,
    hasty: Arc<dyn Store>,
    patient: Arc<dyn Store>,
}

impl<B: Backend> Setting<B> {
    async fn on(server: Arc<B::Server>) -> Self {
        let proxy = Gateway::start(server.addr());
        let backend = B::on(server).await;
        Setting {
            hasty: backend.store(Some(&proxy), TIMEOUT).await,
            patient: backend.store(None, PATIENCE).await,
            backend,
            proxy,
        }
    }

    /// The stores of so many processes.
    async fn processes(&self, count: usize) -> Vec<Arc<dyn Store>> {
        join_all((0..count).map(|_| self.backend.store(None, PATIENCE))).await
    }
}

impl<B: Rows> Setting<B> {
    async fn held(&self) -> i64 {
        self.backend.count("holder <> ''").await
    }

    /// No lock gets a holder in 200 ms.
    async fn stays_free(&self) {
        for _ in 0..20 {
            sleep(10 * MS).await;
            assert_eq!(self.held().await, 0);
        }
    }
}

async fn client(store: &Arc<dyn Store>) -> LockClient {
    let builder = LockClient::builder().shared_store(store.clone());
    let built = builder.retry_for(PATIENCE).build().await;
    built.expect("the server is there")
}

pub(super) async fn one_of_many_processes_wins<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let stores = setting.processes(8).await;
    for round in 0..6 {
        let key = format!("k{}", round / 2);
        if round % 2 == 1 {
            setting.backend.expire().await;
        }
        let asks = (0..64_usize).map(|n| {
            let number = u64::try_from(round * 100 + n).unwrap();
            stores[n % 8].clone().acquire(ask(&key, number, LEASE))
        });
        let replies = join_all(asks).await;
        let granted = replies
            .iter()
            .filter(|reply| matches!(reply, Ok(AcquireReply::Acquired(_))))
            .count();
        assert_eq!(granted, 1, "{round}: {replies:?}");
        let others = replies
            .iter()
            .filter(|reply| matches!(reply, Ok(AcquireReply::Busy(_))));
        assert_eq!(others.count(), 63, "{round}: {replies:?}");
    }
}

pub(super) async fn tokens_never_go_back<B: Backend>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let drawn = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let work = setting
        .processes(6)
        .await
        .into_iter()
        .zip(1..)
        .map(|(store, process)| {
            let drawn = drawn.clone();
            tokio::spawn(async move {
                for n in 0..60 {
                    let number = process * 1000 + n;
                    if let Ok(AcquireReply::Acquired(granted)) =
                        store.clone().acquire(ask("k", number, LEASE)).await
                    {
                        // Held by one at a time, so this is the order of the grants.
                        drawn.lock().push(granted.first_token);
                        assert!(is_released(&store.clone().release(end("k", number)).await));
                    }
                }
            })
        });
    for done in join_all(work).await {
        done.unwrap();
    }
    let drawn = drawn.lock();
    assert!(
        drawn.len() > 10 && drawn.windows(2).all(|pair| pair[0] < pair[1]),
        "{drawn:?}"
    );
}

pub(super) async fn renewal_revives_no_lock<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let store = &setting.patient;
    token(store.clone().acquire(ask("k", 1, LEASE)).await);
    setting.backend.expire().await;
    token(store.clone().acquire(ask("k", 2, LEASE)).await);
    assert_eq!(renewed(store, "k", 1, LEASE).await.unwrap(), Renewal::Gone);
    assert_eq!(renewed(store, "k", 2, LEASE).await.unwrap(), Renewal::Renewed);
    assert!(setting.backend.forget(false).await);
    assert_eq!(renewed(store, "k", 2, LEASE).await.unwrap(), Renewal::Gone);
    assert_eq!(setting.backend.count("true").await, 0);
}

pub(super) async fn late_acquire_takes_nothing<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    // Its row is there, and the connection.
    row(&setting.hasty, "k").await;
    for number in 2..5 {
        let late = setting.proxy.hold(1, B::acquires);
        eventually("it is sent", async || {
            let reply = setting.hasty.clone().acquire(ask("k", number, LEASE)).await;
            reply.unwrap_err().outcome == Outcome::Unknown
        })
        .await;
        late.caught().await;
        // The copy is on its way yet; the release says when it can do nothing any more.
        let released = answered(|| setting.hasty.clone().release(end("k", number))).await;
        assert!(
            matches!(released, Ok(ReleaseReply::NotHeld { .. })),
            "{released:?}"
        );
        late.release();
        late.delivered().await;
        setting.stays_free().await;
    }
}

pub(super) async fn release_waits_for_a_late_acquire<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let store = setting.backend.store(Some(&setting.proxy), 2 * SEC).await;
    row(&store, "k").await;
    let late = setting.proxy.hold(1, B::acquires);
    let asked = tokio::spawn(store.clone().acquire(ask("k", 2, LEASE)));
    late.caught().await;
    // The connection breaks long before the request is late, which is past it and will be served.
    setting.proxy.cut();
    assert_eq!(asked.await.unwrap().unwrap_err().outcome, Outcome::Unknown);
    let released = answered(|| store.clone().release(end("k", 2))).await;
    assert!(released.is_ok(), "{released:?}");
    late.release();
    late.delivered().await;
    setting.stays_free().await;
}

pub(super) async fn lost_requests_and_replies_leave_nothing_wrong<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let verbs: [fn(&Asked<B>) -> bool; 2] = [B::acquires, B::releases];
    for (verb, is) in verbs.into_iter().enumerate() {
        for how in ["swallowed and cut", "swallowed and silent", "lost"] {
            let fault = match how {
                "swallowed and cut" => setting.proxy.swallow(1, Swallow::Cut, is),
                "swallowed and silent" => setting.proxy.swallow(1, Swallow::Hang, is),
                _ => setting.proxy.lose(1, is),
            };
            let guard = within(PATIENCE, how, here.lock("k").acquire()).await.unwrap();
            let busy = there.lock("k").try_acquire().await.unwrap_err();
            assert!(busy.is_busy(), "{verb} {how}");
            within(PATIENCE, how, guard.release()).await.unwrap();
            assert!(fault.fired(), "{verb} {how}");
            let next = there.lock("k").try_acquire().await.unwrap();
            next.release().await.unwrap();
        }
    }
}

pub(super) async fn lost_request_or_reply_of_a_forced_release_ends_the_lock_or_is_told<B: Forces>(
    server: Arc<B::Server>,
) {
    let setting = Setting::<B>::on(server).await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    for loss in LOSSES {
        let guard = there.lock("k").lease(LEASE).acquire().await.unwrap();
        let fault = loss.of(&setting.proxy, B::forces);
        let forced = within(PATIENCE, "it ends", here.force_release("k")).await;
        assert!(fault.fired(), "{loss:?}");
        // A reply that says that it is done is true.
        if forced.is_err() {
            answered(|| here.force_release("k")).await.unwrap();
        }
        assert_eq!(there.list("").await.unwrap(), [], "{loss:?}: {forced:?}");
        let next = here.lock("k").acquire().await.unwrap();
        assert!(next.fencing_token() > guard.fencing_token());
        let ensured = guard.ensure(1000 * LEASE).await;
        assert!(ensured.is_err_and(|error| error.is_lost()), "{loss:?}");
        next.release().await.unwrap();
    }
}

pub(super) async fn lost_renewals_cost_no_lock<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let here = client(&setting.hasty).await;
    let guard = here.lock("k").lease(6 * SEC).acquire().await.unwrap();
    for _ in 0..2 {
        let fault = setting
            .proxy
            .swallow(1, Swallow::Cut, |request| B::renewals(request) > 0);
        eventually("a renewal gets lost", async || fault.fired()).await;
        eventually("the next one holds", async || guard.state() == HoldState::Held).await;
    }
    guard.release().await.unwrap();
}

pub(super) async fn what_waits_goes_together<B: Backend>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let store = setting.backend.store(Some(&setting.proxy), PATIENCE).await;
    let keys: Vec<String> = (0..100).map(|n| format!("k{n}")).collect();
    let asks = |from: u64| {
        keys.iter()
            .zip(from..)
            .map(|(key, n)| store.clone().acquire(ask(key, n, LEASE)))
    };
    let all = |replies: Vec<Result<AcquireReply, StoreError>>| replies.into_iter().map(token).count();
    assert_eq!(all(join_all(asks(1)).await), 100);
    let ends = keys
        .iter()
        .zip(1..)
        .map(|(key, n)| store.clone().release(end(key, n)));
    assert!(join_all(ends).await.iter().all(is_released));
    let before = setting.proxy.count(B::acquires);
    assert_eq!(all(join_all(asks(1000)).await), 100);
    let sent = setting.proxy.count(B::acquires) - before;
    assert!(sent <= 4, "{sent} round trips");
}

/// Sees that the step of one key was refused, and those of all others were carried out.
fn is_refused_alone<T: std::fmt::Debug>(
    at: usize,
    replies: &[Result<T, StoreError>],
    is_done: impl Fn(&T) -> bool,
) {
    for (n, reply) in replies.iter().enumerate() {
        let is_right = match reply {
            Ok(reply) => n != at && is_done(reply),
            Err(error) => n == at && error.outcome == Outcome::NotDone && error.reason == Reason::Refused,
        };
        assert!(is_right, "{n}, where {at} is refused: {replies:?}");
    }
}

/// Of steps that share a request, whichever it is: the first one, the last one, or one between others.
pub(super) async fn refused_key_costs_no_other_key<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let store = &setting.patient;
    let keys: Vec<String> = (0..8).map(|n| format!("k{n}")).collect();
    for key in &keys {
        row(store, key).await;
    }
    for (at, bad) in keys.iter().enumerate() {
        let numbered = || keys.iter().zip(u64::try_from(10 * at).unwrap()..);
        let acquires = || numbered().map(|(key, n)| store.clone().acquire(ask(key, n, LEASE)));
        let releases = || numbered().map(|(key, n)| store.clone().release(end(key, n)));
        let is_granted = |reply: &AcquireReply| matches!(reply, AcquireReply::Acquired(_));

        setting.backend.refuses(Some(bad)).await;
        is_refused_alone(at, &join_all(acquires()).await, is_granted);
        setting.backend.refuses(None).await;
        token(acquires().nth(at).expect("it is one of them").await);

        setting.backend.refuses(Some(bad)).await;
        let renewals = numbered().map(|(key, n)| renewal(key, n, LEASE)).collect();
        let replies = store
            .clone()
            .renew(renewals)
            .await
            .expect("each has a reply of its own");
        is_refused_alone(at, &replies, |reply| *reply == Renewal::Renewed);
        let replies = join_all(releases()).await;
        is_refused_alone(at, &replies, |reply| {
            matches!(reply, ReleaseReply::Released { .. })
        });
        assert_eq!(setting.held().await, 1);
        setting.backend.refuses(None).await;
        assert!(is_released(&releases().nth(at).expect("it is one of them").await));

        assert_eq!(
            join_all(acquires()).await.into_iter().map(token).count(),
            keys.len()
        );
        setting.backend.refuses(Some(bad)).await;
        let forced = keys
            .iter()
            .map(|key| store.clone().force_release(key.as_str().into()));
        is_refused_alone(at, &join_all(forced).await, |ended| *ended);
        assert_eq!(setting.held().await, 1);
        setting.backend.refuses(None).await;
        assert!(store.clone().force_release(bad.as_str().into()).await.unwrap());
    }
    // Their rows have to be made first.
    for at in 0..8 {
        let keys: Vec<String> = (0..8).map(|n| format!("new {at} {n}")).collect();
        setting.backend.refuses(Some(&keys[at])).await;
        let acquires = keys.iter().zip(u64::try_from(100 + 10 * at).unwrap()..);
        let acquires = acquires.map(|(key, n)| store.clone().acquire(ask(key, n, LEASE)));
        is_refused_alone(at, &join_all(acquires).await, |reply| {
            matches!(reply, AcquireReply::Acquired(_))
        });
    }
}

/// The server has to be the test's own.
pub(super) async fn holds_survive_a_restart_and_waiters_go_on<B: Backend>(server: B::Server) {
    let setting = Setting::<B>::on(Arc::new(server)).await;
    // An acquire that the kill leaves in doubt holds others of its key up for as long as a step may take.
    let store = setting.backend.store(None, 5 * SEC).await;
    let (here, there) = (client(&store).await, client(&store).await);
    let guard = here.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(there.lock("k").acquire());
    sleep(200 * MS).await;
    setting.backend.server().restart().await;
    eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
    assert!(!waiter.is_finished());
    guard.release().await.unwrap();
    let next = within(PATIENCE, "the waiter goes on", waiter).await;
    drop(next.unwrap().unwrap());
}

/// Stopped, as a whole, while another client waits. The server has to be the test's own.
pub(super) async fn holder_is_lost_before_the_lease_ends<B: Backend>(server: B::Server) {
    let setting = Setting::<B>::on(Arc::new(server)).await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let lease = 2 * SEC;
    let (guard, beside, waiting, over) = in_rounds("the server stands still before a renewal", async || {
        let asked = Instant::now();
        let guard = here.lock("k").lease(lease).acquire().await.unwrap();
        // The server counts from before.
        let over = Instant::now() + lease;
        let beside = here.lock("beside").lease(lease).acquire().await.unwrap();
        let waiting = tokio::spawn(there.lock("k").acquire());
        sleep(200 * MS).await;
        setting.backend.server().stop();
        if asked.elapsed() < lease / 4 {
            return Ok((guard, beside, waiting, over));
        }
        setting.backend.server().cont();
        waiting.abort();
        Err("a renewal may have been on its way")
    })
    .await;
    // A guard that nobody asks is told as well.
    let told = within(lease, "it is told", beside.lost());
    let (loss, ()) = join(told, is_lost_before(over, &guard)).await;
    assert_eq!(loss, Loss::Expired);
    let error = within(PATIENCE, "it fails", here.lock("other").wait(SEC).acquire())
        .await
        .unwrap_err();
    assert!(!error.is_busy(), "{error}");
    setting.backend.server().cont();
    let next = within(PATIENCE, "the waiter goes on", waiting).await;
    let next = next.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert!(!guard.is_held());
}

/// Cut off alone, while another client asks for its lock again and again.
pub(super) async fn holder_that_is_cut_off_is_lost_before_another_one_has_its_lock<B: Backend>(
    server: Arc<B::Server>,
) {
    let setting = Setting::<B>::on(server).await;
    let (here, there) = (client(&setting.hasty).await, client(&setting.patient).await);
    let guard = here.lock("k").lease(2 * SEC).acquire().await.unwrap();
    setting.proxy.block(Direction::Both);
    let next = loop {
        match there.lock("k").try_acquire().await {
            Err(error) if error.is_busy() => sleep(MS).await,
            acquired => break acquired.unwrap(),
        }
    };
    assert!(!guard.is_held(), "two clients hold the lock");
    assert_eq!(guard.lost().await, Loss::Expired);
    assert!(next.fencing_token() > guard.fencing_token());
}

pub(super) async fn broken_connections_cost_nothing_that_is_held<B: Backend>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    let here = client(&setting.hasty).await;
    let guards = join_all((0..20).map(|n| here.lock(format!("k{n}")).acquire())).await;
    for _ in 0..5 {
        setting.proxy.cut();
        let guard = within(PATIENCE, "it goes on", here.lock("another").acquire())
            .await
            .unwrap();
        guard.release().await.unwrap();
    }
    for guard in guards {
        let guard = guard.unwrap();
        eventually("it is confirmed", async || guard.state() == HoldState::Held).await;
        guard.release().await.unwrap();
    }
}
