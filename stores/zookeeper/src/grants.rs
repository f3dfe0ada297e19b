//! The grants of this client, and when their leases end.
//!
//! To the servers, a lock lasts as long as the session. If a lease is shorter or is not renewed while the session
//! continues, the client itself ends it by deleting the node; if the process dies, the session ends it.

use std::collections::{BTreeSet, HashMap, HashSet};
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

impl Own {
    /// Whether the node is in the queue of a lock or of permits, and holds nothing.
    fn is_position(&self) -> bool {
        matches!(self.state, State::Waits(_) | State::First { .. })
    }
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

/// A grant, and its next check.
#[derive(Debug)]
struct Known {
    own: Own,
    /// Where it is in `looks`: no later than its deadline. That check finds a later deadline.
    look: Option<Instant>,
}

#[derive(Debug, Default)]
struct Inner {
    known: HashMap<GrantId, Known>,
    /// When to check each grant, which is in it once at most: a waiter for permits has a new deadline with each
    /// notification.
    looks: BTreeSet<(Instant, GrantId)>,
}

impl Inner {
    fn own(&self) -> impl Iterator<Item = (GrantId, &Own)> {
        self.known.iter().map(|(grant, known)| (*grant, &known.own))
    }

    fn own_mut(&mut self, grant: GrantId) -> Option<&mut Own> {
        self.known.get_mut(&grant).map(|known| &mut known.own)
    }

    fn remove(&mut self, grant: GrantId) -> Option<Own> {
        let known = self.known.remove(&grant)?;
        if let Some(look) = known.look {
            self.looks.remove(&(look, grant));
        }
        Some(known.own)
    }

    /// Checks the grant at this moment, unless it is checked earlier.
    fn look_at(&mut self, at: Instant, grant: GrantId) {
        let Some(known) = self.known.get_mut(&grant) else {
            return;
        };
        if known.look.is_some_and(|look| look <= at) {
            return;
        }
        if let Some(look) = known.look.replace(at) {
            self.looks.remove(&(look, grant));
        }
        self.looks.insert((at, grant));
    }

    /// Sets the end of a grant's lease.
    fn ends_at(&mut self, deadline: Instant, grant: GrantId) {
        if let Some(own) = self.own_mut(grant) {
            own.deadline = deadline;
            self.look_at(deadline, grant);
        }
    }
}

impl Grants {
    pub(crate) fn insert(&self, grant: GrantId, own: Own) {
        let mut inner = self.0.lock();
        inner.remove(grant);
        let deadline = own.deadline;
        inner.known.insert(grant, Known { own, look: None });
        inner.look_at(deadline, grant);
    }

    pub(crate) fn get(&self, grant: GrantId) -> Option<Own> {
        let inner = self.0.lock();
        inner.known.get(&grant).map(|known| known.own.clone())
    }

    pub(crate) fn remove(&self, grant: GrantId) {
        self.0.lock().remove(grant);
    }

    /// Keeps what is known of the node of a grant, if anything, under an id of its own: the grant may have another node.
    pub(crate) fn set_aside(&self, grant: GrantId) {
        let own = self.0.lock().remove(grant);
        if let Some(own) = own {
            self.insert(GrantId::from_parts(fastrand::u128(..), 0), own);
        }
    }

    /// Returns the lock, the node and its version of a grant that is held in this session.
    pub(crate) fn held(&self, grant: GrantId, epoch: Epoch) -> Option<(Arc<str>, Node, i32)> {
        let inner = self.0.lock();
        let own = &inner.known.get(&grant)?.own;
        match &own.state {
            State::Held { node, version } if own.epoch == epoch => {
                Some((own.lock.clone(), node.clone(), *version))
            }
            _ => None,
        }
    }

    /// Sets the end of a grant's lease.
    pub(crate) fn extend(&self, grant: GrantId, deadline: Instant) {
        self.0.lock().ends_at(deadline, grant);
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
        let waits = inner
            .own()
            .filter(|(_, own)| own.is_position() && *own.lock == *queue && own.deadline > until);
        let waits: Vec<GrantId> = waits.map(|(grant, _)| grant).collect();
        for grant in waits {
            inner.ends_at(until, grant);
        }
    }

    pub(crate) fn set(&self, grant: GrantId, state: State) {
        if let Some(own) = self.0.lock().own_mut(grant) {
            own.state = state;
        }
    }

    /// Records that the node did not exist, but may still be created until this moment.
    pub(crate) fn is_absent(&self, grant: GrantId, until: Instant) {
        let mut inner = self.0.lock();
        if let Some(own) = inner.own_mut(grant) {
            own.state = State::Absent(until);
            inner.ends_at(until, grant);
        }
    }

    /// The grants whose nodes did not exist but may still be created, with their locks.
    pub(crate) fn absent(&self) -> Vec<(GrantId, Arc<str>)> {
        let inner = self.0.lock();
        let absent = inner
            .own()
            .filter(|(_, own)| matches!(own.state, State::Absent(_)));
        absent.map(|(grant, own)| (grant, own.lock.clone())).collect()
    }

    /// Returns whether the grant was renewed after its lease had expired; if so, schedules a check at its new deadline.
    pub(crate) fn was_renewed(&self, grant: GrantId, now: Instant) -> bool {
        let mut inner = self.0.lock();
        let Some(deadline) = inner.known.get(&grant).map(|known| known.own.deadline) else {
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
        self.extend(grant, Instant::now() + after);
    }

    /// Takes the grants whose leases have expired, with their locks, and returns when to check again. Each is returned
    /// once, until another check is scheduled.
    pub(crate) fn over(&self, now: Instant) -> (Vec<(GrantId, Arc<str>)>, Option<Instant>) {
        let mut inner = self.0.lock();
        let Inner { known, looks } = &mut *inner;
        let mut over = Vec::new();
        let mut later = Vec::new();
        while let Some((at, grant)) = looks.first().copied().filter(|(at, _)| *at <= now) {
            looks.remove(&(at, grant));
            let Some(Known { own, look }) = known.get_mut(&grant) else {
                continue;
            };
            *look = Some(own.deadline).filter(|deadline| *deadline > now);
            match *look {
                Some(deadline) => later.push((deadline, grant)),
                None => over.push((grant, own.lock.clone())),
            }
        }
        looks.extend(later);
        (over, looks.first().map(|(at, _)| *at))
    }

    /// The queues in which this client has positions.
    pub(crate) fn queues(&self) -> HashSet<Arc<str>> {
        let inner = self.0.lock();
        let waits = inner.own().filter(|(_, own)| own.is_position());
        waits.map(|(_, own)| own.lock.clone()).collect()
    }

    /// Removes the grants of sessions before this one, which have ended.
    pub(crate) fn forget_before(&self, epoch: Epoch) {
        let mut inner = self.0.lock();
        let Inner { known, looks } = &mut *inner;
        known.retain(|_, known| known.own.epoch >= epoch);
        looks.retain(|(_, grant)| known.contains_key(grant));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().known.len()
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

    /// A waiter for permits is notified of each change of its semaphore, and asks again.
    #[test]
    fn waiter_that_is_notified_again_and_again_is_checked_once() {
        let (grants, start) = (Grants::default(), Instant::now());
        let node = Node::parse("lock-0000000001").unwrap();
        let waits = State::First { node, czxid: 1 };
        let mut own = own(0, start + s(60));
        own.state = waits;
        for round in 0..1000 {
            let now = start + Duration::from_millis(round);
            grants.insert(grant(0), own.clone());
            grants.end_positions("k", now + s(5));
            grants.extend(grant(0), now + s(60));
            grants.insert(grant(1), own.clone());
            grants.remove(grant(1));
            assert!(grants.over(now).0.is_empty());
            assert_eq!(grants.0.lock().looks.len(), 1);
        }
        assert!(grants.over(start + s(30)).0.is_empty());
        assert_eq!(grants.over(start + s(90)).0.len(), 1);
        assert_eq!(grants.0.lock().looks.len(), 0);
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
