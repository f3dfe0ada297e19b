//! How many requests of a layer run in this process at a time.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

/// The bound of a layer, which all its services share.
#[derive(Clone, Default)]
pub(super) struct Bound(Option<Arc<Semaphore>>);

impl Bound {
    pub(super) fn of(most: usize) -> Bound {
        Bound(Some(Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)))))
    }

    pub(super) fn place(&self) -> Place {
        Place {
            semaphore: self.0.clone().map(PollSemaphore::new),
            reserved: None,
        }
    }
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = self.0.as_ref().map(|semaphore| semaphore.available_permits());
        f.debug_struct("Bound").field("free", &free).finish()
    }
}

/// The place that one service may have reserved below its bound. A clone has reserved none.
#[derive(Debug)]
pub(super) struct Place {
    semaphore: Option<PollSemaphore>,
    reserved: Option<OwnedSemaphorePermit>,
}

/// A place that is taken, until this is dropped.
#[derive(Debug)]
pub(super) enum Taken {
    Here(#[allow(dead_code, reason = "it is held")] Option<OwnedSemaphorePermit>),
    /// The service was called without having been ready.
    Later(Arc<Semaphore>),
}

impl Place {
    pub(super) fn poll_reserve(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let (Some(semaphore), None) = (&mut self.semaphore, &self.reserved) {
            self.reserved = ready!(semaphore.poll_acquire(cx));
        }
        Poll::Ready(())
    }

    /// The reserved place, for one call.
    pub(super) fn take(&mut self) -> Taken {
        match (self.reserved.take(), &self.semaphore) {
            (None, Some(semaphore)) => Taken::Later(semaphore.clone_inner()),
            (reserved, _) => Taken::Here(reserved),
        }
    }
}

impl Taken {
    /// Waits for the place, unless it was reserved.
    pub(super) async fn enter(self) -> Taken {
        match self {
            // It is never closed.
            Taken::Later(semaphore) => Taken::Here(semaphore.acquire_owned().await.ok()),
            here => here,
        }
    }
}

impl Clone for Place {
    fn clone(&self) -> Place {
        Place {
            semaphore: self.semaphore.clone(),
            reserved: None,
        }
    }
}
