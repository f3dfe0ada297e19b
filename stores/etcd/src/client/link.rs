//! The connection in use, to one of the servers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::{Reason, StoreError};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;

use super::config::Config;
use super::failure::{self, Failure};
use super::proto::{LeaseKeepAliveResponse, RangeRequest};
use super::rpc::{Call, Rpc, Trouble};

/// The shortest and the longest pause before a request is sent again, and between connections that answer no request.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));

/// One connection.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    pub(crate) rpc: Rpc,
    pub(crate) address: Arc<str>,
    /// Distinguishes connections.
    number: u64,
    /// How many replies have arrived.
    replies: Arc<AtomicU64>,
    /// How many of them are to requests that the server itself has carried out.
    carried_out: Arc<AtomicU64>,
}

/// How many replies have arrived on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    replies: u64,
    carried_out: u64,
}

impl Link {
    fn counts(&self) -> Counts {
        Counts {
            replies: self.replies.load(Ordering::Relaxed),
            carried_out: self.carried_out.load(Ordering::Relaxed),
        }
    }
}

/// Holds the connection in use, and replaces it when it breaks.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) config: Config,
    /// What a server is asked for to see whether it carries requests out.
    key: Vec<u8>,
    state: Mutex<State>,
    /// The number of the connection in use, 0 while there is none.
    in_use: watch::Sender<u64>,
    /// Serves the connections, also those that a call from another runtime needs.
    runtime: runtime::Handle,
    own: Weak<Links>,
}

/// A round of connection attempts. All callers wait for it, and it outlives them; it ends with the store.
type Round = Shared<BoxFuture<'static, Result<(), StoreError>>>;

#[derive(Debug)]
struct State {
    link: Option<Link>,
    /// The round that runs while there is no connection.
    round: Option<Round>,
    /// The next pause between connections; the shortest one after a reply.
    pause: Duration,
    /// Whether the last connection was left before a request on it had a reply.
    is_useless: bool,
    /// The server to try next.
    next: usize,
    made: u64,
    /// Why there is no connection, for messages.
    trouble: Option<String>,
    /// Whether the trouble was logged; it is logged once until a connection succeeds.
    told: bool,
    /// The comparison of the server with another one, which ends with the store.
    comparison: Option<AbortOnDropHandle<()>>,
}

impl State {
    /// Whether this connection is in use.
    fn uses(&self, link: &Link) -> bool {
        (self.link.as_ref()).is_some_and(|current| current.number == link.number)
    }
}

impl Links {
    /// Must be called in the runtime that serves the store. The client has the right to read the key.
    pub(crate) fn new(config: Config, key: impl Into<Vec<u8>>) -> Arc<Links> {
        // Spreads processes over the servers.
        let next = fastrand::usize(..config.servers.len().max(1));
        let state = State {
            link: None,
            round: None,
            pause: PAUSE.0,
            is_useless: false,
            next,
            made: 0,
            trouble: None,
            told: false,
            comparison: None,
        };
        Arc::new_cyclic(|own| Links {
            config,
            key: key.into(),
            state: Mutex::new(state),
            in_use: watch::Sender::new(0),
            runtime: runtime::Handle::current(),
            own: own.clone(),
        })
    }

    /// Describes why no reply arrived in time.
    pub(crate) fn silence(&self) -> String {
        let trouble = self.state.lock().trouble.clone();
        trouble.unwrap_or_else(|| {
            let Config { timeout, .. } = self.config;
            format!(
                "etcd at {} did not answer within {timeout:?}",
                self.config.address()
            )
        })
    }

    /// Describes why the turn of an operation did not come in time.
    pub(crate) fn crowd(&self) -> String {
        let trouble = self.state.lock().trouble.clone();
        trouble.unwrap_or_else(|| "the operations on this key before it took too long".to_owned())
    }

    /// Returns the connection in use, or waits for one. After an error nothing was done.
    pub(crate) async fn get(&self, deadline: Instant) -> Result<Link, StoreError> {
        loop {
            let round = match self.link_or_round() {
                Ok(link) => return Ok(link),
                Err(round) => round,
            };
            match timeout_at(deadline, round).await {
                Ok(ended) => ended?,
                Err(_) => return Err(StoreError::not_done(Reason::Unreachable, self.silence())),
            }
        }
    }

    /// Returns the connection in use, or the round that runs; starts one if none does.
    fn link_or_round(&self) -> Result<Link, Round> {
        let mut state = self.state.lock();
        if let Some(link) = &state.link {
            return Ok(link.clone());
        }
        // A round that panicked has not said that it is over.
        let running = state.round.take().filter(|round| round.peek().is_none());
        Err(state
            .round
            .insert(running.unwrap_or_else(|| self.round()))
            .clone())
    }

    fn round(&self) -> Round {
        let round = connect(self.own.clone(), self.config.clone());
        let round = AbortOnDropHandle::new(self.runtime.spawn(round));
        let ended = |ended: Result<_, _>| {
            let message = "the runtime that served the store has ended";
            ended.unwrap_or_else(|_| Err(StoreError::not_done(Reason::Unreachable, message)))
        };
        round.map(ended).boxed().shared()
    }

    /// Returns the server to try next.
    fn next_server(&self) -> String {
        let mut state = self.state.lock();
        let server = state.next % self.config.servers.len();
        state.next = (server + 1) % self.config.servers.len();
        self.config.servers[server].clone()
    }

    fn not_connected(&self, server: &str, error: &StoreError) {
        let mut state = self.state.lock();
        state.trouble = Some(error.message.clone());
        if !std::mem::replace(&mut state.told, true) {
            tracing::warn!(%server, trouble = %error.message, "no connection to the lock store, trying again");
        }
    }

    /// Returns the pause between two connections.
    fn pause(&self) -> Duration {
        let mut state = self.state.lock();
        let pause = state.pause;
        state.pause = (2 * pause).min(PAUSE.1);
        about(pause)
    }

    /// Returns the pause before the next connection, if the last one answered no request.
    fn pause_after_useless(&self) -> Option<Duration> {
        let is_useless = std::mem::take(&mut self.state.lock().is_useless);
        is_useless.then(|| self.pause())
    }

    fn connected(&self, server: &str, rpc: Rpc) {
        let mut state = self.state.lock();
        state.trouble = None;
        state.round = None;
        if std::mem::take(&mut state.told) {
            tracing::info!(%server, "connected to the lock store again");
        }
        self.uses(&mut state, server, rpc);
    }

    fn uses(&self, state: &mut State, server: &str, rpc: Rpc) {
        state.made += 1;
        state.link = Some(Link {
            rpc,
            address: server.into(),
            number: state.made,
            replies: Arc::default(),
            carried_out: Arc::default(),
        });
        self.in_use.send_replace(state.made);
    }

    /// Compares the server with another one in the background: it does not carry requests out, but answers others, such as
    /// those that it passes on to the leader.
    fn compare(&self, link: &Link) {
        let mut state = self.state.lock();
        let is_running = (state.comparison.as_ref()).is_some_and(|running| !running.is_finished());
        if self.config.servers.len() > 1 && state.uses(link) && !is_running {
            let probe = RangeRequest {
                key: self.key.clone(),
                ..RangeRequest::default()
            };
            let comparison = compare(self.own.clone(), self.config.clone(), link.clone(), probe);
            state.comparison = Some(AbortOnDropHandle::new(self.runtime.spawn(comparison)));
        }
    }

    /// Uses another server, unless this connection was left already.
    fn change(&self, from: &Link, server: &str, rpc: Rpc) {
        let mut state = self.state.lock();
        if state.uses(from) {
            tracing::warn!(
                server = %from.address, %server,
                "a server of the lock store carries out no requests, and this client changes to another one"
            );
            self.uses(&mut state, server, rpc);
        }
    }

    /// Marks the connection as unusable: the next request connects to the next server.
    pub(crate) fn is_broken(&self, link: &Link, why: &str) {
        let mut state = self.state.lock();
        if state.uses(link) {
            state.link = None;
            state.is_useless = link.replies.load(Ordering::Relaxed) == 0;
            state.trouble = Some(why.to_owned());
            self.in_use.send_replace(0);
        }
    }

    /// Records a reply to a request.
    fn replied(&self, link: &Link, is_passed_on: bool) {
        if !is_passed_on {
            link.carried_out.fetch_add(1, Ordering::Relaxed);
        }
        if link.replies.fetch_add(1, Ordering::Relaxed) == 0 {
            self.state.lock().pause = PAUSE.0;
        }
    }

    /// Waits until this connection is no longer in use.
    pub(crate) async fn is_left(&self, link: &Link) {
        let mut in_use = self.in_use.subscribe();
        let _ = in_use.wait_for(|number| *number != link.number).await;
    }

    /// Returns the number of the connection in use, 0 if there is none.
    pub(crate) fn number(&self) -> u64 {
        *self.in_use.borrow()
    }

    /// Reports the number of the connection in use whenever it changes.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.in_use.subscribe()
    }

    /// Sends a request once, and again only if it was certainly not carried out.
    pub(crate) async fn call<C: Call>(&self, message: C, deadline: Instant) -> Result<C::Reply, Failure> {
        let send = |rpc: Rpc| {
            let message = message.clone();
            async move { rpc.call(message).await }
        };
        self.send(send, C::IS_PASSED_ON, deadline).await
    }

    /// Renews a lease once.
    pub(crate) async fn keep_alive(
        &self,
        id: i64,
        deadline: Instant,
    ) -> Result<LeaseKeepAliveResponse, Failure> {
        let send = |rpc: Rpc| async move { rpc.keep_alive(id).await };
        self.send(send, true, deadline).await
    }

    async fn send<T, F>(
        &self,
        send: impl Fn(Rpc) -> F,
        is_passed_on: bool,
        deadline: Instant,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Trouble>>,
    {
        let mut failed: Option<StoreError> = None;
        let mut pause = PAUSE.0;
        loop {
            let link = match self.get(deadline).await {
                Ok(link) => link,
                Err(error) => return Err(Failure::Elsewhere(failed.unwrap_or(error))),
            };
            let (before, sent) = (link.counts(), Instant::now());
            let failure = match timeout_at(deadline, send(link.rpc.clone())).await {
                Ok(Ok(reply)) => {
                    self.replied(&link, is_passed_on);
                    return Ok(reply);
                }
                Ok(Err(Trouble::NotSent(message))) => {
                    let message = format!("etcd at {}: {message}", link.address);
                    Failure::Elsewhere(StoreError::not_done(Reason::Unreachable, message))
                }
                Ok(Err(Trouble::Status(status))) => {
                    failure::of(status, &link.address, self.config.login.is_some())
                }
                Err(_) => {
                    let error = StoreError::unknown(self.silence());
                    // If it was sent just before its deadline, or other requests got replies meanwhile, the connection
                    // may be good.
                    let is_long = sent.elapsed() >= self.config.timeout / 2;
                    let now = link.counts();
                    if is_long && now == before {
                        self.is_broken(&link, &error.message);
                    } else if is_long && !is_passed_on && now.carried_out == before.carried_out {
                        self.compare(&link);
                    }
                    return Err(Failure::Broken(error));
                }
            };
            let (error, is_busy) = match failure {
                Failure::Answered(..) => {
                    self.replied(&link, is_passed_on);
                    return Err(failure);
                }
                Failure::Broken(error) => {
                    self.is_broken(&link, &error.message);
                    return Err(Failure::Broken(error));
                }
                Failure::Elsewhere(error) => {
                    self.is_broken(&link, &error.message);
                    (error, false)
                }
                Failure::Busy(error) => {
                    // It says so without carrying anything out.
                    self.replied(&link, true);
                    (error, true)
                }
            };
            let again = Instant::now() + about(pause);
            if again >= deadline {
                if is_busy {
                    self.compare(&link);
                }
                return Err(Failure::Elsewhere(error));
            }
            failed = Some(error);
            pause = (2 * pause).min(PAUSE.1);
            sleep_until(again).await;
        }
    }
}

/// Varies a pause, so that clients do not go on together.
fn about(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + fastrand::f64())
}

/// Tries each server once, after a pause if the last connection was useless, and pauses if none can be used. Fails if one of
/// them refuses permanently; once there was a connection only if all of them do, since one that is away may come back.
async fn connect(links: Weak<Links>, config: Config) -> Result<(), StoreError> {
    if let Some(pause) = links.upgrade().and_then(|links| links.pause_after_useless()) {
        sleep(pause).await;
    }
    let (mut refused, mut all_refuse) = (None, true);
    for _ in 0..config.servers.len() {
        let Some(server) = links.upgrade().map(|links| links.next_server()) else {
            return Ok(());
        };
        let connected = timeout(config.connect_timeout(), config.connect(&server)).await;
        let connected = connected.unwrap_or_else(|_| {
            let message = format!("etcd at {server} did not answer");
            Err(StoreError::not_done(Reason::Unreachable, message))
        });
        let Some(links) = links.upgrade() else {
            return Ok(());
        };
        let error = match connected {
            Ok(rpc) => {
                links.connected(&server, rpc);
                return Ok(());
            }
            Err(error) => error,
        };
        links.not_connected(&server, &error);
        match error.reason {
            Reason::Unreachable => all_refuse = false,
            _ => refused = refused.or(Some(error)),
        }
    }
    let was_connected = links.upgrade().is_some_and(|links| links.state.lock().made > 0);
    let refused = refused.filter(|_| all_refuse || !was_connected);
    if let (None, Some(pause)) = (&refused, links.upgrade().map(|links| links.pause())) {
        sleep(pause).await;
    }
    if let Some(links) = links.upgrade() {
        links.state.lock().round = None;
    }
    refused.map_or(Ok(()), Err)
}

/// Changes to another server if that one carries a request out while this one does not. So neither a request that is slow
/// by itself nor a cluster that is slow as a whole costs the connection.
async fn compare(links: Weak<Links>, config: Config, link: Link, probe: RangeRequest) {
    let carries_out = async |rpc: &Rpc, address: &str| match rpc.call(probe.clone()).await {
        Ok(_) => true,
        Err(Trouble::NotSent(_)) => false,
        Err(Trouble::Status(status)) => {
            let failure = failure::of(status, address, config.login.is_some());
            matches!(failure, Failure::Answered(..))
        }
    };
    let goes_on = async {
        if !carries_out(&link.rpc, &link.address).await {
            std::future::pending().await
        }
    };
    let before = link.counts().carried_out;
    let changes = async {
        sleep(config.timeout).await;
        for _ in 0..config.servers.len() {
            let Some(server) = links.upgrade().map(|links| links.next_server()) else {
                return;
            };
            if *server != *link.address
                && let Ok(Ok(rpc)) = timeout(config.connect_timeout(), config.connect(&server)).await
                && let Ok(true) = timeout(config.timeout, carries_out(&rpc, &server)).await
                && link.counts().carried_out == before
            {
                if let Some(links) = links.upgrade() {
                    links.change(&link, &server, rpc);
                }
                return;
            }
        }
    };
    tokio::select! {
        biased;
        () = goes_on => {}
        () = changes => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;
    use tokio::io::AsyncReadExt;
    use tokio::net::{TcpListener, TcpStream};

    const MS: Duration = Duration::from_millis(1);

    fn links(server: impl ToString, timeout: Duration) -> Arc<Links> {
        let config = Config {
            servers: vec![server.to_string()],
            login: None,
            tls: None,
            timeout,
            allow_old_server: false,
        };
        Links::new(config, "dlock/")
    }

    /// A server that accepts connections and never answers.
    async fn mute() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        (listener, addr)
    }

    /// Waits until the client has closed the connection.
    async fn is_closed(mut connection: TcpStream) {
        let mut waste = [0; 1024];
        while matches!(connection.read(&mut waste).await, Ok(1..)) {}
    }

    #[tokio::test]
    async fn attempt_to_connect_outlives_its_callers_and_ends_with_the_links() {
        let (listener, addr) = mute().await;
        let links = links(addr, Duration::from_secs(60));
        for _ in 0..10 {
            let error = links.get(Instant::now() + 10 * MS).await.unwrap_err();
            assert_eq!(error.reason, Reason::Unreachable, "{error}");
        }
        let (connection, _) = listener.accept().await.unwrap();
        let another = timeout(100 * MS, listener.accept()).await;
        assert!(another.is_err(), "each caller made its own attempt");
        let weak = Arc::downgrade(&links);
        drop(links);
        assert!(weak.upgrade().is_none(), "the attempt keeps the links alive");
        // Long before its time limit.
        timeout(Duration::from_secs(2), is_closed(connection))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn attempt_that_hangs_is_told_as_the_reason() {
        let (listener, addr) = mute().await;
        let links = links(addr, 100 * MS);
        links.state.lock().trouble = Some("an older attempt failed".to_owned());
        links.get(Instant::now() + 50 * MS).await.unwrap_err();
        let error = links.get(Instant::now() + 300 * MS).await.unwrap_err();
        assert!(error.message.contains("did not answer"), "{error}");
        drop(listener);
    }

    #[tokio::test]
    async fn callers_of_one_attempt_share_its_refusal() {
        let links = links("no host", 100 * MS);
        let deadline = Instant::now() + Duration::from_secs(60);
        let (first, second) = tokio::join!(links.get(deadline), links.get(deadline));
        for error in [first.unwrap_err(), second.unwrap_err()] {
            assert_eq!(error.reason, Reason::WrongUrl, "{error}");
        }
    }
}
