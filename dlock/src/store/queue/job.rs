//! A queued operation.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::InFlight;
use super::send_state::SendState;
use crate::base::waking::reply_to;
use crate::store::StoreError;

/// An operation for a server: a request of a store, see [`StepQueue`](super::StepQueue).
///
/// ```
/// use dlock::store::queue::Step;
/// use std::sync::Arc;
///
/// #[derive(Debug)]
/// enum ToyStep {
///     Acquire(Arc<str>),
///     Release(Arc<str>),
///     List,
/// }
///
/// impl Step for ToyStep {
///     type Answer = bool;
///
///     fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
///         match self {
///             ToyStep::Acquire(key) | ToyStep::Release(key) => Some(key),
///             ToyStep::List => None,
///         }
///         .into_iter()
///     }
///
///     fn acquires(&self) -> bool {
///         matches!(self, ToyStep::Acquire(_))
///     }
/// }
/// # assert_eq!(ToyStep::Release("a".into()).keys().count() + ToyStep::List.keys().count(), 1);
/// ```
pub trait Step: std::fmt::Debug + Send + 'static {
    /// The reply to the caller.
    type Answer: std::fmt::Debug + Send + 'static;

    /// Returns the keys that order it: other steps of these keys run before or after it.
    fn keys(&self) -> impl Iterator<Item = &Arc<str>>;

    /// Returns whether it may create a grant. Without a caller such a step is not sent: the caller releases what it may
    /// have been granted. Every other step is carried out even without its caller.
    fn acquires(&self) -> bool;
}

/// A step that was taken from a [`StepQueue`](super::StepQueue) to be sent.
///
/// ```
/// use dlock::store::queue::{Job, Step, StepQueue};
///
/// /// The server has carried it out.
/// fn carried_out<S: Step<Answer = bool>>(queue: &StepQueue<S>, job: Job<S>) {
///     queue.answer(job, Ok(true));
/// }
/// ```
#[derive(Debug)]
pub struct Job<S: Step> {
    /// What is asked.
    pub step: S,
    /// The caller gets a reply by then, whatever happens.
    pub deadline: Instant,
    /// How often it was [retried](super::StepQueue::retry).
    pub looks: u32,
    /// Whether it is sent in a separate statement: it may be why a combined one failed.
    pub alone: bool,
    /// The earliest time to send it.
    pub(super) not_before: Option<Instant>,
    pub(super) send_state: Arc<SendState>,
    /// Its position among those that wait.
    pub(super) number: i64,
    /// Keeps other steps of its keys back while it is in flight.
    pub(super) in_flight: Option<InFlight<S>>,
    pub(super) reply: oneshot::Sender<Result<S::Answer, StoreError>>,
}

impl<S: Step> Job<S> {
    /// Replies to the caller, if it is still there.
    pub(super) fn answer(self, answer: Result<S::Answer, StoreError>) {
        reply_to(self.reply, answer);
    }

    /// Whether it may be sent yet.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let abandoned = self.step.acquires() && self.reply.is_closed();
        self.deadline > now && !abandoned
    }
}
