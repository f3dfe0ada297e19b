//! Keeps the grants of a client alive and decides on loss.
//!
//! One task for all grants. It sleeps until the first of them is due, renews in one go whatever is due
//! about now, per lane and in chunks that do not wait for each other, and parks without any timer when
//! nothing is held.

mod entries;
mod schedule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::entries::Entries;
use self::schedule::Schedule;
use crate::HoldState;
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::numbers::scatter;
use crate::engine::grant::safety_margin;
use crate::runtime::client::Shared;
use crate::runtime::grants::Grant;
use crate::store::{BackendError, Kind, Lane, Reason, Renewal};
use crate::{Error, LockKey, Loss};

/// Grants in one renewal step.
const CHUNK: usize = 200;
/// Renewal steps of one lane that are under way at a time: two that the server has, and the next two.
const AT_ONCE: usize = 4;
/// A step that is not answered by then makes room for another one: where the way is long the server has nothing to do
/// meanwhile, and one that hangs may do so for longer than others have left.
const SLOW: Duration = Duration::from_millis(20);
/// Steps of one lane that are under way at the most, those that are slow among them.
const AT_MOST: usize = 16;
/// How often readers are looked after at the least, also those whose lease is fixed: Redisson's renewals (every 10 s of a
/// lease of 30 s, by default) leave the lock no more time than that, whatever others have left.
const READERS: Duration = Duration::from_secs(10);
/// The most by which a renewal comes early, to go along with others.
const EARLIEST: Duration = Duration::from_millis(500);

/// The most by which who waits to hear of a loss hears it late, where many are held; and no more than half the margin,
/// so that it is heard before somebody else has the lock.
const LATEST: Duration = Duration::from_millis(10);

/// The books: every live grant and when it needs attention.
#[derive(Debug)]
pub(crate) struct Registry {
    books: Mutex<Books>,
    /// Something is due sooner than the watchdog thinks.
    sooner: Notify,
    /// The last grant has gone.
    emptied: Notify,
}

#[derive(Debug)]
struct Books {
    grants: Entries,
    schedule: Schedule,
    /// When the watchdog will look by itself.
    looks_at: Option<Moment>,
    closed: Option<Loss>,
    doubts: Doubts,
}

/// When lanes came in doubt last. What was asked before that may have been answered by a server that is not there any
/// more, and heard only now: it confirms nothing.
#[derive(Debug, Default)]
struct Doubts {
    last: Option<Moment>,
    /// By the lane; `None` stands for all of them.
    lanes: BTreeMap<Option<Lane>, Moment>,
}

impl Doubts {
    fn put(&mut self, lane: Option<Lane>, now: Moment) {
        self.last = Some(now);
        self.lanes.insert(lane, now);
    }

    /// Whether the lane of this grant has come in doubt since.
    fn came_after(&self, grant: &Grant, asked: Moment) -> bool {
        // Nearly always none has.
        if self.last.is_none_or(|last| last <= asked) {
            return false;
        }
        let lane = grant
            .client()
            .upgrade()
            .map(|shared| shared.backend.lane(&grant.key));
        let came_after = |lane| self.lanes.get(&lane).is_some_and(|at| *at > asked);
        came_after(None) || came_after(lane)
    }
}

impl Books {
    /// Whether there are so many that it pays to renew them in batches that were planned.
    fn are_many(&self) -> bool {
        self.grants.len() >= CHUNK
    }

    fn set_due(&mut self, number: u64, due: Moment) {
        let Some(entry) = self.grants.get(number).filter(|entry| entry.due.get() != due) else {
            return;
        };
        let before = entry.due.replace(due);
        self.schedule.add(due, number);
        self.forget(before, 1);
    }

    /// So many that were due then are not any more.
    fn forget(&mut self, due: Moment, count: usize) {
        let grants = &self.grants;
        let is_due = |number| grants.get(number).is_some_and(|entry| entry.due.get() == due);
        self.schedule.forget(due, count, is_due);
    }

    fn remove(&mut self, number: u64) -> bool {
        let Some(entry) = self.grants.remove(number) else {
            return false;
        };
        self.forget(entry.due.get(), 1);
        true
    }
}

impl Default for Registry {
    fn default() -> Registry {
        Registry {
            books: Mutex::new(Books {
                grants: Entries::default(),
                schedule: Schedule::default(),
                looks_at: None,
                closed: None,
                doubts: Doubts::default(),
            }),
            sooner: Notify::new(),
            emptied: Notify::new(),
        }
    }
}

impl Registry {
    /// Enters a grant that was just given, by a step sent at `sent`.
    pub(crate) fn add(&self, grant: &Arc<Grant>, sent: Instant) {
        let sent = Moment::of(sent);
        let due = next_due(grant, sent, Moment::of(grant.deadline()));
        let mut books = self.books.lock();
        let old = books.doubts.came_after(grant, sent);
        let due = match old {
            true => Moment::of(clock::now()),
            false => spread(books.are_many(), grant, due, share_of_row(grant.number) / 2.0),
        };
        let doubted = old && grant.suspect();
        if let Some(loss) = books.closed {
            drop(books);
            return grant.lose(loss);
        }
        books.grants.insert(grant.clone(), due);
        books.schedule.add(due, grant.number);
        let sooner = books.looks_at.is_none_or(|at| due < at);
        drop(books);
        if doubted {
            grant.tell_suspect();
        }
        if sooner {
            self.sooner.notify_one();
        }
    }

    /// Puts another grant in the place of the one it is the heir of. `false` when that is not there any more, or has come
    /// in doubt since it was seen that it may be handed on.
    pub(crate) fn replace(&self, heir: &Arc<Grant>) -> bool {
        let mut books = self.books.lock();
        let entry = books.grants.get(heir.number);
        let Some(entry) = entry.filter(|entry| !entry.grant.is_suspect() || broken!(HandoffOfSuspectGrant))
        else {
            return false;
        };
        heir.is_asked.set(entry.grant.is_asked.get());
        let due = entry.due.get();
        books.grants.insert(heir.clone(), due);
        true
    }

    /// Takes a grant out: no renewal is sent for it any more, and the answer of one that is under way says
    /// nothing.
    pub(crate) fn remove(&self, number: u64) {
        let mut books = self.books.lock();
        if books.remove(number) && books.grants.is_empty() {
            drop(books);
            self.emptied.notify_waiters();
        }
    }

    /// How many grants are held.
    pub(crate) fn len(&self) -> usize {
        self.books.lock().grants.len()
    }

    #[cfg(dlock_sim)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.books.lock().grants.has(number)
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.len() == 0 {
                return;
            }
            emptied.await;
        }
    }

    /// Ends every grant, and each that is still to come.
    pub(crate) fn close(&self, loss: Loss) -> Vec<Arc<Grant>> {
        let mut books = self.books.lock();
        books.closed.get_or_insert(loss);
        books.schedule.clear();
        let grants: Vec<_> = books.grants.drain().collect();
        drop(books);
        for grant in &grants {
            grant.lose(loss);
        }
        self.emptied.notify_waiters();
        grants
    }

    /// Ends the grant of a key, if there is one.
    pub(crate) fn lose(&self, key: &LockKey, loss: Loss) {
        let mut books = self.books.lock();
        let grants: Vec<_> = books
            .grants
            .grants()
            .filter(|grant| grant.key == *key)
            .cloned()
            .collect();
        for grant in &grants {
            books.remove(grant.number);
        }
        let emptied = books.grants.is_empty();
        // Whoever is told of a loss may call back, so nobody is told under the lock, here and below.
        drop(books);
        for grant in grants {
            grant.lose(loss);
        }
        if emptied {
            self.emptied.notify_waiters();
        }
    }

    /// Whose renewal is due about now, in which lane; whatever else is due is dealt with here.
    fn collect(&self, now: Instant, lane_of: impl Fn(&LockKey) -> Lane) -> Vec<(Lane, u64)> {
        let mut books = self.books.lock();
        let Books { grants, schedule, .. } = &mut *books;
        // Many are due together anyway; a few go along with the first of them.
        let many = grants.len() >= CHUNK;
        let early = if many { Duration::ZERO } else { EARLIEST };
        let now = Moment::of(now);
        let (mut renew, mut over, mut later) = (Vec::new(), Vec::new(), Vec::new());
        while let Some((due, numbers)) = schedule.take(now + early) {
            for number in numbers {
                let Some(entry) = grants.get(number).filter(|entry| entry.due.get() == due) else {
                    continue;
                };
                let grant = &entry.grant;
                if early > Duration::ZERO {
                    let early = if grant.renewed {
                        grain(grant)
                    } else {
                        Duration::ZERO
                    };
                    if due > now + early {
                        later.push((due, number));
                        continue;
                    }
                }
                let (mut state, deadline) = grant.peek_at(now);
                if broken!(DeadlineNeverJudged) && now >= deadline {
                    // Here all the same, or this would look at it for ever.
                    state = HoldState::Lost(Loss::Expired);
                }
                if let HoldState::Lost(loss) = state {
                    over.push((grant.clone(), loss));
                    grants.remove(number);
                    continue;
                }
                let wanted = grant.renewed || state == HoldState::Suspect || grant.kind == Kind::Read;
                if wanted && !grant.is_asked.get() {
                    grant.is_asked.set(true);
                    renew.push((lane_of(&grant.key), number));
                }
                // The next look is at the deadline, unless an answer comes first. Many look together.
                let look = if many {
                    deadline.ceil(latest(grant))
                } else {
                    deadline
                };
                entry.due.set(look);
                later.push((look, number));
            }
        }
        for run in later.chunk_by(|(a, _), (b, _)| a == b) {
            schedule.add_all(run[0].0, run.iter().map(|(_, number)| *number));
        }
        let emptied = grants.is_empty();
        drop(books);
        for (grant, loss) in over {
            grant.lose(loss);
        }
        if emptied {
            self.emptied.notify_waiters();
        }
        renew
    }

    /// The grants of these numbers that are still there, with the leases that they ask for now.
    fn ask(&self, now: Instant, numbers: impl Iterator<Item = u64>) -> Vec<(Arc<Grant>, Duration)> {
        let books = self.books.lock();
        let mut asked = Vec::with_capacity(numbers.size_hint().0);
        for number in numbers {
            let Some(entry) = books.grants.get(number) else {
                continue;
            };
            match entry.grant.next_lease(now) {
                Some(lease) => asked.push((entry.grant.clone(), lease)),
                None => entry.grant.is_asked.set(false),
            }
        }
        asked
    }

    /// What renewals brought that were sent at `sent`, each for its lease.
    fn answered(
        &self,
        sent: Instant,
        answers: impl Iterator<Item = (u64, Duration, Result<Renewal, BackendError>)>,
    ) {
        let (mut lost, mut failed, mut moved) = (Vec::new(), Vec::new(), Vec::new());
        let mut planned: Option<(Moment, Duration, Moment)> = None;
        let mut books = self.books.lock();
        let many = books.are_many();
        let Books { grants, doubts, .. } = &mut *books;
        let (now, sent) = (Moment::of(clock::now()), Moment::of(sent));
        for (number, lease, answer) in answers {
            // Released meanwhile: whatever the store said is of no interest.
            let Some(entry) = grants.get(number) else {
                continue;
            };
            // Who has it now; it may have been handed on since the question was asked. All that follows from
            // the answer is entered before it can be handed on again.
            let grant = &entry.grant;
            grant.is_asked.set(false);
            let old = doubts.came_after(grant, sent);
            let outcome = match answer {
                Ok(Renewal::Renewed) => grant.renewed(now, sent, lease, !old).map(|deadline| {
                    let (due, lease) = (next_due(grant, sent, deadline), grant.lease());
                    match planned {
                        _ if old => now,
                        // What was renewed together stays together.
                        Some((same, its, moment)) if (same, its) == (due, lease) => moment,
                        _ => {
                            let moment = spread(many, grant, due, chance::fraction() / 5.0);
                            planned = Some((due, lease, moment));
                            moment
                        }
                    }
                }),
                answer => match (grant.peek_at(now).0, answer) {
                    (HoldState::Lost(loss), _) if loss != Loss::Released => Err(loss),
                    (_, Ok(_)) => Err(Loss::Gone),
                    (_, Err(error)) if matches!(error.reason, Reason::KeyTaken(_)) => Err(Loss::Gone),
                    (_, Err(error)) => {
                        let doubted = grant.suspect();
                        failed.push((grant.clone(), error, doubted));
                        Ok(next_try(grant, now))
                    }
                },
            };
            match outcome {
                Ok(due) if due == entry.due.get() => {}
                Ok(due) => moved.push((entry.due.replace(due), due, number)),
                Err(loss) => lost.push((number, grant.clone(), loss)),
            }
        }
        for run in moved.chunk_by(|(_, a, _), (_, b, _)| a == b) {
            let numbers = run.iter().map(|(_, _, number)| *number);
            books.schedule.add_all(run[0].1, numbers);
        }
        for run in moved.chunk_by(|(a, ..), (b, ..)| a == b) {
            books.forget(run[0].0, run.len());
        }
        for (number, ..) in &lost {
            books.remove(*number);
        }
        let sooner = match (books.looks_at, books.schedule.first()) {
            (Some(looks_at), Some(first)) => first < looks_at,
            (None, first) => first.is_some(),
            (Some(_), None) => false,
        };
        let emptied = books.grants.is_empty();
        drop(books);
        for (grant, error, doubted) in failed {
            tracing::debug!(key = %grant.key, %error, "a renewal failed and is tried again");
            if doubted {
                grant.tell_suspect();
            }
        }
        for (_, grant, loss) in lost {
            grant.lose(loss);
        }
        if sooner {
            self.sooner.notify_one();
        }
        if emptied {
            self.emptied.notify_waiters();
        }
    }

    /// Has every grant of a lane confirmed at once, or of all lanes.
    fn doubt(&self, lane: Option<Lane>, lane_of: impl Fn(&LockKey) -> Lane) {
        let now = Moment::of(clock::now());
        let in_lane = |grant: &Grant| lane.is_none_or(|lane| lane_of(&grant.key) == lane);
        let mut books = self.books.lock();
        books.doubts.put(lane, now);
        let doubtful: Vec<_> = books
            .grants
            .grants()
            .filter(|grant| in_lane(grant))
            .cloned()
            .collect();
        let mut news = Vec::new();
        for grant in doubtful {
            books.set_due(grant.number, now);
            if grant.suspect() {
                news.push(grant);
            }
        }
        drop(books);
        for grant in news {
            grant.tell_suspect();
        }
    }

    fn first_due(&self) -> Option<Instant> {
        let mut books = self.books.lock();
        let first = books.schedule.first();
        books.looks_at = first;
        first.map(Moment::instant)
    }
}

/// When a grant that was confirmed by a step sent at `sent`, until `deadline`, needs attention next.
fn next_due(grant: &Grant, sent: Moment, deadline: Moment) -> Moment {
    let due = match grant.kind {
        Kind::Read => deadline.min(sent + READERS),
        _ => deadline,
    };
    match grant.renewed {
        true => due.min(sent + grant.lease() / 3),
        false => due,
    }
}

/// Where many are held, what was acquired at once is not renewed at once for ever: a renewal comes earlier,
/// by this share of its period.
fn spread(many: bool, grant: &Grant, due: Moment, share: f64) -> Moment {
    if !grant.renewed || !many {
        return due;
    }
    let earlier = (grant.lease() / 3).mul_f64(share);
    // All that are due within a grain go along with the first.
    due.earlier_by(earlier).floor(grain(grant))
}

/// A number from 0 to 1 that is the same for those who came one after the other: they lie close to each other in memory,
/// and to find each of them somewhere else is most of what a renewal costs.
fn share_of_row(number: u64) -> f64 {
    const ROW: u64 = 64;
    (scatter(number / ROW) >> 32) as f64 / 2_f64.powi(32)
}

/// By how much a renewal may come early, to go along with others.
fn grain(grant: &Grant) -> Duration {
    (grant.lease() / 60).min(EARLIEST)
}

/// By how much a look at the deadline may come late, to go along with others.
fn latest(grant: &Grant) -> Duration {
    (safety_margin(grant.lease()) / 2).min(LATEST)
}

/// When to try again after a renewal failed: the sooner, the less is left.
fn next_try(grant: &Grant, now: Moment) -> Moment {
    let (_, deadline) = grant.peek_at(now);
    let left = deadline.since(now);
    deadline.min(now + (left / 8).max(Duration::from_millis(20)))
}

/// What is to be renewed in one lane.
struct Due {
    numbers: VecDeque<u64>,
    /// For steps that are under way, as long as they are not slow.
    room: Arc<Semaphore>,
    /// For all of them.
    in_all: Arc<Semaphore>,
}

impl Default for Due {
    fn default() -> Due {
        Due {
            numbers: VecDeque::new(),
            room: Arc::new(Semaphore::new(AT_ONCE)),
            in_all: Arc::new(Semaphore::new(AT_MOST)),
        }
    }
}

impl Due {
    /// Room for one more step: as one that is not slow yet, and as one that is.
    fn enter(&self) -> Option<[OwnedSemaphorePermit; 2]> {
        let all = self.in_all.clone().try_acquire_owned().ok()?;
        let room = self.room.clone().try_acquire_owned().ok()?;
        Some([room, all])
    }

    fn is_idle(&self) -> bool {
        self.numbers.is_empty() && self.in_all.available_permits() == AT_MOST
    }
}

/// The watchdog of a client. Ends when `over` says so.
pub(crate) async fn watch(shared: Arc<Shared>, over: impl Future<Output = ()>) {
    let registry = &shared.registry;
    let mut doubts = shared.backend.doubts();
    let mut chunks = JoinSet::new();
    let mut lanes: BTreeMap<Lane, Due> = BTreeMap::new();
    tokio::pin!(over);
    loop {
        let due = registry.first_due();
        let news = tokio::select! {
            biased;
            () = &mut over => return,
            lane = next_doubt(&mut doubts) => {
                registry.doubt(lane, |key| shared.backend.lane(key));
                true
            }
            // What was due is not due any more after the look, so nothing below waits for long.
            () = sleep_until(due) => true,
            () = registry.sooner.notified() => false,
            // Only makes room: what failed a moment ago is not due yet, if nearly.
            Some(_) = chunks.join_next(), if !chunks.is_empty() => false,
        };
        if news {
            let lane_of = |key: &LockKey| shared.backend.lane(key);
            for (lane, number) in registry.collect(clock::now(), lane_of) {
                lanes.entry(lane).or_default().numbers.push_back(number);
            }
        }
        lanes.retain(|_, due| {
            while !due.numbers.is_empty()
                && let Some([room, all]) = due.enter()
            {
                let some = due.numbers.len().min(CHUNK);
                let now = clock::now();
                let asked = registry.ask(now, due.numbers.drain(..some));
                // All released meanwhile, perhaps.
                if asked.is_empty() {
                    continue;
                }
                let shared = shared.clone();
                chunks.spawn(async move {
                    let renewal = renew(shared.clone(), now, asked);
                    tokio::pin!(renewal);
                    if tokio::time::timeout(SLOW, &mut renewal).await.is_err() {
                        drop(room);
                        shared.registry.sooner.notify_one();
                        renewal.await;
                    }
                    drop(all);
                });
            }
            !due.is_idle()
        });
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => clock::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// The next lane that is in doubt; `None` for all of them.
async fn next_doubt(doubts: &mut Option<broadcast::Receiver<Lane>>) -> Option<Lane> {
    let Some(receiver) = doubts else {
        return std::future::pending().await;
    };
    match receiver.recv().await {
        Ok(lane) => Some(lane),
        Err(broadcast::error::RecvError::Lagged(_)) => None,
        Err(broadcast::error::RecvError::Closed) => {
            *doubts = None;
            std::future::pending().await
        }
    }
}

/// Renews a chunk of one lane, each grant for its lease. That counts from `sent`, when it was seen how much is to be had,
/// however much later this is polled.
async fn renew(shared: Arc<Shared>, sent: Instant, asked: Vec<(Arc<Grant>, Duration)>) {
    let requests = asked
        .iter()
        .map(|(grant, lease)| grant.renew_request(*lease))
        .collect();
    let first = asked
        .iter()
        .map(|(grant, _)| grant.deadline())
        .min()
        .unwrap_or(sent);
    // A step that hangs must leave time for others before the lease is over.
    let patience = (first.saturating_duration_since(sent) / 6).max(Duration::from_millis(20));
    let backend = shared.backend.clone();
    // A backend that panics has failed, and is asked again.
    let step = AssertUnwindSafe(async move { backend.renew(requests).await }).catch_unwind();
    let answers = match tokio::time::timeout(patience, step).await {
        Ok(Ok(answers)) => answers,
        Ok(Err(_)) => Err(BackendError::unknown("the step panicked")),
        Err(_) => Err(BackendError::unknown(format!("no answer within {patience:?}"))),
    };
    let mut answers = answers.map(Vec::into_iter);
    let answers = asked.iter().map(|(grant, lease)| {
        let answer = match &mut answers {
            Ok(answers) => answers
                .next()
                .unwrap_or_else(|| Err(BackendError::unknown("no answer"))),
            Err(error) => Err(error.clone()),
        };
        (grant.number, *lease, answer)
    });
    shared.registry.answered(sent, answers);
}

impl Shared {
    /// Renews one grant now, on behalf of its holder.
    pub(crate) async fn renew_one(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        let sent = clock::now();
        let Some(lease) = grant.next_lease(sent) else {
            return Ok(());
        };
        let answers = self.backend.clone().renew(vec![grant.renew_request(lease)]).await;
        let answer = answers.and_then(|mut answers| {
            answers
                .pop()
                .unwrap_or_else(|| Err(BackendError::unknown("no answer")))
        });
        let failed = answer.as_ref().err().cloned();
        self.registry
            .answered(sent, std::iter::once((grant.number, lease, answer)));
        match failed {
            Some(error) if grant.status() != HoldState::Lost(Loss::Gone) => {
                Err(error.into_error("the renewal of lock", &grant.key))
            }
            _ => Ok(()),
        }
    }
}
