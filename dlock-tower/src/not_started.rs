//! The word that a request was not begun.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Extensions;

/// States, in the extensions of a response, that the work which the request asks for has not begun.
///
/// The layers of this crate put it into every answer that they give before the handler runs. Layers further out
/// read it to tell "nothing happened, try again" from "nobody knows how far it got": a 503 without it may have
/// had effects. An [`IdempotencyLayer`](crate::IdempotencyLayer) releases the key of such a request.
///
/// It speaks of one request. The layer counts it only if it was made [of](Self::of) the extensions of the request
/// that the layer has handed in: a handler that passes on the answer of another router, or the answer to another
/// request, keeps its key. In axum a router that is the service of a single route (`route_service`) counts as another
/// one; nest it.
///
/// A handler or a layer of your own that refuses a request before it has had any effect says so:
///
#[cfg_attr(feature = "axum", doc = "```")]
#[cfg_attr(not(feature = "axum"), doc = "```ignore")]
/// use axum::response::IntoResponse;
/// use dlock_tower::NotStarted;
/// use http::StatusCode;
///
/// async fn charge(not_started: NotStarted) -> impl IntoResponse {
///     // The shop is closed, and no card was charged: a retry with the same key runs.
///     (StatusCode::SERVICE_UNAVAILABLE, not_started, "closed until 8")
/// }
///
/// /// For `HandleErrorLayer` around `tower::load_shed`, which has refused before it called the handler.
/// async fn overloaded(not_started: NotStarted, _: tower::BoxError) -> impl IntoResponse {
///     (StatusCode::SERVICE_UNAVAILABLE, not_started, "overloaded")
/// }
/// # let _ = (charge, overloaded);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotStarted {
    /// `None` where no layer has handed the request in.
    request: Option<u64>,
}

impl NotStarted {
    /// The word for the request that has these extensions.
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
            Some(token) if token.place.leads_to(request) => token.word,
            _ => NotStarted { request: None },
        }
    }

    fn of_new_request() -> NotStarted {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NotStarted {
            request: Some(NEXT.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// The word that this request found an equal one at work.
    pub(crate) fn in_progress(self) -> InProgress {
        InProgress(self)
    }
}

/// A request that an idempotency layer has handed in: what its answer says of it is told apart from what it says
/// of others.
pub(crate) struct HandedIn {
    word: NotStarted,
    /// The word for a layer further out.
    outer: NotStarted,
    /// The same, as locked functions know it.
    locks: dlock::__request::Request,
}

impl HandedIn {
    /// Leaves the word in the request.
    pub(crate) fn new(request: &mut Extensions) -> HandedIn {
        let outer = NotStarted::of(request);
        let word = NotStarted::of_new_request();
        let place = Place::of(request);
        request.insert(Token { word, place });
        HandedIn {
            word,
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
        let not_started = answer.remove::<NotStarted>() == Some(self.word)
            || refused.is_some_and(|refused| refused.is_of(&self.locks));
        let in_progress = answer.remove::<InProgress>() == Some(self.word.in_progress());
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
    word: NotStarted,
    place: Place,
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

    /// Whether the request is still on its way to the handler of its route. A router that is nested as a service says
    /// so; every other one with a route of its own is another way.
    fn leads_to(&self, request: &Extensions) -> bool {
        let now = Place::of(request);
        let same_route = match (&self.route, &now.route) {
            // The text is shared by all requests of a route, and by no others.
            (Some(then), Some(now)) => std::ptr::eq(then.as_str(), now.as_str()),
            (None, _) => true,
            (Some(_), None) => false,
        };
        let nest = |place: &Place| place.nest.as_ref().map(|nest| nest.as_str().to_owned());
        same_route || nest(self) != nest(&now)
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
