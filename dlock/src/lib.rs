//! Run it once at a time, across every process.
//!
//! dlock gives a Rust service locks that hold across all its processes: on Redis or Valkey (one server, Sentinel,
//! Cluster, or a quorum of independent servers) or, with nothing installed, in memory; on PostgreSQL, MySQL, etcd and
//! ZooKeeper with crates of their own: see [`LockClientBuilder::scheme`]. A lock is renewed while it is held, released
//! on return, error, panic and cancellation, and available again soon after a crash. A holder learns that its lease is
//! over before another client gets the lock, and every acquisition carries a fencing token.
//!
//! ```
//! use dlock::LockClient;
//! use std::time::Duration;
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! let client = LockClient::connect("memory://").await?; // redis://localhost in a service
//!
//! // Acquire it, work, release it.
//! let guard = client.lock("report").wait(Duration::from_secs(3)).acquire().await?;
//! println!("working, with token {}", guard.fencing_token());
//! guard.release().await?;
//!
//! // Or have a future run inside: what it calls may take the same lock again.
//! client.lock("report").run(|held| async move { held.fencing_token() }).await?;
//!
//! client.shutdown(Duration::from_secs(5)).await;
//! # Ok(()) }
//! ```
//!
//! With the attribute, a function runs once at a time for each key:
//!
//! ```
//! # #[cfg(feature = "macros")] mod example {
//! use dlock::distributed_lock;
//!
//! #[distributed_lock(key = "order:{order_id}", wait = "3s")]
//! async fn pay(order_id: u64) -> Result<String, dlock::Error> {
//!     Ok(format!("paid {order_id}")) // never twice at a time for one order
//! }
//! # }
//! ```
//!
//! `dlock-tower` does the same for HTTP requests, as a layer on an axum router or any Tower service.
//!
//! # Which to use
//!
//! | for | use |
//! |---|---|
//! | a function | `#[distributed_lock(key = ...)]` |
//! | a block of code that may call others which take the same lock | [`Lock::run`], or [`Lock::try_run`] to skip it if the lock is held |
//! | full control | [`Lock::acquire`], [`Lock::try_acquire`] and the [`LockGuard`] |
//! | data with many readers and some writers | [`LockClient::rw_lock`] |
//! | several locks, all or none, without deadlocks | [`LockClient::multi`] |
//! | waiters in order of arrival, across processes | [`LockClient::fair_lock`] |
//! | fencing tokens shared with Redisson's fenced lock | [`LockClient::fenced_lock`] |
//! | a limited number of holders at a time | [`LockClient::semaphore`] |
//! | waiting until a number of steps is done elsewhere | [`LockClient::latch`] |
//! | permits shared with Redisson's `RSemaphore` | [`LockClient::unowned_semaphore`] |
//! | work that one process does at a time, and another one takes over | [`LockClient::leader`] |
//! | work that is done once, not by each process in turn | `LockClient::once` and `#[once]` (feature `once`) |
//! | a job that a scheduler starts on many machines, once for each firing | `LockClient::once(key).every(period)` (feature `once`) |
//! | endpoints, jobs of a worker, messages of a queue | the layers of `dlock-tower` |
//! | one process only | `tokio::sync::Mutex` |
//!
//! Not every store has every kind: [docs/choosing.md](https://github.com/dlock-rs/dlock/blob/main/docs/choosing.md).
//!
//! # What is promised
//!
//! **When an expired lease lets the store grant a lock to another client, the guard of the former holder already
//! reports the loss**: also when the store hangs, the network is cut, or this process was stopped. The deadline is
//! counted by this process's own monotonic clock (on Linux one that keeps running while the machine sleeps), from
//! before the last successful renewal was sent, less a safety margin of 1 % of the lease and at least 10 ms.
//!
//! That assumes that the server keeps its data, that its clock does not jump forward by more than the margin, and that
//! the clocks' rates agree within 1 %. Where that does not hold (a fail-over that lost the write, a restart without the
//! data, a flush, an eviction, a forced release), the holder learns of it at its next renewal or check, and until then
//! two clients may believe that they hold the lock. So may a holder that does not check its guard. In both cases only
//! the **fencing token** protects, checked where the work is written:
//!
//! ```sql
//! UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
//! ```
//!
//! Tokens of a lock grow across release and expiry. On Redis, Valkey, PostgreSQL, MySQL and in memory they also grow
//! across a flush and a restart without data, unless the server's clock goes back as well. On etcd and ZooKeeper they
//! begin anew when all data are lost. After a fail-over that lost the last writes they may, in rare cases, repeat:
//! `docs/guarantees.md` has the conditions. A token that the resource does not check protects nothing.
//!
//! # Re-entry
//!
//! Code that runs inside a holder's future (a [`Lock::run`] closure, a locked function, a request under the lock layer,
//! [`LockGuard::scope`]) may take the same lock again at once, through the same client or a clone of it. Branches that run side by side there (`join!`,
//! `select!`, `buffered`) still exclude each other. Spawned tasks do not inherit; see [`scope`]. A bare guard encloses
//! no code: a second acquire of its lock in the same function waits, as with a `tokio::sync::Mutex`.
//!
//! Two waits look finite but are not: a spawned task that takes the lock while its holder awaits it, and a branch that
//! took the lock and is not polled any more. [`Lock::wait`] limits both; a wait inside the lock's own frame logs a
//! warning after a second.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
//! # use std::time::Duration;
//! # let client = dlock::LockClient::memory();
//! let lock = client.lock("report").wait(Duration::from_millis(50));
//! let inner = lock.clone();
//! lock.run(|_| async move {
//!     assert!(inner.acquire().await.is_ok()); // nested: enters
//!     let child = tokio::spawn(async move { inner.acquire().await.map(drop) });
//!     assert!(child.await.unwrap().unwrap_err().is_busy()); // spawned and awaited: would wait for ever
//! }).await?;
//! # Ok(()) }
//! ```
//!
//! # Synchronous code
//!
//! Without `async` there is no attribute and no [`Lock::run`], but every call is a future that any thread can wait for. A
//! lock is renewed by tasks of the runtime that built the client. So that runtime has threads of its own, and lives for as
//! long as the program: with `new_current_thread`, or a runtime that is made for one call, **nothing renews the lock while
//! the work runs**, and another process gets it after the lease.
//!
//! ```
//! use dlock::LockClient;
//! use std::time::Duration;
//!
//! # fn import(_token: u64) {}
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let runtime = tokio::runtime::Runtime::new()?; // with tokio's feature `rt-multi-thread`
//! let client = runtime.block_on(LockClient::connect("memory://"))?; // redis://localhost in a program
//!
//! let guard = runtime.block_on(client.lock("import").acquire())?;
//! import(guard.fencing_token());
//! guard.check()?; // a loss does not stop the work: ask between its steps
//! runtime.block_on(guard.release())?; // or drop it, in any thread
//!
//! runtime.block_on(client.shutdown(Duration::from_secs(5)));
//! # Ok(()) }
//! ```
//!
//! In a program that is otherwise async, such code runs in `spawn_blocking`, where `Handle::current().block_on(…)` waits.
//! `block_on` panics in a task. A guard of an async caller can be moved there, see [`Lock::run`].
//!
//! # Features
//!
//! | feature | gives |
//! |---|---|
//! | `macros` (default) | `#[distributed_lock]`; `#[once]` together with `once` |
//! | `redis` (default) | the Redis and Valkey store |
//! | `tls` | `rediss://` by rustls |
//! | `metrics` | metrics through the facade `metrics` 0.24: waits, holds, losses, near misses, requests to the store, by [group](LockOptions::group); [`buckets`] that suit them; [docs/metrics.md](https://github.com/dlock-rs/dlock/blob/main/docs/metrics.md) lists them |
//! | `once` | `LockClient::once`: work that is done once, however many processes ask for it |
//! | `axum` | `IntoResponse` of axum 0.8 for [`Error`], as problem+json |
//!
//! `tls` uses [rustls](https://docs.rs/rustls) with its cryptography provider `ring`. If another dependency of the program
//! adds `aws-lc-rs`, rustls does not choose between the two: every `rustls::ClientConfig::builder()` of the program panics
//! until one of them is installed. Such a program calls `rustls::crypto::ring::default_provider().install_default()`, or the
//! same of `aws_lc_rs`, when it starts. The connections of this crate need no default; `dlock-mysql` refuses to encrypt
//! without one.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(target_has_atomic = "64"))]
compile_error!("dlock needs 64-bit atomics, which this target does not have");

mod api;
mod base;
mod engine;
mod runtime;
#[cfg(dlock_sim)]
#[doc(hidden)]
pub mod sim;
pub mod store;
pub mod stores;
pub mod testing;

#[doc(hidden)]
pub mod __chance {
    //! The library's source of randomness, for the layers.

    pub use crate::base::chance::{fraction, jittered, next_id, shortened, uuid};
}
#[doc(hidden)]
pub mod __claim {
    //! The rules of claims for the layers.

    pub use crate::base::clock::now;
    pub use crate::engine::grant::surely_lasts;
    pub use crate::engine::timing::{may_outlast_lease, pause_after_failed_renewal, pause_while_held};
}
#[doc(hidden)]
pub mod __default {
    //! The default client around the caller, for the layers.

    pub use crate::api::default::{around, under};
}
#[doc(hidden)]
pub mod __text {
    //! The rules of what is shown to people, for the command.

    pub use crate::base::text::is_wild;
}
#[doc(hidden)]
pub use api::macro_support as __macro;
#[doc(hidden)]
pub use base::request as __request;

pub mod record {
    #![doc = include_str!("store/records.md")]

    pub use crate::store::records::*;
}
pub mod operations {
    //! The reports of clients, for the person on call: see [`LockClient::active`](crate::LockClient::active) and
    //! [`LockClient::clients`](crate::LockClient::clients).

    pub use crate::api::survey::{Survey, SurveyedLock};
    pub use crate::base::report::{
        ClientReport, HoldReport, Intervention, LossReason, ProcessState, WaitReport,
    };
    pub use crate::runtime::emit::events::{HoldEnd, LockEvent, LockEventKind, LockEvents};
    pub use crate::store::operations::Connection;
}
pub use runtime::emit::buckets;
pub use runtime::scope;

pub use api::builder::{DEFAULT_LEASE, DEFAULT_RETRY_FOR, LockClientBuilder};
pub use api::client::{LockClient, ShutdownReport};
pub use api::default::{RuntimeDefault, default_client, set_default, set_runtime_default, with_default};
pub use api::doctor::{Consequence, Diagnosis, Doctor};
pub use api::guard::LockGuard;
pub use api::health::Health;
pub use api::held::Held;
pub use api::latch::Latch;
pub use api::leader::{Leader, Term};
pub use api::lock::Lock;
pub use api::lost::Lost;
pub use api::multi::{MultiGuard, MultiLock};
#[cfg(feature = "once")]
pub use api::once::{
    NotRun, OnFailure, Once, OnceClaim, OnceError, OnceEvery, OnceReply, OnceSlot, SlotReply, Slots,
};
pub use api::read_write::RwLock;
pub use api::semaphore::{Permit, Semaphore, SemaphoreStatus, UnownedSemaphore};
pub use base::error::Error;
pub use base::hold_state::{HoldState, Loss};
pub use base::key::{LockKey, MAX_KEY_BYTES};
pub use base::kind::LockKind;
pub use base::problem::Problem;
#[cfg(feature = "macros")]
pub use dlock_macros::distributed_lock;
#[cfg(all(feature = "macros", feature = "once"))]
pub use dlock_macros::once;
pub use runtime::options::{Lease, LockOptions, MAX_AT_ONCE};
pub use store::credentials::Credentials;
pub use store::options::DEFAULT_TIMEOUT;

/// Returns the innermost unreleased hold whose frame the calling code runs in; `None` outside of every frame.
///
/// For code deep inside a locked function that needs the fencing token, or whether the lock is still held, without
/// having it passed down. See [`scope`].
///
/// It is `None` in a spawned task, and in a closure of `spawn_blocking`, or of `interact` of deadpool: read the token before,
/// and move it into the closure. Do not send 0 in its place: a check that accepts equal tokens would accept all such
/// writes.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// # let client = dlock::LockClient::memory();
/// async fn write() -> u64 {
///     dlock::current().expect("only called under a lock").fencing_token()
/// }
/// let token = client.lock("report").run(|_| write()).await?;
/// assert!(token > 0);
/// # Ok(()) }
/// ```
#[must_use]
pub fn current() -> Option<Held> {
    runtime::scope::innermost().map(Held::from)
}
