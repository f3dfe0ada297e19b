//! `held`: acquire many locks, keep them for a while, release them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{Held, LockGuard};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Job;
use crate::bench::tally::{Series, kind_of};

/// How many holds are watched for renewals; watching all would cost what is to be measured.
const WATCHED: usize = 1000;

/// The results of holding the locks, in one process.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(in crate::bench) struct Holding {
    /// Locks held.
    pub(in crate::bench) held: u64,
    /// Of those, lost before they were released.
    pub(in crate::bench) lost: u64,
    /// How long they were held after all were acquired, in seconds.
    pub(in crate::bench) seconds: f64,
    /// The lease that is renewed, in seconds.
    pub(in crate::bench) lease: f64,
    /// Renewals of single locks, estimated from those that were watched.
    pub(in crate::bench) renewals: f64,
    /// The shortest remaining lease, in seconds.
    pub(in crate::bench) least_left: f64,
    /// The memory of the holds, in bytes.
    pub(in crate::bench) memory: Option<i64>,
    /// Locks released.
    pub(in crate::bench) released: u64,
    /// How long that took, in seconds.
    pub(in crate::bench) releasing: f64,
}

/// Takes all locks of this process.
pub(in crate::bench) async fn take(job: &Arc<Job>, stop: &CancellationToken) -> Vec<LockGuard> {
    // Allocated at once, not grown: the memory of the guards is measured.
    let mine = job.plan.keys.div_ceil(job.plan.processes as u64);
    let guards = Vec::with_capacity(usize::try_from(mine).unwrap_or(0));
    let guards = Arc::new(Mutex::new(guards));
    let mut tasks = JoinSet::new();
    for task in 0..job.plan.tasks {
        tasks.spawn(take_some(job.clone(), task, stop.clone(), guards.clone()));
    }
    while tasks.join_next().await.is_some() {}
    std::mem::take(&mut guards.lock())
}

async fn take_some(job: Arc<Job>, task: usize, stop: CancellationToken, guards: Arc<Mutex<Vec<LockGuard>>>) {
    let mut recorder = job.tally.recorder(task, Series::Main);
    for number in (job.first_key(task)..job.plan.keys).step_by(job.plan.all_tasks()) {
        let lock = job.lock(&job.clients[0], number);
        let begin = Instant::now();
        let acquired = tokio::select! {
            acquired = lock.acquire() => acquired,
            () = stop.cancelled() => break,
        };
        match acquired {
            Ok(guard) => {
                recorder.done(begin.elapsed());
                guards.lock().push(guard);
            }
            Err(error) => recorder.failed(kind_of(&error)).await,
        }
    }
}

/// Watches some of the holds until the time is over.
pub(in crate::bench) async fn keep(job: &Job, guards: &[LockGuard], stop: &CancellationToken) -> Holding {
    let (begin, lease) = (Instant::now(), job.clients[0].lease());
    let every = (lease / 15).clamp(Duration::from_millis(5), Duration::from_secs(1));
    let watched: Vec<Held> = guards
        .iter()
        .step_by(guards.len().div_ceil(WATCHED).max(1))
        .map(LockGuard::held)
        .collect();
    let mut left: Vec<Duration> = watched.iter().map(Held::remaining).collect();
    let (mut renewals, mut least) = (0u64, lease);
    while !stop.is_cancelled() && begin.elapsed() < job.plan.measure {
        let pause = every.min(job.plan.measure.saturating_sub(begin.elapsed()));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = stop.cancelled() => {}
        }
        for (held, before) in watched.iter().zip(&mut left) {
            let now = held.remaining();
            renewals += u64::from(now > *before);
            least = least.min(now);
            *before = now;
        }
    }
    let scale = guards.len() as f64 / watched.len().max(1) as f64;
    Holding {
        held: guards.len() as u64,
        seconds: begin.elapsed().as_secs_f64(),
        lease: lease.as_secs_f64(),
        renewals: renewals as f64 * scale,
        least_left: least.as_secs_f64(),
        ..Holding::default()
    }
}

/// Drops the guards that are no longer held, and returns how many these are. The release of a lost lock fails, and would
/// count it a second time.
pub(in crate::bench) fn drop_lost(guards: &mut Vec<LockGuard>) -> u64 {
    let all = guards.len();
    guards.retain(LockGuard::is_held);
    (all - guards.len()) as u64
}

/// Releases them, by as many tasks as took them.
pub(in crate::bench) async fn release_all(job: &Arc<Job>, mut guards: Vec<LockGuard>, holding: &mut Holding) {
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    let each = guards.len().div_ceil(job.plan.tasks).max(1);
    while !guards.is_empty() {
        let some = guards.split_off(guards.len().saturating_sub(each));
        let job = job.clone();
        tasks.spawn(async move {
            let mut released = 0;
            for guard in some {
                match job.release(guard).await {
                    Ok(()) => released += 1,
                    Err(kind) => job.tally.failed(kind, 1),
                }
            }
            released
        });
    }
    while let Some(released) = tasks.join_next().await {
        holding.released += released.unwrap_or(0);
    }
    holding.releasing = begin.elapsed().as_secs_f64();
}
