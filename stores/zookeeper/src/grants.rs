//! The grants of this client, and when their leases end.
//!
//! To the servers, a lock lasts as long as the session. If a lease is shorter or is not renewed while the session
//! continues, the client itself ends it by deleting the node; if the process dies, the session ends it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::GrantId;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::names::{Mark, Node};
use crate::session::Epoch;

/// A node that this client created or may have created.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    /// The node of the lock.
    pub(crate) lock: Arc<str>,
    /// Identifies the node.
    pub(crate) mark: Mark,
    /// The session of the node.
    pub(crate) epoch: Epoch,
    pub(crate) state: State,
    /// When the lease ends.
    pub(crate) deadline: Instant,
}

#[derive(Debug, Clone)]
pub(crate) enum State {
    /// The node exists and holds the lock.
    Held {
        node: Node,
        /// The version of its data.
        version: i32,
    },
    /// The node is the position of a waiter for a fair lock or for permits.
    Waits(Position),
    /// The node is the first in the queue for permits.
    First { node: Node, czxid: u64 },
    /// So many leases exist: permits are held.
    Permits(u32),
    /// The leases may exist. While the node in the queue does, they may still be created.
    Takes { node: Option<Node>, amount: u32 },
    /// The node of a step on a counter exists.
    Done,
    /// The node may exist.
    Unknown,
    /// The node did not exist, but may still be created until this moment.
    Absent(Instant),
    /// The node is being deleted, and the deletion has no reply.
    Leaves(Node),
}

/// The position of a waiter behind others.
#[derive(Debug, Clone)]
pub(crate) struct Position {
    pub(crate) node: Node,
    pub(crate) czxid: u64,
    /// The node that was directly before it in the queue.
    pub(crate) before: Node,
    /// Whether that was the only one, so that it is first when that one is gone.
    pub(crate) is_next: bool,
}

/// All grants of this client.
#[derive(Debug, Default)]
pub(crate) struct Grants(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    own: HashMap<GrantId, Own>,
    /// For each grant, a moment that is no later than its deadline.
    ends: BinaryHeap<Reverse<(Instant, GrantId)>>,
}

impl Inner {
    /// Schedules a check of the grant.
    fn look_at(&mut self, at: Instant, grant: GrantId) {
        self.ends.push(Reverse((at, grant)));
    }
}

impl Grants {
    pub(crate) fn insert(&self, grant: GrantId, own: Own) {
        let mut inner = self.0.lock();
        inner.look_at(own.deadline, grant);
        inner.own.insert(grant, own);
    }

    pub(crate) fn get(&self, grant: GrantId) -> Option<Own> {
        self.0.lock().own.get(&grant).cloned()
    }

    pub(crate) fn remove(&self, grant: GrantId) {
        let mut inner = self.0.lock();
        inner.own.remove(&grant);
        // Heap entries of removed grants stay until they are due, unless they are the majority.
        if inner.ends.len() > 64 && inner.ends.len() > 4 * inner.own.len() {
            let Inner { own, ends } = &mut *inner;
            ends.retain(|Reverse((_, grant))| own.contains_key(grant));
        }
    }

    /// Keeps what is known of the node of a grant, if anything, under an id of its own: the grant may have another node.
    pub(crate) fn set_aside(&self, grant: GrantId) {
        let own = self.0.lock().own.remove(&grant);
        if let Some(own) = own {
            self.insert(GrantId::from_parts(fastrand::u128(..), 0), own);
        }
    }

    /// Returns the lock, the node and its version of a grant that is held in this session.
    pub(crate) fn held(&self, grant: GrantId, epoch: Epoch) -> Option<(Arc<str>, Node, i32)> {
        let inner = self.0.lock();
        let own = inner.own.get(&grant).filter(|own| own.epoch == epoch)?;
        match &own.state {
            State::Held { node, version } => Some((own.lock.clone(), node.clone(), *version)),
            _ => None,
        }
    }

    /// Sets the end of a grant's lease.
    pub(crate) fn extend(&self, grant: GrantId, deadline: Instant) {
        let mut inner = self.0.lock();
        let Some(own) = inner.own.get_mut(&grant) else {
            return;
        };
        let is_sooner = deadline < own.deadline;
        own.deadline = deadline;
        if is_sooner {
            inner.look_at(deadline, grant);
        }
    }

    /// Sets until when the position of a waiter is kept, if this is one.
    pub(crate) fn keep_position(&self, grant: GrantId, until: Instant) {
        let is_waiter = |own: &Own| matches!(own.state, State::Waits(_));
        if self.get(grant).as_ref().is_some_and(is_waiter) {
            self.extend(grant, until);
        }
    }

    /// Sets until when the positions in a queue are kept, unless they end before.
    pub(crate) fn end_positions(&self, queue: &str, until: Instant) {
        let mut inner = self.0.lock();
        let Inner { own, ends } = &mut *inner;
        let waits = own.iter_mut().filter(|(_, own)| {
            matches!(own.state, State::Waits(_) | State::First { .. }) && *own.lock == *queue
        });
        for (grant, own) in waits.filter(|(_, own)| own.deadline > until) {
            own.deadline = until;
            ends.push(Reverse((until, *grant)));
        }
    }

    pub(crate) fn set(&self, grant: GrantId, state: State) {
        if let Some(own) = self.0.lock().own.get_mut(&grant) {
            own.state = state;
        }
    }

    /// Records that the node did not exist, but may still be created until this moment.
    pub(crate) fn is_absent(&self, grant: GrantId, until: Instant) {
        let mut inner = self.0.lock();
        if let Some(own) = inner.own.get_mut(&grant) {
            own.state = State::Absent(until);
            own.deadline = until;
            inner.look_at(until, grant);
        }
    }

    /// The grants whose nodes did not exist but may still be created, with their locks.
    pub(crate) fn absent(&self) -> Vec<(GrantId, Arc<str>)> {
        let inner = self.0.lock();
        let absent = inner
            .own
            .iter()
            .filter(|(_, own)| matches!(own.state, State::Absent(_)));
        absent.map(|(grant, own)| (*grant, own.lock.clone())).collect()
    }

    /// Returns whether the grant was renewed after its lease had expired; if so, schedules a check at its new deadline.
    pub(crate) fn was_renewed(&self, grant: GrantId, now: Instant) -> bool {
        let mut inner = self.0.lock();
        let Some(deadline) = inner.own.get(&grant).map(|own| own.deadline) else {
            return false;
        };
        let renewed = deadline > now;
        if renewed {
            inner.look_at(deadline, grant);
        }
        renewed
    }

    /// Schedules another attempt to end the grant.
    pub(crate) fn again(&self, grant: GrantId, after: Duration) {
        let at = Instant::now() + after;
        let mut inner = self.0.lock();
        if let Some(own) = inner.own.get_mut(&grant) {
            own.deadline = at;
            inner.look_at(at, grant);
        }
    }

    /// Takes the grants whose leases have expired, with their locks, and returns when to check again. Each is returned
    /// once, until another check is scheduled.
    pub(crate) fn over(&self, now: Instant) -> (Vec<(GrantId, Arc<str>)>, Option<Instant>) {
        let mut inner = self.0.lock();
        let mut over = Vec::new();
        while let Some(Reverse((at, grant))) = inner.ends.peek().copied() {
            if at > now {
                return (over, Some(at));
            }
            inner.ends.pop();
            match inner.own.get(&grant).map(|own| (own.deadline, &own.lock)) {
                Some((deadline, _)) if deadline > now => inner.look_at(deadline, grant),
                Some((_, lock)) => over.push((grant, lock.clone())),
                None => {}
            }
        }
        (over, None)
    }

    /// The queues in which this client has positions.
    pub(crate) fn queues(&self) -> HashSet<Arc<str>> {
        let inner = self.0.lock();
        let waits =
            (inner.own.values()).filter(|own| matches!(own.state, State::Waits(_) | State::First { .. }));
        waits.map(|own| own.lock.clone()).collect()
    }

    /// Removes the grants of sessions before this one, which have ended.
    pub(crate) fn forget_before(&self, epoch: Epoch) {
        self.0.lock().own.retain(|_, own| own.epoch >= epoch);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().own.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn grant(number: u64) -> GrantId {
        GrantId::from_parts(1, number)
    }

    fn own(epoch: Epoch, deadline: Instant) -> Own {
        Own {
            lock: "k".into(),
            mark: Mark::draw(),
            epoch,
            state: State::Unknown,
            deadline,
        }
    }

    #[test]
    fn grants_are_over_at_their_latest_deadline() {
        let (grants, start) = (Grants::default(), Instant::now());
        for number in 0..4 {
            grants.insert(grant(number), own(0, start + s(10)));
        }
        grants.extend(grant(0), start + s(20));
        grants.extend(grant(1), start + s(5));
        grants.remove(grant(2));
        let over = |at| {
            let (over, next) = grants.over(start + s(at));
            let over: Vec<GrantId> = over.into_iter().map(|(grant, _)| grant).collect();
            (over, next.map(|next| next.duration_since(start)))
        };
        assert_eq!(over(4), (vec![], Some(s(5))));
        assert_eq!(over(5), (vec![grant(1)], Some(s(10))));
        grants.remove(grant(1));
        assert_eq!(over(10), (vec![grant(3)], Some(s(20))));
        assert_eq!(over(20), (vec![grant(0)], None));
    }

    #[test]
    fn grant_that_was_renewed_when_its_lease_was_over_has_an_end_again() {
        let (grants, start) = (Grants::default(), Instant::now());
        grants.insert(grant(0), own(0, start + s(10)));
        assert_eq!(grants.over(start + s(10)).0.len(), 1);
        assert!(!grants.was_renewed(grant(0), start + s(10)));
        grants.extend(grant(0), start + s(20));
        assert!(grants.was_renewed(grant(0), start + s(11)));
        assert_eq!(grants.over(start + s(20)).0.len(), 1);
    }

    #[test]
    fn absent_node_is_looked_for_until_it_can_come_no_more() {
        let (grants, start) = (Grants::default(), Instant::now());
        for number in 0..2 {
            grants.insert(grant(number), own(0, start + s(10)));
        }
        grants.is_absent(grant(1), start + s(20));
        let absent = |grants: &Grants| {
            grants
                .absent()
                .into_iter()
                .map(|(grant, _)| grant)
                .collect::<Vec<_>>()
        };
        assert_eq!(absent(&grants), [grant(1)]);
        assert_eq!(grants.over(start + s(10)).0.len(), 1);
        assert!(grants.over(start + s(20)).0.iter().any(|(of, _)| *of == grant(1)));
        grants.remove(grant(1));
        assert!(absent(&grants).is_empty());
    }

    #[test]
    fn absent_node_is_looked_for_when_its_grant_has_another_one() {
        let (grants, start) = (Grants::default(), Instant::now());
        grants.set_aside(grant(0));
        assert_eq!(grants.len(), 0);
        grants.insert(grant(0), own(0, start + s(10)));
        let mark = grants.get(grant(0)).unwrap().mark;
        grants.is_absent(grant(0), start + s(20));
        grants.set_aside(grant(0));
        grants.insert(grant(0), own(0, start + s(10)));
        let absent = grants.absent();
        assert_eq!(absent.len(), 1);
        let aside = grants.get(absent[0].0).unwrap();
        assert!(absent[0].0 != grant(0) && aside.mark == mark);
        assert!(grants.over(start + s(20)).0.contains(&absent[0]));
    }

    #[test]
    fn grants_end_with_their_session() {
        let (grants, now) = (Grants::default(), Instant::now());
        grants.insert(grant(0), own(0, now));
        grants.insert(grant(1), own(1, now));
        grants.forget_before(1);
        assert!(grants.get(grant(0)).is_none() && grants.get(grant(1)).is_some());
        assert_eq!(grants.len(), 1);
    }
}
