//! A view of what is held, for whoever works under it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::HoldState;
use crate::runtime::grants::Grant;
use crate::runtime::members::{Holds, Members};
use crate::{Error, LockKey, Loss};

/// A view of a hold that can be cloned and handed around. It keeps nothing alive and releases nothing:
/// only the [`LockGuard`](crate::LockGuard) does. After the lock was given back it answers `Lost(Released)`.
///
/// The lock layer puts one into the request's extensions, [`Lock::run`](crate::Lock::run) hands one to its
/// closure, and [`dlock::current`](crate::current) gives the one of the innermost frame.
///
/// Of [several locks](crate::MultiLock) that are held together this is a view of all: it is lost when one of
/// them is.
#[derive(Clone)]
pub struct Held {
    of: Holds,
}

impl Held {
    pub(crate) fn new(grant: Arc<Grant>) -> Held {
        Held {
            of: Holds::One(grant),
        }
    }

    /// A view of several.
    pub(crate) fn of_all(all: Arc<Members>) -> Held {
        Held { of: Holds::All(all) }
    }

    /// All of them, where there are several.
    pub(crate) fn members(&self) -> Option<&Arc<Members>> {
        match &self.of {
            Holds::One(_) => None,
            Holds::All(members) => Some(members),
        }
    }

    fn first(&self) -> &Arc<Grant> {
        match &self.of {
            Holds::One(grant) => grant,
            Holds::All(members) => &members.first,
        }
    }

    pub(crate) fn each(&self) -> &[Arc<Grant>] {
        match &self.of {
            Holds::One(grant) => std::slice::from_ref(grant),
            Holds::All(members) => &members.all,
        }
    }

    /// See [`LockGuard::fencing_token`](crate::LockGuard::fencing_token). Of several locks that of the
    /// [first](Self::key); [`fencing_token_of`](Self::fencing_token_of) has those of the others.
    #[must_use]
    pub fn fencing_token(&self) -> u64 {
        self.first().token
    }

    /// The fencing token of one of several locks; `None` for a name that is not among them.
    #[must_use]
    pub fn fencing_token_of(&self, key: impl Into<LockKey>) -> Option<u64> {
        let key = key.into();
        let grant = self.each().iter().find(|grant| grant.key == key);
        grant.map(|grant| grant.token)
    }

    /// The name of the lock; of several the first in the order of their names.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.first().key
    }

    /// The names of all locks that this is a view of, in their order: more than one for a
    /// [`MultiLock`](crate::MultiLock).
    pub fn keys(&self) -> impl Iterator<Item = &LockKey> {
        self.each().iter().map(|grant| &grant.key)
    }

    /// See [`LockGuard::is_held`](crate::LockGuard::is_held).
    #[must_use]
    pub fn is_held(&self) -> bool {
        !matches!(self.state(), HoldState::Lost(_))
    }

    /// See [`LockGuard::state`](crate::LockGuard::state). Of several locks it is the worst: lost when one of
    /// them is.
    #[must_use]
    pub fn state(&self) -> HoldState {
        let mut worst = HoldState::Held;
        for grant in self.each() {
            match grant.status() {
                HoldState::Held => {}
                HoldState::Suspect => worst = HoldState::Suspect,
                lost @ HoldState::Lost(_) => return lost,
            }
        }
        worst
    }

    /// The error that says which lock is lost, and why; `Ok` while all is held.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.loss() {
            Some((key, loss)) => Err(Error::Lost { key, loss }),
            None => Ok(()),
        }
    }

    /// Which lock is lost, and why; `None` while all is held.
    fn loss(&self) -> Option<(LockKey, Loss)> {
        self.each().iter().find_map(|grant| match grant.status() {
            HoldState::Lost(loss) => Some((grant.key.clone(), loss)),
            _ => None,
        })
    }

    /// See [`LockGuard::remaining`](crate::LockGuard::remaining). Of several locks it is the shortest.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let all = self.each().iter().map(|grant| grant.remaining());
        all.min().unwrap_or_default()
    }

    /// See [`LockGuard::is_renewed`](crate::LockGuard::is_renewed).
    #[must_use]
    pub fn is_renewed(&self) -> bool {
        self.each().iter().all(|grant| grant.renewed)
    }

    /// See [`LockGuard::lost`](crate::LockGuard::lost).
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<> {
        let lost = self.first_lost();
        async move { lost.await.1 }
    }

    /// Waits until one is lost; which, and why.
    pub(crate) fn first_lost(&self) -> impl Future<Output = (LockKey, Loss)> + Send + use<> {
        let held = self.clone();
        async move {
            loop {
                if let Some(loss) = held.loss() {
                    return loss;
                }
                held.over().cancelled_owned().await;
            }
        }
    }

    pub(crate) fn over(&self) -> CancellationToken {
        match &self.of {
            Holds::One(grant) => grant.over(),
            Holds::All(members) => members.over(),
        }
    }

    /// See [`LockGuard::cancellation_token`](crate::LockGuard::cancellation_token).
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.over().child_token()
    }

    /// See [`LockGuard::ensure`](crate::LockGuard::ensure).
    ///
    /// # Errors
    ///
    /// As for [`LockGuard::ensure`](crate::LockGuard::ensure).
    pub async fn ensure(&self, at_least: Duration) -> Result<(), Error> {
        match &self.of {
            Holds::One(grant) => ensure(grant, at_least).await,
            Holds::All(members) => {
                let all = members.all.iter().map(|grant| ensure(grant, at_least));
                let outcomes = join_all(all).await;
                // Also if one was lost while another one was asked for.
                self.check()?;
                outcomes.into_iter().collect()
            }
        }
    }
}

async fn ensure(grant: &Arc<Grant>, at_least: Duration) -> Result<(), Error> {
    let key = &grant.key;
    match grant.status() {
        HoldState::Lost(loss) => {
            return Err(Error::Lost {
                key: key.clone(),
                loss,
            });
        }
        HoldState::Held if grant.remaining() >= at_least => return Ok(()),
        _ => {}
    }
    let Some(client) = grant.client().upgrade() else {
        return Err(Error::ClientClosed);
    };
    client.renew_one(grant).await?;
    match grant.status() {
        HoldState::Lost(loss) => Err(Error::Lost {
            key: key.clone(),
            loss,
        }),
        _ if grant.remaining() >= at_least => Ok(()),
        _ => Err(Error::InvalidOption {
            option: "ensure",
            reason: format!(
                "the lease of lock \"{key}\" cannot be made to last {at_least:?}, it has {:?}",
                grant.remaining()
            ),
        }),
    }
}

impl From<Holds> for Held {
    fn from(of: Holds) -> Held {
        Held { of }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = f.debug_struct("Held");
        match &self.of {
            Holds::One(grant) => all.field("key", self.key()).field("fencing_token", &grant.token),
            Holds::All(_) => all.field("keys", &self.keys().collect::<Vec<_>>()),
        };
        all.field("state", &self.state()).finish()
    }
}
