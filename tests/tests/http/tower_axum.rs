//! The lock layer in axum: path parameters wherever a layer may stand, nested routers, extractors; and on
//! real connections, whose clients go away.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Json, Path, Request};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use bytes::Bytes;
use dlock::{Held, LockClient};
use dlock_tests::eventually;
use dlock_tower::key::{ExtractKey, json_field, method_and_path, path, path_param};
use dlock_tower::{HeldLock, LockLayer, NotStarted};
use futures_util::StreamExt;
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt};

/// A handler that tells which key it runs under.
async fn key(held: Option<HeldLock>) -> String {
    held.map_or_else(
        || "no lock".to_owned(),
        |HeldLock(held)| held.key().as_str().to_owned(),
    )
}

fn layer<K: ExtractKey<Body>>(key: K) -> LockLayer<K> {
    LockLayer::new(LockClient::memory(), key)
}

async fn answer(app: &Router, method: Method, uri: &str) -> (u16, String) {
    let request = Request::builder()
        .method(method)
        .uri(uri)
        .body(Body::empty())
        .unwrap();
    text(app.clone().oneshot(request).await.unwrap()).await
}

async fn text(response: Response) -> (u16, String) {
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn got(app: &Router, uri: &str) -> (u16, String) {
    answer(app, Method::GET, uri).await
}

fn said(text: &str) -> (u16, String) {
    (200, text.to_owned())
}

mod path_parameters {
    use super::*;

    #[tokio::test]
    async fn are_seen_by_layers_on_routers_routes_and_methods() {
        let by_id = || layer(path_param("id").prefix("account:"));
        let apps = [
            Router::new().route("/accounts/{id}", get(key)).layer(by_id()),
            Router::new()
                .route("/accounts/{id}", get(key))
                .route_layer(by_id()),
            Router::new().route("/accounts/{id}", get(key).layer(by_id())),
            Router::new().route("/accounts/{id}", get(key).route_layer(by_id())),
            Router::new().nest("/accounts", Router::new().route("/{id}", get(key)).layer(by_id())),
            Router::new()
                .nest("/accounts", Router::new().route("/{id}", get(key)))
                .layer(by_id()),
            Router::new().merge(Router::new().route("/accounts/{id}", get(key)).layer(by_id())),
        ];
        for (n, app) in apps.iter().enumerate() {
            assert_eq!(got(app, "/accounts/4%2F2").await, said("account:4/2"), "app {n}");
        }
    }

    #[tokio::test]
    async fn of_what_a_router_is_nested_at_are_seen_too() {
        let by_both = layer(dlock_tower::key::all_of((path_param("tenant"), path_param("id"))));
        let inner = Router::new().route("/orders/{id}", get(key)).layer(by_both);
        let app = Router::new().nest("/{tenant}", inner);
        assert_eq!(got(&app, "/acme/orders/7").await, said("acme:7"));
    }

    #[tokio::test]
    async fn no_route_no_lock() {
        let app = Router::new()
            .route("/accounts/{id}", get(key))
            .fallback(|held: Option<HeldLock>| async move { (StatusCode::NOT_FOUND, key(held).await) })
            .layer(layer(path_param("id")));
        assert_eq!(got(&app, "/elsewhere").await, (404, "no lock".into()));
        let nested = Router::new().nest("/api", app);
        assert_eq!(got(&nested, "/api/elsewhere").await, (404, "no lock".into()));
        let app = Router::new()
            .route("/accounts/{id}", get(key))
            .layer(layer(path_param("id")));
        assert_eq!(got(&app, "/elsewhere").await.0, 404);
    }

    #[tokio::test]
    async fn a_route_without_the_parameter_is_our_mistake_unless_it_is_optional() {
        let routes = || {
            Router::new()
                .route("/accounts/{id}", get(key))
                .route("/health", get(key))
        };
        let app = routes().layer(layer(path_param("id")));
        let (status, problem) = got(&app, "/health").await;
        assert_eq!(status, 500);
        assert!(problem.contains("urn:dlock:problem:internal"), "{problem}");
        let app = routes().layer(layer(path_param("id").optional()));
        assert_eq!(got(&app, "/health").await, said("no lock"));
        assert_eq!(got(&app, "/accounts/7").await, said("7"));
        let app = routes().layer(layer(path_param("id").or(path())));
        assert_eq!(got(&app, "/health").await, said("/health"));
    }

    #[tokio::test]
    async fn a_layer_around_the_whole_router_does_not_run_handlers_unlocked() {
        for by_id in [
            layer(path_param("id").prefix("")),
            layer(path_param("nothing").prefix("")),
        ] {
            let app = by_id.layer(Router::new().route("/accounts/{id}", get(key)));
            let request = Request::get("/accounts/7").body(Body::empty()).unwrap();
            assert_eq!(app.oneshot(request).await.unwrap().status(), 500);
        }
    }

    #[tokio::test]
    async fn that_are_not_utf_8_are_the_clients_mistake() {
        let app = Router::new()
            .route("/accounts/{id}", get(key))
            .layer(layer(path_param("id")));
        let (status, problem) = got(&app, "/accounts/%ff").await;
        assert_eq!(status, 400);
        assert!(problem.contains("urn:dlock:problem:invalid-key"), "{problem}");
        assert_eq!(got(&app, "/accounts/%7B7%7D").await.0, 400);
    }
}

#[tokio::test]
async fn nested_routers_share_no_keys() {
    let inner = |layer: LockLayer<_>| Router::new().route("/items/1", get(key).post(key)).layer(layer);
    let app = Router::new()
        .nest("/a", inner(layer(method_and_path())))
        .nest("/b", inner(layer(method_and_path())))
        .nest("/c", Router::new().nest("/d", inner(layer(method_and_path()))));
    assert_eq!(got(&app, "/a/items/1").await, said("GET /a/items/1"));
    assert_eq!(
        answer(&app, Method::POST, "/b/items/1?x").await,
        said("POST /b/items/1")
    );
    assert_eq!(got(&app, "/c/d/items/1").await, said("GET /c/d/items/1"));
    let service = layer(path()).layer(Router::new().route("/items/{id}", get(key)));
    let app = Router::new().nest_service("/e", service);
    assert_eq!(got(&app, "/e/items/1").await, said("/e/items/1"));
}

#[tokio::test]
async fn the_json_body_of_a_locked_request_reaches_the_handler() {
    async fn pay(held: HeldLock, Json(order): Json<serde_json::Value>) -> String {
        format!("{} {}", held.0.key().as_str(), order["amount"])
    }
    let app = Router::new()
        .route("/pay", post(pay))
        .layer(layer(json_field("order.id").prefix("order:")));
    let request = Request::post("/pay")
        .header("content-type", "application/json")
        .body(Body::from_stream(futures_util::stream::iter(
            [r#"{"order":{"id":7},"#, r#" "amount": 12}"#].map(Ok::<_, std::io::Error>),
        )))
        .unwrap();
    assert_eq!(
        text(app.oneshot(request).await.unwrap()).await,
        said("order:7 12")
    );
}

#[tokio::test]
async fn handlers_take_the_lock_as_an_argument() {
    async fn token(HeldLock(held): HeldLock, Extension(same): Extension<Held>) -> String {
        assert_eq!(held.fencing_token(), same.fencing_token());
        format!("{}", held.is_held())
    }
    let app = Router::new()
        .route("/{id}", get(token))
        .layer(layer(path_param("id")));
    assert_eq!(got(&app, "/1").await, said("true"));
    let app = Router::new().route("/{id}", get(|_: HeldLock| async {}));
    assert_eq!(got(&app, "/1").await.0, 500);
}

#[tokio::test]
async fn the_layer_goes_into_a_stack() {
    let (client, other) = (LockClient::memory(), tower::ServiceBuilder::new());
    let _held = client.lock("7").acquire().await.unwrap();
    let app = Router::new().route("/{id}", get(key)).layer(
        other
            .map_response(|response: Response| {
                assert!(
                    response.extensions().get::<NotStarted>().is_some(),
                    "seen further out"
                );
                response
            })
            .map_response(axum::response::IntoResponse::into_response)
            .layer(
                LockLayer::new(client.clone(), path_param("id"))
                    .try_once()
                    .conflict(),
            ),
    );
    assert_eq!(got(&app, "/7").await.0, 409);
}

#[tokio::test]
async fn rejections_may_be_rendered_as_axum_responses() {
    let client = LockClient::memory();
    let _held = client.lock("7").acquire().await.unwrap();
    let layer = LockLayer::new(client.clone(), path_param("id"))
        .try_once()
        .render(|rejection| {
            let body = Json(serde_json::json!({ "error": rejection.kind() }));
            axum::response::IntoResponse::into_response((StatusCode::CONFLICT, body))
        });
    let app = Router::new().route("/{id}", get(key)).layer(layer);
    assert_eq!(
        got(&app, "/7").await,
        (409, r#"{"error":"urn:dlock:problem:busy"}"#.into())
    );
}

/// On real connections.
mod connections {
    use super::*;

    async fn serve(app: Router) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        addr
    }

    async fn ask(addr: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes())
            .await
            .unwrap();
        stream
    }

    #[tokio::test]
    async fn requests_of_one_key_never_overlap() {
        let client = LockClient::memory();
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (now, high) = (inside.clone(), most.clone());
        let handler = move |Path(id): Path<String>| async move {
            high.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(10)).await;
            now.fetch_sub(1, Ordering::SeqCst);
            id
        };
        let app = Router::new()
            .route("/accounts/{id}/withdraw", post(handler))
            .layer(LockLayer::new(
                client.clone(),
                path_param("id").prefix("account:"),
            ));
        let addr = serve(app).await;
        let http = reqwest::Client::new();
        let calls = (0..10).map(|_| http.post(format!("http://{addr}/accounts/7/withdraw")).send());
        for response in futures_util::future::join_all(calls).await {
            assert_eq!(response.unwrap().status(), 200);
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        assert_eq!((client.held(), client.waited_for()), (0, 0));
    }

    #[tokio::test]
    async fn a_client_that_goes_away_leaves_no_waiter_and_no_lock() {
        let client = LockClient::memory();
        let app = Router::new()
            .route("/{id}", get(std::future::pending::<()>))
            .layer(LockLayer::new(client.clone(), path_param("id")).wait(Duration::from_secs(600)));
        let addr = serve(app).await;
        let running = ask(addr, "/7").await;
        eventually("the first runs", || std::future::ready(client.held() == 1)).await;
        let waiting = ask(addr, "/7").await;
        eventually("the second waits", || {
            std::future::ready(client.waited_for() == 1)
        })
        .await;
        drop(waiting);
        eventually("nobody waits", || std::future::ready(client.waited_for() == 0)).await;
        assert_eq!(client.held(), 1);
        drop(running);
        eventually("nothing is held", || std::future::ready(client.held() == 0)).await;
        drop(client.lock("7").try_acquire().await.unwrap());
    }

    #[tokio::test]
    async fn a_client_that_never_reads_holds_no_longer_than_max_hold() {
        let client = LockClient::memory();
        let endless = || async {
            let piece = Bytes::from(vec![0; 64 * 1024]);
            Body::from_stream(futures_util::stream::repeat(piece).map(Ok::<_, std::io::Error>))
        };
        let app = Router::new()
            .route("/{id}", get(endless))
            .layer(LockLayer::new(client.clone(), path_param("id")).until_body(Duration::from_secs(1)));
        let addr = serve(app).await;
        let started = std::time::Instant::now();
        let mut stream = ask(addr, "/7").await;
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        assert!(client.lock("7").try_acquire().await.unwrap_err().is_busy());
        let next = client
            .lock("7")
            .wait(Duration::from_secs(20))
            .acquire()
            .await
            .unwrap();
        assert!(
            started.elapsed() >= Duration::from_millis(900),
            "{:?}",
            started.elapsed()
        );
        // When it reads on, it is told that the response is broken: the last chunk never comes.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!rest.ends_with(b"0\r\n\r\n"));
        assert!(next.is_held());
    }

    #[tokio::test]
    async fn a_streamed_body_holds_the_lock_to_its_end() {
        let client = LockClient::memory();
        let (pieces, rx) = tokio::sync::mpsc::unbounded_channel::<Result<&str, std::io::Error>>();
        let rx = Arc::new(parking_lot::Mutex::new(Some(rx)));
        let handler = move || async move {
            let mut rx = rx.lock().take().expect("asked once");
            Body::from_stream(futures_util::stream::poll_fn(move |cx| rx.poll_recv(cx)))
        };
        let app = Router::new()
            .route("/{id}", get(handler))
            .layer(LockLayer::new(client.clone(), path_param("id")).until_body(Duration::from_secs(60)));
        let addr = serve(app).await;
        let response = reqwest::get(format!("http://{addr}/7")).await.unwrap();
        pieces.send(Ok("a")).unwrap();
        assert_eq!(client.held(), 1);
        pieces.send(Ok("b")).unwrap();
        drop(pieces);
        assert_eq!(response.text().await.unwrap(), "ab");
        assert_eq!(client.held(), 0);
    }
}

/// Spellings that the handler reads as one account are one lock: no client gets around it.
#[tokio::test(start_paused = true)]
async fn typed_path_parameters_lock_what_the_handler_reads() {
    let inside = Arc::new(AtomicUsize::new(0));
    let seen = inside.clone();
    let withdraw = move |Path(id): Path<u64>, HeldLock(held): HeldLock| async move {
        assert_eq!((id, held.key().as_str()), (7, "account:7"));
        assert_eq!(seen.fetch_add(1, Ordering::SeqCst), 0, "two at once");
        tokio::time::sleep(Duration::from_millis(100)).await;
        seen.fetch_sub(1, Ordering::SeqCst);
    };
    let app = Router::new()
        .route("/accounts/{id}/withdraw", get(withdraw))
        .layer(layer(path_param("id").parsed::<u64>().prefix("account:")));
    let spellings = ["7", "07", "007", "+7", "%37", "%2B7"];
    let sent = spellings.map(|id| {
        let (app, uri) = (app.clone(), format!("/accounts/{id}/withdraw"));
        async move { got(&app, &uri).await.0 }
    });
    assert_eq!(futures_util::future::join_all(sent).await, [200; 6]);
    assert_eq!(got(&app, "/accounts/x/withdraw").await.0, 400);
    assert_eq!(inside.load(Ordering::SeqCst), 0);
}
