//! Locks that count only when replicas have acknowledged them (`min_replicas`): with replicas that answer, that stand
//! still, whose answer gets lost, and that become the master.

use std::time::{Duration, Instant};

use dlock::{Error, HoldState, LockClient, LockClientBuilder, LockGuard, LockKind};
use dlock_tests::faults::{
    LEASE, PATIENCE, RETRY_FOR, SLACK, SOON, TIMEOUT, answered, built, hasty_builder, in_rounds, is_back,
    is_confirmed, is_free, is_free_soon, patient, step, within,
};
use dlock_tests::{
    Cluster, Command, Flavor, Proxy, Replicas, Server, ServerBuilder, Store, Swallow, eventually, settle,
};
use futures_util::future::join_all;

/// What a replica that answers is given.
const LONG: Duration = Duration::from_secs(30);
/// What a replica that stands still is given.
const SHORT: Duration = Duration::from_millis(300);

/// A master, and one replica of it.
struct Pair {
    master: Store,
    replica: Server,
    proxy: Proxy,
}

impl Pair {
    async fn start() -> Pair {
        Pair::start_with(|builder| builder).await
    }

    async fn start_with(options: impl FnOnce(ServerBuilder) -> ServerBuilder) -> Pair {
        let flavor = Flavor::from_env();
        let builder = Server::builder(flavor)
            .config("repl-diskless-sync-delay", "0")
            // One that stands still is not given up while a test looks.
            .config("repl-timeout", "600");
        let master = options(builder).start().await;
        let replica = Server::builder(flavor).replica_of(master.addr()).start().await;
        let pair = Pair {
            proxy: Proxy::start(master.addr()),
            master: Store::Server(Box::new(master)),
            replica,
        };
        eventually("the replica is in step", || async {
            let info: String = pair.master.as_server().query(&["INFO", "replication"]).await;
            info.contains("state=online")
        })
        .await;
        pair
    }

    fn builder(&self, within: Duration) -> LockClientBuilder {
        hasty_builder(&self.proxy.url()).min_replicas(1, within)
    }

    async fn client(&self, within: Duration) -> LockClient {
        built(|| self.builder(within)).await
    }

    /// One that asks no replicas and is never late.
    async fn beside(&self) -> LockClient {
        patient(&self.master.as_server().url()).await
    }
}

/// Each of the locks is held by its guard, and busy for another client until the guard is dropped.
async fn all_are_still_held(other: &LockClient, keys: &[String], guards: Vec<LockGuard>) {
    for (key, guard) in keys.iter().zip(guards) {
        let taken = answered(|| other.lock(&**key).try_acquire()).await;
        assert!(taken.is_err_and(|error| error.is_busy()), "{key} was lost");
        assert!(guard.is_held(), "{key} is lost to its holder");
        drop(guard);
        is_free_soon(other, key).await;
    }
}

fn is_wait(command: &Command) -> bool {
    command.is("WAIT")
}

fn is_not_replicated<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::NotReplicated { acknowledged: 0, wanted: 1, within, .. }) if *within == SHORT)
}

/// Asks until a replica that stood still has caught up.
async fn replicated<F: Future<Output = Result<LockGuard, Error>>>(asking: impl Fn() -> F) -> LockGuard {
    let begun = Instant::now();
    loop {
        match answered(&asking).await {
            Ok(guard) => return guard,
            Err(Error::NotReplicated { .. }) if begun.elapsed() < PATIENCE => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquires_and_renewals_are_acknowledged_behind_each_other_on_a_connection_of_their_own() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(LONG).await, pair.beside().await);
    pair.proxy.forget();
    let guard = answered(|| a.lock("k").acquire()).await.unwrap();
    // The replica has it, with its fencing token, by the time at which it is acquired here.
    let known = pair.replica.keys().await;
    assert_eq!(known, ["dlock:fence", "k"], "the replica has not heard of it");
    is_confirmed(&guard).await;
    let sent = pair.proxy.commands();
    let on: Vec<_> = sent
        .iter()
        .filter(|sent| is_wait(&sent.command))
        .map(|sent| sent.connection)
        .collect();
    assert!(on.len() >= 2 && on.iter().all(|one| *one == on[0]), "{sent:?}");
    for name in ["acquire", "renew"] {
        let named = step(name);
        let at = sent.iter().position(|sent| named(&sent.command)).expect(name);
        assert_eq!(sent[at].connection, on[0], "{name} goes another way than WAIT");
        let behind = sent[at + 1..].iter().find(|sent| sent.connection == on[0]);
        assert!(
            is_wait(&behind.expect("a WAIT").command),
            "{name} is not followed by WAIT"
        );
    }
    guard.release().await.unwrap();
    is_free(&b, "k").await;
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_lock_is_acknowledged_or_undone() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(SHORT).await, pair.beside().await);
    let kinds = [
        LockKind::Mutex,
        LockKind::Fair,
        LockKind::Fenced,
        LockKind::Read,
        LockKind::Write,
    ];
    for stopped in [false, true] {
        if stopped {
            pair.replica.stop();
        }
        for kind in kinds {
            let key = format!("k:{kind}");
            let lock = a.lock(&*key).kind(kind).wait(PATIENCE);
            if !stopped {
                replicated(|| lock.acquire()).await.release().await.unwrap();
                continue;
            }
            for had in [
                answered(|| lock.try_acquire()).await,
                answered(|| lock.acquire()).await,
            ] {
                assert!(is_not_replicated(&had), "{kind}: {had:?}");
            }
            let free = b
                .lock(&*key)
                .kind(kind)
                .wait(SOON + SLACK)
                .acquire()
                .await
                .unwrap();
            free.release().await.unwrap();
        }
        let (semaphore, multi) = (a.semaphore("s"), a.multi(["m1", "m2"]));
        if stopped {
            let permits = answered(|| semaphore.try_acquire_many(2)).await;
            assert!(is_not_replicated(&permits), "{permits:?}");
            let several = answered(|| multi.acquire()).await;
            assert!(is_not_replicated(&several), "{several:?}");
            for key in ["m1", "m2"] {
                is_free_soon(&b, key).await;
            }
            eventually("the permits are back", || async {
                b.semaphore("s").available().await.unwrap() == 3
            })
            .await;
        } else {
            semaphore.set_permits(3).await.unwrap();
            drop(
                in_rounds("permits are acquired", async || {
                    semaphore.try_acquire_many(2).await
                })
                .await,
            );
            drop(in_rounds("all are acquired", async || multi.try_acquire().await).await);
        }
    }
    a.semaphore("s").delete().await.unwrap();
    let _fenced = pair
        .master
        .as_server()
        .command(&["DEL", "redisson_lock_token:{k:fenced}"])
        .await;
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_too_few_replicas_hear_of_is_undone_at_once_and_says_so() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(SHORT).await, pair.beside().await);
    pair.replica.stop();
    pair.proxy.forget();
    // However long it would wait.
    let had = answered(|| {
        within(
            SHORT + TIMEOUT,
            "the acquire",
            a.lock("k").wait(PATIENCE).acquire(),
        )
    })
    .await;
    assert!(is_not_replicated(&had), "{had:?}");
    let said = had.unwrap_err().to_string();
    assert_eq!(
        said,
        "the acquire of lock \"k\" was acknowledged by 0 of the 1 replicas that min_replicas wants, within 300ms"
    );
    is_free_soon(&b, "k").await;
    // Nor does its own process find it busy.
    let again = answered(|| a.lock("k").try_acquire()).await;
    assert!(is_not_replicated(&again), "{again:?}");
    pair.master.assert_clean(&[&a, &b]).await;
    pair.replica.cont();
    let guard = replicated(|| a.lock("k").try_acquire()).await;
    is_confirmed_by_replicas(&guard).await;
    guard.release().await.unwrap();
    pair.master.assert_clean(&[&a, &b]).await;
}

/// As [`is_confirmed`], once the replica has caught up.
async fn is_confirmed_by_replicas(guard: &LockGuard) {
    eventually("it is held without a doubt", || async {
        // More than any lease has, so that the server has to be asked.
        let outcome = guard.ensure(1000 * LEASE).await;
        assert!(guard.is_held(), "it was lost: {outcome:?}");
        matches!(outcome, Err(Error::InvalidOption { .. })) && guard.state() == HoldState::Held
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_waits_for_replicas_delays_no_other_call() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(LONG).await, pair.beside().await);
    let guard = replicated(|| a.lock("held").acquire()).await;
    pair.replica.stop();
    pair.proxy.forget();
    let slow = tokio::spawn(a.lock("k").acquire());
    eventually("it waits for replicas", || async {
        pair.proxy.count(is_wait) > 0
    })
    .await;
    let looked = answered(|| a.inspect("held")).await.unwrap();
    assert!(looked.is_some());
    guard.release().await.unwrap();
    is_free(&b, "held").await;
    // A second one waits for the first one's replicas, and is not lost.
    let next = tokio::spawn(a.lock("j").acquire());
    assert!(
        !slow.is_finished() && !next.is_finished(),
        "no replica has said anything"
    );
    pair.replica.cont();
    for one in [slow, next] {
        one.await.unwrap().unwrap().release().await.unwrap();
    }
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_not_acknowledged_is_a_doubt_and_in_the_end_the_loss_comes_in_time() {
    in_rounds("the replica stands still between two renewals", not_acknowledged).await;
}

/// One round; what was missed where the machine was too slow for it.
async fn not_acknowledged() -> Result<(), &'static str> {
    /// Renewed every four seconds.
    const HELD: Duration = Duration::from_secs(12);
    let pair = Pair::start().await;
    let (a, b) = (pair.client(SHORT).await, pair.beside().await);
    let guard = replicated(|| a.lock("k").lease(HELD).acquire()).await;
    pair.replica.stop();
    eventually("it is in doubt", || async { guard.state() == HoldState::Suspect }).await;
    // The replica comes back: nothing was lost.
    pair.replica.cont();
    eventually("it is held again", || async {
        assert!(guard.is_held(), "lost though the replica is back");
        guard.state() == HoldState::Held && guard.remaining() > HELD * 3 / 4
    })
    .await;
    pair.replica.stop();
    let remaining = guard.remaining();
    let until = Instant::now() + remaining;
    if remaining < HELD * 2 / 3 + SHORT {
        return Err("a renewal may be on its way when the replica stands still");
    }
    loop {
        // Before the guard is asked: what it says is true at this moment or later.
        let now = Instant::now();
        if matches!(guard.state(), HoldState::Lost(_)) {
            break;
        }
        assert!(now < until, "held after the last acknowledged lease");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    within(SOON, "it is told", guard.lost()).await;
    // The master's own lease was renewed all the while: no other client had the lock before the holder was told.
    let left = b
        .inspect("k")
        .await
        .unwrap()
        .expect("it is held on the master")
        .remaining;
    assert!(left.is_some_and(|left| left > Duration::ZERO), "{left:?}");
    assert!(guard.release().await.unwrap_err().is_lost());
    is_free_soon(&b, "k").await;
    pair.master.assert_clean(&[&a, &b]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_the_acquire_or_of_the_replicas_leaves_nothing_behind() {
    /// What a step takes whose reply hangs.
    const ENOUGH: Duration = Duration::from_secs(4);
    let lost = [Swallow::Hang, Swallow::Cut].into_iter();
    let cases = lost.flat_map(|then| [(then, false), (then, true)]);
    join_all(cases.map(async |(then, wait)| {
        in_rounds("the acquire is sent in time", async || {
            let pair = Pair::start().await;
            let (a, b) = (pair.client(ENOUGH).await, pair.beside().await);
            let struck = move |command: &Command| match wait {
                true => is_wait(command),
                false => step("acquire")(command),
            };
            let fault = pair.proxy.swallow(1, then, struck);
            let most = ENOUGH + 2 * TIMEOUT;
            let once = within(most, "try_acquire", a.lock("k").try_acquire()).await;
            if !fault.fired() {
                return Err("its time was over before");
            }
            assert!(
                matches!(once, Err(Error::OutcomeUnknown { .. })),
                "{then:?}, WAIT {wait}: {once:?}"
            );
            is_free_soon(&b, "k").await;
            pair.proxy.swallow(1, then, struck);
            let guard = answered(|| a.lock("k").acquire()).await.unwrap();
            is_confirmed(&guard).await;
            guard.release().await.unwrap();
            is_free(&b, "k").await;
            pair.master.assert_clean(&[&a, &b]).await;
            Ok(())
        })
        .await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_that_is_dropped_while_replicas_are_asked_leaves_nothing_behind() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(LONG).await, pair.beside().await);
    pair.replica.stop();
    pair.proxy.forget();
    let dropped = tokio::spawn(a.lock("k").acquire());
    eventually("replicas are asked", || async { pair.proxy.count(is_wait) > 0 }).await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    pair.replica.cont();
    is_free_soon(&b, "k").await;
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_of_a_key_keep_their_order_on_two_connections() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(LONG).await, pair.client(LONG).await);
    // Others keep the connection of the acknowledged steps busy.
    let busy: Vec<_> = (0..4)
        .map(|n| {
            let lock = b.lock(format!("other:{n}"));
            let a = a.clone();
            tokio::spawn(async move {
                for i in 0..100 {
                    drop(answered(|| lock.acquire()).await.unwrap());
                    drop(
                        answered(|| a.lock(format!("more:{n}:{i}")).acquire())
                            .await
                            .unwrap(),
                    );
                }
            })
        })
        .collect();
    for round in 0..200 {
        let guard = answered(|| a.lock("k").try_acquire()).await;
        // A drop, then an acquire in the next line.
        let guard = guard.unwrap_or_else(|error| panic!("round {round}: {error}"));
        drop(guard);
    }
    for task in busy {
        task.await.unwrap();
    }
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_and_an_acquire_of_a_key_do_not_pass_each_other_on_two_connections() {
    let pair = Pair::start().await;
    let (a, b) = (pair.client(LONG).await, pair.beside().await);
    let guard = replicated(|| a.lock("k").acquire()).await;
    // A release on the usual connection, on its way for a while.
    pair.replica.stop();
    pair.proxy.forget();
    let other = tokio::spawn(a.lock("other").acquire());
    eventually("replicas are asked", || async { pair.proxy.count(is_wait) > 0 }).await;
    let held = pair.proxy.hold(1, step("release"));
    drop(guard);
    held.caught().await;
    pair.replica.cont();
    drop(other.await.unwrap().unwrap());
    let next = tokio::spawn(a.lock("k").try_acquire());
    settle().await;
    held.release();
    let guard = next.await.unwrap().expect("its own release comes first");
    guard.release().await.unwrap();
    // An acquire on the other one, and its release when it is dropped.
    let held = pair.proxy.hold(1, step("acquire"));
    let dropped = tokio::spawn(a.lock("k").acquire());
    held.caught().await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    settle().await;
    held.release();
    held.answered().await;
    is_free_soon(&b, "k").await;
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_without_the_right_to_wait_is_told_so() {
    let pair = Pair::start_with(|builder| builder.acl("svc on >pw ~* &* +@all -wait")).await;
    let url = pair.proxy.url_as("svc", "pw");
    let refused = answered(|| hasty_builder(&url).min_replicas(1, LONG).build())
        .await
        .unwrap_err();
    assert!(
        matches!(refused, Error::Refused { .. }) && refused.to_string().contains("min_replicas needs WAIT"),
        "{refused}"
    );
    // And when it is forbidden later.
    let master = pair.master.as_server();
    master.command(&["ACL", "SETUSER", "svc", "+wait"]).await;
    let a = built(|| hasty_builder(&url).min_replicas(1, LONG)).await;
    replicated(|| a.lock("k").acquire())
        .await
        .release()
        .await
        .unwrap();
    master.command(&["ACL", "SETUSER", "svc", "-wait"]).await;
    let refused = answered(|| a.lock("k").wait(RETRY_FOR).acquire())
        .await
        .unwrap_err();
    // The server had it, and was told to release it.
    assert!(
        matches!(refused, Error::OutcomeUnknown { .. })
            && refused.to_string().contains("min_replicas needs WAIT"),
        "{refused}"
    );
    let b = pair.beside().await;
    is_free_soon(&b, "k").await;
    is_back(&a).await;
    pair.master.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn urls_say_it_too_and_stores_without_replicas_refuse_it() {
    let pair = Pair::start().await;
    pair.replica.stop();
    let url = format!("{}?min_replicas=1&min_replicas_within=300ms", pair.proxy.url());
    let a = built(|| LockClient::builder().url(&url).timeout(PATIENCE)).await;
    let had = a.lock("k").try_acquire().await;
    assert!(is_not_replicated(&had), "{had:?}");
    for (url, why) in [
        ("memory://?min_replicas=1", "a store in memory has no replicas"),
        (
            "quorum+redis://a,b,c?min_replicas=1",
            "a majority of its servers has each lock itself",
        ),
        ("redis://localhost?min_replicas=0", "it must be at least 1"),
        (
            "redis://localhost?min_replicas_within=1s",
            "it has no effect without min_replicas",
        ),
        (
            "redis://localhost?min_replicas=1&min_replicas_within=0s",
            "it must be at least 1ms",
        ),
        (
            "redis://localhost?min_replicas=1&min_replicas_within=11s",
            "a third of the lease, which is 30s",
        ),
        (
            "redis://localhost?min_replicas=one",
            "option min_replicas is no number, as in min_replicas=1",
        ),
    ] {
        let refused = LockClient::connect(url).await.unwrap_err();
        let said = refused.to_string();
        assert!(
            matches!(refused, Error::InvalidOption { .. } | Error::InvalidUrl { .. }) && said.contains(why),
            "{url}: {said}"
        );
    }
    let own = LockClient::builder().store(dlock::stores::memory::MemoryStore::new());
    let refused = own.min_replicas(1, SHORT).build().await.unwrap_err();
    assert!(
        refused.to_string().contains("not with a store of your own"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_loses_no_lock_that_all_replicas_acknowledged() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    let builder = || hasty_builder(&replicas.url()).min_replicas(2, LONG);
    let (a, b) = (built(builder).await, patient(&replicas.url()).await);
    let master = replicas.master().await;
    let keys: Vec<_> = (0..20).map(|n| format!("k:{n}")).collect();
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(replicated(|| a.lock(&**key).acquire()).await);
    }
    // The last answer has come a moment ago.
    master.kill();
    eventually("another one is the master", || async {
        replicas.master().await.port() != master.port()
    })
    .await;
    all_are_still_held(&b, &keys, guards).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_without_a_replica_is_not_acquired_where_a_fail_over_would_lose_it() {
    let replicas = Replicas::start(Flavor::from_env()).await;
    let (a, b) = (
        built(|| hasty_builder(&replicas.url()).min_replicas(1, SHORT)).await,
        patient(&replicas.url()).await,
    );
    let master = replicas.master().await;
    let before = master.port();
    let others = || replicas.servers().iter().filter(|server| server.port() != before);
    others().for_each(|server| server.stop());
    // What is on its way to them would arrive later.
    master.command(&["CLIENT", "KILL", "TYPE", "replica"]).await;
    let without = answered(|| b.lock("without").acquire()).await.unwrap();
    let with = answered(|| a.lock("with").acquire()).await;
    assert!(is_not_replicated(&with), "{with:?}");
    master.kill();
    others().for_each(|server| server.cont());
    eventually("another one is the master", || async {
        replicas.master().await.port() != before
    })
    .await;
    // Which is what it is for.
    eventually("the one without is lost", || async { !without.is_held() }).await;
    is_free_soon(&b, "with").await;
    // The new master has not received its token either.
    let next = answered(|| b.lock("without").acquire()).await.unwrap();
    assert!(
        next.fencing_token() > without.fencing_token(),
        "{next:?} after {without:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_in_a_cluster_loses_no_lock_that_its_replica_acknowledged() {
    let cluster = Cluster::start(Flavor::from_env()).await;
    let (a, b) = (
        built(|| hasty_builder(&cluster.url()).min_replicas(1, LONG)).await,
        built(|| hasty_builder(&cluster.url())).await,
    );
    let keys: Vec<_> = (0..60).map(|n| format!("k:{n}")).collect();
    let mut guards = Vec::new();
    for key in &keys {
        guards.push(replicated(|| a.lock(&**key).acquire()).await);
    }
    let (master, slot) = (cluster.server(0), 0);
    master.kill();
    eventually("its replica has taken over", || async {
        cluster.owner(slot).await.port() != master.port()
    })
    .await;
    all_are_still_held(&b, &keys, guards).await;
}
