//! Steps as the statements of one round trip, and what their replies mean.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::store::queue::Step as _;
use dlock::store::{AcquireReply, Busy, Granted, Holder, Outcome, Reason, ReleaseReply, Renewal, StoreError};
use mysql_async::Row;
use tokio::time::{Instant, timeout_at};

use crate::connect::Session;
use crate::failure::{self, Failure};
use crate::row::{Found, number};
use crate::script::{self, Reply};
use crate::step::{Answer, Job, Queue, Step, duration};
use crate::table::{self, Table};

/// The most locks that one round trip acquires, and releases.
const MOST: usize = 64;
/// The most grants that one renews: other steps are not to wait for thousands of them.
const MOST_RENEWALS: usize = 200;
/// How often a step that others came in the way of is sent again.
const LOOKS: u32 = 8;
/// The pause before that, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// A reading of the server's clock is taken along when the one before is older.
const READING: Duration = Duration::from_secs(1);

/// What is left of the room in a round trip.
#[derive(Debug, Default)]
pub(crate) struct Room {
    acquires: usize,
    releases: usize,
    renewals: usize,
    others: usize,
}

impl Room {
    /// Whether this step goes along, which is counted then.
    pub(crate) fn has(&mut self, job: &Job) -> bool {
        let (taken, most) = match &job.step {
            Step::Acquire(_) => (&mut self.acquires, MOST),
            Step::Release(..) => (&mut self.releases, MOST),
            Step::Renew(..) => (&mut self.renewals, MOST_RENEWALS),
            Step::Inspect(_) | Step::List(_) | Step::Force(_) => (&mut self.others, MOST),
        };
        let has = *taken < most;
        *taken += usize::from(has);
        has
    }
}

/// One statement, and the steps that it is for.
#[derive(Debug)]
enum Part {
    Release(Job),
    /// Of one lease.
    Renew(Vec<Job>, i64),
    Force(Job),
    /// With the server's time after which it takes no effect.
    Acquire(Job, i64),
    /// Makes the row for an acquire that follows.
    Insert(Arc<str>),
    /// Holders to show.
    Show(Job),
    Clock,
}

/// Steps on one connection.
pub(crate) struct Performing<'a> {
    pub(crate) session: &'a mut Session,
    pub(crate) queue: &'a Queue,
    pub(crate) table: &'a Table,
    /// When the connection is given up unless everything is answered.
    pub(crate) deadline: Instant,
}

/// What a round trip left over.
#[derive(Debug, Default)]
struct Left {
    /// Acquires that were not granted, with their times.
    refused: Vec<(Job, i64)>,
    /// Renewals of which some grants were not found, and when they were sent.
    renewals: Vec<(Job, Instant)>,
}

/// Why a connection is of no use any more.
type Broken = Result<(), StoreError>;

impl Performing<'_> {
    /// Sends the steps, and answers each of them.
    pub(crate) async fn perform(mut self, jobs: Vec<Job>) -> Broken {
        let before = match self.time_before(&jobs).await {
            Ok(before) => before,
            Err(error) => {
                jobs.into_iter().rev().for_each(|job| self.queue.put_back(job));
                return Err(error);
            }
        };
        let parts = self.parts(jobs);
        let left = self.round(parts, before).await?;
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
            // Another process had it first, or has just removed the row again.
            self.look_again(job);
        }
        Ok(())
    }

    /// The server's time before the steps, where one of them releases an acquire that may still take effect.
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

    /// Those with rows come last.
    fn parts(&self, jobs: Vec<Job>) -> Vec<Part> {
        let (mut releases, mut renewals, mut forced, mut acquires, mut shown) =
            (vec![], vec![], vec![], vec![], vec![]);
        let mut together: HashMap<i64, Vec<Job>> = HashMap::new();
        for job in jobs {
            match &job.step {
                Step::Release(..) => releases.push(Part::Release(job)),
                Step::Renew(_, _, lease) if job.alone => {
                    let lease = *lease;
                    renewals.push(Part::Renew(vec![job], lease));
                }
                Step::Renew(_, _, lease) => together.entry(*lease).or_default().push(job),
                Step::Force(_) => forced.push(Part::Force(job)),
                Step::Acquire(_) => {
                    let refuse_after = self.session.clock.at(job.deadline);
                    acquires.push(Part::Acquire(job, refuse_after));
                }
                Step::Inspect(_) | Step::List(_) => shown.push(Part::Show(job)),
            }
        }
        renewals.extend(together.into_iter().map(|(lease, jobs)| Part::Renew(jobs, lease)));
        if !acquires.is_empty() && self.session.read.elapsed() > READING {
            shown.push(Part::Clock);
        }
        [releases, renewals, forced, acquires, shown]
            .into_iter()
            .flatten()
            .collect()
    }

    fn statement(&self, part: &Part) -> String {
        let table = self.table;
        match part {
            Part::Release(job) => match &job.step {
                Step::Release(key, grant, keep) => table.release(key, *grant, *keep),
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
                Step::List(prefix) => table.list(prefix),
                step => table.look(step.keys().map(|key| &**key)),
            },
            Part::Clock => table::clock(),
        }
    }

    async fn send(&mut self, statements: &[String]) -> (Vec<Reply>, Option<Failure>) {
        let mut done = Vec::with_capacity(statements.len());
        let sending = script::run(&mut self.session.conn, statements, &mut done);
        let failure = match timeout_at(self.deadline, sending).await {
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

    /// One round trip. What it brings is answered; acquires and renewals that need a look come back.
    async fn round(&mut self, parts: Vec<Part>, before: Option<i64>) -> Result<Left, StoreError> {
        let statements: Vec<String> = parts.iter().map(|part| self.statement(part)).collect();
        let sent = Instant::now();
        let (replies, failure) = self.send(&statements).await;
        let mut left = Left::default();
        let mut rest = parts.into_iter();
        for (part, reply) in rest.by_ref().take(replies.len()).zip(replies) {
            self.replied(part, reply, before, sent, &mut left);
        }
        let Some(failure) = failure else { return Ok(left) };
        if !failure.broken {
            // The server executes nothing behind the one that failed.
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
        // Certainly answered, and not looked at any more.
        for (job, refuse_after) in left.refused {
            self.failed(Part::Acquire(job, refuse_after), &not_granted(&failure));
        }
        for (job, _) in left.renewals {
            self.fail(job, &failure.error);
        }
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
            Part::Renew(jobs, _) => left.renewals.extend(jobs.into_iter().map(|job| (job, sent))),
            Part::Force(job) => self.answer(job, Answer::Forced(reply.affected > 0)),
            Part::Acquire(job, refuse_after) => match (&job.step, reply.affected) {
                (Step::Acquire(ask), 1..) => {
                    let first = reply.last_insert_id;
                    let granted = Granted::with_tokens(first, first + u64::from(ask.tokens) - 1);
                    self.answer(job, Answer::Acquired(AcquireReply::Acquired(granted)));
                }
                _ => left.refused.push((job, refuse_after)),
            },
            Part::Insert(_) => {}
            Part::Show(job) => match holders(reply.rows) {
                Some(holders) => self.answer(job, Answer::Holders(holders)),
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

    /// `before`: the server's time before the release, where its acquire may still take effect.
    fn released(&self, job: Job, ended: bool, before: Option<i64>) {
        let Step::Release(_, grant, _) = job.step else {
            return;
        };
        let now = before.unwrap_or(0);
        if !ended
            && let Some(until) = self.queue.unknown_until(grant)
            && until >= now
        {
            // A copy that is still on its way would take the lock after this release.
            let rest = duration(until - now) + PAUSE.0;
            return self.again(job, rest, "the acquire that it undoes may still take effect");
        }
        self.queue.is_known(grant, now);
        let reply = match ended {
            true => ReleaseReply::Released { receivers: None },
            false => ReleaseReply::NotHeld { repeated: false },
        };
        self.answer(job, Answer::Released(reply));
    }

    /// Looks at the rows of what was not done; returns the acquires of keys without a row.
    async fn look(&mut self, left: Left) -> Result<Vec<Job>, StoreError> {
        let jobs = left.refused.iter().map(|(job, _)| job);
        let jobs = jobs.chain(left.renewals.iter().map(|(job, _)| job));
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
                return self.not_looked_at(left, failure);
            }
        };
        self.session.clock.saw(now, sent, Instant::now());
        for (job, sent) in left.renewals {
            let Step::Renew(key, grant, lease) = &job.step else {
                continue;
            };
            let row = rows.get(key.as_bytes());
            let row = row.filter(|row| row.is_held() && !row.kept && row.holder == grant.to_string());
            let renewal = match row {
                // What is left of a lease that this step gave.
                Some(row) if duration(row.until - row.now) + sent.elapsed() >= duration(*lease) => {
                    Renewal::Renewed
                }
                Some(_) => Renewal::Held,
                None => Renewal::Gone,
            };
            self.answer(job, Answer::Renewed(renewal));
        }
        let mut missing = Vec::new();
        for (job, refuse_after) in left.refused {
            let row = job.step.keys().find_map(|key| rows.get(key.as_bytes()));
            match row {
                None => missing.push(job),
                Some(row) if row.is_held() => {
                    let remaining = duration(row.until - row.now);
                    self.answer(job, Answer::Acquired(AcquireReply::busy(Some(remaining))));
                }
                Some(row) if row.now > refuse_after => {
                    let why = "the request came too late, by the server's clock, and was refused";
                    self.again(job, Duration::ZERO, why);
                }
                Some(_) => self.look_again(job),
            }
        }
        Ok(missing)
    }

    fn read(&self, replies: Vec<Reply>) -> Option<(HashMap<Vec<u8>, Found>, i64)> {
        let [rows, now]: [Reply; 2] = replies.try_into().ok()?;
        let rows = rows.rows.into_iter().map(|row| Found::of(row).ok());
        let rows = rows.map(|row| row.map(|row| (row.key.clone(), row)));
        Some((rows.collect::<Option<_>>()?, number(now.rows)?))
    }

    /// The acquires were refused, the grants perhaps renewed.
    fn not_looked_at(&self, left: Left, failure: Failure) -> Result<Vec<Job>, StoreError> {
        for (job, refuse_after) in left.refused {
            self.failed(Part::Acquire(job, refuse_after), &not_granted(&failure));
        }
        for (job, _) in left.renewals {
            self.fail(job, &failure.error);
        }
        match failure.broken {
            true => Err(failure.error),
            false => Ok(Vec::new()),
        }
    }

    /// The statement of this part failed, or its outcome is unknown.
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
                // One row may be why the others were not renewed.
                job.alone |= several;
                let after = pause(job.looks);
                self.again(job, after, &failure.error.message);
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

    /// The row of this key could not be made: its acquire fails, the others are sent again.
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

    /// It was not executed.
    fn put_back(&self, part: Part) {
        match part {
            Part::Release(job) | Part::Force(job) | Part::Show(job) | Part::Acquire(job, _) => {
                self.queue.put_back(job);
            }
            Part::Renew(jobs, _) => jobs.into_iter().rev().for_each(|job| self.queue.put_back(job)),
            Part::Insert(_) | Part::Clock => {}
        }
    }

    /// A step was not carried out, and will be after a while; it fails where it has no time for that.
    fn again(&self, job: Job, after: Duration, why: &str) {
        if Instant::now() + after >= job.deadline {
            return self.fail(job, &StoreError::not_done(Reason::Unreachable, why));
        }
        self.queue.again(job, after);
    }

    /// The same for an acquire that others came in the way of, who may be gone by now.
    fn look_again(&self, job: Job) {
        if job.looks < LOOKS {
            let after = pause(job.looks).mul_f64(0.25 + fastrand::f64());
            return self.again(job, after, "other transactions were always first");
        }
        let busy = Busy::new(None).again(PAUSE.1);
        self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
    }

    fn answer(&self, job: Job, answer: Answer) {
        self.queue.done(&job.step);
        job.answer(Ok(answer));
    }

    fn fail(&self, job: Job, error: &StoreError) {
        self.queue.done(&job.step);
        job.answer(Err(error.clone()));
    }
}

/// The same failure for an acquire that was refused before: it certainly was not done.
fn not_granted(failure: &Failure) -> Failure {
    let mut error = failure.error.clone();
    error.outcome = Outcome::NotDone;
    Failure { error, ..*failure }
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

/// Before a step is sent again that was so often.
fn pause(looks: u32) -> Duration {
    (PAUSE.0 * 2_u32.saturating_pow(looks)).min(PAUSE.1)
}
