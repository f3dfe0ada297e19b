//! The plan of faults, and how it is carried out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::faults::{Fault, Fiend, Kind, Planned};

/// How many faults may be made before one that waits for what they strike.
const PATIENCE: usize = 20;
/// Between the end of a fault and the next one in its place.
const GAP: std::ops::Range<u64> = 20..300;

/// An endless list of faults: rounds of all kinds, each in another order.
#[derive(Debug)]
pub(crate) struct Plan {
    rng: Rng,
    kinds: Vec<Kind>,
    next: VecDeque<Planned>,
    /// How many were made before the first of these.
    passed: usize,
}

impl Plan {
    pub(crate) fn new(seed: u64, kinds: Vec<Kind>) -> Plan {
        Plan {
            rng: Rng::with_seed(seed),
            kinds,
            next: VecDeque::new(),
            passed: 0,
        }
    }

    /// The next that can begin; those that cannot come later.
    fn take(&mut self, place: impl Fn(Planned) -> Option<Fault>) -> Option<Fault> {
        while self.next.len() < self.kinds.len() {
            let mut round = self.kinds.clone();
            self.rng.shuffle(&mut round);
            let rng = &mut self.rng;
            self.next.extend(round.into_iter().map(|kind| Planned {
                kind,
                seed: rng.u64(..),
            }));
        }
        // What waits for long comes next, whoever else could begin.
        let could = if self.passed > PATIENCE {
            1
        } else {
            self.next.len()
        };
        let (at, fault) = (0..could).find_map(|at| Some((at, place(self.next[at])?)))?;
        self.next.remove(at);
        self.passed = if at == 0 { 0 } else { self.passed + 1 };
        Some(fault)
    }
}

/// Makes faults until it is time to stop, and waits until all are over.
///
/// # Errors
/// When the harness fails.
pub(crate) async fn storm(fiend: &Arc<Fiend>, plan: &mut Plan, until: Instant) -> anyhow::Result<()> {
    let mut running = JoinSet::new();
    loop {
        while running.len() < fiend.deployment.topology.at_once() && Instant::now() < until {
            let Some(fault) = plan.take(|planned| fiend.place(planned)) else {
                break;
            };
            let fiend = fiend.clone();
            let gap = Duration::from_millis(plan.rng.u64(GAP));
            running.spawn(async move {
                fiend.inflict(fault).await?;
                sleep(gap).await;
                anyhow::Ok(())
            });
        }
        match running.join_next().await {
            Some(ended) => ended??,
            None => return Ok(()),
        }
    }
}
