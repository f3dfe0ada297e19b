//! Locks that are held until the response's body is through.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use dlock::backend::memory::MemoryBackend;
use dlock::{LockClient, Loss};
use dlock_tower::key::fixed;
use dlock_tower::lock::LockLost;
use dlock_tower::{LockLayer, OnLost};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Frame};
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);
const MAX: Duration = Duration::from_secs(60);

async fn bounded<T>(test: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(3600), test)
        .await
        .expect("it never ended")
}

async fn pair() -> (LockClient, LockClient) {
    let store = MemoryBackend::new();
    let a = LockClient::builder()
        .backend(store.clone())
        .build()
        .await
        .unwrap();
    let b = LockClient::builder().backend(store).build().await.unwrap();
    (a, b)
}

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

/// Sends a request through a layer on key `k`, whose handler answers with `body`.
async fn sent<B>(
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
    layer.layer(handler).oneshot(Request::new(())).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_held_to_the_end_of_the_body_which_runs_in_the_frame() {
    bounded(async {
        let (client, other) = pair().await;
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", "3".parse().unwrap());
        let (body, in_frame) =
            Script::new([Step::Data("a"), Step::Data("b"), Step::Trailers(trailers.clone())]);
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
        assert!(!body.is_end_stream());
        assert!(body.frame().await.is_none());
        drop(
            other
                .lock("k")
                .try_acquire()
                .await
                .expect("free before the end is told"),
        );
        assert!(body.is_end_stream() && body.frame().await.is_none());
        assert!(in_frame.load(Ordering::Relaxed));
        assert_eq!(client.held(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn by_default_the_lock_is_free_when_the_answer_is_there() {
    bounded(async {
        let (client, other) = pair().await;
        let (body, _) = Script::new([Step::Data("a")]);
        let response = sent(LockLayer::new(client, fixed("k")), body).await;
        drop(other.lock("k").try_acquire().await.expect("free"));
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_body_holds_nothing() {
    bounded(async {
        let (client, other) = pair().await;
        let response = sent(
            LockLayer::new(client, fixed("k")).until_body(MAX),
            Empty::<Bytes>::new(),
        )
        .await;
        drop(other.lock("k").try_acquire().await.expect("free"));
        assert!(response.into_body().is_end_stream());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_error_or_a_drop_of_the_body_gives_the_lock_back() {
    bounded(async {
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
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_never_reads_loses_the_lock_at_max_hold() {
    bounded(async {
        let (client, other) = pair().await;
        let layer = LockLayer::new(client, fixed("k")).until_body(10 * SECOND);
        let (body, _) = Script::new([Step::Data("a"), Step::Data("b")]);
        let started = tokio::time::Instant::now();
        let mut body = sent(layer, body).await.into_body();
        // Nobody polls the body, and the next one gets in all the same.
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
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_lock_ends_a_waiting_body_with_an_error_unless_it_may_run_on() {
    bounded(async {
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
    })
    .await;
}

/// A gRPC call under a lock that is lost ends with a status, as gRPC clients need it, and one that they do not retry by
/// themselves.
#[tokio::test(start_paused = true)]
async fn lost_lock_ends_a_grpc_stream_with_its_status() {
    bounded(async {
        let layer = LockLayer::new(LockClient::memory(), fixed("k")).until_body(SECOND);
        let handler = service_fn(|_: Request<()>| async {
            let (body, _) = Script::new([Step::Data("a"), Step::Never]);
            let mut response = Response::new(body);
            let kind = "application/grpc+proto".parse().unwrap();
            response.headers_mut().insert("content-type", kind);
            Ok::<_, Infallible>(response)
        });
        let response = layer.layer(handler).oneshot(Request::new(())).await.unwrap();
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
    })
    .await;
}
