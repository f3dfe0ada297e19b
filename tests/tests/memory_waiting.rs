//! What a call that waits is told, and what becomes of calls that are dropped or not polled, under a paused clock.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::backend::memory::MemoryBackend;
use dlock::{Error, Kind, LockClient};
use dlock_tests::Watched;
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
    let store = MemoryBackend::new();
    let watched = Watched::new(store.clone());
    let client = LockClient::builder().backend(watched.clone()).build();
    let other = LockClient::builder().backend(store).build();
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

    fn fails(&self, fails: bool) {
        self.watched.seen().fail_acquires.store(fails, SeqCst);
    }
}

type Call = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// A call of every kind that waits for so long.
fn calls(client: &LockClient, wait: Duration) -> Vec<(&'static str, Call)> {
    let lock = |kind| {
        let acquire = client.lock("k").kind(kind).wait(wait).acquire();
        Box::pin(async move { acquire.await.map(drop) }) as Call
    };
    let writer = client.rwlock("k").prefer_writers().write().wait(wait).acquire();
    let permit = client.semaphore("s").permits(1).wait(wait).acquire();
    let permits = client.semaphore("s").permits(2).wait(wait).acquire_many(2);
    let unowned = client.unowned_semaphore("u").permits(1).wait(wait).acquire();
    let multi = client.multi(["k", "l"]).wait(wait).acquire();
    vec![
        ("lock", lock(Kind::Lock)),
        ("fair", lock(Kind::Fair)),
        ("fenced", lock(Kind::Fenced)),
        ("read", lock(Kind::Read)),
        ("write", lock(Kind::Write)),
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

/// The same for a store that fails.
#[tokio::test(start_paused = true)]
async fn failing_store_is_never_reported_as_busy() {
    for wait in [1, 50, 900, 2500] {
        let s = setting().await;
        s.fails(true);
        let waiting: Vec<_> = (0..5)
            .flat_map(|_| calls(&s.client, wait * MS))
            .map(|(kind, call)| (kind, tokio::spawn(call)))
            .collect();
        for (kind, call) in waiting {
            let error = call.await.unwrap().unwrap_err();
            assert!(error.is_unavailable(), "{kind}, {wait} ms: {error}");
        }
    }
}

/// A reply that is not there yet is no "busy", and leaves no lock.
#[tokio::test(start_paused = true)]
async fn short_wait_for_a_free_lock_is_not_reported_as_busy() {
    let s = setting().await;
    s.watched.seen().slow_answers.store(5, SeqCst);
    for (kind, call) in calls(&s.client, MS) {
        let error = call.await.unwrap_err();
        assert!(matches!(error, Error::OutcomeUnknown { .. }), "{kind}: {error}");
        sleep(SEC).await;
        assert!(s.watched.memory().is_empty(), "{kind}");
    }
}

/// What the store told the queue's head holds for the calls behind it, and for the next head too.
#[tokio::test(start_paused = true)]
async fn busy_lock_is_reported_as_busy_to_all_that_wait() {
    for kind in [Kind::Lock, Kind::Fair, Kind::Fenced, Kind::Read, Kind::Write] {
        let s = setting().await;
        let holder = match kind {
            Kind::Read => Kind::Write,
            kind => kind,
        };
        let held = s.other.lock("k").kind(holder).acquire().await.unwrap();
        s.watched.seen().slow_answers.store(1, SeqCst);
        let lock = s.client.lock("k").kind(kind).wait(100 * MS);
        let waiting: Vec<_> = (0..10).map(|_| tokio::spawn(lock.acquire())).collect();
        for call in waiting {
            let error = call.await.unwrap().unwrap_err();
            assert!(error.is_busy(), "{kind}: {error}");
        }
        drop(held);
    }
}

/// Another caller of the same process is another holder.
#[tokio::test(start_paused = true)]
async fn lock_that_is_held_in_the_process_is_reported_as_busy() {
    for kind in [Kind::Lock, Kind::Write] {
        let s = setting().await;
        let lock = s.client.lock("k").kind(kind);
        let held = lock.acquire().await.unwrap();
        let (next, late) = (tokio::spawn(lock.acquire()), lock.clone().wait(20 * SEC));
        sleep(MS).await;
        let late = tokio::spawn(late.acquire());
        drop(held);
        // It was handed over by now, and is held while the last one waits.
        let held = next.await.unwrap().unwrap();
        assert!(late.await.unwrap().unwrap_err().is_busy());
        drop(held);
    }
}

/// "Busy" from before the lock was given back does not hold for ever: a store that has been silent since is at fault.
#[tokio::test(start_paused = true)]
async fn store_that_falls_silent_after_a_release_is_not_reported_as_busy() {
    let s = setting().await;
    for kind in [Kind::Lock, Kind::Fair, Kind::Write, Kind::Read] {
        let holder = match kind {
            Kind::Read => Kind::Write,
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

/// `retry_for` bounds each call, however many wait before it in the process.
#[tokio::test(start_paused = true)]
async fn calls_behind_a_failing_head_share_its_patience() {
    let s = setting().await;
    s.fails(true);
    let begun = Instant::now();
    let waiting: Vec<_> = (0..10)
        .map(|_| tokio::spawn(s.client.lock("k").acquire()))
        .collect();
    for call in waiting {
        assert!(call.await.unwrap().unwrap_err().is_unavailable());
    }
    // retry_for is 3 s by default.
    assert!(begun.elapsed() < 6 * SEC, "{:?}", begun.elapsed());
}

/// A latch is closed only where the store has said so.
#[tokio::test(start_paused = true)]
async fn silent_store_is_never_reported_as_a_closed_latch() {
    let s = setting().await;
    let latch = s.client.latch("l");
    s.hangs(true);
    assert!(latch.wait_for(SEC).await.unwrap_err().is_unavailable());
    s.hangs(false);
    latch.try_set_count(1).await.unwrap();
    assert!(!latch.wait_for(SEC).await.unwrap());
}
