//! A server that speaks etcd's protocol and answers as a test tells it.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What the server answers to a request.
#[derive(Debug, Clone)]
pub enum Reply {
    /// This message, of a request that has one reply.
    Message(Vec<u8>),
    /// This message, and the stream goes on.
    Stream(Vec<u8>),
    /// A code of gRPC, and the text of the server.
    Refusal(u16, &'static str),
    /// Nothing, as long as the client waits.
    Silence,
}

impl Reply {
    /// What it takes to connect, to acquire a plain lock on a lease of 30 s, and to find no key.
    ///
    /// # Panics
    /// For other requests.
    pub fn usual(method: &str) -> Reply {
        const REVISION: [u8; 4] = [0x0a, 2, 0x18, 7];
        let lease = vec![0x10, 1, 0x18, 30];
        match method {
            "Status" => Reply::Message(b"\x12\x053.6.6".into()),
            "Put" | "Range" => Reply::Message(REVISION.into()),
            // It has succeeded.
            "Txn" => Reply::Message([&REVISION[..], &[0x10, 1]].concat()),
            "LeaseGrant" => Reply::Message(lease),
            "LeaseKeepAlive" => Reply::Stream(lease),
            "Watch" => Reply::Stream(vec![0x10, 1, 0x18, 1]),
            other => panic!("the script has no reply to {other}"),
        }
    }
}

#[derive(Debug, Default)]
struct Heard {
    connections: AtomicUsize,
    methods: Mutex<Vec<String>>,
}

/// The server, which ends when it is dropped.
#[derive(Debug)]
pub struct ScriptedEtcd {
    addr: SocketAddr,
    heard: Arc<Heard>,
    _tasks: JoinSet<()>,
}

impl ScriptedEtcd {
    /// Starts it. It answers with what the function returns for the method of a request.
    ///
    /// # Panics
    /// Without a free port.
    pub async fn start(script: impl Fn(&str) -> Reply + Clone + Send + Sync + 'static) -> ScriptedEtcd {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("it has one");
        let heard = Arc::<Heard>::default();
        let mut tasks = JoinSet::new();
        let own = heard.clone();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                own.connections.fetch_add(1, Ordering::Relaxed);
                connections.spawn(serve(client, own.clone(), script.clone()));
            }
        });
        ScriptedEtcd {
            addr,
            heard,
            _tasks: tasks,
        }
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections it has had.
    pub fn connections(&self) -> usize {
        self.heard.connections.load(Ordering::Relaxed)
    }

    /// How many requests of this method it has had.
    pub fn count(&self, method: &str) -> usize {
        let methods = self.heard.methods.lock();
        methods.iter().filter(|one| *one == method).count()
    }
}

async fn serve(
    client: TcpStream,
    heard: Arc<Heard>,
    script: impl Fn(&str) -> Reply + Clone + Send + Sync + 'static,
) {
    let service = service_fn(move |request: Request<Incoming>| {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        heard.methods.lock().push(method.to_owned());
        let reply = script(method);
        async move { Ok::<_, Infallible>(answer(reply)) }
    });
    let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    let _ = http.serve_connection(TokioIo::new(client), service).await;
}

fn answer(reply: Reply) -> Response<Body> {
    let response = Response::builder().header("content-type", "application/grpc");
    match reply {
        Reply::Message(message) => {
            let frames = [Frame::data(framed(&message)), Frame::trailers(succeeded())];
            response.body(StreamBody::new(stream::iter(frames.map(Ok))).boxed_unsync())
        }
        Reply::Stream(message) => {
            let first = stream::iter([Ok(Frame::data(framed(&message)))]);
            let frames = first.chain(stream::once(pending()));
            response.body(StreamBody::new(frames).boxed_unsync())
        }
        Reply::Refusal(code, text) => response
            .header("grpc-status", code)
            .header("grpc-message", text)
            .body(StreamBody::new(stream::empty()).boxed_unsync()),
        Reply::Silence => response.body(StreamBody::new(stream::pending()).boxed_unsync()),
    }
    .expect("a response")
}

/// A message as gRPC sends it: not compressed, its length, and itself.
fn framed(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("a short message");
    [&[0], &length.to_be_bytes()[..], message].concat().into()
}

fn succeeded() -> HeaderMap {
    HeaderMap::from_iter([(
        "grpc-status".parse().expect("a name"),
        "0".parse().expect("a value"),
    )])
}
