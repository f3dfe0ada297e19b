use axum::{Router, routing::get};
use dlock_tower::LockLayer;

fn main() {
    let client = dlock::LockClient::memory();
    let _: Router = Router::new().route("/", get(|| async {})).layer(LockLayer::new(client, 42));
}
