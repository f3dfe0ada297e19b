//! What this process has been granted, and until when.
//!
//! A *grant* is what the store knows. The *holds* on it are the callers in this process: re-entry adds
//! one, and the grant is given back when the last is gone.

use std::panic::Location;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::backend::{GrantId, Kind, ReleaseRequest, RenewRequest};
use crate::client::Shared;
use crate::guard::HoldState;
use crate::handover::Chain;
use crate::waiters::Turn;
use crate::{LockKey, Loss, clock};

/// What a lease is shortened by on this side, for clocks that run at different rates and for the way back
/// of the answer.
pub(crate) fn margin(lease: Duration) -> Duration {
    (lease / 100).max(Duration::from_millis(10))
}

/// How a grant is kept alive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// The lease that was asked for.
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// When renewal ends, at the latest.
    pub(crate) max_end: Option<Instant>,
    /// Until when the key stays taken even if the holder is done.
    pub(crate) min_until: Option<Instant>,
}

/// One grant of this process.
pub(crate) struct Grant {
    pub(crate) kind: Kind,
    pub(crate) key: LockKey,
    pub(crate) id: GrantId,
    /// Unique in the process; the grant's name in the watchdog's books.
    pub(crate) number: u64,
    pub(crate) client_id: u64,
    pub(crate) client: Weak<Shared>,
    pub(crate) terms: Terms,
    /// Cancelled when the grant has ended, by loss or by release.
    pub(crate) over: CancellationToken,
    /// Told whenever a hold leaves.
    pub(crate) gate: Notify,
    state: Mutex<State>,
}

struct State {
    /// When the store may give the key to somebody else, less the margin.
    deadline: Instant,
    suspect: bool,
    ended: Option<Loss>,
    holds: Vec<(u64, &'static Location<'static>)>,
    chain: Chain,
    /// The turn of those who wait for the key in this process, while they wait for this grant.
    turn: Option<Turn>,
}

/// What became of an attempt to enter a grant again.
pub(crate) enum Entry {
    /// A hold more, with this id.
    Entered(u64),
    /// Somebody who is not around the asker is inside, since this line.
    Sibling(&'static Location<'static>),
    /// The grant has ended.
    Lost(Loss),
}

impl Grant {
    #[allow(clippy::too_many_arguments, reason = "one constructor, called at one place")]
    pub(crate) fn new(
        kind: Kind,
        key: LockKey,
        id: GrantId,
        client: &std::sync::Arc<Shared>,
        terms: Terms,
        sent: Instant,
        lease: Duration,
        hold: u64,
        by: &'static Location<'static>,
        chain: Chain,
    ) -> Grant {
        let state = State {
            deadline: sent + lease - margin(lease),
            suspect: false,
            ended: None,
            holds: vec![(hold, by)],
            chain,
            turn: None,
        };
        Grant {
            kind,
            key,
            id,
            number: next_id(),
            client_id: client.id,
            client: std::sync::Arc::downgrade(client),
            terms,
            over: CancellationToken::new(),
            gate: Notify::new(),
            state: Mutex::new(state),
        }
    }

    /// The grant as the next holder in this process has it, with its hold and its fencing token. To the
    /// store, and in the watchdog's books, it is the same.
    pub(crate) fn heir(
        &self,
        max_hold: Option<Duration>,
        by: &'static Location<'static>,
    ) -> (Grant, u64, u64) {
        let hold = next_id();
        let state = self.state.lock();
        let (chain, token) = state.chain.step();
        let state = State {
            deadline: state.deadline,
            suspect: state.suspect,
            ended: None,
            holds: vec![(hold, by)],
            chain,
            turn: None,
        };
        let grant = Grant {
            kind: self.kind,
            key: self.key.clone(),
            id: self.id.clone(),
            number: self.number,
            client_id: self.client_id,
            client: self.client.clone(),
            terms: Terms {
                max_end: max_hold.map(|d| clock::now() + d),
                min_until: None,
                ..self.terms
            },
            over: CancellationToken::new(),
            gate: Notify::new(),
            state: Mutex::new(state),
        };
        (grant, hold, token)
    }

    /// Whether the grant can ever be handed on, if it is left in time.
    pub(crate) fn can_be_handed_on(&self) -> bool {
        self.terms.renewed && self.state.lock().chain.is_open(clock::now())
    }

    /// Whether the grant, which nobody here holds any more, may be handed on: it is renewed, past its
    /// `min_hold`, free of doubt, and has a third of its lease left.
    pub(crate) fn may_be_handed_on(&self) -> bool {
        let Terms {
            lease,
            renewed,
            max_end,
            min_until,
        } = self.terms;
        if !renewed {
            return false;
        }
        let now = clock::now();
        // Close to its end a renewal may be under way that asks for less than the lease.
        if min_until.is_some_and(|until| now < until) || max_end.is_some_and(|end| end < now + lease) {
            return false;
        }
        let state = self.state.lock();
        state.chain.is_open(now) && !state.suspect && state.deadline >= now + lease / 3
    }

    /// Keeps the turn until the grant ends; passes it on if it has.
    pub(crate) fn put_turn(&self, turn: Turn) {
        let mut state = self.state.lock();
        if state.ended.is_none() {
            state.turn = Some(turn);
            return;
        }
        drop(state);
        drop(turn);
    }

    pub(crate) fn take_turn(&self) -> Option<Turn> {
        self.state.lock().turn.take()
    }

    /// Whether this hold is still there.
    pub(crate) fn has(&self, hold: u64) -> bool {
        self.state.lock().holds.iter().any(|(id, _)| *id == hold)
    }

    /// One hold more, if everybody inside is around the asker.
    pub(crate) fn enter(&self, around: impl Fn(u64) -> bool, by: &'static Location<'static>) -> Entry {
        if let HoldState::Lost(loss) = self.status() {
            return Entry::Lost(loss);
        }
        let mut state = self.state.lock();
        if let Some(loss) = state.ended {
            return Entry::Lost(loss);
        }
        if let Some((_, line)) = state.holds.iter().find(|(id, _)| !around(*id)) {
            return Entry::Sibling(line);
        }
        let id = next_id();
        state.holds.push((id, by));
        Entry::Entered(id)
    }

    /// One hold less. `Some` for the last one, with what had ended the grant before, if anything.
    pub(crate) fn leave(&self, hold: u64) -> Option<Option<Loss>> {
        self.status();
        let mut state = self.state.lock();
        state.holds.retain(|(id, _)| *id != hold);
        let last = state.holds.is_empty();
        let before = state.ended;
        if last {
            state.ended.get_or_insert(Loss::Released);
        }
        drop(state);
        self.gate.notify_waiters();
        last.then(|| {
            // Told already, otherwise; perhaps by who calls this from a waker.
            if before.is_none() {
                self.over.cancel();
            }
            before
        })
    }

    /// Whether the grant holds, as the clock says now. Once `Lost`, always `Lost`.
    pub(crate) fn status(&self) -> HoldState {
        let status = self.peek();
        if let HoldState::Lost(loss) = status {
            self.lose(loss);
        }
        status
    }

    /// The same without telling anybody, for callers that hold a lock: whoever is told may call back.
    pub(crate) fn peek(&self) -> HoldState {
        let state = self.state.lock();
        if state.ended.is_none() && clock::now() >= state.deadline {
            let loss = match self.terms.max_end {
                Some(end) if self.terms.renewed && state.deadline + margin(self.terms.lease) >= end => {
                    Loss::MaxHold
                }
                _ => Loss::Expired,
            };
            return HoldState::Lost(loss);
        }
        match state.ended {
            Some(loss) => HoldState::Lost(loss),
            None if state.suspect => HoldState::Suspect,
            None => HoldState::Held,
        }
    }

    /// Ends the grant, unless it has ended already.
    pub(crate) fn lose(&self, loss: Loss) {
        let mut state = self.state.lock();
        if state.ended.is_none() {
            state.ended = Some(loss);
            let turn = state.turn.take();
            drop(state);
            self.tell_lost(loss);
            // Who waits here looks at the store now.
            drop(turn);
        }
    }

    fn tell_lost(&self, loss: Loss) {
        tracing::warn!(key = %self.key, grant = %self.id, %loss, "a lock was lost");
        crate::telemetry::lost(loss);
        self.over.cancel();
        self.gate.notify_waiters();
    }

    /// How long the grant holds for sure from now on.
    pub(crate) fn remaining(&self) -> Duration {
        match self.status() {
            HoldState::Lost(_) => Duration::ZERO,
            _ => self.deadline().saturating_duration_since(clock::now()),
        }
    }

    /// What is missing to `min_hold` yet.
    pub(crate) fn min_hold_left(&self) -> Duration {
        self.terms.min_until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(clock::now())
        })
    }

    /// The step that gives the grant back.
    pub(crate) fn release_request(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.id.clone(),
            keep_for: self.min_hold_left(),
        }
    }

    /// When the grant is lost unless it is renewed.
    pub(crate) fn deadline(&self) -> Instant {
        self.state.lock().deadline
    }

    /// The lease that a renewal sent now asks for: what the lease always is, as far as `max_hold` allows,
    /// or what is left of it where it is fixed. `None` when nothing is to be had.
    pub(crate) fn next_lease(&self, now: Instant) -> Option<Duration> {
        let lease = if self.terms.renewed {
            let left = self
                .terms
                .max_end
                .map_or(Duration::MAX, |end| end.saturating_duration_since(now));
            let least = self
                .terms
                .min_until
                .map_or(Duration::ZERO, |t| t.saturating_duration_since(now));
            self.terms.lease.max(least).min(left)
        } else {
            (self.deadline() + margin(self.terms.lease)).saturating_duration_since(now)
        };
        (lease > margin(lease)).then_some(lease)
    }

    /// The step that renews the grant with this lease.
    pub(crate) fn renew_request(&self, lease: Duration) -> RenewRequest {
        RenewRequest {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.id.clone(),
            lease,
        }
    }

    /// The store confirmed the grant, by a step sent at `sent`, for `lease` from then on. Too late is too
    /// late: what had expired before the answer came stays lost.
    pub(crate) fn renewed(&self, sent: Instant, lease: Duration) {
        let mut state = self.state.lock();
        if clock::now() >= state.deadline {
            return;
        }
        state.suspect = false;
        let deadline = sent + lease - margin(lease);
        // A fixed lease that was only confirmed keeps the deadline it had: what was left of it went over
        // the wire in whole milliseconds.
        if self.terms.renewed {
            // An answer may come after that of a later question.
            state.deadline = state.deadline.max(deadline);
        } else {
            state.deadline = state.deadline.min(deadline + margin(lease));
        }
    }

    /// The store has not confirmed the grant when it should have. Whether that is new.
    pub(crate) fn suspect(&self) -> bool {
        let mut state = self.state.lock();
        state.ended.is_none() && !std::mem::replace(&mut state.suspect, true)
    }

    /// Says so, for callers that hold no lock.
    pub(crate) fn tell_suspect(&self) {
        tracing::warn!(key = %self.key, grant = %self.id, "a lock could not be confirmed, its lease still runs");
    }
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant")
            .field("key", &self.key)
            .field("id", &self.id)
            .field("terms", &self.terms)
            .finish_non_exhaustive()
    }
}

/// A number that is unique in this process.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
