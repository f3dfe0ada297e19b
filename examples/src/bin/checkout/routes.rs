//! The routes: what comes in as HTTP, and what goes out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{FromRequest, FromRequestParts, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use dlock_tower::{HeldLock, LockLayer, OnLost, key};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::Error;
use crate::service::{Name, QUEUE, Shop};

/// The longest that `GET /lock` can be asked to hold its lock.
const LONGEST_HOLD: Duration = Duration::from_secs(60);
/// How long it waits for it: long enough for a queue of them.
const HOLD_WAIT: Duration = Duration::from_secs(600);

type Shared = State<Arc<Shop>>;

pub(crate) fn router(shop: Arc<Shop>) -> Router {
    Router::new()
        .route("/items/{sku}", get(item).put(put_item))
        .route("/items/{sku}/buy", post(buy))
        .route("/accounts/{id}/charge", charge_route(&shop))
        .route("/lock", get(lock))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(shop)
}

/// One charge at a time per account: the layer takes the lock before the handler runs and gives it back
/// after, and the handler knows nothing of it.
fn charge_route(shop: &Shop) -> axum::routing::MethodRouter<Arc<Shop>> {
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

// `axum::Json` and its kin, with their rejections as problem documents.

#[derive(FromRequest)]
#[from_request(via(axum::Json), rejection(Error))]
struct Json<T>(T);

#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Error))]
struct Path<T>(T);

#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Error))]
struct Query<T>(T);

#[derive(Deserialize)]
struct Put {
    stock: i64,
}

#[derive(Deserialize)]
struct Buy {
    quantity: i64,
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
    Json(buy): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sale = shop.buy(&Name::parse(sku)?, buy.quantity).await?;
    let answer = json!({ "order": sale.order, "fencing_token": sale.token });
    Ok((StatusCode::CREATED, axum::Json(answer)))
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
    let work = async move {
        let waited = asked.elapsed();
        tokio::time::sleep(hold).await;
        waited
    };
    let (waited, token) = if shop.is_locked() {
        let lock = shop.locks().lock("lock").wait(HOLD_WAIT);
        lock.run(|held| async move { (work.await, Some(held.fencing_token())) })
            .await?
    } else {
        (work.await, None)
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
