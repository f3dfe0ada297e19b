//! The layers beside those of tower-http, in both orders, in axum and by a plain `ServiceBuilder`: all of it
//! compiles, and both do their work.

use std::convert::Infallible;
use std::fmt::Debug;
use std::future::{Ready, ready};
use std::marker::PhantomData;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body as AxumBody;
use axum::routing::post;
use bytes::Bytes;
use dlock::{Held, LockClient};
use dlock_tower::idempotency::caller::{Public, public};
use dlock_tower::key::{Fixed, Key, fixed};
use dlock_tower::{IdempotencyLayer, LockLayer, NotStarted};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Body;
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_http::add_extension::AddExtensionLayer;
use tower_http::auth::{AddAuthorizationLayer, AsyncAuthorizeRequest, AsyncRequireAuthorizationLayer};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::decompression::{DecompressionLayer, RequestDecompressionLayer};
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::map_request_body::MapRequestBodyLayer;
use tower_http::map_response_body::MapResponseBodyLayer;
use tower_http::normalize_path::NormalizePathLayer;
use tower_http::propagate_header::PropagateHeaderLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::sensitive_headers::SetSensitiveHeadersLayer;
use tower_http::set_header::{SetRequestHeaderLayer, SetResponseHeaderLayer};
use tower_http::set_status::SetStatusLayer;
use tower_http::timeout::{RequestBodyTimeoutLayer, ResponseBodyTimeoutLayer, TimeoutLayer};
use tower_http::trace::TraceLayer;
use tower_http::validate_request::ValidateRequestHeaderLayer;

const LONG: Duration = Duration::from_secs(60);

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Req = Request<Full<Bytes>>;

/// A handler for requests with any body. It tells whether it holds the lock, and returns what it was sent.
#[derive(Clone)]
struct Handler;

impl<B> Service<Request<B>> for Handler
where
    B: Body<Data: Send, Error: Debug> + Send + 'static,
{
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response<Full<Bytes>>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let held = request.extensions().get::<Held>().is_some_and(Held::is_held);
        Box::pin(async move {
            let sent = request
                .into_body()
                .collect()
                .await
                .expect("the body came")
                .to_bytes();
            let response = Response::builder().header("x-held", held.to_string());
            Ok(response.body(Full::new(sent)).unwrap())
        })
    }
}

fn lock() -> LockLayer<Key<Fixed>> {
    LockLayer::new(LockClient::memory(), fixed("k"))
}

fn once() -> IdempotencyLayer<Public> {
    IdempotencyLayer::new(LockClient::memory().records().unwrap(), public())
}

fn request<B>(body: B) -> Request<B> {
    Request::post("/pay")
        .header("idempotency-key", "k")
        .header("accept", "text/plain")
        .header("x-user", "ann")
        .body(body)
        .unwrap()
}

/// Two requests go through and reach the handler under the lock.
async fn is_locked<S, R>(name: &str, service: S)
where
    S: Service<Req, Response = Response<R>, Error: Debug> + Clone,
    R: Body<Data = Bytes, Error: Debug>,
{
    for _ in 0..2 {
        let response = service
            .clone()
            .oneshot(request(Full::from("paid")))
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{name}");
        assert_eq!(response.headers()["x-held"], "true", "{name}");
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "paid",
            "{name}"
        );
    }
}

/// The second of two equal requests is a replay of the first.
async fn is_replayed<S, R>(name: &str, service: S)
where
    S: Service<Req, Response = Response<R>, Error: Debug> + Clone,
    R: Body<Data = Bytes, Error: Debug>,
{
    for replayed in [false, true] {
        let response = service
            .clone()
            .oneshot(request(Full::from("paid")))
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{name}");
        let is = response.headers().contains_key("idempotent-replayed");
        assert_eq!(is, replayed, "{name}");
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "paid",
            "{name}"
        );
    }
}

async fn in_axum(name: &str, app: Router) {
    for _ in 0..2 {
        let response = app
            .clone()
            .oneshot(request(AxumBody::from("paid")))
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{name}");
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "paid",
            "{name}"
        );
    }
}

fn route() -> Router {
    Router::new().route("/pay", post(async |body: Bytes| body))
}

/// Checks each of tower-http's layers, outside and inside of ours.
macro_rules! beside {
    ($test:ident: $layer:expr) => {
        #[tokio::test(start_paused = true)]
        async fn $test() {
            let name = stringify!($test);
            let build = ServiceBuilder::new;
            is_locked(name, build().layer($layer).layer(lock()).service(Handler)).await;
            is_locked(name, build().layer(lock()).layer($layer).service(Handler)).await;
            is_replayed(name, build().layer($layer).layer(once()).service(Handler)).await;
            is_replayed(name, build().layer(once()).layer($layer).service(Handler)).await;
            let all = build()
                .layer($layer)
                .layer(once())
                .layer($layer)
                .layer(lock())
                .layer($layer);
            is_replayed(name, all.service(Handler)).await;
            in_axum(name, route().layer(lock()).layer(once()).layer($layer)).await;
            in_axum(name, route().layer($layer).layer(lock()).layer(once())).await;
            in_axum(
                name,
                route().layer(build().layer($layer).layer(once()).layer(lock())),
            )
            .await;
        }
    };
}

const X: HeaderName = HeaderName::from_static("x-more");
const MORE: HeaderValue = HeaderValue::from_static("more");

beside!(trace: TraceLayer::new_for_http());
beside!(cors: CorsLayer::permissive());
beside!(timeout: TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG));
beside!(timeout_of_the_response_body: ResponseBodyTimeoutLayer::new(LONG));
beside!(validate_request: ValidateRequestHeaderLayer::accept("text/plain"));
beside!(authorization: AsyncRequireAuthorizationLayer::new(Authorize::default()));
beside!(add_authorization: AddAuthorizationLayer::bearer("token"));
beside!(compression: CompressionLayer::new());
beside!(decompression: DecompressionLayer::new());
beside!(set_request_id: SetRequestIdLayer::x_request_id(MakeRequestUuid));
beside!(propagate_request_id: PropagateRequestIdLayer::x_request_id());
beside!(propagate_header: PropagateHeaderLayer::new(X));
beside!(set_request_header: SetRequestHeaderLayer::overriding(X, MORE));
beside!(set_response_header: SetResponseHeaderLayer::overriding(X, MORE));
beside!(sensitive_headers: SetSensitiveHeadersLayer::new([header::AUTHORIZATION]));
beside!(set_status: SetStatusLayer::new(StatusCode::OK));
beside!(catch_panic: CatchPanicLayer::new());
beside!(normalize_path: NormalizePathLayer::trim_trailing_slash());
beside!(add_extension: AddExtensionLayer::new(7_u32));
beside!(map_response_body: MapResponseBodyLayer::new(boxed));

fn boxed<B>(body: B) -> UnsyncBoxBody<Bytes, BoxError>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    body.map_err(Into::into).boxed_unsync()
}

/// Lets in requests that name a user, and refuses all others by an empty body of the inner service's type.
struct Authorize<R>(PhantomData<fn() -> R>);

impl<R> Default for Authorize<R> {
    fn default() -> Self {
        Authorize(PhantomData)
    }
}

impl<R> Clone for Authorize<R> {
    fn clone(&self) -> Self {
        Authorize(PhantomData)
    }
}

impl<B, R: Default> AsyncAuthorizeRequest<B> for Authorize<R> {
    type RequestBody = B;
    type ResponseBody = R;
    type Future = Ready<Result<Request<B>, Response<R>>>;

    fn authorize(&mut self, request: Request<B>) -> Self::Future {
        let mut refusal = Response::new(R::default());
        *refusal.status_mut() = StatusCode::UNAUTHORIZED;
        let known = request.headers().contains_key("x-user");
        ready(known.then_some(request).ok_or(refusal))
    }
}

/// What a layer further out answers by itself has an empty body of ours, and neither layer is asked.
#[tokio::test(start_paused = true)]
async fn answers_of_layers_further_out_have_our_body() {
    async fn status<S, R>(service: S, change: impl FnOnce(&mut Req)) -> u16
    where
        S: Service<Req, Response = Response<R>, Error: Debug>,
        R: Body<Data = Bytes, Error: Debug>,
    {
        let mut request = request(Full::from("paid"));
        change(&mut request);
        let response = service.oneshot(request).await.unwrap();
        assert!(
            response.extensions().get::<NotStarted>().is_none(),
            "it is not ours"
        );
        let status = response.status().as_u16();
        assert!(
            response
                .into_body()
                .collect()
                .await
                .unwrap()
                .to_bytes()
                .is_empty()
        );
        status
    }
    let client = LockClient::memory();
    let locked = client.lock("k").acquire().await.unwrap();
    let lock = LockLayer::new(client.clone(), fixed("k")).wait(LONG);
    macro_rules! refused {
        ($layer:expr, $change:expr, $status:expr) => {
            let build = ServiceBuilder::new;
            let locking = build().layer($layer).layer(lock.clone()).service(Handler);
            assert_eq!(status(locking, $change).await, $status);
            let both = build()
                .layer($layer)
                .layer(once())
                .layer(lock.clone())
                .service(Handler);
            assert_eq!(status(both, $change).await, $status);
        };
    }
    refused!(
        TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG / 2),
        |_| {},
        504
    );
    refused!(
        AsyncRequireAuthorizationLayer::new(Authorize::default()),
        |request| drop(request.headers_mut().remove("x-user")),
        401
    );
    refused!(ValidateRequestHeaderLayer::accept("text/html"), |_| {}, 406);
    refused!(
        CorsLayer::permissive(),
        |request| *request.method_mut() = http::Method::OPTIONS,
        200
    );
    // A request that gave up leaves no waiter; one under an idempotency key had its claim released.
    drop(locked);
    tokio::time::sleep(LONG).await;
    assert_eq!((client.waited_for(), client.held()), (0, 0));
}

/// Layers that change the type of the request's body take a `map_request_body` behind them, or the lock layer
/// streams.
#[tokio::test(start_paused = true)]
async fn request_bodies_of_other_types_are_boxed_or_streamed() {
    macro_rules! changed {
        ($layer:expr) => {
            let boxing = MapRequestBodyLayer::new(boxed);
            let build = ServiceBuilder::new;
            let all = build()
                .layer($layer)
                .layer(boxing.clone())
                .layer(lock())
                .service(Handler);
            is_locked("boxed", all).await;
            let all = build()
                .layer($layer)
                .layer(boxing)
                .layer(once())
                .layer(lock())
                .service(Handler);
            is_replayed("boxed", all).await;
            let all = build()
                .layer($layer)
                .layer(lock().streaming())
                .service(Handler);
            is_locked("streamed", all).await;
            is_locked(
                "inside",
                build().layer(lock()).layer($layer).service(Handler),
            )
            .await;
            is_replayed(
                "inside",
                build().layer(once()).layer($layer).service(Handler),
            )
            .await;
        };
    }
    changed!(RequestDecompressionLayer::new());
    changed!(RequestBodyLimitLayer::new(1024));
    changed!(RequestBodyTimeoutLayer::new(LONG));
}
