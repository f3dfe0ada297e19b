//! The grants of this process, including those whose request has no reply.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, Kind};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::names::Name;
use super::session::Session;
use crate::clock::Moment;

/// What is known about a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GrantState {
    /// The request was sent and has no reply: a late copy may still be carried out.
    InFlight,
    /// The server replied, but the reply leaves open whether the request was carried out.
    Unknown,
    Held,
    /// The grant was released, but keeps the lock for its minimum hold time.
    Kept,
}

/// A grant.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) name: Name,
    pub(crate) kind: Kind,
    pub(crate) key: Vec<u8>,
    pub(crate) state: GrantState,
    pub(crate) session: Arc<Session>,
    /// When its key was on the lease of the session: a later look at the lease finds it.
    pub(crate) placed: Moment,
    /// When this process ends the grant unless it is renewed. The session continues for other locks.
    pub(crate) ends: Moment,
}

/// The grants of a store.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    grants: HashMap<GrantId, Grant>,
    /// How many grants may have each key. A grant that is gone counts until this process learns of it.
    keys: HashMap<Vec<u8>, usize>,
    /// When to check each grant: no later than its end.
    looks: BTreeSet<(Moment, GrantId)>,
}

impl Grants {
    pub(crate) fn insert(&self, id: GrantId, grant: Grant) {
        let mut state = self.state.lock();
        let is_first = state.looks.first().is_none_or(|(first, _)| grant.ends < *first);
        state.looks.insert((grant.ends, id));
        *state.keys.entry(grant.key.clone()).or_default() += 1;
        state.grants.insert(id, grant);
        drop(state);
        if is_first {
            self.wake.notify_one();
        }
    }

    /// Makes the next renewal of a grant look anew at the lease of its session: another request found the grant gone.
    pub(crate) fn needs_look(&self, id: GrantId) {
        if let Some(grant) = self.state.lock().grants.get_mut(&id) {
            grant.placed = Moment::now();
        }
    }

    /// Whether no grant may have this key.
    pub(crate) fn is_free(&self, key: &[u8]) -> bool {
        !self.state.lock().keys.contains_key(key)
    }

    /// Whether at most one grant may have this key.
    pub(crate) fn is_alone(&self, key: &[u8]) -> bool {
        self.state.lock().keys.get(key) == Some(&1)
    }

    pub(crate) fn get(&self, id: GrantId) -> Option<Grant> {
        self.state.lock().grants.get(&id).cloned()
    }

    /// Removes a grant that is gone.
    pub(crate) fn remove(&self, id: GrantId) {
        let mut state = self.state.lock();
        let Some(grant) = state.grants.remove(&id) else {
            return;
        };
        state.looks.remove(&(grant.ends, id));
        match state.keys.get_mut(&grant.key) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(state.keys.remove(&grant.key)),
        }
        if grant.state != GrantState::Kept {
            grant.session.leave(1);
        }
    }

    /// Records the state of a grant.
    pub(crate) fn is(&self, id: GrantId, state: GrantState, ends: Moment) {
        self.change(id, ends, |grant| {
            if state == GrantState::Kept && grant.state != GrantState::Kept {
                grant.session.leave(1);
            }
            grant.state = state;
            grant.placed = Moment::now();
        });
    }

    /// Records a renewal.
    pub(crate) fn is_renewed(&self, id: GrantId, ends: Moment) {
        self.change(id, ends, |_| {});
    }

    /// Records a renewal that moved the grant to another session, which has reserved room for it.
    pub(crate) fn is_moved(&self, id: GrantId, session: Arc<Session>, ends: Moment) {
        self.change(id, ends, |grant| {
            grant.session.leave(1);
            grant.session = session;
            grant.placed = Moment::now();
        });
    }

    fn change(&self, id: GrantId, ends: Moment, change: impl FnOnce(&mut Grant)) {
        let mut state = self.state.lock();
        let Some(grant) = state.grants.get_mut(&id) else {
            return;
        };
        change(grant);
        let before = std::mem::replace(&mut grant.ends, ends);
        // A later end is found at the check that is already scheduled.
        if ends < before {
            state.looks.insert((ends, id));
            self.wake.notify_one();
        }
    }

    /// Schedules another check of a grant that could not be ended.
    pub(crate) fn look_again(&self, id: GrantId, after: Duration) {
        let mut state = self.state.lock();
        if state.grants.contains_key(&id) {
            state.looks.insert((Moment::now() + after, id));
            self.wake.notify_one();
        }
    }

    /// Takes the grants whose time is over, each once; also returns the time until the next check.
    pub(crate) fn take_ended(&self) -> (Vec<(GrantId, Name)>, Option<Duration>) {
        let now = Moment::now();
        let mut state = self.state.lock();
        let State { grants, looks, .. } = &mut *state;
        let mut ended = Vec::new();
        let mut later = Vec::new();
        while let Some((at, id)) = looks.first().copied().filter(|(at, _)| *at <= now) {
            looks.remove(&(at, id));
            match grants.get(&id) {
                Some(grant) if grant.ends > now => later.push((grant.ends, id)),
                Some(grant) => ended.push((id, grant.name.clone())),
                None => {}
            }
        }
        looks.extend(later);
        (ended, looks.first().map(|(at, _)| now.until(*at)))
    }

    /// Waits until the next check may have to be earlier.
    pub(crate) async fn changed(&self) {
        self.wake.notified().await;
    }
}
