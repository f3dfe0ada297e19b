//! dlock and Redisson 4.7.0 share the plain lock: they exclude each other, wake each other, and see each
//! other's holds and losses as their own.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::time::{Duration, Instant, SystemTime};

use dlock::{Error, HoldState, LockClient, LockKey, LockKind as As, Loss};
use dlock_tests::faults::{SLACK, in_rounds, is_confirmed};
use dlock_tests::redisson::{Kind, Options, Redisson, add_one};
use dlock_tests::{Server, Store, eventually, settle};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Names as most services use them, and with the tag that places them in a Cluster.
const NAMES: [&str; 2] = ["order:42", "{shop}:order:42"];

fn channel(name: &str) -> String {
    match name.contains('{') {
        true => format!("redisson_lock__channel:{name}"),
        false => format!("redisson_lock__channel:{{{name}}}"),
    }
}

/// Waits until so many processes wait for the lock, and a little longer: for their look after subscribing.
async fn waited_for(server: &Server, name: &str, by: u64) {
    let channel = channel(name);
    eventually("the waiters are subscribed", || async {
        let (_, count): (String, u64) = server.query(&["PUBSUB", "NUMSUB", &channel]).await;
        count == by
    })
    .await;
    settle().await;
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn raw(name: &str) -> LockKey {
    LockKey::raw(name)
}

/// Adds one to a number on the server, `times` times, in two steps with time between them.
async fn count(store: &Store, client: LockClient, name: &'static str, key: String, times: u32) {
    let mut conn = store.as_server().conn().await;
    for _ in 0..times {
        let guard = client.lock(raw(name)).wait(40 * SECOND).acquire().await.unwrap();
        add_one(&mut conn, &key).await;
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_exclude_each_other_under_contention() {
    let store = Store::server().await;
    let (a, b) = tokio::join!(Redisson::on(&store), Redisson::on(&store));
    let (c, d) = (store.client().await, store.client().await);
    for name in NAMES {
        const TIMES: u32 = 12;
        let key = format!("sum of {name}");
        let java = |java, thread| Redisson::counter(java, thread, Kind::Plain, name, &key, TIMES, MS / 2);
        let rust = |client: &LockClient| count(&store, client.clone(), name, key.clone(), TIMES);
        let all = Instant::now();
        let (threads, tasks) = tokio::join!(
            futures_util::future::join_all(
                [(&a, 1), (&a, 2), (&a, 3), (&b, 1), (&b, 2), (&b, 3)].map(|(j, t)| java(j, t))
            ),
            futures_util::future::join_all([&c, &c, &c, &d, &d, &d].map(rust)),
        );
        println!("{name}: 12 times {TIMES} rounds in {:?}", all.elapsed());
        for failures in threads {
            assert_eq!(failures.unwrap(), 0, "rounds of Java that threw");
        }
        assert_eq!(tasks.len(), 6);
        let sum: u32 = store.as_server().query(&["GET", &key]).await;
        assert_eq!(sum, 12 * TIMES, "an addition was lost: two were inside at a time");
        store.as_server().command(&["DEL", &key]).await;
    }
    store.assert_clean(&[&c, &d]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_wake_each_other_in_milliseconds() {
    const ROUNDS: usize = 15;
    let store = Store::server().await;
    let server = store.as_server();
    // Without a notification a waiter waits for at least 30 s.
    let java = Redisson::on_with(&store, &Options::new().watchdog(90 * SECOND)).await;
    let client = store.client_with(|builder| builder.lease(90 * SECOND)).await;
    for name in NAMES {
        let (mut to_rust, mut to_java) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            // Java lets go, Rust waits.
            java.lock(1, Kind::Plain, name, None).await.unwrap();
            let lock = client.lock(raw(name));
            let waiter = tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                (SystemTime::now(), guard)
            });
            waited_for(server, name, 1).await;
            let unlocked = java.unlock(1, Kind::Plain, name).await.unwrap();
            let (woken, guard) = waiter.await.unwrap();
            to_rust.push(
                woken
                    .duration_since(unlocked.done_at - unlocked.took)
                    .unwrap_or_default(),
            );

            // Rust lets go, Java waits.
            eventually("the waiter has left its channel", || async {
                server.pubsub_channels().await.is_empty()
            })
            .await;
            let waiting = java.lock(2, Kind::Plain, name, None);
            let releasing = async {
                waited_for(server, name, 1).await;
                let before = SystemTime::now();
                guard.release().await.unwrap();
                before
            };
            let (woken, released) = tokio::join!(waiting, releasing);
            to_java.push(woken.unwrap().since(released));
            java.unlock(2, Kind::Plain, name).await.unwrap();
            eventually("no client waits", || async {
                server.pubsub_channels().await.is_empty()
            })
            .await;
        }
        let slowest = to_rust.iter().chain(&to_java).max().copied().unwrap();
        let (to_rust, to_java) = (median(to_rust), median(to_java));
        println!(
            "wake-up of {name}, median of {ROUNDS}: Java to Rust {to_rust:?}, Rust to Java {to_java:?}; slowest {slowest:?}"
        );
        // By the message, each of them.
        assert!(slowest < SLACK, "{slowest:?}");
        assert!(
            to_rust < 5 * SECOND && to_java < 5 * SECOND,
            "{to_rust:?}, {to_java:?}"
        );
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_that_are_renewed_are_respected_past_their_first_lease() {
    const HELD: Duration = Duration::from_millis(900);
    let name = NAMES[0];
    in_rounds("both are renewed in time", async || {
        let store = Store::server().await;
        let java = Redisson::on_with(&store, &Options::new().watchdog(HELD)).await;
        let client = store.client_with(|builder| builder.lease(HELD)).await;

        java.lock(1, Kind::Plain, name, None).await.unwrap();
        let held = Instant::now();
        while held.elapsed() < 2500 * MS {
            let Err(Error::NotAcquired { remaining, .. }) = client.lock(name).try_acquire().await else {
                return Err(format!("Java has lost the lock after {:?}", held.elapsed()));
            };
            assert!(remaining.unwrap() <= HELD, "{remaining:?}");
            tokio::time::sleep(20 * MS).await;
        }
        // A waiter respects it too, which has learnt only of the lease.
        let Err(busy) = client.lock(name).wait(1500 * MS).acquire().await else {
            return Err("Java has lost the lock to a waiter".to_owned());
        };
        assert!(busy.is_busy(), "{busy}");
        java.unlock(1, Kind::Plain, name)
            .await
            .map_err(|error| error.to_string())?;

        let guard = client.lock(name).try_acquire().await.unwrap();
        let refused = java
            .try_lock(1, Kind::Plain, name, 2500 * MS, None)
            .await
            .unwrap();
        if refused.acquired() || guard.state() != HoldState::Held {
            return Err(format!("dlock has lost the lock: {:?}", guard.state()));
        }
        assert!(refused.took >= 2500 * MS, "{refused:?}");
        let left = java.remaining(Kind::Plain, name).await.unwrap();
        assert!(left <= 900, "{left}");
        guard.release().await.map_err(|error| error.to_string())?;
        let next = java.try_lock(1, Kind::Plain, name, Duration::ZERO, None).await;
        assert!(next.unwrap().acquired());
        // Where it is too late for this one, its lease has ended already.
        let _ = java.unlock(1, Kind::Plain, name).await;
        store.assert_clean(&[&client]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rust_process_that_is_gone_leaves_the_lock_to_its_lease() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let url = store.as_server().url();
    // What is left of a process that was killed: nothing runs any more, nothing is sent any more.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let guard = runtime.block_on(async {
            let client = LockClient::builder()
                .url(url)
                .lease(2 * SECOND)
                .build()
                .await
                .unwrap();
            client.lock("k").acquire().await.unwrap()
        });
        std::mem::forget(guard);
        runtime.shutdown_background();
    })
    .join()
    .unwrap();

    let gone = SystemTime::now();
    let left = store
        .as_server()
        .ttl("k")
        .await
        .expect("the lock outlives its holder");
    let locked = java.lock(1, Kind::Plain, "k", None).await.unwrap();
    let waited = locked.since(gone);
    println!(
        "the lock of a Rust process that is gone came free {waited:?} later, its lease had {left:?} left"
    );
    assert!(waited + 20 * MS >= left, "before the lease ended");
    assert!(waited < left + SLACK, "long after the lease ended");
    java.unlock(1, Kind::Plain, "k").await.unwrap();
    store.assert_clean(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_side_can_force_the_other_out() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        // Java forces dlock out, and has the lock next.
        let guard = client.lock(raw(name)).acquire().await.unwrap();
        assert!(java.force_unlock(Kind::Plain, name).await.unwrap());
        let next = java.lock(1, Kind::Plain, name, None).await.unwrap();
        let told = guard.ensure(30 * SECOND).await;
        assert!(
            matches!(told, Err(Error::Lost { loss: Loss::Gone, .. })),
            "{told:?}"
        );
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        let released = guard.release().await;
        assert!(
            matches!(released, Err(Error::Lost { loss: Loss::Gone, .. })),
            "{released:?}"
        );
        // Java's hold is as it was.
        assert_eq!(client.inspect(raw(name)).await.unwrap().unwrap().id, next.holder);
        assert!(java.is_held(1, Kind::Plain, name).await.unwrap());

        // dlock forces Java out, and has the lock next.
        assert!(client.force_release(raw(name)).await.unwrap());
        assert!(!client.force_release(raw(name)).await.unwrap());
        let guard = client.lock(raw(name)).try_acquire().await.unwrap();
        let error = java.unlock(1, Kind::Plain, name).await.unwrap_err();
        assert!(error.is_thrown("IllegalMonitorStateException"), "{error}");
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
        // Only the holder may open either of them.
        let guard = client.lock(raw(name)).acquire().await.unwrap();
        let error = java.unlock(1, Kind::Plain, name).await.unwrap_err();
        assert!(error.is_thrown("IllegalMonitorStateException"), "{error}");
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_wakes_the_other_sides_waiters() {
    let store = Store::server().await;
    // Without a notification a waiter waits for at least 30 s.
    let java = Redisson::on_with(&store, &Options::new().watchdog(90 * SECOND)).await;
    let client = store.client_with(|builder| builder.lease(90 * SECOND)).await;
    // A Java waiter behind dlock, forced out by dlock.
    let guard = client.lock("k").acquire().await.unwrap();
    let force = async {
        waited_for(store.as_server(), "k", 1).await;
        let before = SystemTime::now();
        client.force_release("k").await.unwrap();
        before
    };
    let (locked, forced) = tokio::join!(java.lock(1, Kind::Plain, "k", None), force);
    assert!(locked.unwrap().since(forced) < SLACK);
    drop(guard);
    // A dlock waiter behind Java, forced out by Java.
    let lock = client.lock("k");
    let waiter = tokio::spawn(async move { lock.acquire().await.map(|guard| (Instant::now(), guard)) });
    waited_for(store.as_server(), "k", 1).await;
    let forced = Instant::now();
    assert!(java.force_unlock(Kind::Plain, "k").await.unwrap());
    let (woken, guard) = waiter.await.unwrap().unwrap();
    assert!(woken - forced < SLACK, "{:?}", woken - forced);
    guard.release().await.unwrap();
    store.assert_clean(&[&client]).await;
}

/// The reactive API of Redisson draws the number of a holder at random, and half of them are below zero.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_java_holder_with_a_negative_number_is_waited_for_and_seen() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let kinds = [
        (Kind::Plain, As::Mutex),
        (Kind::Fair, As::Fair),
        (Kind::Fenced, As::Fenced),
    ];
    for ((java_kind, kind), id) in kinds.into_iter().zip([-5, i64::MIN, -1]) {
        let lock = client.lock("orders").kind(kind).wait(90 * SECOND);
        java.lock_as(id, java_kind, "orders", 60 * SECOND).await.unwrap();
        let holder = client.inspect("orders").await.unwrap().unwrap();
        assert_eq!(holder.id, format!("{}:{id}", java.uuid()));
        assert_eq!(client.list("").await.unwrap().len(), 1);
        let busy = lock.clone().try_acquire().await.unwrap_err();
        assert!(busy.is_busy(), "{busy}");
        let waiter = tokio::spawn(lock.acquire());
        settle().await;
        java.unlock_as(id, java_kind, "orders").await.unwrap();
        waiter.await.unwrap().unwrap().release().await.unwrap();
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_side_sees_the_others_holds() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        // Java's hold as dlock sees it: twice entered, once left, still held.
        let lease = Some(60 * SECOND);
        let first = java.lock(1, Kind::Plain, name, lease).await.unwrap();
        assert_eq!(client.inspect(raw(name)).await.unwrap().unwrap().holds, 1);
        java.lock(1, Kind::Plain, name, lease).await.unwrap();
        let holder = client.inspect(raw(name)).await.unwrap().unwrap();
        assert_eq!((holder.id.as_str(), holder.holds), (first.holder.as_str(), 2));
        assert!(holder.id.starts_with(java.uuid()), "{holder:?}");
        let left = holder.remaining.unwrap();
        assert!(left > 30 * SECOND && left <= 60 * SECOND, "{left:?}");
        let listed = client.list(&name[..3]).await.unwrap();
        let [(key, listed)] = &listed[..] else {
            panic!("{listed:?}")
        };
        assert_eq!((key.as_str(), &listed.id, listed.holds), (name, &holder.id, 2));

        assert!(client.lock(raw(name)).try_acquire().await.unwrap_err().is_busy());
        java.unlock(1, Kind::Plain, name).await.unwrap();
        assert_eq!(client.inspect(raw(name)).await.unwrap().unwrap().holds, 1);
        assert!(client.lock(raw(name)).try_acquire().await.unwrap_err().is_busy());
        java.unlock(1, Kind::Plain, name).await.unwrap();
        assert_eq!(client.inspect(raw(name)).await.unwrap(), None);

        // dlock's hold as Java sees it.
        let guard = client
            .lock(raw(name))
            .fixed_lease(60 * SECOND)
            .acquire()
            .await
            .unwrap();
        let again = guard.reenter().unwrap();
        assert!(java.is_locked(Kind::Plain, name).await.unwrap());
        assert!(!java.is_held(1, Kind::Plain, name).await.unwrap());
        assert_eq!(java.hold_count(1, Kind::Plain, name).await.unwrap(), 0);
        let left = java.remaining(Kind::Plain, name).await.unwrap();
        assert!(left > 30_000 && left <= 60_000, "{left}");
        drop(guard);
        settle().await;
        assert!(java.is_locked(Kind::Plain, name).await.unwrap());
        again.release().await.unwrap();
        assert!(!java.is_locked(Kind::Plain, name).await.unwrap());
        assert_eq!(java.remaining(Kind::Plain, name).await.unwrap(), -2);
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_end_in_time_and_not_before_the_lock_is_available() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);

    let guard = client.lock("k").acquire().await.unwrap();
    let at_once = java
        .try_lock(1, Kind::Plain, "k", Duration::ZERO, None)
        .await
        .unwrap();
    assert!(!at_once.acquired() && at_once.took < SLACK, "{at_once:?}");
    let in_vain = java.try_lock(1, Kind::Plain, "k", 300 * MS, None).await.unwrap();
    assert!(
        !in_vain.acquired() && in_vain.took >= 300 * MS && in_vain.took < SLACK,
        "{in_vain:?}"
    );
    let release = async {
        waited_for(store.as_server(), "k", 1).await;
        guard.release().await.unwrap();
    };
    let (locked, ()) = tokio::join!(
        java.try_lock(1, Kind::Plain, "k", 60 * SECOND, Some(60 * SECOND)),
        release
    );
    assert!(locked.as_ref().unwrap().acquired() && locked.unwrap().took < SLACK);

    let before = Instant::now();
    let error = client.lock("k").wait(300 * MS).acquire().await.unwrap_err();
    assert!(
        error.is_busy() && before.elapsed() >= 300 * MS && before.elapsed() < SLACK,
        "{error}"
    );
    // A fixed lease of Java that ends by itself, without a message.
    let locked = java.lock(1, Kind::Plain, "short", Some(700 * MS)).await.unwrap();
    let guard = client.lock("short").wait(60 * SECOND).acquire().await.unwrap();
    let waited = SystemTime::now()
        .duration_since(locked.done_at - locked.took)
        .unwrap();
    assert!(waited >= 690 * MS && waited < SLACK, "{waited:?}");
    guard.release().await.unwrap();
    java.unlock(1, Kind::Plain, "k").await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_java_waiter_sits_out_the_min_hold_of_a_released_lock() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let acquired = SystemTime::now();
    let guard = client.lock("k").min_hold(1500 * MS).acquire().await.unwrap();
    let release = async {
        waited_for(store.as_server(), "k", 1).await;
        guard.release().await.unwrap();
    };
    let (locked, ()) = tokio::join!(java.lock(1, Kind::Plain, "k", None), release);
    let waited = locked.unwrap().since(acquired);
    println!("min_hold of 1.5 s, Java had the lock after {waited:?}");
    assert!(waited >= 1499 * MS, "{waited:?}");
    // It learnt the time from the release: its lease had been 30 s.
    assert!(waited < SLACK, "{waited:?}");
    java.unlock(1, Kind::Plain, "k").await.unwrap();
    store.assert_clean(&[&client]).await;
}

/// By that `dlock show` knows that no connection has its name: otherwise it would call each one killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_of_java_is_known_as_one_of_redisson() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for kind in [Kind::Plain, Kind::Fair, Kind::Fenced, Kind::Read, Kind::Write] {
        java.lock(1, kind, "k", None).await.unwrap();
        let holder = client.inspect("k").await.unwrap().unwrap();
        assert!(holder.is_of_redisson(), "{kind:?}: {holder:?}");
        assert!(holder.unknown().unwrap().contains("Redisson"), "{kind:?}");
        java.unlock(1, kind, "k").await.unwrap();
    }
    let guard = client.lock("k").acquire().await.unwrap();
    let holder = client.inspect("k").await.unwrap().unwrap();
    assert!(!holder.is_of_redisson(), "{holder:?}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn java_holds_take_no_fencing_token_and_do_not_disturb_ours() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let mut tokens = Vec::new();
    for _ in 0..5 {
        let guard = client.lock("k").acquire().await.unwrap();
        tokens.push(guard.fencing_token());
        guard.release().await.unwrap();
        let fence: u64 = store.as_server().query(&["GET", "dlock:fence"]).await;
        java.lock(1, Kind::Plain, "k", None).await.unwrap();
        java.lock(1, Kind::Plain, "k", None).await.unwrap();
        let after: u64 = store.as_server().query(&["GET", "dlock:fence"]).await;
        assert_eq!(after, fence);
        java.unlock(1, Kind::Plain, "k").await.unwrap();
        java.unlock(1, Kind::Plain, "k").await.unwrap();
    }
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
    store.assert_clean(&[&client]).await;
}
