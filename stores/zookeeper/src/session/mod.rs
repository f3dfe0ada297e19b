//! A session with the servers: what is sent keeps its order, has an answer in bounded time, and goes on over connections
//! that break.
//!
//! One task owns the connection ([`run`]). Requests are queued from anywhere, and are sent as soon as there is a connection.

mod beat;
mod connection;
mod run;

use std::collections::VecDeque;
use std::time::Duration;

use dlock::store::{Reason, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::wire::{Acl, Code, Reply, Request};

pub(crate) use self::run::open;

/// How to reach the servers, and as whom.
#[derive(Clone)]
pub(crate) struct Config {
    /// `host:port` of each.
    pub(crate) hosts: Vec<String>,
    /// For how long the servers keep what belongs to a client that is silent.
    pub(crate) session: Duration,
    /// How long one step may take.
    pub(crate) timeout: Duration,
    /// After how long at most a server has told the leader of a message; `None` for half of the session.
    pub(crate) tick: Option<Duration>,
    /// `user:password`.
    pub(crate) credentials: Option<String>,
    pub(crate) acl: Acl,
}

/// What happens to a session without a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// There is a connection; watches of the one before are gone.
    Connected,
    /// The session before this one is over, and with it all that belonged to it.
    Expired,
    /// A node with a watch has changed.
    Changed(String),
}

/// Which session it was: they are numbered.
pub(crate) type Epoch = u64;

/// The answer to a request that was sent.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) reply: Result<Reply, Code>,
    /// The session in which it was carried out.
    pub(crate) epoch: Epoch,
}

/// A request without an answer.
#[derive(Debug, Clone)]
pub(crate) enum Silence {
    /// It was never sent.
    NotSent(StoreError),
    /// It may have been carried out, in this session.
    Lost(Epoch, StoreError),
}

impl From<Silence> for StoreError {
    fn from(silence: Silence) -> StoreError {
        match silence {
            Silence::NotSent(error) | Silence::Lost(_, error) => error,
        }
    }
}

/// The answer that comes.
pub(crate) struct Coming(oneshot::Receiver<Result<Answer, Silence>>);

impl Coming {
    pub(crate) async fn answer(self) -> Result<Answer, Silence> {
        self.0.await.unwrap_or_else(|_| {
            let why = "the runtime that served the connection has ended";
            Err(Silence::Lost(Epoch::MAX, StoreError::unknown(why)))
        })
    }
}

/// A request that waits to be sent, or for its answer.
struct Op {
    request: Request,
    deadline: Instant,
    reply: oneshot::Sender<Result<Answer, Silence>>,
}

/// A session, for those who send.
pub(crate) struct Session {
    state: Mutex<State>,
    wake: Notify,
    config: Config,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Op>,
    closed: bool,
    epoch: Epoch,
    /// For how long the servers keep the session of a client that is silent.
    lasts: Duration,
    /// Until when the servers keep the session at least.
    kept_until: Option<Instant>,
    /// Why there is no connection.
    trouble: Option<String>,
}

impl Session {
    fn new(config: Config) -> Session {
        Session {
            state: Mutex::default(),
            wake: Notify::new(),
            config,
        }
    }

    /// Queues requests that are sent one right after the other. Callable from anywhere.
    pub(crate) fn send<const N: usize>(&self, requests: [Request; N]) -> [Coming; N] {
        let deadline = Instant::now() + self.config.timeout;
        let mut state = self.state.lock();
        let coming = requests.map(|request| {
            let (reply, coming) = oneshot::channel();
            state.waiting.push_back(Op {
                request,
                deadline,
                reply,
            });
            Coming(coming)
        });
        drop(state);
        self.wake.notify_one();
        coming
    }

    /// Queues one request.
    pub(crate) fn ask(&self, request: Request) -> Coming {
        let [coming] = self.send([request]);
        coming
    }

    /// Queues the requests of a list.
    pub(crate) fn ask_all(&self, requests: impl IntoIterator<Item = Request>) -> Vec<Coming> {
        requests.into_iter().map(|request| self.ask(request)).collect()
    }

    /// How it reaches the servers.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.state.lock().epoch
    }

    /// Until when the servers keep what belongs to this session at least, whatever happens to this process; `None` if the
    /// session is over.
    pub(crate) fn kept_until(&self, epoch: Epoch) -> Option<Instant> {
        let state = self.state.lock();
        state.kept_until.filter(|_| state.epoch == epoch)
    }

    /// Ends the session once all that waits is sent.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// The session is kept until then, if not longer.
    fn is_kept(&self, until: Instant) {
        let mut state = self.state.lock();
        state.kept_until = state.kept_until.max(Some(until));
    }

    /// For how long the servers keep the session of a client that is silent.
    pub(crate) fn lasts(&self) -> Duration {
        self.state.lock().lasts
    }

    /// To a server that keeps the session for so long.
    fn connected(&self, lasts: Duration) {
        let mut state = self.state.lock();
        state.trouble = None;
        state.lasts = lasts;
    }

    fn has_trouble(&self, trouble: String) {
        self.state.lock().trouble = Some(trouble);
    }

    /// A new session begins.
    fn begins(&self) -> Epoch {
        let mut state = self.state.lock();
        state.epoch += 1;
        state.kept_until = None;
        state.epoch
    }

    /// Answers what waited for too long, and says when the next one has.
    fn fail_late(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        while state.waiting.front().is_some_and(|op| op.deadline <= now) {
            let Some(op) = state.waiting.pop_front() else {
                break;
            };
            let why = state.trouble.as_deref().unwrap_or("no server answered in time");
            let error = StoreError::not_done(Reason::Unreachable, why);
            // Its caller may be gone.
            let _ = op.reply.send(Err(Silence::NotSent(error)));
        }
        state.waiting.front().map(|op| op.deadline)
    }
}

/// What the servers said no to.
pub(crate) fn refused(code: Code, what: &str) -> StoreError {
    let message = format!("ZooKeeper refused {what}: {code}");
    if code.is_unknown() {
        return StoreError::unknown(message);
    }
    let reason = match code {
        Code::THROTTLED => Reason::RefusedForNow,
        Code::SESSION_EXPIRED => Reason::Unreachable,
        _ => Reason::Refused,
    };
    StoreError::not_done(reason, message)
}
