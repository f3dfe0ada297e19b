//! Draws a plan from a seed.

use fastrand::Rng;

use crate::chance::{Draws, stream};
use crate::plan::{
    End, Fault, Habit, Kind, Lock, Millis, Network, Plan, Process, Runtimes, Scheduler, Settings, Stores,
    Task, Trouble, User, Way, Work,
};
use crate::world::streams;

/// The world of a seed.
pub(crate) fn plan(seed: u64, runtimes: Runtimes) -> Plan {
    let mut rng = stream(seed, &[streams::PLAN]);
    let stores = match rng.u32(..6) {
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
    let settings = Settings {
        lease,
        retry_for: rng.between(lease, 3 * lease),
        timeout: (lease / 4).max(4 * network.round_trip()),
    };
    let processes = rng.usize(1..=5);
    // A few keys, so that there is a crowd at each.
    let keys = rng.u32(1..=4);
    let habits = Habits {
        keys,
        lease,
        is_quorum: stores != Stores::One,
        unpolled: rng.permille(150),
        crowd: rng.bool(),
    };
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
    let processes: Vec<_> = (0..processes).map(|_| process(&mut rng)).collect();
    let faults = faults(&mut rng, &stores, processes.len(), lease, runtimes);
    Plan {
        seed,
        runtimes,
        network,
        stores,
        settings,
        scheduler: Scheduler::Random,
        processes,
        faults,
    }
}

struct Habits {
    keys: u32,
    lease: Millis,
    is_quorum: bool,
    /// Whether some acquires are kept unpolled here.
    unpolled: bool,
    crowd: bool,
}

impl Habits {
    fn user(&self, rng: &mut Rng) -> User {
        let tasks = rng.usize(1..=12);
        User {
            begins: rng.between(0, 50),
            tasks: (0..tasks).map(|_| self.task(rng)).collect(),
        }
    }

    fn task(&self, rng: &mut Rng) -> Task {
        match rng.u32(..8) {
            0 => Task::Pause(rng.between(1, self.lease / 2)),
            _ => Task::Lock(self.lock(rng, 0, 0)),
        }
    }

    fn kind(&self, key: u32, rng: &mut Rng) -> Kind {
        // One family of kinds for each key, or they refuse each other.
        match key % 4 {
            1 if !self.is_quorum => Kind::Fair,
            2 => match rng.u32(..3) {
                0 => Kind::Write,
                _ => Kind::Read,
            },
            3 if !self.is_quorum => Kind::Fenced,
            _ => Kind::Plain,
        }
    }

    /// A lock of a key from this one on: nested locks are taken in one order, or they dead-lock.
    fn lock(&self, rng: &mut Rng, from: u32, depth: u32) -> Lock {
        let key = rng.u32(from..self.keys.max(from + 1));
        let kind = self.kind(key, rng);
        let lease = self.lease;
        let fixed = rng.permille(100);
        let max_hold = rng.permille(60);
        Lock {
            key,
            kind,
            once: rng.permille(100),
            wait: (depth > 0 || rng.permille(500)).then(|| rng.between(1, 4 * lease)),
            fixed_lease: fixed.then(|| rng.between(lease / 2, 2 * lease).max(100)),
            min_hold: rng.permille(50).then(|| rng.between(1, lease / 2)),
            max_hold: max_hold.then(|| rng.between(lease, 2 * lease)),
            max_waiters: rng.permille(50).then(|| rng.usize(0..6)),
            preferred: kind == Kind::Write && rng.bool(),
            habit: self.habit(rng),
            work: self.work(rng, key, depth),
            end: match rng.u32(..10) {
                0 | 1 => End::Drop,
                2 => End::ReleaseUnawaited,
                3 if rng.bool() => End::Panic,
                _ => End::Release,
            },
        }
    }

    fn habit(&self, rng: &mut Rng) -> Option<Habit> {
        match rng.u32(..12) {
            0 => Some(Habit::DropsAfterPolls(rng.u32(1..12))),
            1 => Some(Habit::DropsAfter(rng.between(1, self.lease))),
            2 if self.unpolled => Some(Habit::PollsNot {
                after: rng.u32(1..8),
                lasts: rng.between(10, 3 * self.lease),
            }),
            _ => None,
        }
    }

    fn work(&self, rng: &mut Rng, key: u32, depth: u32) -> Vec<Work> {
        let steps = rng.usize(0..=3);
        let step = |rng: &mut Rng| match rng.u32(..12) {
            0..6 => Work::Sleep(match rng.u32(..20) {
                // Too long: the lease has to be renewed, or runs out.
                0 => rng.between(self.lease / 2, 2 * self.lease),
                1..5 => rng.between(1, self.lease / 10),
                _ => rng.between(1, 8),
            }),
            6..8 => Work::Write,
            8 => Work::Ensure(self.lease / 3),
            9 if depth < 2 => Work::Nest(Box::new(self.lock(rng, key, depth + 1))),
            10 if depth < 2 => {
                let branches = rng.usize(1..=3);
                Work::Join((0..branches).map(|_| self.lock(rng, key, depth + 1)).collect())
            }
            11 if depth < 2 => Work::Spawn(Box::new(self.lock(rng, 0, depth + 1))),
            _ => Work::Sleep(1),
        };
        (0..steps).map(|_| step(rng)).collect()
    }
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
