//! Locks that outlive the future of their request.

use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use dlock::scope::{self, Scope};
use dlock::{Error, Held, LockKey, MultiGuard};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, select_all};
use smallvec::SmallVec;

use super::lost::{LockLost, OnLost};

/// The locks of one layer for one request. The layer owns them together with all [`KeptLocks`].
pub(super) struct Hold {
    guard: MultiGuard,
    on_lost: OnLost,
}

impl Hold {
    pub(super) fn new(guard: MultiGuard, on_lost: OnLost) -> Arc<Hold> {
        Arc::new(Hold { guard, on_lost })
    }

    pub(super) fn guard(&self) -> &MultiGuard {
        &self.guard
    }

    fn stops_at_loss(&self) -> bool {
        self.on_lost == OnLost::Stop
    }

    /// The loss that keeps the handler from beginning.
    pub(super) fn found_lost(&self) -> Option<LockLost> {
        let checked = self.stops_at_loss().then(|| self.guard.check());
        checked.and_then(LockLost::found)
    }

    /// Completes when the lock is lost; `None` if the handler runs on then.
    pub(super) fn lost(&self) -> Option<BoxFuture<'static, LockLost>> {
        let stops = self.stops_at_loss();
        stops.then(|| Box::pin(LockLost::of(self.guard.held())) as BoxFuture<'static, _>)
    }

    /// Polls the handler, unless it stops because the lock was lost, before it began or while it waited. `lost` is set when it
    /// waits for the first time: a handler that does not wait costs nothing but a check.
    pub(super) fn poll_handler<T>(
        &self,
        lost: &mut Option<BoxFuture<'static, LockLost>>,
        cx: &mut Context<'_>,
        handler: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<Result<T, LockLost>> {
        match lost {
            Some(waiting) => {
                if let Poll::Ready(lost) = waiting.poll_unpin(cx) {
                    return Poll::Ready(Err(lost));
                }
            }
            None => {
                if let Some(lost) = self.found_lost() {
                    return Poll::Ready(Err(lost));
                }
            }
        }
        if let Poll::Ready(output) = handler(cx) {
            return Poll::Ready(Ok(output));
        }
        if lost.is_some() {
            return Poll::Pending;
        }
        *lost = self.lost();
        match lost {
            Some(waiting) => waiting.poll_unpin(cx).map(Err),
            None => Poll::Pending,
        }
    }
}

/// Releases the lock and waits for that, so that the client with the answer finds the lock available. The answer is
/// sent, whether or not the release succeeds. Work that keeps the lock releases it later.
pub(super) async fn release_hold(hold: Option<Arc<Hold>>) {
    let Some(hold) = hold.and_then(Arc::into_inner) else {
        return;
    };
    let guard = hold.guard;
    let key = guard.held().key().clone();
    note_release(&key, guard.release().await);
}

/// Logs a release that was not confirmed in time: the answer of the work is sent all the same. The client sends the release
/// again, and warns of one that fails for good.
pub(crate) fn note_release(key: &LockKey, released: Result<(), Error>) {
    match released {
        Ok(()) => {}
        Err(error) if error.is_lost() => {
            tracing::debug!(%key, %error, "the lock of a request was lost before its release");
        }
        Err(error) => {
            tracing::debug!(%key, %error, "the release of the lock of a request was not confirmed");
        }
    }
}

/// The locks of a request, for work that outlives the request. A [`LockLayer`](crate::LockLayer) puts it into the
/// request's extensions, next to [`Held`].
///
/// The layer releases its lock when the handler has answered, and when the client goes away. A handler or an inner
/// layer that spawns work has to [keep](Self::keep) the lock for it. The [`IdempotencyLayer`](crate::IdempotencyLayer)
/// does so for a handler that runs on without its client.
///
/// This handle itself keeps nothing: a copy that is left in some extensions does not prolong a lock. Behind several
/// lock layers it stands for the locks of all of them.
///
/// ```
/// use bytes::Bytes;
/// use dlock_tower::lock::RequestLocks;
/// use http::{Request, Response};
/// use http_body_util::Full;
///
/// async fn export(request: Request<Full<Bytes>>) -> Response<Full<Bytes>> {
///     let kept = request.extensions().get::<RequestLocks>().and_then(RequestLocks::keep);
///     if let Some(kept) = kept {
///         tokio::spawn(kept.run(async { /* goes on under the lock, after the answer */ }));
///     }
///     Response::new(Full::from("begun"))
/// }
/// # let _ = export;
/// ```
#[derive(Clone, Default)]
pub struct RequestLocks {
    /// Outermost first.
    holds: SmallVec<[Weak<Hold>; 1]>,
}

impl RequestLocks {
    /// Adds one more lock inside these.
    pub(super) fn with(mut self, hold: &Arc<Hold>) -> RequestLocks {
        self.holds.push(Arc::downgrade(hold));
        self
    }

    /// Keeps the locks until the returned value is dropped; `None` when a layer has already released one.
    #[must_use]
    pub fn keep(&self) -> Option<KeptLocks> {
        let holds: Option<Vec<_>> = self.holds.iter().map(Weak::upgrade).collect();
        holds.map(|holds| KeptLocks { holds })
    }

    /// Keeps those of the locks that no layer has released yet.
    pub(crate) fn keep_rest(&self) -> KeptLocks {
        KeptLocks {
            holds: self.holds.iter().filter_map(Weak::upgrade).collect(),
        }
    }
}

impl fmt::Debug for RequestLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.keep_rest().holds.fmt(f)
    }
}

/// Locks of a request that stay held until this is dropped; created by [`RequestLocks::keep`].
///
/// The layer's answer does not wait for it: the lock passes on when the answer has been sent *and* this is dropped.
/// `max_hold` and a fixed lease continue to count. [`LockClient::shutdown`](dlock::LockClient::shutdown) counts the
/// locks as held.
///
/// ```
/// use axum::Extension;
/// use dlock_tower::lock::RequestLocks;
///
/// async fn order(Extension(locks): Extension<RequestLocks>) -> &'static str {
///     if let Some(kept) = locks.keep() {
///         // The lock passes on when the mail is sent, which the response does not wait for.
///         tokio::spawn(kept.run(async { /* send the mail */ }));
///     }
///     "ordered"
/// }
/// # let _ = axum::Router::<()>::new().route("/", axum::routing::post(order));
/// ```
#[derive(Default)]
#[must_use = "the locks are released when this is dropped"]
pub struct KeptLocks {
    /// Outermost first.
    holds: Vec<Arc<Hold>>,
}

impl KeptLocks {
    /// Returns views of the locks, those of the outermost layer first.
    pub fn held(&self) -> impl Iterator<Item = Held> {
        self.holds.iter().map(|hold| hold.guard.held())
    }

    /// Whether a lock is lost whose layer stops its handler then.
    pub(crate) fn is_lost(&self) -> bool {
        let mut stopping = self.holds.iter().filter(|hold| hold.stops_at_loss());
        stopping.any(|hold| !hold.guard.is_held())
    }

    /// Waits until a lock is lost whose layer has [`OnLost::Stop`]; for ever if there is none. The future keeps nothing
    /// alive.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub fn lost(&self) -> impl Future<Output = LockLost> + Send + use<> {
        let stopping = self.holds.iter().filter(|hold| hold.stops_at_loss());
        let lost: Vec<_> = stopping
            .map(|hold| Box::pin(LockLost::of(hold.guard.held())))
            .collect();
        async move {
            if lost.is_empty() {
                return pending().await;
            }
            let (lost, ..) = select_all(lost).await;
            lost
        }
    }

    /// Runs a future in the frames of the locks, so that an acquire of one of them inside re-enters, and releases the
    /// locks at its end. A future whose lock is lost is dropped, unless the lock's layer has [`OnLost::RunOn`].
    ///
    /// Meant to be spawned: the future also has the client of [`dlock::with_default`] around this call. The future is boxed.
    ///
    /// # Errors
    ///
    /// [`LockLost`] when a lock was lost before the future was done.
    ///
    /// # Cancel safety
    ///
    /// When it is dropped, the future inside is dropped first and then the locks are released.
    pub fn run<F>(self, future: F) -> impl Future<Output = Result<F::Output, LockLost>> + use<F>
    where
        F: Future,
    {
        // In a task of its own it would not have the default client of the request any more.
        let client = dlock::__default::around();
        let work = dlock::__default::under(client, self.frames().wrap(future));
        let mut running = Running {
            work: Box::pin(work),
            kept: self,
        };
        async move {
            let output = tokio::select! {
                biased;
                lost = running.kept.lost() => Err(lost),
                output = &mut running.work => Ok(output),
            };
            // A stalled runtime may deliver the notification late.
            let output = match running.kept.lost().now_or_never() {
                Some(lost) => Err(lost),
                None => output,
            };
            let Running { work, kept } = running;
            drop(work);
            kept.release().await;
            output
        }
    }

    /// Releases the locks and waits until the store has confirmed it, unless other work keeps them too. A release that fails
    /// for good is logged; then the lock ends with its lease.
    ///
    /// # Cancel safety
    ///
    /// When it is dropped, the release continues in the background.
    pub async fn release(mut self) {
        while let Some(hold) = self.holds.pop() {
            release_hold(Some(hold)).await;
        }
    }

    /// Returns the frames of the locks only.
    fn frames(&self) -> Scope {
        self.holds.iter().fold(Scope::default(), |outer, hold| {
            let inside = async { hold.guard.scope(async { scope::current() }).await };
            outer.wrap(inside).now_or_never().unwrap_or_default()
        })
    }
}

impl Drop for KeptLocks {
    // The innermost first.
    fn drop(&mut self) {
        while let Some(hold) = self.holds.pop() {
            drop(hold);
        }
    }
}

impl fmt::Debug for KeptLocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.holds.fmt(f)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.guard.fmt(f)
    }
}

/// The work comes first: its destructors run under the locks.
struct Running<F> {
    work: Pin<Box<F>>,
    kept: KeptLocks,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dlock::LockClient;
    use futures_util::task::noop_waker_ref;

    use super::*;

    /// As of a process that stood still between the acquire and the first poll of the handler.
    #[tokio::test]
    async fn handler_does_not_begin_after_the_end_of_the_lease() {
        const LEASE: Duration = Duration::from_millis(50);
        for on_lost in [OnLost::Stop, OnLost::RunOn] {
            let lock = LockClient::memory().multi(["k"]).lease(LEASE);
            let hold = Hold::new(lock.acquire().await.unwrap(), on_lost);
            std::thread::sleep(2 * LEASE);
            let (mut lost, mut begun) = (None, false);
            let polled = hold.poll_handler(&mut lost, &mut Context::from_waker(noop_waker_ref()), |_| {
                begun = true;
                Poll::Ready(())
            });
            let stops = on_lost == OnLost::Stop;
            assert_eq!(begun, !stops);
            assert!(matches!(polled, Poll::Ready(outcome) if outcome.is_err() == stops));
        }
    }
}
