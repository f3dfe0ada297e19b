//! The doctor, on servers that are set up wrongly on purpose: one for each row of docs/doctor.md.

use std::time::Duration;

use dlock::store::doctor::{Finding, Verdict};
use dlock::{Diagnosis, LockClient};
use dlock_tests::permissions::{give, of};
use dlock_tests::{Clock, Cluster, Direction, Flavor, Independent, Proxy, Replicas, Server, eventually};

const ALL: &str = "on >secret ~* &* +@all";

async fn client(url: &str) -> LockClient {
    LockClient::connect(url).await.expect("a client")
}

/// What it finds by reading only.
async fn read(url: &str) -> Diagnosis {
    client(url).await.doctor().await.expect("a diagnosis")
}

async fn tried(url: &str) -> Diagnosis {
    client(url).await.doctor().probe(true).await.expect("a diagnosis")
}

fn found<'d>(diagnosis: &'d Diagnosis, check: &str) -> &'d Finding {
    let finding = diagnosis.findings.iter().find(|finding| finding.check == check);
    finding.unwrap_or_else(|| panic!("no finding {check}: {diagnosis}"))
}

#[track_caller]
fn is(diagnosis: &Diagnosis, check: &str, verdict: Verdict, why: &str) {
    let finding = found(diagnosis, check);
    assert!(
        finding.verdict == verdict && finding.why.contains(why),
        "{finding:?}"
    );
    assert_eq!(finding.remedy.is_some(), verdict != Verdict::Good, "{finding:?}");
}

/// What depends on how fast this machine is just now.
const TIMED: [&str; 3] = ["wake-up", "request-times", "stalls"];

#[tokio::test]
async fn healthy_server_is_good_and_keeps_nothing_of_the_doctor() {
    let builder = Server::builder(Flavor::Valkey).persistence(true);
    let server = builder.config("appendfsync", "always").start().await;
    server.forget_commands().await;
    let url = format!("{}?timeout=30s", server.url());
    let client = client(&url).await;
    let begun = std::time::Instant::now();
    let diagnosis = client
        .doctor()
        .probe(true)
        .callers_wait(Duration::from_secs(60))
        .await
        .unwrap();
    let took = begun.elapsed();
    for finding in &diagnosis.findings {
        assert!(
            finding.verdict == Verdict::Good || TIMED.contains(&finding.check),
            "{finding:?} in\n{diagnosis}"
        );
    }
    for check in [
        "lease-budget",
        "takeover",
        "eviction",
        "persistence",
        "writes",
        "replicas",
        "stalls",
        "request-times",
        "wake-up",
        "expiry",
        "clock",
        "scripts",
        "pubsub",
        "output-buffer",
        "versions",
        "connections",
        "permissions",
    ] {
        found(&diagnosis, check);
    }
    assert_eq!(diagnosis.what_if.len(), 5);
    assert!(diagnosis.what_if[1].lost.starts_with("none"), "{diagnosis}");
    assert_eq!(server.keys().await, [""; 0], "no key stays");
    let asked = server.commands().await;
    let steps: u64 = asked
        .iter()
        .filter(|(name, _)| *name == "eval")
        .map(|(_, calls)| *calls)
        .sum();
    assert!(steps > 9, "{asked:?}");
    assert!(steps < 100 * (took.as_secs() + 1), "{steps} in {took:?}");
}

#[tokio::test]
async fn server_with_many_mistakes_has_each_of_them_named() {
    let builder = Server::builder(Flavor::Redis)
        .config("maxmemory", "100mb")
        .maxmemory_policy("volatile-lru");
    let builder = builder.config("client-output-buffer-limit", "pubsub 64kb 32kb 60");
    let server = builder.config("maxclients", "12").start().await;
    let mut others = Vec::new();
    for _ in 0..8 {
        others.push(server.conn().await);
    }
    // Longer than it takes a busy machine to load the script.
    let slow = "local t = redis.call('TIME') local s = t[1] * 1000000 + t[2] \
                repeat t = redis.call('TIME') until t[1] * 1000000 + t[2] - s > 300000 return 1";
    let _: i64 = server.query(&["EVAL", slow, "0"]).await;
    let client = client(&server.url()).await;
    let diagnosis = client
        .doctor()
        .callers_wait(Duration::from_secs(15))
        .await
        .unwrap();
    is(&diagnosis, "takeover", Verdict::Bad, "callers give up after 15s");
    is(&diagnosis, "eviction", Verdict::Bad, "volatile-lru");
    is(&diagnosis, "persistence", Verdict::Bad, "a restart empties it");
    is(&diagnosis, "output-buffer", Verdict::Bad, "65536");
    is(&diagnosis, "connections", Verdict::Bad, "of 12");
    is(&diagnosis, "stalls", Verdict::Bad, "EVAL");
    is(&diagnosis, "versions", Verdict::Bad, "CVE-2025-49844");
    is(&diagnosis, "lease-budget", Verdict::Good, "no fail-over");
    is(&diagnosis, "request-times", Verdict::Unknown, "only reads");
    assert!(diagnosis.what_if[1].lost.starts_with("all"), "{diagnosis}");
    assert!(diagnosis.what_if[0].waits.contains("30s"), "{diagnosis}");
    let _: () = server.query(&["CONFIG", "SET", "save", "900 1"]).await;
    is(
        &client.doctor().await.unwrap(),
        "persistence",
        Verdict::Bad,
        "since the last snapshot",
    );
}

#[tokio::test]
async fn full_server_and_one_that_cannot_save_refuse_writes() {
    let builder = Server::builder(Flavor::from_env()).config("stop-writes-on-bgsave-error", "yes");
    let server = builder.start().await;
    let client = client(&server.url()).await;
    is(
        &client.doctor().await.unwrap(),
        "writes",
        Verdict::Good,
        "went well",
    );
    // A snapshot that cannot take its name.
    std::fs::create_dir(server.data_dir().join("dump.rdb")).expect("a directory");
    let _: redis::Value = server.query(&["BGSAVE"]).await;
    eventually("the snapshot has failed", async || {
        let info: String = server.query(&["INFO", "persistence"]).await;
        info.contains("rdb_last_bgsave_status:err")
    })
    .await;
    is(&client.doctor().await.unwrap(), "writes", Verdict::Bad, "MISCONF");
    let _: () = server
        .query(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"])
        .await;
    let _: () = server.query(&["CONFIG", "SET", "maxmemory", "1000"]).await;
    is(
        &client.doctor().await.unwrap(),
        "writes",
        Verdict::Bad,
        "maxmemory are used",
    );
}

#[tokio::test]
async fn missing_replica_is_told_where_one_is_asked_for() {
    let server = Server::start(Flavor::from_env()).await;
    let diagnosis = read(&format!("{}?min_replicas=1", server.url())).await;
    is(&diagnosis, "replicas", Verdict::Bad, "min_replicas wants 1");
    is(&read(&server.url()).await, "replicas", Verdict::Good, "none");
}

#[tokio::test]
async fn slow_network_is_told_by_request_times_and_wake_ups() {
    let server = Server::start(Flavor::from_env()).await;
    let proxy = Proxy::start(server.addr());
    let client = client(&proxy.url()).await;
    proxy.delay(Direction::ToClient, Duration::from_millis(300), Duration::ZERO);
    let diagnosis = client.doctor().probe(true).await.unwrap();
    is(
        &diagnosis,
        "request-times",
        Verdict::Bad,
        "more than a fifth of the timeout",
    );
    is(&diagnosis, "wake-up", Verdict::Bad, "hears of a release after");
}

#[tokio::test]
async fn clock_that_steps_is_told() {
    let (server, clock) = Server::with_clock(Flavor::from_env()).await;
    let client = client(&server.url()).await;
    let steps = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        clock.set(Duration::from_secs(60)).expect("the clock is set");
    };
    let (diagnosis, ()) = tokio::join!(client.doctor().probe(true).into_future(), steps);
    is(&diagnosis.unwrap(), "clock", Verdict::Bad, "drifts or steps");
}

#[tokio::test]
async fn clock_that_is_slow_is_told_by_keys_that_stay() {
    let clock = Clock::new().expect("libfaketime is there");
    clock.run_at(0.5).expect("the clock is set");
    let builder = Server::builder(Flavor::from_env());
    let server = builder.clock(Some(&clock)).start().await;
    let diagnosis = tried(&server.url()).await;
    is(&diagnosis, "expiry", Verdict::Bad, "was there after 220 ms");
    is(&diagnosis, "clock", Verdict::Bad, "drifts or steps");
}

#[tokio::test]
async fn members_of_a_quorum_whose_clocks_differ_are_told() {
    let (ahead, clock) = Server::with_clock(Flavor::from_env()).await;
    let others = Independent::start(Flavor::from_env(), 2).await;
    let addresses: Vec<String> = (others.servers().iter().chain([&ahead]))
        .map(|server| server.addr().to_string())
        .collect();
    let options = "trust_fresh_servers=true&max_lease=1m";
    let client = client(&format!("quorum+redis://{}?{options}", addresses.join(","))).await;
    clock.set(Duration::from_secs(40)).expect("the clock is set");
    let diagnosis = client.doctor().await.unwrap();
    is(&diagnosis, "quorum-clocks", Verdict::Bad, "ms apart");
}

#[tokio::test]
async fn evicted_keys_and_writes_that_wait_for_replicas_are_told() {
    let server = Server::start(Flavor::from_env()).await;
    let client = client(&server.url()).await;
    let set = async |name: &str, value: &str| server.query::<()>(&["CONFIG", "SET", name, value]).await;
    set("maxmemory-policy", "allkeys-lru").await;
    let _: () = server.query(&["SET", "large", &"x".repeat(1 << 20)]).await;
    set("maxmemory", "1000").await;
    eventually("a key is evicted", async || {
        let _refused = server.try_query::<redis::Value>(&["SET", "small", "x"]).await;
        let info: String = server.query(&["INFO", "stats"]).await;
        !info.contains("evicted_keys:0\r\n")
    })
    .await;
    set("maxmemory", "0").await;
    set("maxmemory-policy", "noeviction").await;
    is(
        &client.doctor().await.unwrap(),
        "eviction",
        Verdict::Bad,
        "keys were evicted",
    );
    set("min-replicas-to-write", "1").await;
    is(&client.doctor().await.unwrap(), "writes", Verdict::Bad, "wants 1");
}

#[tokio::test]
async fn what_the_user_may_not_do_is_told_and_what_it_may_not_see_is_unknown() {
    let builder = Server::builder(Flavor::from_env());
    let builder = builder.acl(&format!("noscript {ALL} -eval -evalsha"));
    let builder = builder.acl(&format!("nosub {ALL} -subscribe"));
    let builder = builder.acl(&format!("nohset {ALL} -hset -zadd"));
    let builder = builder.acl(&format!("blind {ALL} -config -info -latency -slowlog"));
    let server = builder.start().await;
    let url = |user: &str| server.url_as(user, "secret");
    is(
        &read(&url("noscript")).await,
        "scripts",
        Verdict::Bad,
        "EVAL is refused",
    );
    is(
        &tried(&url("nosub")).await,
        "pubsub",
        Verdict::Bad,
        "no subscription",
    );
    let nohset = tried(&url("nohset")).await;
    is(&nohset, "permissions", Verdict::Bad, "locks need +hset");
    assert!(
        found(&nohset, "permissions")
            .why
            .contains("read-write locks need +zadd")
    );
    let blind = read(&url("blind")).await;
    for check in [
        "lease-budget",
        "eviction",
        "persistence",
        "writes",
        "replicas",
        "stalls",
        "output-buffer",
        "versions",
        "connections",
    ] {
        is(&blind, check, Verdict::Unknown, "not visible");
    }
    assert_eq!(server.keys().await, [""; 0]);
}

/// Settings have passwords, and the slow log what other users send.
#[tokio::test]
async fn user_of_a_service_sees_all_but_settings_and_the_slow_log() {
    let builder = Server::builder(Flavor::from_env()).persistence(true);
    let server = builder.start().await;
    give(&server, "svc", &["Locks", "What may be left out", "The doctor"]).await;
    for heading in ["Locks", "What may be left out", "The doctor"] {
        let mut acl = vec!["ACL", "SETUSER", "admin"];
        acl.extend(of("svc", heading));
        server.command(&acl).await;
    }
    // Behind the lines of a service, which begin with `reset`.
    give(&server, "admin", &["The doctor"]).await;
    let unknown = |diagnosis: &Diagnosis| -> Vec<&str> {
        let all = diagnosis.findings.iter();
        let unknown = all.filter(|finding| finding.verdict == Verdict::Unknown);
        unknown.map(|finding| finding.check).collect()
    };
    let diagnosis = async |user: &str| {
        let client = client(&server.url_as(user, "password")).await;
        let doctor = client.doctor().probe(true);
        doctor.callers_wait(Duration::from_secs(60)).await.unwrap()
    };
    let service = diagnosis("svc").await;
    assert_eq!(
        unknown(&service),
        ["persistence", "stalls", "output-buffer"],
        "{service}"
    );
    let remedy = found(&service, "output-buffer").remedy.as_deref();
    assert!(
        remedy.is_some_and(|text| text.contains("administrator")),
        "{remedy:?}"
    );
    let admin = diagnosis("admin").await;
    assert_eq!(unknown(&admin), [""; 0], "{admin}");
}

#[tokio::test]
async fn what_settings_may_hide_is_unknown_where_they_may_not_be_read() {
    // A command that a busy machine interrupts is not in the slow log then.
    let builder = Server::builder(Flavor::from_env()).config("slowlog-max-len", "0");
    let builder = builder.persistence(true).acl(&format!("managed {ALL} -config"));
    let server = builder.start().await;
    let managed = read(&server.url_as("managed", "secret")).await;
    is(&managed, "persistence", Verdict::Unknown, "not visible");
    is(&managed, "stalls", Verdict::Unknown, "not visible");
    let all = read(&server.url()).await;
    is(&all, "persistence", Verdict::Good, "append-only file");
    // As it is by default.
    is(&all, "stalls", Verdict::Good, "not recorded there");
}

#[tokio::test]
async fn defaults_of_sentinels_lose_locks_by_time_alone() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    let url = replicas.url();
    let service = url
        .rsplit('/')
        .next()
        .and_then(|path| path.split('?').next())
        .expect("a name");
    let client = client(&url).await;
    is(
        &client.doctor().await.unwrap(),
        "lease-budget",
        Verdict::Good,
        "less than two thirds",
    );
    for sentinel in replicas.sentinels() {
        let set = ["SENTINEL", "SET", service, "down-after-milliseconds", "30000"];
        let _: () = sentinel.query(&set).await;
    }
    eventually("the client has asked the sentinels again", async || {
        found(&client.doctor().await.unwrap(), "lease-budget").verdict == Verdict::Bad
    })
    .await;
    let diagnosis = client.doctor().await.unwrap();
    is(&diagnosis, "lease-budget", Verdict::Bad, "about 32.0s");
    assert!(
        found(&diagnosis, "lease-budget")
            .remedy
            .as_ref()
            .unwrap()
            .contains("?lease=48s")
    );
    assert!(
        diagnosis.what_if[2].lost.contains("all, at the wrong moment"),
        "{diagnosis}"
    );
    is(&diagnosis, "replicas", Verdict::Good, "are linked");
}

#[tokio::test]
async fn cluster_that_stops_as_a_whole_is_told_and_every_shard_is_tried() {
    let cluster = Cluster::builder(Flavor::from_env())
        .config("cluster-require-full-coverage", "yes")
        .start()
        .await;
    let client = client(&cluster.url()).await;
    let diagnosis = client.doctor().probe(true).await.unwrap();
    is(&diagnosis, "cluster", Verdict::Bad, "no lock of any shard");
    is(&diagnosis, "expiry", Verdict::Good, "gone after 220 ms");
    is(&diagnosis, "pubsub", Verdict::Good, "messages arrive");
    is(&diagnosis, "permissions", Verdict::Good, "every command");
    is(&diagnosis, "lease-budget", Verdict::Good, "less than two thirds");
    assert_eq!(cluster.keys("").await, [""; 0], "no key stays");
    for server in cluster.servers() {
        let _: () = server
            .query(&["CONFIG", "SET", "cluster-require-full-coverage", "no"])
            .await;
    }
    is(
        &client.doctor().await.unwrap(),
        "cluster",
        Verdict::Good,
        "does not stop the others",
    );
}

#[tokio::test]
async fn members_of_a_quorum_that_share_a_host_or_copy_each_other_are_told() {
    let servers = Independent::start(Flavor::from_env(), 3).await;
    let client = client(&servers.url()).await;
    let diagnosis = client.doctor().probe(true).await.unwrap();
    is(&diagnosis, "quorum", Verdict::Bad, "share a host");
    is(&diagnosis, "expiry", Verdict::Good, "gone after 220 ms");
    is(&diagnosis, "quorum-clocks", Verdict::Good, "apart");
    assert_eq!(servers.keys("dlock:doctor").await, [""; 0], "no key stays");
    let [first, _, last] = servers.servers() else {
        panic!("three servers")
    };
    let port = first.port().to_string();
    let _: () = last.query(&["REPLICAOF", "127.0.0.1", &port]).await;
    let copies = client.doctor().await.unwrap();
    is(&copies, "quorum", Verdict::Bad, "is a replica of 127.0.0.1");
}

#[tokio::test]
async fn members_of_a_quorum_that_tell_nothing_of_themselves_are_unknown() {
    let builder = || Server::builder(Flavor::from_env()).acl(&format!("blind {ALL} -info"));
    let servers = [
        builder().start().await,
        builder().start().await,
        builder().start().await,
    ];
    // To the doctor these are different hosts.
    let hosts = ["127.0.0.1", "localhost", "LOCALHOST"];
    let members: Vec<String> = (hosts.iter().zip(&servers))
        .map(|(host, server)| format!("{host}:{}", server.port()))
        .collect();
    let url = |user: &str| {
        let members = members.join(",");
        format!("quorum+redis://{user}{members}?trust_fresh_servers=true")
    };
    is(
        &read(&url("")).await,
        "quorum",
        Verdict::Good,
        "3 independent servers",
    );
    let blind = read(&url("blind:secret@")).await;
    is(&blind, "quorum", Verdict::Unknown, "whether it has replicas");
    let [first, ..] = &servers;
    let replica = Server::builder(Flavor::from_env()).replica_of(first.addr());
    let _replica = replica.start().await;
    let client = client(&url("")).await;
    eventually("the replica is linked", async || {
        let diagnosis = client.doctor().await.unwrap();
        let finding = found(&diagnosis, "quorum");
        finding.verdict == Verdict::Bad && finding.why.contains("has replicas")
    })
    .await;
}

#[tokio::test]
async fn quorum_that_trusts_fresh_servers_is_told_of_restarts() {
    let servers = Independent::start(Flavor::from_env(), 3).await;
    let trusting = read(&servers.url()).await;
    is(
        &trusting,
        "quorum-restarts",
        Verdict::Bad,
        "may have lost their data",
    );
    assert!(trusting.what_if[1].lost.starts_with("those"), "{trusting}");
    let careful = servers.url().replace("trust_fresh_servers=true&", "");
    let careful = read(&careful).await;
    is(&careful, "quorum-restarts", Verdict::Good, "does not vote for");
    assert!(
        careful.what_if[1].lost.starts_with("none, while a majority"),
        "{careful}"
    );
}

#[tokio::test]
async fn replica_that_is_behind_is_told() {
    let master = Server::start(Flavor::from_env()).await;
    let replica = Server::builder(Flavor::from_env())
        .replica_of(master.addr())
        .start()
        .await;
    let client = client(&master.url()).await;
    eventually("the replica is linked", async || {
        found(&client.doctor().await.unwrap(), "replicas")
            .why
            .contains("1 of 1")
    })
    .await;
    is(
        &client.doctor().await.unwrap(),
        "replicas",
        Verdict::Good,
        "1 of 1",
    );
    replica.stop();
    let large = "x".repeat(2 << 20);
    let _: () = master.query(&["SET", "large", &large]).await;
    is(
        &client.doctor().await.unwrap(),
        "replicas",
        Verdict::Bad,
        "has not received",
    );
    replica.cont();
    eventually("the replica has caught up", async || {
        found(&client.doctor().await.unwrap(), "replicas").verdict == Verdict::Good
    })
    .await;
}

#[tokio::test]
async fn server_that_stood_still_is_told_by_its_latency_events() {
    let server = Server::builder(Flavor::from_env())
        .config("latency-monitor-threshold", "100")
        .config("slowlog-log-slower-than", "-1")
        .start()
        .await;
    let client = client(&server.url()).await;
    let before = client.doctor().await.unwrap();
    is(
        &before,
        "stalls",
        Verdict::Unknown,
        "records no commands of 10 ms",
    );
    let slow = "local t = redis.call('TIME') local s = t[1] * 1000000 + t[2] \
                repeat t = redis.call('TIME') until t[1] * 1000000 + t[2] - s > 300000 return 1";
    let _: i64 = server.query(&["EVAL", slow, "0"]).await;
    is(&client.doctor().await.unwrap(), "stalls", Verdict::Bad, "command");
}
