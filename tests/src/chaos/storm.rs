//! The plan of faults, and how it is carried out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::faults::{Fiend, Kind, Planned};

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
    fn take<F>(&mut self, place: impl Fn(Planned) -> Option<F>) -> Option<F> {
        while self.next.len() < self.kinds.len() {
            let mut round = self.kinds.clone();
            self.rng.shuffle(&mut round);
            let rng = &mut self.rng;
            self.next.extend(round.into_iter().map(|kind| Planned {
                kind,
                seed: rng.u64(..),
            }));
        }
        // The fault that has waited longest comes next.
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
            None if Instant::now() >= until => return Ok(()),
            // Nothing can begin while a group has no master, say.
            None => sleep(Duration::from_millis(GAP.start)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_comes_once_in_a_round() {
        let kinds = [Kind::Wipe, Kind::ServerKill, Kind::ServerStop];
        let mut plan = Plan::new(7, kinds.to_vec());
        for _ in 0..10 {
            let mut round: Vec<_> = (0..3)
                .map(|_| plan.take(|planned| Some(planned.kind)).unwrap())
                .collect();
            round.sort();
            let mut all = kinds.to_vec();
            all.sort();
            assert_eq!(round, all);
        }
    }

    #[test]
    fn what_cannot_begin_comes_when_it_can_and_holds_up_the_others_after_a_while() {
        let kinds = [
            Kind::Wipe,
            Kind::NetCut,
            Kind::NetHang,
            Kind::NetSlow,
            Kind::ReplyLost,
            Kind::LateCommand,
        ];
        let mut plan = Plan::new(7, kinds.to_vec());
        let others = |planned: Planned| (planned.kind != Kind::Wipe).then_some(planned.kind);
        let mut made = 0;
        while plan.take(others).is_some() {
            made += 1;
        }
        // Those before it in the first round are not counted.
        assert!((PATIENCE + 1..=PATIENCE + kinds.len()).contains(&made), "{made}");
        assert_eq!(plan.take(|planned| Some(planned.kind)), Some(Kind::Wipe));
        assert!(plan.take(others).is_some());
    }
}
