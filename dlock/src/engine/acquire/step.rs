//! What happens to a waiter, and what it does then.

use std::time::Duration;

use crate::base::moment::Moment;
use crate::engine::evidence::Verdict;
use crate::engine::fairness::YieldRound;
use crate::store::{Announce, StoreError};

/// How a lock is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Each waiter asks for itself, head or not, and its position in the store's queue travels with its requests.
    pub(crate) fair: bool,
    /// The waiter of a plain lock has a position at the store, under an id of its own.
    pub(crate) has_position: bool,
    /// The lock is a number of permits.
    pub(crate) permits: bool,
    /// For how long requests are repeated while the store fails.
    pub(crate) patience: Duration,
    /// When the call began.
    pub(crate) started: Moment,
}

/// What happened.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// The waiter may ask now; `listens` says that there is a subscription already.
    MayAsk { listens: bool },
    /// The store granted the lock, or a step towards it that leaves the queue position as it is.
    Granted { ends_position: bool },
    /// Another client holds the lock, with so much left of its lease.
    Busy {
        left: Option<Duration>,
        /// Within which time the store expects the next request.
        again: Option<Duration>,
        /// How many processes listen for the release.
        listeners: Option<u64>,
    },
    /// There are fewer permits in all than were asked for.
    TooFewPermits,
    /// The request failed; the pause after it is jittered by a number from 0 up to 1.
    Failed {
        error: StoreError,
        fraction: fn() -> f64,
    },
    /// The waiter is the queue head from now on.
    BecameHead,
    /// Another caller in this process handed the lock off; it may have been lost since.
    HandedOff { is_held: bool },
    /// The waiter was not polled in time, and lost what it had in this process.
    Withdrawn,
    /// A notification says that the lock has become available; there have been so many of them.
    CameFree { notifications: u64 },
    /// Other processes were to go first. `came` says that one did, and `round` which ones follow.
    Yielded {
        came: bool,
        round: Option<YieldRound>,
        notifications: u64,
        listens: bool,
    },
    /// The process that was let go first has come and gone; there have been so many notifications.
    OtherCame { notifications: u64 },
    /// It did not come in time.
    NoneCame,
    /// A notification says that another process has taken the lock.
    Taken,
    /// The rank that was drawn.
    Drawn(u64),
    /// The time that was waited for has come.
    Due,
    /// The time to begin to listen has come.
    QuietOver,
    /// The wait of the call is over.
    WaitOver,
    /// The patience with a store that fails is over.
    PatienceOver,
    /// The client is shut down.
    Closed,
}

/// What the waiter does, in the order of the fields.
#[derive(Debug)]
pub(crate) struct Step {
    /// The head counts among the waiters from now on, which turns others away where that is too many.
    pub(crate) head_waits: bool,
    /// The waiters behind the head learn what the store replied to it.
    pub(crate) shares_evidence: bool,
    /// No permit is free and none comes back by itself: an operator has to be told.
    pub(crate) warns: bool,
    /// The position is uncertain: the next request is for another one.
    pub(crate) new_position: bool,
    /// Subscribe, before anything else is waited for.
    pub(crate) listens: bool,
    pub(crate) next: Next,
}

#[derive(Debug)]
pub(crate) enum Next {
    /// Send a request. A waiter of a fair lock that is not polled by then is passed over.
    Send {
        announce: Announce,
        poll_by: Option<Moment>,
    },
    /// Go on waiting for the same.
    Continue,
    /// Wait for a notification.
    Wait(Wait),
    /// Draw a rank among so many processes.
    Draw { among: u64 },
    /// Let another process go first, which has so long to come; if the waiter waited before, no longer than that.
    LetGo { patience: Duration },
    /// Wait for what other processes do with the lock that has become available.
    LeaveToOthers { until: Moment },
    /// The end.
    Report(Report),
}

/// A time to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The next request is sent then, if nothing happens before.
    pub(crate) until: Moment,
    /// A waiter that listens only if others ahead of it take long begins then.
    pub(crate) listen_at: Option<Moment>,
    /// As in [`Next::Send`].
    pub(crate) poll_by: Option<Moment>,
    /// The thread that makes this waiter the head sends its request, right behind the release that it has just sent.
    pub(crate) sends_as_head: bool,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Report {
    Granted,
    HandedOff,
    /// What it had in this process is lost: it waits again, in front of those that came later.
    Rejoins,
    TooFewPermits,
    GaveUp(Verdict),
    Closed,
}

impl From<Next> for Step {
    fn from(next: Next) -> Step {
        Step {
            head_waits: false,
            shares_evidence: false,
            warns: false,
            new_position: false,
            listens: false,
            next,
        }
    }
}

impl From<Report> for Step {
    fn from(report: Report) -> Step {
        Next::Report(report).into()
    }
}
