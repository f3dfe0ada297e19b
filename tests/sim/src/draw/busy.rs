//! Draws processes that are busy with one lock while another process waits for it.

use crate::chance::{Draws, stream};
use crate::plan::{End, Kind, Lock, Millis, Plan, Process, Stores, Task, User, Work};
use crate::world::streams;

/// A key that no other user uses, so that only these users compete.
const KEY: u32 = 9;

/// Adds to some plans by a stream of its own.
pub(super) fn add(plan: &mut Plan) {
    let mut rng = stream(plan.seed, &[streams::PLAN_OF_BUSY]);
    if plan.stores != Stores::One || !rng.permille(100) {
        return;
    }
    if plan.processes.len() == 1 {
        plan.processes.push(Process {
            drift: 0,
            users: Vec::new(),
        });
    }
    let begins = plan.settled_after();
    let kinds = [Kind::Plain, Kind::Plain, Kind::Write, Kind::Fair];
    let kind = *rng.choice(&kinds).unwrap_or(&Kind::Plain);
    let busy = rng.usize(..plan.processes.len());
    for (number, process) in plan.processes.iter_mut().enumerate() {
        let (users, most) = match number == busy {
            true => (rng.usize(2..=6), 60),
            false => (usize::from(rng.u32(..3) > 0), 8),
        };
        for _ in 0..users {
            let mut tasks = Vec::new();
            for _ in 0..rng.between(2, most) {
                // Readers that come while a preferred writer waits.
                let reads = kind == Kind::Write && rng.u32(..3) > 0;
                let kind = if reads { Kind::Read } else { kind };
                tasks.push(Task::Lock(lock(KEY, kind, rng.between(0, 4))));
                if number != busy || reads {
                    tasks.push(Task::Pause(rng.between(1, 20)));
                }
            }
            process.users.push(User {
                begins: begins + rng.between(0, 20),
                tasks,
            });
        }
    }
}

/// Takes a lock, sleeps, and releases it.
pub(super) fn lock(key: u32, kind: Kind, lasts: Millis) -> Lock {
    Lock {
        key,
        kind,
        also: Vec::new(),
        call: Default::default(),
        more_permits: 0,
        handoffs: None,
        once: false,
        wait: None,
        fixed_lease: None,
        min_hold: None,
        max_hold: None,
        max_waiters: None,
        preferred: kind == Kind::Write,
        habit: None,
        work: vec![Work::Sleep(lasts)],
        end: End::Release,
        reading: Vec::new(),
    }
}
