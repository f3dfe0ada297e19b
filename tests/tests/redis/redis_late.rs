//! A command that is held back past its client's timeout and let go later finds a world that has moved on:
//! it leaves no ghost hold, touches no successor and prolongs nothing.

use std::time::{Duration, Instant};

use dlock::{Error, LockKind};
use dlock_tests::faults::{
    LEASE, SLACK, SOON, TIMEOUT, acquiring, in_rounds, is_back, is_confirmed, is_free_as, is_free_soon,
    releasing, renewing, setting, step, within,
};
use dlock_tests::{Held, eventually};

const MS: Duration = Duration::from_millis(1);

/// Those whose steps are told apart by their names.
const KINDS: [LockKind; 3] = [LockKind::Mutex, LockKind::Read, LockKind::Write];

/// What such a lock keeps out for certain.
fn kept_out_by(kind: LockKind) -> LockKind {
    match kind {
        LockKind::Read => LockKind::Write,
        kind => kind,
    }
}

/// What a round says in which a step that fails was not even sent in its time.
const TOO_LATE: &str = "its time was over before the step was sent";

fn is_unknown<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::OutcomeUnknown { .. }))
}

/// Lets the command go on and waits until the server has dealt with it.
async fn let_go(held: Held) {
    held.release();
    held.answered().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_arrives_late_leaves_no_ghost_hold() {
    for (kind, new_connection) in KINDS.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        in_rounds("the acquire is sent", async || {
            let (store, proxy, a, b) = setting().await;
            let held = proxy.hold(1, step(acquiring(kind)));
            let once = within(TIMEOUT, "try_acquire", a.lock("k").kind(kind).try_acquire()).await;
            if !held.fired() {
                return Err(TOO_LATE);
            }
            assert!(is_unknown(&once), "{once:?}");
            is_free_as(&b, "k", kind).await;
            if new_connection {
                is_back(&a).await;
                assert!(proxy.connections_seen() > 1, "the silent connection is replaced");
            }
            let_go(held).await;
            assert!(
                !store.as_server().query::<bool>(&["EXISTS", "k"]).await,
                "a ghost"
            );
            is_free_as(&b, "k", kind).await;
            is_back(&a).await;
            is_free_as(&a, "k", kind).await;
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_the_server_takes_for_timely_is_still_undone() {
    in_rounds(
        "the answer of the server's clock is slow, and in time",
        async || {
            let (store, proxy, a, b) = setting().await;
            // The one answer that the client has of the server's clock was long under way, so it believes that the
            // server is ahead, and allows the acquire more time than it has itself.
            let slow = proxy.hold(1, step("inspect"));
            let look = tokio::spawn({
                let a = a.clone();
                async move { a.inspect("another").await }
            });
            slow.caught().await;
            tokio::time::sleep(TIMEOUT - 60 * MS).await;
            slow.release();
            if look.await.unwrap().is_err() {
                return Err("the answer was too late");
            }

            let held = proxy.hold(1, step("acquire"));
            let once = a.lock("k").try_acquire().await;
            if !held.fired() {
                return Err(TOO_LATE);
            }
            assert!(is_unknown(&once), "{once:?}");
            tokio::time::sleep(100 * MS).await;
            let_go(held).await;
            is_free_soon(&b, "k").await;
            is_back(&a).await;
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        },
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_arrives_late_touches_no_successor() {
    for kind in KINDS {
        let (store, proxy, a, b) = setting().await;
        let guard = a.lock("k").kind(kind).acquire().await.unwrap();
        let held = proxy.hold(1, step(releasing(kind)));
        within(SOON, "release", guard.release()).await.unwrap();
        let next = b.lock("k").kind(kept_out_by(kind)).try_acquire().await.unwrap();
        let_go(held).await;
        is_confirmed(&next).await;
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_arrives_late_prolongs_nothing() {
    /// A lease that is shorter than what the late renewal asks for.
    const LESS: Duration = Duration::from_secs(60);
    let (store, proxy, a, b) = setting().await;
    let server = store.as_server();
    // After the release the key is another's, or kept until its minimum: neither is the old grant's any more.
    let cases = KINDS.map(|kind| [(kind, None), (kind, Some(2500 * MS))]);
    for (kind, min_hold) in cases.into_iter().flatten() {
        let started = Instant::now();
        let mut lock = a.lock("k").kind(kind);
        if let Some(min) = min_hold {
            lock = lock.min_hold(min);
        }
        let guard = lock.acquire().await.unwrap();
        let held = proxy.hold(1, step(renewing(kind)));
        let renewed = guard.held();
        let renewal = tokio::spawn(async move { renewed.ensure(2 * LEASE).await });
        held.caught().await;
        within(SOON, "release", guard.release()).await.unwrap();
        match min_hold {
            None => {
                let next = b
                    .lock("k")
                    .kind(kept_out_by(kind))
                    .fixed_lease(LESS)
                    .try_acquire()
                    .await
                    .unwrap();
                let_go(held).await;
                assert!(server.ttl("k").await.unwrap() <= LESS, "prolonged");
                next.release().await.unwrap();
            }
            Some(min) => {
                let_go(held).await;
                eventually("the minimum is over", || async {
                    let next = b.lock("k").kind(kept_out_by(kind)).try_acquire().await;
                    match next {
                        Ok(next) => next.release().await.is_ok(),
                        Err(_) => false,
                    }
                })
                .await;
                let took = started.elapsed();
                assert!(took >= min && took < min + SLACK, "kept for {took:?}");
            }
        }
        assert!(renewal.await.unwrap().is_err());
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_forced_release_ends_no_later_hold() {
    in_rounds("the forced release is sent", async || {
        let (store, proxy, a, b) = setting().await;
        let first = b.lock("k").acquire().await.unwrap();
        let held = proxy.hold(1, step("force"));
        let forced = within(TIMEOUT, "force_release", a.force_release("k")).await;
        if !held.fired() {
            return Err(TOO_LATE);
        }
        assert!(is_unknown(&forced), "{forced:?}");
        // What is known of the server's clock is as exact as a round trip, and that may have been a long one.
        tokio::time::sleep(TIMEOUT).await;
        first.release().await.unwrap();
        let next = b.lock("k").try_acquire().await.unwrap();
        let_go(held).await;
        is_confirmed(&next).await;
        next.release().await.unwrap();
        is_back(&a).await;
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}
