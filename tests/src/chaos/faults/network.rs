//! Faults of the network.

use std::time::{Duration, Instant};

use fastrand::Rng;
use tokio::time::sleep;

use super::{Fiend, Kind, Made};
use crate::{Command, Direction, Proxy, Swallow};

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
        let proxies = || links.iter().map(|at| &self.deployment.links[*at].proxy);
        match kind {
            Kind::NetCut | Kind::Partition => {
                let reset = rng.bool();
                for proxy in proxies() {
                    proxy.refuse();
                    if reset {
                        proxy.reset()
                    } else {
                        proxy.cut()
                    };
                }
                sleep(lasts).await;
            }
            Kind::NetHang => hang(proxies(), Direction::Both, lasts, rng).await,
            Kind::NetHangToServer => hang(proxies(), Direction::ToServer, lasts, rng).await,
            Kind::NetHangToClient => hang(proxies(), Direction::ToClient, lasts, rng).await,
            Kind::NetRefuse => {
                let mute = rng.bool();
                for proxy in proxies() {
                    if mute {
                        proxy.mute_new()
                    } else {
                        proxy.refuse()
                    };
                    for connection in proxy.connections() {
                        if rng.bool() {
                            proxy.cut_connection(connection.id);
                        }
                    }
                }
                sleep(lasts).await;
            }
            Kind::NetSlow => {
                let delay = Duration::from_millis(rng.u64(1..150));
                let jitter = Duration::from_millis(rng.u64(0..300));
                let way = direction(rng);
                proxies().for_each(|proxy| proxy.delay(way, delay, jitter));
                sleep(lasts).await;
            }
            Kind::ReplyLost => {
                let then = if rng.bool() { Swallow::Cut } else { Swallow::Hang };
                let lost: Vec<_> = proxies()
                    .map(|proxy| proxy.swallow(rng.u64(1..6), then, Command::is_script))
                    .collect();
                until(TO_COME, || lost.iter().all(|lost| lost.fired())).await;
                sleep(lasts).await;
            }
            Kind::LateCommand => {
                let late: Vec<_> = proxies()
                    .map(|proxy| proxy.hold(rng.u64(1..6), Command::is_script))
                    .collect();
                until(TO_COME, || late.iter().all(|late| late.fired())).await;
                sleep(lasts).await;
                late.iter().for_each(|late| late.release());
            }
            _ => {
                proxies().for_each(|proxy| proxy.lose_messages(true));
                sleep(lasts).await;
            }
        }
        proxies().for_each(Proxy::heal);
        Ok(Made::Yes)
    }
}

async fn hang<'a>(
    proxies: impl Iterator<Item = &'a Proxy> + Clone,
    way: Direction,
    lasts: Duration,
    rng: &mut Rng,
) {
    let mute = rng.bool();
    for proxy in proxies.clone() {
        proxy.block(way);
        if mute {
            proxy.mute_new();
        }
    }
    sleep(lasts).await;
    // What hung may never arrive.
    if rng.bool() {
        proxies.for_each(|proxy| _ = proxy.cut());
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
