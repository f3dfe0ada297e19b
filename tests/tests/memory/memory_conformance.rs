//! The contract of stores (crate `dlock-conformance`) on stores in memory, and on some that break it on purpose.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::LockKey;
use dlock::store::counter::Counters;
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GrantId, Holder, Kind, Reason, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock_conformance::{CheckReport, Fixture, Verdict, conform, run_only};

struct Memory(MemoryStore);

impl Fixture for Memory {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    async fn forget(&self) -> bool {
        self.0.clear();
        true
    }
}

mod memory {
    use super::*;

    async fn fixture() -> Memory {
        Memory(MemoryStore::new())
    }

    conform!(fixture);
}

mod quorum {
    use super::*;

    struct OfMemory(dlock_tests::Store);

    impl Fixture for OfMemory {
        async fn store(&self) -> Arc<dyn Store> {
            self.0.store().await
        }

        async fn forget(&self) -> bool {
            self.0.flush().await;
            true
        }
    }

    async fn fixture() -> OfMemory {
        OfMemory(dlock_tests::Store::memory_quorum())
    }

    conform!(fixture);
}

/// A store may lose the reply to an acquire that it carried out: it keeps the contract all the same.
mod lossy {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(20);

    /// Plain locks and nothing else, for twenty seconds: no client can force one open.
    #[derive(Clone)]
    struct Lossy {
        memory: Arc<MemoryStore>,
        loses_next: Arc<AtomicBool>,
    }

    impl Store for Lossy {
        fn capabilities(&self) -> Capabilities {
            Capabilities::new([Kind::Mutex]).longest_lease(LONGEST)
        }

        fn acquire(self: Arc<Self>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
            if request.kind != Kind::Mutex || request.lease > LONGEST {
                let error = StoreError::not_done(Reason::Unsupported, "plain locks only, and no long ones");
                return Box::pin(ready(Err(error)));
            }
            request.tokens = 1;
            let step = self.memory.clone().acquire(request);
            Box::pin(async move {
                match step.await {
                    Ok(AcquireReply::Acquired(_)) if self.loses_next.swap(false, Ordering::Relaxed) => {
                        Err(StoreError::unknown("the reply was lost"))
                    }
                    reply => reply,
                }
            })
        }

        fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
            self.memory.clone().release(request)
        }

        fn renew(
            self: Arc<Self>,
            requests: Vec<RenewRequest>,
        ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
            self.memory.clone().renew(requests)
        }
    }

    impl Fixture for Lossy {
        async fn store(&self) -> Arc<dyn Store> {
            Arc::new(self.clone())
        }

        fn patience(&self) -> Duration {
            Duration::from_secs(10)
        }

        async fn lose_next_reply(&self) -> bool {
            self.loses_next.store(true, Ordering::Relaxed);
            true
        }

        async fn restart(&self) -> bool {
            self.lose_next_reply().await
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn store_that_loses_a_reply_keeps_the_contract() {
        let store = Lossy {
            memory: Arc::default(),
            loses_next: Arc::default(),
        };
        let loses = [
            "faults::acquire_with_lost_reply_is_undone_by_release",
            "faults::restarted_store_serves_again",
            "tokens::tokens_grow_over_restart",
            "client::waiting_client_gets_released_lock",
        ];
        let report = run_only(store, |name| loses.contains(&name)).await;
        let kept = |check: &&CheckReport| check.verdict == Verdict::Kept;
        assert_eq!(report.checks.iter().filter(kept).count(), loses.len(), "{report}");
    }
}

/// A store may keep each lock in one of several parts, by its whole name, and grant sets only within a part.
mod sharded {
    use std::hash::{DefaultHasher, Hash, Hasher};

    use super::*;
    use dlock::store::AcquireAllReply;

    const PARTS: u64 = 8;

    #[derive(Clone)]
    struct Sharded(Arc<MemoryStore>);

    fn part(key: &LockKey) -> u32 {
        let mut hasher = DefaultHasher::new();
        key.as_str().hash(&mut hasher);
        (hasher.finish() % PARTS) as u32
    }

    impl Store for Sharded {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities()
        }

        fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
            self.0.clone().acquire(request)
        }

        fn together(&self, _kind: Kind, key: &LockKey) -> Option<u32> {
            Some(part(key))
        }

        fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
            assert!(
                requests
                    .windows(2)
                    .all(|two| part(&two[0].key) == part(&two[1].key))
            );
            self.0.clone().acquire_all(requests)
        }

        fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
            self.0.clone().release(request)
        }

        fn renew(
            self: Arc<Self>,
            requests: Vec<RenewRequest>,
        ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
            self.0.clone().renew(requests)
        }
    }

    impl Fixture for Sharded {
        async fn store(&self) -> Arc<dyn Store> {
            Arc::new(self.clone())
        }
    }

    #[tokio::test]
    async fn store_that_grants_sets_within_a_part_keeps_the_contract() {
        let report = run_only(Sharded(Arc::default()), |name| name.starts_with("sets::")).await;
        let kept = |check: &&CheckReport| check.verdict == Verdict::Kept;
        assert_eq!(report.checks.iter().filter(kept).count(), 2, "{report}");
    }
}

/// A test that nothing fails shows nothing: each of these stores breaks one promise, and some tests have to say so.
mod broken {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Defect {
        /// A step is taken when its future is polled.
        Lazy,
        /// A release ends whatever grant the key has.
        ReleasesOthers,
        /// A release says that it released something, always.
        ReleasesNothing,
        /// A renewal says that it renewed something, always.
        RenewsNothing,
        /// A renewal is answered, and the lease runs on as it did.
        RenewsWithoutEffect,
        /// All tokens are the same.
        OneToken,
        /// A block of tokens is given again.
        BlocksOverlap,
        /// Leases never end.
        NoExpiry,
        /// Leases end too early.
        ShortLeases,
        /// A key stays taken for no longer than its lock is held.
        NoMinHold,
        /// Releases are not told.
        Silent,
        /// Names are the same in capitals.
        IgnoresCase,
        /// Names are the same from some length on.
        CutsNames,
        /// A list has everything.
        ListsAll,
        /// It spawns a task in a verb.
        Spawns,
    }
    use Defect::*;

    struct Broken(Arc<MemoryStore>, Defect);

    impl Broken {
        fn key(&self, key: LockKey) -> LockKey {
            match self.1 {
                IgnoresCase => LockKey::raw(key.as_str().to_lowercase()),
                CutsNames => LockKey::raw(key.as_str().chars().take(200).collect::<String>()),
                _ => key,
            }
        }

        fn step<T: Send + 'static>(
            &self,
            call: impl FnOnce(Arc<MemoryStore>) -> StoreFuture<T> + Send + 'static,
        ) -> StoreFuture<T> {
            let store = self.0.clone();
            match self.1 {
                Lazy => Box::pin(async move { call(store).await }),
                Spawns => {
                    let step = tokio::spawn(call(store));
                    Box::pin(async move { step.await.expect("a step does not panic") })
                }
                _ => call(store),
            }
        }
    }

    impl Store for Broken {
        fn capabilities(&self) -> Capabilities {
            self.0.capabilities().largest_set(1)
        }

        fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
            self.0.clone().counters()
        }

        fn acquire(self: Arc<Self>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
            request.key = self.key(request.key);
            match self.1 {
                NoExpiry => request.lease *= 1000,
                ShortLeases => request.lease /= 2,
                _ => {}
            }
            let (step, defect) = (self.step(|store| store.acquire(request)), self.1);
            Box::pin(async move {
                let mut reply = step.await?;
                if let AcquireReply::Acquired(granted) = &mut reply {
                    match defect {
                        OneToken => (granted.first_token, granted.last_token) = (1, 1),
                        BlocksOverlap => granted.first_token -= 1,
                        _ => {}
                    }
                }
                Ok(reply)
            })
        }

        fn release(self: Arc<Self>, mut request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
            request.key = self.key(request.key);
            if self.1 == NoMinHold {
                request.keep_for = Duration::ZERO;
            }
            let (key, defect) = (request.key.clone(), self.1);
            let step = self.step(|store| store.release(request));
            let forced = (defect == ReleasesOthers).then(|| self.step(|store| store.force_release(key)));
            Box::pin(async move {
                let reply = step.await?;
                if let Some(forced) = forced {
                    forced.await?;
                }
                Ok(match defect {
                    ReleasesNothing => ReleaseReply::Released { receivers: None },
                    _ => reply,
                })
            })
        }

        fn renew(
            self: Arc<Self>,
            mut requests: Vec<RenewRequest>,
        ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
            for request in &mut requests {
                request.key = self.key(request.key.clone());
                if self.1 == RenewsWithoutEffect {
                    request.lease = Duration::from_millis(1500);
                }
            }
            let (step, defect) = (self.step(|store| store.renew(requests)), self.1);
            Box::pin(async move {
                let mut replies = step.await?;
                if defect == RenewsNothing {
                    replies.fill_with(|| Ok(Renewal::Renewed));
                }
                Ok(replies)
            })
        }

        fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
            let key = self.key(key);
            self.step(|store| store.inspect(key))
        }

        fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
            let prefix = if self.1 == ListsAll { String::new() } else { prefix };
            self.step(|store| store.list(prefix))
        }

        fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
            let key = self.key(key);
            self.step(|store| store.force_release(key))
        }

        fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
            let key = match self.1 {
                Silent => LockKey::raw(format!("{key}: never released")),
                _ => self.key(key.clone()),
            };
            self.0.clone().watch(kind, &key, grant)
        }
    }

    struct Of(Defect, MemoryStore);

    impl Fixture for Of {
        async fn store(&self) -> Arc<dyn Store> {
            Arc::new(Broken(Arc::new(self.1.clone()), self.0))
        }

        fn patience(&self) -> Duration {
            Duration::from_secs(3)
        }
    }

    /// The tests that have to fail for each defect, of those that are about it.
    const CAUGHT: [(Defect, &[&str]); 15] = [
        (
            Lazy,
            &[
                "order::unpolled_release_comes_before_later_acquire",
                "order::steps_take_effect_in_the_order_of_calls",
                "order::renewal_takes_effect_in_the_order_of_calls",
            ],
        ),
        (
            ReleasesOthers,
            &[
                "release::release_of_foreign_grant_changes_nothing",
                "release::release_of_expired_grant_leaves_next_holder_alone",
                "random::random_steps_have_the_replies_of_memory",
            ],
        ),
        (
            ReleasesNothing,
            &[
                "release::second_release_says_not_held",
                "release::release_of_unknown_grant_says_not_held",
            ],
        ),
        (
            RenewsNothing,
            &[
                "renewal::renewal_of_unknown_grant_says_gone",
                "renewal::renewal_of_released_grant_says_gone",
                "renewal::renewal_after_expiry_says_gone",
                "renewal::renewals_are_answered_in_their_order",
                "random::random_steps_have_the_replies_of_memory",
            ],
        ),
        (RenewsWithoutEffect, &["renewal::renewal_extends_lease"]),
        (
            OneToken,
            &[
                "tokens::tokens_grow_over_release",
                "tokens::tokens_grow_over_expiry",
                "tokens::tokens_grow_over_forced_release",
                "random::random_steps_have_the_replies_of_memory",
            ],
        ),
        (BlocksOverlap, &["tokens::tokens_of_blocks_do_not_overlap"]),
        (
            NoExpiry,
            &["expiry::lease_runs_out", "tokens::tokens_grow_over_expiry"],
        ),
        (ShortLeases, &["expiry::lease_lasts"]),
        (NoMinHold, &["min_hold::released_lock_stays_taken_for_min_hold"]),
        (
            Silent,
            &[
                "notifications::release_wakes_watch",
                "notifications::release_wakes_every_watch",
            ],
        ),
        (IgnoresCase, &["names::similar_names_are_different_locks"]),
        (
            CutsNames,
            &["notifications::long_names_that_begin_alike_have_watches_of_their_own"],
        ),
        (ListsAll, &["inspection::list_has_held_locks_with_prefix"]),
        (Spawns, &["order::verbs_can_be_called_outside_of_a_runtime"]),
    ];

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn store_that_breaks_a_promise_is_caught() {
        let runs = CAUGHT.map(|(defect, expected)| {
            tokio::spawn(async move {
                let report = run_only(Of(defect, MemoryStore::new()), |name| expected.contains(&name)).await;
                assert_eq!(
                    report.checks.len(),
                    expected.len(),
                    "{defect:?}: names that are no tests in {expected:?}"
                );
                assert_eq!(
                    report.broken().count(),
                    expected.len(),
                    "{defect:?} went unseen:\n{report}"
                );
            })
        });
        for run in runs {
            run.await.unwrap();
        }
    }
}
