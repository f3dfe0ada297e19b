//! Does what a sequence says on a real store, and compares each answer with that of the model.

mod answers;
mod guards;
mod look;
mod take;
mod waiters;

use std::fmt::Debug;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::Kind;
use dlock::{LockClient, LockGuard, LockKind, MultiGuard, Permit};
use tokio::time::{Instant, sleep_until};

use self::waiters::Waiter;
use super::model::{Answer, Model};
use super::ops::{Counter, KEYS, Lease, OWNERS, Op, Step};
use crate::Store;

/// The lease of what is renewed: no sequence takes so long that it would be.
const RENEWED: Duration = Duration::from_secs(3600);
const LONG: Duration = Duration::from_secs(600);
/// What the clocks of a server and of this process may be apart, and what whole milliseconds leave out.
const SLACK: Duration = Duration::from_millis(50);
/// How long before a lease ends no step is begun any more where the clock runs on: it might end in the midst of it.
const STEP: Duration = Duration::from_millis(60);
/// How long after that it is surely over.
const OVER: Duration = Duration::from_millis(5);
/// A missing wake-up. A waiter without notifications looks again after half a minute.
const NEVER: Duration = Duration::from_secs(20);

/// Why a sequence was not gone through.
#[derive(Debug)]
pub(super) enum Halt {
    /// A lease ended in the midst of a step, so that either answer would be right.
    Missed,
    /// An answer is wrong.
    Wrong(String),
}

#[derive(Debug)]
enum Real {
    Lock(LockGuard),
    Several(MultiGuard),
    Permit(Permit),
}

/// A guard: what it is to the library, and each grant with its hold that it is to the model.
#[derive(Debug)]
struct Guard {
    owner: usize,
    real: Real,
    of: Vec<(usize, u64)>,
}

/// A store with its clients, and the model of both.
pub(super) struct World<'a> {
    store: &'a Store,
    clients: Vec<LockClient>,
    began: Instant,
    prefix: String,
    model: Model,
    guards: Vec<Guard>,
    waiters: [Option<Waiter>; KEYS],
}

type Done = Result<(), Halt>;

fn wrong<T>(expected: impl Debug, seen: impl Debug) -> Result<T, Halt> {
    Err(Halt::Wrong(format!("expected {expected:?}, saw {seen:?}")))
}

impl<'a> World<'a> {
    pub(super) async fn new(store: &'a Store) -> World<'a> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        store.flush().await;
        let mut clients = Vec::new();
        for _ in 0..OWNERS {
            clients.push(store.client_with(|builder| builder.lease(RENEWED)).await);
        }
        World {
            store,
            clients,
            began: Instant::now(),
            prefix: format!("s{}:", NUMBER.fetch_add(1, Ordering::Relaxed)),
            model: Model::default(),
            guards: Vec::new(),
            waiters: [const { None }; KEYS],
        }
    }

    /// Goes through the sequence, gives everything back, and sees that nothing is left.
    pub(super) async fn play(mut self, ops: &[Op]) -> Done {
        let outcome = self.all(ops).await;
        if outcome.is_err() {
            for client in &self.clients {
                client.shutdown(Duration::ZERO).await;
            }
        }
        outcome
    }

    async fn all(&mut self, ops: &[Op]) -> Done {
        for (at, op) in ops.iter().enumerate() {
            self.one(op).await.map_err(|halt| match halt {
                Halt::Wrong(why) => Halt::Wrong(format!("step {at}, {op:?}: {why}")),
                missed => missed,
            })?;
        }
        for key in 0..KEYS {
            self.one(&Op::GiveUp { key }).await?;
        }
        while !self.guards.is_empty() {
            self.one(&Op::Release { guard: 0 }).await?;
        }
        for key in 0..KEYS {
            let step = Step::Delete;
            self.one(&Op::Count { owner: 0, key, step }).await?;
        }
        let clients: Vec<_> = self.clients.iter().collect();
        self.store.assert_clean(&clients).await;
        Ok(())
    }

    async fn one(&mut self, op: &Op) -> Done {
        self.come_to_rest().await?;
        let began = Instant::now();
        let touched = self.step(op, began).await?;
        self.in_time()?;
        self.let_others_run(matches!(op, Op::Wait { .. })).await;
        self.come_to_rest().await?;
        if let Some((owner, keys)) = touched {
            for key in keys {
                self.look(owner, key).await?;
            }
        }
        self.in_time()?;
        self.guards_know()
    }

    /// The waiters come as far as they get before the next step, or nearly: what comes first must be told.
    async fn let_others_run(&self, began_to_wait: bool) {
        if began_to_wait {
            tokio::time::sleep(OVER).await;
        }
    }

    /// Waiters for what is free have it, and no lease ends soon.
    async fn come_to_rest(&mut self) -> Done {
        loop {
            self.model.pass(Instant::now());
            match self.ending(Instant::now() + STEP) {
                Some(ends) => sleep_until(ends + OVER).await,
                _ if self.serve().await? => {}
                _ => return Ok(()),
            }
        }
    }

    /// When a lease ends that may be over for a client by then.
    fn ending(&self, by: Instant) -> Option<Instant> {
        let alive = self.model.grants.iter().filter(|grant| {
            let told = grant.known.is_some() || grant.holds.is_empty();
            grant.wanted.fixed && (grant.stored || !told)
        });
        let ending = alive.filter(|grant| grant.deadline.min <= by);
        ending.map(|grant| grant.ends.max).max()
    }

    /// No lease has ended since the store was asked.
    fn in_time(&self) -> Done {
        match self.ending(Instant::now()) {
            Some(_) => Err(Halt::Missed),
            None => Ok(()),
        }
    }

    fn name(&self, key: usize) -> String {
        format!("{}{}", self.prefix, ["a", "b", "c"][key])
    }

    fn key(&self, name: &str) -> Option<usize> {
        (0..KEYS).find(|key| self.name(*key) == name)
    }

    fn lease(lease: Lease) -> Option<Duration> {
        match lease {
            Lease::Renewed => None,
            Lease::Long => Some(LONG),
            Lease::Short(millis) => Some(Duration::from_millis(millis)),
        }
    }

    /// Does it. Returns the actor, and the names, if any.
    async fn step(&mut self, op: &Op, began: Instant) -> Result<Option<(usize, Vec<usize>)>, Halt> {
        match *op {
            Op::Take {
                owner,
                key,
                kind,
                lease,
            } => {
                self.take(owner, key, kind, lease, began).await?;
                Ok(Some((owner, vec![key])))
            }
            Op::TakeAll {
                owner,
                ref keys,
                kind,
                lease,
            } => {
                let mut keys = keys.clone();
                self.take_all(owner, &mut keys, kind, lease, began).await?;
                Ok(Some((owner, keys)))
            }
            Op::TakePermits {
                owner,
                key,
                amount,
                total,
                lease,
            } => {
                self.take_permits(owner, key, amount, total, lease, began).await?;
                Ok(Some((owner, vec![key])))
            }
            Op::Force { owner, key } => {
                let outcome = self.clients[owner].force_release(self.name(key)).await;
                let expected = Answer::Done(self.model.force(key));
                self.answered(expected, outcome, Answer::Done, began)?;
                Ok(Some((owner, vec![key])))
            }
            Op::List { owner } => {
                self.list(owner).await?;
                Ok(None)
            }
            Op::Count {
                key,
                step: Step::Delete,
                ..
            } if self.waiters[key].is_some() && Counter::of(key) != Counter::Latch => Ok(None),
            Op::Count { owner, key, step } => {
                self.count(owner, key, step, began).await?;
                Ok(Some((owner, vec![key])))
            }
            Op::Pause { millis } => {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                self.come_to_rest().await?;
                Ok(None)
            }
            Op::Wait { owner, key, kind } => {
                self.wait(owner, key, kind);
                Ok(Some((owner, vec![key])))
            }
            Op::GiveUp { key } => {
                let Some(Waiter { wanted, task }) = self.waiters[key].take() else {
                    return Ok(None);
                };
                task.abort();
                if let Ok(outcome) = task.await {
                    return wrong("a waiter that waits", outcome);
                }
                Ok(Some((wanted.owner, vec![key])))
            }
            _ if self.guards.is_empty() => Ok(None),
            Op::Reenter { guard }
            | Op::Ensure { guard }
            | Op::TakeWithin { guard, .. }
            | Op::Downgrade { guard }
            | Op::Release { guard }
            | Op::Drop { guard } => {
                let at = guard % self.guards.len();
                let Guard { owner, of, .. } = &self.guards[at];
                let keys = of.iter().map(|(grant, _)| self.model.grants[*grant].wanted.key);
                let touched = (*owner, keys.collect());
                self.with_guard(op, at, began).await?;
                Ok(Some(touched))
            }
        }
    }
}

/// A kind that the operations draw for locks.
fn lock_kind(kind: Kind) -> LockKind {
    kind.lock_kind().expect("a kind of lock")
}
