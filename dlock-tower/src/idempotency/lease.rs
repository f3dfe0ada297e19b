//! The lease of a claim: how long it lasts, and whether it was lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::__claim::{now, surely_lasts};
use dlock::record::{ClaimToken, RecordKey};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::settings::Settings;
use super::stats::Counters;

/// A granted claim, as reported by the store.
pub(super) struct Grant {
    pub(super) record: RecordKey,
    pub(super) token: ClaimToken,
    pub(super) attempt: u32,
    pub(super) fence: u64,
    /// Taken before the claim was sent.
    pub(super) since: Instant,
    /// How long the result is kept.
    pub(super) retention: Duration,
}

/// A granted claim that is renewed until it is settled or lost.
#[derive(Debug)]
pub(super) struct ClaimLease {
    /// Unique within the layer.
    pub(super) id: u64,
    pub(super) record: RecordKey,
    pub(super) token: ClaimToken,
    pub(super) attempt: u32,
    pub(super) fence: u64,
    /// Taken before the claim was sent.
    pub(super) since: Instant,
    /// When it is renewed for the first time, by the clock of timers.
    pub(super) due: Instant,
    /// How long the claim lasts after each renewal.
    pub(super) length: Duration,
    /// How long the result is kept, unless its end decides otherwise.
    retention: Mutex<Duration>,
    /// The runtime on which the request arrived.
    pub(super) runtime: Handle,
    counters: Arc<Counters>,
    /// No other owner can take the claim over before this.
    held_until: Mutex<Instant>,
    /// Whether the handler was asked.
    begun: AtomicBool,
    lost: AtomicBool,
    settled: AtomicBool,
}

impl ClaimLease {
    pub(super) fn new(id: u64, grant: Grant, settings: &Settings, counters: Arc<Counters>) -> ClaimLease {
        ClaimLease {
            id,
            record: grant.record,
            token: grant.token,
            attempt: grant.attempt,
            fence: grant.fence,
            since: grant.since,
            due: Instant::now() + (grant.since + settings.lease / 3).saturating_duration_since(now()),
            length: settings.lease,
            retention: Mutex::new(grant.retention),
            runtime: Handle::current(),
            counters,
            held_until: Mutex::new(grant.since + surely_lasts(settings.lease)),
            begun: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            settled: AtomicBool::new(false),
        }
    }

    pub(super) fn retention(&self) -> Duration {
        *self.retention.lock()
    }

    pub(super) fn keep_for(&self, retention: Duration) {
        *self.retention.lock() = retention;
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Records that the handler is asked.
    pub(super) fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// Marks the outcome as decided. Returns whether it was before.
    pub(super) fn settle(&self) -> bool {
        self.settled.swap(true, Ordering::Relaxed)
    }

    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    /// Records that the store has extended the claim.
    pub(super) fn hold_until(&self, until: Instant) {
        let mut held_until = self.held_until.lock();
        *held_until = until.max(*held_until);
    }

    /// Whether it is certain that no other owner has taken over the claim.
    pub(super) fn is_held(&self) -> bool {
        !self.is_lost() && !self.may_have_run_out()
    }

    /// Whether another owner may have taken over the claim by now.
    pub(super) fn may_have_run_out(&self) -> bool {
        *self.held_until.lock() <= now()
    }

    /// Records the store's reply that the claim is not ours, or no longer is.
    pub(super) fn lose(&self) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            self.counters.lost();
            let what = match self.begun.load(Ordering::Relaxed) {
                true => "it may have run twice, and its result is not kept",
                false => "another attempt has it, and its handler does not begin",
            };
            let (record, attempt) = (self.record.as_str(), self.attempt);
            tracing::warn!(record, attempt, "the claim of a request was lost: {what}");
        }
    }
}
