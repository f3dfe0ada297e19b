//! A network before a database that fails exactly where a test says.
//!
//! The proxy forwards whole requests and knows which reply answers which. Of PostgreSQL it knows the SQL of prepared
//! statements too, so that a test can lose the reply to the second `COMMIT`. It runs in a thread of its own, and does not
//! speak TLS.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{Direction, Swallow, mysql, postgres};

/// How long a test waits for a fault to strike.
const PATIENCE: Duration = Duration::from_secs(60);

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
pub(crate) enum Deed {
    Swallow(Swallow),
    Lose,
    Hold,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Armed,
    Caught,
    Released,
    Swallowed,
}

/// What clients and server speak.
#[derive(Debug, Clone, Copy)]
enum Dialect {
    Postgres,
    Mysql,
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

pub(crate) struct Shared {
    pub(crate) upstream: SocketAddr,
    dialect: Dialect,
    rules: Mutex<Vec<Rule>>,
    log: Mutex<Vec<Request>>,
    weather: watch::Sender<Weather>,
    refusing: watch::Sender<bool>,
    /// Ends every connection that is open.
    cut: Mutex<CancellationToken>,
    /// Closes every connection that is open towards its client.
    cut_clients: Mutex<CancellationToken>,
}

/// A fault of one request. It stays armed when this is dropped.
#[derive(Debug, Clone)]
pub struct SqlFault(watch::Sender<Stage>);

impl SqlFault {
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
pub struct SqlProxy {
    shared: Arc<Shared>,
    addr: SocketAddr,
    ended: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for SqlProxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqlProxy")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl SqlProxy {
    /// Starts a proxy that forwards to `upstream`, a [`Postgres::addr`](postgres::Postgres::addr).
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> SqlProxy {
        SqlProxy::start_for(upstream, Dialect::Postgres)
    }

    /// The same before MySQL or MariaDB, a [`Mysql::addr`](mysql::Mysql::addr).
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start_mysql(upstream: SocketAddr) -> SqlProxy {
        SqlProxy::start_for(upstream, Dialect::Mysql)
    }

    fn start_for(upstream: SocketAddr, dialect: Dialect) -> SqlProxy {
        let shared = Arc::new(Shared {
            upstream,
            dialect,
            rules: Mutex::default(),
            log: Mutex::default(),
            weather: watch::Sender::default(),
            refusing: watch::Sender::default(),
            cut: Mutex::default(),
            cut_clients: Mutex::default(),
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
        SqlProxy {
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

    /// Closes all connections towards the clients. What these have sent still reaches the server.
    pub fn cut_clients(&self) {
        std::mem::take(&mut *self.shared.cut_clients.lock()).cancel();
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
    ) -> SqlFault {
        self.arm(k, Deed::Swallow(then), matches)
    }

    /// Cuts the connection before the `k`-th request from now on that matches: the server never gets it.
    pub fn lose(&self, k: u64, matches: impl Fn(&Request) -> bool + Send + 'static) -> SqlFault {
        self.arm(k, Deed::Lose, matches)
    }

    /// Keeps the `k`-th request from now on that matches, and what its connection sends later, until it is
    /// [released](SqlFault::release): also when its client is gone by then.
    pub fn hold(&self, k: u64, matches: impl Fn(&Request) -> bool + Send + 'static) -> SqlFault {
        self.arm(k, Deed::Hold, matches)
    }

    fn arm(&self, k: u64, deed: Deed, matches: impl Fn(&Request) -> bool + Send + 'static) -> SqlFault {
        assert!(k > 0, "the first request that matches is k = 1");
        let stage = watch::Sender::new(Stage::Armed);
        self.shared.rules.lock().push(Rule {
            left: k,
            matches: Box::new(matches),
            deed,
            stage: stage.clone(),
        });
        SqlFault(stage)
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

impl Drop for SqlProxy {
    fn drop(&mut self) {
        self.ended.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(shared: Arc<Shared>, listener: TcpListener) {
    while let Ok((client, _)) = listener.accept().await {
        if *shared.refusing.borrow() {
            continue;
        }
        let (cut, shared) = (shared.cut.lock().clone(), shared.clone());
        tokio::spawn(async move {
            let forward = async {
                match shared.dialect {
                    Dialect::Postgres => postgres::wire::forward(&shared, client).await,
                    Dialect::Mysql => mysql::wire::forward(&shared, client).await,
                }
            };
            tokio::select! {
                () = cut.cancelled() => {}
                _ = forward => {}
            }
        });
    }
}

impl Shared {
    /// Cancelled when all connections are closed towards their clients.
    pub(crate) fn cut_clients(&self) -> CancellationToken {
        self.cut_clients.lock().clone()
    }

    /// Logs a request, and says what is to become of it.
    pub(crate) fn look(&self, request: Request) -> Option<(Deed, watch::Sender<Stage>)> {
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

    pub(crate) async fn pass(&self, direction: Direction) {
        let delay = self.weather.borrow().delay;
        if direction == Direction::ToServer && !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut weather = self.weather.subscribe();
        let _ = weather.wait_for(|weather| !weather.blocked).await;
    }
}
