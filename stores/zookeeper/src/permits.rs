//! Semaphores, in the layout of Curator's `InterProcessSemaphoreV2`: an `InterProcessMutex` guards the list of leases, each
//! of which is one permit.
//!
//! The nodes of the mutex are the queue of all waiters, Curator's too. Only the first takes permits: one `multi` checks its
//! node and the numbers that it has read, creates the leases and deletes the node. So it takes all permits or none, and a
//! late copy of it takes nothing once the node is gone. A waiter that is first and finds too few permits keeps its node;
//! it is notified of changes of the leases and of the total, a waiter behind it of the end of the node before its own.

mod numbers;
mod queue;
mod take;

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, AcquireRequest, Busy, GrantId, Outcome, Reason, StoreError};
use tokio::time::Instant;

use self::numbers::Choice;
pub(crate) use self::numbers::{Numbers, numbers};
use self::queue::{Queued, Stand};
use crate::core::Core;
use crate::fair::Place;
use crate::grants::{Own, Position, State};
use crate::inspect::waiting;
use crate::layout::{LEASES, QUEUE, leases_of, permits_topic, queue_of, semaphore_of, total_of};
use crate::names::Node;
use crate::session::refused;
use crate::wire::{Code, Mode, Request};

/// How often an acquire starts again because a node was removed or a number has changed.
const ATTEMPTS: u32 = 8;

/// How long a waiter that was notified and sends no request keeps its position.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// A waiter asks again within this time, even without a notification.
const ASK_EVERY: Duration = Duration::from_secs(30);

/// A caller without a position asks again within this time while others are before it.
const ASK_WITHOUT_POSITION: Duration = Duration::from_secs(2);

/// A request for permits.
struct Ask<'a> {
    core: &'a Core,
    queue: &'a Arc<str>,
    semaphore: &'a str,
    request: &'a AcquireRequest,
    called: Instant,
    /// The waiter whose position is kept.
    waiter: Option<GrantId>,
}

impl Core {
    pub(crate) async fn acquire_permits(
        &self,
        queue: Arc<str>,
        request: AcquireRequest,
        called: Instant,
    ) -> Result<AcquireReply, StoreError> {
        let semaphore = semaphore_of(&queue).unwrap_or(&queue).to_owned();
        let ask = Ask {
            core: self,
            queue: &queue,
            semaphore: &semaphore,
            request: &request,
            called,
            // A limit may be that of one caller alone, whom others need not wait for.
            waiter: request.waiter.filter(|_| request.limit.is_none()),
        };
        let reply = ask.reply().await;
        if let Err(error) = &reply
            && error.outcome == Outcome::NotDone
            && error.reason == Reason::Refused
            && self.grants.get(ask.id()).is_some()
        {
            // The next request would be refused as well, and others wait behind the node.
            let _ = ask.leaves().await;
        }
        reply.map_err(|mut error| {
            // A node may be left.
            if [ask.id(), request.grant]
                .into_iter()
                .any(|id| self.grants.get(id).is_some())
            {
                error.outcome = Outcome::Unknown;
            }
            error
        })
    }

    /// Removes the nodes of a semaphore that are empty.
    pub(crate) async fn tidy_semaphore(&self, semaphore: &str) {
        let paths = [LEASES, QUEUE].map(|name| Request::Delete {
            path: self.path_of(semaphore, name),
        });
        for pending in self.session.ask_all(paths) {
            // Otherwise the servers remove them some time after their last child.
            let _ = pending.answer().await;
        }
    }

    /// The paths of the leases of a grant.
    pub(crate) fn leases(&self, own: &Own, amount: u32) -> Vec<String> {
        let semaphore = semaphore_of(&own.lock).unwrap_or(&own.lock);
        let dir = self.path(&leases_of(semaphore));
        (0..amount)
            .map(|index| format!("{dir}/{}", own.mark.lease(index)))
            .collect()
    }

    /// Notifies the waiters for the permits of a semaphore; those that send no request lose their positions.
    pub(crate) fn tell_permits(&self, semaphore: &str) {
        self.grants
            .end_positions(&queue_of(semaphore), Instant::now() + KEPT_FOR);
        self.hub.tell(&permits_topic(semaphore));
    }
}

impl Ask<'_> {
    /// The id under which the own node is known.
    fn id(&self) -> GrantId {
        self.waiter.unwrap_or(self.request.grant)
    }

    /// Joins the queue, and takes the permits if it is first.
    async fn reply(&self) -> Result<AcquireReply, StoreError> {
        for _ in 0..ATTEMPTS {
            let reply = match self.stand().await? {
                Stand::First(queued, numbers) => self.first(queued, numbers).await?,
                Stand::Behind(queued, numbers, before) => self.behind(queued, numbers, *before).await?,
                Stand::Unchanged => Some(self.keeps()),
            };
            if let Some(reply) = reply {
                return Ok(reply);
            }
        }
        self.leaves().await?;
        Err(StoreError::not_done(
            Reason::RefusedForNow,
            "the nodes of the semaphore changed again and again",
        ))
    }

    /// Records the state of the own node.
    fn is_in(&self, queued: &Queued, state: State) {
        let own = Own {
            lock: self.queue.clone(),
            mark: queued.mark.clone(),
            epoch: queued.epoch,
            state,
            deadline: self.called + self.request.lease,
        };
        self.core.grants.insert(self.id(), own);
    }

    /// Takes the permits if there are enough. `None` if the numbers must be read again.
    async fn first(&self, queued: Queued, numbers: Numbers) -> Result<Option<AcquireReply>, StoreError> {
        let state = State::First {
            node: queued.node.clone(),
            czxid: queued.czxid,
        };
        self.is_in(&queued, state);
        match numbers.choice(self.request) {
            Choice::SetTotal(total) => self.begins_with(total).await.map(|()| None),
            Choice::NoTotal => {
                self.leaves().await?;
                Ok(Some(AcquireReply::busy(None)))
            }
            Choice::TooFew => {
                self.leaves().await?;
                Ok(Some(AcquireReply::TooFewPermits))
            }
            Choice::Take => self.take(&queued, &numbers).await,
            Choice::Wait if self.waiter.is_some() => self.waits(&queued).await.map(Some),
            Choice::Wait => self.is_refused(numbers.held == 0).await.map(Some),
        }
    }

    /// Keeps the position, or waits for those that are about to take their permits. `None` if the own node may be first.
    async fn behind(
        &self,
        queued: Queued,
        numbers: Numbers,
        (first, position): (Node, Position),
    ) -> Result<Option<AcquireReply>, StoreError> {
        if numbers.are_too_few(self.request) {
            self.leaves().await?;
            return Ok(Some(AcquireReply::TooFewPermits));
        }
        if self.waiter.is_some() {
            self.is_in(&queued, State::Waits(position.clone()));
            let reply = self.waits(&queued).await?;
            // Watches the node before its own.
            let own = self.core.grants.get(self.id());
            let placed = match own {
                Some(own) => self.core.place(self.id(), &own, position).await?,
                None => Place::Lost,
            };
            return Ok(matches!(placed, Place::Behind).then_some(reply));
        }
        if !numbers.are_enough(self.request) || !self.comes_first(&queued, &first).await? {
            return self.is_refused(true).await.map(Some);
        }
        let state = State::First {
            node: queued.node,
            czxid: queued.czxid,
        };
        self.core.grants.set(self.id(), state);
        Ok(None)
    }

    /// Shows others that the own node is that of a waiter.
    async fn waits(&self, queued: &Queued) -> Result<AcquireReply, StoreError> {
        let mark = Request::Set {
            path: self.core.path_of(self.queue, &queued.node.name),
            data: waiting(self.id()),
        };
        match self.core.session.ask(mark).answer().await?.reply {
            Ok(_) | Err(Code::NO_NODE) => Ok(self.keeps()),
            Err(code) => Err(refused(code, "to mark the node of a waiter")),
        }
    }

    /// The reply to a waiter, whose position lasts until it is notified.
    fn keeps(&self) -> AcquireReply {
        self.core.grants.extend(self.id(), Instant::now() + 2 * ASK_EVERY);
        AcquireReply::Busy(Busy::new(None).again(ASK_EVERY))
    }

    /// Refuses a caller without a position. It is not notified of each change that may let it continue if others are
    /// before it, or if nothing is held that could be released.
    async fn is_refused(&self, asks_again: bool) -> Result<AcquireReply, StoreError> {
        self.leaves().await?;
        let busy = Busy::new(None);
        Ok(AcquireReply::Busy(match asks_again {
            true => busy.again(ASK_WITHOUT_POSITION),
            false => busy.again(ASK_EVERY),
        }))
    }

    /// Gives the own node up.
    async fn leaves(&self) -> Result<(), StoreError> {
        self.core.release(self.id(), None).await.map(drop)
    }

    /// Sets the total that was not set before.
    async fn begins_with(&self, total: u32) -> Result<(), StoreError> {
        let total = i32::try_from(total).unwrap_or(i32::MAX);
        let create = Request::Create {
            path: self.core.path(&total_of(self.semaphore)),
            data: total.to_be_bytes().to_vec(),
            mode: Mode::Persistent,
        };
        match self.core.session.ask(create).answer().await?.reply {
            Ok(_) | Err(Code::NODE_EXISTS) => Ok(()),
            Err(code) => Err(refused(code, "to create the node with the number of permits")),
        }
    }
}
