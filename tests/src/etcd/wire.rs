//! What etcd and its clients say: HTTP/2 to both sides, of which it is known which reply answers which call.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::network::{Deed, Direction, Network, Protocol, Swallow};

type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The method: `Txn`, `DeleteRange`, `LeaseKeepAlive`, …
    pub method: String,
    /// The message as it was sent; empty for those that are streams.
    pub message: Bytes,
}

impl Call {
    /// Whether it is this method.
    pub fn is(&self, method: &str) -> bool {
        self.method == method
    }

    /// Whether these bytes are in its message.
    pub fn has(&self, text: &str) -> bool {
        self.message
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    }
}

/// etcd's protocol.
#[derive(Debug)]
pub struct Grpc;

impl Protocol for Grpc {
    type Request = Call;

    async fn forward(network: Arc<Network<Self>>, client: TcpStream, cut: CancellationToken) {
        let serving = async {
            let server = TcpStream::connect(network.upstream).await.ok()?;
            let _ = server.set_nodelay(true);
            let executor = TokioExecutor::new();
            let (requests, connection) =
                hyper::client::conn::http2::handshake(executor, TokioIo::new(server))
                    .await
                    .ok()?;
            // Not cut with the client's: what was sent goes on.
            tokio::spawn(connection);
            let own = CancellationToken::new();
            let (inner, end) = (network.clone(), own.clone());
            let service = service_fn(move |request| {
                let (network, requests, end) = (inner.clone(), requests.clone(), end.clone());
                async move { Ok::<_, Infallible>(call(network, requests, end, request).await) }
            });
            let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::select! {
                _ = http.serve_connection(TokioIo::new(client), service) => {}
                () = own.cancelled() => {}
            }
            Some(())
        };
        tokio::select! {
            () = cut.cancelled() => {}
            _ = serving => {}
        }
    }

    fn is_step(call: &Call) -> bool {
        ["Txn", "Put", "DeleteRange"].contains(&&*call.method)
    }
}

async fn call(
    network: Arc<Network<Grpc>>,
    mut requests: SendRequest<Body>,
    end: CancellationToken,
    request: Request<Incoming>,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let method = parts.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
    let is_stream = ["Watch", "LeaseKeepAlive"].contains(&&*method);
    let (message, body) = if is_stream {
        (Bytes::new(), passing(&network, Direction::ToServer, body))
    } else {
        let Ok(whole) = body.collect().await else {
            return never().await;
        };
        let message = whole.to_bytes();
        let body = Full::new(message.clone()).map_err(|never| match never {});
        (message, body.boxed_unsync())
    };
    let (deed, fault) = network.strike(Call { method, message }).unzip();
    // In a task of its own: it goes on when the client is gone.
    let sending = tokio::spawn(async move {
        passes(&network, Direction::ToServer).await;
        match (deed, &fault) {
            (Some(Deed::Lose), _) => {
                end.cancel();
                return never().await;
            }
            (Some(Deed::Hold), Some(fault)) => fault.is_released().await,
            _ => {}
        }
        let Ok(reply) = requests.send_request(Request::from_parts(parts, body)).await else {
            end.cancel();
            return never().await;
        };
        let (parts, body) = reply.into_parts();
        let body: Body = match is_stream {
            true => passing(&network, Direction::ToClient, body),
            false => match body.collect().await {
                Ok(whole) => whole.map_err(|never| match never {}).boxed_unsync(),
                Err(_) => {
                    end.cancel();
                    return never().await;
                }
            },
        };
        if let Some(fault) = fault {
            fault.is_swallowed();
        }
        passes(&network, Direction::ToClient).await;
        match deed {
            Some(Deed::Swallow(Swallow::Cut)) => {
                end.cancel();
                never().await
            }
            Some(Deed::Swallow(Swallow::Hang)) => never().await,
            _ => Response::from_parts(parts, body),
        }
    });
    match sending.await {
        Ok(reply) => reply,
        Err(_) => never().await,
    }
}

/// A stream whose messages go through the network one by one.
fn passing(network: &Arc<Network<Grpc>>, direction: Direction, body: Incoming) -> Body {
    let frames = stream::unfold((body, network.clone()), move |(mut body, network)| async move {
        let frame = body.frame().await?;
        passes(&network, direction).await;
        Some((frame, (body, network)))
    });
    StreamBody::new(frames).boxed_unsync()
}

async fn passes(network: &Network<Grpc>, direction: Direction) {
    tokio::time::sleep(network.weather.late_by(direction)).await;
    network.weather.unblocked(direction).await;
}

async fn never<T>() -> T {
    std::future::pending().await
}
