//! A step on its way.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::send_state::SendState;
use crate::store::StoreError;

/// What is asked of a server: a request of a store, see [`StepQueue`](super::StepQueue).
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
    /// What the caller is told.
    type Answer: std::fmt::Debug + Send + 'static;

    /// The keys whose other steps must be done before, or come after.
    fn keys(&self) -> impl Iterator<Item = &Arc<str>>;

    /// Whether it may make a grant. Without a caller such a step is not sent: the caller releases what it may have been
    /// granted. Every other step is carried out without its caller, too.
    fn acquires(&self) -> bool;
}

/// A step that was taken from a [`StepQueue`](super::StepQueue), to be sent.
///
/// ```
/// use dlock::store::queue::{Job, Step};
///
/// /// The server has carried it out.
/// fn answered<S: Step<Answer = bool>>(job: Job<S>) {
///     job.answer(Ok(true));
/// }
/// ```
#[derive(Debug)]
pub struct Job<S: Step> {
    /// What is asked.
    pub step: S,
    /// Its caller has its answer by then, whatever happens.
    pub deadline: Instant,
    /// How often it was sent [again](super::StepQueue::again).
    pub looks: u32,
    /// It is sent in a statement of its own: it may be why the one of many failed.
    pub alone: bool,
    /// It is sent no earlier.
    pub(super) not_before: Option<Instant>,
    pub(super) send_state: Arc<SendState>,
    pub(super) reply: oneshot::Sender<Result<S::Answer, StoreError>>,
}

impl<S: Step> Job<S> {
    /// Answers the caller, if it is still there. The queue is told by [`done`](super::StepQueue::done).
    pub fn answer(self, answer: Result<S::Answer, StoreError>) {
        let _ = self.reply.send(answer);
    }

    /// Whether it is to be sent yet.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let abandoned = self.step.acquires() && self.reply.is_closed();
        self.deadline > now && !abandoned
    }
}
