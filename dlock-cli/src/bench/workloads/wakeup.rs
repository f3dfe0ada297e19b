//! `wakeup`: how soon a waiting client acquires the lock that another client releases.
//!
//! Two clients, in one process or in two, take turns on one key. The holder keeps it until the other client certainly
//! waits. Both only record when they asked, acquired it, and were about to release it, by a clock that all processes
//! share; the times are computed afterwards, so that the two need not communicate in between.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Job;
use crate::bench::tally::{Series, Times, kind_of};
use crate::bench::usage::now;

/// One hold of a key, in nanoseconds by the machine's clock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(in crate::bench) struct Handoff {
    key: usize,
    asked: u64,
    acquired: u64,
    /// Just before the release was called.
    released: u64,
    /// Whether it was acquired during the measurement.
    counts: bool,
}

pub(super) async fn work(job: Arc<Job>, task: usize, side: usize) {
    let lock = job.lock(&job.clients[side], task as u64);
    let mut recorder = job.tally.recorder(task * job.clients.len() + side, Series::Holds);
    // In the pause after a release the other client gets the lock, and then must see this one wait.
    let pause = Duration::from_millis(2).max(job.pair * 4);
    let hold = pause * 2 + Duration::from_millis(2) + job.pair * 4;
    let mut handoffs = Vec::new();
    while !job.tally.is_over() {
        let (asked, begin) = (now(), Instant::now());
        match lock.acquire().await {
            Ok(guard) => {
                let acquired = now();
                recorder.done(begin.elapsed());
                let counts = job.tally.is_measuring();
                // Never in step with another timer.
                tokio::time::sleep(hold.mul_f64(1.0 + fastrand::f64() / 4.0)).await;
                handoffs.push(Handoff {
                    key: task,
                    asked,
                    acquired,
                    released: now(),
                    counts,
                });
                if let Err(kind) = job.release(guard).await {
                    recorder.failed(kind).await;
                }
                tokio::time::sleep(pause).await;
            }
            Err(error) => recorder.failed(kind_of(&error)).await,
        }
    }
    job.handoffs.lock().append(&mut handoffs);
}

/// From the release to the other client's acquisition. A client that found the lock available when it asked has not
/// waited; one that was overtaken after the release has waited since that release.
pub(in crate::bench) fn wakeups(mut holds: Vec<Handoff>) -> Times {
    holds.sort_by_key(|hold| (hold.key, hold.acquired));
    let mut times = Times::new();
    for (at, hold) in holds.iter().enumerate().filter(|(_, hold)| hold.counts) {
        let first_release = holds[..at]
            .iter()
            .rev()
            .take_while(|earlier| earlier.key == hold.key && earlier.released >= hold.asked)
            .last();
        if let Some(earlier) = first_release {
            times.record(hold.acquired.saturating_sub(earlier.released));
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(key: usize, asked: u64, acquired: u64, released: u64) -> Handoff {
        Handoff {
            key,
            asked,
            acquired,
            released,
            counts: true,
        }
    }

    fn all(times: &Times) -> Vec<u64> {
        times
            .each()
            .flat_map(|(nanos, count)| vec![nanos; count as usize])
            .collect()
    }

    #[test]
    fn a_wake_up_is_from_the_release_to_the_acquisition_of_the_one_that_waited() {
        let holds = vec![hold(0, 0, 1, 100), hold(0, 50, 107, 200), hold(1, 60, 61, 101)];
        assert_eq!(all(&wakeups(holds)), [7]);
    }

    #[test]
    fn client_that_finds_the_lock_free_has_not_waited() {
        let holds = vec![hold(0, 0, 1, 100), hold(0, 150, 151, 200)];
        assert!(all(&wakeups(holds)).is_empty());
    }

    #[test]
    fn overtaken_client_has_waited_since_the_first_release() {
        let holds = vec![hold(0, 0, 1, 100), hold(0, 110, 111, 200), hold(0, 50, 209, 300)];
        assert_eq!(all(&wakeups(holds)), [109]);
    }
}
