//! What is held and waited for in all processes, the most urgent first.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dlock::Health;
use dlock::operations::{ClientReport, SurveyedLock};
use dlock::store::Holder;
use dlock::{Error, LockKey};

/// The page with the permissions that a user of the store needs.
macro_rules! permissions_page {
    () => {
        concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/permissions.md")
    };
}

/// The maximum number of clients shown.
const MOST_CLIENTS: usize = 500;

/// The result of one survey.
pub(super) struct Survey {
    pub(super) at: SystemTime,
    pub(super) health: Health,
    pub(super) own: Arc<ClientReport>,
    /// The longest wait first, then near misses, then the longest hold.
    pub(super) locks: Vec<SurveyedLock>,
    pub(super) clients: Vec<Arc<ClientReport>>,
    pub(super) clients_left_out: usize,
    /// Cycles of locks whose holders wait for each other.
    pub(super) deadlocks: Vec<Vec<LockKey>>,
    pub(super) gaps: Vec<Gap>,
}

/// Something unknown, why, and what to do about it.
#[derive(Debug)]
pub(super) struct Gap {
    pub(super) unknown: &'static str,
    pub(super) why: String,
    pub(super) remedy: &'static str,
}

impl Survey {
    /// Converts the survey of all locks of the client's store and prefix. What the store does not tell is a [gap](Gap);
    /// what this process knows about itself is always included.
    pub(super) fn of(found: dlock::operations::Survey, health: Health) -> Survey {
        let gaps = [
            found.locks_unknown.as_ref().map(Gap::of_locks),
            found.clients_unknown.as_ref().map(Gap::of_clients),
            Gap::of_silence(&found.locks),
        ];
        let deadlocks = found.deadlocks();
        let (mut locks, mut clients) = (found.locks, found.clients);
        locks.sort_by_cached_key(urgency);
        clients[1..].sort_by(|a, b| (&a.service, &a.host, &a.client).cmp(&(&b.service, &b.host, &b.client)));
        let clients_left_out = clients.len().saturating_sub(MOST_CLIENTS);
        clients.truncate(MOST_CLIENTS);
        Survey {
            at: SystemTime::now(),
            health,
            own: clients[0].clone(),
            locks,
            clients,
            clients_left_out,
            deadlocks,
            gaps: gaps.into_iter().flatten().collect(),
        }
    }

    /// Returns the clients with calls that waited for a lock.
    pub(super) fn waiting_for(&self, key: &LockKey) -> impl Iterator<Item = Arc<ClientReport>> {
        let lock = self.locks.iter().find(|lock| lock.key == *key);
        let waits = lock.into_iter().flat_map(|lock| &lock.waits);
        waits.map(|(client, _)| client.clone())
    }
}

/// The sort key: the most urgent lock first.
fn urgency(lock: &SurveyedLock) -> (Reverse<Duration>, bool, Reverse<Duration>, LockKey) {
    let waited = lock.waits.first().map(|(_, wait)| wait.waited);
    let held = lock.holders.iter().filter_map(|holder| holder.hold.as_ref());
    let held = held.map(|hold| hold.held).max();
    (
        Reverse(waited.unwrap_or_default()),
        !is_near(lock),
        Reverse(held.unwrap_or_default()),
        lock.key.clone(),
    )
}

/// Whether one of its holders is a near miss.
pub(super) fn is_near(lock: &SurveyedLock) -> bool {
    lock.holders.iter().any(Holder::is_near_its_end)
}

impl Gap {
    fn of_locks(error: &Error) -> Gap {
        Gap {
            unknown: "the locks of other processes",
            why: error.to_string(),
            remedy: concat!(
                "Only what this process holds and waits for is shown. If the store does not answer, look at the store \
                 and the network; if it refuses, give its user the lines of ",
                permissions_page!(),
                "."
            ),
        }
    }

    fn of_clients(error: &Error) -> Gap {
        let remedy = match error {
            Error::Unsupported { .. } => {
                "This store keeps no presence entries of clients. The holders are shown by their ids; ask \
                 each process, or look at its logs."
            }
            Error::Refused { .. } => concat!(
                "Give the store's user the lines of ",
                permissions_page!(),
                " about presence."
            ),
            _ => "Look at the store and the network; this page asks again by itself.",
        };
        Gap {
            unknown: "the reports of other processes: where in the code, since when, which calls wait",
            why: error.to_string(),
            remedy,
        }
    }

    /// The gap for holders without a report.
    fn of_silence(locks: &[SurveyedLock]) -> Option<Gap> {
        let holders = locks.iter().flat_map(|lock| &lock.holders);
        // Of a lock that is only kept for its `min_hold` nobody has anything to publish.
        let held = holders.filter(|holder| holder.holds > 0);
        let silent = held.filter(|holder| holder.client.is_none() && holder.names_client());
        let count = silent.count();
        (count > 0).then(|| Gap {
            unknown: "since when, where in the code and by which process some locks are held, and which calls wait for them",
            why: match count {
                1 => "1 holder has published nothing".to_owned(),
                count => format!("{count} holders have published nothing"),
            },
            remedy: "Set LockClientBuilder::presence(true), or ?presence=on in the URL, in every process; it is off by \
                     default. A holder with presence is missing in its first seconds, after a crash, and while it is \
                     cut off. Holders of Redisson never write.",
        })
    }
}
