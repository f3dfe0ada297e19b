//! Shows what goes wrong without locks or keys: only with `--demo`, and on a separate article, so that all other
//! articles are sold correctly.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{post, put};
use serde_json::{Value, json};

use crate::error::Error;
use crate::routes::{Buy, Json, Put, Shared, sold};
use crate::service::{Name, Shop};

/// The article that is sold without protection.
pub(crate) const SKU: &str = "sneaker-unsafe";

pub(crate) fn router() -> Router<Arc<Shop>> {
    Router::new()
        .route("/demo/stock", put(stock))
        .route("/demo/buy", post(buy_without_lock))
        .route("/demo/buy-without-key", post(buy_without_key))
}

async fn stock(State(shop): Shared, Json(Put { stock }): Json<Put>) -> Result<axum::Json<Value>, Error> {
    let item = shop.put(&sku()?, stock).await?;
    Ok(axum::Json(
        json!({ "sku": SKU, "stock": item.stock, "sold": item.sold }),
    ))
}

/// Reads, waits and writes while all other buyers do the same.
async fn buy_without_lock(
    State(shop): Shared,
    Json(Buy { quantity }): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sale = shop.buy_without_lock(&sku()?, quantity).await?;
    Ok(sold(&sale))
}

/// Under the lock, but without the idempotency layer: a request that is sent twice buys twice.
async fn buy_without_key(
    State(shop): Shared,
    Json(Buy { quantity }): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sale = shop.buy(&sku()?, quantity, None).await?;
    Ok(sold(&sale))
}

fn sku() -> Result<Name, Error> {
    Name::parse(SKU.to_owned())
}
