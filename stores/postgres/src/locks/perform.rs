//! Executes the operations of a wave, and interprets the replies.

mod acquire;
mod look;
mod other;
mod permits;
mod release;

use std::pin::Pin;
use std::time::Duration;

use dlock::store::{Outcome, Reason, Renewal, StoreError};
use futures_util::future::join_all;
use futures_util::join;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::Row;

use super::job::{Answer, Job, Queue, Step};
use super::pins::Pins;
use super::statements::{Statements, column};
use super::table::Sql;
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
        let Wave { batches, others } = wave;
        let batches = batches.into_iter().map(|(sql, jobs)| self.batch(sql, jobs));
        let others = others.into_iter().map(|job| self.other(job));
        let (batches, others) = join!(join_all(batches), join_all(others));
        batches.into_iter().chain(others).collect()
    }

    /// Performs operations that share a statement.
    async fn batch(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
        match sql {
            Sql::Release if jobs.len() == 1 => self.release(Sql::LoneRelease, jobs).await,
            Sql::Release | Sql::Leave | Sql::FairRelease | Sql::PermitRelease => {
                self.release(sql, jobs).await
            }
            Sql::Renew | Sql::Extend => self.renew(sql, jobs).await,
            Sql::PermitRenew => self.renew_permits(jobs).await,
            Sql::Plain if jobs.len() == 1 => self.acquire(Sql::Lone, jobs).await,
            _ => self.acquire(sql, jobs).await,
        }
    }

    async fn ask(&self, sql: Sql, values: &[Value<'_>]) -> Result<Vec<Row>, Failure> {
        match timeout_at(self.deadline, self.on.ask(sql, values)).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::Broken(StoreError::unknown(self.silence))),
        }
    }

    /// Sends a statement whose last parameter, after these values, says whether waiters are notified.
    async fn ask_and_tell(&self, sql: Sql, values: &[Value<'_>]) -> Result<Vec<Row>, Failure> {
        let (tell, silent): (Value<'_>, Value<'_>) = (&self.tell, &false);
        let asked = self.ask(sql, &[values, &[tell]].concat()).await;
        match &asked {
            // A session anywhere in the cluster that listens, and is in a long transaction, lets the queue of notifications
            // fill up. A release does not depend on that: waiters look now and then.
            Err(Failure::Answered(error)) if self.tell && failure::may_be_of_notification(error) => {
                tracing::debug!(%error, "carried out without a notification");
                self.ask(sql, &[values, &[silent]].concat()).await
            }
            _ => asked,
        }
    }

    fn answer(&self, job: Job, answer: Answer) {
        self.queue.answer(job, Ok(answer));
    }

    fn fail(&self, job: Job, error: &StoreError) {
        self.queue.answer(job, Err(error.clone()));
    }

    /// Whether one of several operations may be why their statement was refused, and there is time to find it.
    fn may_halve(&self, jobs: &[Job], failure: &Failure) -> bool {
        let is_refused = match failure {
            Failure::Answered(error) => failure::may_be_of_row(error),
            Failure::Broken(_) => false,
        };
        is_refused && jobs.len() > 1 && Instant::now() + 2 * PAUSE.1 < self.deadline
    }

    /// Performs operations whose statement was refused in two halves. Each in a wave of its own would take too long for
    /// renewals.
    async fn halves(&self, sql: Sql, mut jobs: Vec<Job>) -> Broken {
        let second = jobs.split_off(jobs.len() / 2);
        let (first, second) = join!(self.boxed_batch(sql, jobs), self.boxed_batch(sql, second));
        first.and(second)
    }

    fn boxed_batch(&self, sql: Sql, jobs: Vec<Job>) -> Pin<Box<dyn Future<Output = Broken> + Send + '_>> {
        Box::pin(self.batch(sql, jobs))
    }

    /// Handles a statement that failed: repeats or fails its operations.
    fn failed(&self, jobs: Vec<Job>, failure: Failure, refuse_after: Option<i64>) -> Broken {
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
                for ask in job.step.grants() {
                    self.queue.is_unknown(ask.grant, refuse_after.unwrap_or(i64::MAX));
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
            // The others need not wait for that row again.
            job.alone |= several && failure::stayed_locked(error);
            let after = pause(job.looks);
            self.queue.retry(job, after, &error.message);
            return None;
        }
        if several && failure::may_be_of_row(error) {
            job.alone = true;
            self.queue.retry(job, Duration::ZERO, &error.message);
            return None;
        }
        Some(job)
    }

    /// Whether to try an operation again that found a locked row, rather than to answer it so.
    fn may_look_again(&self, job: &Job) -> bool {
        job.looks < most_looks(&job.step) && Instant::now() + 2 * PAUSE.1 < job.deadline
    }

    /// Repeats an operation because the row of its key is locked.
    fn look_again(&self, job: Job) {
        let after = match job.step.is_of_many() {
            // Random, so that readers do not retry together.
            true => pause(job.looks).mul_f64(0.25 + fastrand::f64()),
            false => pause(job.looks),
        };
        self.queue.retry(
            job,
            after,
            "an open transaction of another session has the row of the lock locked",
        );
    }

    async fn renew(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
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
            Ok(_) => return self.failed(jobs, wrong_number(), None),
            Err(failure) if self.may_halve(&jobs, &failure) => return self.halves(sql, jobs).await,
            Err(failure) => return self.failed(jobs, failure, None),
        };
        let mut ended = Ok(());
        for (job, row) in jobs.into_iter().zip(&rows) {
            match renewal(row) {
                // Another statement may be changing the row.
                Ok(Renewal::Held) if self.may_look_again(&job) => self.look_again(job),
                Ok(renewal) => self.answer(job, Answer::Renewed(renewal)),
                Err(failure) => ended = ended.and(self.failed(vec![job], failure, None)),
            }
        }
        ended
    }
}

const TOO_LATE: &str = "the request came too late, by the server's clock, and was refused";

fn renewal(row: &Row) -> Result<Renewal, Failure> {
    Ok(match (column(row, "renewed")?, column(row, "held")?) {
        (true, _) => Renewal::Renewed,
        (false, true) => Renewal::Held,
        (false, false) => Renewal::Gone,
    })
}

/// How often an operation tries a row that is locked.
fn most_looks(step: &Step) -> u32 {
    match step.is_of_many() {
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
