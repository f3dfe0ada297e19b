//! What is held and waited for in all processes: the locks of the store, joined with what the clients wrote down.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dlock::Health;
use dlock::operations::{ClientReport, HoldReport, WaitReport};
use dlock::store::Holder;
use dlock::{Error, LockClient, LockKey};
use futures_util::future::join;

/// How many locks are shown.
const MOST_LOCKS: usize = 500;
/// How many clients are shown.
const MOST_CLIENTS: usize = 500;
/// How far a chain of holders is followed.
const MOST_LINKS: usize = 32;
/// How often a client whose lease is not known writes down what it does.
const USUALLY_WRITTEN: Duration = Duration::from_secs(5);

/// What was found at one moment.
pub(super) struct Survey {
    pub(super) at: SystemTime,
    pub(super) health: Health,
    pub(super) own: Arc<ClientReport>,
    /// The longest wait first, then what nearly ended, then the longest hold.
    pub(super) locks: Vec<Lock>,
    pub(super) locks_left_out: usize,
    pub(super) clients: Vec<Arc<ClientReport>>,
    pub(super) clients_left_out: usize,
    /// Locks whose holders wait for each other in a circle.
    pub(super) deadlocks: Vec<Vec<LockKey>>,
    pub(super) gaps: Vec<Gap>,
}

/// A lock that is held or waited for.
pub(super) struct Lock {
    pub(super) key: LockKey,
    pub(super) holders: Vec<Holder>,
    /// The longest wait first.
    pub(super) waiters: Vec<(Arc<ClientReport>, WaitReport)>,
}

/// Something that is not known, why, and what to do about it.
#[derive(Debug)]
pub(super) struct Gap {
    pub(super) unknown: &'static str,
    pub(super) why: String,
    pub(super) remedy: &'static str,
}

impl Survey {
    /// Looks at all locks of the client's store and prefix. What the store does not tell is a [gap](Gap): what this
    /// process knows of itself is there in any case.
    pub(super) async fn of(client: &LockClient) -> Survey {
        let (listed, written) = join(client.list(""), client.clients()).await;
        let own = Arc::new(client.active());
        let mut gaps = Vec::new();
        let mut clients = vec![own.clone()];
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                gaps.push(Gap::of_locks(&error));
                own_holds(&own)
            }
        };
        match written {
            Ok(reports) => clients.extend(
                reports
                    .into_iter()
                    // What this process does it knows better.
                    .filter(|report| report.client != own.client)
                    .map(Arc::new),
            ),
            Err(error) => gaps.push(Gap::of_clients(&error)),
        }
        let mut locks = held(listed, &clients);
        for report in &clients {
            for wait in &report.waits {
                let lock = locks
                    .entry(wait.key.clone())
                    .or_insert_with(|| Lock::new(&wait.key));
                lock.waiters.push((report.clone(), wait.clone()));
            }
        }
        gaps.extend(Gap::of_silence(locks.values()));
        let deadlocks = deadlocks(&locks);
        let mut locks: Vec<_> = locks.into_values().collect();
        for lock in &mut locks {
            lock.waiters.sort_by_key(|(_, wait)| Reverse(wait.waited));
        }
        locks.sort_by_cached_key(Lock::urgency);
        clients[1..].sort_by(|a, b| (&a.service, &a.host, &a.client).cmp(&(&b.service, &b.host, &b.client)));
        let locks_left_out = locks.len().saturating_sub(MOST_LOCKS);
        let clients_left_out = clients.len().saturating_sub(MOST_CLIENTS);
        locks.truncate(MOST_LOCKS);
        clients.truncate(MOST_CLIENTS);
        Survey {
            at: SystemTime::now(),
            health: client.health(),
            own,
            locks,
            locks_left_out,
            clients,
            clients_left_out,
            deadlocks,
            gaps,
        }
    }
}

impl Lock {
    pub(super) fn new(key: &LockKey) -> Lock {
        Lock {
            key: key.clone(),
            holders: Vec::new(),
            waiters: Vec::new(),
        }
    }

    /// What sorts the most urgent lock first.
    fn urgency(&self) -> (Reverse<Duration>, bool, Reverse<Duration>, String) {
        let waited = self.waiters.iter().map(|(_, wait)| wait.waited).max();
        let held = self.holders.iter().filter_map(|holder| holder.hold.as_ref());
        let held = held.map(|hold| hold.held).max();
        (
            Reverse(waited.unwrap_or_default()),
            !self.holders.iter().any(is_near_its_end),
            Reverse(held.unwrap_or_default()),
            self.key.as_str().to_owned(),
        )
    }
}

impl Gap {
    fn of_locks(error: &Error) -> Gap {
        Gap {
            unknown: "the locks of other processes",
            why: error.to_string(),
            remedy: "Only what this process holds and waits for is shown. If the store does not answer, look at the \
                     store and the network; if it refuses, give its user the lines of docs/permissions.md.",
        }
    }

    fn of_clients(error: &Error) -> Gap {
        let remedy = match error {
            Error::Unsupported { .. } => {
                "This store has no place for what clients say of themselves. The holders are shown by their ids; ask \
                 each process, or look at its logs."
            }
            Error::Refused { .. } => "Give the store's user the lines of docs/permissions.md about presence.",
            _ => "Look at the store and the network; this page asks again by itself.",
        };
        Gap {
            unknown: "what other processes say of themselves: where in the code, since when, who waits",
            why: error.to_string(),
            remedy,
        }
    }

    /// Of holders that said nothing.
    fn of_silence<'a>(locks: impl Iterator<Item = &'a Lock>) -> Option<Gap> {
        let holders = locks.flat_map(|lock| &lock.holders);
        let silent = holders.filter(|holder| holder.client.is_none() && is_of_a_client(holder));
        let count = silent.count();
        (count > 0).then(|| Gap {
            unknown: "since when, where in the code and by which process some locks are held, and who waits for them",
            why: match count {
                1 => "1 holder has written nothing down".to_owned(),
                count => format!("{count} holders have written nothing down"),
            },
            remedy: "Set LockClientBuilder::presence(true), or ?presence=on in the URL, in every process; it is off by \
                     default. A holder with presence is missing in its first seconds, after a crash, and while it is \
                     cut off. Holders of Redisson never write.",
        })
    }
}

/// The holds of the store, with what is known about them.
fn held(listed: Vec<(LockKey, Holder)>, clients: &[Arc<ClientReport>]) -> BTreeMap<LockKey, Lock> {
    let by_id: HashMap<_, _> = clients
        .iter()
        .map(|report| (report.client.as_str(), report))
        .collect();
    let mut locks = BTreeMap::new();
    for (key, mut holder) in listed {
        let report = holder.id.split_once(':').and_then(|(id, _)| by_id.get(id));
        holder.hold = report.and_then(|report| hold_in(report, &holder.id)).cloned();
        holder.client = report.map(|report| Arc::clone(report));
        let lock = locks.entry(key.clone()).or_insert_with(|| Lock::new(&key));
        lock.holders.push(holder);
    }
    locks
}

/// What this process holds, as it knows without the store.
fn own_holds(own: &ClientReport) -> Vec<(LockKey, Holder)> {
    let holder = |hold: &HoldReport| Holder::new(hold.kind, hold.grant.clone(), 1, Some(hold.lease_left));
    own.holds
        .iter()
        .map(|hold| (hold.key.clone(), holder(hold)))
        .collect()
}

/// The hold of this id, as its client reports it.
pub(super) fn hold_in<'a>(report: &'a ClientReport, id: &str) -> Option<&'a HoldReport> {
    report.holds.iter().find(|hold| hold.grant == id)
}

/// Whether the id of a holder names its client: that of a permit does not.
pub(super) fn is_of_a_client(holder: &Holder) -> bool {
    holder.id.contains(':')
}

/// Whether the lease was not renewed when that was due: a renewed lease always has two thirds left, and less than half
/// of one is a near miss. A client writes down what it does every third of its lease, five seconds at most.
pub(super) fn is_near_its_end(holder: &Holder) -> bool {
    let every = holder
        .client
        .as_ref()
        .map_or(USUALLY_WRITTEN, |client| client.every);
    let suspect = holder.hold.as_ref().is_some_and(|hold| hold.suspect);
    suspect || holder.remaining.is_some_and(|left| left < every * 3 / 2)
}

/// The call that a holder waits in: inside the frame of the hold, or in the task that has it.
pub(super) fn wait_of(holder: &Holder) -> Option<&WaitReport> {
    let waits = &holder.client.as_deref()?.waits;
    let inside = waits.iter().find(|wait| wait.inside.contains(&holder.id));
    let task = holder.hold.as_ref().and_then(|hold| hold.task);
    inside.or_else(|| waits.iter().find(|wait| wait.task.is_some() && wait.task == task))
}

/// The circles of locks whose holders wait for each other, each once.
fn deadlocks(locks: &BTreeMap<LockKey, Lock>) -> Vec<Vec<LockKey>> {
    let next = |key: &LockKey| {
        let lock = locks.get(key)?;
        lock.holders.iter().find_map(wait_of).map(|wait| wait.key.clone())
    };
    let mut found = BTreeSet::new();
    for start in locks.keys() {
        let mut chain = vec![start.clone()];
        while let Some(key) = chain.last().and_then(next).filter(|_| chain.len() <= MOST_LINKS) {
            if let Some(at) = chain.iter().position(|link| *link == key) {
                let mut circle = chain.split_off(at);
                let first = (0..circle.len()).min_by_key(|at| &circle[*at]);
                circle.rotate_left(first.unwrap_or_default());
                // A holder that waits for its own lock waits for a branch of its own, which the log warns of.
                if circle.len() > 1 {
                    found.insert(circle);
                }
                break;
            }
            chain.push(key);
        }
    }
    found.into_iter().collect()
}
