//! One acquire call: what it asks for, and what it reports.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::handoff::{DEFAULT_HANDOFFS, HandoffTerms};
use crate::runtime::attempt::{AcquireAttempt, AcquireTarget, AttemptOutcome};
use crate::runtime::calls::{explained, was_unreachable_since};
use crate::runtime::capable;
use crate::runtime::client::Handle;
use crate::runtime::emit::meter::Series;
use crate::runtime::ending::Ending;
use crate::runtime::hold::Hold;
use crate::runtime::options::{Lease, LockOptions, Options};
use crate::runtime::release::RunToCompletion;
use crate::store::{Announce, GrantId, Holder, Kind, StoreError};
use crate::{Error, LockKey};

/// One acquire call, or the part of a call for several keys that concerns one of them.
#[derive(Clone)]
pub(crate) struct AcquireCall {
    pub(crate) handle: Arc<Handle>,
    pub(crate) key: LockKey,
    pub(crate) options: Options,
    /// Ask once, without waiting.
    pub(crate) once: bool,
    /// Whether it is inside a hold of the same client: a draining client lets it pass.
    /// [`acquires`](Self::acquires) determines it.
    pub(crate) nested: bool,
    /// Its metrics.
    pub(crate) series: Series,
    pub(crate) by: &'static Location<'static>,
}

impl AcquireTarget for AcquireCall {
    type Got = Hold;

    fn handoff_terms(&self) -> Option<HandoffTerms> {
        let LockOptions {
            max_hold, min_hold, ..
        } = self.options.lock;
        let fixed = self.options.lock.fixed();
        let lease = self.lease();
        // What has to be set up at the store, the store is asked for.
        let plain = fixed.is_none() && min_hold.is_none() && max_hold.is_none_or(|most| most >= lease);
        let handoffs = self.handoffs();
        (plain && handoffs > 0).then_some(HandoffTerms {
            lease,
            max_hold,
            handoffs,
        })
    }

    fn attempt(
        &self,
        handed: u32,
        waiter: Option<GrantId>,
        announce: Announce,
    ) -> RunToCompletion<Result<AttemptOutcome<Hold>, StoreError>> {
        let mut attempt = AcquireAttempt::new(self, handed, waiter);
        attempt.request.announce = announce;
        AcquireCall::ask(attempt)
    }

    fn handed_off(&self, guard: Hold) -> Hold {
        guard
    }

    fn guard<'g>(&self, got: &'g Hold) -> Option<&'g Hold> {
        Some(got)
    }

    fn is_held(_got: &Hold) -> bool {
        // It came with the reply to this request.
        true
    }
}

impl AcquireCall {
    /// A call that asks `once`, without waiting, or waits.
    pub(crate) fn new(
        handle: &Arc<Handle>,
        key: &LockKey,
        options: Options,
        once: bool,
        by: &'static Location<'static>,
    ) -> AcquireCall {
        AcquireCall {
            handle: handle.here(),
            key: key.clone(),
            once,
            nested: false,
            series: (handle.shared().meter).series(options.lock.group, options.kind),
            options,
            by,
        }
    }

    /// The same call for another key.
    pub(crate) fn for_key(&self, key: &LockKey) -> AcquireCall {
        AcquireCall {
            handle: self.handle.clone(),
            key: key.clone(),
            options: self.options.clone(),
            series: self.series.clone(),
            ..*self
        }
    }

    /// When the wait time is over.
    pub(crate) fn until(&self, started: Instant) -> Option<Instant> {
        match self.once {
            true => Some(started),
            false => self.options.lock.wait.map(|wait| started + wait),
        }
    }

    /// Given when the call has to end without the lock: the client is shut down, or drains and this is an outermost
    /// call.
    pub(crate) fn ending(&self) -> &Ending {
        let shared = self.handle.shared();
        match self.nested {
            true => &shared.closing,
            false => &shared.draining,
        }
    }

    /// Whether a request that was made then was certainly not sent.
    pub(crate) fn was_not_sent(&self, asked: Moment) -> bool {
        let shared = self.handle.shared();
        was_unreachable_since(&*shared.store, &self.key, asked.instant())
    }

    /// Returns the error of a call that had to end for that reason.
    pub(crate) fn ended(&self) -> Error {
        self.handle.shared().refusal()
    }

    pub(crate) fn not_acquired(
        &self,
        started: Instant,
        remaining: Option<Duration>,
        holder: Option<Arc<Holder>>,
    ) -> Error {
        let waited = match self.once {
            true => Duration::ZERO,
            false => clock::now().saturating_duration_since(started),
        };
        Error::NotAcquired {
            kind: self.options.kind,
            key: self.key.clone(),
            waited,
            remaining,
            holder,
            votes: explained(&*self.handle.shared().store, self.options.kind, &self.key),
        }
    }

    /// Checks key and options, and that the store supports them.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.key.check()?;
        self.options.check()?;
        self.check_store()
    }

    /// Checks that the store supports the options.
    pub(crate) fn check_store(&self) -> Result<(), Error> {
        capable::check(&self.options, self.lease(), &self.handle.shared().capabilities)
    }

    pub(crate) fn handoffs(&self) -> u32 {
        // Each holder in a chain of handoffs has a separate fencing token.
        match self.options.kind.is_handed_off() && self.handle.shared().capabilities.token_blocks {
            true => self.options.lock.local_handoffs.unwrap_or(DEFAULT_HANDOFFS),
            false => 0,
        }
    }

    /// Whether a waiter may have a queue position at the store, under a separate id.
    pub(crate) fn has_position(&self) -> bool {
        match self.options.kind {
            Kind::Write => self.options.prefer_writers,
            Kind::Permit => true,
            // The position of a fair lock is that of its requests.
            Kind::Mutex | Kind::Fair | Kind::Read | Kind::Fenced | Kind::Unowned | Kind::Latch => false,
        }
    }

    /// How many permits are requested; 1 for all other kinds.
    pub(crate) fn amount(&self) -> u32 {
        self.options.permits.map_or(1, |permits| permits.amount)
    }

    /// The requested lease.
    pub(crate) fn lease(&self) -> Duration {
        let LockOptions { lease, max_hold, .. } = self.options.lock;
        match lease {
            // A fixed lease is never confirmed for longer than `max_hold`.
            Some(Lease::Fixed(fixed)) => fixed.min(max_hold.unwrap_or(Duration::MAX)),
            Some(Lease::Renewed(lease)) => lease,
            None => self.handle.shared().settings.lease,
        }
    }

    pub(crate) fn failed(&self, error: StoreError) -> Error {
        error.into_error(&format!("the acquire of {}", self.options.kind.noun()), &self.key)
    }

    /// Asks the store. The request runs to completion even if this is dropped, and a release right behind it undoes it.
    pub(super) fn ask(attempt: AcquireAttempt) -> RunToCompletion<Result<AttemptOutcome<Hold>, StoreError>> {
        RunToCompletion::acquire(attempt)
    }
}
