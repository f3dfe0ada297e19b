//! Acquires of plain locks by commands: what is stored, the order of tokens, what happens if one of the commands fails, and
//! calls that arrive late.

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use dlock::{Error, LockClient, LockGuard};
use dlock_tests::faults::{
    LEASE, PATIENCE, SLACK, SOON, answered, built, hasty_builder, in_rounds, is_back, is_confirmed,
    is_free_soon, patient, setting, within,
};
use dlock_tests::{Cluster, Command, Flavor, Proxy, Replicas, Server, Store, Swallow, eventually};
use futures_util::future::join_all;

const SECOND: Duration = Duration::from_secs(1);
/// How long tokens are drawn by commands before the script comes again.
const FRESH: Duration = Duration::from_millis(20);

fn executes(command: &Command) -> bool {
    command.is("EXEC")
}

fn names(proxy: &Proxy) -> Vec<String> {
    let commands = proxy.commands();
    commands.iter().map(|sent| sent.command.name()).collect()
}

/// Acquires and releases by the script, so that the next acquires go by commands.
async fn warm_up(client: &LockClient) -> u64 {
    let guard = answered(|| client.lock("first").acquire()).await.unwrap();
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    token
}

/// Whether acquires have gone by commands; else what was sent.
fn by_commands(proxy: &Proxy) -> Result<(), Vec<String>> {
    match proxy.count(executes) {
        0 => Err(names(proxy)),
        _ => Ok(()),
    }
}

/// Acquires and releases until an acquire by commands meets a fault: returns how that ended. `None` if all went by the script.
async fn until(
    fired: impl Fn() -> bool,
    acquire: impl AsyncFn() -> Result<LockGuard, Error>,
) -> Option<Result<LockGuard, Error>> {
    for _ in 0..20 {
        let outcome = acquire().await;
        if fired() {
            return Some(outcome);
        }
        if let Ok(guard) = outcome {
            let _ = guard.release().await;
        }
    }
    None
}

/// A client behind a proxy and one beside it, whose steps are never late.
async fn two_patient() -> (Store, Proxy, LockClient, LockClient) {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (
        patient(&proxy.url()).await,
        patient(&store.as_server().url()).await,
    );
    (store, proxy, a, b)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_is_the_same_as_by_the_script() {
    let (store, proxy, a, b) = two_patient().await;
    let server = store.as_server();
    in_rounds("both acquires are sent soon after each other", async || {
        // The next one goes by the script.
        tokio::time::sleep(2 * FRESH).await;
        proxy.forget();
        let first = a.lock("by script").acquire().await.unwrap();
        let second = a.lock("by commands").acquire().await.unwrap();
        let sent = names(&proxy);
        for (guard, name) in [(&first, "by script"), (&second, "by commands")] {
            let fields: Vec<String> = server.query(&["HGETALL", name]).await;
            assert!(fields.len() == 2 && fields[1] == "1", "{fields:?}");
            assert_eq!(server.query::<String>(&["TYPE", name]).await, "hash");
            let ttl = server.ttl(name).await.unwrap();
            assert!(ttl <= LEASE && ttl > LEASE - SLACK, "{ttl:?}");
            is_confirmed(guard).await;
        }
        assert!(first.fencing_token() < second.fencing_token());
        first.release().await.unwrap();
        second.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        match sent == ["EVALSHA", "MULTI", "RESTORE", "INCRBY", "EXEC"] {
            true => Ok(()),
            false => Err(sent),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn script_says_who_holds_a_lock_that_is_busy() {
    let (store, proxy, a, b) = two_patient().await;
    let held = b.lock("k").acquire().await.unwrap();
    in_rounds("commands find that it is busy", async || {
        warm_up(&a).await;
        proxy.forget();
        let busy = a.lock("k").try_acquire().await.unwrap_err();
        assert!(busy.is_busy(), "{busy}");
        let expected = ["MULTI", "RESTORE", "INCRBY", "EXEC", "EVALSHA"];
        match names(&proxy) == expected {
            true => Ok(()),
            false => Err("it was sent too late"),
        }
    })
    .await;
    warm_up(&a).await;
    let waiter = tokio::spawn(a.lock("k").acquire());
    eventually("the waiter listens", || async {
        store.as_server().pubsub_channels().await.len() == 1
    })
    .await;
    held.release().await.unwrap();
    let next = within(SOON, "the waiter", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_acquires_is_answered() {
    let (store, proxy, a, b) = two_patient().await;
    let keys: Vec<_> = (0..300).map(|n| format!("k{n}")).collect();
    let held = join_all(keys.iter().step_by(7).map(|key| b.lock(&**key).acquire())).await;
    let held: Vec<_> = held.into_iter().collect::<Result<_, _>>().unwrap();
    in_rounds("they go by commands", async || {
        warm_up(&a).await;
        let outcomes = join_all(keys.iter().map(|key| a.lock(&**key).try_acquire())).await;
        let mut tokens = HashSet::new();
        for (n, outcome) in outcomes.into_iter().enumerate() {
            match (n % 7, outcome) {
                (0, Err(busy)) => assert!(busy.is_busy(), "{n}: {busy}"),
                (0, Ok(_)) => panic!("{n} is held by another"),
                (_, outcome) => {
                    let guard = outcome.unwrap();
                    assert!(tokens.insert(guard.fencing_token()), "{n}: a token twice");
                    guard.release().await.unwrap();
                }
            }
        }
        by_commands(&proxy)
    })
    .await;
    for guard in held {
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}

/// Clients by the script and by commands, on one lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_from_holder_to_holder_whoever_they_are() {
    let builder = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all -restore");
    let store = Store::Server(Box::new(builder.start().await));
    let proxy = Proxy::start(store.as_server().addr());
    let clients = [
        patient(&proxy.url()).await,
        patient(&store.as_server().url_as("svc", "pw")).await,
        patient(&proxy.url()).await,
    ];
    let (mut last, mut n) = (0, 0);
    while n % 50 != 0 || proxy.count(executes) < 100 {
        assert!(n < 100_000, "two clients go by commands");
        let guard = clients[n * 7 % 3].lock("k").acquire().await.unwrap();
        let token = guard.fencing_token();
        assert!(token > last, "{token} after {last}");
        last = token;
        guard.release().await.unwrap();
        n += 1;
        if n % 100 == 0 {
            // The next ones go by the script.
            tokio::time::sleep(FRESH).await;
        }
    }
    store.assert_clean(&clients.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_grow_though_the_last_one_is_lost_on_an_open_connection() {
    let (store, proxy, a, b) = two_patient().await;
    let server = store.as_server();
    let last = Cell::new(0);
    for lost in [
        &["FLUSHALL"][..],
        &["SET", "dlock:fence", "12"],
        &["SET", "dlock:fence", "no number"],
        &["SET", "dlock:fence", "9223372036854775807"],
        &["SET", "dlock:fence", "-9223372036854775808"],
    ] {
        in_rounds("commands find it", async || {
            last.set(last.get().max(warm_up(&b).await).max(warm_up(&a).await));
            proxy.forget();
            server.command(lost).await;
            for client in [&a, &b, &a] {
                let guard = client.lock("k").try_acquire().await.unwrap();
                let token = guard.fencing_token();
                assert!(token > last.get(), "{lost:?}: {token} after {last:?}");
                last.set(token);
                is_confirmed(&guard).await;
                guard.release().await.unwrap();
            }
            by_commands(&proxy)
        })
        .await;
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fence_of_another_type_is_told_and_leaves_no_hold() {
    let (store, proxy, a, b) = two_patient().await;
    let server = store.as_server();
    in_rounds("commands find it", async || {
        warm_up(&a).await;
        proxy.forget();
        server.command(&["DEL", "dlock:fence"]).await;
        server.command(&["RPUSH", "dlock:fence", "x"]).await;
        for _ in 0..3 {
            let error = a.lock("k").try_acquire().await.unwrap_err();
            assert!(matches!(error, Error::Refused { .. }), "{error:?}");
            assert!(error.to_string().contains("dlock:fence"), "{error}");
        }
        eventually("there is no hold", || async {
            server.keys().await == ["dlock:fence"]
        })
        .await;
        server.command(&["DEL", "dlock:fence"]).await;
        is_back(&a).await;
        by_commands(&proxy)
    })
    .await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_arrives_after_its_connection_broke_takes_nothing() {
    in_rounds("the acquire goes by commands", async || {
        let (store, proxy, a, b) = setting().await;
        let server = store.as_server();
        warm_up(&a).await;
        let held = proxy.hold(1, executes);
        let cut = async {
            held.caught().await;
            proxy.cut();
        };
        let acquires = until(|| held.fired(), async || a.lock("k").try_acquire().await);
        let Ok((unknown, ())) = tokio::time::timeout(SOON, async { tokio::join!(acquires, cut) }).await
        else {
            return Err("it was not sent by commands in its time");
        };
        assert!(
            matches!(unknown, Some(Err(Error::OutcomeUnknown { .. }))),
            "{unknown:?}"
        );
        // On a new connection, which has closed the former one on the server.
        is_back(&a).await;
        let closes =
            |command: &Command| command.is("CLIENT") && command.arg(1) == "KILL" && command.arg(3) != "none";
        assert!(proxy.count(closes) > 0);
        let mut next = b.lock("k").try_acquire().await.unwrap();
        next.release().await.unwrap();
        held.release();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!server.query::<bool>(&["EXISTS", "k"]).await, "a ghost holds it");
        next = b.lock("k").try_acquire().await.unwrap();
        next.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_is_late_on_its_own_connection_is_undone() {
    in_rounds("the acquire goes by commands", async || {
        let (store, proxy, a, b) = setting().await;
        warm_up(&a).await;
        let held = proxy.hold(1, executes);
        let Some(unknown) = until(|| held.fired(), async || a.lock("k").try_acquire().await).await else {
            return Err("it was not sent by commands in its time");
        };
        assert!(
            matches!(unknown, Err(Error::OutcomeUnknown { .. })),
            "{unknown:?}"
        );
        held.release();
        is_free_soon(&b, "k").await;
        is_back(&a).await;
        store.assert_clean(&[&a, &b]).await;
        Ok(())
    })
    .await;
}

/// So long that the client has given up undoing it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_a_server_carries_out_after_it_stood_still_is_undone() {
    in_rounds("the acquire goes by commands", async || {
        let store = Store::server().await;
        let (server, proxy) = (store.as_server(), Proxy::start(store.as_server().addr()));
        let lease = 10 * SECOND;
        let a = built(|| hasty_builder(&proxy.url()).lease(lease)).await;
        let b = patient(&server.url()).await;
        warm_up(&a).await;
        proxy.forget();
        server.stop();
        let unknown = a.lock("k").try_acquire().await;
        if proxy.count(executes) == 0 {
            server.cont();
            return Err("it was not sent by commands");
        }
        assert!(
            matches!(unknown, Err(Error::OutcomeUnknown { .. })),
            "{unknown:?}"
        );
        tokio::time::sleep(lease + 5 * SECOND).await;
        server.cont();
        let resumed = Instant::now();
        is_free_soon(&b, "k").await;
        store.assert_clean(&[&a, &b]).await;
        // A ghost would end with its lease.
        match resumed.elapsed() < lease / 2 {
            true => Ok(()),
            false => Err("the lock was not free in time"),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_whose_reply_is_lost_leaves_nothing() {
    for then in [Swallow::Cut, Swallow::Hang] {
        in_rounds("the acquire goes by commands", async || {
            let (store, proxy, a, b) = setting().await;
            warm_up(&a).await;
            let lost = proxy.swallow(1, then, executes);
            // It is repeated by the engine until it succeeds.
            let acquire = async || within(SOON * 4, "acquire", a.lock("k").acquire()).await;
            let Some(acquired) = until(|| lost.fired(), acquire).await else {
                return Err("it was not sent by commands in its time");
            };
            let guard = acquired.unwrap();
            is_confirmed(&guard).await;
            guard.release().await.unwrap();
            is_free_soon(&b, "k").await;
            store.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquires_that_are_dropped_leave_nothing() {
    let (store, proxy, a, b) = two_patient().await;
    in_rounds("they go by commands", async || {
        warm_up(&a).await;
        for n in 0..200 {
            let mut acquire = Box::pin(a.lock(format!("k{}", n % 3)).try_acquire());
            let first = futures_util::poll!(&mut acquire);
            if n % 2 == 0 && first.is_pending() {
                tokio::task::yield_now().await;
            }
            drop(acquire);
        }
        for key in ["k0", "k1", "k2"] {
            is_free_soon(&b, key).await;
        }
        by_commands(&proxy)
    })
    .await;
    store.assert_clean(&[&a, &b]).await;
}

/// Of a server or a user without one of the commands, all acquires go by the script, and none fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_one_of_the_commands_the_script_acquires() {
    let all = ["MULTI", "RESTORE", "INCRBY"];
    join_all(all.map(|missing| async move {
        let builder =
            Server::builder(Flavor::from_env()).config("rename-command", &format!("{missing} \"\""));
        let store = Store::Server(Box::new(builder.start().await));
        let proxy = Proxy::start(store.as_server().addr());
        locks_and_loses_nothing(&store, &proxy, &proxy.url(), missing).await;
    }))
    .await;
}

/// A transaction that cannot end makes the connection useless; after one such connection all acquires go by the script.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_begins_transactions_and_ends_none_is_sent_no_other() {
    let builder = Server::builder(Flavor::from_env()).config("rename-command", "EXEC \"\"");
    let store = Store::Server(Box::new(builder.start().await));
    let proxy = Proxy::start(store.as_server().addr());
    let client = patient(&proxy.url()).await;
    in_rounds("a transaction is begun", async || {
        for _ in 0..10 {
            warm_up(&client).await;
        }
        by_commands(&proxy)
    })
    .await;
    for _ in 0..50 {
        warm_up(&client).await;
    }
    assert_eq!(proxy.count(executes), 1);
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_without_one_of_the_permissions_acquires_by_the_script() {
    let all = ["multi", "exec", "restore", "incrby", "client|id", "client|kill"];
    join_all(all.map(|missing| async move {
        let acl = format!("svc on >pw ~* &* +@all -{missing}");
        let builder = Server::builder(Flavor::from_env()).acl(&acl);
        let store = Store::Server(Box::new(builder.start().await));
        let proxy = Proxy::start(store.as_server().addr());
        locks_and_loses_nothing(&store, &proxy, &proxy.url_as("svc", "pw"), missing).await;
    }))
    .await;
}

/// Where several servers may grant, or others must have the hold, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_sentinels_in_a_cluster_and_with_replicas_the_script_acquires() {
    let flavor = Flavor::from_env();
    let (replicas, cluster, master) = tokio::join!(
        Replicas::start(flavor),
        Cluster::start(flavor),
        Server::start(flavor)
    );
    let replica = Server::builder(flavor).replica_of(master.addr()).start().await;
    let with_replica = built(|| {
        let builder = hasty_builder(&master.url()).timeout(PATIENCE);
        builder.min_replicas(1, LEASE / 4)
    });
    let clients = [
        patient(&replicas.url()).await,
        patient(&cluster.url()).await,
        with_replica.await,
    ];
    for client in &clients {
        for _ in 0..50 {
            warm_up(client).await;
        }
    }
    let servers = replicas.servers().iter().chain(cluster.servers());
    for server in servers.chain([&master, &replica]) {
        let commands = server.commands().await;
        assert!(!commands.contains_key("restore"), "{commands:?}");
    }
}

async fn locks_and_loses_nothing(store: &Store, proxy: &Proxy, url: &str, missing: &str) {
    let client = patient(url).await;
    let keys = ["a", "b", "c"];
    let mut last = 0;
    for _ in 0..20 {
        let guards = join_all(keys.map(|key| client.lock(key).try_acquire())).await;
        let mut tokens = Vec::new();
        for guard in guards {
            let guard = guard.unwrap_or_else(|error| panic!("without {missing}: {error}"));
            tokens.push(guard.fencing_token());
            guard.release().await.unwrap();
        }
        assert!(
            tokens.iter().all(|token| *token > last),
            "{missing}: {tokens:?} after {last}"
        );
        last = tokens.into_iter().max().unwrap_or(last);
    }
    // At most once for each call that is in flight when the first is answered.
    let tried = proxy.count(executes) as u64;
    let most = match missing.to_ascii_lowercase().starts_with("client") {
        true => 0,
        false => 8 * proxy.connections_seen(),
    };
    assert!(tried <= most, "{missing}: {tried} of {most}");
    store.assert_clean(&[&client]).await;
}
