//! A network between a client and its server that fails exactly where a test says.
//!
//! Every proxy has a [`Door`] and behind it a [`Weather`]. A [`Gateway`] is a whole proxy, for a [`Protocol`] that knows which reply
//! answers which request. It runs in a thread of its own, and does not speak TLS.

mod door;
mod fault;
mod stream;
mod weather;

use std::fmt::{self, Debug};
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

pub use door::Door;
pub(crate) use fault::Deed;
pub use fault::{NetFault, Swallow};
use fault::{Rules, Undelivered};
pub(crate) use stream::{Asks, Dialect, Stream, Unit};
pub use weather::{Direction, Weather};

/// What clients and server speak.
pub trait Protocol: Sized + Send + Sync + 'static {
    /// What a client asks for.
    type Request: Debug + Clone + Send + 'static;

    /// Forwards a connection until it ends, or until [`Gateway::cut`]. What it holds back lives on without its client.
    fn forward(
        network: Arc<Network<Self>>,
        client: TcpStream,
        cut: CancellationToken,
    ) -> impl Future<Output = ()> + Send;

    /// Whether it is a step of a lock.
    fn is_step(request: &Self::Request) -> bool;
}

/// What a proxy and its connections share.
pub struct Network<P: Protocol> {
    pub(crate) upstream: SocketAddr,
    pub(crate) weather: Arc<Weather>,
    rules: Rules<P::Request>,
    log: Mutex<Vec<P::Request>>,
    open: AtomicUsize,
    /// Ends every connection that is open.
    cut: Mutex<CancellationToken>,
}

impl<P: Protocol> Network<P> {
    /// Notes a request, and says what is to become of it.
    pub(crate) fn strike(&self, request: P::Request) -> Option<(Deed, NetFault)> {
        let struck = self.rules.strike(&request);
        self.log.lock().push(request);
        struck
    }

    /// A connection from its acceptance to its end.
    async fn serve(self: Arc<Self>, client: TcpStream, mute: bool) {
        let cut = self.cut.lock().clone();
        self.open.fetch_add(1, Ordering::SeqCst);
        match mute {
            true => {
                tokio::select! {
                    () = cut.cancelled() => {}
                    () = ends(client) => {}
                }
            }
            false => {
                let _ = client.set_nodelay(true);
                P::forward(self.clone(), client, cut).await;
            }
        }
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn ends(mut client: TcpStream) {
    let mut waste = [0; 4096];
    while matches!(client.read(&mut waste).await, Ok(1..)) {}
}

impl<P: Protocol> Debug for Network<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network")
            .field("upstream", &self.upstream)
            .finish_non_exhaustive()
    }
}

/// A proxy before a server. All connections through it end when it is dropped.
///
/// Faults of single requests are counted over all connections from the call on, and strike once.
pub struct Gateway<P: Protocol> {
    network: Arc<Network<P>>,
    door: Door,
}

impl<P: Protocol> Debug for Gateway<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway")
            .field("addr", &self.addr())
            .finish_non_exhaustive()
    }
}

impl<P: Protocol> Deref for Gateway<P> {
    type Target = Door;

    fn deref(&self) -> &Door {
        &self.door
    }
}

impl<P: Protocol> Gateway<P> {
    /// Starts a proxy that forwards to `upstream`.
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> Self {
        let network = Arc::new(Network {
            upstream,
            weather: Arc::default(),
            rules: Rules::default(),
            log: Mutex::default(),
            open: AtomicUsize::new(0),
            cut: Mutex::default(),
        });
        let (inner, weather) = (network.clone(), network.weather.clone());
        let door = Door::open("dlock-tests-net", weather, move |client, mute| {
            tokio::spawn(inner.clone().serve(client, mute));
        });
        Gateway { network, door }
    }

    /// Closes all connections. New ones are accepted. What is [held](Self::hold) back still reaches the server.
    pub fn cut(&self) {
        std::mem::take(&mut *self.network.cut.lock()).cancel();
    }

    /// Swallows the reply to the `k`-th request from now on that matches: the server has done it, the client does
    /// not learn.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn swallow(
        &self,
        k: u64,
        then: Swallow,
        matches: impl Fn(&P::Request) -> bool + Send + 'static,
    ) -> NetFault {
        self.network.rules.arm(k, Deed::Swallow(then), matches)
    }

    /// Cuts the connection before the `k`-th request from now on that matches: the server never gets it.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn lose(&self, k: u64, matches: impl Fn(&P::Request) -> bool + Send + 'static) -> NetFault {
        self.network.rules.arm(k, Deed::Lose, matches)
    }

    /// Keeps the `k`-th request from now on that matches, and what its connection sends later, until it is
    /// [released](NetFault::release): also when its client is gone by then.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn hold(&self, k: u64, matches: impl Fn(&P::Request) -> bool + Send + 'static) -> NetFault {
        self.network.rules.arm(k, Deed::Hold, matches)
    }

    /// Disarms all faults of single requests that have not struck yet, and ends all others. What is held back stays so.
    pub fn heal(&self) {
        self.network.rules.clear();
        self.door.heal();
    }

    /// The requests that clients sent, whether or not they reached the server.
    pub fn requests(&self) -> Vec<P::Request> {
        self.network.log.lock().clone()
    }

    /// How many of them match.
    pub fn count(&self, matches: impl Fn(&P::Request) -> bool) -> usize {
        self.network
            .log
            .lock()
            .iter()
            .filter(|request| matches(request))
            .count()
    }

    /// Empties the list of requests.
    pub fn forget(&self) {
        self.network.log.lock().clear();
    }

    /// How many connections clients have open.
    pub fn connections_open(&self) -> usize {
        self.network.open.load(Ordering::SeqCst)
    }
}
