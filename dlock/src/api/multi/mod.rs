//! Several locks at once: all of them or none.

mod acquire;
mod attempt;
mod guard;
mod in_order;

use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

use smallvec::SmallVec;

use self::acquire::MultiCall;
pub use self::guard::MultiGuard;
use crate::LockKind;
use crate::api::options::option_methods;
use crate::api::run::Run;
use crate::runtime::client::Handle;
use crate::{Error, Held, Lock, LockKey, LockOptions};

/// In their order. A request that a layer locks has one.
type Keys = SmallVec<[LockKey; 1]>;

/// Several locks that are acquired together, all of them or none, with the options of a [`Lock`].
///
/// Created by [`LockClient::multi`](crate::LockClient::multi). For work on several resources that other code locks one
/// by one, or in other combinations: a transfer between two accounts takes both locks, in whatever order they are
/// named.
///
/// - **No call waits while it holds a part.** When one of the locks is busy, none is kept: the call waits for the busy
///   one and then takes all at once. So sets of locks cannot deadlock, whatever they have in common and in whatever
///   order they are named, nor can they with locks that are taken one by one. What an enclosing frame holds stays held while
///   the call waits for the rest: there a [`wait`](Self::wait) ends a deadlock.
/// - **No call starves.** A call that found one of the locks available and another one busy eight times takes them one
///   after the other instead, in the order of their names and each as a queued waiter, and keeps (and renews) what it
///   holds while it waits for the next. Other such calls use the same order, so they cannot deadlock. But a caller may
///   hold a single lock of the set and wait for another, so the wait for the next is limited: 1 s at first; then all
///   are released and tried at once again, and each time after that the limit doubles, up to a minute.
/// - **One operation where the store allows it**: in memory, on PostgreSQL and on one Redis or Valkey server one
///   operation of the store grants all locks or none; in a Cluster the locks of one slot, on etcd up to 100 locks.
///   Otherwise they are acquired one after the other, in the order of their names (after a busy reply the lock that the call
///   waited for comes first), and released when one of them is busy.
/// - **The lease begins for all of them at the same time**, when the last is acquired, however long that took: where one
///   operation acquires them, where the call takes them one after the other instead, and with a fixed lease or
///   [`min_hold`](Self::min_hold). Renewed locks of several operations keep the beginnings of their own, and
///   [`remaining`](MultiGuard::remaining) is the shortest.
/// - **When one of them is lost, the whole is lost**: see [`MultiGuard`].
///
/// A set has at most [`MAX_AT_ONCE`](crate::MAX_AT_ONCE) locks. Keys that are named twice count once. A key that an
/// enclosing frame holds is re-entered.
///
/// When a call in this process waits for a lock as part of a set, the released lock goes back to the store, even where
/// [`local_handoffs`](Lock::local_handoffs) would hand it off to the waiter of a single lock.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::memory();
/// let (from, to) = ("account:7", "account:3");
///
/// let guard = client.multi([from, to]).wait(Duration::from_secs(3)).acquire().await?;
/// for (key, token) in guard.fencing_tokens() {
///     println!("{key} is written under token {token}");
/// }
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "locks do nothing until they are acquired"]
pub struct MultiLock {
    /// In the order of their names, each once.
    keys: Keys,
    /// The options, stored in a lock by the first name.
    each: Lock,
}

impl MultiLock {
    pub(crate) fn new(handle: Arc<Handle>, keys: impl Iterator<Item = LockKey>) -> MultiLock {
        let mut keys: Keys = keys.collect();
        keys.sort();
        keys.dedup();
        let first = keys.first().cloned().unwrap_or_else(|| "".into());
        MultiLock {
            keys,
            each: Lock::new(handle, first),
        }
    }

    fn each(self, change: impl FnOnce(Lock) -> Lock) -> MultiLock {
        MultiLock {
            keys: self.keys,
            each: change(self.each),
        }
    }

    fn with(self, change: impl FnOnce(LockOptions) -> LockOptions) -> MultiLock {
        self.each(|lock| lock.with(change))
    }

    /// Sets the kind of each lock, [`LockKind::Mutex`] by default. [`LockKind::Fair`] is refused for more than one key:
    /// fair locks cannot be acquired together.
    ///
    /// **A set has one kind for all of its keys.** To read one lock and write another, lock both to write; or take two
    /// locks, one after the other and everywhere in the same order, because such calls wait while they hold a part and can
    /// deadlock in another order.
    pub fn kind(self, kind: LockKind) -> MultiLock {
        self.each(|lock| lock.kind(kind))
    }

    option_methods! {
        options,
        lease,
        /// It begins for all of them when the last is acquired.
        fixed_lease,
        /// The time is for all of them together.
        wait,
        max_hold,
        min_hold,
        /// It counts the waiters of the lock that this call waits for.
        max_waiters,
        /// Applies to a handoff to a call for this lock alone; see [`Lock::local_handoffs`].
        local_handoffs,
        group,
    }

    /// Makes new readers of a read-write lock yield while this call waits to write. See
    /// [`RwLock::prefer_writers`](crate::RwLock::prefer_writers). With several read-write locks, it applies to the lock
    /// that the call currently waits for.
    pub fn prefer_writers(self) -> MultiLock {
        self.each(Lock::prefer_writers)
    }

    /// Says what these acquisitions are for, for the person on call, as [`Lock::note`] does: each of the locks has the
    /// note, and the lock that a call waits for. At most 200 characters; none by default. It is written to the store as
    /// it is: leave secrets out.
    pub fn note(self, note: impl AsRef<str>) -> MultiLock {
        self.each(|lock| lock.note(note))
    }

    /// Returns the names, in their order, each once.
    #[must_use]
    pub fn keys(&self) -> &[LockKey] {
        &self.keys
    }

    /// Checks names and options as each acquire does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], or [`Error::InvalidOption`], also for no names at all or more than
    /// [`MAX_AT_ONCE`](crate::MAX_AT_ONCE); [`Error::Unsupported`] for what the store does not have.
    pub fn check(&self) -> Result<(), Error> {
        self.call(true, Location::caller()).check()
    }

    /// Acquires all of the locks if all are available, without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when another caller holds one of them (it names the first that was found busy), and every
    /// error of [`acquire`](Self::acquire).
    ///
    /// Cancel safe.
    #[track_caller]
    pub fn try_acquire(&self) -> impl Future<Output = Result<MultiGuard, Error>> + Send + use<> {
        self.call(true, Location::caller()).run()
    }

    /// Acquires all of the locks, waiting as long as [`wait`](Self::wait) allows.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::acquire`]; they name the lock in question. When the wait time is over, that is the lock that
    /// the call waited for last.
    ///
    /// Cancel safe, as [`Lock::acquire`] is: dropped at any point it leaves none of the locks.
    #[track_caller]
    pub fn acquire(&self) -> impl Future<Output = Result<MultiGuard, Error>> + Send + use<> {
        self.call(false, Location::caller()).run()
    }

    /// For the layers: an acquire, or a try, as if it was called there.
    #[doc(hidden)]
    pub fn __acquire_at(
        &self,
        once: bool,
        by: &'static Location<'static>,
    ) -> impl Future<Output = Result<MultiGuard, Error>> + Send + use<> {
        self.call(once, by).run()
    }

    fn call(&self, once: bool, by: &'static Location<'static>) -> MultiCall {
        MultiCall {
            keys: self.keys.clone(),
            first: self.each.call(once, by),
        }
    }

    /// Acquires all of the locks as [`acquire`](Self::acquire) does, runs the closure's future inside, and releases
    /// them: when the future is done, and also when it panics or is dropped. A nested acquire of any of them re-enters.
    /// When one of them is lost the future is dropped.
    ///
    /// If the release fails after the work was done, the result is kept; the failure is logged, and the lock ends with
    /// its lease.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when one of them was lost before the future
    /// was done.
    ///
    /// Cancel safe for the locks; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(self.acquire(), work)
    }

    /// Runs the closure's future under the locks if all are available, otherwise not at all: as [`run`](Self::run), but
    /// without waiting, as [`try_acquire`](Self::try_acquire).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// # let client = dlock::LockClient::memory();
    /// let sweep = client.multi(["disk:1", "disk:2"]).try_run(async |held| held.keys().count());
    /// match sweep.await {
    ///     Ok(disks) => println!("swept {disks} disks"),
    ///     Err(error) if error.is_busy() => println!("one of them is in use: skipped"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotAcquired`] when another caller holds one of them: then the closure was not called. And those of
    /// [`run`](Self::run).
    ///
    /// Cancel safe for the locks; what happens to the work is up to the closure's future.
    #[track_caller]
    pub fn try_run<F, Fut>(&self, work: F) -> impl Future<Output = Result<Fut::Output, Error>> + use<F, Fut>
    where
        F: FnOnce(Held) -> Fut,
        Fut: Future,
    {
        Run::new(self.try_acquire(), work)
    }
}

impl fmt::Debug for MultiLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiLock")
            .field("keys", &self.keys)
            .field("each", &self.each)
            .finish()
    }
}
