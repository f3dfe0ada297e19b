//! The assumptions of promises that hold in a world: see docs/guarantees.md.

use crate::plan::{Plan, Runtimes, StoreClock, Stores, Trouble};

/// Clocks that run apart by more than this many millionths are not within the safety margin any more, with what is
/// rounded to whole milliseconds.
const MOST_DRIFT: i64 = 9_100;
/// A step of a store's clock that is within the margin of the shortest lease, beside the drift.
const MOST_STEP: i64 = 4;
/// A fail-over that takes longer than what reserved tokens reach back.
const LEAST_AWAY: u64 = 6;

/// One flag for each promise: whether what it rests on is true in the world, from its beginning to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Assumptions {
    /// One holder at a time, and a holder is told of its loss before its store can grant the lock to another one: clocks
    /// run within 1 %, no store's clock steps forward by more than the margin, no lock is forced open, and the store
    /// keeps its data; of a quorum, members that lost theirs abstain.
    pub(crate) exclusion: bool,
    /// Fencing tokens grow: no clock of a store that lost data went back, a fail-over takes longer than 5 ms, and the
    /// clocks of a quorum are less than its longest lease apart.
    pub(crate) tokens: bool,
    /// `min_hold` and `max_hold` are kept: as exclusion, and no store's clock steps at all.
    pub(crate) hold_times: bool,
    /// A released lock is free, and a late acquire takes nothing: the store keeps its data, and no clock of a store
    /// steps back.
    pub(crate) cleanup: bool,
}

impl Assumptions {
    pub(crate) fn of(plan: &Plan) -> Assumptions {
        let faults = || plan.faults.iter().map(|fault| (fault.what, fault.lasts));
        let steps = || {
            faults().filter_map(|(what, _)| match what {
                Trouble::StoreClockSteps { by, .. } => Some(by),
                _ => None,
            })
        };
        let loses_data = faults().any(|(what, _)| match what {
            Trouble::StoreStops { loses_data, .. } => loses_data,
            Trouble::StoreLosesData { .. } => true,
            Trouble::StoreFailsOver { lag, .. } => lag > 0,
            _ => false,
        });
        // A replica does not know what it lacks, so it does not abstain.
        let fails_over =
            faults().any(|(what, _)| matches!(what, Trouble::StoreFailsOver { lag, .. } if lag > 0));
        let forced = faults().any(|(what, _)| matches!(what, Trouble::ForcedOpen { .. }));
        let is_quorum = plan.stores != Stores::One;
        let abstain = is_quorum && plan.settings.members_abstain;
        let keeps_locks = !fails_over && (!loses_data || abstain);
        let comes_back_too_soon = faults().any(|(what, lasts)| match what {
            Trouble::StoreStops { loses_data: true, .. } | Trouble::StoreFailsOver { .. } => {
                lasts < LEAST_AWAY
            }
            _ => false,
        });
        let steps_back: i64 = steps().filter(|by| *by < 0).map(|by| -by).sum();
        let steps_forward: i64 = steps().filter(|by| *by > 0).sum();
        let apart = spread(plan, |clock| clock.ahead) + steps_back + steps_forward;
        let max_lease = i64::try_from(plan.settings.max_lease()).unwrap_or(i64::MAX);
        let exclusion =
            most_drift(plan) <= MOST_DRIFT && steps_forward <= MOST_STEP && keeps_locks && !forced;
        let loss_of_order = loses_data && (steps_back > 0 || comes_back_too_soon);
        let tokens =
            !loss_of_order && (!is_quorum || apart < max_lease / 2 && (apart == 0 || !loses_data || abstain));
        Assumptions {
            exclusion,
            tokens,
            hold_times: exclusion && steps().next().is_none(),
            cleanup: !loses_data && steps_back == 0,
        }
    }

    /// As a trace has it.
    pub(crate) fn told(self) -> String {
        let word = |holds, promise| {
            if holds {
                format!("{promise} holds")
            } else {
                format!("{promise} may fail")
            }
        };
        let all = [
            word(self.exclusion, "exclusion"),
            word(self.tokens, "the order of tokens"),
            word(self.hold_times, "min_hold and max_hold"),
            word(self.cleanup, "cleanup"),
        ];
        format!("its assumptions: {}", all.join(", "))
    }
}

/// By how much a number of the stores' clocks differs, also from that of the world.
fn spread(plan: &Plan, of: impl Fn(&StoreClock) -> i64) -> i64 {
    let all = || plan.store_clocks.iter().map(&of).chain([0]);
    all().max().unwrap_or(0) - all().min().unwrap_or(0)
}

/// By how many millionths the clock of a process and that of a store run apart at most.
fn most_drift(plan: &Plan) -> i64 {
    let process = |process: &crate::plan::Process| match plan.runtimes {
        Runtimes::One => 0,
        Runtimes::Each => process.drift,
    };
    let stores = || plan.store_clocks.iter().map(|clock| clock.drift).chain([0]);
    let apart = plan
        .processes
        .iter()
        .flat_map(|it| stores().map(move |store| (process(it) - store).abs()));
    apart.max().unwrap_or(0)
}
