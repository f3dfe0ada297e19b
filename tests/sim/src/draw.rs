//! Draws a plan from a seed.

mod busy;
mod once;
mod record;
mod sets;
mod stores;
mod users;

use fastrand::Rng;

use crate::chance::{Draws, stream};
use crate::plan::{
    Fault, Millis, Network, Plan, Process, Runtimes, Scheduler, Sets, Settings, Stores, Trouble, Way,
};
use crate::world::streams;

use self::users::Habits;

/// The world of a seed.
pub(crate) fn plan(seed: u64, runtimes: Runtimes) -> Plan {
    let mut rng = stream(seed, &[streams::PLAN]);
    // An eighth of the time: they cost several times as much as others.
    let stores = match rng.u32(..30) {
        0 => Stores::Quorum(3),
        1 if rng.bool() => Stores::Quorum(5),
        _ => Stores::One,
    };
    let least = rng.between(1, 5);
    let network = Network {
        least,
        most: least + rng.between(0, 2 * least),
    };
    let lease = *rng.choice(&[300, 1_000, 3_000]).unwrap_or(&1_000);
    let is_quorum = stores != Stores::One;
    let settings = Settings {
        lease,
        sets: match rng.u32(..4) {
            0 => Sets::ByShard,
            1 => Sets::OneByOne,
            _ => Sets::InOneStep,
        },
        retry_for: rng.between(lease, 3 * lease),
        timeout: (lease / 4).max(4 * network.round_trip()),
        members_abstain: false,
    };
    let processes = rng.usize(1..=5);
    let habits = Habits::draw(&mut rng, lease, is_quorum);
    let process = |rng: &mut Rng| {
        let users = match habits.crowd {
            true => rng.usize(1..=40 / processes.max(2)),
            false => rng.usize(1..=4),
        };
        Process {
            drift: match rng.u32(..3) {
                0 => 0,
                // Within what the safety margin is for.
                _ => rng.i64(-8_000..=8_000),
            },
            users: (0..users).map(|_| habits.user(rng)).collect(),
        }
    };
    let mut processes: Vec<_> = (0..processes).map(|_| process(&mut rng)).collect();
    let faults = faults(&mut rng, &stores, processes.len(), lease, runtimes);
    let mut records = record::add(seed, stores, lease, &mut processes);
    if let Some(records) = &mut records {
        once::add(seed, records, &mut processes);
    }
    let mut plan = Plan {
        seed,
        runtimes,
        network,
        stores,
        settings,
        store_clocks: Vec::new(),
        scheduler: Scheduler::Random,
        semaphores: habits.semaphores,
        unowned: habits.unowned,
        records,
        processes,
        faults,
    };
    stores::add(&mut plan);
    busy::add(&mut plan);
    sets::add(&mut plan);
    plan
}

fn faults(rng: &mut Rng, stores: &Stores, processes: usize, lease: Millis, runtimes: Runtimes) -> Vec<Fault> {
    let mut all = Vec::new();
    // One in six has none: what goes wrong there goes wrong by itself.
    if rng.u32(..6) == 0 {
        return all;
    }
    let mut at = rng.between(0, 2 * lease);
    let loses_data = rng.permille(100);
    for _ in 0..rng.usize(1..=3) {
        let lasts = rng.between(lease / 4, 3 * lease);
        all.push(Fault {
            at,
            lasts,
            what: Trouble::Storm {
                lost: rng.u32(0..150),
                late: rng.u32(0..200),
                doubled: rng.u32(0..150),
                broken: rng.u32(0..30),
                by: rng.between(5, lease / 2),
            },
        });
        for _ in 0..rng.usize(0..=3) {
            let at = at + rng.between(0, lasts);
            let lasts = rng.between(1, lease);
            let store = rng.usize(..stores.count());
            let process = rng.usize(..processes);
            let one_of = |rng: &mut Rng, it: usize| rng.bool().then_some(it);
            let own = runtimes == Runtimes::Each;
            let what = match rng.u32(..10) {
                0 | 1 => Trouble::Cut {
                    process: one_of(rng, process),
                    store: one_of(rng, store),
                    way: *rng
                        .choice(&[Way::Both, Way::ToStore, Way::ToProcess])
                        .unwrap_or(&Way::Both),
                },
                2 => Trouble::StoreStops {
                    store,
                    loses_data: loses_data && rng.bool(),
                },
                3 if loses_data => Trouble::StoreLosesData { store },
                4 => Trouble::StoreRefuses {
                    store,
                    full: rng.bool(),
                },
                5 | 6 if own => Trouble::ProcessStops { process },
                7 if own => Trouble::ProcessCrashes { process },
                8 if own => Trouble::ProcessEnds { process },
                _ => continue,
            };
            all.push(Fault { at, lasts, what });
        }
        at += lasts + rng.between(lease, 6 * lease);
    }
    all
}
