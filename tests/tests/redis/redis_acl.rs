//! A user with exactly the permissions that locks need can do everything, and with one less something
//! fails: with a clear error, and nothing left behind.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use dlock::record::{ClaimReply, RecordKey};
use dlock::store::StoreError;
use dlock::store::doctor::Verdict;
use dlock::{Diagnosis, Error, HoldState, LockClient, LockClientBuilder};
use dlock_tests::faults::{PATIENCE, SOON, TIMEOUT, hasty_builder, in_rounds, is_confirmed, within};
use dlock_tests::permissions::{commands, give, headings, in_a_cluster, of, patterns};
use dlock_tests::records::{ask, fresh_key};
use dlock_tests::{Cluster, Flavor, Log, Replicas, Server, Store, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

/// Everything here is as docs/permissions.md says it.
type Words = LazyLock<Vec<&'static str>>;

/// What acquire, renew, release, wait, inspect and forced releases need, the scripts' own commands included.
static NEEDED: Words = LazyLock::new(|| commands("Locks"));
static FOR_LIST: Words = LazyLock::new(|| commands("A list of all locks"));
/// What makes a connection better and is done without where it is forbidden.
static WISHED: Words = LazyLock::new(|| commands("What may be left out"));
static KEYS: Words = LazyLock::new(|| patterns("Locks"));

async fn server() -> Store {
    let builder = Server::builder(Flavor::from_env()).acl("svc on >pw");
    Store::Server(Box::new(builder.start().await))
}

/// Gives the user these permissions and no other.
async fn allow<'a>(store: &Store, commands: impl Iterator<Item = &'a &'static str>) {
    let mut acl = vec!["ACL", "SETUSER", "svc", "reset", "resetchannels", "on", ">pw"];
    acl.extend(KEYS.iter());
    acl.extend(commands);
    store.as_server().command(&acl).await;
}

async fn client(store: &Store) -> Result<LockClient, Error> {
    let builder = hasty_builder(&store.as_server().url_as("svc", "pw"));
    builder.timeout(PATIENCE).build().await
}

/// Everything that locks can do; where something is wrong, what.
async fn everything(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    store.as_server().script_flush().await;
    let renewed = a.lock("shop:k").lease(600 * MS).acquire().await.map_err(text)?;
    let guard = a.lock("shop:m").acquire().await.map_err(text)?;
    // Its last look comes long after the release.
    let waiter = tokio::spawn(b.lock("shop:m").wait(Duration::from_secs(8)).acquire());
    tokio::time::sleep(700 * MS).await;
    if renewed.state() != HoldState::Held {
        return Err("the renewal failed".to_owned());
    }
    a.inspect("shop:k").await.map_err(text)?.ok_or("it is held")?;
    let free = a.inspect("shop:free").await.map_err(text)?.is_none();
    if !free || a.force_release("shop:free").await.map_err(text)? {
        return Err("it is free".to_owned());
    }
    let subscribed = store.as_server().pubsub_channels().await.len();
    let released = Instant::now();
    guard.release().await.map_err(text)?;
    let next = waiter.await.unwrap().map_err(text)?;
    if subscribed != 1 || released.elapsed() > Duration::from_secs(2) {
        return Err("the waiter was not notified".to_owned());
    }
    next.release().await.map_err(text)?;
    b.force_release("shop:k").await.map_err(text)?;
    drop(renewed);
    let kept = a
        .lock("shop:k")
        .min_hold(500 * MS)
        .acquire()
        .await
        .map_err(text)?;
    kept.release().await.map_err(text)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_by_its_number_needs_what_the_documentation_lists() {
    let store = server().await;
    let url = format!("{}/1", store.as_server().url_as("svc", "pw"));
    let connected = async || hasty_builder(&url).timeout(PATIENCE).build().await;
    allow(&store, NEEDED.iter()).await;
    let refused = connected().await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    assert!(refused.to_string().contains("+select"), "{refused}");
    let select = commands("A database by its number");
    allow(&store, NEEDED.iter().chain(&select)).await;
    let guard = connected().await.unwrap().lock("shop:k").acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_what_the_documentation_lists_can_do_everything() {
    for wished in [&WISHED[..], &[]] {
        let store = server().await;
        allow(&store, NEEDED.iter().chain(FOR_LIST.iter()).chain(wished)).await;
        in_rounds("everything can be done", async || everything(&store).await).await;
        store.assert_clean(&[]).await;
        let a = client(&store).await.unwrap();
        let guard = a.lock("shop:k").acquire().await.unwrap();
        assert_eq!(a.list("shop:").await.unwrap().len(), 1);
        guard.release().await.unwrap();
        let goes_by_commands = async || {
            for _ in 0..10 {
                a.lock("shop:k").acquire().await.unwrap().release().await.unwrap();
            }
            store.as_server().commands().await.contains_key("restore")
        };
        match wished.is_empty() || Flavor::from_env() == Flavor::Redis62 {
            true => assert!(!goes_by_commands().await),
            false => eventually("acquires go by commands", &goes_by_commands).await,
        }
        store.assert_clean(&[&a]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_one_permission_less_cannot() {
    join_all(NEEDED.iter().map(|missing| async move {
        let store = server().await;
        allow(&store, NEEDED.iter().filter(|command| command != &missing)).await;
        let outcome = everything(&store).await;
        // Ending a subscription can wait until the connection ends.
        assert!(
            outcome.is_err() || *missing == "+unsubscribe",
            "{missing} is not needed"
        );
        // A grant ends with its lease at the latest.
        eventually("every hold has an end", || async {
            let server = store.as_server();
            server.try_query::<bool>(&["EXISTS", "shop:k"]).await == Ok(false)
                || server.ttl("shop:k").await.is_some()
        })
        .await;
    }))
    .await;
}

/// A client that is connected notices it at its next acquire by a script, which nothing repeats.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_that_is_forbidden_later_refuses_acquires_at_once() {
    let store = server().await;
    allow(&store, NEEDED.iter()).await;
    let client = client(&store).await.unwrap();
    let acquire = async |n: usize| client.lock(format!("shop:{n}")).acquire().await;
    drop(acquire(0).await.unwrap());
    store
        .as_server()
        .command(&["ACL", "SETUSER", "svc", "-time"])
        .await;
    let alone = acquire(1).await;
    let together = join_all((2..10).map(acquire)).await;
    for refused in together.into_iter().chain([alone]) {
        let error = refused.map(drop).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("ACL SETUSER"), "{error}");
    }
    store
        .as_server()
        .command(&["ACL", "SETUSER", "svc", "+time"])
        .await;
    drop(acquire(1).await.unwrap());
}

/// The lines of the doctor are for its own keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_names_each_permission_that_locks_lack() {
    let examined = async |missing: &str, with_its_lines: bool| {
        let store = server().await;
        allow(&store, NEEDED.iter().filter(|command| **command != missing)).await;
        if with_its_lines {
            let mut acl = vec!["ACL", "SETUSER", "svc"];
            acl.extend(of("svc", "The doctor"));
            store.as_server().command(&acl).await;
        }
        let client = client(&store).await.unwrap();
        (client.doctor().probe(true).await.unwrap(), store)
    };
    let verdicts = |diagnosis: &Diagnosis| {
        ["permissions", "scripts", "pubsub"].map(|check| {
            let found = diagnosis.findings.iter().find(|finding| finding.check == check);
            found.unwrap_or_else(|| panic!("no {check}: {diagnosis}")).verdict
        })
    };
    let (examined, verdicts) = (&examined, &verdicts);
    // Without the time no client connects, and the end of a subscription can wait for that of the connection.
    let needed = NEEDED
        .iter()
        .filter(|command| !["+time", "+unsubscribe"].contains(command));
    join_all(needed.map(|missing| async move {
        let (diagnosis, store) = examined(missing, true).await;
        assert!(
            verdicts(&diagnosis).contains(&Verdict::Bad),
            "{missing}: {diagnosis}"
        );
        let stays = diagnosis
            .findings
            .iter()
            .any(|finding| finding.check == "scratch");
        assert_eq!(stays, *missing == "+del", "{missing}: {diagnosis}");
        eventually("no key of the doctor stays", || async {
            store.as_server().keys().await.is_empty()
        })
        .await;
    }))
    .await;
    for missing in ["", "+unsubscribe"] {
        let (diagnosis, _store) = examined(missing, true).await;
        assert_eq!(verdicts(&diagnosis), [Verdict::Good; 3], "{missing}: {diagnosis}");
    }
    let (diagnosis, _store) = examined("", false).await;
    let [permissions, scripts, pubsub] = verdicts(&diagnosis);
    assert_eq!(
        (permissions, scripts, pubsub),
        (Verdict::Unknown, Verdict::Good, Verdict::Unknown),
        "{diagnosis}"
    );
    let remedy = diagnosis
        .findings
        .iter()
        .find(|finding| finding.check == "pubsub");
    let remedy = remedy.and_then(|finding| finding.remedy.as_deref()).unwrap();
    assert!(
        remedy.contains("&redisson_lock__channel:dlock:doctor:*"),
        "{remedy}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_could_not_end_does_not_come_to_be() {
    for missing in [
        &["+pexpire"][..],
        &["+pexpire", "+hdel"],
        &["+pexpire", "+hdel", "+del"],
    ] {
        let store = server().await;
        allow(
            &store,
            NEEDED.iter().filter(|command| !missing.contains(*command)),
        )
        .await;
        let a = client(&store).await.unwrap();
        // One of them alone, and several in one call.
        for names in [&["shop:1"][..], &["shop:1", "shop:2", "shop:3"]] {
            let outcomes = join_all(names.iter().map(|name| a.lock(*name).try_acquire())).await;
            for outcome in outcomes {
                assert!(matches!(outcome, Err(Error::Refused { .. })), "{outcome:?}");
            }
        }
        settle().await;
        assert_eq!(store.as_server().keys().await, ["dlock:fence"], "{missing:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_out_of_bounds_harms_no_other_in_the_same_call() {
    let store = server().await;
    allow(&store, NEEDED.iter().chain(FOR_LIST.iter())).await;
    let a = client(&store).await.unwrap();
    let server = store.as_server();
    server.command(&["SET", "shop:string", "text"]).await;
    server.command(&["RPUSH", "shop:list", "a"]).await;
    server.command(&["HSET", "shop:hash", "field", "value"]).await;
    for _ in 0..5 {
        let names = [
            "shop:1",
            "private:1",
            "shop:string",
            "shop:2",
            "shop:list",
            "private:2",
            "shop:hash",
            "shop:3",
        ];
        let outcomes = join_all(names.map(|name| a.lock(name).try_acquire())).await;
        for (name, outcome) in names.iter().zip(&outcomes) {
            match (name.split_once(':').unwrap(), outcome) {
                (("private", _), Err(Error::Refused { .. })) | (("shop", "1" | "2" | "3"), Ok(_)) => {}
                (("shop", "string" | "list" | "hash"), Err(Error::KeyTaken { .. })) => {}
                (_, outcome) => panic!("{name}: {outcome:?}"),
            }
        }
        // The refused ones between the releases, too.
        let again = join_all(outcomes.into_iter().zip(names).map(|(outcome, name)| {
            drop(outcome);
            a.lock(name).try_acquire()
        }))
        .await;
        assert_eq!(
            again.iter().filter(|outcome| outcome.is_ok()).count(),
            3,
            "{again:?}"
        );
    }
    settle().await;
    assert_eq!(server.query::<String>(&["GET", "shop:string"]).await, "text");
    assert_eq!(
        server.query::<String>(&["HGET", "shop:hash", "field"]).await,
        "value"
    );
    server
        .command(&["DEL", "shop:string", "shop:list", "shop:hash"])
        .await;
    store.assert_clean(&[&a]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_refused_takes_no_other_along() {
    let store = server().await;
    let server = store.as_server();
    allow(&store, NEEDED.iter()).await;
    server.command(&["ACL", "SETUSER", "svc", "~private:*"]).await;
    let a = client(&store).await.unwrap();
    let names = ["shop:1", "private:1", "shop:2", "shop:3"];
    let lease = 30 * SOON;
    let guards = join_all(names.map(|name| a.lock(name).lease(lease).acquire())).await;
    let guards: Vec<_> = guards.into_iter().map(Result::unwrap).collect();
    allow(&store, NEEDED.iter()).await;
    // As if they were due: a reconnection has all of them confirmed at once.
    server.command(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    eventually("one is in doubt and the others are not", || async {
        let states = guards.iter().map(dlock::LockGuard::state);
        states.eq([
            HoldState::Held,
            HoldState::Suspect,
            HoldState::Held,
            HoldState::Held,
        ])
    })
    .await;
    server.command(&["ACL", "SETUSER", "svc", "~private:*"]).await;
    for guard in guards {
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forbidden_channel_delays_only_its_own_waiters() {
    let store = server().await;
    let server = store.as_server();
    allow(&store, NEEDED.iter()).await;
    server.command(&["ACL", "SETUSER", "svc", "~other:*"]).await;
    let (a, b) = (client(&store).await.unwrap(), client(&store).await.unwrap());
    let guards = [
        b.lock("shop:k").acquire().await.unwrap(),
        b.lock("other:k").acquire().await.unwrap(),
    ];
    let waiters = ["shop:k", "other:k"].map(|name| {
        let lock = a.lock(name);
        tokio::spawn(async move { drop(lock.acquire().await.unwrap()) })
    });
    tokio::time::sleep(TIMEOUT).await;
    drop(guards);
    for outcome in within(SOON, "both wake-ups", join_all(waiters)).await {
        outcome.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}

/// All that becomes of a fair lock; where something is wrong, what.
async fn everything_fair(store: &Store) -> Result<(), String> {
    const QUEUE: &str = "redisson_lock_queue:{shop:k}";
    const TIMES: &str = "redisson_lock_timeout:{shop:k}";
    let text = |error: Error| error.to_string();
    let server = store.as_server();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    // A waiter that is gone is in front.
    let other = "11111111-2222-4333-8444-555555555555:1";
    server.command(&["RPUSH", QUEUE, other]).await;
    server.command(&["ZADD", TIMES, "1000", other]).await;
    let guard = a.fair_lock("shop:k").acquire().await.map_err(text)?;
    // Behind one of Redisson's.
    server.command(&["RPUSH", QUEUE, other]).await;
    server.command(&["ZADD", TIMES, "9000000000000", other]).await;
    let gives_up = b.fair_lock("shop:k").wait(300 * MS).acquire().await;
    if !gives_up.is_err_and(|error| error.is_busy()) {
        return Err("it did not wait".to_owned());
    }
    let given_up = eventually("it has left the queue", || async {
        server.query::<u64>(&["LLEN", QUEUE]).await == 1
    });
    if tokio::time::timeout(3000 * MS, given_up).await.is_err() {
        return Err("it stands in the queue still".to_owned());
    }
    server.command(&["DEL", QUEUE, TIMES]).await;
    let waiter = tokio::spawn(b.fair_lock("shop:k").wait(PATIENCE).acquire());
    let first = async || -> Option<String> { server.query(&["LINDEX", QUEUE, "0"]).await };
    eventually("it stands in the queue, or has failed", || async {
        first().await.is_some() || waiter.is_finished()
    })
    .await;
    let Some(its) = first().await.filter(|_| !waiter.is_finished()) else {
        return Err(waiter
            .await
            .unwrap()
            .map_or_else(text, |_| "it did not wait".to_owned()));
    };
    // One of Redisson's behind it, and its own place taken away.
    server.command(&["RPUSH", QUEUE, other]).await;
    server.command(&["ZADD", TIMES, "9000000000000", other]).await;
    server.command(&["LREM", QUEUE, "0", &its]).await;
    eventually("it is back, or has failed", || async {
        first().await.as_deref() == Some(&its) || waiter.is_finished()
    })
    .await;
    let released = guard.release().await.map_err(text);
    let served = waiter.await.unwrap().map_err(text);
    released?;
    served?.release().await.map_err(text)?;
    let endless = server.ttl(QUEUE).await.is_none();
    server.command(&["DEL", QUEUE, TIMES]).await;
    endless
        .then_some(())
        .ok_or("the queue of the others has an end".to_owned())
}

async fn everything_fenced(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let a = client(store).await.map_err(text)?;
    // A counter of its own, and one that Java began.
    for begun in [None, Some("5")] {
        if let Some(last) = begun {
            let set = ["SET", "redisson_lock_token:{shop:k}", last];
            store.as_server().command(&set).await;
        }
        for _ in 0..2 {
            let guard = a.fenced_lock("shop:k").acquire().await.map_err(text)?;
            guard.release().await.map_err(text)?;
        }
    }
    Ok(())
}

/// A server whose user has what plain locks need, and these words.
async fn server_for(words: impl Iterator<Item = &&'static str>) -> Store {
    let store = server().await;
    allow(&store, NEEDED.iter()).await;
    let mut acl = vec!["ACL", "SETUSER", "svc"];
    acl.extend(words);
    store.as_server().command(&acl).await;
    store
}

/// With what stands under the heading everything can be done, and with one word less, of commands and keys, it cannot.
/// Whichever command is missing, nothing is done by half: `is_whole` sees that.
async fn no_less_than(
    heading: &str,
    everything: impl AsyncFn(&Store) -> Result<(), String>,
    is_whole: impl AsyncFn(&Server) -> bool,
) {
    let words = [commands(heading), patterns(heading)].concat();
    let store = server_for(words.iter()).await;
    in_rounds("everything can be done", async || everything(&store).await).await;
    join_all(words.iter().map(|missing| {
        let (words, everything, is_whole) = (&words, &everything, &is_whole);
        async move {
            let store = server_for(words.iter().filter(|word| *word != missing)).await;
            assert!(everything(&store).await.is_err(), "{missing} is not needed");
            if missing.starts_with('+') {
                let what = format!("nothing is done by half without {missing}");
                eventually(&what, || is_whole(store.as_server())).await;
            }
        }
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fair_locks_need_what_the_documentation_lists_and_no_less() {
    no_less_than("Fair locks", everything_fair, async |_| true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fenced_locks_need_what_the_documentation_lists_and_no_less() {
    let has_no_lock = async |server: &Server| !server.query::<bool>(&["EXISTS", "shop:k"]).await;
    no_less_than("Fenced locks", everything_fenced, has_no_lock).await;
}

/// The text says to remove the key: an operator would lose the tokens by that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_permission_is_not_taken_for_a_broken_fencing_token() {
    let refused = async |store: &Store, names: &[&str], fenced: bool| {
        let client = client(store).await.unwrap();
        let outcome = match (fenced, names) {
            (true, _) => client.fenced_lock(names[0]).try_acquire().await.map(drop),
            (false, _) => client.multi(names.iter().copied()).try_acquire().await.map(drop),
        };
        outcome.unwrap_err().to_string()
    };
    // Neither command nor key of the counter.
    let store = server().await;
    allow(&store, NEEDED.iter()).await;
    let error = refused(&store, &["shop:k"], true).await;
    assert!(
        error.contains("permissions.md") && !error.contains("remove"),
        "{error}"
    );
    // The fence of all locks, which several acquires in one call read.
    allow(&store, NEEDED.iter().filter(|command| **command != "+get")).await;
    let error = refused(&store, &["shop:1", "shop:2"], false).await;
    assert!(
        error.contains("permissions.md") && !error.contains("remove"),
        "{error}"
    );
    // What is no token is named as before.
    let store = server_for(commands("Fenced locks").iter().chain(&patterns("Fenced locks"))).await;
    store
        .as_server()
        .command(&["HSET", "redisson_lock_token:{shop:k}", "a", "1"])
        .await;
    let error = refused(&store, &["shop:k"], true).await;
    assert!(error.contains("holds no fencing token"), "{error}");
}

/// Everything that semaphores can do; where something is wrong, what.
async fn everything_of_semaphores(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    let semaphore = a.semaphore("shop:k").permits(3);
    // One that is renewed, one that ends by itself.
    let held = semaphore
        .clone()
        .lease(600 * MS)
        .acquire_many(2)
        .await
        .map_err(text)?;
    let short = semaphore
        .clone()
        .fixed_lease(100 * MS)
        .acquire()
        .await
        .map_err(text)?;
    let many = tokio::spawn(b.semaphore("shop:k").wait(PATIENCE).acquire_many(3));
    tokio::time::sleep(700 * MS).await;
    if held.state() != HoldState::Held {
        return Err("the renewal failed".to_owned());
    }
    if a.holders("shop:k").await.map_err(text)?.len() != 2 {
        return Err("who holds permits is not seen".to_owned());
    }
    drop(short);
    let subscribed = store.as_server().pubsub_channels().await.len();
    let released = Instant::now();
    held.release().await.map_err(text)?;
    let many = many.await.unwrap().map_err(text)?;
    if subscribed != 1 || released.elapsed() > Duration::from_secs(2) {
        return Err("the waiter was not notified".to_owned());
    }
    semaphore.add_permits(1).await.map_err(text)?;
    b.force_release("shop:k").await.map_err(text)?;
    drop(many);
    let status = semaphore.status().await.map_err(text)?.ok_or("it is set")?;
    if (status.total, status.held) != (4, 0) {
        return Err(format!("{status:?}"));
    }
    semaphore.delete().await.map_err(text)?;
    let unowned = a.unowned_semaphore("shop:k").permits(1);
    unowned.acquire().await.map_err(text)?;
    unowned.release().await.map_err(text)?;
    unowned.delete().await.map_err(text)?;
    Ok(())
}

/// Everything that semaphores without owners can do; where something is wrong, what.
async fn everything_of_semaphores_without_owners(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let a = client(store).await.map_err(text)?;
    let semaphore = a.unowned_semaphore("shop:k").permits(1);
    semaphore.acquire().await.map_err(text)?;
    if semaphore.try_acquire().await.is_ok() {
        return Err("there is one".to_owned());
    }
    semaphore.release().await.map_err(text)?;
    semaphore.add_permits(1).await.map_err(text)?;
    if semaphore.drain().await.map_err(text)? != 2 {
        return Err("there are two".to_owned());
    }
    semaphore.delete().await.map_err(text)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn semaphores_without_owners_need_few_permissions() {
    let keys = patterns("Semaphores");
    let counts = ["+incrby", "+zcard", "+zcount"];
    let store = server_for(keys.iter().chain(&counts)).await;
    in_rounds("everything can be done", async || {
        everything_of_semaphores_without_owners(&store).await
    })
    .await;
    // Permits with holders count for one who may only count them.
    let owner = LockClient::connect(&store.as_server().url()).await.unwrap();
    let held = owner.semaphore("shop:owned").limit(1).acquire().await.unwrap();
    let semaphore = client(&store)
        .await
        .unwrap()
        .unowned_semaphore("shop:owned")
        .permits(2);
    semaphore.try_acquire().await.unwrap();
    let busy = semaphore.try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    held.release().await.unwrap();
    // Acquires alone need less, also where permits are short.
    let store = server_for(keys.iter().chain(&counts[..1])).await;
    let semaphore = client(&store)
        .await
        .unwrap()
        .unowned_semaphore("shop:k")
        .permits(1);
    semaphore.acquire().await.unwrap();
    let busy = semaphore.try_acquire().await.unwrap_err();
    assert!(busy.is_busy(), "{busy}");
    let refused = semaphore.release().await.unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused}");
}

async fn everything_of_latches(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    a.latch("shop:k").try_set_count(2).await.map_err(text)?;
    let latch = b.latch("shop:k");
    let waiter = tokio::spawn(async move { latch.wait_for(PATIENCE).await });
    settle().await;
    let subscribed = store.as_server().pubsub_channels().await.len();
    let opened = Instant::now();
    for _ in 0..2 {
        a.latch("shop:k").count_down().await.map_err(text)?;
    }
    waiter.await.unwrap().map_err(text)?;
    if subscribed != 1 || opened.elapsed() > Duration::from_secs(2) {
        return Err("the waiter was not notified".to_owned());
    }
    a.latch("shop:k").try_set_count(2).await.map_err(text)?;
    a.latch("shop:k").delete().await.map_err(text)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn semaphores_need_what_the_documentation_lists_and_no_less() {
    // What is free and what is held is what there is.
    let adds_up = async |server: &Server| {
        let free: Option<i64> = server.query(&["GET", "shop:k"]).await;
        let held: i64 = server.query(&["ZCARD", "{shop:k}:timeout"]).await;
        matches!(free.map(|free| free + held), None | Some(3 | 4))
    };
    no_less_than("Semaphores", everything_of_semaphores, adds_up).await;
}

/// Everything that can be done with records; where something is wrong, what.
async fn everything_of_records(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let failed = |error: StoreError| error.to_string();
    let a = client(store).await.map_err(text)?.records().map_err(text)?;
    let b = client(store).await.map_err(text)?.records().map_err(text)?;
    let (key, other) = (fresh_key(), fresh_key());
    let claim = async |key: &RecordKey| {
        let request = ask(key);
        let token = request.token.clone();
        match a.claim(request).await.map_err(failed)? {
            ClaimReply::Claimed { .. } => Ok(token),
            reply => Err(format!("{reply:?}")),
        }
    };
    let token = claim(&key).await?;
    let mut watch = b.watch(&key);
    settle().await;
    let subscribed = store.as_server().pubsub_channels().await.len();
    match b.claim(ask(&key)).await.map_err(failed)? {
        ClaimReply::InProgress { .. } if subscribed == 1 => {}
        reply => return Err(format!("{reply:?}, {subscribed} subscriptions")),
    }
    a.extend(&key, &token, PATIENCE, PATIENCE).await.map_err(failed)?;
    a.complete(&key, &token, b"done".to_vec(), PATIENCE)
        .await
        .map_err(failed)?;
    (tokio::time::timeout(PATIENCE, watch.changed()).await).map_err(|_| "the waiter was not notified")?;
    match b.claim(ask(&key)).await.map_err(failed)? {
        ClaimReply::Completed { .. } => {}
        reply => return Err(format!("{reply:?}")),
    }
    let token = claim(&other).await?;
    a.abandon(&other, &token).await.map_err(failed)?;
    let token = claim(&other).await?;
    a.release(&other, &token).await.map_err(failed)?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_need_what_the_documentation_lists_and_no_less() {
    let end = async |server: &Server| {
        for key in server.keys().await {
            if key != "dlock:fence" && server.ttl(&key).await.is_none() {
                return false;
            }
        }
        true
    };
    no_less_than("Records", everything_of_records, end).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latches_need_what_the_documentation_lists_and_no_less() {
    no_less_than("Latches", everything_of_latches, async |_| true).await;
}

/// Everything that readers and writers can do; where something is wrong, what.
async fn everything_read_write(store: &Store) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    let lock = |client: &LockClient| client.rw_lock("shop:k");
    let readers = [
        lock(&a).read().lease(600 * MS).acquire().await.map_err(text)?,
        lock(&b).read().acquire().await.map_err(text)?,
    ];
    tokio::time::sleep(700 * MS).await;
    if readers[0].state() != HoldState::Held {
        return Err("the renewal failed".to_owned());
    }
    if a.holders("shop:k").await.map_err(text)?.len() != 2 {
        return Err("the readers are not seen".to_owned());
    }
    let writer = tokio::spawn(lock(&a).write().wait(PATIENCE).acquire());
    settle().await;
    let subscribed = store.as_server().pubsub_channels().await.len();
    let released = Instant::now();
    for reader in readers {
        reader.release().await.map_err(text)?;
    }
    let writer = writer.await.unwrap().map_err(text)?;
    if subscribed != 1 || released.elapsed() > Duration::from_secs(2) {
        return Err("the waiter was not notified".to_owned());
    }
    let reading = writer.downgrade().await.map_err(text)?;
    b.force_release("shop:k").await.map_err(text)?;
    drop(reading);
    let kept = lock(&b)
        .write()
        .min_hold(500 * MS)
        .acquire()
        .await
        .map_err(text)?;
    kept.release().await.map_err(text)?;
    // The lock lasts as long as the longest of its readers.
    let readers = [60, 600].map(|seconds| {
        lock(&a)
            .read()
            .wait(PATIENCE)
            .fixed_lease(1000 * seconds * MS)
            .acquire()
    });
    let [short, long] = readers;
    let (short, long) = (short.await.map_err(text)?, long.await.map_err(text)?);
    long.release().await.map_err(text)?;
    let left = store.as_server().ttl("shop:k").await;
    short.release().await.map_err(text)?;
    match left {
        Some(left) if left <= 60_000 * MS => Ok(()),
        left => Err(format!(
            "the waiter was not told how long the readers have: {left:?}"
        )),
    }
}

async fn everything_of_preferred_writers(store: &Store) -> Result<(), String> {
    const WRITERS: &str = "{shop:k}:dlock:writers";
    let text = |error: Error| error.to_string();
    let server = store.as_server();
    let (a, b) = (
        client(store).await.map_err(text)?,
        client(store).await.map_err(text)?,
    );
    let reader = b.rw_lock("shop:k").read().acquire().await.map_err(text)?;
    let lock = a.rw_lock("shop:k").prefer_writers().write();
    let writer = tokio::spawn(lock.wait(PATIENCE).acquire());
    eventually("readers stand back, or it has failed", async || {
        server.query::<bool>(&["EXISTS", WRITERS]).await || writer.is_finished()
    })
    .await;
    reader.release().await.map_err(text)?;
    let writer = writer.await.unwrap().map_err(text)?;
    let waits = server.query::<bool>(&["EXISTS", WRITERS]).await;
    writer.release().await.map_err(text)?;
    match waits {
        true => Err("the writer that was served still keeps readers out".to_owned()),
        false => Ok(()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_write_locks_need_what_the_documentation_lists_and_no_less() {
    let all = async |store: &Store| {
        everything_read_write(store).await?;
        everything_of_preferred_writers(store).await
    };
    let has_no_lock = async |server: &Server| !server.query::<bool>(&["EXISTS", "shop:k"]).await;
    no_less_than("Read-write locks", all, has_no_lock).await;
}

/// What a service does, on whatever store this is; where something is wrong, what.
async fn at_work(a: &LockClient, b: &LockClient, key: &str) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let guard = a.lock(key).acquire().await.map_err(text)?;
    let waiter = tokio::spawn(b.lock(key).wait(PATIENCE).acquire());
    settle().await;
    if b.inspect(key).await.map_err(text)?.is_none() {
        return Err("it is held".to_owned());
    }
    // As much as a lease has: it has to be asked for.
    guard.ensure(a.lease() * 9 / 10).await.map_err(text)?;
    let released = Instant::now();
    guard.release().await.map_err(text)?;
    waiter
        .await
        .unwrap()
        .map_err(text)?
        .release()
        .await
        .map_err(text)?;
    match released.elapsed() {
        took if took > Duration::from_secs(5) => Err(format!("the waiter was not notified for {took:?}")),
        _ => Ok(()),
    }
}

/// Two clients of a store whose URL names no user.
async fn two_at(
    url: &str,
    options: impl Fn(LockClientBuilder) -> LockClientBuilder,
) -> Result<[LockClient; 2], String> {
    let url = url.replacen("://", "://svc:password@", 1);
    let build = async || {
        let builder = LockClient::builder()
            .url(&url)
            .timeout(PATIENCE)
            .retry_for(PATIENCE);
        options(builder).build().await.map_err(|error| error.to_string())
    };
    Ok([build().await?, build().await?])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_cluster_a_user_needs_what_the_documentation_lists() {
    let flavor = Flavor::from_env();
    let (cluster, headings) = (Cluster::start(flavor).await, in_a_cluster(flavor));
    for server in cluster.servers() {
        give(server, "svc", headings).await;
    }
    let [a, b] = two_at(&cluster.url(), |builder| builder).await.unwrap();
    for server in cluster.servers() {
        server.command(&["SCRIPT", "FLUSH"]).await;
    }
    in_rounds("all is done in time", async || {
        for shard in 0..8 {
            at_work(&a, &b, &format!("shop:{shard}")).await?;
        }
        Ok::<_, String>(())
    })
    .await;
    // In a slot that is on its way, a lock is asked for where it is by now.
    let slot = dlock_tests::slot_of("shop:0");
    let (from, to) = (
        cluster.owner(slot).await,
        cluster.owner((slot + 8192) % 16384).await,
    );
    let guard = a.lock("shop:0").acquire().await.unwrap();
    cluster.begin_move(slot, from, to).await;
    cluster.move_key("shop:0", from, to).await;
    is_confirmed(&guard).await;
    within(SOON, "a release there", guard.release()).await.unwrap();
    for key in cluster.keys_in(slot, from).await {
        cluster.move_key(&key, from, to).await;
    }
    cluster.end_move(slot, from, to).await;
    at_work(&a, &b, "shop:0").await.unwrap();
    // A user that may not listen polls, and a user that may not notify makes others wait.
    let [listen, tell] = match flavor {
        Flavor::Redis62 => ["-subscribe", "-publish"],
        Flavor::Redis | Flavor::Valkey => ["-ssubscribe", "-spublish"],
    };
    for (missing, all_is_well) in [(listen, true), (tell, false)] {
        for server in cluster.servers() {
            give(server, "svc", headings).await;
            server.command(&["ACL", "SETUSER", "svc", missing]).await;
        }
        let [a, b] = two_at(&cluster.url(), |builder| builder).await.unwrap();
        let outcome = at_work(&a, &b, "shop:0").await;
        assert_eq!(outcome.is_ok(), all_is_well, "{missing}: {outcome:?}");
    }
    for server in cluster.servers() {
        give(server, "svc", headings).await;
    }
    // A user that may not ask for the slots cannot connect.
    for server in cluster.servers() {
        let rule = ["ACL", "SETUSER", "svc", "-cluster", "+cluster|info"];
        server.command(&rule).await;
    }
    assert!(two_at(&cluster.url(), |builder| builder).await.is_err());
    for server in cluster.servers() {
        server
            .command(&["ACL", "SETUSER", "svc", "+cluster|slots", "resetkeys", "~shop:*"])
            .await;
    }
    assert!(at_work(&a, &b, "shop:0").await.is_err(), "each slot has a fence");
    // Where the prefix is the client's, the fences have it, too.
    let prefixed = two_at(&cluster.url(), |builder| builder.prefix("shop:")).await;
    let [a, b] = prefixed.unwrap();
    in_rounds("all is done in time", async || at_work(&a, &b, "0").await).await;
}

#[tokio::test]
async fn user_without_the_right_to_publish_is_warned() {
    let flavor = Flavor::from_env();
    let (server, cluster) = (Server::start(flavor).await, Cluster::start(flavor).await);
    let tell = match flavor {
        Flavor::Redis62 => "-publish",
        Flavor::Redis | Flavor::Valkey => "-spublish",
    };
    let shards: Vec<_> = cluster.servers().collect();
    for (url, servers, words, missing) in [
        (server.url(), &[&server][..], &["Locks"][..], "-publish"),
        (cluster.url(), &shards, in_a_cluster(flavor), tell),
    ] {
        for server in servers {
            give(server, "svc", words).await;
        }
        let log = Log::default();
        let listening = log.listen();
        let [a, _] = two_at(&url, |builder| builder).await.unwrap();
        a.lock("shop:0").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(log.count("forbids to tell"), 0, "{missing}");
        for server in servers {
            server.command(&["ACL", "SETUSER", "svc", missing]).await;
        }
        a.lock("shop:0").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(log.count("forbids to tell"), 1, "{missing}");
        drop(listening);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_sentinels_a_user_needs_what_the_documentation_lists() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    for server in replicas.servers() {
        give(server, "svc", &["Locks", "Sentinel"]).await;
    }
    for sentinel in replicas.sentinels() {
        give(sentinel, "watch", &["Sentinel"]).await;
    }
    let as_watch = |builder: LockClientBuilder| builder.sentinel_user("watch").sentinel_password("password");
    let [a, b] = two_at(&replicas.url(), as_watch).await.unwrap();
    in_rounds("all is done in time", async || at_work(&a, &b, "shop:k").await).await;
    replicas.fail_over().await;
    in_rounds("all is done in time", async || at_work(&a, &b, "shop:k").await).await;
    for sentinel in replicas.sentinels() {
        let rule = ["ACL", "SETUSER", "watch", "-sentinel", "+sentinel|sentinels"];
        sentinel.command(&rule).await;
    }
    let impatient = |builder: LockClientBuilder| as_watch(builder).retry_for(Duration::from_secs(1));
    assert!(two_at(&replicas.url(), impatient).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_the_members_of_a_quorum_a_user_needs_what_the_documentation_lists() {
    let flavor = Flavor::from_env();
    let servers = join_all((0..3).map(|_| Server::start(flavor))).await;
    for server in &servers {
        give(server, "svc", &["Locks", "Quorum"]).await;
    }
    let hosts: Vec<_> = servers
        .iter()
        .map(|server| format!("127.0.0.1:{}", server.port()))
        .collect();
    let url = format!("quorum+redis://{}", hosts.join(","));
    let lease = Duration::from_secs(5);
    let short = |builder: LockClientBuilder| builder.max_lease(lease).lease(lease);
    let [a, b] = two_at(&url, short).await.unwrap();
    in_rounds("all is done in time", async || at_work(&a, &b, "shop:k").await).await;
    for missing in ["-info", "resetkeys"] {
        for server in &servers {
            give(server, "svc", &["Locks", "Quorum"]).await;
            server
                .command(&["ACL", "SETUSER", "svc", missing, "~shop:*", "~dlock:fence"])
                .await;
        }
        let outcome = match two_at(&url, short).await {
            Ok([a, _]) => a
                .lock("shop:k")
                .try_acquire()
                .await
                .map_err(|error| error.to_string()),
            Err(error) => Err(error),
        };
        assert!(outcome.is_err(), "{missing}");
    }
}

/// With the password of the default user it could do everything.
#[tokio::test]
async fn user_of_a_service_reads_neither_passwords_nor_the_commands_of_others() {
    let flavor = Flavor::from_env();
    let server = Server::builder(flavor).password("secret").start().await;
    let all = headings("svc");
    assert!(all.len() > 15 && all.contains(&"The doctor"), "{all:?}");
    for heading in all {
        if flavor != Flavor::Redis62 || heading != "Sharded channels" {
            give(&server, "svc", &[heading]).await;
        }
    }
    for command in [
        &["CONFIG", "GET", "requirepass"][..],
        &["CONFIG", "GET", "*"],
        &["SLOWLOG", "GET"],
        &["ACL", "GETUSER", "default"],
        &["MONITOR"],
    ] {
        let client = redis::Client::open(server.url_as("svc", "password")).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let (name, rest) = command.split_first().unwrap();
        let answer: redis::RedisResult<redis::Value> =
            redis::cmd(name).arg(rest).query_async(&mut connection).await;
        let error = answer.expect_err(name);
        assert_eq!(error.code(), Some("NOPERM"), "{command:?}: {error}");
    }
}
