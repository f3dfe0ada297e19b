//! What goes wrong otherwise, to be shown: only with `--demo`, and on an article of its own, so that the
//! others are sold rightly all the while.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{post, put};
use serde_json::{Value, json};

use crate::error::Error;
use crate::routes::{Buy, Json, Put, Shared, sold};
use crate::service::{Name, Shop};

/// The article that is sold wrongly.
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

/// Reads, thinks and writes while all others do the same.
async fn buy_without_lock(
    State(shop): Shared,
    Json(Buy { quantity }): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sale = shop.buy_without_lock(&sku()?, quantity).await?;
    Ok(sold(&sale))
}

/// Under the lock, but no layer looks at the idempotency key: what is sent twice is bought twice.
async fn buy_without_key(
    State(shop): Shared,
    Json(Buy { quantity }): Json<Buy>,
) -> Result<(StatusCode, axum::Json<Value>), Error> {
    let sale = shop.buy(&sku()?, quantity).await?;
    Ok(sold(&sale))
}

fn sku() -> Result<Name, Error> {
    Name::parse(SKU.to_owned())
}
