//! The series of metrics, registered when a group of locks is first used, and kept: a lookup costs more than a write.
//!
//! They belong to a client and to the recorder that was installed when they were created. If a program installs its
//! recorder after its first lock, they are created again; a call keeps those that it began with, and so does what it acquires.

use std::time::Duration;
#[cfg(feature = "metrics")]
use std::{collections::HashMap, sync::Arc};

#[cfg(feature = "metrics")]
use metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};
#[cfg(feature = "metrics")]
use parking_lot::RwLock;

use tokio::time::Instant;

use crate::base::clock;
#[cfg(feature = "metrics")]
use crate::base::int_hash::BuildIntHasher;
#[cfg(feature = "metrics")]
use crate::base::observed::observed;
use crate::base::report::LossReason;
use crate::runtime::emit::Event;
use crate::runtime::emit::label::label;
use crate::runtime::group::Group;
use crate::store::{Kind, Reason, StoreError};

label! {
    /// How an acquire ended.
    Outcome {
        Acquired = "acquired",
        Busy = "busy",
        Timeout = "timeout",
        Refused = "refused",
        Error = "error",
        Cancelled = "cancelled",
    }
}

label! {
    /// How a hold ended.
    Ended {
        Released = "released",
        Dropped = "dropped",
        Lost = "lost",
        Handoff = "handoff",
    }
}

label! {
    /// The operation of a request to the store.
    Operation {
        Acquire = "acquire",
        Renew = "renew",
        Release = "release",
    }
}

label! {
    /// How a request to the store ended.
    Answer {
        Ok = "ok",
        Refused = "refused",
        Failed = "failed",
    }
}

#[cfg(feature = "metrics")]
label! {
    /// Why a hold was lost.
    LostBy {
        Expired = "expired",
        Stalled = "stalled",
        Unanswered = "unanswered",
        Refused = "refused",
        Gone = "gone",
        MaxHold = "max_hold",
        Shutdown = "shutdown",
        RuntimeEnded = "runtime_ended",
    }
}

#[cfg(feature = "metrics")]
impl From<&LossReason> for LostBy {
    fn from(reason: &LossReason) -> LostBy {
        match reason {
            // A release is not a loss.
            LossReason::Expired | LossReason::Released => LostBy::Expired,
            LossReason::Stalled => LostBy::Stalled,
            LossReason::Unanswered(_) => LostBy::Unanswered,
            LossReason::Refused(_) => LostBy::Refused,
            // The new holder is looked up later, if at all.
            LossReason::Gone | LossReason::Broken(_) | LossReason::Taken { .. } => LostBy::Gone,
            LossReason::MaxHold => LostBy::MaxHold,
            LossReason::Shutdown => LostBy::Shutdown,
            LossReason::RuntimeEnded => LostBy::RuntimeEnded,
        }
    }
}

/// The series of one kind of locks of a group.
#[derive(Clone)]
pub(crate) struct Series {
    #[cfg(feature = "metrics")]
    of: Arc<OfGroup>,
}

#[cfg(feature = "metrics")]
struct OfGroup {
    wait: [Histogram; Outcome::ALL.len()],
    hold: [Histogram; Ended::ALL.len()],
    waiting: Gauge,
    held: Gauge,
    suspect: Gauge,
    lost: [Counter; LostBy::ALL.len()],
    client: ClientSeries,
}

/// The series of a client that have no group.
#[derive(Clone)]
pub(crate) struct ClientSeries {
    #[cfg(feature = "metrics")]
    of: Arc<OfClient>,
}

#[cfg(feature = "metrics")]
struct OfClient {
    request: [[Histogram; Answer::ALL.len()]; Operation::ALL.len()],
    remaining: Histogram,
    handoffs: Counter,
    reconnects: Counter,
    release_failed: Counter,
}

/// All series of a client.
#[derive(Default)]
pub(crate) struct Meter {
    #[cfg(feature = "metrics")]
    table: RwLock<Table>,
}

#[cfg(feature = "metrics")]
#[derive(Default)]
struct Table {
    /// The address of the recorder.
    recorder: usize,
    client: Option<ClientSeries>,
    /// By the numbers of their group and kind.
    groups: HashMap<u64, Arc<OfGroup>, BuildIntHasher>,
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter").finish_non_exhaustive()
    }
}

/// Registers a series, and tells the recorder what its metric means.
#[cfg(feature = "metrics")]
macro_rules! series {
    ($register:ident, $describe:ident, $name:literal, $unit:ident, $means:literal $(, $label:literal => $value:expr)*) => {{
        $describe!($name, metrics::Unit::$unit, $means);
        $register!($name $(, $label => $value)*)
    }};
}

#[cfg(feature = "metrics")]
impl OfClient {
    fn new() -> OfClient {
        OfClient {
            request: Operation::ALL.map(|operation| {
                Answer::ALL.map(|outcome| {
                    series!(
                        histogram, describe_histogram, "dlock_store_request_seconds", Seconds,
                        "Requests to the store, by operation and outcome.",
                        "operation" => operation.name(), "outcome" => outcome.name()
                    )
                })
            }),
            remaining: series!(
                histogram,
                describe_histogram,
                "dlock_lease_remaining_ratio",
                Count,
                "What was left of a lease when it was renewed: 0 to 1."
            ),
            handoffs: series!(
                counter,
                describe_counter,
                "dlock_handoffs_total",
                Count,
                "Locks that went to the next caller in this process."
            ),
            reconnects: series!(
                counter,
                describe_counter,
                "dlock_store_reconnects_total",
                Count,
                "Connections to the store that came back."
            ),
            release_failed: series!(
                counter,
                describe_counter,
                "dlock_release_failed_total",
                Count,
                "Locks whose release failed for good, which their leases end."
            ),
        }
    }
}

#[cfg(feature = "metrics")]
impl OfGroup {
    fn new(group: Group, kind: Kind, client: ClientSeries) -> OfGroup {
        let (group, kind) = (group.name(), kind.name());
        OfGroup {
            wait: Outcome::ALL.map(|outcome| {
                series!(
                    histogram, describe_histogram, "dlock_wait_seconds", Seconds,
                    "From the call of an acquire to its end, by outcome.",
                    "group" => group, "kind" => kind, "outcome" => outcome.name()
                )
            }),
            hold: Ended::ALL.map(|ended| {
                series!(
                    histogram, describe_histogram, "dlock_hold_seconds", Seconds,
                    "From the grant of a lock to its confirmed release, or its loss.",
                    "group" => group, "kind" => kind, "ended" => ended.name()
                )
            }),
            waiting: series!(
                gauge, describe_gauge, "dlock_waiting", Count, "Acquires under way in this process.",
                "group" => group, "kind" => kind
            ),
            held: series!(
                gauge, describe_gauge, "dlock_held", Count, "Locks that this process holds.",
                "group" => group, "kind" => kind
            ),
            suspect: series!(
                gauge, describe_gauge, "dlock_suspect", Count,
                "Of these, locks that the store has not confirmed when it was due.",
                "group" => group, "kind" => kind
            ),
            lost: LostBy::ALL.map(|reason| {
                series!(
                    counter, describe_counter, "dlock_lost_total", Count,
                    "Locks that were lost while they were held, by reason.",
                    "group" => group, "reason" => reason.name()
                )
            }),
            client,
        }
    }
}

#[cfg(feature = "metrics")]
impl Table {
    /// Forgets the series of another recorder.
    fn of_recorder(&mut self, recorder: usize) -> ClientSeries {
        if self.recorder != recorder {
            self.groups.clear();
            self.recorder = recorder;
            self.client = None;
        }
        let new = || ClientSeries {
            of: Arc::new(OfClient::new()),
        };
        self.client.get_or_insert_with(new).clone()
    }
}

#[cfg(feature = "metrics")]
fn recorder() -> usize {
    metrics::with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>().addr())
}

impl Meter {
    /// The series of a group.
    #[cfg_attr(
        not(feature = "metrics"),
        allow(clippy::unused_self, reason = "nothing is counted")
    )]
    pub(crate) fn series(&self, group: Group, kind: Kind) -> Series {
        #[cfg(feature = "metrics")]
        {
            let number = group.number() << 8 | kind as u64;
            let recorder = recorder();
            let table = self.table.read();
            if table.recorder == recorder
                && let Some(of) = table.groups.get(&number)
            {
                return Series { of: of.clone() };
            }
            drop(table);
            let mut table = self.table.write();
            let client = table.of_recorder(recorder);
            let of = table.groups.entry(number);
            let of = of.or_insert_with(|| Arc::new(OfGroup::new(group, kind, client)));
            Series { of: of.clone() }
        }
        #[cfg(not(feature = "metrics"))]
        {
            let _ = (group, kind);
            Series {}
        }
    }

    /// The series without a group.
    #[cfg_attr(
        not(feature = "metrics"),
        allow(clippy::unused_self, reason = "nothing is counted")
    )]
    pub(crate) fn client(&self) -> ClientSeries {
        #[cfg(feature = "metrics")]
        {
            let recorder = recorder();
            let table = self.table.read();
            if table.recorder == recorder
                && let Some(client) = &table.client
            {
                return client.clone();
            }
            drop(table);
            self.table.write().of_recorder(recorder)
        }
        #[cfg(not(feature = "metrics"))]
        ClientSeries {}
    }

    /// Counts a restored connection to the store.
    pub(super) fn reconnected(&self) {
        #[cfg(feature = "metrics")]
        observed(|| self.client().of.reconnects.increment(1));
    }

    /// A release failed for good.
    pub(super) fn release_failed(&self) {
        #[cfg(feature = "metrics")]
        observed(|| self.client().of.release_failed.increment(1));
    }
}

impl ClientSeries {
    /// Records how a request to the store ended, after this time.
    pub(super) fn requested(&self, operation: Operation, answer: Answer, took: Duration) {
        #[cfg(feature = "metrics")]
        observed(|| self.of.request[operation as usize][answer as usize].record(took.as_secs_f64()));
        #[cfg(not(feature = "metrics"))]
        let _ = (self, operation, answer, took);
    }

    /// Records how a request sent at `sent` ended.
    pub(crate) fn request_ended<T>(
        &self,
        operation: Operation,
        outcome: &Result<T, StoreError>,
        sent: Instant,
    ) {
        let answer = match outcome {
            Ok(_) => Answer::Ok,
            Err(error) => match error.reason {
                Reason::Unreachable | Reason::Closed => Answer::Failed,
                _ => Answer::Refused,
            },
        };
        let event = Event::Requested {
            client: self,
            operation,
            answer,
            took: clock::now().saturating_duration_since(sent),
        };
        event.emit();
    }
}

macro_rules! written {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $of:ty),*) => |$series:ident| $write:expr) => {
        $(#[$doc])*
        pub(super) fn $name(&self $(, $arg: $of)*) {
            #[cfg(feature = "metrics")]
            {
                let $series = &self.of;
                observed(|| $write);
            }
            #[cfg(not(feature = "metrics"))]
            let _ = (self, $($arg),*);
        }
    };
}

impl Series {
    /// The series of its client.
    #[cfg_attr(
        not(feature = "metrics"),
        allow(clippy::unused_self, reason = "nothing is counted")
    )]
    pub(crate) fn client(&self) -> &ClientSeries {
        #[cfg(feature = "metrics")]
        {
            &self.of.client
        }
        #[cfg(not(feature = "metrics"))]
        &ClientSeries {}
    }

    written!(waited(outcome: Outcome, waited: Duration) => |of| of.wait[outcome as usize].record(waited.as_secs_f64()));
    written!(was_held(ended: Ended, held: Duration) => |of| of.hold[ended as usize].record(held.as_secs_f64()));
    written!(waits(by: f64) => |of| of.waiting.increment(by));
    written!(holds(by: f64) => |of| of.held.increment(by));
    written!(is_suspect(by: f64) => |of| of.suspect.increment(by));
    written!(lost(reason: &LossReason) => |of| of.lost[LostBy::from(reason) as usize].increment(1));
    written!(renewed(remaining: f64) => |of| of.client.of.remaining.record(remaining));
    written!(handed_off() => |of| of.client.of.handoffs.increment(1));
}
