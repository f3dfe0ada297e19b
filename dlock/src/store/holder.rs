//! Holders as a store reports them.

use std::time::Duration;

use super::Kind;

/// Who holds a lock, as the store sees it.
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
    /// What it holds the key as.
    pub kind: Kind,
    /// The wire id, `<client uuid>:<number>` for dlock and Redisson alike; of a permit, what Redisson calls it
    /// by: 32 hexadecimal digits, the first eight of which are those of dlock's client.
    pub id: String,
    /// How many holds the store counts: for dlock 1, since re-entry is counted in the process, and 0 while a
    /// lock that was released is kept by its `min_hold`.
    pub holds: u64,
    /// What is left of the lease; `None` when it has no end.
    pub remaining: Option<Duration>,
}

impl Holder {
    /// A holder as a store reports it.
    #[must_use]
    pub fn new(kind: Kind, id: String, holds: u64, remaining: Option<Duration>) -> Holder {
        Holder {
            kind,
            id,
            holds,
            remaining,
        }
    }
}
