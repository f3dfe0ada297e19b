//! Work that is done once, by a paused clock: by one of many, again after a failure or a crash as the policies say, and
//! never again while its result is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use dlock::record::OnOrphan;
use dlock::stores::memory::MemoryStore;
use dlock::{Error, LockClient, NotRun, OnFailure, OnceClaim, OnceError, OnceReply, SlotReply};
use dlock_tests::paused_for;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all, pending};
use tokio::time::{Instant, sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

type Reply<T> = Result<OnceReply<T>, OnceError<String>>;

/// The paused clock, and a virtual limit.
fn paused(test: impl Future<Output = ()>) {
    paused_for(10 * DAY, test);
}

async fn clients<const N: usize>() -> [LockClient; N] {
    let store = MemoryStore::new();
    let mut all = Vec::new();
    for _ in 0..N {
        all.push(LockClient::builder().store(store.clone()).build().await.unwrap());
    }
    all.try_into().unwrap_or_else(|_| unreachable!())
}

fn earlier<T>(reply: Reply<T>) -> T {
    match reply {
        Ok(OnceReply::Earlier(value)) => value,
        Ok(_) => panic!("it was not done before"),
        Err(error) => panic!("{error}"),
    }
}

fn ran<T>(reply: Reply<T>) -> T {
    match reply {
        Ok(OnceReply::Ran(value)) => value,
        Ok(_) => panic!("it did not run here"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn first_call_runs_and_later_ones_get_the_result() {
    paused(async {
        let [a, b] = clients().await;
        let result = ("text".to_owned(), vec![1_u64, 2], Some(-1_i8));
        let work = async |_| Ok(result.clone());
        assert_eq!(ran(a.once("w").run(work).await), result);
        for client in [&a, &b] {
            let done = client.once("w");
            let again: Reply<(String, Vec<u64>, Option<i8>)> =
                done.run(async |_| panic!("it was done before")).await;
            assert_eq!(earlier(again), result);
        }
        // Other names are other work, also where they need more than a record's name can have.
        for name in ["w2", "W", "w:1", "w:2", &"w".repeat(500), "-", "ä"] {
            assert_eq!(ran(b.once(name).run(async |_| Ok(name.len())).await), name.len());
        }
        // And they are no locks.
        assert!(a.list("").await.unwrap().is_empty());
        assert!(a.lock("w").try_acquire().await.is_ok());
    });
}

#[test]
fn of_many_that_wait_one_runs_and_all_have_its_result() {
    paused(async {
        let clients = clients::<3>().await;
        let (runs, at_once) = (AtomicU32::new(0), AtomicU32::new(0));
        let calls = (0..60).map(|n: usize| {
            let once = clients[n % 3].once("w").wait(DAY);
            let (runs, at_once) = (&runs, &at_once);
            async move {
                sleep(n as u32 % 7 * 10 * MS).await;
                let reply: Reply<u32> = once
                    .run(async |_| {
                        assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0);
                        sleep(100 * SEC).await;
                        at_once.fetch_sub(1, Ordering::SeqCst);
                        Ok(runs.fetch_add(1, Ordering::SeqCst))
                    })
                    .await;
                reply.unwrap().into_result()
            }
        });
        let began = Instant::now();
        assert_eq!(join_all(calls).await, vec![Some(0); 60]);
        assert!(began.elapsed() < 101 * SEC, "waiters are notified");
    });
}

#[test]
fn call_that_does_not_wait_learns_that_the_work_runs_elsewhere() {
    paused(async {
        let [a, b] = clients().await;
        let work = tokio::spawn(a.once("w").lease(3 * SEC).run(async |_| {
            sleep(60 * SEC).await;
            Ok::<_, String>(1)
        }));
        // It is renewed for as long as it runs.
        for _ in 0..59 {
            sleep(SEC).await;
            let once = b.once("w").lease(3 * SEC);
            let reply: Reply<u8> = once.run(async |_| panic!("it runs elsewhere")).await;
            match reply.unwrap() {
                OnceReply::Elsewhere {
                    attempt, remaining, ..
                } => {
                    assert!(
                        attempt == 1 && remaining <= 3 * SEC && remaining >= 2 * SEC,
                        "{remaining:?}"
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        // A wait that is too short ends with the same answer.
        let short = b.once("w").wait(500 * MS);
        let reply: Reply<u8> = short.run(async |_| panic!("it runs elsewhere")).await;
        assert!(matches!(reply.unwrap(), OnceReply::Elsewhere { .. }));
        assert_eq!(ran(work.await.unwrap()), 1);
    });
}

#[test]
fn dropped_work_is_an_orphan_at_once() {
    paused(async {
        let [a, b] = clients().await;
        let stuck = a.once("w").run(async |_| {
            pending::<()>().await;
            Ok::<u8, String>(0)
        });
        assert!(timeout(SEC, stuck).await.is_err());
        sleep(MS).await;
        let leave = b.once("w").on_orphan(OnOrphan::Leave);
        let left: Reply<u8> = leave.run(async |_| panic!("it is not taken over")).await;
        assert!(
            matches!(left, Err(OnceError::Orphaned { attempt: 1, .. })),
            "{left:?}"
        );
        // A panic is told of by its caller, and ends it likewise.
        let panics = b.once("w").run::<u8, String, _, _>(async |claim| {
            assert_eq!(claim.attempt(), 2);
            panic!("on purpose")
        });
        assert!(std::panic::AssertUnwindSafe(panics).catch_unwind().await.is_err());
        sleep(MS).await;
        let mut fence = 0;
        let third = b.once("w").run(async |claim| {
            assert!(claim.is_held());
            fence = claim.fencing_token();
            Ok(claim.attempt())
        });
        assert_eq!(ran(third.await), 3);
        assert!(fence > 0);
    });
}

#[test]
fn failures_follow_their_policy() {
    paused(async {
        let [a, b] = clients().await;
        let fails = async |_| Err::<u32, _>("no".to_owned());
        for n in 1..4 {
            let failed = a.once("again").run(fails).await;
            assert!(matches!(failed, Err(OnceError::Work(why)) if why == "no"));
            let next = b
                .once("again")
                .run(async |claim| Err::<u32, _>(claim.attempt().to_string()));
            assert!(matches!(next.await, Err(OnceError::Work(attempt)) if attempt == (2 * n).to_string()));
        }
        assert_eq!(
            ran(b.once("again").run(async |claim| Ok(claim.attempt())).await),
            7
        );

        let kept = a.once("keep").on_failure(OnFailure::Keep);
        assert!(matches!(kept.run(fails).await, Err(OnceError::Work(_))));
        let later: Reply<u32> = b.once("keep").run(async |_| panic!("it has failed")).await;
        assert!(
            matches!(later, Err(OnceError::Failed { attempts: 1, .. })),
            "{later:?}"
        );

        // A failure that was told is no orphan.
        let once = a.once("leave").on_orphan(OnOrphan::Leave);
        assert!(matches!(once.run(fails).await, Err(OnceError::Work(_))));
        assert_eq!(ran(once.run(async |_| Ok(1)).await), 1);
    });
}

#[test]
fn work_that_was_not_started_has_not_failed() {
    paused(async {
        let [a, b] = clients().await;
        for (key, on_failure, on_orphan) in [
            ("again", OnFailure::RunAgain, OnOrphan::TakeOver),
            ("keep", OnFailure::Keep, OnOrphan::TakeOver),
            ("once", OnFailure::AtMost(1), OnOrphan::TakeOver),
            ("leave", OnFailure::Keep, OnOrphan::Leave),
        ] {
            let once = |client: &LockClient| client.once(key).on_failure(on_failure).on_orphan(on_orphan);
            let refuses = async |claim: OnceClaim| {
                claim.not_started();
                Err::<u32, _>("no room".to_owned())
            };
            assert!(
                matches!(once(&a).run(refuses).await, Err(OnceError::Work(_))),
                "{key}"
            );
            assert_eq!(
                ran(once(&b).run(async |claim| Ok(claim.attempt())).await),
                1,
                "{key}"
            );
            let done = once(&a).run(refuses).await;
            assert!(matches!(done, Ok(OnceReply::Earlier(1))), "{key}: {done:?}");
        }
    });
}

/// Two attempts crash, and the third would, too.
#[test]
fn attempts_that_crash_count() {
    paused(async {
        let [a, b] = clients().await;
        let at_most_two = |client: &LockClient| client.once("w").on_failure(OnFailure::AtMost(2));
        for _ in 0..2 {
            let crashes = at_most_two(&a).run(async |_| {
                pending::<()>().await;
                Ok::<u8, String>(0)
            });
            assert!(timeout(SEC, crashes).await.is_err());
            sleep(MS).await;
        }
        for client in [&b, &a, &b] {
            let over: Reply<u8> = at_most_two(client).run(async |_| panic!("two are enough")).await;
            assert!(
                matches!(over, Err(OnceError::Failed { attempts: 2, .. })),
                "{over:?}"
            );
        }
    });
}

#[test]
fn result_that_cannot_be_given_is_never_made_again() {
    paused(async {
        let [a, b] = clients().await;
        let long = "x".repeat(2 << 20);
        assert_eq!(ran(a.once("long").run(async |_| Ok(long.clone())).await), long);
        let later: Reply<String> = b.once("long").run(async |_| panic!("it was done")).await;
        assert!(matches!(later, Err(OnceError::ResultUnavailable)), "{later:?}");
        ran(a.once("text").run(async |_| Ok("text".to_owned())).await);
        let later: Reply<u64> = b.once("text").run(async |_| panic!("it was done")).await;
        assert!(matches!(later, Err(OnceError::Unreadable { .. })), "{later:?}");
    });
}

#[test]
fn mistakes_are_told_before_anything_is_done() {
    paused(async {
        let [client] = clients().await;
        let told = async |once: dlock::Once| {
            let checked = once.check().unwrap_err().to_string();
            let reply: Reply<u8> = once.run(async |_| panic!("it makes no sense")).await;
            match reply.unwrap_err() {
                OnceError::Store(error) => assert_eq!(error.to_string(), checked),
                other => panic!("{other}"),
            }
            checked
        };
        let once = || client.once("w");
        for (wrong, option) in [
            (once().lease(Duration::ZERO), "lease"),
            (once().lease(5 * MS), "lease"),
            (once().keep(59 * SEC), "keep"),
            (once().keep(367 * DAY), "keep"),
            (once().wait(Duration::ZERO), "wait"),
            (once().on_failure(OnFailure::AtMost(0)), "on_failure"),
            (
                once().on_failure(OnFailure::AtMost(3)).on_orphan(OnOrphan::Leave),
                "on_failure",
            ),
            (client.once(""), "empty"),
            (client.once("x".repeat(4096)), "bytes"),
        ] {
            let said = told(wrong).await;
            assert!(said.contains(option), "{option}: {said}");
        }
    });
}

#[test]
fn shutdown_ends_waits_and_lets_results_arrive() {
    paused(async {
        let [a, b] = clients().await;
        let begun = Arc::new(tokio::sync::Notify::new());
        let work = tokio::spawn({
            let begun = begun.clone();
            a.once("w").run(async move |_| {
                begun.notify_one();
                sleep(2 * SEC).await;
                Ok::<_, String>(1)
            })
        });
        begun.notified().await;
        let waits = tokio::spawn(b.once("w").wait(DAY).run(async |_| Ok::<_, String>(2)));
        sleep(SEC).await;
        b.shutdown(SEC).await;
        let waited = waits.await.unwrap();
        assert!(
            matches!(waited, Err(OnceError::Store(Error::ClientClosed))),
            "{waited:?}"
        );
        let closed = b.once("w").run(async |_| Ok::<_, String>(2)).await;
        assert!(
            matches!(closed, Err(OnceError::Store(Error::ClientClosed))),
            "{closed:?}"
        );
        assert_eq!(ran(work.await.unwrap()), 1);
    });
}

/// Work of two seconds under a claim, by each way to begin it.
fn works(client: &LockClient) -> Vec<BoxFuture<'static, bool>> {
    async fn work(_: OnceClaim) -> Result<u32, String> {
        sleep(2 * SEC).await;
        Ok(1)
    }
    let once = |name: &str| client.once(name);
    let slot = once("slot").slot(SystemTime::now());
    let (plain, tick) = (once("plain"), once("tick").every(60 * SEC));
    let alone = dlock::with_default(client.clone(), attribute());
    vec![
        async move { matches!(plain.run(work).await, Ok(OnceReply::Ran(1))) }.boxed(),
        async move { matches!(tick.run(work).await, Ok(SlotReply::Ran(1))) }.boxed(),
        async move { matches!(slot.run(work).await, Ok(SlotReply::Ran(1))) }.boxed(),
        alone.map(|reply| matches!(reply, Ok(1))).boxed(),
    ]
}

#[dlock::once(key = "attribute")]
async fn attribute() -> Result<u32, NotRun> {
    sleep(2 * SEC).await;
    Ok(1)
}

#[test]
fn shutdown_waits_for_work_under_claims_until_its_deadline() {
    paused(async {
        for (deadline, takes, unfinished) in [
            (5 * SEC, 2 * SEC, 0),
            (SEC, SEC, 4),
            (Duration::ZERO, Duration::ZERO, 4),
        ] {
            let [client, other] = clients().await;
            let works: Vec<_> = works(&client).into_iter().map(tokio::spawn).collect();
            // The attribute's lock is claimed in its own task, too.
            sleep(MS).await;
            assert_eq!((client.health().claims, client.held()), (4, 0));
            let begun = Instant::now();
            let report = client.shutdown(deadline).await;
            let took = begun.elapsed();
            assert!(
                takes.saturating_sub(MS) <= took && took <= takes,
                "{deadline:?}: {took:?}"
            );
            assert_eq!(
                (report.unfinished, report.lost, report.unconfirmed),
                (unfinished, 0, 0),
                "{deadline:?}"
            );
            assert_eq!(client.health().claims, unfinished);
            // Their results are kept, also of those that went on.
            for ran in join_all(works).await {
                assert!(ran.unwrap(), "{deadline:?}");
            }
            assert_eq!(client.health().claims, 0);
            let later = other
                .once("plain")
                .run(async |_| Err::<u32, _>("it was done".to_owned()));
            assert_eq!(earlier(later.await), 1);
        }
    });
}

#[test]
fn drained_waits_for_work_under_claims() {
    paused(async {
        let [client] = clients().await;
        let works: Vec<_> = works(&client).into_iter().map(tokio::spawn).collect();
        sleep(MS).await;
        client.drain();
        let begun = Instant::now();
        client.drained().await;
        let took = begun.elapsed();
        assert!(2 * SEC - MS <= took && took <= 2 * SEC, "{took:?}");
        for ran in join_all(works).await {
            assert!(ran.unwrap());
        }
        // Nothing is waited for any more.
        assert_eq!(client.drained().now_or_never(), Some(()));
    });
}

#[test]
fn work_that_was_dropped_panicked_failed_or_lost_its_claim_is_not_waited_for() {
    paused(async {
        let [client, other] = clients().await;
        let dropped = client
            .once("dropped")
            .run(async |_| pending::<Result<(), String>>().await);
        assert!(timeout(SEC, dropped).await.is_err());
        let panicked = tokio::spawn(
            client
                .once("panicked")
                .run(async |_| -> Result<(), String> { panic!("on purpose") }),
        );
        assert!(panicked.await.is_err());
        let failed = client
            .once("failed")
            .run(async |_| Err::<(), _>("no such file".to_owned()));
        assert!(matches!(failed.await, Err(OnceError::Work(_))));
        let records = other.records().unwrap();
        let lost = client.once("lost").run(async |claim: OnceClaim| {
            records.release(claim.record_key(), claim.token()).await.unwrap();
            pending::<Result<(), String>>().await
        });
        assert!(matches!(lost.await, Err(OnceError::Lost { .. })));

        assert_eq!(client.health().claims, 0);
        assert_eq!(client.drained().now_or_never(), Some(()));
        let begun = Instant::now();
        let report = client.shutdown(DAY).await;
        assert_eq!(
            (report.unfinished, report.unconfirmed, begun.elapsed()),
            (0, 0, Duration::ZERO)
        );
        // What was given up is free for the next attempt.
        for name in ["dropped", "panicked"] {
            let next = other.once(name).run(async |claim: OnceClaim| Ok(claim.attempt()));
            assert_eq!(ran(next.await), 2, "{name}");
        }
    });
}

/// The work and a hold inside of it end one after the other, whichever is first.
#[test]
fn shutdown_waits_for_holds_and_work_together() {
    paused(async {
        for (hold, work) in [(SEC, 3 * SEC), (3 * SEC, SEC)] {
            let [client] = clients().await;
            let guard = client.lock("l").acquire().await.unwrap();
            let holds = tokio::spawn(async move {
                sleep(hold).await;
                guard.release().await
            });
            let works = tokio::spawn(client.once("w").run(async move |_| {
                sleep(work).await;
                Ok::<_, String>(1)
            }));
            sleep(MS).await;
            let begun = Instant::now();
            let report = client.shutdown(60 * SEC).await;
            let took = begun.elapsed();
            assert!(3 * SEC - MS <= took && took <= 3 * SEC, "{took:?}");
            assert_eq!((report.lost, report.unfinished), (0, 0));
            holds.await.unwrap().unwrap();
            assert_eq!(ran(works.await.unwrap()), 1);
        }
    });
}

/// Work that asks its own client to drain would wait for itself.
#[test]
fn shutdown_inside_of_the_work_ends_at_its_deadline() {
    paused(async {
        let [client] = clients().await;
        let inside = client.clone();
        let reply = client.once("w").run(async move |_| {
            assert!(timeout(60 * SEC, inside.drained()).await.is_err());
            Ok::<_, String>(inside.shutdown(SEC).await.unfinished)
        });
        assert_eq!(ran(reply.await), 1);
    });
}

#[dlock::once(key = "attempt")]
async fn attempt_and_token() -> Result<(u32, u64), NotRun> {
    let claim = OnceClaim::current().expect("the body runs under its claim");
    if claim.attempt() == 1 {
        return Err(Error::ClientClosed.into());
    }
    Ok((claim.attempt(), claim.fencing_token()))
}

#[test]
fn work_finds_its_claim_and_code_beside_it_does_not() {
    paused(async {
        let [client] = clients().await;
        assert!(OnceClaim::current().is_none());
        let inner = client.once("inner");
        let work = client.once("outer").run(async |claim: OnceClaim| {
            let seen = || OnceClaim::current().map(|claim| claim.token().clone());
            assert_eq!(seen().as_ref(), Some(claim.token()));
            tokio::task::yield_now().await;
            let inside = inner.run(async |claim: OnceClaim| {
                assert_eq!(seen().as_ref(), Some(claim.token()));
                Ok::<_, String>(())
            });
            assert!(inside.await.unwrap().ran_here());
            assert_eq!(seen().as_ref(), Some(claim.token()));
            let spawned = tokio::spawn(async { OnceClaim::current().is_none() });
            assert!(spawned.await.unwrap());
            Ok::<_, String>(())
        });
        // Other code of the same task, while the work waits.
        let (work, ()) = tokio::join!(work, async { assert!(OnceClaim::current().is_none()) });
        assert!(work.unwrap().ran_here());
        assert!(OnceClaim::current().is_none());

        let attribute = || dlock::with_default(client.clone(), attempt_and_token());
        assert!(attribute().await.is_err());
        assert!(matches!(attribute().await, Ok((2, 2..))));
    });
}

#[test]
fn reply_tells_whether_the_work_ran_here() {
    paused(async {
        let [client] = clients().await;
        let work = client.once("w");
        let run = || {
            work.run(async |_| {
                sleep(SEC).await;
                Ok::<_, String>(())
            })
        };
        let (ran, elsewhere) = tokio::join!(run(), run());
        let earlier = run().await;
        let here = [ran, elsewhere, earlier].map(|reply| reply.unwrap().ran_here());
        assert_eq!(here, [true, false, false]);
    });
}
