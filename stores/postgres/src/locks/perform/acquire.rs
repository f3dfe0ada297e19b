//! Acquires.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Step as _;
use dlock::store::{AcquireAllReply, AcquireReply, Busy, Kind, Outcome, StoreError};
use tokio::time::Instant;

use super::look::Look;
use super::{AGAIN, Broken, LOOKS, PAUSE, Performing, TOO_LATE, Value, most_looks, taken, wrong_number};
use crate::failure::Failure;
use crate::locks::job::{Answer, Ask, Job};
use crate::locks::statements::{column, one};
use crate::locks::table::Sql;
use crate::locks::transaction::holder;

impl Performing<'_> {
    pub(super) async fn acquire(&self, sql: Sql, jobs: Vec<Job>) -> Broken {
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
        let Sent { looks, refuse_after } = self.send(sql, &asks, false).await;
        let (mut missing, mut locked, mut unsure) = (Vec::new(), Vec::new(), Vec::new());
        let looks = match looks {
            Ok(looks) => looks,
            Err(failure) => return self.failed(jobs, failure, refuse_after).map(|()| missing),
        };
        for (job, look) in jobs.into_iter().zip(looks) {
            match look {
                Look::Granted(granted) => {
                    self.not_pinned(&job);
                    self.answer(job, Answer::Acquired(AcquireReply::Acquired(granted)));
                }
                Look::Held(remaining) => {
                    self.not_pinned(&job);
                    let mut busy = Busy::new(Some(remaining));
                    busy.again = (job.step.shared() == Some(Sql::Fair)).then_some(AGAIN);
                    self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
                }
                Look::Short(short) => self.short(job, short).await,
                Look::Other(held) => {
                    self.not_pinned(&job);
                    self.fail(job, &taken(held));
                }
                Look::Missing => missing.push(job),
                Look::Late => self.again(job, Duration::ZERO, TOO_LATE),
                Look::Contended if job.looks < most_looks(&job.step) => self.look_again(job),
                Look::Contended => {
                    let busy = Busy::new(None).again(PAUSE.1);
                    self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
                }
                Look::Open | Look::Locked if job.looks == LOOKS && self.looks_again(&job) => unsure.push(job),
                Look::Open | Look::Locked if self.looks_again(&job) => self.look_again(job),
                Look::Open | Look::Locked => locked.push(job),
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
        Ok(missing)
    }

    /// Whether to try a locked row again before reporting it: it may be locked only for a moment.
    fn looks_again(&self, job: &Job) -> bool {
        let now = Instant::now();
        job.looks < most_looks(&job.step) && !job.step.keys().any(|key| self.pins.is_known(key, now))
    }

    /// Records that an open transaction has locked the row, and finds out which one. Returns when a waiter must try
    /// again.
    pub(super) async fn pinned(&self, key: &Arc<str>) -> Duration {
        let (again, ask) = self.pins.found(key, Instant::now());
        if ask {
            let by = holder(self.pids(key).await.as_deref());
            self.pins.named(key, format!("{by} it"));
        }
        again
    }

    /// Returns the server processes whose transactions hold the lock.
    pub(super) async fn pids(&self, key: &Arc<str>) -> Option<String> {
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
        let kinds: Vec<String> = match sql {
            Sql::Fair | Sql::Permit => Vec::new(),
            Sql::Plain => once_if_equal(asks.iter().map(|(ask, _)| ask.kind))
                .iter()
                .map(Kind::to_string)
                .collect(),
            _ => asks.iter().map(|(ask, _)| ask.kind.to_string()).collect(),
        };
        let leases = asks.iter().map(|(ask, _)| ask.lease);
        let tokens = asks.iter().map(|(ask, _)| ask.tokens);
        let (leases, tokens): (Vec<i64>, Vec<i32>) = match sql {
            Sql::Plain => (once_if_equal(leases), once_if_equal(tokens)),
            _ => (leases.collect(), tokens.collect()),
        };
        let refuse_after: Vec<i64> = asks
            .iter()
            .map(|(_, deadline)| self.on.refuse_after(*deadline))
            .collect();
        let first = refuse_after.iter().min().copied().unwrap_or(i64::MAX);
        let at = Instant::now();
        let rows = match sql {
            Sql::Fair => {
                let waits: Vec<bool> = asks.iter().map(|(ask, _)| ask.waits).collect();
                let asked: Vec<bool> = asks.iter().map(|(ask, _)| ask.asked).collect();
                let values: [Value<'_>; 7] =
                    [&keys, &holders, &leases, &tokens, &refuse_after, &waits, &asked];
                self.ask(sql, &values).await
            }
            Sql::Permit => {
                let values = [&keys as Value<'_>, &holders, &leases, &tokens, &refuse_after];
                self.send_permits(asks, values).await
            }
            // Late for one is late for all: those that are not send it again.
            Sql::Plain => {
                let values: [Value<'_>; 6] = [&keys, &holders, &kinds, &leases, &tokens, &first];
                self.ask(sql, &values).await
            }
            Sql::Lone => {
                let values: [Value<'_>; 6] = [&keys, &holders, &kinds, &leases, &tokens, &refuse_after];
                self.ask(sql, &values).await
            }
            _ => {
                let all = if all { asks.len() as i64 } else { 0 };
                let nested = |ask: &Ask| ask.nested_in.map(|grant| grant.to_string()).unwrap_or_default();
                let nested: Vec<String> = asks.iter().map(|(ask, _)| nested(ask)).collect();
                let values: [Value<'_>; 8] = [
                    &keys,
                    &holders,
                    &kinds,
                    &leases,
                    &tokens,
                    &refuse_after,
                    &all,
                    &nested,
                ];
                self.ask(sql, &values).await
            }
        };
        let looks = rows.and_then(|rows| {
            let first = one(&rows)?;
            self.on.saw(column(first, "now")?, at);
            match sql {
                Sql::Plain => Look::of_many(first, asks),
                _ if rows.len() == asks.len() => rows
                    .iter()
                    .zip(asks)
                    .map(|(row, (ask, _))| Look::of(row, ask))
                    .collect(),
                _ => Err(wrong_number()),
            }
        });
        Sent {
            looks,
            refuse_after: refuse_after.into_iter().max(),
        }
    }

    pub(super) async fn acquire_all(&self, job: Job) -> Broken {
        for round in 0..2 {
            let asks: Vec<(&Ask, Instant)> =
                job.step.grants().iter().map(|ask| (ask, job.deadline)).collect();
            let Sent { looks, refuse_after } = self.send(Sql::Acquire, &asks, true).await;
            let looks = match looks {
                Ok(looks) => looks,
                Err(failure) => return self.failed(vec![job], failure, refuse_after),
            };
            let missing = looks.iter().any(|look| matches!(look, Look::Missing));
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
            let reply = match *look {
                Look::Held(remaining) => AcquireAllReply::Busy {
                    at,
                    remaining: Some(remaining),
                },
                Look::Other(held) => AcquireAllReply::Failed {
                    at,
                    error: taken(held),
                },
                _ => continue,
            };
            return self.answer(job, Answer::AcquiredAll(reply));
        }
        if looks.iter().any(|look| matches!(look, Look::Late)) {
            return self.again(job, Duration::ZERO, TOO_LATE);
        }
        let locked = looks.iter().position(|look| matches!(look, Look::Locked));
        let mut grants = Vec::with_capacity(looks.len());
        for look in looks {
            if let Look::Granted(granted) = look {
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
}

/// Acquires that were sent.
struct Sent {
    looks: Result<Vec<Look>, Failure>,
    /// The server's time, in µs, after which all are refused.
    refuse_after: Option<i64>,
}

/// The values; or the first, if all are equal to it.
pub(super) fn once_if_equal<T: PartialEq + Copy>(values: impl Iterator<Item = T> + Clone) -> Vec<T> {
    let mut rest = values.clone();
    match rest.next() {
        Some(first) if rest.all(|value| value == first) => vec![first],
        _ => values.collect(),
    }
}
