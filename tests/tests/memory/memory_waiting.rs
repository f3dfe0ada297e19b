//! What a call that waits is told, and what becomes of calls that are dropped or not polled, under a paused clock.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::{Error, Lock, LockClient, LockGuard, LockKind};
use dlock_tests::Watched;
use futures_util::poll;
use parking_lot::Mutex;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

struct Setting {
    watched: Watched,
    client: LockClient,
    other: LockClient,
}

/// Two clients of a store; that of the first can be made to hang or to fail.
async fn setting() -> Setting {
    let store = MemoryStore::new();
    let watched = Watched::new(store.clone());
    let client = LockClient::builder().store(watched.clone()).build();
    let other = LockClient::builder().store(store).build();
    Setting {
        client: client.await.unwrap(),
        other: other.await.unwrap(),
        watched,
    }
}

impl Setting {
    fn hangs(&self, hangs: bool) {
        self.watched.seen().hang_acquires.store(hangs, SeqCst);
    }
}

type Call = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// A call of every kind that waits for so long.
fn calls(client: &LockClient, wait: Duration) -> Vec<(&'static str, Call)> {
    let lock = |kind| {
        let acquire = client.lock("k").kind(kind).wait(wait).acquire();
        Box::pin(async move { acquire.await.map(drop) }) as Call
    };
    let writer = client.rw_lock("k").prefer_writers().write().wait(wait).acquire();
    let permit = client.semaphore("s").permits(1).wait(wait).acquire();
    let permits = client.semaphore("s").permits(2).wait(wait).acquire_many(2);
    let unowned = client.unowned_semaphore("u").permits(1).wait(wait).acquire();
    let multi = client.multi(["k", "l"]).wait(wait).acquire();
    vec![
        ("lock", lock(LockKind::Mutex)),
        ("fair", lock(LockKind::Fair)),
        ("fenced", lock(LockKind::Fenced)),
        ("read", lock(LockKind::Read)),
        ("write", lock(LockKind::Write)),
        ("preferred write", Box::pin(async move { writer.await.map(drop) })),
        ("permit", Box::pin(async move { permit.await.map(drop) })),
        ("permits", Box::pin(async move { permits.await.map(drop) })),
        ("unowned", Box::pin(unowned)),
        ("multi", Box::pin(async move { multi.await.map(drop) })),
    ]
}

/// A store that does not reply is at fault, for the call that asks and for those behind it: the lock may be free.
#[tokio::test(start_paused = true)]
async fn silent_store_is_never_reported_as_busy() {
    for wait in [1, 50, 900, 2500] {
        let s = setting().await;
        s.hangs(true);
        let waiting: Vec<_> = (0..5)
            .flat_map(|_| calls(&s.client, wait * MS))
            .map(|(kind, call)| (kind, tokio::spawn(call)))
            .collect();
        for (kind, call) in waiting {
            let error = call.await.unwrap().unwrap_err();
            assert!(error.is_unavailable(), "{kind}, {wait} ms: {error}");
        }
        assert_eq!(s.client.waited_for(), 0);
    }
}

/// "Busy" from before the lock was released does not hold for ever: a store that has been silent since is at fault.
#[tokio::test(start_paused = true)]
async fn store_that_falls_silent_after_a_release_is_not_reported_as_busy() {
    let s = setting().await;
    for kind in [LockKind::Mutex, LockKind::Fair, LockKind::Write, LockKind::Read] {
        let holder = match kind {
            LockKind::Read => LockKind::Write,
            kind => kind,
        };
        let held = s.other.lock("k").kind(holder).acquire().await.unwrap();
        let lock = s.client.lock("k").kind(kind).wait(2 * SEC);
        let waiting: Vec<_> = (0..3).map(|_| tokio::spawn(lock.acquire())).collect();
        sleep(100 * MS).await;
        s.hangs(true);
        held.release().await.unwrap();
        for call in waiting {
            let error = call.await.unwrap().unwrap_err();
            assert!(error.is_unavailable(), "{kind}: {error}");
        }
        s.hangs(false);
    }
}

/// A dropped acquire stands before the next attempt of its process, as a dropped guard does: the attempt never finds the
/// lock busy because of it.
#[tokio::test(start_paused = true)]
async fn dropped_acquire_is_undone_before_the_next_attempt() {
    let s = setting().await;
    s.watched.seen().slow_answers.store(5, SeqCst);
    for together in [false, true] {
        s.watched.seen().together.store(together, SeqCst);
        for round in 0..20 {
            for (kind, mut call) in calls(&s.client, 10 * SEC) {
                assert!(poll!(&mut call).is_pending(), "{kind}");
                drop(call);
                let next = attempts(&s.client, kind).await;
                assert!(next.is_ok(), "{kind}, {together}, {round}: {next:?}");
                sleep(20 * MS).await;
            }
            for (kind, mut call) in tries(&s.client) {
                assert!(poll!(&mut call).is_pending(), "{kind}");
                drop(call);
                let next = attempts(&s.client, kind).await;
                assert!(next.is_ok(), "{kind}, {together}, {round}: {next:?}");
                sleep(20 * MS).await;
            }
        }
        assert!(s.watched.memory().is_empty());
        assert_eq!(s.watched.memory().queued(), 0);
    }
}

/// An attempt at what a call of this sort asks for.
async fn attempts(client: &LockClient, kind: &str) -> Result<(), Error> {
    let (_, call) = tries(client).into_iter().find(|(of, _)| *of == kind).expect(kind);
    call.await
}

fn tries(client: &LockClient) -> Vec<(&'static str, Call)> {
    let lock = |kind| {
        let acquire = client.lock("k").kind(kind).try_acquire();
        Box::pin(async move { acquire.await.map(drop) }) as Call
    };
    let writer = client.rw_lock("k").prefer_writers().write().try_acquire();
    let permit = client.semaphore("s").permits(1).try_acquire();
    let permits = client.semaphore("s").permits(2).try_acquire_many(1);
    let unowned = client.unowned_semaphore("u").permits(1);
    let multi = client.multi(["k", "l"]).try_acquire();
    vec![
        ("lock", lock(LockKind::Mutex)),
        ("fair", lock(LockKind::Fair)),
        ("fenced", lock(LockKind::Fenced)),
        ("read", lock(LockKind::Read)),
        ("write", lock(LockKind::Write)),
        ("preferred write", Box::pin(async move { writer.await.map(drop) })),
        ("permit", Box::pin(async move { permit.await.map(drop) })),
        ("permits", Box::pin(async move { permits.await.map(drop) })),
        (
            "unowned",
            Box::pin(async move {
                unowned.try_acquire().await?;
                unowned.release().await
            }),
        ),
        ("multi", Box::pin(async move { multi.await.map(drop) })),
    ]
}

type Acquire = Pin<Box<dyn Future<Output = Result<LockGuard, Error>> + Send>>;

/// A waiter that is polled once, and kept.
async fn silent(lock: &Lock) -> Acquire {
    let mut acquire: Acquire = Box::pin(lock.acquire());
    assert!(poll!(&mut acquire).is_pending());
    acquire
}

/// How long it takes.
async fn took<T>(work: impl Future<Output = T>) -> Duration {
    let begun = Instant::now();
    work.await;
    begun.elapsed()
}

/// What a waiter loses by not being polled comes within twice the poll deadline of a second.
const GONE: Duration = Duration::from_millis(2100);

/// A lock that was handed off goes on when its waiter is not polled: to the next in the process, and to others.
#[tokio::test(start_paused = true)]
async fn handed_off_lock_goes_on_when_its_waiter_is_not_polled() {
    for kind in [LockKind::Mutex, LockKind::Write, LockKind::Fair] {
        for next_is_here in [false, true] {
            let s = setting().await;
            let lock = s.client.lock("k").kind(kind);
            let held = lock.acquire().await.unwrap();
            let waiting = silent(&lock).await;
            let next = match next_is_here {
                true => tokio::spawn(lock.acquire()),
                false => tokio::spawn(s.other.lock("k").kind(kind).acquire()),
            };
            sleep(10 * MS).await;
            held.release().await.unwrap();
            let next = tokio::time::timeout(60 * SEC, next).await;
            let next = next.expect("no polled waiter has it").unwrap().unwrap();
            // Polled again, it just goes on waiting.
            let waits = tokio::spawn(waiting);
            sleep(5 * SEC).await;
            assert!(!waits.is_finished() && next.is_held(), "{kind}");
            assert!(took(next.release()).await < SEC);
            waits.await.unwrap().unwrap().release().await.unwrap();
            sleep(20 * MS).await;
            assert!(s.watched.memory().is_empty(), "{kind}");
            assert_eq!((s.client.held(), s.client.waited_for()), (0, 0), "{kind}");
        }
    }
}

/// The head of a queue that is not polled blocks no waiter behind it while the lock is free.
#[tokio::test(start_paused = true)]
async fn head_that_is_not_polled_blocks_no_waiter_behind_it() {
    for kind in [
        LockKind::Mutex,
        LockKind::Write,
        LockKind::Read,
        LockKind::Fenced,
        LockKind::Fair,
    ] {
        for slow in [0, 5] {
            let s = setting().await;
            s.watched.seen().slow_answers.store(slow, SeqCst);
            let holder = if kind == LockKind::Read {
                LockKind::Write
            } else {
                kind
            };
            let lock = s.client.lock("k").kind(kind);
            let held = s.other.lock("k").kind(holder).acquire().await.unwrap();
            let head = silent(&lock).await;
            let next = tokio::spawn(lock.acquire());
            sleep(100 * MS).await;
            held.release().await.unwrap();
            let served = took(async { next.await.unwrap().unwrap().release().await.unwrap() }).await;
            assert!(served < 6 * SEC, "{kind}, {slow} ms: {served:?}");
            if kind != LockKind::Fair {
                assert!(served < GONE + 50 * MS, "{kind}, {slow} ms: {served:?}");
            }
            head.await.unwrap().release().await.unwrap();
            sleep(20 * MS).await;
            assert!(s.watched.memory().is_empty(), "{kind}");
            assert_eq!(
                (s.watched.memory().watched(), s.watched.memory().queued()),
                (0, 0),
                "{kind}"
            );
            assert_eq!((s.client.held(), s.client.waited_for()), (0, 0), "{kind}");
        }
    }
}

/// However many waiters of another lock are not polled.
#[tokio::test(start_paused = true)]
async fn many_waiters_that_are_not_polled_delay_no_other_lock() {
    for after in [0, 500, 1100, 1500, 2500, 4900] {
        let s = setting().await;
        let (many, one) = (s.client.lock("many"), s.client.lock("one"));
        let of_many = s.other.lock("many").acquire().await.unwrap();
        let of_one = s.other.lock("one").acquire().await.unwrap();
        let mut crowd = Vec::new();
        for _ in 0..300 {
            crowd.push(silent(&many).await);
        }
        let _head = silent(&one).await;
        let next = tokio::spawn(one.acquire());
        sleep(100 * MS).await;
        of_many.release().await.unwrap();
        sleep(after * MS).await;
        of_one.release().await.unwrap();
        let served = took(async { drop(next.await.unwrap().unwrap()) }).await;
        assert!(served < GONE + 100 * MS, "{after} ms: {served:?}");
    }
}

/// Also where the last of them misses its poll deadline just before all queues are checked.
#[tokio::test(start_paused = true)]
async fn waiters_that_are_not_polled_never_postpone_the_check_of_other_locks() {
    for crowd in [18, 19, 20, 21] {
        for after in [1995, 2010, 2100, 2500, 2900, 2990] {
            let s = setting().await;
            let (many, one) = (s.client.lock("many"), s.client.lock("one"));
            let of_many = s.other.lock("many").acquire().await.unwrap();
            let of_one = s.other.lock("one").acquire().await.unwrap();
            let mut waiting = Vec::new();
            for _ in 0..crowd {
                waiting.push(silent(&many).await);
            }
            let _head = silent(&one).await;
            let next = tokio::spawn(one.acquire());
            // What woke them until now is over.
            sleep(5 * SEC).await;
            of_many.release().await.unwrap();
            sleep(after * MS).await;
            of_one.release().await.unwrap();
            let served = took(async { drop(next.await.unwrap().unwrap()) }).await;
            assert!(served < GONE + 50 * MS, "{crowd}, {after} ms: {served:?}");
        }
    }
}

/// A lock that the store granted is released when the waiter does not come for it.
#[tokio::test(start_paused = true)]
async fn granted_lock_is_released_when_its_waiter_is_not_polled() {
    for kind in [LockKind::Mutex, LockKind::Write, LockKind::Fenced, LockKind::Fair] {
        let s = setting().await;
        s.watched.seen().slow_answers.store(5, SeqCst);
        let waiting = silent(&s.client.lock("k").kind(kind)).await;
        let lock = s.other.lock("k").kind(kind);
        let served = took(async { lock.acquire().await.unwrap().release().await.unwrap() }).await;
        assert!(served < GONE + 50 * MS, "{kind}: {served:?}");
        waiting.await.unwrap().release().await.unwrap();
        sleep(20 * MS).await;
        assert!(s.watched.memory().is_empty(), "{kind}");
    }
}

/// The reply is withdrawn from the waiter, but its position at the store stays.
#[tokio::test(start_paused = true)]
async fn fair_waiter_that_is_polled_late_keeps_its_position() {
    let s = setting().await;
    s.watched.seen().slow_answers.store(5, SeqCst);
    let elsewhere = s.other.fair_lock("k");
    let held = elsewhere.acquire().await.unwrap();
    let late = silent(&s.client.fair_lock("k")).await;
    let next = tokio::spawn(elsewhere.acquire());
    sleep(GONE + 400 * MS).await;
    let late = tokio::spawn(late);
    sleep(100 * MS).await;
    held.release().await.unwrap();
    let late = tokio::time::timeout(SEC, late).await;
    let late = late.expect("its position was given up").unwrap().unwrap();
    assert!(!next.is_finished());
    late.release().await.unwrap();
    next.await.unwrap().unwrap().release().await.unwrap();
}

/// All of them miss their poll deadline, as when their tasks stall.
#[tokio::test(start_paused = true)]
async fn waiters_that_are_polled_late_keep_their_order() {
    let s = setting().await;
    let (lock, elsewhere) = (s.client.lock("k"), s.other.lock("k"));
    let held = elsewhere.acquire().await.unwrap();
    let late = [silent(&lock).await, silent(&lock).await, silent(&lock).await];
    held.release().await.unwrap();
    let held = elsewhere.acquire().await.unwrap();
    sleep(5 * SEC).await;
    assert_eq!(s.client.waited_for(), 0, "they are withdrawn");
    let served: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut tasks = JoinSet::new();
    for (name, acquire) in late.into_iter().enumerate() {
        let served = served.clone();
        tasks.spawn(async move {
            let guard = acquire.await.unwrap();
            served.lock().push(name);
            guard.release().await.unwrap();
        });
    }
    sleep(MS).await;
    held.release().await.unwrap();
    tasks.join_all().await;
    assert_eq!(*served.lock(), [0, 1, 2]);
}

/// A waiter that is polled rarely is served too: it keeps its place in front of those that came later.
#[tokio::test(start_paused = true)]
async fn waiter_that_is_polled_rarely_is_served() {
    for kind in [LockKind::Mutex, LockKind::Fair] {
        let s = setting().await;
        let lock = s.client.lock("k").kind(kind);
        let mut busy = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let lock = lock.clone();
            busy.spawn(async move {
                loop {
                    let guard = lock.acquire().await.unwrap();
                    sleep(300 * MS).await;
                    guard.release().await.unwrap();
                }
            });
        }
        let mut rare: Acquire = Box::pin(lock.acquire());
        let mut polls = 0;
        while poll!(&mut rare).is_pending() {
            polls += 1;
            assert!(polls < 50, "{kind}");
            sleep(2500 * MS).await;
        }
    }
}

/// The pace of a caller: how long it holds the lock, and how long it does something else before it asks again.
#[derive(Debug, Clone, Copy)]
struct Pace {
    holds: Duration,
    thinks: Duration,
}

type MakeLock = fn(&LockClient) -> Lock;

/// More than fit into a time slice.
const MOST: usize = 5000;

/// A waiter of the process that has just released a lock would always be faster than another process.
#[tokio::test(start_paused = true)]
async fn process_with_many_callers_lets_another_process_have_its_turn() {
    let locks: [(&str, MakeLock); 5] = [
        ("plain", |client| client.lock("k")),
        ("without handoffs", |client| client.lock("k").local_handoffs(0)),
        ("of a fixed lease", |client| client.lock("k").fixed_lease(5 * SEC)),
        ("fenced", |client| client.fenced_lock("k")),
        ("write", |client| client.rw_lock("k").write().local_handoffs(0)),
    ];
    let paces = [
        (Duration::ZERO, Duration::ZERO),
        (MS, Duration::ZERO),
        // A caller comes while the other one holds the lock, and no third one waits.
        (10 * MS, 5 * MS),
    ];
    for (name, lock) in locks {
        for (holds, thinks) in paces {
            let pace = Pace { holds, thinks };
            let store = MemoryStore::new();
            let many = LockClient::builder().store(store.clone()).build().await.unwrap();
            let one = LockClient::builder().store(store.clone()).build().await.unwrap();
            // How often the many have had it, and when they stop.
            let (taken, limit) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(MOST)));
            let mut others = JoinSet::new();
            for _ in 0..2 {
                let (lock, taken, limit) = (lock(&many), taken.clone(), limit.clone());
                others.spawn(async move {
                    while taken.fetch_add(1, SeqCst) < limit.load(SeqCst) {
                        let guard = lock.acquire().await.unwrap();
                        pause(pace.holds).await;
                        guard.release().await.unwrap();
                        pause(pace.thinks).await;
                    }
                });
            }
            for turn in 0..20 {
                limit.store(taken.load(SeqCst) + MOST, SeqCst);
                let guard = lock(&one).acquire().await.unwrap();
                let in_time = taken.load(SeqCst) < limit.load(SeqCst);
                assert!(
                    in_time,
                    "{name}, {pace:?}: turn {turn} came behind {MOST} acquisitions"
                );
                guard.release().await.unwrap();
            }
        }
    }
}

async fn pause(time: Duration) {
    match time.is_zero() {
        true => yield_now().await,
        false => sleep(time).await,
    }
}

/// Half of a nanosecond is none: a waiter that asked at once kept the clock from moving.
#[test]
fn waiter_lets_the_paused_clock_pass_the_shortest_min_hold() {
    dlock_tests::paused_for(SEC, async {
        let client = LockClient::memory();
        for nanos in 1..4 {
            let lock = client.lock("k").min_hold(Duration::from_nanos(nanos));
            drop(lock.acquire().await.unwrap());
            lock.acquire().await.unwrap().release().await.unwrap();
        }
    });
}
