//! Grants on their way into the renewal table. Most are released before anything is due for them: they stay with the thread
//! that entered them until the watchdog looks, and threads do not wait for each other. Grants of fair locks share a slot, as
//! their numbers do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Table;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::base::int_hash::BuildIntHasher;
use crate::base::moment::Moment;
use crate::base::own_line::OwnLine;
use crate::base::per_thread::PerThread;
use crate::engine::renewal::{Actions, Renewable};
use crate::runtime::client::slot_of_grant;
use crate::runtime::grants::Grant;

/// How many of a slot may be on their way. With more, few are released soon.
const MOST: usize = 64;

/// By their numbers, each with the time of its request.
type Waiting = HashMap<u64, (Arc<Grant>, Moment), BuildIntHasher>;

/// By the slots in which their numbers were drawn.
#[derive(Debug, Default)]
pub(super) struct Entering {
    grants: PerThread<Mutex<Waiting>>,
    gate: OwnLine<Gate>,
}

/// Which grants may wait for the watchdog. Written under the mutex of the table, and read under that of a slot: what passed
/// the gate before it was written is there when the slot is emptied afterwards.
#[derive(Debug)]
struct Gate {
    /// When the watchdog looks next: those that are due then or later. In nanoseconds, like the other.
    looks_at: AtomicU64,
    /// The last doubt: those whose request was sent later.
    doubted: AtomicU64,
}

/// No grant may wait.
const CLOSED: u64 = u64::MAX;

impl Default for Gate {
    fn default() -> Gate {
        Gate {
            looks_at: AtomicU64::new(CLOSED),
            doubted: AtomicU64::new(0),
        }
    }
}

impl Gate {
    fn lets_wait(&self, due: Moment, sent: Moment) -> bool {
        due.as_nanos() >= self.looks_at.load(Ordering::Relaxed)
            && sent.as_nanos() > self.doubted.load(Ordering::Relaxed)
    }
}

impl Entering {
    /// Lets a new grant wait for the watchdog. Returns false if it has to enter the table at once.
    pub(super) fn add(&self, grant: &Arc<Grant>, sent: Moment, now: Moment) -> bool {
        let due = Table::due(grant, sent, now);
        let mut waiting = self.grants.at(slot_of_grant(grant.number)).lock();
        let may_wait = waiting.len() < MOST && self.gate.lets_wait(due, sent);
        if may_wait {
            waiting.insert(grant.number, (grant.clone(), sent));
        }
        may_wait
    }

    /// Replaces a grant that waits by its successor, as [`Table::replace`] does. `None` if it does not wait.
    pub(super) fn replace(&self, successor: &Arc<Grant>) -> Option<bool> {
        let mut waiting = self.grants.at(slot_of_grant(successor.number)).lock();
        let (grant, _) = waiting.get_mut(&successor.number)?;
        if grant.is_suspect() && !broken!(HandoffOfSuspectGrant) {
            return Some(false);
        }
        let before = std::mem::replace(grant, successor.clone());
        drop(waiting);
        drop(before);
        Some(true)
    }

    /// Removes a grant, if it waits.
    pub(super) fn remove(&self, number: u64) -> bool {
        let removed = self.grants.at(slot_of_grant(number)).lock().remove(&number);
        removed.is_some()
    }

    /// Closes the gate, and enters all that wait into the table.
    pub(super) fn enter(&self, table: &mut Table) -> Actions<Arc<Grant>> {
        self.gate.looks_at.store(CLOSED, Ordering::Relaxed);
        let mut actions = Actions::new();
        for slot in self.grants.iter() {
            let mut waiting = slot.lock();
            for (_, (grant, sent)) in waiting.drain() {
                actions.extend(table.add(&grant, sent, Moment::now()));
            }
        }
        actions
    }

    /// Lets those wait from now on that are due when the watchdog looks next, or later.
    pub(super) fn open(&self, table: &Table) {
        let looks_at = table.looks_at().map_or(CLOSED, Moment::as_nanos);
        self.gate.looks_at.store(looks_at, Ordering::Relaxed);
    }

    /// Lets none wait whose request was sent before this doubt.
    pub(super) fn doubt(&self, now: Moment) {
        self.gate.doubted.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }
}
