//! Executes operations: builds the statements of one round trip, and interprets the replies.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::queue::{Moment, Step as _};
use dlock::store::{AcquireReply, Busy, Granted, Holder, Outcome, Reason, ReleaseReply, Renewal, StoreError};
use mysql_async::Row;
use tokio::time::{Instant, timeout};

use crate::connect::Session;
use crate::failure::{self, Failure};
use crate::row::{self, Found, number};
use crate::script::{self, Reply};
use crate::step::{Answer, Job, Page, Queue, Step, duration, micros};
use crate::table::{self, PAGE, Table};

/// The most acquires, and the most releases, in one round trip.
const MOST: usize = 64;
/// The most renewals in one round trip, so that other operations do not wait for thousands of them.
const MOST_RENEWALS: usize = 256;
/// The most renewals that are sent separately after a refusal; more are sent in parts of this size before.
const FEW: usize = 16;
/// How often an operation that conflicts with other transactions is repeated.
const LOOKS: u32 = 8;
/// The shortest and the longest pause before a repetition.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// The server's clock is read with other statements if the last reading is older than this.
const READING: Duration = Duration::from_secs(1);

/// The most bytes of the statements of one operation, without its key, which they contain up to twice in hexadecimal.
const STATEMENTS: usize = 2048;

/// Counts the operations that a round trip already contains.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// How many bytes of statements still fit.
    bytes: usize,
    acquires: usize,
    releases: usize,
    renewals: usize,
    others: usize,
}

impl Room {
    /// The room in a round trip of this many bytes.
    pub(crate) fn new(packet: usize) -> Room {
        Room {
            bytes: packet,
            ..Room::default()
        }
    }

    /// Whether the operation fits into the round trip; if so, counts it.
    pub(crate) fn has(&mut self, job: &Job) -> bool {
        let (taken, most) = match &job.step {
            Step::Acquire(_) => (&mut self.acquires, MOST),
            Step::Release(..) => (&mut self.releases, MOST),
            Step::Renew(..) => (&mut self.renewals, MOST_RENEWALS),
            Step::Inspect(_) | Step::List(..) | Step::Force(_) => (&mut self.others, MOST),
        };
        let bytes = most_bytes(&job.step);
        let has = *taken < most && bytes <= self.bytes;
        if has {
            *taken += 1;
            self.bytes -= bytes;
        }
        has
    }
}

fn most_bytes(step: &Step) -> usize {
    let key = match step {
        Step::List(prefix, after) => prefix.len().max(after.len()),
        _ => step.keys().map(|key| key.len()).sum(),
    };
    STATEMENTS + 4 * key
}

/// One statement, and the operations that it executes.
#[derive(Debug)]
enum Part {
    Release(Job),
    /// Renewals with the same lease, in µs.
    Renew(Vec<Job>, i64),
    Force(Job),
    /// An acquire, and the server time after which it has no effect.
    Acquire(Job, i64),
    /// Creates the row for an acquire that follows.
    Insert(Arc<str>),
    /// Reads holders.
    Show(Job),
    Clock,
}

/// Executes operations on one connection.
pub(crate) struct Performing<'a> {
    pub(crate) session: &'a mut Session,
    pub(crate) queue: &'a Queue,
    pub(crate) table: &'a Table,
    /// How long the replies to a round trip may take, before the connection is given up.
    pub(crate) limit: Duration,
}

/// The operations that a round trip did not complete.
#[derive(Debug, Default)]
struct Left {
    /// Acquires that were not granted, with the server time after which they have no effect.
    refused: Vec<(Job, i64)>,
    /// Renewals that did not find all of their grants, with the time when they were sent; or that were not sent, because
    /// their rows are locked.
    renewals: Vec<(Job, Option<Instant>)>,
    /// Acquires that were granted, by a reply without the token: a trigger of the table hides it.
    granted: Vec<Job>,
}

/// The rows of locks by their keys.
type Rows = HashMap<Vec<u8>, Found>;

/// An error means that the connection is unusable.
type Broken = Result<(), StoreError>;

impl Performing<'_> {
    /// Sends the operations, and replies to each of them.
    pub(crate) async fn perform(mut self, jobs: Vec<Job>) -> Broken {
        let before = match self.time_before(&jobs).await {
            Ok(before) => before,
            Err(error) => {
                jobs.into_iter().rev().for_each(|job| self.queue.put_back(job));
                return Err(error);
            }
        };
        let (jobs, locked) = self.without_locked(jobs).await?;
        let parts = self.parts(jobs);
        let mut left = match self.round(parts, before).await {
            Ok(left) => left,
            Err(error) => {
                locked.into_iter().for_each(|job| self.queue.put_back(job));
                return Err(error);
            }
        };
        left.renewals.extend(locked.into_iter().map(|job| (job, None)));
        let missing = self.look(left).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let inserts = missing
            .iter()
            .flat_map(|job| job.step.keys())
            .map(|key| Part::Insert(key.clone()));
        let mut parts: Vec<Part> = inserts.collect();
        let acquires = missing
            .into_iter()
            .map(|job| (self.session.clock.at(job.deadline), job));
        parts.extend(acquires.map(|(refuse_after, job)| Part::Acquire(job, refuse_after)));
        let left = self.round(parts, None).await?;
        for (job, _) in left.refused {
            // Another process was first, or has just removed the row again.
            self.look_again(job);
        }
        let granted = left.granted;
        self.look(Left {
            granted,
            ..Left::default()
        })
        .await
        .map(drop)
    }

    /// Reads the server's time before the operations, if one of them releases an acquire that may still take effect.
    async fn time_before(&mut self, jobs: &[Job]) -> Result<Option<i64>, StoreError> {
        let is_unknown = |job: &Job| match &job.step {
            Step::Release(_, grant, _) => self.queue.unknown_until(*grant).is_some(),
            _ => false,
        };
        if !jobs.iter().any(is_unknown) {
            return Ok(None);
        }
        let sent = Instant::now();
        let (replies, failure) = self.send(&[table::clock()]).await;
        if let Some(failure) = failure {
            return Err(failure.error);
        }
        let now = replies.into_iter().next().and_then(|reply| number(reply.rows));
        if let Some(now) = now {
            self.session.clock.saw(now, sent, Instant::now());
        }
        now.map(Some).ok_or_else(unreadable)
    }

    /// Separates the renewals whose rows are missing or locked by a transaction, which are not sent: one that waits for its
    /// row delays all operations of the round trip. A single renewal is sent at first without this look.
    async fn without_locked(&mut self, jobs: Vec<Job>) -> Result<(Vec<Job>, Vec<Job>), StoreError> {
        let renewals = jobs.iter().filter(|job| matches!(job.step, Step::Renew(..)));
        let keys: Vec<&str> = renewals
            .flat_map(|job| job.step.keys())
            .map(|key| &**key)
            .collect();
        if keys.is_empty() || jobs.len() == 1 && jobs[0].looks == 0 {
            return Ok((jobs, Vec::new()));
        }
        let (replies, failure) = self.send(&[self.table.lockable(keys.into_iter())]).await;
        match failure {
            None => {}
            Some(failure) if failure.broken => {
                jobs.into_iter().rev().for_each(|job| self.queue.put_back(job));
                return Err(failure.error);
            }
            // Each statement on this table would wait as long. None was sent.
            Some(failure) if failure.conflict => {
                for job in jobs {
                    let after = pause(job.looks);
                    match job.looks < LOOKS {
                        true => self.queue.retry(job, after, &failure.error.message),
                        false => self.fail(job, &failure.error),
                    }
                }
                return Ok((Vec::new(), Vec::new()));
            }
            // The renewals will tell.
            Some(_) => return Ok((jobs, Vec::new())),
        }
        let rows = replies.iter().flat_map(|reply| &reply.rows);
        let lockable: HashSet<Vec<u8>> = rows.filter_map(row::bytes).collect();
        let is_sent = |job: &Job| match &job.step {
            Step::Renew(key, ..) => lockable.contains(key.as_bytes()),
            _ => true,
        };
        Ok(jobs.into_iter().partition(is_sent))
    }

    /// Orders the statements; those that return rows are last. Renewals are first, so that no lease ends because a release or
    /// an acquire waits for its row.
    fn parts(&self, jobs: Vec<Job>) -> Vec<Part> {
        let (mut releases, mut alone, mut forced, mut acquires, mut shown) =
            (vec![], vec![], vec![], vec![], vec![]);
        let mut together: HashMap<i64, Vec<Job>> = HashMap::new();
        for job in jobs {
            match &job.step {
                Step::Release(..) => releases.push(Part::Release(job)),
                Step::Renew(_, _, lease) if job.alone => {
                    let lease = *lease;
                    alone.push(Part::Renew(vec![job], lease));
                }
                Step::Renew(_, _, lease) => together.entry(*lease).or_default().push(job),
                Step::Force(_) => forced.push(Part::Force(job)),
                Step::Acquire(_) => {
                    let refuse_after = self.session.clock.at(job.deadline);
                    acquires.push(Part::Acquire(job, refuse_after));
                }
                Step::Inspect(_) | Step::List(..) => shown.push(Part::Show(job)),
            }
        }
        let together = together.into_iter().map(|(lease, jobs)| Part::Renew(jobs, lease));
        if !acquires.is_empty() && self.session.read.elapsed() > READING {
            shown.push(Part::Clock);
        }
        // Those that were refused before may fail again, and no statement behind them is executed.
        let rest = [alone, releases, forced, acquires, shown];
        together.chain(rest.into_iter().flatten()).collect()
    }

    fn statement(&self, part: &Part) -> String {
        let table = self.table;
        match part {
            Part::Release(job) => match &job.step {
                Step::Release(key, grant, keep_until) => {
                    let keep = keep_until.map_or(0, |until| micros(until.since(Moment::now())));
                    table.release(key, *grant, keep)
                }
                other => unreachable!("{other:?} is no release"),
            },
            Part::Renew(jobs, lease) => {
                let grants = jobs.iter().filter_map(|job| match &job.step {
                    Step::Renew(key, grant, _) => Some((&**key, *grant)),
                    _ => None,
                });
                table.renew(grants, *lease)
            }
            Part::Acquire(job, refuse_after) => match &job.step {
                Step::Acquire(ask) => table.acquire(ask, *refuse_after),
                other => unreachable!("{other:?} is no acquire"),
            },
            Part::Insert(key) => table.insert(key),
            Part::Force(job) => job.step.keys().map(|key| table.force(key)).collect(),
            Part::Show(job) => match &job.step {
                Step::List(prefix, after) => table.list(prefix, after),
                step => table.look(step.keys().map(|key| &**key)),
            },
            Part::Clock => table::clock(),
        }
    }

    async fn send(&mut self, statements: &[String]) -> (Vec<Reply>, Option<Failure>) {
        let mut done = Vec::with_capacity(statements.len());
        let sending = script::run(&mut self.session.conn, statements, &mut done);
        let failure = match timeout(self.limit, sending).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(failure::of_step(error)),
            Err(_) => Some(Failure {
                error: StoreError::unknown(self.queue.no_answer()),
                broken: true,
                conflict: false,
            }),
        };
        (done, failure)
    }

    /// Executes one round trip and replies to the completed operations. Returns acquires and renewals that need a look
    /// at their rows.
    async fn round(&mut self, parts: Vec<Part>, before: Option<i64>) -> Result<Left, StoreError> {
        let mut left = Left::default();
        let mut next = parts;
        let (mut rest, failure) = loop {
            let statements: Vec<String> = next.iter().map(|part| self.statement(part)).collect();
            let sent = Instant::now();
            let (replies, failure) = self.send(&statements).await;
            let mut rest = next.into_iter();
            for (part, reply) in rest.by_ref().take(replies.len()).zip(replies) {
                self.replied(part, reply, before, sent, &mut left);
            }
            let Some(failure) = failure else { return Ok(left) };
            let is_of_many = |part: &Part| matches!(part, Part::Renew(jobs, _) if jobs.len() > FEW);
            let of_many = rest.as_slice().first().is_some_and(is_of_many);
            if failure.broken || !of_many || !failure::may_be_of_row(&failure.error) {
                break (rest, failure);
            }
            // A single row may be why all were refused.
            let many = rest.next();
            next = many.into_iter().flat_map(in_parts).chain(rest).collect();
        };
        if !failure.broken {
            // The server executes no statement after a failed one.
            match rest.next() {
                Some(Part::Insert(key)) => return self.not_inserted(&key, rest, &failure).map(|()| left),
                Some(part) => self.failed(part, &failure),
                None => {}
            }
            for part in rest.rev() {
                self.put_back(part);
            }
            return Ok(left);
        }
        rest.for_each(|part| self.failed(part, &failure));
        self.not_looked_at(left, &failure);
        Err(failure.error)
    }

    fn replied(&mut self, part: Part, reply: Reply, before: Option<i64>, sent: Instant, left: &mut Left) {
        match part {
            Part::Release(job) => self.released(job, reply.affected > 0, before),
            Part::Renew(jobs, _) if reply.affected == jobs.len() as u64 => {
                for job in jobs {
                    self.answer(job, Answer::Renewed(Renewal::Renewed));
                }
            }
            Part::Renew(jobs, _) => left
                .renewals
                .extend(jobs.into_iter().map(|job| (job, Some(sent)))),
            Part::Force(job) => self.answer(job, Answer::Forced(reply.affected > 0)),
            Part::Acquire(job, refuse_after) => match (&job.step, reply.affected) {
                (_, 1..) if reply.last_insert_id == 0 => left.granted.push(job),
                (Step::Acquire(ask), 1..) => {
                    let first = reply.last_insert_id;
                    let granted = Granted::with_tokens(first, first + u64::from(ask.tokens) - 1);
                    self.answer(job, Answer::Acquired(AcquireReply::Acquired(granted)));
                }
                _ => left.refused.push((job, refuse_after)),
            },
            Part::Insert(_) => {}
            Part::Show(job) => match shown(&job.step, reply.rows) {
                Some(answer) => self.answer(job, answer),
                None => self.fail(job, &unreadable()),
            },
            Part::Clock => {
                if let Some(now) = number(reply.rows) {
                    self.session.clock.saw(now, sent, Instant::now());
                    self.session.read = Instant::now();
                }
            }
        }
    }

    /// Handles the reply to a release. `before` is the server's time before the release, if its acquire may still take
    /// effect.
    fn released(&self, job: Job, ended: bool, before: Option<i64>) {
        let Step::Release(_, grant, _) = job.step else {
            return;
        };
        let now = before.unwrap_or(0);
        if !ended
            && let Some(until) = self.queue.unknown_until(grant)
            && until >= now
        {
            // A copy that is still in flight would take the lock after this release.
            let rest = duration(until - now) + PAUSE.0;
            return self
                .queue
                .retry(job, rest, "the acquire that it undoes may still take effect");
        }
        self.queue.is_known(grant, now);
        let reply = match ended {
            true => ReleaseReply::Released { receivers: None },
            false => ReleaseReply::NotHeld { repeated: false },
        };
        self.answer(job, Answer::Released(reply));
    }

    /// Reads the rows of the operations that were not completed. Returns the acquires of keys without a row.
    async fn look(&mut self, left: Left) -> Result<Vec<Job>, StoreError> {
        let jobs = left.refused.iter().map(|(job, _)| job);
        let jobs = jobs.chain(left.renewals.iter().map(|(job, _)| job));
        let jobs = jobs.chain(&left.granted);
        let keys: Vec<&str> = jobs.flat_map(|job| job.step.keys()).map(|key| &**key).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let statements = [self.table.look(keys.into_iter()), table::clock()];
        let sent = Instant::now();
        let (replies, failure) = self.send(&statements).await;
        let read = self.read(replies);
        let (rows, now) = match (read, failure) {
            (Some(read), None) => read,
            (_, failure) => {
                let failure = failure.unwrap_or_else(|| Failure {
                    error: unreadable(),
                    broken: true,
                    conflict: false,
                });
                self.not_looked_at(left, &failure);
                return match failure.broken {
                    true => Err(failure.error),
                    false => Ok(Vec::new()),
                };
            }
        };
        self.session.clock.saw(now, sent, Instant::now());
        self.renewals_seen(left.renewals, &rows);
        self.grants_seen(left.granted, &rows);
        Ok(self.refused_seen(left.refused, &rows))
    }

    /// Replies to renewals by the rows of their locks, or repeats them.
    fn renewals_seen(&self, renewals: Vec<(Job, Option<Instant>)>, rows: &Rows) {
        for (job, sent) in renewals {
            let Step::Renew(key, grant, lease) = &job.step else {
                continue;
            };
            let row = rows.get(key.as_bytes());
            let row = row.filter(|row| row.is_held() && !row.kept && row.holder == grant.to_string());
            let renewal = match (row, sent) {
                // The remaining lease shows that this renewal took effect.
                (Some(row), Some(sent))
                    if duration(row.until - row.now) + sent.elapsed() >= duration(*lease) =>
                {
                    Renewal::Renewed
                }
                // Another statement may have locked the row for a moment.
                (Some(_), _) if job.looks < LOOKS && Instant::now() + 2 * PAUSE.1 < job.deadline => {
                    let after = pause(job.looks);
                    let why = "another transaction has the row of the lock locked";
                    self.queue.retry(job, after, why);
                    continue;
                }
                (Some(_), _) => Renewal::Held,
                (None, _) => Renewal::Gone,
            };
            self.answer(job, Answer::Renewed(renewal));
        }
    }

    /// Replies to acquires that were granted, with the tokens in the rows of their locks.
    fn grants_seen(&self, granted: Vec<Job>, rows: &Rows) {
        for job in granted {
            let Step::Acquire(ask) = &job.step else { continue };
            let row = rows.get(ask.key.as_bytes());
            match row.filter(|row| row.holder == ask.grant.to_string()) {
                Some(row) => {
                    let granted = Granted::with_tokens(row.fence, row.fence + u64::from(ask.tokens) - 1);
                    self.answer(job, Answer::Acquired(AcquireReply::Acquired(granted)));
                }
                None => self.fail(
                    job,
                    &StoreError::unknown("the grant ended before its token was read"),
                ),
            }
        }
    }

    /// Replies to acquires that were not granted, with the holders in the rows of their locks, or repeats them. Returns those
    /// of keys without a row.
    fn refused_seen(&self, refused: Vec<(Job, i64)>, rows: &Rows) -> Vec<Job> {
        let mut missing = Vec::new();
        for (job, refuse_after) in refused {
            let row = job.step.keys().find_map(|key| rows.get(key.as_bytes()));
            match row {
                None => missing.push(job),
                Some(row) if row.is_held() => {
                    let remaining = duration(row.until - row.now);
                    self.answer(job, Answer::Acquired(AcquireReply::busy(Some(remaining))));
                }
                Some(row) if row.now > refuse_after => {
                    let why = "the request came too late, by the server's clock, and was refused";
                    self.queue.retry(job, Duration::ZERO, why);
                }
                Some(_) => self.look_again(job),
            }
        }
        missing
    }

    fn read(&self, replies: Vec<Reply>) -> Option<(Rows, i64)> {
        let [rows, now]: [Reply; 2] = replies.try_into().ok()?;
        let rows = rows.rows.into_iter().map(|row| Found::of(row).ok());
        let rows = rows.map(|row| row.map(|row| (row.key.clone(), row)));
        Some((rows.collect::<Option<_>>()?, number(now.rows)?))
    }

    /// Fails the operations to which the server has replied, but whose rows could not be read: acquires that were refused,
    /// and grants that were acquired or may have been renewed.
    fn not_looked_at(&self, left: Left, failure: &Failure) {
        for (job, refuse_after) in left.refused {
            self.failed(Part::Acquire(job, refuse_after), &not_granted(failure));
        }
        let mut unknown = failure.error.clone();
        unknown.outcome = Outcome::Unknown;
        let renewals = left.renewals.into_iter().map(|(job, _)| job);
        for job in renewals.chain(left.granted) {
            self.fail(job, &unknown);
        }
    }

    /// Handles a statement that failed or whose outcome is unknown.
    fn failed(&self, part: Part, failure: &Failure) {
        let (jobs, refuse_after) = match part {
            Part::Release(job) | Part::Force(job) | Part::Show(job) => (vec![job], 0),
            Part::Renew(jobs, _) => (jobs, 0),
            Part::Acquire(job, refuse_after) => (vec![job], refuse_after),
            Part::Insert(_) | Part::Clock => return,
        };
        let several = jobs.len() > 1;
        for mut job in jobs {
            if failure.conflict && job.looks < LOOKS {
                // A single row may be why the other grants were not renewed.
                job.alone |= several;
                let after = pause(job.looks);
                self.queue.retry(job, after, &failure.error.message);
                continue;
            }
            if several && !failure.broken && failure::may_be_of_row(&failure.error) {
                job.alone = true;
                self.queue.retry(job, Duration::ZERO, &failure.error.message);
                continue;
            }
            if failure.error.outcome == Outcome::Unknown
                && refuse_after > 0
                && let Step::Acquire(ask) = &job.step
            {
                self.queue.is_unknown(ask.grant, refuse_after);
            }
            self.fail(job, &failure.error);
        }
    }

    /// Handles a row that could not be created: its acquire fails, and the other operations are sent again.
    fn not_inserted(
        &self,
        key: &str,
        rest: impl DoubleEndedIterator<Item = Part>,
        failure: &Failure,
    ) -> Broken {
        for part in rest.rev() {
            match &part {
                Part::Acquire(job, _) if job.step.keys().any(|of| **of == *key) => self.failed(part, failure),
                _ => self.put_back(part),
            }
        }
        Ok(())
    }

    /// Puts operations that were not executed back into the queue.
    fn put_back(&self, part: Part) {
        match part {
            Part::Release(job) | Part::Force(job) | Part::Show(job) | Part::Acquire(job, _) => {
                self.queue.put_back(job);
            }
            Part::Renew(jobs, _) => jobs.into_iter().rev().for_each(|job| self.queue.put_back(job)),
            Part::Insert(_) | Part::Clock => {}
        }
    }

    /// Repeats an acquire that conflicted with other transactions, which may be over by now.
    fn look_again(&self, job: Job) {
        if job.looks < LOOKS {
            let after = pause(job.looks).mul_f64(0.25 + fastrand::f64());
            return self
                .queue
                .retry(job, after, "other transactions were always first");
        }
        let busy = Busy::new(None).again(PAUSE.1);
        self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
    }

    fn answer(&self, job: Job, answer: Answer) {
        self.queue.answer(job, Ok(answer));
    }

    fn fail(&self, job: Job, error: &StoreError) {
        self.queue.answer(job, Err(error.clone()));
    }
}

/// Renewals in parts of a few each.
fn in_parts(part: Part) -> Vec<Part> {
    let Part::Renew(mut jobs, lease) = part else {
        return vec![part];
    };
    let mut parts = Vec::new();
    while !jobs.is_empty() {
        let few = jobs.drain(..FEW.min(jobs.len())).collect();
        parts.push(Part::Renew(few, lease));
    }
    parts
}

/// Marks the failure as not done, for an acquire that was already refused.
fn not_granted(failure: &Failure) -> Failure {
    let mut error = failure.error.clone();
    error.outcome = Outcome::NotDone;
    Failure { error, ..*failure }
}

/// The answer to a step that reads holders; `None` if a row cannot be read.
fn shown(step: &Step, rows: Vec<Row>) -> Option<Answer> {
    let Step::List(..) = step else {
        return holders(rows).map(Answer::Holders);
    };
    let last = rows.get(PAGE - 1).and_then(row::bytes);
    let holders = holders(rows)?;
    Some(Answer::Page(Page { holders, last }))
}

fn holders(rows: Vec<Row>) -> Option<Vec<(LockKey, Holder)>> {
    let found = rows.into_iter().map(|row| Found::of(row).ok());
    let found = found.collect::<Option<Vec<Found>>>()?;
    let held = found.into_iter().filter(Found::is_held);
    let named = held.filter_map(|row| {
        let key = LockKey::raw(String::from_utf8(row.key.clone()).ok()?);
        Some((key, row.shown()?))
    });
    Some(named.collect())
}

fn unreadable() -> StoreError {
    let mut error = StoreError::unknown("the server answered with a row that cannot be read");
    error.reason = Reason::KeyTaken("a row that cannot be read".to_owned());
    error
}

/// The pause before an operation is repeated once more.
fn pause(looks: u32) -> Duration {
    (PAUSE.0 * 2_u32.saturating_pow(looks)).min(PAUSE.1)
}

#[cfg(test)]
mod tests {
    use dlock::store::{GrantId, Kind};

    use super::*;
    use crate::connect::LEAST_PACKET;
    use crate::step::{Ask, LONGEST_KEY};

    #[test]
    fn statements_of_the_longest_key_fit_into_the_least_packet() {
        let table = Table::new(&format!("{0}.{0}", "t".repeat(24))).unwrap();
        let key: Arc<str> = "k".repeat(LONGEST_KEY).into();
        let (grant, most) = (GrantId::from_parts(u128::MAX, u64::MAX), i64::MAX);
        let ask = Ask {
            key: key.clone(),
            grant,
            kind: Kind::Fenced,
            lease: most,
            tokens: u32::MAX,
        };
        let acquire = format!("{};\n{};\n", table.insert(&key), table.acquire(&ask, most));
        let renew = table.renew([(&*key, grant)].into_iter(), most);
        let list = table.list(&key, key.as_bytes());
        let statements = [acquire, renew, table.release(&key, grant, most), list];
        let longest = statements.iter().map(String::len).max().unwrap();
        let bytes = most_bytes(&Step::Acquire(ask));
        assert!(longest <= bytes && bytes <= LEAST_PACKET, "{longest} {bytes}");
        assert!(table.schema.len() <= LEAST_PACKET);
    }
}
