//! Locks that are held until the response's body is through.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use dlock::{LockClient, LockOptions, Loss};
use dlock_tower::key::fixed;
use dlock_tower::lock::LockLost;
use dlock_tower::{LockLayer, OnLost};
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Frame, SizeHint};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};

use crate::tower_support::pair;

const SECOND: Duration = Duration::from_secs(1);
const MAX: Duration = Duration::from_secs(60);

enum Step {
    Data(&'static str),
    Trailers(HeaderMap),
    Error(&'static str),
    Never,
}

/// A body that does as told, and notes whether it is polled and dropped in a frame.
struct Script {
    steps: VecDeque<Step>,
    in_frame: Arc<AtomicBool>,
}

impl Script {
    fn new(steps: impl IntoIterator<Item = Step>) -> (Script, Arc<AtomicBool>) {
        let in_frame = Arc::new(AtomicBool::new(true));
        (
            Script {
                steps: steps.into_iter().collect(),
                in_frame: in_frame.clone(),
            },
            in_frame,
        )
    }

    fn note(&self) {
        self.in_frame
            .fetch_and(dlock::current().is_some(), Ordering::Relaxed);
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.note();
        Poll::Ready(match self.steps.pop_front() {
            Some(Step::Data(data)) => Some(Ok(Frame::data(data.into()))),
            Some(Step::Trailers(trailers)) => Some(Ok(Frame::trailers(trailers))),
            Some(Step::Error(error)) => Some(Err(error)),
            Some(Step::Never) => {
                self.steps.push_front(Step::Never);
                return Poll::Pending;
            }
            None => None,
        })
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        self.note();
    }
}

/// A body that knows how many bytes are left.
struct OfLength(Script, u64);

impl Body for OfLength {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        let frame = Pin::new(&mut self.0).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.1 -= frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        frame
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.1)
    }
}

/// Sends a request through a layer on key `k`, whose handler answers with `body`.
async fn sent<B>(
    layer: LockLayer<impl dlock_tower::key::ExtractKey<()>>,
    body: B,
) -> Response<dlock_tower::lock::ResponseBody<B>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    sent_over(Version::HTTP_11, layer, body).await
}

async fn sent_over<B>(
    version: Version,
    layer: LockLayer<impl dlock_tower::key::ExtractKey<()>>,
    body: B,
) -> Response<dlock_tower::lock::ResponseBody<B>>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let body = Arc::new(parking_lot::Mutex::new(Some(body)));
    let handler = service_fn(move |_: Request<()>| {
        let body = body.lock().take().expect("called once");
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    let mut request = Request::new(());
    *request.version_mut() = version;
    layer.streaming().layer(handler).oneshot(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_held_to_the_end_of_the_body_which_runs_in_the_frame() {
    let (client, other) = pair().await;
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", "3".parse().unwrap());
    let (body, in_frame) = Script::new([Step::Data("a"), Step::Data("b"), Step::Trailers(trailers.clone())]);
    let response = sent(LockLayer::new(client.clone(), fixed("k")).until_body(MAX), body).await;
    let mut body = response.into_body();
    for data in ["a", "b"] {
        assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), data);
    }
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_trailers().unwrap(),
        trailers
    );
    // Trailers are the end: servers ask for nothing after them.
    let free = other.lock("k").try_acquire().await;
    drop(free.expect("free before the end is told"));
    assert!(body.is_end_stream() && body.frame().await.is_none());
    assert!(in_frame.load(Ordering::Relaxed));
    assert_eq!(client.held(), 0);
}

#[tokio::test(start_paused = true)]
async fn lock_is_free_before_the_end_of_a_body_without_trailers_is_told() {
    let (client, other) = pair().await;
    let (body, _) = Script::new([Step::Data("a")]);
    let response = sent(LockLayer::new(client.clone(), fixed("k")).until_body(MAX), body).await;
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    assert!(!body.is_end_stream());
    assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
    assert!(body.frame().await.is_none());
    drop(other.lock("k").try_acquire().await.expect("free"));
    assert!(body.is_end_stream() && body.frame().await.is_none());
}

/// A server asks a body that says that it has ended for nothing more.
#[tokio::test(start_paused = true)]
async fn lock_is_free_before_the_last_frame_of_a_body_that_ends_with_it() {
    let (client, other) = pair().await;
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let layer = LockLayer::new(client.clone(), fixed("k")).until_body(MAX);
        let mut body = sent_over(version, layer, Full::<Bytes>::from("ab"))
            .await
            .into_body();
        assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
        drop(other.lock("k").try_acquire().await.expect("free"));
        assert!(body.is_end_stream() && body.frame().await.is_none());
    }
}

/// An HTTP/1 server asks for nothing after the bytes that it has announced; one of HTTP/2 asks for trailers.
#[tokio::test(start_paused = true)]
async fn lock_is_free_before_the_last_byte_that_http_1_announces() {
    let (client, other) = pair().await;
    for (version, is_free) in [(Version::HTTP_11, true), (Version::HTTP_2, false)] {
        let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "3".parse().unwrap())]);
        let (body, _) = Script::new([Step::Data("a"), Step::Data("b"), Step::Trailers(trailers.clone())]);
        let layer = LockLayer::new(client.clone(), fixed("k")).until_body(MAX);
        let mut body = sent_over(version, layer, OfLength(body, 2)).await.into_body();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
        assert!(other.lock("k").try_acquire().await.unwrap_err().is_busy());
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "b");
        assert_eq!(
            other.lock("k").try_acquire().await.is_ok(),
            is_free,
            "{version:?}"
        );
        assert!(!body.is_end_stream());
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_trailers().unwrap(),
            trailers
        );
        drop(other.lock("k").try_acquire().await.expect("free"));
        assert!(body.frame().await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn bound_of_until_body_outlives_other_options() {
    let client = LockClient::memory();
    let bounded = || LockLayer::new(client.clone(), fixed("k")).until_body(10 * SECOND);
    for (layer, seconds) in [
        (bounded().options(LockOptions::new()), 10.0),
        (bounded().max_hold(20 * SECOND), 10.0),
        (bounded().max_hold(5 * SECOND), 5.0),
    ] {
        let (body, _) = Script::new([Step::Never]);
        let mut body = sent(layer, body).await.into_body();
        let started = tokio::time::Instant::now();
        let end = timeout(MAX, body.frame()).await.expect("it is bounded");
        assert!(end.unwrap().unwrap_err().is::<LockLost>());
        let took = started.elapsed().as_secs_f64();
        assert!((took - seconds).abs() < 0.5, "{took} instead of {seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn by_default_the_lock_is_free_when_the_answer_is_there() {
    let (client, other) = pair().await;
    let (body, _) = Script::new([Step::Data("a")]);
    let response = sent(LockLayer::new(client, fixed("k")), body).await;
    drop(other.lock("k").try_acquire().await.expect("free"));
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a");
}

#[tokio::test(start_paused = true)]
async fn an_empty_body_holds_nothing() {
    let (client, other) = pair().await;
    let response = sent(
        LockLayer::new(client, fixed("k")).until_body(MAX),
        Empty::<Bytes>::new(),
    )
    .await;
    drop(other.lock("k").try_acquire().await.expect("free"));
    assert!(response.into_body().is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn an_error_or_a_drop_of_the_body_gives_the_lock_back() {
    let (client, other) = pair().await;
    let layer = LockLayer::new(client.clone(), fixed("k")).until_body(MAX);
    let (body, in_frame) = Script::new([Step::Data("a"), Step::Error("broken")]);
    let mut body = sent(layer.clone(), body).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "broken");
    assert_eq!(client.held(), 0);
    assert!(in_frame.load(Ordering::Relaxed));
    assert!(body.frame().await.is_none());
    drop(other.lock("k").acquire().await.unwrap());

    let (body, in_frame) = Script::new([Step::Data("a"), Step::Never]);
    let mut body = sent(layer, body).await.into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(client.held(), 1);
    drop(body);
    assert_eq!(client.held(), 0);
    assert!(
        in_frame.load(Ordering::Relaxed),
        "what a body does when dropped, it does in the frame"
    );
    drop(other.lock("k").acquire().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_reads_loses_the_lock_at_max_hold() {
    let (client, other) = pair().await;
    let layer = LockLayer::new(client, fixed("k")).until_body(10 * SECOND);
    let (body, _) = Script::new([Step::Data("a"), Step::Data("b")]);
    let started = tokio::time::Instant::now();
    let mut body = sent(layer, body).await.into_body();
    // The body is not polled, and the next request still gets in.
    drop(other.lock("k").acquire().await.unwrap());
    assert!(
        (started.elapsed().as_secs_f64() - 10.0).abs() < 0.5,
        "{:?}",
        started.elapsed()
    );
    // Should the client wake up now, its response is broken, and not just short.
    let error = body.frame().await.unwrap().unwrap_err();
    let lost = error.downcast_ref::<LockLost>().expect("the loss is told");
    assert_eq!((lost.key.as_str(), lost.loss), ("k", Loss::MaxHold));
    assert!(body.frame().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_lost_lock_ends_a_waiting_body_with_an_error_unless_it_may_run_on() {
    let layer = LockLayer::new(LockClient::memory(), fixed("k")).until_body(SECOND);
    let (body, in_frame) = Script::new([Step::Never]);
    let mut body = sent(layer.clone(), body).await.into_body();
    assert!(body.frame().await.unwrap().unwrap_err().is::<LockLost>());
    assert!(in_frame.load(Ordering::Relaxed));

    let (script, _) = Script::new([Step::Data("a"), Step::Data("b")]);
    let mut body = sent(layer.on_lost(OnLost::RunOn), script).await.into_body();
    body.frame().await.unwrap().unwrap();
    sleep(2 * SECOND).await;
    assert_eq!(body.collect().await.unwrap().to_bytes(), "b");
}

/// A gRPC call under a lock that is lost ends with a status, as gRPC clients need it, and one that they do not retry by
/// themselves.
#[tokio::test(start_paused = true)]
async fn lost_lock_ends_a_grpc_stream_with_its_status() {
    let layer = LockLayer::new(LockClient::memory(), fixed("k")).until_body(SECOND);
    let handler = service_fn(|_: Request<()>| async {
        let (body, _) = Script::new([Step::Data("a"), Step::Never]);
        let mut response = Response::new(body);
        let kind = "application/grpc+proto".parse().unwrap();
        response.headers_mut().insert("content-type", kind);
        Ok::<_, Infallible>(response)
    });
    let response = layer
        .streaming()
        .layer(handler)
        .oneshot(Request::new(()))
        .await
        .unwrap();
    let body = response.into_body().collect().await.unwrap();
    let trailers = body.trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "2");
    assert!(
        trailers["grpc-message"]
            .to_str()
            .unwrap()
            .contains("stopped half way")
    );
    assert_eq!(body.to_bytes(), "a");
}

/// A gRPC-Web client does not read trailers: for it the body breaks off.
#[tokio::test(start_paused = true)]
async fn lost_lock_breaks_off_a_grpc_web_stream() {
    let layer = LockLayer::new(LockClient::memory(), fixed("k")).until_body(SECOND);
    let handler = service_fn(|_: Request<()>| async {
        let (body, _) = Script::new([Step::Data("a"), Step::Never]);
        let mut response = Response::new(body);
        let kind = "application/grpc-web".parse().unwrap();
        response.headers_mut().insert("content-type", kind);
        Ok::<_, Infallible>(response)
    });
    let service = layer.streaming().layer(handler);
    let response = service.oneshot(Request::new(())).await.unwrap();
    assert!(response.into_body().collect().await.is_err());
}

/// The body of a request is read before the lock is taken.
mod the_body_of_a_request {
    use super::*;
    use dlock_tower::body::{Buffered, FromBuffered};
    use dlock_tower::key::{Key, header};
    use dlock_tower::{NotStarted, Reason};
    use http::StatusCode;
    use http_body_util::combinators::UnsyncBoxBody;
    use http_body_util::{Full, StreamBody};
    use std::pin::pin;

    type Out = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

    fn frames(
        frames: impl futures_util::Stream<Item = Result<Frame<Bytes>, &'static str>> + Send + 'static,
    ) -> Out {
        StreamBody::new(frames).map_err(Into::into).boxed_unsync()
    }

    /// Comes piece by piece, with a pause before each.
    fn slow(pieces: &'static [&'static str], pause: Duration) -> Out {
        use futures_util::StreamExt;
        frames(futures_util::stream::iter(pieces).then(move |piece| async move {
            sleep(pause).await;
            Ok(Frame::data(Bytes::from(*piece)))
        }))
    }

    fn never() -> Out {
        frames(futures_util::stream::pending())
    }

    fn post(body: Out) -> Request<Out> {
        Request::post("/").header("k", "7").body(body).unwrap()
    }

    /// Answers with the body of the request, and tells in a header how long the body was said to be.
    async fn echo(request: Request<Out>) -> Result<Response<Full<Bytes>>, Infallible> {
        assert!(dlock::current().is_some());
        let size = request.body().size_hint().exact();
        let collected = request.into_body().collect().await.unwrap();
        let sum = collected
            .trailers()
            .and_then(|trailers| trailers.get("x-sum").cloned());
        let mut response = Response::builder().header("x-size", format!("{size:?}"));
        if let Some(sum) = sum {
            response = response.header("x-sum", sum);
        }
        Ok(response.body(Full::new(collected.to_bytes())).unwrap())
    }

    fn by_header(client: &LockClient) -> LockLayer<Key<dlock_tower::key::Header>> {
        LockLayer::new(client.clone(), header("k"))
    }

    /// A client that sends nothing holds no lock, whatever it announced.
    #[tokio::test(start_paused = true)]
    async fn that_does_not_come_holds_no_lock_and_ends_in_408() {
        let (client, other) = pair().await;
        let service = by_header(&client).layer(service_fn(echo));
        let started = tokio::time::Instant::now();
        let mut first = pin!(service.clone().oneshot(post(never())));
        assert!(timeout(SECOND, &mut first).await.is_err());
        assert_eq!((client.held(), client.waited_for()), (0, 0));
        drop(other.lock("7").try_acquire().await.expect("free"));
        let second = service.oneshot(post(slow(&["a"], Duration::ZERO))).await.unwrap();
        assert_eq!(second.status(), 200);
        let response = first.await.unwrap();
        assert_eq!(started.elapsed().as_secs(), 30);
        assert_eq!(response.status(), StatusCode::REQUEST_TIMEOUT);
        assert!(response.extensions().get::<NotStarted>().is_some());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(problem["type"], "urn:dlock:problem:body-timeout");
    }

    /// The lock is taken when the last byte is there, and not before.
    #[tokio::test(start_paused = true)]
    async fn that_comes_slowly_reaches_the_handler_whole() {
        let (client, other) = pair().await;
        let service = by_header(&client).layer(service_fn(echo));
        let body = slow(&["a", "b", "c"], 5 * SECOND);
        let (response, ()) = tokio::join!(service.oneshot(post(body)), async {
            for _ in 0..14 {
                drop(other.lock("7").try_acquire().await.expect("free"));
                sleep(SECOND).await;
            }
        });
        let response = response.unwrap();
        assert_eq!(response.headers()["x-size"], "Some(3)");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "abc");
    }

    #[tokio::test(start_paused = true)]
    async fn reaches_the_handler_with_its_trailers() {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", "3".parse().unwrap());
        let body = frames(futures_util::stream::iter([
            Ok(Frame::data(Bytes::from("a"))),
            Ok(Frame::trailers(trailers)),
        ]));
        let service = by_header(&LockClient::memory()).layer(service_fn(echo));
        let response = service.oneshot(post(body)).await.unwrap();
        assert_eq!(response.headers()["x-sum"], "3");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a");
    }

    /// 413 by what is announced, without a look at the body; and by what comes.
    #[tokio::test(start_paused = true)]
    async fn that_is_too_large_is_refused_before_anything_is_locked() {
        let (client, other) = pair().await;
        // No request gets as far as to wait for it.
        let _held = other.lock("7").acquire().await.unwrap();
        let service = by_header(&client).body_limit(3).layer(service_fn(echo));
        let announced = Full::from("abcd").map_err(|never| match never {}).boxed_unsync();
        for body in [announced, slow(&["ab", "cd"], Duration::ZERO)] {
            let response = service.clone().oneshot(post(body)).await.unwrap();
            assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
            assert!(response.extensions().get::<NotStarted>().is_some());
        }
        let layer = by_header(&client).body_limit(3).try_once();
        let fits = layer
            .layer(service_fn(echo))
            .oneshot(post(slow(&["abc"], Duration::ZERO)));
        assert_eq!(fits.await.unwrap().status(), StatusCode::LOCKED);
    }

    #[tokio::test(start_paused = true)]
    async fn that_breaks_is_refused_before_anything_is_locked() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let service = by_header(&client).layer(service_fn(echo));
        let body = frames(futures_util::stream::iter([Err("the client hung up")]));
        let response = service.oneshot(post(body)).await.unwrap();
        assert_eq!(response.status(), StatusCode::BAD_REQUEST);
        assert!(response.extensions().get::<NotStarted>().is_some());
        let problem = response.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&problem).unwrap();
        assert_eq!(problem["type"], "urn:dlock:problem:body-incomplete");
        assert_eq!(problem["retryable"], true);
    }

    /// A body that is gone over to the handler as it came, and must not be touched.
    struct Untouched {
        ended: bool,
    }

    impl Body for Untouched {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            panic!("it was read");
        }

        fn is_end_stream(&self) -> bool {
            self.ended
        }
    }

    impl FromBuffered for Untouched {
        fn from_buffered(_: Buffered) -> Self {
            panic!("it was replaced");
        }
    }

    /// A request without a body costs nothing. One that is refused for its key is never asked for its body
    /// (`Expect: 100-continue`), nor is one that needs no lock, nor a tunnel.
    #[tokio::test(start_paused = true)]
    async fn is_not_touched_where_there_is_none_or_nothing_to_lock() {
        let client = LockClient::memory();
        let handler = service_fn(|_: Request<Untouched>| async {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        });
        let required = by_header(&client).layer(handler);
        let optional = LockLayer::new(client, header("k").optional()).layer(handler);
        let request = |method: &str, ended| {
            let request = Request::builder().method(method);
            request.body(Untouched { ended }).unwrap()
        };
        let mut get = request("GET", true);
        get.headers_mut().insert("k", "7".parse().unwrap());
        assert_eq!(required.clone().oneshot(get).await.unwrap().status(), 200);
        let without_key = required.clone().oneshot(request("POST", false)).await.unwrap();
        assert_eq!(without_key.status(), 400);
        let passes = optional.oneshot(request("POST", false)).await.unwrap();
        assert_eq!(passes.status(), 200);
        let mut tunnel = request("CONNECT", false);
        tunnel.headers_mut().insert("k", "7".parse().unwrap());
        assert_eq!(required.oneshot(tunnel).await.unwrap().status(), 200);
        // A key that would be in the body of a tunnel is missing.
        let from_body = header("k").or(dlock_tower::key::json_field("k"));
        let from_body = LockLayer::new(LockClient::memory(), from_body).layer(handler);
        let without_key = from_body.oneshot(request("CONNECT", false)).await.unwrap();
        assert_eq!(without_key.status(), 400);
    }

    /// With `streaming` the handler reads it under the lock, which `max_hold` bounds.
    #[tokio::test(start_paused = true)]
    async fn is_read_under_the_lock_where_the_layer_streams() {
        let (client, other) = pair().await;
        let layer = by_header(&client).streaming().max_hold(10 * SECOND);
        let service = layer.layer(service_fn(echo));
        let body = slow(&["a", "b"], SECOND);
        let (response, busy) = tokio::join!(service.clone().oneshot(post(body)), async {
            sleep(SECOND).await;
            other.lock("7").try_acquire().await.unwrap_err().is_busy()
        });
        assert!(busy);
        let response = response.unwrap();
        assert_eq!(response.headers()["x-size"], "None");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "ab");
        assert_eq!(service.oneshot(post(never())).await.unwrap().status(), 503);
    }

    /// Clients of gRPC are told in its own way, and renderers what it was.
    #[tokio::test(start_paused = true)]
    async fn that_does_not_come_is_told_to_grpc_and_to_renderers() {
        let seen = Arc::new(parking_lot::Mutex::new(None));
        let slot = seen.clone();
        let layer = by_header(&LockClient::memory()).body_timeout(SECOND);
        let service = layer.clone().layer(service_fn(echo));
        let mut request = post(never());
        let grpc = "application/grpc".parse().unwrap();
        request.headers_mut().insert("content-type", grpc);
        let response = service.oneshot(request).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["grpc-status"]),
            (200, &"4".parse().unwrap())
        );
        let rendering = layer.render(move |rejection| {
            *slot.lock() = Some(rejection.reason());
            rejection.response()
        });
        rendering
            .layer(service_fn(echo))
            .oneshot(post(never()))
            .await
            .unwrap();
        assert_eq!(*seen.lock(), Some(Reason::BodyTimeout));
    }

    /// A key that is taken from the body does not wait for ever either.
    #[tokio::test(start_paused = true)]
    async fn that_does_not_come_ends_the_search_for_a_key_in_it() {
        let key = dlock_tower::key::json_field("id").timeout(SECOND);
        let service = LockLayer::new(LockClient::memory(), key).layer(service_fn(echo));
        let started = tokio::time::Instant::now();
        let response = service.oneshot(post(never())).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), started.elapsed().as_secs()),
            (408, 1)
        );
    }
}
