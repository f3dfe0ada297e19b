//! The grants of this client, and when their leases end.
//!
//! To the servers a lock lasts as long as the session. A lease that is shorter, or is not renewed while the session goes on,
//! is ended by the client itself, which deletes the node; where the process is gone, the session ends it.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::GrantId;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::names::{Mark, Node};
use crate::session::Epoch;

/// A node that this client made, or may have made.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    /// The node of the lock.
    pub(crate) lock: Arc<str>,
    /// By which the node is found.
    pub(crate) mark: Mark,
    /// The session that it belongs to.
    pub(crate) epoch: Epoch,
    pub(crate) state: State,
    /// When its lease ends.
    pub(crate) deadline: Instant,
}

#[derive(Debug, Clone)]
pub(crate) enum State {
    /// It is there and has the lock.
    Held(Node),
    /// It may be there.
    Unknown,
    /// It was not there, and may come until then.
    Absent(Instant),
    /// It is to be deleted, which was not answered.
    Leaves(Node),
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Grants(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    own: HashMap<GrantId, Own>,
    /// For each grant a moment that is not after its deadline.
    ends: BinaryHeap<Reverse<(Instant, GrantId)>>,
}

impl Inner {
    /// Has the grant looked at then.
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
        // Entries whose grants are gone are left in the heap until their time: most of them, at some point.
        if inner.ends.len() > 64 && inner.ends.len() > 4 * inner.own.len() {
            let Inner { own, ends } = &mut *inner;
            ends.retain(|Reverse((_, grant))| own.contains_key(grant));
        }
    }

    /// The node of a grant that is held in this session.
    pub(crate) fn held(&self, grant: GrantId, epoch: Epoch) -> Option<(Arc<str>, Node)> {
        let inner = self.0.lock();
        let own = inner.own.get(&grant).filter(|own| own.epoch == epoch)?;
        match &own.state {
            State::Held(node) => Some((own.lock.clone(), node.clone())),
            _ => None,
        }
    }

    /// The lease of a grant ends then.
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

    pub(crate) fn set(&self, grant: GrantId, state: State) {
        if let Some(own) = self.0.lock().own.get_mut(&grant) {
            own.state = state;
        }
    }

    /// The node was not there, and may come until then.
    pub(crate) fn is_absent(&self, grant: GrantId, until: Instant) {
        let mut inner = self.0.lock();
        if let Some(own) = inner.own.get_mut(&grant) {
            own.state = State::Absent(until);
            own.deadline = until;
            inner.look_at(until, grant);
        }
    }

    /// Those whose nodes were not there and may come, with their locks.
    pub(crate) fn absent(&self) -> Vec<(GrantId, Arc<str>)> {
        let inner = self.0.lock();
        let absent = inner
            .own
            .iter()
            .filter(|(_, own)| matches!(own.state, State::Absent(_)));
        absent.map(|(grant, own)| (*grant, own.lock.clone())).collect()
    }

    /// Looks at the grant again at its deadline, if it was renewed since its lease was over; whether it was.
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

    /// Tries to end the grant again after a while.
    pub(crate) fn again(&self, grant: GrantId, after: Duration) {
        let at = Instant::now() + after;
        let mut inner = self.0.lock();
        if let Some(own) = inner.own.get_mut(&grant) {
            own.deadline = at;
            inner.look_at(at, grant);
        }
    }

    /// Those whose leases are over, with their locks; and when to look again. Each is looked at no more until it is ended,
    /// or tried again.
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

    /// A session is over, and all of it is gone.
    pub(crate) fn forget_before(&self, epoch: Epoch) {
        self.0.lock().own.retain(|_, own| own.epoch >= epoch);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
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
    fn grants_end_with_their_session() {
        let (grants, now) = (Grants::default(), Instant::now());
        grants.insert(grant(0), own(0, now));
        grants.insert(grant(1), own(1, now));
        grants.forget_before(1);
        assert!(grants.get(grant(0)).is_none() && grants.get(grant(1)).is_some());
        assert_eq!(grants.len(), 1);
    }
}
