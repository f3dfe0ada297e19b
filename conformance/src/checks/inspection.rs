//! Inspection and forced releases.

use std::collections::BTreeSet;

use dlock::store::Kind;

use crate::case::Case;
use crate::promise::Promise;

pub async fn inspection_names_the_holder(case: Case) {
    let promise = Promise("inspect: The holders of the key: none, one, or several readers");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    let holders = b.inspect(&key).await.expect("the store inspects");
    let [holder] = &holders[..] else {
        panic!("{promise:?}: {holders:?}");
    };
    promise.same(&holder.id, &held.grant.to_string());
    promise.same(holder.kind, Kind::Mutex);
    promise.same(holder.holds, 1);
    let most = case.long() + case.tick();
    promise.holds(holder.remaining.is_none_or(|left| left <= most), holder);
}

pub async fn inspection_of_free_key_is_empty(case: Case) {
    let promise = Promise("inspect: no holder if the key is free");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    promise.same(a.inspect(&key).await.ok(), Some(Vec::new()));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    assert!(a.gives(&held).await);
    promise.same(b.inspect(&key).await.ok(), Some(Vec::new()));
}

pub async fn list_has_held_locks_with_prefix(case: Case) {
    let promise = Promise("list: The locks whose names begin with a prefix, in no order");
    let (a, b) = case.peers().await;
    let mut expected = BTreeSet::new();
    // With characters that a store may take for a pattern.
    for name in ["a:1", "a:2", "a:*", "a:[x]", "a:%_", "A:1", "b", "*"] {
        let key = case.key(name);
        a.takes(Kind::Mutex, &key, case.long()).await;
        if name.starts_with("a:") {
            expected.insert(key);
        }
    }
    let gone = a.takes(Kind::Mutex, &case.key("a:gone"), case.long()).await;
    assert!(a.gives(&gone).await);
    let list = |prefix: String| {
        let listed = b.list(&prefix);
        async move {
            let listed = listed.await.expect("the store lists");
            listed.into_iter().map(|(key, _)| key).collect::<BTreeSet<_>>()
        }
    };
    let prefix = case.prefix();
    promise.same(list(format!("{prefix}:a:")).await, expected);
    promise.same(
        list(format!("{prefix}:a:*")).await,
        BTreeSet::from([case.key("a:*")]),
    );
    promise.same(list(format!("{prefix}:none")).await, BTreeSet::new());
}

pub async fn forced_release_ends_foreign_grant(case: Case) {
    let promise = Promise("force_release: Ends any grant of the key; returns whether there was one");
    let ((a, b), key) = (case.peers().await, case.key("k"));
    let held = a.takes(Kind::Mutex, &key, case.long()).await;
    promise.same(b.force_release(&key).await.ok(), Some(true));
    promise.holds(
        !a.renews(&held, case.long()).await,
        "the grant was renewed after that",
    );
    promise.holds(!a.gives(&held).await, "the grant was there after that");
    let next = b.takes(Kind::Mutex, &key, case.long()).await;
    promise.holds(b.gives(&next).await, "the next grant is gone");
}

pub async fn forced_release_of_free_key_says_false(case: Case) {
    let promise = Promise("force_release: returns whether there was a grant");
    let (peer, key) = (case.peer().await, case.key("k"));
    promise.same(peer.force_release(&key).await.ok(), Some(false));
    let held = peer.takes(Kind::Mutex, &key, case.long()).await;
    assert!(peer.gives(&held).await);
    promise.same(peer.force_release(&key).await.ok(), Some(false));
}
