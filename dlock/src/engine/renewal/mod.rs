//! The renewal table of a client: every live grant, when it needs attention, and what the replies to renewals mean.
//!
//! One table for all grants of a client, with one next deadline. Grants that are due about now are renewed together,
//! per lane and in chunks that do not wait for each other. The results are [`Actions`], for a caller that holds no
//! mutex: a holder that learns of a loss may call back.

mod doubts;
mod entries;
mod lanes;
mod look;
mod reply;
mod schedule;
mod timing;

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use self::doubts::Doubts;
use self::entries::Entries;
use self::lanes::Lanes;
pub(crate) use self::lanes::SLOW;
pub(crate) use self::look::Request;
pub(crate) use self::reply::Reply;
use self::schedule::Schedule;
use self::timing::{next_due, share_of_row, spread};
use crate::base::broken;
use crate::base::hold_state::{HoldState, Loss};
use crate::base::kind::Kind;
use crate::base::moment::Moment;
use crate::engine::grant::Terms;
use crate::store::{Lane, StoreError};

/// A pointer to a grant, as the table sees it. The table calls these under its mutex: they do not call holders.
pub(crate) trait Renewable: Clone {
    /// Its number in the table, which never changes.
    fn number(&self) -> &u64;
    fn kind(&self) -> Kind;
    fn terms(&self) -> Terms;
    /// The lane in which the store renews it.
    fn lane(&self) -> Lane;
    /// Its state, and when it is lost unless it is renewed.
    fn judge(&self, now: Moment) -> (HoldState, Moment);
    /// Records the store's confirmation by a request sent at `sent`. Returns the new deadline.
    fn confirmed(&self, now: Moment, sent: Moment, lease: Duration, ends_doubt: bool)
    -> Result<Moment, Loss>;
    /// Records that the store did not confirm it. Returns whether a holder is to be told.
    fn doubt(&self) -> bool;
    fn is_suspect(&self) -> bool;
    /// Whether a renewal is due or in flight, as the table set it.
    fn is_asked(&self) -> bool;
    fn set_asked(&self, is_asked: bool);
}

/// What to do once the table's mutex is released.
#[derive(Debug)]
pub(crate) enum Action<G> {
    /// End this grant, which is no longer in the table.
    End(G, Loss),
    /// Report that this grant has become suspect, because its renewal failed or its lane is in doubt.
    TellSuspect(G, Option<Box<StoreError>>),
    /// Report that the renewal of this grant failed and is tried again.
    TellFailed(G, Box<StoreError>),
    /// Wake the watchdog: something is due before its next check.
    Wake,
    /// The last grant is gone.
    TellEmpty,
}

pub(crate) type Actions<G> = SmallVec<[Action<G>; 2]>;

/// Every live grant of a client, and when it needs attention.
#[derive(Debug)]
pub(crate) struct RenewalTable<G> {
    entries: Entries<G>,
    schedule: Schedule,
    lanes: Lanes,
    doubts: Doubts,
    /// The next check of the watchdog.
    looks_at: Option<Moment>,
    closed: Option<Loss>,
}

impl<G> Default for RenewalTable<G> {
    fn default() -> RenewalTable<G> {
        RenewalTable {
            entries: Entries::default(),
            schedule: Schedule::default(),
            lanes: Lanes::default(),
            doubts: Doubts::default(),
            looks_at: None,
            closed: None,
        }
    }
}

impl<G: Renewable> RenewalTable<G> {
    /// Returns how many grants are held.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the grant with this number, if it is held.
    pub(crate) fn grant(&self, number: u64) -> Option<&G> {
        self.entries.get(number).map(|entry| &entry.grant)
    }

    /// Returns the held grants, in no order.
    pub(crate) fn grants(&self) -> impl Iterator<Item = &G> {
        self.entries.grants()
    }

    #[cfg(any(test, dlock_sim))]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.entries.get(number).is_some()
    }

    /// Enters a new grant, obtained by a request sent at `sent`.
    pub(crate) fn add(&mut self, grant: &G, sent: Moment, now: Moment) -> Actions<G> {
        if let Some(loss) = self.closed {
            return smallvec![Action::End(grant.clone(), loss)];
        }
        let mut actions = Actions::new();
        let due = if self.doubts.came_after(sent, || grant.lane()) {
            if grant.doubt() {
                actions.push(Action::TellSuspect(grant.clone(), None));
            }
            now
        } else {
            let due = Self::due(grant, sent, now);
            match self.are_many() {
                true => spread(&grant.terms(), due, now, share_of_row(*grant.number()) / 2.0),
                false => due,
            }
        };
        self.entries.insert(grant.clone(), due);
        self.schedule.add(due, *grant.number());
        if self.looks_at.is_none_or(|at| due < at) {
            self.looks_at = Some(due);
            actions.push(Action::Wake);
        }
        actions
    }

    /// When a new grant needs attention, obtained by a request sent at `sent`.
    pub(crate) fn due(grant: &G, sent: Moment, now: Moment) -> Moment {
        let (_, deadline) = grant.judge(now);
        next_due(grant.kind(), &grant.terms(), sent, deadline)
    }

    /// When the watchdog checks next, unless it is woken, and whatever is entered before then; `None` if it sleeps, or if every
    /// grant ends.
    pub(crate) fn looks_at(&self) -> Option<Moment> {
        self.looks_at.filter(|_| self.closed.is_none())
    }

    /// Replaces a grant by its successor. Returns false if the grant is gone, or has become suspect since the handoff
    /// was decided.
    pub(crate) fn replace(&mut self, successor: &G) -> bool {
        let entry = self.entries.get(*successor.number());
        let Some(entry) = entry.filter(|entry| !entry.grant.is_suspect() || broken!(HandoffOfSuspectGrant))
        else {
            return false;
        };
        successor.set_asked(entry.grant.is_asked());
        let due = entry.due.get();
        self.entries.insert(successor.clone(), due);
        true
    }

    /// Removes a grant: it is not renewed any more, and the reply to a renewal in flight is ignored.
    pub(crate) fn remove(&mut self, number: u64) -> Actions<G> {
        match self.take_out(number) && self.entries.is_empty() {
            true => smallvec![Action::TellEmpty],
            false => Actions::new(),
        }
    }

    /// Ends the selected grants.
    pub(crate) fn end(&mut self, loss: Loss, is_meant: impl Fn(&G) -> bool) -> Actions<G> {
        let grants: Vec<_> = self
            .entries
            .grants()
            .filter(|grant| is_meant(grant))
            .cloned()
            .collect();
        let mut actions = Actions::new();
        for grant in grants {
            self.take_out(*grant.number());
            actions.push(Action::End(grant, loss));
        }
        self.tell_if_empty(&mut actions);
        actions
    }

    /// Removes every grant, each with this loss; future grants end in the same way.
    pub(crate) fn close(&mut self, loss: Loss) -> Vec<G> {
        self.closed.get_or_insert(loss);
        self.schedule.clear();
        self.entries.drain().collect()
    }

    /// Has every grant of a lane, or of all lanes, confirmed at once.
    pub(crate) fn doubt(&mut self, lane: Option<Lane>, now: Moment) -> Actions<G> {
        self.doubts.put(lane, now);
        let is_in_lane = |grant: &G| lane.is_none_or(|lane| grant.lane() == lane);
        let doubtful: Vec<_> = self
            .entries
            .grants()
            .filter(|grant| is_in_lane(grant))
            .cloned()
            .collect();
        let mut actions = Actions::new();
        for grant in doubtful {
            self.set_due(*grant.number(), now);
            if grant.doubt() {
                actions.push(Action::TellSuspect(grant, None));
            }
        }
        actions
    }

    /// Has each grant confirmed that enters from now on, if its request was sent earlier.
    pub(crate) fn doubt_entering(&mut self, now: Moment) {
        self.doubts.put(None, now);
    }

    /// Whether there are enough for planned renewal batches to pay off.
    fn are_many(&self) -> bool {
        self.entries.len() >= lanes::CHUNK
    }

    fn set_due(&mut self, number: u64, due: Moment) {
        let Some(entry) = self.entries.get(number).filter(|entry| entry.due.get() != due) else {
            return;
        };
        let before = entry.due.replace(due);
        self.schedule.add(due, number);
        self.forget(before, 1);
    }

    /// Counts the entries that are no longer due then.
    fn forget(&mut self, due: Moment, count: usize) {
        let entries = &self.entries;
        let is_due = |number| entries.get(number).is_some_and(|entry| entry.due.get() == due);
        self.schedule.forget(due, count, is_due);
    }

    fn take_out(&mut self, number: u64) -> bool {
        let Some(entry) = self.entries.remove(number) else {
            return false;
        };
        self.forget(entry.due.get(), 1);
        true
    }

    /// Reports that nothing is left, after some were removed.
    fn tell_if_empty(&self, actions: &mut Actions<G>) {
        if self.entries.is_empty() && actions.iter().any(|action| matches!(action, Action::End(..))) {
            actions.push(Action::TellEmpty);
        }
    }
}

#[cfg(test)]
mod tests;
