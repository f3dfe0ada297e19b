//! Several locks at once on a real server: one step on the wire, faults that strike it, and what stands in its way.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use dlock::{Error, LockClient, LockKey, MultiLock};
use dlock_tests::faults::{
    PATIENCE, RETRY_FOR, SOON, TIMEOUT, answered, in_rounds, is_free, is_free_soon, patient, setting, step,
    within,
};
use dlock_tests::{Command, Direction, Proxy, Store, Swallow, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const KEYS: [&str; 3] = ["a", "b", "c"];
/// One way through the network.
const DELAY: Duration = Duration::from_millis(5);

fn all_of(client: &LockClient) -> MultiLock {
    client.multi(KEYS)
}

async fn are_free(client: &LockClient) {
    for key in KEYS {
        is_free(client, key).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_are_one_step_that_declares_all_keys() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let client = patient(&proxy.url()).await;
    proxy.forget();
    let guard = all_of(&client).acquire().await.unwrap();
    let calls: Vec<_> = proxy.commands();
    assert_eq!(calls.len(), 1, "{calls:?}");
    // All names are declared, so that permissions and a cluster see them.
    let text = format!("{:?}", calls[0].command);
    for key in KEYS.iter().chain(&["dlock:fence"]) {
        assert!(text.contains(key), "{key}: {text}");
    }
    let keys = store.as_server().keys().await;
    assert_eq!(keys, ["a", "b", "c", "dlock:fence"]);
    for key in KEYS {
        let fields: Vec<String> = store.as_server().query(&["HGETALL", key]).await;
        assert_eq!((fields.len(), fields[1].as_str()), (2, "1"), "{key}: {fields:?}");
        assert!(store.as_server().ttl(key).await.is_some(), "{key} has no end");
    }
    guard.release().await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_that_waits_sends_nothing() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (
        patient(&proxy.url()).await,
        patient(&store.as_server().url()).await,
    );
    let busy = b.lock("b").acquire().await.unwrap();
    let waiter = tokio::spawn(all_of(&a).acquire());
    eventually("it waits at the server", || async {
        store.as_server().pubsub_channels().await == ["redisson_lock__channel:{b}"]
    })
    .await;
    settle().await;
    let asked = |command: &Command| command.is_script();
    let before = proxy.count(asked);
    tokio::time::sleep(500 * MS).await;
    assert_eq!(proxy.count(asked), before);
    busy.release().await.unwrap();
    within(SOON, "the wake-up", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_for_all_whose_reply_is_lost_is_unknown_once_or_repeated_under_new_ids() {
    for then in [Swallow::Hang, Swallow::Cut] {
        in_rounds("the acquire is sent", async || {
            let (store, proxy, a, b) = setting().await;
            let fault = proxy.swallow(1, then, step("all"));
            let once = within(TIMEOUT, "try_acquire", all_of(&a).try_acquire()).await;
            if !fault.fired() {
                return Err("its time was over before the step was sent");
            }
            assert!(
                matches!(once, Err(Error::OutcomeUnknown { .. })),
                "{then:?}: {once:?}"
            );
            // What the server did is undone in the background, for each of them, long before the lease ends.
            for key in KEYS {
                is_free_soon(&b, key).await;
            }
            let fault = proxy.swallow(1, then, step("all"));
            let guard = within(SOON, "acquire", all_of(&a).acquire()).await.unwrap();
            assert!(fault.fired());
            let again = answered(|| guard.ensure(10 * MS)).await;
            assert!(again.is_ok(), "{again:?}");
            guard.release().await.unwrap();
            are_free(&b).await;
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_comes_late_takes_nothing() {
    let (store, proxy, a, b) = setting().await;
    let held = proxy.hold(1, step("all"));
    let once = all_of(&a).try_acquire().await;
    assert!(matches!(once, Err(Error::OutcomeUnknown { .. })), "{once:?}");
    held.release();
    held.answered().await;
    for key in KEYS {
        is_free_soon(&b, key).await;
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_set_whose_reply_is_lost_disturbs_nobody() {
    let (store, proxy, a, b) = setting().await;
    let busy = b.lock("b").acquire().await.unwrap();
    let fault = proxy.swallow(1, Swallow::Hang, step("all"));
    let error = answered(|| all_of(&a).wait(RETRY_FOR).acquire())
        .await
        .unwrap_err();
    assert!(error.is_busy() && fault.fired(), "{error}");
    for free in ["a", "c"] {
        is_free_soon(&b, free).await;
    }
    busy.release().await.unwrap();
    is_free(&a, "b").await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_under_one_of_the_names_is_told_and_nothing_is_taken() {
    let store = Store::server().await;
    let client = patient(&store.as_server().url()).await;
    for (key, command) in [
        ("b", &["SET", "b", "x"][..]),
        ("c", &["HSET", "c", "mode", "read", "x", "1"]),
        ("a", &["RPUSH", "a", "1"]),
    ] {
        store.as_server().command(command).await;
        for outcome in [
            all_of(&client).try_acquire().await,
            all_of(&client).acquire().await,
        ] {
            let error = outcome.unwrap_err();
            let Error::KeyTaken { key: taken, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(taken.as_str(), key);
        }
        assert_eq!(client.held(), 0);
        let mut keys = store.as_server().keys().await;
        keys.retain(|key| key != "dlock:fence");
        assert_eq!(keys, [key]);
        store.as_server().command(&["DEL", key]).await;
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_name_that_is_out_of_bounds_keeps_the_whole_set_out_and_no_other_call() {
    let store = Store::server().await;
    let server = store.as_server();
    let rule = [
        "ACL",
        "SETUSER",
        "svc",
        "on",
        ">pw",
        "+@all",
        "&*",
        "~a",
        "~c",
        "~dlock:fence",
    ];
    server.command(&rule).await;
    let url = server.url_as("svc", "pw");
    let (a, b) = (patient(&url).await, patient(&server.url()).await);
    let (set, alone) = tokio::join!(all_of(&a).acquire(), a.lock("c").try_acquire());
    assert!(matches!(set, Err(Error::Refused { .. })), "{set:?}");
    alone.unwrap().release().await.unwrap();
    are_free(&b).await;
    let guard = a.multi(["a", "c"]).acquire().await.unwrap();
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_a_set_are_those_of_the_server_and_never_go_back() {
    let store = Store::server().await;
    let (a, b) = (
        patient(&store.as_server().url()).await,
        patient(&store.as_server().url()).await,
    );
    let mut last = 0;
    for round in 0..50 {
        let client = if round % 2 == 0 { &a } else { &b };
        let guard = all_of(client).wait(PATIENCE).acquire().await.unwrap();
        let tokens: Vec<_> = guard.fencing_tokens().map(|(_, token)| token).collect();
        assert!(
            tokens.iter().all(|token| *token > last),
            "{tokens:?} after {last}"
        );
        last = tokens.into_iter().max().unwrap();
        if round % 11 == 10 {
            store.flush().await;
        }
        drop(guard);
    }
    let fence: u64 = store.as_server().query(&["GET", "dlock:fence"]).await;
    // Nothing runs ahead of the clock.
    assert!(fence >= last && fence <= store.as_server().time_us().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_are_one_step_too() {
    let store = Store::server().await;
    let client = patient(&store.as_server().url()).await;
    let names: Vec<_> = (0..700).map(|i| format!("k{i:03}")).collect();
    let guard = client.multi(&names).acquire().await.unwrap();
    assert_eq!(client.held(), 700);
    let distinct: std::collections::BTreeSet<_> = guard.fencing_tokens().map(|(_, token)| token).collect();
    assert_eq!(distinct.len(), 700);
    assert!(
        guard
            .keys()
            .map(LockKey::as_str)
            .eq(names.iter().map(String::as_str))
    );
    guard.release().await.unwrap();
    store.assert_clean(&[&client]).await;
}

/// Polls an acquire up to `n` times, each time after a while, then drops it. Whether it was done before.
async fn polled(lock: &MultiLock, n: usize) -> bool {
    let mut acquire = pin!(lock.acquire());
    for _ in 0..n {
        let mut first = true;
        let poll = std::future::poll_fn(|cx| match std::mem::take(&mut first) {
            true => Poll::Ready(acquire.as_mut().poll(cx).is_ready()),
            false => Poll::Pending,
        });
        if poll.await {
            return true;
        }
        // Long enough for the next answer to arrive, and not a multiple of the way.
        tokio::time::sleep(DELAY + 3 * MS).await;
    }
    false
}

/// One acquire dropped after `n` polls; whether it was done by then.
async fn case(store: &Store, n: usize, busy: bool) -> bool {
    let keys = KEYS.map(|key| format!("{key}:{n}"));
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (patient(&proxy.url()).await, patient(&proxy.url()).await);
    proxy.delay(Direction::Both, DELAY, 2 * MS);
    let guard = if busy {
        Some(a.lock(&keys[1]).acquire().await.unwrap())
    } else {
        None
    };
    let done = polled(&b.multi(&keys), n).await;
    assert!(!(busy && done), "{n}: two holders");
    drop(guard);
    for key in &keys {
        is_free_soon(&a, key).await;
    }
    eventually("no hold and no waiter is left", || async {
        [&a, &b]
            .iter()
            .all(|client| client.held() == 0 && client.waited_for() == 0)
    })
    .await;
    done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_of_a_set_leaves_nothing_at_any_poll() {
    const MOST: usize = 16;
    for busy in [false, true] {
        let store = Store::server().await;
        // Free ones are acquired at some poll, however slow the machine is.
        let polls = |n| if n == MOST - 1 && !busy { usize::MAX } else { n };
        let done = join_all((0..MOST).map(|n| case(&store, polls(n), busy))).await;
        assert!(!done[0] && !done[1]);
        assert_eq!(done[MOST - 1], !busy, "{done:?}");
        store.assert_clean(&[]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_acquire_is_undone_while_its_outcome_is_unknown() {
    let (store, proxy, a, b) = setting().await;
    for then in [Swallow::Hang, Swallow::Cut] {
        let fault = proxy.swallow(1, then, step("all"));
        let dropped = tokio::spawn(all_of(&a).acquire());
        fault.swallowed().await;
        dropped.abort();
        drop(dropped.await);
        for key in KEYS {
            is_free_soon(&b, key).await;
        }
        store.assert_clean(&[&a, &b]).await;
    }
}
