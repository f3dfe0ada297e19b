//! Work under a guard, from its acquire to its release.

use std::future::Future;

use dlock::{Error, Held, MultiGuard, Permit};
use tower_service::Service;

use super::bound::Running;
use super::error::TaskError;
use crate::lock::kept::note_release;

/// What work runs under.
pub(super) trait Guard: Send + 'static {
    fn view(&self) -> Held;
    fn run_in<F: Future + Send>(
        &self,
        work: F,
    ) -> impl Future<Output = Result<F::Output, Error>> + Send + use<Self, F>;
    fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send;
}

macro_rules! guard {
    ($guard:ty) => {
        impl Guard for $guard {
            fn view(&self) -> Held {
                self.held()
            }

            fn run_in<F: Future + Send>(
                &self,
                work: F,
            ) -> impl Future<Output = Result<F::Output, Error>> + Send + use<F> {
                self.run(work)
            }

            fn release_hold(self) -> impl Future<Output = Result<(), Error>> + Send {
                self.release()
            }
        }
    };
}

guard!(MultiGuard);
guard!(Permit);

/// The service that became ready, for one call; a clone of it, which did not, takes its stead.
pub(super) fn take_ready<S: Clone>(service: &mut S) -> S {
    let clone = service.clone();
    std::mem::replace(service, clone)
}

/// Acquires, calls the service, and releases. Dropped at any point, the work is dropped first, then the guard, then it
/// no longer counts for the bound.
pub(super) async fn work<G, S, R>(
    running: Running,
    acquire: impl Future<Output = Result<G, Error>> + Send,
    mut inner: S,
    request: R,
) -> Result<S::Response, TaskError<S::Error>>
where
    G: Guard,
    S: Service<R, Response: Send, Error: Send, Future: Send> + Send,
    R: Send,
{
    let _running = running.enter().await;
    let guard = acquire.await.map_err(TaskError::of_acquire)?;
    let outcome = guard.run_in(async move { inner.call(request).await }).await;
    let key = guard.view().key().clone();
    note_release(&key, guard.release_hold().await);
    match outcome {
        Ok(answer) => answer.map_err(TaskError::Inner),
        Err(lost) => Err(TaskError::of_hold(lost)),
    }
}
