//! The client that `#[distributed_lock]` uses where no `lock = ...` is given: that of the enclosing code, of the
//! runtime, or of the process.

use std::fmt;
use std::future::Future;
use std::sync::LazyLock;

use futures_util::future::Either;
use parking_lot::RwLock;
use tokio::runtime;

use crate::base::chance::{HashMap, next_id};
use crate::{Error, LockClient};

static PROCESS: RwLock<Option<LockClient>> = RwLock::new(None);

/// The defaults of each runtime; the last one counts.
static RUNTIMES: LazyLock<RwLock<HashMap<runtime::Id, Vec<Entry>>>> = LazyLock::new(RwLock::default);

struct Entry {
    id: u64,
    client: LockClient,
}

tokio::task_local! {
    static AROUND: LockClient;
}

/// Sets the default client of the whole process, which `#[distributed_lock]` uses where no `lock = ...` is given. Call
/// it once, at start-up.
///
/// Tests that run side by side in one process need a client each: see [`set_runtime_default`] and [`with_default`],
/// which take precedence.
///
/// # Errors
///
/// [`Error::DefaultClientSet`] when it was set before, unless that client is shut down or its runtime has ended: such a
/// client is replaced.
pub fn set_default(client: LockClient) -> Result<(), Error> {
    let mut process = PROCESS.write();
    if process.as_ref().is_some_and(|set| !set.is_closed()) {
        return Err(Error::DefaultClientSet);
    }
    let closed = process.replace(client);
    drop(process);
    // Its destructor is not run under the lock.
    drop(closed);
    Ok(())
}

/// Sets the default client of the current tokio runtime, for as long as the returned value lives.
///
/// All tasks of that runtime use it, spawned ones too, and no other runtime does. Each `#[tokio::test]` has a runtime of
/// its own, so each test has its own locks:
///
/// ```
/// # #[cfg(feature = "macros")] mod example {
/// use dlock::{LockClient, distributed_lock};
///
/// #[distributed_lock(key = "order:{order_id}", wait = "3s")]
/// async fn pay(order_id: u64) -> Result<String, dlock::Error> {
///     Ok(format!("paid {order_id}"))
/// }
///
/// # /*
/// #[tokio::test]
/// # */ #[tokio::main(flavor = "current_thread")] pub
/// async fn paying_says_which_order() {
///     let _default = dlock::set_runtime_default(LockClient::memory());
///     assert_eq!(pay(7).await.unwrap(), "paid 7");
/// }
/// # }
/// # #[cfg(feature = "macros")] example::paying_says_which_order();
/// ```
///
/// # Panics
///
/// Outside of a tokio runtime.
pub fn set_runtime_default(client: LockClient) -> RuntimeDefault {
    let set = RuntimeDefault {
        runtime: runtime::Handle::current().id(),
        id: next_id(),
    };
    let entry = Entry { id: set.id, client };
    RUNTIMES.write().entry(set.runtime).or_default().push(entry);
    set
}

/// A default client of a runtime; made by [`set_runtime_default`]. Dropping it restores the default that was set before.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{LockClient, default_client, set_runtime_default};
///
/// let default = set_runtime_default(LockClient::memory());
/// assert!(default_client().is_ok());
/// drop(default);
/// assert!(default_client().is_err());
/// # Ok(()) }
/// ```
#[must_use = "the default client is unset when this is dropped"]
pub struct RuntimeDefault {
    runtime: runtime::Id,
    id: u64,
}

impl Drop for RuntimeDefault {
    fn drop(&mut self) {
        let mut runtimes = RUNTIMES.write();
        let Some(entries) = runtimes.get_mut(&self.runtime) else {
            return;
        };
        let at = entries.iter().position(|entry| entry.id == self.id);
        let unset = at.map(|at| entries.remove(at));
        if entries.is_empty() {
            runtimes.remove(&self.runtime);
        }
        drop(runtimes);
        // Its destructor is not run under the lock.
        drop(unset);
    }
}

impl fmt::Debug for RuntimeDefault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuntimeDefault")
            .field("runtime", &self.runtime)
            .finish_non_exhaustive()
    }
}

/// Runs a future with its own default client, whichever runtime polls it. Tasks that it spawns do not inherit the
/// client.
///
/// ```
/// # #[cfg(feature = "macros")] {
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::{LockClient, distributed_lock, with_default};
///
/// #[distributed_lock(key = "report")]
/// async fn report() -> Result<&'static str, dlock::Error> {
///     Ok("written")
/// }
///
/// let tenant = LockClient::memory();
/// assert_eq!(with_default(tenant, report()).await?, "written");
/// # Ok(()) } main().unwrap() }
/// ```
///
/// # Cancel safety
///
/// Dropping the returned future drops the inner future.
pub fn with_default<F: Future>(client: LockClient, future: F) -> impl Future<Output = F::Output> {
    AROUND.scope(client, future)
}

/// Returns the client of the innermost [`with_default`] around the caller, for work that goes on in a task of its own.
#[must_use]
pub fn around() -> Option<LockClient> {
    AROUND.try_with(Clone::clone).ok()
}

/// Runs a future under the client of [`around`], if there was one where the work began.
pub fn under<F: Future>(client: Option<LockClient>, future: F) -> impl Future<Output = F::Output> {
    match client {
        Some(client) => Either::Left(with_default(client, future)),
        None => Either::Right(future),
    }
}

/// Returns the client that `#[distributed_lock]` uses where no `lock = ...` is given: that of the innermost
/// [`with_default`] around the caller, else that of its runtime ([`set_runtime_default`]), else that of the process
/// ([`set_default`]).
///
/// # Errors
///
/// [`Error::NoDefaultClient`], which says what to call.
pub fn default_client() -> Result<LockClient, Error> {
    around()
        .or_else(of_runtime)
        .or_else(|| PROCESS.read().clone())
        .ok_or(Error::NoDefaultClient)
}

fn of_runtime() -> Option<LockClient> {
    let runtimes = RUNTIMES.read();
    if runtimes.is_empty() {
        return None;
    }
    let runtime = runtime::Handle::try_current().ok()?.id();
    Some(runtimes.get(&runtime)?.last()?.client.clone())
}
