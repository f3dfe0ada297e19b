//! The members' replies about keys that were not acquired, for the error of a caller that gives up, and how often in a
//! row they were split.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::Kind;

/// How long replies about a key are kept at least; at most twice as long, while more arrive.
const SAID_FOR: Duration = Duration::from_secs(60);

/// The replies about a key.
#[derive(Debug)]
struct Saying {
    text: Arc<str>,
    /// How many times in a row some members granted it, but too few.
    splits: u32,
}

type Said = HashMap<(Kind, LockKey), Saying>;

/// In two halves, of which the older one is dropped as a whole: no caller scans all of them while others wait.
#[derive(Debug, Default)]
pub(super) struct Sayings {
    young: Said,
    old: Said,
    since: Option<Instant>,
}

/// Forgotten replies, to be dropped without the mutex.
#[must_use]
pub(super) struct Forgotten(#[allow(dead_code, reason = "only dropped")] Said);

impl Sayings {
    /// Also returns how many times in a row the members were split.
    pub(super) fn put(
        &mut self,
        (kind, key): (Kind, &LockKey),
        said: String,
        is_split: bool,
        now: Instant,
    ) -> (u32, Forgotten) {
        let mut forgotten = Said::default();
        if self.since.is_none_or(|since| since + SAID_FOR <= now) {
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
        self.young.insert(of, Saying { text, splits });
        (splits, Forgotten(forgotten))
    }

    pub(super) fn get(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        let of = (kind, key.clone());
        let saying = self.young.get(&of).or_else(|| self.old.get(&of));
        saying.map(|saying| saying.text.clone())
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
        let (mut sayings, begun) = (Sayings::default(), Instant::now());
        let key = LockKey::from("k");
        let known = |sayings: &Sayings| sayings.get(Kind::Mutex, &key).as_deref().map(str::to_owned);
        let put = |sayings: &mut Sayings, key: &str, said: &str, after| {
            let of = (Kind::Mutex, &key.into());
            let (_, forgotten) = sayings.put(of, said.to_owned(), false, begun + after);
            forgotten.0.len()
        };
        assert_eq!(put(&mut sayings, "k", "busy", Duration::ZERO), 0);
        assert_eq!(put(&mut sayings, "other", "busy", SAID_FOR), 0);
        assert_eq!(known(&sayings).as_deref(), Some("busy"));
        assert_eq!(put(&mut sayings, "k", "free", SAID_FOR), 0);
        assert_eq!(known(&sayings).as_deref(), Some("free"));
        sayings.forget(Kind::Mutex, &key);
        assert_eq!(known(&sayings), None);
        assert_eq!(put(&mut sayings, "k", "busy", SAID_FOR), 0);
        assert_eq!(put(&mut sayings, "other", "busy", 2 * SAID_FOR), 0);
        // All at once.
        assert_eq!(put(&mut sayings, "other", "busy", 3 * SAID_FOR), 2);
        assert_eq!(known(&sayings), None);
    }

    #[test]
    fn splits_are_counted_until_members_agree_or_the_key_is_acquired() {
        let (mut sayings, key) = (Sayings::default(), LockKey::from("k"));
        let put = |sayings: &mut Sayings, is_split| {
            let of = (Kind::Mutex, &key);
            sayings.put(of, "busy".to_owned(), is_split, Instant::now()).0
        };
        let said = [true, true, false, true].map(|is_split| put(&mut sayings, is_split));
        assert_eq!(said, [1, 2, 0, 1]);
        sayings.forget(Kind::Mutex, &key);
        assert_eq!(put(&mut sayings, true), 1);
    }
}
