//! What a step on a counter does, by what it has read.

use dlock::store::counter::{CounterReply, CounterStep};
use dlock::store::{Reason, StoreError};

use crate::layout::CounterPaths;
use crate::permits::Numbers;
use crate::wire::{Change, Mode};

/// The most permits: those of a `SharedCount`.
const MOST: i64 = i32::MAX as i64;

/// What a step reads.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) numbers: Numbers,
    /// The names of the leases before the numbers were read, of a semaphore that is drained or deleted.
    pub(super) leases: Vec<String>,
    /// The count of the latch and the version of its node.
    pub(super) latch: Option<(u64, i32)>,
    /// The family of other data of the key.
    pub(super) taken: Option<&'static str>,
}

/// What a step does.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Effect {
    pub(super) reply: CounterReply,
    /// All of them are made, or none.
    pub(super) changes: Vec<Change>,
}

impl Effect {
    fn nothing(reply: CounterReply) -> Effect {
        let changes = Vec::new();
        Effect { reply, changes }
    }

    fn one(reply: CounterReply, change: Change) -> Effect {
        let changes = vec![change];
        Effect { reply, changes }
    }
}

impl Seen {
    pub(super) fn effect(&self, step: CounterStep, paths: &CounterPaths) -> Result<Effect, StoreError> {
        Ok(match step {
            CounterStep::Permits => Effect::nothing(self.permits(self.total())),
            CounterStep::SetPermits { total, only_unset } => self.sets_permits(total, only_unset, paths),
            CounterStep::AddPermits { by, unowned: false } => self.adds_permits(by, paths),
            CounterStep::Drain => self.drains(paths),
            CounterStep::DeletePermits => self.deletes_permits(paths),
            CounterStep::Count => {
                Effect::nothing(CounterReply::Number(self.latch.map_or(0, |(count, _)| count)))
            }
            CounterStep::SetCount { count } => self.sets_count(count, paths),
            CounterStep::CountDown => self.counts_down(paths),
            CounterStep::DeleteLatch => self.deletes_latch(paths),
            _ => {
                let message = "ZooKeeper has no permits without a holder";
                return Err(StoreError::not_done(Reason::Unsupported, message));
            }
        })
    }

    fn total(&self) -> Option<i64> {
        self.numbers.total.map(|(total, _)| total)
    }

    fn permits(&self, total: Option<i64>) -> CounterReply {
        let held = self.numbers.held;
        CounterReply::Permits {
            free: total.map(|total| total - held),
            held: u64::try_from(held).unwrap_or(0),
        }
    }

    fn sets_total(&self, total: i64, reply: CounterReply, paths: &CounterPaths) -> Effect {
        let Ok(total) = i32::try_from(total) else {
            return Effect::nothing(CounterReply::TooMany);
        };
        let (path, data) = (paths.total.clone(), total.to_be_bytes().to_vec());
        let change = match self.numbers.total {
            Some((_, version)) => Change::Set { path, data, version },
            None => Change::Create {
                path,
                data,
                mode: Mode::Persistent,
            },
        };
        Effect::one(reply, change)
    }

    fn sets_permits(&self, total: u32, only_unset: bool, paths: &CounterPaths) -> Effect {
        let stays = self
            .total()
            .is_some_and(|is| only_unset || is == i64::from(total));
        match stays {
            true => Effect::nothing(CounterReply::Done(false)),
            false => self.sets_total(i64::from(total), CounterReply::Done(true), paths),
        }
    }

    fn adds_permits(&self, by: i64, paths: &CounterPaths) -> Effect {
        let is = self.total().unwrap_or(0);
        let total = is.saturating_add(by);
        if by < 0 && (self.total().is_none() || total < 0) {
            let is = u64::try_from(is).unwrap_or(0);
            return Effect::nothing(CounterReply::TooFew { is });
        }
        match total > MOST {
            true => Effect::nothing(CounterReply::TooMany),
            false => self.sets_total(total, self.permits(Some(total)), paths),
        }
    }

    fn drains(&self, paths: &CounterPaths) -> Effect {
        let total = self.total().unwrap_or(0);
        let free = (total - self.numbers.held).max(0);
        let reply = CounterReply::Number(u64::try_from(free).unwrap_or(0));
        if free == 0 {
            return Effect::nothing(reply);
        }
        let mut effect = self.sets_total(total - free, reply, paths);
        effect.changes.extend(self.no_acquire(paths));
        effect
    }

    fn deletes_permits(&self, paths: &CounterPaths) -> Effect {
        let leases = self.leases.iter().map(|name| Change::Delete {
            path: paths.lease(name),
            version: -1,
        });
        let total = self.numbers.total.map(|(_, version)| Change::Delete {
            path: paths.total.clone(),
            version,
        });
        let mut changes: Vec<Change> = leases.chain(total).collect();
        if changes.is_empty() {
            return Effect::nothing(CounterReply::Done(false));
        }
        changes.extend(self.no_lease(paths));
        let reply = CounterReply::Done(true);
        Effect { reply, changes }
    }

    /// Changes that cannot be made if an acquire of dlock comes in between.
    fn no_acquire(&self, paths: &CounterPaths) -> Vec<Change> {
        let (Some(version), Some(lease)) = (self.numbers.leases, self.leases.first()) else {
            return self.no_lease(paths);
        };
        // With this lease the parent is the same: servers remove an empty one, and another one may have that version too.
        let lease = Change::Check {
            path: paths.lease(lease),
            version: -1,
        };
        let path = paths.leases.clone();
        vec![lease, Change::Check { path, version }]
    }

    /// Changes that cannot be made while there is a lease. They remove the empty parent of the leases.
    fn no_lease(&self, paths: &CounterPaths) -> Vec<Change> {
        let path = paths.leases.clone();
        let create = Change::Create {
            path: path.clone(),
            data: Vec::new(),
            mode: Mode::Container,
        };
        let is_missing = self.numbers.leases.is_none();
        let creates = is_missing.then_some(create).into_iter();
        creates.chain([Change::Delete { path, version: -1 }]).collect()
    }

    fn sets_count(&self, count: u64, paths: &CounterPaths) -> Effect {
        if self.latch.is_some() {
            return Effect::nothing(CounterReply::Done(false));
        }
        let create = Change::Create {
            path: paths.latch.clone(),
            data: count.to_string().into_bytes(),
            mode: Mode::Persistent,
        };
        Effect::one(CounterReply::Done(true), create)
    }

    fn counts_down(&self, paths: &CounterPaths) -> Effect {
        let Some((count, version)) = self.latch else {
            return Effect::nothing(CounterReply::TooFew { is: 0 });
        };
        let (path, left) = (paths.latch.clone(), count.saturating_sub(1));
        let change = match left {
            0 => Change::Delete { path, version },
            _ => Change::Set {
                path,
                data: left.to_string().into_bytes(),
                version,
            },
        };
        Effect::one(CounterReply::Number(left), change)
    }

    fn deletes_latch(&self, paths: &CounterPaths) -> Effect {
        let Some((_, version)) = self.latch else {
            return Effect::nothing(CounterReply::Done(false));
        };
        let path = paths.latch.clone();
        Effect::one(CounterReply::Done(true), Change::Delete { path, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(held: i64, leases: Option<i32>, total: i64) -> Seen {
        Seen {
            numbers: Numbers {
                held,
                leases,
                total: Some((total, 3)),
            },
            leases: (0..held).map(|n| format!("lease-{n}")).collect(),
            ..Seen::default()
        }
    }

    fn effect(seen: &Seen, step: CounterStep) -> (CounterReply, Vec<String>) {
        let Effect { reply, changes } = seen.effect(step, &CounterPaths::of("/k")).unwrap();
        let said = changes.iter().map(|change| match change {
            Change::Check { path, version } => format!("check {path} {version}"),
            Change::Create { path, .. } => format!("create {path}"),
            Change::Set { path, version, .. } => format!("set {path} {version}"),
            Change::Delete { path, version } => format!("delete {path} {version}"),
        });
        (reply, said.collect())
    }

    #[test]
    fn drain_and_deletion_fail_after_an_acquire_that_they_have_not_seen() {
        for (held, leases, guards) in [
            (0, None, &["create /k/leases", "delete /k/leases -1"][..]),
            (0, Some(7), &["delete /k/leases -1"]),
            (2, Some(7), &["check /k/leases/lease-0 -1", "check /k/leases 7"]),
        ] {
            let (reply, changes) = effect(&seen(held, leases, 5), CounterStep::Drain);
            assert_eq!(reply, CounterReply::Number(5 - held.unsigned_abs()));
            assert_eq!(changes, [&["set /k/permits 3"], guards].concat());
        }
        let (reply, changes) = effect(&seen(1, Some(7), 5), CounterStep::DeletePermits);
        assert_eq!(reply, CounterReply::Done(true));
        let wanted = [
            "delete /k/leases/lease-0 -1",
            "delete /k/permits 3",
            "delete /k/leases -1",
        ];
        assert_eq!(changes, wanted);
    }

    #[test]
    fn total_stays_between_zero_and_the_most_permits() {
        let adds = |total, by| {
            effect(
                &seen(1, Some(0), total),
                CounterStep::AddPermits { by, unowned: false },
            )
        };
        assert_eq!(adds(2, -3), (CounterReply::TooFew { is: 2 }, Vec::new()));
        assert_eq!(adds(2, MOST - 1), (CounterReply::TooMany, Vec::new()));
        let (free, held) = (Some(MOST - 1), 1);
        let most = (
            CounterReply::Permits { free, held },
            vec!["set /k/permits 3".to_owned()],
        );
        assert_eq!(adds(2, MOST - 2), most);
        let unset = effect(
            &Seen::default(),
            CounterStep::AddPermits {
                by: -1,
                unowned: false,
            },
        );
        assert_eq!(unset, (CounterReply::TooFew { is: 0 }, Vec::new()));
    }

    #[test]
    fn latch_is_deleted_with_its_last_step() {
        let counts_down = |count| {
            let latch = Some((count, 4));
            effect(
                &Seen {
                    latch,
                    ..Seen::default()
                },
                CounterStep::CountDown,
            )
        };
        let left = |left, change: &str| (CounterReply::Number(left), vec![change.to_owned()]);
        assert_eq!(counts_down(2), left(1, "set /k/latch 4"));
        assert_eq!(counts_down(1), left(0, "delete /k/latch 4"));
        let open = effect(&Seen::default(), CounterStep::CountDown);
        assert_eq!(open, (CounterReply::TooFew { is: 0 }, Vec::new()));
    }
}
