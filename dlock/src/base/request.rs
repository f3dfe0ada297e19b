//! What a layer with idempotency keys learns about the locked functions that it runs. Not for direct use: it changes
//! without notice.
//!
//! A locked function that did not get its lock has done nothing, and the key of its request may be released. Its error
//! becomes a response without access to the request, so the layer polls its handler within a [`Request`], which records
//! the refusal.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::task::Id;

use crate::Error;

/// A request for which a layer has claimed a key. Clones share it.
#[derive(Clone, Default)]
pub struct Request(Arc<Mutex<Progress>>);

#[derive(Default)]
enum Progress {
    #[default]
    Nothing,
    /// A locked function that may be the handler did not get its lock; the message of its error.
    Refused(String),
    /// The body of a locked function has begun.
    Begun,
}

/// A response extension: the response reports the error of a locked function whose body did not begin.
#[derive(Debug, Clone)]
pub struct Refused(Request);

impl Refused {
    /// Whether this very request began nothing.
    #[must_use]
    pub fn is_of(&self, request: &Request) -> bool {
        Arc::ptr_eq(&self.0.0, &request.0) && !matches!(*request.0.lock(), Progress::Begun)
    }
}

impl Request {
    /// Polls the handler of this request.
    pub fn run<F: Future>(&self, handler: F) -> Within<F> {
        Within {
            handler,
            request: self.clone(),
        }
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").finish_non_exhaustive()
    }
}

/// Records the result of the acquire of a locked function.
///
/// Only with `may_be_handler` does a refusal concern the whole request. A function that cannot be a handler is called
/// by one, which may have had effects before.
pub(crate) fn note<T>(acquired: &Result<T, Error>, may_be_handler: bool) {
    let Some(request) = current() else { return };
    let mut progress = request.0.lock();
    match acquired {
        Ok(_) => *progress = Progress::Begun,
        Err(error) if may_be_handler && !error.is_lost() && !matches!(*progress, Progress::Begun) => {
            *progress = Progress::Refused(error.to_string());
        }
        Err(_) => {}
    }
}

/// Whether the error is the reason for which the request being polled was refused.
#[cfg_attr(
    not(feature = "axum"),
    allow(dead_code, reason = "errors become responses by that feature")
)]
pub(crate) fn refused_by(error: &Error) -> Option<Refused> {
    let request = current()?;
    let is_it = match &*request.0.lock() {
        Progress::Refused(message) => *message == error.to_string(),
        Progress::Nothing | Progress::Begun => false,
    };
    is_it.then_some(Refused(request))
}

struct Active {
    request: Request,
    /// The task that polls the handler: other tasks polled from within are not part of it.
    task: Option<Id>,
}

thread_local! {
    static ACTIVE: RefCell<Option<Active>> = const { RefCell::new(None) };
}

fn current() -> Option<Request> {
    let active = ACTIVE.try_with(|slot| match &*slot.borrow() {
        Some(active) if active.task == tokio::task::try_id() => Some(active.request.clone()),
        _ => None,
    });
    active.ok().flatten()
}

pin_project! {
    /// The handler of a request; created by [`Request::run`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Within<F> {
        #[pin]
        handler: F,
        request: Request,
    }
}

impl<F: Future> Future for Within<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let active = Active {
            request: this.request.clone(),
            task: tokio::task::try_id(),
        };
        let _outer = Restored(
            ACTIVE
                .try_with(|slot| slot.replace(Some(active)))
                .unwrap_or_default(),
        );
        this.handler.poll(cx)
    }
}

impl<F> fmt::Debug for Within<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Within").finish_non_exhaustive()
    }
}

/// Restores the outer request as the active one, also after a panic.
struct Restored(Option<Active>);

impl Drop for Restored {
    fn drop(&mut self) {
        let outer = self.0.take();
        drop(ACTIVE.try_with(|slot| slot.replace(outer)));
    }
}
