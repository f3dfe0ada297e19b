//! A session with the servers. Requests keep their order, get a reply or an error in bounded time, and survive broken
//! connections.
//!
//! One task owns the connection ([`run`]). Requests can be queued from any thread, and are sent once there is a
//! connection.

mod beat;
mod connection;
mod run;

use std::collections::VecDeque;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{Reason, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::wire::{Acl, Changed, Code, Reply, Request};

pub(crate) use self::run::open;

/// The servers, and the options of the session.
#[derive(Clone)]
pub(crate) struct Config {
    /// The `host:port` of each server.
    pub(crate) hosts: Vec<String>,
    /// How long the servers keep the session of a silent client.
    pub(crate) session: Duration,
    /// How long one operation may take.
    pub(crate) timeout: Duration,
    /// The longest time until a server has reported a message to the leader; `None` for half of the session.
    pub(crate) tick: Option<Duration>,
    /// `user:password`.
    pub(crate) credentials: Option<String>,
    pub(crate) acl: Acl,
    /// In bytes.
    pub(crate) largest_request: usize,
}

/// An event of a session that no request caused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A connection was made; watches of the previous connection are gone.
    Connected,
    /// The previous session expired, and everything that belonged to it is gone.
    Expired,
    /// A node with a watch has changed.
    Changed(Changed),
}

/// The number of a session.
pub(crate) type Epoch = u64;

/// The reply to a request.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) reply: Result<Reply, Code>,
    /// The session in which the request was carried out.
    pub(crate) epoch: Epoch,
}

/// A request without a reply.
#[derive(Debug, Clone)]
pub(crate) enum NoReply {
    /// The request was never sent.
    NotSent(StoreError),
    /// The request may have been carried out, in this session.
    Lost(Epoch, StoreError),
}

impl From<NoReply> for StoreError {
    fn from(no_reply: NoReply) -> StoreError {
        match no_reply {
            NoReply::NotSent(error) | NoReply::Lost(_, error) => error,
        }
    }
}

/// A pending reply.
pub(crate) struct PendingReply(oneshot::Receiver<Result<Answer, NoReply>>);

impl PendingReply {
    pub(crate) async fn answer(self) -> Result<Answer, NoReply> {
        self.0.await.unwrap_or_else(|_| {
            let why = "the runtime that served the connection has ended";
            Err(NoReply::Lost(Epoch::MAX, StoreError::unknown(why)))
        })
    }
}

/// A request that waits to be sent or for its reply.
struct Op {
    request: Request,
    deadline: Instant,
    reply: oneshot::Sender<Result<Answer, NoReply>>,
}

/// The session, as its users see it.
pub(crate) struct Session {
    state: Mutex<State>,
    wake: Notify,
    config: Config,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Op>,
    closed: bool,
    /// No task sends requests any more.
    ended: bool,
    epoch: Epoch,
    /// How long the servers keep the session of a silent client.
    lasts: Duration,
    /// The servers keep the session at least until this moment.
    kept_until: Option<Moment>,
    /// Why there is no connection.
    trouble: Option<String>,
}

impl State {
    fn queue(&mut self, request: Request, deadline: Instant) -> PendingReply {
        let (reply, pending) = oneshot::channel();
        if !self.ended {
            self.waiting.push_back(Op {
                request,
                deadline,
                reply,
            });
        }
        PendingReply(pending)
    }
}

impl Session {
    fn new(config: Config) -> Session {
        Session {
            state: Mutex::default(),
            wake: Notify::new(),
            config,
        }
    }

    /// Queues requests that are sent together. Can be called from any thread.
    pub(crate) fn send<const N: usize>(&self, requests: [Request; N]) -> [PendingReply; N] {
        let deadline = Instant::now() + self.config.timeout;
        let mut state = self.state.lock();
        let pending = requests.map(|request| state.queue(request, deadline));
        drop(state);
        self.wake.notify_one();
        pending
    }

    /// Queues one request.
    pub(crate) fn ask(&self, request: Request) -> PendingReply {
        let [pending] = self.send([request]);
        pending
    }

    /// As [`send`](Self::send), with a list of requests.
    pub(crate) fn ask_all(&self, requests: impl IntoIterator<Item = Request>) -> Vec<PendingReply> {
        let deadline = Instant::now() + self.config.timeout;
        let mut state = self.state.lock();
        let requests = requests.into_iter();
        let pending = requests.map(|request| state.queue(request, deadline)).collect();
        drop(state);
        self.wake.notify_one();
        pending
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.state.lock().epoch
    }

    /// Until when the servers keep this session at least, whatever happens to this process; `None` if the session has
    /// ended.
    pub(crate) fn kept_until(&self, epoch: Epoch) -> Option<Moment> {
        let state = self.state.lock();
        state.kept_until.filter(|_| state.epoch == epoch)
    }

    /// Ends the session once all queued requests are sent.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// Drops the queued requests, and all that follow.
    fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        drop(waiting);
    }

    /// Records that the servers keep the session at least until this moment.
    fn is_kept(&self, until: Moment) {
        let mut state = self.state.lock();
        state.kept_until = state.kept_until.max(Some(until));
    }

    /// How long the servers keep the session of a silent client.
    pub(crate) fn lasts(&self) -> Duration {
        self.state.lock().lasts
    }

    /// How long a connection that resumes the session may take: a silent server must leave time for the others, before the
    /// session is over.
    fn dials_within(&self) -> Duration {
        let servers = u32::try_from(self.config.hosts.len()).unwrap_or(u32::MAX).max(1);
        let share = self.lasts() / 4 / servers;
        self.config.timeout.min(share.max(Duration::from_millis(500)))
    }

    /// Records a connection to a server that keeps the session for `lasts`.
    fn connected(&self, lasts: Duration) {
        let mut state = self.state.lock();
        state.trouble = None;
        state.lasts = lasts;
    }

    fn has_trouble(&self, trouble: String) {
        self.state.lock().trouble = Some(trouble);
    }

    /// Starts a new session.
    fn begins(&self) -> Epoch {
        let mut state = self.state.lock();
        state.epoch += 1;
        state.kept_until = None;
        state.epoch
    }

    /// Fails the requests whose deadline is over, and returns the next deadline.
    fn fail_late(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        while state.waiting.front().is_some_and(|op| op.deadline <= now) {
            let Some(op) = state.waiting.pop_front() else {
                break;
            };
            let why = state.trouble.as_deref().unwrap_or("no server answered in time");
            let error = StoreError::not_done(Reason::Unreachable, why);
            // The caller may have been dropped.
            let _ = op.reply.send(Err(NoReply::NotSent(error)));
        }
        state.waiting.front().map(|op| op.deadline)
    }
}

#[cfg(test)]
impl Session {
    /// A session whose requests are served by the test alone.
    pub(crate) fn unserved(timeout: Duration) -> Session {
        Session::new(Config {
            hosts: Vec::new(),
            session: Duration::from_secs(30),
            timeout,
            tick: None,
            credentials: None,
            acl: Acl::Open,
            largest_request: 1 << 20,
        })
    }

    /// Waits until requests are queued, and then until they have failed because they are late.
    pub(crate) async fn fails_late(&self) {
        loop {
            let is_queued = !self.state.lock().waiting.is_empty();
            if is_queued {
                tokio::time::sleep(self.config.timeout).await;
                self.fail_late(Instant::now());
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Replies to the queued requests.
    pub(crate) fn answers(&self, reply: &Result<Reply, Code>) {
        for op in std::mem::take(&mut self.state.lock().waiting) {
            let reply = reply.clone();
            let _ = op.reply.send(Ok(Answer { reply, epoch: 0 }));
        }
    }
}

/// The error for a request that the servers refused.
pub(crate) fn refused(code: Code, what: &str) -> StoreError {
    let mut message = format!("ZooKeeper refused {what}: {code}");
    if let Some(advice) = code.advice() {
        message = format!("{message}; {advice}");
    }
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
