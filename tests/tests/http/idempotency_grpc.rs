//! The idempotency layer around a tonic server: unary calls, their trailers, and what their status means.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::idempotency_support::{Counting, around, layer, post, send};
use bytes::{Buf, BufMut, Bytes};
use dlock_tower::idempotency::IdempotencyHandle;
use dlock_tower::{Idempotency, IdempotencyLayer, LockLayer, key};
use http::uri::PathAndQuery;
use http_body_util::Full;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tower::Service;

/// Text as it is, in place of generated messages.
#[derive(Default, Clone, Copy)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;

    fn encoder(&mut self) -> Text {
        Text
    }
    fn decoder(&mut self) -> Text {
        Text
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, item: String, dst: &mut EncodeBuf<'_>) -> Result<(), Status> {
        dst.put_slice(item.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = src.copy_to_bytes(src.remaining());
        String::from_utf8(bytes.to_vec())
            .map(Some)
            .map_err(|_| Status::internal("not text"))
    }
}

/// Answers `run N`, or with the code that it is asked for.
#[derive(Clone)]
struct Bank(Counting);

impl NamedService for Bank {
    const NAME: &'static str = "bank.Bank";
}

impl UnaryService<String> for Bank {
    type Response = String;
    type Future = Ready<Result<Response<String>, Status>>;

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let n = self.0.next();
        let claimed = request.extensions().get::<Idempotency>().is_some();
        let wanted = request.into_inner();
        ready(match wanted.parse::<i32>() {
            Ok(code) if code != 0 => {
                let mut metadata = MetadataMap::new();
                metadata.insert("x-run", n.to_string().parse().unwrap());
                Err(Status::with_details_and_metadata(
                    Code::from(code),
                    format!("run {n}, 100 %"),
                    b"\0\x01detail"[..].into(),
                    metadata,
                ))
            }
            _ => {
                let mut response = Response::new(format!("run {n} claimed {claimed}"));
                response.metadata_mut().insert("x-head", "1".parse().unwrap());
                Ok(response)
            }
        })
    }
}

impl Service<http::Request<Body>> for Bank {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let bank = self.clone();
        Box::pin(async move { Ok(Grpc::new(Text).unary(bank, request).await) })
    }
}

struct Served {
    run: Counting,
    channel: Channel,
    handle: IdempotencyHandle,
}

async fn serve(
    layer: IdempotencyLayer<dlock_tower::idempotency::caller::Public>,
    lock: Option<dlock::LockClient>,
) -> Served {
    let run = Counting::default();
    let handle = layer.handle();
    let bank = Bank(run.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let incoming = futures_util::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    });
    match lock {
        // Around the server itself, and around its routes in axum.
        None => tokio::spawn(
            Server::builder()
                .layer(layer)
                .add_service(bank)
                .serve_with_incoming(incoming),
        ),
        Some(client) => {
            let lock = LockLayer::new(client, key::fixed("bank")).try_once();
            let routes = tonic::service::Routes::new(bank)
                .into_axum_router()
                .layer(lock)
                .layer(layer);
            tokio::spawn(
                Server::builder()
                    .add_routes(routes.into())
                    .serve_with_incoming(incoming),
            )
        }
    };
    let channel = Endpoint::from_shared(format!("http://{address}"))
        .unwrap()
        .connect()
        .await
        .unwrap();
    Served { run, channel, handle }
}

impl Served {
    async fn call(&self, key: &str, message: &str) -> Result<Response<String>, Status> {
        let mut client = tonic::client::Grpc::new(self.channel.clone());
        client.ready().await.unwrap();
        let mut request = Request::new(message.to_owned());
        if !key.is_empty() {
            request
                .metadata_mut()
                .insert("idempotency-key", key.parse().unwrap());
        }
        client
            .unary(request, PathAndQuery::from_static("/bank.Bank/Pay"), Text)
            .await
    }

    async fn text(&self, key: &str, message: &str) -> String {
        self.call(key, message).await.unwrap().into_inner()
    }
}

#[tokio::test]
async fn unary_calls_run_once_where_that_was_opted_for() {
    let served = serve(layer().grpc_unary(), None).await;
    let first = served.call("k", "5x").await.unwrap();
    assert_eq!(first.metadata().get("idempotent-replayed"), None);
    assert_eq!(first.into_inner(), "run 1 claimed true");
    for _ in 0..2 {
        let again = served.call("k", "5x").await.unwrap();
        assert_eq!(again.metadata().get("idempotent-replayed").unwrap(), "true");
        assert_eq!(again.into_inner(), "run 1 claimed true");
    }
    assert_eq!(served.text("", "5x").await, "run 2 claimed false");
    assert_eq!(served.text("k2", "5x").await, "run 3 claimed true");
    assert_eq!(served.handle.claims(), 0);
}

#[tokio::test]
async fn otherwise_they_pass_untouched() {
    let served = serve(layer(), None).await;
    assert_eq!(served.text("k", "5x").await, "run 1 claimed false");
    assert_eq!(served.text("k", "5x").await, "run 2 claimed false");
}

#[tokio::test]
async fn status_of_a_call_is_kept_with_its_details() {
    let served = serve(layer().grpc_unary(), None).await;
    for code in 1..=16 {
        let (before, key) = (served.run.count(), format!("k{code}"));
        let first = served.call(&key, &code.to_string()).await.unwrap_err();
        let second = served.call(&key, &code.to_string()).await.unwrap_err();
        assert_eq!(served.run.count(), before + 1, "{code}");
        for status in [first, second] {
            assert_eq!(status.code(), Code::from(code));
            assert_eq!(status.message(), format!("run {}, 100 %", before + 1));
            assert_eq!(status.details(), b"\0\x01detail");
        }
    }
    let served = serve(layer().grpc_unary().retry_ambiguous(), None).await;
    for (code, runs) in [(14, 2), (5, 1)] {
        let before = served.run.count();
        for _ in 0..2 {
            served
                .call(&format!("k{code}"), &code.to_string())
                .await
                .unwrap_err();
        }
        assert_eq!(served.run.count(), before + runs, "{code}");
    }
}

/// A gRPC-Web response has its status in the body, which the layer does not read: it is a result, as each 200. One that
/// has it in the head is judged by it.
#[tokio::test]
async fn grpc_web_response_is_a_result_unless_its_head_says_otherwise() {
    let answers = |status: Option<&'static str>| {
        move |n: usize| async move {
            let mut response = http::Response::new(Full::<Bytes>::from(format!("run {n}")));
            let headers = response.headers_mut();
            headers.insert("content-type", "application/grpc-web+proto".parse().unwrap());
            if let Some(status) = status {
                headers.insert("grpc-status", status.parse().unwrap());
            }
            response
        }
    };
    for (status, again) in [(None, "run 1"), (Some("0"), "run 1"), (Some("14"), "run 2")] {
        let layer = layer().grpc_unary().retry_ambiguous();
        let service = around(&layer, Counting::default().answering(answers(status)));
        assert_eq!(send(&service, post("k")).await.text(), "run 1");
        assert_eq!(send(&service, post("k")).await.text(), again, "{status:?}");
    }
}

#[tokio::test]
async fn answers_of_the_layer_are_grpc_too() {
    let served = serve(layer().grpc_unary().required(), None).await;
    served.text("k", "5x").await;
    for (key, message, code) in [
        ("k", "6x", Code::InvalidArgument),
        ("", "5x", Code::InvalidArgument),
        ("a b", "5x", Code::InvalidArgument),
    ] {
        assert_eq!(
            served.call(key, message).await.unwrap_err().code(),
            code,
            "{key} {message}"
        );
    }
    let served = serve(layer().grpc_unary().body_limit(10), None).await;
    assert_eq!(
        served.call("k", "longer than ten").await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    assert_eq!(served.run.count(), 0);
}

#[tokio::test]
async fn a_busy_lock_inside_releases_the_key() {
    let client = dlock::LockClient::memory();
    let served = serve(layer().grpc_unary(), Some(client.clone())).await;
    let guard = client.lock("bank").acquire().await.unwrap();
    assert_eq!(served.call("k", "5x").await.unwrap_err().code(), Code::Aborted);
    guard.release().await.unwrap();
    assert_eq!(served.text("k", "5x").await, "run 1 claimed true");
    assert_eq!(served.text("k", "5x").await, "run 1 claimed true");
}
