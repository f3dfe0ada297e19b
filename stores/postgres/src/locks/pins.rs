//! The locks that open transactions hold, as far as this process has seen.
//!
//! The end of a transaction sends no notification: a NOTIFY in it would block all commits with notifications while it
//! writes to the disk. So a waiter tries again, soon at first, and less often the longer the transaction takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The shortest and the longest time after which a waiter tries again.
const AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));
/// How long a transaction is remembered after it was last seen, and how often the server is asked which one it is.
const FRESH: Duration = Duration::from_secs(1);
/// The number of entries from which stale ones are removed.
const MANY: usize = 256;

/// The locks that transactions hold, by name.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<HashMap<Arc<str>, Pin>>);

#[derive(Debug)]
struct Pin {
    since: Instant,
    seen: Instant,
    /// When the server was last asked for the transaction.
    named: Option<Instant>,
    why: Option<Arc<str>>,
}

impl Pin {
    fn is_fresh(&self, now: Instant) -> bool {
        now.duration_since(self.seen) < FRESH
    }
}

impl Pins {
    /// Records that a transaction holds a lock. Returns when to try again, and whether to ask which transaction it is.
    pub(crate) fn found(&self, name: &Arc<str>, now: Instant) -> (Duration, bool) {
        let mut pins = self.0.lock();
        if pins.len() >= MANY {
            pins.retain(|_, pin| pin.is_fresh(now));
        }
        let new = || Pin {
            since: now,
            seen: now,
            named: None,
            why: None,
        };
        let pin = pins.entry(name.clone()).or_insert_with(new);
        if !pin.is_fresh(now) {
            *pin = new();
        }
        pin.seen = now;
        let ask = pin.named.is_none_or(|named| now.duration_since(named) >= FRESH);
        if ask {
            pin.named = Some(now);
        }
        let again = (now.duration_since(pin.since) / 2).clamp(AGAIN.0, AGAIN.1);
        (again, ask)
    }

    /// Records the transactions that hold the lock.
    pub(crate) fn named(&self, name: &str, why: String) {
        if let Some(pin) = self.0.lock().get_mut(name) {
            pin.why = Some(why.into());
        }
    }

    /// Records that no transaction holds the lock.
    pub(crate) fn gone(&self, name: &str) {
        self.0.lock().remove(name);
    }

    /// Whether a transaction recently held the lock.
    pub(crate) fn is_known(&self, name: &str, now: Instant) -> bool {
        self.0.lock().get(name).is_some_and(|pin| pin.is_fresh(now))
    }

    /// Explains to a caller why the lock was not acquired.
    pub(crate) fn why(&self, name: &str, now: Instant) -> Option<Arc<str>> {
        let pins = self.0.lock();
        pins.get(name)
            .filter(|pin| pin.is_fresh(now))
            .and_then(|pin| pin.why.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn waiter_looks_soon_at_first_and_less_often_later() {
        let (pins, name, begun) = (Pins::default(), Arc::from("k"), Instant::now());
        for (after, again, ask) in [
            (0, 10, true),
            (15, 10, false),
            (100, 50, false),
            (600, 250, false),
            (1500, 250, true),
            // Not seen for a while: it is a new transaction.
            (9000, 10, true),
        ] {
            assert_eq!(
                pins.found(&name, begun + after * MS),
                (again * MS, ask),
                "{after}"
            );
        }
    }

    #[test]
    fn what_is_gone_or_was_long_ago_is_not_told() {
        let (pins, name, begun) = (Pins::default(), Arc::from("k"), Instant::now());
        pins.found(&name, begun);
        assert_eq!(pins.why(&name, begun), None);
        pins.named(&name, "why".to_owned());
        assert_eq!(pins.why(&name, begun).as_deref(), Some("why"));
        assert!(pins.is_known(&name, begun + 999 * MS));
        assert_eq!(pins.why(&name, begun + 1000 * MS), None);
        pins.gone(&name);
        assert!(!pins.is_known(&name, begun));
    }

    #[test]
    fn those_that_are_forgotten_are_removed() {
        let (pins, begun) = (Pins::default(), Instant::now());
        for n in 0..1000_u32 {
            pins.found(&n.to_string().into(), begun + n * 10 * MS);
        }
        assert!(pins.0.lock().len() <= MANY);
    }
}
