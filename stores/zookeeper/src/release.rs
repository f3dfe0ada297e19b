//! Releases grants, and ends expired leases.

use std::time::Duration;

use dlock::store::{GrantId, ReleaseReply, StoreError};
use tokio::time::Instant;

use crate::core::{Core, role};
use crate::grants::{Own, Position, State};
use crate::names::Node;
use crate::session::refused;
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
        kind: Option<dlock::store::Kind>,
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
            State::Leaves(node) => self.delete_node(grant, &own, node, true).await,
            State::Unknown => {
                self.undo(grant, &own, Instant::now() + 2 * self.session.lasts())
                    .await
            }
            State::Absent(until) => self.undo(grant, &own, *until).await,
        }
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
        let reply = match deleted.reply {
            Ok(_) => RELEASED,
            Err(Code::NO_NODE) => ReleaseReply::NotHeld { repeated },
            Err(code) => return Err(refused(code, "to delete the node of a lock")),
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
        if self.waits_behind_others(grant).await {
            self.grants.again(grant, LOOK_EVERY);
            return;
        }
        if let Err(error) = self.release(grant, None).await {
            tracing::debug!(%grant, %error, "a lease that is over could not be ended yet");
            self.grants.again(grant, AGAIN);
        }
    }
}
