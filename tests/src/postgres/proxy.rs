//! A network before PostgreSQL that fails exactly where a test says.
//!
//! The proxy forwards whole requests (all that a client sends up to and with a `Sync` or a simple query) and knows which
//! reply answers which, by the `ReadyForQuery` at its end. It knows the SQL of prepared statements too, so that a test
//! can lose the reply to the second `COMMIT`. It runs in a thread of its own, and does not speak TLS.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{Direction, Swallow};

/// How long a test waits for a fault to strike.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The SQL, of each statement one line; of a prepared one what was prepared.
    pub sql: String,
    /// Whether something is executed, and not only prepared or closed.
    pub executes: bool,
}

impl Request {
    /// Whether it executes a statement with this text in it.
    pub fn runs(&self, text: &str) -> bool {
        self.executes && self.sql.contains(text)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Swallow(Swallow),
    Lose,
    Hold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Armed,
    Caught,
    Released,
    Swallowed,
}

struct Rule {
    left: u64,
    matches: Box<dyn Fn(&Request) -> bool + Send>,
    deed: Deed,
    stage: watch::Sender<Stage>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Weather {
    delay: Duration,
    blocked: bool,
}

struct Shared {
    upstream: SocketAddr,
    rules: Mutex<Vec<Rule>>,
    log: Mutex<Vec<Request>>,
    weather: watch::Sender<Weather>,
    refusing: watch::Sender<bool>,
    /// Ends every connection that is open.
    cut: Mutex<CancellationToken>,
}

/// A fault of one request. It stays armed when this is dropped.
#[derive(Debug, Clone)]
pub struct PgFault(watch::Sender<Stage>);

impl PgFault {
    /// Whether a client has sent the request that it is for.
    pub fn fired(&self) -> bool {
        *self.0.borrow() > Stage::Armed
    }

    /// Waits until a client has sent the request that it is for.
    ///
    /// # Panics
    /// After 20 seconds.
    pub async fn caught(&self) {
        self.reached(Stage::Caught).await;
    }

    /// Waits until the server's reply was swallowed.
    ///
    /// # Panics
    /// After 20 seconds.
    pub async fn swallowed(&self) {
        self.reached(Stage::Swallowed).await;
    }

    /// Lets a request go on to the server that is held, if its connection still stands.
    pub fn release(&self) {
        self.0.send_replace(Stage::Released);
    }

    async fn reached(&self, stage: Stage) {
        let mut stages = self.0.subscribe();
        let reached = tokio::time::timeout(PATIENCE, stages.wait_for(|now| *now >= stage)).await;
        assert!(reached.is_ok(), "the fault does not get to {stage:?}");
    }
}

/// A TCP proxy before a PostgreSQL server. All connections through it end when it is dropped.
pub struct PgProxy {
    shared: Arc<Shared>,
    addr: SocketAddr,
    ended: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for PgProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PgProxy")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl PgProxy {
    /// Starts a proxy that forwards to `upstream`, a [`Postgres::addr`](super::Postgres::addr).
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> PgProxy {
        let shared = Arc::new(Shared {
            upstream,
            rules: Mutex::default(),
            log: Mutex::default(),
            weather: watch::Sender::default(),
            refusing: watch::Sender::default(),
            cut: Mutex::default(),
        });
        let ended = CancellationToken::new();
        let (ready, started) = sync_mpsc::channel();
        let (inner, end) = (shared.clone(), ended.clone());
        let thread = thread::Builder::new()
            .name("dlock-tests-pg-proxy".into())
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
        PgProxy {
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

    /// Closes all connections on both sides. New ones are accepted.
    pub fn cut(&self) {
        std::mem::take(&mut *self.shared.cut.lock()).cancel();
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, on: bool) {
        self.shared.refusing.send_replace(on);
    }

    /// Whether nothing goes through, in either direction, while all connections stay open. What arrives is kept.
    pub fn block(&self, on: bool) {
        self.shared.weather.send_modify(|weather| weather.blocked = on);
    }

    /// Forwards each request this much later.
    pub fn delay(&self, by: Duration) {
        self.shared.weather.send_modify(|weather| weather.delay = by);
    }

    /// Swallows the reply to the `k`-th request from now on that matches: the server has done it, the client does
    /// not learn.
    pub fn swallow(
        &self,
        k: u64,
        then: Swallow,
        matches: impl Fn(&Request) -> bool + Send + 'static,
    ) -> PgFault {
        self.arm(k, Deed::Swallow(then), matches)
    }

    /// Cuts the connection before the `k`-th request from now on that matches: the server never gets it.
    pub fn lose(&self, k: u64, matches: impl Fn(&Request) -> bool + Send + 'static) -> PgFault {
        self.arm(k, Deed::Lose, matches)
    }

    /// Keeps the `k`-th request from now on that matches, and what its connection sends later, until it is
    /// [released](PgFault::release): also when its client is gone by then.
    pub fn hold(&self, k: u64, matches: impl Fn(&Request) -> bool + Send + 'static) -> PgFault {
        self.arm(k, Deed::Hold, matches)
    }

    fn arm(&self, k: u64, deed: Deed, matches: impl Fn(&Request) -> bool + Send + 'static) -> PgFault {
        assert!(k > 0, "the first request that matches is k = 1");
        let stage = watch::Sender::new(Stage::Armed);
        self.shared.rules.lock().push(Rule {
            left: k,
            matches: Box::new(matches),
            deed,
            stage: stage.clone(),
        });
        PgFault(stage)
    }

    /// The requests that clients sent, whether or not they reached the server.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.log.lock().clone()
    }

    /// How many of them match.
    pub fn count(&self, matches: impl Fn(&Request) -> bool) -> usize {
        self.shared
            .log
            .lock()
            .iter()
            .filter(|request| matches(request))
            .count()
    }
}

impl Drop for PgProxy {
    fn drop(&mut self) {
        self.ended.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Logs a request, and says what is to become of it.
    fn look(&self, request: Request) -> Option<(Deed, watch::Sender<Stage>)> {
        let mut rules = self.rules.lock();
        let mut struck = None;
        for (i, rule) in rules.iter_mut().enumerate() {
            if (rule.matches)(&request) {
                rule.left -= 1;
                if rule.left == 0 && struck.is_none() {
                    struck = Some(i);
                }
            }
        }
        self.log.lock().push(request);
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

    async fn pass(&self, direction: Direction) {
        let delay = self.weather.borrow().delay;
        if direction == Direction::ToServer && !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut weather = self.weather.subscribe();
        let _ = weather.wait_for(|weather| !weather.blocked).await;
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    while let Ok((client, _)) = listener.accept().await {
        if *shared.refusing.borrow() {
            continue;
        }
        let (cut, shared) = (shared.cut.lock().clone(), shared.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = cut.cancelled() => {}
                _ = forward(&shared, client) => {}
            }
        });
    }
}

/// A reply that is still to come, and what is to become of it.
type Pending = Option<(Swallow, watch::Sender<Stage>)>;

async fn forward(shared: &Shared, client: TcpStream) -> io::Result<()> {
    let server = TcpStream::connect(shared.upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let (asked, replies) = mpsc::unbounded_channel();
    let requests = requests(shared, client_read, server_write, asked);
    let replies = self::replies(shared, server_read, client_write, replies);
    // A client that closes takes nothing back that it has sent; a server that closes ends it all.
    let mut requests = std::pin::pin!(requests);
    let mut replies = std::pin::pin!(replies);
    tokio::select! {
        outcome = &mut requests => { outcome?; replies.await }
        outcome = &mut replies => outcome,
    }
}

async fn requests(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    asked: mpsc::UnboundedSender<Pending>,
) -> io::Result<()> {
    let mut startup = vec![0; 4];
    from.read_exact(&mut startup).await?;
    let length = u32::from_be_bytes([startup[0], startup[1], startup[2], startup[3]]) as usize;
    startup.resize(length, 0);
    from.read_exact(&mut startup[4..]).await?;
    shared.pass(Direction::ToServer).await;
    to.write_all(&startup).await?;
    let _ = asked.send(None);
    let mut prepared = HashMap::new();
    loop {
        let (mut bytes, mut lines, mut executes) = (Vec::new(), Vec::new(), false);
        loop {
            let Some(message) = message(&mut from).await? else {
                return to.shutdown().await;
            };
            let body = &message[5..];
            match message[0] {
                b'P' => {
                    let (name, sql) = (text(body, 0), text(body, 1));
                    lines.push(sql.clone());
                    prepared.insert(name, sql);
                }
                b'B' => lines.extend(prepared.get(&text(body, 1)).cloned()),
                b'E' => executes = true,
                b'Q' => {
                    lines.push(text(body, 0));
                    executes = true;
                }
                _ => {}
            }
            bytes.extend_from_slice(&message);
            match message[0] {
                b'S' | b'Q' => break,
                // Passwords and the end have no reply of their own.
                b'p' | b'X' => {
                    to.write_all(&std::mem::take(&mut bytes)).await?;
                }
                _ => {}
            }
        }
        lines.dedup();
        let request = Request {
            sql: lines.join("\n"),
            executes,
        };
        let mut pending = None;
        match shared.look(request) {
            Some((Deed::Lose, _)) => return Err(io::ErrorKind::ConnectionAborted.into()),
            Some((Deed::Swallow(then), stage)) => pending = Some((then, stage)),
            Some((Deed::Hold, stage)) => {
                let mut stages = stage.subscribe();
                let _ = stages.wait_for(|stage| *stage == Stage::Released).await;
            }
            None => {}
        }
        shared.pass(Direction::ToServer).await;
        let _ = asked.send(pending);
        to.write_all(&bytes).await?;
    }
}

async fn replies(
    shared: &Shared,
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut asked: mpsc::UnboundedReceiver<Pending>,
) -> io::Result<()> {
    let mut current: Option<Pending> = None;
    let mut mute = false;
    while let Some(message) = message(&mut from).await? {
        if current.is_none() {
            current = asked.try_recv().ok();
        }
        shared.pass(Direction::ToClient).await;
        let swallowed = matches!(&current, Some(Some(_)));
        if !mute && !swallowed {
            // The client may be gone; what it sent still reaches the server.
            let _ = to.write_all(&message).await;
        }
        if message[0] == b'Z'
            && let Some(Some((then, stage))) = current.take()
        {
            stage.send_replace(Stage::Swallowed);
            match then {
                Swallow::Cut => return Err(io::ErrorKind::ConnectionAborted.into()),
                Swallow::Hang => mute = true,
            }
        }
    }
    Ok(())
}

/// One message with its head; `None` at the end.
async fn message(from: &mut OwnedReadHalf) -> io::Result<Option<Vec<u8>>> {
    let mut message = vec![0; 5];
    if from.read(&mut message[..1]).await? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut message[1..]).await?;
    let length = u32::from_be_bytes([message[1], message[2], message[3], message[4]]) as usize;
    message.resize(length + 1, 0);
    from.read_exact(&mut message[5..]).await?;
    Ok(Some(message))
}

/// The `n`-th text in a row of those that end with a zero.
fn text(body: &[u8], n: usize) -> String {
    let part = body.split(|byte| *byte == 0).nth(n).unwrap_or_default();
    String::from_utf8_lossy(part).into_owned()
}
