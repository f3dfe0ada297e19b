//! The kinds of locks, and of the grants of a store.

use std::fmt;

/// Defines an enum together with the complete list of its variants.
macro_rules! listed {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$about:meta])* $variant:ident,)* }) => {
        $(#[$attribute])*
        pub enum $name { $($(#[$about])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];
        }
    };
}

listed! {
    /// Kind of a lock as users choose it: with [`Lock::kind`](crate::Lock::kind), in the layer of dlock-tower, and in
    /// the attribute `#[distributed_lock]`.
    ///
    /// Semaphores and latches are separate types ([`Semaphore`](crate::Semaphore), [`Latch`](crate::Latch)). The kinds
    /// of a store, which include theirs, are [`store::Kind`](Kind).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::LockKind;
    ///
    /// let client = dlock::LockClient::memory();
    /// let lock = client.lock("tickets").kind(LockKind::Fair); // the same as client.fair_lock("tickets")
    /// let guard = lock.acquire().await?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    #[non_exhaustive]
    pub enum LockKind {
        /// One holder at a time, re-entrant. The default.
        #[default]
        Mutex,
        /// The same, but waiters are served in order of arrival, across processes.
        ///
        /// Each waiter has a queue position on the store from its first request on, and the lock goes to the first in
        /// the queue. [`try_acquire`](crate::Lock::try_acquire) takes no position and does not overtake waiters in the
        /// queue. Giving up, at the end of the wait or by dropping the future, leaves the queue and moves no other
        /// waiter back. A waiter asks every 1.5 s; a waiter that was silent for 5 s counts as gone once it is first, so
        /// a process that died or is stopped delays the others by some seconds. If it comes back it is first again,
        /// ahead of all later waiters. A request with an unknown outcome costs the position. In one process the lock is
        /// handed off without the store to waiters that the store named as the next ones of its queue.
        /// [`LockKind::Mutex`] under the same name is the same lock for callers that take no position: it overtakes the
        /// queue when it finds the lock available, and waiters in the queue learn of its release when they next ask.
        ///
        /// Redisson's fair lock of the same name uses the same queue. A Java process that dies while it waits delays
        /// the others by its wait timeout, 300 s unless configured otherwise. Redisson's scripts use the clock of the
        /// calling machine: keep the clocks of those machines and of the server within 3 s of each other, or a Java
        /// process whose clock is ahead considers dlock's waiters gone. Beside Java waiters with a wait time, keep more
        /// than 5 s of the lease left at all times (a renewed lease of 8 s or more): with less, a later Java waiter may
        /// overtake a dlock waiter.
        ///
        /// On ZooKeeper the queue is that of Curator's `InterProcessMutex`, and [`LockKind::Mutex`] does not overtake it. A
        /// process that died or is stopped delays the others until its session is over, and a waiter that lost its position
        /// joins again at the end.
        Fair,
        /// One of many readers.
        Read,
        /// The writer that keeps readers out.
        Write,
        /// A plain lock whose fencing tokens are those of Redisson's fenced lock of the same name: each acquisition, in
        /// Rust or in Java, takes a greater number of one counter.
        ///
        /// For resources that compare tokens of both; otherwise every lock has tokens that grow. The counter is a
        /// separate key for every name, `redisson_lock_token:{name}`, that dlock never deletes; a `RedissonMultiLock`
        /// with a lease has it expire with that lease, so take no fenced lock in one: if Java acquires first after that,
        /// tokens begin with 1 again. A counter that dlock began is at least the server's clock in microseconds after
        /// each acquire of dlock, so that it does not go back when data was lost. A counter that a Java service began
        /// starts with 1 and grows by one each time, and an acquire of Java always takes the next number. So after a
        /// fail-over that lost the last write, a token may be given twice if Java began the counter or is the first to
        /// acquire; and if Java is the first to acquire after a loss of all data, tokens begin with 1 again. In one
        /// process the lock is not handed off without the store.
        ///
        /// Use no name both as a fenced lock and as a plain or fair one on Redis and Valkey: they exclude each other, but
        /// draw tokens from two counters, so a later holder may have a smaller token, and the resource refuses it. After a
        /// counter of Java, which begins with 1, that goes on for ever. On other stores, and in memory, the tokens of a
        /// fenced lock are the same as for all locks.
        Fenced,
    }
}

impl From<LockKind> for Kind {
    fn from(kind: LockKind) -> Kind {
        match kind {
            LockKind::Mutex => Kind::Mutex,
            LockKind::Fair => Kind::Fair,
            LockKind::Read => Kind::Read,
            LockKind::Write => Kind::Write,
            LockKind::Fenced => Kind::Fenced,
        }
    }
}

impl PartialEq<LockKind> for Kind {
    fn eq(&self, other: &LockKind) -> bool {
        *self == Kind::from(*other)
    }
}

impl PartialEq<Kind> for LockKind {
    fn eq(&self, other: &Kind) -> bool {
        other == self
    }
}

impl fmt::Display for LockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Kind::from(*self).fmt(f)
    }
}

listed! {
    /// Kind of a store's grant: every [`LockKind`], the permits of semaphores, and latches.
    ///
    /// Stores declare their kinds in their [`Capabilities`](crate::store::Capabilities).
    ///
    /// ```
    /// use dlock::LockKind;
    /// use dlock::store::Kind;
    ///
    /// // What a store is asked for: the kinds of locks, and permits.
    /// assert_eq!(Kind::from(LockKind::Fair), Kind::Fair);
    /// assert_eq!(Kind::Mutex, LockKind::Mutex);
    /// ```
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    #[cfg_attr(dlock_sim, derive(PartialOrd, Ord))]
    #[non_exhaustive]
    pub enum Kind {
        /// A lock of [`LockKind::Mutex`]. The default.
        #[default]
        Mutex,
        /// A lock of [`LockKind::Fair`].
        Fair,
        /// A lock of [`LockKind::Read`].
        Read,
        /// A lock of [`LockKind::Write`].
        Write,
        /// A lock of [`LockKind::Fenced`].
        Fenced,
        /// Permits of a semaphore that return to it when their holder is gone.
        Permit,
        /// Permits of a semaphore that does not record their holders.
        Unowned,
        /// A count-down latch: callers wait for it, and it has no holder.
        Latch,
    }
}

/// How a kind behaves; the methods of [`Kind`] with the same names explain each field.
struct Behaviour {
    name: &'static str,
    lock: Option<LockKind>,
    family: Family,
    is_exclusive: bool,
    is_shared: bool,
    waits_in_store: bool,
    is_handed_off: bool,
}

impl Behaviour {
    /// A lock with one holder at a time.
    const fn exclusive(name: &'static str, lock: LockKind, family: Family) -> Behaviour {
        Behaviour {
            name,
            lock: Some(lock),
            family,
            is_exclusive: true,
            is_shared: false,
            waits_in_store: false,
            is_handed_off: true,
        }
    }

    /// A counter, not a lock.
    const fn counter(name: &'static str, family: Family) -> Behaviour {
        Behaviour {
            name,
            lock: None,
            family,
            is_exclusive: false,
            is_shared: false,
            waits_in_store: false,
            is_handed_off: false,
        }
    }
}

impl Kind {
    const fn behaviour(self) -> Behaviour {
        match self {
            Kind::Mutex => Behaviour::exclusive("lock", LockKind::Mutex, Family::Plain),
            Kind::Fair => Behaviour {
                waits_in_store: true,
                ..Behaviour::exclusive("fair", LockKind::Fair, Family::Plain)
            },
            Kind::Read => Behaviour {
                is_exclusive: false,
                is_shared: true,
                // Readers do not wait for readers.
                is_handed_off: false,
                ..Behaviour::exclusive("read", LockKind::Read, Family::ReadWrite)
            },
            Kind::Write => Behaviour::exclusive("write", LockKind::Write, Family::ReadWrite),
            Kind::Fenced => Behaviour {
                // Its tokens count every grant of the store.
                is_handed_off: false,
                ..Behaviour::exclusive("fenced", LockKind::Fenced, Family::Plain)
            },
            Kind::Permit => Behaviour::counter("permit", Family::Permits),
            Kind::Unowned => Behaviour::counter("unowned", Family::Permits),
            Kind::Latch => Behaviour::counter("latch", Family::Latch),
        }
    }

    /// Returns the kind of lock, or `None` for permits and latches.
    #[must_use]
    pub fn lock_kind(self) -> Option<LockKind> {
        self.behaviour().lock
    }

    /// Returns whether one holder excludes all others.
    #[must_use]
    pub fn is_exclusive(self) -> bool {
        self.behaviour().is_exclusive
    }

    /// Whether any number of holders share one lock, and its expiry at the store.
    pub(crate) fn is_shared(self) -> bool {
        self.behaviour().is_shared
    }

    /// The kinds with which it shares data at the store.
    pub(crate) fn family(self) -> Family {
        self.behaviour().family
    }

    /// Whether it grants a number of permits.
    pub(crate) fn is_permits(self) -> bool {
        self.family() == Family::Permits
    }

    /// Whether it is one side of a read-write lock.
    pub(crate) fn is_read_write(self) -> bool {
        self.family() == Family::ReadWrite
    }

    /// Its noun in messages about waiting and losses.
    pub(crate) fn noun(self) -> &'static str {
        match self.family() {
            Family::Plain | Family::ReadWrite => "lock",
            Family::Permits => "semaphore",
            Family::Latch => "latch",
        }
    }

    /// Whether each waiter has a separate position in the store's queue.
    pub(crate) fn waits_in_store(self) -> bool {
        self.behaviour().waits_in_store
    }

    /// Whether a lock may be handed off to the next waiter of this process without a request to the store.
    pub(crate) fn is_handed_off(self) -> bool {
        self.behaviour().is_handed_off
    }

    pub(crate) fn name(self) -> &'static str {
        self.behaviour().name
    }

    /// The kind with this display name.
    #[cfg(feature = "redis")]
    pub(crate) fn of_name(name: &str) -> Option<Kind> {
        Kind::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// Kinds that share data at the store: under one name, only kinds of one family are the same lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Plain,
    ReadWrite,
    Permits,
    Latch,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also that no two kinds share a name: the store, the command and the attribute identify them by it.
    #[test]
    fn every_kind_of_lock_is_a_kind_of_the_store_with_a_name_of_its_own() {
        let mut names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kind::ALL.len());
        let locks: Vec<_> = Kind::ALL.iter().filter_map(|kind| kind.lock_kind()).collect();
        assert_eq!(locks, LockKind::ALL);
        for &kind in LockKind::ALL {
            assert_eq!(Kind::from(kind).lock_kind(), Some(kind));
        }
    }
}
