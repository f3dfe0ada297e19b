//! Slow responses: they are sent while they are captured.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

use super::capture::Capture;
use super::claim::Claim;
use super::origin::Origin;
use super::owned::Owned;
use super::settlement::Settlement;
use super::stored::Stored;
use crate::body::{BoxError, add_frames};
use crate::lock::LockLost;

/// A body on its way to the first caller.
///
/// Dropped before its end while it is still captured, a task reads the rest: the client will ask again for the very
/// result that it did not wait for.
pub(super) struct Stream<R: Body<Data = Bytes> + Send + 'static>
where
    R::Error: Into<BoxError>,
{
    /// Frames that were captured before the head was sent.
    before: VecDeque<Frame<Bytes>>,
    state: State<R>,
    polling: bool,
}

enum State<R> {
    /// Captures each frame.
    Taking {
        body: Pin<Box<R>>,
        capture: Box<Capture>,
        claim: Owned,
        origin: Origin,
    },
    /// Waits until the store has the outcome, before the next frame is sent.
    Settling {
        settling: BoxFuture<'static, ()>,
        next: Option<Frame<Bytes>>,
        after: After<R>,
        origin: Origin,
        claim: Arc<Claim>,
    },
    /// Settled; passes the rest on.
    Passing(Pin<Box<R>>),
    /// Settled with all bytes; passes trailers on, but no bytes that were not announced.
    Trailers(Pin<Box<R>>),
    /// Sends this, and nothing more.
    Ended(Last),
}

/// The rest of a body when the outcome was sent to the store.
enum After<R> {
    Body(Pin<Box<R>>),
    Trailers(Pin<Box<R>>),
    Nothing(Last),
}

/// How a body ends.
pub(super) enum Last {
    End,
    Error(BoxError),
}

fn frames(pieces: Vec<Bytes>, trailers: Option<HeaderMap>) -> VecDeque<Frame<Bytes>> {
    let data = pieces.into_iter().map(Frame::data);
    data.chain(trailers.map(Frame::trailers)).collect()
}

fn has_bytes(frame: &Frame<Bytes>) -> bool {
    frame.data_ref().is_some_and(|data| !data.is_empty())
}

impl<R> Stream<R>
where
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    /// Creates a body that is no longer captured, after `pieces` and `next`.
    pub(super) fn passing(
        pieces: Vec<Bytes>,
        trailers: Option<HeaderMap>,
        next: Frame<Bytes>,
        body: Pin<Box<R>>,
    ) -> Self {
        let mut before = frames(pieces, trailers);
        before.push_back(next);
        Stream {
            before,
            state: State::Passing(body),
            polling: false,
        }
    }

    /// Creates a body of which all bytes are captured; trailers may still follow.
    pub(super) fn up_to_trailers(pieces: Vec<Bytes>, trailers: Option<HeaderMap>, body: Pin<Box<R>>) -> Self {
        Stream {
            before: frames(pieces, trailers),
            state: State::Trailers(body),
            polling: false,
        }
    }

    /// Creates a body that has ended.
    pub(super) fn ended(pieces: Vec<Bytes>, last: Last) -> Self {
        Stream {
            before: frames(pieces, None),
            state: State::Ended(last),
            polling: false,
        }
    }

    /// Creates a body that is still to be captured.
    pub(super) fn taking_down(capture: Capture, claim: Owned, body: Pin<Box<R>>) -> Self {
        let (pieces, trailers) = capture.pieces();
        Stream {
            before: frames(pieces, trailers),
            state: State::Taking {
                body,
                capture: Box::new(capture),
                claim,
                origin: Origin::here(),
            },
            polling: false,
        }
    }

    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(frame) = self.before.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        // Still set when it is dropped: it panicked.
        self.polling = true;
        let polled = self.poll_rest(cx);
        self.polling = false;
        polled
    }

    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.state {
                State::Taking { body, capture, .. } => {
                    let frame = ready!(body.as_mut().poll_frame(cx)).transpose();
                    let step = match frame {
                        Ok(Some(frame)) => match capture.take(frame) {
                            Err(frame) => Step::TooMuch(frame),
                            Ok(frame) if capture.is_complete() => Step::End(Some(frame)),
                            Ok(frame) if body.is_end_stream() && capture.cut_short().is_none() => {
                                Step::End(Some(frame))
                            }
                            Ok(frame) => return Poll::Ready(Some(Ok(frame))),
                        },
                        Ok(None) => match capture.cut_short() {
                            Some(error) => Step::Broken(error),
                            None => Step::End(None),
                        },
                        Err(error) => Step::Broken(error.into()),
                    };
                    self.settle(step);
                }
                State::Settling { settling, .. } => {
                    ready!(settling.as_mut().poll(cx));
                    let State::Settling { next, after, .. } =
                        mem::replace(&mut self.state, State::Ended(Last::End))
                    else {
                        continue;
                    };
                    self.state = match after {
                        After::Body(body) => State::Passing(body),
                        After::Trailers(body) => State::Trailers(body),
                        After::Nothing(last) => State::Ended(last),
                    };
                    if let Some(next) = next {
                        return Poll::Ready(Some(Ok(next)));
                    }
                }
                State::Passing(body) => return body.as_mut().poll_frame(cx).map_err(Into::into),
                State::Trailers(body) => {
                    let frame = ready!(body.as_mut().poll_frame(cx));
                    if !matches!(&frame, Some(Ok(frame)) if has_bytes(frame)) {
                        return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
                    }
                    let ended = State::Ended(Last::End);
                    if let State::Trailers(body) = mem::replace(&mut self.state, ended) {
                        let_go(body);
                    }
                }
                State::Ended(last) => {
                    return Poll::Ready(match mem::replace(last, Last::End) {
                        Last::End => None,
                        Last::Error(error) => Some(Err(error)),
                    });
                }
            }
        }
    }

    fn settle(&mut self, step: Step) {
        let State::Taking {
            body,
            capture,
            claim,
            origin,
        } = mem::replace(&mut self.state, State::Ended(Last::End))
        else {
            return;
        };
        let (settlement, next, after): (Settlement, _, _) = match step {
            Step::TooMuch(frame) => (Stored::Unavailable.into(), Some(frame), After::Body(body)),
            Step::End(frame) => {
                // Everything announced has arrived; trailers may still follow.
                let after = if body.is_end_stream() || frame.is_none() || capture.is_cut() {
                    let_go(body);
                    After::Nothing(Last::End)
                } else {
                    After::Trailers(body)
                };
                (capture.conclude(&claim), frame, after)
            }
            Step::Broken(error) => {
                let_go(body);
                let settlement = capture.conclude_without_end(&claim);
                (settlement, None, After::Nothing(Last::Error(error)))
            }
        };
        let kept = (*claim).clone();
        self.state = State::Settling {
            settling: Box::pin(claim.settle(settlement)),
            next,
            after,
            origin,
            claim: kept,
        };
    }

    pub(super) fn is_end_stream(&self) -> bool {
        self.before.is_empty()
            && match &self.state {
                State::Passing(body) | State::Trailers(body) => body.is_end_stream(),
                State::Ended(Last::End) => true,
                _ => false,
            }
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let mut hint = match &self.state {
            State::Taking { body, capture, .. } => capture.rest(body.size_hint()),
            State::Passing(body) => body.size_hint(),
            // HTTP/1 cannot send trailers after a body of known length.
            State::Trailers(_) if self.before.iter().any(Frame::is_trailers) => SizeHint::default(),
            State::Trailers(_) => SizeHint::with_exact(0),
            State::Settling { next, after, .. } => {
                let mut hint = match after {
                    After::Body(body) => body.size_hint(),
                    After::Trailers(_) | After::Nothing(_) => SizeHint::with_exact(0),
                };
                add_frames(&mut hint, next.iter());
                hint
            }
            State::Ended(Last::End) => SizeHint::with_exact(0),
            State::Ended(Last::Error(_)) => SizeHint::default(),
        };
        add_frames(&mut hint, self.before.iter());
        hint
    }
}

/// Ends the capture.
enum Step {
    TooMuch(Frame<Bytes>),
    End(Option<Frame<Bytes>>),
    Broken(BoxError),
}

impl<R: Body<Data = Bytes> + Send + 'static> Drop for Stream<R>
where
    R::Error: Into<BoxError>,
{
    fn drop(&mut self) {
        match mem::replace(&mut self.state, State::Ended(Last::End)) {
            State::Taking {
                body,
                capture,
                claim,
                origin,
            } => {
                let kept = (*claim).clone();
                let locks = kept.locks.keep_rest();
                // A body that panicked is never polled again, and one whose lock is lost must not continue.
                if self.polling || kept.core.settings.cancel_on_disconnect || locks.is_lost() {
                    let_go(body);
                    let settlement = capture.conclude_without_end(&claim);
                    kept.spawn(claim.settle(settlement));
                } else {
                    kept.set_detached();
                    let lost = locks.lost();
                    origin.go_on(&kept, locks, read_on(body, *capture, claim, lost));
                }
            }
            State::Settling {
                settling,
                origin,
                claim,
                ..
            } if !self.polling => origin.go_on(&claim, claim.locks.keep_rest(), settling),
            _ => {}
        }
    }
}

/// Drops a body. If that panics, of which the panic hook tells, the claim is settled all the same: the handler has
/// answered.
fn let_go<R>(body: Pin<Box<R>>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(body)));
}

/// Reads a body to its end for the store alone, unless that takes too long or the lock under which it is made is lost.
async fn read_on<R>(
    mut body: Pin<Box<R>>,
    mut capture: Capture,
    claim: Owned,
    lost: impl Future<Output = LockLost>,
) where
    R: Body<Data = Bytes>,
{
    let core = claim.core.clone();
    let mut over = pin!(core.shared.read_on(core.settings.read_on));
    let mut lost = pin!(lost);
    let whole = loop {
        let next = tokio::select! {
            biased;
            _ = &mut lost => break capture.has_all_bytes(),
            () = &mut over => break capture.has_all_bytes(),
            next = AssertUnwindSafe(body.frame()).catch_unwind() => next,
        };
        match next {
            Ok(Some(Ok(frame))) => match capture.take(frame) {
                Ok(_) if capture.has_ended() => break true,
                Ok(_) => {}
                Err(_) => break false,
            },
            // A body that panicked is broken, and never polled again.
            Ok(Some(Err(_))) | Err(_) => break capture.has_all_bytes(),
            Ok(None) => break capture.cut_short().is_none(),
        }
    };
    let_go(body);
    let settlement = if whole {
        capture.conclude(&claim)
    } else {
        Stored::Unavailable.into()
    };
    claim.settle(settlement).await;
}

impl<R> fmt::Debug for Stream<R>
where
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").finish_non_exhaustive()
    }
}
