//! Fair locks: the node of a waiter stays in the queue, which is that of Curator's `InterProcessMutex`.
//!
//! A waiter watches only the node before it, so that a release wakes one waiter. Its requests are answered here while that
//! node is watched and nothing was told of it.
//! When it is first, it writes to its own node: the reply shows that a quorum has the node, so that the session is kept,
//! and the data of the node shows others that it no longer waits.
//!
//! The position lasts as long as the session, unless the waiter sends no request for a while: then it ends once it is first.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{AcquireReply, AcquireRequest, Busy, GrantId, Outcome, Reason, StoreError};
use tokio::time::Instant;

use crate::core::{Core, listed};
use crate::followers::Watched;
use crate::grants::{Own, Position, State};
use crate::inspect::waiting;
use crate::layout::{permits_topic, semaphore_of, semaphore_with};
use crate::names::Node;
use crate::session::{Answer, refused};
use crate::wire::{Code, Reply, Request};

/// How long a waiter that sends no request keeps its position when it is first.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// The topic on which a waiter for a fair lock is notified.
pub(crate) fn position_topic(lock: &str, grant: GrantId) -> String {
    format!("{grant} {lock}")
}

impl Position {
    /// The position of a node among all nodes of the lock, given in queue order; `None` if nothing is before it.
    pub(crate) fn among(nodes: &[Node], node: Node, czxid: u64) -> Option<Position> {
        let mut earlier = (nodes.iter().rev()).filter(|other| other.position < node.position);
        let before = earlier.next()?.clone();
        let is_next = earlier.next().is_none();
        Some(Position {
            node,
            czxid,
            before,
            is_next,
        })
    }
}

/// The state of the node before that of a waiter.
enum Before {
    There,
    Deleted,
    /// Deleted, or the server has not caught up with its creation.
    Missing,
}

/// Where a waiter stands in the queue.
pub(crate) enum Place {
    First,
    Behind,
    /// Its node is gone.
    Lost,
}

impl Core {
    /// Takes a position for a waiter whose node was just created.
    pub(crate) async fn join(
        &self,
        grant: GrantId,
        own: Own,
        request: &AcquireRequest,
        called: Instant,
    ) -> Result<AcquireReply, StoreError> {
        let State::Waits(position) = &own.state else {
            return Err(StoreError::unknown("the node of a waiter has no position"));
        };
        let mark = Request::Set {
            path: self.path_of(&own.lock, &position.node.name),
            data: waiting(grant),
        };
        self.grants.insert(grant, own);
        // Sent together with the next request.
        let marked = self.session.ask(mark);
        let reply = self.ask_again(request, called).await;
        if let Err(code) = marked.answer().await?.reply {
            return Err(refused(code, "to mark the node of a waiter"));
        }
        reply?.ok_or_else(|| StoreError::not_done(Reason::Unreachable, "the node of a waiter was removed"))
    }

    /// Returns the reply to a waiter with a position; `None` if it has none. A failure leaves the position as it is.
    pub(crate) async fn ask_again(
        &self,
        request: &AcquireRequest,
        called: Instant,
    ) -> Result<Option<AcquireReply>, StoreError> {
        let grant = request.grant;
        self.grants.keep_position(grant, Instant::now() + KEPT_FOR);
        let placed = match self.position(grant) {
            Some((own, position)) => self.serve(own, position, request, called).await,
            None => Ok(None),
        };
        // The reply may have taken long.
        self.grants.keep_position(grant, Instant::now() + KEPT_FOR);
        placed.map_err(|mut error| {
            error.outcome = Outcome::NotDone;
            error
        })
    }

    /// The position of a waiter in this session.
    fn position(&self, grant: GrantId) -> Option<(Own, Position)> {
        let own = self.grants.get(grant)?;
        match &own.state {
            State::Waits(position) if own.epoch == self.session.epoch() => {
                let position = position.clone();
                Some((own, position))
            }
            _ => None,
        }
    }

    async fn serve(
        &self,
        own: Own,
        position: Position,
        request: &AcquireRequest,
        called: Instant,
    ) -> Result<Option<AcquireReply>, StoreError> {
        let grant = request.grant;
        let (node, token) = (position.node.clone(), position.czxid);
        match self.place(grant, &own, position).await? {
            Place::Behind => return Ok(Some(AcquireReply::Busy(Busy::new(None)))),
            Place::Lost => {
                self.grants.remove(grant);
                return Ok(None);
            }
            Place::First => {}
        }
        let take = Request::Set {
            path: self.path_of(&own.lock, &node.name),
            data: grant.to_string().into_bytes(),
        };
        let Answer { reply, epoch } = self.session.ask(take).answer().await?;
        let version = match reply {
            Ok(Reply::Set { version }) if epoch == own.epoch => version,
            Ok(Reply::Set { .. }) | Err(Code::NO_NODE | Code::SESSION_EXPIRED) => {
                self.grants.remove(grant);
                return Ok(None);
            }
            Ok(_) => return Err(StoreError::unknown("the answer of another request came")),
            Err(code) => return Err(refused(code, "to take a lock")),
        };
        let held = Own {
            state: State::Held { node, version },
            deadline: called + request.lease,
            ..own
        };
        self.granted(grant, held, token, called, request.lease).map(Some)
    }

    /// Determines where a waiter stands, and watches the node before it.
    pub(crate) async fn place(
        &self,
        grant: GrantId,
        own: &Own,
        mut position: Position,
    ) -> Result<Place, StoreError> {
        loop {
            match self.watch_before(grant, &own.lock, &position.before).await? {
                Before::There => return Ok(Place::Behind),
                Before::Deleted if position.is_next => return Ok(Place::First),
                Before::Deleted | Before::Missing => {}
            }
            let nodes = self.nodes_with(&own.lock, &position.node).await?;
            if !nodes.contains(&position.node) {
                return Ok(Place::Lost);
            }
            let Some(now) = Position::among(&nodes, position.node, position.czxid) else {
                return Ok(Place::First);
            };
            self.grants.set(grant, State::Waits(now.clone()));
            position = now;
        }
    }

    /// Looks at the node before that of a waiter, unless it is watched. If it exists, the waiter is told of its end.
    async fn watch_before(&self, grant: GrantId, lock: &str, before: &Node) -> Result<Before, StoreError> {
        let path = self.path_of(lock, &before.name);
        let topic: Arc<str> = match semaphore_of(lock) {
            Some(semaphore) => permits_topic(semaphore).into(),
            None => position_topic(lock, grant).into(),
        };
        match self.followers.look(&path, &topic) {
            Watched::Deleted => return Ok(Before::Deleted),
            Watched::There(_) => return Ok(Before::There),
            Watched::Unknown => {}
        }
        // Before the request: the end may be told before its reply is handled.
        self.followers.asks(&path, topic.clone());
        // Of a node that cannot have children this watch tells only the end.
        let watch = Request::Children {
            path: path.clone(),
            watch: true,
        };
        match self.session.ask(watch).answer().await?.reply {
            Ok(_) => {
                self.followers.is_there(&path, &topic);
                Ok(Before::There)
            }
            Err(Code::NO_NODE) => {
                self.followers.remove(&path);
                Ok(Before::Missing)
            }
            Err(code) => {
                self.followers.remove(&path);
                Err(refused(code, "to watch the node before that of a waiter"))
            }
        }
    }

    /// Lists the nodes of a lock. If this node is missing, the server may be behind, and catches up first.
    pub(crate) async fn nodes_with(&self, lock: &str, node: &Node) -> Result<Vec<Node>, StoreError> {
        let nodes = listed(self.session.ask(self.children(lock, false))).await?;
        match nodes.contains(node) {
            true => Ok(nodes),
            false => self.nodes(lock).await,
        }
    }

    /// Notifies the waiter behind a node that has changed.
    pub(crate) fn tell_follower(&self, path: &str, is_deleted: bool) {
        let Some(topic) = self.followers.changed(path, is_deleted) else {
            return;
        };
        match semaphore_with(&topic) {
            Some(semaphore) => self.tell_permits(semaphore),
            None => drop(self.hub.tell(&topic)),
        }
    }

    /// Whether this is a waiter that is not known to be first.
    pub(crate) async fn waits_behind_others(&self, grant: GrantId) -> bool {
        match self.position(grant) {
            Some((own, position)) => !matches!(
                self.place(grant, &own, position).await,
                Ok(Place::First | Place::Lost)
            ),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(names: &[&str]) -> Vec<Node> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        Node::sorted(&names)
    }

    #[test]
    fn waiter_follows_the_node_directly_before_it() {
        let own = Node::parse("lock-0000000007").unwrap();
        for (others, before) in [
            (&["lock-0000000008"][..], None),
            (
                &["lock-0000000005", "lock-0000000008"],
                Some(("lock-0000000005", true)),
            ),
            (
                &["_c_a-lock-0000000006", "lock-0000000005"],
                Some(("_c_a-lock-0000000006", false)),
            ),
        ] {
            let all = nodes(&[others, &["lock-0000000007"]].concat());
            let position = Position::among(&all, own.clone(), 1);
            let found = position.as_ref().map(|at| (at.before.name.as_str(), at.is_next));
            assert_eq!(found, before, "{others:?}");
        }
    }
}
