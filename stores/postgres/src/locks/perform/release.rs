//! Releases.

use std::time::Duration;

use dlock::store::ReleaseReply;
use dlock::store::queue::Moment;
use tokio::time::Instant;
use tokio_postgres::Row;

use super::acquire::once_if_equal;
use super::{Broken, PAUSE, Performing, wrong_number};
use crate::failure::Failure;
use crate::locks::job::{Answer, Job, Step};
use crate::locks::statements::{column, in_order, list, one, positions};
use crate::locks::table::{Sql, bucket};
use crate::micros::micros;

impl Performing<'_> {
    pub(super) async fn release(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
        let (mut keys, mut holders, mut keeps, mut buckets) = (vec![], vec![], vec![], vec![]);
        let now = Moment::now();
        for job in &jobs {
            if let Step::Release(key, grant, keep_until)
            | Step::Leave(key, grant, keep_until)
            | Step::FairRelease(key, grant, keep_until)
            | Step::PermitRelease(key, grant, keep_until) = &job.step
            {
                keys.push(&**key);
                holders.push(grant.to_string());
                keeps.push(keep_until.map_or(0, |until| micros(until.since(now))));
                buckets.push(bucket(key));
            }
        }
        if sql == Sql::Release {
            keeps = once_if_equal(keeps.iter().copied());
        }
        let sent = Instant::now();
        let rows = self.ask_and_tell(sql, &[&keys, &holders, &keeps, &buckets]).await;
        let endings = rows.and_then(|rows| match sql {
            Sql::Release => Ending::of_many(one(&rows)?, jobs.len()),
            _ if rows.len() == jobs.len() => rows.iter().map(Ending::of).collect(),
            _ => Err(wrong_number()),
        });
        let endings = match endings {
            Ok(endings) => endings,
            Err(failure) if self.may_halve(&jobs, &failure) => return self.halves(sql, jobs).await,
            Err(failure) => return self.failed(jobs, failure, None),
        };
        for (job, ending) in jobs.into_iter().zip(endings) {
            self.on.saw(ending.now, sent);
            self.released(job, &ending);
        }
        Ok(())
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
                self.queue
                    .retry(job, rest, "the acquire that it undoes may still take effect");
            }
            _ => {
                self.queue.is_known(grant, ending.now);
                self.answer(job, Answer::Released(ReleaseReply::NotHeld { repeated: false }));
            }
        }
    }
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

    /// Interprets the reply to all releases of a statement.
    fn of_many(row: &Row, number: usize) -> Result<Vec<Ending>, Failure> {
        let now = column(row, "now")?;
        let ended = positions(row, "ended")?.into_iter();
        let ended = ended.map(|at| (at, true, (false, true)));
        let states = list(row, "locked")?.into_iter().zip(list(row, "held")?);
        let others = positions(row, "others")?.into_iter().zip(states);
        let others = others.map(|(at, state)| (at, false, state));
        let endings = ended.chain(others).map(|(at, ended, (locked, held))| {
            let ending = Ending {
                ended,
                locked,
                held,
                now,
            };
            (at, ending)
        });
        in_order(endings.collect(), number)
    }
}
