//! A view of a hold, for code that runs under it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio_util::sync::CancellationToken;

use crate::HoldState;
use crate::api::methods::hold_methods;
use crate::base::report::{Intervention, LossReason};
use crate::runtime::grants::Grant;
use crate::runtime::members::{Holds, Members};
use crate::store::{Bind, BoundGrant};
use crate::{Error, LockGuard, Loss, MultiGuard, Permit, Term};

/// A cloneable view of a hold. It keeps nothing alive and releases nothing: only the [`LockGuard`](crate::LockGuard)
/// does. After the release it reports `Lost(Released)`.
///
/// The lock layer puts one into the request's extensions, [`Lock::run`](crate::Lock::run) passes one to its closure,
/// and [`dlock::current`](crate::current) returns that of the innermost frame.
///
/// For [several locks](crate::MultiLock) that are held together it is a view of all: it is lost when one of them is.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{HoldState, Loss};
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("report:7").acquire().await?;
///
/// let held = guard.held();
/// let watcher = tokio::spawn(async move { held.lost().await });
/// assert!(guard.is_held());
///
/// let held = guard.held();
/// guard.release().await?;
/// assert_eq!(held.state(), HoldState::Lost(Loss::Released));
/// assert_eq!(watcher.await.unwrap(), Loss::Released);
/// # Ok(()) }
/// ```
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

    /// All members, if there are several.
    pub(crate) fn members(&self) -> Option<&Arc<Members>> {
        match &self.of {
            Holds::One(_) => None,
            Holds::All(members) => Some(members),
        }
    }

    hold_methods! {
        /// Of several locks, the first in the order of their names.
        key,
        /// For several locks, that of the [first](Self::key); [`ids`](Self::ids) returns all. Permits have other ids at the
        /// store in memory, on Redis and on Valkey.
        id,
        ids,
        /// **For several locks, that of the [first](Self::key) alone**: writes to the others carry their own tokens, which
        /// [`fencing_tokens`](Self::fencing_tokens) and [`fencing_token_of`](Self::fencing_token_of) return.
        fencing_token,
        fencing_token_of,
        /// ```
        /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
        /// let client = dlock::LockClient::memory();
        /// let transfer = client.multi(["account:7", "account:3"]).run(async |held| {
        ///     for (key, token) in held.fencing_tokens() {
        ///         println!("{key} is written under token {token}");
        ///     }
        /// });
        /// transfer.await?;
        /// # Ok(()) }
        /// ```
        fencing_tokens,
        keys,
        is_held,
        state,
        remaining,
        is_renewed,
        check,
        lost,
        ensure,
        note,
        revoked,
        why_lost,
    }

    pub(crate) fn over(&self) -> CancellationToken {
        match &self.of {
            Holds::One(grant) => grant.over(),
            Holds::All(members) => members.over(),
        }
    }
}

impl View for Held {
    fn grants(&self) -> &[Arc<Grant>] {
        match &self.of {
            Holds::One(grant) => std::slice::from_ref(grant),
            Holds::All(members) => &members.all,
        }
    }

    fn first(&self) -> &Arc<Grant> {
        match &self.of {
            Holds::One(grant) => grant,
            Holds::All(members) => &members.first,
        }
    }

    fn view(&self) -> Held {
        self.clone()
    }
}

/// Guards and views of holds: what they have in common.
pub(crate) trait View {
    /// All grants, in the order of their names; never empty.
    fn grants(&self) -> &[Arc<Grant>];

    /// The first of them.
    fn first(&self) -> &Arc<Grant>;

    /// A view of all of it.
    fn view(&self) -> Held;
}

macro_rules! bind {
    ($($hold:ty),*) => {
        $(impl Bind for $hold {
            fn bind(&self) -> Result<Vec<BoundGrant>, Error> {
                let bind = |grant: &Arc<Grant>| grant.bind().map_err(|loss| grant.lost(loss));
                self.grants().iter().map(bind).collect()
            }
        })*
    };
}

bind!(Held, LockGuard, MultiGuard, Permit, Term);

/// The worst state: lost when one of them is.
pub(crate) fn state(grants: &[Arc<Grant>]) -> HoldState {
    let mut worst = HoldState::Held;
    for grant in grants {
        match grant.status() {
            HoldState::Held => {}
            HoldState::Suspect => worst = HoldState::Suspect,
            lost @ HoldState::Lost(_) => return lost,
        }
    }
    worst
}

/// The shortest.
pub(crate) fn remaining(grants: &[Arc<Grant>]) -> Duration {
    let all = grants.iter().map(|grant| grant.remaining());
    all.min().unwrap_or_default()
}

pub(crate) fn check(grants: &[Arc<Grant>]) -> Result<(), Error> {
    match first_loss(grants) {
        Some((grant, loss)) => Err(grant.lost(loss)),
        None => Ok(()),
    }
}

fn first_loss(grants: &[Arc<Grant>]) -> Option<(&Arc<Grant>, Loss)> {
    grants.iter().find_map(|grant| match grant.status() {
        HoldState::Lost(loss) => Some((grant, loss)),
        _ => None,
    })
}

pub(crate) async fn ensure(grants: &[Arc<Grant>], at_least: Duration) -> Result<(), Error> {
    if let [only] = grants {
        return ensure_one(only, at_least).await;
    }
    let outcomes = join_all(grants.iter().map(|grant| ensure_one(grant, at_least))).await;
    // Also if one was lost while another was being renewed.
    check(grants)?;
    outcomes.into_iter().collect()
}

/// Why the first of them that is lost was lost.
pub(crate) async fn why_lost(grants: Vec<Arc<Grant>>) -> Option<LossReason> {
    let (grant, loss) = first_loss(&grants)?;
    match (loss, grant.client().upgrade()) {
        (Loss::Gone, Some(client)) => Some(client.why_gone(grant).await),
        _ => Some(grant.why_lost(loss)),
    }
}

/// Completes when the first of them is asked to stop or is not held any more.
pub(crate) async fn revoked(grants: Vec<Arc<Grant>>) -> Option<Intervention> {
    let each = grants
        .into_iter()
        .map(|grant| async move { grant.revoked().await });
    let mut each: FuturesUnordered<_> = each.collect();
    each.next().await.flatten()
}

async fn ensure_one(grant: &Arc<Grant>, at_least: Duration) -> Result<(), Error> {
    let key = &grant.key;
    match grant.status() {
        HoldState::Lost(loss) => return Err(grant.lost(loss)),
        HoldState::Held if grant.remaining() >= at_least => return Ok(()),
        _ => {}
    }
    grant.confirm().await?;
    match grant.remaining() {
        remaining if remaining >= at_least => Ok(()),
        remaining => Err(Error::InvalidOption {
            option: "ensure",
            reason: format!(
                "the lease of lock \"{key}\" cannot be made to last {at_least:?}, it has {remaining:?}"
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
            Holds::One(grant) => all.field("key", &grant.key).field("fencing_token", &grant.token),
            Holds::All(_) => all.field("keys", &self.keys().collect::<Vec<_>>()),
        };
        all.field("state", &self.state()).finish()
    }
}
