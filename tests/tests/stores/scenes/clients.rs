//! What a whole client does on a store: many locks, a clock of the server that is set, an end without a word.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::HoldState;
use dlock::store::{AcquireReply, Bind, Kind, Outcome, RenewRequest, Renewal};
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::{Clock, eventually};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

use super::{LEASE, MS, Rows, SEC, Setting, ask, client, end, is_released, row};

/// Clocks of clients do not count; that of the server does: ahead ends leases early, and never makes two tokens of one.
pub(crate) async fn clock_that_jumps_lets_tokens_grow_and_the_holder_know<B: Rows>(
    start: impl AsyncFnOnce(&Clock) -> B::Server,
) {
    let clock = Clock::new().expect("libfaketime");
    let server = Arc::new(start(&clock).await);
    let setting = Setting::<B>::on(server).await;
    let (here, there) = (client(&setting.patient).await, client(&setting.patient).await);
    let guard = here.lock("k").lease(6 * SEC).acquire().await.unwrap();
    clock
        .set(Duration::from_secs(3600))
        .expect("its file can be written");
    let next = within(PATIENCE, "the lease is over", there.lock("k").acquire())
        .await
        .unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    within(PATIENCE, "it is told", guard.lost()).await;
    // Back again: what was granted an hour ahead is kept by its renewals, and tokens go on from there.
    clock.set(Duration::ZERO).expect("its file can be written");
    let token = next.fencing_token();
    next.release().await.unwrap();
    setting.backend.expire().await;
    let last = within(PATIENCE, "free again", there.lock("k").acquire())
        .await
        .unwrap();
    assert!(last.fencing_token() > token);
    // Requests are refused after a time of the server's clock as it is now.
    for number in 1..4 {
        let reply = setting.patient.clone().acquire(ask("fresh", number, LEASE)).await;
        assert!(matches!(reply, Ok(AcquireReply::Acquired(_))), "{reply:?}");
        assert!(is_released(
            &setting.patient.clone().release(end("fresh", number)).await
        ));
    }
}

/// The server has to be the test's own.
pub(crate) async fn dropped_client_leaves_no_connection_and_no_lock<B: Rows>(server: B::Server) {
    let setting = Setting::<B>::on(Arc::new(server)).await;
    let Setting { backend, hasty, .. } = setting;
    drop((setting.patient, setting.proxy, hasty));
    for waits in [false, true] {
        let stores = [
            backend.store(None, PATIENCE).await,
            backend.store(None, PATIENCE).await,
        ];
        let (here, there) = (client(&stores[0]).await, client(&stores[1]).await);
        drop(stores);
        let guards = join_all((0..50).map(|n| here.lock(format!("k{n}")).acquire())).await;
        assert!(guards.iter().all(Result::is_ok));
        assert!(backend.connections().await > 0);
        let waiter = waits.then(|| tokio::spawn(there.lock("k7").acquire()));
        if let Some(waiter) = waiter {
            // Where there are notifications it listens.
            sleep(300 * MS).await;
            waiter.abort();
        }
        drop((guards, here, there));
        eventually("its locks are released, and no connection is left", async || {
            backend.count("holder <> ''").await == 0 && backend.connections().await == 0
        })
        .await;
    }
}

/// It lasts two thirds of a lease.
pub(crate) async fn many_locks_of_a_client_are_renewed_by_few_statements<B: Rows>(server: Arc<B::Server>) {
    const THIRD: Duration = Duration::from_secs(4);
    let setting = Setting::<B>::on(server).await;
    let store = setting.backend.store(Some(&setting.proxy), PATIENCE).await;
    let here = client(&store).await;
    let mut guards = Vec::new();
    for some in 0..20 {
        let keys = (0..500).map(|n| format!("k{some} {n}"));
        let asked = keys.map(|key| here.lock(key).lease(3 * THIRD).acquire());
        guards.extend(join_all(asked).await.into_iter().map(Result::unwrap));
    }
    let renewals = || -> usize { setting.proxy.requests().iter().map(B::renewals).sum() };
    let (before, began) = (renewals(), Instant::now());
    sleep(2 * THIRD).await;
    let (sent, thirds) = (renewals() - before, began.elapsed().div_duration_f64(THIRD));
    assert!(
        sent as f64 <= 60.0 * thirds,
        "{sent} statements in {thirds} thirds of a lease"
    );
    eventually("each is renewed", async || renewals() - before > 40).await;
}

/// Dead-locks, serialization failures and lock waits at every third change, whatever makes it.
pub(crate) async fn conflicts_at_any_step_cost_no_lock_and_grant_none_twice<B: Rows>(server: Arc<B::Server>) {
    let setting = Setting::<B>::on(server).await;
    row(&setting.patient, "k").await;
    setting.backend.conflicts().await;
    let (inside, tokens) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let work = setting.processes(6).await.into_iter().map(async |store| {
        let here = client(&store).await;
        for n in 0..10 {
            let key = format!("of {:p} {n}", &here);
            let own = within(PATIENCE, "a new key", here.lock(key).acquire()).await;
            let guard = within(2 * PATIENCE, "a key of all", here.lock("k").acquire())
                .await
                .unwrap();
            assert!(!inside.swap(true, Ordering::SeqCst), "two have it");
            tokens.lock().push(guard.fencing_token());
            let bound = guard.bind().unwrap().remove(0);
            let renewal = RenewRequest::new(Kind::Mutex, bound.key, bound.grant, LEASE);
            match store.clone().renew(vec![renewal]).await.unwrap().remove(0) {
                Ok(renewed) => assert_eq!(renewed, Renewal::Renewed),
                Err(error) => assert_eq!(error.outcome, Outcome::NotDone, "{error}"),
            }
            inside.store(false, Ordering::SeqCst);
            within(PATIENCE, "a release", guard.release()).await.unwrap();
            let own = own.unwrap();
            assert_eq!(own.state(), HoldState::Held);
            within(PATIENCE, "a release", own.release()).await.unwrap();
        }
    });
    join_all(work).await;
    let tokens = tokens.into_inner();
    assert_eq!(tokens.len(), 60);
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
    assert_eq!(setting.held().await, 0);
}
