//! Draining: outermost acquires are refused, nested ones pass, holds end by themselves, and nothing is handed off; and what
//! a client says of how it is.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, LockClient, OnceError};
use dlock_tests::paused;
use futures_util::FutureExt;
use futures_util::future::join;
use tokio::runtime;
use tokio::task::JoinSet;
use tokio::time::sleep;

#[test]
fn draining_client_refuses_outermost_acquires_and_lets_nested_ones_pass() {
    paused(async {
        let client = LockClient::memory();
        let (a, b) = (client.lock("a"), client.lock("b"));
        let (again, inside) = (a.clone(), client.clone());
        let ran = a.run(|held| async move {
            inside.drain();
            // Of the same lock, of another one, of several, and permits.
            assert!(again.acquire().await.is_ok());
            assert!(b.wait(Duration::from_secs(1)).acquire().await.is_ok());
            assert!(inside.multi(["c", "d"]).acquire().await.is_ok());
            assert!(inside.semaphore("e").permits(1).acquire().await.is_ok());
            assert!(held.check().is_ok(), "the hold goes on");
        });
        ran.await.expect("the work comes to its end");
        let refused = |error: Error| matches!(error, Error::Draining);
        assert!(refused(client.lock("a").acquire().await.unwrap_err()));
        assert!(refused(client.lock("a").try_acquire().await.unwrap_err()));
        assert!(refused(client.fair_lock("f").acquire().await.unwrap_err()));
        assert!(refused(client.rw_lock("g").read().acquire().await.unwrap_err()));
        assert!(refused(client.multi(["c", "d"]).acquire().await.unwrap_err()));
        let permit = client.semaphore("e").permits(1).acquire().await;
        assert!(refused(permit.unwrap_err()));
        assert!(refused(client.leader("h").campaign().await.unwrap_err()));
        let once = client.once("i").run(async |_| Ok::<_, String>(1)).await;
        assert!(
            matches!(once, Err(OnceError::Store(Error::Draining))),
            "work that is done once is begun elsewhere: {once:?}"
        );
    });
}

#[test]
fn draining_client_ends_the_waits_of_outermost_calls_only() {
    paused(async {
        let client = LockClient::memory();
        let other = client.lock("a").acquire().await.unwrap();
        let fair = client.fair_lock("f").acquire().await.unwrap();
        let mut outermost = Box::pin(client.lock("a").acquire());
        let mut behind = Box::pin(client.lock("a").acquire());
        let mut in_order = Box::pin(client.fair_lock("f").acquire());
        let outer = client.lock("b").acquire().await.unwrap();
        let mut nested = Box::pin(outer.scope(client.lock("a").acquire()));
        for waits in [&mut outermost, &mut behind, &mut in_order] {
            assert!(waits.as_mut().now_or_never().is_none());
        }
        assert!(nested.as_mut().now_or_never().is_none());
        client.drain();
        for waits in [outermost, behind, in_order] {
            let ended = tokio::time::timeout(Duration::from_secs(1), waits).await;
            assert!(matches!(ended.expect("at once"), Err(Error::Draining)));
        }
        other.release().await.unwrap();
        drop(nested.await.expect("the work under way gets its lock"));
        fair.release().await.unwrap();
        outer.release().await.unwrap();
        tokio::time::timeout(Duration::from_secs(1), client.drained())
            .await
            .expect("nothing is held");
    });
}

/// Each in a task of its own, which nothing else polls.
#[test]
fn sleeping_waiters_learn_that_the_client_drains() {
    paused(async {
        let store = MemoryStore::new();
        let build = || LockClient::builder().store(store.clone()).build();
        let (client, other) = (build().await.unwrap(), build().await.unwrap());
        let elsewhere = other.lock("elsewhere").acquire().await.unwrap();
        let (here, fair) = (client.lock("here"), other.fair_lock("fair"));
        let (here, fair) = (here.acquire().await.unwrap(), fair.acquire().await.unwrap());
        let permit = other.semaphore("permits").permits(1).acquire().await.unwrap();
        let mut waiters = JoinSet::new();
        for _ in 0..2 {
            waiters.spawn(client.lock("elsewhere").acquire().map(|got| got.map(drop)));
            waiters.spawn(client.lock("here").acquire().map(|got| got.map(drop)));
            waiters.spawn(client.fair_lock("fair").acquire().map(|got| got.map(drop)));
            waiters.spawn(
                client
                    .multi(["elsewhere", "free"])
                    .acquire()
                    .map(|got| got.map(drop)),
            );
            let permit = client.semaphore("permits").permits(1).acquire();
            waiters.spawn(permit.map(|got| got.map(drop)));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        client.drain();
        let ended = tokio::time::timeout(Duration::from_millis(1), waiters.join_all()).await;
        let ended = ended.expect("at once");
        assert_eq!(ended.len(), 10);
        assert!(
            ended.iter().all(|ended| matches!(ended, Err(Error::Draining))),
            "{ended:?}"
        );
        drop((elsewhere, here, fair, permit));
    });
}

#[test]
fn draining_client_hands_nothing_off_and_frees_its_lock_for_other_clients() {
    paused(async {
        let store = MemoryStore::new();
        let build = || LockClient::builder().store(store.clone()).build();
        let (leaving, staying) = (build().await.unwrap(), build().await.unwrap());
        let guard = leaving.lock("a").acquire().await.unwrap();
        let outer = leaving.lock("b").acquire().await.unwrap();
        let mut nested = Box::pin(outer.scope(leaving.lock("a").acquire()));
        assert!(nested.as_mut().now_or_never().is_none());
        let mut elsewhere = Box::pin(staying.lock("a").acquire());
        assert!(elsewhere.as_mut().now_or_never().is_none());
        leaving.drain();
        guard.release().await.unwrap();
        // Without the drain the waiter of the same process would have it by now.
        let got = tokio::time::timeout(Duration::from_secs(1), elsewhere).await;
        drop(got.expect("no lease is waited for").unwrap());
        drop(nested.await.unwrap());
    });
}

#[test]
fn shutdown_after_a_drain_tells_that_the_client_is_closed() {
    paused(async {
        let client = LockClient::memory();
        client.drain();
        client.shutdown(Duration::ZERO).await;
        let error = client.lock("a").acquire().await.unwrap_err();
        assert!(matches!(error, Error::ClientClosed), "{error}");
        let closed = LockClient::memory();
        closed.shutdown(Duration::ZERO).await;
        closed.drain();
        let error = closed.lock("a").acquire().await.unwrap_err();
        assert!(matches!(error, Error::ClientClosed), "{error}");
    });
}

/// Each operation is the first one of its client.
#[test]
fn health_tells_of_a_reply_to_anything_that_was_asked() {
    paused(async {
        for asked in [
            "nothing", "list", "inspect", "clients", "once", "permits", "latch",
        ] {
            let client = LockClient::memory();
            match asked {
                "list" => drop(client.list("").await.unwrap()),
                "inspect" => drop(client.inspect("a").await.unwrap()),
                "clients" => drop(client.clients().await.unwrap()),
                "once" => drop(client.once("a").run(async |_| Ok::<_, Error>(())).await.unwrap()),
                "permits" => drop(client.semaphore("a").set_permits(2).await.unwrap()),
                "latch" => drop(client.latch("a").count().await.unwrap()),
                _ => {}
            }
            let is_told = client.health().last_reply.is_some();
            assert_eq!(is_told, asked != "nothing", "{asked}");
        }
    });
}

#[test]
fn health_tells_what_is_held_and_the_least_lease() {
    paused(async {
        let client = LockClient::memory();
        let health = client.health();
        assert_eq!(
            (health.held, health.least_lease_left, health.last_reply),
            (0, None, None)
        );
        assert!(!health.is_draining);
        let long = client.lock("a").acquire().await.unwrap();
        let short = client.lock("b").fixed_lease(Duration::from_secs(5));
        let short = short.acquire().await.unwrap();
        tokio::time::sleep(Duration::from_secs(2)).await;
        client.drain();
        let health = client.health();
        assert_eq!((health.held, health.suspect), (2, 0));
        let left = health.least_lease_left.expect("two are held");
        assert!(
            left < Duration::from_secs(3) && left > Duration::from_secs(2),
            "{left:?}"
        );
        assert!(health.is_draining);
        short.release().await.unwrap();
        long.release().await.unwrap();
        assert_eq!(client.health().least_lease_left, None);
    });
}

/// What a shutdown must not miss is there for less than a microsecond, so there are many rounds.
#[test]
fn shutdown_waits_for_what_other_threads_have_just_begun() {
    const ROUNDS: usize = 4000;
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    for round in 0..ROUNDS {
        let store = TestStore::new();
        let client = runtime.block_on(async { store.client() });
        let guard = runtime.block_on(client.lock("released").acquire()).unwrap();
        let (at_once, acquires) = (round % 2 == 0, client.clone());
        let start = Barrier::new(3);
        thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                drop(guard);
            });
            scope.spawn(|| {
                start.wait();
                // Dropped as soon as it is there.
                drop(acquires.lock("acquired").try_acquire().now_or_never());
            });
            start.wait();
            let deadline = match at_once {
                true => Duration::ZERO,
                false => Duration::from_secs(20),
            };
            let report = runtime.block_on(client.shutdown(deadline));
            assert_eq!((store.held(), report.unconfirmed), (0, 0), "{round}: {report:?}");
        });
        assert_eq!(store.held(), 0, "{round}, afterwards");
    }
}

/// By then the leases may have been prolonged by renewals whose replies were lost.
#[test]
fn shutdown_repeats_the_release_of_a_guard_that_is_alive_beyond_its_own_deadline() {
    paused(async {
        let (store, secs) = (TestStore::new(), Duration::from_secs_f64);
        let client = store.client_with(|options| options.lease(secs(3.0)).retry_for(secs(3.0)));
        let client = client.await.unwrap();
        let guard = client.lock("k").acquire().await.unwrap();
        for _ in 0..100 {
            store.fail_next(Step::Renew, Fault::AnswerLost);
        }
        sleep(secs(2.5)).await;
        store.set_down(true);
        let back = async {
            sleep(secs(0.8)).await;
            store.set_down(false);
        };
        let (report, ()) = join(client.shutdown(Duration::ZERO), back).await;
        assert_eq!((report.lost, report.unconfirmed, store.held()), (1, 0, 0));
        assert!(!guard.is_held());
    });
}
