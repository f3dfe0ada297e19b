//! What the locks of a client go through, for those who listen: the same that logs and metrics are told.
//!
//! Telling never waits: the last events are kept for each listener, and one that is too slow misses the oldest.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::LockKey;
use crate::base::report::{Intervention, LossReason};
use crate::runtime::emit::meter::Ended;
use crate::store::{GrantId, Kind};

/// How many events a listener may be behind.
const KEPT: usize = 1024;

/// The listeners of a client. Nothing is made up for them before there is one.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    sender: OnceLock<broadcast::Sender<LockEvent>>,
}

impl Listeners {
    pub(crate) fn listen(&self) -> LockEvents {
        let sender = self.sender.get_or_init(|| broadcast::Sender::new(KEPT));
        LockEvents {
            receiver: sender.subscribe(),
            dropped: 0,
        }
    }

    /// Whether anybody listens.
    pub(crate) fn is_heard(&self) -> bool {
        self.sender
            .get()
            .is_some_and(|sender| sender.receiver_count() > 0)
    }
}

/// Of which lock or hold an event is.
#[derive(Clone, Copy)]
pub(crate) struct Of<'a> {
    pub(crate) listeners: &'a Listeners,
    pub(crate) key: &'a LockKey,
    pub(crate) kind: Kind,
    pub(crate) grant: Option<GrantId>,
}

impl Of<'_> {
    pub(super) fn tell(self, what: impl FnOnce() -> LockEventKind) {
        if let Some(sender) = self.listeners.sender.get()
            && sender.receiver_count() > 0
        {
            // The last listener may have gone in this moment.
            let _ = sender.send(LockEvent {
                key: self.key.clone(),
                kind: self.kind,
                grant: self.grant.map(|grant| grant.to_string()),
                what: what(),
            });
        }
    }
}

/// What a lock of this client went through, see [`LockClient::events`](crate::LockClient::events).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let mut events = client.events();
/// client.lock("report").try_acquire().await?.release().await?;
/// let event = events.next().await.expect("the client is there");
/// println!("{} {}: {:?}", event.kind, event.key, event.what);
/// assert_eq!(event.key.as_str(), "report");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockEvent {
    /// The lock.
    pub key: LockKey,
    /// What kind of lock it was acquired as.
    pub kind: Kind,
    /// The hold, by its id on the store; `None` where the event is one of a call. A lock that is handed off keeps it.
    pub grant: Option<String>,
    /// What happened.
    pub what: LockEventKind,
}

/// What happened to a lock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::operations::LockEventKind;
///
/// let client = dlock::LockClient::memory();
/// let mut events = client.events();
/// drop(client.lock("report").acquire().await?);
/// while let Some(event) = events.next().await {
///     match event.what {
///         LockEventKind::Granted { token, .. } => println!("{} is held, with token {token}", event.key),
///         LockEventKind::Lost { reason, .. } => println!("{} was lost: {reason}", event.key),
///         LockEventKind::Ended { .. } => break,
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockEventKind {
    /// This process holds the lock from now on: the store gave it, or another caller in this process handed it off. Permits
    /// of an [`UnownedSemaphore`](crate::UnownedSemaphore) are nobody's: no [`Ended`](Self::Ended) follows for them.
    #[non_exhaustive]
    Granted {
        /// Its fencing token.
        token: u64,
        /// It was handed off.
        handed_off: bool,
    },
    /// A call has the lock: the first one on a hold, or one that re-entered.
    #[non_exhaustive]
    Acquired {
        /// How long it waited.
        waited: Duration,
    },
    /// A call failed, or its wait was over.
    #[non_exhaustive]
    NotAcquired {
        /// How long it waited.
        waited: Duration,
        /// Its error.
        error: String,
    },
    /// A call was dropped before it had the lock.
    #[non_exhaustive]
    Cancelled {
        /// How long it waited.
        waited: Duration,
    },
    /// A renewal came late: less than a third of the lease was left.
    #[non_exhaustive]
    NearMiss {
        /// For how long the hold was certain when the renewal arrived.
        left: Duration,
    },
    /// The store has not confirmed the hold when it was due.
    Suspect,
    /// The store has confirmed the hold after all.
    Confirmed,
    /// The holder is asked to stop.
    #[non_exhaustive]
    Revoked {
        /// By whom, and why.
        intervention: Intervention,
    },
    /// The hold was lost.
    #[non_exhaustive]
    Lost {
        /// Why, as far as this process knows.
        reason: LossReason,
    },
    /// The end of the hold is certain: the store has confirmed it, another caller in this process has it, or it was lost.
    #[non_exhaustive]
    Ended {
        /// How it ended.
        how: HoldEnd,
        /// How long it was held.
        held: Duration,
    },
}

/// How a hold ended, as an event says it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::operations::{HoldEnd, LockEventKind};
///
/// let client = dlock::LockClient::memory();
/// let mut events = client.events();
/// client.lock("report").acquire().await?.release().await?;
/// while let Some(event) = events.next().await {
///     if let LockEventKind::Ended { how, held, .. } = event.what {
///         assert_eq!(how, HoldEnd::Released);
///         println!("{} was held for {held:?}", event.key);
///         break;
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HoldEnd {
    /// It was released.
    Released,
    /// Its guard was dropped.
    Dropped,
    /// It was handed off to another caller in this process.
    HandedOff,
    /// It was lost, or its release found that the store had lost it.
    Lost,
}

impl From<Ended> for HoldEnd {
    fn from(ended: Ended) -> HoldEnd {
        match ended {
            Ended::Released => HoldEnd::Released,
            Ended::Dropped => HoldEnd::Dropped,
            Ended::Handoff => HoldEnd::HandedOff,
            Ended::Lost => HoldEnd::Lost,
        }
    }
}

/// The events of a client from when it was [asked](crate::LockClient::events) for them.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::memory();
/// let mut events = client.events();
/// let log = tokio::spawn(async move {
///     while let Some(event) = events.next().await {
///         println!("{event:?}");
///     }
///     events.dropped()
/// });
/// client.lock("report").acquire().await?.release().await?;
/// drop(client);
/// assert_eq!(log.await.unwrap(), 0);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct LockEvents {
    receiver: broadcast::Receiver<LockEvent>,
    dropped: u64,
}

impl LockEvents {
    /// The next event; `None` once the client and its holds are gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no event is lost with it.
    pub async fn next(&mut self) -> Option<LockEvent> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => return Some(event),
                Err(RecvError::Lagged(missed)) => self.dropped = self.dropped.saturating_add(missed),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// How many events were not seen here because 1,024 newer ones came before they were asked for.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}
