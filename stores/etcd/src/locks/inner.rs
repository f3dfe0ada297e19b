//! The shared state of a store, and how its operations run.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::{DoubtSender, Reason, StoreError, StoreFuture};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::DropGuard;

use super::answers::Answers;
use super::batches::Batches;
use super::grants::Grants;
use super::names::{Name, Names};
use super::pool::Pool;
use super::positions::Positions;
use super::queues::LockQueues;
use super::release;
use super::waiters::Waiters;
use crate::client::Links;

/// The pause between attempts to end an expired grant.
const AGAIN: Duration = Duration::from_millis(500);

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

/// Ends grants when their time is over, as long as the store exists: their sessions continue for other locks.
pub(crate) async fn sweep(store: Weak<Inner>, grants: Arc<Grants>) {
    loop {
        let (ended, next) = grants.take_ended();
        if !ended.is_empty() {
            let Some(inner) = store.upgrade() else { return };
            for (id, name) in ended {
                let step = inner.step([name], Abandoned::Goes, move |inner, deadline| async move {
                    release::expire(inner, id, deadline).await
                });
                let grants = grants.clone();
                // Also if it was not carried out because earlier operations took too long.
                inner.runtime.spawn(async move {
                    if step.await.is_err() {
                        grants.look_again(id, AGAIN);
                    }
                });
            }
        }
        tokio::select! {
            () = grants.changed() => {}
            () = async {
                match next {
                    Some(next) => sleep(next).await,
                    None => std::future::pending().await,
                }
            } => {}
        }
    }
}

/// Ends positions of waiters that send no requests, as long as the store exists.
pub(crate) async fn end_silent(store: Weak<Inner>, positions: Arc<Positions>) {
    loop {
        let silent = positions.become_silent().await;
        let Some(inner) = store.upgrade() else { return };
        for (id, name) in silent {
            let step = inner.step(
                [name.clone()],
                Abandoned::Goes,
                move |inner, deadline| async move { release::end_silent(inner, name, id, deadline).await },
            );
            drop(step);
        }
    }
}
