//! The only file that calls a store: the requests and replies of its verbs, in the terms of the tests.

use std::future::{Future, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Holder, Kind, Notifications, Outcome, Reason,
    ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};

/// A connection to the store, as one process has it.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) store: Arc<dyn Store>,
    client: u128,
    grants: Arc<AtomicU64>,
    patience: Duration,
}

/// The reply to an acquire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    Granted(Tokens),
    Busy(Option<Duration>),
    TooFewPermits,
}

/// The contents of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// The next waiters of a fair lock.
    pub(crate) behind: Vec<GrantId>,
}

/// A hold.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) kind: Kind,
    pub(crate) key: LockKey,
    pub(crate) grant: GrantId,
    pub(crate) tokens: Tokens,
    pub(crate) amount: u32,
}

impl Reply {
    pub(crate) fn is_granted(&self) -> bool {
        matches!(self, Reply::Granted(_))
    }

    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Reply::Busy(_))
    }

    fn of(reply: AcquireReply) -> Reply {
        match reply {
            AcquireReply::Acquired(granted) => Reply::Granted(Tokens {
                first: granted.first_token,
                last: granted.last_token,
                behind: granted.behind,
            }),
            AcquireReply::Busy(busy) => Reply::Busy(busy.remaining),
            AcquireReply::TooFewPermits => Reply::TooFewPermits,
            other => panic!("a store that is asked by a client replied {other:?}"),
        }
    }
}

/// The reply to an acquire of several locks.
#[derive(Debug)]
pub(crate) enum SetReply {
    /// The first token of each.
    Granted(Vec<u64>),
    Busy {
        at: usize,
    },
}

/// Whether a release found its grant.
pub(crate) fn is_released(reply: ReleaseReply) -> bool {
    matches!(reply, ReleaseReply::Released { .. })
}

pub(crate) fn is_renewed(reply: &Result<Renewal, StoreError>) -> bool {
    matches!(reply, Ok(Renewal::Renewed | Renewal::RenewedFor(_)))
}

pub(crate) fn is_gone(reply: &Result<Renewal, StoreError>) -> bool {
    matches!(reply, Ok(Renewal::Gone))
}

/// Whether the store refused something that it does not support, and did nothing.
pub(crate) fn is_unsupported(error: &StoreError) -> bool {
    error.reason == Reason::Unsupported && error.outcome == Outcome::NotDone
}

/// Whether the key has data of another kind, and the step was not done.
pub(crate) fn is_key_taken(error: &StoreError) -> bool {
    matches!(error.reason, Reason::KeyTaken(_)) && error.outcome == Outcome::NotDone
}

/// The error of a step that certainly was not carried out.
pub(crate) fn is_not_done(error: &StoreError) -> bool {
    error.outcome == Outcome::NotDone
}

impl Peer {
    pub(crate) fn new(store: Arc<dyn Store>, patience: Duration) -> Peer {
        // The version of UUID that distinguishes dlock's grants from those of other libraries.
        let client = fastrand::u128(..) & !(0xf << 76) & !(0x3 << 62) | 0x8 << 76 | 0x2 << 62;
        Peer {
            store,
            client,
            grants: Arc::default(),
            patience,
        }
    }

    /// A new id, as for each acquire that is sent.
    pub(crate) fn grant(&self) -> GrantId {
        GrantId::from_parts(self.client, self.grants.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(crate) fn request(&self, kind: Kind, key: &LockKey, lease: Duration) -> AcquireRequest {
        let mut request = AcquireRequest::new(kind, key.clone(), self.grant(), lease);
        if kind == Kind::Unowned || kind == Kind::Permit {
            request.permits = Some(1);
        }
        request
    }

    /// A step, which is called now; its reply in bounded time.
    fn step<T>(
        &self,
        what: &'static str,
        step: StoreFuture<T>,
    ) -> impl Future<Output = Result<T, StoreError>> + Send + use<T> {
        let patience = self.patience;
        async move {
            let step = tokio::time::timeout(patience, step);
            let ended = step.await;
            ended.unwrap_or_else(|_| {
                panic!("broken promise: \"Every step ends in bounded time\"\n  found: {what} had no reply after {patience:?}")
            })
        }
    }

    pub(crate) fn acquire(
        &self,
        request: AcquireRequest,
    ) -> impl Future<Output = Result<Reply, StoreError>> + Send + use<> {
        let step = self.step("acquire", self.store.clone().acquire(request));
        async move { step.await.map(Reply::of) }
    }

    pub(crate) fn release(
        &self,
        request: ReleaseRequest,
    ) -> impl Future<Output = Result<ReleaseReply, StoreError>> + Send + use<> {
        self.step("release", self.store.clone().release(request))
    }

    pub(crate) fn renew(
        &self,
        requests: Vec<RenewRequest>,
    ) -> impl Future<Output = Result<Vec<Result<Renewal, StoreError>>, StoreError>> + Send + use<> {
        self.step("renew", self.store.clone().renew(requests))
    }

    pub(crate) fn inspect(
        &self,
        key: &LockKey,
    ) -> impl Future<Output = Result<Vec<Holder>, StoreError>> + Send + use<> {
        self.step("inspect", self.store.clone().inspect(key.clone()))
    }

    pub(crate) fn list(
        &self,
        prefix: &str,
    ) -> impl Future<Output = Result<Vec<(LockKey, Holder)>, StoreError>> + Send + use<> {
        self.step("list", self.store.clone().list(prefix.to_owned()))
    }

    pub(crate) fn force_release(
        &self,
        key: &LockKey,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send + use<> {
        self.step("force_release", self.store.clone().force_release(key.clone()))
    }

    pub(crate) fn watch(&self, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.store.clone().watch(kind, key, grant)
    }

    pub(crate) fn count(
        &self,
        key: &LockKey,
        step: CounterStep,
    ) -> impl Future<Output = Result<CounterReply, StoreError>> + Send + use<> {
        self.count_as(key, self.grant(), step)
    }

    /// The same with an id that an earlier step may have used.
    pub(crate) fn count_as(
        &self,
        key: &LockKey,
        id: GrantId,
        step: CounterStep,
    ) -> impl Future<Output = Result<CounterReply, StoreError>> + Send + use<> {
        let request = CounterRequest::new(key.clone(), id, step);
        let step = match self.store.clone().counters() {
            Some(counters) => counters.count(request),
            None => Box::pin(ready(Err(StoreError::not_done(
                Reason::Unsupported,
                "the store has no counters",
            )))),
        };
        self.step("count", step)
    }

    /// The number shared by keys that can be acquired in one step.
    pub(crate) fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        self.store.together(kind, key)
    }

    pub(crate) fn acquire_all(
        &self,
        requests: Vec<AcquireRequest>,
    ) -> impl Future<Output = Result<SetReply, StoreError>> + Send + use<> {
        let step = self.step("acquire_all", self.store.clone().acquire_all(requests));
        async move {
            Ok(match step.await? {
                AcquireAllReply::Acquired { grants } => {
                    SetReply::Granted(grants.iter().map(|granted| granted.first_token).collect())
                }
                AcquireAllReply::Busy { at, .. } => SetReply::Busy { at },
                AcquireAllReply::Failed { error, .. } => return Err(error),
                other => panic!("a reply that no test knows: {other:?}"),
            })
        }
    }

    /// Asks once for a lock, as a waiter does that asks again later: like a client, it undoes an acquire of unknown
    /// outcome first.
    pub(crate) async fn tries(
        &self,
        kind: Kind,
        key: &LockKey,
        lease: Duration,
    ) -> Result<Reply, StoreError> {
        let request = self.request(kind, key, lease);
        self.tries_as(request).await
    }

    /// The same for this request.
    pub(crate) async fn tries_as(&self, request: AcquireRequest) -> Result<Reply, StoreError> {
        let undo = ReleaseRequest::new(request.kind, request.key.clone(), request.grant);
        let reply = self.acquire(request).await;
        if reply.as_ref().is_err_and(|error| !is_not_done(error)) {
            let begun = Instant::now();
            while self.release(undo.clone()).await.is_err() && begun.elapsed() < self.patience {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        reply
    }

    /// Asks once for a lock, and expects a reply.
    #[track_caller]
    pub(crate) fn asks(
        &self,
        kind: Kind,
        key: &LockKey,
        lease: Duration,
    ) -> impl Future<Output = Reply> + Send + use<> {
        let (key, step) = (key.clone(), self.acquire(self.request(kind, &key.clone(), lease)));
        async move {
            step.await
                .unwrap_or_else(|error| panic!("the store failed to acquire {key} as a {kind}: {error:?}"))
        }
    }

    /// Acquires a lock that is free.
    pub(crate) async fn takes(&self, kind: Kind, key: &LockKey, lease: Duration) -> Held {
        self.takes_as(self.request(kind, key, lease)).await
    }

    /// The same with a request that says more.
    pub(crate) async fn takes_as(&self, request: AcquireRequest) -> Held {
        let asked = Held::asked_by(&request);
        match self.acquire(request).await {
            Ok(Reply::Granted(tokens)) => asked.with(tokens),
            found => panic!("a free {} ({}) was not granted: {found:?}", asked.kind, asked.key),
        }
    }

    /// Releases a hold; returns whether the store knew it.
    pub(crate) async fn gives(&self, held: &Held) -> bool {
        match self.release(held.release()).await {
            Ok(reply) => is_released(reply),
            Err(error) => panic!("the store failed to release {}: {error:?}", held.key),
        }
    }

    /// Renews a hold; returns whether the store knew it.
    pub(crate) async fn renews(&self, held: &Held, lease: Duration) -> bool {
        let replies = self.renew(vec![held.renewal(lease)]).await;
        match replies.as_deref() {
            Ok([reply]) if is_renewed(reply) => true,
            Ok([reply]) if is_gone(reply) => false,
            found => panic!("the store failed to renew {}: {found:?}", held.key),
        }
    }
}

impl Held {
    /// What a request asks for, whose grant may be in flight: without tokens.
    pub(crate) fn asked_by(request: &AcquireRequest) -> Held {
        Held {
            kind: request.kind,
            key: request.key.clone(),
            grant: request.grant,
            tokens: Tokens {
                first: 0,
                last: 0,
                behind: Vec::new(),
            },
            amount: request.amount,
        }
    }

    pub(crate) fn with(self, tokens: Tokens) -> Held {
        Held { tokens, ..self }
    }

    pub(crate) fn release(&self) -> ReleaseRequest {
        let mut request = ReleaseRequest::new(self.kind, self.key.clone(), self.grant);
        request.amount = self.amount;
        request
    }

    pub(crate) fn renewal(&self, lease: Duration) -> RenewRequest {
        let mut request = RenewRequest::new(self.kind, self.key.clone(), self.grant, lease);
        request.amount = self.amount;
        request
    }
}

/// The capabilities of a store.
#[derive(Debug, Clone)]
pub(crate) struct Can {
    pub(crate) kinds: Vec<Kind>,
    pub(crate) min_hold: bool,
    pub(crate) prefer_writers: bool,
    pub(crate) restores_positions: bool,
    pub(crate) limits: bool,
    pub(crate) notifications: bool,
    pub(crate) inspection: bool,
    pub(crate) shortest_lease: Duration,
    pub(crate) longest_lease: Option<Duration>,
}

impl Can {
    pub(crate) fn of(peer: &Peer) -> Can {
        let capabilities = peer.store.capabilities();
        Can {
            min_hold: capabilities.min_hold,
            prefer_writers: capabilities.prefer_writers,
            restores_positions: capabilities.restores_positions,
            limits: capabilities.limits,
            notifications: capabilities.notifications != Notifications::None,
            inspection: capabilities.inspection,
            shortest_lease: capabilities.shortest_lease,
            longest_lease: capabilities.longest_lease,
            kinds: capabilities.kinds,
        }
    }
}
