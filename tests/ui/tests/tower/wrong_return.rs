use axum::{Router, routing::get};
use dlock_tower::LockLayer;

fn main() {
    let client = dlock::LockClient::memory();
    let layer = LockLayer::new(client, |parts: &http::request::Parts| parts.headers.len());
    let _: Router = Router::new().route("/", get(|| async {})).layer(layer);
}
