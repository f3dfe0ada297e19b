//! dlock and Redisson 4.7.0 share locks in a Cluster, on every shard. There both tell their news on sharded channels, and
//! listen to these.
//!
//! Needs java 17 and Maven; `tests/run` leaves this suite out where they are missing, and says so.

use std::time::{Duration, Instant};

use dlock::{Error, LockClient, LockGuard, LockKey};
use dlock_tests::faults::{LEASE, PATIENCE, SLACK, SOON, within};
use dlock_tests::redisson::{self, Answer, Kind, Options, Redisson};
use dlock_tests::{Cluster, Flavor, Server, eventually, settle};
use tokio::task::JoinHandle;

/// How long a waiter is given to begin to listen.
const A_WHILE: Duration = Duration::from_millis(500);

/// A Cluster, a Java process and a client of dlock, both with leases of [`LEASE`].
async fn both_sides() -> (Cluster, Redisson, LockClient) {
    if let Err(missing) = Redisson::available() {
        panic!("no tests with Redisson: {missing} (tests/run leaves this suite out)");
    }
    let cluster = Cluster::start(Flavor::from_env()).await;
    let options = Options::new().watchdog(LEASE);
    let java = Redisson::start_with(&cluster.url(), &options).await.unwrap();
    let builder = LockClient::builder().url(cluster.url()).lease(LEASE);
    (cluster, java, builder.build().await.unwrap())
}

async fn acquire(client: LockClient, kind: Kind, name: String, wait: Duration) -> Result<LockGuard, Error> {
    let key = LockKey::raw(name);
    match kind {
        Kind::Plain => client.lock(key).wait(wait).acquire().await,
        Kind::Fair => client.fair_lock(key).wait(wait).acquire().await,
        Kind::Fenced => client.fenced_lock(key).wait(wait).acquire().await,
        Kind::Read => client.rw_lock(key).read().wait(wait).acquire().await,
        Kind::Write => client.rw_lock(key).write().wait(wait).acquire().await,
        other => panic!("{other:?} has no guard of a lock"),
    }
}

/// The lock goes to and fro: a waiter on one side is woken by the release of the other. Nothing else would wake them
/// within [`SLACK`], since leases are so long that they are looked at every 30 s.
async fn go_to_and_fro(java: &Redisson, client: &LockClient, kind: Kind, name: &str) {
    let ask = |wait| acquire(client.clone(), kind, name.to_owned(), wait);
    java.lock(1, kind, name, None).await.unwrap();
    let refused = ask(A_WHILE).await.unwrap_err();
    assert!(refused.is_busy(), "{kind:?} {name}: {refused}");
    let waiter = tokio::spawn(ask(PATIENCE));
    tokio::time::sleep(A_WHILE).await;
    assert!(!waiter.is_finished(), "{kind:?} {name}: two have it");
    let released = Instant::now();
    java.unlock(1, kind, name).await.unwrap();
    let guard = within(SOON, "the wake-up by Java", waiter)
        .await
        .unwrap()
        .unwrap();
    let to_rust = released.elapsed();

    assert!(java.is_locked(kind, name).await.unwrap(), "{kind:?} {name}");
    let release = async {
        tokio::time::sleep(A_WHILE).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        released
    };
    let locked = async {
        let answer = java.lock(2, kind, name, None).await.unwrap();
        (answer.took, Instant::now())
    };
    let (released, (took, woken)) = tokio::join!(release, locked);
    let to_java = woken.saturating_duration_since(released);
    assert!(
        took >= A_WHILE / 2 && to_java < SLACK,
        "{kind:?} {name}: {took:?}, {to_java:?}"
    );
    java.unlock(2, kind, name).await.unwrap();
    println!("{kind:?} {name}: Java to Rust {to_rust:?}, Rust to Java {to_java:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_exclude_and_wake_each_other_on_every_shard() {
    let (cluster, java, client) = both_sides().await;
    for shard in 0..3 {
        let name = cluster.key_on(cluster.server(shard), "order:").await;
        for kind in [Kind::Plain, Kind::Fair, Kind::Write] {
            go_to_and_fro(&java, &client, kind, &format!("{{{name}}}:{kind:?}")).await;
        }
        go_to_and_fro(&java, &client, Kind::Plain, &name).await;
    }
    client.shutdown(PATIENCE).await;
    assert_eq!(cluster.keys("order:").await, Vec::<String>::new());
}

/// A waiter here waits for what Java has. It asks for nothing meanwhile, or only to keep its position in a queue, and
/// hears of Java's release.
async fn is_told<T>(
    server: &Server,
    name: &str,
    waiter: JoinHandle<Result<T, Error>>,
    release: impl Future<Output = Result<Answer, redisson::Error>>,
) -> T {
    eventually("a waiter listens", || async {
        let channels = server.pubsub_channels().await;
        channels.iter().any(|channel| channel.contains(name))
    })
    .await;
    settle().await;
    let monitor = server.monitor().await;
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let asked = monitor.commands().await;
    let asked = asked.iter().filter(|command| command.is_script()).count();
    let owed = 1 + began.elapsed().as_millis() / 1500;
    assert!(
        asked <= owed as usize,
        "{name}: {asked} looks in {:?}",
        began.elapsed()
    );
    drop(monitor);
    assert!(!waiter.is_finished(), "{name}: two have it");
    let released = Instant::now();
    release.await.unwrap();
    // A client that looks for other reasons does so every 30 s.
    let got = within(SOON, format!("the wake-up by Java of {name}"), waiter).await;
    println!("{name}: {:?}, Java's own answer included", released.elapsed());
    got.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_release_by_java_is_notified_and_no_waiter_asks_meanwhile() {
    let (cluster, java, client) = both_sides().await;
    for (at, (theirs, ours)) in [
        (Kind::Plain, Kind::Plain),
        (Kind::Fair, Kind::Fair),
        (Kind::Fenced, Kind::Fenced),
        (Kind::Write, Kind::Write),
        (Kind::Write, Kind::Read),
        (Kind::Read, Kind::Write),
    ]
    .into_iter()
    .enumerate()
    {
        let server = cluster.server(at % 3);
        let name = cluster.key_on(server, &format!("{ours:?}-{theirs:?}:")).await;
        java.lock(1, theirs, &name, None).await.unwrap();
        let waiter = tokio::spawn(acquire(client.clone(), ours, name.clone(), PATIENCE));
        let release = java.unlock(1, theirs, &name);
        let guard = is_told(server, &name, waiter, release).await;
        guard.release().await.unwrap();
    }
    let server = cluster.server(0);

    let name = cluster.key_on(server, "permits:").await;
    let words = |method, more: &[&str]| [&[method, "permits", &*name], more].concat().join(" ");
    let call = async |words: String| java.call(1, &words.split(' ').collect::<Vec<_>>()).await;
    call(words("trySetPermits", &["1"])).await.unwrap();
    let permit = call(words("acquire", &[])).await.unwrap();
    let waiter = tokio::spawn(client.semaphore(&name).wait(PATIENCE).acquire());
    let release = call(words("release", &[permit.text()]));
    let permit = is_told(server, &name, waiter, release).await;
    permit.release().await.unwrap();

    let name = cluster.key_on(server, "semaphore:").await;
    for words in [
        &["trySetPermits", "semaphore", &name, "1"][..],
        &["acquire", "semaphore", &name],
    ] {
        java.call(1, words).await.unwrap();
    }
    let waiter = tokio::spawn(client.unowned_semaphore(&name).wait(PATIENCE).acquire());
    let release = ["release", "semaphore", &name];
    is_told(server, &name, waiter, java.call(1, &release)).await;

    let name = cluster.key_on(server, "latch:").await;
    let words = ["trySetCount", "latch", &name, "1"];
    java.call(1, &words).await.unwrap();
    let latch = client.latch(&name);
    let waiter = tokio::spawn(async move { latch.wait_for(PATIENCE).await });
    let open = ["countDown", "latch", &name];
    assert!(is_told(server, &name, waiter, java.call(1, &open)).await);
    client.shutdown(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_both_sides_are_inside_together() {
    let (cluster, java, client) = both_sides().await;
    let name = "{shop}:prices";
    java.lock(1, Kind::Read, name, None).await.unwrap();
    let reader = acquire(client.clone(), Kind::Read, name.to_owned(), PATIENCE)
        .await
        .unwrap();
    let writer = tokio::spawn(acquire(client.clone(), Kind::Write, name.to_owned(), PATIENCE));
    java.unlock(1, Kind::Read, name).await.unwrap();
    tokio::time::sleep(A_WHILE).await;
    assert!(!writer.is_finished(), "a writer beside a reader");
    reader.release().await.unwrap();
    let guard = within(SOON, "the writer", writer).await.unwrap().unwrap();
    assert!(
        !java
            .try_lock(1, Kind::Read, name, Duration::ZERO, None)
            .await
            .unwrap()
            .acquired()
    );
    guard.release().await.unwrap();
    client.shutdown(PATIENCE).await;
    assert_eq!(cluster.keys("prices").await, Vec::<String>::new());
}
