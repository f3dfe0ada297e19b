//! The lock layer, rule by rule: which requests get in, the responses of the others, and that nothing is left behind.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use dlock::stores::memory::MemoryStore;
use dlock::testing::{Fault, Step, TestStore};
use dlock::{Held, LockClient, LockOptions, Loss};
use dlock_tests::{Log, watched};
use dlock_tower::key::{fixed, from_fn, header};
use dlock_tower::{LockLayer, NotStarted, OnLost, Reason, Rejection};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::tower_support::pair;

type Req = Request<Full<Bytes>>;
type Res = Response<Full<Bytes>>;

const SECOND: Duration = Duration::from_secs(1);

fn request(key: &str) -> Req {
    Request::builder()
        .method("POST")
        .uri("/x")
        .header("k", key)
        .body(Full::default())
        .unwrap()
}

fn grpc(key: &str) -> Req {
    let mut request = request(key);
    request
        .headers_mut()
        .insert("content-type", "application/grpc+proto".parse().unwrap());
    request
}

fn answer() -> Res {
    Response::new(Full::from("done"))
}

async fn ok(_: Req) -> Result<Res, Infallible> {
    Ok(answer())
}

async fn slow(_: Req) -> Result<Res, Infallible> {
    sleep(SECOND).await;
    Ok(answer())
}

fn not_started<B>(response: &Response<B>) -> bool {
    response.extensions().get::<NotStarted>().is_some()
}

fn value<'a, B>(response: &'a Response<B>, header: &str) -> &'a str {
    response
        .headers()
        .get(header)
        .map_or("", |value| value.to_str().unwrap())
}

async fn json<B>(response: Response<B>) -> serde_json::Value
where
    B: http_body_util::BodyExt<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

mod who_gets_in {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn holder_is_where_the_layer_was_made() {
        let client = LockClient::memory();
        let layer = LockLayer::new(client.clone(), header("k"));
        let line = line!() - 1;
        let service = layer.layer(service_fn(slow));
        let (response, report) = tokio::join!(service.oneshot(request("7")), async {
            sleep(SECOND / 2).await;
            client.active()
        });
        assert_eq!(response.unwrap().status(), StatusCode::OK);
        let location = &report.holds[0].location;
        assert!(location.contains(&format!("tower_lock.rs:{line}:")), "{location}");
    }

    /// A type that axum reads as JSON is no gRPC.
    #[tokio::test]
    async fn content_type_is_of_grpc_as_a_whole_or_not_at_all() {
        let service = LockLayer::new(LockClient::memory(), header("k")).layer(service_fn(ok));
        let is_grpc = [
            ("application/grpc", true),
            ("application/GRPC+proto", true),
            ("application/grpc;charset=utf-8", true),
            ("application/grpc-web", true),
            ("application/grpc-web+proto", true),
            ("application/grpc-web-text+proto", true),
            ("application/grpcxyz+json", false),
            ("application/grpc-website+json", false),
            ("application/grpc-json", false),
            ("application/json", false),
        ];
        for (kind, is_grpc) in is_grpc {
            let mut refused = request("{");
            refused
                .headers_mut()
                .insert("content-type", kind.parse().unwrap());
            let response = service.clone().oneshot(refused).await.unwrap();
            let status = response.headers().contains_key("grpc-status");
            assert_eq!(
                (status, response.status() == StatusCode::OK),
                (is_grpc, is_grpc),
                "{kind}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_handler_runs_under_the_lock_and_its_answer_goes_out_as_it_is() {
        let (client, other) = pair().await;
        let probe = other.clone();
        let service = LockLayer::new(client.clone(), header("k").prefix("account:")).layer(service_fn(
            move |request: Req| {
                let probe = probe.clone();
                async move {
                    let held = request
                        .extensions()
                        .get::<Held>()
                        .expect("a view of the lock")
                        .clone();
                    assert!(held.is_held() && held.fencing_token() > 0);
                    assert_eq!(held.key().as_str(), "account:7");
                    assert!(probe.lock("account:7").try_acquire().await.unwrap_err().is_busy());
                    let response = Response::builder().status(201).header("x-own", "1");
                    Ok::<_, Infallible>(response.body(Full::<Bytes>::from("made")).unwrap())
                }
            },
        ));
        let response = service.oneshot(request("7")).await.unwrap();
        assert_eq!(
            (response.status(), value(&response, "x-own")),
            (StatusCode::CREATED, "1")
        );
        assert!(!not_started(&response));
        // The release has arrived before the answer: another process finds the lock free.
        drop(
            other
                .lock("account:7")
                .try_acquire()
                .await
                .expect("the lock is free"),
        );
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "made");
        assert_eq!(client.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_of_one_key_run_one_after_the_other_and_of_others_at_once() {
        let client = LockClient::memory();
        let layer = LockLayer::new(client, header("k"));
        let started = Instant::now();
        let run = |key| layer.layer(service_fn(slow)).oneshot(request(key));
        let (a, b, c, d) = tokio::join!(run("1"), run("1"), run("1"), run("2"));
        for response in [a, b, c, d] {
            assert_eq!(response.unwrap().status(), StatusCode::OK);
        }
        assert!(started.elapsed() >= 3 * SECOND && started.elapsed() < 4 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn options_and_head_pass_without_a_lock_unless_other_methods_are_named() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let layer = LockLayer::new(client, header("k")).try_once();
        let status = |layer: LockLayer<_>, method: Method| async move {
            let mut request = request("7");
            *request.method_mut() = method;
            layer
                .layer(service_fn(ok))
                .oneshot(request)
                .await
                .unwrap()
                .status()
        };
        assert_eq!(status(layer.clone(), Method::OPTIONS).await, 200);
        assert_eq!(status(layer.clone(), Method::HEAD).await, 200);
        assert_eq!(status(layer.clone(), Method::GET).await, 423);
        let layer = layer.skip_methods([Method::GET]);
        assert_eq!(status(layer.clone(), Method::GET).await, 200);
        assert_eq!(status(layer, Method::HEAD).await, 423);
    }

    #[tokio::test(start_paused = true)]
    async fn a_closure_lets_pass_or_refuses() {
        let layer = LockLayer::new(LockClient::memory(), |parts: &http::request::Parts| {
            match parts.headers.get("k").and_then(|k| k.to_str().ok()) {
                None => Err(Rejection::new(StatusCode::UNAUTHORIZED, "no account was named")),
                Some("free") => Ok(None),
                Some(key) => Ok(Some(format!("k:{key}"))),
            }
        });
        let service = layer.layer(service_fn(|request: Req| async move {
            let held = request
                .extensions()
                .get::<Held>()
                .map(|held| held.key().as_str().to_owned());
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(
                held.unwrap_or("nothing".into()),
            )))
        }));
        for (key, says) in [("free", "nothing"), ("1", "k:1")] {
            let response = service.clone().oneshot(request(key)).await.unwrap();
            assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), says);
        }
        let mut bare = request("");
        bare.headers_mut().clear();
        let response = service.oneshot(bare).await.unwrap();
        assert_eq!(response.status(), 401);
        assert!(not_started(&response));
        let problem = json(response).await;
        assert_eq!(problem["type"], "about:blank");
        assert_eq!(
            (problem["title"].as_str(), problem["detail"].as_str()),
            (Some("Unauthorized"), Some("no account was named"))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn handler_runs_in_the_frame_and_re_enters() {
        let client = LockClient::memory();
        let (outer, inner) = (client.clone(), client.clone());
        let handler = service_fn(move |request: Req| {
            let client = inner.clone();
            async move {
                let held = request.extensions().get::<Held>().unwrap().clone();
                let again = client.lock("7").try_acquire().await.expect("re-entered");
                assert_eq!(again.fencing_token(), held.fencing_token());
                assert_eq!(dlock::current().unwrap().key().as_str(), "7");
                Ok::<_, Infallible>(answer())
            }
        });
        // A second layer of the same key re-enters as well.
        let layer = LockLayer::new(client.clone(), header("k"));
        let service = LockLayer::new(outer, fixed("7")).layer(layer.layer(handler));
        assert_eq!(service.oneshot(request("7")).await.unwrap().status(), 200);
        assert_eq!(client.held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn min_hold_keeps_the_lock_after_the_answer() {
        let (client, other) = pair().await;
        let layer = LockLayer::new(client, header("k")).min_hold(10 * SECOND);
        layer.layer(service_fn(ok)).oneshot(request("7")).await.unwrap();
        assert!(other.lock("7").try_acquire().await.unwrap_err().is_busy());
        sleep(10 * SECOND).await;
        drop(other.lock("7").try_acquire().await.unwrap());
    }
}

mod what_the_others_are_told {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn busy_is_423_after_five_seconds_with_retry_after_and_a_problem() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let in_handler = ran.clone();
        let service = LockLayer::new(client.clone(), header("k")).layer(service_fn(move |r: Req| {
            in_handler.store(true, Ordering::Relaxed);
            ok(r)
        }));
        let started = Instant::now();
        let response = service.oneshot(request("7")).await.unwrap();
        assert_eq!(started.elapsed().as_secs(), 5);
        assert_eq!(response.status(), StatusCode::LOCKED);
        assert_eq!(value(&response, "retry-after"), "1");
        assert_eq!(value(&response, "content-type"), "application/problem+json");
        assert!(not_started(&response));
        let problem = json(response).await;
        assert_eq!(problem["type"], "urn:dlock:problem:busy");
        assert_eq!(problem["status"], 423);
        assert!(problem["title"].is_string() && problem["detail"].is_string());
        assert!(!ran.load(Ordering::Relaxed));
        assert_eq!((client.waited_for(), client.held()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn try_once_does_not_wait_and_wait_waits_as_long_as_it_says() {
        let (client, other) = pair().await;
        let held = other.lock("7").acquire().await.unwrap();
        let layer = LockLayer::new(client, header("k"));
        let run = |layer: LockLayer<_>| layer.layer(service_fn(ok)).oneshot(request("7"));
        let started = Instant::now();
        assert_eq!(run(layer.clone().try_once()).await.unwrap().status(), 423);
        assert_eq!(started.elapsed(), Duration::ZERO);
        assert_eq!(run(layer.clone().wait(90 * SECOND)).await.unwrap().status(), 423);
        assert_eq!(started.elapsed().as_secs(), 90);
        let (response, ()) = tokio::join!(run(layer), async {
            sleep(2 * SECOND).await;
            drop(held);
        });
        assert_eq!(response.unwrap().status(), 200);
        assert_eq!(started.elapsed().as_secs(), 92);
    }

    /// `options` replaces all that was said before, also that a request does not wait.
    #[tokio::test(start_paused = true)]
    async fn options_replace_try_once() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let options = LockOptions::new().wait(2 * SECOND);
        let layer = LockLayer::new(client, header("k")).try_once().options(options);
        let started = Instant::now();
        let busy = layer
            .clone()
            .layer(service_fn(ok))
            .oneshot(request("7"))
            .await
            .unwrap();
        assert_eq!((busy.status().as_u16(), started.elapsed()), (423, 2 * SECOND));
        let busy = layer
            .try_once()
            .layer(service_fn(ok))
            .oneshot(request("7"))
            .await
            .unwrap();
        assert_eq!((busy.status().as_u16(), started.elapsed()), (423, 2 * SECOND));
    }

    #[tokio::test(start_paused = true)]
    async fn the_busy_status_can_be_chosen() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let layer = || LockLayer::new(client.clone(), header("k")).try_once();
        for (layer, status) in [
            (layer().conflict(), 409),
            (layer().too_many_requests(), 429),
            (layer().service_unavailable(), 503),
            (layer().busy_status(StatusCode::FAILED_DEPENDENCY), 424),
        ] {
            let response = layer.layer(service_fn(ok)).oneshot(request("7")).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), value(&response, "retry-after")),
                (status, "1")
            );
            assert!(not_started(&response));
            let problem = json(response).await;
            assert_eq!(
                (&problem["status"], &problem["type"]),
                (&status.into(), &"urn:dlock:problem:busy".into())
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_fixed_lease_tells_when_the_lock_ends() {
        let client = LockClient::memory();
        let layer = LockLayer::new(client, header("k"))
            .fixed_lease(Duration::from_millis(8500))
            .try_once();
        let first = tokio::spawn(
            layer
                .layer(service_fn(|_: Req| pending::<Result<Res, Infallible>>()))
                .oneshot(request("7")),
        );
        sleep(SECOND).await;
        let response = layer.layer(service_fn(ok)).oneshot(request("7")).await.unwrap();
        // 7.5 s are left.
        assert_eq!(
            (response.status().as_u16(), value(&response, "retry-after")),
            (423, "8")
        );
        first.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn excess_waiters_are_refused_at_once() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let layer = LockLayer::new(client.clone(), header("k")).max_waiters(1);
        let waiting = tokio::spawn(layer.layer(service_fn(ok)).oneshot(request("7")));
        sleep(SECOND).await;
        let started = Instant::now();
        let response = layer.layer(service_fn(ok)).oneshot(request("7")).await.unwrap();
        assert_eq!(started.elapsed(), Duration::ZERO);
        assert_eq!(
            (response.status().as_u16(), value(&response, "retry-after")),
            (503, "1")
        );
        assert!(not_started(&response));
        assert_eq!(json(response).await["type"], "urn:dlock:problem:too-many-waiters");
        assert_eq!(waiting.await.unwrap().unwrap().status(), 423);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_down_is_503_and_never_open_unless_asked() {
        let (store, client) = watched().await;
        store.seen().fail_acquires.store(true, Ordering::Relaxed);
        let seen = Arc::new(AtomicUsize::new(0));
        let counter = seen.clone();
        let handler = service_fn(move |request: Req| {
            counter.fetch_add(1, Ordering::Relaxed);
            assert!(
                request.extensions().get::<Held>().is_none(),
                "there is no lock to show"
            );
            ok(request)
        });
        let layer = LockLayer::new(client.clone(), header("k"));
        for layer in [layer.clone(), layer.clone().try_once()] {
            let response = layer.layer(handler.clone()).oneshot(request("7")).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), value(&response, "retry-after")),
                (503, "1")
            );
            assert!(not_started(&response));
            let problem = json(response).await;
            assert_eq!(problem["type"], "urn:dlock:problem:unavailable");
            assert!(
                !problem["detail"].as_str().unwrap().contains("it is not there"),
                "insides shown to strangers"
            );
        }
        assert_eq!(seen.load(Ordering::Relaxed), 0);

        let open = layer.fail_open().layer(handler);
        let response = open.clone().oneshot(request("7")).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), seen.load(Ordering::Relaxed)),
            (200, 1)
        );
        // Open means open to an outage, not to a bad key or a service that ends.
        assert_eq!(open.clone().oneshot(request("{")).await.unwrap().status(), 400);
        client.shutdown(SECOND).await;
        assert_eq!(open.oneshot(request("7")).await.unwrap().status(), 503);
        assert_eq!(seen.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_bad_key_is_the_clients_mistake_and_bad_options_are_ours() {
        let client = LockClient::memory();
        let layer = LockLayer::new(client.clone(), header("k"));
        for key in ["a{b", "", &"x".repeat(513)] {
            let response = layer.layer(service_fn(ok)).oneshot(request(key)).await.unwrap();
            assert_eq!(response.status(), 400, "{key}");
            assert!(not_started(&response) && value(&response, "retry-after").is_empty());
            assert_eq!(json(response).await["type"], "urn:dlock:problem:invalid-key");
        }
        layer.check().unwrap();
        for wrong in [
            layer.clone().wait(Duration::ZERO),
            layer.clone().fixed_lease(Duration::from_millis(1)),
            layer.clone().until_body(Duration::ZERO),
            layer.clone().fixed_lease(SECOND).min_hold(2 * SECOND),
            layer.clone().busy_status(StatusCode::OK),
        ] {
            let error = wrong.check().unwrap_err().to_string();
            assert!(error.contains("option"), "{error}");
            let response = wrong.layer(service_fn(ok)).oneshot(request("7")).await.unwrap();
            assert_eq!(response.status(), 500);
            assert!(not_started(&response));
            assert_eq!(json(response).await["type"], "urn:dlock:problem:internal");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_is_answered_with_trailers_only() {
        let (client, other) = pair().await;
        let _held = other.lock("größe 100%").acquire().await.unwrap();
        let service = LockLayer::new(
            client.clone(),
            from_fn(|parts| {
                parts.headers["k"]
                    .to_str()
                    .map(|k| k.replace("size", "größe"))
                    .unwrap_or_default()
            }),
        )
        .try_once()
        .conflict()
        .layer(service_fn(ok));
        let response = service.clone().oneshot(grpc("size 100%")).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), value(&response, "grpc-status")),
            (200, "10")
        );
        assert_eq!(value(&response, "content-type"), "application/grpc+proto");
        assert_eq!(value(&response, "retry-after"), "1");
        let message = value(&response, "grpc-message");
        assert!(message.contains("gr%C3%B6%C3%9Fe 100%25"), "{message}");
        assert!(not_started(&response));
        assert!(
            http_body_util::BodyExt::collect(response.into_body())
                .await
                .unwrap()
                .to_bytes()
                .is_empty()
        );

        let response = service.clone().oneshot(grpc("{")).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), value(&response, "grpc-status")),
            (200, "3")
        );
        client.shutdown(SECOND).await;
        let response = service.oneshot(grpc("7")).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), value(&response, "grpc-status")),
            (200, "14")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_answers_can_be_replaced() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let service = LockLayer::new(client, header("k"))
            .try_once()
            .render(|rejection: &Rejection| {
                assert_eq!(
                    (rejection.reason(), rejection.status().as_u16()),
                    (Reason::Busy, 423)
                );
                assert_eq!(rejection.retry_after_secs(), Some(1));
                assert!(!rejection.has_started() && rejection.grpc().is_none());
                Response::builder()
                    .status(418)
                    .body(String::from("short and stout"))
                    .unwrap()
            })
            .layer(service_fn(ok));
        let response = service.oneshot(request("7")).await.unwrap();
        assert_eq!(response.status(), 418);
        assert!(not_started(&response));
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "short and stout"
        );
    }
}

mod ends {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_services_error_is_left_alone_and_gives_the_lock_back() {
        let (client, other) = pair().await;
        let service =
            LockLayer::new(client, header("k")).layer(service_fn(|_: Req| async { Err::<Res, _>("broken") }));
        assert_eq!(service.oneshot(request("7")).await.unwrap_err(), "broken");
        drop(other.lock("7").try_acquire().await.expect("the lock is free"));
    }

    #[tokio::test(start_paused = true)]
    async fn failed_release_leaves_the_response_whole() {
        let (store, client) = watched().await;
        let service = LockLayer::new(client, header("k")).layer(service_fn(move |request: Req| {
            // The release is never answered.
            store.seen().slow_answers.store(3_600_000, Ordering::Relaxed);
            ok(request)
        }));
        let started = Instant::now();
        let response = service.oneshot(request("7")).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(!not_started(&response));
        assert_eq!(started.elapsed().as_secs(), dlock::DEFAULT_RETRY_FOR.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_gives_the_lock_back() {
        let client = LockClient::memory();
        let service = LockLayer::new(client.clone(), header("k")).layer(service_fn(|_: Req| async {
            panic!("on purpose") as Result<Res, Infallible>
        }));
        assert!(
            tokio::spawn(service.oneshot(request("7")))
                .await
                .unwrap_err()
                .is_panic()
        );
        drop(client.lock("7").try_acquire().await.expect("the lock is free"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_dropped_while_it_waits_leaves_no_waiter() {
        let (client, other) = pair().await;
        let held = other.lock("7").acquire().await.unwrap();
        let layer = LockLayer::new(client.clone(), header("k"));
        for _ in 0..3 {
            let run = layer.layer(service_fn(ok)).oneshot(request("7"));
            assert!(timeout(SECOND, run).await.is_err());
        }
        sleep(SECOND).await;
        assert_eq!((client.waited_for(), client.held()), (0, 0));
        drop(held);
        drop(other.lock("7").acquire().await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_dropped_in_its_handler_drops_that_first_and_then_the_lock() {
        struct OnDrop(LockClient, Arc<AtomicBool>);
        impl Drop for OnDrop {
            fn drop(&mut self) {
                self.1.store(
                    self.0.held() == 1 && dlock::current().is_some(),
                    Ordering::Relaxed,
                );
            }
        }
        let (client, other) = pair().await;
        let in_order = Arc::new(AtomicBool::new(false));
        let (mine, seen) = (client.clone(), in_order.clone());
        let service = LockLayer::new(client, header("k")).layer(service_fn(move |_: Req| {
            let cleanup = OnDrop(mine.clone(), seen.clone());
            async move {
                let _cleanup = cleanup;
                pending::<Result<Res, Infallible>>().await
            }
        }));
        assert!(timeout(SECOND, service.oneshot(request("7"))).await.is_err());
        assert!(
            in_order.load(Ordering::Relaxed),
            "the handler was dropped outside of its lock"
        );
        drop(other.lock("7").acquire().await.unwrap());
    }
}

mod loss {
    use super::*;

    /// A handler that tells when it is dropped, and what it saw.
    fn endless(
        dropped: Arc<AtomicBool>,
    ) -> impl Service<Req, Response = Res, Error = Infallible, Future: Send> + Clone {
        struct OnDrop(Arc<AtomicBool>);
        impl Drop for OnDrop {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        service_fn(move |_: Req| {
            let cleanup = OnDrop(dropped.clone());
            async move {
                let _cleanup = cleanup;
                pending::<Result<Res, Infallible>>().await
            }
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_that_ends_stops_the_handler_and_the_answer_does_not_say_not_started() {
        let client = LockClient::memory();
        let layer = || LockLayer::new(client.clone(), header("k"));
        for layer in [layer().fixed_lease(10 * SECOND), layer().max_hold(10 * SECOND)] {
            let dropped = Arc::new(AtomicBool::new(false));
            let started = Instant::now();
            let response = layer
                .layer(endless(dropped.clone()))
                .oneshot(request("7"))
                .await
                .unwrap();
            assert!(dropped.load(Ordering::Relaxed));
            assert!(
                started.elapsed() < 10 * SECOND,
                "told before another client can have the lock"
            );
            assert_eq!(response.status(), 503);
            assert!(!not_started(&response), "the handler had begun");
            assert_eq!(value(&response, "retry-after"), "", "it may have had effects");
            assert_eq!(json(response).await["type"], "urn:dlock:problem:lost");
            sleep(SECOND).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_of_the_handler_goes_before_the_lock() {
        struct OnDrop(MemoryStore, Arc<AtomicUsize>);
        impl Drop for OnDrop {
            fn drop(&mut self) {
                self.1.store(self.0.len(), Ordering::Relaxed);
            }
        }
        let store = MemoryStore::new();
        let client = LockClient::builder().store(store.clone()).build().await.unwrap();
        let in_store = Arc::new(AtomicUsize::new(0));
        let (probe, seen) = (store.clone(), in_store.clone());
        let service = LockLayer::new(client, header("k"))
            .fixed_lease(10 * SECOND)
            .layer(service_fn(move |_: Req| {
                let cleanup = OnDrop(probe.clone(), seen.clone());
                async move {
                    let _cleanup = cleanup;
                    pending::<Result<Res, Infallible>>().await
                }
            }));
        assert_eq!(service.oneshot(request("7")).await.unwrap().status(), 503);
        assert_eq!(
            in_store.load(Ordering::Relaxed),
            1,
            "the lock was released while the handler was there"
        );
        assert!(store.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_that_is_forced_open_stops_the_handler_at_the_next_renewal() {
        let (client, other) = pair().await;
        let dropped = Arc::new(AtomicBool::new(false));
        let service = LockLayer::new(client.clone(), header("k"))
            .lease(9 * SECOND)
            .layer(endless(dropped.clone()));
        let run = tokio::spawn(service.oneshot(request("7")));
        sleep(SECOND).await;
        assert!(other.force_release("7").await.unwrap());
        let successor = other.lock("7").acquire().await.unwrap();
        let response = run.await.unwrap().unwrap();
        assert_eq!(response.status(), 503);
        assert!(!not_started(&response) && dropped.load(Ordering::Relaxed));
        sleep(SECOND).await;
        assert!(successor.is_held());
        successor
            .release()
            .await
            .expect("a lost lock touches no successor");
    }

    #[tokio::test(start_paused = true)]
    async fn grpc_clients_do_not_retry_a_loss_by_themselves() {
        let layer = LockLayer::new(LockClient::memory(), header("k")).fixed_lease(SECOND);
        let response = layer
            .layer(endless(Arc::default()))
            .oneshot(grpc("7"))
            .await
            .unwrap();
        assert_eq!(
            (response.status().as_u16(), value(&response, "grpc-status")),
            (200, "2")
        );
        assert!(!not_started(&response));
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_may_run_on_and_sees_the_loss() {
        let service = LockLayer::new(LockClient::memory(), header("k"))
            .fixed_lease(SECOND)
            .on_lost(OnLost::RunOn)
            .layer(service_fn(|request: Req| async move {
                let held = request.extensions().get::<Held>().unwrap().clone();
                assert_eq!(held.lost().await, Loss::Expired);
                sleep(SECOND).await;
                Ok::<_, Infallible>(answer())
            }));
        let response = service.oneshot(request("7")).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(!not_started(&response));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_enclosing_frame_is_refused_before_the_handler() {
        let client = LockClient::memory();
        let inner = LockLayer::new(client.clone(), header("k")).layer(service_fn(ok));
        let service = LockLayer::new(client.clone(), header("k"))
            .fixed_lease(SECOND)
            .on_lost(OnLost::RunOn)
            .layer(service_fn(move |request: Req| {
                let inner = inner.clone();
                async move {
                    sleep(2 * SECOND).await;
                    let response = inner.oneshot(request).await?;
                    assert_eq!(response.status(), 503);
                    assert!(not_started(&response));
                    assert_eq!(value(&response, "retry-after"), "1");
                    Ok::<_, Infallible>(answer())
                }
            }));
        assert_eq!(service.oneshot(request("7")).await.unwrap().status(), 200);
    }
}

mod readiness {
    use super::*;

    /// A service whose readiness is a place: it is taken by `poll_ready` and kept until the answer, as in
    /// a buffer or behind a concurrency limit.
    struct Places {
        places: Arc<Semaphore>,
        polled: Arc<AtomicUsize>,
        taking: Option<Pin<Box<dyn Future<Output = OwnedSemaphorePermit> + Send>>>,
        taken: Option<OwnedSemaphorePermit>,
    }

    impl Places {
        fn new(places: usize) -> Places {
            let places = Arc::new(Semaphore::new(places));
            Places {
                places,
                polled: Arc::default(),
                taking: None,
                taken: None,
            }
        }
    }

    impl Clone for Places {
        fn clone(&self) -> Places {
            Places {
                places: self.places.clone(),
                polled: self.polled.clone(),
                taking: None,
                taken: None,
            }
        }
    }

    impl Service<Req> for Places {
        type Response = Res;
        type Error = Infallible;
        type Future = Pin<Box<dyn Future<Output = Result<Res, Infallible>> + Send>>;

        fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            self.polled.fetch_add(1, Ordering::Relaxed);
            if self.taken.is_none() {
                let places = self.places.clone();
                let taking = self
                    .taking
                    .get_or_insert_with(|| Box::pin(async move { places.acquire_owned().await.unwrap() }));
                self.taken = Some(std::task::ready!(taking.as_mut().poll(cx)));
                self.taking = None;
            }
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Req) -> Self::Future {
            let place = self.taken.take().expect("called without being ready");
            Box::pin(async move {
                sleep(Duration::from_millis(25)).await;
                drop(place);
                Ok(answer())
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiting_request_keeps_no_place_in_the_inner_service() {
        let (client, other) = pair().await;
        let held = other.lock("busy").acquire().await.unwrap();
        let mut service = LockLayer::new(client, header("k")).layer(Places::new(1));
        // As a server does it: ready first, then call.
        let waiting = tokio::spawn(service.ready().await.unwrap().call(request("busy")));
        sleep(Duration::from_millis(1)).await;
        let started = Instant::now();
        let free = service
            .ready()
            .await
            .unwrap()
            .call(request("free"))
            .await
            .unwrap();
        assert_eq!(free.status(), 200);
        assert_eq!(
            started.elapsed(),
            Duration::from_millis(25),
            "it waited behind another key"
        );
        drop(held);
        assert_eq!(waiting.await.unwrap().unwrap().status(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn poll_ready_does_not_touch_the_inner_service() {
        let (client, other) = pair().await;
        let _held = other.lock("7").acquire().await.unwrap();
        let inner = Places::new(1);
        let polled = inner.polled.clone();
        let mut service = LockLayer::new(client, header("k")).try_once().layer(inner);
        for _ in 0..10 {
            service.ready().await.unwrap();
        }
        assert_eq!(service.call(request("7")).await.unwrap().status(), 423);
        assert_eq!(polled.load(Ordering::Relaxed), 0);
        assert_eq!(service.call(request("8")).await.unwrap().status(), 200);
        assert!(polled.load(Ordering::Relaxed) > 0);
    }
}

/// The client warns of it; the layer does not know whether the release goes on.
#[tokio::test(start_paused = true)]
async fn release_that_failed_is_warned_of_once() {
    let log = Log::default();
    let _listening = log.listen();
    let store = TestStore::new();
    let service = LockLayer::new(store.client(), header("k")).layer(service_fn(ok));
    store.fail_next(Step::Release, Fault::Refused);
    let response = service.oneshot(request("7")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(log.count("WARN"), 1);
}

/// A program may install its recorder after the first request.
#[tokio::test]
async fn requests_are_counted_by_outcome_with_the_recorder_of_the_time() {
    let service = LockLayer::new(LockClient::memory(), header("k")).layer(service_fn(ok));
    let recorders = [(); 2].map(|()| PrometheusBuilder::new().build_recorder());
    for (recorder, ran) in recorders.iter().zip([2, 1]) {
        let installed = metrics::set_default_local_recorder(recorder);
        for _ in 0..ran {
            service.clone().oneshot(request("a")).await.unwrap();
        }
        service
            .clone()
            .oneshot(Request::new(Full::default()))
            .await
            .unwrap();
        drop(installed);
        let text = recorder.handle().render();
        let counted: Vec<_> = text
            .lines()
            .filter_map(|line| line.strip_prefix("dlock_http_requests_total"))
            .collect();
        let of = |outcome, count| format!("{{layer=\"lock\",outcome=\"{outcome}\"}} {count}");
        assert_eq!(counted.len(), 2, "{counted:?}");
        assert!(counted.contains(&&*of("ran", ran)), "{counted:?}");
        assert!(counted.contains(&&*of("rejected", 1)), "{counted:?}");
    }
}
