//! One server: a queue of steps, and a supervised connection that carries them.
//!
//! Steps are sent in the order in which they were queued, except that those by commands may overtake others, see
//! [`take_by_commands`](send_queue::SendQueue::take_by_commands). Steps that wait when a call can be made share one call; a single step is sent at
//! once, unless many are in flight. A step that is not answered within its timeout fails, whatever the connection
//! does. A connection that broke, or did not answer several times in a row, is replaced, for ever and with growing
//! pauses.
//!
//! In a Cluster there is one node for each server with slots. A call then carries steps of one slot, many calls are in
//! flight at a time, and steps move to another server when their slot does.

mod actor;
mod alarm;
mod answering;
mod by_commands;
mod connections;
mod contacts;
mod delivery;
mod doubts;
mod failure;
mod flow_control;
mod former_connections;
mod in_flight;
mod inbox;
mod late_copies;
mod payload;
mod plain_acquire;
mod plain_release;
mod redirect;
mod replicas;
mod reply;
mod responses;
mod send_queue;
mod sending;
mod served;
mod slot_migration;
#[cfg(test)]
mod test_steps;
mod token_draws;
mod undos;
mod wire;

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::actor::Actor;
use self::answering::{Awaited, Channel};
pub(super) use self::failure::{classify, refused};
pub(super) use self::former_connections::{closing_trial, may_close};
use self::replicas::ConnectionRole;
pub(super) use self::sending::CALLS_IN_ALL;
use self::slot_migration::Move;
pub(super) use self::wire::Aside;
use super::cluster::Cluster;
use super::connect::{Connected, Connector};
use super::endpoint::Endpoint;
use super::fence::Fence;
use super::script::{Answer, Call};
use crate::base::clock;
use crate::base::moment::Moment;
use crate::store::DoubtSender;
use crate::store::{Lane, Outcome, Reason, StoreError};

/// The outcome of a step.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) answer: Answer,
    /// Whether the step was sent more than once.
    pub(crate) repeated: bool,
}

type Reply = answering::Reply<Result<Done, StoreError>>;

/// A step on its way through the queue. Boxed, because it is moved a dozen times.
pub(super) struct Step(Box<StepMemory>);

/// The memory of a step, for the next one.
struct StepMemory {
    /// `None` between two steps.
    step: Option<Queuing>,
    answers: Channel<Result<Done, StoreError>>,
}

/// The memory of a step that was answered.
struct Used(Box<StepMemory>);

impl Step {
    /// Creates a step, in this memory if there is any, and what its caller waits for.
    fn new(
        used: Option<Used>,
        call: Call,
        deadline: Instant,
        permit: Option<QueuePermit>,
    ) -> (Step, Awaited<Result<Done, StoreError>>) {
        let new = || {
            Box::new(StepMemory {
                step: None,
                answers: Channel::new(),
            })
        };
        let mut memory = used.map_or_else(new, |Used(memory)| memory);
        let (reply, answer) = memory.answers.open();
        memory.step = Some(Queuing::new(call, deadline, reply, permit));
        (Step(memory), answer)
    }

    /// Creates a step without a waiting caller.
    fn unanswered(call: Call, deadline: Instant) -> Step {
        Step::new(None, call, deadline, None).0
    }

    /// Ends the step; its memory remains.
    fn end(mut self) -> Used {
        self.0.step = None;
        Used(self.0)
    }
}

impl Deref for Step {
    type Target = Queuing;

    fn deref(&self) -> &Queuing {
        self.0.step.as_ref().expect(HAS_STEP)
    }
}

impl DerefMut for Step {
    fn deref_mut(&mut self) -> &mut Queuing {
        self.0.step.as_mut().expect(HAS_STEP)
    }
}

const HAS_STEP: &str = "the memory has a step until that ends";

/// What a step is, and what has become of it so far.
pub(super) struct Queuing {
    pub(super) call: Call,
    deadline: Instant,
    /// Its position in the send queue; 0 for a failed release, which has none.
    number: u64,
    /// How often it was sent.
    sent: u32,
    /// Whether it needs a separate call, because it was refused together with others.
    alone: bool,
    /// Whether a plain release or acquire must go by the script: it undoes an acquire, or the commands did not do it.
    by_script: bool,
    /// Whether an earlier copy may have acquired the lock, although it was not answered so: then no failure is certain.
    in_doubt: bool,
    /// Whether its server has sent it here, although this server does not own the slot yet.
    asking: bool,
    /// How often it could not be carried out on the server to which it was sent.
    hops: u32,
    /// Until when it is held back.
    not_before: Option<Instant>,
    /// Why it is not carried out yet, as a server said.
    held_up: Option<String>,
    /// Until when the script may carry out an acquire or a forced release, by the server's clock in µs. Commands do not check
    /// it, see [`former_connections`].
    refuse_after: u64,
    /// `None` once it was answered.
    reply: Option<Reply>,
    /// Its share of the limit of queued requests.
    permit: Option<QueuePermit>,
}

impl Queuing {
    fn new(call: Call, deadline: Instant, reply: Reply, permit: Option<QueuePermit>) -> Queuing {
        Queuing {
            by_script: call.undoes_acquire(),
            call,
            deadline,
            number: 0,
            sent: 0,
            alone: false,
            in_doubt: false,
            asking: false,
            hops: 0,
            not_before: None,
            held_up: None,
            refuse_after: 0,
            reply: Some(reply),
            permit,
        }
    }

    /// After the failure of such a resent step, the outcome of the earlier copy is unknown.
    fn admit(&self, error: &mut StoreError) {
        if self.in_doubt || self.sent > 1 && self.call.may_be_done_before() {
            error.outcome = Outcome::Unknown;
        }
    }
}

/// The answer to a queued step, within the timeout.
#[derive(Debug)]
pub(crate) enum Queued {
    Waits(Awaited<Result<Done, StoreError>>),
    /// It was refused, or there is no task to take it; `None` once that was reported.
    TurnedAway(Option<StoreError>),
}

impl Queued {
    pub(super) fn turned_away(error: StoreError) -> Queued {
        Queued::TurnedAway(Some(error))
    }
}

impl Future for Queued {
    type Output = Result<Done, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Queued::Waits(answer) => {
                let answer = ready!(Pin::new(answer).poll(cx));
                Poll::Ready(answer.unwrap_or_else(|| Err(closed(true))))
            }
            Queued::TurnedAway(error) => error
                .take()
                .map_or(Poll::Pending, |error| Poll::Ready(Err(error))),
        }
    }
}

type PlainReply = oneshot::Sender<Result<Value, StoreError>>;

/// A command that is not a step.
struct Plain {
    cmd: Cmd,
    role: ConnectionRole,
    deadline: Instant,
    reply: PlainReply,
}

/// Nearly all of them are steps.
enum Request {
    Step(Step),
    Plain(Box<Plain>),
    Move(Box<Move>),
}

/// How many steps wait, in cache lines of its own: each step changes it, and counts references to it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Taken(AtomicUsize);

/// How many steps may wait for a server that does not keep up. Steps that end or extend something are always accepted:
/// there are never more of them than holds.
#[derive(Debug, Clone)]
struct Room {
    taken: Arc<Taken>,
    limit: usize,
}

/// A share of the limit of queued requests, released when it is dropped.
#[derive(Debug)]
struct QueuePermit(Arc<Taken>);

impl Drop for QueuePermit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Room {
    fn enter(&self) -> Result<QueuePermit, StoreError> {
        let permit = QueuePermit(self.taken.clone());
        if self.taken.0.fetch_add(1, Ordering::Relaxed) < self.limit {
            return Ok(permit);
        }
        Err(StoreError::not_done(
            Reason::Unreachable,
            format!("{} requests are waiting for the server already", self.limit),
        ))
    }
}

/// A server, for callers that have steps for it. The connection ends when the last handle is gone.
#[derive(Debug, Clone)]
pub(super) struct Node {
    queue: inbox::Sender<Request, Used>,
    room: Room,
    /// The time within which a step is answered or has failed.
    pub(super) timeout: Duration,
    pub(super) endpoint: Endpoint,
    /// Identifies its grants.
    pub(super) lane: Lane,
    /// How many replicas must acknowledge acquires and renewals.
    pub(super) min_replicas: Option<u32>,
    /// The server has no slots any more.
    is_retired: Arc<AtomicBool>,
    standing: Arc<Standing>,
}

/// What the connection's task tells of the connection.
#[derive(Debug, Default)]
struct Standing {
    /// How many processes of the server were met.
    processes: AtomicU64,
    /// Since when there is no connection, in nanoseconds; zero while there is one.
    cut_off_since: AtomicU64,
}

/// The identity and the settings of a node.
#[derive(Clone)]
pub(super) struct Part {
    /// Identifies its grants.
    pub(super) lane: Lane,
    /// The maximum number of requests that wait to be sent.
    pub(super) limit: usize,
    /// The keys of the last fencing tokens.
    pub(super) fence: Fence,
    /// Notified whenever a connection was replaced.
    pub(super) doubts: DoubtSender,
    /// The order of steps.
    pub(super) steps: Arc<AtomicU64>,
    /// Knows the slots; `None` for a server that has all keys.
    pub(super) cluster: Option<Weak<Cluster>>,
}

impl Node {
    /// Starts the node, with an established connection if there is one.
    pub(super) fn start(
        connector: Connector,
        connected: Option<Connected>,
        part: Part,
        runtime: &tokio::runtime::Handle,
    ) -> Node {
        let (queue, requests) = inbox::inbox();
        let timeout = connector.access.patience();
        let room = Room {
            taken: Arc::default(),
            limit: part.limit,
        };
        let (endpoint, lane) = (connector.endpoint.clone(), part.lane);
        let min_replicas = connector.access.replicas.map(|replicas| replicas.count);
        let standing = Arc::<Standing>::default();
        let actor = Actor::new(connector, requests, part, standing.clone());
        runtime.spawn(actor.run(connected));
        Node {
            queue,
            room,
            timeout,
            endpoint,
            lane,
            min_replicas,
            is_retired: Arc::default(),
            standing,
        }
    }

    /// How many processes of the server were met so far. A connection that cannot tell its process counts as one to another.
    pub(super) fn processes(&self) -> u64 {
        self.standing.processes.load(Ordering::Relaxed)
    }

    /// Whether it has had no connection since then, and so has sent nothing.
    pub(super) fn was_cut_off_since(&self, since: Moment) -> bool {
        let cut_off = self.standing.cut_off_since.load(Ordering::Relaxed);
        cut_off != 0 && Moment::from_nanos(cut_off) < since
    }

    /// Queues a step now.
    pub(super) fn queue(&self, call: Call) -> Queued {
        let permit = match call.may_be_turned_away() {
            true => match self.room.enter() {
                Ok(permit) => Some(permit),
                Err(error) => return Queued::turned_away(error),
            },
            false => None,
        };
        let deadline = clock::now() + self.timeout;
        let queued = self.queue.send_with(|used| {
            let (step, answer) = Step::new(used, call, deadline, permit);
            (Request::Step(step), answer)
        });
        match queued {
            Some(answer) => Queued::Waits(answer),
            // There is no task to take it.
            None => Queued::turned_away(closed(false)),
        }
    }

    /// How many steps that may be turned away are queued together: they leave room for those of other callers.
    pub(super) fn queued_together(&self) -> usize {
        (self.room.limit / 2).clamp(1, 256)
    }

    /// Sends a command that is not a step, outside the order of steps.
    pub(super) async fn plain(&self, cmd: Cmd) -> Result<Value, StoreError> {
        let (reply, answer) = oneshot::channel();
        let deadline = clock::now() + self.timeout;
        let plain = Plain {
            cmd,
            role: ConnectionRole::Usual,
            deadline,
            reply,
        };
        let queued = self.queue.send(Request::Plain(Box::new(plain)));
        answer.await.unwrap_or_else(|_| {
            Err(match self.is_retired.load(Ordering::Relaxed) {
                true => {
                    let message = format!("{} has no slots of the Cluster any more", self.endpoint);
                    StoreError::not_done(Reason::Unreachable, message)
                }
                false => closed(queued),
            })
        })
    }
}

/// The background work is gone, by shutdown or with its runtime.
fn closed(queued: bool) -> StoreError {
    StoreError {
        outcome: if queued {
            Outcome::Unknown
        } else {
            Outcome::NotDone
        },
        reason: Reason::Closed,
        message: "the lock client is shut down".to_owned(),
        source: None,
    }
}
