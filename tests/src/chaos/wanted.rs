//! What the tasks fight for under a name: a lock, or permits; and the guard of it.

use std::future::Future;
use std::time::Duration;

use dlock::store::{Capabilities, Kind};
use dlock::{Error, Held, Lock, LockClient, LockGuard, LockKind, Permit, Semaphore};

use super::event::Share;
use super::store::key_name;

/// The semaphore whose total the store keeps.
pub(crate) const TOTAL: usize = 7;
/// The permits of a semaphore.
pub(crate) const PERMITS: u32 = 3;

/// What a key is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Plain,
    Fair,
    Fenced,
    ReadWrite,
    /// One whose readers yield to waiting writers.
    PreferWriters,
    /// A semaphore whose total the store keeps.
    Total,
    /// One without a total: each acquire has a limit.
    Limit,
}

impl Sort {
    /// The sort of a key: a plain lock where the store has nothing else.
    pub(crate) fn of(store: &Capabilities, key: usize) -> Sort {
        let read_write = store.has(Kind::Read) && store.has(Kind::Write);
        match key {
            1 | 4 if store.has(Kind::Fair) => Sort::Fair,
            3 if store.has(Kind::Fenced) => Sort::Fenced,
            6 if read_write && store.prefer_writers => Sort::PreferWriters,
            5 | 6 if read_write => Sort::ReadWrite,
            TOTAL if store.has(Kind::Permit) => Sort::Total,
            8 if store.limits => Sort::Limit,
            _ => Sort::Plain,
        }
    }
}

/// The lock of a key, or the side of it that a share is.
fn lock_of(client: &LockClient, key: usize, share: Share) -> Lock {
    let name = key_name(key);
    match (Sort::of(client.capabilities(), key), share) {
        (Sort::Fair, _) => client.fair_lock(name),
        (Sort::Fenced, _) => client.lock(name).kind(LockKind::Fenced),
        (Sort::ReadWrite | Sort::PreferWriters, Share::Read) => client.rw_lock(name).read(),
        (Sort::ReadWrite, _) => client.rw_lock(name).write(),
        (Sort::PreferWriters, _) => client.rw_lock(name).prefer_writers().write(),
        _ => client.lock(name),
    }
}

/// The semaphore of a key.
fn semaphore_of(client: &LockClient, key: usize) -> Semaphore {
    let semaphore = client.semaphore(key_name(key));
    match Sort::of(client.capabilities(), key) {
        Sort::Limit => semaphore.limit(PERMITS),
        _ => semaphore.permits(PERMITS),
    }
}

#[derive(Clone)]
pub(crate) enum Wanted {
    Lock(Lock),
    /// So many permits.
    Permits(Semaphore, u32),
}

/// Options that both types have.
macro_rules! options {
    ($($option:ident),*) => {$(
        pub(crate) fn $option(self, of: Duration) -> Wanted {
            match self {
                Wanted::Lock(lock) => Wanted::Lock(lock.$option(of)),
                Wanted::Permits(permits, amount) => Wanted::Permits(permits.$option(of), amount),
            }
        }
    )*};
}

impl Wanted {
    pub(crate) fn new(client: &LockClient, key: usize, share: Share) -> Wanted {
        match share {
            Share::Permits { amount, .. } => Wanted::Permits(semaphore_of(client, key), amount),
            share => Wanted::Lock(lock_of(client, key, share)),
        }
    }

    /// All of a key: one holder at a time.
    pub(crate) fn whole(client: &LockClient, key: usize) -> Wanted {
        let share = match Sort::of(client.capabilities(), key) {
            Sort::Total | Sort::Limit => Share::Permits {
                amount: PERMITS,
                total: PERMITS,
            },
            _ => Share::All,
        };
        Wanted::new(client, key, share)
    }

    options!(wait, lease, fixed_lease, max_hold, min_hold);

    pub(crate) async fn acquire(&self) -> Result<Guard, Error> {
        match self {
            Wanted::Lock(lock) => lock.acquire().await.map(Guard::Lock),
            Wanted::Permits(permits, amount) => permits.acquire_many(*amount).await.map(Guard::Permit),
        }
    }

    pub(crate) async fn try_acquire(&self) -> Result<Guard, Error> {
        match self {
            Wanted::Lock(lock) => lock.try_acquire().await.map(Guard::Lock),
            Wanted::Permits(permits, amount) => permits.try_acquire_many(*amount).await.map(Guard::Permit),
        }
    }

    /// Runs the work under the lock, or under one permit.
    pub(crate) async fn run<F, Fut>(&self, work: F) -> Result<Fut::Output, Error>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        match self {
            Wanted::Lock(lock) => lock.run(work).await,
            Wanted::Permits(permits, _) => permits.run(work).await,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Guard {
    Lock(LockGuard),
    Permit(Permit),
}

impl Guard {
    pub(crate) fn held(&self) -> Held {
        match self {
            Guard::Lock(guard) => guard.held(),
            Guard::Permit(permit) => permit.held(),
        }
    }

    /// The guard of a lock, which can be entered again.
    pub(crate) fn lock(&self) -> Option<&LockGuard> {
        match self {
            Guard::Lock(guard) => Some(guard),
            Guard::Permit(_) => None,
        }
    }

    pub(crate) async fn release(self) -> Result<(), Error> {
        match self {
            Guard::Lock(guard) => guard.release().await,
            Guard::Permit(permit) => permit.release().await,
        }
    }
}
