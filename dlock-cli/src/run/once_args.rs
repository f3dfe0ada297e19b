//! The arguments of `dlock run --once`.

use std::time::{Duration, SystemTime};

use clap::{ArgGroup, Args, ValueEnum};
use dlock::record::OnOrphan;
use dlock::{LockKey, OnFailure};

use super::when;

/// Options of locks that have no effect here.
const OF_LOCKS: [&str; 4] = ["kind", "prefer_writers", "fixed_lease", "min_hold"];

#[derive(Debug, Args)]
#[command(next_help_heading = "Once in a fleet", group = ArgGroup::new("asked_once").multiple(true))]
pub(crate) struct OnceArgs {
    /// Run the command once in the whole fleet, instead of under a lock: not again after it has ended with status 0.
    /// While another machine runs it, this one waits (--wait, --try); if that run fails or crashes, this machine runs
    /// it.
    #[arg(long, group = "asked_once", conflicts_with_all = OF_LOCKS, conflicts_with_all = ["every", "slot"])]
    once: bool,
    /// Run the command once in each slot of time, as in 5min, for cron on every machine. Slots begin at the multiples
    /// of the period since 1970 by the clock of the store; a tick is for the nearest one. A slot that begins while the
    /// command of an earlier one runs is skipped.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, group = "asked_once",
          conflicts_with_all = OF_LOCKS)]
    every: Option<Duration>,
    /// Run the command once in the slot that begins at this time: the time for which the scheduler fires, the same on
    /// every machine, as in 2026-11-22T03:00:00Z, with an offset (+01:00), or @1763780400. Not the present. A slot that is
    /// older than --keep, or than the last one that was begun, is not run: exit status 0.
    #[arg(long, value_name = "WHEN", value_parser = when::parse, group = "asked_once", conflicts_with_all = OF_LOCKS)]
    slot: Option<SystemTime>,
    /// How long to remember that the command ran; after that it runs again [default: 1day; with --every at least three
    /// periods].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "asked_once")]
    keep: Option<Duration>,
    /// What later calls do after the command has failed (a status other than 0).
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        default_value = "run-again",
        requires = "asked_once"
    )]
    on_failure: AfterFailure,
    /// Give up after this many attempts in all, including crashed ones; with slots, in each slot.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "asked_once",
          conflicts_with = "on_failure")]
    attempts: Option<u32>,
    /// What later calls do after an attempt that ended in the middle: its machine crashed, or a signal ended the command.
    #[arg(
        long,
        value_enum,
        value_name = "WHAT",
        default_value = "take-over",
        requires = "asked_once",
        conflicts_with = "attempts"
    )]
    on_crash: AfterCrash,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AfterFailure {
    /// The next one runs it again.
    RunAgain,
    /// None runs it again; status 77.
    Keep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AfterCrash {
    /// The next one runs it again, as the next attempt, when the lease is over.
    TakeOver,
    /// None runs it again; status 77.
    Leave,
}

/// The checked arguments.
#[derive(Debug, Clone)]
pub(crate) struct OncePlan {
    pub(super) key: LockKey,
    pub(super) every: Option<Duration>,
    pub(super) slot: Option<SystemTime>,
    pub(super) keep: Option<Duration>,
    pub(super) on_failure: OnFailure,
    pub(super) on_orphan: OnOrphan,
}

impl OnceArgs {
    /// `None` for a command under a lock.
    pub(crate) fn plan(self, keys: &[LockKey]) -> Result<Option<OncePlan>, String> {
        if !self.once && self.every.is_none() && self.slot.is_none() {
            return Ok(None);
        }
        let [key] = keys else {
            return Err("what is run once has one name: --once, --every and --slot take one KEY".to_owned());
        };
        Ok(Some(OncePlan {
            key: key.clone(),
            every: self.every,
            slot: self.slot,
            keep: self.keep,
            on_failure: match (self.attempts, self.on_failure) {
                (Some(most), _) => OnFailure::AtMost(most),
                (None, AfterFailure::RunAgain) => OnFailure::RunAgain,
                (None, AfterFailure::Keep) => OnFailure::Keep,
            },
            on_orphan: match self.on_crash {
                AfterCrash::TakeOver => OnOrphan::TakeOver,
                AfterCrash::Leave => OnOrphan::Leave,
            },
        }))
    }
}
