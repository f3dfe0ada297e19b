//! Acquires.

use std::collections::HashMap;
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
        if let Err(failure) = self.ask(Sql::Insert, &[&keys_of(&missing)]).await {
            return match self.may_halve(&missing, &failure) {
                true => self.halves(sql, missing).await,
                false => self.failed_before(missing, failure),
            };
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
        let (mut missing, mut pinned, mut unsure) = (Vec::new(), Vec::new(), Vec::new());
        let looks = match looks {
            Ok(looks) => looks,
            Err(failure) if self.may_halve(&jobs, &failure) => {
                return self.halves(sql, jobs).await.map(|()| missing);
            }
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
                Look::Short(short) if short.is_pinned() => pinned.push((job, short.busy())),
                Look::Short(short) => self.short(job, &short),
                Look::Other(held) => {
                    self.not_pinned(&job);
                    self.fail(job, &taken(held));
                }
                Look::Missing => missing.push(job),
                Look::Late => self.queue.retry(job, Duration::ZERO, TOO_LATE),
                Look::Contended if job.looks < most_looks(&job.step) => self.look_again(job),
                Look::Contended => {
                    let busy = Busy::new(None).again(PAUSE.1);
                    self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
                }
                Look::Open | Look::Locked if job.looks == LOOKS && self.looks_again(&job) => unsure.push(job),
                Look::Open | Look::Locked if self.looks_again(&job) => self.look_again(job),
                Look::Open | Look::Locked => pinned.push((job, Busy::new(None))),
            }
        }
        let held = self.pids(&keys_of(&unsure)).await;
        for job in unsure {
            let is_held = job.step.keys().any(|key| held.contains_key(&**key));
            match is_held {
                true => pinned.push((job, Busy::new(None))),
                false => self.look_again(job),
            }
        }
        self.answer_pinned(pinned).await;
        Ok(missing)
    }

    /// Whether to try a locked row again before reporting it: it may be locked only for a moment.
    fn looks_again(&self, job: &Job) -> bool {
        let now = Instant::now();
        job.looks < most_looks(&job.step) && !job.step.keys().any(|key| self.pins.is_known(key, now))
    }

    /// Answers acquires of locks that open transactions hold.
    async fn answer_pinned(&self, jobs: Vec<(Job, Busy)>) {
        let keys: Vec<&Arc<str>> = jobs.iter().flat_map(|(job, _)| job.step.keys()).collect();
        let again = self.pinned(&keys).await;
        for ((job, mut busy), again) in jobs.into_iter().zip(again) {
            busy.again = Some(busy.again.map_or(again, |other| other.min(again)));
            self.answer(job, Answer::Acquired(AcquireReply::Busy(busy)));
        }
    }

    /// Records that open transactions hold these locks, and finds out which ones. Returns when their waiters must try
    /// again.
    async fn pinned(&self, keys: &[&Arc<str>]) -> Vec<Duration> {
        let now = Instant::now();
        let mut unnamed: Vec<&str> = Vec::new();
        let again = keys.iter().map(|key| {
            let (again, ask) = self.pins.found(key, now);
            if ask {
                unnamed.push(key);
            }
            again
        });
        let again = again.collect();
        let pids = self.pids(&unnamed).await;
        for key in unnamed {
            let by = holder(pids.get(key).map(String::as_str));
            self.pins.named(key, format!("{by} it"));
        }
        again
    }

    /// Returns the server processes whose transactions hold the locks, by key, as far as they are known.
    pub(super) async fn pids(&self, keys: &[&str]) -> HashMap<String, String> {
        if keys.is_empty() {
            return HashMap::new();
        }
        let rows = self.ask(Sql::Pins, &[&keys]).await.unwrap_or_default();
        let found = |row| Some((column(row, "key").ok()?, column(row, "pids").ok()?));
        rows.iter().filter_map(found).collect()
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
                let keys = keys_of(std::slice::from_ref(&job));
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
            return self.queue.retry(job, Duration::ZERO, TOO_LATE);
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
        let again = self.pinned(&[&job.step.grants()[at].key]).await;
        let busy = AcquireAllReply::Busy {
            at,
            remaining: again.first().copied(),
        };
        self.answer(job, Answer::AcquiredAll(busy));
    }
}

fn keys_of(jobs: &[Job]) -> Vec<&str> {
    let keys = jobs.iter().flat_map(|job| job.step.keys());
    keys.map(|key| &**key).collect()
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
