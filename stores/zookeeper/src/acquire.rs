//! Acquires locks: one round trip creates a sequential node and lists the nodes before it.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{
    AcquireReply, AcquireRequest, Busy, GivenLease, GrantId, Granted, Kind, Outcome, Reason, StoreError,
};
use tokio::time::Instant;

use crate::core::{Core, key_taken, role};
use crate::grants::{Own, Position, State};
use crate::names::{Mark, Node, Role, family_beside};
use crate::seen::Seen;
use crate::session::{Answer, Epoch, NoReply, PendingReply, refused};
use crate::wire::{Code, Mode, Reply, Request};

/// How often an acquire starts again because the node of its lock was just removed.
const ATTEMPTS: u32 = 4;

/// The node that an acquire created.
struct Made {
    node: Node,
    czxid: u64,
    epoch: Epoch,
    /// All nodes of the lock, in queue order.
    nodes: Vec<Node>,
    /// The counter that the key holds.
    counter: Option<&'static str>,
}

/// An acquire in flight.
pub(crate) struct Attempt<'a> {
    pub(crate) core: &'a Core,
    pub(crate) lock: &'a Arc<str>,
    pub(crate) grant: GrantId,
    pub(crate) role: Role,
    pub(crate) mark: Mark,
    pub(crate) deadline: Instant,
    /// The write grant that contains a nested read lock.
    pub(crate) writer: Option<Node>,
}

/// The state of the node of a lock.
enum Container {
    There,
    /// The parent node is missing.
    Rootless,
    /// This client has no right to create the node; it may exist.
    Forbidden,
}

/// What precedes a node in the queue.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Holder,
    Other(Role),
}

impl Core {
    pub(crate) async fn acquire(
        &self,
        lock: Arc<str>,
        request: AcquireRequest,
        called: Instant,
    ) -> Result<AcquireReply, StoreError> {
        let role = role(request.kind)?;
        let waits = request.kind == Kind::Fair && request.queue;
        if waits {
            if let Some(reply) = self.ask_again(&request, called).await? {
                return Ok(reply);
            }
            self.leave_earlier(request.grant).await?;
        }
        let writer = match request.nested_in.filter(|_| role == Role::Read) {
            Some(grant) => match self.writer(&lock, grant) {
                Some(writer) => Some(writer),
                None => return Ok(AcquireReply::busy(Some(Duration::ZERO))),
            },
            None => None,
        };
        if !waits && writer.is_none() && self.busy.has(&lock) && self.is_still_busy(&lock, role).await? {
            return Ok(AcquireReply::Busy(Busy::new(None)));
        }
        let attempt = Attempt {
            core: self,
            lock: &lock,
            grant: request.grant,
            role,
            mark: Mark::draw(),
            deadline: called + request.lease,
            writer,
        };
        let made = attempt.make().await?;
        if made.node.position.is_exhausted() {
            attempt.undo(&made.node, made.epoch).await?;
            return Err(self.exhausted(&lock));
        }
        if let Some(counter) = made.counter {
            attempt.undo(&made.node, made.epoch).await?;
            return Err(key_taken(counter));
        }
        match found(&made.nodes, &made.node, attempt.writer.as_ref()) {
            Found::Nothing => {
                self.busy.forget(&lock);
                attempt.granted(made, called, request.lease)
            }
            Found::Holder if waits => attempt.joins(made, &request, called).await,
            Found::Holder => {
                self.busy.add(&lock);
                let others = made.nodes.iter().filter(|node| node.name != made.node.name);
                self.tell(&lock, &self.watches.meet(&lock, Seen::of(others)));
                attempt.undo(&made.node, made.epoch).await?;
                Ok(AcquireReply::Busy(Busy::new(None)))
            }
            Found::Other(other) => {
                attempt.undo(&made.node, made.epoch).await?;
                Err(key_taken(other.family()))
            }
        }
    }
}

impl Core {
    /// Whether a new node of this role would not get the lock. It is asked before a node is created for a lock that was busy:
    /// others cannot tell a node that is about to be deleted from that of a holder.
    async fn is_still_busy(&self, lock: &Arc<str>, role: Role) -> Result<bool, StoreError> {
        let nodes = self.nodes(lock).await.map_err(|mut error| {
            // Nothing was asked for.
            error.outcome = Outcome::NotDone;
            error
        })?;
        if !nodes.iter().any(|node| is_in_the_way(node, role)) {
            return Ok(false);
        }
        self.tell(lock, &self.watches.meet(lock, Seen::of(nodes.iter())));
        Ok(true)
    }

    /// The node of a write grant of this lock that is held in this session.
    fn writer(&self, lock: &str, grant: GrantId) -> Option<Node> {
        let (of, node, _) = self.grants.held(grant, self.session.epoch())?;
        (*of == *lock && node.role == Role::Write).then_some(node)
    }

    /// Records a grant.
    pub(crate) fn granted(
        &self,
        grant: GrantId,
        own: Own,
        token: u64,
        called: Instant,
        asked: Duration,
    ) -> Result<AcquireReply, StoreError> {
        let Some(kept_until) = self.session.kept_until(own.epoch) else {
            // The session ended, and the node with it.
            self.grants.remove(grant);
            return Err(StoreError::not_done(
                Reason::Unreachable,
                "the session with ZooKeeper expired",
            ));
        };
        self.grants.insert(grant, own);
        let granted = Granted::new(token);
        Ok(AcquireReply::Acquired(match given(kept_until, called, asked) {
            Some(lease) => granted.lease(lease),
            None => granted,
        }))
    }
}

impl Attempt<'_> {
    /// Creates the node, and lists the nodes of the lock.
    async fn make(&self) -> Result<Made, StoreError> {
        let session = &self.core.session;
        for attempt in 0..ATTEMPTS {
            let (container, create, children) = if attempt == 0 && self.core.made.has(self.lock) {
                let [create, children] = session.send([self.create(), self.core.children(self.lock, false)]);
                (Container::There, create, children)
            } else {
                let requests = [
                    self.core.container(self.lock),
                    self.create(),
                    self.core.children(self.lock, false),
                ];
                let [container, create, children] = session.send(requests);
                (self.contained(container).await?, create, children)
            };
            if let Some((node, czxid, epoch)) = self.created(create).await? {
                let names = self.list(children, &node, epoch).await?;
                return Ok(Made {
                    node,
                    czxid,
                    epoch,
                    nodes: Node::sorted(&names),
                    counter: family_beside(&names, None),
                });
            }
            self.core.made.forget(self.lock);
            match container {
                Container::There => {}
                Container::Rootless => self.core.make_root().await?,
                Container::Forbidden => return Err(refused(Code::NO_AUTH, "to create the node of the lock")),
            }
        }
        Err(StoreError::not_done(
            Reason::RefusedForNow,
            "the node of the lock was removed again and again",
        ))
    }

    pub(crate) fn create(&self) -> Request {
        let (name, mode) = match &self.writer {
            Some(writer) => (writer.beside(&self.mark, self.role), Mode::Ephemeral),
            None => (self.mark.prefix(self.role), Mode::Sequential),
        };
        Request::Create {
            path: self.core.path_of(self.lock, &name),
            data: self.grant.to_string().into_bytes(),
            mode,
        }
    }

    async fn contained(&self, container: PendingReply) -> Result<Container, StoreError> {
        let answer = match container.answer().await {
            Ok(answer) => answer,
            // The acquire was sent right after this request, and may have been carried out.
            Err(NoReply::Lost(epoch, error)) => return Err(self.unknown(State::Unknown, epoch, error)),
            Err(NoReply::NotSent(error)) => return Err(error),
        };
        match answer.reply {
            Ok(_) | Err(Code::NODE_EXISTS) => {
                self.core.made.add(self.lock);
                Ok(Container::There)
            }
            Err(Code::NO_NODE) => Ok(Container::Rootless),
            // A client does not need the right to create a node that exists.
            Err(Code::NO_AUTH) => Ok(Container::Forbidden),
            Err(code) => {
                let error = refused(code, "to create the node of the lock");
                Err(self.unknown(State::Unknown, answer.epoch, error))
            }
        }
    }

    /// Returns the node that was created; `None` if the node of the lock does not exist.
    pub(crate) async fn created(
        &self,
        create: PendingReply,
    ) -> Result<Option<(Node, u64, Epoch)>, StoreError> {
        let Answer { reply, epoch } = match create.answer().await {
            Ok(answer) => answer,
            Err(NoReply::Lost(epoch, error)) => return Err(self.unknown(State::Unknown, epoch, error)),
            Err(NoReply::NotSent(error)) => return Err(error),
        };
        match reply {
            Ok(Reply::Created { path, czxid }) => {
                let name = path.rsplit_once('/').map_or("", |(_, name)| name);
                match Node::parse(name) {
                    Some(node) => Ok(Some((node, czxid.unsigned_abs(), epoch))),
                    None => {
                        let error = StoreError::unknown("a node was created that is no part of a lock");
                        Err(self.unknown(State::Unknown, epoch, error))
                    }
                }
            }
            Err(Code::NO_NODE) => Ok(None),
            Err(code) if !code.is_unknown() => Err(refused(code, "to create a node in that of the lock")),
            reply => {
                let error = StoreError::unknown(format!("the node may have been created or not: {reply:?}"));
                Err(self.unknown(State::Unknown, epoch, error))
            }
        }
    }

    /// The names of all nodes of the lock.
    async fn list(
        &self,
        children: PendingReply,
        node: &Node,
        epoch: Epoch,
    ) -> Result<Vec<String>, StoreError> {
        let error = match children.answer().await {
            Ok(Answer {
                reply: Ok(Reply::Children(names)),
                ..
            }) => return Ok(names),
            Ok(Answer { reply: Err(code), .. }) => {
                self.undo(node, epoch).await?;
                return Err(refused(code, "to list the nodes of the lock"));
            }
            Ok(_) => StoreError::unknown("the answer of another request came"),
            Err(no_reply) => no_reply.into(),
        };
        Err(self.unknown(State::Leaves(node.clone()), epoch, error))
    }

    /// Records the node that may exist, and returns the error with an unknown outcome.
    fn unknown(&self, state: State, epoch: Epoch, mut error: StoreError) -> StoreError {
        self.keep(state, epoch);
        error.outcome = Outcome::Unknown;
        error
    }

    fn keep(&self, state: State, epoch: Epoch) {
        self.core.grants.insert(self.grant, self.own(state, epoch));
    }

    fn own(&self, state: State, epoch: Epoch) -> Own {
        Own {
            lock: self.lock.clone(),
            mark: self.mark.clone(),
            epoch,
            state,
            deadline: self.deadline,
        }
    }

    fn granted(&self, made: Made, called: Instant, asked: Duration) -> Result<AcquireReply, StoreError> {
        let own = self.own(
            State::Held {
                node: made.node,
                version: 0,
            },
            made.epoch,
        );
        self.core.granted(self.grant, own, made.czxid, called, asked)
    }

    /// Keeps the node as the position of a waiter. After an error it has none.
    async fn joins(
        &self,
        made: Made,
        request: &AcquireRequest,
        called: Instant,
    ) -> Result<AcquireReply, StoreError> {
        let (node, epoch) = (made.node.clone(), made.epoch);
        let joined = match Position::among(&made.nodes, made.node, made.czxid) {
            Some(position) => {
                let own = self.own(State::Waits(position), epoch);
                self.core.join(self.grant, own, request, called).await
            }
            None => Err(StoreError::unknown("nothing is before the node of a waiter")),
        };
        joined.map_err(|error| self.unknown(State::Leaves(node), epoch, error))
    }

    /// Deletes the node of an acquire that did not get the lock.
    async fn undo(&self, node: &Node, epoch: Epoch) -> Result<(), StoreError> {
        let error = match self.core.delete(self.lock, node).await {
            Ok(Answer {
                reply: Ok(_) | Err(Code::NO_NODE),
                ..
            }) => return Ok(()),
            Ok(Answer { reply: Err(code), .. }) => refused(code, "to delete a node"),
            Err(no_reply) => no_reply.into(),
        };
        Err(self.unknown(State::Leaves(node.clone()), epoch, error))
    }
}

/// Returns the lease that the session provides if it is shorter than the requested one.
pub(crate) fn given(kept_until: Moment, called: Instant, asked: Duration) -> Option<GivenLease> {
    // Later than that if the machine was suspended since, which makes the lease shorter.
    let called = Moment::now().earlier_by(called.elapsed());
    shorter(kept_until, called, asked)
}

fn shorter(kept_until: Moment, called: Moment, asked: Duration) -> Option<GivenLease> {
    let left = kept_until.since(called);
    (left < asked).then(|| GivenLease::new(left))
}

/// Determines whether an earlier node conflicts with this one.
fn found(nodes: &[Node], own: &Node, writer: Option<&Node>) -> Found {
    if let Some(writer) = writer {
        // A nested reader precedes all nodes behind its writer.
        return match nodes.contains(writer) {
            true => Found::Nothing,
            false => Found::Holder,
        };
    }
    let before = || nodes.iter().filter(|node| node.position < own.position);
    if let Some(other) = before().find(|node| !node.role.is_of_family(own.role)) {
        return Found::Other(other.role);
    }
    // A nested reader has the number of its writer.
    match before().any(|node| is_in_the_way(node, own.role)) {
        true => Found::Holder,
        false => Found::Nothing,
    }
}

/// Whether a node behind this one, of such a role, does not have the lock.
fn is_in_the_way(node: &Node, behind: Role) -> bool {
    node.role.is_of_family(behind) && (behind != Role::Read || node.role == Role::Write)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str) -> Node {
        Node::parse(name).unwrap()
    }

    #[test]
    fn a_node_has_the_lock_where_nothing_is_in_its_way() {
        for (before, own, wanted) in [
            (&[][..], "lock-0000000007", Found::Nothing),
            (&["lock-0000000006"], "lock-0000000007", Found::Holder),
            (&["lock-0000000008"], "lock-0000000007", Found::Nothing),
            (&["__READ__0000000006"], "__READ__0000000007", Found::Nothing),
            (&["__WRIT__0000000006"], "__READ__0000000007", Found::Holder),
            (&["__WRIT__0000000008"], "__READ__0000000007", Found::Nothing),
            (
                &["__READ__0000000005", "__WRIT__0000000006"],
                "__READ__0000000007",
                Found::Holder,
            ),
            (&["__READ__0000000006"], "__WRIT__0000000007", Found::Holder),
            (
                &["lock-0000000006"],
                "__READ__0000000007",
                Found::Other(Role::Mutex),
            ),
            (
                &["__READ__0000000006"],
                "lock-0000000007",
                Found::Other(Role::Read),
            ),
        ] {
            let own = node(own);
            let nodes: Vec<Node> = before
                .iter()
                .map(|name| node(name))
                .chain([own.clone()])
                .collect();
            assert_eq!(found(&nodes, &own, None), wanted, "{before:?} {own:?}");
        }
    }

    #[test]
    fn reader_under_its_writer_needs_it_to_be_there() {
        let (writer, reader) = (node("__WRIT__0000000001"), node("__READ__0000000001"));
        let nodes = [writer.clone(), reader.clone()];
        assert_eq!(found(&nodes, &reader, Some(&writer)), Found::Nothing);
        assert_eq!(found(&nodes[1..], &reader, Some(&writer)), Found::Holder);
    }

    #[test]
    fn lease_is_never_longer_than_the_session_is_kept() {
        let (now, s) = (Moment::now(), Duration::from_secs);
        assert_eq!(shorter(now + s(10), now, s(30)), Some(GivenLease::new(s(10))));
        assert_eq!(shorter(now + s(40), now, s(30)), None);
        assert_eq!(
            shorter(now, now + s(1), s(30)),
            Some(GivenLease::new(Duration::ZERO))
        );
        assert!(given(Moment::now() + s(10), Instant::now(), s(30)).is_some());
        assert_eq!(given(Moment::now() + s(40), Instant::now(), s(30)), None);
    }
}
