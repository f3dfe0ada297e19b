//! Of many processes that wait for one plain lock, a few ask when it comes free: so the requests of a handoff do not grow
//! with the number of processes.
//!
//! The store says how many processes listen for the release. Each of them draws a rank among them at each release.
//! Those with the lowest ranks ask at once; the others wait, a few in each slot, and ask only if they do not hear that
//! the lock was taken. So a process that is stopped or cut off while it ranks first costs one slot.

use std::time::Duration;

use tokio::time::Instant;

use super::came_free;
use crate::base::chance;
use crate::base::clock;
use crate::engine::fairness::{YieldRound, some_round_trips};
use crate::store::{Announce, Heard, Watch};

/// How many processes ask in one slot, the first of which begins with the release.
const FEW: u64 = 4;
/// The shortest slot: enough for a request and the message that the lock is taken.
const SHORTEST_SLOT: Duration = Duration::from_millis(2);

/// The longest that a process leaves the lock to others of which it hears nothing.
const LONGEST: Duration = Duration::from_secs(1);
/// More listeners than that are no number: Valkey 9.1.2 answers `PUBSUB NUMSUB` inside a script with garbage at times.
const MOST: u64 = 100_000;

/// The processes that wait for the same lock, as this one knows them.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    listeners: u64,
    slot: Duration,
    /// Whether this process has just begun to listen: its next request is for what it missed before.
    is_new: bool,
    announce: Announce,
}

impl Crowd {
    /// What the next request tells the others.
    pub(super) fn announce(&self) -> Announce {
        self.announce
    }

    /// The store has answered, to a request of that moment, that the lock is taken.
    pub(super) fn is_busy(&mut self, listeners: Option<u64>, asked: Instant) {
        self.listeners = listeners.filter(|listeners| *listeners <= MOST).unwrap_or(0);
        self.slot = some_round_trips(clock::now().saturating_duration_since(asked), SHORTEST_SLOT);
    }

    /// This process has begun to listen.
    pub(super) fn listens(&mut self) {
        self.is_new = true;
    }

    /// Waits until this process is to ask: when the lock has come free and it is this process's turn, or after
    /// `patience`. Cancel safe.
    pub(super) async fn asks_next(
        &mut self,
        watch: &mut Option<Watch>,
        round: &mut Option<YieldRound>,
        patience: Duration,
    ) {
        self.announce = Announce::Nothing;
        let end = Instant::now() + patience;
        loop {
            tokio::select! {
                biased;
                () = came_free(watch, round) => {}
                () = tokio::time::sleep_until(end) => return,
            }
            let is_crowd = self.listeners > FEW && !std::mem::take(&mut self.is_new);
            let comes_up = match watch {
                Some(watch) if is_crowd => self.comes_up(watch, end).await,
                _ => true,
            };
            if comes_up {
                return;
            }
        }
    }

    /// The lock has come free. Whether it is for this process to ask for it; if not, another one has it.
    async fn comes_up(&mut self, watch: &mut Watch, end: Instant) -> bool {
        loop {
            let slots = chance::below(self.listeners) / FEW;
            if slots == 0 {
                self.announce = Announce::Grant;
                return true;
            }
            let slots = u32::try_from(slots).unwrap_or(u32::MAX);
            let wait = self
                .slot
                .saturating_mul(slots)
                .min(LONGEST)
                .min(end.saturating_duration_since(Instant::now()));
            match tokio::time::timeout(wait, watch.heard()).await {
                // It came free once more: a new draw.
                Ok(Heard::News) => {}
                Ok(Heard::Taken) => return false,
                Err(_) => {
                    self.announce = Announce::Taken;
                    return true;
                }
            }
        }
    }
}
