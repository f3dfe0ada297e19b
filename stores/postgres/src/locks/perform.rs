//! Executes the operations of a wave, and interprets the replies.

mod permits;

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{
    AcquireAllReply, AcquireReply, Busy, GrantId, Granted, Holder, Kind, Outcome, Reason, ReleaseReply,
    Renewal, StoreError,
};
use futures_util::future::join_all;
use futures_util::join;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use dlock::store::queue::Step as _;

use self::permits::Short;
use super::job::{Answer, Ask, Job, Queue, Step, is_permit, kind_of, other_lock};
use super::pins::Pins;
use super::statements::{Statements, column, one};
use super::table::{Sql, bucket};
use super::transaction::{holder, pinned};
use super::wave::Wave;
use crate::failure::{self, Failure};

/// How often a request tries a row that is locked before it treats the lock as held.
const LOOKS: u32 = 7;
/// The limit for readers, unless a transaction is known to hold the lock: other readers lock the row for a moment each.
const LOOKS_OF_READER: u32 = 17;
/// The shortest and the longest pause before a locked row is tried again.
const PAUSE: (Duration, Duration) = (Duration::from_micros(250), Duration::from_millis(50));

/// A waiter for a fair lock must ask again within this time, to keep its position.
const AGAIN: Duration = Duration::from_millis(1500);

/// Executes one wave on one connection.
pub(crate) struct Performing<'a> {
    pub(crate) on: &'a Statements,
    pub(crate) queue: &'a Queue,
    pub(crate) pins: &'a Pins,
    /// Whether releases notify through the server.
    pub(crate) tell: bool,
    /// When to give up the connection if replies are missing.
    pub(crate) deadline: Instant,
    /// The error message for operations without a reply.
    pub(crate) silence: &'a str,
}

/// A parameter of a statement.
type Value<'a> = &'a (dyn tokio_postgres::types::ToSql + Sync);

/// An error means that the connection is unusable.
type Broken = Result<(), StoreError>;

impl Performing<'_> {
    /// Sends the statements of the wave in a pipeline, and replies to its operations as the replies arrive.
    pub(crate) async fn perform(&self, wave: Wave) -> Broken {
        let Wave {
            releases,
            renewals,
            acquires,
            others,
        } = wave;
        let (fair_releases, releases): (Vec<Job>, _) =
            releases.into_iter().partition(|job| job.step.is_fair());
        let (permit_releases, releases): (Vec<Job>, _) =
            releases.into_iter().partition(|job| job.step.is_of_permits());
        let (permit_renewals, renewals): (Vec<Job>, _) =
            renewals.into_iter().partition(|job| job.step.is_of_permits());
        let (permit_acquires, acquires): (Vec<Job>, _) =
            acquires.into_iter().partition(|job| job.step.is_of_permits());
        let (leaves, releases) = split(releases);
        let (extensions, renewals) = split(renewals);
        let (fair_acquires, acquires): (Vec<Job>, _) =
            acquires.into_iter().partition(|job| job.step.is_fair());
        let (reads, acquires) = split(acquires);
        // In this order, because acquires wait for the disk.
        let ended = join!(
            self.release(
                if releases.len() == 1 {
                    Sql::LoneRelease
                } else {
                    Sql::Release
                },
                releases
            ),
            self.release(Sql::Leave, leaves),
            self.release(Sql::FairRelease, fair_releases),
            self.release(Sql::PermitRelease, permit_releases),
            self.renew_permits(permit_renewals),
            self.renew(Sql::Renew, renewals),
            self.renew(Sql::Extend, extensions),
            join_all(others.into_iter().map(|job| self.other(job))),
            self.acquire(Sql::Permit, permit_acquires),
            self.acquire(Sql::Fair, fair_acquires),
            self.acquire(Sql::Acquire, reads),
            self.acquire(
                if acquires.len() == 1 {
                    Sql::Lone
                } else {
                    Sql::Plain
                },
                acquires
            ),
        );
        let (
            release,
            leave,
            fair_release,
            returned,
            kept,
            renew,
            extend,
            others,
            permits,
            fair,
            read,
            acquire,
        ) = ended;
        let others = others.into_iter().collect::<Broken>();
        let released = release.and(leave).and(fair_release).and(returned);
        let renewed = renew.and(extend).and(kept);
        let acquired = permits.and(fair).and(read).and(acquire);
        released.and(renewed).and(others).and(acquired)
    }

    async fn ask(
        &self,
        sql: Sql,
        values: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<Row>, Failure> {
        match timeout_at(self.deadline, self.on.ask(sql, values)).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::Broken(StoreError::unknown(self.silence))),
        }
    }

    fn answer(&self, job: Job, answer: Answer) {
        self.queue.done(&job.step);
        job.answer(Ok(answer));
    }

    fn fail(&self, job: Job, error: &StoreError) {
        self.queue.done(&job.step);
        job.answer(Err(error.clone()));
    }

    /// Handles a statement that failed: repeats or fails its operations.
    fn failed(&self, jobs: Vec<Job>, failure: Failure, refuse_after: &[i64]) -> Broken {
        let several = jobs.len() > 1;
        let (error, broken) = match failure {
            Failure::Answered(error) => (error, false),
            Failure::Broken(error) => (error, true),
        };
        for job in jobs {
            let Some(job) = self.repeated(job, several, &error) else {
                continue;
            };
            if error.outcome == Outcome::Unknown {
                let until = refuse_after.iter().max().copied();
                for ask in job.step.grants() {
                    self.queue.is_unknown(ask.grant, until.unwrap_or(i64::MAX));
                }
            }
            self.fail(job, &error);
        }
        if broken { Err(error) } else { Ok(()) }
    }

    /// Repeats an operation if its statement failed because of another transaction, or possibly because of another
    /// operation in the same statement; otherwise returns it.
    fn repeated(&self, mut job: Job, several: bool, error: &StoreError) -> Option<Job> {
        if error.outcome == Outcome::NotDone
            && failure::is_conflict(error)
            && job.looks < most_looks(&job.step)
        {
            let after = pause(job.looks);
            self.again(job, after, &error.message);
            return None;
        }
        if error.outcome == Outcome::NotDone && several && failure::is_of_data(error) {
            job.alone = true;
            self.again(job, Duration::ZERO, &error.message);
            return None;
        }
        Some(job)
    }

    /// Repeats, after a pause, an operation that was not carried out; fails it if its deadline is earlier.
    fn again(&self, job: Job, after: Duration, why: &str) {
        if Instant::now() + after >= job.deadline {
            let error = StoreError::not_done(Reason::Unreachable, why);
            return self.fail(job, &error);
        }
        self.queue.again(job, after);
    }

    /// Whether to try an operation again that found a locked row, rather than to answer it so.
    fn may_look_again(&self, job: &Job) -> bool {
        job.looks < most_looks(&job.step) && Instant::now() + 2 * PAUSE.1 < job.deadline
    }

    /// Repeats an operation because the row of its key is locked.
    fn look_again(&self, job: Job) {
        let after = match job.step.is_shared() {
            // Random, so that readers do not retry together.
            true => pause(job.looks).mul_f64(0.25 + fastrand::f64()),
            false => pause(job.looks),
        };
        self.again(
            job,
            after,
            "an open transaction of another session has the row of the lock locked",
        );
    }

    async fn acquire(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
        if jobs.is_empty() {
            return Ok(());
        }
        let missing = self.acquire_rows(sql, jobs).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let keys: Vec<&str> = missing
            .iter()
            .flat_map(|job| job.step.keys())
            .map(|key| &**key)
            .collect();
        if let Err(failure) = self.ask(Sql::Insert, &[&keys]).await {
            return self.failed_before(missing, failure);
        }
        for job in self.acquire_rows(sql, missing).await? {
            // Another process has just removed the rows again.
            self.look_again(job);
        }
        Ok(())
    }

    /// Handles a failure before the acquires were sent; at most rows of available locks were created.
    fn failed_before(&self, jobs: Vec<Job>, failure: Failure) -> Broken {
        let (mut error, broken) = match failure {
            Failure::Answered(error) => (error, false),
            Failure::Broken(error) => (error, true),
        };
        let told = error.clone();
        error.outcome = Outcome::NotDone;
        let several = jobs.len() > 1;
        for job in jobs {
            if let Some(job) = self.repeated(job, several, &error) {
                self.fail(job, &error);
            }
        }
        if broken { Err(told) } else { Ok(()) }
    }

    /// Acquires locks whose rows exist, and returns the requests without a row.
    async fn acquire_rows(&self, sql: Sql, jobs: Vec<Job>) -> Result<Vec<Job>, StoreError> {
        let asks: Vec<(&Ask, Instant)> = jobs
            .iter()
            .flat_map(|job| job.step.grants().iter().map(|ask| (ask, job.deadline)))
            .collect();
        let Sent {
            rows,
            refuse_after,
            at,
        } = self.send(sql, &asks, false).await;
        let (mut missing, mut locked, mut unsure, mut ended) = (Vec::new(), Vec::new(), Vec::new(), Ok(()));
        let rows = match rows {
            Ok(rows) if rows.len() == jobs.len() => rows,
            Ok(_) => return self.failed(jobs, wrong_number(), &refuse_after).map(|()| missing),
            Err(failure) => return self.failed(jobs, failure, &refuse_after).map(|()| missing),
        };
        for (job, row) in jobs.into_iter().zip(&rows) {
            match Look::of(row, &job.step.grants()[0]) {
                Ok(look) => {
                    self.on.saw(look.now, at);
                    match look.found {
                        Found::Granted(granted) => {
                            self.not_pinned(&job);
                            self.answer(job, Answer::Acquired(AcquireReply::Acquired(granted)))
                        }
                        Found::Held(remaining) => {
                            self.not_pinned(&job);
                            let mut busy = Busy::new(Some(remaining));
                            busy.again = job.step.is_fair().then_some(AGAIN);
                            self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
                        }
                        Found::Short(short) => self.short(job, short).await,
                        Found::Other(held) => {
                            self.not_pinned(&job);
                            self.fail(job, &taken(held));
                        }
                        Found::Missing => missing.push(job),
                        Found::Late => self.again(job, Duration::ZERO, TOO_LATE),
                        Found::Contended if job.looks < most_looks(&job.step) => self.look_again(job),
                        Found::Contended => {
                            let busy = Busy::new(None).again(PAUSE.1);
                            self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
                        }
                        Found::Open | Found::Locked if job.looks == LOOKS && self.looks_again(&job) => {
                            unsure.push(job);
                        }
                        Found::Open | Found::Locked if self.looks_again(&job) => self.look_again(job),
                        Found::Open | Found::Locked => locked.push(job),
                    }
                }
                Err(failure) => ended = ended.and(self.failed(vec![job], failure, &refuse_after)),
            }
        }
        for job in unsure {
            let is_held = match job.step.keys().next() {
                Some(key) => self.pids(key).await.is_some(),
                None => false,
            };
            match is_held {
                true => locked.push(job),
                false => self.look_again(job),
            }
        }
        for job in locked {
            let again = match job.step.keys().next() {
                Some(key) => self.pinned(key).await,
                None => Duration::ZERO,
            };
            let busy = Busy::new(None).again(again);
            self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
        }
        match ended {
            Ok(()) => Ok(missing),
            Err(error) => self
                .failed_before(missing, Failure::Broken(error))
                .map(|()| Vec::new()),
        }
    }

    /// Whether to try a locked row again before reporting it: it may be locked only for a moment.
    fn looks_again(&self, job: &Job) -> bool {
        let now = Instant::now();
        job.looks < most_looks(&job.step) && !job.step.keys().any(|key| self.pins.is_known(key, now))
    }

    /// Records that an open transaction has locked the row, and finds out which one. Returns when a waiter must try
    /// again.
    async fn pinned(&self, key: &Arc<str>) -> Duration {
        let (again, ask) = self.pins.found(key, Instant::now());
        if ask {
            let by = holder(self.pids(key).await.as_deref());
            self.pins.named(key, format!("{by} it"));
        }
        again
    }

    /// Returns the server processes whose transactions hold the lock.
    async fn pids(&self, key: &Arc<str>) -> Option<String> {
        let rows = self.ask(Sql::Pins, &[&&**key]).await.ok()?;
        column::<Option<String>>(one(&rows).ok()?, "pids").ok()?
    }

    fn not_pinned(&self, job: &Job) {
        job.step.keys().for_each(|key| self.pins.gone(key));
    }

    /// Sends acquires: each on its own, or `all` of them or none.
    async fn send(&self, sql: Sql, asks: &[(&Ask, Instant)], all: bool) -> Sent {
        let keys: Vec<&str> = asks.iter().map(|(ask, _)| &*ask.key).collect();
        let holders: Vec<String> = asks.iter().map(|(ask, _)| ask.grant.to_string()).collect();
        let kinds = || -> Vec<String> { asks.iter().map(|(ask, _)| ask.kind.to_string()).collect() };
        let leases: Vec<i64> = asks.iter().map(|(ask, _)| ask.lease).collect();
        let tokens: Vec<i32> = asks.iter().map(|(ask, _)| ask.tokens).collect();
        let refuse_after: Vec<i64> = asks
            .iter()
            .map(|(_, deadline)| self.on.refuse_after(*deadline))
            .collect();
        let at = Instant::now();
        let rows = match sql {
            Sql::Fair => {
                let waits: Vec<bool> = asks.iter().map(|(ask, _)| ask.waits).collect();
                let asked: Vec<bool> = asks.iter().map(|(ask, _)| ask.asked).collect();
                self.ask(
                    sql,
                    &[&keys, &holders, &leases, &tokens, &refuse_after, &waits, &asked],
                )
                .await
            }
            Sql::Permit => {
                let values = [&keys as Value<'_>, &holders, &leases, &tokens, &refuse_after];
                self.send_permits(asks, values).await
            }
            Sql::Plain | Sql::Lone => {
                let kinds = kinds();
                self.ask(sql, &[&keys, &holders, &kinds, &leases, &tokens, &refuse_after])
                    .await
            }
            _ => {
                let kinds = kinds();
                let all = if all { asks.len() as i64 } else { 0 };
                let nested = |ask: &Ask| ask.nested_in.map(|grant| grant.to_string()).unwrap_or_default();
                let nested: Vec<String> = asks.iter().map(|(ask, _)| nested(ask)).collect();
                self.ask(
                    sql,
                    &[
                        &keys,
                        &holders,
                        &kinds,
                        &leases,
                        &tokens,
                        &refuse_after,
                        &all,
                        &nested,
                    ],
                )
                .await
            }
        };
        Sent {
            rows,
            refuse_after,
            at,
        }
    }

    async fn release(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
        if jobs.is_empty() {
            return Ok(());
        }
        let (mut keys, mut holders, mut keeps, mut buckets) = (vec![], vec![], vec![], vec![]);
        for job in &jobs {
            if let Step::Release(key, grant, keep)
            | Step::Leave(key, grant, keep)
            | Step::FairRelease(key, grant, keep)
            | Step::PermitRelease(key, grant, keep) = &job.step
            {
                keys.push(&**key);
                holders.push(grant.to_string());
                keeps.push(*keep);
                buckets.push(bucket(key));
            }
        }
        let sent = Instant::now();
        let rows = self
            .ask(sql, &[&keys, &holders, &keeps, &buckets, &self.tell])
            .await;
        let rows = match rows {
            Ok(rows) if rows.len() == jobs.len() => rows,
            Ok(_) => return self.failed(jobs, wrong_number(), &[]),
            Err(failure) => return self.failed(jobs, failure, &[]),
        };
        let mut ended = Ok(());
        for (job, row) in jobs.into_iter().zip(&rows) {
            match Ending::of(row) {
                Ok(ending) => {
                    self.on.saw(ending.now, sent);
                    self.released(job, &ending);
                }
                Err(failure) => ended = ended.and(self.failed(vec![job], failure, &[])),
            }
        }
        ended
    }

    fn released(&self, job: Job, ending: &Ending) {
        let (Step::Release(_, grant, _)
        | Step::Leave(_, grant, _)
        | Step::FairRelease(_, grant, _)
        | Step::PermitRelease(_, grant, _)) = job.step
        else {
            return;
        };
        if ending.ended {
            self.queue.is_known(grant, ending.now);
            return self.answer(job, Answer::Released(ReleaseReply::Released { receivers: None }));
        }
        let unknown = self.queue.unknown_until(grant);
        if ending.held || ending.locked && unknown.is_some() {
            // Another transaction is changing the row: possibly the acquire that this release undoes.
            return self.look_again(job);
        }
        match unknown {
            // A copy that is still in flight would take the lock after this release.
            Some(until) if until >= ending.now => {
                let rest = Duration::from_micros((until - ending.now).unsigned_abs()) + PAUSE.0;
                self.again(job, rest, "the acquire that it undoes may still take effect");
            }
            _ => {
                self.queue.is_known(grant, ending.now);
                self.answer(job, Answer::Released(ReleaseReply::NotHeld { repeated: false }));
            }
        }
    }

    async fn renew(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
        if jobs.is_empty() {
            return Ok(());
        }
        let (mut keys, mut holders, mut leases) = (vec![], vec![], vec![]);
        for job in &jobs {
            if let Step::Renew(key, grant, lease) | Step::Extend(key, grant, lease) = &job.step {
                keys.push(&**key);
                holders.push(grant.to_string());
                leases.push(*lease);
            }
        }
        let rows = match self.ask(sql, &[&keys, &holders, &leases]).await {
            Ok(rows) if rows.len() == jobs.len() => rows,
            Ok(_) => return self.failed(jobs, wrong_number(), &[]),
            Err(failure) => return self.failed(jobs, failure, &[]),
        };
        let mut ended = Ok(());
        for (job, row) in jobs.into_iter().zip(&rows) {
            match renewal(row) {
                // Another statement may be changing the row.
                Ok(Renewal::Held) if self.may_look_again(&job) => self.look_again(job),
                Ok(renewal) => self.answer(job, Answer::Renewed(renewal)),
                Err(failure) => ended = ended.and(self.failed(vec![job], failure, &[])),
            }
        }
        ended
    }

    /// Executes an operation that has its own statement.
    async fn other(&self, job: Job) -> Broken {
        let answer = match &job.step {
            Step::AcquireAll(_) => return self.acquire_all(job).await,
            Step::Count(_) => return self.count(job).await,
            Step::Inspect(key) => self.holders(Some(key), "").await.map(Answer::Holders),
            Step::List(prefix) => self.holders(None, prefix).await.map(Answer::Holders),
            Step::Force(key) => match self.force(key).await {
                Ok(Forcing::Locked(_)) if job.looks < LOOKS => {
                    self.look_again(job);
                    return Ok(());
                }
                Ok(Forcing::Locked(pids)) => Err(Failure::Answered(pinned(key, pids.as_deref()))),
                Ok(Forcing::Done(held)) => Ok(Answer::Forced(held)),
                Ok(Forcing::Counts) => return self.count(job).await,
                Err(failure) => Err(failure),
            },
            Step::Make(key) => self
                .ask(Sql::Insert, &[&vec![&**key]])
                .await
                .map(|_| Answer::Made),
            Step::Acquire(_)
            | Step::Release(..)
            | Step::Renew(..)
            | Step::Leave(..)
            | Step::Extend(..)
            | Step::FairRelease(..)
            | Step::PermitRelease(..)
            | Step::PermitRenew(..) => return Ok(()),
        };
        match answer {
            Ok(answer) => self.answer(job, answer),
            Err(failure) => self.failed(vec![job], failure, &[])?,
        }
        Ok(())
    }

    async fn acquire_all(&self, job: Job) -> Broken {
        for round in 0..2 {
            let asks: Vec<(&Ask, Instant)> =
                job.step.grants().iter().map(|ask| (ask, job.deadline)).collect();
            let Sent {
                rows,
                refuse_after,
                at,
            } = self.send(Sql::Acquire, &asks, true).await;
            let looks = rows.and_then(|rows| {
                let each = rows.iter().zip(&asks);
                each.map(|(row, (ask, _))| Look::of(row, ask))
                    .collect::<Result<Vec<Look>, Failure>>()
            });
            let looks = match looks {
                Ok(looks) => looks,
                Err(failure) => return self.failed(vec![job], failure, &refuse_after),
            };
            if let Some(look) = looks.first() {
                self.on.saw(look.now, at);
            }
            let missing = looks.iter().any(|look| matches!(look.found, Found::Missing));
            if missing && round == 0 {
                let keys: Vec<&str> = job.step.keys().map(|key| &**key).collect();
                if let Err(failure) = self.ask(Sql::Insert, &[&keys]).await {
                    return self.failed_before(vec![job], failure);
                }
                continue;
            }
            self.acquired_all(job, looks).await;
            break;
        }
        Ok(())
    }

    async fn acquired_all(&self, job: Job, looks: Vec<Look>) {
        for (at, look) in looks.iter().enumerate() {
            let reply = match look.found {
                Found::Held(remaining) => AcquireAllReply::Busy {
                    at,
                    remaining: Some(remaining),
                },
                Found::Other(held) => AcquireAllReply::Failed {
                    at,
                    error: taken(held),
                },
                _ => continue,
            };
            return self.answer(job, Answer::AcquiredAll(reply));
        }
        if looks.iter().any(|look| matches!(look.found, Found::Late)) {
            return self.again(job, Duration::ZERO, TOO_LATE);
        }
        let locked = looks.iter().position(|look| matches!(look.found, Found::Locked));
        let mut grants = Vec::with_capacity(looks.len());
        for look in looks {
            if let Found::Granted(granted) = look.found {
                grants.push(granted);
            }
        }
        if grants.len() == job.step.grants().len() {
            self.not_pinned(&job);
            return self.answer(job, Answer::AcquiredAll(AcquireAllReply::Acquired { grants }));
        }
        let (Some(at), false) = (locked, self.looks_again(&job)) else {
            return self.look_again(job);
        };
        let again = self.pinned(&job.step.grants()[at].key).await;
        let busy = AcquireAllReply::Busy {
            at,
            remaining: Some(again),
        };
        self.answer(job, Answer::AcquiredAll(busy));
    }

    async fn holders(&self, key: Option<&str>, prefix: &str) -> Result<Vec<(String, Holder)>, Failure> {
        let rows = self.ask(Sql::Inspect, &[&key, &prefix]).await?;
        let mut holders = Vec::with_capacity(rows.len());
        for row in &rows {
            let (kind, holder) = (column::<&str>(row, "kind")?, column(row, "holder")?);
            let holds = u64::from(!column::<bool>(row, "kept")?);
            let holder = match (column(row, "remaining")?, kind_of(kind)) {
                (None, _) => Holder::new(Kind::Mutex, holder, holds, None).ending_with("its transaction"),
                (Some(remaining), Some(kind)) => Holder::new(kind, holder, holds, Some(duration(remaining))),
                // Of a newer version, which has more kinds.
                (Some(_), None) => continue,
            };
            let key: String = column(row, "key")?;
            let amount = column::<i32>(row, "amount")?.unsigned_abs() as usize;
            holders.extend(std::iter::repeat_n((key, holder), amount));
        }
        Ok(holders)
    }

    async fn force(&self, key: &str) -> Result<Forcing, Failure> {
        let rows = self.ask(Sql::Force, &[&key]).await?;
        let row = one(&rows)?;
        if column(row, "counts")? {
            return Ok(Forcing::Counts);
        }
        if column(row, "locked")? {
            return Ok(Forcing::Locked(column(row, "pids")?));
        }
        // Not in the same transaction, which waits for the disk: commits with notifications are serialized.
        if self.tell && self.ask(Sql::Tell, &[&key]).await.is_err() {
            tracing::debug!(key, "the waiters of this lock were not notified");
        }
        Ok(Forcing::Done(column(row, "ended")?))
    }
}

const TOO_LATE: &str = "the request came too late, by the server's clock, and was refused";

/// The result of a forced release.
enum Forcing {
    Done(bool),
    /// A transaction of one of these processes has locked the row.
    Locked(Option<String>),
    /// It is the row of a semaphore or latch.
    Counts,
}

/// Acquires that were sent.
struct Sent {
    rows: Result<Vec<Row>, Failure>,
    /// The server's times, in µs, after which they are refused.
    refuse_after: Vec<i64>,
    at: Instant,
}

/// The state that a request found.
struct Look {
    found: Found,
    /// The server's time in µs.
    now: i64,
}

enum Found {
    Granted(Granted),
    Held(Duration),
    /// There are too few permits.
    Short(Short),
    /// The key holds this other sort of lock.
    Other(&'static str),
    /// The row does not exist.
    Missing,
    /// The request arrived too late and was refused.
    Late,
    /// The lock is available but was not acquired, because another lock of the set is not available.
    Open,
    /// The lock is available or its lease has expired, but another transaction has locked the row.
    Locked,
    /// Another step has locked the row of the semaphore.
    Contended,
}

impl Look {
    fn of(row: &Row, ask: &Ask) -> Result<Look, Failure> {
        let now = column(row, "now")?;
        if is_permit(ask.kind) {
            let found = permits::found(row, ask)?;
            return Ok(Look { found, now });
        }
        let found = if let Some(fence) = column::<Option<i64>>(row, "fence")? {
            let tokens = column::<i32>(row, "tokens")?.unsigned_abs().max(1);
            let first = fence.unsigned_abs();
            let granted = Granted::with_tokens(first, first + u64::from(tokens) - 1);
            Found::Granted(match ask.kind {
                Kind::Fair => granted.behind(behind(row, ask.grant)?),
                _ => granted,
            })
        } else if !column::<bool>(row, "there")? {
            Found::Missing
        } else if column(row, "held")? {
            match other_lock(ask.kind, column(row, "held_as")?) {
                Some(held) => Found::Other(held),
                None => Found::Held(duration(column(row, "remaining")?)),
            }
        } else if column(row, "astray")? {
            Found::Held(duration(column(row, "remaining")?))
        } else if column(row, "late")? {
            Found::Late
        } else if column(row, "open")? {
            Found::Open
        } else {
            Found::Locked
        };
        Ok(Look { found, now })
    }
}

/// The next waiters of the same client.
fn behind(row: &Row, grant: GrantId) -> Result<Vec<GrantId>, Failure> {
    let ids = column::<Vec<&str>>(row, "behind")?;
    let numbers = ids.iter().filter_map(|id| id.rsplit(':').next()?.parse().ok());
    Ok(numbers.map(|number| grant.with_number(number)).collect())
}

/// The state that a release found.
struct Ending {
    ended: bool,
    /// Another transaction has locked the row.
    locked: bool,
    /// The grant existed when the statement began.
    held: bool,
    now: i64,
}

impl Ending {
    fn of(row: &Row) -> Result<Ending, Failure> {
        Ok(Ending {
            ended: column(row, "ended")?,
            locked: column(row, "locked")?,
            held: column(row, "held")?,
            now: column(row, "now")?,
        })
    }
}

fn renewal(row: &Row) -> Result<Renewal, Failure> {
    Ok(match (column(row, "renewed")?, column(row, "held")?) {
        (true, _) => Renewal::Renewed,
        (false, true) => Renewal::Held,
        (false, false) => Renewal::Gone,
    })
}

/// Separates the operations of readers from all others.
fn split(jobs: Vec<Job>) -> (Vec<Job>, Vec<Job>) {
    jobs.into_iter().partition(|job| job.step.is_shared())
}

/// How often an operation tries a row that is locked.
fn most_looks(step: &Step) -> u32 {
    match step.is_shared() {
        true => LOOKS_OF_READER,
        false => LOOKS,
    }
}

fn taken(held: &str) -> StoreError {
    StoreError::not_done(Reason::KeyTaken(held.to_owned()), format!("the key holds {held}"))
}

/// The pause before an operation is repeated once more.
fn pause(looks: u32) -> Duration {
    (PAUSE.0 * 2_u32.saturating_pow(looks)).min(PAUSE.1)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn wrong_number() -> Failure {
    Failure::Broken(StoreError::unknown(
        "the server answered with another number of rows",
    ))
}
