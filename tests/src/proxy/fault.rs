//! Faults that strike one command, and the handles by which a test follows them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::timeout;

use super::shared::Shared;
use crate::network::Swallow;
use crate::resp::Command;

/// How long a test waits for a fault to fire.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command that went through the proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// The number of its connection, counted from 1.
    pub connection: u64,
    /// The command.
    pub command: Command,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Deed {
    Hold,
    Lose,
    Swallow(Swallow),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Release,
    Discard,
}

#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) caught: Option<Sent>,
    pub(super) verdict: Option<Verdict>,
    pub(super) reply: Option<Bytes>,
}

pub(super) type Tracker = watch::Sender<Progress>;

pub(super) struct Rule {
    pub(super) id: u64,
    pub(super) left: u64,
    pub(super) matches: Box<dyn Fn(&Command) -> bool + Send>,
    pub(super) deed: Deed,
    pub(super) tracker: Tracker,
}

/// A fault that is armed, or has struck: from [`Proxy::swallow`](super::Proxy::swallow) and [`Proxy::lose`](super::Proxy::lose). It stays armed when this is
/// dropped.
#[derive(Debug, Clone)]
pub struct Fault {
    pub(super) tracker: Tracker,
}

impl Fault {
    /// Whether a client has sent the command that it is for. A loop over k ends when this stays false.
    pub fn fired(&self) -> bool {
        self.tracker.borrow().caught.is_some()
    }

    /// Waits until a client has sent the command that it is for, and gives that command.
    ///
    /// # Panics
    /// After a minute.
    pub async fn caught(&self) -> Sent {
        reached(&self.tracker, "the fault does not fire", |progress| {
            progress.caught.clone()
        })
        .await
    }

    /// Waits until the server's reply was swallowed, and gives its bytes.
    ///
    /// # Panics
    /// After a minute; so it always does after [`Proxy::lose`](super::Proxy::lose).
    pub async fn swallowed(&self) -> Bytes {
        reached(&self.tracker, "no reply was swallowed", |progress| {
            progress.reply.clone()
        })
        .await
    }
}

/// A command that is held back, or will be: from [`Proxy::hold`](super::Proxy::hold).
///
/// Dropping it [discards](Self::discard) the command, or disarms the fault if the command has not come yet.
#[must_use = "a dropped hold discards the command"]
pub struct Held {
    pub(super) shared: Arc<Shared>,
    pub(super) rule: u64,
    pub(super) tracker: Tracker,
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Held").field(&*self.tracker.borrow()).finish()
    }
}

impl Held {
    /// Whether a client has sent the command.
    pub fn fired(&self) -> bool {
        self.tracker.borrow().caught.is_some()
    }

    /// Waits until a client has sent the command, and gives it. It is kept from the server from then on.
    ///
    /// # Panics
    /// After a minute.
    pub async fn caught(&self) -> Sent {
        reached(&self.tracker, "no command was held", |progress| {
            progress.caught.clone()
        })
        .await
    }

    /// Lets the command go on to the server, and what stands behind it. If it has not come yet it will not be held.
    pub fn release(&self) {
        self.decide(Verdict::Release);
    }

    /// Destroys the command, and with it its connection and everything that stands behind it.
    pub fn discard(&self) {
        self.decide(Verdict::Discard);
    }

    fn decide(&self, verdict: Verdict) {
        if !self.fired() {
            self.shared.state.lock().rules.retain(|rule| rule.id != self.rule);
        }
        self.tracker.send_modify(|progress| {
            progress.verdict.get_or_insert(verdict);
        });
    }

    /// Waits until the server has answered the released command, and gives the bytes of the reply. They come this far
    /// also when the client has gone.
    ///
    /// # Panics
    /// After a minute.
    pub async fn answered(&self) -> Bytes {
        reached(&self.tracker, "the held command was not answered", |progress| {
            progress.reply.clone()
        })
        .await
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.discard();
    }
}

async fn reached<T>(tracker: &Tracker, otherwise: &str, look: impl Fn(&Progress) -> Option<T>) -> T {
    let mut progress = tracker.subscribe();
    let arrived = timeout(PATIENCE, progress.wait_for(|progress| look(progress).is_some())).await;
    let progress = arrived.unwrap_or_else(|_| panic!("{otherwise}: waited {PATIENCE:?}"));
    look(&progress.expect("the tracker lives")).expect("it was just there")
}

/// What the test decides about a held command.
pub(super) async fn verdict(tracker: &Tracker) -> Verdict {
    let mut progress = tracker.subscribe();
    let decided = progress.wait_for(|progress| progress.verdict.is_some()).await;
    decided
        .ok()
        .and_then(|progress| progress.verdict)
        .unwrap_or(Verdict::Discard)
}
