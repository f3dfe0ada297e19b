//! The operations that are sent together on a connection, one statement for each kind.

use dlock::store::queue::Step as _;

use super::job::{Job, Step};
use super::table::Sql;

/// The most locks that one statement acquires or releases.
const MOST: usize = 128;
/// The most grants that one statement and one wave renew, so that other operations do not wait for thousands of them.
pub(super) const MOST_RENEWALS: usize = 256;

/// Operations that are sent together.
#[derive(Debug, Default)]
pub(crate) struct Wave {
    /// Those that share statements, in the order in which the statements are sent.
    pub(crate) batches: Vec<(Sql, Vec<Job>)>,
    /// One statement for each operation.
    pub(crate) others: Vec<Job>,
}

/// What a wave consists of.
///
/// Each statement is a transaction, and costs more than a few locks in it: with acquires and releases in each wave there would
/// be twice as many, each for half as many locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Acquires,
    Others,
}

impl Sort {
    fn of(step: &Step) -> Sort {
        match step.acquires() {
            true => Sort::Acquires,
            false => Sort::Others,
        }
    }

    pub(crate) fn other(self) -> Sort {
        match self {
            Sort::Acquires => Sort::Others,
            Sort::Others => Sort::Acquires,
        }
    }
}

/// Counts the operations that a wave already contains.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// That of the first operation, unless it is given.
    pub(crate) sort: Option<Sort>,
    releases: Taken,
    renewals: Taken,
    acquires: Taken,
    others: Taken,
}

#[derive(Debug, Default)]
struct Taken {
    /// How many locks or grants.
    size: usize,
    /// Whether the operation must not share its statement.
    alone: bool,
}

impl Room {
    pub(crate) fn of(sort: Option<Sort>) -> Room {
        Room {
            sort,
            ..Room::default()
        }
    }

    /// Whether the operation fits into the wave; if so, counts it.
    pub(crate) fn has(&mut self, job: &Job) -> bool {
        let sort = Sort::of(&job.step);
        if *self.sort.get_or_insert(sort) != sort {
            return false;
        }
        let (taken, most) = match job.step.shared() {
            Some(Sql::Release | Sql::Leave | Sql::FairRelease | Sql::PermitRelease) => {
                (&mut self.releases, MOST)
            }
            Some(Sql::Renew | Sql::Extend | Sql::PermitRenew) => (&mut self.renewals, MOST_RENEWALS),
            Some(_) => (&mut self.acquires, MOST),
            None => (&mut self.others, MOST),
        };
        let size = match &job.step {
            Step::PermitRenew(_, grants) => grants.len(),
            _ => 1,
        };
        if taken.size > 0 && (taken.size + size > most || taken.alone || job.alone) {
            return false;
        }
        taken.size += size;
        taken.alone |= job.alone;
        true
    }
}

impl From<Vec<Job>> for Wave {
    fn from(jobs: Vec<Job>) -> Wave {
        let most = jobs.len();
        let mut wave = Wave::default();
        for job in jobs {
            let Some(sql) = job.step.shared() else {
                wave.others.push(job);
                continue;
            };
            match wave.batches.iter_mut().find(|(other, _)| *other == sql) {
                Some((_, batch)) => batch.push(job),
                None => {
                    let mut batch = Vec::with_capacity(most);
                    batch.push(job);
                    wave.batches.push((sql, batch));
                }
            }
        }
        wave.batches.sort_unstable_by_key(|(sql, _)| *sql as usize);
        wave
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use dlock::LockKey;
    use dlock::store::queue::Next;
    use dlock::store::{AcquireRequest, GrantId, Kind};
    use tokio::time::Instant;

    use super::super::job::{Ask, Queue};
    use super::*;

    fn queue() -> Arc<Queue> {
        Arc::new(Queue::new("db", Duration::from_secs(60)))
    }

    fn renew(key: &str) -> Step {
        Step::Renew(key.into(), GrantId::from_parts(1, 1), 1)
    }

    fn taken(queue: &Queue) -> Vec<Job> {
        let mut room = Room::of(None);
        match queue.next(Instant::now(), |job| room.has(job)) {
            Next::Send(jobs) => jobs,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn waves_are_of_a_limited_size_and_releases_pass_renewals_of_other_keys() {
        let queue = queue();
        let release = |key: &str| Step::Release(key.into(), GrantId::from_parts(1, 1), None);
        for n in 0..2 * MOST_RENEWALS {
            drop(queue.ask(renew(&format!("k{n}"))));
        }
        drop(queue.ask(release("other")));
        drop(queue.ask(release(&format!("k{}", 2 * MOST_RENEWALS - 1))));
        let first = Wave::from(taken(&queue));
        assert_eq!(sizes(&first), [(Sql::Release, 1), (Sql::Renew, MOST_RENEWALS)]);
        let second = Wave::from(taken(&queue));
        assert_eq!(sizes(&second), [(Sql::Renew, MOST_RENEWALS)]);
    }

    fn sizes(wave: &Wave) -> Vec<(Sql, usize)> {
        wave.batches
            .iter()
            .map(|(sql, jobs)| (*sql, jobs.len()))
            .collect()
    }

    #[test]
    fn acquires_and_other_steps_go_in_waves_of_their_own() {
        let queue = queue();
        let grant = GrantId::from_parts(1, 1);
        let acquire = |key: &str| {
            let request = AcquireRequest::new(Kind::Mutex, LockKey::raw(key), grant, Duration::from_secs(1));
            Step::Acquire(Ask::new(key.into(), &request).unwrap())
        };
        drop(queue.ask(Step::Release("a".into(), grant, None)));
        let asked = ["b", "c"].map(|key| queue.ask(acquire(key)));
        drop(queue.ask(renew("d")));
        assert_eq!(
            sizes(&Wave::from(taken(&queue))),
            [(Sql::Release, 1), (Sql::Renew, 1)]
        );
        assert_eq!(sizes(&Wave::from(taken(&queue))), [(Sql::Plain, 2)]);
        drop(asked);
    }

    #[test]
    fn sort_that_is_given_goes_first() {
        let queue = queue();
        drop(queue.ask(renew("a")));
        let mut room = Room::of(Some(Sort::Acquires));
        let next = queue.next(Instant::now(), |job| room.has(job));
        assert!(matches!(next, Next::Wait(_)), "{next:?}");
        assert_eq!(sizes(&Wave::from(taken(&queue))), [(Sql::Renew, 1)]);
    }

    #[test]
    fn step_that_goes_alone_shares_no_statement() {
        let queue = queue();
        for key in ["a", "b", "c", "d"] {
            drop(queue.ask(renew(key)));
        }
        for mut job in taken(&queue).into_iter().rev() {
            job.alone = ["a", "c"].contains(&name(&job).as_str());
            queue.put_back(job);
        }
        let names = || taken(&queue).iter().map(name).collect::<Vec<String>>();
        assert_eq!(names(), ["a"]);
        assert_eq!(names(), ["b", "d"]);
        assert_eq!(names(), ["c"]);
    }

    fn name(job: &Job) -> String {
        match &job.step {
            Step::Renew(key, ..) => key.to_string(),
            other => panic!("{other:?}"),
        }
    }
}
