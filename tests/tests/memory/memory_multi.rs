//! Several locks at once by a paused clock: on a store that grants them in one step, and on one that grants one at a
//! time. What time does, and what is left when an acquire is dropped or fails half way.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, Kind, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture,
};
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, LockClient, LockKey, Loss};
use dlock_tests::{Watched, paused};
use futures_util::{FutureExt, poll};
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
/// How long an answer of the store is on its way.
const WAY: Duration = Duration::from_millis(20);

struct Setting {
    store: MemoryStore,
    watched: Watched,
    /// One whose answers take a while.
    a: LockClient,
    /// One beside it.
    b: LockClient,
}

/// With and without a step that takes several.
async fn setting(together: bool) -> Setting {
    let store = MemoryStore::new();
    let watched = Watched::new(store.clone());
    watched.seen().together.store(together, SeqCst);
    watched
        .seen()
        .slow_answers
        .store(WAY.as_millis() as usize, SeqCst);
    let a = LockClient::builder().store(watched.clone()).build().await;
    let b = LockClient::builder().store(store.clone()).build().await;
    let (a, b) = (a.unwrap(), b.unwrap());
    Setting { store, watched, a, b }
}

impl Setting {
    async fn assert_clean(&self, case: &str) {
        sleep(10 * WAY).await;
        assert!(self.store.is_empty(), "{case}: a lock is left");
        assert_eq!(self.store.watched(), 0, "{case}: a watch is left");
        for client in [&self.a, &self.b] {
            assert_eq!((client.held(), client.waited_for()), (0, 0), "{case}");
        }
    }
}

/// The leases begin with the last lock, however long the others took.
#[test]
fn set_that_takes_longer_than_its_lease_is_acquired_and_held() {
    paused(async {
        let setting = setting(false).await;
        let names = (0..200).map(|n| n.to_string());
        let started = Instant::now();
        let guard = setting.a.multi(names).lease(2 * SEC).acquire().await.unwrap();
        assert!(started.elapsed() > 2 * SEC, "{:?}", started.elapsed());
        assert!(guard.is_held());
        sleep(3 * SEC).await;
        assert!(guard.is_held(), "renewed");
        let others = setting.b.lock("0").try_acquire().await;
        assert!(matches!(others, Err(Error::NotAcquired { .. })), "{others:?}");
        guard.release().await.unwrap();
        setting.assert_clean("a long set").await;
    });
}

#[test]
fn three_locks_are_one_step_where_the_store_can_and_one_each_where_it_cannot() {
    for (together, steps) in [(true, 1), (false, 3)] {
        paused(async {
            let setting = setting(together).await;
            let started = Instant::now();
            let guard = setting.a.multi(["c", "a", "b"]).acquire().await.unwrap();
            assert_eq!(setting.watched.seen().acquires.load(SeqCst), steps);
            assert_eq!(started.elapsed(), WAY * steps as u32);
            guard.release().await.unwrap();
            // All releases are on their way at once.
            assert_eq!(started.elapsed(), WAY * (steps as u32 + 1));
            setting.assert_clean("").await;
        });
    }
}

#[test]
fn a_release_that_fails_for_one_is_repeated_and_the_others_are_free_at_once() {
    paused(async {
        let store = TestStore::new();
        let (a, b) = (store.client(), store.client());
        let guard = a.multi(["a", "b", "c"]).acquire().await.unwrap();
        // The last goes first.
        store.fail_next(Step::Release, Fault::Refused);
        let error = guard.release().await.unwrap_err();
        assert!(
            matches!(&error, Error::Refused { what, .. } if what.contains("\"c\"")),
            "{error}"
        );
        drop(b.multi(["a", "b"]).try_acquire().await.unwrap());
        assert!(b.lock("c").try_acquire().await.unwrap_err().is_busy());
        sleep(31 * SEC).await;
        drop(b.lock("c").try_acquire().await.unwrap());

        let guard = a.multi(["a", "b", "c"]).acquire().await.unwrap();
        for _ in 0..2 {
            store.fail_next(Step::Release, Fault::Refused);
        }
        let error = guard.release().await.unwrap_err();
        let Error::NotReleased { failures, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(failures.len(), 2);
        assert!(error.is_unavailable() && !error.is_lost());
        drop(b.lock("a").try_acquire().await.unwrap());
    });
}

#[test]
fn the_signal_tells_the_end_of_the_first_that_ends_also_of_holds_that_were_re_entered() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let (a, b) = (client.lock("a"), client.multi(["a", "b"]));
        let test_store = store.clone();
        a.run(|outer| async move {
            let guard = b.acquire().await.unwrap();
            let (lost, held) = (guard.lost(), guard.held());
            assert!(test_store.lose("b"));
            assert_eq!(lost.await, Loss::Gone);
            assert!(!held.is_held() && outer.is_held());
            assert!(guard.release().await.unwrap_err().is_lost());

            let guard = b.acquire().await.unwrap();
            let lost = guard.lost();
            drop(guard);
            assert_eq!(lost.await, Loss::Released);
            assert!(outer.is_held());
        })
        .await
        .unwrap();
        assert_eq!(store.held(), 0);
    });
}

#[test]
fn nobody_waits_to_be_asked_to_stop_once_one_of_them_is_lost() {
    paused(async {
        let store = TestStore::new();
        let guard = store.client().multi(["a", "b"]).acquire().await.unwrap();
        let mut revoked = Box::pin(guard.revoked());
        assert!(poll!(&mut revoked).is_pending());
        assert!(store.lose("b"));
        assert!(revoked.await.is_none());
        assert!(!guard.is_held());
    });
}

#[test]
fn set_that_outer_frames_hold_asks_no_store() {
    paused(async {
        let setting = setting(true).await;
        let (a, watched) = (setting.a.clone(), setting.watched.clone());
        setting
            .a
            .multi(["a", "b"])
            .run(|outer| async move {
                let before = watched.seen().acquires.load(SeqCst);
                let guard = a.multi(["b", "a"]).try_acquire().await.unwrap();
                assert_eq!(watched.seen().acquires.load(SeqCst), before);
                assert_eq!(guard.fencing_token_of("b"), outer.fencing_token_of("b"));
                let lost = guard.lost();
                drop(guard);
                // The enclosing hold keeps the locks.
                assert!(lost.now_or_never().is_none() && outer.is_held());
            })
            .await
            .unwrap();
        setting.assert_clean("").await;
    });
}

/// Its reply for a set is without the last grant.
struct Short(Arc<MemoryStore>);

impl Store for Short {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.0.clone().acquire(request)
    }
    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.0.clone().release(request)
    }
    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.0.clone().renew(requests)
    }
    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        self.0.together(kind, key)
    }
    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        let reply = self.0.clone().acquire_all(requests);
        Box::pin(async move {
            let mut reply = reply.await?;
            if let AcquireAllReply::Acquired { grants } = &mut reply {
                grants.pop();
            }
            Ok(reply)
        })
    }
}

#[test]
fn set_is_not_acquired_by_a_reply_with_too_few_grants() {
    paused(async {
        let store = MemoryStore::new();
        let client = LockClient::builder().store(Short(Arc::new(store.clone())));
        let client = client.build().await.unwrap();
        let error = client.multi(["a", "b"]).try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error:?}");
        assert!(error.to_string().contains("granted 1 of 2 locks"), "{error}");
        sleep(SEC).await;
        assert!(store.is_empty());
        assert_eq!(client.held(), 0);
    });
}
