//! The state of one grant: how long it lasts, whether it is suspect, and whether it may be handed off.

use std::time::Duration;

use crate::base::broken;
use crate::base::hold_state::{HoldState, Loss};
use crate::base::moment::Moment;
use crate::engine::handoff::{HandoffBudget, HandoffTerms};

/// The safety margin of a lease: for clock rates that differ and for the return path of the reply.
pub(crate) fn safety_margin(lease: Duration) -> Duration {
    if broken!(NoSafetyMargin) {
        return Duration::ZERO;
    }
    (lease / 100).max(Duration::from_millis(10))
}

/// How long a lease lasts for certain, from the moment at which it was asked for.
pub fn surely_lasts(lease: Duration) -> Duration {
    lease.saturating_sub(safety_margin(lease))
}

/// How a grant is kept alive.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    /// The lease that was asked for.
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// The latest end of renewal.
    pub(crate) max_end: Option<Moment>,
    /// Until when the key stays held even if the holder is done.
    pub(crate) min_until: Option<Moment>,
}

impl Terms {
    fn max_end(&self) -> Option<Moment> {
        self.max_end.filter(|_| !broken!(MaxHoldIgnored))
    }

    /// The time left until `max_hold`, if set.
    pub(crate) fn max_hold_left(&self, now: Moment) -> Option<Duration> {
        self.max_end().map(|end| end.since(now))
    }

    /// The time left until `min_hold`.
    pub(crate) fn min_hold_left(&self, now: Moment) -> Duration {
        if broken!(MinHoldEndsEarly) {
            return Duration::ZERO;
        }
        self.min_until.map_or(Duration::ZERO, |until| until.since(now))
    }

    /// Whether a lease that ends at `deadline` lasts as long as `max_hold` allows.
    pub(crate) fn ends_with_max_hold(&self, deadline: Moment) -> bool {
        let last = deadline + safety_margin(self.lease);
        self.max_end().is_some_and(|end| last >= end)
    }

    /// The lease for a renewal sent now: that of the grant, as far as `max_hold` allows, or the rest of a fixed one
    /// that ends at `deadline`. `None` if that is not worth a request.
    pub(crate) fn next_lease(&self, deadline: Moment, now: Moment) -> Option<Duration> {
        let lease = match self.renewed {
            true => {
                let most = self.max_hold_left(now).unwrap_or(Duration::MAX);
                let least = self.min_until.map_or(Duration::ZERO, |until| until.since(now));
                self.lease.max(least).min(most)
            }
            false => (deadline + safety_margin(self.lease)).since(now),
        };
        (lease > safety_margin(lease)).then_some(lease)
    }
}

/// The state of one grant.
#[derive(Debug)]
pub(crate) struct GrantState {
    /// When the store may give the key to another client, less the safety margin.
    deadline: Moment,
    budget: HandoffBudget,
    suspect: bool,
    ended: Option<Loss>,
}

impl GrantState {
    /// Creates the state of a grant, obtained by a request sent at `sent`, for `lease` from then on.
    pub(crate) fn granted(sent: Moment, lease: Duration, budget: HandoffBudget) -> GrantState {
        GrantState {
            deadline: sent + surely_lasts(lease),
            budget,
            suspect: false,
            ended: None,
        }
    }

    /// Creates the state of the same grant for the next holder in this process.
    pub(crate) fn successor(&self, terms: &HandoffTerms) -> GrantState {
        GrantState {
            deadline: self.deadline,
            budget: self.budget.step(terms.handoffs),
            suspect: self.suspect,
            ended: None,
        }
    }

    /// When the grant is lost unless it is renewed.
    pub(crate) fn deadline(&self) -> Moment {
        self.deadline
    }

    /// The loss that ended it, if it has ended.
    pub(crate) fn ended(&self) -> Option<Loss> {
        self.ended
    }

    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect
    }

    pub(crate) fn budget(&self) -> HandoffBudget {
        self.budget
    }

    /// Prevents further handoffs of the grant.
    pub(crate) fn end_handoffs(&mut self) {
        self.budget.close();
    }

    /// The state to report to a holder that asks now.
    pub(crate) fn judge(&self, terms: &Terms, now: Moment) -> HoldState {
        match self.ended {
            Some(loss) => HoldState::Lost(loss),
            None if now >= self.deadline && !broken!(DeadlineNeverJudged) => {
                HoldState::Lost(self.loss_at_deadline(terms))
            }
            None if self.suspect => HoldState::Suspect,
            None => HoldState::Held,
        }
    }

    /// Why the lease expires at the deadline.
    pub(crate) fn loss_at_deadline(&self, terms: &Terms) -> Loss {
        match terms.ends_with_max_hold(self.deadline) {
            true => Loss::MaxHold,
            false => Loss::Expired,
        }
    }

    /// Whether the grant, which has no holder any more, may be handed off: it is renewed, past its `min_hold`,
    /// confirmed, and has a third of its lease left.
    pub(crate) fn may_be_handed_off(&self, terms: &Terms, now: Moment) -> bool {
        let Terms {
            lease,
            renewed,
            min_until,
            ..
        } = *terms;
        let is_past_min_hold = min_until.is_none_or(|until| now >= until || broken!(HandedOffWithinMinHold));
        // Near its end a renewal may be in flight that asks for less than the lease.
        let is_far_from_max_hold = terms.max_end().is_none_or(|end| end >= now + lease);
        let lasts = self.deadline >= now + lease / 3;
        let is_confirmed = !self.suspect || broken!(HandoffOfSuspectGrant);
        renewed
            && is_past_min_hold
            && is_far_from_max_hold
            && lasts
            && is_confirmed
            && self.budget.is_open(now)
    }

    /// Ends the grant; returns false if it has ended before.
    pub(crate) fn end(&mut self, loss: Loss) -> bool {
        let is_first = self.ended.is_none();
        self.ended.get_or_insert(loss);
        is_first
    }

    /// Records the store's confirmation, by a request sent at `sent`, for `lease` from then on. A grant that had
    /// expired before the reply came stays lost. `ends_doubt` says that no doubt is newer than the request. Returns the
    /// new deadline.
    pub(crate) fn confirmed(
        &mut self,
        terms: &Terms,
        now: Moment,
        sent: Moment,
        lease: Duration,
        ends_doubt: bool,
    ) -> Result<Moment, Loss> {
        match self.judge(terms, now) {
            HoldState::Lost(Loss::Released) => return Ok(self.deadline),
            HoldState::Lost(_) if broken!(RenewalRevivesLostHold) => self.ended = None,
            HoldState::Lost(loss) => return Err(loss),
            HoldState::Held | HoldState::Suspect => {}
        }
        self.suspect &= !ends_doubt;
        let from = match broken!(RenewalDeadlineFromReply) {
            true => now,
            false => sent,
        };
        let deadline = from + surely_lasts(lease);
        self.deadline = match terms.renewed {
            // The reply may arrive after that of a later request.
            true => self.deadline.max(deadline),
            // A fixed lease that was only confirmed keeps its deadline: the rest was sent in whole milliseconds.
            false => self.deadline.min(deadline + safety_margin(lease)),
        };
        Ok(self.deadline)
    }

    /// Records that the store did not confirm the grant in time. Returns whether a holder is to be told.
    pub(crate) fn doubt(&mut self) -> bool {
        // Also if the last holder has left: the grant may be about to be handed off.
        let is_new = !std::mem::replace(&mut self.suspect, true);
        is_new && self.ended.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::kind::Kind;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);
    const LEASE: Duration = Duration::from_secs(30);

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn terms() -> Terms {
        Terms {
            lease: LEASE,
            renewed: true,
            max_end: None,
            min_until: None,
        }
    }

    fn granted() -> GrantState {
        let budget = HandoffBudget::new(Kind::Mutex, 8, (1, 9), START, START + s(25));
        GrantState::granted(START, LEASE, budget)
    }

    #[test]
    fn margin_is_a_percent_and_at_least_ten_milliseconds() {
        for (lease, margin) in [(s(30), ms(300)), (s(1), ms(10)), (ms(50), ms(10))] {
            assert_eq!(safety_margin(lease), margin, "{lease:?}");
        }
    }

    #[test]
    fn hold_is_lost_a_margin_before_its_lease_ends() {
        let max_end = Some(START + LEASE);
        for (after, max_end, state) in [
            (ms(29_699), None, HoldState::Held),
            (ms(29_700), None, HoldState::Lost(Loss::Expired)),
            (ms(29_700), max_end, HoldState::Lost(Loss::MaxHold)),
            (ms(29_700), Some(START + s(31)), HoldState::Lost(Loss::Expired)),
        ] {
            for renewed in [true, false] {
                let terms = Terms {
                    max_end,
                    renewed,
                    ..terms()
                };
                assert_eq!(
                    granted().judge(&terms, START + after),
                    state,
                    "{after:?} {max_end:?} {renewed}"
                );
            }
        }
    }

    #[test]
    fn first_end_stays() {
        let mut state = granted();
        assert!(state.end(Loss::Gone));
        assert!(!state.end(Loss::Released));
        assert_eq!(state.judge(&terms(), START), HoldState::Lost(Loss::Gone));
    }

    #[test]
    fn confirmation_counts_from_its_request_and_revives_nothing() {
        // asked, replied, lease: the deadline
        let fixed = Terms {
            renewed: false,
            ..terms()
        };
        for (terms, asked, replied, lease, deadline) in [
            (terms(), s(10), s(12), s(30), Ok(START + ms(39_700))),
            // overtaken by a later one
            (terms(), s(0), s(12), s(10), Ok(START + ms(29_700))),
            (terms(), s(10), s(30), s(30), Err(Loss::Expired)),
            // what is left of a fixed lease, in whole milliseconds
            (fixed, s(10), s(12), ms(20_000), Ok(START + ms(29_700))),
            (fixed, s(10), s(12), ms(19_000), Ok(START + ms(29_000))),
        ] {
            let mut state = granted();
            let now = state.confirmed(&terms, START + replied, START + asked, lease, true);
            assert_eq!(now, deadline, "{asked:?} {replied:?} {lease:?}");
        }
    }

    #[test]
    fn doubt_ends_with_a_request_that_is_newer() {
        let mut state = granted();
        assert!(state.doubt());
        assert!(!state.doubt(), "told before");
        assert_eq!(state.judge(&terms(), START), HoldState::Suspect);
        for (ends_doubt, after) in [(false, HoldState::Suspect), (true, HoldState::Held)] {
            state
                .confirmed(&terms(), START + s(1), START, LEASE, ends_doubt)
                .unwrap();
            assert_eq!(state.judge(&terms(), START + s(1)), after);
        }
    }

    #[test]
    fn handoff_needs_a_confirmed_renewed_grant_with_time_left() {
        let at = |after: Duration| START + after;
        let fixed = Terms {
            renewed: false,
            ..terms()
        };
        let min_hold = Terms {
            min_until: Some(at(s(5))),
            ..terms()
        };
        let max_hold = Terms {
            max_end: Some(at(s(34))),
            ..terms()
        };
        for (terms, after, may) in [
            (terms(), s(4), true),
            (fixed, s(4), false),
            (min_hold, s(4), false),
            (min_hold, s(5), true),
            (max_hold, s(4), true),
            (max_hold, s(5), false),
            // a third of the lease has to be left
            (terms(), ms(19_700), true),
            (terms(), ms(19_701), false),
            // the time slice is over: 100 ms from the reply on
            (terms(), ms(25_100), false),
        ] {
            assert_eq!(
                granted().may_be_handed_off(&terms, at(after)),
                may,
                "{terms:?} {after:?}"
            );
        }
        let mut suspect = granted();
        suspect.doubt();
        assert!(!suspect.may_be_handed_off(&terms(), at(s(4))));
        let mut last = granted();
        last.end_handoffs();
        assert!(!last.may_be_handed_off(&terms(), at(s(4))));
    }

    #[test]
    fn successor_inherits_deadline_and_doubt() {
        let mut state = granted();
        state.doubt();
        state.end(Loss::Released);
        let terms_of_next = HandoffTerms {
            lease: LEASE,
            max_hold: None,
            handoffs: 3,
        };
        let next = state.successor(&terms_of_next);
        assert_eq!(next.deadline(), state.deadline());
        assert_eq!(next.judge(&terms(), START), HoldState::Suspect);
    }

    #[test]
    fn renewal_asks_for_what_max_hold_and_min_hold_allow() {
        let at = |after: Duration| Some(START + after);
        let (plain, fixed) = (
            terms(),
            Terms {
                renewed: false,
                ..terms()
            },
        );
        // at, the lease that is asked for
        for (terms, now, lease) in [
            (plain, s(10), Some(s(30))),
            (
                Terms {
                    max_end: at(s(25)),
                    ..plain
                },
                s(10),
                Some(s(15)),
            ),
            (
                Terms {
                    max_end: at(s(10)),
                    ..plain
                },
                s(10),
                None,
            ),
            (
                Terms {
                    min_until: at(s(60)),
                    ..plain
                },
                s(10),
                Some(s(50)),
            ),
            (fixed, s(10), Some(s(20))),
            (fixed, s(30), None),
        ] {
            let deadline = granted().deadline();
            assert_eq!(
                terms.next_lease(deadline, START + now),
                lease,
                "{terms:?} {now:?}"
            );
        }
    }
}
