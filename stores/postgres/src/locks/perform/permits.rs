//! The operations on semaphores and latches.

use std::time::Duration;

use dlock::store::counter::CounterReply;
use dlock::store::{AcquireReply, Busy, Kind, Renewal, StoreError};
use tokio::time::Instant;
use tokio_postgres::Row;

use super::look::{Look, granted_from};
use super::{Broken, Performing, TOO_LATE, Value, duration, renewal, taken, wrong_number};
use crate::failure::Failure;
use crate::locks::job::{Answer, Ask, Counting, Job, Step, is_permit, kind_of, other_lock};
use crate::locks::statements::{column, one};
use crate::locks::table::{Sql, bucket};
use crate::locks::transaction::pinned;

/// Why permits were not granted.
pub(super) struct Short {
    /// The total is smaller than the request.
    few: bool,
    /// A transaction holds permits that were released, or whose lease has expired.
    pinned: bool,
    remaining: Option<Duration>,
    again: Option<Duration>,
}

impl Short {
    pub(super) fn is_pinned(&self) -> bool {
        self.pinned && !self.few
    }

    pub(super) fn busy(&self) -> Busy {
        let mut busy = Busy::new(self.remaining);
        busy.again = self.again;
        busy
    }
}

/// Interprets the reply to an acquire of permits.
pub(super) fn look(row: &Row, ask: &Ask) -> Result<Look, Failure> {
    if let Some(fence) = column::<Option<i64>>(row, "fence")? {
        return Ok(Look::Granted(granted_from(fence, column(row, "tokens")?)));
    }
    if column(row, "late")? {
        return Ok(Look::Late);
    }
    if !column::<bool>(row, "there")? {
        return Ok(Look::Missing);
    }
    let held_as: &str = column(row, "held_as")?;
    if !column::<bool>(row, "held")? {
        return Ok(match kind_of(held_as).is_some_and(is_permit) {
            true => Look::Contended,
            false => Look::Locked,
        });
    }
    if let Some(held) = other_lock(ask.kind, held_as) {
        return Ok(Look::Other(held));
    }
    Ok(Look::Short(Short {
        few: column(row, "few")?,
        pinned: column(row, "pinned")?,
        remaining: column::<Option<i64>>(row, "remaining")?.map(duration),
        again: column::<Option<i64>>(row, "again")?.map(duration),
    }))
}

impl Performing<'_> {
    /// Sends acquires of permits, with the values that all acquires have.
    pub(super) async fn send_permits(
        &self,
        asks: &[(&Ask, Instant)],
        [keys, holders, leases, tokens, refuse_after]: [Value<'_>; 5],
    ) -> Result<Vec<Row>, Failure> {
        let asks = || asks.iter().map(|(ask, _)| ask);
        let owned: Vec<bool> = asks().map(|ask| ask.kind == Kind::Permit).collect();
        let amounts: Vec<i32> = asks().map(|ask| ask.amount).collect();
        let totals: Vec<Option<i64>> = asks().map(|ask| ask.total).collect();
        let limits: Vec<Option<i64>> = asks().map(|ask| ask.limit).collect();
        let waiter = |ask: &&Ask| ask.waiter.map(|waiter| waiter.to_string()).unwrap_or_default();
        let waiters: Vec<String> = asks().map(waiter).collect();
        let buckets: Vec<i32> = asks().map(|ask| bucket(&ask.key)).collect();
        self.ask_and_tell(
            Sql::Permit,
            &[
                keys,
                holders,
                &owned,
                leases,
                tokens,
                refuse_after,
                &amounts,
                &totals,
                &limits,
                &waiters,
                &buckets,
            ],
        )
        .await
    }

    /// Answers an acquire that found too few permits.
    pub(super) fn short(&self, job: Job, short: &Short) {
        let reply = match short.few {
            true => AcquireReply::TooFewPermits,
            false => AcquireReply::Busy(short.busy()),
        };
        self.answer(job, Answer::Acquired(reply));
    }

    pub(super) async fn renew_permits(&self, jobs: Vec<Job>) -> Broken {
        let (mut keys, mut holders, mut leases) = (vec![], vec![], vec![]);
        for job in &jobs {
            if let Step::PermitRenew(key, grants) = &job.step {
                for (grant, lease) in grants {
                    keys.push(&**key);
                    holders.push(grant.to_string());
                    leases.push(*lease);
                }
            }
        }
        let rows = match self.ask(Sql::PermitRenew, &[&keys, &holders, &leases]).await {
            Ok(rows) if rows.len() == keys.len() => rows,
            Ok(_) => return self.failed(jobs, wrong_number(), None),
            Err(failure) if self.may_halve(&jobs, &failure) => {
                return self.halves(Sql::PermitRenew, jobs).await;
            }
            Err(failure) => return self.failed(jobs, failure, None),
        };
        let (mut rows, mut ended) = (rows.iter(), Ok(()));
        for job in jobs {
            let Step::PermitRenew(_, grants) = &job.step else {
                continue;
            };
            let renewals: Result<Vec<Renewal>, Failure> =
                rows.by_ref().take(grants.len()).map(renewal).collect();
            match renewals {
                // Another statement may be changing a row.
                Ok(renewals) if renewals.contains(&Renewal::Held) && self.may_look_again(&job) => {
                    self.look_again(job);
                }
                Ok(renewals) => self.answer(job, Answer::RenewedAll(renewals)),
                Err(failure) => ended = ended.and(self.failed(vec![job], failure, None)),
            }
        }
        ended
    }

    /// Runs an operation on a semaphore or latch, or takes all permits from their holders.
    pub(super) async fn count(&self, job: Job) -> Broken {
        let forces;
        let counting = match &job.step {
            Step::Count(counting) => counting,
            Step::Force(key) => {
                forces = Counting::force(key.clone());
                &forces
            }
            _ => return Ok(()),
        };
        let refuse_after = self.on.refuse_after(job.deadline);
        let sent = Instant::now();
        let rows = self
            .ask_and_tell(
                Sql::Count,
                &[
                    &&*counting.key,
                    &counting.kind.to_string(),
                    &counting.step,
                    &counting.id,
                    &counting.amount,
                    &counting.flag,
                    &counting.repeated_for,
                    &refuse_after,
                    &bucket(&counting.key),
                ],
            )
            .await;
        let counted = rows.and_then(|rows| {
            let row = one(&rows)?;
            self.on.saw(column(row, "now")?, sent);
            Counted::of(row, counting.kind)
        });
        match counted {
            Ok(Counted::Reply(reply)) => {
                let answer = match (&job.step, reply) {
                    (Step::Force(_), reply) => Answer::Forced(reply == CounterReply::Done(true)),
                    (_, reply) => Answer::Counted(reply),
                };
                self.answer(job, answer);
            }
            Ok(Counted::Other(held)) => match &job.step {
                Step::Force(_) => self.answer(job, Answer::Forced(false)),
                _ => self.fail(job, &taken(held)),
            },
            Ok(Counted::Late) => self.queue.retry(job, Duration::ZERO, TOO_LATE),
            Ok(Counted::Contended) => self.look_again(job),
            Ok(Counted::Locked) if self.may_look_again(&job) => self.look_again(job),
            Ok(Counted::Locked) => {
                let key = counting.key.clone();
                let error = pinned(&key, self.pids(&[&key]).await.get(&*key).map(String::as_str));
                self.fail(job, &error);
            }
            Err(failure) => return self.failed(vec![job], failure, Some(refuse_after)),
        }
        Ok(())
    }
}

/// The result of an operation on a semaphore or latch.
enum Counted {
    Reply(CounterReply),
    /// The key holds this other sort of lock.
    Other(&'static str),
    /// The request arrived too late and was refused.
    Late,
    /// Another step has locked the row of the semaphore or latch.
    Contended,
    /// A transaction has locked the row of an available lock, or holds permits.
    Locked,
}

impl Counted {
    fn of(row: &Row, kind: Kind) -> Result<Counted, Failure> {
        let held_as = column::<Option<&str>>(row, "held_as")?;
        if let Some(held) = held_as.and_then(|held| other_lock(kind, held)) {
            return Ok(Counted::Other(held));
        }
        if column(row, "late")? {
            return Ok(Counted::Late);
        }
        if column(row, "locked")? {
            return Ok(match held_as {
                Some(_) => Counted::Contended,
                None => Counted::Locked,
            });
        }
        let number = column::<Option<i64>>(row, "number")?;
        let held = column::<Option<i64>>(row, "in_use")?.unwrap_or(0).unsigned_abs();
        let count = || number.unwrap_or(0).unsigned_abs();
        Ok(Counted::Reply(match column::<&str>(row, "reply")? {
            "permits" => CounterReply::Permits { free: number, held },
            "changed" => CounterReply::Done(true),
            "same" => CounterReply::Done(false),
            "number" => CounterReply::Number(count()),
            "few" => CounterReply::TooFew { is: count() },
            "many" => CounterReply::TooMany,
            other => {
                let error = StoreError::unknown(format!("the server answered with {other}"));
                return Err(Failure::Broken(error));
            }
        }))
    }
}
