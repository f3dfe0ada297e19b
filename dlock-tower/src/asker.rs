//! What an answer in the handler's stead has to know of its request.

use http::{HeaderValue, Request, Response};

use crate::{NotStarted, Rejection, grpc};

/// A request, as far as the layer's own answer to it goes.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    grpc: Option<HeaderValue>,
    word: NotStarted,
}

impl Asker {
    pub(crate) fn of<B>(request: &Request<B>) -> Asker {
        Asker {
            grpc: grpc::content_type(request.headers()),
            word: NotStarted::of(request.extensions()),
        }
    }

    pub(crate) fn is_grpc(&self) -> bool {
        self.grpc.is_some()
    }

    /// What the layer refused the request for, as this request is to be told.
    pub(crate) fn told(&self, rejection: Rejection) -> Rejection {
        rejection.with_grpc(self.grpc.clone())
    }

    /// Says in the answer whether the request was begun.
    pub(crate) fn mark<B>(&self, rejection: &Rejection, answer: &mut Response<B>) {
        if rejection.has_started() {
            answer.extensions_mut().remove::<NotStarted>();
        } else {
            answer.extensions_mut().insert(self.word);
        }
        if rejection.is_in_progress() {
            answer.extensions_mut().insert(self.word.in_progress());
        }
    }
}
