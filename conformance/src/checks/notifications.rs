//! Waiters that are woken.

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Reply};

const LOOK_NOW: Promise = Promise("watch: The first notification is \"subscribed, look now\"");
const WAKES: Promise = Promise("release: wakes the waiters of the key");

pub async fn new_watch_says_look_now(case: Case) {
    let (peer, key) = (case.peer().await, case.key("k"));
    let mut watch = peer.watch(Kind::Mutex, &key, peer.grant());
    case.hears(&mut watch, LOOK_NOW).await;
    // Waiters of one process share a subscription, and each waiter looks.
    let mut second = peer.watch(Kind::Mutex, &key, peer.grant());
    case.hears(&mut second, LOOK_NOW).await;
}

pub async fn release_wakes_watch(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut watch = b.watch(Kind::Mutex, &key, b.grant());
    case.hears(&mut watch, LOOK_NOW).await;
    for _ in 0..5 {
        let held = a.takes(Kind::Mutex, &key, case.long()).await;
        case.settles(&mut watch).await;
        assert!(a.gives(&held).await);
        case.hears(&mut watch, WAKES).await;
        let held = b.takes(Kind::Mutex, &key, case.long()).await;
        assert!(b.gives(&held).await);
    }
}

pub async fn forced_release_wakes_watch(case: Case) {
    let promise = Promise("force_release: wakes the waiters");
    if !case.can().inspection {
        return case.leave_out("no lock is forced open");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    a.takes(Kind::Mutex, &key, case.long()).await;
    let mut watch = case
        .watches(b.watch(Kind::Mutex, &key, b.grant()), LOOK_NOW)
        .await;
    assert_eq!(
        b.force_release(&key).await.ok(),
        Some(true),
        "force_release of a held lock"
    );
    case.hears(&mut watch, promise).await;
}

pub async fn release_wakes_every_watch(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let mut watches = Vec::new();
    for peer in [&a, &a, &b, &b] {
        let mut watch = peer.watch(Kind::Mutex, &key, peer.grant());
        case.hears(&mut watch, LOOK_NOW).await;
        watches.push(watch);
    }
    for watch in &mut watches {
        case.settles(watch).await;
    }
    assert!(a.gives(&held).await);
    for watch in &mut watches {
        case.hears(watch, WAKES).await;
    }
}

pub async fn long_names_that_begin_alike_have_watches_of_their_own(case: Case) {
    let (a, b) = case.peers().await;
    let mut watches = Vec::new();
    for end in ["one", "two"] {
        let key = case.key(&format!("{}{end}", "x".repeat(200)));
        let watch = case
            .watches(b.watch(Kind::Mutex, &key, b.grant()), LOOK_NOW)
            .await;
        watches.push((key, watch));
    }
    // A store that makes one of both refuses the second.
    let mut held = Vec::new();
    for (key, _) in &watches {
        held.push(a.takes(Kind::Mutex, key, case.long()).await);
    }
    for ((_, watch), held) in watches.iter_mut().zip(&held) {
        case.settles(watch).await;
        assert!(a.gives(held).await);
        case.hears(watch, WAKES).await;
    }
}

pub async fn dropped_watch_leaves_others_alone(case: Case) {
    let promise = Promise("Dropping the last watch of a key ends the subscription");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let mut kept = b.watch(Kind::Mutex, &key, b.grant());
    case.hears(&mut kept, LOOK_NOW).await;
    for _ in 0..3 {
        let mut dropped = b.watch(Kind::Mutex, &key, b.grant());
        case.hears(&mut dropped, LOOK_NOW).await;
    }
    case.settles(&mut kept).await;
    assert!(a.gives(&held).await);
    case.hears(&mut kept, promise).await;
    // After the last subscriber is gone, a new first one subscribes.
    drop(kept);
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let mut again = case
        .watches(b.watch(Kind::Mutex, &key, b.grant()), LOOK_NOW)
        .await;
    assert!(a.gives(&held).await);
    case.hears(&mut again, WAKES).await;
}

/// Every waiter relies on this: it subscribes, looks once, and then sleeps.
pub async fn release_between_watch_and_look_is_not_missed(case: Case) {
    let promise =
        Promise("A release after the look that follows \"look now\" is told: subscribe, then look once");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    for round in 0..30_u32 {
        let held = a.takes(Kind::Mutex, &key, case.long()).await;
        let releasing = {
            let a = a.clone();
            let pause = case.tick() * round / 300;
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                assert!(a.gives(&held).await);
            })
        };
        let mut watch = b.watch(Kind::Mutex, &key, b.grant());
        let held = loop {
            case.hears(&mut watch, promise).await;
            let request = b.request(Kind::Mutex, &key, case.long());
            let held = Held::asked_by(&request);
            if let Ok(Reply::Granted(_)) = b.acquire(request).await {
                break held;
            }
        };
        assert!(b.gives(&held).await);
        releasing
            .await
            .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    }
}
