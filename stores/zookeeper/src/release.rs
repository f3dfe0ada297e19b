//! Releases, and the end of leases that were not renewed.

use std::time::Duration;

use dlock::store::{GrantId, ReleaseReply, StoreError};
use tokio::time::Instant;

use crate::core::{Core, role};
use crate::grants::{Own, State};
use crate::names::Node;
use crate::session::refused;
use crate::wire::Code;

/// How soon the end of a lease is tried again that did not succeed.
const AGAIN: Duration = Duration::from_millis(200);

const NOT_HELD: ReleaseReply = ReleaseReply::NotHeld { repeated: false };
const RELEASED: ReleaseReply = ReleaseReply::Released { receivers: None };

impl Core {
    /// Ends a grant of this client; of others it knows nothing.
    pub(crate) async fn release(
        &self,
        grant: GrantId,
        kind: Option<dlock::store::Kind>,
    ) -> Result<ReleaseReply, StoreError> {
        let Some(own) = self.grants.get(grant) else {
            return Ok(NOT_HELD);
        };
        if self.session.epoch() > own.epoch {
            // The servers removed it with its session, in which nothing can be created any more.
            self.grants.remove(grant);
            return Ok(NOT_HELD);
        }
        match &own.state {
            State::Held(node) => {
                if kind.is_some_and(|kind| role(kind).ok() != Some(node.role)) {
                    return Ok(NOT_HELD);
                }
                self.delete_node(grant, &own, node, false).await
            }
            State::Leaves(node) => self.delete_node(grant, &own, node, true).await,
            State::Unknown => {
                self.undo(grant, &own, Instant::now() + 2 * self.session.lasts())
                    .await
            }
            State::Absent(until) => self.undo(grant, &own, *until).await,
        }
    }

    async fn delete_node(
        &self,
        grant: GrantId,
        own: &Own,
        node: &Node,
        repeated: bool,
    ) -> Result<ReleaseReply, StoreError> {
        // Until the reply it may be there or not, and is renewed no more.
        self.grants.set(grant, State::Leaves(node.clone()));
        let deleted = self.delete(&own.lock, node).await?;
        let reply = match deleted.reply {
            Ok(_) => RELEASED,
            Err(Code::NO_NODE) => ReleaseReply::NotHeld { repeated },
            Err(code) => return Err(refused(code, "to delete the node of a lock")),
        };
        self.grants.remove(grant);
        Ok(reply)
    }

    /// Deletes what an acquire without a reply may have created. The session goes on over another connection, and what the
    /// servers took before is seen after they have caught up.
    ///
    /// They take nothing more from the connection before, as long as the session is at another server. When it comes back
    /// to the first one, a request that has just arrived there is taken. So it is looked for after each connect, until the
    /// first one has closed a connection that was silent for as long as the session.
    async fn undo(&self, grant: GrantId, own: &Own, until: Instant) -> Result<ReleaseReply, StoreError> {
        let nodes = self.nodes(&own.lock).await?;
        match nodes.into_iter().find(|node| own.mark.is_of(&node.name)) {
            Some(node) => return self.delete_node(grant, own, &node, true).await,
            None if until > Instant::now() => self.grants.is_absent(grant, until),
            None => self.grants.remove(grant),
        }
        Ok(NOT_HELD)
    }

    /// Looks for a node that was not there, over a new connection; after an error there is another one.
    pub(crate) async fn look_again(&self, grant: GrantId) {
        if let Err(error) = self.release(grant, None).await {
            tracing::debug!(%grant, %error, "a node that may have come late could not be looked for");
        }
    }

    /// Ends a grant whose lease is over, and tries until it succeeds.
    pub(crate) async fn expire(&self, grant: GrantId) {
        // By a renewal that was on its way.
        if self.grants.was_renewed(grant, Instant::now()) {
            return;
        }
        if let Err(error) = self.release(grant, None).await {
            tracing::debug!(%grant, %error, "a lease that is over could not be ended yet");
            self.grants.again(grant, AGAIN);
        }
    }
}
