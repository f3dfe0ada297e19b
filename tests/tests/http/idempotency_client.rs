//! The client's side: a key for each operation, kept over its retries; over hyper and over reqwest.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::idempotency_support::{Answer, Counting, SECOND, answer, layer};
use axum::Router;
use axum::routing::post;
use bytes::Bytes;
use dlock_tower::retry::{RetryLayer, SendError, Sent};
use futures_util::stream::{self, StreamExt};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_http::compression::CompressionLayer;
use tower_http::decompression::DecompressionLayer;

type Res = Response<Full<Bytes>>;
type Answers = Box<dyn Fn() -> Result<Res, &'static str>>;
type Seen = Arc<Mutex<Vec<HeaderMap>>>;

/// A client that answers by number, and notes what it was sent.
fn answering<F>(
    answer: F,
) -> (
    impl Service<Request<Full<Bytes>>, Response = Res, Error = &'static str, Future: Send>
    + Clone
    + Send
    + 'static,
    Seen,
)
where
    F: Fn(usize) -> Result<Res, &'static str> + Clone + Send + 'static,
{
    let seen = Seen::default();
    let noted = seen.clone();
    let client = tower::service_fn(move |request: Request<Full<Bytes>>| {
        let (noted, answer) = (noted.clone(), answer.clone());
        async move {
            let (parts, body) = request.into_parts();
            assert_eq!(body.collect().await.unwrap().to_bytes(), "5");
            let n = {
                let mut noted = noted.lock().unwrap();
                noted.push(parts.headers);
                noted.len()
            };
            answer(n)
        }
    });
    (client, seen)
}

fn status(status: u16) -> Res {
    Response::builder()
        .status(status)
        .body(Full::from("text"))
        .unwrap()
}

fn in_progress() -> Res {
    dlock_tower::idempotency::Problem::InProgress
        .rejection()
        .response()
}

fn pay() -> Request<Full<Bytes>> {
    Request::post("http://shop/pay").body(Full::from("5")).unwrap()
}

fn key(headers: &HeaderMap) -> &str {
    headers["idempotency-key"].to_str().unwrap()
}

#[tokio::test(start_paused = true)]
async fn each_request_gets_a_key_and_keeps_it_over_its_retries() {
    let (client, seen) = answering(|n| {
        if n % 3 == 0 {
            Ok(status(201))
        } else {
            Ok(status(503))
        }
    });
    let client = RetryLayer::new().layer(client);
    for _ in 0..2 {
        let response = client.clone().oneshot(pay()).await.unwrap();
        assert_eq!(response.status(), 201);
        let sent = response.extensions().get::<Sent>().unwrap();
        assert_eq!(sent.attempts, 3);
        assert_eq!(
            sent.key.to_str().unwrap(),
            key(seen.lock().unwrap().last().unwrap())
        );
    }
    let seen = seen.lock().unwrap();
    let keys: Vec<&str> = seen.iter().map(key).collect();
    assert!(keys[0] == keys[1] && keys[1] == keys[2] && keys[3] == keys[5]);
    assert_ne!(keys[0], keys[3]);
    assert!(keys[0].len() == 38 && keys[0].starts_with('"') && keys[0].ends_with('"'));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_there_already_stays() {
    let (client, seen) = answering(|n| Ok(status(if n == 1 { 502 } else { 200 })));
    let mut request = pay();
    request
        .headers_mut()
        .insert("idempotency-key", "mine".parse().unwrap());
    RetryLayer::new().layer(client).oneshot(request).await.unwrap();
    assert!(seen.lock().unwrap().iter().all(|headers| key(headers) == "mine"));
}

#[tokio::test(start_paused = true)]
async fn what_is_sent_again_and_what_is_not() {
    let replayed = || {
        let mut response = status(503);
        response
            .headers_mut()
            .insert("idempotent-replayed", "true".parse().unwrap());
        response
    };
    let other_conflict = || {
        let mut response = status(409);
        response
            .headers_mut()
            .insert("content-type", "application/problem+json".parse().unwrap());
        response
    };
    let cases: Vec<(&str, Answers, usize)> = vec![
        ("failure", Box::new(|| Err("broken")), 5),
        ("429", Box::new(|| Ok(status(429))), 5),
        ("502", Box::new(|| Ok(status(502))), 5),
        ("503", Box::new(|| Ok(status(503))), 5),
        ("504", Box::new(|| Ok(status(504))), 5),
        ("replayed", Box::new(move || Ok(replayed())), 1),
        ("other conflict", Box::new(move || Ok(other_conflict())), 1),
        ("conflict", Box::new(|| Ok(status(409))), 1),
        ("200", Box::new(|| Ok(status(200))), 1),
        ("422", Box::new(|| Ok(status(422))), 1),
        ("500", Box::new(|| Ok(status(500))), 1),
    ];
    for (what, answer, times) in cases {
        let answer = Arc::new(Mutex::new(
            std::iter::repeat_with(answer).take(9).collect::<Vec<_>>(),
        ));
        let next = answer.clone();
        let (client, seen) = answering(move |_| next.lock().unwrap().pop().unwrap());
        let outcome = RetryLayer::new().layer(client).oneshot(pay()).await;
        assert_eq!(seen.lock().unwrap().len(), times, "{what}");
        assert_eq!(outcome.is_err(), what == "failure");
    }
}

/// As a lock layer's for a busy lock, which is a problem document, too.
#[tokio::test(start_paused = true)]
async fn conflict_is_sent_again_where_that_is_wanted_and_may_help() {
    for (problem, times) in [
        (r#"{"type":"urn:dlock:problem:busy"}"#, 5),
        (
            r#"{"type":"urn:dlock:problem:idempotency-failed","retryable":false}"#,
            1,
        ),
    ] {
        let (client, seen) = answering(move |_| {
            let response = Response::builder().status(409);
            let response = response.header("content-type", "application/problem+json");
            Ok(response.body(Full::from(problem)).unwrap())
        });
        let layer = RetryLayer::new().retry_statuses([StatusCode::CONFLICT]);
        let response = layer.layer(client).oneshot(pay()).await.unwrap();
        assert_eq!(response.status(), 409);
        assert_eq!(seen.lock().unwrap().len(), times, "{problem}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_body_of_a_conflict_is_not_lost_by_looking_at_it() {
    let (client, _) = answering(|_| Ok(in_progress()));
    let response = RetryLayer::new()
        .total_time(Duration::ZERO)
        .layer(client)
        .oneshot(pay())
        .await
        .unwrap();
    let json = answer(response).await.json();
    assert_eq!(json["type"], "urn:dlock:problem:idempotency-in-progress");
}

/// Answers "in progress" use up no attempts: only the total time bounds them ("What is sent again" of the client's docs).
#[tokio::test(start_paused = true)]
async fn in_progress_answers_are_bounded_by_the_total_time_alone() {
    let begun = Instant::now();
    // The work takes 25 of the 30 s.
    let (client, seen) = answering(move |_| match begun.elapsed() < SECOND * 25 {
        true => Ok(in_progress()),
        false => Ok(status(201)),
    });
    let response = RetryLayer::new().layer(client).oneshot(pay()).await.unwrap();
    assert_eq!(response.status(), 201);
    let sent = response.extensions().get::<Sent>().unwrap();
    assert_eq!(sent.attempts as usize, seen.lock().unwrap().len());
    assert!(sent.attempts > 15, "{sent:?}");
    // It never ends: the caller gets the last answer when the time is over, and not before.
    let (client, _) = answering(|_| Ok(in_progress()));
    let begun = Instant::now();
    let response = RetryLayer::new().layer(client).oneshot(pay()).await.unwrap();
    let took = begun.elapsed();
    assert_eq!(response.status(), 409);
    assert!(took > SECOND * 27 && took <= SECOND * 30, "{took:?}");
}

/// A caller that got no response is told the key that the layer drew, and can send the same request later.
#[tokio::test(start_paused = true)]
async fn error_tells_the_drawn_key_and_the_number_of_tries() {
    let (client, seen) = answering(|_| Err("broken"));
    let layer = RetryLayer::new().attempts(2);
    let error: SendError = layer.layer(client).oneshot(pay()).await.unwrap_err();
    assert_eq!(
        error.key().unwrap().to_str().unwrap(),
        key(&seen.lock().unwrap()[1])
    );
    assert_eq!(error.sent().unwrap().attempts, 2);
    let key = error.key().unwrap().to_str().unwrap();
    assert!(error.to_string().contains(key), "{error}");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "broken");
    // A typed error is found again, whatever the client is.
    let failing = tower::service_fn(|_: Request<Full<Bytes>>| async {
        Err::<Res, _>(std::io::Error::from(std::io::ErrorKind::TimedOut))
    });
    let error = RetryLayer::new().layer(failing).oneshot(pay()).await.unwrap_err();
    assert_eq!(
        error.downcast_ref::<std::io::Error>().unwrap().kind(),
        std::io::ErrorKind::TimedOut
    );
    let mut get = pay();
    *get.method_mut() = Method::GET;
    let (client, _) = answering(|_| Err("broken"));
    assert_eq!(
        RetryLayer::new()
            .layer(client)
            .oneshot(get)
            .await
            .unwrap_err()
            .key(),
        None
    );
}

/// Failures in between use up attempts, and answers "in progress" give none back.
#[tokio::test(start_paused = true)]
async fn failures_between_in_progress_answers_use_up_the_attempts() {
    let (client, seen) = answering(|n| match n % 2 {
        0 => Ok(in_progress()),
        _ => Ok(status(503)),
    });
    let response = RetryLayer::new()
        .attempts(3)
        .layer(client)
        .oneshot(pay())
        .await
        .unwrap();
    assert_eq!((response.status().as_u16(), seen.lock().unwrap().len()), (503, 5));
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_honoured_and_the_tries_are_bounded() {
    let after = |seconds: &'static str| {
        move |n: usize| {
            let mut response = status(if n < 3 { 503 } else { 200 });
            response
                .headers_mut()
                .insert("retry-after", seconds.parse().unwrap());
            Ok(response)
        }
    };
    let (client, _) = answering(after("7"));
    let begun = Instant::now();
    assert_eq!(
        RetryLayer::new()
            .layer(client)
            .oneshot(pay())
            .await
            .unwrap()
            .status(),
        200
    );
    let took = begun.elapsed();
    assert!(took >= SECOND * 14 && took < SECOND * 15, "{took:?}");
    // There is no time for it.
    let (client, seen) = answering(after("20"));
    let begun = Instant::now();
    assert_eq!(
        RetryLayer::new()
            .layer(client)
            .oneshot(pay())
            .await
            .unwrap()
            .status(),
        503
    );
    assert!(begun.elapsed() < SECOND * 21);
    assert_eq!(seen.lock().unwrap().len(), 2);
    // Without it the pauses grow.
    let (client, seen) = answering(|_| Err("broken"));
    let begun = Instant::now();
    let layer = RetryLayer::new().attempts(8).pauses(SECOND / 10, SECOND * 2);
    assert_eq!(
        layer
            .layer(client)
            .oneshot(pay())
            .await
            .unwrap_err()
            .into_source()
            .to_string(),
        "broken"
    );
    let took = begun.elapsed();
    assert!(took > SECOND * 3 && took < SECOND * 10, "{took:?}");
    assert_eq!(seen.lock().unwrap().len(), 8);
}

#[tokio::test(start_paused = true)]
async fn other_methods_and_failures_of_no_use_are_left_alone() {
    let (client, seen) = answering(|_| Err("no"));
    let layer = RetryLayer::new();
    let mut get = pay();
    *get.method_mut() = Method::GET;
    assert!(layer.layer(client.clone()).oneshot(get).await.is_err());
    assert!(!seen.lock().unwrap()[0].contains_key("idempotency-key"));
    let picky = layer.retry_error(|error: &&'static str| *error != "no");
    assert!(picky.layer(client).oneshot(pay()).await.is_err());
    assert_eq!(seen.lock().unwrap().len(), 2);
}

/// A shop that loses its first answers: the work is done, and the connection breaks.
async fn shop(run: &Counting) -> String {
    let counting = run.clone();
    let app = Router::new()
        .route(
            "/pay",
            post(move |body: String| async move {
                let n = counting.next();
                sleep(Duration::from_millis(300)).await;
                (StatusCode::CREATED, format!("run {n} for {body}"))
            }),
        )
        .layer(layer());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, run) = (listener.local_addr().unwrap(), run.clone());
    tokio::spawn(async move {
        let mut connections = 0;
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            connections += 1;
            let service = hyper_util::service::TowerToHyperService::new(app.clone());
            let (breaks, run) = (connections == 1, run.clone());
            tokio::spawn(async move {
                let serve = hyper::server::conn::http1::Builder::new()
                    .serve_connection(hyper_util::rt::TokioIo::new(stream), service);
                if breaks {
                    // Before the answer, however long the machine stands still.
                    let begun = dlock_tests::eventually("it runs", || std::future::ready(run.count() == 1));
                    tokio::select! { biased; () = begun => {}, _ = serve => {} }
                } else {
                    let _ = serve.await;
                }
            });
        }
    });
    format!("http://{address}/pay")
}

fn assert_paid_once(answer: &Answer, run: &Counting, sent: &Sent) {
    assert_eq!(answer.both(), (201, "run 1 for 5"));
    assert!(answer.is_replay(), "the first answer was lost");
    assert_eq!(run.count(), 1);
    // The first broke, the second was told that it is in progress.
    assert!(sent.attempts >= 2);
}

#[tokio::test]
async fn over_hyper() {
    let run = Counting::default();
    let url = shop(&run).await;
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let client = RetryLayer::new().layer(client);
    let request = Request::post(url)
        .header("content-type", "text/plain")
        .body(Full::from("5"))
        .unwrap();
    let response = client.oneshot(request).await.unwrap();
    let sent = response.extensions().get::<Sent>().unwrap().clone();
    assert_paid_once(&answer(response).await, &run, &sent);
}

#[tokio::test]
async fn over_reqwest() {
    let run = Counting::default();
    let url = shop(&run).await;
    let reqwest = reqwest::Client::new();
    let adapter = tower::service_fn(move |request: Request<Bytes>| {
        let client = reqwest.clone();
        async move {
            let response = client.execute(request.try_into()?).await?;
            Ok::<_, reqwest::Error>(Response::<reqwest::Body>::from(response))
        }
    });
    let client = RetryLayer::new()
        .retry_error(|error: &reqwest::Error| !error.is_builder())
        .layer(adapter);
    let request = Request::post(url)
        .header("content-type", "text/plain")
        .body(Bytes::from("5"))
        .unwrap();
    let response = client.oneshot(request).await.unwrap();
    let sent = response.extensions().get::<Sent>().unwrap().clone();
    assert_paid_once(&answer(response).await, &run, &sent);
}

#[tokio::test]
async fn a_client_that_is_driven_ready_is_the_one_that_is_called() {
    #[derive(Default)]
    struct OnlyWhenReady(bool);
    impl Clone for OnlyWhenReady {
        fn clone(&self) -> Self {
            OnlyWhenReady(false)
        }
    }
    impl Service<Request<Full<Bytes>>> for OnlyWhenReady {
        type Response = Res;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Res, Infallible>>;
        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
            self.0 = true;
            std::task::Poll::Ready(Ok(()))
        }
        fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
            assert!(std::mem::take(&mut self.0), "called without being ready");
            std::future::ready(Ok(status(503)))
        }
    }
    let layer = RetryLayer::new()
        .attempts(3)
        .pauses(Duration::from_millis(1), Duration::from_millis(1));
    let mut client = layer.layer(OnlyWhenReady::default());
    for _ in 0..2 {
        assert_eq!(
            client.ready().await.unwrap().call(pay()).await.unwrap().status(),
            503
        );
    }
}

/// A client whose answers are a 409 that tells a problem, with a body that begins like this and never ends.
fn endless_conflict(
    begin: &'static [&'static str],
    empty: bool,
) -> impl Service<
    Request<Full<Bytes>>,
    Response = Response<UnsyncBoxBody<Bytes, Infallible>>,
    Error = Infallible,
    Future: Send,
> + Clone
+ Send
+ 'static {
    tower::service_fn(move |_| async move {
        let frame = |text: &'static str| Ok(Frame::data(Bytes::from(text)));
        let rest = match empty {
            true => stream::repeat("").map(frame).left_stream(),
            false => stream::pending().right_stream(),
        };
        let body = StreamBody::new(stream::iter(begin).map(move |text| frame(text)).chain(rest));
        let response = Response::builder()
            .status(409)
            .header("content-type", "application/problem+json")
            .body(body.boxed_unsync());
        Ok(response.unwrap())
    })
}

#[tokio::test(start_paused = true)]
async fn a_problem_that_stalls_is_left_to_the_caller_with_what_was_read() {
    for (total, waited) in [(30, 5), (2, 2)] {
        let client = RetryLayer::new()
            .total_time(SECOND * total)
            .layer(endless_conflict(&["{\"type\":", "\"x\""], false));
        let begun = Instant::now();
        let answer = timeout(SECOND * 60, client.oneshot(pay())).await;
        let response = answer.expect("the call does not hang").unwrap();
        assert_eq!(response.status(), 409);
        assert_eq!(begun.elapsed().as_secs(), waited);
        let mut body = response.into_body();
        for piece in ["{\"type\":", "\"x\""] {
            let frame = body.frame().await.unwrap().unwrap();
            assert_eq!(frame.into_data().unwrap(), piece);
        }
        assert!(timeout(SECOND, body.frame()).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_problem_of_endless_empty_pieces_is_left_to_the_caller() {
    let client = RetryLayer::new().layer(endless_conflict(&["{"], true));
    let response = client.oneshot(pay()).await.unwrap();
    assert_eq!(response.status(), 409);
    let frame = response.into_body().frame().await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "{");
}

/// As behind a server's `CompressionLayer`, where a layer around this one has asked for gzip and decompresses.
#[tokio::test(start_paused = true)]
async fn in_progress_answer_that_is_compressed_is_asked_again() {
    let (server, seen) = answering(|n| Ok(if n < 9 { in_progress() } else { status(201) }));
    let client = ServiceBuilder::new()
        .layer(DecompressionLayer::new())
        .layer(RetryLayer::new())
        .layer(CompressionLayer::new())
        .service(server);
    let response = client.oneshot(pay()).await.unwrap();
    assert_eq!(response.status(), 201);
    assert_eq!(seen.lock().unwrap().len(), 9);
}

/// Only an answer that names a time, and that the layer cannot read, may be one in progress.
#[tokio::test(start_paused = true)]
async fn encoded_conflict_that_names_no_time_is_not_asked_again() {
    for (encoding, retry_after, times) in [("gzip", false, 1), ("gzip", true, 3), ("Identity", true, 1)] {
        let (client, seen) = answering(move |n| {
            let mut response = Response::builder().status(if n < 3 { 409 } else { 201 });
            response = response
                .header("content-type", "application/problem+json")
                .header("content-encoding", encoding);
            if retry_after {
                response = response.header("retry-after", "1");
            }
            Ok(response.body(Full::from("encoded")).unwrap())
        });
        let response = RetryLayer::new().layer(client).oneshot(pay()).await;
        assert!(response.is_ok());
        assert_eq!(seen.lock().unwrap().len(), times, "{encoding} {retry_after}");
    }
}

/// As a `ConcurrencyLimit` whose only permit another call has.
#[tokio::test(start_paused = true)]
async fn total_time_bounds_the_wait_for_a_client_that_is_not_ready() {
    #[derive(Clone)]
    struct ReadyOnce(bool);
    impl Service<Request<Full<Bytes>>> for ReadyOnce {
        type Response = Res;
        type Error = Infallible;
        type Future = std::future::Ready<Result<Res, Infallible>>;
        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
            match self.0 {
                false => std::task::Poll::Ready(Ok(())),
                true => std::task::Poll::Pending,
            }
        }
        fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
            assert!(!self.0, "it is called without being ready");
            self.0 = true;
            std::future::ready(Ok(status(503)))
        }
    }
    let begun = Instant::now();
    let client = RetryLayer::new().layer(ReadyOnce(false));
    let outcome = timeout(SECOND * 600, client.oneshot(pay())).await;
    let error: SendError = outcome.expect("it ends").unwrap_err();
    assert_eq!(begun.elapsed().as_secs(), 30);
    assert_eq!(error.sent().unwrap().attempts, 1);
    // Without a bound it is as patient as its caller.
    let patient = RetryLayer::new()
        .total_time(Duration::MAX)
        .layer(ReadyOnce(false));
    assert!(timeout(SECOND * 600, patient.oneshot(pay())).await.is_err());
}
