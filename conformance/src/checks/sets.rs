//! Several locks in one step.

use std::collections::BTreeMap;

use dlock::LockKey;
use dlock::store::{Kind, StoreError};

use crate::case::Case;
use crate::promise::Promise;
use crate::verbs::{Held, Peer, SetReply, is_unsupported};

const TOGETHER: Promise = Promise("acquire_all: Grants all of these locks or none, in one step");

/// Three of so many keys are in one part of a store that has fewer than fifty.
const MOST_KEYS: u32 = 100;

/// Three keys that the store can acquire in one step, if it has such.
async fn together(case: &Case, peer: &Peer) -> Option<[LockKey; 3]> {
    let mut groups: BTreeMap<u32, Vec<LockKey>> = BTreeMap::new();
    for number in 0..MOST_KEYS {
        // In a cluster the part in braces says where a key is; another store may go by the whole name.
        let key = LockKey::raw(format!("{{{}}}:{number}", case.prefix()));
        let Some(group) = peer.together(Kind::Mutex, &key) else {
            continue;
        };
        let keys = groups.entry(group).or_default();
        keys.push(key);
        if let Ok(keys) = keys.clone().try_into() {
            return Some(keys);
        }
    }
    if groups.is_empty() {
        let request = peer.request(Kind::Mutex, &case.key("alone"), case.long());
        let reply: Result<SetReply, StoreError> = peer.acquire_all(vec![request]).await;
        let refused = matches!(&reply, Err(error) if is_unsupported(error));
        Promise("acquire_all: a store without it refuses it as Unsupported").holds(refused, reply);
        case.leave_out("the store grants one lock at a time");
    } else {
        case.leave_out(format!(
            "none of {MOST_KEYS} keys is acquired in one step with two others"
        ));
    }
    None
}

pub async fn set_is_granted_with_a_token_for_each_key(case: Case) {
    let (a, b) = case.peers().await;
    let Some(keys) = together(&case, &a).await else {
        return;
    };
    let mut before = [0; 3];
    for _ in 0..2 {
        let requests: Vec<_> = keys
            .iter()
            .map(|key| a.request(Kind::Mutex, key, case.long()))
            .collect();
        let held: Vec<_> = requests.iter().map(Held::asked_by).collect();
        let reply = a.acquire_all(requests).await;
        let Ok(SetReply::Granted(tokens)) = &reply else {
            panic!("broken promise: {TOGETHER:?}\n  found: {reply:?}");
        };
        TOGETHER.same(tokens.len(), 3);
        for (token, before) in tokens.iter().zip(&mut before) {
            Promise("A fencing token is greater than every token of the key before")
                .holds(token > before, (token, &before));
            *before = *token;
        }
        for key in &keys {
            let reply = b.asks(Kind::Mutex, key, case.long()).await;
            TOGETHER.holds(reply.is_busy(), (key, reply));
        }
        for held in &held {
            TOGETHER.holds(a.gives(held).await, &held.key);
        }
    }
}

pub async fn set_with_a_busy_key_grants_nothing(case: Case) {
    let (a, b) = case.peers().await;
    let Some(keys) = together(&case, &a).await else {
        return;
    };
    for busy in [0, 1, 2] {
        let held = b.takes(Kind::Mutex, &keys[busy], case.long()).await;
        let requests = keys.iter().map(|key| a.request(Kind::Mutex, key, case.long()));
        let reply = a.acquire_all(requests.collect()).await;
        TOGETHER.holds(
            matches!(reply, Ok(SetReply::Busy { at }) if at == busy),
            (busy, reply),
        );
        assert!(b.gives(&held).await);
        for key in &keys {
            let free = b.takes(Kind::Mutex, key, case.long()).await;
            assert!(b.gives(&free).await);
        }
    }
}
