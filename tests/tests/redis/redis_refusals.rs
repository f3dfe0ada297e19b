//! A server that refuses for a while: it is full, cannot save, lacks replicas, or was made a replica for a moment. New
//! locks are refused there at once; what is held is renewed and released as soon as the server lets it, of every kind.

use std::time::Duration;

use dlock::record::{ClaimReply, OwnerReply};
use dlock::store::{Outcome, Reason};
use dlock::{Error, Held, LockClient, LockGuard, LockKey, LockKind, OnceError, OnceReply};
use dlock_tests::faults::{LEASE, PATIENCE, SLACK, SOON, answered, within};
use dlock_tests::records::{ask, ask_for, by, claimed, fresh_key};
use dlock_tests::{Flavor, Server, eventually};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const MIN_HOLD: Duration = Duration::from_secs(60);
const KINDS: [LockKind; 5] = [
    LockKind::Mutex,
    LockKind::Fair,
    LockKind::Fenced,
    LockKind::Read,
    LockKind::Write,
];

/// What makes a server refuse, and what ends that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Full,
    CannotSave,
    LacksReplicas,
    IsReplica,
}

impl Trouble {
    const ALL: [Trouble; 4] = [
        Trouble::Full,
        Trouble::CannotSave,
        Trouble::LacksReplicas,
        Trouble::IsReplica,
    ];

    async fn server() -> Server {
        Server::builder(Flavor::from_env())
            .maxmemory_policy("noeviction")
            .start()
            .await
    }

    async fn begin(self, server: &Server) {
        match self {
            Trouble::Full => server.command(&["CONFIG", "SET", "maxmemory", "1"]).await,
            Trouble::LacksReplicas => {
                server
                    .command(&["CONFIG", "SET", "min-replicas-to-write", "1"])
                    .await
            }
            Trouble::IsReplica => server.command(&["REPLICAOF", "127.0.0.1", "1"]).await,
            Trouble::CannotSave => {
                server.command(&["CONFIG", "SET", "save", "3600 1"]).await;
                server
                    .command(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "yes"])
                    .await;
                // Where the file belongs there is a directory.
                std::fs::create_dir_all(server.data_dir().join("dump.rdb/taken")).unwrap();
                server.command(&["BGSAVE"]).await;
                eventually("a save has failed", || async {
                    let info: String = server.query(&["INFO", "persistence"]).await;
                    info.contains("rdb_last_bgsave_status:err")
                })
                .await;
                redis::Value::Okay
            }
        };
    }

    async fn end(self, server: &Server) {
        match self {
            Trouble::Full => server.command(&["CONFIG", "SET", "maxmemory", "0"]).await,
            Trouble::LacksReplicas => {
                server
                    .command(&["CONFIG", "SET", "min-replicas-to-write", "0"])
                    .await
            }
            Trouble::IsReplica => server.command(&["REPLICAOF", "NO", "ONE"]).await,
            Trouble::CannotSave => server.command(&["CONFIG", "SET", "save", ""]).await,
        };
    }

    /// What the server says then.
    fn says(self) -> &'static str {
        match self {
            Trouble::Full => "OOM",
            Trouble::CannotSave => "MISCONF",
            Trouble::LacksReplicas => "replicas",
            Trouble::IsReplica => "read-only replica",
        }
    }
}

async fn client(server: &Server) -> LockClient {
    let builder = LockClient::builder().url(server.url()).lease(LEASE);
    builder
        .timeout(PATIENCE)
        .retry_for(PATIENCE)
        .build()
        .await
        .unwrap()
}

fn key(kind: impl std::fmt::Display) -> LockKey {
    LockKey::new(kind.to_string()).unwrap()
}

/// Sees by the server's own word that it is held.
async fn confirmed(held: &Held, what: impl std::fmt::Display) {
    // More than any lease has, so that the server has to be asked.
    let outcome = answered(|| held.ensure(1000 * LEASE)).await;
    assert!(
        matches!(outcome, Err(Error::InvalidOption { .. })) && held.is_held(),
        "{what}: {outcome:?}"
    );
}

fn assert_refused(error: &Error, trouble: Trouble) {
    let says = error.to_string();
    assert!(
        matches!(error, Error::Refused { .. }) && says.contains(trouble.says()),
        "{error:?}"
    );
}

/// Renewals and releases need no memory: a full server must not cost a holder its lock, and it gets no
/// emptier by refusing releases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_are_renewed_and_released_on_a_full_server() {
    let server = Trouble::server().await;
    let client = client(&server).await;
    let mut guards = Vec::new();
    for kind in KINDS {
        let lock = |name: String| client.lock(key(name)).kind(kind);
        guards.push(lock(format!("{kind}")).acquire().await.unwrap());
        guards.push(
            lock(format!("kept {kind}"))
                .min_hold(MIN_HOLD)
                .acquire()
                .await
                .unwrap(),
        );
    }
    let all = client.multi(["a", "b"]).acquire().await.unwrap();
    let semaphore = client.semaphore("permits").permits(9);
    let several = semaphore.acquire_many(2).await.unwrap();
    let kept = semaphore.clone().min_hold(MIN_HOLD).acquire().await.unwrap();
    // Permits whose holder is gone come back with the next step, whatever that is.
    let expired = semaphore.clone().fixed_lease(200 * MS).acquire().await.unwrap();
    let unowned = client.unowned_semaphore("unowned").permits(3);
    unowned.acquire_many(2).await.unwrap();
    let latch = client.latch("latch");
    latch.try_set_count(2).await.unwrap();
    eventually("a permit has run out", || async { !expired.is_held() }).await;
    tokio::time::sleep(300 * MS).await;

    Trouble::Full.begin(&server).await;
    assert_refused(&client.lock("k").try_acquire().await.unwrap_err(), Trouble::Full);
    confirmed(&several.held(), "permits").await;
    confirmed(&all.held(), "several locks").await;
    for guard in &guards {
        confirmed(&guard.held(), guard.key()).await;
    }
    several.release().await.unwrap();
    kept.release().await.unwrap();
    assert_eq!(semaphore.status().await.unwrap().unwrap().held, 1);
    for guard in guards {
        let key = guard.key().clone();
        let released = within(SECOND, format!("the release of {key}"), guard.release()).await;
        released.unwrap_or_else(|error| panic!("{key}: {error}"));
    }
    all.release().await.unwrap();
    unowned.release_many(2).await.unwrap();
    assert_eq!(unowned.available().await.unwrap(), 3);
    assert_eq!(latch.count_down().await.unwrap(), 1);
    assert_eq!(latch.count_down().await.unwrap(), 0);
    for kind in KINDS {
        let holders = client.holders(key(format!("kept {kind}"))).await.unwrap();
        let [holder] = &holders[..] else {
            panic!("{kind}: {holders:?}")
        };
        assert!(
            holder.holds == 0 && holder.remaining <= Some(MIN_HOLD),
            "{holder:?}"
        );
        assert!(client.inspect(key(kind)).await.unwrap().is_none(), "{kind}");
    }
    assert_refused(&client.lock("k").try_acquire().await.unwrap_err(), Trouble::Full);
}

/// A server that has no room takes no new work, and the results of work that is done: else it would be done again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_extended_completed_and_released_on_a_full_server() {
    let server = Trouble::server().await;
    let records = client(&server).await.records().unwrap();
    let keys: Vec<_> = (0..4).map(|_| fresh_key()).collect();
    let (done, _) = claimed(&records, ask(&keys[0]), 1).await;
    let (large, _) = claimed(&records, ask(&keys[1]), 1).await;
    let (released, _) = claimed(&records, ask(&keys[2]), 1).await;
    claimed(&records, ask_for(&keys[3], MS, DAY), 1).await;
    tokio::time::sleep(20 * MS).await;
    let (taken_over, _) = claimed(&records, ask(&keys[3]), 2).await;

    Trouble::Full.begin(&server).await;
    let refused = records.claim(ask(&fresh_key())).await.unwrap_err();
    assert!(
        refused.reason == Reason::RefusedForNow && refused.message.contains("OOM"),
        "{refused:?}"
    );
    for (key, token) in [(&keys[0], &done), (&keys[1], &large), (&keys[3], &taken_over)] {
        assert_eq!(
            records.extend(key, token, DAY, DAY).await.unwrap(),
            OwnerReply::Done
        );
        let again = records.claim(by(token, ask(key))).await.unwrap();
        assert!(matches!(again, ClaimReply::Claimed { .. }), "{again:?}");
    }
    let result = vec![7; 64 * 1024];
    assert_eq!(
        records
            .complete(&keys[0], &done, result.clone(), DAY)
            .await
            .unwrap(),
        OwnerReply::Done
    );
    let replayed = records.claim(ask(&keys[0])).await.unwrap();
    assert!(matches!(replayed, ClaimReply::Completed { response } if response == result));
    // What may fill it further is refused, and something small takes its place.
    let refused = records
        .complete(&keys[1], &large, vec![7; 64 * 1024 + 1], DAY)
        .await
        .unwrap_err();
    assert!(
        refused.reason == Reason::RefusedForNow && refused.outcome == Outcome::NotDone,
        "{refused:?}"
    );
    assert_eq!(
        records.complete(&keys[1], &large, vec![7], DAY).await.unwrap(),
        OwnerReply::Done
    );
    assert_eq!(
        records.release(&keys[2], &released).await.unwrap(),
        OwnerReply::Done
    );
    assert_eq!(
        records.release(&keys[3], &taken_over).await.unwrap(),
        OwnerReply::Done
    );
    Trouble::Full.end(&server).await;
    let (_, fence) = claimed(&records, ask(&keys[2]), 1).await;
    assert!(fence > 0);
    claimed(&records, ask(&keys[3]), 2).await;
}

/// A full server takes no result of more than 64 KiB, but that there was one: finished work is not done again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_work_whose_result_a_full_server_refuses_is_not_done_again() {
    let server = Trouble::server().await;
    let client = client(&server).await;
    let work = client.once("report");
    let done = work.run(async |_| {
        Trouble::Full.begin(&server).await;
        Ok::<_, String>("x".repeat(64 * 1024))
    });
    let done = within(SECOND, "the work", done).await;
    assert!(matches!(done, Ok(OnceReply::Ran(_))), "{done:?}");
    let again = work.run(async |_| -> Result<String, String> { panic!("it was done") });
    let again = again.await;
    assert!(matches!(again, Err(OnceError::ResultUnavailable)), "{again:?}");
}

/// A release that the server refuses is repeated until the server takes it, and a waiter has the lock then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_is_refused_for_a_moment_is_repeated() {
    for trouble in Trouble::ALL {
        let server = Trouble::server().await;
        let (a, b) = (client(&server).await, client(&server).await);
        let mut guards = Vec::new();
        for kind in KINDS {
            guards.push(a.lock(key(kind)).kind(kind).acquire().await.unwrap());
        }
        let all = a.multi(["a", "b"]).acquire().await.unwrap();
        let permit = a.semaphore("permits").permits(1).acquire().await.unwrap();
        let unowned = a.unowned_semaphore("unowned").permits(1);
        unowned.acquire().await.unwrap();
        let latch = a.latch("latch");
        latch.try_set_count(1).await.unwrap();

        trouble.begin(&server).await;
        // Where a replica took the place of the master, the new master is looked for at the same address instead.
        if trouble != Trouble::IsReplica {
            let refused = b.lock("k").try_acquire().await;
            assert_refused(&refused.expect_err(trouble.says()), trouble);
        }
        // Some are awaited and some are not.
        drop((all, permit));
        let released = join_all(guards.into_iter().map(LockGuard::release));
        let released = tokio::spawn(released);
        let given = tokio::spawn(async move { unowned.release().await });
        let counted = tokio::spawn(async move { latch.count_down().await });
        tokio::time::sleep(300 * MS).await;
        trouble.end(&server).await;

        // Far less than a lease.
        let waiters = KINDS.map(|kind| {
            let lock = b.lock(key(kind)).kind(if kind == LockKind::Read {
                LockKind::Write
            } else {
                kind
            });
            lock.wait(SOON + SLACK).acquire()
        });
        for (kind, waiter) in KINDS.into_iter().zip(join_all(waiters).await) {
            drop(waiter.unwrap_or_else(|error| panic!("{trouble:?}, {kind}: {error}")));
        }
        drop(b.multi(["a", "b"]).wait(SOON + SLACK).acquire().await.unwrap());
        drop(b.semaphore("permits").wait(SOON + SLACK).acquire().await.unwrap());
        for outcome in released.await.unwrap() {
            outcome.unwrap_or_else(|error| panic!("{trouble:?}: {error}"));
        }
        given
            .await
            .unwrap()
            .unwrap_or_else(|error| panic!("{trouble:?}: {error}"));
        assert_eq!(counted.await.unwrap().unwrap(), 0, "{trouble:?}");
        assert_eq!(b.unowned_semaphore("unowned").available().await.unwrap(), 1);
    }
}
