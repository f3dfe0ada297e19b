//! Draws sets whose keys are rarely free at the same time, so that they are acquired one after the other, and a
//! client that is shut down during this.

use fastrand::Rng;

use super::busy::lock;
use crate::chance::{Draws, stream};
use crate::plan::{Habit, Kind, Lock, Millis, Plan, Process, Stores, Task, User};
use crate::world::streams;

/// Keys that no other user has.
const KEYS: std::ops::Range<u32> = 10..12;

/// Adds to some plans by a stream of its own.
pub(super) fn add(plan: &mut Plan) {
    let mut rng = stream(plan.seed, &[streams::PLAN_OF_SETS]);
    if plan.stores != Stores::One || !rng.permille(50) {
        return;
    }
    let begins = match rng.bool() {
        true => 0,
        false => plan.settled_after(),
    };
    // Two for each key: the lock goes from one to the other, and is free only between two slices.
    let busy = KEYS.flat_map(|key| [key, key]).map(|key| {
        user(&mut rng, begins, |rng| {
            let tasks =
                (0..rng.between(8, 16)).map(|_| Task::Lock(lock(key, Kind::Plain, rng.between(15, 60))));
            tasks.collect()
        })
    });
    let busy = busy.collect();
    let mut users: Vec<_> = (0..rng.usize(1..=2))
        .map(|_| user(&mut rng, begins, sets))
        .collect();
    users.push(User {
        begins: begins + rng.between(100, 1_000),
        tasks: vec![Task::ShutDownAmidSet {
            within: 1_000,
            deadline: rng.between(1, plan.settings.lease),
        }],
    });
    plan.processes
        .extend([busy, users].map(|users| Process { drift: 0, users }));
}

fn user(rng: &mut Rng, begins: Millis, tasks: impl FnOnce(&mut Rng) -> Vec<Task>) -> User {
    User {
        begins: begins + rng.between(0, 20),
        tasks: tasks(rng),
    }
}

/// Some users stop polling while they hold a part of the set.
fn sets(rng: &mut Rng) -> Vec<Task> {
    let stops = rng.bool();
    let set = |rng: &mut Rng| {
        let (first, others) = (KEYS.start, KEYS.skip(1).collect());
        Task::Lock(Lock {
            also: others,
            habit: stops.then(|| Habit::PollsNot {
                after: rng.u32(10..60),
                lasts: rng.between(100, 1_500),
            }),
            ..lock(first, Kind::Plain, rng.between(0, 10))
        })
    };
    (0..rng.between(1, 4)).map(|_| set(rng)).collect()
}
