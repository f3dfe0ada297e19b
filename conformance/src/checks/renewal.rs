//! Leases that are extended.

use std::time::Instant;

use dlock::store::{Kind, RenewRequest};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Reply, is_gone, is_renewed};

const GONE: Promise = Promise("renew: Gone where the store knows no such grant; nothing is changed");
const EXTENDED: Promise = Promise("renew: The lease it gets, counted from now");

pub async fn renewal_extends_lease(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let called = Instant::now();
    let held = a.takes(Kind::Mutex, &key, 2 * case.short()).await;
    let renewed = a.renews(&held, case.long()).await;
    if called.elapsed() >= 2 * case.short() {
        return case.leave_out("the machine was too slow to renew in time");
    }
    EXTENDED.holds(renewed, "Gone, before the lease was over");
    tokio::time::sleep(3 * case.short()).await;
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    let left = match &reply {
        Reply::Busy(left) => left.unwrap_or(case.long()),
        found => panic!("{EXTENDED:?}: {found:?}"),
    };
    EXTENDED.holds(left > 2 * case.short(), left);
    EXTENDED.holds(a.gives(&held).await, "the grant is gone");
}

pub async fn renewal_of_unknown_grant_says_gone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let request = RenewRequest::new(Kind::Mutex, key.clone(), a.grant(), case.long());
    let reply = a.renew(vec![request]).await;
    GONE.holds(matches!(reply.as_deref(), Ok([reply]) if is_gone(reply)), reply);
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    GONE.holds(reply.is_granted(), reply);
}

pub async fn renewal_of_released_grant_says_gone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    assert!(a.gives(&held).await);
    GONE.holds(!a.renews(&held, case.long()).await, "Renewed");
    let reply = b.asks(Kind::Mutex, &key, case.long()).await;
    GONE.holds(reply.is_granted(), reply);
}

pub async fn renewal_of_foreign_grant_leaves_holder_alone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    // It would end the holder's lease soon.
    let request = RenewRequest::new(Kind::Mutex, key.clone(), b.grant(), case.short());
    let reply = b.renew(vec![request]).await;
    GONE.holds(matches!(reply.as_deref(), Ok([reply]) if is_gone(reply)), reply);
    tokio::time::sleep(2 * case.short()).await;
    GONE.holds(a.gives(&held).await, "the holder's grant is gone");
}

pub async fn renewal_after_expiry_says_gone(case: Case) {
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let before = a.takes(Kind::Mutex, &key, case.short()).await;
    let after = case
        .comes_free(
            &b,
            Kind::Mutex,
            &key,
            Promise("A lease that is not renewed expires"),
        )
        .await;
    GONE.holds(
        !a.renews(&before, case.long()).await,
        "Renewed, of a lease that was over",
    );
    assert!(b.gives(&after).await);
    GONE.holds(
        !a.renews(&before, case.long()).await,
        "Renewed, of a lease that was over",
    );
}

pub async fn renewals_are_answered_in_their_order(case: Case) {
    let promise = Promise("renew: the replies come in the order of the requests");
    let peer = case.peer().await;
    let mut all = Vec::new();
    for number in 0..8 {
        let key = case.key(&format!("k{number}"));
        all.push(peer.takes(Kind::Mutex, &key, case.long()).await);
    }
    assert!(peer.gives(&all[2]).await && peer.gives(&all[7]).await);
    // Requests of one lane are sent together.
    let mut lanes: Vec<_> = all.iter().map(|held| peer.store.lane(&held.key)).collect();
    lanes.sort();
    lanes.dedup();
    for lane in lanes {
        let of_lane = all
            .iter()
            .enumerate()
            .filter(|(_, held)| peer.store.lane(&held.key) == lane);
        let of_lane: Vec<_> = of_lane.collect();
        let requests = of_lane.iter().map(|(_, held)| held.renewal(case.long()));
        let replies = peer.renew(requests.collect()).await.expect("the store renews");
        promise.same(replies.len(), of_lane.len());
        for ((number, _), reply) in of_lane.iter().zip(&replies) {
            let is_right = match number {
                2 | 7 => is_gone(reply),
                _ => is_renewed(reply),
            };
            promise.holds(is_right, (number, reply));
        }
    }
}
