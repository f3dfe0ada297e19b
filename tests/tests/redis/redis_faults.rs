//! Faults that strike one command at a time: its reply is swallowed, or the connection is cut before it. Each
//! time the outcome is that without the fault or one clear error, and nothing is left behind.

use std::time::{Duration, Instant};

use dlock::operations::{Intervention, LockEventKind};
use dlock::{Error, HoldState, LockKind};
use dlock_tests::faults::{
    Pair, RETRY_FOR, SLACK, SOON, TIMEOUT, answered, hasty, hasty_builder, in_rounds, is_back, is_confirmed,
    is_free, is_free_as, keeping, patient, releasing, renewing, setting, setting_of_faults, step, within,
};
use dlock_tests::{Command, Proxy, Store, Swallow, eventually, settle};
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

fn is_unknown<T>(outcome: &Result<T, Error>) -> bool {
    matches!(outcome, Err(Error::OutcomeUnknown { .. }))
}

const SWALLOWS: [Swallow; 2] = [Swallow::Hang, Swallow::Cut];

/// Each pair with each way to lose a reply.
fn cases() -> impl Iterator<Item = (Pair, Swallow)> {
    let pairs = Pair::ALL.into_iter();
    pairs.flat_map(|pair| SWALLOWS.map(|then| (pair, then)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_is_repeated_and_reports_no_loss_when_its_reply_is_lost() {
    let (store, proxy, a, b) = setting().await;
    for (pair, then) in cases() {
        let guard = pair.asked(&a, "k").acquire().await.unwrap();
        let fault = proxy.swallow(1, then, step(releasing(pair.asks)));
        within(SOON, "release", guard.release()).await.unwrap();
        assert!(fault.fired());
        is_free_as(&b, "k", pair.asks).await;

        let started = Instant::now();
        let guard = pair.asked(&a, "k").min_hold(1000 * MS).acquire().await.unwrap();
        let fault = proxy.swallow(1, then, step(keeping(pair.asks)));
        within(SOON, "release", guard.release()).await.unwrap();
        assert!(fault.fired());
        eventually("the minimum is over", || async {
            pair.held(&b, "k").try_acquire().await.is_ok()
        })
        .await;
        let took = started.elapsed();
        assert!(
            took >= 1000 * MS && took < 1000 * MS + SLACK,
            "{pair}, {then:?}: kept for {took:?}"
        );
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn break_is_in_the_audit_log_once_and_not_done_when_the_reply_is_lost() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (
        patient(&proxy.url()).await,
        patient(&store.as_server().url()).await,
    );
    let guard = b.lock("k").acquire().await.unwrap();
    let id = a.inspect("k").await.unwrap().unwrap().id;
    let fault = proxy.swallow(1, Swallow::Cut, step("audit"));
    let broken = a.break_hold("k", &id, Intervention::new("it hangs")).await;
    assert!(fault.fired() && is_unknown(&broken), "{broken:?}");
    is_back(&a).await;
    assert_eq!(store.as_server().query::<u64>(&["XLEN", "dlock:audit"]).await, 1);
    is_confirmed(&guard).await;
    guard.release().await.unwrap();
    store.as_server().command(&["DEL", "dlock:audit"]).await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sent_release_stays_unknown_when_the_server_goes_away() {
    in_rounds("the server is gone before it is asked again", async || {
        let (store, proxy, a, b) = setting_of_faults().await;
        let guard = answered(|| a.lock("k").acquire()).await.unwrap();
        let fault = proxy.swallow(1, Swallow::Hang, step("release"));
        let outcome = tokio::spawn(guard.release());
        fault.swallowed().await;
        proxy.refuse();
        let outcome = within(RETRY_FOR, "release", outcome).await.unwrap();
        is_free(&b, "k").await;
        proxy.accept();
        is_back(&a).await;
        store.assert_clean(&[&a, &b]).await;
        if outcome.is_ok() {
            return Err("it was asked again before");
        }
        assert!(is_unknown(&outcome), "{outcome:?}");
        Ok(())
    })
    .await;
}

#[derive(Debug, Clone, Copy)]
enum Deed {
    Swallow(Swallow),
    Lose,
    Hold,
}

/// "Acquire, renew, release with a waiter", with a fault at the k-th command of all. Whether it struck.
async fn scenario(store: &Store, pair: Pair, k: u64, deed: Deed) -> bool {
    let (key, case) = (format!("k:{pair}:{deed:?}:{k}"), format!("{pair}, {deed:?} {k}"));
    let proxy = Proxy::start(store.as_server().addr());
    let (a, b) = (hasty(&proxy.url()).await, hasty(&proxy.url()).await);
    let any = |_: &Command| true;
    let (fault, held) = match deed {
        Deed::Swallow(then) => (Some(proxy.swallow(k, then, any)), None),
        Deed::Lose => (Some(proxy.lose(k, any)), None),
        Deed::Hold => (None, Some(proxy.hold(k, any))),
    };
    let guard = pair.held(&a, &key).acquire().await.expect(&case);
    let waiter = tokio::spawn(pair.asked(&b, &key).acquire());
    settle().await;
    is_confirmed(&guard).await;
    assert!(!waiter.is_finished(), "{case}: two holders");
    let token = guard.fencing_token();
    guard.release().await.expect(&case);
    // A reply that hangs costs two timeouts until the connection is replaced; no lease is waited for.
    let next = within(4 * TIMEOUT, format!("{case}: the wake-up"), waiter).await;
    let next = next.unwrap().expect(&case);
    assert!(next.fencing_token() > token, "{case}");
    next.release().await.expect(&case);
    let struck = match (&fault, held) {
        (Some(fault), _) => fault.fired(),
        (None, Some(held)) if held.fired() => {
            held.release();
            held.answered().await;
            true
        }
        _ => false,
    };
    eventually("no hold and no waiter is left", || async {
        [&a, &b]
            .iter()
            .all(|client| client.held() == 0 && client.waited_for() == 0)
    })
    .await;
    // Nor a step that takes back what may yet come: without the proxy it would not arrive.
    for client in [&a, &b] {
        let report = client.shutdown(Duration::ZERO).await;
        assert_eq!((report.lost, report.unconfirmed), (0, 0), "{case}");
    }
    struck
}

async fn every_command_of_a_scenario(deed: Deed) {
    const MOST: u64 = 40;
    let store = Store::server().await;
    for pair in Pair::ALL {
        let struck = join_all((1..=MOST).map(|k| scenario(&store, pair, k, deed))).await;
        let commands = struck.iter().filter(|struck| **struck).count();
        assert!(
            commands >= 9 && !struck[MOST as usize - 1],
            "{pair}, {deed:?}: {struck:?}"
        );
    }
    store.assert_clean(&[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_connection_is_cut_before_each_command() {
    every_command_of_a_scenario(Deed::Lose).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_command_is_held_back_and_let_go_later() {
    every_command_of_a_scenario(Deed::Hold).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connecting_fails_in_time_at_each_command_and_says_why() {
    let store = Store::server().await;
    for deed in [
        Deed::Swallow(Swallow::Hang),
        Deed::Swallow(Swallow::Cut),
        Deed::Lose,
    ] {
        for k in 1.. {
            // Whether the fault struck.
            let round = async || {
                let proxy = Proxy::start(store.as_server().addr());
                let any = |_: &Command| true;
                let fault = match deed {
                    Deed::Swallow(then) => proxy.swallow(k, then, any),
                    _ => proxy.lose(k, any),
                };
                let builder = hasty_builder(&proxy.url());
                let connected = within(TIMEOUT, "connecting", builder.build()).await;
                match (fault.fired(), connected) {
                    (true, connected) => {
                        let error = connected.unwrap_err();
                        assert!(
                            matches!(error, Error::Unreachable { .. }),
                            "{deed:?} {k}: {error}"
                        );
                        Ok(true)
                    }
                    (false, Err(error)) => Err(error),
                    (false, Ok(client)) => {
                        proxy.heal();
                        is_free(&client, "k").await;
                        Ok(false)
                    }
                }
            };
            if !in_rounds("it connects where no fault strikes", round).await {
                assert!(k > 3, "connecting takes more commands than {k}");
                break;
            }
        }
    }
    settle().await;
    store.assert_clean(&[]).await;
}

/// What is left of the leases here after a renewal that fails is more than a machine stands still.
mod alone {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn renewal_puts_the_hold_in_doubt_when_its_reply_is_lost() {
        const HELD: Duration = Duration::from_secs(12);
        let faults = [Some(Swallow::Hang), Some(Swallow::Cut), None];
        let kinds = [LockKind::Mutex, LockKind::Read, LockKind::Write];
        let cases = kinds.into_iter().flat_map(|kind| faults.map(|then| (kind, then)));
        join_all(cases.map(async |(kind, then)| {
            let (store, proxy, a, b) = setting().await;
            let mut events = a.events();
            let guard = a.lock("k").kind(kind).lease(HELD).acquire().await.unwrap();
            let fault = match then {
                Some(then) => proxy.swallow(1, then, step(renewing(kind))),
                None => proxy.lose(1, step(renewing(kind))),
            };
            eventually("a renewal is due", || async { fault.fired() }).await;
            if then == Some(Swallow::Hang) {
                // The state is that of a few milliseconds, and can be missed.
                let doubt = async {
                    while events.next().await.expect("the client is there").what != LockEventKind::Suspect {}
                };
                within(SLACK, "it is in doubt", doubt).await;
            }
            eventually("it is held again", || async {
                assert!(guard.is_held(), "{kind}, {then:?}: lost");
                guard.state() == HoldState::Held && guard.remaining() > HELD * 3 / 4
            })
            .await;
            guard.release().await.unwrap();
            is_free_as(&b, "k", kind).await;
            store.assert_clean(&[&a, &b]).await;
        }))
        .await;
    }
}
