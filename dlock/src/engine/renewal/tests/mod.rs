//! Tables of what happens to a renewal table, and what follows.

mod look;
mod reply;
mod table;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::*;
use crate::engine::grant::GrantState;
use crate::engine::handoff::{HandoffBudget, HandoffTerms};
use crate::store::Renewal;

const START: Moment = Moment::from_nanos(1_000_000_000_000);
const LEASE: Duration = Duration::from_secs(30);

fn s(s: u64) -> Duration {
    Duration::from_secs(s)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn at(ms: u64) -> Moment {
    START + Duration::from_millis(ms)
}

#[derive(Debug)]
struct Grant {
    number: u64,
    kind: Kind,
    terms: Terms,
    lane: Lane,
    state: RefCell<GrantState>,
    is_asked: Cell<bool>,
}

impl Renewable for Rc<Grant> {
    fn number(&self) -> &u64 {
        &self.number
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn terms(&self) -> Terms {
        self.terms
    }

    fn lane(&self) -> Lane {
        self.lane
    }

    fn judge(&self, now: Moment) -> (HoldState, Moment) {
        let state = self.state.borrow();
        (state.judge(&self.terms, now), state.deadline())
    }

    fn confirmed(
        &self,
        now: Moment,
        sent: Moment,
        lease: Duration,
        ends_doubt: bool,
    ) -> Result<Moment, Loss> {
        let mut state = self.state.borrow_mut();
        state.confirmed(&self.terms, now, sent, lease, ends_doubt)
    }

    fn doubt(&self) -> bool {
        self.state.borrow_mut().doubt()
    }

    fn is_suspect(&self) -> bool {
        self.state.borrow().is_suspect()
    }

    fn is_asked(&self) -> bool {
        self.is_asked.get()
    }

    fn set_asked(&self, is_asked: bool) {
        self.is_asked.set(is_asked);
    }
}

type Table = RenewalTable<Rc<Grant>>;

const RENEWED: Terms = Terms {
    lease: LEASE,
    renewed: true,
    max_end: None,
    min_until: None,
};
const FIXED: Terms = Terms {
    renewed: false,
    ..RENEWED
};

fn grant_of(number: u64, kind: Kind, terms: Terms) -> Rc<Grant> {
    let budget = HandoffBudget::new(kind, 10, (1, 11), START, START);
    Rc::new(Grant {
        number,
        kind,
        terms,
        lane: Lane(number as u32 % 2),
        state: RefCell::new(GrantState::granted(START, terms.lease, budget)),
        is_asked: Cell::new(false),
    })
}

/// A renewed lock that was granted at the start.
fn grant(number: u64) -> Rc<Grant> {
    grant_of(number, Kind::Mutex, RENEWED)
}

fn table_of(grants: &[Rc<Grant>]) -> Table {
    let mut table = Table::default();
    for grant in grants {
        table.add(grant, START, START);
    }
    table.next_deadline(START);
    table
}

/// The grant as its next holder in the process has it.
fn successor(grant: &Grant) -> Rc<Grant> {
    let terms = HandoffTerms {
        lease: LEASE,
        max_hold: None,
        handoffs: 10,
    };
    Rc::new(Grant {
        state: RefCell::new(grant.state.borrow().successor(&terms)),
        is_asked: Cell::new(false),
        ..*grant
    })
}

fn said(actions: Actions<Rc<Grant>>) -> Vec<String> {
    let said = actions.into_iter().map(|action| match action {
        Action::End(grant, loss) => format!("end {}: {loss:?}", grant.number),
        Action::TellSuspect(grant, None) => format!("suspect {}", grant.number),
        Action::TellSuspect(grant, Some(error)) => format!("suspect {}: {}", grant.number, error.message),
        Action::TellFailed(grant, error) => format!("failed {}: {}", grant.number, error.message),
        Action::Wake => "wake".to_owned(),
        Action::TellEmpty => "empty".to_owned(),
    });
    said.collect()
}

/// The numbers of each request that is sent now.
fn requests(table: &mut Table, now: Moment) -> Vec<Vec<u64>> {
    let next = || table.next_request(now);
    std::iter::from_fn(next)
        .map(|request| request.grants.iter().map(|(grant, _)| grant.number).collect())
        .collect()
}

fn reply(table: &mut Table, now: Moment, sent: Moment, result: Result<Renewal, StoreError>) -> Vec<String> {
    let reply = Reply {
        number: 1,
        lease: LEASE,
        result,
    };
    said(table.replies(now, sent, std::iter::once(reply), || 0.5))
}

fn no_answer() -> Result<Renewal, StoreError> {
    Err(StoreError::unknown("no answer"))
}
