//! What a task does next, drawn at random.

use std::time::Duration;

use dlock::store::Capabilities;
use fastrand::Rng;

use crate::chaos::event::Share;
use crate::chaos::store::{KEYS, LEASE, LONG_KEYS, LONGEST_LEASE};
use crate::chaos::wanted::{PERMITS, Sort};

/// How a lock is acquired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// Waits until it is available.
    Wait,
    /// Tries once.
    Try,
    /// Waits for so long.
    Within(Duration),
    /// Is dropped after so long, at whatever step.
    Cancelled(Duration),
    /// The work runs inside, as the closure of `Lock::run`.
    Run,
}

/// The terms of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Terms {
    /// The client's lease, renewed.
    Plain,
    /// Another lease, renewed.
    Renewed(Duration),
    /// Not renewed.
    Fixed(Duration),
    MaxHold(Duration),
    MinHold(Duration),
}

/// How it is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Release,
    /// The release is dropped after its start.
    Begun,
    /// A writer reads on, and releases that.
    Downgrade,
    Drop,
    Panic,
}

/// One acquire and what follows.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) key: usize,
    pub(super) share: Share,
    pub(super) ask: Ask,
    pub(super) terms: Terms,
    pub(super) work: Duration,
    pub(super) again: bool,
    pub(super) ensure: bool,
    pub(super) end: End,
    /// What it does before the next one.
    pub(super) pause: Duration,
}

impl Plan {
    /// For a task that often works for long, or for another one: these would soon all wait for such tasks.
    pub(super) fn draw(rng: &mut Rng, often_long: bool, store: &Capabilities) -> Plan {
        let key = match often_long {
            true => rng.usize(..LONG_KEYS),
            false => rng.usize(LONG_KEYS..KEYS),
        };
        let sort = Sort::of(store, key);
        let share = match sort {
            Sort::ReadWrite | Sort::PreferWriters if rng.u32(..4) > 0 => Share::Read,
            Sort::Total | Sort::Limit => Share::Permits {
                amount: rng.u32(1..=PERMITS).min(rng.u32(1..=PERMITS)),
                total: PERMITS,
            },
            _ => Share::All,
        };
        let ask = match rng.u32(..100) {
            0..=9 => Ask::Try,
            10..=19 => Ask::Within(millis(rng, 20..3000)),
            20..=23 => Ask::Cancelled(millis(rng, 0..3)),
            24..=29 => Ask::Cancelled(millis(rng, 0..200)),
            30..=35 => Ask::Run,
            _ => Ask::Wait,
        };
        let most = LONGEST_LEASE.as_millis() as u64;
        let terms = match rng.u32(..100) {
            0..=5 => Terms::Renewed(millis(rng, 400..most)),
            6..=13 => Terms::Fixed(millis(rng, 200..most)),
            14..=17 => Terms::MaxHold(millis(rng, 200..1500)),
            18..=20 => Terms::MinHold(millis(rng, 20..200)),
            _ => Terms::Plain,
        };
        let long = match share {
            _ if often_long => rng.u32(..4) == 0,
            Share::All => rng.u32(..400) == 0,
            // Others can share it meanwhile.
            Share::Read | Share::Permits { .. } => rng.u32(..40) == 0,
        };
        let work = match long {
            true => millis(rng, 1000..6000),
            false => match rng.u32(..10) {
                0..=5 => Duration::ZERO,
                6..=8 => millis(rng, 0..10),
                _ => millis(rng, 0..40),
            },
        };
        let end = match rng.u32(..100) {
            0..=19 => End::Drop,
            20..=24 => End::Begun,
            25 => End::Panic,
            26..=49 if share == Share::All && matches!(sort, Sort::ReadWrite | Sort::PreferWriters) => {
                End::Downgrade
            }
            _ => End::Release,
        };
        let plan = Plan {
            key,
            share,
            ask,
            terms,
            work,
            again: rng.u32(..20) == 0,
            ensure: rng.u32(..30) == 0,
            end,
            pause: millis(rng, 0..4),
        };
        plan.on(store)
    }

    /// The same on a store that does not support all of it.
    fn on(mut self, store: &Capabilities) -> Plan {
        if let (Ask::Run, Share::Permits { amount, .. }) = (self.ask, &mut self.share) {
            // Work in a closure has one.
            *amount = 1;
        }
        self.terms = match self.terms {
            Terms::Fixed(_) if !store.fixed_lease => Terms::Plain,
            Terms::MinHold(_) if !store.min_hold => Terms::Plain,
            Terms::Renewed(lease) => Terms::Renewed(lease.max(store.shortest_lease)),
            Terms::Fixed(lease) => Terms::Fixed(lease.max(store.shortest_lease)),
            terms => terms,
        };
        self
    }

    /// The lease that the store is asked for.
    pub(super) fn lease(&self) -> Duration {
        match self.terms {
            Terms::Renewed(lease) | Terms::Fixed(lease) => lease,
            _ => LEASE,
        }
    }

    /// In a word of the log.
    pub(super) fn told(&self) -> String {
        let ask = match self.ask {
            Ask::Wait => "wait".to_owned(),
            Ask::Try => "try".to_owned(),
            Ask::Within(limit) => format!("within:{}ms", limit.as_millis()),
            Ask::Cancelled(after) => format!("cancelled:{}ms", after.as_millis()),
            Ask::Run => "run".to_owned(),
        };
        let terms = match self.terms {
            Terms::Plain => String::new(),
            Terms::Renewed(_) => ",renewed".to_owned(),
            Terms::Fixed(_) => ",fixed".to_owned(),
            Terms::MaxHold(most) => format!(",max_hold:{}ms", most.as_millis()),
            Terms::MinHold(least) => format!(",min_hold:{}ms", least.as_millis()),
        };
        format!("{ask}{terms},work:{}ms", self.work.as_millis())
    }
}

fn millis(rng: &mut Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rng.u64(range))
}
