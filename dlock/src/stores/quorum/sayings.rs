//! What the members said of keys that were not had, for the error of a caller that gives up.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::LockKey;
use crate::base::chance::HashMap;
use crate::store::Kind;

/// How long what was said of a key is remembered at least; twice as long at most, while more is said.
const SAID_FOR: Duration = Duration::from_secs(60);

type Said = HashMap<(Kind, LockKey), Arc<str>>;

/// In two halves, of which the older one goes as a whole: no caller looks through all of them while others wait.
#[derive(Debug, Default)]
pub(super) struct Sayings {
    young: Said,
    old: Said,
    since: Option<Instant>,
}

/// What was forgotten, to be dropped without the lock.
#[must_use]
pub(super) struct Forgotten(#[allow(dead_code, reason = "only dropped")] Said);

impl Sayings {
    pub(super) fn put(&mut self, kind: Kind, key: &LockKey, said: String, now: Instant) -> Forgotten {
        let mut forgotten = Said::default();
        if self.since.is_none_or(|since| since + SAID_FOR <= now) {
            self.since = Some(now);
            forgotten = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        }
        self.young.insert((kind, key.clone()), said.into());
        Forgotten(forgotten)
    }

    pub(super) fn get(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        let of = (kind, key.clone());
        self.young.get(&of).or_else(|| self.old.get(&of)).cloned()
    }

    /// The key was acquired.
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
            let forgotten = sayings.put(Kind::Mutex, &key.into(), said.to_owned(), begun + after);
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
}
