//! Draws users of records.

use fastrand::Rng;

use super::Draws;
use crate::chance::stream;
use crate::plan::record::{Answer, Ask, LockAt, Record, RecordEnd, Records};
use crate::plan::{Habit, Millis, Process, Stores, Task};
use crate::world::streams;

/// Gives the users of some worlds tasks with records. It has a stream of its own, so that worlds without records are
/// as they were.
pub(super) fn add(seed: u64, stores: Stores, lease: Millis, processes: &mut [Process]) -> Option<Records> {
    let mut rng = stream(seed, &[streams::RECORDS]);
    // A quorum keeps no records.
    if stores != Stores::One || !rng.permille(300) {
        return None;
    }
    let lease = *rng.choice(&[lease / 2, lease]).unwrap_or(&lease);
    let common = Records {
        lease,
        // Often so short that keys are used again.
        retention: lease * rng.between(1, 10),
        leaves_orphans: rng.permille(200),
        wait: rng.bool().then(|| rng.between(1, 3 * lease)),
        retries_ambiguous: rng.permille(400),
        cancels: rng.permille(250),
        lock: match rng.u32(..4) {
            0 => Some(LockAt::Outside),
            1 => Some(LockAt::Inside),
            _ => None,
        },
        period: 0,
    };
    let keys = rng.u32(1..=24);
    for user in processes.iter_mut().flat_map(|process| &mut process.users) {
        for task in &mut user.tasks {
            match rng.u32(..4) {
                0 => *task = Task::Record(record(&mut rng, keys, lease)),
                1 => *task = Task::Ask(ask(&mut rng, keys, lease)),
                _ => {}
            }
        }
    }
    Some(common)
}

fn record(rng: &mut Rng, keys: u32, lease: Millis) -> Record {
    Record {
        key: rng.u32(..keys),
        variant: u8::from(rng.permille(60)),
        retries: rng.u32(..3),
        wait: rng.bool().then(|| rng.between(1, 3 * lease)),
        habit: habit(rng, lease),
        work: match rng.u32(..8) {
            // Its claim has to be extended.
            0 => rng.between(lease / 2, 3 * lease),
            1..3 => rng.between(1, lease / 10),
            _ => rng.between(0, 8),
        },
        careless: rng.permille(100),
        end: match rng.u32(..16) {
            0 => RecordEnd::CompleteTwice,
            1 => RecordEnd::CompleteLate,
            2 | 3 => RecordEnd::Release,
            4 => RecordEnd::Abandon,
            5 => RecordEnd::Leave,
            6 => RecordEnd::Panic,
            _ => RecordEnd::Complete,
        },
    }
}

pub(super) fn habit(rng: &mut Rng, lease: Millis) -> Option<Habit> {
    match rng.u32(..16) {
        0 => Some(Habit::DropsAfterPolls(rng.u32(1..8))),
        1 => Some(Habit::DropsAfter(rng.between(1, lease))),
        2 => Some(Habit::PollsNot {
            after: rng.u32(1..4),
            lasts: rng.between(10, 2 * lease),
        }),
        _ => None,
    }
}

fn ask(rng: &mut Rng, keys: u32, lease: Millis) -> Ask {
    Ask {
        key: rng.u32(..keys),
        account: rng.u32(..2),
        variant: u8::from(rng.permille(60)),
        retries: rng.u32(..4),
        habit: habit(rng, lease),
        work: match rng.u32(..8) {
            0 => rng.between(lease / 2, 3 * lease),
            1..3 => rng.between(1, lease / 10),
            _ => rng.between(0, 8),
        },
        size: if rng.permille(100) { 400 } else { rng.usize(..20) },
        answer: match rng.u32(..14) {
            0 => Answer::Streams,
            1 => Answer::Refuses,
            2 => Answer::Fails,
            3 => Answer::Panics,
            4 => Answer::Breaks,
            5 => Answer::NotStarted,
            _ => Answer::Done,
        },
    }
}
