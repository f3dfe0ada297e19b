//! The events of a client's locks, for listeners: the same as in logs and metrics.
//!
//! Emitting never waits: the last events are kept for each listener, and a slow listener misses the oldest.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::LockKey;
use crate::base::chance::HashMap;
use crate::base::report::{Intervention, LossReason};
use crate::base::waking::waking;
use crate::runtime::emit::meter::Ended;
use crate::store::{GrantId, Kind};

/// How many events a listener may be behind.
const KEPT: usize = 1024;

/// The listeners of a client. Events are created only while one of them wants them.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    /// How many there are, to be read without the lock.
    count: AtomicUsize,
    /// Exchanged as a whole, so that filters run, and go, without the lock: they are the user's code.
    listeners: RwLock<Arc<[Arc<Listener>]>>,
    later: Later,
}

/// Events of the watchdog, which notices them under its mutex: told without it, in their order.
#[derive(Debug, Default)]
struct Later {
    /// Whether there are any, to be read without the mutex.
    any: AtomicBool,
    events: Mutex<Told>,
}

#[derive(Debug, Default)]
struct Told {
    waiting: VecDeque<(Hold, LockEvent)>,
    /// How many events of each hold wait or are being told: only later ones of these holds have to wait behind them.
    /// If all did, one thread would tell the events of all threads.
    holds: HashMap<Hold, usize>,
    /// Whether a thread tells them, perhaps by running a filter that has come here again.
    is_telling: bool,
}

/// What keeps its events in order.
type Hold = Option<GrantId>;

/// Decides which events a listener gets.
type Filter = Box<dyn Fn(&LockKey, &LockEventKind) -> bool + Send + Sync>;

struct Listener {
    filter: Filter,
    sender: broadcast::Sender<LockEvent>,
}

impl Listeners {
    pub(crate) fn listen(self: &Arc<Self>, filter: Filter) -> LockEvents {
        let (sender, receiver) = broadcast::channel(KEPT);
        self.set(Some(Arc::new(Listener { filter, sender })));
        LockEvents {
            receiver,
            dropped: 0,
            _listening: Listening(Arc::downgrade(self)),
        }
    }

    /// Adds a listener, and removes those that are gone.
    fn set(&self, new: Option<Arc<Listener>>) {
        let mut listeners = self.listeners.write();
        let present = listeners.iter().filter(|listener| listener.is_there());
        let present: Arc<[_]> = present.cloned().chain(new).collect();
        self.count.store(present.len(), Ordering::Relaxed);
        let before = std::mem::replace(&mut *listeners, present);
        drop(listeners);
        drop(before);
    }

    /// Whether there is a listener.
    pub(crate) fn is_heard(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
            && self.listeners.read().iter().any(|listener| listener.is_there())
    }

    fn tell(&self, of: Of<'_>, what: impl FnOnce() -> LockEventKind) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        if self.later.any.load(Ordering::Relaxed) && self.later.has(of.grant) {
            self.tell_later(of, what);
            return self.tell_left();
        }
        let listeners = self.listeners.read().clone();
        let mut present = listeners.iter().filter(|listener| listener.is_there()).peekable();
        if present.peek().is_none() {
            return;
        }
        let what = what();
        for listener in present {
            if listener.wants(of.key, &what) {
                listener.send(of.event(what.clone()));
            }
        }
    }

    fn tell_later(&self, of: Of<'_>, what: impl FnOnce() -> LockEventKind) {
        if self.is_heard() {
            let event = of.event(what());
            let mut events = self.later.events.lock();
            *events.holds.entry(of.grant).or_default() += 1;
            events.waiting.push_back((of.grant, event));
            self.later.any.store(true, Ordering::Relaxed);
        }
    }

    /// Tells the events that were left for later. For callers that hold no mutex.
    pub(crate) fn tell_left(&self) {
        if !self.later.any.load(Ordering::Relaxed) {
            return;
        }
        let mut told = None;
        while let Some(LockEvent {
            key,
            kind,
            grant,
            what,
        }) = self.next_left(&mut told)
        {
            let listeners = self.listeners.read().clone();
            for listener in listeners.iter().filter(|listener| listener.is_there()) {
                if listener.wants(&key, &what) {
                    let (key, grant, what) = (key.clone(), grant.clone(), what.clone());
                    listener.send(LockEvent {
                        key,
                        kind,
                        grant,
                        what,
                    });
                }
            }
        }
    }

    /// Returns the next event that was left, unless another thread tells them. `told` has the hold of the last one.
    fn next_left(&self, told: &mut Option<Hold>) -> Option<LockEvent> {
        let mut events = self.later.events.lock();
        if events.is_telling != told.is_some() {
            return None;
        }
        if let Some(hold) = told.take() {
            events.was_told(hold);
        }
        let next = events.waiting.pop_front();
        events.is_telling = next.is_some();
        self.later.any.store(events.is_telling, Ordering::Relaxed);
        let (hold, event) = next?;
        *told = Some(hold);
        Some(event)
    }
}

impl Later {
    /// Whether an event of this hold waits or is being told.
    fn has(&self, hold: Hold) -> bool {
        self.events.lock().holds.contains_key(&hold)
    }
}

impl Told {
    fn was_told(&mut self, hold: Hold) {
        if let Entry::Occupied(mut left) = self.holds.entry(hold) {
            match left.get() {
                2.. => *left.get_mut() -= 1,
                _ => drop(left.remove()),
            }
        }
    }
}

impl Listener {
    /// A filter that panics has not asked for the event: the call that it runs in goes on.
    fn wants(&self, key: &LockKey, what: &LockEventKind) -> bool {
        catch_unwind(AssertUnwindSafe(|| (self.filter)(key, what))).unwrap_or(false)
    }

    /// The waker of a listener may be of any executor: if it panics, the call goes on.
    fn send(&self, event: LockEvent) {
        // The listener may just have gone.
        waking(|| drop(self.sender.send(event)));
    }

    fn is_there(&self) -> bool {
        self.sender.receiver_count() > 0
    }
}

impl Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

/// The lock or hold of an event.
#[derive(Clone, Copy)]
pub(crate) struct Of<'a> {
    pub(crate) listeners: &'a Listeners,
    pub(crate) key: &'a LockKey,
    pub(crate) kind: Kind,
    pub(crate) grant: Option<GrantId>,
}

impl Of<'_> {
    pub(super) fn tell(self, what: impl FnOnce() -> LockEventKind) {
        self.listeners.tell(self, what);
    }

    /// For callers that hold a mutex: told by [`Listeners::tell_left`].
    pub(super) fn tell_later(self, what: impl FnOnce() -> LockEventKind) {
        self.listeners.tell_later(self, what);
    }

    fn event(self, what: LockEventKind) -> LockEvent {
        LockEvent {
            key: self.key.clone(),
            kind: self.kind,
            grant: self.grant.map(|grant| grant.to_string()),
            what,
        }
    }
}

/// An event of a lock of this client, see [`LockClient::events`](crate::LockClient::events).
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
    /// The kind as which it was acquired.
    pub kind: Kind,
    /// The hold, by its id on the store; `None` if the event concerns a call. A lock that is handed off keeps it.
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
///         LockEventKind::Ended { .. } => break, // after the loss, if there was one
///         _ => {}
///     }
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockEventKind {
    /// This process holds the lock from now on: the store granted it, or another caller in this process handed it off, whose
    /// hold has [`Ended`](Self::Ended) before.
    /// Permits of an [`UnownedSemaphore`](crate::UnownedSemaphore) have no owner: no [`Ended`](Self::Ended) follows for
    /// them.
    #[non_exhaustive]
    Granted {
        /// Its fencing token.
        token: u64,
        /// Whether it was handed off.
        handed_off: bool,
    },
    /// A call has the lock: the first one of a hold, or one that re-entered.
    #[non_exhaustive]
    Acquired {
        /// How long it waited.
        waited: Duration,
    },
    /// A call failed, or its wait time was over.
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
        /// How long the hold was still certain when the renewal arrived.
        left: Duration,
    },
    /// The store has not confirmed the hold when due.
    Suspect,
    /// The store has confirmed the hold after all.
    Confirmed,
    /// The holder is asked to stop.
    #[non_exhaustive]
    Revoked {
        /// The name of the operator, and the reason.
        intervention: Intervention,
    },
    /// The hold was lost: [`Ended`](Self::Ended) follows. Both may come after the [`Granted`](Self::Granted) of the next hold:
    /// the holder learns of the loss first.
    #[non_exhaustive]
    Lost {
        /// Why, as far as this process knows.
        reason: LossReason,
    },
    /// The hold has ended: the store has confirmed it, another caller in this process gets it, or it was lost; or its release
    /// failed for good, then the lock ends with its lease.
    #[non_exhaustive]
    Ended {
        /// How it ended.
        how: HoldEnd,
        /// How long it was held.
        held: Duration,
    },
}

/// How a hold ended, in an event.
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
    /// It was lost, or its release found that the store had lost it. Or its release failed for good: then the lock ends with
    /// its lease, and no [`Lost`](LockEventKind::Lost) is told.
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

/// The events of a client since the call of [`LockClient::events`](crate::LockClient::events) or
/// [`LockClient::events_where`](crate::LockClient::events_where).
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
    /// Dropped after the receiver.
    _listening: Listening,
}

/// Removes the listeners that are gone, with what their filters own: perhaps the last handle of the client.
#[derive(Debug)]
struct Listening(Weak<Listeners>);

impl Drop for Listening {
    fn drop(&mut self) {
        if let Some(listeners) = self.0.upgrade() {
            listeners.set(None);
        }
    }
}

impl LockEvents {
    /// Waits for the next event; `None` once the client and its holds are gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: no event is lost.
    pub async fn next(&mut self) -> Option<LockEvent> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => return Some(event),
                Err(RecvError::Lagged(missed)) => self.dropped = self.dropped.saturating_add(missed),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Returns how many events were missed because the listener was more than 1,024 events behind.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;

    fn of<'a>(listeners: &'a Listeners, key: &'a LockKey, number: u64) -> Of<'a> {
        Of {
            listeners,
            key,
            kind: Kind::Mutex,
            grant: Some(GrantId::from_parts(1, number)),
        }
    }

    /// A filter runs in the middle of telling, as other threads do: what it tells of another hold is told at once.
    #[test]
    fn event_waits_only_behind_those_of_its_own_hold() {
        let listeners: &'static Arc<Listeners> = Box::leak(Box::default());
        let [a, b] = ["a", "b"].map(LockKey::from);
        let (same, other) = (a.clone(), b);
        let is_first = OnceLock::new();
        let mut events = listeners.listen(Box::new(move |_, _| {
            for _ in 0..if is_first.set(()).is_ok() { 2 } else { 0 } {
                of(listeners, &other, 2).tell(|| LockEventKind::Confirmed);
                of(listeners, &same, 1).tell(|| LockEventKind::Confirmed);
            }
            true
        }));
        of(listeners, &a, 1).tell_later(|| LockEventKind::Suspect);
        listeners.tell_left();
        let mut told = Vec::new();
        while let Ok(event) = events.receiver.try_recv() {
            told.push(format!("{} {:?}", event.key, event.what));
        }
        let expected = [
            "b Confirmed",
            "b Confirmed",
            "a Suspect",
            "a Confirmed",
            "a Confirmed",
        ];
        assert_eq!(told, expected);
        let left = listeners.later.events.lock();
        assert!(left.waiting.is_empty() && left.holds.is_empty() && !left.is_telling);
        assert!(!listeners.later.any.load(Ordering::Relaxed));
    }
}
