//! The lock layer in axum: path parameters wherever a layer may stand, nested routers, extractors; and on
//! real connections, whose clients go away.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Json, Path, Request};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router};
use dlock::{Held, LockClient};
use dlock_tests::{Log, watched};
use dlock_tower::key::{
    ExtractKey, each_of, extension, header, json_field, method_and_path, path, path_param,
};
use dlock_tower::lock::RequestLocks;
use dlock_tower::{HeldLock, LockLayer, NotStarted};
use http::{Method, StatusCode};
use http_body_util::BodyExt;
use metrics_exporter_prometheus::PrometheusBuilder;
use tower::{Layer, ServiceExt};

use crate::tower_support::pair;

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

#[tokio::test]
async fn locks_count_in_the_group_of_the_layer_or_of_the_matched_path() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let shown = recorder.handle();
    let _counting = metrics::set_default_local_recorder(&recorder);
    let by_id = || layer(path_param("id"));
    let app = Router::new()
        .route("/accounts/{id}", get(key).layer(by_id()))
        .route("/orders/{id}", get(key).layer(by_id().group("orders")));
    assert_eq!(got(&app, "/accounts/7").await, said("7"));
    assert_eq!(got(&app, "/orders/8").await, said("8"));
    let text = shown.render();
    for (group, is_counted) in [
        ("/accounts/{id}", true),
        ("orders", true),
        ("/orders/{id}", false),
    ] {
        let of_the_group = |line: &str| line.contains(&format!("group=\"{group}\""));
        assert_eq!(text.lines().any(of_the_group), is_counted, "{group}: {text}");
    }
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
    async fn handler_that_runs_unlocked_for_want_of_a_route_is_reported_once() {
        let log = Log::default();
        let _listening = log.listen();
        let told = || log.count("the router of its lock layer matched no route");
        let inner = || Router::new().route("/accounts/{id}", get(key));
        let by_id = layer(path_param("id"));
        let app = Router::new().nest_service("/api", inner()).layer(by_id.clone());
        assert_eq!(got(&app, "/api/elsewhere").await.0, 404);
        assert_eq!(answer(&app, Method::POST, "/api/accounts/7").await.0, 405);
        assert_eq!(told(), 0);
        for _ in 0..2 {
            assert_eq!(got(&app, "/api/accounts/7").await, said("no lock"));
        }
        assert_eq!(told(), 1);
        let app = Router::new()
            .fallback_service(inner())
            .layer(layer(path_param("id")));
        assert_eq!(got(&app, "/accounts/7").await, said("no lock"));
        assert_eq!(told(), 2);
        // It stands inside, or says what such requests lock.
        for (app, says) in [
            (Router::new().nest_service("/api", inner().layer(by_id)), "7"),
            (
                Router::new()
                    .nest_service("/api", inner())
                    .layer(layer(path_param("id").optional())),
                "no lock",
            ),
            (
                Router::new()
                    .nest_service("/api", inner())
                    .layer(layer(path_param("id").or(path()))),
                "/api/accounts/7",
            ),
        ] {
            assert_eq!(got(&app, "/api/accounts/7").await, said(says));
        }
        assert_eq!(told(), 2);
        // Another part of the key has nothing to say about it, whether it finds a key or passes on purpose.
        let both = |optional: &str| {
            let keys = each_of((path_param("id"), header(optional).optional()));
            Router::new().nest_service("/api", inner()).layer(layer(keys))
        };
        let app = both("x-none");
        assert_eq!(got(&app, "/api/accounts/7").await, said("no lock"));
        assert_eq!(told(), 3);
        let app = both("host");
        let request = Request::get("/api/accounts/7").header("host", "h");
        let answer = app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!((answer.status(), told()), (StatusCode::OK, 4));
        let none = |_: &http::request::Parts| None::<String>;
        let app = Router::new()
            .nest_service("/api", inner())
            .layer(layer(path_param("id").or(none)));
        got(&app, "/api/accounts/7").await;
        assert_eq!(told(), 4);
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

mod extensions {
    use super::*;

    #[derive(Debug, Clone)]
    struct User {
        tenant: &'static str,
    }

    /// Stands for an authentication, which public paths do not need.
    async fn authenticate(mut request: Request, next: axum::middleware::Next) -> Response {
        if request.uri().path() != "/health" {
            request.extensions_mut().insert(User { tenant: "acme" });
        }
        next.run(request).await
    }

    fn by_tenant() -> dlock_tower::key::Key<impl ExtractKey<Body> + Clone> {
        extension(|user: &User| user.tenant).prefix("tenant:")
    }

    fn routes() -> Router {
        Router::new()
            .route("/import", get(key))
            .route("/health", get(key))
    }

    #[tokio::test]
    async fn layer_inside_of_the_authentication_locks_what_the_extension_names() {
        let (here, elsewhere) = pair().await;
        let app = routes()
            .layer(LockLayer::new(here, by_tenant()).try_once())
            .layer(axum::middleware::from_fn(authenticate));
        assert_eq!(got(&app, "/import").await, said("tenant:acme"));
        let guard = elsewhere.lock("tenant:acme").acquire().await.unwrap();
        assert_eq!(got(&app, "/import").await.0, 423);
        guard.release().await.unwrap();
        assert_eq!(got(&app, "/import").await, said("tenant:acme"));
    }

    /// In axum this is the order that is written by mistake.
    #[tokio::test]
    async fn layer_outside_of_the_authentication_runs_no_handler() {
        async fn handler() -> String {
            panic!("the handler runs without its lock")
        }
        let log = Log::default();
        let _listening = log.listen();
        let app = Router::new()
            .route("/import", get(handler))
            .layer(axum::middleware::from_fn(authenticate))
            .layer(layer(by_tenant()));
        let (status, problem) = got(&app, "/import").await;
        assert_eq!(status, 500);
        assert!(problem.contains("urn:dlock:problem:internal"), "{problem}");
        assert!(!problem.contains("User"), "{problem}");
        let name = std::any::type_name::<User>();
        let says = format!(
            "the request has no extension `{name}` to take a lock's key from: put the lock layer inside"
        );
        assert_eq!((log.count("ERROR"), log.count(&says)), (1, 1), "{log:?}");
    }

    #[tokio::test]
    async fn request_without_the_extension_is_our_mistake_unless_it_is_optional() {
        let app = routes()
            .layer(layer(by_tenant()))
            .layer(axum::middleware::from_fn(authenticate));
        let (status, problem) = got(&app, "/health").await;
        assert_eq!(status, 500);
        assert!(problem.contains("urn:dlock:problem:internal"), "{problem}");
        let log = Log::default();
        let _listening = log.listen();
        let app = routes()
            .layer(layer(by_tenant().optional()))
            .layer(axum::middleware::from_fn(authenticate));
        assert_eq!(got(&app, "/health").await, said("no lock"));
        assert_eq!(got(&app, "/import").await, said("tenant:acme"));
        let app = routes()
            .layer(layer(by_tenant().or(path())))
            .layer(axum::middleware::from_fn(authenticate));
        assert_eq!(got(&app, "/health").await, said("/health"));
        assert_eq!(got(&app, "/import").await, said("tenant:acme"));
        assert_eq!(log.count("ERROR"), 0);
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

/// A handler under a tenant's lock must not take its token for that of the account, which was not locked.
#[tokio::test(start_paused = true)]
async fn layer_that_runs_a_request_without_its_lock_hides_the_lock_of_a_layer_further_out() {
    async fn both(held: Option<HeldLock>, Extension(locks): Extension<RequestLocks>) -> String {
        let kept = locks.keep().unwrap();
        let outer: Vec<_> = kept.held().map(|held| held.key().to_string()).collect();
        format!("{} inside of {}", key(held).await, outer.join(", "))
    }
    let app = || Router::new().route("/", get(both));
    let account = || layer(header("account").optional());
    let (store, down) = watched().await;
    store.seen().fail_acquires.store(true, Ordering::Relaxed);
    let apps = [
        app().layer(account()),
        app().layer(account().skip_methods([Method::GET])),
        app().layer(LockLayer::new(down, method_and_path()).fail_open()),
    ];
    for app in apps {
        let app = app.layer(layer(path().prefix("tenant:")));
        assert_eq!(got(&app, "/").await, said("no lock inside of tenant:/"));
    }
}
