//! The routes: what comes in as HTTP, and what goes out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use dlock_tower::idempotency::{REPLAYED, caller::Public};
use dlock_tower::{HeldLock, Idempotency, IdempotencyLayer, LockLayer, OnLost, key};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::Error;
use crate::service::{Name, QUEUE, Sale, Shop};
use crate::{demo, page};

/// The longest that `GET /lock` can be asked to hold its lock.
const LONGEST_HOLD: Duration = Duration::from_secs(60);
/// How long it waits for the lock: long enough for a queue of such requests.
const HOLD_WAIT: Duration = Duration::from_secs(600);

pub(crate) type Shared = State<Arc<Shop>>;

/// What makes the retries of a request harmless, for all routes that take an `Idempotency-Key`.
pub(crate) type Keys = IdempotencyLayer<Public>;

pub(crate) fn router(shop: Arc<Shop>, keys: &Keys, with_demo: bool) -> Router {
    let replays = from_fn_with_state(shop.clone(), note_replays);
    // Keys outside locks: a stored answer needs no lock, and a request that did not get its lock releases its key.
    let once = |route: MethodRouter<Arc<Shop>>| route.layer(keys.clone()).layer(replays.clone());
    let mut router = Router::new()
        .route("/items/{sku}", get(item).put(put_item))
        .route("/items/{sku}/buy", once(post(buy)))
        .route("/accounts/{id}/charge", once(charge_route(&shop)))
        .route("/lock", get(lock));
    if with_demo {
        router = router.merge(demo::router());
    }
    let router = router.with_state(shop.clone());
    let page = page::router(shop, &router, with_demo);
    router
        .merge(page)
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
}

/// Reports a replayed answer to the log and the board: nothing else sees it.
async fn note_replays(State(shop): Shared, request: Request, next: Next) -> Response {
    let (path, key) = (request.uri().path().to_owned(), key_of(&request));
    let response = next.run(request).await;
    if let Some(key) = key.filter(|_| response.headers().contains_key(REPLAYED)) {
        // Every client that knows the key can ask for the response, so the log has only a part of it.
        let begin: String = key.chars().take(8).collect();
        tracing::info!(
            path,
            key = format!("{begin}…"),
            "replayed: nothing was done for it"
        );
        let (head, body) = response.into_parts();
        // The answers of this service are short, and a stored one is in memory already.
        let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        let order = answer["order"].as_str().map(str::to_owned);
        shop.board().replayed(&path, order);
        return Response::from_parts(head, Body::from(body));
    }
    response
}

/// The key, precise enough for the log; the layer parses it properly.
fn key_of(request: &Request) -> Option<String> {
    let header = request.headers().get("idempotency-key")?.to_str().ok()?;
    Some(header.trim().trim_matches('"').to_owned())
}

/// One charge at a time per account: the layer takes the lock before the handler runs and releases it
/// after, and the handler knows nothing of it.
fn charge_route(shop: &Arc<Shop>) -> MethodRouter<Arc<Shop>> {
    let route = post(charge);
    if !shop.is_locked() {
        return route;
    }
    let layer = LockLayer::new(shop.locks().clone(), key::path_param("id").prefix("account:"))
        .wait(shop.wait())
        .max_waiters(QUEUE)
        // As for a sale: the write is checked, and its outcome is the answer.
        .on_lost(OnLost::RunOn);
    route.layer(layer)
}

// `axum::Json` and similar extractors, with their rejections as problem documents.

#[derive(FromRequest)]
#[from_request(via(axum::Json), rejection(Error))]
pub(crate) struct Json<T>(pub(crate) T);

#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Error))]
pub(crate) struct Path<T>(pub(crate) T);

#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Error))]
pub(crate) struct Query<T>(pub(crate) T);

#[derive(Deserialize)]
pub(crate) struct Put {
    pub(crate) stock: i64,
}

#[derive(Deserialize)]
pub(crate) struct Buy {
    pub(crate) quantity: i64,
}

#[derive(Deserialize)]
struct Charge {
    amount: i64,
}

#[derive(Deserialize)]
struct Hold {
    #[serde(default = "a_second")]
    hold_ms: u64,
}

fn a_second() -> u64 {
    1_000
}

async fn item(State(shop): Shared, Path(sku): Path<String>) -> Result<axum::Json<Value>, Error> {
    let sku = Name::parse(sku)?;
    let item = shop.item(&sku).await?;
    Ok(axum::Json(
        json!({ "sku": sku.to_string(), "stock": item.stock, "sold": item.sold }),
    ))
}

async fn put_item(
    State(shop): Shared,
    Path(sku): Path<String>,
    Json(put): Json<Put>,
) -> Result<axum::Json<Value>, Error> {
    let sku = Name::parse(sku)?;
    let item = shop.put(&sku, put.stock).await?;
    Ok(axum::Json(
        json!({ "sku": sku.to_string(), "stock": item.stock, "sold": item.sold }),
    ))
}

async fn buy(
    State(shop): Shared,
    Path(sku): Path<String>,
    claim: Option<Idempotency>,
    Json(buy): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sku = Name::parse(sku)?;
    let sale = shop.buy(&sku, buy.quantity, claim.as_ref()).await?;
    Ok(sold(&sale))
}

/// The response to a purchase.
pub(crate) fn sold(sale: &Sale) -> (StatusCode, axum::Json<Value>) {
    let answer = json!({ "order": sale.order, "fencing_token": sale.token });
    (StatusCode::CREATED, axum::Json(answer))
}

async fn charge(
    State(shop): Shared,
    Path(id): Path<String>,
    held: Option<HeldLock>,
    Json(charge): Json<Charge>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let id = Name::parse(id)?;
    let token = held.map(|HeldLock(held)| held.fencing_token());
    let charged = shop.charge(&id, charge.amount, token).await?;
    let answer = json!({ "account": id.to_string(), "charged": charged, "fencing_token": token });
    Ok((StatusCode::CREATED, axum::Json(answer)))
}

/// Holds one lock for a while: two of them at once take twice as long.
async fn lock(State(shop): Shared, Query(Hold { hold_ms }): Query<Hold>) -> Result<axum::Json<Value>, Error> {
    let hold = Duration::from_millis(hold_ms);
    if hold > LONGEST_HOLD {
        let most = LONGEST_HOLD.as_millis();
        return Err(Error::BadRequest(format!(
            "hold_ms is {hold_ms}, it must be from 0 to {most}"
        )));
    }
    let asked = Instant::now();
    let work = async move |token| {
        let waited = asked.elapsed();
        tokio::time::sleep(hold).await;
        (waited, token)
    };
    let (waited, token) = if shop.is_locked() {
        let lock = shop.locks().lock("lock").wait(HOLD_WAIT);
        lock.run(|held| work(Some(held.fencing_token()))).await?
    } else {
        work(None).await
    };
    tracing::info!(?hold, token, ?waited, "held");
    let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
    Ok(axum::Json(
        json!({ "held_ms": hold_ms, "waited_ms": waited_ms, "fencing_token": token }),
    ))
}

async fn no_route() -> Error {
    Error::Http(
        StatusCode::NOT_FOUND,
        "there is nothing here; checkout --help lists the requests".to_owned(),
    )
}

async fn no_method() -> Error {
    Error::Http(
        StatusCode::METHOD_NOT_ALLOWED,
        "this path does not take that method".to_owned(),
    )
}
