//! Semaphores, in the layout of Curator's `InterProcessSemaphoreV2`: an `InterProcessMutex` guards the list of leases, each
//! of which is one permit.
//!
//! The nodes of the mutex are the queue of all waiters, Curator's too. Only the first takes permits: one `multi` checks its
//! node and the numbers that it has read, creates the leases and deletes the node. So it takes all permits or none, and a
//! late copy of it takes nothing once the node is gone. A waiter that is first and finds too few permits keeps its node;
//! it is notified of changes of the leases and of the total, a waiter behind it of the end of the node before its own.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, AcquireRequest, Busy, GrantId, Outcome, Reason, StoreError};
use tokio::time::{Instant, sleep};

use crate::acquire::Attempt;
use crate::core::{Core, data, key_taken, listed, names};
use crate::fair::Place;
use crate::grants::{Own, Position, State};
use crate::inspect::{is_waiting, waiting};
use crate::layout::{LEASES, QUEUE, leases_of, permits_topic, queue_of, semaphore_of, total_of};
use crate::names::{Counter, Mark, Node, Role, family_beside};
use crate::session::{Answer, Epoch, NoReply, PendingReply, refused};
use crate::wire::{Change, Code, Mode, Reply, Request};

/// How often an acquire starts again because a node was removed or a number has changed.
const ATTEMPTS: u32 = 8;

/// How long a waiter that was notified and sends no request keeps its position.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// A waiter asks again within this time, even without a notification.
const ASK_EVERY: Duration = Duration::from_secs(30);

/// A caller without a position asks again within this time while others are before it.
const ASK_WITHOUT_POSITION: Duration = Duration::from_secs(2);

/// How long a caller without a position waits until those before it have taken their permits, and the longest pause
/// between its looks at them.
const OTHERS_TAKE: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a semaphore has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// The number of leases.
    pub(crate) held: i64,
    /// The version of their parent, which each acquire of dlock changes; `None` if it does not exist.
    pub(crate) leases: Option<i32>,
    /// The total and its version.
    pub(crate) total: Option<(i64, i32)>,
}

impl Numbers {
    /// Whether the key is that of a semaphore. Whatever is beside it is the node of an attempt that is about to be refused.
    pub(crate) fn is_in_use(&self) -> bool {
        self.total.is_some() || self.held > 0
    }

    /// How many permits are available, also below a limit; `None` if there is neither a total nor a limit.
    fn free(&self, limit: Option<u32>) -> Option<i64> {
        let total = self.total.map(|(total, _)| total);
        let most = total.into_iter().chain(limit.map(i64::from)).min()?;
        Some(most - self.held)
    }
}

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

/// The own node in the queue.
#[derive(Debug, Clone)]
struct Queued {
    node: Node,
    czxid: u64,
    mark: Mark,
    epoch: Epoch,
}

/// Where the own node stands.
enum Stand {
    First(Queued, Numbers),
    /// Behind others, with the first of them.
    Behind(Queued, Numbers, Box<(Node, Position)>),
    /// Behind others, as before.
    Unchanged,
}

/// Whether permits were taken.
enum Taken {
    Yes(AcquireReply),
    /// The own node is gone.
    Lost,
    /// A number has changed.
    Again,
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
        ask.reply().await.map_err(|mut error| {
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
    /// Requests the numbers of a semaphore.
    pub(crate) fn number_requests(&self, semaphore: &str) -> [Request; 2] {
        [leases_of(semaphore), total_of(semaphore)].map(|name| Request::Data {
            path: self.path(&name),
            watch: false,
        })
    }

    /// The numbers of a semaphore after the server has caught up with the leader.
    async fn numbers(&self, semaphore: &str) -> Result<Numbers, StoreError> {
        let sync = Request::Sync {
            path: self.path(semaphore),
        };
        let [leases, total] = self.number_requests(semaphore);
        let [sync, leases, total] = self.session.send([sync, leases, total]);
        if let Err(code) = sync.answer().await?.reply {
            return Err(refused(code, "to catch up"));
        }
        numbers(leases, total).await
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

/// Reads the replies to [`Core::number_requests`].
pub(crate) async fn numbers(leases: PendingReply, total: PendingReply) -> Result<Numbers, StoreError> {
    let leases = data(leases).await?;
    let total = data(total).await?;
    let total = total.map(|(data, stat)| match data.first_chunk() {
        Some(count) => Ok((i64::from(i32::from_be_bytes(*count)), stat.version)),
        None => Err(StoreError::not_done(
            Reason::Refused,
            "the node with the number of permits is not that of a SharedCount",
        )),
    });
    Ok(Numbers {
        held: leases.as_ref().map_or(0, |(_, stat)| i64::from(stat.children)),
        leases: leases.map(|(_, stat)| stat.version),
        total: total.transpose()?,
    })
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
                Stand::Unchanged => Some(self.keeps(ASK_EVERY)),
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

    fn amount(&self) -> u32 {
        self.request.amount.max(1)
    }

    /// Finds the own node in the queue, or joins it.
    async fn stand(&self) -> Result<Stand, StoreError> {
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
                    core.release(self.id(), None).await?;
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
        if let (None, Some(total)) = (numbers.total, self.request.permits) {
            self.begins_with(total).await?;
            return Ok(None);
        }
        let Some(free) = numbers.free(self.request.limit) else {
            self.leaves().await?;
            return Ok(Some(AcquireReply::busy(None)));
        };
        if self.is_too_much(&numbers) {
            self.leaves().await?;
            return Ok(Some(AcquireReply::TooFewPermits));
        }
        if free >= i64::from(self.amount()) {
            return match self.take(&queued, &numbers).await? {
                Taken::Yes(reply) => Ok(Some(reply)),
                Taken::Lost | Taken::Again => Ok(None),
            };
        }
        match self.waiter {
            Some(_) => self.waits(&queued).await.map(Some),
            None => self.is_refused(numbers.held == 0).await.map(Some),
        }
    }

    /// Whether more permits are wanted than exist, so that others must not wait for this request.
    fn is_too_much(&self, numbers: &Numbers) -> bool {
        let total = numbers.total.map(|(total, _)| total);
        self.request.limit.is_none() && total.is_some_and(|total| i64::from(self.amount()) > total)
    }

    /// Keeps the position, or waits for those that are about to take their permits. `None` if the own node may be first.
    async fn behind(
        &self,
        queued: Queued,
        numbers: Numbers,
        (first, position): (Node, Position),
    ) -> Result<Option<AcquireReply>, StoreError> {
        if self.is_too_much(&numbers) {
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
        let free = numbers.free(self.request.limit);
        let is_enough = free.is_some_and(|free| free >= i64::from(self.amount()));
        if !is_enough || !self.comes_first(&queued, &first).await? {
            return self.is_refused(true).await.map(Some);
        }
        let state = State::First {
            node: queued.node,
            czxid: queued.czxid,
        };
        self.core.grants.set(self.id(), state);
        Ok(None)
    }

    /// Waits for a short time until the own node is first. `false` at once if the first is one that waits.
    async fn comes_first(&self, queued: &Queued, first: &Node) -> Result<bool, StoreError> {
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

    /// Shows others that the own node is that of a waiter.
    async fn waits(&self, queued: &Queued) -> Result<AcquireReply, StoreError> {
        let mark = Request::Set {
            path: self.core.path_of(self.queue, &queued.node.name),
            data: waiting(self.id()),
        };
        match self.core.session.ask(mark).answer().await?.reply {
            Ok(_) | Err(Code::NO_NODE) => Ok(self.keeps(ASK_EVERY)),
            Err(code) => Err(refused(code, "to mark the node of a waiter")),
        }
    }

    /// The reply to a waiter, whose position lasts until it is notified.
    fn keeps(&self, again: Duration) -> AcquireReply {
        self.core.grants.extend(self.id(), Instant::now() + 2 * ASK_EVERY);
        AcquireReply::Busy(Busy::new(None).again(again))
    }

    /// Refuses a caller without a position. It is not notified of each change that may let it continue if others are
    /// before it, or if nothing is held that could be released.
    async fn is_refused(&self, asks_again: bool) -> Result<AcquireReply, StoreError> {
        self.leaves().await?;
        let busy = Busy::new(None);
        Ok(AcquireReply::Busy(match asks_again {
            true => busy.again(ASK_WITHOUT_POSITION),
            false => busy,
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

    /// Takes the permits.
    async fn take(&self, queued: &Queued, numbers: &Numbers) -> Result<Taken, StoreError> {
        let (core, amount, grant) = (self.core, self.amount(), self.request.grant);
        let own = Own {
            lock: self.queue.clone(),
            mark: Mark::draw(),
            epoch: queued.epoch,
            state: State::Takes {
                node: Some(queued.node.clone()),
                amount,
            },
            deadline: self.called + self.request.lease,
        };
        let request = Request::Multi(self.changes(queued, numbers, &own));
        let (bytes, limit) = (
            request.bytes(core.session.config().acl),
            core.session.config().largest_request,
        );
        if bytes > limit {
            self.leaves().await?;
            let message =
                format!("{amount} permits at once take a request of {bytes} bytes, and it has up to {limit}");
            return Err(StoreError::not_done(Reason::Refused, message));
        }
        core.grants.remove(self.id());
        core.grants.insert(grant, own.clone());
        let Answer { reply, epoch } = match core.session.ask(request).answer().await {
            Ok(answer) => answer,
            Err(NoReply::Lost(_, error) | NoReply::NotSent(error)) => return Err(error),
        };
        let codes = match reply {
            Ok(Reply::Multi(codes)) => codes,
            Ok(_) => return Err(StoreError::unknown("the answer of another request came")),
            // The nodes of the session are gone.
            Err(Code::SESSION_EXPIRED) => vec![Code::NO_NODE],
            Err(code) => return Err(refused(code, "to take permits")),
        };
        let failed = codes
            .iter()
            .position(|code| *code != Code::OK && *code != Code::ROLLED_BACK);
        let Some(failed) = failed else {
            let held = Own {
                state: State::Permits(amount),
                epoch,
                ..own
            };
            let granted = core.granted(grant, held, queued.czxid, self.called, self.request.lease)?;
            return Ok(Taken::Yes(granted));
        };
        // Nothing was changed.
        core.grants.remove(grant);
        if failed == 0 && codes[0] == Code::NO_NODE {
            return Ok(Taken::Lost);
        }
        let state = State::First {
            node: queued.node.clone(),
            czxid: queued.czxid,
        };
        self.is_in(queued, state);
        match codes[failed] {
            Code::NO_NODE | Code::BAD_VERSION | Code::NODE_EXISTS => Ok(Taken::Again),
            code => {
                self.leaves().await?;
                Err(refused(code, "to take permits"))
            }
        }
    }

    /// The changes by which the first in the queue takes permits.
    fn changes(&self, queued: &Queued, numbers: &Numbers, own: &Own) -> Vec<Change> {
        let core = self.core;
        let node = core.path_of(self.queue, &queued.node.name);
        let mut changes = vec![Change::Check {
            path: node.clone(),
            version: -1,
        }];
        changes.extend(numbers.total.map(|(_, version)| Change::Check {
            path: core.path(&total_of(self.semaphore)),
            version,
        }));
        let (path, data) = (core.path(&leases_of(self.semaphore)), Vec::new());
        changes.push(match numbers.leases {
            Some(version) => Change::Set { path, data, version },
            // Only together with its children: servers never remove a container that had none.
            None => Change::Create {
                path,
                data,
                mode: Mode::Container,
            },
        });
        let leases = core.leases(own, self.amount()).into_iter();
        changes.extend(leases.map(|path| Change::Create {
            path,
            data: self.request.grant.to_string().into_bytes(),
            mode: Mode::Ephemeral,
        }));
        changes.push(Change::Delete {
            path: node,
            version: -1,
        });
        changes
    }
}
