//! Draws users of work that is done once.

use crate::chance::{Draws, stream};
use crate::plan::record::{Once, OnceEnd, Records, Slots};
use crate::plan::{Process, Task};
use crate::world::streams;

/// Gives the users of some worlds with records tasks of this sort, by a stream of its own.
pub(super) fn add(seed: u64, records: &mut Records, processes: &mut [Process]) {
    let mut rng = stream(seed, &[streams::ONCE]);
    if rng.bool() {
        return;
    }
    let lease = records.lease;
    records.period = rng.between(10, 2 * lease);
    let keys = rng.u32(1..=6);
    for user in processes.iter_mut().flat_map(|process| &mut process.users) {
        for task in &mut user.tasks {
            if rng.u32(..3) != 0 {
                continue;
            }
            let slots = rng.bool().then(|| match rng.u32(..4) {
                0 => Slots::Nearest,
                1 => Slots::Named(rng.i64(-3..=1)),
                _ => Slots::Next(rng.u32(1..=6)),
            });
            *task = Task::Once(Once {
                key: rng.u32(..keys),
                slots,
                retries: rng.u32(..3),
                wait: rng.bool().then(|| rng.between(1, 3 * lease)),
                habit: super::record::habit(&mut rng, lease),
                work: match rng.u32(..8) {
                    0 => rng.between(lease / 2, 3 * lease),
                    1..3 => rng.between(1, lease / 10),
                    _ => rng.between(0, 8),
                },
                end: match rng.u32(..10) {
                    0 => OnceEnd::Fails,
                    1 => OnceEnd::Panics,
                    _ => OnceEnd::Returns,
                },
            });
        }
    }
}
