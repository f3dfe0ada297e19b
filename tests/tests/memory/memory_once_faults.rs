//! Work that is done once on a store that answers late, refuses, or leaves a claim to a transaction of the work, by a
//! paused clock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dlock::record::{
    ClaimReply, ClaimRequest, ClaimToken, OnOrphan, OwnerReply, RecordKey, RecordStore, Records,
};
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GrantId, Kind, Reason, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::testing::TestStore;
use dlock::{Error, LockClient, LockKey, OnceClaim, OnceError, OnceReply};
use dlock_tests::paused_for;
use futures_util::FutureExt;
use futures_util::future::pending;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(30);

type Reply<T> = Result<OnceReply<T>, OnceError<String>>;

fn paused(test: impl Future<Output = ()>) {
    paused_for(24 * 3600 * SEC, test);
}

/// What the store does with an extension.
#[derive(Clone, Copy)]
enum Extension {
    Done,
    /// A transaction of the work has the record, which takes so long to find out.
    Held(Duration),
    Silent,
}

/// What becomes of a claim.
#[derive(Clone, Copy)]
enum Claimed {
    /// It is carried out, and its reply is lost.
    Unanswered,
    /// A transaction has the record, of whatever attempt.
    Held,
}

/// Records in memory with faults.
struct Faulty {
    inner: Records,
    /// What becomes of the next claims; those after them are carried out and answered.
    next_claims: Mutex<VecDeque<Claimed>>,
    claims_answered_after: Mutex<Duration>,
    extension: Mutex<Extension>,
    /// Results that are longer are refused for good.
    room: usize,
    /// So many marks, the short results, get no answer.
    marks_unanswered: AtomicU32,
    /// Runs between a claim and its reply.
    on_claim: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Faulty {
    fn new(room: usize, marks_unanswered: u32) -> (Arc<Faulty>, Records) {
        let faulty = Arc::new(Faulty {
            inner: LockClient::memory().records().unwrap(),
            next_claims: Mutex::default(),
            claims_answered_after: Mutex::default(),
            extension: Mutex::new(Extension::Done),
            room,
            marks_unanswered: AtomicU32::new(marks_unanswered),
            on_claim: Mutex::default(),
        });
        (faulty.clone(), Records::new(Shared(faulty)))
    }
}

struct Shared(Arc<Faulty>);

impl RecordStore for Shared {
    async fn claim(self: Arc<Self>, request: ClaimRequest) -> Result<ClaimReply, StoreError> {
        let next = self.0.next_claims.lock().pop_front();
        if let Some(Claimed::Held) = next {
            return Ok(ClaimReply::InProgress {
                attempt: 1,
                remaining: SEC,
            });
        }
        let reply = self.0.inner.claim(request).await;
        if let Some(Claimed::Unanswered) = next {
            return Err(StoreError::unknown("no answer"));
        }
        let late = *self.0.claims_answered_after.lock();
        sleep(late).await;
        if let Some(what) = self.0.on_claim.lock().take() {
            what();
        }
        reply
    }

    async fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        let extension = *self.0.extension.lock();
        match extension {
            Extension::Done => self.0.inner.extend(&key, &token, lease, retention).await,
            Extension::Held(after) => {
                sleep(after).await;
                Ok(OwnerReply::Held)
            }
            Extension::Silent => pending().await,
        }
    }

    async fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        if response.len() > self.0.room {
            return Err(StoreError::not_done(Reason::Refused, "too long"));
        }
        let unanswered = &self.0.marks_unanswered;
        let fewer = |left: u32| left.checked_sub(1);
        if unanswered
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer)
            .is_ok()
        {
            return Err(StoreError::unknown("no answer"));
        }
        self.0.inner.complete(&key, &token, response, retention).await
    }

    async fn release(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> Result<OwnerReply, StoreError> {
        self.0.inner.release(&key, &token).await
    }

    async fn abandon(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> Result<OwnerReply, StoreError> {
        self.0.inner.abandon(&key, &token).await
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.0.inner.watch(key)
    }
}

/// A transaction of the work keeps others from the claim as long as it is open. It may end at any moment, so the work is
/// dropped before the lease is over, if the store does not say until then that it is still open.
#[test]
fn a_transaction_that_has_the_claim_prolongs_it_only_where_it_outlasts_the_lease() {
    paused(async {
        for silent_after in [11 * SEC, 22 * SEC, 26 * SEC] {
            let (store, records) = Faulty::new(1 << 20, 0);
            *store.extension.lock() = Extension::Held(Duration::ZERO);
            let begun = Instant::now();
            let reply: Reply<()> = records
                .once("w")
                .lease(LEASE)
                .run(async |_| {
                    sleep(silent_after).await;
                    *store.extension.lock() = Extension::Silent;
                    pending().await
                })
                .await;
            assert!(
                matches!(reply, Err(OnceError::Lost { attempt: 1, .. })),
                "{reply:?}"
            );
            let kept = begun.elapsed();
            assert!(LEASE - SEC < kept && kept < LEASE, "{silent_after:?}: {kept:?}");
        }
    });
}

#[test]
fn a_transaction_that_outlasts_the_lease_does_not_lose_the_claim() {
    paused(async {
        let near = [SEC / 4, SEC, LEASE].map(|lease| (lease, Duration::ZERO));
        let far = |part| [1, 2, 5, 10, 30].map(|lease| (lease * SEC, lease * SEC / part));
        for (lease, latency) in near.into_iter().chain([20, 10, 5, 4].into_iter().flat_map(far)) {
            let (store, records) = Faulty::new(1 << 20, 0);
            let reply: Reply<()> = records
                .once("w")
                .lease(lease)
                .run(async |claim: OnceClaim| {
                    *store.extension.lock() = Extension::Held(latency);
                    for _ in 0..300 {
                        sleep(lease / 100).await;
                        assert!(claim.is_held(), "{lease:?}, {latency:?}");
                    }
                    *store.extension.lock() = Extension::Done;
                    sleep(3 * lease).await;
                    Ok(())
                })
                .await;
            assert!(
                matches!(reply, Ok(OnceReply::Ran(()))),
                "{lease:?}, {latency:?}: {reply:?}"
            );
        }
    });
}

#[test]
fn work_whose_claim_is_over_when_its_reply_comes_is_not_begun_and_does_not_count() {
    paused(async {
        let (store, records) = Faulty::new(1 << 20, 0);
        let work = records.once("w").lease(SEC).on_orphan(OnOrphan::Leave);
        *store.claims_answered_after.lock() = SEC;
        let reply: Reply<u32> = work.run(async |_| panic!("it began")).await;
        assert!(
            matches!(reply, Err(OnceError::Lost { attempt: 1, .. })),
            "{reply:?}"
        );
        *store.claims_answered_after.lock() = Duration::ZERO;
        let reply: Reply<u32> = work.run(async |claim: OnceClaim| Ok(claim.attempt())).await;
        assert!(matches!(reply, Ok(OnceReply::Ran(1))), "{reply:?}");
    });
}

#[test]
fn claim_of_unknown_outcome_is_given_back_where_an_attempt_in_progress_may_be_its_own() {
    paused(async {
        let (store, records) = Faulty::new(1 << 20, 0);
        let work = records.once("w").lease(LEASE).on_orphan(OnOrphan::Leave);
        store
            .next_claims
            .lock()
            .extend([Claimed::Unanswered, Claimed::Held]);
        let reply: Reply<u32> = work.run(async |_| panic!("it began")).await;
        assert!(matches!(reply, Ok(OnceReply::Elsewhere { .. })), "{reply:?}");
        sleep(SEC).await;
        let reply: Reply<u32> = work.run(async |claim: OnceClaim| Ok(claim.attempt())).await;
        assert!(matches!(reply, Ok(OnceReply::Ran(1))), "{reply:?}");
    });
}

/// As one that reported its failure, or was not started.
#[test]
fn a_release_is_sent_until_the_store_is_back_where_an_orphan_would_stay() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let work = client.once("w").lease(SEC).on_orphan(OnOrphan::Leave);
        let reply: Reply<()> = work
            .run(async |_| {
                store.set_down(true);
                Err("the store is down".to_owned())
            })
            .await;
        assert!(matches!(reply, Err(OnceError::Work(_))), "{reply:?}");
        sleep(600 * SEC).await;
        store.set_down(false);
        sleep(10 * SEC).await;
        let reply: Reply<()> = work.run(async |_| Ok(())).await;
        assert!(matches!(reply, Ok(OnceReply::Ran(()))), "{reply:?}");
    });
}

#[test]
fn the_mark_of_a_result_that_is_refused_is_sent_until_the_store_has_it() {
    paused(async {
        let (_, records) = Faulty::new(100, 3);
        let work = records.once("w");
        let reply: Reply<String> = work.run(async |_| Ok("x".repeat(1000))).await;
        assert!(matches!(reply, Ok(OnceReply::Ran(_))), "{reply:?}");
        let reply: Reply<String> = work.run(async |_| panic!("it was done")).await;
        assert!(matches!(reply, Err(OnceError::ResultUnavailable)), "{reply:?}");
    });
}

/// Locks in memory beside records with faults.
struct Both(Arc<MemoryStore>, Records);

impl Store for Both {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        Store::acquire(self.0.clone(), request)
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        Store::release(self.0.clone(), request)
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Store::renew(self.0.clone(), requests)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(self.0.clone(), kind, key, grant)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(self.1.clone())
    }
}

/// The end of the client comes between the claim and its reply, after the call was asked whether it may go on. Otherwise work
/// would begin that no shutdown has seen.
#[test]
fn work_does_not_begin_under_a_claim_whose_client_has_ended_meanwhile() {
    paused(async {
        for is_shut_down in [false, true] {
            let (store, records) = Faulty::new(1 << 20, 0);
            let both = Both(Arc::new(MemoryStore::new()), records.clone());
            let client = LockClient::builder().store(both).build().await.unwrap();
            let ends = client.clone();
            *store.on_claim.lock() = Some(Box::new(move || match is_shut_down {
                true => _ = ends.shutdown(Duration::ZERO).now_or_never(),
                false => ends.drain(),
            }));
            let reply: Reply<()> = client.once("w").run(async |_| panic!("it began")).await;
            let is_refused = match &reply {
                Err(OnceError::Store(Error::ClientClosed)) => is_shut_down,
                Err(OnceError::Store(Error::Draining)) => !is_shut_down,
                _ => false,
            };
            assert!(is_refused, "{reply:?}");
            assert_eq!(client.health().claims, 0);
            client.drained().await;
            client.shutdown(SEC).await;
            // It was no attempt, and nothing waits for its lease.
            let reply: Reply<u32> = records
                .once("w")
                .run(async |claim: OnceClaim| Ok(claim.attempt()))
                .await;
            assert!(matches!(reply, Ok(OnceReply::Ran(1))), "{reply:?}");
        }
    });
}
