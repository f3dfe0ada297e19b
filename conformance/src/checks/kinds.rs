//! Several kinds by one name.

use std::time::Instant;

use dlock::store::counter::{CounterReply, CounterStep};
use dlock::store::{Kind, ReleaseRequest};

use crate::case::Case;
use crate::promise::{Promise, REFUSED};
use crate::verbs::{Peer, is_key_taken, is_not_done};

/// Kinds that share their data.
fn family(kind: Kind) -> u8 {
    match kind {
        Kind::Mutex | Kind::Fair | Kind::Fenced => 0,
        Kind::Read | Kind::Write => 1,
        // All of them are numbers, which a store need not distinguish.
        Kind::Permit | Kind::Unowned | Kind::Latch => 2,
        other => panic!("the contract does not say with which kinds a {other} shares its data"),
    }
}

/// Makes the key hold data of a kind; returns how to release it.
async fn occupy(case: &Case, peer: &Peer, kind: Kind, key: &dlock::LockKey) {
    match kind {
        Kind::Latch => {
            let reply = peer.count(key, CounterStep::SetCount { count: 3 }).await;
            assert!(
                matches!(reply, Ok(CounterReply::Done(true))),
                "a latch that is set: {reply:?}"
            );
        }
        _ => {
            peer.takes(kind, key, case.long()).await;
        }
    }
}

pub async fn key_of_another_kind_is_taken(case: Case) {
    let promise = Promise("KeyTaken: The key holds other data; the step was not done");
    let (a, b) = case.peers().await;
    for held in Kind::ALL.into_iter().filter(|kind| case.has(*kind)) {
        for asked in Kind::ALL.into_iter().filter(|kind| case.has(*kind)) {
            if family(held) == family(asked) {
                continue;
            }
            let key = case.key(&format!("{held}-{asked}"));
            occupy(&case, &a, held, &key).await;
            let begun = Instant::now();
            loop {
                let error = match asked {
                    Kind::Latch => b.count(&key, CounterStep::SetCount { count: 1 }).await.err(),
                    _ => {
                        let request = b.request(asked, &key, case.long());
                        let undone = ReleaseRequest::new(asked, key.clone(), request.grant);
                        let error = b.acquire(request).await.err();
                        if error.as_ref().is_some_and(|error| !is_not_done(error)) {
                            let _ = b.release(undone).await;
                        }
                        error
                    }
                };
                if error.as_ref().is_some_and(is_key_taken) {
                    break;
                }
                // A store of several servers has not reached all of them when a majority has replied. A server that
                // receives both kinds in the other order may grant what the other servers refuse, until that is
                // released.
                let may_pass = error.as_ref().is_some_and(|error| !is_not_done(error));
                promise.holds(
                    may_pass && begun.elapsed() < case.patience(),
                    (held, asked, error),
                );
                tokio::time::sleep(case.tick() / 4).await;
            }
        }
    }
}

pub async fn plain_locks_of_one_key_exclude_each_other(case: Case) {
    let promise = Promise("Plain, fair and fenced locks of one name are the same lock");
    let (a, b) = case.peers().await;
    let plain = || {
        Kind::ALL
            .into_iter()
            .filter(|kind| family(*kind) == 0 && case.has(*kind))
    };
    for held in plain() {
        for asked in plain() {
            let key = case.key(&format!("{held}-{asked}"));
            let holds = a.takes(held, &key, case.long()).await;
            let reply = b.asks(asked, &key, case.long()).await;
            promise.holds(reply.is_busy(), (held, asked, reply));
            assert!(a.gives(&holds).await);
            b.takes(asked, &key, case.long()).await;
        }
    }
}

pub async fn each_kind_is_supported_or_refused(case: Case) {
    let peer = case.peer().await;
    for kind in Kind::ALL {
        if !case.has(kind) {
            case.refuses(kind).await;
        } else if kind != Kind::Latch {
            let held = peer.takes(kind, &case.key(&kind.to_string()), case.long()).await;
            assert!(peer.gives(&held).await, "a release of a {kind}");
        }
    }
    // A latch has waiters, and no holder.
    let reply = peer
        .acquire(peer.request(Kind::Latch, &case.key("latch"), case.long()))
        .await;
    let is_refused = reply.as_ref().is_err_and(crate::verbs::is_unsupported);
    REFUSED.holds(is_refused, (Kind::Latch, reply));
}
