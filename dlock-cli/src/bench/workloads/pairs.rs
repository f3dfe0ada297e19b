//! `sequential`, `parallel` and `contended`: acquire a lock and release it, with no work between.

use std::borrow::Cow;
use std::sync::Arc;

use dlock::{Lock, LockClient};

use super::Job;
use crate::bench::args::Workload;
use crate::bench::tally::Series;

pub(super) async fn work(job: Arc<Job>, task: usize) {
    let mut recorder = job.tally.recorder(task, Series::Main);
    let mut keys = Keys::of(&job, task);
    while !job.tally.is_over() {
        let lock = keys.next(&job);
        match job.pair(&lock).await {
            Ok(took) => recorder.done(took),
            Err(kind) => recorder.failed(kind).await,
        }
    }
}

/// Chooses the next lock.
enum Keys {
    /// Always the same.
    One(Lock),
    /// The task's own locks, in turn: every `step`th of `all`.
    Own {
        client: LockClient,
        next: u64,
        first: u64,
        step: u64,
        all: u64,
    },
    /// Any of them.
    Any { client: LockClient, all: u64 },
}

impl Keys {
    fn of(job: &Job, task: usize) -> Keys {
        let plan = &job.plan;
        let client = job.clients[0].clone();
        let (all, step) = (plan.keys, plan.all_tasks() as u64);
        let first = job.first_key(task);
        match plan.workload {
            Workload::Contended if all == 1 => Keys::One(job.lock(&client, 0)),
            Workload::Contended => Keys::Any { client, all },
            _ if all - first <= step => Keys::One(job.lock(&client, first)),
            _ => Keys::Own {
                client,
                next: first,
                first,
                step,
                all,
            },
        }
    }

    fn next(&mut self, job: &Job) -> Cow<'_, Lock> {
        match self {
            Keys::One(lock) => Cow::Borrowed(lock),
            Keys::Own {
                client,
                next,
                first,
                step,
                all,
            } => {
                let number = *next;
                *next = if number + *step < *all {
                    number + *step
                } else {
                    *first
                };
                Cow::Owned(job.lock(client, number))
            }
            Keys::Any { client, all } => Cow::Owned(job.lock(client, fastrand::u64(..*all))),
        }
    }
}
