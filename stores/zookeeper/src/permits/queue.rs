//! The own node in the queue for permits, and those before it.

use std::time::Duration;

use dlock::store::{Reason, StoreError};
use tokio::time::{Instant, sleep};

use super::numbers::{Numbers, numbers};
use super::{ATTEMPTS, Ask};
use crate::acquire::Attempt;
use crate::core::{data, key_taken, listed, names};
use crate::fair::Place;
use crate::grants::{Position, State};
use crate::inspect::is_waiting;
use crate::layout::QUEUE;
use crate::names::{Counter, Mark, Node, Role, family_beside};
use crate::session::Epoch;
use crate::wire::Request;

/// How long a caller without a position waits until those before it have taken their permits, and the longest pause
/// between its looks at them.
const OTHERS_TAKE: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The own node in the queue.
#[derive(Debug, Clone)]
pub(super) struct Queued {
    pub(super) node: Node,
    pub(super) czxid: u64,
    pub(super) mark: Mark,
    pub(super) epoch: Epoch,
}

/// Where the own node stands.
pub(super) enum Stand {
    First(Queued, Numbers),
    /// Behind others, with the first of them.
    Behind(Queued, Numbers, Box<(Node, Position)>),
    /// Behind others, as before.
    Unchanged,
}

impl Ask<'_> {
    /// Finds the own node in the queue, or joins it.
    pub(super) async fn stand(&self) -> Result<Stand, StoreError> {
        let core = self.core;
        if let Some(own) = core
            .grants
            .get(self.id())
            .filter(|own| own.epoch == core.session.epoch())
        {
            let queued = |node: &Node, czxid| Queued {
                node: node.clone(),
                czxid,
                mark: own.mark.clone(),
                epoch: own.epoch,
            };
            let first = match &own.state {
                State::First { node, czxid } => Some(queued(node, *czxid)),
                State::Waits(position) => {
                    let (own, position) = (own.clone(), position.clone());
                    let first = queued(&position.node, position.czxid);
                    match core.place(self.id(), &own, position).await? {
                        Place::First => Some(first),
                        Place::Behind => return Ok(Stand::Unchanged),
                        Place::Lost => None,
                    }
                }
                // The outcome of an earlier request is unknown.
                _ => {
                    core.leave_earlier(self.id()).await?;
                    None
                }
            };
            if let Some(queued) = first {
                let numbers = core.numbers(self.semaphore).await?;
                return Ok(Stand::First(queued, numbers));
            }
        }
        self.join().await
    }

    /// Creates the own node at the end of the queue.
    async fn join(&self) -> Result<Stand, StoreError> {
        let core = self.core;
        for _ in 0..ATTEMPTS {
            let attempt = Attempt {
                core,
                lock: self.queue,
                grant: self.id(),
                role: Role::Mutex,
                mark: Mark::draw(),
                deadline: self.called + self.request.lease,
                writer: None,
            };
            let [leases, total] = core.number_requests(self.semaphore);
            let requests = [
                attempt.create(),
                core.children(self.semaphore, false),
                core.children(self.queue, false),
                leases,
                total,
            ];
            let [create, beside, children, leases, total] = core.session.send(requests);
            let created = attempt.created(create).await?.map(|(node, czxid, epoch)| Queued {
                node,
                czxid,
                mark: attempt.mark.clone(),
                epoch,
            });
            if let Some(queued) = &created {
                self.is_in(queued, State::Leaves(queued.node.clone()));
            }
            let (beside, nodes) = (names(beside).await?, listed(children).await?);
            let numbers = numbers(leases, total).await?;
            let family = family_beside(&beside, Some(Counter::Semaphore));
            if let Some(family) = family.filter(|_| !numbers.is_in_use()) {
                if created.is_some() {
                    self.leaves().await?;
                    core.tidy_semaphore(self.semaphore).await;
                }
                return Err(key_taken(family));
            }
            let Some(queued) = created else {
                core.make_below(self.semaphore, QUEUE).await?;
                continue;
            };
            let (node, czxid) = (queued.node.clone(), queued.czxid);
            if node.position.is_exhausted() {
                self.leaves().await?;
                return Err(core.exhausted(self.queue));
            }
            return Ok(match Position::among(&nodes, node, czxid) {
                Some(position) => {
                    let first = nodes
                        .into_iter()
                        .next()
                        .unwrap_or_else(|| position.before.clone());
                    Stand::Behind(queued, numbers, Box::new((first, position)))
                }
                None => Stand::First(queued, numbers),
            });
        }
        Err(StoreError::not_done(
            Reason::RefusedForNow,
            "the nodes of the semaphore were removed again and again",
        ))
    }

    /// Waits for a short time until the own node is first. `false` at once if the first is one that waits.
    pub(super) async fn comes_first(&self, queued: &Queued, first: &Node) -> Result<bool, StoreError> {
        let (until, mut pause) = (Instant::now() + OTHERS_TAKE, Duration::from_millis(1));
        let mut first = first.clone();
        loop {
            if self.waits_for_permits(&first).await? {
                return Ok(false);
            }
            let nodes = self.core.nodes_with(self.queue, &queued.node).await?;
            match nodes.into_iter().next() {
                Some(node) if node == queued.node => return Ok(true),
                Some(_) if Instant::now() > until => return Ok(false),
                Some(node) => first = node,
                None => return Ok(false),
            }
            sleep(pause).await;
            pause = (2 * pause).min(LOOK_EVERY);
        }
    }

    /// Whether the first in the queue is a waiter of dlock that has found too few permits. (One of Curator has a lease
    /// by then.)
    async fn waits_for_permits(&self, first: &Node) -> Result<bool, StoreError> {
        let look = Request::Data {
            path: self.core.path_of(self.queue, &first.name),
            watch: false,
        };
        Ok(data(self.core.session.ask(look))
            .await?
            .is_some_and(|(data, _)| is_waiting(&data)))
    }
}
