//! What the replies to renewals mean.

use std::time::Duration;

use super::timing::{next_due, next_try, spread};
use super::{Action, Actions, Renewable, RenewalTable};
use crate::base::broken;
use crate::base::hold_state::{HoldState, Loss};
use crate::base::moment::Moment;
use crate::store::{Reason, Renewal, StoreError};

/// The reply to the renewal of one grant.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) number: u64,
    /// The requested lease.
    pub(crate) lease: Duration,
    pub(crate) result: Result<Renewal, StoreError>,
}

/// Keeps grants together that were renewed together.
#[derive(Debug)]
struct Plan {
    due: Moment,
    lease: Duration,
    /// When they are renewed next.
    moment: Moment,
}

impl<G: Renewable> RenewalTable<G> {
    /// Enters the replies to renewals sent at `sent`. `draw` returns numbers from 0 to 1 that spread the renewals.
    pub(crate) fn replies(
        &mut self,
        now: Moment,
        sent: Moment,
        replies: impl Iterator<Item = Reply>,
        mut draw: impl FnMut() -> f64,
    ) -> Actions<G> {
        let many = self.are_many();
        let mut actions = Actions::new();
        let (mut lost, mut moved) = (Vec::new(), Vec::new());
        let mut plan: Option<Plan> = None;
        for Reply {
            number,
            lease,
            result,
        } in replies
        {
            // Released in the meantime: the reply does not matter.
            let Some(entry) = self.entries.get(number) else {
                continue;
            };
            // The grant of its current holder; it may have been handed off since the request was sent. All consequences
            // of the reply are entered before it can be handed off again.
            let grant = &entry.grant;
            grant.set_asked(broken!(AskedForEver));
            let outcome = match result {
                Ok(Renewal::Held) => match grant.judge(now) {
                    (HoldState::Lost(loss), _) if loss != Loss::Released => Err(loss),
                    (_, deadline) => Ok(next_try(deadline, now)),
                },
                Ok(reply @ (Renewal::Renewed | Renewal::RenewedFor(_))) => {
                    let is_old = self.doubts.came_after(sent, || grant.lane());
                    let (from, lease) = reply.lease_given(sent, lease);
                    grant.confirmed(now, from, lease, !is_old).map(|deadline| {
                        if is_old {
                            return now;
                        }
                        let mut terms = grant.terms();
                        if matches!(reply, Renewal::RenewedFor(_)) {
                            terms.lease = terms.lease.min(lease);
                        }
                        let mut due = next_due(grant.kind(), &terms, from, deadline);
                        if due <= now {
                            // The store last extended the lease long before this request.
                            due = next_try(deadline, now);
                        }
                        let lease = terms.lease;
                        match &plan {
                            Some(plan) if (plan.due, plan.lease) == (due, lease) => plan.moment,
                            _ => {
                                let share = draw() / 5.0;
                                let moment = if many {
                                    spread(&terms, due, now, share)
                                } else {
                                    due
                                };
                                plan = Some(Plan { due, lease, moment });
                                moment
                            }
                        }
                    })
                }
                result => {
                    let (state, deadline) = grant.judge(now);
                    match (state, result) {
                        (HoldState::Lost(loss), _) if loss != Loss::Released => Err(loss),
                        (_, Ok(_)) => Err(Loss::Gone),
                        (_, Err(error)) if matches!(error.reason, Reason::KeyTaken(_)) => Err(Loss::Gone),
                        (_, Err(error)) => {
                            let error = Box::new(error);
                            actions.push(Action::TellFailed(grant.clone(), error.clone()));
                            if grant.doubt() {
                                actions.push(Action::TellSuspect(grant.clone(), Some(error)));
                            }
                            Ok(next_try(deadline, now))
                        }
                    }
                }
            };
            match outcome {
                Ok(due) if due == entry.due.get() => {}
                Ok(due) => moved.push((entry.due.replace(due), due, number)),
                Err(loss) => {
                    lost.push(number);
                    actions.push(Action::End(grant.clone(), loss));
                }
            }
        }
        for run in moved.chunk_by(|(_, a, _), (_, b, _)| a == b) {
            let numbers = run.iter().map(|(_, _, number)| *number);
            self.schedule.add_all(run[0].1, numbers);
        }
        for run in moved.chunk_by(|(a, ..), (b, ..)| a == b) {
            self.forget(run[0].0, run.len());
        }
        for number in lost {
            self.take_out(number);
        }
        if self.is_late() {
            actions.push(Action::Wake);
        }
        self.tell_if_empty(&mut actions);
        actions
    }

    /// Whether something is due before the watchdog's next check.
    fn is_late(&self) -> bool {
        match (self.looks_at, self.schedule.first()) {
            (Some(looks_at), Some(first)) => first < looks_at,
            (None, first) => first.is_some(),
            (Some(_), None) => false,
        }
    }
}

impl Renewal {
    /// Returns from when the lease of a renewed grant counts, and its length, for a requested `lease` and a request
    /// sent at `sent`.
    fn lease_given(self, sent: Moment, lease: Duration) -> (Moment, Duration) {
        match self {
            // The client asks for a lease from this request on: an earlier beginning takes nothing from it.
            Renewal::RenewedFor(given) => {
                let begun = given.begun_before();
                (sent.earlier_by(begun), given.at_most(lease.saturating_add(begun)))
            }
            Renewal::Renewed | Renewal::Held | Renewal::Gone => (sent, lease),
        }
    }
}
