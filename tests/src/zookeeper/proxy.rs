//! A network before ZooKeeper that fails exactly where a test says.
//!
//! The proxy forwards whole messages, and knows what a client asks for. It runs in a thread of its own.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How long a test waits for a fault to strike.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZkRequest {
    /// The number by which its reply is known.
    xid: i32,
    /// The number of the operation.
    pub operation: i32,
    /// The path of the node; empty where there is none.
    pub path: String,
}

impl ZkRequest {
    /// Whether it creates a node, and no container.
    pub fn creates(&self) -> bool {
        matches!(self.operation, 1 | 15)
    }

    /// Whether it deletes a node.
    pub fn deletes(&self) -> bool {
        self.operation == 2
    }

    /// Whether it is of several parts, as a renewal is.
    pub fn is_multi(&self) -> bool {
        self.operation == 14
    }

    fn parse(frame: &[u8]) -> Option<ZkRequest> {
        let int = |at: usize| Some(i32::from_be_bytes(frame.get(at..at + 4)?.try_into().ok()?));
        let (xid, operation) = (int(0)?, int(4)?);
        let path = int(8)
            .and_then(|length| frame.get(12..12 + usize::try_from(length).ok()?))
            .map(|path| String::from_utf8_lossy(path).into_owned());
        Some(ZkRequest {
            xid,
            operation,
            path: path.unwrap_or_default(),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    /// The connection breaks in place of the reply.
    Swallow,
    /// It goes to the server only when the test says so, whatever became of the client's connection.
    Hold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Armed,
    Struck,
    Released,
    Delivered,
}

struct Rule {
    matches: Box<dyn Fn(&ZkRequest) -> bool + Send>,
    deed: Deed,
    stage: watch::Sender<Stage>,
}

struct Shared {
    upstream: SocketAddr,
    /// Whether messages are known.
    framed: bool,
    blocked: watch::Sender<bool>,
    refusing: watch::Sender<bool>,
    cut: Mutex<CancellationToken>,
    rules: Mutex<Vec<Rule>>,
}

/// A fault of one request. It stays armed when this is dropped.
#[derive(Debug)]
pub struct ZkFault(watch::Sender<Stage>);

impl ZkFault {
    /// Waits until it has struck.
    ///
    /// # Panics
    /// When it does not within a minute.
    pub async fn struck(&self) {
        self.reached(Stage::Struck).await;
    }

    /// Lets a request go that was held, and waits until the server has it.
    ///
    /// # Panics
    /// When it cannot be delivered within a minute.
    pub async fn release(&self) {
        self.0.send_modify(|stage| *stage = (*stage).max(Stage::Released));
        self.reached(Stage::Delivered).await;
    }

    async fn reached(&self, wanted: Stage) {
        let mut stages = self.0.subscribe();
        let reached = stages.wait_for(|stage| *stage >= wanted);
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        assert!(
            reached.is_ok_and(|stage| stage.is_ok()),
            "the fault did not strike"
        );
    }
}

/// A proxy before a server.
pub struct ZkProxy {
    shared: Arc<Shared>,
    addr: SocketAddr,
    ended: CancellationToken,
}

impl ZkProxy {
    /// A proxy before the server at this address.
    ///
    /// # Panics
    /// When no port can be listened on.
    pub fn start(upstream: SocketAddr) -> ZkProxy {
        ZkProxy::of(upstream, true)
    }

    /// The same for connections that are none of clients.
    pub(super) fn raw(upstream: SocketAddr) -> ZkProxy {
        ZkProxy::of(upstream, false)
    }

    fn of(upstream: SocketAddr, framed: bool) -> ZkProxy {
        let shared = Arc::new(Shared {
            upstream,
            framed,
            blocked: watch::Sender::new(false),
            refusing: watch::Sender::new(false),
            cut: Mutex::default(),
            rules: Mutex::default(),
        });
        let ended = CancellationToken::new();
        let (ready, addr) = sync_mpsc::channel();
        let (serving, until) = (shared.clone(), ended.clone());
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
                    .await
                    .expect("a free port");
                ready
                    .send(listener.local_addr().expect("it listens"))
                    .expect("it is waited for");
                tokio::select! {
                    () = until.cancelled() => {}
                    () = accept(listener, serving) => {}
                }
            });
        });
        ZkProxy {
            shared,
            addr: addr.recv().expect("the proxy listens"),
            ended,
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Breaks all connections.
    pub fn cut(&self) {
        std::mem::take(&mut *self.shared.cut.lock()).cancel();
    }

    /// Closes new connections at once, or no more.
    pub fn refuse(&self, refusing: bool) {
        self.shared.refusing.send_replace(refusing);
    }

    /// Forwards nothing while connections stay open, or goes on.
    pub fn block(&self, blocked: bool) {
        self.shared.blocked.send_replace(blocked);
    }

    /// Loses the reply to the next such request: the server carries it out, and the connection breaks.
    pub fn swallow(&self, matches: impl Fn(&ZkRequest) -> bool + Send + 'static) -> ZkFault {
        self.arm(Deed::Swallow, matches)
    }

    /// Holds the next such request, and what its client sends after it.
    pub fn hold(&self, matches: impl Fn(&ZkRequest) -> bool + Send + 'static) -> ZkFault {
        self.arm(Deed::Hold, matches)
    }

    fn arm(&self, deed: Deed, matches: impl Fn(&ZkRequest) -> bool + Send + 'static) -> ZkFault {
        let stage = watch::Sender::new(Stage::Armed);
        self.shared.rules.lock().push(Rule {
            matches: Box::new(matches),
            deed,
            stage: stage.clone(),
        });
        ZkFault(stage)
    }
}

impl fmt::Debug for ZkProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkProxy")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl Drop for ZkProxy {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        if *shared.refusing.borrow() {
            continue;
        }
        let (shared, cut) = (shared.clone(), shared.cut.lock().clone());
        tokio::spawn(async move {
            if let Ok(server) = TcpStream::connect(shared.upstream).await {
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                connected(client, server, shared, cut).await;
            }
        });
    }
}

/// What both directions of a connection know of each other.
struct Link {
    shared: Arc<Shared>,
    /// The reply that is swallowed.
    swallowed: Mutex<Option<(i32, watch::Sender<Stage>)>>,
    /// Ends both.
    over: CancellationToken,
}

async fn connected(client: TcpStream, server: TcpStream, shared: Arc<Shared>, cut: CancellationToken) {
    let link = Arc::new(Link {
        shared,
        swallowed: Mutex::default(),
        over: cut.child_token(),
    });
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // One that holds a request lives on without its client.
    let requests = tokio::spawn(requests(link.clone(), from_client, to_server));
    tokio::select! {
        () = link.over.cancelled() => {}
        _ = replies(&link, from_server, to_client) => {}
    }
    link.over.cancel();
    let _ = requests.await;
}

impl Link {
    async fn unblocked(&self) {
        let mut blocked = self.shared.blocked.subscribe();
        let _ = blocked.wait_for(|blocked| !blocked).await;
    }

    /// The fault of a request.
    fn fault(&self, request: &ZkRequest) -> Option<(Deed, watch::Sender<Stage>)> {
        let mut rules = self.shared.rules.lock();
        let at = rules.iter().position(|rule| (rule.matches)(request))?;
        let rule = rules.remove(at);
        Some((rule.deed, rule.stage))
    }

    async fn frame(&self, from: &mut OwnedReadHalf) -> io::Result<Vec<u8>> {
        if !self.shared.framed {
            let mut some = vec![0; 16_384];
            let length = from.read(&mut some).await?;
            some.truncate(length);
            return match length {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                _ => Ok(some),
            };
        }
        let length = from.read_u32().await?;
        let mut frame = length.to_be_bytes().to_vec();
        frame.resize(4 + length as usize, 0);
        from.read_exact(&mut frame[4..]).await?;
        Ok(frame)
    }
}

async fn requests(link: Arc<Link>, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    let mut greeted = false;
    loop {
        let frame = tokio::select! {
            () = link.over.cancelled() => return Ok(()),
            frame = link.frame(&mut from) => frame?,
        };
        tokio::select! {
            () = link.over.cancelled() => return Ok(()),
            () = link.unblocked() => {}
        }
        let request = (greeted && link.shared.framed)
            .then(|| ZkRequest::parse(&frame[4..]))
            .flatten();
        greeted = true;
        let fault = request
            .as_ref()
            .and_then(|request| Some((link.fault(request)?, request.xid)));
        match fault {
            Some(((Deed::Swallow, stage), xid)) => *link.swallowed.lock() = Some((xid, stage)),
            Some(((Deed::Hold, stage), _)) => {
                stage.send_modify(|stage| *stage = (*stage).max(Stage::Struck));
                let mut stages = stage.subscribe();
                let _ = stages.wait_for(|stage| *stage >= Stage::Released).await;
                // The server may have closed the connection meanwhile.
                let _ = to.write_all(&frame).await;
                stage.send_replace(Stage::Delivered);
                continue;
            }
            None => {}
        }
        to.write_all(&frame).await?;
    }
}

async fn replies(link: &Link, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    loop {
        let frame = link.frame(&mut from).await?;
        link.unblocked().await;
        let xid = frame
            .get(4..8)
            .and_then(|xid| xid.try_into().ok())
            .map(i32::from_be_bytes);
        let swallowed = link.swallowed.lock().clone();
        if let Some((expected, stage)) = swallowed
            && link.shared.framed
            && xid == Some(expected)
        {
            stage.send_replace(Stage::Struck);
            return Ok(());
        }
        to.write_all(&frame).await?;
    }
}
