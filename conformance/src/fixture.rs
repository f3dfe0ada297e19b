//! The environment of a store under test.

use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;

/// A store under test: how to reach it, how fast it is, and which faults it can inject.
///
/// Only [`store`](Self::store) is required. Each fault returns whether it was injected; by default none is, and the tests
/// that need it are skipped.
///
/// Every test uses its own keys, so that tests of one store can run concurrently on one server. Faults affect all
/// tests on a server: a fixture with faults needs a separate server for each test.
///
/// ```
/// use dlock::store::Store;
/// use dlock::stores::memory::MemoryStore;
/// use dlock_conformance::Fixture;
/// use std::sync::Arc;
///
/// struct Memory(MemoryStore);
///
/// impl Fixture for Memory {
///     async fn store(&self) -> Arc<dyn Store> {
///         Arc::new(self.0.clone())
///     }
/// }
/// ```
pub trait Fixture: Send + Sync + 'static {
    /// Connects to the store, as another process would: two results exclude each other.
    fn store(&self) -> impl Future<Output = Arc<dyn Store>> + Send;

    /// The unit of time of the tests: leases that must end last a few of them. 1/10 s by default. A store whose
    /// leases are whole seconds needs at least one.
    fn tick(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// How long a step or a notification may take before the test fails. 30 s by default: no test must fail because
    /// the machine is slow.
    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }

    /// Makes the store forget all data, without a notification.
    fn forget(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Restarts the store with its data, or without if it does not keep them.
    fn restart(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Breaks all connections to the store, and refuses new ones until [`heal`](Self::heal).
    fn cut(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Stops all replies of the store until [`heal`](Self::heal). Connections stay open.
    fn freeze(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Ends [`cut`](Self::cut) and [`freeze`](Self::freeze).
    fn heal(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// Loses the reply to the next acquire: the store carries out the acquire, but the client does not learn of it.
    fn lose_next_reply(&self) -> impl Future<Output = bool> + Send {
        ready(false)
    }

    /// Sets the clock of the store back.
    fn set_clock_back(&self, by: Duration) -> impl Future<Output = bool> + Send {
        let _ = by;
        ready(false)
    }

    /// Runs when a test has ended well.
    fn clean_up(&self) -> impl Future<Output = ()> + Send {
        ready(())
    }
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The same as an object, so that the tests are compiled once and not for each fixture.
pub(crate) trait AnyFixture: Send + Sync {
    fn store(&self) -> Boxed<'_, Arc<dyn Store>>;
    fn tick(&self) -> Duration;
    fn patience(&self) -> Duration;
    fn fault(&self, fault: Fault) -> Boxed<'_, bool>;
    fn heal(&self) -> Boxed<'_, ()>;
    fn clean_up(&self) -> Boxed<'_, ()>;
}

/// The faults of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Forget,
    Restart,
    Cut,
    Freeze,
    LoseNextReply,
    ClockBack(Duration),
}

impl<F: Fixture> AnyFixture for F {
    fn store(&self) -> Boxed<'_, Arc<dyn Store>> {
        Box::pin(Fixture::store(self))
    }

    fn tick(&self) -> Duration {
        Fixture::tick(self)
    }

    fn patience(&self) -> Duration {
        Fixture::patience(self)
    }

    fn fault(&self, fault: Fault) -> Boxed<'_, bool> {
        match fault {
            Fault::Forget => Box::pin(self.forget()),
            Fault::Restart => Box::pin(self.restart()),
            Fault::Cut => Box::pin(self.cut()),
            Fault::Freeze => Box::pin(self.freeze()),
            Fault::LoseNextReply => Box::pin(self.lose_next_reply()),
            Fault::ClockBack(by) => Box::pin(self.set_clock_back(by)),
        }
    }

    fn heal(&self) -> Boxed<'_, ()> {
        Box::pin(Fixture::heal(self))
    }

    fn clean_up(&self) -> Boxed<'_, ()> {
        Box::pin(Fixture::clean_up(self))
    }
}
