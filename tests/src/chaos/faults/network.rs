//! Faults of the network.

use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::time::sleep;

use super::{Fiend, Kind, Made};
use crate::chaos::way::{Struck, Way};
use crate::{Direction, Swallow};

/// How long a command is waited for that is to be lost or late.
const TO_COME: Duration = Duration::from_millis(1500);

impl Fiend {
    pub(super) async fn strike_network(
        &self,
        kind: Kind,
        links: &[usize],
        lasts: Duration,
        rng: &mut Rng,
    ) -> anyhow::Result<Made> {
        let ways = || links.iter().map(|at| &*self.deployment.links[*at].way);
        let mut of_one_step: Option<Vec<Box<dyn Struck>>> = None;
        match kind {
            Kind::NetCut | Kind::Partition => {
                let reset = rng.bool();
                for way in ways() {
                    way.refuse();
                    way.cut(reset);
                }
                sleep(lasts).await;
            }
            Kind::NetHang => hang(ways(), Direction::Both, lasts, rng).await,
            Kind::NetHangToServer => hang(ways(), Direction::ToServer, lasts, rng).await,
            Kind::NetHangToClient => hang(ways(), Direction::ToClient, lasts, rng).await,
            Kind::NetRefuse => {
                let mute = rng.bool();
                for way in ways() {
                    match mute {
                        true => way.mute_new(),
                        false => way.refuse(),
                    }
                    way.cut_some(rng);
                }
                sleep(lasts).await;
            }
            Kind::NetSlow => {
                let delay = Duration::from_millis(rng.u64(1..150));
                let jitter = Duration::from_millis(rng.u64(0..300));
                let direction = direction(rng);
                ways().for_each(|way| way.delay(direction, delay, jitter));
                sleep(lasts).await;
            }
            Kind::ReplyLost => {
                let then = if rng.bool() { Swallow::Cut } else { Swallow::Hang };
                let lost: Vec<_> = ways().map(|way| way.swallow(rng.u64(1..6), then)).collect();
                until(TO_COME, || lost.iter().all(|lost| lost.fired())).await;
                sleep(lasts).await;
                of_one_step = Some(lost);
            }
            Kind::LateCommand => {
                let late: Vec<_> = ways().map(|way| way.hold(rng.u64(1..6))).collect();
                until(TO_COME, || late.iter().all(|late| late.fired())).await;
                sleep(lasts).await;
                late.iter().for_each(|late| late.release());
                of_one_step = Some(late);
            }
            _ => {
                ways().for_each(|way| way.lose_messages(true));
                sleep(lasts).await;
            }
        }
        ways().for_each(Way::heal);
        // Only now none of them can strike any more. Some ways carry no steps, as those to sentinels.
        let missed = of_one_step.is_some_and(|faults| !faults.iter().any(|fault| fault.fired()));
        Ok(if missed { Made::No } else { Made::Yes })
    }
}

async fn hang<'a>(
    ways: impl Iterator<Item = &'a dyn Way> + Clone,
    direction: Direction,
    lasts: Duration,
    rng: &mut Rng,
) {
    let mute = rng.bool();
    for way in ways.clone() {
        way.block(direction);
        if mute {
            way.mute_new();
        }
    }
    sleep(lasts).await;
    // What hung may never arrive.
    if rng.bool() {
        ways.for_each(|way| way.cut(false));
    }
}

fn direction(rng: &mut Rng) -> Direction {
    match rng.u32(..3) {
        0 => Direction::ToServer,
        1 => Direction::ToClient,
        _ => Direction::Both,
    }
}

async fn until(limit: Duration, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() && begun.elapsed() < limit {
        sleep(Duration::from_millis(5)).await;
    }
}
