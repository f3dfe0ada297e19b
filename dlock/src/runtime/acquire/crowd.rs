//! Waits until this process is to ask for a plain lock; [`engine::crowd`](crate::engine::crowd) decides.

use std::time::Duration;

use tokio::time::Instant;

use super::came_free;
use crate::base::chance;
use crate::engine::crowd::Crowd;
use crate::engine::fairness::YieldRound;
use crate::store::{Notification, Watch};

/// Waits until this process is to ask: when the lock has come free and it is this process's turn, or after `patience`.
/// Cancel safe.
pub(super) async fn asks_next(
    crowd: &mut Crowd,
    watch: &mut Option<Watch>,
    round: &mut Option<YieldRound>,
    patience: Duration,
) {
    crowd.waits();
    let end = Instant::now() + patience;
    loop {
        tokio::select! {
            biased;
            () = came_free(watch, round) => {}
            () = tokio::time::sleep_until(end) => return,
        }
        let comes_up = match (crowd.came_free(), &mut *watch) {
            (Some(among), Some(watch)) => comes_up(crowd, among, watch, end).await,
            _ => true,
        };
        if comes_up {
            return;
        }
    }
}

/// The lock has come free. Whether it is for this process to ask for it; if not, another one has it.
async fn comes_up(crowd: &mut Crowd, among: u64, watch: &mut Watch, end: Instant) -> bool {
    loop {
        let Some(wait) = crowd.ranks(chance::below(among)) else {
            return true;
        };
        let wait = wait.min(end.saturating_duration_since(Instant::now()));
        match tokio::time::timeout(wait, watch.notification()).await {
            // It came free once more: a new draw.
            Ok(Notification::Changed) => {}
            Ok(Notification::Taken) => return false,
            Err(_) => {
                crowd.was_left();
                return true;
            }
        }
    }
}
