//! A waiter in a Cluster is told, for every kind of lock and wherever its slot has moved, and sends no request.

use std::time::{Duration, Instant};

use dlock::{LockClient, LockKey};
use dlock_tests::faults::{PATIENCE, Pair, SOON, answered, hasty_builder, in_rounds, patient, within};
use dlock_tests::{Cluster, Flavor, Server, eventually, settle, slot_of};
use futures_util::future::{BoxFuture, FutureExt, join_all};
use tokio::task::JoinHandle;

const MS: Duration = Duration::from_millis(1);
/// So long that no lease ends during a test: a waiter looks every 30 s then, and [`SOON`] is less.
const LEASE: Duration = Duration::from_secs(3600);

/// A waiter, and what it waits for.
struct Waiting {
    /// The name of the lock, or whatever it is.
    name: String,
    waiter: JoinHandle<()>,
    release: BoxFuture<'static, ()>,
}

impl Waiting {
    /// Releases what it waits for, and sees that it is told.
    async fn assert_woken(self) {
        let Waiting {
            name,
            waiter,
            release,
        } = self;
        assert!(!waiter.is_finished(), "{name} is held");
        let released = Instant::now();
        release.await;
        within(SOON, format!("the wake-up of {name}"), waiter)
            .await
            .unwrap();
        println!("{name}: {:?}", released.elapsed());
    }
}

/// Two clients of a Cluster of its own.
async fn cluster() -> (Cluster, LockClient, LockClient) {
    let builder = Cluster::builder(Flavor::from_env()).persistence(true);
    let cluster = builder.start().await;
    let (a, b) = clients(&cluster).await;
    (cluster, a, b)
}

async fn clients(cluster: &Cluster) -> (LockClient, LockClient) {
    let url = cluster.url();
    let client = async || hasty_builder(&url).lease(LEASE).build().await.unwrap();
    (client().await, client().await)
}

/// Two clients that are never told where the slots are but by servers that have them no longer: otherwise they would ask
/// for themselves after some seconds.
async fn uninformed(cluster: &Cluster) -> (LockClient, LockClient) {
    for server in cluster.servers() {
        let everything = ["ACL", "SETUSER", "svc", "on", ">pw", "~*", "&*", "+@all"];
        server.command(&everything).await;
    }
    let url = cluster.url().replacen("://", "://svc:pw@", 1);
    let client = async || hasty_builder(&url).lease(LEASE).build().await.unwrap();
    let clients = (client().await, client().await);
    for server in cluster.servers() {
        let rule = ["ACL", "SETUSER", "svc", "-cluster", "+cluster|info"];
        server.command(&rule).await;
    }
    clients
}

/// Waits until a client listens for notifications of this name there.
async fn is_heard_of_at(server: &Server, name: &str) {
    eventually("a waiter listens there", || async {
        let channels = server.pubsub_channels().await;
        channels.iter().any(|channel| channel.contains(name))
    })
    .await;
}

/// Every kind that is waited for, held by `a` in this slot, and `b` waits. Names with braces as far as they may be in
/// another slot than their channel.
async fn everything(a: &LockClient, b: &LockClient, slot: u16) -> Vec<Waiting> {
    let here = |what: &str| {
        let mut names = (0..).map(|n| what.replace('#', &n.to_string()));
        names
            .find(|name| slot_of(name) == slot)
            .expect("there are names for every slot")
    };
    let mut all = Vec::new();
    for (at, pair) in Pair::ALL.into_iter().enumerate() {
        let name = here(&format!("lock:{at}:#"));
        let guard = answered(|| pair.held(a, &name).acquire()).await.unwrap();
        let lock = pair.asked(b, &name).wait(PATIENCE);
        all.push(Waiting {
            waiter: tokio::spawn(async move { drop(answered(|| lock.acquire()).await.unwrap()) }),
            release: async move { guard.release().await.unwrap() }.boxed(),
            name,
        });
    }
    for name in [
        here("{tag:#}:lock"),
        here("half:{#"),
        here("none:{}#"),
        here("back:#}x"),
    ] {
        let guard = a.lock(LockKey::raw(&*name)).acquire().await.unwrap();
        let lock = b.lock(LockKey::raw(&*name)).wait(PATIENCE);
        all.push(Waiting {
            waiter: tokio::spawn(async move { drop(answered(|| lock.acquire()).await.unwrap()) }),
            release: async move { guard.release().await.unwrap() }.boxed(),
            name,
        });
    }
    for name in [here("permit:#"), here("{tag:#}:permit")] {
        let permit = a
            .semaphore(LockKey::raw(&*name))
            .permits(1)
            .acquire()
            .await
            .unwrap();
        let semaphore = b.semaphore(LockKey::raw(&*name)).wait(PATIENCE);
        all.push(Waiting {
            waiter: tokio::spawn(async move { drop(answered(|| semaphore.acquire()).await.unwrap()) }),
            release: async move { permit.release().await.unwrap() }.boxed(),
            name,
        });
    }
    let name = here("unowned:#");
    let taken = a.unowned_semaphore(&name).permits(1);
    taken.acquire().await.unwrap();
    let semaphore = b.unowned_semaphore(&name).wait(PATIENCE);
    all.push(Waiting {
        waiter: tokio::spawn(async move { answered(|| semaphore.acquire()).await.unwrap() }),
        release: async move { taken.release().await.unwrap() }.boxed(),
        name,
    });
    for name in [here("latch:#"), here("{tag:#}:latch")] {
        let count = a.latch(LockKey::raw(&*name));
        count.try_set_count(1).await.unwrap();
        let latch = b.latch(LockKey::raw(&*name));
        all.push(Waiting {
            waiter: tokio::spawn(async move {
                let opened = answered(|| latch.wait_for(PATIENCE)).await.unwrap();
                assert!(opened, "the latch stays shut");
            }),
            release: async move { assert_eq!(count.count_down().await.unwrap(), 0) }.boxed(),
            name,
        });
    }
    all
}

/// Waits until this server has the subscriptions of all of them.
async fn listen_at(server: &Server, all: &[Waiting]) {
    eventually("all listen there", async || {
        let channels = server.pubsub_channels().await;
        let is_there = |name: &str| channels.iter().any(|channel| channel.contains(name));
        all.iter().all(|waiting| is_there(&waiting.name))
    })
    .await;
    settle().await;
}

/// How many requests come to a server in a second.
async fn requests_in_a_second(server: &Server) -> usize {
    let monitor = server.monitor().await;
    tokio::time::sleep(1000 * MS).await;
    let commands = monitor.commands().await;
    commands.iter().filter(|command| command.is_script()).count()
}

/// Checks that no waiter asks while nothing happens, and that each is woken. Each waiter looks once after it has subscribed
/// anew, which on a slow machine is a while after the fail-over.
async fn are_woken_at(server: &Server, all: Vec<Waiting>) {
    // Two that keep their positions say so now and then, every 1.5 s or less often.
    const OWED: usize = 2;
    let mut requests = Vec::new();
    for _ in 0..5 {
        requests.push(requests_in_a_second(server).await);
        if requests.last() <= Some(&OWED) {
            break;
        }
    }
    assert!(
        requests.last() <= Some(&OWED),
        "requests in each second: {requests:?}"
    );
    for waiting in all {
        waiting.assert_woken().await;
    }
}

/// `b` waits and `a` releases, on any server.
async fn all_are_woken_on_every_shard(cluster: &Cluster, a: &LockClient, b: &LockClient) {
    for shard in 0..3 {
        let server = cluster.server(shard);
        let slot = slot_of(&cluster.key_on(server, "k").await);
        let all = everything(a, b, slot).await;
        listen_at(server, &all).await;
        are_woken_at(server, all).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_of_every_kind_of_release_and_asks_for_nothing_meanwhile() {
    let (cluster, a, b) = cluster().await;
    all_are_woken_on_every_shard(&cluster, &a, &b).await;
    // A waiter in a queue asks every 1.5 s, which may be just then; but not five times.
    in_rounds("five in a row are woken at once", async || {
        let mut guard = a.fair_lock("k").acquire().await.unwrap();
        let mut took = Duration::ZERO;
        for (at, client) in [&b, &a, &b, &a, &b].into_iter().enumerate() {
            let waiter = tokio::spawn(client.fair_lock("k").wait(PATIENCE).acquire());
            eventually("it listens", async || {
                !cluster.pubsub_channels("{k}:").await.is_empty()
            })
            .await;
            // So that they do not fall into step with each other.
            tokio::time::sleep(Duration::from_millis(100 + 70 * at as u64)).await;
            let released = Instant::now();
            guard.release().await.unwrap();
            guard = within(SOON, "the next", waiter).await.unwrap().unwrap();
            took += released.elapsed();
        }
        guard.release().await.unwrap();
        match took < Duration::from_secs(1) {
            true => Ok(()),
            false => Err(took),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_by_the_server_that_its_slot_has_moved_to() {
    let (cluster, a, b) = cluster().await;
    let slot = slot_of(&cluster.key_on(cluster.server(0), "k").await);
    let all = everything(&a, &b, slot).await;
    listen_at(cluster.server(0), &all).await;
    for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 1)] {
        let (from, to) = (cluster.server(from), cluster.server(to));
        cluster.move_slot(slot, from, to).await;
        listen_at(to, &all).await;
        cluster.owner(slot).await;
    }
    are_woken_at(cluster.server(1), all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_loses_a_slot_tells_its_listeners() {
    let (cluster, _, _) = cluster().await;
    let (a, b) = uninformed(&cluster).await;
    let name = cluster.key_on(cluster.server(0), "k").await;
    let guard = a.lock(&name).acquire().await.unwrap();
    let waiter = tokio::spawn(b.lock(&name).wait(PATIENCE).acquire());
    is_heard_of_at(cluster.server(0), &name).await;
    for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 2)] {
        let (from, to) = (cluster.server(from), cluster.server(to));
        settle().await;
        cluster.move_slot(slot_of(&name), from, to).await;
        // No client looks for other reasons for half a minute.
        within(SOON, "the way there", is_heard_of_at(to, &name)).await;
    }
    guard.release().await.unwrap();
    let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_released_while_its_slot_is_on_two_servers_is_seen_at_the_end_of_the_move() {
    let (cluster, a, b) = cluster().await;
    let [from, to] = [cluster.server(0), cluster.server(1)];
    let slot = slot_of(&cluster.key_on(from, "k").await);
    let all = everything(&a, &b, slot).await;
    listen_at(from, &all).await;
    cluster.begin_move(slot, from, to).await;
    for key in cluster.keys_in(slot, from).await {
        cluster.move_key(&key, from, to).await;
    }
    // What needs one key alone happens on the server that the slot goes to, which has no subscriber yet; all else waits.
    let mut waiters = Vec::new();
    for waiting in all {
        let released = tokio::spawn(waiting.release);
        let _ = tokio::time::timeout(100 * MS, released).await;
        waiters.push((waiting.name, waiting.waiter));
    }
    cluster.end_move(slot, from, to).await;
    for (name, waiter) in waiters {
        within(SOON, format!("the look for {name}"), waiter)
            .await
            .unwrap();
    }
}

/// What a lock has beside its own key comes later than that, and must not be taken for missing: a second queue would be
/// made, which stops the move, and readers and permits would be found to be gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_begun_anew_where_only_some_keys_of_a_lock_have_come() {
    let (cluster, a, b) = cluster().await;
    let [from, to] = [cluster.server(0), cluster.server(1)];
    let slot = slot_of(&cluster.key_on(from, "k").await);
    let all = everything(&a, &b, slot).await;
    listen_at(from, &all).await;
    cluster.begin_move(slot, from, to).await;
    let keys = cluster.keys_in(slot, from).await;
    let has_come = |key: &String| {
        !["queue", "timeout", "}:dlock:"]
            .iter()
            .any(|part| key.contains(part))
    };
    let mut first: Vec<_> = keys.into_iter().filter(has_come).collect();
    for key in &first {
        cluster.move_key(key, from, to).await;
    }
    // Waiters who ask for the first time, beside those who ask again meanwhile.
    let names: Vec<_> = all.iter().map(|waiting| waiting.name.clone()).collect();
    let mut late = Vec::new();
    for (pair, name) in Pair::ALL.into_iter().zip(&names) {
        let lock = pair.asked(&b, name).wait(PATIENCE);
        late.push(tokio::spawn(async move {
            drop(answered(|| lock.acquire()).await.unwrap());
        }));
    }
    tokio::time::sleep(2000 * MS).await;
    let mut come = cluster.keys_in(slot, to).await;
    come.sort();
    first.sort();
    assert_eq!(come, first, "what is there has been moved");
    cluster.end_move(slot, from, to).await;
    cluster.owner(slot).await;
    listen_at(to, &all).await;
    for waiting in all {
        waiting.assert_woken().await;
    }
    for waiter in late {
        within(SOON, "the wake-up of one who came late", waiter)
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_by_the_server_that_takes_over_in_good_order() {
    let (cluster, a, b) = cluster().await;
    let slot = slot_of(&cluster.key_on(cluster.server(0), "k").await);
    let all = everything(&a, &b, slot).await;
    listen_at(cluster.server(0), &all).await;
    cluster.fail_over(cluster.server(0)).await;
    let heir = cluster.owner(slot).await;
    listen_at(heir, &all).await;
    are_woken_at(heir, all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_is_told_by_the_server_that_takes_over_from_a_dead_one() {
    let (cluster, a, b) = cluster().await;
    let master = cluster.server(0);
    let slot = slot_of(&cluster.key_on(master, "k").await);
    let all = everything(&a, &b, slot).await;
    listen_at(master, &all).await;
    let replica = cluster.replica_of(master).await;
    eventually("the replica has everything", async || {
        replica.keys().await == master.keys().await
    })
    .await;
    master.kill();
    let heir = cluster.owner(slot).await;
    listen_at(heir, &all).await;
    are_woken_at(heir, all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_that_leaves_among_replies_to_subscriptions_loses_no_subscription() {
    let builder = Cluster::builder(Flavor::from_env()).replicas(0);
    let cluster = builder.behind_proxies(true).start().await;
    let (a, b) = uninformed(&cluster).await;
    let server = cluster.server(0);
    // Two that stand, and a third that is asked for when the slot of the first one leaves.
    let names = ["k", "l", "m"].map(|prefix| cluster.key_on(server, prefix));
    let names = join_all(names).await;
    let guards = join_all(names.iter().map(|name| a.lock(name).acquire())).await;
    let wait = |name: &String| tokio::spawn(b.lock(name).wait(PATIENCE).acquire());
    let mut waiters = vec![wait(&names[0]), wait(&names[1])];
    is_heard_of_at(server, &names[0]).await;
    is_heard_of_at(server, &names[1]).await;
    let proxies = cluster.proxies();
    let held = proxies[0].hold(1, |command| command.is("SSUBSCRIBE"));
    waiters.push(wait(&names[2]));
    held.caught().await;
    cluster
        .move_slot(slot_of(&names[0]), server, cluster.server(1))
        .await;
    settle().await;
    held.release();
    // In the place of its own answer the third one had that of the first; all stand in the end.
    within(
        SOON,
        "the way there",
        is_heard_of_at(cluster.server(1), &names[0]),
    )
    .await;
    is_heard_of_at(server, &names[1]).await;
    is_heard_of_at(server, &names[2]).await;
    settle().await;
    for (guard, waiter) in guards.into_iter().zip(waiters) {
        guard.unwrap().release().await.unwrap();
        let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        next.release().await.unwrap();
    }
    let subscribed = proxies[0].connections();
    let subscribed = subscribed.iter().filter(|connection| connection.subscriber);
    assert_eq!(subscribed.count(), 1, "it was the same connection all the time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_waiters_cost_two_connections_for_each_master() {
    let builder = Cluster::builder(Flavor::from_env()).replicas(0);
    let cluster = builder.behind_proxies(true).start().await;
    let (a, b) = (patient(&cluster.url()).await, patient(&cluster.url()).await);
    let names: Vec<_> = (0..2000).map(|n| format!("k{n}")).collect();
    let guards = join_all(names.iter().map(|name| a.lock(name).acquire())).await;
    let waiters: Vec<_> = names
        .iter()
        .map(|name| tokio::spawn(b.lock(name).acquire()))
        .collect();
    eventually("all listen", async || {
        cluster.pubsub_channels("lock__channel").await.len() == names.len()
    })
    .await;
    settle().await;
    let proxies = cluster.proxies();
    let connections = proxies
        .iter()
        .map(|proxy| proxy.connections_open())
        .collect::<Vec<_>>();
    // One of the holder, two of the waiter.
    assert_eq!(connections, [3, 3, 3]);
    for guard in guards {
        guard.unwrap().release().await.unwrap();
    }
    for outcome in within(SOON, "all wake-ups", join_all(waiters)).await {
        drop(outcome.unwrap().unwrap());
    }
    eventually("no subscription is left", async || {
        cluster.pubsub_channels("lock__channel").await.is_empty()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_without_sharded_channels_tell_the_plain_way() {
    let mut builder = Cluster::builder(Flavor::from_env());
    // Redis 6.2 has none.
    if Flavor::from_env() != Flavor::Redis62 {
        for command in ["SSUBSCRIBE", "SPUBLISH"] {
            builder = builder.config("rename-command", &format!("{command} \"\""));
        }
    }
    let cluster = builder.start().await;
    let (a, b) = clients(&cluster).await;
    all_are_woken_on_every_shard(&cluster, &a, &b).await;
}
