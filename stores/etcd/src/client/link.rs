//! The connection in use, to one of the servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::store::{Reason, StoreError};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::config::Config;
use super::failure::{self, Failure};
use super::proto::{AuthenticateRequest, LeaseKeepAliveResponse, StatusRequest};
use super::rpc::{Call, Rpc, Trouble};
use super::version;

/// The shortest and the longest pause between two rounds of connection attempts.
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
}

/// Holds the connection in use, and replaces it when it breaks.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) config: Config,
    state: Mutex<State>,
    connecting: tokio::sync::Mutex<()>,
    /// The number of the connection in use, 0 while there is none.
    in_use: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    link: Option<Link>,
    /// The server to try next.
    next: usize,
    made: u64,
    /// Why there is no connection, for messages.
    trouble: Option<String>,
    /// Whether the trouble was logged; it is logged once until a connection succeeds.
    told: bool,
}

impl Links {
    pub(crate) fn new(config: Config) -> Links {
        // Spreads processes over the servers.
        let next = fastrand::usize(..config.servers.len().max(1));
        let state = State {
            link: None,
            next,
            made: 0,
            trouble: None,
            told: false,
        };
        Links {
            config,
            state: Mutex::new(state),
            connecting: tokio::sync::Mutex::default(),
            in_use: watch::Sender::new(0),
        }
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

    /// Returns the connection in use, or connects. After an error nothing was done.
    pub(crate) async fn get(&self, deadline: Instant) -> Result<Link, StoreError> {
        if let Some(link) = self.current() {
            return Ok(link);
        }
        let unreachable = |_| StoreError::not_done(Reason::Unreachable, self.silence());
        let _one = timeout_at(deadline, self.connecting.lock())
            .await
            .map_err(unreachable)?;
        let mut pause = PAUSE.0;
        loop {
            if let Some(link) = self.current() {
                return Ok(link);
            }
            timeout_at(deadline, self.connect())
                .await
                .map_err(unreachable)??;
            if self.current().is_none() {
                let until = Instant::now() + pause.mul_f64(0.5 + fastrand::f64());
                if until >= deadline {
                    return Err(StoreError::not_done(Reason::Unreachable, self.silence()));
                }
                sleep_until(until).await;
                pause = (2 * pause).min(PAUSE.1);
            }
        }
    }

    fn current(&self) -> Option<Link> {
        self.state.lock().link.clone()
    }

    /// Tries each server once. Fails only if no server can be used and one of them refuses permanently.
    async fn connect(&self) -> Result<(), StoreError> {
        let mut refused = None;
        for _ in 0..self.config.servers.len() {
            let server = {
                let mut state = self.state.lock();
                let server = state.next % self.config.servers.len();
                state.next = (server + 1) % self.config.servers.len();
                &self.config.servers[server]
            };
            let connected = timeout(self.config.connect_timeout(), self.connect_to(server)).await;
            let error = match connected {
                Ok(Ok(rpc)) => {
                    self.connected(server, rpc);
                    return Ok(());
                }
                Ok(Err(error)) => error,
                Err(_) => {
                    let message = format!("etcd at {server} did not answer");
                    StoreError::not_done(Reason::Unreachable, message)
                }
            };
            let mut state = self.state.lock();
            state.trouble = Some(error.message.clone());
            if !std::mem::replace(&mut state.told, true) {
                tracing::warn!(%server, trouble = %error.message, "no connection to the lock store, trying again");
            }
            drop(state);
            if error.reason != Reason::Unreachable {
                refused.get_or_insert(error);
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// Connects to this server and checks that it can serve locks.
    pub(crate) async fn connect_to(&self, server: &str) -> Result<Rpc, StoreError> {
        let Config {
            login,
            allow_old_server,
            tls,
            ..
        } = &self.config;
        let failed = |trouble: Trouble| {
            let is_cut = tls.is_none() && !trouble.is_answer();
            let mut error = match trouble {
                Trouble::NotSent(message) => StoreError::unknown(format!("{server}: {message}")),
                Trouble::Status(status) => failure::of(status, server).error(),
            };
            if is_cut {
                error.message += ": if the server speaks TLS, use etcds:// instead of etcd://";
            }
            // No operation on a lock was sent.
            error.outcome = dlock::store::Outcome::NotDone;
            error
        };
        let channel = self.config.endpoint(server)?.connect().await.map_err(|error| {
            let advice = match tls.is_some() && failure::is_failed_handshake(&error) {
                true => {
                    ": the server does not speak TLS, or it closed the connection; without TLS use etcd://"
                }
                false => "",
            };
            let message = format!("etcd at {server}: {}{advice}", failure::describe(&error));
            StoreError::not_done(Reason::Unreachable, message).caused_by(error)
        })?;
        let mut rpc = Rpc::new(channel);
        if let Some(login) = login {
            let message = AuthenticateRequest {
                name: login.user.clone(),
                password: login.password.clone(),
            };
            let token = match rpc.call(message).await {
                Ok(reply) => reply.token,
                // The server has no authentication: no token is needed.
                Err(Trouble::Status(status))
                    if status.message().contains("authentication is not enabled") =>
                {
                    String::new()
                }
                Err(trouble) => return Err(failed(trouble)),
            };
            if !token.is_empty() {
                rpc = rpc
                    .logged_in(&token)
                    .map_err(|status| failed(Trouble::Status(status)))?;
            }
        }
        let status = match rpc.call(StatusRequest {}).await {
            Ok(status) => status,
            // Servers that tell this to administrators alone are new enough: etcd 3.6.
            Err(Trouble::Status(status)) if status.code() == tonic::Code::PermissionDenied => return Ok(rpc),
            Err(trouble) => return Err(failed(trouble)),
        };
        match version::check(&status.version) {
            Err(reason) if !allow_old_server => Err(StoreError::not_done(
                Reason::Refused,
                format!("{server}: {reason}. Update it, or accept that with allow_old_server=true"),
            )),
            _ => Ok(rpc),
        }
    }

    fn connected(&self, server: &str, rpc: Rpc) {
        let mut state = self.state.lock();
        state.made += 1;
        state.trouble = None;
        if std::mem::take(&mut state.told) {
            tracing::info!(%server, "connected to the lock store again");
        }
        state.link = Some(Link {
            rpc,
            address: server.into(),
            number: state.made,
            replies: Arc::default(),
        });
        self.in_use.send_replace(state.made);
    }

    /// Marks the connection as unusable: the next request connects to the next server.
    pub(crate) fn is_broken(&self, link: &Link, why: &str) {
        let mut state = self.state.lock();
        if state
            .link
            .as_ref()
            .is_some_and(|current| current.number == link.number)
        {
            state.link = None;
            state.trouble = Some(why.to_owned());
            self.in_use.send_replace(0);
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
        self.send(send, deadline).await
    }

    /// Renews a lease once.
    pub(crate) async fn keep_alive(
        &self,
        id: i64,
        deadline: Instant,
    ) -> Result<LeaseKeepAliveResponse, Failure> {
        let send = |rpc: Rpc| async move { rpc.keep_alive(id).await };
        self.send(send, deadline).await
    }

    async fn send<T, F>(&self, send: impl Fn(Rpc) -> F, deadline: Instant) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Trouble>>,
    {
        let mut failed: Option<StoreError> = None;
        loop {
            let link = match self.get(deadline).await {
                Ok(link) => link,
                Err(error) => return Err(Failure::Elsewhere(failed.unwrap_or(error))),
            };
            let before = link.replies.load(Ordering::Relaxed);
            let failure = match timeout_at(deadline, send(link.rpc.clone())).await {
                Ok(Ok(reply)) => {
                    link.replies.fetch_add(1, Ordering::Relaxed);
                    return Ok(reply);
                }
                Ok(Err(Trouble::NotSent(message))) => {
                    let message = format!("etcd at {}: {message}", link.address);
                    Failure::Elsewhere(StoreError::not_done(Reason::Unreachable, message))
                }
                Ok(Err(Trouble::Status(status))) => failure::of(status, &link.address),
                Err(_) => {
                    let error = StoreError::unknown(self.silence());
                    // If other requests got replies meanwhile, only this request is slow.
                    if link.replies.load(Ordering::Relaxed) == before {
                        self.is_broken(&link, &error.message);
                    }
                    return Err(Failure::Broken(error));
                }
            };
            match failure {
                Failure::Answered(..) => {
                    link.replies.fetch_add(1, Ordering::Relaxed);
                    return Err(failure);
                }
                Failure::Broken(error) => {
                    self.is_broken(&link, &error.message);
                    return Err(Failure::Broken(error));
                }
                Failure::Elsewhere(error) => {
                    self.is_broken(&link, &error.message);
                    let pause = Instant::now() + PAUSE.0.mul_f64(0.5 + fastrand::f64());
                    if pause >= deadline {
                        return Err(Failure::Elsewhere(error));
                    }
                    failed = Some(error);
                    sleep_until(pause).await;
                }
            }
        }
    }
}
