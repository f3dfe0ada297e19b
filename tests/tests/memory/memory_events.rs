//! What a client tells its listeners of its locks.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use dlock::operations::{HoldEnd, LockEvent, LockEventKind, LockEvents, LossReason};
use dlock::store::Lane;
use dlock::{LockClient, Loss};
use dlock_tests::{paused, watched};
use futures_util::{FutureExt, poll};
use tokio::task::unconstrained;
use tokio::time::{sleep, timeout};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

/// The events so far, in short.
fn told(events: &mut LockEvents) -> Vec<String> {
    std::iter::from_fn(|| ready(events))
        .map(|event| short(&event))
        .collect()
}

/// The next event that is there, also where the task has used up what it may do at a time.
fn ready(events: &mut LockEvents) -> Option<LockEvent> {
    unconstrained(events.next()).now_or_never().flatten()
}

fn short(event: &LockEvent) -> String {
    let what = match &event.what {
        LockEventKind::Granted { handed_off, .. } if *handed_off => "handed off".to_owned(),
        LockEventKind::Granted { .. } => "granted".to_owned(),
        LockEventKind::Acquired { waited, .. } => format!("acquired after {}s", waited.as_secs()),
        LockEventKind::NotAcquired { waited, .. } => format!("not acquired after {}s", waited.as_secs()),
        LockEventKind::Cancelled { waited, .. } => format!("cancelled after {}s", waited.as_secs()),
        LockEventKind::NearMiss { .. } => "near miss".to_owned(),
        LockEventKind::Lost { .. } => "lost".to_owned(),
        LockEventKind::Ended { how, held, .. } => format!("{how:?} after {}s", held.as_secs()),
        other => format!("{other:?}"),
    };
    format!("{} {}: {what}", event.kind, event.key)
}

#[test]
fn listener_is_told_what_locks_and_calls_go_through_in_their_order() {
    paused(async {
        let client = LockClient::memory();
        drop(client.lock("before").acquire().await.unwrap());
        sleep(MS).await;
        let mut events = client.events();
        let lock = client.lock("k");
        let first = lock.acquire().await.unwrap();
        lock.try_acquire().await.unwrap_err();
        let gone = tokio::spawn(lock.acquire());
        sleep(SEC).await;
        gone.abort();
        gone.await.unwrap_err();
        first.release().await.unwrap();
        // Soon enough for a handoff.
        let first = lock.acquire().await.unwrap();
        let second = tokio::spawn(lock.acquire());
        sleep(MS).await;
        first.release().await.unwrap();
        let second = second.await.unwrap().unwrap();
        sleep(SEC).await;
        drop(second);
        sleep(MS).await;
        let expected = [
            "lock k: granted",
            "lock k: acquired after 0s",
            "lock k: not acquired after 0s",
            "lock k: cancelled after 1s",
            "lock k: Released after 1s",
            "lock k: granted",
            "lock k: acquired after 0s",
            "lock k: HandedOff after 0s",
            "lock k: handed off",
            "lock k: acquired after 0s",
            "lock k: Dropped after 1s",
        ];
        assert_eq!(told(&mut events), expected);
        assert_eq!(events.dropped(), 0);

        // Several at once are told one by one, and each kind by its name.
        let both = client.multi(["a", "b"]).acquire().await.unwrap();
        let writer = client.rw_lock("w").write().acquire().await.unwrap();
        let told = told(&mut events);
        for event in ["lock a: granted", "lock b: acquired after 0s", "write w: granted"] {
            assert!(told.iter().any(|told| told == event), "{event}: {told:?}");
        }
        drop((both, writer));
    });
}

#[test]
fn near_misses_suspects_and_losses_are_told_with_their_hold() {
    paused(async {
        let (watched, client) = watched().await;
        let mut events = client.events();
        let guard = client.lock("k").lease(30 * SEC).acquire().await.unwrap();
        let token = guard.fencing_token();
        watched.seen().hang_renewals.store(true, SeqCst);
        sleep(20500 * MS).await;
        watched.seen().hang_renewals.store(false, SeqCst);
        sleep(8 * SEC).await;
        assert!(guard.is_held());
        watched.seen().hang_renewals.store(true, SeqCst);
        assert_eq!(guard.lost().await, Loss::Expired);
        let mut all = Vec::new();
        while let Some(event) = ready(&mut events) {
            all.push(event);
        }
        let granted = &all[0];
        assert!(
            granted
                .grant
                .as_ref()
                .is_some_and(|grant| grant.starts_with(&client.id()))
        );
        assert!(matches!(granted.what, LockEventKind::Granted { token: told, .. } if told == token));
        let of_hold = all.iter().filter(|event| event.grant.is_some());
        assert!(
            of_hold
                .clone()
                .all(|event| event.grant == granted.grant && event.key.as_str() == "k")
        );
        let of_hold: Vec<_> = of_hold.map(|event| &event.what).collect();
        let [
            _,
            LockEventKind::Suspect,
            LockEventKind::Confirmed,
            LockEventKind::NearMiss { left, .. },
            LockEventKind::Suspect,
            LockEventKind::Lost { reason, .. },
            LockEventKind::Ended { how, .. },
        ] = of_hold.as_slice()
        else {
            panic!("{of_hold:?}");
        };
        assert!(*left < 10 * SEC && !left.is_zero(), "{left:?}");
        assert_eq!(*how, HoldEnd::Lost);
        assert!(matches!(reason, LossReason::Unanswered(_)), "{reason:?}");
    });
}

#[test]
fn slow_listener_misses_the_oldest_events_and_holds_up_no_lock() {
    paused(async {
        let client = LockClient::memory();
        let (mut slow, mut other) = (client.events(), client.events());
        let mut seen = 0;
        for _ in 0..1000 {
            client.lock("k").acquire().await.unwrap().release().await.unwrap();
            seen += told(&mut other).len();
        }
        assert_eq!((seen, other.dropped()), (3000, 0));
        let last = told(&mut slow);
        assert_eq!((last.len() as u64 + slow.dropped(), last.len()), (3000, 1024));
        assert_eq!(last.last().map(String::as_str), Some("lock k: Released after 0s"));
        // A listener keeps no client alive, and hears its end.
        drop(client);
        sleep(MS).await;
        assert_eq!(slow.next().await, None);
        assert_eq!(other.next().await, None);
    });
}

/// The watchdog finds it suspect while the handoff is reported.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hold_that_becomes_suspect_while_it_is_handed_off_is_told_of_once() {
    let (watched, client) = watched().await;
    watched.seen().hang_renewals.store(true, SeqCst);
    let [handed_off, suspect] = [0, 0].map(|count| Arc::new(AtomicUsize::new(count)));
    let (handoffs, suspects) = (handed_off.clone(), suspect.clone());
    let _events = client.events_where(move |_, what| {
        match what {
            LockEventKind::Suspect => {
                suspects.fetch_add(1, SeqCst);
            }
            LockEventKind::Granted { handed_off: true, .. } => {
                handoffs.fetch_add(1, SeqCst);
                watched.seen().doubts.tell(Lane::default());
                for _ in 0..5000 {
                    if suspects.load(SeqCst) == 0 {
                        std::thread::sleep(MS);
                    }
                }
            }
            _ => {}
        }
        false
    });
    let lock = client.lock("k");
    let first = lock.acquire().await.unwrap();
    let mut second = Box::pin(lock.acquire());
    assert!(poll!(&mut second).is_pending());
    drop(first);
    drop(second.await.unwrap());
    // None, if the machine stood still for a whole time slice.
    assert_eq!(suspect.load(SeqCst), handed_off.load(SeqCst));
}

#[test]
fn filter_decides_which_events_a_listener_gets() {
    paused(async {
        let client = LockClient::memory();
        let mut of_b = client.events_where(|key, what| {
            assert_ne!(key.as_str(), "c", "a filter that panics");
            key.as_str() == "b" && !matches!(what, LockEventKind::Acquired { .. })
        });
        let mut all = client.events();
        for name in ["a", "b", "c"] {
            client
                .lock(name)
                .acquire()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        assert_eq!(told(&mut of_b), ["lock b: granted", "lock b: Released after 0s"]);
        assert_eq!(told(&mut all).len(), 9);
        drop(of_b);
        client.lock("b").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(told(&mut all).len(), 3);
    });
}

#[test]
fn filter_goes_with_its_events() {
    paused(async {
        let client = LockClient::memory();
        let owned = Arc::new(());
        let filter = |owned: &Arc<()>| {
            let owned = owned.clone();
            move |_: &_, _: &_| Arc::strong_count(&owned) > 0
        };
        let (first, second) = (
            client.events_where(filter(&owned)),
            client.events_where(filter(&owned)),
        );
        assert_eq!(Arc::strong_count(&owned), 3);
        drop(first);
        assert_eq!(Arc::strong_count(&owned), 2);
        drop((client, second));
        assert_eq!(Arc::strong_count(&owned), 1);
    });
}

#[test]
fn client_ends_though_a_filter_that_is_gone_owned_it() {
    paused(async {
        let client = LockClient::memory();
        let (owned, mut others) = (client.clone(), client.events());
        let events = client.events_where(move |_, _| owned.held() == 0);
        drop((client, events));
        let end = timeout(SEC, others.next()).await.expect("the client ends");
        assert_eq!(end, None);
    });
}

#[test]
fn filter_may_ask_the_client_about_what_the_watchdog_has_noticed() {
    paused(async {
        let (watched, client) = watched().await;
        let asked = client.clone();
        let mut events = client.events_where(move |_, what| {
            let is_noticed = matches!(
                what,
                LockEventKind::Suspect | LockEventKind::Confirmed | LockEventKind::NearMiss { .. }
            );
            is_noticed && asked.held() == 1
        });
        let guard = client.lock("k").lease(30 * SEC).acquire().await.unwrap();
        watched.seen().hang_renewals.store(true, SeqCst);
        sleep(20500 * MS).await;
        watched.seen().hang_renewals.store(false, SeqCst);
        sleep(8 * SEC).await;
        assert!(guard.is_held());
        let expected = ["lock k: Suspect", "lock k: Confirmed", "lock k: near miss"];
        assert_eq!(told(&mut events), expected);
    });
}
