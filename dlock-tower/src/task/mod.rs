//! Layers for every Tower service, whatever its requests are: workers, consumers of queues, RPC.
//!
//! | layer | for |
//! |---|---|
//! | [`TaskLockLayer`] | jobs that must not run at the same time for one account, file, tenant |
//! | [`LimitLayer`] | at most so many jobs of a tenant at a time, over all processes |
#![cfg_attr(
    feature = "once",
    doc = "| [`TaskOnceLayer`] | messages that are delivered more than once, and done once (feature `once`) |"
)]
#![cfg_attr(
    not(feature = "once"),
    doc = "| `TaskOnceLayer` | messages that are delivered more than once, and done once (feature `once`) |"
)]
//!
//! They know nothing of HTTP, whose clients need an answer: the [layers for HTTP](crate) are apart. A worker requeues a job
//! whose lock is [busy](TaskError::Busy), so by default none of them waits. The guide is
//! [docs/tasks.md](https://github.com/dlock-rs/dlock/blob/main/docs/tasks.md).

mod bound;
mod error;
mod limit;
mod lock;
#[cfg(feature = "once")]
mod once;
mod options;
mod work;

pub use error::TaskError;
pub use limit::{LimitLayer, LimitService};
pub use lock::{TaskLockLayer, TaskLockService};
#[cfg(feature = "once")]
#[cfg_attr(docsrs, doc(cfg(feature = "once")))]
pub use once::{Done, TaskOnceError, TaskOnceLayer, TaskOnceService};
