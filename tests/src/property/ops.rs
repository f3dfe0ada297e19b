//! Random operations of the owners.

use dlock::store::Kind;
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use proptest::strategy::Union;

/// How many clients there are on one store.
pub(super) const OWNERS: usize = 3;
/// How many names there are. All may be locks; beside that each may be what [`Counter`] says.
pub(super) const KEYS: usize = 3;

/// What else than a lock a name is used for. Permits with an owner and those without are one number on a server, and so
/// is the count of a latch: no name is used for two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Counter {
    Permits,
    Unowned,
    Latch,
}

impl Counter {
    pub(super) fn of(key: usize) -> Counter {
        [Counter::Permits, Counter::Unowned, Counter::Latch][key]
    }

    /// As what it is waited for.
    pub(super) fn kind(self) -> Kind {
        match self {
            Counter::Permits => Kind::Permit,
            Counter::Unowned => Kind::Unowned,
            Counter::Latch => Kind::Latch,
        }
    }
}

/// For how long a lock is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lease {
    /// That of the client, renewed.
    Renewed,
    /// Longer than any sequence takes.
    Long,
    /// So many milliseconds, which end in the midst of things.
    Short(u64),
}

/// A step on the counter that a name is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Of permits: `try_set_permits`.
    TrySet(u32),
    /// Of permits with an owner: `set_permits`.
    Set(u32),
    Add(u32),
    Remove(u32),
    /// How many there are; the count of a latch.
    Look,
    /// Of permits without an owner.
    Give(u32),
    Drain,
    /// Of a latch.
    SetCount(u64),
    CountDown,
    Delete,
}

/// What one of the owners does. A guard is named by its place among all that there are, modulo their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Op {
    /// `try_acquire`.
    Take {
        owner: usize,
        key: usize,
        kind: Kind,
        lease: Lease,
    },
    /// The same for several.
    TakeAll {
        owner: usize,
        keys: Vec<usize>,
        kind: Kind,
        lease: Lease,
    },
    /// The same in the frame of a guard, by its owner.
    TakeWithin {
        guard: usize,
        key: usize,
        kind: Kind,
    },
    /// Permits, and their number if none was set.
    TakePermits {
        owner: usize,
        key: usize,
        amount: u32,
        total: Option<u32>,
        lease: Lease,
    },
    Reenter {
        guard: usize,
    },
    Downgrade {
        guard: usize,
    },
    /// `ensure` for longer than any lease is: the store is asked.
    Ensure {
        guard: usize,
    },
    Release {
        guard: usize,
    },
    Drop {
        guard: usize,
    },
    /// `acquire`, and goes on with other things; one at a time for each name.
    Wait {
        owner: usize,
        key: usize,
        kind: Kind,
    },
    /// The waiter gives up.
    GiveUp {
        key: usize,
    },
    Force {
        owner: usize,
        key: usize,
    },
    List {
        owner: usize,
    },
    Count {
        owner: usize,
        key: usize,
        step: Step,
    },
    Pause {
        millis: u64,
    },
}

/// On what the sequences lay stress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stress {
    /// Everything by the same names.
    All,
    /// Plain, fair and fenced locks, alone and in sets.
    Locks,
    /// Readers, writers, and readers under a write lock.
    ReadWrite,
    /// Permits with and without an owner, and latches.
    Counters,
}

fn lease(timed: bool) -> impl Strategy<Value = Lease> {
    prop_oneof![
        4 => Just(Lease::Renewed),
        2 => Just(Lease::Long),
        // What ends has to be waited for, on a server.
        2 => (2_u64..5).prop_map(move |n| if timed { Lease::Short(60 * n) } else { Lease::Renewed }),
    ]
}

fn lock_kind(stress: Stress) -> BoxedStrategy<Kind> {
    let kinds: &[Kind] = match stress {
        Stress::Locks => &[Kind::Mutex, Kind::Fair, Kind::Fenced],
        Stress::ReadWrite => &[Kind::Read, Kind::Read, Kind::Write],
        _ => &[
            Kind::Mutex,
            Kind::Fair,
            Kind::Fenced,
            Kind::Read,
            Kind::Read,
            Kind::Write,
        ],
    };
    proptest::sample::select(kinds).boxed()
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0_u32..5).prop_map(Step::TrySet),
        1 => (0_u32..5).prop_map(Step::Set),
        2 => (0_u32..4).prop_map(Step::Add),
        2 => (0_u32..4).prop_map(Step::Remove),
        2 => Just(Step::Look),
        2 => (0_u32..4).prop_map(Step::Give),
        1 => Just(Step::Drain),
        3 => (0_u64..4).prop_map(Step::SetCount),
        4 => Just(Step::CountDown),
        1 => Just(Step::Delete),
    ]
}

fn op(stress: Stress, timed: bool) -> impl Strategy<Value = Op> {
    let (owner, guard) = (0..OWNERS, 0_usize..8);
    // Few names, so that they meet.
    let key = 0..if stress == Stress::ReadWrite { 1 } else { KEYS };
    let kind = lock_kind(stress);
    let (locks, sets, counters) = match stress {
        Stress::All => (6, 2, 5),
        Stress::Locks => (6, 4, 0),
        Stress::ReadWrite => (8, 1, 0),
        Stress::Counters => (1, 0, 12),
    };
    let waits_for =
        (kind.clone(), 0..locks + counters).prop_map(move |(kind, of)| (of < locks).then_some(kind));
    let all = [
        (
            2 * locks,
            (owner.clone(), key.clone(), kind.clone(), lease(timed))
                .prop_map(|(owner, key, kind, lease)| Op::Take {
                    owner,
                    key,
                    kind,
                    lease,
                })
                .boxed(),
        ),
        (
            sets,
            (owner.clone(), vec(0..KEYS, 0..4), kind.clone(), lease(timed))
                .prop_map(|(owner, keys, kind, lease)| Op::TakeAll {
                    owner,
                    keys,
                    kind,
                    lease,
                })
                .boxed(),
        ),
        (
            locks,
            (guard.clone(), key.clone(), kind)
                .prop_map(|(guard, key, kind)| Op::TakeWithin { guard, key, kind })
                .boxed(),
        ),
        (
            counters,
            (owner.clone(), 0..2_usize, 0_u32..4, of(0_u32..5), lease(timed))
                .prop_map(|(owner, key, amount, total, lease)| Op::TakePermits {
                    owner,
                    key,
                    amount,
                    total,
                    lease,
                })
                .boxed(),
        ),
        (
            counters,
            (owner.clone(), key.clone(), step())
                .prop_map(|(owner, key, step)| Op::Count { owner, key, step })
                .boxed(),
        ),
        (1, guard.clone().prop_map(|guard| Op::Reenter { guard }).boxed()),
        (
            locks / 2,
            guard.clone().prop_map(|guard| Op::Downgrade { guard }).boxed(),
        ),
        (3, guard.clone().prop_map(|guard| Op::Ensure { guard }).boxed()),
        (6, guard.clone().prop_map(|guard| Op::Release { guard }).boxed()),
        (3, guard.prop_map(|guard| Op::Drop { guard }).boxed()),
        (
            3,
            (owner.clone(), key.clone(), waits_for)
                .prop_map(|(owner, key, kind)| Op::Wait {
                    owner,
                    key,
                    kind: kind.unwrap_or_else(|| Counter::of(key).kind()),
                })
                .boxed(),
        ),
        (1, key.clone().prop_map(|key| Op::GiveUp { key }).boxed()),
        (
            2,
            (owner.clone(), key)
                .prop_map(|(owner, key)| Op::Force { owner, key })
                .boxed(),
        ),
        (1, owner.prop_map(|owner| Op::List { owner }).boxed()),
        (2, (0_u64..25).prop_map(|n| Op::Pause { millis: 10 * n }).boxed()),
    ];
    Union::new_weighted(all.into_iter().filter(|(weight, _)| *weight > 0).collect())
}

/// A sequence of operations: one in three is about leases that end.
pub(super) fn sequence(stress: Stress) -> impl Strategy<Value = Vec<Op>> {
    prop_oneof![
        2 => vec(op(stress, false), 1..40),
        1 => vec(op(stress, true), 1..40),
    ]
}
