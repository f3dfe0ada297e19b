//! Keeps the claims of handlers that take long.
//!
//! Most requests are done long before a third of the lease is over, so they only pass through a list: one
//! task looks when the first of them is due, and is gone when there is none left. A claim that becomes due
//! gets a task of its own, until its outcome is decided.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dlock::record::OwnerReply;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::claim::Claim;
use super::settings::Shared;

#[derive(Debug, Default)]
pub(super) struct Renewals {
    state: Mutex<State>,
    /// A claim is due earlier than the task expects.
    sooner: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// By when they are due, and their numbers.
    waiting: BTreeMap<(Instant, u64), Arc<Claim>>,
    /// Those that have a task of their own.
    renewed: HashMap<u64, AbortHandle>,
    /// When the task looks next; `None` when there is no task.
    look: Option<Instant>,
}

/// When a claim is to be renewed for the first time.
fn due(claim: &Claim) -> (Instant, u64) {
    (claim.since + claim.core.settings.lease / 3, claim.id)
}

impl Renewals {
    /// Renews the claim from the time on when that is due.
    pub(super) fn register(&self, claim: &Arc<Claim>) {
        let at = due(claim);
        let mut state = self.state.lock();
        state.waiting.insert(at, claim.clone());
        match state.look {
            None => {
                state.look = Some(at.0);
                drop(state);
                let (shared, done) = (claim.core.shared.clone(), false);
                claim.runtime.spawn(look_out(Lookout { shared, done }));
            }
            Some(look) if at.0 < look => self.sooner.notify_one(),
            Some(_) => {}
        }
    }

    /// Renews the claim from now on.
    pub(super) fn start(&self, claim: &Arc<Claim>) {
        let task = claim.runtime.spawn(renew(claim.clone())).abort_handle();
        self.state.lock().renewed.insert(claim.id, task);
    }

    /// Renews it no more. A renewal that is under way may still arrive.
    pub(super) fn stop(&self, claim: &Claim) {
        let mut state = self.state.lock();
        let waited = state.waiting.remove(&due(claim));
        let task = match waited {
            Some(_) => None,
            None => state.renewed.remove(&claim.id),
        };
        drop(state);
        if let Some(task) = task {
            task.abort();
        }
    }

    /// How many claims are kept at present.
    pub(super) fn len(&self) -> usize {
        let state = self.state.lock();
        state.waiting.len() + state.renewed.len()
    }

    /// Gives those that are due their tasks; answers when to look again.
    fn begin_due(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut state = self.state.lock();
        while let Some(first) = state.waiting.first_entry() {
            let (at, id) = *first.key();
            if at > now {
                state.look = Some(at);
                return Some(at);
            }
            let claim = first.remove();
            let task = claim.runtime.spawn(renew(claim.clone())).abort_handle();
            state.renewed.insert(id, task);
        }
        state.look = None;
        None
    }
}

/// The task that looks which claims are due.
struct Lookout {
    shared: Arc<Shared>,
    done: bool,
}

impl Drop for Lookout {
    // Its runtime ended before it was done: the next claim starts another one.
    fn drop(&mut self) {
        if !self.done {
            self.shared.renewals.state.lock().look = None;
        }
    }
}

async fn look_out(mut lookout: Lookout) {
    let renewals = &lookout.shared.renewals;
    while let Some(look) = renewals.begin_due() {
        tokio::select! {
            () = sleep_until(look) => {}
            () = renewals.sooner.notified() => {}
        }
    }
    lookout.done = true;
}

/// Renews one claim, with growing urgency when that fails.
async fn renew(claim: Arc<Claim>) {
    const SHORTEST: Duration = Duration::from_millis(20);
    let (shared, settings) = (&claim.core.shared, &claim.core.settings);
    let lease = settings.lease;
    let mut ends = claim.since + lease;
    loop {
        let sent = Instant::now();
        let step = shared
            .records
            .extend(&claim.record, &claim.token, lease, settings.retention);
        let pause = match timeout(lease / 3, step).await {
            Ok(Ok(OwnerReply::NotOwner)) => {
                // After the outcome is decided, a renewal that comes late finds no claim: no loss.
                if !claim.is_settled() {
                    claim.lose();
                }
                return;
            }
            Ok(Ok(_)) => {
                ends = sent + lease;
                claim.hold_until(ends);
                (sent + lease / 3).saturating_duration_since(Instant::now())
            }
            failure => {
                shared.counters.renewal_failures();
                match failure {
                    Ok(Err(error)) => {
                        tracing::warn!(record = claim.record.as_str(), %error, "a claim was not renewed");
                    }
                    _ => tracing::warn!(record = claim.record.as_str(), "a claim was not renewed in time"),
                }
                let left = ends.saturating_duration_since(Instant::now());
                // Nobody may have taken it over yet, so it is asked for beyond its end too.
                if left.is_zero() {
                    lease / 6
                } else {
                    (left / 4).max(SHORTEST).min(lease / 6)
                }
            }
        };
        sleep(pause).await;
    }
}
