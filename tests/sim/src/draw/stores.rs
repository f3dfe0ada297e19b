//! Draws faults of stores, their clocks, and the machines of processes, within the assumptions of most promises and
//! beyond them.

use fastrand::Rng;

use crate::chance::{Draws, stream};
use crate::plan::{Fault, Millis, Plan, Runtimes, StoreClock, Stores, Trouble};
use crate::world::streams;

/// Adds to a plan by a stream of its own.
pub(crate) fn add(plan: &mut Plan) {
    let mut rng = stream(plan.seed, &[streams::PLAN_OF_STORES]);
    let is_quorum = plan.stores != Stores::One;
    plan.settings.members_abstain = is_quorum && rng.bool();
    // Records have assumptions of their own.
    let plain = plan.records.is_none();
    if plain {
        clocks(plan, &mut rng);
    }
    if is_quorum && rng.permille(400) {
        members_lose_data(plan, &mut rng);
    }
    if !is_quorum && plain && rng.permille(120) {
        fails_over(plan, &mut rng);
    }
    let lease = plan.settings.lease;
    if rng.permille(80) {
        let store = rng.usize(..plan.stores.count());
        let each = rng.between(1, 8);
        let lasts = rng.between(lease / 4, lease);
        put(plan, &mut rng, lasts, Trouble::StoreIsSlow { store, each });
    }
    if plain && rng.permille(30) {
        let key = rng.u32(..4);
        put(plan, &mut rng, 0, Trouble::ForcedOpen { key });
    }
    if plan.runtimes == Runtimes::Each && rng.permille(150) {
        for _ in 0..rng.usize(1..=3) {
            let process = rng.usize(..plan.processes.len());
            let lasts = rng.between(lease / 10, 2 * lease);
            put(plan, &mut rng, lasts, Trouble::ProcessSuspended { process });
        }
    }
}

/// At any time up to a little after the last of the other faults.
fn put(plan: &mut Plan, rng: &mut Rng, lasts: Millis, what: Trouble) {
    let at = rng.between(0, plan.faults_end() + 4 * plan.settings.lease);
    plan.faults.push(Fault { at, lasts, what });
}

fn clocks(plan: &mut Plan, rng: &mut Rng) {
    let lease = plan.settings.lease;
    let stores = plan.stores.count();
    if rng.permille(300) {
        // Beside the drift of processes, where these have any.
        let most = if plan.runtimes == Runtimes::One {
            8_000
        } else {
            1_000
        };
        let ahead = i64::try_from(lease / 3).unwrap_or_default();
        let clock = |rng: &mut Rng| StoreClock {
            drift: rng.i64(-most..=most),
            ahead: rng.i64(-ahead..=ahead),
        };
        plan.store_clocks = (0..stores).map(|_| clock(rng)).collect();
    } else if rng.permille(150) {
        // Within the margin, forward as a whole.
        let store = rng.usize(..stores);
        let back = rng.i64(-(i64::try_from(lease).unwrap_or_default())..=0);
        put(plan, rng, 0, Trouble::StoreClockSteps { store, by: 4 });
        put(plan, rng, 0, Trouble::StoreClockSteps { store, by: back });
    }
    // Beyond all margins.
    if rng.permille(40) {
        let store = rng.usize(..stores);
        let by = i64::try_from(rng.between(lease / 10, 2 * lease)).unwrap_or_default();
        put(plan, rng, 0, Trouble::StoreClockSteps { store, by });
    }
    if plan.runtimes == Runtimes::Each && rng.permille(40) {
        let process = rng.choice(&mut plan.processes);
        process
            .into_iter()
            .for_each(|process| process.drift = rng.i64(-60_000..=60_000));
    }
}

/// A minority at a time, or more.
fn members_lose_data(plan: &mut Plan, rng: &mut Rng) {
    let members = plan.stores.count();
    let lease = plan.settings.lease;
    let most = if rng.bool() { members } else { members / 2 };
    let mut at = rng.between(0, 4 * lease);
    for _ in 0..rng.usize(1..=3) {
        let mut all: Vec<_> = (0..members).collect();
        rng.shuffle(&mut all);
        for store in all.into_iter().take(rng.usize(1..=most)) {
            let what = Trouble::StoreStops {
                store,
                loses_data: true,
            };
            let lasts = rng.between(6, lease);
            plan.faults.push(Fault {
                at: at + rng.between(0, lease / 4),
                lasts,
                what,
            });
        }
        at += rng.between(lease, 4 * lease);
    }
}

fn fails_over(plan: &mut Plan, rng: &mut Rng) {
    for _ in 0..rng.usize(1..=2) {
        let lag = if rng.bool() { 0 } else { rng.between(1, 100) };
        let lasts = rng.between(6, plan.settings.lease);
        put(plan, rng, lasts, Trouble::StoreFailsOver { store: 0, lag });
    }
}
