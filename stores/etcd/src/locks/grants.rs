//! The grants of this process, including those whose request has no reply.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{GrantId, Kind};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::names::Name;
use super::session::Session;

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

/// A grant, and its next check.
#[derive(Debug)]
struct Known {
    grant: Grant,
    /// Where it is in `looks`: no later than its end, while it has one. That check finds a later end.
    look: Option<Moment>,
}

/// The grants of a store.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    grants: HashMap<GrantId, Known>,
    /// How many grants may have each key. A grant that is gone counts until this process learns of it.
    keys: HashMap<Vec<u8>, usize>,
    /// When to check each grant, which is in it once at most.
    looks: BTreeSet<(Moment, GrantId)>,
}

impl State {
    /// Adds a grant without a check.
    fn insert(&mut self, id: GrantId, grant: Grant) {
        let before = self.grants.insert(id, Known { grant, look: None });
        if let Some(look) = before.and_then(|known| known.look) {
            self.looks.remove(&(look, id));
        }
    }

    /// Removes a grant and its check.
    fn remove(&mut self, id: GrantId) -> Option<Grant> {
        let known = self.grants.remove(&id)?;
        if let Some(look) = known.look {
            self.looks.remove(&(look, id));
        }
        Some(known.grant)
    }

    /// Checks a grant at this moment, unless it is checked earlier. Returns whether no check of any grant is earlier.
    fn look_at(&mut self, id: GrantId, at: Moment) -> bool {
        let Some(known) = self.grants.get_mut(&id) else {
            return false;
        };
        if known.look.is_some_and(|look| look <= at) {
            return false;
        }
        if let Some(look) = known.look.replace(at) {
            self.looks.remove(&(look, id));
        }
        self.looks.insert((at, id));
        self.looks.first() == Some(&(at, id))
    }
}

impl Grants {
    pub(crate) fn insert(&self, id: GrantId, grant: Grant) {
        let mut state = self.state.lock();
        let ends = grant.ends;
        grant.session.is_needed_until(ends);
        *state.keys.entry(grant.key.clone()).or_default() += 1;
        state.insert(id, grant);
        self.look_at(state, id, ends);
    }

    fn look_at(&self, mut state: MutexGuard<'_, State>, id: GrantId, at: Moment) {
        let is_first = state.look_at(id, at);
        drop(state);
        if is_first {
            self.wake.notify_one();
        }
    }

    /// Makes the next renewal of a grant look anew at the lease of its session: another request found the grant gone.
    pub(crate) fn needs_look(&self, id: GrantId) {
        if let Some(known) = self.state.lock().grants.get_mut(&id) {
            known.grant.placed = Moment::now();
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
        let state = self.state.lock();
        state.grants.get(&id).map(|known| known.grant.clone())
    }

    /// Removes a grant that is gone.
    pub(crate) fn remove(&self, id: GrantId) {
        let mut state = self.state.lock();
        let Some(grant) = state.remove(id) else {
            return;
        };
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
        let Some(Known { grant, .. }) = state.grants.get_mut(&id) else {
            return;
        };
        change(grant);
        grant.ends = ends;
        grant.session.is_needed_until(ends);
        self.look_at(state, id, ends);
    }

    /// Schedules another check of a grant that could not be ended.
    pub(crate) fn look_again(&self, id: GrantId, after: Duration) {
        self.look_at(self.state.lock(), id, Moment::now() + after);
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
            let Some(Known { grant, look }) = grants.get_mut(&id) else {
                continue;
            };
            *look = Some(grant.ends).filter(|ends| *ends > now);
            match *look {
                Some(ends) => later.push((ends, id)),
                None => ended.push((id, grant.name.clone())),
            }
        }
        looks.extend(later);
        (ended, looks.first().map(|(at, _)| at.since(now)))
    }

    /// Waits until the next check may have to be earlier.
    pub(crate) async fn changed(&self) {
        self.wake.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn id(number: u64) -> GrantId {
        GrantId::from_parts(1, number)
    }

    fn grant(ends: Moment) -> Grant {
        Grant {
            name: "k".into(),
            kind: Kind::Mutex,
            key: b"k".to_vec(),
            state: GrantState::InFlight,
            session: Arc::new(Session::new(1, LEASE, Vec::new(), Moment::now())),
            placed: Moment::now(),
            ends,
        }
    }

    /// A process that acquires and releases would otherwise keep as many as it has had within a lease.
    #[test]
    fn released_grant_leaves_no_check() {
        let grants = Grants::default();
        for number in 0..10 {
            let ends = Moment::now() + LEASE;
            grants.insert(id(number), grant(ends));
            grants.is(id(number), GrantState::Held, ends + LEASE);
            grants.is_renewed(id(number), ends + 2 * LEASE);
            grants.look_again(id(number), LEASE / 2);
            assert_eq!(grants.state.lock().looks.len(), 1);
            grants.remove(id(number));
            assert!(grants.state.lock().looks.is_empty());
        }
        grants.insert(id(1), grant(Moment::now() + LEASE));
        grants.insert(id(1), grant(Moment::now() + 2 * LEASE));
        assert_eq!(grants.state.lock().looks.len(), 1);
    }

    #[test]
    fn grant_is_checked_at_its_end_however_often_that_moves() {
        let grants = Grants::default();
        let now = Moment::now();
        let next = |grants: &Grants| {
            let (ended, next) = grants.take_ended();
            (ended.into_iter().map(|(id, _)| id).collect::<Vec<_>>(), next)
        };
        let about = |next: Option<Duration>, expected: Duration| {
            let next = next.unwrap();
            assert!(next <= expected && expected - next < LEASE / 10, "{next:?}");
        };
        grants.insert(id(1), grant(now + LEASE));
        grants.is_renewed(id(1), now + 2 * LEASE);
        about(next(&grants).1, LEASE);
        grants.is_renewed(id(1), now + LEASE / 2);
        about(next(&grants).1, LEASE / 2);
        // The check that was due finds the later end.
        grants.is_renewed(id(1), now);
        grants.is_renewed(id(1), now + 3 * LEASE);
        let (ended, at) = next(&grants);
        assert!(ended.is_empty());
        about(at, 3 * LEASE);
        grants.is_renewed(id(1), now);
        assert_eq!(next(&grants), (vec![id(1)], None));
        assert_eq!(next(&grants), (vec![], None), "once");
        // It could not be ended, or was renewed meanwhile.
        grants.look_again(id(1), LEASE / 3);
        about(next(&grants).1, LEASE / 3);
        grants.is_renewed(id(1), now);
        assert_eq!(next(&grants).0, vec![id(1)]);
        grants.is_renewed(id(1), now + LEASE);
        about(next(&grants).1, LEASE);
    }
}
