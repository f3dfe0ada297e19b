//! The way to the server is slow, half open or dead, or the server closes it: nothing takes longer than it
//! may, and everything works again by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::{Error, HoldState, Loss};
use dlock_tests::faults::{
    LEASE, PATIENCE, RETRY_FOR, TIMEOUT, answered, hasty_builder, in_rounds, is_back, is_free, is_free_soon,
    patient, setting, setting_of_faults, within,
};
use dlock_tests::{Direction, Proxy, Server, Store, eventually, settle};

const MS: Duration = Duration::from_millis(1);

type Act = fn(&Proxy, &Server);

/// Faults of the way as a whole: how each begins, and how it ends.
const FAULTS: [(&str, Act, Act); 6] = [
    ("deaf", |p, _| p.block(Direction::ToServer), |p, _| p.heal()),
    ("mute", |p, _| p.block(Direction::ToClient), |p, _| p.heal()),
    ("dead", |p, _| p.block(Direction::Both), |p, _| p.heal()),
    (
        "refused",
        |p, _| {
            p.refuse();
            p.cut();
        },
        |p, _| p.heal(),
    ),
    (
        "silent",
        |p, _| {
            p.mute_new();
            p.reset();
        },
        |p, _| {
            p.heal();
            p.cut();
        },
    ),
    ("frozen", |_, s| s.stop(), |_, s| s.cont()),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_takes_longer_than_it_may_whatever_the_network_does() {
    let cases = FAULTS.map(|(fault, begin, end)| tokio::spawn(keeps_its_time(fault, begin, end)));
    for case in cases {
        case.await.unwrap();
    }
}

async fn keeps_its_time(fault: &'static str, begin: Act, end: Act) {
    let (store, proxy, a, b) = setting_of_faults().await;
    let kept = answered(|| a.lock("kept").acquire()).await.unwrap();
    let given = answered(|| a.lock("given").acquire()).await.unwrap();
    begin(&proxy, store.as_server());
    for round in 0..2 {
        let case = |what| format!("{what} ({fault}, round {round})");
        let (once, waited, held, free, all, sure, second) = tokio::join!(
            within(TIMEOUT, case("try_acquire"), a.lock("k").try_acquire()),
            within(RETRY_FOR, case("acquire"), a.lock("l").acquire()),
            within(TIMEOUT, case("inspect"), a.inspect("k")),
            within(TIMEOUT, case("force_release"), a.force_release("k")),
            within(TIMEOUT, case("list"), a.list("k")),
            within(TIMEOUT, case("ensure"), kept.ensure(LEASE)),
            within(TIMEOUT, case("connecting"), hasty_builder(&proxy.url()).build()),
        );
        let errors = [
            once.err(),
            waited.err(),
            held.err(),
            free.err(),
            all.err(),
            sure.err(),
            second.err(),
        ];
        for error in errors {
            let error = error.unwrap_or_else(|| panic!("{}", case("it passed")));
            assert!(error.is_unavailable(), "{}: {error}", case("an operation"));
        }
        assert_eq!(kept.state(), HoldState::Suspect, "{fault}");
    }
    let waited = within(250 * MS, "wait", a.lock("k").wait(250 * MS).acquire())
        .await
        .unwrap_err();
    assert!(waited.is_busy() || waited.is_unavailable(), "{fault}: {waited}");
    let released = within(RETRY_FOR, "release", given.release()).await.unwrap_err();
    assert!(released.is_unavailable(), "{fault}: {released}");
    end(&proxy, store.as_server());
    eventually("the holder is confirmed", || async {
        kept.state() == HoldState::Held
    })
    .await;
    let released = kept.release().await;
    assert!(
        matches!(released, Ok(()) | Err(Error::OutcomeUnknown { .. })),
        "{fault}: {released:?}"
    );
    for key in ["k", "l", "given", "kept"] {
        is_free_soon(&b, key).await;
    }
    is_back(&a).await;
    is_free(&a, "k").await;
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_timeout_of_a_slow_server_keeps_the_connection() {
    // A second one in a row would rightly cost the connection.
    in_rounds("one timeout, and the connection stays", async || {
        let (store, proxy, a, _b) = setting().await;
        let slow = proxy.hold(1, |command| command.is_script());
        assert!(a.lock("k").try_acquire().await.is_err());
        slow.release();
        eventually("it answers", || async { a.inspect("k").await.is_ok() }).await;
        settle().await;
        store.assert_clean(&[&a]).await;
        match proxy.connections_seen() {
            1 => Ok(()),
            more => Err(more),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_jumpy_network_in_small_pieces_changes_nothing() {
    let (store, proxy, _a, b) = setting().await;
    let patient = patient(&proxy.url()).await;
    for small in [false, true] {
        if small {
            proxy.trickle(Direction::Both, Some(Duration::ZERO));
        } else {
            proxy.delay(Direction::Both, 10 * MS, 15 * MS);
        }
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let visits = (0..12).map(|i| {
            let lock = [&patient, &b][i % 2].lock("k").wait(PATIENCE);
            let (inside, most) = (inside.clone(), most.clone());
            tokio::spawn(async move {
                let guard = lock.acquire().await.unwrap();
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(5 * MS).await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
            })
        });
        for visit in visits.collect::<Vec<_>>() {
            visit.await.unwrap();
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        proxy.heal();
    }
    assert_eq!(proxy.malformed(), Vec::<String>::new());
    store.assert_clean(&[&patient, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_sent_only_once_reports_the_loss() {
    // More than one question, and it might have been released by one whose answer was late.
    let store = Store::server().await;
    let a = patient(&store.as_server().url()).await;
    let guard = a.lock("k").acquire().await.unwrap();
    store.flush().await;
    // The script is not there either: that question was not carried out, so it counts for nothing.
    store.as_server().script_flush().await;
    let outcome = guard.release().await;
    assert!(
        matches!(outcome, Err(Error::Lost { loss: Loss::Gone, .. })),
        "{outcome:?}"
    );
    store.assert_clean(&[&a]).await;
}
