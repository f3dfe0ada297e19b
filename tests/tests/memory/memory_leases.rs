//! Leases, renewal and loss by a paused clock, on memory and on a third party's watched around it.
//!
//! The clock moves by `sleep`, never by `advance`; every test runs inside a virtual hour, because a
//! dead-lock never idles once there is a watchdog.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::store::{Bind, Lane};
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, HoldState, LockClient, Loss};
use dlock_tests::{Watched, paused, watched};
use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

#[test]
fn holder_is_lost_before_the_store_gives_the_key_away() {
    paused(async {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        let a = LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap();
        let b = LockClient::builder().store(store).build().await.unwrap();
        for lease in [100 * MS, SEC, 30 * SEC, 3600 * SEC] {
            let key = format!("{lease:?}");
            let guard = a.lock(&*key).lease(lease).acquire().await.unwrap();
            let taken = Instant::now();
            watched.seen().hang_renewals.store(true, SeqCst);
            let told = async {
                guard.lost().await;
                Instant::now()
            };
            let passed = async {
                let guard = b.lock(&*key).acquire().await.unwrap();
                (Instant::now(), guard)
            };
            let (told, (passed, next)) = tokio::join!(told, passed);
            let margin = (lease / 100).max(10 * MS);
            assert!(
                told + margin <= passed + MS,
                "{lease:?}: told {:?} before",
                passed - told
            );
            // And not much too early either.
            assert!(told - taken >= lease - margin - 2 * MS, "{lease:?}");
            assert!(!guard.is_held() && next.fencing_token() > guard.fencing_token());
            watched.seen().hang_renewals.store(false, SeqCst);
        }
    });
}

#[test]
fn reply_after_the_end_of_max_hold_grants_nothing() {
    paused(async {
        let watched = Watched::new(MemoryStore::new());
        let client = LockClient::builder()
            .store(watched.clone())
            .build()
            .await
            .unwrap();
        let short = client.lock("k").max_hold(30 * MS);
        for lock in [short.clone(), short.fixed_lease(SEC)] {
            watched.seen().slow_answers.store(40, SeqCst);
            let late = lock.try_acquire().await;
            assert!(late.as_ref().is_err_and(Error::is_unavailable), "{late:?}");
            watched.seen().slow_answers.store(0, SeqCst);
            assert!(lock.acquire().await.unwrap().is_held());
        }
    });
}

#[test]
fn stalled_runtime_reports_no_expired_hold() {
    // Without a paused clock: the watchdog is kept from running, and the clock goes on.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let client = LockClient::memory();
        let guard = client.lock("k").lease(100 * MS).acquire().await.unwrap();
        let work = guard.run(async { tokio::task::yield_now().await });
        std::thread::sleep(150 * MS);
        assert!(!guard.is_held());
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        assert!(work.await.unwrap_err().is_lost());
    });
}

#[test]
fn loss_is_final_when_the_renewal_succeeds_late() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        let guard = client.lock("k").acquire().await.unwrap();
        store.set_down(true);
        sleep(31 * SEC).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        store.set_down(false);
        sleep(60 * SEC).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        assert!(guard.ensure(SEC).await.unwrap_err().is_lost());
        assert!(guard.reenter().unwrap_err().is_lost());
        assert!(guard.release().await.unwrap_err().is_lost());
    });
}

/// The failure of a renewal means that the lock is still held.
#[test]
fn hold_that_is_lost_while_its_renewal_fails_is_reported_as_lost() {
    paused(async {
        let (watched, client) = watched().await;
        let guard = client.lock("k").lease(SEC).acquire().await.unwrap();
        watched.seen().fail_renewals.store(true, SeqCst);
        let failed = guard.ensure(SEC).await;
        assert!(matches!(failed, Err(Error::Unreachable { .. })), "{failed:?}");
        // Longer than the lease lasts.
        watched.seen().slow_answers.store(700, SeqCst);
        sleep(600 * MS).await;
        assert!(guard.is_held());
        let bound = guard.bind().unwrap().remove(0);
        let (ensured, confirmed) = tokio::join!(guard.ensure(SEC), bound.confirm());
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        for outcome in [ensured, confirmed] {
            assert!(outcome.as_ref().unwrap_err().is_lost(), "{outcome:?}");
        }
    });
}

/// A server has answered, another one takes its place, and only then the answer is heard.
#[test]
fn reply_from_before_a_doubt_confirms_nothing() {
    paused(async {
        let store = MemoryStore::new();
        let watched = Watched::new(store.clone());
        let builder = LockClient::builder().store(watched.clone());
        let client = builder.build().await.unwrap();
        let seen = watched.seen();
        let lost_in_doubt = || {
            store.clear();
            seen.doubts.tell(Lane(1));
        };
        // The answer to a renewal.
        let guard = client.lock("1:k").acquire().await.unwrap();
        seen.slow_answers.store(100, SeqCst);
        sleep(10 * SEC + 50 * MS).await;
        assert_eq!((seen.renewals.load(SeqCst), guard.state()), (1, HoldState::Held));
        lost_in_doubt();
        sleep(40 * MS).await;
        assert_eq!(guard.state(), HoldState::Suspect);
        seen.slow_answers.store(0, SeqCst);
        sleep(20 * MS).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        // The answer to an acquire; of another lane, it is not suspect.
        seen.slow_answers.store(100, SeqCst);
        let here = tokio::spawn(client.lock("1:k").acquire());
        let elsewhere = tokio::spawn(client.lock("2:k").acquire());
        sleep(50 * MS).await;
        seen.slow_answers.store(0, SeqCst);
        lost_in_doubt();
        sleep(60 * MS).await;
        assert_eq!(here.await.unwrap().unwrap().state(), HoldState::Lost(Loss::Gone));
        assert_eq!(elsewhere.await.unwrap().unwrap().state(), HoldState::Held);
    });
}

#[test]
fn ensure_renews_only_when_less_is_left() {
    paused(async {
        let (watched, client) = watched().await;
        let guard = client.lock("k").acquire().await.unwrap();
        guard.ensure(20 * SEC).await.unwrap();
        assert_eq!(watched.seen().renewals.load(SeqCst), 0);
        sleep(9 * SEC).await;
        guard.ensure(25 * SEC).await.unwrap();
        assert_eq!(watched.seen().renewals.load(SeqCst), 1);
        assert!(guard.remaining() > 29 * SEC);
        assert!(matches!(
            guard.ensure(40 * SEC).await,
            Err(Error::InvalidOption { option: "ensure", .. })
        ));
        let fixed = client.lock("f").fixed_lease(5 * SEC).acquire().await.unwrap();
        fixed.ensure(4 * SEC).await.unwrap();
        assert!(fixed.ensure(6 * SEC).await.is_err());
        assert!(fixed.remaining() < 5 * SEC);
    });
}

#[test]
fn runtime_end_ends_every_hold() {
    let background = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let front = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    front.block_on(async {
        let client = LockClient::builder()
            .url("memory://")
            .runtime(background.handle().clone())
            .build()
            .await
            .unwrap();
        let guard = client.lock("k").acquire().await.unwrap();
        let lost = guard.lost();
        let also = guard.lost();
        background.shutdown_background();
        assert_eq!(lost.await, Loss::RuntimeEnded);
        assert_eq!(also.now_or_never(), Some(Loss::RuntimeEnded));
        assert_eq!(guard.state(), HoldState::Lost(Loss::RuntimeEnded));
        assert!(matches!(
            client.lock("x").acquire().await,
            Err(Error::ClientClosed)
        ));
        drop(guard);
    });
}

#[test]
fn senseless_options_are_refused_before_the_store_is_asked() {
    paused(async {
        let (watched, client) = watched().await;
        let lock = || client.lock("k");
        let year = Duration::from_secs(367 * 24 * 3600);
        for (lock, option, says) in [
            (lock().fixed_lease(Duration::ZERO), "fixed_lease", "it is zero"),
            (lock().fixed_lease(10 * MS), "fixed_lease", "margin"),
            (
                lock().fixed_lease(Duration::MAX),
                "fixed_lease",
                "more than a year",
            ),
            (lock().lease(Duration::ZERO), "lease", "it is zero"),
            (lock().lease(year), "lease", "more than a year"),
            (lock().wait(Duration::ZERO), "wait", "try_acquire and try_run ask"),
            (lock().wait(Duration::MAX), "wait", "more than a year"),
            (lock().max_hold(Duration::ZERO), "max_hold", "it is zero"),
            (lock().min_hold(Duration::ZERO), "min_hold", "it is zero"),
            (
                lock().min_hold(2 * SEC).max_hold(SEC),
                "min_hold",
                "longer than max_hold",
            ),
            (
                lock().min_hold(2 * SEC).fixed_lease(SEC),
                "min_hold",
                "longer than fixed_lease",
            ),
        ] {
            for error in [
                lock.acquire().await.unwrap_err(),
                lock.try_acquire().await.unwrap_err(),
            ] {
                let is_named =
                    matches!(&error, Error::InvalidOption { option: named, .. } if *named == option);
                assert!(
                    is_named && error.to_string().contains(says),
                    "{option}, {says}: {error}"
                );
            }
        }
        assert_eq!((client.held(), watched.seen().acquires.load(SeqCst)), (0, 0));
        let with = |url: &str| LockClient::builder().url(url);
        for (builder, says) in [
            (with("memory://").lease(Duration::ZERO), "lease: it is zero"),
            (with("memory://").lease(Duration::MAX), "more than a year"),
            (with("memory://").timeout(Duration::ZERO), "timeout: it is zero"),
            (
                with("memory://").retry_for(Duration::ZERO),
                "retry_for: it is zero",
            ),
            (with("memory://").retry_for(Duration::MAX), "more than a year"),
            (
                with("memory://").store(MemoryStore::new()),
                "choose one of the two",
            ),
            (
                with("memory://").presence(false).control(true),
                "control: it needs presence, which is off",
            ),
            (
                with("redis://user:password@127.0.0.1:1").root_certificate("any"),
                "not encrypted: use rediss://",
            ),
            (
                with("redis://127.0.0.1:1").client_certificate("any", "any"),
                "not encrypted: use rediss://",
            ),
            (with("memory://").root_certificate("any"), "options for theirs"),
            (
                LockClient::builder()
                    .store(MemoryStore::new())
                    .root_certificate("any"),
                "not with a store of your own",
            ),
            (LockClient::builder(), "neither"),
        ] {
            let error = builder.build().await.unwrap_err();
            assert!(matches!(error, Error::InvalidOption { .. }), "{says}: {error}");
            assert!(error.to_string().contains(says), "{says}: {error}");
        }
    });
}

#[test]
fn prefixes_in_memory_are_names_of_their_own() {
    paused(async {
        let with = |query: &str| LockClient::builder().url(format!("memory://prefixes{query}"));
        let mut clients = Vec::new();
        for query in ["", "", "?prefix=a:", "?prefix=b:", "?prefix=a:"] {
            clients.push(with(query).build().await.unwrap());
        }
        let mut free = Vec::new();
        let mut held = Vec::new();
        for client in &clients {
            let guard = client.lock("k").try_acquire().await;
            free.push(guard.is_ok());
            held.extend(guard);
        }
        assert_eq!(free, [true, false, true, true, false]);
    });
}

#[test]
fn acquire_undoes_an_unknown_outcome_and_goes_on() {
    paused(async {
        for fault in [Fault::AnswerLost, Fault::RequestLost, Fault::Unreachable] {
            let store = TestStore::new();
            let client = store.client();
            store.fail_next(Step::Acquire, fault);
            let guard = client.lock("k").acquire().await.unwrap();
            assert_eq!(store.held(), 1);
            guard.release().await.unwrap();
            assert_eq!((store.held(), store.watched()), (0, 0));
            store.fail_next(Step::Acquire, fault);
            let error = client.lock("k").try_acquire().await.unwrap_err();
            match fault {
                Fault::Unreachable => assert!(matches!(error, Error::Unreachable { .. }), "{error}"),
                _ => assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}"),
            }
            sleep(SEC).await;
            assert_eq!(store.held(), 0);
        }
    });
}

#[test]
fn a_store_that_stays_away_ends_an_acquire_with_its_own_error() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        store.set_down(true);
        let before = Instant::now();
        assert!(matches!(
            client.lock("k").acquire().await,
            Err(Error::Unreachable { .. })
        ));
        assert!(before.elapsed() <= 5 * SEC, "{:?}", before.elapsed());
        let before = Instant::now();
        assert!(matches!(
            client.lock("k").wait(SEC).acquire().await,
            Err(Error::Unreachable { .. })
        ));
        assert!(before.elapsed() <= SEC + 10 * MS);
        store.set_down(false);
        store.fail_next(Step::Acquire, Fault::Refused);
        assert!(matches!(
            client.lock("k").acquire().await,
            Err(Error::Refused { .. })
        ));
        assert_eq!((client.held(), client.waited_for(), store.watched()), (0, 0, 0));
    });
}

#[test]
fn failed_release_keeps_the_result() {
    paused(async {
        let store = TestStore::new();
        let client = store.client();
        store.fail_next(Step::Release, Fault::Refused);
        assert_eq!(client.lock("k").run(|_| async { 42 }).await.unwrap(), 42);
        assert_eq!(store.held(), 1, "left to the lease");
        sleep(30 * SEC).await;
        assert_eq!(store.held(), 0);
    });
}
