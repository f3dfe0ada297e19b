//! Semaphores and latches by a paused clock, on memory and with faults: leases, renewal and loss of permits, places in
//! the queue, steps whose answers are lost, and acquires that are dropped at any poll.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Waker};
use std::time::Duration;

use dlock::operations::LockEventKind;
use dlock::store::Kind;
use dlock::store::counter::Counters;
use dlock::store::{AcquireReply, AcquireRequest, Busy, GrantId, Hub, Store, Watch};
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, HoldState, LockClient, LockKey, Loss, Permit};
use dlock_tests::{Watched, paused_for};
use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

/// The paused clock, and a virtual limit.
fn paused(test: impl Future<Output = ()>) {
    paused_for(10 * HOUR, test);
}

async fn client_on(watched: impl Store) -> LockClient {
    LockClient::builder().store(watched).build().await.unwrap()
}

fn is_busy(outcome: &Result<Permit, Error>) -> bool {
    matches!(outcome, Err(error) if error.is_busy())
}

fn is_unknown<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::OutcomeUnknown { .. }))
}

/// A waiter that asks the store once, and never again.
async fn asks_once(store: &MemoryStore, name: &str, permits: u32, number: u64) -> AcquireReply {
    let grant = GrantId::from_parts(7, number);
    let mut request = AcquireRequest::new(Kind::Permit, LockKey::from(name), grant, 30 * SEC);
    request.amount = permits;
    request.waiter = Some(GrantId::from_parts(7, 1000 + number));
    Arc::new(store.clone()).acquire(request).await.unwrap()
}

#[test]
fn holder_is_lost_before_its_permits_are_given_away() {
    paused(async {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        let (a, b) = (client_on(watched.clone()).await, client_on(store).await);
        for lease in [100 * MS, SEC, 30 * SEC, HOUR] {
            let name = format!("{lease:?}");
            let semaphore = a.semaphore(&*name).permits(2).lease(lease);
            let permit = semaphore.acquire_many(2).await.unwrap();
            let taken = Instant::now();
            watched.seen().hang_renewals.store(true, SeqCst);
            let told = async {
                assert_eq!(permit.lost().await, Loss::Expired);
                let error = permit.check().unwrap_err().to_string();
                assert!(
                    error.starts_with(&format!("permit of semaphore \"{name}\" was lost: ")),
                    "{error}"
                );
                Instant::now()
            };
            let next = async {
                let next = b.semaphore(&*name).acquire().await.unwrap();
                assert_eq!(permit.state(), HoldState::Lost(Loss::Expired));
                (Instant::now(), next)
            };
            let (told, (had, next)) = tokio::join!(told, next);
            let margin = (lease / 100).max(10 * MS);
            assert!(told <= had && told - taken <= lease - margin + MS, "{lease:?}");
            assert!(
                had - taken >= lease && had - taken <= lease + 10 * MS,
                "{:?}",
                had - taken
            );
            watched.seen().hang_renewals.store(false, SeqCst);
            drop((permit, next));
            sleep(SEC).await;
        }
    });
}

#[test]
fn waiter_that_asks_keeps_its_position_for_an_hour_and_a_silent_one_loses_it() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client_on(store.clone()).await, client_on(store.clone()).await);
        let semaphore = a.semaphore("k").permits(2);
        let held = semaphore.acquire().await.unwrap();
        let two = tokio::spawn(b.semaphore("k").acquire_many(2));
        for _ in 0..60 {
            sleep(60 * SEC).await;
            assert!(
                is_busy(&semaphore.try_acquire().await),
                "it is kept for the waiter"
            );
        }
        // What a process leaves that has crashed while it waited.
        let asked = asks_once(&store, "k", 2, 1).await;
        assert!(
            matches!(asked, AcquireReply::Busy(Busy { again: Some(_), .. })),
            "{asked:?}"
        );
        held.release().await.unwrap();
        two.await.unwrap().unwrap().release().await.unwrap();
        let begun = Instant::now();
        let one = semaphore.acquire().await.unwrap();
        assert!(begun.elapsed() <= 5 * SEC, "{:?}", begun.elapsed());
        assert!(
            begun.elapsed() >= 4 * SEC,
            "its place was kept: {:?}",
            begun.elapsed()
        );
        one.release().await.unwrap();
    });
}

#[test]
fn a_step_of_a_counter_that_is_never_answered_is_unknown_and_one_that_was_never_sent_is_not() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let latch = client.latch("l");
        latch.try_set_count(5).await.unwrap();
        (0..200).for_each(|_| store.fail_next(Step::Count, Fault::AnswerLost));
        let begun = Instant::now();
        assert!(is_unknown(&latch.count_down().await));
        // As long as any other step goes on.
        assert!(
            begun.elapsed() >= 3 * SEC && begun.elapsed() < 5 * SEC,
            "{:?}",
            begun.elapsed()
        );
        let looked = store
            .client_with(|builder| builder)
            .await
            .unwrap()
            .latch("l")
            .count()
            .await;
        assert!(
            matches!(looked, Err(Error::Unreachable { .. })),
            "a look has no outcome: {looked:?}"
        );

        let store = TestStore::new();
        let latch = store.client().latch("l");
        store.set_down(true);
        let outcome = latch.count_down().await;
        assert!(matches!(outcome, Err(Error::Unreachable { .. })), "{outcome:?}");
        store.set_down(false);
        store.fail_next(Step::Count, Fault::Refused);
        let outcome = latch.try_set_count(1).await;
        assert!(matches!(outcome, Err(Error::Refused { .. })), "{outcome:?}");
        assert!(latch.try_set_count(1).await.unwrap());
    });
}

/// The shutdown comes between the reply of the store and the end of the call.
#[test]
fn unowned_permit_that_a_shutdown_has_released_is_not_acquired() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let ends = client.clone();
        let _events = client.events_where(move |_, what| {
            if matches!(what, LockEventKind::Acquired { .. }) {
                let _ = ends.shutdown(Duration::ZERO).now_or_never();
            }
            false
        });
        let outcome = client.unowned_semaphore("u").permits(1).acquire().await;
        assert!(matches!(outcome, Err(Error::ClientClosed)), "{outcome:?}");
        sleep(SEC).await;
        let semaphore = store.client().unowned_semaphore("u");
        assert_eq!(semaphore.available().await.unwrap(), 1);
    });
}

/// The store tells no waiter of the end of a lease.
#[test]
fn waiter_without_a_holder_is_served_when_a_lease_ends() {
    paused(async {
        let client = LockClient::memory();
        let semaphore = client.semaphore("k").permits(1).fixed_lease(10 * SEC);
        let permit = semaphore.acquire().await.unwrap();
        let begun = Instant::now();
        let unowned = client.unowned_semaphore("k").wait(HOUR);
        unowned.acquire().await.unwrap();
        assert!(begun.elapsed() <= 11 * SEC, "{:?}", begun.elapsed());
        drop(permit);
    });
}

/// A store whose messages are all lost.
struct Mute(MemoryStore);

impl Mute {
    fn inner(&self) -> Arc<MemoryStore> {
        Arc::new(self.0.clone())
    }
}

impl Store for Mute {
    fn capabilities(&self) -> dlock::store::Capabilities {
        self.0.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> dlock::store::StoreFuture<AcquireReply> {
        Store::acquire(self.inner(), request)
    }

    fn release(
        self: Arc<Self>,
        request: dlock::store::ReleaseRequest,
    ) -> dlock::store::StoreFuture<dlock::store::ReleaseReply> {
        Store::release(self.inner(), request)
    }

    fn renew(
        self: Arc<Self>,
        requests: Vec<dlock::store::RenewRequest>,
    ) -> dlock::store::StoreFuture<Vec<Result<dlock::store::Renewal, dlock::store::StoreError>>> {
        Store::renew(self.inner(), requests)
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> dlock::store::StoreFuture<Vec<dlock::store::Holder>> {
        Store::inspect(self.inner(), key)
    }

    fn list(
        self: Arc<Self>,
        prefix: String,
    ) -> dlock::store::StoreFuture<Vec<(LockKey, dlock::store::Holder)>> {
        Store::list(self.inner(), prefix)
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> dlock::store::StoreFuture<bool> {
        Store::force_release(self.inner(), key)
    }

    fn watch(self: Arc<Self>, _kind: Kind, _key: &LockKey, _grant: GrantId) -> Watch {
        Arc::new(Hub::default()).listen("no publisher".into(), |_| false, |_| {})
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        self.inner().counters()
    }
}

#[test]
fn a_message_that_is_lost_costs_a_look_and_no_lease() {
    paused(async {
        let memory = MemoryStore::new();
        let (a, b) = (client_on(memory.clone()).await, client_on(Mute(memory)).await);
        a.latch("l").try_set_count(1).await.unwrap();
        let latch = b.latch("l");
        let waiter = tokio::spawn(async move { latch.wait().await });
        sleep(HOUR + SEC).await;
        let begun = Instant::now();
        a.latch("l").count_down().await.unwrap();
        waiter.await.unwrap().unwrap();
        assert!(begun.elapsed() <= 30 * SEC, "{:?}", begun.elapsed());

        let held = a
            .semaphore("k")
            .permits(1)
            .lease(300 * SEC)
            .acquire()
            .await
            .unwrap();
        let waiter = tokio::spawn(b.semaphore("k").acquire());
        sleep(HOUR + SEC).await;
        let begun = Instant::now();
        held.release().await.unwrap();
        drop(waiter.await.unwrap().unwrap());
        assert!(begun.elapsed() <= 150 * SEC, "{:?}", begun.elapsed());
    });
}

/// The latch may have been opened since the store said that it was closed.
#[test]
fn latch_is_not_said_to_be_closed_while_the_store_is_silent() {
    paused(async {
        let watched = Watched::new(MemoryStore::new());
        let (waits, opens) = (
            client_on(watched.clone()).await,
            client_on(watched.memory().clone()).await,
        );
        for (silent_for, told, opened) in [
            (1500 * MS, true, None),
            // The message is lost, too.
            (1500 * MS, false, None),
            (100 * MS, true, Some(false)),
        ] {
            let latch = waits.latch(format!("{silent_for:?} {told}"));
            latch.try_set_count(1).await.unwrap();
            let begun = Instant::now();
            let waiter = {
                let latch = latch.clone();
                tokio::spawn(async move { latch.wait_for(2 * SEC).await })
            };
            sleep(2 * SEC - silent_for).await;
            watched.seen().hang_acquires.store(true, SeqCst);
            if told {
                // It is told of this, and asks.
                opens.latch(latch.key().clone()).count_down().await.unwrap();
            }
            let waited = waiter.await.unwrap();
            assert_eq!(begun.elapsed(), 2 * SEC);
            match opened {
                Some(opened) => assert_eq!(waited.unwrap(), opened),
                None => assert!(matches!(waited, Err(Error::Unreachable { .. })), "{waited:?}"),
            }
            watched.seen().hang_acquires.store(false, SeqCst);
        }
    });
}

#[test]
fn futures_of_semaphores_and_latches_can_be_spawned() {
    fn send<T: Send>(value: T) -> T {
        value
    }
    paused(async {
        let client = LockClient::memory();
        let semaphore = client.semaphore("k").permits(1);
        let mut acquire = pin!(send(semaphore.acquire()));
        let poll = acquire.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        drop(send(poll));
        drop(send(semaphore.run(|_| async {})));
        drop(send(semaphore.add_permits(1)));
        drop(send(client.unowned_semaphore("u").acquire()));
        drop(send(client.latch("l").wait()));
    });
}
