//! What the proxy's handle and its connections share.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::fault::{Deed, Progress, Rule, Sent, Tracker};
use crate::network::{Direction, Weather};
use crate::resp::Command;

/// How many commands are kept for asserts; the oldest go first.
const LOG_LIMIT: usize = 1_000_000;

pub(super) struct State {
    pub(super) rules: Vec<Rule>,
    pub(super) next_rule: u64,
    pub(super) log: VecDeque<Sent>,
    pub(super) total: u64,
    pub(super) connections: BTreeMap<u64, Arc<Conn>>,
    pub(super) connections_seen: u64,
    pub(super) malformed: Vec<String>,
    pub(super) upstream: SocketAddr,
    pub(super) ports: Arc<HashMap<u16, u16>>,
}

pub(super) struct Shared {
    pub(super) weather: Arc<Weather>,
    pub(super) state: Mutex<State>,
}

impl Shared {
    pub(super) fn new(upstream: SocketAddr) -> Self {
        Self {
            weather: Arc::default(),
            state: Mutex::new(State {
                rules: Vec::new(),
                next_rule: 1,
                log: VecDeque::new(),
                total: 0,
                connections: BTreeMap::new(),
                connections_seen: 0,
                malformed: Vec::new(),
                upstream,
                ports: Arc::default(),
            }),
        }
    }

    pub(super) async fn unblocked(&self, conn: &Conn, direction: Direction) {
        let (mut weather, mut own) = (self.weather.subscribe(), conn.blocked.subscribe());
        let blocked = |own: &[bool; 2]| own[usize::from(direction == Direction::ToClient)];
        loop {
            if weather.borrow_and_update().lane(direction).blocked {
                let _ = weather.changed().await;
            } else if blocked(&own.borrow_and_update()) {
                let _ = own.changed().await;
            } else {
                return;
            }
        }
    }

    pub(super) fn arm(
        &self,
        k: u64,
        deed: Deed,
        matches: Box<dyn Fn(&Command) -> bool + Send>,
    ) -> (u64, Tracker) {
        assert!(k > 0, "the first matching command is k = 1");
        let tracker = watch::Sender::new(Progress::default());
        let mut state = self.state.lock();
        let id = state.next_rule;
        state.next_rule += 1;
        state.rules.push(Rule {
            id,
            left: k,
            matches,
            deed,
            tracker: tracker.clone(),
        });
        (id, tracker)
    }

    /// Notes a command and says which faults it sets off.
    pub(super) fn register(&self, conn: &Conn, command: &Command) -> Vec<(Deed, Tracker)> {
        conn.note(command);
        let sent = Sent {
            connection: conn.id,
            command: command.clone(),
        };
        let mut state = self.state.lock();
        let mut deeds = Vec::new();
        state.rules.retain_mut(|rule| {
            if !(rule.matches)(command) {
                return true;
            }
            rule.left -= 1;
            if rule.left > 0 {
                return true;
            }
            if matches!(rule.deed, Deed::Hold) {
                conn.holding.fetch_add(1, Ordering::SeqCst);
            }
            rule.tracker
                .send_modify(|progress| progress.caught = Some(sent.clone()));
            deeds.push((rule.deed, rule.tracker.clone()));
            false
        });
        state.total += 1;
        if state.log.len() == LOG_LIMIT {
            state.log.pop_front();
        }
        state.log.push_back(sent);
        deeds
    }
}

pub(super) struct Conn {
    pub(super) id: u64,
    /// Ends the client's side at once.
    pub(super) drop_client: CancellationToken,
    /// Ends the server's side at once, with all that is still under way to it.
    pub(super) drop_server: CancellationToken,
    /// The client sends no more.
    pub(super) client_done: CancellationToken,
    pub(super) reset: AtomicBool,
    pub(super) open: AtomicBool,
    pub(super) holding: AtomicUsize,
    pub(super) blocked: watch::Sender<[bool; 2]>,
    pub(super) subscriber: AtomicBool,
    /// A replica follows its master on it: no commands and replies any more.
    pub(super) is_of_replica: AtomicBool,
    pub(super) commands: AtomicU64,
    pub(super) name: Mutex<Option<String>>,
}

impl Conn {
    pub(super) fn new(id: u64) -> Self {
        Self {
            id,
            drop_client: CancellationToken::new(),
            drop_server: CancellationToken::new(),
            client_done: CancellationToken::new(),
            reset: AtomicBool::new(false),
            open: AtomicBool::new(true),
            holding: AtomicUsize::new(0),
            blocked: watch::Sender::new([false; 2]),
            subscriber: AtomicBool::new(false),
            is_of_replica: AtomicBool::new(false),
            commands: AtomicU64::new(0),
            name: Mutex::new(None),
        }
    }

    pub(super) fn note(&self, command: &Command) {
        self.commands.fetch_add(1, Ordering::Relaxed);
        if command.is("CLIENT") && command.arg(1).eq_ignore_ascii_case("SETNAME") {
            *self.name.lock() = Some(command.arg(2).into_owned());
        }
        if matches!(command.name().as_str(), "SUBSCRIBE" | "PSUBSCRIBE" | "SSUBSCRIBE") {
            self.subscriber.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn set_blocked(&self, direction: Direction, blocked: bool) {
        self.blocked.send_modify(|lanes| {
            for (lane, way) in lanes.iter_mut().zip([Direction::ToServer, Direction::ToClient]) {
                *lane = if direction.covers(way) { blocked } else { *lane };
            }
        });
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// Closes both sides. What a test holds back stays under way to the server, like a packet stuck in the network.
    pub(super) fn cut(&self) {
        self.open.store(false, Ordering::SeqCst);
        self.drop_client.cancel();
        if self.holding.load(Ordering::SeqCst) == 0 {
            self.drop_server.cancel();
        }
    }

    pub(super) fn destroy(&self) {
        self.open.store(false, Ordering::SeqCst);
        self.drop_client.cancel();
        self.drop_server.cancel();
    }
}
