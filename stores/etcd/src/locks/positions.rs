//! The waiters of this process for fair locks: their positions, and what is known of those before them.
//!
//! A position is a key; the watch of the lock reports when such a key, or that of a grant, is deleted. So a waiter knows
//! when it must look: when the position before its own is gone, and at the head of the queue when the grant is gone.
//! In between its requests are answered here.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{Busy, GrantId};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::names::Name;
use super::session::Session;

/// How long a position is kept for a waiter that sends no requests, and on which lease it is.
pub(crate) const KEPT_FOR: Duration = Duration::from_secs(5);
/// After this time a waiter looks at the server although no key was deleted.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The position of a waiter.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    pub(crate) name: Name,
    pub(crate) key: Vec<u8>,
    /// The session whose lease the key is on.
    pub(crate) session: Arc<Session>,
    /// The revision that created its first key; `None` until a reply tells it.
    pub(crate) order: Option<i64>,
    pub(crate) state: PositionState,
    /// When the waiter sent its last request, or got the reply.
    asked: Moment,
    /// Its release was requested: it has no place in the order once its key is gone.
    gives_up: bool,
    /// When its end was requested, because the waiter was silent for too long.
    ending: Option<Moment>,
    /// The position before it; `None` at the head of the queue, as far as this process knows.
    before: Option<Vec<u8>>,
    /// The reply while no key was deleted that concerns it, and since when.
    busy: Option<(Busy, Moment)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PositionState {
    /// A request that creates its key was sent, and has no reply.
    InFlight,
    Stands,
    /// The key is gone. The waiter returns to its place in the order when it asks again.
    Lost,
}

/// What a reply tells about a position.
#[derive(Debug)]
pub(crate) struct Standing {
    /// The revision of the reply.
    pub(crate) revision: i64,
    pub(crate) order: i64,
    pub(crate) before: Option<Vec<u8>>,
    pub(crate) busy: Busy,
}

/// The positions of a store.
#[derive(Debug, Default)]
pub(crate) struct Positions {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    positions: HashMap<GrantId, Position>,
    /// The waiters by the keys that may exist.
    keys: HashMap<Vec<u8>, GrantId>,
    locks: HashMap<Name, Lock>,
}

/// A lock that is waited for or watched.
#[derive(Debug, Default)]
struct Lock {
    waiters: HashSet<GrantId>,
    /// The revision after which deletions are reported, while the lock is watched.
    watched_from: Option<i64>,
    /// The last reported deletion.
    deleted_at: i64,
}

impl State {
    fn leaves_key(&mut self, id: GrantId) {
        if let Some(position) = self.positions.get_mut(&id)
            && std::mem::replace(&mut position.state, PositionState::Lost) != PositionState::Lost
        {
            position.busy = None;
            self.keys.remove(&position.key);
            position.session.leave(1);
        }
    }

    fn tidy(&mut self, name: &Name) {
        let is_idle = |lock: &Lock| lock.waiters.is_empty() && lock.watched_from.is_none();
        if self.locks.get(name).is_some_and(is_idle) {
            self.locks.remove(name);
        }
    }

    fn is_silent(&self, id: GrantId) -> bool {
        let position = self.positions.get(&id);
        position.is_some_and(|position| {
            let is_there = position.state != PositionState::Lost || position.gives_up;
            is_there && Moment::now().since(position.asked) >= KEPT_FOR
        })
    }
}

impl Positions {
    pub(crate) fn get(&self, id: GrantId) -> Option<Position> {
        self.state.lock().positions.get(&id).cloned()
    }

    /// Records that a waiter asks. Returns the reply if it is known.
    pub(crate) fn asks(&self, id: GrantId) -> Option<Busy> {
        let mut state = self.state.lock();
        if state.positions.get(&id)?.session.ended() {
            state.leaves_key(id);
        }
        let position = state.positions.get_mut(&id)?;
        position.asked = Moment::now();
        let (busy, since) = position.busy?;
        (Moment::now().since(since) < LOOK_EVERY).then_some(busy)
    }

    /// Records a position before its key is created on the lease of this session, which has reserved room for it. `key`
    /// names the keys to choose from, for a new waiter or one that had lost its position of this revision.
    pub(crate) fn joins(
        &self,
        id: GrantId,
        name: &Name,
        session: Arc<Session>,
        key: impl Fn(Option<i64>, usize) -> Vec<u8>,
    ) -> Position {
        let mut state = self.state.lock();
        let before = state.positions.get(&id);
        let gives_up = before.is_some_and(|before| before.gives_up);
        let order = before.filter(|_| !gives_up).and_then(|before| before.order);
        let free = (0..)
            .map(|number| key(order, number))
            .find(|key| !state.keys.contains_key(key));
        let position = Position {
            name: name.clone(),
            key: free.expect("fewer waiters than numbers"),
            session,
            order,
            state: PositionState::InFlight,
            asked: Moment::now(),
            gives_up,
            ending: None,
            before: None,
            busy: None,
        };
        state.keys.insert(position.key.clone(), id);
        state.locks.entry(name.clone()).or_default().waiters.insert(id);
        let is_first = state.positions.is_empty();
        state.positions.insert(id, position.clone());
        drop(state);
        if is_first {
            self.wake.notify_one();
        }
        position
    }

    /// Records a reply. Returns whether the waiter must look again: a key was deleted since.
    pub(crate) fn stands(&self, id: GrantId, standing: Standing) -> bool {
        let mut state = self.state.lock();
        let State { positions, locks, .. } = &mut *state;
        let Some(position) = positions.get_mut(&id) else {
            return false;
        };
        position.state = PositionState::Stands;
        position.asked = Moment::now();
        position.order = Some(standing.order);
        position.before = standing.before;
        let lock = locks.entry(position.name.clone()).or_default();
        let is_watched = lock.watched_from.is_some_and(|from| from <= standing.revision);
        let is_old = lock.deleted_at > standing.revision;
        position.busy = (is_watched && !is_old).then(|| (standing.busy, Moment::now()));
        is_watched && is_old
    }

    /// Records that the key of a position was found.
    pub(crate) fn is_there(&self, id: GrantId) {
        if let Some(position) = self.state.lock().positions.get_mut(&id) {
            position.state = PositionState::Stands;
            position.asked = Moment::now();
        }
    }

    /// Records that a waiter leaves. If the release fails, its position is ended as that of a silent one.
    pub(crate) fn gives_up(&self, id: GrantId) {
        if let Some(position) = self.state.lock().positions.get_mut(&id) {
            position.gives_up = true;
        }
    }

    /// Records that the key of a position is gone, or was not created.
    pub(crate) fn is_lost(&self, id: GrantId) {
        let mut state = self.state.lock();
        state.leaves_key(id);
        if state
            .positions
            .get(&id)
            .is_some_and(|position| position.order.is_none() || position.gives_up)
        {
            drop(state);
            self.remove(id);
        }
    }

    /// Removes a waiter whose key is gone.
    pub(crate) fn remove(&self, id: GrantId) {
        let mut state = self.state.lock();
        state.leaves_key(id);
        let Some(position) = state.positions.remove(&id) else {
            return;
        };
        if let Some(lock) = state.locks.get_mut(&position.name) {
            lock.waiters.remove(&id);
        }
        state.tidy(&position.name);
    }

    /// Returns the waiter with this key.
    pub(crate) fn waiter(&self, key: &[u8]) -> Option<GrantId> {
        self.state.lock().keys.get(key).copied()
    }

    /// Records that deletions are reported after this revision, or not any more.
    pub(crate) fn watched(&self, name: &Name, from: Option<i64>) {
        let mut state = self.state.lock();
        let State { positions, locks, .. } = &mut *state;
        let lock = locks.entry(name.clone()).or_default();
        lock.watched_from = from;
        if from.is_some_and(|from| from < lock.deleted_at) {
            // All deletions since then are reported, also in a cluster whose revisions went back.
            lock.deleted_at = 0;
        }
        for id in &lock.waiters {
            positions.entry(*id).and_modify(|position| position.busy = None);
        }
        state.tidy(name);
    }

    /// Records the deletion of a key at this revision: of a grant, or of a position. Returns the waiters that must look.
    pub(crate) fn deleted(&self, name: &Name, key: &[u8], is_grant: bool, revision: i64) -> Vec<GrantId> {
        let mut state = self.state.lock();
        let State { positions, locks, .. } = &mut *state;
        let Some(lock) = locks.get_mut(name) else {
            return Vec::new();
        };
        lock.deleted_at = lock.deleted_at.max(revision);
        let concerns = |id: &&GrantId| {
            positions.get_mut(id).is_some_and(|position| {
                let is_before = match &position.before {
                    None => is_grant,
                    Some(before) => before == key,
                };
                let concerns = is_before || position.key == key;
                if concerns {
                    (position.before, position.busy) = (None, None);
                }
                concerns
            })
        };
        lock.waiters.iter().filter(concerns).copied().collect()
    }

    /// Returns the waiters that were silent for too long, and again later if they have not ended by then.
    fn take_silent(&self) -> Vec<(GrantId, Name)> {
        let mut state = self.state.lock();
        let silent = state.positions.keys().filter(|id| state.is_silent(**id));
        let ids: Vec<_> = silent.copied().collect();
        let take = |id| {
            let position = state.positions.get_mut(&id)?;
            let is_due = position
                .ending
                .is_none_or(|ending| Moment::now().since(ending) >= KEPT_FOR);
            is_due.then(|| {
                position.ending = Some(Moment::now());
                (id, position.name.clone())
            })
        };
        ids.into_iter().filter_map(take).collect()
    }

    pub(crate) fn is_silent(&self, id: GrantId) -> bool {
        self.state.lock().is_silent(id)
    }

    /// Waits until waiters are silent for too long, and returns them.
    pub(crate) async fn become_silent(&self) -> Vec<(GrantId, Name)> {
        loop {
            if self.state.lock().positions.is_empty() {
                self.wake.notified().await;
            }
            tokio::time::sleep(KEPT_FOR / 10).await;
            let silent = self.take_silent();
            if !silent.is_empty() {
                return silent;
            }
        }
    }
}
