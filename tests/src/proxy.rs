//! A network between a client and its server that fails exactly where a test says.
//!
//! The proxy forwards whole commands and whole replies and knows which reply answers which command. So a test can lose
//! the answer of the third script call, or keep a release in the network until its client is long gone, and can go
//! through all such moments one by one: arm the fault for k = 1, 2, …, until it no longer [fires](Fault::fired).
//!
//! It runs in a thread of its own. Neither a test that blocks its thread nor one that drops its runtime stops it.
//! From `PSYNC` or `SYNC` on a connection is a replica's: it is passed on as it is, and only the faults of the network as a
//! whole act on it. `CLIENT REPLY` and `MONITOR` break the pairing of commands with replies: they pass, but the faults that act on
//! replies miss their mark on such a connection.

mod fault;
mod pairing;
mod ports;
mod shared;
mod wire;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use fault::{Fault, Held, Sent};

use crate::network::{Direction, Door, Swallow};
use crate::resp::Command;
use fault::Deed;
use shared::Shared;
use wire::take_in;

/// What the proxy knows of a connection.
#[derive(Debug, Clone)]
pub struct ConnectionInfo {
    /// Its number, counted from 1.
    pub id: u64,
    /// The name that the client gave it by `CLIENT SETNAME`.
    pub name: Option<String>,
    /// Whether it ever subscribed to a channel.
    pub subscriber: bool,
    /// How many commands were sent on it.
    pub commands: u64,
}

/// A TCP proxy before a Redis or Valkey server. All connections through it end when it is dropped.
///
/// Faults of the network as a whole (delays, blocks, refusals) hold from the call on until they are taken back, for
/// open connections and new ones. Faults of single commands ([`hold`](Self::hold), [`swallow`](Self::swallow),
/// [`lose`](Self::lose)) are counted over all connections from the call on, and strike once.
///
/// A client that closes its connection does not take back what it has sent: that still reaches the server, in order,
/// as soon as nothing delays, blocks or holds it.
pub struct Proxy {
    shared: Arc<Shared>,
    door: Door,
}

impl Deref for Proxy {
    type Target = Door;

    fn deref(&self) -> &Door {
        &self.door
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy")
            .field("port", &self.port())
            .field("upstream", &self.shared.state.lock().upstream)
            .field("connections", &self.connections())
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// Starts a proxy that forwards to `upstream`, usually a [`Process::addr`](crate::Process::addr).
    ///
    /// # Panics
    /// When it cannot listen.
    pub fn start(upstream: SocketAddr) -> Self {
        let shared = Arc::new(Shared::new(upstream));
        let (inner, weather) = (shared.clone(), shared.weather.clone());
        let door = Door::open("dlock-tests-proxy", weather, move |client, mute| {
            take_in(&inner, client, mute);
        });
        Self { shared, door }
    }

    /// The URL to connect to, without user and password.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// The URL to connect to as `user`; the empty user is the default one.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@{}", self.addr())
    }

    /// Sends new connections to another server.
    pub fn retarget(&self, upstream: SocketAddr) {
        self.shared.state.lock().upstream = upstream;
    }

    /// Has replies name other ports of 127.0.0.1 than the servers do, by pairs of the real port and the told one: so
    /// clients that are told of other servers come to their proxies. All ports have five digits.
    pub fn tell_ports(&self, ports: HashMap<u16, u16>) {
        self.shared.state.lock().ports = Arc::new(ports);
    }

    /// [`block`](crate::Weather::block) for one connection.
    pub fn block_connection(&self, id: u64, direction: Direction) {
        self.set_blocked(id, direction, true);
    }

    fn set_blocked(&self, id: u64, direction: Direction, blocked: bool) {
        if let Some(conn) = self.shared.state.lock().connections.get(&id) {
            conn.set_blocked(direction, blocked);
        }
    }

    /// Closes all connections on both sides, and says how many. New ones are still accepted.
    ///
    /// Commands that [`hold`](Self::hold) keeps back, and what stands behind them, still reach the server.
    pub fn cut(&self) -> usize {
        self.end_all(false)
    }

    /// [`cut`](Self::cut), but clients see a reset instead of a close.
    pub fn reset(&self) -> usize {
        self.end_all(true)
    }

    fn end_all(&self, reset: bool) -> usize {
        let connections: Vec<_> = self.shared.state.lock().connections.values().cloned().collect();
        let open = connections.iter().filter(|conn| conn.is_open()).count();
        for conn in connections {
            conn.reset.store(reset, Ordering::SeqCst);
            conn.cut();
        }
        open
    }

    /// Closes one connection on both sides.
    pub fn cut_connection(&self, id: u64) {
        let conn = self.shared.state.lock().connections.get(&id).cloned();
        if let Some(conn) = conn {
            conn.cut();
        }
    }

    /// Keeps the `k`-th command from now on that matches from reaching the server, and with it all that its connection
    /// sends later, until the handle [releases](Held::release) it. If the client has gone by then, the server still gets
    /// the bytes on the same connection.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn hold(&self, k: u64, matches: impl Fn(&Command) -> bool + Send + 'static) -> Held {
        let (rule, tracker) = self.shared.arm(k, Deed::Hold, Box::new(matches));
        Held {
            shared: self.shared.clone(),
            rule,
            tracker,
        }
    }

    /// Swallows the reply to the `k`-th command from now on that matches: the server has executed it, the client
    /// does not learn.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn swallow(
        &self,
        k: u64,
        then: Swallow,
        matches: impl Fn(&Command) -> bool + Send + 'static,
    ) -> Fault {
        let (_, tracker) = self.shared.arm(k, Deed::Swallow(then), Box::new(matches));
        Fault { tracker }
    }

    /// Cuts the connection before the `k`-th command from now on that matches: the server never gets it, nor anything
    /// after it.
    ///
    /// # Panics
    /// When `k` is 0.
    pub fn lose(&self, k: u64, matches: impl Fn(&Command) -> bool + Send + 'static) -> Fault {
        let (_, tracker) = self.shared.arm(k, Deed::Lose, Box::new(matches));
        Fault { tracker }
    }

    /// Disarms all faults of single commands that have not struck yet, and ends all others. What is held back stays so.
    ///
    /// # Panics
    /// When its port was taken while connections were refused.
    pub fn heal(&self) {
        self.shared.state.lock().rules.clear();
        for conn in self.shared.state.lock().connections.values() {
            conn.set_blocked(Direction::Both, false);
        }
        self.door.heal();
    }

    /// How many connections were made so far.
    pub fn connections_seen(&self) -> u64 {
        self.shared.state.lock().connections_seen
    }

    /// How many connections clients have open.
    pub fn connections_open(&self) -> usize {
        self.shared
            .state
            .lock()
            .connections
            .values()
            .filter(|conn| conn.is_open())
            .count()
    }

    /// The connections that clients have open.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        let state = self.shared.state.lock();
        let open = state.connections.values().filter(|conn| conn.is_open());
        open.map(|conn| ConnectionInfo {
            id: conn.id,
            name: conn.name.lock().clone(),
            subscriber: conn.subscriber.load(Ordering::Relaxed),
            commands: conn.commands.load(Ordering::Relaxed),
        })
        .collect()
    }

    /// How many commands clients sent so far.
    pub fn commands_seen(&self) -> u64 {
        self.shared.state.lock().total
    }

    /// The commands that clients sent, in the order of their arrival (at most the last million), whether or not they
    /// reached the server.
    pub fn commands(&self) -> Vec<Sent> {
        self.shared.state.lock().log.iter().cloned().collect()
    }

    /// How many of [`commands`](Self::commands) match.
    pub fn count(&self, matches: impl Fn(&Command) -> bool) -> usize {
        self.shared
            .state
            .lock()
            .log
            .iter()
            .filter(|sent| matches(&sent.command))
            .count()
    }

    /// Empties the list of commands. The counts of connections and commands go on.
    pub fn forget(&self) {
        self.shared.state.lock().log.clear();
    }

    /// What arrived that is not the protocol; each time the connection was cut.
    pub fn malformed(&self) -> Vec<String> {
        self.shared.state.lock().malformed.clone()
    }
}
