//! Whether a connection that is silent is still alive.

use std::time::Duration;

use redis::Cmd;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::actor::Actor;
use super::contacts::Contacts;
use super::in_flight::Batch;
use super::replicas::ConnectionRole;
use super::served::Served;
use super::{Plain, PlainReply};
use crate::base::clock;

/// A connection that was silent for this long is doubted if the next call on it is not answered soon.
const IDLE: Duration = Duration::from_secs(1);
/// A connection that was silent for this long is tested.
const TEST: Duration = Duration::from_secs(10);

impl Actor {
    /// When to connect a spare, unless a call is answered before.
    pub(super) fn spare_at(&self, served: &Served) -> Option<Instant> {
        let may_help = served.spare.is_none() && !served.was_tried;
        may_help.then(|| self.doubtful_from(&served.contacts)).flatten()
    }

    /// When a connection that was idle before its oldest call is doubted, unless that is answered before.
    fn doubtful_from(&self, contacts: &Contacts) -> Option<Instant> {
        // One per connection suffices: answers come in the order of the calls.
        let oldest = |role| {
            let call = self.calls.iter().find(|call| call.role == role)?;
            let was_idle = call.sent_at >= contacts.on(role).at + IDLE;
            (was_idle && !matches!(call.batch, Batch::Wait)).then_some(call.sent_at)
        };
        let timeout = self.connector.access.timeout;
        let patience = (timeout / 4).max(self.flow_control.fastest().unwrap_or_default() * 3);
        let oldest = self.roles().iter().copied().filter_map(oldest).min();
        // Later than the timeout anyway.
        oldest
            .filter(|_| patience < timeout)
            .map(|sent_at| sent_at + patience)
    }

    /// The connection for acknowledgements exists only if there are replicas.
    fn roles(&self) -> &'static [ConnectionRole] {
        match self.replicas {
            Some(_) => &[ConnectionRole::Usual, ConnectionRole::Acknowledged],
            None => &[ConnectionRole::Usual],
        }
    }

    /// When the next test of an idle connection is due.
    pub(super) fn test_at(&self, contacts: &Contacts) -> Option<Instant> {
        let idle = self.roles().iter().filter(|role| !self.is_busy(**role));
        idle.map(|role| contacts.on(*role).at + TEST).min()
    }

    /// Tests the idle connections: a dead one is found before it is needed.
    pub(super) fn test(&mut self, contacts: &Contacts, now: Instant) {
        for role in self.roles() {
            if !self.is_busy(*role) && contacts.on(*role).at + TEST <= now {
                self.ping(*role);
            }
        }
    }

    /// Whether something is under way on a connection, or waits for it alone.
    fn is_busy(&self, role: ConnectionRole) -> bool {
        self.calls.iter().any(|call| call.role == role) || self.plain.iter().any(|plain| plain.role == role)
    }

    /// Asks whether the server is there, without waiting for the answer.
    pub(super) fn ping(&mut self, role: ConnectionRole) {
        let ping = redis::cmd("PING");
        let ping = self.plain(ping, role, self.connector.access.timeout, oneshot::channel().0);
        self.plain.push_back(ping);
    }

    pub(super) fn plain(&self, cmd: Cmd, role: ConnectionRole, within: Duration, reply: PlainReply) -> Plain {
        let deadline = clock::now() + within;
        Plain {
            cmd,
            role,
            deadline,
            reply,
        }
    }
}
