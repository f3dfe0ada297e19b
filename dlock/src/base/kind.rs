//! The kinds of locks, and of what a store grants.

use std::fmt;

/// An enum and the list of its variants, which lacks none: both are made from the same words.
macro_rules! listed {
    ($(#[$attribute:meta])* pub enum $name:ident { $($(#[$about:meta])* $variant:ident,)* }) => {
        $(#[$attribute])*
        pub enum $name { $($(#[$about])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: [$name; [$(stringify!($variant)),*].len()] = [$($name::$variant),*];
        }
    };
}

listed! {
    /// Kind of a lock, as users choose it: [`Lock::kind`](crate::Lock::kind), the layer of dlock-tower and the attribute
    /// `#[distributed_lock]`.
    ///
    /// Semaphores and latches are types of their own ([`Semaphore`](crate::Semaphore), [`Latch`](crate::Latch)): a lock cannot
    /// be one. The kinds of a store, which include theirs, are [`store::Kind`](Kind).
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
        /// The same, but waiters are served in the order in which they came, across processes.
        ///
        /// Each waiter has a queue position on the store from its first request on, and the lock goes to the first in the
        /// queue. [`try_acquire`](crate::Lock::try_acquire) takes no position and overtakes no waiter that has one. Giving
        /// up, by the end of the wait or by dropping the future, leaves the queue and moves no other waiter back. A waiter
        /// asks every 1.5 s; a waiter that was silent for 5 s counts as gone once it is the first, so a process that died
        /// or stands still delays the others by some seconds. If it comes back it is the first again, before all that came
        /// later. A request with an unknown outcome costs the position. In one process the lock is handed off without the
        /// store to waiters that the store named as the next ones of its queue. [`LockKind::Mutex`] under the same name is
        /// the same lock for callers that take no position: it overtakes the queue where it finds the lock free, and
        /// waiters in the queue learn of its release by asking.
        ///
        /// Redisson's fair lock of the same name uses the same queue. A Java process that dies while it waits costs the
        /// time that it had, 300 s unless configured otherwise, and Redisson's scripts go by the clock of the machine that
        /// they are called from: let the clocks of those machines and of the server differ by less than 3 s, or a Java
        /// process whose clock is ahead takes dlock's waiters for gone.
        Fair,
        /// One of many readers.
        Read,
        /// The writer that keeps readers out.
        Write,
        /// A plain lock whose fencing tokens are those of Redisson's fenced lock of the same name: each acquisition,
        /// in Rust or in Java, has the next number of one counter.
        ///
        /// For resources that compare tokens of both; otherwise every lock has tokens that only grow. The counter is a key
        /// of its own for every name, `redisson_lock_token:{name}`, that stays for ever. A new counter begins with the
        /// server's clock in microseconds, so that it does not go back when the data were lost; if a Java service is the
        /// first to lock after that, it begins with 1. In one process the lock is not handed off without the store. In
        /// memory its tokens are those of all locks.
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
    /// Kind of what a store grants: every [`LockKind`], the permits of semaphores, and latches.
    ///
    /// Stores state which kinds they have in their [`Capabilities`](crate::store::Capabilities).
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
        /// Permits of a semaphore, which return to it when their holder is gone.
        Permit,
        /// Permits of a semaphore that does not record their holders.
        Unowned,
        /// A count-down latch: callers wait for it, and it has no holder.
        Latch,
    }
}

/// How a kind behaves; what each of these means, the methods of [`Kind`] say that have their names.
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
    /// A lock that one holder has.
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

    /// What is counted, and is no lock.
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
                // Readers are not kept waiting by readers.
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

    /// The kind of lock, or `None` for permits and latches.
    #[must_use]
    pub fn lock_kind(self) -> Option<LockKind> {
        self.behaviour().lock
    }

    /// Whether one holder keeps out all others.
    #[must_use]
    pub fn is_exclusive(self) -> bool {
        self.behaviour().is_exclusive
    }

    /// Whether any number of holders share one lock, and the end of its lease at the store.
    pub(crate) fn is_shared(self) -> bool {
        self.behaviour().is_shared
    }

    /// The kinds that it shares its data at the store with.
    pub(crate) fn family(self) -> Family {
        self.behaviour().family
    }

    /// Whether what is taken is a number of permits.
    pub(crate) fn is_permits(self) -> bool {
        self.family() == Family::Permits
    }

    /// Whether it is one side of a read-write lock.
    pub(crate) fn is_read_write(self) -> bool {
        self.family() == Family::ReadWrite
    }

    /// What it is called where it is waited for or lost.
    pub(crate) fn noun(self) -> &'static str {
        match self.family() {
            Family::Plain | Family::ReadWrite => "lock",
            Family::Permits => "semaphore",
            Family::Latch => "latch",
        }
    }

    /// Whether each waiter has a position of its own in the store's queue.
    pub(crate) fn waits_in_store(self) -> bool {
        self.behaviour().waits_in_store
    }

    /// Whether a lock may go to the next waiter of this process without a request to the store.
    pub(crate) fn is_handed_off(self) -> bool {
        self.behaviour().is_handed_off
    }

    pub(crate) fn name(self) -> &'static str {
        self.behaviour().name
    }

    /// The kind that is displayed like this.
    #[cfg(feature = "redis")]
    pub(crate) fn of_name(name: &str) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Kinds that share their data at the store: of one name, only kinds of one family are locks together.
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

    /// Also that no two kinds have one name: the store, the command and the attribute know them by it.
    #[test]
    fn every_kind_of_lock_is_a_kind_of_the_store_with_a_name_of_its_own() {
        let mut names: Vec<_> = Kind::ALL.iter().map(|kind| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Kind::ALL.len());
        let locks: Vec<_> = Kind::ALL.into_iter().filter_map(Kind::lock_kind).collect();
        assert_eq!(locks, LockKind::ALL);
        for kind in LockKind::ALL {
            assert_eq!(Kind::from(kind).lock_kind(), Some(kind));
        }
    }
}
