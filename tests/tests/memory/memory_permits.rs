//! Semaphores and latches by a paused clock, on memory and with faults: leases, renewal and loss of permits, places in
//! the queue, steps whose answers are lost, and acquires that are dropped at any poll.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::{AcquireReply, AcquireRequest, Busy, GrantId, Hub, Store, Watch};
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, HoldState, LockClient, LockKey, Loss, Permit, Semaphore};
use dlock_tests::{Watched, paused_for};
use futures_util::future::join_all;
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

async fn watched() -> (Watched, LockClient) {
    let watched = Watched::new(MemoryStore::new());
    let client = client_on(watched.clone()).await;
    (watched, client)
}

async fn available(semaphore: &Semaphore) -> i64 {
    semaphore.available().await.unwrap()
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
fn permits_of_a_grant_are_held_for_an_hour_with_one_renewal_every_ten_seconds() {
    paused(async {
        let (watched, client) = watched().await;
        let semaphore = client.semaphore("k").permits(5);
        let permit = semaphore.acquire_many(4).await.unwrap();
        sleep(HOUR).await;
        assert!(permit.is_held() && permit.is_renewed());
        assert_eq!(available(&semaphore).await, 1);
        let renewals = watched.seen().renewals.load(SeqCst);
        assert!((359..=360).contains(&renewals), "{renewals}");
        permit.release().await.unwrap();
        assert_eq!(available(&semaphore).await, 5);
        sleep(HOUR).await;
        assert_eq!(watched.seen().renewals.load(SeqCst), renewals);
        assert_eq!((client.held(), client.waited_for()), (0, 0));
    });
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
fn the_first_of_many_leases_that_ends_serves_who_waits() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (client_on(store.clone()).await, client_on(store).await);
        let semaphore = a.semaphore("k").permits(3);
        let mut held = Vec::new();
        for lease in [90, 20, 50] {
            held.push(
                semaphore
                    .clone()
                    .fixed_lease(lease * SEC)
                    .acquire()
                    .await
                    .unwrap(),
            );
        }
        let begun = Instant::now();
        let one = b.semaphore("k").acquire().await.unwrap();
        assert_eq!(begun.elapsed().as_secs(), 20);
        let two = b.semaphore("k").acquire_many(2).await.unwrap();
        assert_eq!(begun.elapsed().as_secs(), 90);
        drop((held, one, two));
        sleep(SEC).await;
        assert_eq!(available(&semaphore).await, 3);
    });
}

#[test]
fn a_limit_of_time_and_of_waiters_holds_for_permits_as_for_locks() {
    paused(async {
        let client = LockClient::memory();
        let semaphore = client.semaphore("k").permits(1);
        let permit = semaphore.clone().max_hold(25 * SEC).acquire().await.unwrap();
        let begun = Instant::now();
        let waiting = semaphore.clone().max_waiters(2);
        let waiters: Vec<_> = (0..2).map(|_| tokio::spawn(waiting.acquire())).collect();
        sleep(MS).await;
        let third = waiting.acquire().await;
        assert!(
            matches!(third, Err(Error::TooManyWaiters { limit: 2, .. })),
            "{third:?}"
        );
        let over = semaphore.clone().wait(5 * SEC).acquire().await;
        assert!(is_busy(&over) && begun.elapsed().as_secs() == 5);
        assert_eq!(permit.lost().await, Loss::MaxHold);
        for waiter in waiters {
            drop(waiter.await.unwrap().unwrap());
        }
        assert_eq!(begun.elapsed().as_secs(), 25);
    });
}

#[test]
fn who_waits_for_an_hour_keeps_its_place_and_who_is_not_heard_of_loses_it() {
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
                "it is kept for who waits"
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
fn many_who_are_gone_cost_no_more_than_one() {
    paused(async {
        let store = MemoryStore::new();
        let client = client_on(store.clone()).await;
        let semaphore = client.semaphore("k").permits(2);
        let held = semaphore.acquire().await.unwrap();
        for number in 0..20 {
            asks_once(&store, "k", 2, number).await;
        }
        drop(held);
        let begun = Instant::now();
        let waiters = join_all((0..4).map(|_| async {
            let permit = semaphore.acquire().await.unwrap();
            sleep(10 * MS).await;
            permit.release().await.unwrap();
        }));
        waiters.await;
        assert!(begun.elapsed() < 6 * SEC, "{:?}", begun.elapsed());
    });
}

#[test]
fn while_all_wait_for_one_permit_nothing_is_sent_but_looks_at_the_lease() {
    paused(async {
        let (watched, a) = watched().await;
        let b = client_on(Watched::new(watched.memory().clone())).await;
        let held = b.semaphore("k").permits(1).acquire().await.unwrap();
        let waiter = tokio::spawn(a.semaphore("k").acquire());
        sleep(HOUR).await;
        let asked = watched.seen().acquires.load(SeqCst);
        assert!((200..=400).contains(&asked), "{asked} questions in an hour");
        held.release().await.unwrap();
        drop(waiter.await.unwrap().unwrap());
    });
}

#[test]
fn an_acquire_of_permits_whose_answer_is_lost_is_undone_or_repeated() {
    paused(async {
        for fault in [Fault::AnswerLost, Fault::RequestLost] {
            let store = TestStore::new();
            let client = store.client();
            let semaphore = client.semaphore("k").permits(3);
            store.fail_next(Step::Acquire, fault);
            assert!(is_unknown(&semaphore.try_acquire_many(2).await));
            sleep(SEC).await;
            store.fail_next(Step::Acquire, fault);
            let permit = semaphore.acquire_many(3).await.unwrap();
            store.fail_next(Step::Release, fault);
            permit.release().await.unwrap();
            assert_eq!(available(&semaphore).await, 3, "{fault:?}");

            let unowned = client.unowned_semaphore("u").permits(3);
            store.fail_next(Step::Acquire, fault);
            assert!(is_unknown(&unowned.try_acquire_many(2).await));
            sleep(SEC).await;
            assert_eq!(
                unowned.available().await.unwrap_or(3),
                if fault == Fault::AnswerLost { 3 } else { 0 }
            );
            store.fail_next(Step::Acquire, fault);
            unowned.acquire_many(2).await.unwrap();
            sleep(SEC).await;
            assert_eq!(unowned.available().await.unwrap(), 1, "{fault:?}");
            assert_eq!(client.held(), 0);
        }
    });
}

#[test]
fn a_renewal_of_permits_whose_answer_is_lost_is_no_loss() {
    paused(async {
        let store = TestStore::new();
        let semaphore = store.client().semaphore("k").permits(2);
        let permit = semaphore.acquire_many(2).await.unwrap();
        for fault in [Fault::AnswerLost, Fault::RequestLost, Fault::Unreachable] {
            store.fail_next(Step::Renew, fault);
            sleep(15 * SEC).await;
            assert_eq!(permit.state(), HoldState::Held, "{fault:?}");
        }
        permit.release().await.unwrap();
    });
}

#[test]
fn each_step_of_a_counter_is_carried_out_once_however_often_its_answer_is_lost() {
    paused(async {
        for fault in [Fault::AnswerLost, Fault::RequestLost, Fault::Unreachable] {
            let store = TestStore::new();
            let client = store.client();
            let faults = || (0..3).for_each(|_| store.fail_next(Step::Count, fault));
            let (semaphore, unowned) = (client.semaphore("k"), client.unowned_semaphore("u"));

            faults();
            assert!(semaphore.try_set_permits(5).await.unwrap(), "{fault:?}");
            faults();
            assert_eq!(semaphore.add_permits(2).await.unwrap().total, 7);
            faults();
            assert_eq!(semaphore.remove_permits(3).await.unwrap().total, 4);
            faults();
            assert!(semaphore.set_permits(6).await.unwrap());
            faults();
            assert_eq!(available(&semaphore).await, 6);
            faults();
            assert!(semaphore.delete().await.unwrap());

            faults();
            assert!(unowned.try_set_permits(5).await.unwrap());
            unowned.acquire_many(4).await.unwrap();
            faults();
            unowned.release_many(3).await.unwrap();
            faults();
            assert_eq!(unowned.drain().await.unwrap(), 4);
            faults();
            assert_eq!(unowned.remove_permits(1).await.unwrap().available, -1);

            let latch = client.latch("l");
            faults();
            assert!(latch.try_set_count(3).await.unwrap());
            faults();
            assert_eq!(latch.count_down().await.unwrap(), 2);
            faults();
            assert_eq!(latch.count().await.unwrap(), 2);
            faults();
            latch.wait_for(SEC).await.unwrap();
            faults();
            assert!(latch.delete().await.unwrap());
            faults();
            assert!(matches!(latch.count_down().await, Err(Error::LatchOpen { .. })));
        }
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

#[test]
fn the_same_step_is_answered_as_the_first_time_and_another_is_another() {
    paused(async {
        let store = Arc::new(MemoryStore::new());
        let id = |number| GrantId::from_parts(7, number);
        let step = |number, step| {
            let request = CounterRequest::new("k".into(), id(number), step);
            let store = store.clone();
            async move { store.count(request).await.unwrap() }
        };
        let set = CounterStep::SetPermits {
            total: 1,
            only_unset: true,
        };
        let take = CounterStep::AddPermits {
            by: -1,
            unowned: false,
        };
        assert_eq!(step(1, set).await, CounterReply::Done(true));
        assert_eq!(step(1, set).await, CounterReply::Done(true));
        assert_eq!(step(2, set).await, CounterReply::Done(false));
        let none = CounterReply::Permits {
            free: Some(0),
            held: 0,
        };
        assert_eq!(step(3, take).await, none);
        assert_eq!(step(3, take).await, none);
        // What changed nothing changes nothing later either.
        assert_eq!(step(4, take).await, CounterReply::TooFew { is: 0 });
        step(
            5,
            CounterStep::AddPermits {
                by: 9,
                unowned: false,
            },
        )
        .await;
        assert_eq!(step(4, take).await, CounterReply::TooFew { is: 0 });
        assert_eq!(step(3, take).await, none);
        sleep(61 * SEC).await;
        assert_eq!(
            step(6, CounterStep::Permits).await,
            CounterReply::Permits {
                free: Some(9),
                held: 0
            }
        );
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
        Arc::new(Hub::default()).listen("nobody".into(), |_| false, |_| {})
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

/// Polls a future up to `n` times with room for everybody else in between, then drops it. Whether it was done before.
async fn polled<T>(future: impl Future<Output = T>, n: usize) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..n {
        let mut done = None;
        std::future::poll_fn(|cx| {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                done = Some(output);
            }
            Poll::Ready(())
        })
        .await;
        if done.is_some() {
            return done;
        }
        sleep(MS).await;
    }
    None
}

#[test]
fn dropped_acquire_of_permits_leaves_nothing_at_any_poll() {
    paused(async {
        for (busy, permits) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            for second_in_line in [false, true] {
                for n in 0..12 {
                    let case = format!("busy {busy}, {permits} permits, second {second_in_line}, {n} polls");
                    let store = MemoryStore::new();
                    let (a, b) = (client_on(store.clone()).await, client_on(store.clone()).await);
                    let semaphore = a.semaphore("k").permits(2);
                    semaphore.set_permits(2).await.unwrap();
                    let held = match busy {
                        true => Some(semaphore.acquire_many(2).await.unwrap()),
                        false => None,
                    };
                    let first = second_in_line.then(|| tokio::spawn(b.semaphore("k").acquire_many(permits)));
                    tokio::task::yield_now().await;
                    drop(polled(b.semaphore("k").acquire_many(permits), n).await);
                    drop(held);
                    if let Some(first) = first {
                        drop(first.await.unwrap().unwrap());
                    }
                    // Nothing stands in the way, no place in the queue either.
                    sleep(MS).await;
                    drop(semaphore.try_acquire().await.expect(&case));
                    sleep(MS).await;
                    assert_eq!(available(&semaphore).await, 2, "{case}");
                    assert_eq!((store.len(), store.watched()), (0, 0), "{case}");
                    assert_eq!((b.held(), b.waited_for()), (0, 0), "{case}");
                }
            }
        }
    });
}

#[test]
fn unowned_acquire_is_done_or_undone_when_dropped_at_any_poll() {
    paused(async {
        for busy in [false, true] {
            for slow in [0, 5] {
                for n in 0..16 {
                    let watched = Watched::new(MemoryStore::new());
                    watched.seen().slow_answers.store(slow, SeqCst);
                    let client = client_on(watched.clone()).await;
                    let semaphore = client.unowned_semaphore("k");
                    semaphore.try_set_permits(2).await.unwrap();
                    if busy {
                        semaphore.acquire_many(2).await.unwrap();
                    }
                    let dropped = async {
                        let had = polled(semaphore.acquire_many(2), n).await;
                        had.map(|outcome| outcome.unwrap()).is_some()
                    };
                    let release = async {
                        if busy {
                            sleep(4 * MS).await;
                            semaphore.release_many(2).await.unwrap();
                        }
                    };
                    let (had, ()) = tokio::join!(dropped, release);
                    sleep(SEC).await;
                    let left = if had { 0 } else { 2 };
                    assert_eq!(
                        semaphore.available().await.unwrap(),
                        left,
                        "busy {busy}, {slow} ms, {n} polls"
                    );
                    assert_eq!(watched.memory().watched(), 0);
                    assert_eq!((client.held(), client.waited_for()), (0, 0));
                }
            }
        }
    });
}

#[test]
fn a_step_of_a_counter_that_is_dropped_is_carried_out_once_or_was_never_begun() {
    paused(async {
        for n in 0..4 {
            let store = TestStore::new();
            let client = store.client();
            let latch = client.latch("l");
            latch.try_set_count(9).await.unwrap();
            // The first try fails and is repeated in the background.
            store.fail_next(Step::Count, Fault::AnswerLost);
            drop(polled(latch.count_down(), n).await);
            sleep(5 * SEC).await;
            if n == 0 {
                store.fail_next(Step::Count, Fault::AnswerLost);
            }
            assert_eq!(
                latch.count().await.unwrap(),
                if n == 0 { 9 } else { 8 },
                "{n} polls"
            );
        }
    });
}

#[test]
fn a_wait_for_a_latch_that_is_dropped_at_any_poll_leaves_nothing() {
    paused(async {
        for n in 0..6 {
            let store = MemoryStore::new();
            let client = client_on(store.clone()).await;
            let latch = client.latch("l");
            latch.try_set_count(1).await.unwrap();
            assert!(polled(latch.wait(), n).await.is_none());
            assert_eq!(store.watched(), 0, "{n} polls");
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
