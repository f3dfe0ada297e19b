//! The events of a waiter, and its actions.

use std::time::Duration;

use crate::base::moment::Moment;
use crate::engine::evidence::Verdict;
use crate::engine::fairness::YieldRound;
use crate::store::{Announce, StoreError};

/// How a lock is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// Whether each waiter asks for itself, head or not, and its position in the store's queue is part of its requests.
    pub(crate) fair: bool,
    /// Whether the waiter of a plain lock has a position at the store, under a separate id.
    pub(crate) has_position: bool,
    /// Whether the lock is a number of permits.
    pub(crate) permits: bool,
    /// How long requests are repeated while the store fails.
    pub(crate) patience: Duration,
    /// When the call began.
    pub(crate) started: Moment,
    /// When the wait of the call is over.
    pub(crate) until: Option<Moment>,
}

/// An event.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// The waiter may ask now; `listens` says whether there is a subscription already.
    MayAsk { listens: bool },
    /// The store granted the lock, or a part of it that leaves the queue position unchanged.
    Granted { ends_position: bool },
    /// Another client holds the lock, with this remaining lease.
    Busy {
        left: Option<Duration>,
        /// The time within which the store expects the next request.
        again: Option<Duration>,
        /// How many processes listen for the release.
        listeners: Option<u64>,
        /// For how long no further request is sent, even after a notification.
        pause: Duration,
    },
    /// The semaphore has fewer permits in all than requested.
    TooFewPermits,
    /// The request failed; a number from 0 up to 1 jitters the pause after it.
    Failed {
        error: StoreError,
        /// Whether its queue position at the store is not kept.
        loses_position: bool,
        fraction: fn() -> f64,
    },
    /// The waiter is the queue head from now on.
    BecameHead,
    /// Another caller in this process handed the lock off; it may have been lost since.
    HandedOff { is_held: bool },
    /// The waiter missed its poll deadline, and lost what it had in this process.
    Withdrawn,
    /// A notification says that the lock is available; the number of notifications so far.
    CameFree { notifications: u64 },
    /// Other processes went first. `came` says whether one came, and `round` which ones follow.
    Yielded {
        came: bool,
        round: Option<YieldRound>,
        notifications: u64,
        listens: bool,
    },
    /// The process that goes first has come and gone; the number of notifications so far.
    OtherCame { notifications: u64 },
    /// It did not come in time.
    NoneCame,
    /// A notification says that another process has taken the lock.
    Taken,
    /// The drawn rank.
    Drawn(u64),
    /// The awaited time has come.
    Due,
    /// The time to begin to listen has come.
    QuietOver,
    /// The wait time of the call is over.
    WaitOver,
    /// `retry_for` is over.
    PatienceOver,
    /// The client is shut down.
    Closed,
}

/// The actions of the waiter, in the order of the fields.
#[derive(Debug)]
pub(crate) struct Step {
    /// The head counts among the waiters from now on; excess waiters are refused.
    pub(crate) head_waits: bool,
    /// The waiters behind the head learn the store's reply to it.
    pub(crate) shares_evidence: bool,
    /// No permit is available and none will be released by itself: an operator has to be told.
    pub(crate) warns: bool,
    /// The position is uncertain: the next request needs a new one.
    pub(crate) new_position: bool,
    /// Subscribe, before anything else is waited for.
    pub(crate) listens: bool,
    pub(crate) next: Next,
}

#[derive(Debug)]
pub(crate) enum Next {
    /// Send a request. A waiter of a fair lock that is not polled by this time is passed over.
    Send {
        announce: Announce,
        poll_by: Option<Moment>,
    },
    /// Continue to wait for the same.
    Continue,
    /// Wait for a notification.
    Wait(Wait),
    /// Draw a rank among this many processes.
    Draw { among: u64 },
    /// Let another process go first, for at most this long; if the waiter waited before, no longer than that wait.
    LetGo { patience: Duration },
    /// Wait for what other processes do with the available lock.
    LeaveToOthers { until: Moment },
    /// The end.
    Report(Report),
}

/// A time to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The time of the next request, if nothing happens before.
    pub(crate) until: Moment,
    /// When a waiter begins to listen that does so only if others ahead of it take long.
    pub(crate) listen_at: Option<Moment>,
    /// As in [`Next::Send`].
    pub(crate) poll_by: Option<Moment>,
    /// The thread that makes this waiter the head sends its request, right behind the release that it has just sent.
    pub(crate) sends_as_head: bool,
}

/// The outcome.
#[derive(Debug)]
pub(crate) enum Report {
    Granted,
    HandedOff,
    /// What it had in this process is lost: it waits again, ahead of later waiters.
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
