//! Read-write locks on the server and on the wire: the data of Redisson's and its messages, whatever it does to them,
//! and beside them those of ours alone. interop_rwlock.rs has the real Redisson.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dlock::{Error, HoldState, LockClient, LockKey, RwLock};
use dlock_tests::faults::{
    LEASE, PATIENCE, SLACK, SOON, hasty, in_rounds, is_confirmed, ordinary, setting, step, within,
};
use dlock_tests::{Server, Store, Swallow, eventually, settle};
use futures_util::StreamExt;
use tokio::time::sleep;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const SWALLOWS: [Swallow; 2] = [Swallow::Hang, Swallow::Cut];
/// The writers whom readers stand back for.
const WRITERS: &str = "{k}:dlock:writers";
/// The index of the readers.
const INDEX: &str = "{k}:dlock:readers";
/// A reader of Redisson's.
const JAVA: &str = "11111111-2222-4333-8444-555555555555:1";

async fn two() -> (Store, LockClient, LockClient) {
    let store = Store::server().await;
    let url = store.as_server().url();
    (store, ordinary(&url).await, ordinary(&url).await)
}

/// The hash of a lock.
async fn hash(server: &Server, name: &str) -> BTreeMap<String, String> {
    server.query(&["HGETALL", name]).await
}

/// The fields of the hash beside its mode, all of which count one hold, and its mode.
async fn inside(server: &Server, name: &str) -> (String, Vec<String>) {
    let mut fields = hash(server, name).await;
    let mode = fields.remove("mode").unwrap_or_default();
    assert!(fields.values().all(|holds| holds == "1"), "{fields:?}");
    (mode, fields.into_keys().collect())
}

/// Whether a key has this time left, or a little less.
async fn lasts(server: &Server, key: &str, time: Duration) -> bool {
    let left = server.ttl(key).await;
    left.is_some_and(|left| left <= time && left > time - SLACK)
}

/// Without the fence and the index of readers.
async fn keys(server: &Server) -> Vec<String> {
    let mut keys = server.keys().await;
    keys.retain(|key| !key.ends_with("dlock:fence") && !key.ends_with(":dlock:readers"));
    keys
}

async fn is_empty_soon(server: &Server) {
    eventually("nothing is left", || async { keys(server).await.is_empty() }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_writers_have_the_fields_and_the_keys_of_redissons() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    // The name, what stands before the keys beside it, and the client.
    let prefixed = LockClient::builder()
        .url(server.url())
        .timeout(PATIENCE)
        .prefix("shop:");
    let prefixed = prefixed.build().await.unwrap();
    for (client, name, on_server, beside) in [
        (&a, "k", "k", "{k}"),
        (&a, "{t}:k", "{t}:k", "{t}:k"),
        (&prefixed, "k", "shop:k", "{shop:k}"),
    ] {
        let lock = client.rw_lock(LockKey::raw(name));
        let timeout = |holder: &str| format!("{beside}:{holder}:rwlock_timeout:1");
        let short = lock.read().fixed_lease(100 * SECOND).acquire().await.unwrap();
        let (mode, readers) = inside(server, on_server).await;
        let [first] = &readers[..] else {
            panic!("{readers:?}")
        };
        assert_eq!(
            (mode.as_str(), &first[14..15]),
            ("read", "8"),
            "of the version that grants of ours have"
        );
        assert_eq!(keys(server).await, sorted([on_server.to_owned(), timeout(first)]));
        assert_eq!(server.query::<String>(&["GET", &timeout(first)]).await, "1");
        assert!(
            lasts(server, &timeout(first), 100 * SECOND).await
                && lasts(server, on_server, 100 * SECOND).await
        );

        let long = lock.read().fixed_lease(400 * SECOND).acquire().await.unwrap();
        let (mode, readers) = inside(server, on_server).await;
        assert_eq!((mode.as_str(), readers.len()), ("read", 2));
        let second = readers.iter().find(|reader| *reader != first).unwrap();
        assert!(
            lasts(server, &timeout(second), 400 * SECOND).await
                && lasts(server, on_server, 400 * SECOND).await
        );
        // The longest has gone: the hash lasts as long as the others do.
        long.release().await.unwrap();
        assert_eq!(keys(server).await, sorted([on_server.to_owned(), timeout(first)]));
        assert!(lasts(server, on_server, 100 * SECOND).await);
        // A shorter one does not cut it.
        let third = lock.read().fixed_lease(30 * SECOND).acquire().await.unwrap();
        assert!(lasts(server, on_server, 100 * SECOND).await);
        third.release().await.unwrap();
        short.release().await.unwrap();
        assert!(keys(server).await.is_empty());

        let writing = lock.write().fixed_lease(100 * SECOND).acquire().await.unwrap();
        let (mode, writers) = inside(server, on_server).await;
        let [writer] = &writers[..] else {
            panic!("{writers:?}")
        };
        let id = writer.strip_suffix(":write").unwrap().to_owned();
        assert_eq!(
            (mode.as_str(), keys(server).await),
            ("write", vec![on_server.to_owned()])
        );
        assert!(lasts(server, on_server, 100 * SECOND).await);

        // A read under it: Redisson sees a writer that reads, and ours its lease beside the hash's.
        let under = writing
            .scope(lock.read().fixed_lease(400 * SECOND).acquire())
            .await
            .unwrap();
        let (mode, both) = inside(server, on_server).await;
        assert_eq!((mode.as_str(), both.len()), ("write", 2));
        let reader = both.iter().find(|field| *field != writer).unwrap();
        let of_writer = timeout(&format!("{id}:write"));
        assert_eq!(
            keys(server).await,
            sorted([on_server.to_owned(), timeout(reader), of_writer.clone()])
        );
        assert!(
            lasts(server, on_server, 400 * SECOND).await && lasts(server, &of_writer, 100 * SECOND).await
        );
        writing.release().await.unwrap();
        assert_eq!(
            inside(server, on_server).await,
            ("read".to_owned(), vec![reader.clone()])
        );
        assert_eq!(
            keys(server).await,
            sorted([on_server.to_owned(), timeout(reader)])
        );
        under.release().await.unwrap();
        assert!(keys(server).await.is_empty());
    }
    store.assert_clean(&[&a, &b, &prefixed]).await;
}

fn sorted<const N: usize>(keys: [String; N]) -> Vec<String> {
    let mut keys = keys.to_vec();
    keys.sort();
    keys
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_release_is_told_as_redisson_tells_it() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let mut pubsub = server.client().unwrap().get_async_pubsub().await.unwrap();
    pubsub.psubscribe("*").await.unwrap();
    let mut messages = pubsub.on_message();
    let mut told = async || {
        let message = tokio::time::timeout(60 * SECOND, messages.next())
            .await
            .unwrap()
            .unwrap();
        let payload: String = message.get_payload().unwrap();
        (message.get_channel_name().to_owned(), payload)
    };
    for (name, channel) in [("k", "redisson_rwlock:{k}"), ("{t}:k", "redisson_rwlock:{t}:k")] {
        let is = |message: &str| (channel.to_owned(), message.to_owned());
        let lock = |client: &LockClient| client.rw_lock(LockKey::raw(name));
        // The last of several readers, and no other, wakes one; a writer wakes all, also one that stays as a reader.
        let readers = [
            lock(&a).read().acquire().await.unwrap(),
            lock(&b).read().acquire().await.unwrap(),
        ];
        for reader in readers {
            reader.release().await.unwrap();
        }
        assert_eq!(told().await, is("0"));
        lock(&a).write().acquire().await.unwrap().release().await.unwrap();
        assert_eq!(told().await, is("1"));
        let reading = lock(&a)
            .write()
            .acquire()
            .await
            .unwrap()
            .downgrade()
            .await
            .unwrap();
        assert_eq!(told().await, is("1"));
        reading.release().await.unwrap();
        assert_eq!(told().await, is("0"));
        // Waiters learn how long a minimum lasts.
        for (side, message) in [(lock(&a).read(), "0"), (lock(&a).write(), "1")] {
            side.min_hold(50 * MS)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
            assert_eq!(told().await, is(message));
            lock(&b)
                .write()
                .wait(PATIENCE)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
            assert_eq!(told().await, is("1"));
        }
        for side in [lock(&a).read(), lock(&a).write()] {
            let guard = side.acquire().await.unwrap();
            assert!(b.force_release(LockKey::raw(name)).await.unwrap());
            assert_eq!(told().await, is("1"));
            drop(guard);
        }
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_redissons_renewal_cuts_each_reader_of_ours_restores() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    // One that is renewed and one that is not, each alone with one of Redisson's.
    for fixed in [false, true] {
        let lock = a.rw_lock("k").read();
        let lock = match fixed {
            false => lock.lease(600 * SECOND),
            true => lock.fixed_lease(600 * SECOND),
        };
        let reader = lock.acquire().await.unwrap();
        let beside = format!("{{k}}:{JAVA}:rwlock_timeout:1");
        server.command(&["HSET", "k", JAVA, "1"]).await;
        server.command(&["SET", &beside, "1", "PX", "30000"]).await;
        // Theirs sets the time of the hash without looking.
        server.command(&["PEXPIRE", "k", "30000"]).await;
        assert!(lasts(server, "k", 30 * SECOND).await);
        let cut = Instant::now();
        eventually("it has its time again", || async {
            server.ttl("k").await.is_some_and(|left| left > 500 * SECOND)
        })
        .await;
        assert!(cut.elapsed() < 10 * SECOND + SLACK, "{:?}", cut.elapsed());
        // And is no longer than its own lease.
        assert!(lasts(server, "k", 600 * SECOND).await);
        assert_eq!(reader.state(), HoldState::Held);
        assert!(b.rw_lock("k").write().try_acquire().await.unwrap_err().is_busy());
        // Redisson's leaves: what is left is ours.
        server.command(&["HDEL", "k", JAVA]).await;
        server.command(&["DEL", &beside]).await;
        reader.release().await.unwrap();
        is_empty_soon(server).await;
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_is_preferred_stands_beside_redissons_data_and_ends_by_itself() {
    in_rounds("the place is looked at in time", async || {
        let (store, a, b) = two().await;
        let server = store.as_server();
        let inside = b.rw_lock("k").read().acquire().await.unwrap();
        let before = (hash(server, "k").await, keys(server).await);
        let writer = tokio::spawn(a.rw_lock("k").prefer_writers().write().acquire());
        eventually("it stands there", || async { keys(server).await.len() == 3 }).await;
        assert_eq!(hash(server, "k").await, before.0, "Redisson sees nothing of it");
        assert!(keys(server).await.contains(&WRITERS.to_owned()));
        assert_eq!(
            server
                .query::<Vec<String>>(&["ZRANGE", WRITERS, "0", "-1"])
                .await
                .len(),
            1
        );
        // It is kept for as long as the writer is heard of, every 2 s.
        for _ in 0..3 {
            let left = server.ttl(WRITERS).await;
            if left.is_none_or(|left| left < 2500 * MS) {
                return Err(left);
            }
            assert!(left.unwrap() <= 5 * SECOND, "{left:?}");
            tokio::time::sleep(1500 * MS).await;
        }
        inside.release().await.unwrap();
        let writer = within(SOON, "its turn", writer).await.unwrap().unwrap();
        assert_eq!(keys(server).await, ["k"], "the served writer waits no more");
        is_confirmed(&writer).await;
        writer.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_writer_delays_readers_for_five_seconds_without_a_notification() {
    let store = Store::server().await;
    let server = store.as_server();
    let long = async || store.client_with(|builder| builder.lease(LEASE)).await;
    let (a, b) = (long().await, long().await);
    // Where others read, and where the lock is free.
    for is_read in [true, false] {
        in_rounds("it is asked for before the place ends", async || {
            let inside = match is_read {
                true => Some(a.rw_lock("k").read().acquire().await.unwrap()),
                false => None,
            };
            let died = Instant::now();
            let (seconds, micros): (u64, u64) = server.query(&["TIME"]).await;
            let until = (seconds * 1000 + micros / 1000 + 5000).to_string();
            server.command(&["ZADD", WRITERS, &until, "dead"]).await;
            let tried = b.rw_lock("k").read().try_acquire().await;
            // Writers do not stand back for each other.
            if !is_read {
                let writer = a.rw_lock("k").write().try_acquire().await;
                writer.unwrap().release().await.unwrap();
            }
            let asked = died.elapsed();
            let reader = within(5 * SECOND, "the reader", b.rw_lock("k").read().acquire()).await;
            reader.unwrap().release().await.unwrap();
            drop(inside);
            server.command(&["DEL", WRITERS]).await;
            store.assert_clean(&[&a, &b]).await;
            if asked > 4 * SECOND {
                return Err(asked);
            }
            assert!(tried.unwrap_err().is_busy());
            assert!(died.elapsed() >= 5 * SECOND, "{:?}", died.elapsed());
            Ok(())
        })
        .await;
    }
}

/// It was written before the server's clock was set back by an hour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_writer_whose_time_is_far_ahead_keeps_no_reader_out() {
    let store = Store::server().await;
    let server = store.as_server();
    let client = store.client().await;
    let (seconds, _): (u64, u64) = server.query(&["TIME"]).await;
    let until = ((seconds + 3600) * 1000).to_string();
    server.command(&["ZADD", WRITERS, &until, "dead"]).await;
    let reader = client.rw_lock("k").read().try_acquire().await;
    reader.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_whose_question_or_farewell_is_lost_or_late_keeps_no_reader_out_for_long() {
    let preferring = |client: &LockClient| -> RwLock { client.rw_lock("k").prefer_writers() };
    let (store, proxy, _, b) = setting().await;
    let server = store.as_server();
    // Waits as long as it takes; only its steps are quick to fail.
    let a = hasty(&proxy.url()).await;
    for lost in ["write", "release_write"] {
        for then in SWALLOWS {
            let inside = b.rw_lock("k").read().acquire().await.unwrap();
            let fault = proxy.swallow(1, then, step(lost));
            let writer = tokio::spawn(preferring(&a).write().acquire());
            if lost == "write" {
                fault.swallowed().await;
            } else {
                eventually("it waits", || async {
                    server.query::<u32>(&["ZCARD", WRITERS]).await == 1
                })
                .await;
            }
            writer.abort();
            drop(writer.await);
            let reader = within(SOON, "the reader", b.rw_lock("k").read().acquire())
                .await
                .unwrap();
            drop((inside, reader));
            // Nothing of it comes back later.
            settle().await;
            eventually("no reader stands back", async || {
                b.rw_lock("k").read().try_acquire().await.is_ok()
            })
            .await;
            store.assert_clean(&[&a, &b]).await;
        }
    }
    // A question that comes only after its time refuses itself, and takes no place.
    in_rounds("the question is sent", async || {
        let (store, proxy, a, b) = setting().await;
        let inside = b.rw_lock("k").read().acquire().await.unwrap();
        let held = proxy.hold(1, step("write"));
        let writer = tokio::spawn(preferring(&a).write().acquire());
        held.caught().await;
        writer.abort();
        drop(writer.await);
        // Its time is over, and it was not answered.
        tokio::time::sleep(2 * dlock_tests::faults::TIMEOUT).await;
        held.release();
        held.answered().await;
        let kept = store.as_server().query::<bool>(&["EXISTS", WRITERS]).await;
        inside.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        if kept { Err("it had a place") } else { Ok(()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_in_place_of_the_writers_is_named_and_stays_and_fails_no_release() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let inside = a.rw_lock("k").read().acquire().await.unwrap();
    server.command(&["SET", WRITERS, "text"]).await;
    let preferring = b.rw_lock("k").prefer_writers().write();
    for error in [
        b.rw_lock("k").read().try_acquire().await.unwrap_err(),
        b.rw_lock("k").read().acquire().await.unwrap_err(),
        preferring.acquire().await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert!(error.to_string().contains(WRITERS), "{error}");
    }
    is_confirmed(&inside).await;
    inside.release().await.unwrap();
    b.rw_lock("k")
        .write()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    preferring.acquire().await.unwrap().release().await.unwrap();
    assert_eq!(server.query::<String>(&["GET", WRITERS]).await, "text");
    server.command(&["DEL", WRITERS]).await;
    store.assert_clean(&[&a, &b]).await;
}

/// A reader of Redisson's enters, with so long a lease.
async fn java_reads(server: &Server, lease: Duration) {
    let ms = lease.as_millis().to_string();
    let beside = format!("{{k}}:{JAVA}:rwlock_timeout:1");
    server.command(&["HSET", "k", "mode", "read", JAVA, "1"]).await;
    server.command(&["SET", &beside, "1", "PX", &ms]).await;
    if server.ttl("k").await.is_none_or(|left| left < lease) {
        server.command(&["PEXPIRE", "k", &ms]).await;
    }
}

/// Counts the commands that a step makes the server run.
async fn commands_of<T>(server: &Server, step: impl Future<Output = T>) -> (u64, T) {
    server.forget_commands().await;
    let done = step.await;
    (server.commands().await.values().sum(), done)
}

/// Protects "A reader enters, renews and leaves at the same cost to the server from one reader to 10,000".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_costs_the_same_among_few_and_among_many() {
    in_rounds("no renewal comes between", async || {
        let (store, a, b) = two().await;
        let server = store.as_server();
        let lock = |client: &LockClient| client.rw_lock("k").read().fixed_lease(600 * SECOND);
        let mut costs = Vec::new();
        for many in [4, 500] {
            let readers = futures_util::future::join_all((0..many).map(|_| lock(&a).acquire())).await;
            let mut steps = Vec::new();
            for renewed in [false, true] {
                let lock = match renewed {
                    false => lock(&b),
                    // The longest of all: the others have to be looked for when it leaves.
                    true => b.rw_lock("k").read().lease(900 * SECOND),
                };
                let (entering, reader) = commands_of(server, lock.acquire()).await;
                let reader = reader.unwrap();
                let (renewing, renewed) = commands_of(server, is_confirmed(&reader)).await;
                let () = renewed;
                let (leaving, left) = commands_of(server, reader.release()).await;
                left.unwrap();
                steps.extend([entering, renewing, leaving]);
            }
            assert!(lasts(server, "k", 600 * SECOND).await);
            let (last, ()) = commands_of(server, async {
                drop(readers);
                is_empty_soon(server).await;
            })
            .await;
            steps.push(last / many);
            costs.push(steps);
            store.assert_clean(&[&a, &b]).await;
        }
        let same = costs[0].iter().zip(&costs[1]).all(|(few, many)| *many <= few + 2);
        if same { Ok(()) } else { Err(costs) }
    })
    .await;
}

/// Protects "A reader enters, renews and leaves at the same cost" for readers under their own writer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_under_a_writer_costs_the_same_among_few_and_among_many() {
    in_rounds("no renewal comes between", async || {
        let (store, a, b) = two().await;
        let server = store.as_server();
        let writer = a
            .rw_lock("k")
            .write()
            .fixed_lease(600 * SECOND)
            .acquire()
            .await
            .unwrap();
        let read = || a.rw_lock("k").read().fixed_lease(300 * SECOND);
        let mut costs = Vec::new();
        for many in [4, 500] {
            let readers =
                futures_util::future::join_all((0..many).map(|_| writer.scope(read().acquire()))).await;
            assert!(readers.iter().all(Result::is_ok));
            let (entering, reader) = commands_of(server, writer.scope(read().acquire())).await;
            let reader = reader.unwrap();
            let (asking, refused) = commands_of(server, b.rw_lock("k").read().try_acquire()).await;
            assert!(refused.unwrap_err().is_busy());
            let (leaving, left) = commands_of(server, reader.release()).await;
            left.unwrap();
            costs.push([entering, asking, leaving]);
            drop(readers);
            eventually("the readers have left", || async {
                inside(server, "k").await.1.len() == 1
            })
            .await;
            assert!(lasts(server, "k", 600 * SECOND).await);
        }
        assert_eq!(keys(server).await, ["k"]);
        writer.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        let same = costs[0].iter().zip(&costs[1]).all(|(few, many)| *many <= few + 2);
        if same { Ok(()) } else { Err(costs) }
    })
    .await;
}

/// Protects "Many readers or one writer": an index that Redisson or an eviction left behind ends no reader's lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_of_readers_counts_for_nothing_when_it_is_not_that_of_the_hash() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let read = |client: &LockClient, seconds: u32| client.rw_lock("k").read().fixed_lease(seconds * SECOND);

    // Redisson's unlock by force deletes the hash, and a reader of Redisson's makes a new one.
    for java_is_longest in [true, false] {
        let gone = read(&a, 600).acquire().await.unwrap();
        server.command(&["DEL", "k"]).await;
        java_reads(server, 90 * SECOND).await;
        let seconds = if java_is_longest { 50 } else { 200 };
        let reader = read(&b, seconds).acquire().await.unwrap();
        assert!(lasts(server, "k", seconds.max(90) * SECOND).await);
        reader.release().await.unwrap();
        assert!(
            lasts(server, "k", 90 * SECOND).await,
            "{:?}",
            server.ttl("k").await
        );
        assert_eq!(inside(server, "k").await.1, [JAVA]);
        drop(gone);
        settle().await;
        assert_eq!(inside(server, "k").await.1, [JAVA]);
        server
            .command(&["DEL", "k", &format!("{{k}}:{JAVA}:rwlock_timeout:1")])
            .await;
        assert!(server.ttl(INDEX).await.is_none());
    }

    // The index was evicted, or has lost one entry, or holds one of before: as many as there are readers.
    for damage in ["DEL", "ZREM", "ZADD"] {
        let long = read(&a, 400).acquire().await.unwrap();
        let unknown = inside(server, "k").await.1[0].clone();
        let longer = read(&b, 900).acquire().await.unwrap();
        if damage == "ZREM" {
            server.command(&["ZREM", INDEX, &unknown]).await;
        } else {
            server.command(&["DEL", INDEX]).await;
        }
        if damage == "ZADD" {
            for number in 1..=2 {
                let before = format!("00000000-0000-8000-8000-000000000000:{number}");
                server.command(&["ZADD", INDEX, "9000000000000", &before]).await;
            }
        }
        let short = read(&b, 100).acquire().await.unwrap();
        assert!(lasts(server, "k", 900 * SECOND).await, "{damage}");
        longer.release().await.unwrap();
        assert!(lasts(server, "k", 400 * SECOND).await, "{damage}");
        short.release().await.unwrap();
        assert!(lasts(server, "k", 400 * SECOND).await, "{damage}");
        // A reader that asks for its state is entered again.
        is_confirmed(&long).await;
        long.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    // The hash was evicted alone.
    let reader = read(&a, 400).acquire().await.unwrap();
    server.command(&["DEL", "k"]).await;
    let writer = b.rw_lock("k").write().try_acquire().await.unwrap();
    writer.release().await.unwrap();
    let next = read(&b, 100).acquire().await.unwrap();
    assert!(reader.release().await.unwrap_err().is_lost());
    assert!(lasts(server, "k", 100 * SECOND).await);
    assert!(server.ttl(INDEX).await.is_some_and(|left| left <= 100 * SECOND));
    next.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

/// Protects "A reader leaves at the same cost": dead readers are removed in bounded parts, and delay no caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_dead_processes_go_in_parts_and_hold_no_writer_up() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let reader = a
        .rw_lock("k")
        .read()
        .fixed_lease(100 * SECOND)
        .acquire()
        .await
        .unwrap();
    for number in 0..1000 {
        let dead = format!("00000000-0000-8000-8000-000000000000:{number}");
        server.command(&["HSET", "k", &dead, "1"]).await;
        server.command(&["ZADD", INDEX, "1000", &dead]).await;
    }
    let other = b
        .rw_lock("k")
        .read()
        .fixed_lease(300 * SECOND)
        .acquire()
        .await
        .unwrap();
    let (cost, left) = commands_of(server, other.release()).await;
    left.unwrap();
    assert!(cost < 300, "{cost}");
    let inside: usize = server.query(&["HLEN", "k"]).await;
    assert!(inside > 500 && inside < 900, "{inside}");
    assert!(lasts(server, "k", 100 * SECOND).await || lasts(server, "k", 300 * SECOND).await);
    reader.release().await.unwrap();
    let writer = b.rw_lock("k").write().wait(PATIENCE).acquire();
    within(SOON, "no live holder is inside", writer)
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_in_place_of_the_index_is_named_and_stays_and_fails_no_renewal_and_no_release() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let held = a.rw_lock("k").read().acquire().await.unwrap();
    server.command(&["SET", INDEX, "text"]).await;
    let error = b.rw_lock("k").read().acquire().await.unwrap_err();
    assert!(matches!(&error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains(INDEX), "{error}");
    is_confirmed(&held).await;
    assert_eq!(inside(server, "k").await.1.len(), 1);
    held.release().await.unwrap();
    // With the lock, which has no holder any more, its index goes as well.
    b.rw_lock("k")
        .write()
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    store.assert_clean(&[&a, &b]).await;
}

/// What is left of its own lease, from a read under it that ended unreleased, is not the writer's lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_keeps_others_out_also_after_a_read_under_it_has_expired() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let lock = a.rw_lock("k");
    let writing = lock.write().acquire().await.unwrap();
    let read = |lease| writing.scope(lock.read().fixed_lease(lease).acquire());
    let first = read(300 * MS).await.unwrap();
    sleep(400 * MS).await;
    let other = b.rw_lock("k").read();
    assert!(other.try_acquire().await.unwrap_err().is_busy());
    drop(first);
    let all = keys(server).await;
    let stale = all.iter().find(|key| key.contains(":write:rwlock_timeout"));
    if let Some(stale) = stale {
        // As at the end of the lease from before the renewals.
        server.command(&["PEXPIRE", stale, "200"]).await;
    }
    let second = read(10 * SECOND).await.unwrap();
    sleep(300 * MS).await;
    assert!(other.try_acquire().await.unwrap_err().is_busy());
    assert!(writing.is_held());
    second.release().await.unwrap();
    writing.release().await.unwrap();
    is_empty_soon(server).await;
}

/// The release of a writer that does not know that its lease is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_hold_of_a_writer_whose_lease_is_over_takes_nothing_from_readers() {
    let (store, a, b) = two().await;
    let server = store.as_server();
    let lock = a.rw_lock("k");
    let writing = lock.write().min_hold(2 * SECOND).acquire().await.unwrap();
    let reading = writing.scope(lock.read().fixed_lease(100 * SECOND).acquire());
    let reading = reading.await.unwrap();
    let all = keys(server).await;
    let of_writer = all.iter().find(|key| key.contains(":write:rwlock_timeout"));
    server.command(&["DEL", of_writer.expect("its own lease")]).await;
    let _ = writing.release().await;
    assert!(
        lasts(server, "k", 100 * SECOND).await,
        "{:?}",
        server.ttl("k").await
    );
    assert!(b.rw_lock("k").write().try_acquire().await.unwrap_err().is_busy());
    reading.release().await.unwrap();
    is_empty_soon(server).await;
}
