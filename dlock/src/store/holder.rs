//! Holders as a store reports them.

use std::time::Duration;

use super::Kind;

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
    /// The remaining lease; `None` if it does not end.
    pub remaining: Option<Duration>,
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
        }
    }
}
