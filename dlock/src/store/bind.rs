//! Holds as the store that granted them sees them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::{GrantId, Kind};
use crate::{Error, LockKey};

/// Guards and views of holds, for a store that does more with a hold than renew and release it: for example one whose
/// transactions can lock the row of a lock, or compare its token. A wrapper around a guard forwards to it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::store::Bind;
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("order:42").acquire().await?;
/// let bound = guard.bind()?;
/// assert_eq!((&bound[0].key, bound[0].token), (guard.key(), guard.fencing_token()));
/// # Ok(()) }
/// ```
pub trait Bind {
    /// Returns the grants of this hold: for several locks, of all of them. From now on the store sees the end of the
    /// hold: the lock is released, not handed off inside the process, where the next holder would have the same grant.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when one of them is lost or released.
    fn bind(&self) -> Result<Vec<BoundGrant>, Error>;
}

/// A grant that is not handed off, see [`Bind`].
///
/// ```
/// use dlock::store::BoundGrant;
///
/// /// The condition of a transaction that is to fail once the lock is lost.
/// fn condition(bound: &BoundGrant) -> String {
///     format!("holder of {} is {}", bound.key, bound.grant)
/// }
/// # let _ = condition;
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BoundGrant {
    /// The kind of the lock.
    pub kind: Kind,
    /// Its name, without the prefix of the client.
    pub key: LockKey,
    /// Its id on the store.
    pub grant: GrantId,
    /// The fencing token of this hold.
    pub token: u64,
    pub(crate) renewable: Arc<dyn Renewable>,
}

impl BoundGrant {
    /// Asks the store whether it still has the grant, by renewing it now. For a store that was told otherwise by another
    /// request, such as a transaction that compares the token: if the grant is gone, the guard, its views and its events
    /// report the loss before this returns.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::store::Bind;
    ///
    /// let client = dlock::LockClient::memory();
    /// let guard = client.lock("order:42").acquire().await?;
    /// let bound = guard.bind()?.remove(0);
    /// client.force_release("order:42").await?;
    /// assert!(guard.is_held(), "it learns of it at its next renewal");
    /// assert!(bound.confirm().await.unwrap_err().is_lost() && !guard.is_held());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the grant is lost or released; otherwise a failure of the store.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn confirm(&self) -> Result<(), Error> {
        self.renewable.clone().confirm().await
    }
}

/// A grant that can be renewed now.
pub(crate) trait Renewable: fmt::Debug + Send + Sync {
    fn confirm(self: Arc<Self>) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;
}
