//! What a user holds.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use dlock::store::Kind;
use dlock::{
    Error, Held, Lease, LockClient, LockGuard, LockKey, LockKind, LockOptions, MultiGuard, Permit, Term,
};

use crate::plan::{self, Lock};
use crate::world::with;

pub(super) enum Holder {
    One(LockGuard),
    Set(MultiGuard),
    Permit(Permit),
    Term(Term),
    /// Inside of `run`, `lead`, or a function with the attribute.
    Frame(Held),
}

type Outcome<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

impl Holder {
    pub(super) fn held(&self) -> Held {
        match self {
            Holder::One(guard) => guard.held(),
            Holder::Set(guard) => guard.held(),
            Holder::Permit(permit) => permit.held(),
            Holder::Term(term) => term.held(),
            Holder::Frame(held) => held.clone(),
        }
    }

    /// Runs a future in the frame, if there is one.
    pub(super) async fn scope<F: Future>(&self, future: F) -> Option<F::Output> {
        match self {
            Holder::One(guard) => Some(guard.scope(future).await),
            Holder::Set(guard) => Some(guard.scope(future).await),
            Holder::Permit(_) | Holder::Frame(_) => Some(future.await),
            Holder::Term(term) => term.run(future).await.ok(),
        }
    }

    /// The same, and the future is dropped when the hold is lost.
    pub(super) async fn run<F: Future>(&self, future: F) -> Option<Result<F::Output, Error>> {
        match self {
            Holder::One(guard) => Some(guard.run(future).await),
            Holder::Set(guard) => Some(guard.run(future).await),
            Holder::Permit(permit) => Some(permit.run(future).await),
            Holder::Term(term) => Some(term.run(future).await),
            Holder::Frame(_) => None,
        }
    }

    pub(super) async fn release(self) -> Result<(), Error> {
        match self {
            Holder::One(guard) => guard.release().await,
            Holder::Set(guard) => guard.release().await,
            Holder::Permit(permit) => permit.release().await,
            Holder::Term(term) => term.release().await,
            Holder::Frame(_) => Ok(()),
        }
    }
}

/// Names of different kinds are different, or they would refuse each other.
pub(super) fn key_of(kind: plan::Kind, number: u32) -> LockKey {
    LockKey::from(match kind {
        plan::Kind::Permit => format!("s{number}"),
        plan::Kind::Leader => format!("l{number}"),
        _ => format!("k{number}"),
    })
}

pub(super) fn keys_of(task: &Lock) -> impl Iterator<Item = LockKey> + use<> {
    let (kind, first) = (task.kind, task.key);
    let all = std::iter::once(first).chain(task.also.clone());
    all.map(move |number| key_of(kind, number))
}

pub(super) fn kind_of(kind: plan::Kind) -> Kind {
    match kind {
        plan::Kind::Plain | plan::Kind::Leader => Kind::Mutex,
        plan::Kind::Fair => Kind::Fair,
        plan::Kind::Fenced => Kind::Fenced,
        plan::Kind::Read => Kind::Read,
        plan::Kind::Write => Kind::Write,
        plan::Kind::Permit => Kind::Permit,
    }
}

/// A task for a semaphore asks for its permits, not for a lock.
fn lock_kind_of(kind: plan::Kind) -> LockKind {
    kind_of(kind).lock_kind().expect("a kind of lock")
}

fn options_of(task: &Lock) -> LockOptions {
    let millis = Duration::from_millis;
    let mut options = LockOptions::new();
    options.lease = task.fixed_lease.map(|lease| Lease::Fixed(millis(lease)));
    options.wait = task.wait.map(millis);
    options.min_hold = task.min_hold.map(millis);
    options.max_hold = task.max_hold.map(millis);
    options.max_waiters = task.max_waiters;
    options
}

pub(super) fn lock_of(client: &LockClient, task: &Lock) -> dlock::Lock {
    let lock = client
        .lock(key_of(task.kind, task.key))
        .kind(lock_kind_of(task.kind));
    let mut options = options_of(task);
    options.local_handoffs = task.handoffs;
    let lock = lock.options(options);
    if task.preferred {
        lock.prefer_writers()
    } else {
        lock
    }
}

pub(super) fn set_of(client: &LockClient, task: &Lock) -> dlock::MultiLock {
    let set = client.multi(keys_of(task)).kind(lock_kind_of(task.kind));
    let set = set.options(options_of(task));
    if task.preferred { set.prefer_writers() } else { set }
}

pub(super) fn semaphore_of(client: &LockClient, task: &Lock) -> dlock::Semaphore {
    let total = with(|world| world.plan.semaphores.get(task.key as usize).copied());
    client
        .semaphore(key_of(task.kind, task.key))
        .permits(total.unwrap_or(1))
        .options(options_of(task))
}

pub(super) fn post_of(client: &LockClient, task: &Lock) -> dlock::Leader {
    let post = client.leader(key_of(task.kind, task.key));
    match task.max_hold {
        Some(most) => post.max_term(Duration::from_millis(most)),
        None => post,
    }
}

/// Asks for what a task wants.
pub(super) fn acquire(client: &LockClient, task: &Lock) -> Outcome<Holder> {
    let once = task.once;
    match task.kind {
        plan::Kind::Permit => {
            let (semaphore, amount) = (semaphore_of(client, task), 1 + task.more_permits);
            Box::pin(async move {
                let permit = match once {
                    true => semaphore.try_acquire_many(amount).await,
                    false => semaphore.acquire_many(amount).await,
                };
                permit.map(Holder::Permit)
            })
        }
        plan::Kind::Leader => {
            let post = post_of(client, task);
            Box::pin(async move {
                let term = match once {
                    true => post.try_campaign().await,
                    false => post.campaign().await,
                };
                term.map(Holder::Term)
            })
        }
        _ if !task.also.is_empty() => {
            let set = set_of(client, task);
            Box::pin(async move {
                let guard = match once {
                    true => set.try_acquire().await,
                    false => set.acquire().await,
                };
                guard.map(Holder::Set)
            })
        }
        _ => {
            let lock = lock_of(client, task);
            Box::pin(async move {
                let guard = match once {
                    true => lock.try_acquire().await,
                    false => lock.acquire().await,
                };
                guard.map(Holder::One)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_lock_has_a_user() {
        use plan::Kind::{Fair, Fenced, Leader, Permit, Plain, Read, Write};
        let users = [Plain, Fair, Fenced, Read, Write, Permit, Leader].map(kind_of);
        for &kind in LockKind::ALL {
            assert!(
                users.contains(&Kind::from(kind)),
                "no user acquires a {kind} lock"
            );
        }
    }
}
