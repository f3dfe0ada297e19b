//! Stores that are broken on purpose: a checker that finds nothing wrong with them proves nothing of others.

use std::collections::HashMap;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::LockKey;
use dlock::store::Kind;
use dlock::store::counter::Counters;
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, Doubts, GrantId, Granted, Holder, Lane, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::store::LONGEST_LEASE;

/// What is wrong with the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub(crate) enum Break {
    /// Fencing tokens do not grow.
    NoFence,
    /// The store is asked for a much shorter lease than the holder is told.
    EarlyGrant,
    /// Renewals are answered as done and not sent, until it is too late.
    LateLoss,
    /// Now and then an acquire arrives once more after its release, and is renewed for ever.
    Ghost,
    /// Readers lock another key than writers, and the store is asked for one permit, however many the holder is told.
    Shares,
}

/// By how much a lease is shorter than it looks.
const SHORTER: u32 = 8;
/// How long renewals are not sent: longer than the lease that most have.
const NOT_SENT: Duration = Duration::from_millis(2500);
/// One release in so many is followed by a ghost.
const GHOST: u64 = 50;
/// How often a ghost is renewed.
const GHOSTLY: Duration = Duration::from_secs(1);

/// A store and what is wrong with it.
pub(crate) struct Broken {
    inner: Arc<dyn Store>,
    how: Break,
    releases: AtomicU64,
    /// When the grants were given that are held.
    given: Mutex<HashMap<GrantId, Instant>>,
    /// A renewal as it looks like.
    renewal: Mutex<Option<RenewRequest>>,
}

impl Broken {
    pub(crate) fn new(inner: Arc<dyn Store>, how: Break) -> Broken {
        Broken {
            inner,
            how,
            releases: AtomicU64::new(0),
            given: Mutex::default(),
            renewal: Mutex::default(),
        }
    }

    /// What the store is asked for instead of this key and so many permits.
    fn asked(&self, kind: Kind, key: &mut LockKey, amount: &mut u32) {
        if self.how == Break::Shares {
            match kind {
                Kind::Read => *key = LockKey::from(format!("{key}:readers")),
                Kind::Permit => *amount = 1,
                _ => {}
            }
        }
    }

    fn lease(&self, lease: Duration) -> Duration {
        match self.how {
            Break::EarlyGrant => lease / SHORTER,
            _ => lease,
        }
    }
}

/// Takes what was released once more, and keeps it.
async fn haunt(store: Arc<dyn Store>, released: ReleaseRequest, mut renewal: RenewRequest) {
    let ReleaseRequest { kind, key, grant, .. } = released;
    let again = AcquireRequest::new(kind, key.clone(), grant, LONGEST_LEASE);
    if store.clone().acquire(again).await.is_err() {
        return;
    }
    (renewal.kind, renewal.key, renewal.grant) = (kind, key, grant);
    (renewal.lease, renewal.amount) = (LONGEST_LEASE, 1);
    loop {
        tokio::time::sleep(GHOSTLY).await;
        let _ = store.clone().renew(vec![renewal.clone()]).await;
    }
}

impl Store for Broken {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn acquire(self: Arc<Self>, mut request: AcquireRequest) -> StoreFuture<AcquireReply> {
        request.lease = self.lease(request.lease);
        self.asked(request.kind, &mut request.key, &mut request.amount);
        let (grant, count) = (request.grant, u64::from(request.tokens));
        let step = self.inner.clone().acquire(request);
        Box::pin(async move {
            let reply = step.await?;
            if let AcquireReply::Acquired(_) = reply {
                self.given.lock().insert(grant, Instant::now());
                if self.how == Break::NoFence {
                    return Ok(AcquireReply::Acquired(Granted::with_tokens(1, count)));
                }
            }
            Ok(reply)
        })
    }

    fn release(self: Arc<Self>, mut request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.asked(request.kind, &mut request.key, &mut request.amount);
        let was_given = self.given.lock().remove(&request.grant).is_some();
        let step = self.inner.clone().release(request.clone());
        let returns = self.how == Break::Ghost
            && matches!(request.kind, Kind::Mutex | Kind::Fair)
            && was_given
            && self.releases.fetch_add(1, Ordering::Relaxed) % GHOST == GHOST - 1;
        let returns = self.renewal.lock().clone().filter(|_| returns);
        Box::pin(async move {
            let answer = step.await;
            if let Some(renewal) = returns {
                tokio::spawn(haunt(self.inner.clone(), request, renewal));
            }
            answer
        })
    }

    fn renew(
        self: Arc<Self>,
        mut requests: Vec<RenewRequest>,
    ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        if self.how == Break::Ghost {
            *self.renewal.lock() = requests.first().cloned();
        }
        if self.how == Break::LateLoss {
            let given = self.given.lock();
            let not_sent = |request: &RenewRequest| {
                given
                    .get(&request.grant)
                    .is_some_and(|at| at.elapsed() < NOT_SENT)
            };
            if requests.iter().all(not_sent) {
                return Box::pin(ready(Ok(requests.iter().map(|_| Ok(Renewal::Renewed)).collect())));
            }
        }
        for request in &mut requests {
            request.lease = self.lease(request.lease);
            self.asked(request.kind, &mut request.key, &mut request.amount);
        }
        self.inner.clone().renew(requests)
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        self.inner.clone().inspect(key)
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        self.inner.clone().list(prefix)
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        self.inner.clone().force_release(key)
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        self.inner.clone().counters()
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.inner.clone().watch(kind, key, grant)
    }

    fn lane(&self, key: &LockKey) -> Lane {
        self.inner.lane(key)
    }

    fn explain(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        self.inner.explain(kind, key)
    }

    fn doubts(&self) -> Doubts {
        self.inner.doubts()
    }
}
