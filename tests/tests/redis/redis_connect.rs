//! How connections are made, tested and replaced: what stands in the way is told at once, and a client finds its server
//! again wherever that has gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::{Credentials, Error, LockClient, LockClientBuilder};
use dlock_tests::faults::{
    PATIENCE, SOON, answered, built, hasty, in_rounds, is_confirmed, is_free, patient, step, within,
};
use dlock_tests::{Cluster, Command, Direction, Flavor, Independent, Proxy, Replicas, Server, eventually};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A node of a Cluster behind `redis://` has a part of the keys only: the client says so at once, and names the URL that
/// works, instead of failing at its first lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_of_a_cluster_is_refused_with_the_url_to_use() {
    let node = Server::builder(Flavor::from_env()).config("cluster-enabled", "yes");
    let node = node.acl("svc on >pw ~* &* +@all -info").start().await;
    let started = Instant::now();
    let error = LockClient::connect(&node.url())
        .await
        .expect_err("a node of a Cluster is refused");
    let use_instead = format!("redis+cluster://{}", node.addr());
    assert!(matches!(error, Error::InvalidUrl { .. }), "{error:?}");
    assert!(error.to_string().contains(&use_instead), "{error}");

    // A user that may not ask the server what it is learns it from the first lock, and nothing is released.
    let slots = ["CLUSTER", "ADDSLOTSRANGE", "0", "16383"];
    if node.try_query::<String>(&slots).await.is_ok() {
        eventually("the node serves", || async {
            let info: String = node.query(&["CLUSTER", "INFO"]).await;
            info.contains("cluster_state:ok")
        })
        .await;
    }
    let proxy = Proxy::start(node.addr());
    let client = patient(&proxy.url_as("svc", "pw")).await;
    proxy.forget();
    let error = client.lock("order:42").acquire().await.unwrap_err();
    assert!(matches!(error, Error::InvalidUrl { .. }), "{error:?}");
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    assert!(started.elapsed() < PATIENCE, "it took {:?}", started.elapsed());
    assert_eq!(
        proxy.count(Command::is_script),
        1,
        "one call, and nothing to take back"
    );
}

/// Makes the replica the master of both, and has the endpoint lead to it; open connections still go to the other one.
async fn switch(master: &Server, replica: &Server, endpoint: &Proxy) {
    replica.command(&["REPLICAOF", "NO", "ONE"]).await;
    let port = replica.port().to_string();
    master.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    endpoint.retarget(replica.addr());
}

async fn linked(replica: &Server) {
    eventually("the replica is linked", || async {
        let info: String = replica.query(&["INFO", "replication"]).await;
        info.contains("master_link_status:up")
    })
    .await;
}

/// A master and a replica behind one address.
async fn endpoint() -> (Server, Server, Proxy) {
    let master = Server::start(Flavor::from_env()).await;
    let builder = Server::builder(Flavor::from_env()).config("repl-ping-replica-period", "1");
    let replica = builder.replica_of(master.addr()).start().await;
    linked(&replica).await;
    let proxy = Proxy::start(master.addr());
    (master, replica, proxy)
}

/// A managed service or Kubernetes has another server behind the same name after a fail-over: the client finds it, and what
/// the new master still has stays held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoint_whose_master_changed_is_connected_to_anew() {
    let (master, replica, proxy) = endpoint().await;
    let client = hasty(&proxy.url()).await;
    let held = client.lock("held").acquire().await.unwrap();
    let other = client.lock("busy").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("busy").wait(PATIENCE).acquire());
    eventually("the replica has the locks", || async {
        replica.keys().await.len() == 3
    })
    .await;
    switch(&master, &replica, &proxy).await;
    let _next = within(SOON, "an acquire", async {
        answered(|| client.lock("next").acquire()).await.unwrap()
    })
    .await;
    is_confirmed(&held).await;
    other.release().await.unwrap();
    drop(within(SOON, "the waiter", waiter).await.unwrap().unwrap());
    held.release().await.unwrap();
    assert_eq!(replica.try_query::<bool>(&["EXISTS", "held"]).await, Ok(false));
    let clients = master.client_list().await;
    let ours = clients
        .iter()
        .filter(|client| client["name"].starts_with("dlock:"));
    assert_eq!(
        ours.count(),
        0,
        "no connection stays at the old master: {clients:?}"
    );
}

/// While there is no master behind the address an acquire goes on until its time is over, and no connection storm comes
/// from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoint_without_a_master_is_asked_in_growing_pauses() {
    let (master, replica, proxy) = endpoint().await;
    let client = hasty(&proxy.url()).await;
    is_free(&client, "k").await;
    // Both are replicas, as in the middle of a fail-over.
    let port = replica.port().to_string();
    master.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    let before = proxy.connections_seen();
    let waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
    tokio::time::sleep(3 * SECOND).await;
    assert!(!waiter.is_finished(), "{:?}", waiter.await);
    let attempts = proxy.connections_seen() - before;
    assert!(attempts <= 20, "{attempts} connections in 3 s");
    master.command(&["REPLICAOF", "NO", "ONE"]).await;
    drop(within(SOON, "the waiter", waiter).await.unwrap().unwrap());
}

/// A Cluster that was set up anew counts its epochs from the beginning: it is learned all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_that_was_set_up_anew_is_learned_in_spite_of_lower_epochs() {
    let mut cluster = Cluster::start(Flavor::from_env()).await;
    for _ in 0..4 {
        for master in 0..3 {
            cluster.server(master).command(&["CLUSTER", "BUMPEPOCH"]).await;
        }
    }
    let master = cluster.server(0);
    eventually("the epoch has grown", || async {
        let info: String = master.query(&["CLUSTER", "INFO"]).await;
        let epoch = info
            .lines()
            .find_map(|line| line.strip_prefix("cluster_current_epoch:"));
        epoch.is_some_and(|epoch| epoch.trim().parse::<u64>().unwrap() > 3)
    })
    .await;
    cluster.is_settled().await;
    let client = hasty(&cluster.url()).await;
    for key in 0..20 {
        is_free(&client, &format!("before:{key}")).await;
    }
    cluster.set_up_anew().await;
    for key in 0..20 {
        let lock = client.lock(format!("after:{key}"));
        let guard = within(SOON, "an acquire", answered(|| lock.acquire()))
            .await
            .unwrap();
        guard.release().await.unwrap();
    }
}

/// Waits for a lock that another client releases a little later, sees that the waiter polls, and tells how many connections that
/// took.
async fn wakes_up_by_polling(server: &Server, proxy: &Proxy, waits: &LockClient) -> u64 {
    let holder = patient(&server.url()).await;
    let guard = holder.lock("k").acquire().await.unwrap();
    let looks = || proxy.count(step("acquire"));
    let (before, asked) = (proxy.connections_seen(), looks());
    let waiter = tokio::spawn(waits.lock("k").wait(PATIENCE).acquire());
    let polls = async |asked: usize| {
        tokio::time::sleep(5 * SECOND).await;
        let looks = looks() - asked;
        // Four a second, and not one now and then.
        if looks >= 8 { Ok(()) } else { Err(looks) }
    };
    let polled = polls(asked).await;
    let connections = proxy.connections_seen() - before;
    if polled.is_err() {
        in_rounds("waiters poll", async || polls(looks()).await).await;
    }
    guard.release().await.unwrap();
    let next = within(2 * SECOND, "the waiter", waiter).await.unwrap().unwrap();
    next.release().await.unwrap();
    connections
}

/// A server or a proxy that does not know `SUBSCRIBE`: waiters poll on a connection that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_subscriptions_is_not_connected_to_again_and_again() {
    let server = Server::builder(Flavor::from_env()).config("rename-command", "SUBSCRIBE \"\"");
    let server = server.start().await;
    let proxy = Proxy::start(server.addr());
    let waits = patient(&proxy.url()).await;
    let connections = wakes_up_by_polling(&server, &proxy, &waits).await;
    assert_eq!(connections, 1, "one connection for notifications, and it stays");
    let asked = proxy.count(|command| command.is("SUBSCRIBE"));
    assert!(asked <= 6, "it was asked for {asked} times in 5 s");
}

/// The same where the permissions of the user forbid it; once they allow it, releases are told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_subscription_is_asked_for_again_and_stands_once_it_is_allowed() {
    let server = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all -subscribe");
    let server = server.start().await;
    let proxy = Proxy::start(server.addr());
    let waits = patient(&proxy.url_as("svc", "pw")).await;
    let connections = wakes_up_by_polling(&server, &proxy, &waits).await;
    assert_eq!(connections, 1, "one connection for notifications, and it stays");
    let holder = patient(&server.url()).await;
    let guards = [
        holder.lock("a").acquire().await.unwrap(),
        holder.lock("b").acquire().await.unwrap(),
    ];
    let waiters = ["a", "b"].map(|key| tokio::spawn(waits.lock(key).wait(PATIENCE).acquire()));
    tokio::time::sleep(500 * MS).await;
    server.command(&["ACL", "SETUSER", "svc", "+subscribe"]).await;
    eventually("both are subscribed", || async {
        server.pubsub_channels().await.len() == 2
    })
    .await;
    drop(guards);
    for waiter in waiters {
        drop(within(SOON, "the waiter", waiter).await.unwrap().unwrap());
    }
}

/// A proxy that closes the connection at a command it does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_at_the_subscription_come_less_and_less_often() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let waits = patient(&proxy.url()).await;
    let _faults: Vec<_> = (1..=100)
        .map(|k| proxy.lose(k, |command| command.is("SUBSCRIBE")))
        .collect();
    let connections = wakes_up_by_polling(&server, &proxy, &waits).await;
    assert!(connections <= 6, "{connections} connections in 5 s");
}

/// What one step of a client may take whose connection dies: far more than a test waits for anything else.
const STEP: Duration = Duration::from_secs(12);

/// A client with long steps behind a proxy, whose connections have been idle for a while and are then swallowed by the
/// network.
async fn client_with_dead_connections(server: &Server) -> (Proxy, LockClient) {
    let proxy = Proxy::start(server.addr());
    let builder = || {
        LockClient::builder()
            .url(proxy.url())
            .timeout(STEP)
            .retry_for(PATIENCE)
    };
    let client = built(builder).await;
    // So that both connections stand.
    let guard = client.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("k").local_handoffs(0).wait(PATIENCE).acquire());
    eventually("it is subscribed", || async {
        !server.pubsub_channels().await.is_empty()
    })
    .await;
    guard.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    tokio::time::sleep(1500 * MS).await;
    for connection in proxy.connections() {
        proxy.block_connection(connection.id, Direction::Both);
    }
    (proxy, client)
}

/// A connection that died while idle costs an acquire a part of the time of one step, not several such times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connection_that_is_dead_is_replaced_within_one_step() {
    let server = Server::start(Flavor::from_env()).await;
    let (_proxy, client) = client_with_dead_connections(&server).await;
    let begun = Instant::now();
    let guard = client.lock("k").acquire().await.unwrap();
    assert!(begun.elapsed() < STEP, "it took {:?}", begun.elapsed());
    guard.release().await.unwrap();
}

/// The same of the connection for news: a waiter hears of a release that came while it was dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_on_a_dead_subscription_is_served_within_one_step() {
    let server = Server::start(Flavor::from_env()).await;
    let (_proxy, client) = client_with_dead_connections(&server).await;
    let holder = patient(&server.url()).await;
    let guard = holder.lock("k").acquire().await.unwrap();
    let begun = Instant::now();
    let waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
    tokio::time::sleep(SECOND).await;
    guard.release().await.unwrap();
    drop(waiter.await.unwrap().unwrap());
    assert!(begun.elapsed() < STEP, "it took {:?}", begun.elapsed());
}

/// A dead connection is found while it is idle, and replaced before the next caller comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_are_tested() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let client = hasty(&proxy.url()).await;
    is_free(&client, "k").await;
    let before = proxy.connections_seen();
    for connection in proxy.connections() {
        proxy.block_connection(connection.id, Direction::Both);
    }
    eventually("there is another connection", || async {
        proxy.connections_seen() > before
    })
    .await;
    assert_eq!(proxy.count(|command| command.is("PING")), 1);
}

/// A middlebox that ends idle connections. It takes twelve seconds, since the pause before a new connection grows with each
/// one that was useless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_that_end_again_and_again_are_replaced_at_once() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let client = hasty(&proxy.url()).await;
    is_free(&client, "k").await;
    let mut took = Vec::new();
    for _ in 0..10 {
        tokio::time::sleep(1200 * MS).await;
        let (before, begun) = (proxy.connections_seen(), Instant::now());
        proxy.cut();
        eventually("there is another connection", || async {
            proxy.connections_seen() > before
        })
        .await;
        took.push(begun.elapsed());
    }
    // At least 320 ms each, if they counted as useless.
    let last = took[7..].iter().min().copied();
    assert!(last.is_some_and(|took| took < 300 * MS), "{took:?}");
    is_free(&client, "k").await;
}

/// A server that stands still for a moment keeps its connections: a new one would be answered no sooner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connection_to_a_server_that_stands_still_is_kept() {
    let server = Server::start(Flavor::from_env()).await;
    let builder = || {
        LockClient::builder()
            .url(server.url())
            .timeout(STEP)
            .retry_for(PATIENCE)
    };
    let client = built(builder).await;
    is_free(&client, "k").await;
    let ours = || async {
        let clients = server.client_list().await;
        clients
            .into_iter()
            .map(|client| client["id"].clone())
            .collect::<Vec<_>>()
    };
    let before = ours().await;
    tokio::time::sleep(1500 * MS).await;
    server.stop();
    let acquiring = tokio::spawn(client.lock("k").acquire());
    tokio::time::sleep(STEP / 4 + 500 * MS).await;
    server.cont();
    acquiring.await.unwrap().unwrap().release().await.unwrap();
    eventually("only the old connection is there", || async {
        ours().await == before
    })
    .await;
}

/// 200 ms of round trip leave time to connect, with nothing but the defaults.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn distant_servers_can_be_connected_to() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    proxy.delay(Direction::Both, 100 * MS, Duration::ZERO);
    // Their limits are short; so a machine that stood still may miss them.
    let client = built(|| LockClient::builder().url(proxy.url())).await;
    answered(|| client.lock("k").acquire())
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let commands = proxy.commands();
    let names: Vec<_> = commands.iter().map(|sent| sent.command.name()).collect();
    assert!(names.contains(&"HELLO".to_owned()), "{names:?}");

    let cluster = Cluster::builder(Flavor::from_env())
        .behind_proxies(true)
        .start()
        .await;
    for proxy in cluster.proxies() {
        proxy.delay(Direction::Both, 100 * MS, Duration::ZERO);
    }
    let client = built(|| LockClient::builder().url(cluster.url())).await;
    for key in 0..6 {
        let lock = client.lock(format!("k{key}"));
        answered(|| lock.acquire())
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
    }
}

/// Tokens of the user `svc` that count up; each server that is told of one takes it besides the others.
#[derive(Clone, Default)]
struct Tokens(Arc<AtomicUsize>);

impl Tokens {
    fn current(&self) -> String {
        format!("hunter{}", self.0.load(Ordering::SeqCst))
    }

    async fn allow(&self, servers: &[&Server]) {
        for server in servers {
            let password = format!(">{}", self.current());
            let rule = ["ACL", "SETUSER", "svc", "on", &password, "~*", "&*", "+@all"];
            server.command(&rule).await;
        }
    }

    /// The next token is the only one from now on.
    async fn rotate(&self, servers: &[&Server]) {
        self.0.fetch_add(1, Ordering::SeqCst);
        for server in servers {
            server.command(&["ACL", "SETUSER", "svc", "resetpass"]).await;
        }
        self.allow(servers).await;
    }

    fn builder(&self, url: &str, valid_for: Option<Duration>) -> LockClientBuilder {
        let tokens = self.clone();
        let builder = LockClient::builder().url(url).retry_for(PATIENCE);
        builder.credentials(move || {
            let credentials = Credentials::new("svc", tokens.current());
            let credentials = match valid_for {
                Some(time) => credentials.valid_for(time),
                None => credentials,
            };
            async { Ok::<_, std::io::Error>(credentials) }
        })
    }
}

/// Locks go on through a change of the token, with each connection made anew by the token of that moment.
async fn tokens_rotate(url: &str, servers: &[&Server]) {
    let tokens = Tokens::default();
    tokens.allow(servers).await;
    let client = built(|| tokens.builder(url, None)).await;
    let held = client.lock("held").acquire().await.unwrap();
    tokens.rotate(servers).await;
    for server in servers {
        server.command(&["CLIENT", "KILL", "USER", "svc"]).await;
    }
    for key in 0..4 {
        let lock = client.lock(format!("k{key}"));
        let guard = within(SOON, "an acquire", answered(|| lock.acquire()))
            .await
            .unwrap();
        guard.release().await.unwrap();
    }
    is_confirmed(&held).await;
    held.release().await.unwrap();
    for server in servers {
        let clients = server.client_list().await;
        let mut ours = clients
            .iter()
            .filter(|client| client["name"].starts_with("dlock:"));
        assert!(ours.all(|client| client["user"] == "svc"), "{url}: {clients:?}");
    }
}

/// Tokens may change at run time, on every kind of store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_asked_for_at_each_connection() {
    let flavor = Flavor::from_env();
    let server = Server::start(flavor).await;
    tokens_rotate(&server.url(), &[&server]).await;
    let replicas = Replicas::start(flavor).await;
    tokens_rotate(&replicas.url(), &replicas.servers().iter().collect::<Vec<_>>()).await;
    let cluster = Cluster::builder(flavor).replicas(0).start().await;
    tokens_rotate(&cluster.url(), &cluster.servers().collect::<Vec<_>>()).await;
    let quorum = Independent::start(flavor, 3).await;
    tokens_rotate(&quorum.url(), &quorum.servers().iter().collect::<Vec<_>>()).await;
}

/// Connections log in anew before the credentials end of which the provider says how long they are valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_connections_log_in_before_their_credentials_expire() {
    let server = Server::start(Flavor::from_env()).await;
    let tokens = Tokens::default();
    tokens.allow(&[&server]).await;
    let proxy = Proxy::start(server.addr());
    let client = built(|| tokens.builder(&proxy.url(), Some(2 * SECOND))).await;
    let guard = client.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("k").local_handoffs(0).wait(PATIENCE).acquire());
    eventually("it is subscribed", || async {
        !server.pubsub_channels().await.is_empty()
    })
    .await;
    let before = proxy.connections_seen();
    tokens.rotate(&[&server]).await;
    let new = tokens.current();
    let logins = || proxy.count(|command| command.is("AUTH") && command.mentions(&new));
    eventually("both have logged in anew, twice", || async { logins() >= 4 }).await;
    guard.release().await.unwrap();
    within(SOON, "the waiter", waiter)
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();
    assert_eq!(proxy.connections_seen(), before, "no connection was replaced");
}

/// A provider that panics has failed: connections are made, and logins renewed, as soon as it gives credentials again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn provider_of_credentials_may_panic() {
    let server = Server::builder(Flavor::from_env()).acl("svc on >pw ~* &* +@all");
    let server = server.start().await;
    let proxy = Proxy::start(server.addr());
    let (panics, panicked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let builder = || {
        let (panics, panicked) = (panics.clone(), panicked.clone());
        let builder = LockClient::builder().url(proxy.url()).retry_for(PATIENCE);
        builder.credentials(move || {
            if panics.load(Ordering::SeqCst) {
                panicked.fetch_add(1, Ordering::SeqCst);
                panic!("the provider panics");
            }
            let credentials = Credentials::new("svc", "pw").valid_for(2 * SECOND);
            async { Ok::<_, Error>(credentials) }
        })
    };
    let panicked_more_often = |times: usize| {
        let (before, panicked) = (panicked.load(Ordering::SeqCst), &panicked);
        eventually("it panicked", move || async move {
            panicked.load(Ordering::SeqCst) >= before + times
        })
    };
    panics.store(true, Ordering::SeqCst);
    let error = builder().build().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    panics.store(false, Ordering::SeqCst);

    let client = built(builder).await;
    let held = client.lock("held").acquire().await.unwrap();
    let other = patient(&server.url()).await;
    let other = other.lock("busy").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("busy").wait(PATIENCE).acquire());
    let is_subscribed = || {
        eventually("it is subscribed", || async {
            !server.pubsub_channels().await.is_empty()
        })
    };
    is_subscribed().await;
    // The logins of open connections.
    panics.store(true, Ordering::SeqCst);
    panicked_more_often(2).await;
    panics.store(false, Ordering::SeqCst);
    let logins = || proxy.count(|command| command.is("AUTH"));
    let before = logins();
    eventually("both have logged in anew", || async { logins() >= before + 2 }).await;
    // New connections.
    panics.store(true, Ordering::SeqCst);
    server.command(&["CLIENT", "KILL", "USER", "svc"]).await;
    panicked_more_often(4).await;
    panics.store(false, Ordering::SeqCst);
    let next = within(SOON, "an acquire", client.lock("next").acquire()).await;
    next.unwrap().release().await.unwrap();
    is_confirmed(&held).await;
    is_subscribed().await;
    other.release().await.unwrap();
    let woken = within(SOON, "the waiter", waiter).await.unwrap().unwrap();
    woken.release().await.unwrap();
    held.release().await.unwrap();
}

/// No password in what is shown, and a mistake is told before anything is sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_never_shown() {
    let server = Server::builder(Flavor::from_env())
        .acl("svc on >right ~* &* +@all")
        .start()
        .await;
    let credentials = Credentials::new("svc", "hunter2").valid_for(SECOND);
    let shown = format!("{credentials:?}");
    assert!(shown.contains("svc") && !shown.contains("hunter2"), "{shown}");
    let builder = LockClient::builder().url(server.url());
    let wrong = builder.credentials(|| async { Ok::<_, Error>(Credentials::new("svc", "hunter2")) });
    let shown = format!("{wrong:?}");
    let error = wrong.build().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    assert!(
        !format!("{shown}{error}{error:?}").contains("hunter2"),
        "{error:?}"
    );

    let failing = LockClient::builder().url(server.url());
    let failing = failing.credentials(|| async { Err::<Credentials, _>("the token service is away") });
    let error = failing.build().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains("the token service is away"), "{error}");

    for url in ["memory://", "redis://:hunter2@localhost"] {
        let builder = LockClient::builder().url(url);
        let builder = builder.credentials(|| async { Ok::<_, Error>(Credentials::password("x")) });
        let error = builder.build().await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }), "{error:?}");
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }
}
