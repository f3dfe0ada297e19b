//! How many requests of a layer run in this process at a time.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use dlock::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

/// The bound of a layer, which all its services share.
#[derive(Clone, Default)]
pub(super) struct Bound {
    /// `None` if there is no bound, or zero was given, with which no service would ever be ready.
    semaphore: Option<Arc<Semaphore>>,
    is_zero: bool,
}

impl Bound {
    pub(super) fn of(most: usize) -> Bound {
        let is_zero = most == 0;
        let semaphore = || Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        Bound {
            semaphore: (!is_zero).then(semaphore),
            is_zero,
        }
    }

    /// Fails for a bound below which no request would ever run.
    pub(super) fn check(&self) -> Result<(), Error> {
        match self.is_zero {
            true => Err(Error::invalid_option(
                "at_most_here",
                "it is zero, so that no request would ever run",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn reservation(&self) -> Reservation {
        Reservation {
            bound: self.clone(),
            semaphore: self.semaphore.clone().map(PollSemaphore::new),
            reserved: None,
        }
    }
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let semaphore = self.semaphore.as_ref();
        let free = semaphore.map(|semaphore| semaphore.available_permits());
        f.debug_struct("Bound").field("free", &free).finish()
    }
}

/// What one service may have reserved below its bound. A clone has reserved nothing.
#[derive(Debug)]
pub(super) struct Reservation {
    bound: Bound,
    semaphore: Option<PollSemaphore>,
    reserved: Option<OwnedSemaphorePermit>,
}

/// A request that counts for the bound, until this is dropped.
#[derive(Debug)]
pub(super) enum Running {
    Now(#[allow(dead_code, reason = "it is held")] Option<OwnedSemaphorePermit>),
    /// The service was called without having been ready.
    Later(Arc<Semaphore>),
}

impl Reservation {
    pub(super) fn poll_reserve(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let (Some(semaphore), None) = (&mut self.semaphore, &self.reserved) {
            self.reserved = ready!(semaphore.poll_acquire(cx));
        }
        Poll::Ready(())
    }

    /// Takes the reservation for one call. Fails as [`Bound::check`].
    pub(super) fn take(&mut self) -> Result<Running, Error> {
        self.bound.check()?;
        Ok(match (self.reserved.take(), &self.bound.semaphore) {
            (None, Some(semaphore)) => Running::Later(semaphore.clone()),
            (reserved, _) => Running::Now(reserved),
        })
    }
}

impl Running {
    /// Waits until the request may run, unless that was reserved.
    pub(super) async fn enter(self) -> Running {
        match self {
            // It is never closed.
            Running::Later(semaphore) => Running::Now(semaphore.acquire_owned().await.ok()),
            now => now,
        }
    }
}

impl Clone for Reservation {
    fn clone(&self) -> Reservation {
        self.bound.reservation()
    }
}
