use std::convert::Infallible;

use bytes::Bytes;
use dlock_tower::LockLayer;
use dlock_tower::key::json_field;
use http::{Request, Response};
use http_body_util::Empty;
use tower::{Layer, Service, service_fn};

async fn handler(_: Request<Empty<Bytes>>) -> Result<Response<Empty<Bytes>>, Infallible> {
    Ok(Response::new(Empty::new()))
}

fn serve(_: impl Service<Request<Empty<Bytes>>>) {}

fn main() {
    let client = dlock::LockClient::memory();
    serve(LockLayer::new(client, json_field("id")).layer(service_fn(handler)));
}
