//! The one path for everything observable: each event becomes a log entry, a metric, or both.
//!
//! Log entries go through `tracing`; metrics through the `metrics` facade, and nowhere without the feature of that name.
//! Stores report on their own connections.

pub mod buckets;
pub(crate) mod events;
mod label;
pub(crate) mod meter;
pub(crate) mod trace;

use std::fmt::{Debug, Display};
use std::panic::Location;
use std::time::Duration;

use crate::base::observed::log;
use crate::base::report::{Intervention, LossReason};
use crate::runtime::emit::events::{LockEventKind, Of};
use crate::runtime::emit::meter::{Answer, ClientSeries, Ended, Meter, Operation, Outcome, Series};
use crate::runtime::emit::trace::{AcquireTrace, Acquired};
use crate::store::{GrantId, StoreError};
use crate::{Error, LockKey, Loss};

/// What can be observed of locks and semaphores.
pub(crate) enum Event<'a> {
    /// An acquire began.
    AcquireBegins { series: &'a Series },
    /// An acquire succeeded.
    Acquired {
        end: AcquireEnd<'a>,
        got: &'a dyn Acquired,
    },
    /// An acquire failed, or the wait was over.
    NotAcquired {
        end: AcquireEnd<'a>,
        lock: &'a dyn Debug,
        error: &'a Error,
    },
    /// An acquire was dropped before it ended.
    AcquireDropped(AcquireEnd<'a>),
    /// This process holds a lock.
    HoldBegins {
        series: &'a Series,
        of: Of<'a>,
        token: u64,
        handed_off: bool,
    },
    /// The process no longer holds it, whether or not the store knows.
    HoldEnds { series: &'a Series, was_suspect: bool },
    /// The hold has certainly ended, or its release failed for good.
    Held {
        series: &'a Series,
        of: Of<'a>,
        ended: Ended,
        held: Duration,
    },
    /// A lock was handed off in this process.
    HandedOff { series: &'a Series },
    /// A lease was renewed with this much left, unless it lasted as long as `max_hold` allows already.
    Renewed {
        series: &'a Series,
        of: Of<'a>,
        left: Duration,
        lease: Duration,
    },
    /// A hold is no longer suspect.
    Confirmed { series: &'a Series, of: Of<'a> },
    /// A request to the store ended.
    Requested {
        client: &'a ClientSeries,
        operation: Operation,
        answer: Answer,
        took: Duration,
    },
    /// A connection to the store was restored.
    Reconnected { meter: &'a Meter },
    /// A waiter needs more permits than the semaphore has in all.
    TooFewPermits { semaphore: &'a LockKey, wanted: u32 },
    /// A waiter waits for permits, and no permit has a lease that expires.
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
    /// A hold became suspect: its renewal failed, or the store is in doubt.
    Suspect {
        key: &'a LockKey,
        grant: GrantId,
        error: Option<&'a StoreError>,
    },
    /// Further holds became suspect at the same time.
    MoreSuspect { count: usize },
    /// A hold became suspect, for the metrics.
    BecameSuspect { series: &'a Series, of: Of<'a> },
    /// A hold was lost.
    Lost {
        series: &'a Series,
        of: Of<'a>,
        key: &'a LockKey,
        grant: GrantId,
        reason: &'a LossReason,
    },
    /// The holder of a lock is asked to stop.
    Revoked {
        of: Of<'a>,
        key: &'a LockKey,
        grant: GrantId,
        intervention: &'a Intervention,
    },
    /// The presence entry, or an answer to another client, was not written; without an error, not in time.
    NotWritten { error: Option<&'a StoreError> },
    /// A release failed and is sent again.
    ReleaseRepeated {
        key: &'a LockKey,
        grant: GrantId,
        error: &'a StoreError,
    },
    /// A release failed for good.
    ReleaseFailed {
        meter: &'a Meter,
        key: &'a LockKey,
        grant: GrantId,
        error: &'a StoreError,
    },
    /// The release after the user's work was not confirmed in time; the work's result is returned all the same. If the
    /// release fails for good, that is reported by itself.
    NotReleasedAfterWork { key: &'a LockKey, error: &'a Error },
    /// A request on a counter failed and is sent again.
    CounterRepeated { key: &'a LockKey, error: &'a StoreError },
    /// This process leads.
    Leads { name: &'a LockKey, token: u64 },
    /// This process no longer leads, and is a candidate again.
    LeadLost { name: &'a LockKey, loss: Loss },
    /// A campaign for leadership failed, and is tried again.
    StandingFailed { name: &'a LockKey, error: &'a Error },
    /// The claim of work that is done once was not renewed; without an error, not in time.
    #[cfg(feature = "once")]
    ClaimNotRenewed {
        name: &'a LockKey,
        error: Option<&'a StoreError>,
    },
    /// The outcome of such a claim did not reach the store.
    #[cfg(feature = "once")]
    ClaimNotSettled {
        name: &'a LockKey,
        error: &'a StoreError,
    },
    /// Such a claim was lost while the work ran.
    #[cfg(feature = "once")]
    ClaimLost { name: &'a LockKey, attempt: u32 },
    /// This many slots before the current one were not done.
    #[cfg(feature = "once")]
    SlotsSkipped { name: &'a LockKey, count: u64 },
    /// The result of such work cannot be kept.
    #[cfg(feature = "once")]
    ResultNotKept { name: &'a LockKey, why: &'a str },
    /// A method of the store panicked, called for this lock.
    StorePanicked { key: Option<&'a LockKey> },
    /// The store has not answered an acquire for this time; the call continues to wait.
    StoreSilent { key: &'a LockKey, since: Duration },
}

/// The end of an acquire.
pub(crate) struct AcquireEnd<'a> {
    pub(crate) series: &'a Series,
    pub(crate) trace: &'a AcquireTrace,
    pub(crate) of: &'a [Of<'a>],
    pub(crate) waited: Duration,
}

impl AcquireEnd<'_> {
    fn count(&self, outcome: Outcome) {
        self.series.waits(-1.0);
        self.series.waited(outcome, self.waited);
    }

    fn tell(&self, what: impl Fn(Duration) -> LockEventKind) {
        self.of.iter().for_each(|of| of.tell(|| what(self.waited)));
    }
}

impl Event<'_> {
    /// Reports the event to the listeners, log and metrics.
    pub(crate) fn emit(self) {
        match self {
            Event::AcquireBegins { series } => series.waits(1.0),
            Event::Acquired { end, got } => {
                end.count(Outcome::Acquired);
                end.trace.acquired(end.waited, got);
                end.tell(|waited| LockEventKind::Acquired { waited });
            }
            Event::NotAcquired { end, lock, error } => {
                let outcome = outcome_of(error);
                end.count(outcome);
                end.trace.not_acquired(end.waited, outcome);
                log!(debug, ?lock, %error, "a lock was not acquired");
                end.tell(|waited| LockEventKind::NotAcquired {
                    waited,
                    error: error.to_string(),
                });
            }
            Event::AcquireDropped(end) => {
                end.count(Outcome::Cancelled);
                end.trace.not_acquired(end.waited, Outcome::Cancelled);
                end.tell(|waited| LockEventKind::Cancelled { waited });
            }
            Event::HoldBegins {
                series,
                of,
                token,
                handed_off,
            } => {
                series.holds(1.0);
                of.tell(|| LockEventKind::Granted { token, handed_off });
            }
            Event::HoldEnds { series, was_suspect } => {
                series.holds(-1.0);
                if was_suspect {
                    series.is_suspect(-1.0);
                }
            }
            Event::Held {
                series,
                of,
                ended,
                held,
            } => {
                series.was_held(ended, held);
                let how = ended.into();
                of.tell(|| LockEventKind::Ended { how, held });
            }
            Event::HandedOff { series } => series.handed_off(),
            Event::Renewed {
                series,
                of,
                left,
                lease,
            } => {
                // The first lease is as long as a `min_hold`.
                series.renewed((left.as_secs_f64() / lease.as_secs_f64()).min(1.0));
                if left < lease / 3 {
                    of.tell_later(|| LockEventKind::NearMiss { left });
                }
            }
            Event::Confirmed { series, of } => {
                series.is_suspect(-1.0);
                of.tell_later(|| LockEventKind::Confirmed);
            }
            Event::BecameSuspect { series, of } => {
                series.is_suspect(1.0);
                of.tell_later(|| LockEventKind::Suspect);
            }
            Event::Requested {
                client,
                operation,
                answer,
                took,
            } => client.requested(operation, answer, took),
            Event::Reconnected { meter } => meter.reconnected(),
            Event::TooFewPermits { semaphore, wanted } => log!(
                warn, %semaphore, wanted,
                "a semaphore has fewer permits in all than are wanted: waiting until some are added"
            ),
            Event::NoPermitEnds { semaphore } => log!(
                warn, %semaphore,
                "no permit is available, and no lease of one expires: waiting until permits are set or released"
            ),
            Event::WaitsInOwnFrame { key, waiting, inside } => log!(
                warn, %key, %waiting, %inside,
                "a call waits for a lock inside the lock's own frame, while another guard of it is inside: if that guard \
                 waits for this call, this never ends (pass the guard along, use guard.reenter(), or set a wait)"
            ),
            Event::PollDeadlineMissed { key, by } => {
                log!(debug, %key, %by, "a waiter was woken and not polled: others go first");
            }
            Event::RenewalFailed { key, error } => {
                log!(debug, %key, %error, "a renewal failed and is tried again");
            }
            Event::Suspect { key, grant, error } => {
                let error = error.map(tracing::field::display);
                log!(warn, %key, %grant, error, "a lock could not be confirmed; its lease has not ended");
            }
            Event::MoreSuspect { count } => {
                log!(
                    warn,
                    count,
                    "further locks could not be confirmed; their leases have not ended"
                );
            }
            Event::Lost {
                series,
                of,
                key,
                grant,
                reason,
            } => {
                series.lost(reason);
                log!(warn, %key, %grant, %reason, "a lock was lost");
                of.tell(|| LockEventKind::Lost {
                    reason: reason.clone(),
                });
            }
            Event::Revoked {
                of,
                key,
                grant,
                intervention,
            } => {
                log!(
                    warn, %key, %grant, by = %intervention.by, reason = %intervention.reason,
                    "the holder of a lock is asked to stop"
                );
                of.tell(|| LockEventKind::Revoked {
                    intervention: intervention.clone(),
                });
            }
            Event::NotWritten { error } => {
                let error = error.map(tracing::field::display);
                log!(debug, error, "the presence entry was not written");
            }
            Event::ReleaseRepeated { key, grant, error } => {
                log!(debug, %key, %grant, %error, "a release failed and is repeated");
            }
            Event::ReleaseFailed {
                meter,
                key,
                grant,
                error,
            } => {
                meter.release_failed();
                log!(warn, %key, %grant, %error, "a lock could not be released; it ends with its lease");
            }
            Event::NotReleasedAfterWork { key, error } => {
                log!(debug, %key, %error, "the release of a lock after its work was not confirmed");
            }
            Event::CounterRepeated { key, error } => {
                log!(debug, %key, %error, "a counter operation failed and is repeated");
            }
            Event::Leads { name, token } => log!(info, %name, token, "leads"),
            Event::LeadLost { name, loss } => {
                log!(warn, %name, %loss, "leadership lost; campaigning again");
            }
            Event::StandingFailed { name, error } => {
                log!(warn, %name, %error, "a campaign for leadership failed and is tried again");
            }
            #[cfg(feature = "once")]
            Event::ClaimNotRenewed { name, error } => {
                let error = error.map(tracing::field::display);
                log!(warn, %name, error, "the claim of work was not renewed in time; the renewal is tried again");
            }
            #[cfg(feature = "once")]
            Event::ClaimNotSettled { name, error } => {
                log!(warn, %name, %error, "the outcome of work did not reach the store and is sent again");
            }
            #[cfg(feature = "once")]
            Event::ClaimLost { name, attempt } => {
                log!(warn, %name, attempt, "work lost its claim: another process may do it again");
            }
            #[cfg(feature = "once")]
            Event::SlotsSkipped { name, count } => {
                log!(info, %name, count, "slots of work were skipped: no process asked for them, or a run was still going");
            }
            #[cfg(feature = "once")]
            Event::ResultNotKept { name, why } => {
                log!(warn, %name, why, "the work is done, but its result cannot be kept");
            }
            Event::StorePanicked { key } => {
                let key = key.map(tracing::field::display);
                log!(error, key, "an operation of the lock store panicked");
            }
            Event::StoreSilent { key, since } => log!(
                warn, %key, ?since,
                "the lock store has not answered an acquire: still waiting (a store must end each operation in bounded time)"
            ),
        }
    }
}

/// Returns the label `outcome` of a failed acquire.
fn outcome_of(error: &Error) -> Outcome {
    match error {
        Error::NotAcquired { waited, .. } if waited.is_zero() => Outcome::Busy,
        Error::NotAcquired { .. } => Outcome::Timeout,
        Error::Unreachable { .. }
        | Error::OutcomeUnknown { .. }
        | Error::Refused { .. }
        | Error::NotReplicated { .. }
        | Error::Lost { .. } => Outcome::Error,
        _ => Outcome::Refused,
    }
}
