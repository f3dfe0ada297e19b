//! The idempotency layer in axum and under plain hyper, over HTTP/1 and HTTP/2, with real clients that go
//! away.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use crate::idempotency_support::{Answer, Counting, answer, layer, records};
use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{any, patch, post};
use bytes::Bytes;
use dlock_tower::idempotency::caller::{self};
use dlock_tower::idempotency::{IdempotencyHandle, Outcome};
use dlock_tower::{Idempotency, IdempotencyLayer};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tower::ServiceExt;
use tower_http::compression::CompressionLayer;

fn ask(method: &str, uri: &str, key: &str) -> Request<Body> {
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .header("accept-encoding", "gzip")
        .header("idempotency-key", key);
    request.body(Body::empty()).unwrap()
}

async fn call(app: &Router, method: &str, uri: &str, key: &str) -> Answer {
    answer(app.clone().oneshot(ask(method, uri, key)).await.unwrap()).await
}

mod in_axum {
    use super::*;

    #[tokio::test]
    async fn keys_on_different_routes_methods_and_nested_routers_are_different_keys() {
        let run = Counting::default();
        let handler = {
            let run = run.clone();
            move || async move { format!("run {}", run.next()) }
        };
        let routes = || Router::new().route("/{id}", post(handler.clone()).merge(patch(handler.clone())));
        let app = Router::new()
            .nest("/accounts", routes())
            .nest("/orders", routes().layer(layer()))
            .nest_service("/service", routes())
            .nest("/{tenant}/items", routes())
            .route("/own/{id}", post(handler.clone()))
            .layer(layer());
        let different = [
            ("POST", "/accounts/1"),
            ("PATCH", "/accounts/1"),
            ("POST", "/orders/1"),
            ("POST", "/service/1"),
            ("POST", "/acme/items/1"),
            ("POST", "/own/1"),
        ];
        for round in 0..2 {
            for (n, (method, uri)) in different.into_iter().enumerate() {
                let got = call(&app, method, uri, "k").await;
                assert_eq!(got.text(), format!("run {}", n + 1), "{method} {uri}");
                assert_eq!(got.is_replay(), round == 1);
            }
        }
        // Another resource of the same route has keys of its own.
        assert_eq!(call(&app, "POST", "/accounts/2", "k").await.text(), "run 7");
    }

    /// A rolling deploy that renames a path parameter, or nests a router otherwise, does not change the keys.
    #[tokio::test]
    async fn renamed_path_parameter_and_another_nesting_keep_the_key() {
        let run = Counting::default();
        let handler = {
            let run = run.clone();
            move || async move { format!("run {}", run.next()) }
        };
        let layer = layer();
        let inner = |path| Router::new().route(path, post(handler.clone()));
        let apps = [
            inner("/v1/orders/{id}").layer(layer.clone()),
            inner("/v1/orders/{order_id}").layer(layer.clone()),
            Router::new()
                .nest("/v1", inner("/orders/{id}"))
                .layer(layer.clone()),
            Router::new().nest("/v1", inner("/orders/{id}").layer(layer.clone())),
            Router::new().nest_service("/v1", inner("/orders/{id}").layer(layer.clone())),
            Router::new()
                .nest_service("/v1", inner("/orders/{id}"))
                .layer(layer.clone()),
        ];
        for app in apps {
            assert_eq!(call(&app, "POST", "/v1/orders/7", "k").await.text(), "run 1");
        }
    }

    /// Such a status ends with its head, and announces no length of its own, whatever body the handler gave it. A layer around
    /// it has nothing to compress.
    #[tokio::test(start_paused = true)]
    async fn status_without_a_body_has_none_for_the_first_caller_and_for_a_retry() {
        let later = |pause| {
            let piece = futures_util::stream::once(async move {
                sleep(pause).await;
                Ok::<_, Infallible>("ab")
            });
            Body::from_stream(piece)
        };
        for status in [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED] {
            let app = Router::new()
                .route("/empty", post(move || async move { status }))
                .route("/ready", post(move || async move { (status, "ab") }))
                .route(
                    "/soon",
                    post(move || async move { (status, later(Duration::ZERO)) }),
                )
                .route(
                    "/later",
                    post(move || async move { (status, later(Duration::from_secs(1))) }),
                )
                .layer(layer())
                .layer(CompressionLayer::new());
            for path in ["/empty", "/ready", "/soon", "/later"] {
                for replayed in [false, true] {
                    let got = call(&app, "POST", path, "k").await;
                    assert_eq!(
                        (got.status(), got.is_replay()),
                        (status.as_u16(), replayed),
                        "{path}"
                    );
                    // Of its own: axum may add that of nothing.
                    let length = got.header("content-length").unwrap_or("0");
                    assert_eq!((got.text(), length), ("", "0"), "{path}");
                    assert_eq!(got.header("content-encoding"), None, "{path}");
                }
            }
        }
    }

    #[tokio::test]
    async fn equal_inner_routes_of_two_nests_do_not_share_keys_wherever_the_layer_is() {
        let run = Counting::default();
        let handler = {
            let run = run.clone();
            move |Path(id): Path<u32>| async move { format!("{id}: run {}", run.next()) }
        };
        let one = layer();
        for nest in [true, false] {
            let inner = Router::new()
                .route("/{id}", post(handler.clone()))
                .layer(one.clone());
            let app = if nest {
                Router::new().nest("/a", inner.clone()).nest("/b", inner)
            } else {
                Router::new()
                    .nest_service("/c", inner.clone())
                    .nest_service("/d", inner)
            };
            let (first, second) = if nest { ("/a/1", "/b/1") } else { ("/c/1", "/d/1") };
            let got = [
                call(&app, "POST", first, "k").await,
                call(&app, "POST", second, "k").await,
            ];
            assert!(
                got.iter().all(|got| got.status() == 200 && !got.is_replay()),
                "{got:?}"
            );
            assert!(call(&app, "POST", first, "k").await.is_replay());
            assert!(call(&app, "POST", second, "k").await.is_replay());
        }
        assert_eq!(run.count(), 4);
    }

    #[tokio::test]
    async fn the_layer_works_around_a_router_on_a_route_and_on_a_method() {
        let run = Counting::default();
        let handler = {
            let run = run.clone();
            move || async move { format!("run {}", run.next()) }
        };
        let around = tower::ServiceBuilder::new()
            .layer(layer())
            .service(Router::new().route("/x", post(handler.clone())));
        for _ in 0..2 {
            let got = around.clone().oneshot(ask("POST", "/x", "k")).await.unwrap();
            assert_eq!(answer(got).await.text(), "run 1");
        }
        for (n, app) in [
            Router::new()
                .route("/x", post(handler.clone()))
                .route_layer(layer()),
            Router::new().route("/x", post(handler.clone()).layer(layer())),
        ]
        .into_iter()
        .enumerate()
        {
            for _ in 0..2 {
                assert_eq!(
                    call(&app, "POST", "/x", "k").await.text(),
                    format!("run {}", n + 2)
                );
            }
        }
    }

    #[tokio::test]
    async fn handlers_extract_their_claim_and_say_what_their_error_is_worth() {
        let run = Counting::default();
        let counting = run.clone();
        let app = Router::new()
            .route(
                "/pay/{how}",
                post(move |claim: Idempotency, Path(how): Path<String>| async move {
                    let n = counting.next();
                    assert_eq!(claim.attempt(), 1);
                    match how.as_str() {
                        "retry" => (StatusCode::OK, Outcome::Retry, n.to_string()).into_response(),
                        "final" => {
                            (StatusCode::TOO_MANY_REQUESTS, Outcome::Final, n.to_string()).into_response()
                        }
                        _ => {
                            claim.forget();
                            n.to_string().into_response()
                        }
                    }
                }),
            )
            .route(
                "/optional",
                any(|claim: Option<Idempotency>| async move { claim.is_some().to_string() }),
            )
            .layer(layer());
        for (how, runs) in [("retry", 2), ("final", 1), ("forget", 2)] {
            let before = run.count();
            for _ in 0..2 {
                call(&app, "POST", &format!("/pay/{how}"), how).await;
            }
            assert_eq!(run.count() - before, runs, "{how}");
        }
        assert_eq!(call(&app, "POST", "/optional", "k").await.text(), "true");
        assert_eq!(call(&app, "GET", "/optional", "k").await.text(), "false");
        let bare = Router::new().route("/", post(|_: Idempotency| async {}));
        assert_eq!(call(&bare, "POST", "/", "k").await.status(), 500);
    }

    #[tokio::test]
    async fn caller_that_lost_access_gets_no_replay_and_compressed_bodies_stay_as_they_are() {
        #[derive(Clone)]
        struct User(&'static str);
        let app = Router::new()
            .route(
                "/pay",
                post(|| async {
                    (
                        [("content-encoding", "gzip"), ("set-cookie", "a=1")],
                        "\u{1}\u{2}not really gzip",
                    )
                }),
            )
            .layer(IdempotencyLayer::new(
                records(),
                caller::extension(|user: &User| user.0),
            ))
            .layer(axum::middleware::from_fn(
                |mut request: axum::extract::Request, next: axum::middleware::Next| async move {
                    if request.headers().contains_key("x-revoked") {
                        return StatusCode::FORBIDDEN.into_response();
                    }
                    request.extensions_mut().insert(User("ann"));
                    next.run(request).await
                },
            ));
        let first = call(&app, "POST", "/pay", "k").await;
        assert_eq!(first.header("set-cookie"), Some("a=1"));
        let second = call(&app, "POST", "/pay", "k").await;
        assert!(second.is_replay() && second.body == first.body);
        assert_eq!(
            (second.header("content-encoding"), second.header("set-cookie")),
            (Some("gzip"), None)
        );
        let mut revoked = ask("POST", "/pay", "k");
        revoked.headers_mut().insert("x-revoked", "1".parse().unwrap());
        let third = answer(app.oneshot(revoked).await.unwrap()).await;
        assert_eq!((third.status(), third.text()), (403, ""));
    }
}

/// A service whose handlers wait until they may go on.
struct Shop {
    address: SocketAddr,
    run: Counting,
    handle: IdempotencyHandle,
}

impl Shop {
    async fn open(layer: IdempotencyLayer<caller::Public>) -> Shop {
        let run = Counting::default();
        let handle = layer.handle();
        let quick = {
            let run = run.clone();
            move || async move { format!("run {}", run.next()) }
        };
        let app = Router::new().route("/quick", post(quick)).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        // Both versions of HTTP on one port.
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = hyper_util::service::TowerToHyperService::new(app.clone());
                tokio::spawn(async move {
                    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Shop { address, run, handle }
    }

    /// A client with a connection of its own.
    async fn client(&self, http2: bool) -> Client {
        let stream = TokioIo::new(TcpStream::connect(self.address).await.unwrap());
        if http2 {
            let (send, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), stream)
                .await
                .unwrap();
            tokio::spawn(connection);
            Client::Two(send)
        } else {
            let (send, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            Client::One(send)
        }
    }
}

enum Client {
    One(hyper::client::conn::http1::SendRequest<Full<Bytes>>),
    Two(hyper::client::conn::http2::SendRequest<Full<Bytes>>),
}

impl Client {
    async fn post(&mut self, path: &str, key: &str) -> http::Response<hyper::body::Incoming> {
        let request = Request::post(format!("http://shop{path}"))
            .header("host", "shop")
            .header("idempotency-key", key)
            .body(Full::from("5"))
            .unwrap();
        match self {
            Client::One(send) => send.send_request(request).await.unwrap(),
            Client::Two(send) => send.send_request(request).await.unwrap(),
        }
    }

    async fn answer(&mut self, path: &str, key: &str) -> Answer {
        answer(self.post(path, key).await).await
    }
}

mod over_http {
    use super::*;

    #[tokio::test]
    async fn a_request_runs_once_over_both_versions() {
        let shop = Shop::open(layer()).await;
        for (http2, again) in [(false, false), (true, false), (false, true), (true, true)] {
            let got = shop.client(http2).await.answer("/quick", "k").await;
            assert_eq!(got.text(), "run 1");
            assert_eq!(got.header("content-length"), Some("5"));
            assert!(got.header("date").is_some(), "the server's own, and new");
            assert_eq!(got.is_replay(), (http2, again) != (false, false));
        }
    }

    #[tokio::test]
    async fn a_client_that_hangs_up_in_the_middle_of_its_body_claims_nothing() {
        let shop = Shop::open(layer()).await;
        let mut stream = TcpStream::connect(shop.address).await.unwrap();
        stream
            .write_all(
                b"POST /quick HTTP/1.1\r\nhost: shop\r\nidempotency-key: k\r\ncontent-length: 10\r\n\r\nhalf",
            )
            .await
            .unwrap();
        sleep(Duration::from_millis(50)).await;
        drop(stream);
        sleep(Duration::from_millis(50)).await;
        assert_eq!((shop.handle.stats().claimed, shop.run.count()), (0, 0));
        assert_eq!(
            shop.client(false).await.answer("/quick", "k").await.text(),
            "run 1"
        );
    }

    #[tokio::test]
    async fn a_key_given_twice_on_the_wire_is_refused() {
        let shop = Shop::open(layer()).await;
        let mut stream = TcpStream::connect(shop.address).await.unwrap();
        stream
            .write_all(b"POST /quick HTTP/1.1\r\nhost: shop\r\nconnection: close\r\nidempotency-key: k\r\nIdempotency-Key: k\r\ncontent-length: 0\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        assert!(
            text.starts_with("HTTP/1.1 400 ") && text.contains("idempotency-key-invalid"),
            "{text}"
        );
        assert_eq!(shop.run.count(), 0);
    }

    #[tokio::test]
    async fn plain_hyper_needs_a_body_that_can_be_read_ahead() {
        use http_body_util::combinators::UnsyncBoxBody;
        type Boxed = UnsyncBoxBody<Bytes, hyper::Error>;
        let run = Counting::default();
        let counting = run.clone();
        let handler = tower::service_fn(move |request: Request<Boxed>| {
            let n = counting.next();
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                Ok::<_, Infallible>(http::Response::new(Full::<Bytes>::from(format!(
                    "run {n} of {} bytes",
                    body.len()
                ))))
            }
        });
        let service = tower::ServiceBuilder::new()
            .map_request(|request: Request<hyper::body::Incoming>| request.map(BodyExt::boxed_unsync))
            .layer(layer())
            .service(handler);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let service = hyper_util::service::TowerToHyperService::new(service.clone());
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        for round in 0..2 {
            let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
            let (send, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            let got = Client::One(send).answer("/", "k").await;
            assert_eq!((got.text(), got.is_replay()), ("run 1 of 1 bytes", round == 1));
        }
    }
}
