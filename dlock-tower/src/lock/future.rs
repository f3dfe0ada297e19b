use std::fmt;
use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{Request, Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tower::util::Oneshot;
use tower_service::Service;

use super::admission::Admitted;
use super::body::ResponseBody;
use super::call::{Calling, Framed, Readying, framed};
use super::kept::{Hold, release_hold};
use super::lost::LockLost;
use super::settings::Settings;
use crate::not_started::Entry;
use crate::own_answer::AnswerContext;
use crate::problem::Problem;
use crate::{Rejection, grpc};

type Admission<B> = BoxFuture<'static, Result<Admitted<B>, Rejection>>;

pin_project! {
    /// The course of one request: acquire the lock, run the handler inside, release the lock.
    ///
    /// Dropped at any point, as when the client goes away, it leaves nothing behind: no waiter, and no lock except for
    /// work that [keeps](super::RequestLocks) it.
    ///
    /// A service around it can name it, and needs no boxed future:
    ///
    /// ```
    /// use bytes::Bytes;
    /// use dlock_tower::LockService;
    /// use dlock_tower::key::ExtractKey;
    /// use dlock_tower::lock::{ResponseBody, ResponseFuture};
    /// use http::{Request, Response};
    /// use http_body_util::Full;
    /// use std::task::{Context, Poll};
    /// use tower::Service;
    ///
    /// struct Accounts<S, K>(LockService<S, K>);
    ///
    /// impl<S, K> Service<Request<Full<Bytes>>> for Accounts<S, K>
    /// where
    ///     S: Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>> + Clone,
    ///     K: ExtractKey<Full<Bytes>>,
    /// {
    ///     type Response = Response<ResponseBody<Full<Bytes>>>;
    ///     type Error = S::Error;
    ///     type Future = ResponseFuture<S, Full<Bytes>>;
    ///
    ///     fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
    ///         self.0.poll_ready(cx)
    ///     }
    ///
    ///     fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
    ///         self.0.call(request)
    ///     }
    /// }
    /// ```
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B>
    where
        S: Service<Request<B>>,
    {
        /// The key is looked for and the lock waited for.
        Admitting {
            admission: Admission<B>,
            after: Option<AfterAdmission<S>>,
        },
        /// The layer does not apply to the request.
        Bare {
            #[pin]
            call: Oneshot<S, Request<B>>,
        },
        /// The service inside becomes ready, in the lock's frame.
        Readying {
            #[pin]
            ready: Framed<Readying<S, B>>,
            // Set once the request waits, if that stops when the lock is lost.
            lost: Option<BoxFuture<'static, LockLost>>,
            hold: Option<Arc<Hold>>,
            after: Option<AfterReady>,
        },
        /// The request has waited for so long that its claim may have gone to another copy of it.
        Confirming {
            ready: Option<(S, Request<B>)>,
            lost: Option<BoxFuture<'static, LockLost>>,
            confirmation: BoxFuture<'static, Result<Option<Arc<Hold>>, Problem>>,
            after: Option<AfterReady>,
        },
        /// The handler runs in the lock's frame. It comes first: its destructors run under the lock.
        Calling {
            #[pin]
            call: Framed<Calling<S, B>>,
            lost: Option<BoxFuture<'static, LockLost>>,
            hold: Option<Arc<Hold>>,
            answers: Answers,
        },
        /// The handler has answered, the lock is being released.
        Releasing {
            release: BoxFuture<'static, ()>,
            outcome: Option<Result<S::Response, S::Error>>,
            // The service inside has failed before it was called.
            failed: Option<Entry>,
        },
        Done,
    }
}

/// What a request needs once its lock is held, or refused.
struct AfterAdmission<S> {
    inner: S,
    answers: Answers,
    entry: Option<Entry>,
}

/// What a request needs once the service inside is ready.
struct AfterReady {
    answers: Answers,
    entry: Option<Entry>,
}

/// How to answer a request.
pub(super) struct Answers {
    settings: Arc<Settings>,
    answer_context: AnswerContext,
    version: Version,
    /// Whether a lock was left out because no route was matched for the request.
    is_unrouted: bool,
}

impl Answers {
    pub(super) fn of<B>(settings: Arc<Settings>, request: &Request<B>) -> Answers {
        Answers {
            settings,
            answer_context: AnswerContext::of(request),
            version: request.version(),
            is_unrouted: false,
        }
    }

    fn note<R, E>(&self, outcome: &Result<Response<R>, E>) {
        if let (true, Ok(response)) = (self.is_unrouted, outcome) {
            self.settings.note_unrouted(response.status());
        }
    }

    /// Whether the lock is held until the body of this response is sent.
    fn hold_until_sent<R: Body>(&self, response: &Response<R>) -> bool {
        self.settings.until_body.is_some()
            && !response.body().is_end_stream()
            && self.announced(response) != Some(0)
    }

    /// How many bytes the server announces, if it asks for nothing after them: those of HTTP/1 do not.
    fn announced<R: Body>(&self, response: &Response<R>) -> Option<u64> {
        let headers = response.headers();
        if self.version > Version::HTTP_11 || headers.contains_key(TRANSFER_ENCODING) {
            return None;
        }
        let length = headers.get(CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        length.or_else(|| response.body().size_hint().exact())
    }

    fn respond<R>(&self, rejection: Rejection) -> Response<ResponseBody<R>> {
        self.settings
            .respond(rejection, &self.answer_context)
            .map(ResponseBody::answer)
    }
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    pub(super) fn bare(inner: S, request: Request<B>) -> Self {
        ResponseFuture {
            state: State::Bare {
                call: Oneshot::new(inner, request),
            },
        }
    }

    pub(super) fn locked(inner: S, admission: Admission<B>, entry: Option<Entry>, answers: Answers) -> Self {
        ResponseFuture {
            state: State::Admitting {
                admission,
                after: Some(AfterAdmission {
                    inner,
                    answers,
                    entry,
                }),
            },
        }
    }
}

impl<S, B, R> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body,
{
    type Output = Result<Response<ResponseBody<R>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            let step = match state.as_mut().project() {
                StateProj::Admitting { admission, after } => {
                    let admitted = ready!(admission.as_mut().poll(cx));
                    match (admitted, after.take()) {
                        (Ok(admitted), Some(after)) => Step::Continue(enter(admitted, after)),
                        (Err(rejection), Some(after)) => end(Ok(after.answers.respond(rejection)), None),
                        (_, None) => Step::Continue(State::Done),
                    }
                }
                StateProj::Bare { call } => end(ready!(call.poll(cx)).map(bare), None),
                StateProj::Readying {
                    ready,
                    lost,
                    hold,
                    after,
                } => {
                    let outcome = match hold {
                        Some(hold) => ready!(hold.poll_handler(lost, cx, |cx| ready.poll(cx))),
                        None => Ok(ready!(ready.poll(cx))),
                    };
                    after_ready(outcome, lost.take(), hold.take(), after.take())
                }
                StateProj::Confirming {
                    ready,
                    lost,
                    confirmation,
                    after,
                } => {
                    let confirmed = ready!(confirmation.as_mut().poll(cx));
                    match (ready.take(), after.take()) {
                        (Some(ready), Some(after)) => {
                            after_confirmation(confirmed, ready, lost.take(), after)
                        }
                        _ => Step::Continue(State::Done),
                    }
                }
                StateProj::Calling {
                    call,
                    lost,
                    hold,
                    answers,
                } => {
                    let outcome = match hold {
                        Some(hold) => ready!(hold.poll_handler(lost, cx, |cx| call.poll(cx))),
                        None => Ok(ready!(call.poll(cx))),
                    };
                    after_call(outcome, lost.take(), hold.take(), answers)
                }
                StateProj::Releasing {
                    release,
                    outcome,
                    failed,
                } => {
                    ready!(release.as_mut().poll(cx));
                    if let Some(entry) = failed.take() {
                        entry.fail();
                    }
                    match outcome.take() {
                        Some(outcome) => end(outcome.map(bare), None),
                        None => Step::Continue(State::Done),
                    }
                }
                StateProj::Done => panic!("`ResponseFuture` polled after it was done"),
            };
            match step {
                Step::Continue(next) => state.set(next),
                Step::Break(Ended { outcome, hold }) => {
                    // First the service, the request and the handler are dropped, then the lock.
                    state.set(State::Done);
                    drop(hold);
                    return Poll::Ready(outcome);
                }
            }
        }
    }
}

/// The service inside, with the request, or why it did not become ready.
type Ready<S, B> = Result<(S, Request<B>), <S as Service<Request<B>>>::Error>;

/// What comes after a state: the next one, or the end.
type Step<S, B, R> = ControlFlow<Ended<R, <S as Service<Request<B>>>::Error>, State<S, B>>;

/// The outcome of a request, and the lock, if that is to be released now.
struct Ended<R, E> {
    outcome: Result<Response<ResponseBody<R>>, E>,
    hold: Option<Arc<Hold>>,
}

fn end<S, B, R>(
    outcome: Result<Response<ResponseBody<R>>, S::Error>,
    hold: Option<Arc<Hold>>,
) -> Step<S, B, R>
where
    S: Service<Request<B>>,
{
    Step::Break(Ended { outcome, hold })
}

fn bare<R>(response: Response<R>) -> Response<ResponseBody<R>> {
    response.map(ResponseBody::bare)
}

/// Has the service inside become ready, with the request's lock if it has one.
fn enter<S, B>(admitted: Admitted<B>, after: AfterAdmission<S>) -> State<S, B>
where
    S: Service<Request<B>>,
{
    let AfterAdmission {
        inner,
        mut answers,
        entry,
    } = after;
    answers.is_unrouted = admitted.is_unrouted;
    State::Readying {
        ready: framed(admitted.hold.as_deref(), Readying::new(inner, admitted.request)),
        lost: None,
        hold: admitted.hold,
        after: Some(AfterReady { answers, entry }),
    }
}

/// The service inside is ready or has failed, or the lock was lost meanwhile.
fn after_ready<S, B, R>(
    outcome: Result<Ready<S, B>, LockLost>,
    lost: Option<BoxFuture<'static, LockLost>>,
    hold: Option<Arc<Hold>>,
    after: Option<AfterReady>,
) -> Step<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    match (outcome, after) {
        (Ok(Ok(ready)), Some(after)) => Step::Continue(begin_or_confirm(ready, lost, hold, after)),
        (Ok(Err(error)), after) => Step::Continue(State::Releasing {
            release: Box::pin(release_hold(hold)),
            outcome: Some(Err(error)),
            failed: after.and_then(|after| after.entry),
        }),
        (Err(LockLost { key, loss }), Some(after)) => end(
            Ok(after.answers.respond(Rejection::lost_before(&key, loss))),
            hold,
        ),
        (_, None) => Step::Continue(State::Done),
    }
}

/// Runs the handler, unless the claim of the request may have been lost while the request waited.
fn begin_or_confirm<S, B>(
    ready: (S, Request<B>),
    lost: Option<BoxFuture<'static, LockLost>>,
    hold: Option<Arc<Hold>>,
    after: AfterReady,
) -> State<S, B>
where
    S: Service<Request<B>>,
{
    let Some(claim) = after.entry.as_ref().and_then(Entry::claim_in_doubt) else {
        return begin(ready, lost, hold, after);
    };
    State::Confirming {
        ready: Some(ready),
        lost,
        confirmation: Box::pin(async move {
            match claim.confirmed().await {
                Ok(()) => Ok(hold),
                Err(problem) => {
                    release_hold(hold).await;
                    Err(problem)
                }
            }
        }),
        after: Some(after),
    }
}

/// The claim is the request's still, with the lock unless that was lost meanwhile; or another copy of the request may have it.
fn after_confirmation<S, B, R>(
    confirmed: Result<Option<Arc<Hold>>, Problem>,
    ready: (S, Request<B>),
    lost: Option<BoxFuture<'static, LockLost>>,
    after: AfterReady,
) -> Step<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    let hold = match confirmed {
        Ok(hold) => hold,
        Err(problem) => return end(Ok(after.answers.respond(problem.rejection())), None),
    };
    match hold.as_ref().and_then(|hold| hold.found_lost()) {
        None => Step::Continue(begin(ready, lost, hold, after)),
        Some(LockLost { key, loss }) => end(
            Ok(after.answers.respond(Rejection::lost_before(&key, loss))),
            hold,
        ),
    }
}

/// Runs the handler.
fn begin<S, B>(
    (inner, mut request): (S, Request<B>),
    lost: Option<BoxFuture<'static, LockLost>>,
    hold: Option<Arc<Hold>>,
    after: AfterReady,
) -> State<S, B>
where
    S: Service<Request<B>>,
{
    if let Some(entry) = after.entry {
        entry.admit(request.extensions_mut());
    }
    State::Calling {
        call: framed(hold.as_deref(), Calling::new(inner, request)),
        lost,
        hold,
        answers: after.answers,
    }
}

/// The handler has answered, or the lock was lost while it ran.
fn after_call<S, B, R>(
    outcome: Result<Result<Response<R>, S::Error>, LockLost>,
    lost: Option<BoxFuture<'static, LockLost>>,
    hold: Option<Arc<Hold>>,
    answers: &Answers,
) -> Step<S, B, R>
where
    S: Service<Request<B>, Response = Response<R>>,
    R: Body,
{
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(LockLost { key, loss }) => {
            return end(Ok(answers.respond(Rejection::lost(&key, loss))), hold);
        }
    };
    answers.note(&outcome);
    match (outcome, hold) {
        (Ok(response), Some(hold)) if answers.hold_until_sent(&response) => {
            let lost = lost.or_else(|| hold.lost());
            let announced = answers.announced(&response);
            let grpc = grpc::has_trailers(response.headers());
            let held = |body| ResponseBody::held(body, hold, lost, announced, grpc);
            end(Ok(response.map(held)), None)
        }
        (outcome, None) => end(outcome.map(bare), None),
        (outcome, hold) => Step::Continue(State::Releasing {
            release: Box::pin(release_hold(hold)),
            outcome: Some(outcome),
            failed: None,
        }),
    }
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Admitting { .. } => "Admitting",
            State::Bare { .. } => "Bare",
            State::Readying { .. } => "Readying",
            State::Confirming { .. } => "Confirming",
            State::Calling { .. } => "Calling",
            State::Releasing { .. } => "Releasing",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("state", &state)
            .finish_non_exhaustive()
    }
}
