#![doc = include_str!("seam.md")]

mod announce;
pub mod counter;
pub(crate) mod credentials;
mod failure;
pub(crate) mod hub;
pub(crate) mod options;
pub(crate) mod records;
mod release;
mod renewal;
pub(crate) mod url;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{broadcast, watch};
use uuid::Uuid;

pub use self::announce::Announce;
use self::counter::{CounterReply, CounterRequest};
pub use self::failure::{Outcome, Reason, StoreError};
pub use self::release::ReleaseReply;
pub use self::renewal::{Lane, Renewal};
use crate::base::chance;
pub use crate::base::kind::Kind;
use crate::store::records::Records;
use crate::{Error, LockKey};

/// What a store knows a grant by: `<client uuid>:<number>`, drawn anew for every acquire that is sent and
/// never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GrantId {
    client: Uuid,
    number: u64,
}

impl GrantId {
    /// The first part of the ids of a client: random, and of a version that tells dlock's grants from the holders of
    /// others, whose ids are UUIDs of version 4.
    pub(crate) fn new_client() -> Uuid {
        uuid::Builder::from_custom_bytes(chance::uuid().into_bytes()).into_uuid()
    }

    pub(crate) fn new(client: Uuid, number: u64) -> GrantId {
        GrantId { client, number }
    }

    /// The id of a grant for whoever calls a store directly: the bits of a client's UUID, and a number that
    /// is unique in that client.
    #[must_use]
    pub const fn from_parts(client: u128, number: u64) -> GrantId {
        GrantId {
            client: Uuid::from_u128(client),
            number,
        }
    }

    /// Whether it was drawn after the other, by the same client.
    pub(crate) fn came_after(self, other: GrantId) -> bool {
        self.client == other.client && self.number > other.number
    }

    /// Another one of the same client.
    #[cfg(feature = "redis")]
    pub(crate) fn with_number(self, number: u64) -> GrantId {
        GrantId { number, ..self }
    }

    /// Whether both are of one client.
    pub(crate) fn is_of_client_of(self, other: GrantId) -> bool {
        self.client == other.client
    }

    #[cfg(dlock_sim)]
    pub(crate) fn client(self) -> Uuid {
        self.client
    }

    /// Unique in its client.
    pub(crate) fn number(self) -> u64 {
        self.number
    }

    /// The ids of so many permits, one after the other: 16 bytes each, which is what Redisson calls a permit by.
    /// They differ for all numbers of a client, and the first four bytes are the first group of its UUID.
    pub(crate) fn permits(self, amount: u32) -> Vec<u8> {
        let base = self.client.as_u128() ^ (u128::from(self.number) << 32);
        (0..amount)
            .flat_map(|index| (base ^ u128::from(index)).to_be_bytes())
            .collect()
    }

    /// Writes the id as it stands in the store to the end of a buffer; where it begins there. It is sent with
    /// every step, and what `Display` costs shows.
    #[cfg(feature = "redis")]
    pub(crate) fn write(self, buffer: &mut [u8; 57]) -> usize {
        let (mut at, mut number) = (buffer.len(), self.number);
        loop {
            at -= 1;
            buffer[at] = b'0' + (number % 10) as u8;
            number /= 10;
            if number == 0 {
                break;
            }
        }
        at -= 1;
        buffer[at] = b':';
        let begin = at - uuid::fmt::Hyphenated::LENGTH;
        self.client.hyphenated().encode_lower(&mut buffer[begin..at]);
        begin
    }
}

impl fmt::Display for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.client, self.number)
    }
}

/// Asks for a lock.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AcquireRequest {
    /// What kind of lock.
    pub kind: Kind,
    /// Its name.
    pub key: LockKey,
    /// The id under which it is granted.
    pub grant: GrantId,
    /// How long the store keeps the grant unless it is renewed.
    pub lease: Duration,
    /// How many fencing tokens to reserve; at least 1. Those beyond the first are for others who wait in the same
    /// process.
    pub tokens: u32,
    /// Fair locks: take a place in the queue when the lock is busy, or keep the one that this id has. Such a
    /// place is given up by a [`release`](Store::release) of the same id.
    pub queue: bool,
    /// Fair locks: for how long this id has not asked; `None` where it asks for the first time. One that has
    /// asked before and finds its place given away was not heard of for too long, and gets it back.
    pub last_asked: Option<Duration>,
    /// Read locks: the write grant of the same key whose holder asks, which is not in its way.
    pub under: Option<GrantId>,
    /// Permits: how many there are in all, where nobody has said so before.
    pub permits: Option<u32>,
    /// Asked as a member of a [quorum](crate::stores::quorum::Quorum): the store has its say only when it has been up with its
    /// data for this long, by a mark that it keeps beside them, and answers
    /// [`Abstained`](AcquireReply::Abstained) before. A store that cannot tell refuses.
    pub vote_after: Option<Duration>,
    /// Permits: how many to take, all or none; at least 1, which is what every other kind asks for.
    pub amount: u32,
    /// Permits, and write locks that readers shall stand back for: who waits, the same over all questions of one
    /// waiter. Its place, among those who wait for different amounts or in front of the readers, is given up by a
    /// [`release`](Store::release) of this id. `None` for who does not wait or takes no place.
    pub waiter: Option<GrantId>,
    /// Plain locks: what the other processes that wait for the key are told of the outcome.
    pub announce: Announce,
}

impl AcquireRequest {
    /// Asks for a lock with one fencing token, and nothing that is special to a kind.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId, lease: Duration) -> AcquireRequest {
        AcquireRequest {
            kind,
            key,
            grant,
            lease,
            tokens: 1,
            queue: false,
            last_asked: None,
            under: None,
            permits: None,
            vote_after: None,
            amount: 1,
            waiter: None,
            announce: Announce::Nothing,
        }
    }

    /// The release of what this asks for.
    pub(crate) fn undone(&self) -> ReleaseRequest {
        ReleaseRequest {
            kind: self.kind,
            key: self.key.clone(),
            grant: self.grant,
            keep_for: Duration::ZERO,
            amount: self.amount,
        }
    }
}

/// The answer to an [`AcquireRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireReply {
    /// The lock is granted.
    Acquired {
        /// The first of the reserved fencing tokens; greater than every token of this key before.
        first_token: u64,
        /// The last of them.
        last_token: u64,
    },
    /// The same of a fair lock, where others of the same client are next in the queue.
    AcquiredInLine {
        /// The first of the reserved fencing tokens; greater than every token of this key before.
        first_token: u64,
        /// The last of them.
        last_token: u64,
        /// Those who come right behind in the queue, in its order, up to the first of another client: no more than there
        /// are tokens for. They keep their places.
        behind: Vec<GrantId>,
    },
    /// Somebody else has it.
    Busy {
        /// What is left of the holder's lease; `None` when it has no end.
        remaining: Option<Duration>,
        /// Who goes on waiting asks again within this time, whatever it hears: to keep a place that is only
        /// kept for those who are heard of, or to see whether others have lost theirs.
        again: Option<Duration>,
        /// How many processes listen for the release of a plain lock; `None` where the store cannot tell.
        listeners: Option<u64>,
    },
    /// Permits: there are fewer in all than were asked for, so that only a change of their number can help. Who waits
    /// for so many keeps nobody else waiting.
    TooFewPermits,
    /// A member of a quorum that has not been up with its data for long enough.
    Abstained {
        /// When it will have been.
        votes_in: Duration,
    },
}

impl AcquireReply {
    /// For how long the lock is not to be had, as far as is known, if it was not granted.
    pub(crate) fn busy_for(&self) -> Option<Duration> {
        match self {
            AcquireReply::Acquired { .. }
            | AcquireReply::AcquiredInLine { .. }
            | AcquireReply::TooFewPermits => None,
            AcquireReply::Busy { remaining, .. } => *remaining,
            AcquireReply::Abstained { votes_in } => Some(*votes_in),
        }
    }
}

/// The answer to a request for several locks at once.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum AcquireAllReply {
    /// All of them are granted.
    Acquired {
        /// The first and the last of the fencing tokens of each, in the order of the requests.
        tokens: Vec<(u64, u64)>,
    },
    /// Somebody else has one of them, so none is granted.
    Busy {
        /// Which request: the first of which it is so.
        at: usize,
        /// What is left of that holder's lease; `None` when it has no end.
        remaining: Option<Duration>,
    },
    /// One of them cannot be locked, so none is granted.
    Failed {
        /// Which request.
        at: usize,
        /// Why; the step as a whole was not done.
        error: StoreError,
    },
}

/// Gives a lock back.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ReleaseRequest {
    /// What kind of lock.
    pub kind: Kind,
    /// Its name.
    pub key: LockKey,
    /// The grant to end; no other is touched.
    pub grant: GrantId,
    /// Keep the key taken for this long yet (a `min_hold`); zero ends it now.
    pub keep_for: Duration,
    /// Permits: how many were taken by this grant; 1 for every other kind.
    pub amount: u32,
}

impl ReleaseRequest {
    /// Ends a grant at once, of permits one.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId) -> ReleaseRequest {
        ReleaseRequest {
            kind,
            key,
            grant,
            keep_for: Duration::ZERO,
            amount: 1,
        }
    }
}

/// Extends the lease of a grant that the store still knows.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RenewRequest {
    /// What kind of lock.
    pub kind: Kind,
    /// Its name.
    pub key: LockKey,
    /// The grant.
    pub grant: GrantId,
    /// The lease it gets, counted from now.
    pub lease: Duration,
    /// Permits: how many were taken by this grant; 1 for every other kind.
    pub amount: u32,
}

impl RenewRequest {
    /// Extends a grant, of permits one.
    #[must_use]
    pub fn new(kind: Kind, key: LockKey, grant: GrantId, lease: Duration) -> RenewRequest {
        RenewRequest {
            kind,
            key,
            grant,
            lease,
            amount: 1,
        }
    }
}

/// Who holds a lock, as the store sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// What it holds the key as.
    pub kind: Kind,
    /// The wire id, `<client uuid>:<number>` for dlock and Redisson alike; of a permit, what Redisson calls it
    /// by: 32 hexadecimal digits, the first eight of which are those of dlock's client.
    pub id: String,
    /// How many holds the store counts: for dlock 1, since re-entry is counted in the process, and 0 while a
    /// lock that was released is kept by its `min_hold`.
    pub holds: u64,
    /// What is left of the lease; `None` when it has no end.
    pub remaining: Option<Duration>,
}

impl Holder {
    /// A holder as a store reports it.
    #[must_use]
    pub fn new(kind: Kind, id: String, holds: u64, remaining: Option<Duration>) -> Holder {
        Holder {
            kind,
            id,
            holds,
            remaining,
        }
    }
}

impl StoreError {
    /// What a user is told when `what` failed on `key`.
    pub(crate) fn into_error(self, what: &str, key: &LockKey) -> Error {
        let StoreError {
            outcome,
            reason,
            message,
            source,
        } = self;
        let what = format!("{what} \"{key}\"");
        match (reason, outcome) {
            (Reason::KeyTaken(found), _) => Error::KeyTaken {
                key: key.clone(),
                found,
            },
            (Reason::Unsupported, _) => Error::Unsupported {
                what,
                reason: message,
            },
            (
                Reason::TooFewReplicas {
                    acknowledged,
                    wanted,
                    within,
                },
                _,
            ) => Error::NotReplicated {
                what,
                acknowledged,
                wanted,
                within,
            },
            (Reason::WrongUrl, _) => Error::InvalidUrl { reason: message },
            (Reason::Closed, _) => Error::ClientClosed,
            (Reason::Refused | Reason::RefusedForNow, _) => Error::Refused {
                what,
                message,
                source,
            },
            (Reason::Unreachable, Outcome::NotDone) => Error::Unreachable {
                what,
                message,
                source,
            },
            (Reason::Unreachable, Outcome::Unknown) => Error::OutcomeUnknown {
                what,
                message,
                source,
            },
        }
    }
}

/// News of one key, shared by all who wait for it in this process.
///
/// Dropping it ends the subscription when nobody else has one.
pub struct Watch {
    changes: Option<watch::Receiver<u64>>,
    /// The last value that was seen; `None` where the first look is due.
    seen: Option<u64>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

/// What a [`Watch`] heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Something changed, or may have.
    News,
    /// Another process has taken the lock that had come free.
    Taken,
}

/// The value of a watch counts the news below this, and above it how many times the lock was said to be taken.
pub(crate) const TAKEN: u64 = 1 << 48;

impl Watch {
    /// A watch over `changes`: each new value is news, and the value counts them. A receiver that has news already
    /// ([`watch::Receiver::mark_changed`]) says "you are subscribed, look now". `on_drop` runs when the
    /// receiver is gone.
    pub fn new(changes: watch::Receiver<u64>, on_drop: impl FnOnce() + Send + Sync + 'static) -> Watch {
        let looks_now = changes.has_changed().unwrap_or(false);
        let seen = (!looks_now).then(|| *changes.borrow());
        Watch {
            changes: Some(changes),
            seen,
            on_drop: Some(Box::new(on_drop)),
        }
    }

    /// How many news there have been so far, the unseen ones among them: the value of the receiver.
    pub(crate) fn count(&self) -> u64 {
        self.changes
            .as_ref()
            .map_or(0, |changes| *changes.borrow() % TAKEN)
    }

    /// Ends the subscription: from now on it hears nothing.
    pub(crate) fn end(&mut self) {
        self.changes = None;
        if let Some(on_drop) = self.on_drop.take() {
            on_drop();
        }
    }

    /// Takes what has come so far as seen.
    pub(crate) fn seen(&mut self) {
        if let Some(changes) = &mut self.changes {
            self.seen = Some(*changes.borrow_and_update());
        }
    }

    /// Waits for news. The first is "subscribed, look now"; each later one "something changed, or may have
    /// changed unseen". Several at once count as one. Never returns when the store has ended.
    ///
    /// Cancel safe: news that came while nobody listened are told by the next call.
    pub async fn changed(&mut self) {
        while self.heard().await != Heard::News {}
    }

    /// The same, or hears that the lock is taken.
    pub(crate) async fn heard(&mut self) -> Heard {
        let Some(changes) = &mut self.changes else {
            return std::future::pending().await;
        };
        loop {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            let now = *changes.borrow_and_update();
            match self.seen.replace(now) {
                Some(before) if before == now => {}
                Some(before) if before % TAKEN == now % TAKEN => return Heard::Taken,
                _ => return Heard::News,
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// The reply to a step that is on its way. Dropping it does not take the step back.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'static>>;

/// A store that can hold locks. See the [module](crate::store) for the rules that every verb keeps.
pub trait Store: Send + Sync + 'static {
    /// Grants the lock, or tells who is in the way. Never waits for the holder.
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply>;

    /// Ends a grant and wakes whoever waits for the key.
    ///
    /// For the id of an acquire whose outcome is unknown it answers `Ok` only when that acquire can no
    /// longer take effect.
    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply>;

    /// Renews grants of one lane; the answers stand in the order of the requests.
    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>>;

    /// Who holds the key: nobody, one, or several readers.
    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>>;

    /// The locks whose names begin with `prefix`, in no order. A look at everything: for people and
    /// tools, not for a service at work.
    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>>;

    /// Ends whatever grant the key has and wakes the waiters; answers whether there was one.
    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool>;

    /// Subscribes to the releases of a key. `grant` is the id under which is waited, for kinds whose waiters
    /// are woken one by one.
    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch;

    /// Takes a step of a counter: of the permits of a semaphore, or of a latch.
    ///
    /// By default it is [`Reason::Unsupported`].
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        Box::pin(std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            format!("this store has no counters, such as that of {}", request.key),
        ))))
    }

    /// The lane of a key. Asked under a lock, and often: it answers at once, and calls no client.
    fn lane(&self, _key: &LockKey) -> Lane {
        Lane::default()
    }

    /// Which keys can be had together: those for which this is the same number, in one step of
    /// [`acquire_all`](Self::acquire_all). By default none can, and who wants several gets them one by one,
    /// and gives all back when one of them is busy.
    fn together(&self, _kind: Kind, _key: &LockKey) -> Option<u32> {
        None
    }

    /// Grants all of these locks or none, in one step; never waits. Only asked for keys that are
    /// [`together`](Self::together). Where the outcome is unknown, the core releases each of the grants.
    fn acquire_all(self: Arc<Self>, _requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        Box::pin(std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "this store takes one lock at a time",
        ))))
    }

    /// The records that this store keeps beside its locks, over the same connections. `None` when it keeps
    /// none.
    fn records(self: Arc<Self>) -> Option<Records> {
        None
    }

    /// Has every fencing token that the store gives from now on be greater than `at_least`, if it still knows
    /// the grant; answers whether it does. For members of a [quorum](crate::stores::quorum::Quorum), which has to give one
    /// token for all of them; refused by default.
    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool> {
        let _ = (kind, key, grant, at_least);
        Box::pin(std::future::ready(Err(StoreError::not_done(
            Reason::Unsupported,
            "this store cannot be a member of a quorum",
        ))))
    }

    /// What stood in the way of the last acquire of a key that was not granted, beyond its answer; `None` where
    /// there is no more to tell.
    fn explain(&self, _kind: Kind, _key: &LockKey) -> Option<Arc<str>> {
        None
    }

    /// Tells of lanes whose grants are in doubt: a server came back after a broken connection, or another
    /// one took its place. The core has each grant there confirmed at once. `None` when that never happens.
    fn doubts(&self) -> Option<broadcast::Receiver<Lane>> {
        None
    }
}

#[cfg(all(test, feature = "redis"))]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_written_as_it_is_displayed() {
        for number in [0, 7, 10, 1234, u64::MAX] {
            let id = GrantId::new(Uuid::new_v4(), number);
            let mut buffer = [0; 57];
            let begin = id.write(&mut buffer);
            assert_eq!(&buffer[begin..], id.to_string().as_bytes());
        }
    }
}
