//! Several kinds by one name.

use std::time::Instant;

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterStep};
use dlock::store::{Kind, ReleaseRequest, StoreError};

use crate::case::Case;
use crate::promise::{Promise, REFUSED};
use crate::verbs::{Peer, is_key_taken, is_not_done};

const KEY_TAKEN: Promise = Promise("KeyTaken: The key holds other data; the step was not done");

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
async fn occupy(case: &Case, peer: &Peer, kind: Kind, key: &LockKey) {
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
    let (a, b) = case.peers().await;
    for &held in Kind::ALL.iter().filter(|kind| case.has(**kind)) {
        for &asked in Kind::ALL.iter().filter(|kind| case.has(**kind)) {
            if family(held) == family(asked) {
                continue;
            }
            let key = case.key(&format!("{held}-{asked}"));
            occupy(&case, &a, held, &key).await;
            for look in look(asked).map(Some).into_iter().chain([None]) {
                refuses(&case, &b, (held, asked), look, &key).await;
            }
        }
    }
}

/// Expects that the key is taken for a step on its number, or for an acquire.
async fn refuses(
    case: &Case,
    peer: &Peer,
    (held, asked): (Kind, Kind),
    look: Option<CounterStep>,
    key: &LockKey,
) {
    let begun = Instant::now();
    loop {
        let error = match look {
            Some(look) => peer.count(key, look).await.err(),
            None => ask(case, peer, asked, key).await,
        };
        if error.as_ref().is_some_and(is_key_taken) {
            return;
        }
        // A store of several servers has not reached all of them when a majority has replied. A server that receives both
        // kinds in the other order may grant what the other servers refuse, until that is released.
        let may_pass = error.as_ref().is_some_and(|error| !is_not_done(error));
        KEY_TAKEN.holds(
            may_pass && begun.elapsed() < case.patience(),
            (held, asked, look, error),
        );
        tokio::time::sleep(case.tick() / 4).await;
    }
}

/// Asks for the key as a kind, and returns the error. What may have been granted is released.
async fn ask(case: &Case, peer: &Peer, kind: Kind, key: &LockKey) -> Option<StoreError> {
    if kind == Kind::Latch {
        return peer.count(key, CounterStep::SetCount { count: 1 }).await.err();
    }
    let request = peer.request(kind, key, case.long());
    let undone = ReleaseRequest::new(kind, key.clone(), request.grant);
    let error = peer.acquire(request).await.err();
    if error.as_ref().is_some_and(|error| !is_not_done(error)) {
        let _ = peer.release(undone).await;
    }
    error
}

/// The step that reads the number of a kind: a waiter for a latch must not take a lock for a latch at zero.
fn look(kind: Kind) -> Option<CounterStep> {
    match kind {
        Kind::Latch => Some(CounterStep::Count),
        Kind::Permit | Kind::Unowned => Some(CounterStep::Permits),
        _ => None,
    }
}

pub async fn plain_locks_of_one_key_exclude_each_other(case: Case) {
    let promise = Promise("Plain, fair and fenced locks of one name are the same lock");
    let (a, b) = case.peers().await;
    let plain = || {
        Kind::ALL
            .iter()
            .copied()
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
    for &kind in Kind::ALL {
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
