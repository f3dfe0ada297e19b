//! Several locks at once, each of which is busy all the time: a caller of all of them gets them in the end, and no caller
//! waits for ever for another waiter. By a paused clock, on a store that grants several in one step and on one that
//! does not.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::Kind;
use dlock::store::{AcquireAllReply, AcquireReply, AcquireRequest, GrantId, ReleaseRequest, Store};
use dlock::stores::memory::MemoryStore;
use dlock::{HoldState, LockClient};
use dlock_tests::{Watched, paused};
use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
/// After how many failed attempts the keys are acquired one after the other.
const LOOKS: usize = 8;
const KEYS: [&str; 3] = ["a", "b", "c"];

/// A store whose answers are on their way for a millisecond; with and without a step that takes several.
struct Setting {
    store: MemoryStore,
    watched: Watched,
}

impl Setting {
    fn new(together: bool) -> Setting {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        watched.seen().together.store(together, SeqCst);
        watched.seen().slow_answers.store(1, SeqCst);
        Setting { store, watched }
    }

    async fn client(&self) -> LockClient {
        let builder = LockClient::builder().store(self.watched.clone());
        builder.build().await.unwrap()
    }

    async fn assert_clean(&self, case: &str) {
        sleep(SEC).await;
        assert!(self.store.is_empty(), "{case}: a lock is left");
        assert_eq!(self.store.watched(), 0, "{case}: a watch is left");
    }
}

/// Has each of the keys busy all the time: a process has it, in which there is always a waiter for it. Their
/// times are such that the keys become available at different moments.
async fn load(setting: &Setting) -> Vec<JoinHandle<()>> {
    let mut tasks = Vec::new();
    for (key, time) in KEYS.iter().zip([71, 113, 131]) {
        let client = setting.client().await;
        for _ in 0..2 {
            let lock = client.lock(*key);
            tasks.push(tokio::spawn(async move {
                loop {
                    let guard = lock.acquire().await.unwrap();
                    sleep(time * MS).await;
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    sleep(100 * MS).await;
    tasks
}

async fn stop(tasks: Vec<JoinHandle<()>>) {
    for task in tasks {
        task.abort();
        let _ = task.await;
    }
}

/// Has a call find one of "a" and "b" free and the other one busy, until it takes them in order; then it has "a", and
/// "b" is held by a guard that is released.
async fn drive_until_it_holds_a(others: &LockClient) -> dlock::LockGuard {
    // It waits for whichever was busy last.
    let mut held = others.lock("a").acquire().await.unwrap();
    let mut other = "b";
    for _ in 0..LOOKS {
        let next = others.lock(other).acquire().await.unwrap();
        other = if other == "b" { "a" } else { "b" };
        held.release().await.unwrap();
        sleep(20 * MS).await;
        held = next;
    }
    assert_eq!(held.key().as_str(), "a");
    // The eighth failed because of "a": it takes "a" first.
    let b = others.lock("b").acquire().await.unwrap();
    held.release().await.unwrap();
    sleep(20 * MS).await;
    let of_a = others.inspect("a").await.unwrap();
    assert!(of_a.is_some(), "it holds nothing");
    b
}

#[test]
fn set_of_always_busy_keys_is_acquired_again_and_again() {
    for together in [true, false] {
        paused(async move {
            let setting = Setting::new(together);
            let busy = load(&setting).await;
            let client = setting.client().await;
            for round in 0..10 {
                let acquire = client.multi(KEYS).acquire();
                let guard = timeout(60 * SEC, acquire).await;
                let guard = guard
                    .unwrap_or_else(|_| panic!("it starves in round {round}"))
                    .unwrap();
                assert_eq!(guard.state(), HoldState::Held);
                sleep(5 * MS).await;
                guard.release().await.unwrap();
                sleep(50 * MS).await;
            }
            stop(busy).await;
            setting.assert_clean("").await;
        });
    }
}

#[test]
fn sets_that_overlap_never_dead_lock_whatever_else_is_busy() {
    for together in [true, false] {
        paused(async move {
            let setting = Setting::new(together);
            let busy = load(&setting).await;
            let sets: [&[&str]; 5] = [
                &["a", "b"],
                &["c", "b"],
                &["c", "a"],
                &["c", "b", "a"],
                &["a", "c", "b"],
            ];
            let inside = Arc::new(KEYS.map(|_| AtomicUsize::new(0)));
            let calls = sets.into_iter().map(async |set| {
                let lock = setting.client().await.multi(set.iter().copied());
                for _ in 0..4 {
                    let guard = lock.acquire().await.unwrap();
                    let mine = KEYS
                        .iter()
                        .zip(inside.iter())
                        .filter(|(key, _)| set.contains(key));
                    let mine: Vec<_> = mine.map(|(_, count)| count).collect();
                    for count in &mine {
                        assert_eq!(count.fetch_add(1, SeqCst), 0, "two at a time");
                    }
                    sleep(3 * MS).await;
                    assert_eq!(guard.state(), HoldState::Held);
                    for count in &mine {
                        count.fetch_sub(1, SeqCst);
                    }
                    guard.release().await.unwrap();
                }
            });
            timeout(1800 * SEC, join_all(calls)).await.expect("a dead-lock");
            stop(busy).await;
            setting.assert_clean("").await;
        });
    }
}

#[test]
fn holder_of_one_key_that_waits_for_another_is_let_by_after_a_while() {
    paused(async {
        let setting = Setting::new(true);
        let (others, client) = (setting.client().await, setting.client().await);
        let call = tokio::spawn({
            let lock = client.multi(["a", "b"]);
            async move {
                sleep(10 * MS).await;
                lock.acquire().await
            }
        });
        let b = drive_until_it_holds_a(&others).await;
        // Against the order: each has what the other waits for.
        let begun = Instant::now();
        let a = others.lock("a").acquire().await.unwrap();
        assert!(
            begun.elapsed() > 500 * MS && begun.elapsed() < 2 * SEC,
            "{:?}",
            begun.elapsed()
        );
        assert!(!call.is_finished());
        drop((a, b));
        call.await.unwrap().unwrap().release().await.unwrap();
        setting.assert_clean("").await;
    });
}

#[test]
fn part_of_a_set_is_renewed_while_it_waits_and_released_when_the_wait_is_over() {
    paused(async {
        let setting = Setting::new(true);
        let (others, client) = (setting.client().await, setting.client().await);
        for wait in [None, Some(600 * MS)] {
            let mut lock = client.multi(["a", "b"]).fixed_lease(200 * MS);
            if let Some(wait) = wait {
                // From when it is driven on.
                lock = lock.wait(10 * MS + 20 * MS * (LOOKS as u32 + 1) + wait);
            }
            let call = tokio::spawn(async move {
                sleep(10 * MS).await;
                lock.acquire().await
            });
            let b = drive_until_it_holds_a(&others).await;
            // More than two leases.
            for _ in 0..5 {
                sleep(90 * MS).await;
                assert!(others.lock("a").try_acquire().await.unwrap_err().is_busy());
            }
            match wait {
                None => {
                    b.release().await.unwrap();
                    let guard = call.await.unwrap().unwrap();
                    // The lease begins for both when the last is acquired.
                    assert!(guard.remaining() > 180 * MS, "{:?}", guard.remaining());
                    assert!(!guard.is_renewed());
                    guard.release().await.unwrap();
                }
                Some(_) => {
                    assert!(call.await.unwrap().unwrap_err().is_busy());
                    sleep(5 * MS).await;
                    others
                        .lock("a")
                        .try_acquire()
                        .await
                        .unwrap()
                        .release()
                        .await
                        .unwrap();
                    b.release().await.unwrap();
                }
            }
            setting.assert_clean(&format!("{wait:?}")).await;
        }
    });
}

#[test]
fn dropped_acquire_in_order_leaves_nothing_at_any_moment() {
    for together in [true, false] {
        paused(async move {
            for at in (0..3000).step_by(111) {
                let setting = Setting::new(together);
                let (others, client) = (setting.client().await, setting.client().await);
                let busy = load(&setting).await;
                let call = tokio::spawn(client.multi(KEYS).acquire());
                sleep(at * MS).await;
                call.abort();
                drop(call.await);
                stop(busy).await;
                sleep(10 * MS).await;
                let all = KEYS.map(|key| others.lock(key).try_acquire());
                for (key, got) in KEYS.iter().zip(join_all(all).await) {
                    let got = got.unwrap_or_else(|error| panic!("{at} ms, {key}: {error}"));
                    got.release().await.unwrap();
                }
                setting.assert_clean(&format!("{at} ms")).await;
                assert_eq!((client.held(), client.waited_for()), (0, 0), "{at} ms");
            }
        });
    }
}

/// A shutdown knows what a call has that is not done: it is counted as held, and released before the shutdown ends, also
/// when the call is not polled any more.
#[test]
fn shutdown_releases_what_a_set_has_so_far() {
    for (together, polled) in [(true, true), (true, false), (false, true), (false, false)] {
        paused(async move {
            let case = format!("together {together}, polled {polled}");
            let setting = Setting::new(together);
            let (others, client) = (setting.client().await, setting.client().await);
            let mut call = Box::pin(client.multi(["a", "b"]).acquire());
            let drive = drive_until_it_holds_a(&others);
            let held = tokio::select! {
                biased;
                held = drive => held,
                _ = &mut call => panic!("{case}: it has both"),
            };
            assert_eq!(client.held(), 1, "{case}");
            let ends = tokio::spawn(async move {
                if polled {
                    let error = call.await.unwrap_err();
                    assert!(matches!(error, dlock::Error::ClientClosed), "{error}");
                } else {
                    sleep(30 * SEC).await;
                    drop(call);
                }
            });
            let report = client.shutdown(5 * SEC).await;
            assert_eq!(
                (report.lost, report.unconfirmed, client.held()),
                (0, 0, 0),
                "{case}"
            );
            assert!(others.lock("a").try_acquire().await.is_ok(), "{case}");
            held.release().await.unwrap();
            ends.await.unwrap();
            setting.assert_clean(&case).await;
        });
    }
}

/// The same for the places of waiters at the store: no client waits behind a client that is shut down.
#[test]
fn shutdown_gives_up_the_places_of_calls_that_wait() {
    paused(async {
        let setting = Setting::new(true);
        let (others, client) = (setting.client().await, setting.client().await);
        let of = |client: &LockClient| {
            let rw = client.rw_lock("rw").prefer_writers();
            (
                client.lock("fair").kind(dlock::LockKind::Fair),
                rw,
                client.semaphore("permits").permits(2),
            )
        };
        let (fair, rw, permits) = of(&others);
        let holds = (fair.acquire().await.unwrap(), rw.read().acquire().await.unwrap());
        let permit = permits.acquire().await.unwrap();
        let (its_fair, its_rw, its_permits) = of(&client);
        let write = its_rw.write();
        let (a, b, c) = (its_fair.acquire(), write.acquire(), its_permits.acquire_many(2));
        let mut waits = Box::pin(futures_util::future::join3(a, b, c));
        assert!(timeout(50 * MS, &mut waits).await.is_err());
        assert!(
            rw.read().try_acquire().await.is_err(),
            "a reader stands back for the writer"
        );
        let report = client.shutdown(5 * SEC).await;
        assert_eq!((report.lost, report.unconfirmed), (0, 0));
        drop(rw.read().try_acquire().await.unwrap());
        drop(permits.try_acquire().await.unwrap());
        drop(holds);
        sleep(5 * MS).await;
        drop(fair.try_acquire().await.unwrap());
        let (a, b, c) = waits.await;
        assert!(a.is_err() && b.is_err() && c.is_err());
        drop(permit);
        setting.assert_clean("places").await;
    });
}

/// A preferred writer that has one of its locks for a moment, and finds another one busy, is not in front of the readers any
/// more: they hear of it.
#[test]
fn readers_are_told_when_a_preferred_set_finds_another_lock_busy() {
    paused(async {
        let store = Arc::new(MemoryStore::new());
        let request = |kind, key: &str, number| {
            AcquireRequest::new(kind, key.into(), GrantId::from_parts(1, number), 30 * SEC)
        };
        let of_set = |key: &str, number| {
            let mut request = request(Kind::Write, key, number);
            request.waiter = Some(GrantId::from_parts(1, 100));
            request
        };
        let acquire = |request| store.clone().acquire(request);
        for (key, number) in [("a", 1), ("b", 2)] {
            let reply = acquire(request(Kind::Write, key, number)).await.unwrap();
            assert!(matches!(reply, AcquireReply::Acquired(_)));
        }
        let place = acquire(of_set("a", 3)).await.unwrap();
        assert!(matches!(place, AcquireReply::Busy(_)));
        let first = ReleaseRequest::new(Kind::Write, "a".into(), GrantId::from_parts(1, 1));
        store.clone().release(first).await.unwrap();
        let stands_back = acquire(request(Kind::Read, "a", 4)).await.unwrap();
        assert!(matches!(stands_back, AcquireReply::Busy(_)));
        let mut notifications = store
            .clone()
            .watch(Kind::Read, &"a".into(), GrantId::from_parts(1, 5));
        notifications.changed().await;
        let set = store.clone().acquire_all(vec![of_set("a", 6), of_set("b", 7)]);
        let reply = set.await.unwrap();
        assert!(matches!(reply, AcquireAllReply::Busy { at: 1, .. }), "{reply:?}");
        timeout(MS, notifications.changed())
            .await
            .expect("the reader is told");
        let reader = acquire(request(Kind::Read, "a", 8)).await.unwrap();
        assert!(matches!(reader, AcquireReply::Acquired(_)));
    });
}
