//! One test on one store.

use std::fmt;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use dlock::LockKey;
use dlock::store::counter::CounterStep;
use dlock::store::{Kind, Watch};

use crate::fixture::{AnyFixture, Fault};
use crate::promise::{Promise, REFUSED};
use crate::verbs::{Can, Held, Peer, Reply, is_unsupported};

/// The input of a test: the store, the test's own keys, and leases of a suitable length.
#[doc(hidden)]
#[derive(Clone)]
pub struct Case {
    fixture: Arc<dyn AnyFixture>,
    name: Arc<str>,
    can: Arc<Can>,
    left_out: Arc<Mutex<Option<String>>>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Case {
    pub(crate) async fn new(fixture: Arc<dyn AnyFixture>) -> Case {
        let peer = Peer::new(fixture.store().await, fixture.patience());
        Case {
            can: Arc::new(Can::of(&peer)),
            fixture,
            name: format!("conform-{:016x}", fastrand::u64(..)).into(),
            left_out: Arc::default(),
        }
    }

    pub(crate) fn can(&self) -> &Can {
        &self.can
    }

    pub(crate) fn has(&self, kind: Kind) -> bool {
        self.can.kinds.contains(&kind)
    }

    /// Checks that the store refuses a kind that it does not support.
    pub(crate) async fn refuses(&self, kind: Kind) {
        let (peer, key) = (self.peer().await, self.key("refused"));
        let refused = match kind {
            Kind::Latch => peer.count(&key, CounterStep::SetCount { count: 1 }).await.err(),
            _ => peer.acquire(peer.request(kind, &key, self.long())).await.err(),
        };
        REFUSED.holds(refused.as_ref().is_some_and(is_unsupported), (kind, refused));
    }

    /// A new connection to the store.
    pub(crate) async fn peer(&self) -> Peer {
        Peer::new(self.fixture.store().await, self.patience())
    }

    /// Two of them.
    pub(crate) async fn peers(&self) -> (Peer, Peer) {
        (self.peer().await, self.peer().await)
    }

    /// The prefix of all keys of this test.
    pub(crate) fn prefix(&self) -> &str {
        &self.name
    }

    /// A key that no other test uses.
    pub(crate) fn key(&self, name: &str) -> LockKey {
        LockKey::from(format!("{}:{name}", self.name))
    }

    pub(crate) fn tick(&self) -> Duration {
        self.fixture.tick()
    }

    pub(crate) fn patience(&self) -> Duration {
        self.fixture.patience()
    }

    /// A lease that ends during a test.
    pub(crate) fn short(&self) -> Duration {
        (4 * self.tick()).max(self.can.shortest_lease)
    }

    /// A lease that ends during no test, as far as the store has one.
    pub(crate) fn long(&self) -> Duration {
        let long = (600 * self.tick()).max(2 * self.patience());
        self.can.longest_lease.map_or(long, |longest| long.min(longest))
    }

    /// Injects a fault into the store, or says that it cannot and that the test is skipped.
    pub(crate) async fn fault(&self, fault: Fault) -> bool {
        let done = self.fixture.fault(fault).await;
        if !done {
            self.leave_out(format!("the fixture cannot bring about: {fault:?}"));
        }
        done
    }

    pub(crate) async fn heal(&self) {
        self.fixture.heal().await;
    }

    pub(crate) fn leave_out(&self, why: impl Into<String>) {
        *self.left_out.lock().expect("no test panics here") = Some(why.into());
    }

    pub(crate) fn left_out(&self) -> Option<String> {
        self.left_out.lock().expect("no test panics here").clone()
    }

    pub(crate) async fn clean_up(&self) {
        self.heal().await;
        self.fixture.clean_up().await;
    }

    /// Asks for a lock until it is granted.
    pub(crate) async fn comes_free(&self, peer: &Peer, kind: Kind, key: &LockKey, promise: Promise) -> Held {
        let begun = Instant::now();
        loop {
            let request = peer.request(kind, key, self.long());
            let asked = Held::asked_by(&request);
            match peer.tries_as(request).await {
                Ok(Reply::Granted(tokens)) => return asked.with(tokens),
                found => promise.holds(begun.elapsed() < self.patience(), found),
            }
            tokio::time::sleep(self.tick() / 4).await;
        }
    }

    /// Waits for a notification.
    pub(crate) async fn hears(&self, watch: &mut Watch, promise: Promise) {
        let heard = tokio::time::timeout(self.patience(), watch.changed()).await;
        promise.holds(heard.is_ok(), "no notification");
    }

    /// Returns the watch once it has told that it began, and is quiet.
    pub(crate) async fn watches(&self, mut watch: Watch, promise: Promise) -> Watch {
        self.hears(&mut watch, promise).await;
        self.settles(&mut watch).await;
        watch
    }

    /// Lets a notification in flight pass, so that later ones can be distinguished from it. Nothing fails
    /// if it takes longer.
    pub(crate) async fn settles(&self, watch: &mut Watch) {
        let pause = self.tick().min(Duration::from_millis(100));
        while tokio::time::timeout(pause, watch.changed()).await.is_ok() {}
    }
}
