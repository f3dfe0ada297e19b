//! placeholder

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backend;
mod client;
mod clock;
mod error;
mod grants;
mod guard;
mod key;
mod lock;
mod problem;
mod release;
pub mod scope;
mod telemetry;
mod url;
mod waiters;
mod watchdog;

#[doc(hidden)]
#[path = "macro_support.rs"]
pub mod __macro;

pub use backend::Kind;
pub use client::{
    DEFAULT_LEASE, DEFAULT_RETRY_FOR, DEFAULT_TIMEOUT, LockClient, LockClientBuilder, ShutdownReport,
    default_client, set_default,
};
#[cfg(feature = "macros")]
pub use dlock_macros::distributed_lock;
pub use error::{Error, Loss};
pub use guard::{Held, HoldState, LockGuard};
pub use key::{LockKey, MAX_KEY_BYTES};
pub use lock::Lock;
pub use problem::Problem;

/// The innermost hold whose frame the calling code runs in, and that has not been given back; `None`
/// outside of every frame.
///
/// For code deep inside a locked function that wants the fencing token, or to know whether the lock is
/// still held, without having it passed down. See [`scope`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::LockClient::memory();
/// async fn write() -> u64 {
///     dlock::current().map_or(0, |held| held.fencing_token())
/// }
/// let token = client.lock("report").run(|_| write()).await?;
/// assert!(token > 0);
/// # Ok(()) }
/// ```
#[must_use]
pub fn current() -> Option<Held> {
    scope::innermost()
}
