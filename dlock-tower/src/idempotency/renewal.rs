//! Renews the claims of slow handlers.
//!
//! Most requests are done long before a third of the lease is over, so they only pass through a list: a task wakes when
//! the first of them is due, and ends when there is none left. A claim that becomes due gets its own task, until its
//! outcome is decided.
//!
//! Each runtime has its own list and task: a runtime that blocks or ends does not affect the claims of another one.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use dlock::__claim::{may_outlast_lease, now, pause_after_failed_renewal, pause_while_held, surely_lasts};
use dlock::record::{OwnerReply, Records};
use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::lease::ClaimLease;
use super::stats::Counters;

#[derive(Debug)]
pub(super) struct Renewals {
    records: Records,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Claims that are not due yet, by the runtime on which they were made.
    lists: HashMap<runtime::Id, List>,
    /// Claims with their own task.
    renewed: HashMap<u64, AbortHandle>,
}

/// The claims of a runtime. It exists for as long as a task watches it.
#[derive(Debug)]
struct List {
    /// By when they are due, and their numbers.
    waiting: BTreeMap<(Instant, u64), Arc<ClaimLease>>,
    /// When the task checks next.
    look: Instant,
    /// A claim is due earlier than the task expects.
    sooner: Arc<Notify>,
}

/// When a claim is to be renewed for the first time.
fn due(lease: &ClaimLease) -> (Instant, u64) {
    (lease.due, lease.id)
}

impl Renewals {
    pub(super) fn new(records: Records, counters: Arc<Counters>) -> Renewals {
        Renewals {
            records,
            counters,
            state: Mutex::default(),
        }
    }

    /// Renews the claim from when it is first due.
    pub(super) fn register(self: &Arc<Self>, lease: &Arc<ClaimLease>) {
        let at = due(lease);
        let mut state = self.state.lock();
        match state.lists.entry(lease.runtime.id()) {
            Entry::Occupied(mut list) => {
                let list = list.get_mut();
                list.waiting.insert(at, lease.clone());
                if at.0 < list.look {
                    list.sooner.notify_one();
                }
            }
            Entry::Vacant(none) => {
                let sooner = Arc::new(Notify::new());
                none.insert(List {
                    waiting: BTreeMap::from([(at, lease.clone())]),
                    look: at.0,
                    sooner: sooner.clone(),
                });
                drop(state);
                let lookout = Lookout {
                    renewals: self.clone(),
                    runtime: lease.runtime.id(),
                    done: false,
                };
                lease.runtime.spawn(look_out(lookout, sooner));
            }
        }
    }

    /// Renews the claim from now on.
    pub(super) fn start(self: &Arc<Self>, lease: &Arc<ClaimLease>) {
        let task = lease
            .runtime
            .spawn(renew(self.clone(), lease.clone()))
            .abort_handle();
        self.state.lock().renewed.insert(lease.id, task);
    }

    /// Stops renewing it. A renewal in flight may still arrive.
    pub(super) fn stop(&self, lease: &ClaimLease) {
        let mut state = self.state.lock();
        let list = state.lists.get_mut(&lease.runtime.id());
        let waited = list.and_then(|list| list.waiting.remove(&due(lease)));
        let task = match waited {
            Some(_) => None,
            None => state.renewed.remove(&lease.id),
        };
        drop(state);
        if let Some(task) = task {
            task.abort();
        }
    }

    /// Returns how many claims are renewed at present.
    pub(super) fn len(&self) -> usize {
        let state = self.state.lock();
        let waiting: usize = state.lists.values().map(|list| list.waiting.len()).sum();
        waiting + state.renewed.len()
    }

    /// Starts tasks for the due claims of the runtime; returns when to check again.
    fn begin_due(self: &Arc<Self>, runtime: runtime::Id) -> Option<Instant> {
        let now = Instant::now();
        let State { lists, renewed } = &mut *self.state.lock();
        let list = lists.get_mut(&runtime)?;
        while let Some(first) = list.waiting.first_entry() {
            let (at, id) = *first.key();
            if at > now {
                list.look = at;
                return Some(at);
            }
            let lease = first.remove();
            let task = lease
                .runtime
                .spawn(renew(self.clone(), lease.clone()))
                .abort_handle();
            renewed.insert(id, task);
        }
        lists.remove(&runtime);
        None
    }
}

/// The task that checks which claims of its runtime are due.
struct Lookout {
    renewals: Arc<Renewals>,
    runtime: runtime::Id,
    done: bool,
}

impl Drop for Lookout {
    // Its runtime ended before it was done, and the work under its claims with it.
    fn drop(&mut self) {
        if !self.done {
            let ended = self.renewals.state.lock().lists.remove(&self.runtime);
            drop(ended);
        }
    }
}

async fn look_out(mut lookout: Lookout, sooner: Arc<Notify>) {
    while let Some(look) = lookout.renewals.begin_due(lookout.runtime) {
        tokio::select! {
            biased;
            () = sleep_until(look) => {}
            () = sooner.notified() => {}
        }
    }
    lookout.done = true;
}

/// Renews one claim, and more often when that fails.
async fn renew(renewals: Arc<Renewals>, lease: Arc<ClaimLease>) {
    let length = lease.length;
    let mut ends = lease.since + length;
    loop {
        let sent = now();
        let step = renewals
            .records
            .extend(&lease.record, &lease.token, length, lease.retention());
        let pause = match timeout(length / 3, step).await {
            Ok(Ok(OwnerReply::NotOwner)) => {
                // After the outcome is decided, a late renewal finds no claim, which is no loss.
                if !lease.is_settled() {
                    lease.lose();
                }
                return;
            }
            // A transaction of the work has the record.
            Ok(Ok(OwnerReply::Held)) => {
                let now = now();
                let left = ends.saturating_duration_since(now);
                if may_outlast_lease(left, length, now - sent) {
                    lease.hold_until(now + length / 2);
                }
                pause_while_held(left, length)
            }
            Ok(Ok(_)) => {
                ends = sent + length;
                lease.hold_until(sent + surely_lasts(length));
                (sent + length / 3).saturating_duration_since(now())
            }
            failure => {
                renewals.counters.renewal_failures();
                match failure {
                    Ok(Err(error)) => {
                        tracing::warn!(record = lease.record.as_str(), %error, "a claim was not renewed");
                    }
                    _ => tracing::warn!(record = lease.record.as_str(), "a claim was not renewed in time"),
                }
                let left = ends.saturating_duration_since(now());
                pause_after_failed_renewal(left, length)
            }
        };
        sleep(pause).await;
    }
}
