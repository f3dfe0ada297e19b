//! Calls in flight: what each carries, and how.

use redis::{RedisError, Value};
use tokio::time::Instant;

use super::replicas::ConnectionRole;
use super::{Plain, Step};
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::script::By;

/// The outcome of a call; `None` without an answer in time.
pub(super) type Outcome = Option<Result<Value, RedisError>>;

/// A call in flight.
pub(super) struct InFlight {
    /// Identifies its reply.
    pub(super) number: u64,
    pub(super) batch: Batch,
    /// Its connection.
    pub(super) role: ConnectionRole,
    /// The number of the `WAIT` that it is, or that follows it.
    pub(super) round: u64,
    /// The slot of its steps, in a Cluster.
    pub(super) slot: Option<Slot>,
    pub(super) form: CallForm,
    pub(super) sent_at: Instant,
    /// When its first unanswered step times out.
    pub(super) due: Instant,
    /// After this no answer is expected.
    pub(super) until: Instant,
    /// Steps that were sent before these must be resent, so that these may have been first.
    pub(super) overtook: bool,
}

/// How a call carries its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallForm {
    Script(By),
    /// See [`by_commands`](super::by_commands), with so many fencing tokens.
    Commands {
        tokens: u64,
    },
}

pub(super) enum Batch {
    Steps(Vec<Step>),
    Plain(Plain),
    /// The request whether replicas have everything that was sent before.
    Wait,
}

impl Batch {
    pub(super) fn all(&self) -> &[Step] {
        match self {
            Batch::Steps(steps) => steps,
            Batch::Plain(_) | Batch::Wait => &[],
        }
    }

    pub(super) fn all_mut(&mut self) -> &mut [Step] {
        match self {
            Batch::Steps(steps) => steps,
            Batch::Plain(_) | Batch::Wait => &mut [],
        }
    }
}
