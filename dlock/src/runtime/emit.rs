//! The one path by which the library says what happened: each event becomes a log entry, a metric, or both.
//!
//! Log entries go through `tracing`; metrics through the `metrics` facade, and nowhere without the feature of that name.
//! Stores report on their own connections.

use std::fmt::{Debug, Display};
use std::panic::Location;
use std::time::Duration;

use crate::store::{GrantId, StoreError};
use crate::{Error, LockKey, Loss};

/// What can be observed of locks and semaphores.
pub(crate) enum Event<'a> {
    /// An acquire succeeded.
    Acquired { waited: Duration },
    /// An acquire failed, or the wait was over.
    NotAcquired { lock: &'a dyn Debug, error: &'a Error },
    /// A waiter wants more permits than the semaphore has in all.
    TooFewPermits { semaphore: &'a LockKey, wanted: u32 },
    /// A waiter waits for permits, and no lease of a permit ends.
    NoPermitEnds { semaphore: &'a LockKey },
    /// A call waits for a lock inside the lock's own frame.
    WaitsInOwnFrame {
        key: &'a LockKey,
        waiting: &'static Location<'static>,
        inside: &'a dyn Display,
    },
    /// A waiter missed its poll deadline and lost its position in this process.
    PollDeadlineMissed {
        key: &'a LockKey,
        by: &'static Location<'static>,
    },
    /// A renewal failed; the watchdog tries again.
    RenewalFailed { key: &'a LockKey, error: &'a StoreError },
    /// A hold became suspect: its renewal failed so, or the store is in doubt.
    Suspect {
        key: &'a LockKey,
        grant: GrantId,
        error: Option<&'a StoreError>,
    },
    /// A hold was lost.
    Lost {
        key: &'a LockKey,
        grant: GrantId,
        loss: Loss,
    },
    /// A release was confirmed.
    Released,
    /// A release failed and is sent again.
    ReleaseRepeated {
        key: &'a LockKey,
        grant: GrantId,
        error: &'a StoreError,
    },
    /// A release failed for good.
    ReleaseFailed {
        key: &'a LockKey,
        grant: GrantId,
        error: &'a StoreError,
    },
    /// The release after the user's work failed; the work's result is returned all the same.
    NotReleasedAfterWork { key: &'a LockKey, error: &'a Error },
    /// A request on a counter failed and is sent again.
    CounterRepeated { key: &'a LockKey, error: &'a StoreError },
    /// This process leads.
    Leads { name: &'a LockKey, token: u64 },
    /// This process no longer leads, and is a candidate again.
    LeadLost { name: &'a LockKey, loss: Loss },
    /// A campaign for the lead failed, and is tried again.
    StandingFailed { name: &'a LockKey, error: &'a Error },
    /// The claim of work that is done once was not renewed; without an error, not in time.
    #[cfg(feature = "once")]
    ClaimNotRenewed {
        name: &'a LockKey,
        error: Option<&'a StoreError>,
    },
    /// What became of such a claim did not reach the store.
    #[cfg(feature = "once")]
    ClaimNotSettled {
        name: &'a LockKey,
        error: &'a StoreError,
    },
    /// Such a claim was lost while the work ran.
    #[cfg(feature = "once")]
    ClaimLost { name: &'a LockKey, attempt: u32 },
    /// The result of such work cannot be kept.
    #[cfg(feature = "once")]
    ResultNotKept { name: &'a LockKey, why: &'a str },
    /// A method of the store panicked, which was called for this lock.
    StorePanicked { key: Option<&'a LockKey> },
    /// The store has not answered an acquire for this time, and is waited for.
    StoreSilent { key: &'a LockKey, since: Duration },
}

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)*) => {{
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment(1);
        #[cfg(not(feature = "metrics"))]
        { $(let _ = &$value;)* }
    }};
}

macro_rules! record {
    ($name:literal, $value:expr) => {{
        #[cfg(feature = "metrics")]
        metrics::histogram!($name).record($value);
        #[cfg(not(feature = "metrics"))]
        let _ = &$value;
    }};
}

impl Event<'_> {
    /// Tells the listeners of the process.
    pub(crate) fn emit(self) {
        match self {
            Event::Acquired { waited } => {
                count!("dlock_acquired_total");
                record!("dlock_wait_seconds", waited.as_secs_f64());
            }
            Event::NotAcquired { lock, error } => {
                count!("dlock_acquire_failed_total", "reason" => reason_of(error));
                tracing::debug!(?lock, %error, "a lock was not acquired");
            }
            Event::TooFewPermits { semaphore, wanted } => tracing::warn!(
                %semaphore, wanted,
                "a semaphore has fewer permits in all than are wanted: waiting until some are added"
            ),
            Event::NoPermitEnds { semaphore } => tracing::warn!(
                %semaphore,
                "no permit is free and no lease of one ends: waiting until permits are set or released"
            ),
            Event::WaitsInOwnFrame { key, waiting, inside } => tracing::warn!(
                %key, %waiting, %inside,
                "a lock is waited for from inside its own frame, while another guard of it is inside: if that one \
                 waits for this call, this never ends (pass the guard on, use guard.reenter(), or set a wait)"
            ),
            Event::PollDeadlineMissed { key, by } => {
                tracing::debug!(%key, %by, "a waiter was woken and not polled: others go first");
            }
            Event::RenewalFailed { key, error } => {
                tracing::debug!(%key, %error, "a renewal failed and is tried again");
            }
            Event::Suspect { key, grant, error } => {
                let error = error.map(tracing::field::display);
                tracing::warn!(%key, %grant, error, "a lock could not be confirmed, its lease still runs");
            }
            Event::Lost { key, grant, loss } => {
                count!("dlock_lost_total", "reason" => reason_of_loss(loss));
                tracing::warn!(%key, %grant, %loss, "a lock was lost");
            }
            Event::Released => count!("dlock_released_total"),
            Event::ReleaseRepeated { key, grant, error } => {
                tracing::debug!(%key, %grant, %error, "a release failed and is repeated");
            }
            Event::ReleaseFailed { key, grant, error } => {
                count!("dlock_release_failed_total");
                tracing::warn!(%key, %grant, %error, "a lock could not be released, its lease ends it");
            }
            Event::NotReleasedAfterWork { key, error } => {
                tracing::warn!(%key, %error, "the release of a lock failed, its lease ends it");
            }
            Event::CounterRepeated { key, error } => {
                tracing::debug!(%key, %error, "a step on a counter failed and is repeated");
            }
            Event::Leads { name, token } => tracing::info!(%name, token, "leads"),
            Event::LeadLost { name, loss } => {
                tracing::warn!(%name, %loss, "the lead is lost, and is stood for again");
            }
            Event::StandingFailed { name, error } => {
                tracing::warn!(%name, %error, "standing for the lead failed, and is tried again");
            }
            #[cfg(feature = "once")]
            Event::ClaimNotRenewed { name, error } => {
                let error = error.map(tracing::field::display);
                tracing::warn!(%name, error, "the claim of work was not renewed in time, and is asked for again");
            }
            #[cfg(feature = "once")]
            Event::ClaimNotSettled { name, error } => {
                tracing::warn!(%name, %error, "what became of work did not reach the store, and is sent again");
            }
            #[cfg(feature = "once")]
            Event::ClaimLost { name, attempt } => {
                tracing::warn!(%name, attempt, "work lost its claim: another process may do it again");
            }
            #[cfg(feature = "once")]
            Event::ResultNotKept { name, why } => {
                tracing::warn!(%name, why, "the work is done, and its result cannot be kept");
            }
            Event::StorePanicked { key } => {
                let key = key.map(tracing::field::display);
                tracing::error!(key, "a step of the lock store panicked");
            }
            Event::StoreSilent { key, since } => tracing::warn!(
                %key, ?since,
                "the lock store has not answered an acquire: waiting on (a store has to end each step in bounded time)"
            ),
        }
    }
}

/// The label `reason` of `dlock_acquire_failed_total`.
fn reason_of(error: &Error) -> &'static str {
    match error {
        Error::NotAcquired { .. } => "busy",
        Error::TooManyWaiters { .. } => "too_many_waiters",
        Error::Lost { .. } => "lost",
        Error::WouldDeadlock { .. } => "would_deadlock",
        error if error.is_unavailable() => "unavailable",
        _ => "invalid",
    }
}

/// The label `reason` of `dlock_lost_total`.
fn reason_of_loss(loss: Loss) -> &'static str {
    match loss {
        Loss::Expired => "expired",
        Loss::Gone => "gone",
        Loss::MaxHold => "max_hold",
        Loss::Shutdown => "shutdown",
        Loss::RuntimeEnded => "runtime_ended",
        Loss::Released => "released",
    }
}
