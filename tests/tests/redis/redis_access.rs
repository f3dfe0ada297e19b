//! Passwords and prefixes in every topology: a client with them gets in and goes on through a fail-over, another is told at
//! once, and no password goes to where it does not belong.

use std::time::Duration;

use dlock::{Error, LockClient, LockGuard};
use dlock_tests::faults::{PATIENCE, SOON, answered, built, hasty, hasty_builder, is_confirmed, within};
use dlock_tests::{Cluster, Flavor, Independent, Proxy, Replicas, Server, eventually, settle};

/// What the servers ask for, and what the sentinels do.
const PASSWORD: &str = "of-the-servers";
const OF_SENTINELS: &str = "of-the-sentinels";

/// Waits are woken, and holds are confirmed through a change.
async fn go_on_through(url: &str, keys: &[String], change: impl AsyncFn(&str, &LockGuard)) {
    let (a, b) = (hasty(url).await, hasty(url).await);
    for key in keys {
        let key = key.as_str();
        let guard = answered(|| a.lock(key).acquire()).await.unwrap();
        let waiter = tokio::spawn(b.lock(key).wait(PATIENCE).acquire());
        settle().await;
        guard.release().await.unwrap();
        let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        let waiter = tokio::spawn(a.lock(key).wait(PATIENCE).acquire());
        settle().await;
        change(key, &guard).await;
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
        let guard = within(PATIENCE, "the next one", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

/// It gets no further, and is told at once, and without any password.
async fn is_refused(url: &str, wrong: &str) {
    // What is told only when that is over is not told at once.
    let builder = LockClient::builder().url(url).timeout(PATIENCE);
    let error = within(SOON, wrong, builder.build()).await.unwrap_err();
    println!("{wrong}: {error}");
    assert!(matches!(error, Error::Refused { .. }), "{wrong}: {error:?}");
    let text = format!("{error} {error:?}");
    assert!(!text.contains("of-the-") && !text.contains("hunter2"), "{text}");
    if wrong.contains("no password of") {
        let is_of_sentinels = wrong.contains("sentinels");
        assert_eq!(
            text.contains("sentinel_password"),
            is_of_sentinels,
            "{wrong}: {text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_have_passwords_of_their_own() {
    let builder = Replicas::builder(Flavor::from_env()).password(OF_SENTINELS);
    let replicas = builder.server_password(PASSWORD).start().await;
    let url = replicas.url();
    go_on_through(&url, &["k".to_owned()], async |key, _| {
        let before = replicas.master().await.port();
        for replica in replicas.servers().iter().filter(|server| server.port() != before) {
            eventually("the replicas have it", || async {
                replica.keys().await.iter().any(|have| have == key)
            })
            .await;
        }
        replicas.fail_over().await;
    })
    .await;
    for (wrong, url) in [
        (
            "another password of the servers",
            url.replace(PASSWORD, "hunter2"),
        ),
        (
            "no password of the servers",
            url.replace(&format!(":{PASSWORD}@"), ""),
        ),
        (
            "another password of the sentinels",
            url.replace(OF_SENTINELS, "hunter2"),
        ),
        (
            "no password of the sentinels",
            url.replace(&format!("?sentinel_password={OF_SENTINELS}"), ""),
        ),
        (
            "each other's passwords",
            url.replace(PASSWORD, "x")
                .replace(OF_SENTINELS, PASSWORD)
                .replace("x", OF_SENTINELS),
        ),
        ("a master that they do not know", url.replace("/main", "/another")),
    ] {
        is_refused(&url, wrong).await;
    }
    // Sentinels are never told the servers' password, whether they ask for one or not.
    let proxies = replicas
        .sentinels()
        .iter()
        .map(|sentinel| Proxy::start(sentinel.addr()));
    let proxies: Vec<_> = proxies.collect();
    let hosts: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    let (begin, end) = (url.find('@').unwrap() + 1, url.find("/main").unwrap());
    for own in [true, false] {
        let mut url = format!("{}{}{}", &url[..begin], hosts.join(","), &url[end..]);
        if own {
            hasty(&url).await.shutdown(Duration::ZERO).await;
        } else {
            url = url.replace(&format!("?sentinel_password={OF_SENTINELS}"), "");
            is_refused(&url, "no password of the sentinels").await;
        }
    }
    for proxy in &proxies {
        let told = proxy.count(|command| command.mentions(PASSWORD));
        assert!(told == 0 && proxy.commands_seen() > 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_of_a_cluster_have_a_password() {
    let builder = Cluster::builder(Flavor::from_env()).persistence(true);
    let cluster = builder.password(PASSWORD).start().await;
    let keys = [
        cluster.key_on(cluster.server(0), "k").await,
        cluster.key_on(cluster.server(1), "k").await,
    ];
    go_on_through(&cluster.url(), &keys, async |key, _| {
        cluster.fail_over(cluster.owner_of(key).await).await;
    })
    .await;
    let url = cluster.url();
    is_refused(&url.replace(PASSWORD, "hunter2"), "another password").await;
    is_refused(&url.replace(&format!(":{PASSWORD}@"), ""), "no password").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_members_of_a_quorum_have_a_password() {
    let builder = Server::builder(Flavor::from_env()).password(PASSWORD);
    let quorum = Independent::start_as(builder, 3).await;
    let url = quorum.url();
    go_on_through(&url, &["k".to_owned()], async |key, guard| {
        quorum.all_have(key, guard).await;
        quorum.servers()[0].kill();
    })
    .await;
    quorum.servers()[0].restart().await;
    is_refused(&url.replace(PASSWORD, "hunter2"), "another password").await;
    is_refused(&url.replace(&format!(":{PASSWORD}@"), ""), "no password").await;
}

/// The same name with two prefixes is two locks, and no client sees more than its own prefix.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_keep_locks_apart_in_every_topology() {
    let flavor = Flavor::from_env();
    let server = Server::start(flavor);
    let (server, replicas, cluster, quorum) = tokio::join!(
        server,
        Replicas::start(flavor),
        Cluster::start(flavor),
        Independent::start(flavor, 3)
    );
    for url in [server.url(), replicas.url(), cluster.url(), quorum.url()] {
        let shop = built(|| hasty_builder(&url).prefix("shop:")).await;
        let same = built(|| hasty_builder(&url).prefix("shop:")).await;
        let mill = built(|| hasty_builder(&url).prefix("mill:")).await;
        let none = built(|| hasty_builder(&url)).await;
        let guard = answered(|| shop.lock("k").acquire()).await.unwrap();
        // The same name with another prefix, and with none.
        for other in [&mill, &none] {
            let free = answered(|| other.lock("k").try_acquire()).await.unwrap();
            free.release().await.unwrap();
        }
        // With the same prefix, and with none and all of it in the name.
        for (other, name) in [(&same, "k"), (&none, "shop:k")] {
            let busy = answered(|| other.lock(name).try_acquire()).await.unwrap_err();
            assert!(
                busy.is_busy() && busy.to_string().contains(&format!("\"{name}\"")),
                "{url}: {busy}"
            );
            assert!(answered(|| other.inspect(name)).await.unwrap().is_some(), "{url}");
            let waiter = tokio::spawn(other.lock(name).wait(PATIENCE).acquire());
            settle().await;
            assert!(!waiter.is_finished(), "{url}");
            waiter.abort();
        }
        let waiter = tokio::spawn(none.lock("shop:k").wait(PATIENCE).acquire());
        settle().await;
        guard.release().await.unwrap();
        let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        next.release().await.unwrap();
    }
}
