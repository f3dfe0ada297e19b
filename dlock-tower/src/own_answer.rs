//! Answers that a layer makes itself.

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;

use crate::body::BoxError;
use crate::{NotStarted, Rejection, grpc};

/// The body of an answer made by a layer.
pub(crate) type AnswerBody = UnsyncBoxBody<Bytes, BoxError>;

/// Renders a rejection, instead of [`Rejection::response`].
pub(crate) type Render = dyn Fn(&Rejection) -> Response<AnswerBody> + Send + Sync;

/// The parts of a request that the layer's own answer needs.
#[derive(Debug, Clone)]
pub(crate) struct AnswerContext {
    grpc: Option<HeaderValue>,
    not_started: NotStarted,
}

impl AnswerContext {
    pub(crate) fn of<B>(request: &Request<B>) -> AnswerContext {
        AnswerContext {
            grpc: grpc::content_type(request.headers()),
            not_started: NotStarted::of(request.extensions()),
        }
    }

    pub(crate) fn is_grpc(&self) -> bool {
        self.grpc.is_some()
    }

    /// Returns the layer's own answer to this request. Its extensions say whether the request was begun.
    pub(crate) fn answer(&self, rejection: Rejection, render: Option<&Render>) -> Response<AnswerBody> {
        let rejection = rejection.with_grpc(self.grpc.clone());
        let mut response = match render {
            Some(render) => render(&rejection),
            None => rejection
                .response()
                .map(|body| body.map_err(Into::into).boxed_unsync()),
        };
        self.mark(&rejection, &mut response);
        response
    }

    /// Marks in the answer whether the request was begun.
    fn mark<B>(&self, rejection: &Rejection, answer: &mut Response<B>) {
        if rejection.has_started() {
            answer.extensions_mut().remove::<NotStarted>();
        } else {
            answer.extensions_mut().insert(self.not_started);
        }
        if rejection.is_in_progress() {
            answer.extensions_mut().insert(self.not_started.in_progress());
        }
    }
}
