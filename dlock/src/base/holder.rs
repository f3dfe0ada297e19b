//! Holders as a store reports them, and as their clients do.

use std::sync::Arc;
use std::time::Duration;

use crate::base::kind::Kind;
use crate::base::report::{ClientReport, HoldReport};

/// A holder of a lock, as the store sees it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let _guard = client.lock("order:42").acquire().await?;
///
/// let holder = client.inspect("order:42").await?.expect("the lock is held");
/// assert!(holder.id.starts_with(&client.id()));
/// println!("the lease ends in {:?}", holder.remaining);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The kind of the hold.
    pub kind: Kind,
    /// The id on the wire, `<client uuid>:<number>` for dlock and Redisson alike; of a permit, Redisson's permit id: 32
    /// hexadecimal digits, the first eight of which are those of dlock's client.
    pub id: String,
    /// How many holds the store counts: for dlock 1, since re-entry is counted in the process, and 0 while a
    /// lock that was released is kept by its `min_hold`.
    pub holds: u64,
    /// The remaining lease; `None` if it does not end by itself, or [not by a lease](Self::ends_with).
    pub remaining: Option<Duration>,
    /// What the hold ends with where no lease bounds it, as in `its session with the store`; `None` where a lease does,
    /// or nothing.
    pub ends_with: Option<&'static str>,
    /// The client that has it, as that client wrote it down. Filled in by [`LockClient::inspect`] and
    /// [`LockClient::holders`]; `None` where that client wrote nothing: it has gone, cannot reach the store, began to
    /// hold something a moment ago, or is not dlock's.
    ///
    /// [`LockClient::inspect`]: crate::LockClient::inspect
    /// [`LockClient::holders`]: crate::LockClient::holders
    pub client: Option<Arc<ClientReport>>,
    /// The hold, as that client wrote it down: since when, where in the code, its note. `None` where it wrote nothing of
    /// this hold: it is younger than a second or two, or one of many.
    pub hold: Option<HoldReport>,
}

impl Holder {
    /// A holder, for a store that reports one.
    #[must_use]
    pub fn new(kind: Kind, id: String, holds: u64, remaining: Option<Duration>) -> Holder {
        Holder {
            kind,
            id,
            holds,
            remaining,
            ends_with: None,
            client: None,
            hold: None,
        }
    }

    /// Sets what it [ends with](Self::ends_with), for a store that has no lease of it.
    #[must_use]
    pub fn ending_with(mut self, what: &'static str) -> Holder {
        self.ends_with = Some(what);
        self
    }

    /// The same with what its client wrote down.
    pub(crate) fn known(mut self, client: Option<Arc<ClientReport>>) -> Holder {
        let hold = |client: &Arc<ClientReport>| {
            let mut holds = client.holds.iter();
            holds.find(|hold| hold.grant == self.id).cloned()
        };
        self.hold = client.as_ref().and_then(hold);
        self.client = client;
        self
    }

    /// The UUID of its client, where the id has one.
    pub(crate) fn client_id(&self) -> Option<uuid::Uuid> {
        let (client, _) = self.id.split_once(':')?;
        uuid::Uuid::try_parse(client).ok()
    }
}
