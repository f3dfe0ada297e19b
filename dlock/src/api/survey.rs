//! What is held and waited for in all processes: the locks of the store, joined with the reports of the clients.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::sync::Arc;

use futures_util::future::{join, join_all};

use crate::base::chance::{HashMap, HashSet};
use crate::base::holder::{Holder, Said};
use crate::base::report::{ClientReport, HoldReport, WaitReport};
use crate::{Error, LockClient, LockKey};

/// How many holders of a chain are followed.
const MOST_LINKS: usize = 32;

/// What is held and waited for in all processes, see [`LockClient::survey`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let _guard = client.lock("order:42").acquire().await?;
///
/// let survey = client.survey("order:", false).await;
/// let lock = &survey.locks[0];
/// assert_eq!((lock.key.as_str(), lock.holders.len(), lock.waits.len()), ("order:42", 1, 0));
/// assert!(survey.deadlocks().is_empty());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Survey {
    /// The locks that are held, or known to be waited for, by name.
    pub locks: Vec<SurveyedLock>,
    /// The reports of the clients: first this one, then the others by their ids.
    pub clients: Vec<Arc<ClientReport>>,
    /// Why the locks of other clients are unknown: then only those that this client holds are listed.
    pub locks_unknown: Option<Error>,
    /// Why the reports of other clients are unknown.
    pub clients_unknown: Option<Error>,
}

/// A lock that is held or waited for, see [`Survey`].
///
/// ```
/// # async fn example(client: dlock::LockClient) {
/// for lock in client.survey("", false).await.locks {
///     println!("{}: {} holders, {} waiters", lock.key, lock.holders.len(), lock.waits.len());
/// }
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SurveyedLock {
    /// Its name.
    pub key: LockKey,
    /// Its holders, with their clients' reports.
    pub holders: Vec<Holder>,
    /// The calls that wait for it, as far as is known, the longest wait first. Those of a client that fell silent are as it
    /// published them last: see [`ClientReport::is_overdue`].
    pub waits: Vec<(Arc<ClientReport>, WaitReport)>,
}

impl LockClient {
    /// Surveys the locks whose names begin with `prefix`, their holders and waiters, in all processes. With `ask`, each
    /// other client that [answers](crate::LockClientBuilder::control) and holds one of them is [asked](Self::ask) what
    /// it does at this moment; that takes a second if one does not answer. The store scans all of its keys for this:
    /// meant for people and tools. In a Redis Cluster a lock whose slot moves during the scan may be missing.
    ///
    /// If the store does not tell something, the survey says so; what this client holds and waits for is always
    /// included. Cancel safe.
    pub async fn survey(&self, prefix: &str, ask: bool) -> Survey {
        let (listed, written) = join(self.list(prefix), self.clients()).await;
        let own = self.active();
        let (listed, mut locks_unknown) = match listed {
            Ok(listed) => (listed, None),
            Err(error) => (own_holds(&own, prefix), Some(error)),
        };
        let (mut others, clients_unknown) = match written {
            Ok(others) => (others, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        // About itself this client knows more.
        others.retain(|report| report.client != own.client);
        if ask {
            others = self.asked(others, &listed).await;
        }
        let clients: Vec<_> = [own].into_iter().chain(others).map(Arc::new).collect();
        let join = {
            let (prefix, clients) = (prefix.to_owned(), clients.clone());
            move || joined(&prefix, listed, &clients)
        };
        // Of a hundred thousand locks it takes a while, in which the other tasks of this thread go on. The caller may have no
        // runtime of its own.
        let runtime = &self.handle().shared().runtime;
        let locks = runtime.spawn_blocking(join).await.unwrap_or_else(|error| {
            if let Ok(panic) = error.try_into_panic() {
                std::panic::resume_unwind(panic);
            }
            // The client's runtime is gone, and the client with it.
            locks_unknown = Some(Error::ClientClosed);
            Vec::new()
        });
        Survey {
            locks,
            clients,
            locks_unknown,
            clients_unknown,
        }
    }

    /// Asks the clients that answer and hold one of these locks for newer reports than the published ones.
    async fn asked(&self, reports: Vec<ClientReport>, listed: &[(LockKey, Holder)]) -> Vec<ClientReport> {
        let ids = listed.iter().filter_map(|(_, holder)| holder.id.split_once(':'));
        let holding: HashSet<&str> = ids.map(|(client, _)| client).collect();
        let asked = reports.into_iter().map(|report| async {
            let is_asked = report.answers && !report.is_overdue() && holding.contains(report.client.as_str());
            let answer = match is_asked {
                true => self.ask(&report.client).await.ok().flatten(),
                false => None,
            };
            answer.unwrap_or(report)
        });
        join_all(asked).await
    }
}

impl Survey {
    /// Returns the cycles of locks whose holders wait for each other, each once. Of cycles that share locks, each lock is
    /// in one of those that are returned.
    #[must_use]
    pub fn deadlocks(&self) -> Vec<Vec<LockKey>> {
        let next = self.waited_for();
        let mut found = BTreeSet::new();
        let mut in_one: HashSet<&LockKey> = HashSet::default();
        for start in next.keys().copied() {
            if in_one.contains(start) {
                continue;
            }
            let Some(mut cycle) = cycle_from(start, &next) else {
                continue;
            };
            in_one.extend(cycle.iter().copied());
            let first = (0..cycle.len()).min_by_key(|at| &cycle[*at]);
            cycle.rotate_left(first.unwrap_or_default());
            found.insert(cycle);
        }
        let named = |cycle: Vec<&LockKey>| cycle.into_iter().cloned().collect();
        found.into_iter().map(named).collect()
    }

    /// For each lock, the locks that its holders wait for. Only locks that may be in a cycle, or before one.
    fn waited_for(&self) -> BTreeMap<&LockKey, Vec<&LockKey>> {
        let waits = self
            .locks
            .iter()
            .map(|lock| (&lock.key, waited_for_by_holders(lock)));
        let mut next: BTreeMap<_, _> = waits.filter(|(_, waits)| !waits.is_empty()).collect();
        // Almost all locks leave here, so that the search is short.
        for _ in 0..MOST_LINKS {
            let waiting: HashSet<&LockKey> = next.keys().copied().collect();
            next.retain(|_, waits| {
                waits.retain(|key| waiting.contains(key));
                !waits.is_empty()
            });
            if next.len() == waiting.len() {
                break;
            }
        }
        next
    }
}

/// The locks that the holders of this one wait for, each once.
fn waited_for_by_holders(lock: &SurveyedLock) -> Vec<&LockKey> {
    let waits = lock.holders.iter().filter_map(|holder| holder.waits_for.as_ref());
    let mut waits: Vec<_> = waits.map(|wait| &wait.key).collect();
    // Any holder of a permit may let the next one on, so that all have to wait.
    let is_let_on = |holder: &Holder| holder.kind.is_permits() && holder.waits_for.is_none();
    if lock.holders.iter().any(is_let_on) {
        return Vec::new();
    }
    // A holder that waits for its own lock waits in another branch of its task; the log warns of that. Several wait for each
    // other: readers that want to write.
    if waits.iter().filter(|key| ***key == lock.key).count() == 1 {
        waits.retain(|key| **key != lock.key);
    }
    waits.sort_unstable();
    waits.dedup();
    waits
}

/// The shortest cycle with this lock.
fn cycle_from<'a>(
    start: &'a LockKey,
    next: &BTreeMap<&'a LockKey, Vec<&'a LockKey>>,
) -> Option<Vec<&'a LockKey>> {
    let mut came_from: HashMap<&LockKey, &LockKey> = HashMap::default();
    let mut ring = vec![start];
    for _ in 0..MOST_LINKS {
        let mut further = Vec::new();
        for key in ring {
            for after in next.get(key).into_iter().flatten() {
                if *after == start {
                    let back = iter::successors(Some(key), |key| came_from.get(key).copied());
                    let mut cycle: Vec<_> = back.collect();
                    cycle.reverse();
                    return Some(cycle);
                }
                if !came_from.contains_key(after) {
                    came_from.insert(after, key);
                    further.push(*after);
                }
            }
        }
        ring = further;
    }
    None
}

/// The locks by name, with what is known about their holders and waiters.
fn joined(prefix: &str, listed: Vec<(LockKey, Holder)>, clients: &[Arc<ClientReport>]) -> Vec<SurveyedLock> {
    let said: HashMap<&str, Said<'_>> = clients
        .iter()
        .map(|client| (client.client.as_str(), Said::by(client)))
        .collect();
    let mut held: BTreeMap<LockKey, Vec<Holder>> = BTreeMap::new();
    for (key, holder) in listed {
        let said = holder.id.split_once(':').and_then(|(client, _)| said.get(client));
        let holder = match said {
            Some(said) => said.tell(holder),
            None => holder,
        };
        held.entry(key).or_default().push(holder);
    }
    let mut waits: BTreeMap<LockKey, Vec<_>> = BTreeMap::new();
    for client in clients {
        let named = client.waits.iter();
        for wait in named.filter(|wait| wait.key.as_str().starts_with(prefix)) {
            held.entry(wait.key.clone()).or_default();
            let of_key = waits.entry(wait.key.clone()).or_default();
            of_key.push((client.clone(), wait.clone()));
        }
    }
    let locks = held.into_iter().map(|(key, holders)| {
        let waits = waits.remove(&key).unwrap_or_default();
        SurveyedLock { key, holders, waits }.in_order()
    });
    locks.collect()
}

impl SurveyedLock {
    /// A lock with these holders, and with the calls of these clients that wait for it.
    #[must_use]
    pub fn new(
        key: LockKey,
        holders: Vec<Holder>,
        clients: impl IntoIterator<Item = Arc<ClientReport>>,
    ) -> SurveyedLock {
        let waits = clients.into_iter().flat_map(|client| {
            let of_key = client.waits.iter().filter(|wait| wait.key == key);
            let of_key: Vec<_> = of_key.map(|wait| (client.clone(), wait.clone())).collect();
            of_key
        });
        let waits = waits.collect();
        SurveyedLock { key, holders, waits }.in_order()
    }

    fn in_order(mut self) -> SurveyedLock {
        self.waits.sort_by_key(|(_, wait)| Reverse(wait.waited));
        self
    }
}

/// What this client holds, known without the store.
fn own_holds(own: &ClientReport, prefix: &str) -> Vec<(LockKey, Holder)> {
    let holder = |hold: &HoldReport| Holder::new(hold.kind, hold.grant.clone(), 1, Some(hold.lease_left));
    let named = own
        .holds
        .iter()
        .filter(|hold| hold.key.as_str().starts_with(prefix));
    named.map(|hold| (hold.key.clone(), holder(hold))).collect()
}
