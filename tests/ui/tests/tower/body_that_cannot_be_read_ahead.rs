use std::convert::Infallible;

use bytes::Bytes;
use dlock_tower::LockLayer;
use dlock_tower::key::{header, json_field};
use http::{Request, Response};
use http_body_util::{Either, Empty};
use tower::{Layer, Service, service_fn};

type Body = Either<Empty<Bytes>, Empty<Bytes>>;

async fn handler(_: Request<Body>) -> Result<Response<Empty<Bytes>>, Infallible> {
    Ok(Response::new(Empty::new()))
}

fn serve(_: impl Service<Request<Body>>) {}

fn main() {
    let client = dlock::LockClient::memory();
    let by_field = LockLayer::new(client.clone(), json_field("id"));
    serve(by_field.streaming().layer(service_fn(handler)));
    serve(LockLayer::new(client, header("id")).layer(service_fn(handler)));
}
