//! A network before etcd that fails exactly where a test says.
//!
//! It speaks HTTP/2 to both sides and knows which reply answers which call. A call that it [holds](EtcdProxy::hold) reaches the
//! server although its client is long gone. It runs in a thread of its own.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long a test waits for a fault to strike.
const PATIENCE: Duration = Duration::from_secs(60);

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    /// The server does it, and the connection is cut before the reply.
    Swallow,
    /// The server does it, and the reply never comes.
    Mute,
    /// The connection is cut before the server gets it.
    Lose,
    /// It is kept.
    Hold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Armed,
    Caught,
    Released,
    Done,
}

struct Rule {
    left: u64,
    matches: Box<dyn Fn(&Call) -> bool + Send>,
    deed: Deed,
    stage: watch::Sender<Stage>,
}

struct Shared {
    upstream: SocketAddr,
    rules: Mutex<Vec<Rule>>,
    log: Mutex<Vec<Call>>,
    blocked: watch::Sender<bool>,
    refusing: watch::Sender<bool>,
    /// Ends every connection that is open.
    cut: Mutex<CancellationToken>,
}

/// A fault of one call. It stays armed when this is dropped.
#[derive(Debug, Clone)]
pub struct EtcdFault(watch::Sender<Stage>);

impl EtcdFault {
    /// Waits until a client has sent the call that it is for.
    ///
    /// # Panics
    /// After a minute.
    pub async fn caught(&self) {
        self.reached(Stage::Caught).await;
    }

    /// Waits until the server has replied to the call.
    ///
    /// # Panics
    /// After a minute.
    pub async fn done(&self) {
        self.reached(Stage::Done).await;
    }

    /// Lets a call go on to the server that is held.
    pub fn release(&self) {
        self.0.send_replace(Stage::Released);
    }

    async fn reached(&self, stage: Stage) {
        let mut stages = self.0.subscribe();
        let reached = tokio::time::timeout(PATIENCE, stages.wait_for(|now| *now >= stage)).await;
        assert!(reached.is_ok(), "the fault does not get to {stage:?}");
    }
}

/// A proxy before an etcd server. All connections through it end when it is dropped.
pub struct EtcdProxy {
    shared: Arc<Shared>,
    addr: SocketAddr,
    ended: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for EtcdProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdProxy")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl EtcdProxy {
    /// Starts a proxy that forwards to `upstream`, an [`Etcd::addr`](super::Etcd::addr).
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> EtcdProxy {
        let shared = Arc::new(Shared {
            upstream,
            rules: Mutex::default(),
            log: Mutex::default(),
            blocked: watch::Sender::default(),
            refusing: watch::Sender::default(),
            cut: Mutex::default(),
        });
        let ended = CancellationToken::new();
        let (ready, started) = sync_mpsc::channel();
        let (inner, end) = (shared.clone(), ended.clone());
        let thread = thread::Builder::new()
            .name("dlock-tests-etcd-proxy".into())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime can be built");
                runtime.block_on(async {
                    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                        .await
                        .expect("a free port");
                    let _ = ready.send(listener.local_addr().expect("it listens"));
                    tokio::select! {
                        () = end.cancelled() => {}
                        () = accept(inner, listener) => {}
                    }
                });
            })
            .expect("a thread can be started");
        EtcdProxy {
            shared,
            addr: started.recv().expect("the proxy listens"),
            ended,
            thread: Some(thread),
        }
    }

    /// The address to connect to.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Closes all connections. What the server has got goes on. New ones are accepted.
    pub fn cut(&self) {
        std::mem::take(&mut *self.shared.cut.lock()).cancel();
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, on: bool) {
        self.shared.refusing.send_replace(on);
    }

    /// Whether nothing goes through, in either direction, while all connections stay open. What arrives is kept.
    pub fn block(&self, on: bool) {
        self.shared.blocked.send_replace(on);
    }

    /// Cuts the connection instead of the reply to the `k`-th call from now on that matches: the server has done it, the
    /// client does not learn.
    pub fn swallow(&self, k: u64, matches: impl Fn(&Call) -> bool + Send + 'static) -> EtcdFault {
        self.arm(k, Deed::Swallow, matches)
    }

    /// Never brings the reply to the `k`-th call from now on that matches.
    pub fn mute(&self, k: u64, matches: impl Fn(&Call) -> bool + Send + 'static) -> EtcdFault {
        self.arm(k, Deed::Mute, matches)
    }

    /// Cuts the connection before the `k`-th call from now on that matches: the server never gets it.
    pub fn lose(&self, k: u64, matches: impl Fn(&Call) -> bool + Send + 'static) -> EtcdFault {
        self.arm(k, Deed::Lose, matches)
    }

    /// Keeps the `k`-th call from now on that matches until it is [released](EtcdFault::release): also when its client is
    /// gone by then.
    pub fn hold(&self, k: u64, matches: impl Fn(&Call) -> bool + Send + 'static) -> EtcdFault {
        self.arm(k, Deed::Hold, matches)
    }

    fn arm(&self, k: u64, deed: Deed, matches: impl Fn(&Call) -> bool + Send + 'static) -> EtcdFault {
        assert!(k > 0, "the first call that matches is k = 1");
        let stage = watch::Sender::new(Stage::Armed);
        self.shared.rules.lock().push(Rule {
            left: k,
            matches: Box::new(matches),
            deed,
            stage: stage.clone(),
        });
        EtcdFault(stage)
    }

    /// How many of the calls match that clients sent, whether or not they reached the server.
    pub fn count(&self, matches: impl Fn(&Call) -> bool) -> usize {
        self.shared.log.lock().iter().filter(|call| matches(call)).count()
    }
}

impl Drop for EtcdProxy {
    fn drop(&mut self) {
        self.ended.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        let _ = client.set_nodelay(true);
        if *shared.refusing.borrow() {
            continue;
        }
        tokio::spawn(serve(shared.clone(), client));
    }
}

/// Serves a connection of a client by one to the server.
async fn serve(shared: Arc<Shared>, client: TcpStream) {
    let cut = shared.cut.lock().clone();
    let serving = async {
        let server = TcpStream::connect(shared.upstream).await.ok()?;
        let _ = server.set_nodelay(true);
        let executor = TokioExecutor::new();
        let (requests, connection) = hyper::client::conn::http2::handshake(executor, TokioIo::new(server))
            .await
            .ok()?;
        // Not cut with the client's: what was sent goes on.
        tokio::spawn(connection);
        let own = CancellationToken::new();
        let (inner, end) = (shared.clone(), own.clone());
        let service = service_fn(move |request| {
            let (shared, requests, end) = (inner.clone(), requests.clone(), end.clone());
            async move { Ok::<_, Infallible>(forward(shared, requests, end, request).await) }
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

async fn forward(
    shared: Arc<Shared>,
    mut requests: SendRequest<Body>,
    end: CancellationToken,
    request: Request<Incoming>,
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let method = parts.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
    let is_stream = ["Watch", "LeaseKeepAlive"].contains(&&*method);
    let (message, body) = if is_stream {
        (Bytes::new(), body.boxed_unsync())
    } else {
        let Ok(whole) = body.collect().await else {
            return never().await;
        };
        let message = whole.to_bytes();
        let body = Full::new(message.clone()).map_err(|never| match never {});
        (message, body.boxed_unsync())
    };
    let struck = shared.look(Call { method, message });
    let (deed, stage) = match struck {
        Some((deed, stage)) => (Some(deed), Some(stage)),
        None => (None, None),
    };
    // In a task of its own: it goes on when the client is gone.
    let sending = tokio::spawn(async move {
        shared.passes().await;
        match (deed, &stage) {
            (Some(Deed::Lose), _) => {
                end.cancel();
                return never().await;
            }
            (Some(Deed::Hold), Some(stage)) => {
                let _ = stage.subscribe().wait_for(|now| *now >= Stage::Released).await;
            }
            _ => {}
        }
        let Ok(reply) = requests.send_request(Request::from_parts(parts, body)).await else {
            end.cancel();
            return never().await;
        };
        let (parts, body) = reply.into_parts();
        let body: Body = match is_stream {
            true => body.boxed_unsync(),
            false => match body.collect().await {
                Ok(whole) => whole.map_err(|never| match never {}).boxed_unsync(),
                Err(_) => {
                    end.cancel();
                    return never().await;
                }
            },
        };
        if let Some(stage) = stage {
            stage.send_replace(Stage::Done);
        }
        shared.passes().await;
        match deed {
            Some(Deed::Swallow) => {
                end.cancel();
                never().await
            }
            Some(Deed::Mute) => never().await,
            _ => Response::from_parts(parts, body),
        }
    });
    match sending.await {
        Ok(reply) => reply,
        Err(_) => never().await,
    }
}

async fn never<T>() -> T {
    std::future::pending().await
}

impl Shared {
    /// Logs a call, and says what is to become of it.
    fn look(&self, call: Call) -> Option<(Deed, watch::Sender<Stage>)> {
        let mut rules = self.rules.lock();
        let mut struck = None;
        for (i, rule) in rules.iter_mut().enumerate() {
            if (rule.matches)(&call) {
                rule.left -= 1;
                if rule.left == 0 && struck.is_none() {
                    struck = Some(i);
                }
            }
        }
        self.log.lock().push(call);
        let rule = rules.remove(struck?);
        rules.retain(|rule| rule.left > 0);
        rule.stage.send_if_modified(|stage| {
            let first = *stage == Stage::Armed;
            if first {
                *stage = Stage::Caught;
            }
            first
        });
        Some((rule.deed, rule.stage))
    }

    async fn passes(&self) {
        let mut blocked = self.blocked.subscribe();
        let _ = blocked.wait_for(|blocked| !blocked).await;
    }
}
