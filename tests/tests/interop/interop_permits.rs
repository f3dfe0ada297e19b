//! dlock and Redisson 4.7.0 share semaphores and latches: permits from both sides, numbers that both see, wake-ups in
//! milliseconds both ways, and permits that come back after a crash of either.
//!
//! What Redisson's own tests say of `RPermitExpirableSemaphore`, `RSemaphore` and `RCountDownLatch` is said here of both
//! sides at once.

use std::time::{Duration, Instant, SystemTime};

use dlock::{Error, LockClient, LockKey, Semaphore, SemaphoreStatus};
use dlock_tests::faults::{SLACK, SOON, in_rounds, within};
use dlock_tests::redisson::{Answer, Error as Thrown, Redisson};
use dlock_tests::{Server, Store, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// Names as most services use them, and with the tag that places them in a Cluster.
const NAMES: [&str; 2] = ["pool:42", "{shop}:pool:42"];

fn raw(name: &str) -> LockKey {
    LockKey::raw(name)
}

fn millis(time: Duration) -> String {
    time.as_millis().to_string()
}

fn semaphore_channel(name: &str) -> String {
    match name.contains('{') {
        true => format!("redisson_sc:{name}"),
        false => format!("redisson_sc:{{{name}}}"),
    }
}

fn latch_channel(name: &str) -> String {
    format!("redisson_countdownlatch__channel__{{{name}}}")
}

/// Waits until so many processes listen to the channel, and a little longer: for their look after subscribing.
async fn waited_for(server: &Server, channel: &str, by: u64) {
    eventually("the waiters are subscribed", || async {
        let (_, count): (String, u64) = server.query(&["PUBSUB", "NUMSUB", channel]).await;
        count == by
    })
    .await;
    settle().await;
}

async fn nobody_waits(server: &Server) {
    eventually("no client waits", || async {
        server.pubsub_channels().await.is_empty()
    })
    .await;
}

/// Calls of Java on permits with an owner.
struct Permits<'a> {
    java: &'a Redisson,
    name: &'a str,
}

impl Permits<'_> {
    async fn call(&self, thread: u32, method: &str, arguments: &[&str]) -> Result<Answer, Thrown> {
        let words = [&[method, "permits", self.name], arguments].concat();
        self.java.call(thread, &words).await
    }

    /// A permit that ends by itself after this long; its id.
    async fn acquire(&self, thread: u32, lease: Duration) -> String {
        let answer = self.call(thread, "acquire", &[&millis(lease)]).await.unwrap();
        answer.text().to_owned()
    }

    async fn try_acquire(&self, thread: u32, wait: Duration) -> Answer {
        self.call(thread, "tryAcquire", &[&millis(wait), "30000"])
            .await
            .unwrap()
    }

    async fn release(&self, thread: u32, id: &str) -> Result<Answer, Thrown> {
        self.call(thread, "release", &[id]).await
    }

    async fn number(&self, method: &str) -> i64 {
        self.call(9, method, &[]).await.unwrap().number()
    }

    /// Both sides say that there are so many in all, so many held and so many free.
    async fn agree(&self, semaphore: &Semaphore, total: i64, held: u64, available: i64) {
        let status = semaphore.status().await.unwrap().unwrap();
        let SemaphoreStatus {
            total: all,
            held: out,
            available: free,
            ..
        } = status;
        assert_eq!((all, out, free), (total, held, available), "{status:?}");
        let java = (
            self.number("getPermits").await,
            self.number("acquiredPermits").await,
            self.number("availablePermits").await,
        );
        assert_eq!(
            java,
            (total, i64::try_from(held).unwrap(), available),
            "as Java sees it"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_wake_each_other_in_milliseconds() {
    const ROUNDS: usize = 15;
    let store = Store::server().await;
    let server = store.as_server();
    let java = Redisson::on(&store).await;
    // By the message: leases are 90 s on both sides.
    let client = store.client_with(|builder| builder.lease(90 * SECOND)).await;
    for name in NAMES {
        let (channel, semaphore) = (semaphore_channel(name), client.semaphore(raw(name)));
        let permits = Permits { java: &java, name };
        semaphore.set_permits(1).await.unwrap();
        let (mut to_rust, mut to_java) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let id = permits.acquire(1, 90 * SECOND).await;
            let waiting = semaphore.acquire();
            let waiter = tokio::spawn(async move { (waiting.await.unwrap(), SystemTime::now()) });
            waited_for(server, &channel, 1).await;
            let released = permits.release(1, &id).await.unwrap();
            let (permit, woken) = waiter.await.unwrap();
            to_rust.push(
                woken
                    .duration_since(released.done_at - released.took)
                    .unwrap_or_default(),
            );
            nobody_waits(server).await;

            let releasing = async {
                waited_for(server, &channel, 1).await;
                let before = SystemTime::now();
                permit.release().await.unwrap();
                before
            };
            let (woken, released) = tokio::join!(permits.try_acquire(2, 60 * SECOND), releasing);
            to_java.push(woken.since(released));
            permits.release(2, woken.text()).await.unwrap();
            nobody_waits(server).await;
        }
        told(&format!("permits of {name}"), to_rust, to_java);
        assert!(semaphore.delete().await.unwrap());
    }
    store.assert_clean(&[&client]).await;
}

/// Says how long the wake-ups took, and that each of them was by the message: without it a waiter looks after 30 s.
fn told(what: &str, mut to_rust: Vec<Duration>, mut to_java: Vec<Duration>) {
    to_rust.sort();
    to_java.sort();
    let (rust, java) = (to_rust[to_rust.len() / 2], to_java[to_java.len() / 2]);
    let slowest = to_rust.iter().chain(&to_java).max().copied().unwrap();
    println!("wake-up, {what}, median: Java to Rust {rust:?}, Rust to Java {java:?}; slowest {slowest:?}");
    assert!(slowest < SLACK, "{what}: {slowest:?}");
    assert!(rust < 5 * SECOND && java < 5 * SECOND, "{rust:?}, {java:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_without_an_owner_and_latches_wake_each_other_in_milliseconds() {
    const ROUNDS: usize = 10;
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        let (channel, semaphore) = (semaphore_channel(name), client.unowned_semaphore(raw(name)));
        assert!(semaphore.try_set_permits(0).await.unwrap());
        let (mut to_rust, mut to_java) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let waiting = semaphore.acquire_many(2);
            let waiter = tokio::spawn(async move {
                waiting.await.unwrap();
                SystemTime::now()
            });
            waited_for(server, &channel, 1).await;
            let released = java.call(1, &["release", "semaphore", name, "2"]).await.unwrap();
            let woken = waiter.await.unwrap();
            to_rust.push(
                woken
                    .duration_since(released.done_at - released.took)
                    .unwrap_or_default(),
            );
            nobody_waits(server).await;
            let releasing = async {
                waited_for(server, &channel, 1).await;
                let before = SystemTime::now();
                semaphore.release_many(3).await.unwrap();
                before
            };
            let acquire = ["acquire", "semaphore", name, "3"];
            let (woken, released) = tokio::join!(java.call(2, &acquire), releasing);
            to_java.push(woken.unwrap().since(released));
            nobody_waits(server).await;
        }
        told(&format!("permits without an owner of {name}"), to_rust, to_java);
        assert!(semaphore.delete().await.unwrap());

        let (channel, latch) = (latch_channel(name), client.latch(raw(name)));
        let (mut to_rust, mut to_java) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            assert!(latch.try_set_count(1).await.unwrap());
            let waiter = tokio::spawn({
                let latch = latch.clone();
                async move {
                    latch.wait().await.unwrap();
                    SystemTime::now()
                }
            });
            let opening = async {
                // Both processes listen.
                waited_for(server, &channel, 2).await;
                let before = SystemTime::now();
                match round % 2 {
                    0 => drop(latch.count_down().await.unwrap()),
                    _ => drop(java.call(1, &["countDown", "latch", name]).await.unwrap()),
                }
                before
            };
            let wait = ["await", "latch", name];
            let (waited, opened) = tokio::join!(java.call(2, &wait), opening);
            to_java.push(waited.unwrap().since(opened));
            to_rust.push(waiter.await.unwrap().duration_since(opened).unwrap_or_default());
            nobody_waits(server).await;
        }
        told(&format!("latch {name}"), to_rust, to_java);
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_sides_see_the_same_permits_whichever_side_changes_them() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        let (permits, semaphore) = (Permits { java: &java, name }, client.semaphore(raw(name)));
        assert_eq!(semaphore.status().await.unwrap(), None);
        assert_eq!(permits.number("availablePermits").await, 0);
        let set = async |method: &str, number: &str| {
            let answer = permits.call(1, method, &[number]).await;
            answer.unwrap().acquired()
        };
        // The first says it.
        assert!(set("trySetPermits", "4").await);
        assert!(!semaphore.try_set_permits(9).await.unwrap());
        assert!(!set("trySetPermits", "9").await);
        permits.agree(&semaphore, 4, 0, 4).await;

        // Permits of both.
        let id = permits.acquire(1, 60 * SECOND).await;
        let two = semaphore.acquire_many(2).await.unwrap();
        permits.agree(&semaphore, 4, 3, 1).await;
        assert!(semaphore.try_acquire_many(2).await.unwrap_err().is_busy());
        let many = permits
            .call(1, "tryAcquireMany", &["2", "0", "30000"])
            .await
            .unwrap();
        assert!(!many.acquired());

        // More and fewer, also than are held.
        set("addPermits", "2").await;
        permits.agree(&semaphore, 6, 3, 3).await;
        semaphore.remove_permits(4).await.unwrap();
        permits.agree(&semaphore, 2, 3, -1).await;
        set("setPermits", "1").await;
        permits.agree(&semaphore, 1, 3, -2).await;
        semaphore.set_permits(3).await.unwrap();
        permits.agree(&semaphore, 3, 3, 0).await;
        set("addPermits", "-1").await;
        permits.agree(&semaphore, 2, 3, -1).await;
        two.release().await.unwrap();
        permits.agree(&semaphore, 2, 1, 1).await;
        permits.release(1, &id).await.unwrap();
        permits.agree(&semaphore, 2, 0, 2).await;

        let many = permits
            .call(1, "tryAcquireMany", &["2", "0", "30000"])
            .await
            .unwrap();
        permits.agree(&semaphore, 2, 2, 0).await;
        permits.call(1, "releaseMany", &[many.text()]).await.unwrap();
        permits.agree(&semaphore, 2, 0, 2).await;
        assert!(permits.call(1, "delete", &[]).await.unwrap().acquired());
        assert_eq!(semaphore.status().await.unwrap(), None);
        assert!(semaphore.try_set_permits(1).await.unwrap());
        assert!(semaphore.delete().await.unwrap());
        assert_eq!(permits.number("getPermits").await, 0);
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_on_either_side_is_told_of_permits_that_are_added_or_set() {
    let store = Store::server().await;
    let server = store.as_server();
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let name = NAMES[0];
    let (permits, semaphore) = (Permits { java: &java, name }, client.semaphore(name));
    let channel = semaphore_channel(name);
    // A waiter that comes before the number is set, too.
    for (rust, how) in [
        (false, "trySetPermits"),
        (false, "addPermits"),
        (false, "setPermits"),
        (true, "add"),
        (true, "set"),
    ] {
        let waiting = semaphore.acquire_many(2);
        let rust_waits = tokio::spawn(async move { waiting.await.map(drop) });
        let change = async {
            waited_for(server, &channel, 2).await;
            match (rust, how) {
                (false, how) => drop(permits.call(1, how, &["7"]).await.unwrap()),
                (true, "add") => drop(semaphore.add_permits(7).await.unwrap()),
                _ => drop(semaphore.set_permits(7).await.unwrap()),
            }
        };
        let both = async { tokio::join!(permits.try_acquire(2, 60 * SECOND), change) };
        let (had, ()) = within(SOON, how, both).await;
        assert!(had.acquired(), "{how}");
        within(SOON, how, rust_waits).await.unwrap().unwrap();
        permits.release(2, had.text()).await.unwrap();
        assert!(semaphore.delete().await.unwrap());
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_release_serves_all_waiters_that_can_go_on_on_both_sides() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let client = store.client_with(|builder| builder.lease(90 * SECOND)).await;
    let name = NAMES[0];
    let (permits, semaphore) = (Permits { java: &java, name }, client.semaphore(name));
    semaphore.set_permits(6).await.unwrap();
    let all = semaphore.acquire_many(6).await.unwrap();
    let threads = join_all((1..4).map(|thread| permits.try_acquire(thread, 60 * SECOND)));
    let tasks = join_all((0..3).map(|_| semaphore.acquire()));
    let release = async {
        waited_for(store.as_server(), &semaphore_channel(name), 2).await;
        let released = Instant::now();
        all.release().await.unwrap();
        released
    };
    let (had, held, released) = tokio::join!(threads, tasks, release);
    assert!(released.elapsed() < SLACK, "{:?}", released.elapsed());
    permits.agree(&semaphore, 6, 6, 0).await;
    for (thread, had) in (1..).zip(had) {
        permits.release(thread, had.text()).await.unwrap();
    }
    drop(held);
    eventually("all are back", || async {
        semaphore.available().await.unwrap() == 6
    })
    .await;
    assert!(semaphore.delete().await.unwrap());
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_either_side_are_respected_until_their_leases_end() {
    const HELD: Duration = Duration::from_millis(900);
    let name = NAMES[0];
    in_rounds("both are renewed in time", async || {
        let store = Store::server().await;
        let java = Redisson::on(&store).await;
        let client = store.client_with(|builder| builder.lease(HELD)).await;
        let (permits, semaphore) = (Permits { java: &java, name }, client.semaphore(name));
        semaphore.set_permits(2).await.unwrap();
        // Java prolongs its own, dlock renews its own.
        let id = permits.acquire(1, 700 * MS).await;
        let prolonged = permits.call(1, "updateLeaseTime", &[&id, "60000"]).await.unwrap();
        let permit = semaphore.acquire().await.unwrap();
        let refused = permits.try_acquire(2, 2500 * MS).await;
        if refused.acquired() || !permit.is_held() || !prolonged.acquired() {
            return Err(format!("lost: {refused:?}, {permit:?}, {prolonged:?}"));
        }
        assert!(refused.took >= 2500 * MS);
        assert!(semaphore.try_acquire().await.unwrap_err().is_busy());
        permits.agree(&semaphore, 2, 2, 0).await;
        // Both can see whose it is and how long it has yet.
        let holders = client.holders(name).await.unwrap();
        assert!(
            holders
                .iter()
                .any(|holder| holder.id == id && holder.remaining > Some(30 * SECOND))
        );
        let ours = holders.iter().find(|holder| holder.id != id).unwrap();
        let left = permits
            .call(1, "getLeaseTime", &[&ours.id])
            .await
            .unwrap()
            .number();
        assert!(left > 0 && left <= 900, "{left}");
        permits.release(1, &id).await.unwrap();
        permit.release().await.map_err(|error| error.to_string())?;
        permits.agree(&semaphore, 2, 0, 2).await;
        // One without an end.
        let for_ever = permits.call(1, "acquire", &[]).await.unwrap();
        let holders = client.holders(name).await.unwrap();
        assert_eq!((holders.len(), holders[0].remaining), (1, None));
        semaphore.set_permits(1).await.unwrap();
        let waited = semaphore.clone().wait(100 * MS).acquire().await;
        assert!(
            matches!(waited, Err(Error::NotAcquired { remaining: None, .. })),
            "{waited:?}"
        );
        permits.release(1, for_ever.text()).await.unwrap();
        assert!(semaphore.delete().await.unwrap());
        store.assert_clean(&[&client]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_java_process_that_is_killed_come_back_with_their_lease() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    let name = NAMES[1];
    let (permits, semaphore) = (Permits { java: &java, name }, client.semaphore(raw(name)));
    semaphore.set_permits(2).await.unwrap();
    let begun = Instant::now();
    permits
        .call(1, "tryAcquireMany", &["2", "0", "2000"])
        .await
        .unwrap();
    let waiting = semaphore.acquire_many(2);
    let waiter = tokio::spawn(async move { waiting.await.map(|permit| (permit, Instant::now())) });
    waited_for(store.as_server(), &semaphore_channel(name), 1).await;
    java.kill();
    let (permit, had) = waiter.await.unwrap().unwrap();
    let waited = had - begun;
    println!("permits of a killed Java process came back {waited:?} after they were taken, for 2 s");
    assert!(waited >= 1990 * MS && waited < 2 * SECOND + SLACK, "{waited:?}");
    permit.release().await.unwrap();
    assert_eq!(semaphore.available().await.unwrap(), 2);
    assert!(semaphore.delete().await.unwrap());
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_of_a_rust_process_that_is_gone_come_back_with_their_lease() {
    let store = Store::server().await;
    let java = Redisson::on(&store).await;
    let url = store.as_server().url();
    let name = NAMES[0];
    // What is left of a process that was killed: nothing runs any more, nothing is sent any more.
    let begun = SystemTime::now();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let permit = runtime.block_on(async {
            let builder = LockClient::builder().url(url).lease(2 * SECOND);
            let client = builder.build().await.unwrap();
            let semaphore = client.semaphore(NAMES[0]).permits(3);
            semaphore.acquire_many(3).await.unwrap()
        });
        std::mem::forget(permit);
        runtime.shutdown_background();
    })
    .join()
    .unwrap();
    let permits = Permits { java: &java, name };
    let had = permits
        .call(1, "tryAcquireMany", &["3", "60000", "60000"])
        .await
        .unwrap();
    let waited = had.since(begun);
    println!("permits of a Rust process that is gone came back {waited:?} after they were taken, for 2 s");
    assert!(
        had.acquired() && waited >= 1990 * MS && waited < 2 * SECOND + SLACK,
        "{waited:?}"
    );
    permits.call(1, "releaseMany", &[had.text()]).await.unwrap();
    assert_eq!(permits.number("availablePermits").await, 3);
    permits.call(1, "delete", &[]).await.unwrap();
    store.assert_clean(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_number_of_permits_without_an_owner_is_shared() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        let semaphore = client.unowned_semaphore(raw(name));
        let call = async |words: &[&str]| {
            let words = [&[words[0], "semaphore", name], &words[1..]].concat();
            java.call(1, &words).await.unwrap()
        };
        let agree = async |free: i64| {
            assert_eq!(semaphore.available().await.unwrap(), free);
            assert_eq!(call(&["availablePermits"]).await.number(), free);
        };
        agree(0).await;
        assert!(call(&["trySetPermits", "5"]).await.acquired());
        assert!(!semaphore.try_set_permits(3).await.unwrap());
        call(&["acquire", "2"]).await;
        semaphore.acquire_many(2).await.unwrap();
        agree(1).await;
        assert!(semaphore.try_acquire_many(2).await.unwrap_err().is_busy());
        assert!(!call(&["tryAcquire", "2", "0"]).await.acquired());
        // Each releases what the other acquired.
        call(&["release", "2"]).await;
        semaphore.release_many(2).await.unwrap();
        agree(5).await;
        call(&["addPermits", "-7"]).await;
        agree(-2).await;
        semaphore.add_permits(5).await.unwrap();
        agree(3).await;
        assert_eq!(semaphore.drain().await.unwrap(), 3);
        assert_eq!(call(&["drainPermits"]).await.number(), 0);
        semaphore.remove_permits(1).await.unwrap();
        agree(-1).await;
        semaphore.release_many(4).await.unwrap();
        assert_eq!(call(&["drainPermits"]).await.number(), 3);
        assert!(call(&["delete"]).await.acquired());
        assert!(matches!(
            semaphore.release().await,
            Err(Error::NoPermitsSet { .. })
        ));
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_latch_is_shared() {
    let store = Store::server().await;
    let (java, client) = (Redisson::on(&store).await, store.client().await);
    for name in NAMES {
        let latch = client.latch(raw(name));
        let call = async |thread: u32, words: &[&str]| {
            let words = [&[words[0], "latch", name], &words[1..]].concat();
            java.call(thread, &words).await.unwrap()
        };
        // An open one is not waited for.
        call(1, &["await"]).await;
        latch.wait().await.unwrap();
        assert!(call(1, &["trySetCount", "3"]).await.acquired());
        assert!(!latch.try_set_count(2).await.unwrap());
        assert_eq!(latch.count().await.unwrap(), 3);
        assert_eq!(latch.count_down().await.unwrap(), 2);
        call(1, &["countDown"]).await;
        assert_eq!(
            (
                latch.count().await.unwrap(),
                call(1, &["getCount"]).await.number()
            ),
            (1, 1)
        );
        // Waits end with their time.
        assert!(!call(1, &["await", "200"]).await.acquired());
        assert!(!latch.wait_for(200 * MS).await.unwrap());
        call(1, &["countDown"]).await;
        assert!(matches!(latch.count_down().await, Err(Error::LatchOpen { .. })));
        assert_eq!(call(1, &["getCount"]).await.number(), 0);
        // Below zero is nothing to Redisson, and changes nothing.
        call(1, &["countDown"]).await;
        assert_eq!(latch.count().await.unwrap(), 0);

        // Set by dlock; several wait on both sides.
        assert!(latch.try_set_count(2).await.unwrap());
        assert!(!call(1, &["trySetCount", "5"]).await.acquired());
        let threads = join_all((2..5).map(|thread| call(thread, &["await", "60000"])));
        let tasks = join_all((0..3).map(|_| latch.wait_for(60 * SECOND)));
        let down = async {
            waited_for(store.as_server(), &latch_channel(name), 2).await;
            call(1, &["countDown"]).await;
            settle().await;
            assert_eq!(latch.count_down().await.unwrap(), 0);
            Instant::now()
        };
        let (threads, tasks, opened) = tokio::join!(threads, tasks, down);
        assert!(opened.elapsed() < SLACK);
        assert!(threads.iter().all(Answer::acquired) && tasks.into_iter().all(|open| open.unwrap()));

        // A latch that dlock deletes is open to both. (A waiter for one that Redisson deletes finds out too.)
        assert!(latch.try_set_count(2).await.unwrap());
        let delete = async {
            waited_for(store.as_server(), &latch_channel(name), 1).await;
            assert!(latch.delete().await.unwrap());
        };
        let (waited, ()) = tokio::join!(call(2, &["await", "60000"]), delete);
        assert!(waited.acquired() && waited.took < SLACK, "{waited:?}");
        assert!(latch.try_set_count(2).await.unwrap());
        let delete = async {
            waited_for(store.as_server(), &latch_channel(name), 1).await;
            assert!(call(1, &["delete"]).await.acquired());
        };
        let (waited, ()) = tokio::join!(within(SOON, "the end of the latch", latch.wait()), delete);
        waited.unwrap();
        assert!(!call(1, &["delete"]).await.acquired());
    }
    store.assert_clean(&[&client]).await;
}
