//! The members' replies about keys that were not acquired, for the error of a caller that gives up, and how often in a
//! row they were split.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::Kind;

/// How long replies about a key are kept at least; at most twice as long, while more arrive.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// The last replies about a key.
#[derive(Debug)]
struct LastReply {
    text: Arc<str>,
    /// How many times in a row some members granted it, but too few.
    splits: u32,
}

type ByKey = HashMap<(Kind, LockKey), LastReply>;

/// In two halves, of which the older one is dropped as a whole: no caller scans all of them while others wait.
#[derive(Debug, Default)]
pub(super) struct LastReplies {
    young: ByKey,
    old: ByKey,
    since: Option<Instant>,
}

/// Forgotten replies, to be dropped without the mutex.
#[must_use]
pub(super) struct Forgotten(#[allow(dead_code, reason = "only dropped")] ByKey);

impl LastReplies {
    /// Also returns how many times in a row the members were split.
    pub(super) fn put(
        &mut self,
        (kind, key): (Kind, &LockKey),
        said: String,
        is_split: bool,
        now: Instant,
    ) -> (u32, Forgotten) {
        let mut forgotten = ByKey::default();
        if self.since.is_none_or(|since| since + KEPT_FOR <= now) {
            self.since = Some(now);
            forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        }
        let of = (kind, key.clone());
        let before = self.young.get(&of).or_else(|| self.old.get(&of));
        let splits = match is_split {
            true => before.map_or(0, |before| before.splits).saturating_add(1),
            false => 0,
        };
        let text = said.into();
        self.young.insert(of, LastReply { text, splits });
        (splits, Forgotten(forgotten))
    }

    pub(super) fn get(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        let of = (kind, key.clone());
        let reply = self.young.get(&of).or_else(|| self.old.get(&of));
        reply.map(|reply| reply.text.clone())
    }

    /// Records that the key was acquired.
    pub(super) fn forget(&mut self, kind: Kind, key: &LockKey) {
        let of = (kind, key.clone());
        self.young.remove(&of);
        self.old.remove(&of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_known_for_a_while_and_goes_with_its_half() {
        let (mut replies, begun) = (LastReplies::default(), Instant::now());
        let key = LockKey::from("k");
        let known = |replies: &LastReplies| replies.get(Kind::Mutex, &key).as_deref().map(str::to_owned);
        let put = |replies: &mut LastReplies, key: &str, said: &str, after| {
            let of = (Kind::Mutex, &key.into());
            let (_, forgotten) = replies.put(of, said.to_owned(), false, begun + after);
            forgotten.0.len()
        };
        assert_eq!(put(&mut replies, "k", "busy", Duration::ZERO), 0);
        assert_eq!(put(&mut replies, "other", "busy", KEPT_FOR), 0);
        assert_eq!(known(&replies).as_deref(), Some("busy"));
        assert_eq!(put(&mut replies, "k", "free", KEPT_FOR), 0);
        assert_eq!(known(&replies).as_deref(), Some("free"));
        replies.forget(Kind::Mutex, &key);
        assert_eq!(known(&replies), None);
        assert_eq!(put(&mut replies, "k", "busy", KEPT_FOR), 0);
        assert_eq!(put(&mut replies, "other", "busy", 2 * KEPT_FOR), 0);
        // All at once.
        assert_eq!(put(&mut replies, "other", "busy", 3 * KEPT_FOR), 2);
        assert_eq!(known(&replies), None);
    }

    #[test]
    fn splits_are_counted_until_members_agree_or_the_key_is_acquired() {
        let (mut replies, key) = (LastReplies::default(), LockKey::from("k"));
        let put = |replies: &mut LastReplies, is_split| {
            let of = (Kind::Mutex, &key);
            replies.put(of, "busy".to_owned(), is_split, Instant::now()).0
        };
        let said = [true, true, false, true].map(|is_split| put(&mut replies, is_split));
        assert_eq!(said, [1, 2, 0, 1]);
        replies.forget(Kind::Mutex, &key);
        assert_eq!(put(&mut replies, true), 1);
    }
}
