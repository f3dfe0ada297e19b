//! A request to the store for a lock, and the guard of what it grants.

use std::panic::Location;
use std::sync::Arc;
use std::thread::LocalKey;
use std::time::Duration;

use tokio::time::Instant;

use crate::HoldState;
use crate::base::broken;
use crate::base::chance::unique_id;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::grant::Terms;
use crate::engine::handoff::{self, HandoffBudget, HandoffTerms};
use crate::runtime::acquire::AcquireCall;
use crate::runtime::client::{Handle, Shared};
use crate::runtime::emit::meter::{ClientSeries, Series};
use crate::runtime::grants::{Grant, Granted};
use crate::runtime::group::Group;
use crate::runtime::hold::Hold;
use crate::runtime::nested_read::NestedRead;
use crate::runtime::options::LockOptions;
use crate::runtime::release::{AcquireMemory, PendingAcquire, RunToCompletion};
use crate::runtime::scope::HoldRef;
use crate::runtime::unfinished::Part;
use crate::store::{
    self, AcquireReply, AcquireRequest, Announce, Busy, GivenLease, GrantId, Outcome, Reason, RenewRequest,
    Renewal, StoreError,
};
use crate::{Error, Loss};

/// The outcome of one request to the store.
pub(crate) enum AttemptOutcome<T> {
    Got(T),
    /// Another client holds the requested key.
    Busy {
        /// The remaining lease of the holder, or `None` if it does not expire.
        left: Option<Duration>,
        /// The time within which the waiter has to ask again.
        again: Option<Duration>,
        /// How many processes wait for a plain lock, as far as the store can tell.
        listeners: Option<u64>,
        /// For how long the waiter sends no further request, even if it is notified.
        pause: Duration,
    },
    /// The semaphore has fewer permits in all than requested.
    TooFew,
}

/// What a waiter asks the store for.
pub(crate) trait AcquireTarget: Sync {
    /// The result of a successful acquire.
    type Got: Send + 'static;

    /// The grants that it accepts from other holders in this process, if any.
    fn handoff_terms(&self) -> Option<HandoffTerms>;

    /// Asks the store once. The request runs to completion even if this is dropped, and is then undone. `handed` counts
    /// the handoffs here since the lock last came from the store, `waiter` is the id of the queue position at the
    /// store, `announce` what other processes are told.
    fn attempt(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        announce: Announce,
    ) -> RunToCompletion<Result<AttemptOutcome<Self::Got>, StoreError>>;

    /// Accepts a lock that another caller of this process has handed off.
    fn handed_off(&self, guard: Hold) -> Self::Got;

    /// Returns the lock that the call waited for, if it was acquired.
    fn guard<'g>(&self, got: &'g Self::Got) -> Option<&'g Hold>;

    /// Whether what was acquired is still held, if that took several requests.
    fn is_held(got: &Self::Got) -> bool;
}

/// One request for one key, and the data that its grant needs.
pub(crate) struct AcquireAttempt {
    pub(crate) handle: Arc<Handle>,
    pub(crate) request: AcquireRequest,
    /// The moment from which the lease counts.
    sent: Instant,
    lease: Duration,
    fixed: bool,
    max_hold: Option<Duration>,
    min_hold: Option<Duration>,
    handoffs: u32,
    group: Group,
    series: Series,
    by: &'static Location<'static>,
    nested_read: Option<Arc<NestedRead>>,
}

impl AcquireAttempt {
    /// Creates a request for the key of the call, under a new id; `handed` and `waiter` as in
    /// [`AcquireTarget::attempt`].
    pub(crate) fn new(call: &AcquireCall, handed: u32, waiter: Option<GrantId>) -> AcquireAttempt {
        let mut attempt = AcquireAttempt::with_id(call.handle.shared().next_grant(), call, handed);
        attempt.request.waiter = waiter.filter(|_| call.has_position());
        attempt
    }

    /// Creates a request with this id, without a queue position at the store.
    pub(crate) fn with_id(grant: GrantId, call: &AcquireCall, handed: u32) -> AcquireAttempt {
        let kind = call.options.kind;
        let LockOptions {
            max_hold, min_hold, ..
        } = call.options.lock;
        let (lease, handoffs) = (call.lease(), call.handoffs());
        // `max_hold` limits every lease and `min_hold` extends the first one; conflicting options are refused.
        let first_lease = lease
            .max(min_hold.unwrap_or_default())
            .min(max_hold.unwrap_or(Duration::MAX));
        let request = AcquireRequest {
            // A waiter with a position in the store's queue states for how many others it asks.
            tokens: match kind.waits_in_store() {
                true => 1,
                false => handoff::tokens(handoffs, handed),
            },
            permits: call.options.permits.and_then(|permits| permits.total),
            limit: call.options.permits.and_then(|permits| permits.limit),
            amount: call.amount(),
            ..AcquireRequest::new(kind, call.key.clone(), grant, first_lease)
        };
        AcquireAttempt {
            handle: call.handle.clone(),
            request,
            sent: clock::now(),
            lease,
            fixed: call.options.lock.fixed().is_some(),
            max_hold,
            min_hold,
            handoffs,
            group: call.options.lock.group,
            series: call.series.clone(),
            by: call.by,
            nested_read: None,
        }
    }

    /// Nests the read in a write grant.
    pub(crate) fn nested_in(mut self, nested_read: Arc<NestedRead>) -> AcquireAttempt {
        self.request.nested_in = Some(nested_read.write.id());
        self.nested_read = Some(nested_read);
        self
    }

    /// Returns the client, and the series that count its requests to the store.
    pub(crate) fn counted_by(&self) -> (&Shared, &ClientSeries) {
        (self.handle.shared(), self.series.client())
    }

    /// Returns the moment from which its lease counts.
    pub(crate) fn sent(&self) -> Instant {
        self.sent
    }

    /// Whether its lease runs from the acquisition on, without renewal.
    pub(crate) fn ends_by_itself(&self) -> bool {
        self.fixed || self.min_hold.is_some()
    }

    /// Creates the operation that restarts the lease now.
    pub(crate) fn begin_anew(&self) -> RenewRequest {
        let AcquireRequest {
            kind,
            grant,
            lease,
            amount,
            ..
        } = self.request;
        let key = self.request.key.clone();
        RenewRequest {
            kind,
            key,
            grant,
            lease,
            amount,
        }
    }

    /// Counts the lease from `sent` on, as far as the store has renewed it.
    pub(crate) fn begun_anew(&mut self, sent: Instant, renewal: Renewal) {
        match renewal {
            Renewal::Renewed => self.sent = sent,
            Renewal::RenewedFor(lease) => {
                self.sent = sent;
                self.was_given(lease);
            }
            Renewal::Held | Renewal::Gone => {}
        }
    }

    /// Adopts the lease that the store gave instead of the requested one.
    fn was_given(&mut self, lease: GivenLease) {
        let (elapsed, lasts) = (lease.begun_before(), lease.at_most(self.request.lease));
        (self.sent, self.request.lease) = match self.sent.checked_sub(elapsed) {
            Some(begun) => (begun, lasts),
            // The clock cannot go back that far.
            None => (self.sent, lasts.saturating_sub(elapsed)),
        };
        self.lease = lease.at_most(self.lease);
    }

    /// Returns the guard of the grant.
    pub(crate) fn granted(mut self, granted: &store::Granted) -> Result<Hold, StoreError> {
        let tokens = (granted.first_token, granted.last_token);
        if let Some(lease) = granted.lease {
            self.was_given(lease);
        }
        let AcquireAttempt {
            handle,
            request,
            sent,
            ..
        } = self;
        let (shared, sent) = (handle.shared(), Moment::of(sent));
        let terms = Terms {
            lease: self.lease,
            renewed: !self.fixed,
            max_end: self.max_hold.map(|d| sent + d),
            min_until: self.min_hold.map(|d| sent + d),
        };
        let hold = self
            .nested_read
            .as_ref()
            .map_or_else(unique_id, |nested_read| nested_read.hold);
        // The arrival of the reply.
        let now = Moment::now();
        let what = Granted {
            group: self.group,
            series: self.series,
            kind: request.kind,
            amount: request.amount,
            key: request.key,
            number: request.grant.number(),
            token: tokens.0,
            sent: if broken!(AcquireDeadlineFromReply) {
                now
            } else {
                sent
            },
            lease: request.lease,
            budget: HandoffBudget::new(request.kind, self.handoffs, tokens, sent, now),
            nested_read: self.nested_read,
        };
        let grant = Arc::new(Grant::new(what, shared.issuer(), terms, (hold, self.by)));
        shared.watchdog.add(&grant, sent, now);
        let status = grant.status_at(now);
        let hold = HoldRef { id: hold, grant };
        let guard = Hold::new(hold, handle);
        // Dropped if it is already lost, which releases it.
        match status {
            HoldState::Lost(Loss::Expired | Loss::MaxHold) => Err(StoreError::not_done(
                Reason::Unreachable,
                "the reply arrived after the lease expired",
            )),
            HoldState::Lost(Loss::Shutdown | Loss::RuntimeEnded) => Err(StoreError::not_done(
                Reason::Closed,
                "the reply arrived after the client was shut down",
            )),
            _ => Ok(guard),
        }
    }

    /// Registers the grant, so that a shutdown releases it, until [`finished`](Self::finished).
    pub(crate) fn unfinished(&self, is_held: bool) {
        self.handle.shared().unfinished.add(Part {
            request: self.request.undone(),
            lease: self.request.lease,
            is_held,
        });
    }

    /// Unregisters it: the call owns it now. Returns false if a shutdown has released it.
    pub(crate) fn finished(&self) -> bool {
        self.handle
            .shared()
            .unfinished
            .remove(self.request.grant.number())
    }

    /// Handles a failed request: nothing stays of it.
    pub(crate) fn failed(&self, error: &StoreError) {
        if error.outcome == Outcome::Unknown && !broken!(UnknownAcquireNotUndone) {
            drop(self.undo());
        }
    }

    /// Releases what was granted, or may have been. The release is queued before this returns; its outcome may be
    /// dropped.
    pub(crate) fn undo(&self) -> RunToCompletion<Result<(), Error>> {
        self.handle.undo(self.request.undone(), self.request.lease)
    }
}

impl PendingAcquire for AcquireAttempt {
    type Brought = Result<AttemptOutcome<Hold>, StoreError>;

    fn attempt(&self) -> &AcquireAttempt {
        self
    }

    fn replied(self, reply: Result<AcquireReply, StoreError>) -> Self::Brought {
        match reply {
            Ok(AcquireReply::Acquired(granted)) => self.granted(&granted).map(AttemptOutcome::Got),
            Ok(AcquireReply::Busy(Busy {
                remaining,
                again,
                listeners,
                pause,
            })) => Ok(AttemptOutcome::Busy {
                left: remaining,
                again,
                listeners,
                pause,
            }),
            Ok(AcquireReply::TooFewPermits) => Ok(AttemptOutcome::TooFew),
            Err(error) => {
                self.failed(&error);
                Err(error)
            }
        }
    }

    fn undo(&self) -> RunToCompletion<Result<(), Error>> {
        AcquireAttempt::undo(self)
    }

    fn forget(self) {}

    fn spares() -> Option<&'static LocalKey<AcquireMemory<AcquireAttempt>>> {
        Some(&SPARES)
    }
}

thread_local! {
    static SPARES: AcquireMemory<AcquireAttempt> = const { AcquireMemory::new() };
}
