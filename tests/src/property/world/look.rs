//! What the store shows, and what guards say of themselves.

use dlock::store::Kind;
use tokio::time::Instant;

use super::answers::is_left;
use super::{Done, Real, World, wrong};
use crate::property::ops::{KEYS, Step};

impl World<'_> {
    /// The holders and the counters, as the store sees them.
    pub(super) async fn look(&mut self, owner: usize, key: usize) -> Done {
        let began = Instant::now();
        let client = &self.clients[owner];
        let holders = client.holders(self.name(key)).await;
        self.in_time()?;
        let now = Instant::now();
        let mut holders = match holders {
            Ok(holders) => holders,
            Err(error) => return wrong("holders", error),
        };
        let mut expected = Vec::new();
        for (_, grant) in self.model.stored(key) {
            for _ in 0..grant.wanted.amount {
                expected.push((seen_as(grant.wanted.kind), grant.ends));
            }
        }
        // Each holder is one of those that should be there: of several the one whose time is over first.
        expected.sort_by_key(|(_, ends)| ends.max);
        holders.sort_by_key(|holder| holder.remaining);
        let mut missing = expected.clone();
        let agrees = expected.len() == holders.len()
            && holders.iter().all(|holder| {
                let found = missing.iter().position(|(kind, ends)| {
                    holder.kind == *kind
                        && holder.holds == 1
                        && is_left(Some(*ends), holder.remaining, began, now)
                });
                found.map(|at| missing.remove(at)).is_some()
            });
        if !agrees {
            return wrong(format!("holders {expected:?} at {now:?}"), holders);
        }
        self.count(owner, key, Step::Look, now).await
    }

    pub(super) async fn list(&mut self, owner: usize) -> Done {
        let listed = self.clients[owner].list(&self.prefix).await;
        self.in_time()?;
        let mut seen: Vec<_> = match listed {
            Ok(listed) => listed
                .iter()
                .map(|(key, holder)| (self.key(key.as_str()), holder.kind.to_string()))
                .collect(),
            Err(error) => return wrong("a list", error),
        };
        let mut expected = Vec::new();
        for key in 0..KEYS {
            for (_, grant) in self.model.stored(key) {
                for _ in 0..grant.wanted.amount {
                    expected.push((Some(key), seen_as(grant.wanted.kind).to_string()));
                }
            }
        }
        seen.sort();
        expected.sort();
        if seen == expected {
            Ok(())
        } else {
            wrong(expected, seen)
        }
    }

    /// What each guard says of itself, without a word to the store.
    pub(super) fn guards_know(&self) -> Done {
        for guard in &self.guards {
            let is_held = match &guard.real {
                Real::Lock(guard) => guard.is_held(),
                Real::Several(guard) => guard.is_held(),
                Real::Permit(guard) => guard.is_held(),
            };
            let known = guard
                .of
                .iter()
                .all(|(at, _)| self.model.grants[*at].known.is_none());
            if is_held != known {
                return wrong(format!("is_held() {known}"), guard);
            }
        }
        Ok(())
    }
}

/// As what a store shows a holder.
fn seen_as(kind: Kind) -> Kind {
    match kind {
        Kind::Fair | Kind::Fenced => Kind::Mutex,
        other => other,
    }
}
