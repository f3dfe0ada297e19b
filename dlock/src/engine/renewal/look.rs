//! The checks of the watchdog: what is due, and what to ask the store.

use std::time::Duration;

use super::entries::Entries;
use super::lanes::Lanes;
use super::timing::{EARLIEST, grain, joint_look, patience};
use super::{Action, Actions, Renewable, RenewalTable};
use crate::base::broken;
use crate::base::hold_state::{HoldState, Loss};
use crate::base::moment::Moment;
use crate::store::Lane;

/// A request to renew grants of one lane, each with its lease. It is in flight until
/// [`done`](RenewalTable::request_done).
#[derive(Debug)]
pub(crate) struct Request<G> {
    pub(crate) lane: Lane,
    pub(crate) grants: Vec<(G, Duration)>,
    /// How long to wait for the reply.
    pub(crate) patience: Duration,
}

impl<G: Renewable> RenewalTable<G> {
    /// When the watchdog checks next; it is woken if something is due before. When nothing is held, the time stays:
    /// locks that are held for a moment only would otherwise wake it each time.
    pub(crate) fn next_deadline(&mut self, now: Moment) -> Option<Moment> {
        let in_mind = self.looks_at.filter(|at| *at > now);
        self.looks_at = self.schedule.first().or(in_mind);
        self.looks_at
    }

    /// Handles everything that is due about now: grants to renew wait for [`next_request`](RenewalTable::next_request),
    /// grants past their deadline end.
    pub(crate) fn look(&mut self, now: Moment) -> Actions<G> {
        // Many are due together anyway; a few are renewed together with the first of them.
        let many = self.are_many();
        let early = if many { Duration::ZERO } else { EARLIEST };
        let mut actions = Actions::new();
        let mut later = Vec::new();
        while let Some((due, numbers)) = self.schedule.take(now + early) {
            for number in numbers {
                let Some(entry) = self.entries.get(number).filter(|entry| entry.due.get() == due) else {
                    continue;
                };
                let grant = &entry.grant;
                let terms = grant.terms();
                if due > now + grain(&terms) {
                    later.push((due, number));
                    continue;
                }
                let (mut state, deadline) = grant.judge(now);
                if broken!(DeadlineNeverJudged) && now >= deadline {
                    // Still in the table, or this would check it for ever.
                    state = HoldState::Lost(Loss::Expired);
                }
                if let HoldState::Lost(loss) = state {
                    actions.push(Action::End(grant.clone(), loss));
                    self.entries.remove(number);
                    continue;
                }
                let wanted = terms.renewed || state == HoldState::Suspect || grant.kind().is_shared();
                if wanted && !grant.is_asked() {
                    grant.set_asked(true);
                    self.lanes.push(grant.lane(), number);
                }
                // The next check is at the deadline, unless a reply comes first. Many grants are checked together.
                let look = if many {
                    joint_look(&terms, deadline)
                } else {
                    deadline
                };
                entry.due.set(look);
                later.push((look, number));
            }
        }
        for run in later.chunk_by(|(a, _), (b, _)| a == b) {
            let numbers = run.iter().map(|(_, number)| *number);
            self.schedule.add_all(run[0].0, numbers);
        }
        self.tell_if_empty(&mut actions);
        actions
    }

    /// Returns the next request that has room in its lane, if any. It is sent now.
    pub(crate) fn next_request(&mut self, now: Moment) -> Option<Request<G>> {
        loop {
            let RenewalTable { entries, lanes, .. } = self;
            let request = request(entries, lanes, now)?;
            if !request.grants.is_empty() {
                return Some(request);
            }
            // Perhaps all were released in the meantime.
            lanes.done(request.lane, false);
        }
    }

    /// Records that a request has been in flight for [`SLOW`](super::SLOW): there is room for another one.
    pub(crate) fn request_slow(&mut self, lane: Lane) {
        self.lanes.slow(lane);
    }

    /// Records that a request is no longer in flight.
    pub(crate) fn request_done(&mut self, lane: Lane, was_slow: bool) {
        self.lanes.done(lane, was_slow);
    }
}

/// Returns the remaining grants of the next request, with the leases to ask for now.
fn request<G: Renewable>(entries: &Entries<G>, lanes: &mut Lanes, now: Moment) -> Option<Request<G>> {
    let (lane, numbers) = lanes.take()?;
    let mut grants = Vec::with_capacity(numbers.size_hint().0);
    let (mut first, mut last): (Option<Moment>, Option<Moment>) = (None, None);
    for number in numbers {
        let Some(entry) = entries.get(number) else {
            continue;
        };
        let grant = &entry.grant;
        let (_, deadline) = grant.judge(now);
        let terms = grant.terms();
        match terms.next_lease(deadline, now) {
            Some(lease) => {
                grants.push((grant.clone(), lease));
                // One that ends with its max_hold gains no time by a reply.
                let earliest = if terms.ends_with_max_hold(deadline) {
                    &mut last
                } else {
                    &mut first
                };
                *earliest = Some(earliest.map_or(deadline, |earliest| earliest.min(deadline)));
            }
            None => grant.set_asked(false),
        }
    }
    Some(Request {
        lane,
        grants,
        patience: patience(first.or(last).unwrap_or(now).since(now)),
    })
}
