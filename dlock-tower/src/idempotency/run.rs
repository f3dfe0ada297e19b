//! The work under a claim: the handler, and the outcome of its answer.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use bytes::Bytes;
use futures_util::poll;
use http::{Method, Request, Response, Version};
use http_body::Body;
use http_body_util::BodyExt;
use tower_service::Service;

use super::body::ResponseBody;
use super::capture::{Capture, is_endless};
use super::claim::Phase;
use super::commit::Ended;
use super::extract::Idempotency;
use super::headers::has_no_body;
use super::owned::Owned;
use super::policy::{Ending, Outcome};
use super::settlement::Settlement;
use super::stored::Stored;
use super::stream::{Last, Stream};
use crate::body::BoxError;
use crate::not_started::{HandedIn, with_outer};
use crate::own_answer::AnswerContext;

/// Runs the handler. When this is done the outcome is in the store, or on its way there, or the returned body takes
/// care of it.
pub(super) async fn run<S, B, R>(
    mut inner: S,
    mut request: Request<B>,
    claim: Owned,
) -> Result<Response<ResponseBody<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    if let Err(error) = poll_fn(|cx| inner.poll_ready(cx)).await {
        // From here on the work goes on without its client: nothing else would repeat the release.
        claim.enter(Phase::Answered);
        claim.settle(Settlement::Release).await;
        return Err(error);
    }
    let answer_context = AnswerContext::of(&request);
    let all = with_outer(request.extensions(), (*claim).clone());
    let confirmed = match all.is_held() {
        true => Ok(()),
        false => all.clone().confirmed().await,
    };
    if let Err(problem) = confirmed {
        claim.enter(Phase::Answered);
        claim.set_not_begun();
        let answer = claim.core.settings.respond(problem.rejection(), &answer_context);
        claim.settle(Settlement::Release).await;
        return Ok(answer.map(ResponseBody::answer));
    }
    let (version, method) = (request.version(), request.method().clone());
    let idempotency = Idempotency {
        claim: (*claim).clone(),
    };
    request.extensions_mut().insert(idempotency);
    let handed_in = HandedIn::new(request.extensions_mut(), claim.beginning.clone(), all);
    claim.enter(Phase::Working);
    let mut answer = {
        let mut handler = pin!(handed_in.run(inner.call(request)));
        poll_fn(|cx| {
            claim.beginning.forget_failure();
            handler.as_mut().poll(cx)
        })
        .await
    };
    claim.enter(Phase::Answered);
    let not_begun = match &mut answer {
        Ok(response) => handed_in.was_not_begun(response.extensions_mut()),
        Err(_) => claim.beginning.has_failed_before() && claim.is_untouched(),
    };
    if not_begun {
        claim.set_not_begun();
    }
    match (claim.end_transaction(&answer_context).await, answer) {
        (Ended::Committed(response), _) => Ok(response),
        (Ended::Open { claim, rolled_back }, Ok(response)) => {
            Ok(keep(claim, response, (version, method), rolled_back).await)
        }
        (Ended::Open { claim, .. }, Err(error)) if not_begun => {
            claim.settle(Settlement::Release).await;
            Err(error)
        }
        (Ended::Open { claim, rolled_back }, Err(error)) => {
            let settlement = claim.verdict_on_failure(&Ending::ServiceError, rolled_back);
            claim.settle(settlement).await;
            Err(error)
        }
        (Ended::Unknown(claim), Ok(response)) => Ok(look_later(claim, response)),
        (Ended::Unknown(claim), Err(error)) => {
            let kept = (*claim).clone();
            kept.spawn(claim.settle_after_failure(Ending::ServiceError));
            Err(error)
        }
    }
}

/// Returns the response, and finds out later whether the handler's transaction was committed.
fn look_later<R>(claim: Owned, response: Response<R>) -> Response<ResponseBody<R>> {
    let (parts, body) = response.into_parts();
    let released = |rolled_back| Capture::new(&parts, &claim, rolled_back).released();
    let otherwise = released(false).unwrap_or_else(|| Stored::Unavailable.into());
    let said = parts.extensions.get::<Outcome>().copied();
    let rolled_back = match said.or_else(|| claim.stated_outcome.said()) {
        // The handler may have had an effect outside of the transaction.
        Some(Outcome::Final) => Stored::Unavailable.into(),
        // Nothing has happened, and the response is not there to be kept: a retry gets its own.
        _ => released(true).unwrap_or(Settlement::Release),
    };
    let kept = (*claim).clone();
    kept.spawn(claim.settle_by_record(otherwise, rolled_back));
    Response::from_parts(parts, ResponseBody::bare(body))
}

/// Stores what is kept of a response, and returns the response unchanged.
///
/// `version` and `method`: of the request. `rolled_back`: all effects of the handler were in a transaction that was not committed.
async fn keep<R>(
    claim: Owned,
    response: Response<R>,
    (version, method): (Version, Method),
    rolled_back: bool,
) -> Response<ResponseBody<R>>
where
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let (parts, body) = response.into_parts();
    let mut capture = Capture::new(&parts, &claim, rolled_back);
    capture.expect_version(version);
    if let Some(settlement) = capture.released() {
        claim.settle(settlement).await;
        return Response::from_parts(parts, ResponseBody::bare(body));
    }
    let has_none = has_no_body(parts.status);
    if is_endless(&parts) || !has_none && capture.exceeds(body.size_hint().lower()) {
        claim.settle(Stored::Unavailable).await;
        return Response::from_parts(parts, ResponseBody::bare(body));
    }
    if has_none {
        let settlement = capture.conclude(&claim);
        claim.settle(settlement).await;
        return Response::from_parts(parts, ResponseBody::none());
    }
    if body.is_end_stream() || method == Method::HEAD {
        capture.expect_no_body();
    } else {
        capture.expect_bytes(body.size_hint().exact());
    }
    // Most bodies are complete at once; they are stored before the first byte is sent.
    let mut body = Box::pin(body);
    let body = loop {
        let next = match capture.is_cut() {
            true => Poll::Ready(None),
            false => poll!(body.frame()),
        };
        let next = next.map(|next| match next {
            Some(frame) => Some(frame.map_err(Into::<BoxError>::into)),
            None => capture.cut_short().map(Err),
        });
        match next {
            Poll::Ready(Some(Ok(frame))) => {
                if let Err(frame) = capture.take(frame) {
                    claim.settle(Stored::Unavailable).await;
                    let (pieces, trailers) = capture.pieces();
                    break ResponseBody::stream(Stream::passing(pieces, trailers, frame, body));
                }
            }
            Poll::Ready(Some(Err(error))) => {
                let (pieces, _) = capture.pieces();
                let settlement = capture.conclude_without_end(&claim);
                claim.settle(settlement).await;
                break ResponseBody::stream(Stream::ended(pieces, Last::Error(error)));
            }
            Poll::Ready(None) => {
                let (pieces, trailers) = capture.pieces();
                let settlement = capture.conclude(&claim);
                claim.settle(settlement).await;
                break ResponseBody::whole(pieces, trailers);
            }
            Poll::Pending if capture.is_complete() => {
                let (pieces, trailers) = capture.pieces();
                let settlement = capture.conclude(&claim);
                claim.settle(settlement).await;
                break ResponseBody::stream(Stream::up_to_trailers(pieces, trailers, body));
            }
            Poll::Pending => break ResponseBody::stream(Stream::taking_down(capture, claim, body)),
        }
    };
    Response::from_parts(parts, body)
}
