//! Fencing tokens.

use dlock::LockKey;
use dlock::store::Kind;

use crate::case::Case;
use crate::fixture::Fault;
use crate::promise::Promise;
use crate::verbs::{Peer, Reply};

const GROW: Promise = Promise("A fencing token is greater than every token of the key before");

pub async fn tokens_grow_over_release(case: Case) {
    let (a, b) = case.peers().await;
    // Readers and writers share a counter; each kind of plain lock may have its own.
    let orders = [
        &[Kind::Mutex][..],
        &[Kind::Fair],
        &[Kind::Fenced],
        &[Kind::Write, Kind::Read, Kind::Read],
        &[Kind::Permit],
    ];
    for kinds in orders {
        if !kinds.iter().all(|kind| case.has(*kind)) {
            continue;
        }
        let (key, mut last) = (case.key(&kinds[0].to_string()), 0);
        for (kind, peer) in kinds.iter().cycle().zip([&a, &b, &a, &a, &b, &b, &a]) {
            let held = peer.takes(*kind, &key, case.long()).await;
            GROW.holds(held.tokens.first > last, (kind, last, &held.tokens));
            last = held.tokens.last;
            assert!(peer.gives(&held).await);
        }
    }
}

pub async fn tokens_grow_over_expiry(case: Case) {
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
    GROW.holds(
        after.tokens.first > before.tokens.last,
        (before.tokens, after.tokens),
    );
}

pub async fn tokens_grow_over_forced_release(case: Case) {
    if !case.can().inspection {
        return case.leave_out("no lock is forced open");
    }
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let before = a.takes(Kind::Mutex, &key, case.long()).await;
    assert_eq!(
        b.force_release(&key).await.ok(),
        Some(true),
        "force_release of a held lock"
    );
    let after = b.takes(Kind::Mutex, &key, case.long()).await;
    GROW.holds(
        after.tokens.first > before.tokens.last,
        (before.tokens, after.tokens),
    );
}

/// A store may grant fewer tokens than requested: at least one.
pub async fn tokens_of_blocks_do_not_overlap(case: Case) {
    let block = Promise(
        "tokens: How many fencing tokens to reserve; the store grants at least one, and no more than that",
    );
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let mut last = 0;
    for (peer, wanted) in [(&a, 7), (&b, 1), (&b, 1000), (&a, 2), (&a, 1)] {
        let mut request = peer.request(Kind::Mutex, &key, case.long());
        request.tokens = wanted;
        let held = peer.takes_as(request).await;
        let (first, end) = (held.tokens.first, held.tokens.last);
        block.holds(
            first <= end && end - first < u64::from(wanted),
            (wanted, first, end),
        );
        GROW.holds(first > last, (last, first));
        last = end;
        assert!(peer.gives(&held).await);
    }
}

pub async fn tokens_grow_after_data_loss(case: Case) {
    grow_over(&case, Fault::Forget).await;
}

pub async fn tokens_grow_over_restart(case: Case) {
    grow_over(&case, Fault::Restart).await;
}

pub(super) async fn grow_over(case: &Case, fault: Fault) {
    let (a, b) = case.peers().await;
    let mut before = Vec::new();
    for kind in [Kind::Mutex, Kind::Fair, Kind::Fenced, Kind::Write] {
        if case.has(kind) {
            before.push(a.takes(kind, &case.key(&kind.to_string()), case.short()).await);
        }
    }
    if !case.fault(fault).await {
        return;
    }
    for held in before {
        let after = granted_soon(case, &b, held.kind, &held.key).await;
        GROW.holds(after > held.tokens.last, (fault, held, after));
    }
}

/// The token of the grant once the store serves again.
async fn granted_soon(case: &Case, peer: &Peer, kind: Kind, key: &LockKey) -> u64 {
    let again = async {
        loop {
            if let Ok(Reply::Granted(tokens)) = peer.tries(kind, key, case.long()).await {
                return tokens.first;
            }
            tokio::time::sleep(case.tick() / 4).await;
        }
    };
    let granted = tokio::time::timeout(2 * case.patience(), again).await;
    granted.expect("the store serves again after the fault")
}
