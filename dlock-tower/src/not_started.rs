//! The mark of a request that was not begun.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use http::Extensions;

use crate::problem::Problem;

/// States, in the extensions of a response, that the requested work has not begun.
///
/// The layers of this crate put it into every answer that they give before the handler runs, but for those of
/// [`IdempotencyLayer`](crate::IdempotencyLayer) that tell of an equal request. Outer layers read it to
/// distinguish "nothing happened, try again" from "the progress is unknown": a 503 without it may have had effects. An
/// [`IdempotencyLayer`](crate::IdempotencyLayer) releases the key of such a request.
///
/// It concerns one request. The layer counts it only if it was made [of](Self::of) the extensions of the request that
/// the layer has passed in: a handler that passes on the answer of another router, or the answer to another request,
/// keeps its key. Around a whole router, on a fallback, or without axum, the layer cannot tell another router from its own: there
/// a handler that passes *its own* request on to one must remove the mark from the answer. In axum a router that is the service of a single route (`route_service`) counts as another one; nest
/// it.
///
/// A layer in between may send a request more than once, and the mark of one copy says nothing of the others. So the mark
/// does not count if a [`LockLayer`](crate::LockLayer) further in than its maker has let the request in, or a copy of it.
/// If there is no lock layer behind it, such a layer has to remove the mark from its answer itself.
///
/// A handler or your own layer that refuses a request before it has had any effect returns it:
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::response::IntoResponse;
/// use dlock_tower::NotStarted;
/// use http::StatusCode;
/// use tower::load_shed::error::Overloaded;
///
/// async fn charge(not_started: NotStarted) -> impl IntoResponse {
///     // The shop is closed, and no card was charged: a retry with the same key runs.
///     (StatusCode::SERVICE_UNAVAILABLE, not_started, "closed until 8")
/// }
///
/// /// For `HandleErrorLayer` around `tower::load_shed`. With its own error it has refused before it called the handler. It
/// /// also passes on the errors of the services inside, such as a timeout, after which a retry must not run.
/// async fn overloaded(not_started: NotStarted, error: tower::BoxError) -> impl IntoResponse {
///     let not_started = error.is::<Overloaded>().then_some(not_started);
///     (StatusCode::SERVICE_UNAVAILABLE, not_started, "overloaded")
/// }
/// # let _ = (charge, overloaded);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotStarted {
    /// `None` where no layer has handed the request in.
    request: Option<u64>,
    /// How many layers have let the request in on its way to where the mark was made.
    admitted: usize,
}

impl NotStarted {
    /// The mark of the request that has these extensions.
    ///
    /// ```
    /// use dlock_tower::NotStarted;
    ///
    /// fn refuse(request: &http::Request<()>) -> http::Response<&'static str> {
    ///     let mut response = http::Response::new("closed");
    ///     response.extensions_mut().insert(NotStarted::of(request.extensions()));
    ///     response
    /// }
    /// # assert!(refuse(&http::Request::default()).extensions().get::<NotStarted>().is_some());
    /// ```
    #[must_use]
    pub fn of(request: &Extensions) -> NotStarted {
        match request.get::<Token>() {
            Some(token) if token.place.leads_to(request) => token.mark,
            _ => NotStarted {
                request: None,
                admitted: 0,
            },
        }
    }

    fn of_new_request() -> NotStarted {
        NotStarted {
            request: Some(dlock::__chance::next_id()),
            admitted: 0,
        }
    }

    /// The mark of a request that found an equal one at work.
    pub(crate) fn in_progress(self) -> InProgress {
        InProgress(self)
    }
}

/// A request that an idempotency layer has handed in: what its answer says of it is told apart from what it says
/// of others.
pub(crate) struct HandedIn {
    mark: NotStarted,
    beginning: Arc<Beginning>,
    /// The mark for a layer further out.
    outer: NotStarted,
    /// The same, as locked functions know it.
    locks: dlock::__request::Request,
}

impl HandedIn {
    /// Leaves the mark in the request.
    pub(crate) fn new(
        request: &mut Extensions,
        beginning: Arc<Beginning>,
        claim: Arc<dyn OuterClaim>,
    ) -> HandedIn {
        let outer = NotStarted::of(request);
        let mark = NotStarted::of_new_request();
        let place = Place::of(request);
        request.insert(Token {
            mark,
            place,
            beginning: beginning.clone(),
            claim,
        });
        HandedIn {
            mark,
            beginning,
            outer,
            locks: dlock::__request::Request::default(),
        }
    }

    /// Polls the handler of the request.
    pub(crate) fn run<F: Future>(&self, handler: F) -> dlock::__request::Within<F> {
        self.locks.run(handler)
    }

    /// Whether the answer says that this request was not begun. From then on it says so to layers further out, and
    /// nothing of any other request.
    pub(crate) fn was_not_begun(&self, answer: &mut Extensions) -> bool {
        let refused = answer.remove::<dlock::__request::Refused>();
        // Let in more often than on the way of the mark: the request was let in on another way too.
        let mark = NotStarted {
            admitted: self.beginning.admitted(),
            ..self.mark
        };
        let not_started = answer.remove::<NotStarted>() == Some(mark)
            || refused.is_some_and(|refused| refused.is_of(&self.locks));
        let in_progress = answer.remove::<InProgress>() == Some(mark.in_progress());
        if not_started {
            answer.insert(self.outer);
        }
        if in_progress {
            answer.insert(self.outer.in_progress());
        }
        not_started || in_progress
    }
}

/// What a layer leaves in the request that it hands in.
#[derive(Clone)]
struct Token {
    mark: NotStarted,
    place: Place,
    beginning: Arc<Beginning>,
    claim: Arc<dyn OuterClaim>,
}

/// The claim under which a request was handed in. It may be lost while the request waits at a layer further in.
pub(crate) trait OuterClaim: Send + Sync {
    /// Whether it is certain that no other copy of the request has begun.
    fn is_held(&self) -> bool;

    /// Asks the store when it is not certain. The error is the answer to the request, which must not begin.
    fn confirmed(self: Arc<Self>) -> BoxFuture<'static, Result<(), Problem>>;
}

/// This claim, with those of layers further out on whose way the request still is.
pub(crate) fn with_outer(request: &Extensions, inner: Arc<dyn OuterClaim>) -> Arc<dyn OuterClaim> {
    match request.get::<Token>() {
        Some(token) if token.place.leads_to(request) => Arc::new(Claims {
            outer: token.claim.clone(),
            inner,
        }),
        _ => inner,
    }
}

/// The claims of a request of two idempotency layers, one in the other.
struct Claims {
    outer: Arc<dyn OuterClaim>,
    inner: Arc<dyn OuterClaim>,
}

impl OuterClaim for Claims {
    fn is_held(&self) -> bool {
        self.outer.is_held() && self.inner.is_held()
    }

    fn confirmed(self: Arc<Self>) -> BoxFuture<'static, Result<(), Problem>> {
        Box::pin(async move {
            // One may end while the other is asked for.
            while !self.is_held() {
                self.outer.clone().confirmed().await?;
                self.inner.clone().confirmed().await?;
            }
            Ok(())
        })
    }
}

/// Whether a request has begun, as the layers tell that it was to pass.
#[derive(Debug, Default)]
pub(crate) struct Beginning {
    /// How often a layer has let the request in. A layer in between may send it more than once.
    admitted: AtomicUsize,
    stopping: AtomicBool,
    not_begun: AtomicBool,
    /// The service behind a layer failed before the layer let the request in, in this poll of the request's work. After an
    /// earlier poll, a layer in between may have sent the request on another way.
    has_failed: AtomicBool,
}

impl Beginning {
    fn admitted(&self) -> usize {
        self.admitted.load(Ordering::Relaxed)
    }

    /// Called before each poll of the request's work.
    pub(crate) fn forget_failure(&self) {
        self.has_failed.store(false, Ordering::Relaxed);
    }

    /// Whether the error of the work is that of a service which failed before the request was let in.
    pub(crate) fn has_failed_before(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Drops the work of the request, and returns whether a layer was still to let it in.
    pub(crate) fn stop(&self, work: impl FnOnce()) -> bool {
        self.stopping.store(true, Ordering::Relaxed);
        work();
        self.not_begun.load(Ordering::Relaxed)
    }
}

/// A layer that is to let a request in. Dropped before that while the work is stopped, it says that the request was
/// not begun.
pub(crate) struct Entry {
    beginning: Arc<Beginning>,
    admitted: usize,
    claim: Arc<dyn OuterClaim>,
}

impl Entry {
    /// `None` where no layer further out asks.
    pub(crate) fn of(request: &Extensions) -> Option<Entry> {
        let token = request.get::<Token>()?;
        token.place.leads_to(request).then(|| Entry {
            beginning: token.beginning.clone(),
            admitted: token.mark.admitted,
            claim: token.claim.clone(),
        })
    }

    /// The claim of the request, if another copy of the request may have taken it over meanwhile.
    pub(crate) fn claim_in_doubt(&self) -> Option<Arc<dyn OuterClaim>> {
        (!self.claim.is_held()).then(|| self.claim.clone())
    }

    /// The service behind the layer has failed, and was not asked.
    pub(crate) fn fail(self) {
        if !self.was_let_in_elsewhere() {
            self.beginning.has_failed.store(true, Ordering::Relaxed);
        }
    }

    /// Let in more often than by the layers further out on this way: the request was let in on another way too.
    fn was_let_in_elsewhere(&self) -> bool {
        self.beginning.admitted() != self.admitted
    }

    /// The layer lets the request in.
    pub(crate) fn admit(self, request: &mut Extensions) {
        self.beginning.admitted.fetch_add(1, Ordering::Relaxed);
        self.beginning.forget_failure();
        if let Some(token) = request.get_mut::<Token>() {
            token.mark.admitted += 1;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.beginning.stopping.load(Ordering::Relaxed) && !self.was_let_in_elsewhere() {
            self.beginning.not_begun.store(true, Ordering::Relaxed);
        }
    }
}

/// Where in the routers a request was handed in. A handler may pass it on to another router, after effects.
#[derive(Clone)]
struct Place {
    #[cfg(feature = "axum")]
    route: Option<axum::extract::MatchedPath>,
    #[cfg(feature = "axum")]
    nest: Option<axum::extract::NestedPath>,
}

#[cfg(feature = "axum")]
impl Place {
    fn of(request: &Extensions) -> Place {
        Place {
            route: request.get().cloned(),
            nest: request.get().cloned(),
        }
    }

    /// Whether the request is still on its way to the handler of its route. Every other router with a route of its own
    /// is another way, except one that is nested as a service at that route.
    fn leads_to(&self, request: &Extensions) -> bool {
        let now = Place::of(request);
        let Some(then) = &self.route else {
            return true;
        };
        // The text is shared by all requests of a route, and by no others.
        let same_route = now
            .route
            .as_ref()
            .is_some_and(|now| std::ptr::eq(then.as_str(), now.as_str()));
        let nest = |place: &Place| {
            let nest = place.nest.as_ref()?;
            Some(nest.as_str().trim_end_matches('/').to_owned())
        };
        let nested_here =
            nest(self) != nest(&now) && nest(&now).as_deref() == Some(then.as_str().trim_end_matches('/'));
        same_route || nested_here
    }
}

#[cfg(not(feature = "axum"))]
impl Place {
    fn of(_: &Extensions) -> Place {
        Place {}
    }

    fn leads_to(&self, _: &Extensions) -> bool {
        true
    }
}

/// States, in the extensions of a response, that a layer further in found an equal request at work, and so has
/// not begun this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InProgress(NotStarted);

#[cfg(feature = "axum")]
impl axum::response::IntoResponseParts for NotStarted {
    type Error = std::convert::Infallible;

    fn into_response_parts(
        self,
        mut parts: axum::response::ResponseParts,
    ) -> Result<axum::response::ResponseParts, Self::Error> {
        parts.extensions_mut().insert(self);
        Ok(parts)
    }
}

#[cfg(feature = "axum")]
impl<S: Send + Sync> axum::extract::FromRequestParts<S> for NotStarted {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        _: &S,
    ) -> Result<NotStarted, Self::Rejection> {
        Ok(NotStarted::of(&parts.extensions))
    }
}
