//! When the connections to a server were last heard of.

use tokio::time::Instant;

use super::replicas::ConnectionRole;
use crate::base::clock;

/// How many calls in a row may stay unanswered before the connection is given up.
pub(super) const SILENT: u32 = 2;

/// When a connection last received something, and what is missing.
pub(super) struct LastResponse {
    /// When the last answer came.
    pub(super) at: Instant,
    /// How many calls in a row were not answered in time.
    unanswered: u32,
}

impl LastResponse {
    fn just_now() -> LastResponse {
        LastResponse {
            at: clock::now(),
            unanswered: 0,
        }
    }
}

/// When each of the two connections was heard of.
pub(super) struct Contacts {
    usual: LastResponse,
    acknowledged: LastResponse,
}

impl Contacts {
    /// Both have just been answered.
    pub(super) fn new() -> Contacts {
        Contacts {
            usual: LastResponse::just_now(),
            acknowledged: LastResponse::just_now(),
        }
    }

    pub(super) fn on(&self, role: ConnectionRole) -> &LastResponse {
        match role {
            ConnectionRole::Usual => &self.usual,
            ConnectionRole::Acknowledged => &self.acknowledged,
        }
    }

    fn on_mut(&mut self, role: ConnectionRole) -> &mut LastResponse {
        match role {
            ConnectionRole::Usual => &mut self.usual,
            ConnectionRole::Acknowledged => &mut self.acknowledged,
        }
    }

    pub(super) fn answered(&mut self, role: ConnectionRole) {
        *self.on_mut(role) = LastResponse::just_now();
    }

    pub(super) fn unanswered(&mut self, role: ConnectionRole) {
        self.on_mut(role).unanswered += 1;
    }

    pub(super) fn is_silent(&self) -> bool {
        self.usual.unanswered.max(self.acknowledged.unanswered) >= SILENT
    }

    /// Which of them is silent.
    pub(super) fn silent_role(&self) -> Option<ConnectionRole> {
        match (self.usual.unanswered, self.acknowledged.unanswered) {
            (0, 0) => None,
            (0, _) => Some(ConnectionRole::Acknowledged),
            _ => Some(ConnectionRole::Usual),
        }
    }
}
