//! What the checker looks at, which changes nothing.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::HoldState;
use crate::api::held::View;
use crate::base::moment::Moment;
use crate::engine::timing;
use crate::runtime::client::Shared;
use crate::store::{GrantId, Kind};
use crate::{Held, LockClient, LockKey, Loss};

/// What a hold would answer at `now` by the clock of its process, which must be entered; of several the worst. It
/// notifies no waiter, and does not end an expired grant.
#[must_use]
pub fn peek(held: &Held, now: Instant) -> HoldState {
    let now = Moment::of(now);
    let mut worst = HoldState::Held;
    for grant in held.grants() {
        match grant.peek_at(now).0 {
            HoldState::Held => {}
            HoldState::Suspect => worst = HoldState::Suspect,
            lost @ HoldState::Lost(_) => return lost,
        }
    }
    worst
}

/// Whether a renewed lease of a hold has expired, by the clock that [`peek`] takes.
#[must_use]
pub fn ran_out(held: &Held, now: Instant) -> bool {
    let now = Moment::of(now);
    let mut renewed = held.grants().iter().filter(|grant| grant.renewed);
    renewed.any(|grant| grant.peek_at(now).0 == HoldState::Lost(Loss::Expired))
}

/// What a hold is known by at the store.
pub fn grants(held: &Held) -> impl Iterator<Item = (&LockKey, Kind, GrantId)> {
    let grants = held.grants().iter();
    grants.map(|grant| (&grant.key, grant.kind, grant.id()))
}

/// What is left in a client; nothing of it when all its users are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Left {
    /// Grants that it believes to hold.
    pub grants: usize,
    /// Locks of sets that are not complete, and queue positions.
    pub unfinished: usize,
    /// Keys that are waited for.
    pub waiters: usize,
    /// Steps under way whose callers may have gone.
    pub pending: usize,
}

/// Looks what is left in a client.
#[must_use]
pub fn left(client: &LockClient) -> Left {
    let shared = client.shared();
    Left {
        grants: shared.watchdog.len(),
        unfinished: shared.unfinished.len(),
        waiters: shared.waiters.len(),
        pending: shared.pending.len(),
    }
}

/// A client as the checker knows it; keeps nothing of it alive.
#[derive(Clone)]
pub struct Client(Weak<Shared>);

impl Client {
    /// Looks at this client.
    #[must_use]
    pub fn of(client: &LockClient) -> Client {
        Client(Arc::downgrade(client.shared()))
    }

    /// Whether a request or an undo is on its way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| !shared.pending.is_empty())
    }

    /// Whether the client knows that it has a grant, or that some call has it for now.
    #[must_use]
    pub fn has(&self, grant: GrantId) -> bool {
        let Some(shared) = self.0.upgrade() else {
            return false;
        };
        shared.watchdog.has(grant.number()) || shared.unfinished.has(grant.number())
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// Whether its client lost a grant before a shutdown: such a grant is not released, and its lease runs out.
#[must_use]
pub fn was_lost(grant: GrantId) -> bool {
    crate::base::sim::was_lost((client_of(grant), grant.number()))
}

/// The client that a grant was given to.
#[must_use]
pub fn client_of(grant: GrantId) -> u128 {
    grant.client().as_u128()
}

/// The id of a client, as in its grants.
#[must_use]
pub fn id_of(client: &LockClient) -> u128 {
    client.shared().issuer().uuid.as_u128()
}

/// How long a process lets another one go first, after a release that took this long.
#[must_use]
pub fn yield_to_first(round_trip: Duration) -> Duration {
    timing::yield_to_first(round_trip)
}

/// For how long a process hands off a lock that it was granted in a round trip of this length.
#[must_use]
pub fn time_slice(round_trip: Duration) -> Duration {
    timing::time_slice(round_trip)
}
