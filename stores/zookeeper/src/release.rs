//! Releases grants, and ends expired leases.

use std::time::Duration;

use dlock::store::{GrantId, Kind, Outcome, ReleaseReply, StoreError};
use futures_util::future::join_all;
use tokio::time::Instant;

use crate::core::{Core, role};
use crate::grants::{Own, Position, State};
use crate::layout::{done_of, semaphore_of};
use crate::names::Node;
use crate::session::{Answer, refused};
use crate::wire::Code;

/// The pause between attempts to end an expired lease.
const AGAIN: Duration = Duration::from_millis(200);

/// The pause between looks at the position of a waiter that sends no requests.
const LOOK_EVERY: Duration = Duration::from_secs(1);

const NOT_HELD: ReleaseReply = ReleaseReply::NotHeld { repeated: false };
const RELEASED: ReleaseReply = ReleaseReply::Released { receivers: None };

impl Core {
    /// Releases a grant of this client. A grant of another client counts as not held.
    pub(crate) async fn release(
        &self,
        grant: GrantId,
        kind: Option<Kind>,
    ) -> Result<ReleaseReply, StoreError> {
        let Some(own) = self.grants.get(grant) else {
            return Ok(NOT_HELD);
        };
        if self.session.epoch() > own.epoch {
            // The servers removed the node with its session, and nothing more can be created in that session.
            self.grants.remove(grant);
            return Ok(NOT_HELD);
        }
        match &own.state {
            State::Held { node, .. } => {
                if kind.is_some_and(|kind| role(kind).ok() != Some(node.role)) {
                    return Ok(NOT_HELD);
                }
                self.delete_node(grant, &own, node, false).await
            }
            State::Waits(position) => self.leaves(grant, &own, position).await,
            State::First { node, .. } => {
                self.delete_node(grant, &own, node, false).await?;
                Ok(NOT_HELD)
            }
            State::Leaves(node) => self.delete_node(grant, &own, node, true).await,
            State::Permits(amount) => {
                if kind.is_some_and(|kind| kind != Kind::Permit) {
                    return Ok(NOT_HELD);
                }
                // Until the reply it is unknown which leases exist.
                let node = None;
                self.grants.set(
                    grant,
                    State::Takes {
                        node,
                        amount: *amount,
                    },
                );
                self.give_back(grant, &own, None, *amount, false).await
            }
            State::Takes { node, amount } => self.give_back(grant, &own, node.as_ref(), *amount, true).await,
            State::Done => {
                let name = semaphore_of(&own.lock).unwrap_or(&own.lock);
                let deleted = self.delete_path(self.path(&done_of(name, grant))).await?;
                is_deleted(deleted, "to delete the node of a step")?;
                self.grants.remove(grant);
                Ok(NOT_HELD)
            }
            State::Unknown => {
                self.undo(grant, &own, Instant::now() + 2 * self.session.lasts())
                    .await
            }
            State::Absent(until) => self.undo(grant, &own, *until).await,
        }
    }

    /// Ends what an earlier request of this grant may have left, before it has another node. After an error that may still
    /// exist.
    pub(crate) async fn leave_earlier(&self, grant: GrantId) -> Result<(), StoreError> {
        self.release(grant, None).await.map_err(|mut error| {
            error.outcome = Outcome::Unknown;
            error
        })?;
        // A node that did not exist may come late.
        self.grants.set_aside(grant);
        Ok(())
    }

    /// Gives up the position of a waiter.
    async fn leaves(
        &self,
        grant: GrantId,
        own: &Own,
        position: &Position,
    ) -> Result<ReleaseReply, StoreError> {
        self.followers
            .remove(&self.path_of(&own.lock, &position.before.name));
        self.delete_node(grant, own, &position.node, false).await?;
        Ok(NOT_HELD)
    }

    /// Deletes the leases of a grant, and before them the node with which they may still be created.
    async fn give_back(
        &self,
        grant: GrantId,
        own: &Own,
        node: Option<&Node>,
        amount: u32,
        repeated: bool,
    ) -> Result<ReleaseReply, StoreError> {
        if let Some(node) = node {
            is_deleted(
                self.delete(&own.lock, node).await?,
                "to delete the node of a waiter",
            )?;
        }
        let deletes = self
            .leases(own, amount)
            .into_iter()
            .map(|path| self.delete_path(path));
        let mut existed = false;
        for deleted in join_all(deletes).await {
            existed |= is_deleted(deleted?, "to delete a lease")?;
        }
        self.grants.remove(grant);
        Ok(match existed {
            true => RELEASED,
            false => ReleaseReply::NotHeld { repeated },
        })
    }

    async fn delete_node(
        &self,
        grant: GrantId,
        own: &Own,
        node: &Node,
        repeated: bool,
    ) -> Result<ReleaseReply, StoreError> {
        // Until the reply it is unknown whether the node exists, so the grant is no longer renewed.
        self.grants.set(grant, State::Leaves(node.clone()));
        let deleted = self.delete(&own.lock, node).await?;
        let reply = match is_deleted(deleted, "to delete the node of a lock")? {
            true => RELEASED,
            false => ReleaseReply::NotHeld { repeated },
        };
        self.grants.remove(grant);
        self.tell_follower(&self.path_of(&own.lock, &node.name), true);
        Ok(reply)
    }

    /// Deletes the node that an acquire without a reply may have created. The session continues on another connection;
    /// after the server has caught up, it shows everything that the servers accepted before.
    ///
    /// The servers accept nothing more from the old connection while the session is at another server. When the session
    /// returns to the first server, a request that has just arrived there is accepted. So the client looks for the node
    /// after each connect, until the first server must have closed a connection that was silent for the session
    /// timeout.
    async fn undo(&self, grant: GrantId, own: &Own, until: Instant) -> Result<ReleaseReply, StoreError> {
        let nodes = self.nodes(&own.lock).await?;
        match nodes.into_iter().find(|node| own.mark.is_of(&node.name)) {
            Some(node) => return self.delete_node(grant, own, &node, true).await,
            None if until > Instant::now() => self.grants.is_absent(grant, until),
            None => self.grants.remove(grant),
        }
        Ok(NOT_HELD)
    }

    /// Looks again, on a new connection, for a node that did not exist. After an error there is another new connection.
    pub(crate) async fn look_again(&self, grant: GrantId) {
        if let Err(error) = self.release(grant, None).await {
            tracing::debug!(%grant, %error, "a node that may have come late could not be looked for");
        }
    }

    /// Ends an expired grant; repeats this until it succeeds.
    pub(crate) async fn expire(&self, grant: GrantId) {
        // A renewal was in flight.
        if self.grants.was_renewed(grant, Instant::now()) {
            return;
        }
        // A waiter for permits was notified when it could continue.
        let is_of_permits = self
            .grants
            .get(grant)
            .is_some_and(|own| semaphore_of(&own.lock).is_some());
        if !is_of_permits && self.waits_behind_others(grant).await {
            self.grants.again(grant, LOOK_EVERY);
            return;
        }
        if let Err(error) = self.release(grant, None).await {
            tracing::debug!(%grant, %error, "a lease that is over could not be ended yet");
            self.grants.again(grant, AGAIN);
        }
    }
}

/// Whether the node existed.
fn is_deleted(answer: Answer, what: &str) -> Result<bool, StoreError> {
    match answer.reply {
        Ok(_) => Ok(true),
        Err(Code::NO_NODE) => Ok(false),
        Err(code) => Err(refused(code, what)),
    }
}
