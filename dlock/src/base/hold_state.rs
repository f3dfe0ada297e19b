//! The state of a hold, for its holder.

/// Whether a lock is still held, by the clock as of the call.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::HoldState;
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("order:42").acquire().await?;
/// match guard.state() {
///     HoldState::Held => println!("go on"),
///     HoldState::Suspect => println!("begin nothing that takes long: the store has not confirmed the lease"),
///     HoldState::Lost(loss) => println!("stop: {loss}"),
///     _ => {}
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldState {
    /// Held, and confirmed by the store when it was due.
    Held,
    /// The lease has not ended, but a renewal is overdue, or the store was reconnected and not yet asked. No other
    /// client has the lock unless the store lost its data.
    Suspect,
    /// Over, permanently. Another client may have the lock.
    Lost(Loss),
}

/// Why a hold ended.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::Loss;
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let guard = client.lock("report").fixed_lease(Duration::from_millis(20)).acquire().await?;
/// match guard.lost().await {
///     Loss::Expired => println!("the work took longer than the lease"),
///     loss => panic!("{loss}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// The lease expired by this process's clock, because it was fixed or could not be renewed in time.
    Expired,
    /// The store no longer has the hold: it was forced open, or the data was lost or evicted.
    Gone,
    /// The hold reached its `max_hold`.
    MaxHold,
    /// The client was shut down while the lock was held.
    Shutdown,
    /// The runtime that renewed the lock has ended.
    RuntimeEnded,
    /// The lock was released; seen by views of a hold that outlive it.
    Released,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Loss::Expired => "its lease expired",
            Loss::Gone => "the store no longer has it (forced open, or its data was lost)",
            Loss::MaxHold => "it was held as long as max_hold allows",
            Loss::Shutdown => "the client was shut down",
            Loss::RuntimeEnded => "the runtime that renewed it has ended",
            Loss::Released => "it was released",
        })
    }
}
