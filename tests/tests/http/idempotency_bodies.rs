//! The idempotency layer: bodies at the limits, streams, trailers, and what is never kept whole.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock::LockClient;
use dlock_tower::idempotency::{DEFAULT_LIMIT, Outcome};
use dlock_tower::{LockLayer, key};
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use tokio::time::sleep;
use tower::{Layer, ServiceExt};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Streamed = UnsyncBoxBody<Bytes, Error>;

/// A body of pieces with pauses before them.
fn slowly(pieces: Vec<Result<Frame<Bytes>, &'static str>>, pause: Duration) -> Streamed {
    let stream = stream::iter(pieces).then(move |piece| async move {
        if !pause.is_zero() {
            sleep(pause).await;
        }
        piece.map_err(Error::from)
    });
    StreamBody::new(stream).boxed_unsync()
}

/// A response that announces so many.
fn of_ten_bytes<B>(body: B) -> Response<B> {
    let mut response = Response::new(body);
    let length = HeaderValue::from_static("10");
    response.headers_mut().insert("content-length", length);
    response
}

/// A body that knows how many bytes are left, as the server then announces.
struct Sized {
    body: Streamed,
    left: u64,
}

impl Body for Sized {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            self.left -= frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

fn over_http_2<B>(mut request: Request<B>) -> Request<B> {
    *request.version_mut() = http::Version::HTTP_2;
    request
}

fn data(len: usize) -> Result<Frame<Bytes>, &'static str> {
    Ok(Frame::data(Bytes::from(vec![b'x'; len])))
}

fn broken() -> Result<Frame<Bytes>, &'static str> {
    Err("it broke")
}

fn of_size(len: usize) -> Req {
    Request::post("/pay")
        .header("idempotency-key", "k")
        .body(Full::from(vec![b'x'; len]))
        .unwrap()
}

#[tokio::test]
async fn a_request_of_the_limit_passes_and_one_byte_more_is_refused_with_nothing_claimed() {
    for limit in [None, Some(10), Some(0)] {
        let store = Faulty::new();
        let run = Counting::default();
        let (layer, limit) = match limit {
            None => (store.layer(), DEFAULT_LIMIT),
            Some(limit) => (store.layer().body_limit(limit), limit),
        };
        let service = around(&layer, run.service());
        let answer = send(&service, of_size(limit + 1)).await;
        assert_eq!(answer.problem(), problem(413, "content-too-large"));
        assert!(answer.not_started());
        assert_eq!((run.count(), store.faults.seen()), (0, (0, 0, 0, 0)));
        assert_eq!(send(&service, of_size(limit)).await.text(), "run 1");
        assert!(send(&service, of_size(limit)).await.is_replay());
    }
}

/// A client that sends no body holds a lock outside for the bound of the body only, and claims nothing.
#[tokio::test(start_paused = true)]
async fn request_body_that_does_not_come_ends_in_408_with_nothing_claimed() {
    for (limit, seconds) in [(None, 30), (Some(SECOND * 2), 2)] {
        let store = Faulty::new();
        let locks = LockClient::memory();
        let lock = LockLayer::new(locks.clone(), key::fixed("account")).streaming();
        let layer = match limit {
            None => store.layer(),
            Some(limit) => store.layer().body_timeout(limit),
        };
        let handler = tower::service_fn(|_: Request<Streamed>| async {
            Ok::<_, Infallible>(Response::new(Full::from("run")))
        });
        let service = lock.layer(layer.layer(handler));
        let ask = |body: Streamed| {
            let request = Request::post("/pay").header("idempotency-key", "k");
            service.clone().oneshot(request.body(body).unwrap())
        };
        let begun = tokio::time::Instant::now();
        let never = StreamBody::new(stream::pending::<Result<Frame<Bytes>, Error>>());
        let Ok(refused) = ask(never.boxed_unsync()).await;
        let refused = answer(refused).await;
        assert_eq!(refused.problem(), problem(408, "body-timeout"));
        assert_eq!(
            (refused.not_started(), begun.elapsed().as_secs()),
            (true, seconds)
        );
        assert_eq!((locks.held(), store.faults.seen()), (0, (0, 0, 0, 0)));
        let Ok(retry) = ask(slowly(vec![data(1)], SECOND)).await;
        assert_eq!(answer(retry).await.text(), "run");
    }
}

/// Sends the same request twice to a handler that answers with this body.
async fn twice(
    layer: &dlock_tower::IdempotencyLayer<dlock_tower::idempotency::caller::Public>,
    body: impl Fn() -> Streamed + Clone + Send + Sync + 'static,
) -> (usize, Answer, Answer) {
    let run = Counting::default();
    let service = around(
        layer,
        run.answering(move |_| {
            let body = body();
            async move { Response::new(body) }
        }),
    );
    let first = send(&service, post("k")).await;
    let second = send(&service, post("k")).await;
    (run.count(), first, second)
}

#[tokio::test(start_paused = true)]
async fn a_response_of_the_limit_is_kept_and_of_one_byte_more_only_that_there_was_one() {
    for pause in [Duration::ZERO, SECOND] {
        for pieces in [vec![100], vec![60, 40], vec![1; 100], vec![0, 100, 0]] {
            let what = format!("{pause:?} {pieces:?}");
            let layer = layer().response_limit(100);
            let body = move |more: usize| {
                let pieces = pieces.clone();
                move || {
                    slowly(
                        pieces
                            .iter()
                            .copied()
                            .chain((more > 0).then_some(more))
                            .map(data)
                            .collect(),
                        pause,
                    )
                }
            };
            let (runs, first, second) = twice(&layer, body(0)).await;
            assert_eq!(
                (runs, first.body.len(), second.body.len()),
                (1, 100, 100),
                "{what}"
            );
            assert!(second.is_replay());
            let layer = layer.namespace("2");
            let (runs, first, second) = twice(&layer, body(1)).await;
            assert_eq!((runs, first.body.len()), (1, 101), "{what}");
            assert_eq!(second.problem(), problem(409, "result-unavailable"), "{what}");
            assert_eq!(second.header("retry-after"), None);
            assert!(!second.not_started());
        }
    }
}

#[tokio::test]
async fn a_large_response_of_known_size_reaches_the_first_caller_whole() {
    let layer = layer();
    let run = Counting::default();
    let service = around(
        &layer,
        run.answering(|_| async { Response::new(Full::from(vec![7; DEFAULT_LIMIT + 1])) }),
    );
    let first = send(&service, post("k")).await;
    assert!(first.body.len() == DEFAULT_LIMIT + 1 && first.body.iter().all(|byte| *byte == 7));
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "result-unavailable")
    );
    let service = around(
        &layer,
        run.answering(|_| async { Response::new(Full::from(vec![7; DEFAULT_LIMIT])) }),
    );
    send(&service, post("k2")).await;
    let second = send(&service, post("k2")).await;
    assert!(second.is_replay() && second.body.len() == DEFAULT_LIMIT);
    assert_eq!((run.count(), layer.stats().tombstones), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn the_tombstone_is_stored_before_the_first_byte_past_the_limit_goes_out() {
    for pause in [Duration::ZERO, SECOND] {
        let store = Faulty::new();
        let layer = store.layer().response_limit(100);
        let run = Counting::default();
        let service = around(
            &layer,
            run.answering(
                move |_| async move { Response::new(slowly(vec![data(100), data(1), data(1)], pause)) },
            ),
        );
        let mut body = service.clone().oneshot(post("k")).await.unwrap().into_body();
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(first.len(), 100);
        if !pause.is_zero() {
            assert_eq!(store.faults.seen().2, 0);
            assert_eq!(
                send(&service, post("k")).await.problem(),
                problem(409, "in-progress")
            );
        }
        body.frame().await.unwrap().unwrap();
        assert_eq!(store.faults.seen().2, 1);
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "result-unavailable")
        );
        // The client goes away in the middle: so it stays.
        drop(body);
        layer.handle().shutdown(SECOND).await;
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "result-unavailable")
        );
        assert_eq!((run.count(), layer.handle().claims()), (1, 0));
    }
}

#[tokio::test]
async fn of_event_streams_and_upgrades_it_is_stored_before_the_head() {
    for (status, content_type) in [(200, "text/event-stream; charset=utf-8"), (101, "")] {
        let store = Faulty::new();
        let run = Counting::default();
        let service = around(
            &store.layer(),
            run.answering(move |_| async move {
                let mut response = Response::new(
                    StreamBody::new(stream::pending::<Result<Frame<Bytes>, Error>>()).boxed_unsync(),
                );
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
                response
                    .headers_mut()
                    .insert("content-type", HeaderValue::from_static(content_type));
                response
            }),
        );
        let response = service.clone().oneshot(post("k")).await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(store.faults.seen().2, 1);
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "result-unavailable")
        );
        drop(response);
        assert_eq!(
            send(&service, post("k")).await.problem(),
            problem(409, "result-unavailable")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_goes_out_as_it_comes_and_is_kept_at_its_end() {
    let layer = layer();
    let service = around(
        &layer,
        Counting::default()
            .answering(|_| async { Response::new(slowly(vec![data(5), data(5), data(5)], SECOND)) }),
    );
    let begun = tokio::time::Instant::now();
    let mut body = service.clone().oneshot(post("k")).await.unwrap().into_body();
    assert!(begun.elapsed() < SECOND, "the head does not wait for the body");
    for n in 1..=3 {
        body.frame().await.unwrap().unwrap();
        assert!(begun.elapsed() < SECOND * n + SECOND / 2);
        if n < 3 {
            assert_eq!(
                send(&service, post("k")).await.problem(),
                problem(409, "in-progress")
            );
        }
    }
    assert!(body.frame().await.is_none());
    let again = send(&service, post("k")).await;
    assert!(again.is_replay() && again.body.len() == 15);
    assert_eq!(layer.handle().claims(), 0);
}

#[tokio::test(start_paused = true)]
async fn caller_that_knows_the_length_finds_the_result_stored_with_the_last_byte() {
    let service = around(
        &layer(),
        Counting::default().answering(|_| async { of_ten_bytes(slowly(vec![data(5), data(5)], SECOND)) }),
    );
    let mut body = service.clone().oneshot(post("k")).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    body.frame().await.unwrap().unwrap();
    // As a server does that has sent all that was announced.
    drop(body);
    assert!(send(&service, post("k")).await.is_replay());
}

/// Also where all bytes are ready at once, and only the end is not.
#[tokio::test(start_paused = true)]
async fn caller_that_knows_the_length_finds_the_result_stored_while_the_end_is_pending() {
    for (leaves, by_head) in [(false, false), (false, true), (true, false), (true, true)] {
        let layer = if leaves {
            layer().cancel_on_disconnect()
        } else {
            layer()
        };
        let service = around(
            &layer,
            Counting::default().answering(move |_| async move {
                let bytes = stream::iter([data(5), data(5)]).map(|piece| piece.map_err(Error::from));
                let body = StreamBody::new(bytes.chain(stream::pending())).boxed_unsync();
                match by_head {
                    true => of_ten_bytes(body),
                    false => Response::new(Sized { body, left: 10 }.boxed_unsync()),
                }
            }),
        );
        let mut body = service.clone().oneshot(post("k")).await.unwrap().into_body();
        body.frame().await.unwrap().unwrap();
        body.frame().await.unwrap().unwrap();
        drop(body);
        let again = send(&service, post("k")).await;
        assert!(again.is_replay() && again.body.len() == 10);
    }
}

/// In HTTP/2 they may follow the announced bytes. Without them all bytes are a result, too.
#[tokio::test(start_paused = true)]
async fn trailers_after_the_announced_bytes_are_kept_unless_the_client_leaves_before() {
    for gone in [false, true] {
        let layer = layer().cancel_on_disconnect();
        let service = around(
            &layer,
            Counting::default().answering(|_| async {
                let trailers = HeaderMap::from_iter([(
                    http::HeaderName::from_static("x-sum"),
                    HeaderValue::from_static("1"),
                )]);
                let pieces = vec![data(5), data(5), Ok(Frame::trailers(trailers))];
                of_ten_bytes(slowly(pieces, SECOND))
            }),
        );
        let response = service.clone().oneshot(over_http_2(post("k"))).await.unwrap();
        let mut body = response.into_body();
        for _ in 0..2 {
            body.frame().await.unwrap().unwrap();
        }
        if gone {
            drop(body);
        } else {
            assert!(body.collect().await.unwrap().trailers().is_some());
        }
        layer.handle().shutdown(SECOND).await;
        let again = send(&service, post("k")).await;
        assert!(again.is_replay() && again.body.len() == 10);
        assert_eq!(again.trailers.is_none(), gone);
    }
}

/// As above, with an end that never comes or that is an error.
#[tokio::test(start_paused = true)]
async fn announced_bytes_are_a_result_whatever_becomes_of_their_end() {
    for (breaks, gone) in [(false, true), (true, true), (true, false)] {
        let layer = layer();
        let service = around(
            &layer,
            Counting::default().answering(move |_| {
                let pieces = [data(5), data(5)].into_iter().chain(breaks.then(broken));
                async move {
                    let pieces = stream::iter(pieces).chain(stream::pending());
                    let body = StreamBody::new(pieces.map(|piece| piece.map_err(Error::from)));
                    of_ten_bytes(body.boxed_unsync())
                }
            }),
        );
        let response = service.clone().oneshot(over_http_2(post("k"))).await.unwrap();
        let mut body = response.into_body();
        for _ in 0..2 {
            body.frame().await.unwrap().unwrap();
        }
        if gone {
            drop(body);
        } else {
            body.frame().await.unwrap().unwrap_err();
        }
        layer.handle().shutdown(60 * SECOND).await;
        let again = send(&service, post("k")).await;
        assert!(again.is_replay() && again.body.len() == 10, "{breaks} {gone}");
    }
}

/// A response that ends before its `Content-Length` is no result: its caller sees it break off, and a retry is told that
/// there is none, instead of a part that passes for the whole.
#[tokio::test(start_paused = true)]
async fn response_shorter_than_its_content_length_is_not_replayed() {
    for pause in [Duration::ZERO, SECOND] {
        for gone in [false, true] {
            let (layer, run) = (layer(), Counting::default());
            let service = around(
                &layer,
                run.answering(move |_| async move { of_ten_bytes(slowly(vec![data(5), data(2)], pause)) }),
            );
            let body = service.clone().oneshot(post("k")).await.unwrap().into_body();
            if gone {
                drop(body);
            } else {
                let error = body.collect().await.unwrap_err().to_string();
                assert!(error.contains("7 of 10 bytes"), "{error}");
            }
            layer.handle().shutdown(SECOND * 10).await;
            let again = send(&service, post("k")).await;
            assert_eq!(
                again.problem(),
                problem(409, "result-unavailable"),
                "{pause:?} {gone}"
            );
            assert_eq!((run.count(), layer.handle().claims()), (1, 0));
        }
    }
}

/// A server sends as many bytes as it has announced, however the pieces of the body come: a retry gets the same.
#[tokio::test(start_paused = true)]
async fn response_longer_than_its_content_length_ends_with_the_announced_bytes() {
    for (first, pause) in [
        (Duration::ZERO, Duration::ZERO),
        (Duration::ZERO, SECOND),
        (SECOND, SECOND),
    ] {
        for pieces in [[6, 6, 2], [10, 4, 1], [14, 1, 1]] {
            for case in 0..8 {
                let (http_2, gone, known) = (case & 1 != 0, case & 2 != 0, case & 4 != 0);
                let what =
                    format!("{first:?} {pause:?} {pieces:?} http_2: {http_2}, gone: {gone}, known: {known}");
                let (layer, run) = (layer(), Counting::default());
                let service = around(
                    &layer,
                    run.answering(move |_| async move {
                        let start = BodyStream::new(slowly(vec![data(pieces[0])], first));
                        let rest = slowly(pieces[1..].iter().copied().map(data).collect(), pause);
                        let body = StreamBody::new(start.chain(BodyStream::new(rest))).boxed_unsync();
                        of_ten_bytes(match known {
                            true => {
                                let left = pieces.iter().sum::<usize>() as u64;
                                Sized { body, left }.boxed_unsync()
                            }
                            false => body,
                        })
                    }),
                );
                let ask = if http_2 { over_http_2(post("k")) } else { post("k") };
                let mut body = service.clone().oneshot(ask).await.unwrap().into_body();
                let size = body.size_hint().exact();
                assert!(size.is_none_or(|size| size == 10), "{what}: {size:?}");
                if gone {
                    drop(body);
                    layer.handle().shutdown(60 * SECOND).await;
                } else {
                    let mut sent = 0;
                    while let Some(frame) = body.frame().await {
                        sent += frame.unwrap().into_data().unwrap().len();
                        let left = body.size_hint();
                        assert!(sent as u64 + left.lower() <= 10, "{what}: {sent} and {left:?}");
                    }
                    assert_eq!(sent, 10, "{what}");
                }
                let again = send(&service, post("k")).await;
                assert!(again.is_replay(), "{what}: {}", again.text());
                assert_eq!((again.body.len(), run.count()), (10, 1), "{what}");
            }
        }
    }
}

/// An answer to `HEAD` announces a body that does not come.
#[tokio::test]
async fn response_that_has_no_body_may_announce_one() {
    let (layer, run) = (layer().methods([http::Method::HEAD]), Counting::default());
    let service = around(
        &layer,
        run.answering(|_| async { of_ten_bytes(Full::<Bytes>::default()) }),
    );
    for replayed in [false, true] {
        let answer = send(&service, request("HEAD", "/pay", "k", "")).await;
        assert_eq!((answer.status(), answer.is_replay()), (200, replayed));
    }
}

/// A body that does not know that it is empty, as that of a proxy.
#[tokio::test]
async fn response_that_has_no_body_may_be_a_stream() {
    let not_modified = |mut response: Response<Streamed>| {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        let events = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", events);
        response
    };
    for method in ["HEAD", "POST"] {
        let layer = layer().methods([http::Method::HEAD, http::Method::POST]);
        let run = Counting::default();
        let answering = run.answering(move |_| async move {
            let response = of_ten_bytes(slowly(Vec::new(), Duration::ZERO));
            match method {
                "HEAD" => response,
                _ => not_modified(response),
            }
        });
        let service = around(&layer, answering);
        for replayed in [false, true] {
            let answer = send(&service, request(method, "/pay", "k", "")).await;
            let status = if method == "HEAD" { 200 } else { 304 };
            assert_eq!(
                (answer.status(), answer.is_replay()),
                (status, replayed),
                "{method}"
            );
        }
    }
}

/// A request that ends before its `Content-Length` was cut off on its way: it claims nothing.
#[tokio::test]
async fn request_shorter_than_its_content_length_claims_nothing() {
    let (store, run) = (Faulty::new(), Counting::default());
    let service = around(&store.layer(), run.service());
    let mut cut = request("POST", "/pay", "k", "amount=10");
    cut.headers_mut()
        .insert("content-length", HeaderValue::from_static("12"));
    let answer = send(&service, cut).await;
    assert_eq!(answer.status(), 400);
    assert!(answer.not_started());
    assert_eq!((run.count(), store.faults.seen()), (0, (0, 0, 0, 0)));
    let mut whole = request("POST", "/pay", "k", "amount=10000");
    whole
        .headers_mut()
        .insert("content-length", HeaderValue::from_static("12"));
    assert_eq!(send(&service, whole).await.text(), "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_client_goes_away_is_read_on_and_kept() {
    let layer = layer();
    let run = Counting::default();
    let service = around(
        &layer,
        run.answering(|_| async { Response::new(slowly((0..10).map(|_| data(5)).collect(), SECOND)) }),
    );
    let mut body = service.clone().oneshot(post("k")).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(layer.handle().tasks(), 1);
    assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
    let again = send(&service, post("k")).await;
    assert!(again.is_replay() && again.body.len() == 50);
    assert_eq!((run.count(), layer.handle().claims()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_is_not_run_again() {
    for pause in [Duration::ZERO, SECOND] {
        for gone in [false, true] {
            let layer = layer();
            let run = Counting::default();
            let service = around(
                &layer,
                run.answering(move |_| async move { Response::new(slowly(vec![data(5), broken()], pause)) }),
            );
            let response = service.clone().oneshot(post("k")).await.unwrap();
            let mut body = response.into_body();
            if !gone {
                assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap().len(), 5);
                assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "it broke");
            }
            drop(body);
            layer.handle().shutdown(SECOND * 10).await;
            assert_eq!(
                send(&service, post("k")).await.problem(),
                problem(409, "result-unavailable")
            );
            assert_eq!((run.count(), layer.handle().claims()), (1, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn with_cancel_on_disconnect_a_stream_is_dropped_and_not_run_again() {
    let layer = layer().cancel_on_disconnect();
    let run = Counting::default();
    let service = around(
        &layer,
        run.answering(|_| async { Response::new(slowly(vec![data(5), data(5)], SECOND)) }),
    );
    drop(service.clone().oneshot(post("k")).await.unwrap());
    layer.handle().shutdown(SECOND).await;
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "result-unavailable")
    );
    assert_eq!((run.count(), layer.handle().claims()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn trailers_are_kept() {
    for pause in [Duration::ZERO, SECOND] {
        let (_, first, second) = twice(&layer(), move || {
            let mut trailers = HeaderMap::new();
            trailers.append("x-sum", HeaderValue::from_static("1"));
            trailers.append("x-sum", HeaderValue::from_static("2"));
            trailers.append("set-cookie", HeaderValue::from_static("no"));
            slowly(vec![data(5), Ok(Frame::trailers(trailers))], pause)
        })
        .await;
        assert_eq!(first.trailers.unwrap().len(), 3);
        let kept = second.trailers.unwrap();
        assert_eq!(kept.get_all("x-sum").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(
            (kept.len(), second.parts.headers["trailer"].as_bytes()),
            (2, b"x-sum".as_slice())
        );
    }
}

/// Trailers of a gRPC call that came to its end.
fn ok_trailers() -> Result<Frame<Bytes>, &'static str> {
    let status = (
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static("0"),
    );
    Ok(Frame::trailers(HeaderMap::from_iter([status])))
}

/// Reads a body as servers do: they ask for nothing after trailers.
async fn up_to_trailers<B>(body: B)
where
    B: Body<Data = Bytes, Error = Error>,
{
    let mut body = std::pin::pin!(body);
    while let Some(frame) = body.frame().await {
        if frame.unwrap().is_trailers() {
            return;
        }
    }
    panic!("there were no trailers");
}

/// Whether the body says so or not, and whether or not the head of the answer tells how it ended.
#[tokio::test(start_paused = true)]
async fn trailers_are_the_end_of_a_body() {
    for pause in [Duration::ZERO, SECOND] {
        for (cancels, grpc) in [(false, false), (false, true), (true, false), (true, true)] {
            let layer = if cancels {
                layer().cancel_on_disconnect()
            } else {
                layer()
            };
            let run = Counting::default();
            let service = around(
                &layer,
                run.answering(move |_| async move {
                    let pieces = stream::iter([data(5), ok_trailers()]).then(move |piece| async move {
                        sleep(pause).await;
                        piece.map_err(Error::from)
                    });
                    let body = StreamBody::new(pieces.chain(stream::pending())).boxed_unsync();
                    let mut response = Response::new(body);
                    if grpc {
                        let kind = HeaderValue::from_static("application/grpc");
                        response.headers_mut().insert("content-type", kind);
                    }
                    response
                }),
            );
            let what = format!("{pause:?} {cancels} {grpc}");
            let first = service.clone().oneshot(over_http_2(post("k"))).await.unwrap();
            up_to_trailers(first.into_body()).await;
            assert_eq!(layer.handle().tasks(), 0, "{what}");
            let again = send(&service, over_http_2(post("k"))).await;
            assert!(again.is_replay() && again.body.len() == 5, "{what}");
            assert_eq!(again.trailers.unwrap()["grpc-status"], "0", "{what}");
            let stats = layer.stats();
            assert_eq!((stats.tombstones, stats.detached), (0, 0), "{what}");
        }
    }
}

/// The same for a body that is read on without its client.
#[tokio::test(start_paused = true)]
async fn trailers_are_the_end_of_a_body_that_is_read_on() {
    let layer = layer();
    let service = around(
        &layer,
        Counting::default().answering(|_| async {
            let pieces = stream::iter([data(5), ok_trailers()]).then(|piece| async {
                sleep(SECOND).await;
                piece.map_err(Error::from)
            });
            let body = StreamBody::new(pieces.chain(stream::pending())).boxed_unsync();
            let mut response = Response::new(body);
            let kind = HeaderValue::from_static("application/grpc");
            response.headers_mut().insert("content-type", kind);
            response
        }),
    );
    drop(service.clone().oneshot(post("k")).await.unwrap());
    sleep(SECOND * 3).await;
    assert_eq!(layer.handle().tasks(), 0);
    let again = send(&service, post("k")).await;
    assert!(again.is_replay() && again.trailers.is_some());
}

/// Trailers that come before all announced bytes complete nothing.
#[tokio::test(start_paused = true)]
async fn trailers_of_a_body_that_is_too_short_complete_nothing() {
    let layer = layer().cancel_on_disconnect();
    let service = around(
        &layer,
        Counting::default()
            .answering(|_| async { of_ten_bytes(slowly(vec![data(5), ok_trailers()], SECOND)) }),
    );
    let first = service.clone().oneshot(over_http_2(post("k"))).await.unwrap();
    up_to_trailers(first.into_body()).await;
    layer.handle().shutdown(SECOND).await;
    let again = send(&service, post("k")).await;
    assert_eq!(again.problem(), problem(409, "result-unavailable"));
}

/// A call under a lock that ends with its body is kept like any other.
#[tokio::test(start_paused = true)]
async fn trailers_under_a_lock_that_is_held_until_the_end_of_the_body_are_kept() {
    for pause in [Duration::ZERO, SECOND] {
        for cancels in [false, true] {
            let layer = layer().grpc_unary();
            let layer = if cancels {
                layer.cancel_on_disconnect()
            } else {
                layer
            };
            let locks = LockClient::memory();
            let lock = LockLayer::new(locks.clone(), key::fixed("account")).until_body(SECOND * 60);
            let calls = Counting::default().answering(move |_| async move {
                let mut response = Response::new(slowly(vec![data(5), ok_trailers()], pause));
                let kind = HeaderValue::from_static("application/grpc");
                response.headers_mut().insert("content-type", kind);
                response
            });
            let service = layer.layer(lock.layer(calls));
            let first = service.clone().oneshot(over_http_2(post("k"))).await.unwrap();
            up_to_trailers(first.into_body()).await;
            assert_eq!(locks.held(), 0, "{pause:?} {cancels}");
            assert!(send(&service, post("k")).await.is_replay(), "{pause:?} {cancels}");
            let stats = layer.stats();
            assert_eq!((stats.tombstones, stats.detached), (0, 0), "{pause:?} {cancels}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_releases_is_not_read() {
    let run = Counting::default();
    let service = around(
        &layer(),
        run.answering(|_| async {
            let mut response = Response::new(
                StreamBody::new(stream::pending::<Result<Frame<Bytes>, Error>>()).boxed_unsync(),
            );
            response.extensions_mut().insert(Outcome::Retry);
            response
        }),
    );
    for n in 1..=2 {
        drop(service.clone().oneshot(post("k")).await.unwrap());
        assert_eq!(run.count(), n);
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_at_the_limit_does_not_cut_the_response() {
    let store = Faulty::new();
    let layer = store.layer().response_limit(10);
    let faults = store.faults.clone();
    let service = around(
        &layer,
        Counting::default().answering(move |_| {
            faults.set_down(true);
            async { Response::new(slowly(vec![data(8), data(8)], SECOND)) }
        }),
    );
    let first = send(&service, post("k")).await;
    assert_eq!(first.body.len(), 16);
    store.faults.set_down(false);
    layer.handle().shutdown(SECOND * 20).await;
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "result-unavailable")
    );
}

#[tokio::test]
async fn an_empty_body_is_kept_too_and_lengths_are_known() {
    let (_, _, second) = twice(&layer(), || slowly(vec![], Duration::ZERO)).await;
    assert!(second.is_replay() && second.body.is_empty());
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let service = around(
        &layer(),
        tower::service_fn(move |_: Req| {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("12345"))) }
        }),
    );
    for _ in 0..2 {
        let response = service.clone().oneshot(post("k")).await.unwrap();
        assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(5));
    }
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

/// One whose client leaves the handler, whose body is then read on by no client either, is one request.
#[tokio::test(start_paused = true)]
async fn request_that_goes_on_without_its_client_counts_once() {
    let layer = layer();
    let run = Counting::default();
    let service = around(
        &layer,
        run.answering(|_| async {
            sleep(SECOND * 5).await;
            Response::new(slowly(vec![data(5)], SECOND))
        }),
    );
    let gone = tokio::time::timeout(SECOND, service.clone().oneshot(post("k")));
    assert!(gone.await.is_err());
    assert_eq!(layer.handle().shutdown(SECOND * 20).await, 0);
    assert!(send(&service, post("k")).await.is_replay());
    assert_eq!((run.count(), layer.stats().detached), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn each_result_of_which_only_the_existence_is_kept_counts_once() {
    type Pieces = fn() -> Vec<Result<Frame<Bytes>, &'static str>>;
    let breaks: Pieces = || vec![data(5), broken()];
    let large: Pieces = || vec![data(5), data(100)];
    for (pause, pieces, waits) in [
        (Duration::ZERO, breaks, true),
        (Duration::ZERO, large, true),
        (SECOND, breaks, true),
        (SECOND, large, true),
        (SECOND, breaks, false),
        (SECOND, large, false),
    ] {
        for cancels in [false, true] {
            let layer = layer().response_limit(100);
            let layer = if cancels {
                layer.cancel_on_disconnect()
            } else {
                layer
            };
            let run = Counting::default();
            let service = around(
                &layer,
                run.answering(move |_| async move { Response::new(slowly(pieces(), pause)) }),
            );
            let first = service.clone().oneshot(post("k")).await.unwrap();
            match waits {
                true => drop(first.into_body().collect().await),
                false => drop(first),
            }
            layer.handle().shutdown(SECOND * 10).await;
            let again = send(&service, post("k")).await;
            assert_eq!(again.problem(), problem(409, "result-unavailable"));
            assert_eq!(layer.stats().tombstones, 1, "{pause:?} {waits} {cancels}");
        }
    }
}
