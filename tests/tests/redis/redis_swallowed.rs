//! The reply to each step, swallowed once, in every topology: the outcome is the same as if it had arrived, or a clear
//! error, and nothing is left behind.
//!
//! A life takes every step there is. It is lived once without a fault, to see which steps that are, and then once for
//! each of them and for each way to lose its reply, all of them side by side.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dlock::record::{
    ClaimReply, ClaimToken, ForgetReply, OwnerReply, RecordKey, Records, SlotOutcome, SlotRequest,
};
use dlock::{Error, LockClient, LockKey, LockKind};
use dlock_tests::faults::{
    LEASE, PATIENCE, answered, built, hasty_builder, is_confirmed, is_free_soon, within,
};
use dlock_tests::records::{ask, by, fresh_key};
use dlock_tests::{Cluster, Command, Flavor, Proxy, Replicas, Server, Swallow, eventually, is_of_a_step};
use futures_util::StreamExt;
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

/// Servers, all behind proxies.
enum Topology {
    Server(Box<Server>, Proxy),
    Sentinel(Replicas),
    Cluster(Cluster),
    Quorum(Vec<Server>, Vec<Proxy>),
}

impl Topology {
    async fn server() -> Topology {
        let server = Server::start(Flavor::from_env()).await;
        let proxy = Proxy::start(server.addr());
        Topology::Server(Box::new(server), proxy)
    }

    async fn sentinel() -> Topology {
        Topology::Sentinel(Replicas::start_behind_proxy(Flavor::from_env()).await)
    }

    async fn cluster() -> Topology {
        let builder = Cluster::builder(Flavor::from_env()).replicas(0);
        Topology::Cluster(builder.behind_proxies(true).start().await)
    }

    /// Its members have a vote, as if they had been up for long.
    async fn quorum() -> Topology {
        let servers = join_all((0..3).map(|_| Server::start(Flavor::from_env()))).await;
        for server in &servers {
            let info: String = server.query(&["INFO", "server"]).await;
            let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
            let since = (server.time_us().await - 3_600_000_000).to_string();
            let run = run_id.expect("a server has a run id");
            server
                .command(&["HSET", "dlock:voter", "run", run, "since", &since])
                .await;
        }
        let proxies = servers.iter().map(|server| Proxy::start(server.addr())).collect();
        Topology::Quorum(servers, proxies)
    }

    fn url(&self) -> String {
        match self {
            Topology::Server(_, proxy) => proxy.url(),
            Topology::Sentinel(replicas) => replicas.url(),
            Topology::Cluster(cluster) => cluster.url(),
            Topology::Quorum(_, proxies) => {
                let hosts: Vec<_> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
                // No lease is longer than this.
                format!("quorum+redis://{}?max_lease=2min", hosts.join(","))
            }
        }
    }

    fn proxies(&self) -> Vec<&Proxy> {
        match self {
            Topology::Server(_, proxy) => vec![proxy],
            Topology::Sentinel(replicas) => replicas.proxy().into_iter().collect(),
            Topology::Cluster(cluster) => cluster.proxies(),
            Topology::Quorum(_, proxies) => proxies.iter().collect(),
        }
    }

    fn servers(&self) -> Vec<&Server> {
        match self {
            Topology::Server(server, _) => vec![server],
            Topology::Sentinel(replicas) => replicas.servers().iter().collect(),
            Topology::Cluster(cluster) => cluster.servers().collect(),
            Topology::Quorum(servers, _) => servers.iter().collect(),
        }
    }

    fn is_quorum(&self) -> bool {
        matches!(self, Topology::Quorum(..))
    }

    /// Keys with this in their names that are left, beside what may stay.
    async fn left(&self, prefix: &str) -> Vec<String> {
        let mut left = Vec::new();
        for server in self.servers() {
            let mut keys = server.keys().await;
            keys.retain(|key| {
                let stays = key.starts_with("redisson_lock_token:")
                    || key.contains("dlock:fence")
                    || is_of_a_step(key);
                key.contains(prefix) && !stays
            });
            left.extend(keys);
        }
        left
    }
}

const ACQUIRE_BY_COMMANDS: &str = "acquire by commands";

/// A step without a script, by a command whose key has the prefix of the client. Of acquires it is the last but one: without its
/// reply that of `EXEC` is lost, too.
fn by_commands(command: &Command) -> Option<&'static str> {
    let steps = [("HDEL", "release"), ("INCRBY", ACQUIRE_BY_COMMANDS)];
    steps
        .into_iter()
        .find_map(|(name, step)| command.is(name).then_some(step))
}

/// What the first step of a call is called.
fn name_of(command: &Command) -> Option<String> {
    let by_commands = by_commands(command);
    if by_commands.is_some() {
        return by_commands.map(str::to_owned);
    }
    if !command.is_script() {
        return None;
    }
    let keys: usize = command.arg(2).parse().ok()?;
    // A short call begins with the name, any other with numbers.
    let at = match command.arg(keys + 3).parse::<u64>() {
        Ok(_) => keys + 7,
        Err(_) => keys + 3,
    };
    Some(match &*command.arg(at) {
        "vote" => format!("vote {}", command.arg(at + 4)),
        "count" => format!("count {}", command.arg(at + 2)),
        // Its steps follow what they share.
        "queue" => command.arg(at + 8).into_owned(),
        name => name.to_owned(),
    })
}

/// Whether a call is about a key with this in its name.
fn is_of(command: &Command, prefix: &str) -> bool {
    if by_commands(command).is_some() {
        return command.arg(1).contains(prefix);
    }
    let keys = command.arg(2).parse().unwrap_or(0);
    (3..3 + keys).any(|at| command.arg(at).contains(prefix))
}

/// All that a lock of a kind can go through.
async fn life_of_a_lock(kind: LockKind, a: &LockClient, b: &LockClient) {
    let key = format!("k:{kind}");
    let others = match kind {
        LockKind::Read => LockKind::Write,
        kind => kind,
    };
    let theirs = b.lock(&*key).kind(others);
    let guard = answered(|| a.lock(&*key).kind(kind).try_acquire()).await;
    let guard = guard.unwrap_or_else(|error| panic!("{kind}: no other client has it: {error}"));
    is_confirmed(&guard).await;
    let seen = answered(|| b.inspect(&*key)).await.unwrap();
    assert!(seen.is_some(), "{kind}: it is held");
    let busy = answered(|| theirs.clone().wait(50 * MS).acquire()).await;
    assert!(busy.as_ref().is_err_and(Error::is_busy), "{kind}: {busy:?}");
    guard.release().await.unwrap();
    let next = answered(|| theirs.clone().wait(PATIENCE).acquire()).await;
    next.unwrap().release().await.unwrap();
    if kind == LockKind::Write {
        let guard = answered(|| a.lock(&*key).kind(kind).acquire()).await.unwrap();
        match guard.downgrade().await {
            Ok(reader) => {
                let other = b.lock(&*key).kind(LockKind::Read).wait(PATIENCE);
                answered(|| other.acquire())
                    .await
                    .unwrap()
                    .release()
                    .await
                    .unwrap();
                reader.release().await.unwrap();
            }
            // Then it is released.
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
        let next = answered(|| theirs.clone().wait(PATIENCE).acquire()).await;
        next.unwrap().release().await.unwrap();
    }
}

async fn life_of_a_forced_lock(a: &LockClient, b: &LockClient) {
    let guard = answered(|| b.lock("forced").acquire()).await.unwrap();
    // One whose reply was lost may have done it, and the next one finds nothing.
    answered(|| a.force_release("forced")).await.unwrap();
    is_free_soon(a, "forced").await;
    // One that had to be repeated, and finds nothing, takes it for its own work.
    let released = guard.release().await;
    assert!(
        released.as_ref().map_or_else(Error::is_lost, |()| true),
        "{released:?}"
    );
}

async fn life_of_several_locks(a: &LockClient, b: &LockClient) {
    // In a Cluster these have one slot, and those in general three.
    for name in ["{m}:", "m:"] {
        let keys = [1, 2, 3].map(|n| LockKey::raw(format!("{name}{n}")));
        let guard = answered(|| a.multi(keys.clone()).try_acquire()).await.unwrap();
        let theirs = b.lock(keys[2].clone());
        let busy = answered(|| theirs.try_acquire()).await;
        assert!(busy.is_err_and(|error| error.is_busy()));
        guard.release().await.unwrap();
        for key in keys {
            let lock = b.lock(key).wait(PATIENCE);
            let guard = answered(|| lock.acquire()).await.unwrap();
            guard.release().await.unwrap();
        }
    }
}

async fn life_of_semaphores(a: &LockClient, b: &LockClient) {
    let owned = a.semaphore("s");
    answered(|| owned.set_permits(3)).await.unwrap();
    let permit = answered(|| owned.try_acquire_many(2)).await.unwrap();
    let ensured = answered(|| permit.ensure(1000 * LEASE)).await;
    assert!(matches!(ensured, Err(Error::InvalidOption { .. })) && permit.is_held());
    // Carried out once each, or the sum is another one.
    owned.add_permits(4).await.unwrap();
    owned.remove_permits(2).await.unwrap();
    let theirs = b.semaphore("s").wait(50 * MS);
    eventually("what was taken twice is back", || async {
        answered(|| theirs.available()).await.unwrap() == 3
    })
    .await;
    let busy = answered(|| theirs.acquire_many(4)).await;
    assert!(busy.is_err_and(|error| error.is_busy()));
    permit.release().await.unwrap();
    // The last request of a waiter that gave up may come after the release, and is then undone.
    eventually("all are back", || async {
        answered(|| owned.available()).await.unwrap() == 5
    })
    .await;
    answered(|| owned.delete()).await.unwrap();

    let unowned = a.unowned_semaphore("u");
    answered(|| unowned.try_set_permits(6)).await.unwrap();
    unowned.release_many(2).await.unwrap();
    unowned.add_permits(1).await.unwrap();
    assert_eq!(answered(|| unowned.available()).await.unwrap(), 9);
    match unowned.acquire_many(4).await {
        Ok(()) => assert_eq!(unowned.drain().await.unwrap(), 5),
        Err(error) => panic!("it is asked for until it is acquired: {error}"),
    }
    answered(|| unowned.delete()).await.unwrap();
}

async fn life_of_a_latch(a: &LockClient, b: &LockClient) {
    let latch = a.latch("l");
    answered(|| latch.try_set_count(2)).await.unwrap();
    assert_eq!(latch.count_down().await.unwrap(), 1);
    assert_eq!(answered(|| latch.count()).await.unwrap(), 1);
    let waiting = tokio::spawn({
        let latch = b.latch("l");
        async move { answered(|| latch.wait()).await }
    });
    assert_eq!(latch.count_down().await.unwrap(), 0);
    within(PATIENCE, "the latch", waiting).await.unwrap().unwrap();
    answered(|| latch.try_set_count(1)).await.unwrap();
    answered(|| latch.delete()).await.unwrap();
}

/// The record that stays.
async fn life_of_records(a: &Records) -> RecordKey {
    let (done, released, token) = (fresh_key(), fresh_key(), ClaimToken::new());
    for key in [&done, &released] {
        let claim = by(&token, ask(key));
        let reply = answered(|| a.claim(claim.clone())).await.unwrap();
        assert!(
            matches!(reply, ClaimReply::Claimed { attempt: 1, .. }),
            "{reply:?}"
        );
    }
    let stranger = answered(|| a.claim(ask(&done))).await.unwrap();
    assert!(matches!(stranger, ClaimReply::InProgress { .. }), "{stranger:?}");
    let hour = Duration::from_secs(3600);
    let extended = answered(|| a.extend(&done, &token, hour, hour)).await.unwrap();
    assert_eq!(extended, OwnerReply::Done);
    let complete = || a.complete(&done, &token, b"result".to_vec(), hour);
    assert_eq!(answered(complete).await.unwrap(), OwnerReply::Done);
    let forgotten = answered(|| a.release(&released, &token)).await.unwrap();
    assert_eq!(forgotten, OwnerReply::Done);

    let (abandoned, slotted) = (fresh_key(), fresh_key());
    answered(|| a.claim(by(&token, ask(&abandoned)))).await.unwrap();
    let given_up = answered(|| a.abandon(&abandoned, &token)).await.unwrap();
    assert_eq!(given_up, OwnerReply::Done);
    let slot = SlotRequest::nearest(Duration::from_secs(60));
    let reply = answered(|| a.claim_slot(by(&token, ask(&slotted)), slot))
        .await
        .unwrap();
    assert!(
        matches!(
            reply.outcome,
            SlotOutcome::Claim(ClaimReply::Claimed { attempt: 1, .. })
        ),
        "{reply:?}"
    );
    // The slot stays known.
    let released = answered(|| a.release(&slotted, &token)).await.unwrap();
    assert_eq!(released, OwnerReply::Done);
    for key in [&abandoned, &slotted] {
        let reply = answered(|| a.forget(key)).await.unwrap();
        // One whose reply was lost may have done it.
        assert!(
            matches!(reply, ForgetReply::Forgotten | ForgetReply::Missing),
            "{reply:?}"
        );
    }
    done
}

/// Every step there is, of two clients. The record that stays.
async fn life(topology: &Topology, a: &LockClient, b: &LockClient) -> Option<RecordKey> {
    for kind in [LockKind::Mutex, LockKind::Read, LockKind::Write] {
        life_of_a_lock(kind, a, b).await;
    }
    life_of_a_forced_lock(a, b).await;
    life_of_several_locks(a, b).await;
    if topology.is_quorum() {
        return None;
    }
    for kind in [LockKind::Fair, LockKind::Fenced] {
        life_of_a_lock(kind, a, b).await;
    }
    life_of_semaphores(a, b).await;
    life_of_a_latch(a, b).await;
    Some(life_of_records(&a.records().unwrap()).await)
}

/// How many servers of a quorum lose the reply; elsewhere there is one that could.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    First,
    All,
}

/// The prefix of the keys of one life.
fn fresh_prefix() -> String {
    static LIVES: AtomicUsize = AtomicUsize::new(0);
    format!("life-{}:", LIVES.fetch_add(1, Ordering::Relaxed))
}

/// The proxies that may lose the reply: only one of the servers of a Cluster, or each of a quorum, gets the step.
fn struck(topology: &Topology, on: On) -> Vec<&Proxy> {
    let some = match (topology, on) {
        (Topology::Quorum(..), On::First) => 1,
        _ => usize::MAX,
    };
    topology.proxies().into_iter().take(some).collect()
}

/// A life in which the first reply to this step is lost, if one is named.
async fn live(topology: &Topology, fault: Option<(&str, Swallow, On)>) -> String {
    let prefix = fresh_prefix();
    let builder = || hasty_builder(&topology.url()).prefix(&prefix);
    let (a, b) = (built(builder).await, built(builder).await);
    let mut faults = Vec::new();
    if let Some((name, then, on)) = fault {
        for proxy in struck(topology, on) {
            let (name, prefix) = (name.to_owned(), prefix.clone());
            let struck = move |command: &Command| {
                name_of(command).as_deref() == Some(&*name) && is_of(command, &prefix)
            };
            faults.push(proxy.swallow(1, then, struck));
        }
    }
    let case = format!("{fault:?}");
    let record = within(4 * PATIENCE, &case, life(topology, &a, &b)).await;
    let stays = record.map(|key| format!("{prefix}dlock:record:{}", key.as_str()));
    if fault.is_some_and(|(name, ..)| name == ACQUIRE_BY_COMMANDS) {
        // Only acquires soon after one by the script go by commands.
        eventually(&format!("{case}: it is sent"), || async {
            let mut held = Vec::new();
            for key in ["k:often", "l:often", "m:often", "n:often"] {
                held.push(answered(|| a.lock(key).acquire()).await.unwrap());
            }
            for guard in held {
                let _ = guard.release().await;
            }
            faults.iter().any(|fault| fault.fired())
        })
        .await;
    }
    if fault.is_some() {
        assert!(
            faults.iter().any(|fault| fault.fired()),
            "{case}: it was not sent"
        );
    }
    nothing_is_left(topology, &case, &prefix, [&a, &b], stays.as_deref()).await;
    prefix
}

/// Nothing but the key that stays is left of a life, soon.
async fn nothing_is_left(
    topology: &Topology,
    case: &str,
    prefix: &str,
    clients: [&LockClient; 2],
    stays: Option<&str>,
) {
    eventually(&format!("{case}: no hold and no waiter is left"), || async {
        let is_done = |client: &&LockClient| client.held() == 0 && client.waited_for() == 0;
        clients.iter().all(is_done)
    })
    .await;
    let begun = Instant::now();
    loop {
        let left = topology.left(prefix).await;
        if left.iter().map(String::as_str).eq(stays) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{case}: left is {left:?}");
        tokio::time::sleep(20 * MS).await;
    }
}

/// A writer goes on as a reader, and the `k`-th reply is lost. The names of the steps that lost one.
async fn downgrade(topology: &Topology, k: u64, then: Swallow, on: On) -> Vec<String> {
    let (case, prefix) = (format!("downgrade, reply {k}, {then:?}, {on:?}"), fresh_prefix());
    let builder = || hasty_builder(&topology.url()).prefix(&prefix);
    let (a, b) = (built(builder).await, built(builder).await);
    let faults = struck(topology, on).into_iter().map(|proxy| {
        let prefix = prefix.clone();
        proxy.swallow(k, then, move |command| is_of(command, &prefix))
    });
    let faults: Vec<_> = faults.collect();
    within(4 * PATIENCE, &case, async {
        let lock = |client: &LockClient, kind| client.lock("d").kind(kind).wait(PATIENCE);
        let writer = answered(|| lock(&a, LockKind::Write).acquire()).await.unwrap();
        match writer.downgrade().await {
            Ok(reader) => {
                // A reader, and nothing else.
                let write = lock(&b, LockKind::Write);
                let busy = answered(|| write.try_acquire()).await;
                assert!(busy.as_ref().is_err_and(Error::is_busy), "{case}: {busy:?}");
                let other = answered(|| lock(&b, LockKind::Read).acquire()).await.unwrap();
                assert!(reader.is_held(), "{case}");
                other.release().await.unwrap();
                reader.release().await.unwrap();
            }
            // Then nothing.
            Err(error) => assert!(error.is_unavailable(), "{case}: {error}"),
        }
        let next = answered(|| lock(&b, LockKind::Write).acquire()).await;
        next.unwrap().release().await.unwrap();
    })
    .await;
    nothing_is_left(topology, &case, &prefix, [&a, &b], None).await;
    let mut lost = Vec::new();
    for fault in faults.iter().filter(|fault| fault.fired()) {
        lost.extend(name_of(&fault.caught().await.command));
    }
    lost
}

/// One downgrade for each of the first replies that could be lost, with each way to lose it.
async fn every_reply_of_a_downgrade_is_lost_once(topology: &Topology, on: &[On], expected: [&str; 3]) {
    let mut cases = Vec::new();
    for k in 1..=6 {
        for then in [Swallow::Hang, Swallow::Cut] {
            cases.extend(on.iter().map(|on| (k, then, *on)));
        }
    }
    let downgrades = cases.into_iter().map(async |(k, then, on)| {
        let lost = downgrade(topology, k, then, on).await;
        (k, lost)
    });
    let lost: Vec<_> = futures_util::stream::iter(downgrades)
        .buffer_unordered(8)
        .collect()
        .await;
    println!("of downgrades were lost: {lost:?}");
    // What comes after a writer has its lock is its downgrade.
    for name in expected {
        let is_lost = |(_, lost): &(u64, Vec<String>)| lost.iter().any(|lost| lost == name);
        assert!(lost.iter().any(is_lost), "{name} is not among {lost:?}");
    }
}

/// The steps of a life, and one life for each of them with each way to lose its reply.
async fn every_reply_is_lost_once(topology: &Topology, on: &[On], expected: &[&str]) {
    let prefix = live(topology, None).await;
    let mut names = BTreeSet::new();
    for proxy in topology.proxies() {
        let sent = proxy.commands().into_iter().map(|sent| sent.command);
        names.extend(
            sent.filter(|command| is_of(command, &prefix))
                .filter_map(|command| name_of(&command)),
        );
    }
    for name in expected {
        assert!(names.contains(*name), "{name} is not among {names:?}");
    }
    // Not in each life is one sent.
    if matches!(topology, Topology::Server(..)) && Flavor::from_env() != Flavor::Redis62 {
        names.insert(ACQUIRE_BY_COMMANDS.to_owned());
    }
    let mut cases = Vec::new();
    for name in &names {
        for then in [Swallow::Hang, Swallow::Cut] {
            cases.extend(on.iter().map(|on| (&**name, then, *on)));
        }
    }
    println!("{} lives: {names:?}", cases.len());
    let lives = cases.into_iter().map(|case| live(topology, Some(case)));
    futures_util::stream::iter(lives)
        .buffer_unordered(8)
        .collect::<Vec<_>>()
        .await;
}

/// What the steps are called that every store but a quorum has.
const ALL: &[&str] = &[
    "abandon",
    "acquire",
    "all",
    "claim",
    "claim_slot",
    "complete",
    "count add",
    "count count",
    "count count_down",
    "count delete",
    "count delete_latch",
    "count drain",
    "count give",
    "count permits",
    "count set",
    "count set_count",
    "extend",
    "fair",
    "fenced",
    "force",
    "forget",
    "forget_record",
    "inspect",
    "permit",
    "read",
    "release",
    "release_fair",
    "release_permit",
    "release_read",
    "release_write",
    "renew",
    "renew_permit",
    "renew_read",
    "renew_write",
    "unowned",
    "write",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_server() {
    let topology = Topology::server().await;
    every_reply_is_lost_once(&topology, &[On::First], ALL).await;
    every_reply_of_a_downgrade_is_lost_once(&topology, &[On::First], ["write", "read", "release_write"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_master_that_sentinels_name() {
    let topology = Topology::sentinel().await;
    every_reply_is_lost_once(&topology, &[On::First], ALL).await;
    every_reply_of_a_downgrade_is_lost_once(&topology, &[On::First], ["write", "read", "release_write"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster() {
    let topology = Topology::cluster().await;
    every_reply_is_lost_once(&topology, &[On::First], ALL).await;
    every_reply_of_a_downgrade_is_lost_once(&topology, &[On::First], ["write", "read", "release_write"])
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_one_or_all_members_of_a_quorum() {
    let expected = [
        "force",
        "inspect",
        "raise_fence",
        "release",
        "release_read",
        "release_write",
        "renew",
        "renew_read",
        "renew_write",
        "vote acquire",
        "vote read",
        "vote write",
    ];
    let (topology, on) = (Topology::quorum().await, [On::First, On::All]);
    every_reply_is_lost_once(&topology, &on, &expected).await;
    let expected = ["vote write", "vote read", "release_write"];
    every_reply_of_a_downgrade_is_lost_once(&topology, &on, expected).await;
}
