//! The shared state of a store, and how its operations run.

use std::future::Future;
use std::sync::Arc;

use dlock::store::{DoubtSender, Reason, StoreError, StoreFuture};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::DropGuard;

use super::answers::Answers;
use super::batches::Batches;
use super::grants::Grants;
use super::names::{Name, Names};
use super::pool::Pool;
use super::positions::Positions;
use super::queues::LockQueues;
use super::waiters::Waiters;
use crate::client::Links;

/// The shared state of a store.
pub(crate) struct Inner {
    pub(crate) links: Arc<Links>,
    pub(crate) names: Names,
    pub(crate) pool: Arc<Pool>,
    pub(crate) grants: Arc<Grants>,
    pub(crate) queues: LockQueues,
    pub(crate) acquires: Batches,
    /// Separate from acquires, which a server refuses when its space is used up.
    pub(crate) releases: Batches,
    pub(crate) answers: Answers,
    pub(crate) waiters: Waiters,
    pub(crate) positions: Arc<Positions>,
    pub(crate) doubts: DoubtSender,
    pub(crate) runtime: runtime::Handle,
    /// Stops the background tasks.
    pub(crate) _ended: DropGuard,
}

/// Whether an operation runs after its caller is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Abandoned {
    /// The operation runs: a release, for example.
    Goes,
    /// The operation is not sent: its caller releases the grant that it may have, and that release finds nothing. Nor is it
    /// if its turn comes after half of its time.
    Ends,
}

impl Inner {
    /// Queues an operation on these locks at once. The future only returns the reply.
    pub(crate) fn step<T, F>(
        self: &Arc<Self>,
        names: impl IntoIterator<Item = Name>,
        abandoned: Abandoned,
        work: impl FnOnce(Arc<Inner>, Instant) -> F + Send + 'static,
    ) -> StoreFuture<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let mut position = self.queues.join(names);
        let timeout = self.links.config.timeout;
        let (called, deadline) = (Instant::now(), Instant::now() + timeout);
        // What is begun late leaves no time for the renewals and releases behind it.
        let begins_by = match abandoned {
            Abandoned::Goes => deadline,
            Abandoned::Ends => called + timeout / 2,
        };
        let (reply, answer) = oneshot::channel();
        let inner = self.clone();
        self.runtime.spawn(async move {
            if timeout_at(begins_by, position.comes()).await.is_err() {
                let error = StoreError::not_done(Reason::Unreachable, inner.links.crowd());
                let _ = reply.send(Err(error));
                // Later operations must still wait for the earlier ones.
                return position.comes().await;
            }
            if abandoned == Abandoned::Goes || !reply.is_closed() {
                let answer = work(inner, deadline).await;
                let _ = reply.send(answer);
            }
        });
        Box::pin(async move {
            match answer.await {
                Ok(answer) => answer,
                Err(_) => Err(StoreError::unknown("the runtime that served the store has ended")),
            }
        })
    }
}
