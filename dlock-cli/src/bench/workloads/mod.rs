//! The workloads: each file is one operation that tasks repeat.

pub(super) mod held;
mod pairs;
mod reentrant;
mod service;
mod wakeup;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{Error, Lock, LockClient, LockGuard, LockKey};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::args::{Plan, Workload};
use super::tally::{Series, Tally, kind_of};
use crate::stores;
pub(super) use wakeup::{Handoff, wakeups};

/// The input of the tasks of one process.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) plan: Plan,
    pub(super) clients: Vec<LockClient>,
    pub(super) tally: Arc<Tally>,
    pub(super) handoffs: Mutex<Vec<Handoff>>,
    /// How long a pair takes on an uncontended lock.
    pub(super) pair: Duration,
}

impl Job {
    /// Connects, and checks that the store supports the workload.
    pub(super) async fn prepare(plan: Plan) -> Result<Job, Error> {
        let mut clients = Vec::new();
        for _ in 0..clients_of(&plan) {
            let builder = stores::client(plan.url.clone()).service_name("dlock-bench");
            let builder = match plan.lease {
                Some(lease) => builder.lease(lease),
                None => builder,
            };
            clients.push(builder.build().await?);
        }
        let counting = clients.len() * plan.tasks;
        let mut job = Job {
            plan,
            clients,
            tally: Tally::new(counting),
            handoffs: Mutex::default(),
            pair: Duration::ZERO,
        };
        if job.plan.workload == Workload::Idempotency {
            // A store without records is reported now.
            job.clients[0].records()?;
        } else {
            job.pair = job.try_out().await?;
        }
        if matches!(job.plan.workload, Workload::Layer | Workload::Idempotency) {
            job.tally.add(Series::Bare, &service::measure_bare().await);
        }
        Ok(job)
    }

    /// A few pairs on a key without other users.
    async fn try_out(&self) -> Result<Duration, Error> {
        const PAIRS: u32 = 8;
        let mut begin = Instant::now();
        for client in &self.clients {
            let mine = fastrand::u64(..);
            let lock = self.lock_named(client, format!("{}probe:{mine:016x}", self.plan.prefix));
            lock.acquire().await?.release().await?;
            begin = Instant::now();
            for _ in 0..PAIRS {
                lock.acquire().await?.release().await?;
            }
        }
        Ok(begin.elapsed() / PAIRS)
    }

    /// Starts the tasks; `held` runs differently.
    pub(super) fn start(self: &Arc<Self>) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        for task in 0..self.plan.tasks {
            match self.plan.workload {
                Workload::Sequential | Workload::Parallel | Workload::Contended => {
                    drop(tasks.spawn(pairs::work(self.clone(), task)));
                }
                Workload::Reentrant => drop(tasks.spawn(reentrant::work(self.clone(), task))),
                Workload::Layer => drop(tasks.spawn(service::locked(self.clone(), task))),
                Workload::Idempotency => drop(tasks.spawn(service::once(self.clone(), task))),
                Workload::Held => {}
                Workload::Wakeup => {
                    for side in 0..self.clients.len() {
                        tasks.spawn(wakeup::work(self.clone(), task, side));
                    }
                }
            }
        }
        tasks
    }

    /// The number of a task among those of all processes: its key, or the first of its keys.
    fn first_key(&self, task: usize) -> u64 {
        (self.plan.process * self.plan.tasks + task) as u64
    }

    /// The lock of this number, of all that the measurement uses.
    fn lock(&self, client: &LockClient, number: u64) -> Lock {
        self.lock_named(client, format!("{}{number}", self.plan.prefix))
    }

    fn lock_named(&self, client: &LockClient, name: String) -> Lock {
        // The user's prefix is taken literally, including braces.
        let lock = client.lock(LockKey::raw(name)).kind(self.plan.kind.into());
        match self.plan.local_handoffs {
            Some(times) => lock.local_handoffs(times),
            None => lock,
        }
    }

    /// Acquires a lock and releases it; returns how long the acquire took, or the kind of the error.
    async fn pair(&self, lock: &Lock) -> Result<Duration, &'static str> {
        let begin = Instant::now();
        let guard = lock.acquire().await.map_err(|error| kind_of(&error))?;
        let took = begin.elapsed();
        self.release(guard).await?;
        Ok(took)
    }

    /// Releases a lock as the user has chosen.
    async fn release(&self, guard: LockGuard) -> Result<(), &'static str> {
        if self.plan.await_release {
            return guard.release().await.map_err(|error| kind_of(&error));
        }
        drop(guard);
        Ok(())
    }
}

/// A wake-up must reach another client: inside one client, locks may be handed off.
fn clients_of(plan: &Plan) -> usize {
    match plan.workload {
        Workload::Wakeup if plan.processes == 1 => 2,
        _ => 1,
    }
}
