//! What the clients of a [`TestStore`] ask: the memory store, with the faults of its script.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::{Step, TestStore};
use crate::LockKey;
use crate::store::counter::{CounterReply, CounterRequest, Counters};
use crate::store::records::{
    ClaimReply, ClaimRequest, ClaimToken, ForgetReply, OwnerReply, RecordKey, RecordLook, RecordStore,
    Records, SlotReply, SlotRequest,
};
use crate::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, GrantId, Holder, Kind, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use crate::stores::memory::MemoryStore;
use crate::stores::memory::records::MemoryRecords;

/// The memory store with the scripted faults.
pub(super) struct Scripted(pub(super) TestStore);

impl Scripted {
    fn memory(&self) -> Arc<MemoryStore> {
        Arc::new(self.0.memory.clone())
    }
}

/// The memory store runs its operations when they are called; this returns their replies.
async fn answered<T, F>(step: Result<F, StoreError>) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    step?.await
}

impl Store for Scripted {
    fn capabilities(&self) -> Capabilities {
        self.0.memory.capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        Box::pin(answered(
            self.0
                .play(Step::Acquire, || Store::acquire(self.memory(), request)),
        ))
    }

    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        Store::together(&self.0.memory, kind, key)
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        Box::pin(answered(
            self.0
                .play(Step::Acquire, || Store::acquire_all(self.memory(), requests)),
        ))
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        Box::pin(answered(
            self.0
                .play(Step::Release, || Store::release(self.memory(), request)),
        ))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let count = requests.len();
        let replied = answered(self.0.play(Step::Renew, || Store::renew(self.memory(), requests)));
        // As other stores do, it answers each of them.
        Box::pin(replied.map(move |replied| Ok(replied.unwrap_or_else(|error| vec![Err(error); count]))))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        Box::pin(answered(self.0.reach(|| Store::inspect(self.memory(), key))))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(answered(self.0.reach(|| Store::list(self.memory(), prefix))))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        Box::pin(answered(
            self.0.reach(|| Store::force_release(self.memory(), key)),
        ))
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(self.memory(), kind, key, grant)
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(Records::new(ScriptedRecords(self.0.clone())))
    }
}

impl Counters for Scripted {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        Box::pin(answered(
            self.0
                .play(Step::Count, || Counters::count(self.memory(), request)),
        ))
    }
}

/// The records of the memory store with the scripted faults.
struct ScriptedRecords(TestStore);

impl ScriptedRecords {
    fn memory(&self) -> Arc<MemoryRecords> {
        Arc::new(MemoryRecords(self.0.memory.clone()))
    }
}

type Answer<T> = Result<T, StoreError>;

impl RecordStore for ScriptedRecords {
    fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> impl Future<Output = Answer<ClaimReply>> + Send + 'static {
        answered(self.0.play(Step::Claim, || self.memory().claim(request)))
    }

    fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> impl Future<Output = Answer<OwnerReply>> + Send + 'static {
        answered(self.0.play(Step::Extend, || {
            self.memory().extend(key, token, lease, retention)
        }))
    }

    fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> impl Future<Output = Answer<OwnerReply>> + Send + 'static {
        let complete = || self.memory().complete(key, token, response, retention);
        answered(self.0.play(Step::Settle, complete))
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Answer<OwnerReply>> + Send + 'static {
        answered(self.0.play(Step::Settle, || self.memory().release(key, token)))
    }

    fn abandon(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Answer<OwnerReply>> + Send + 'static {
        answered(self.0.play(Step::Settle, || self.memory().abandon(key, token)))
    }

    fn claim_slot(
        self: Arc<Self>,
        request: ClaimRequest,
        slot: SlotRequest,
    ) -> impl Future<Output = Answer<SlotReply>> + Send + 'static {
        answered(
            self.0
                .play(Step::Claim, || self.memory().claim_slot(request, slot)),
        )
    }

    fn inspect(
        self: Arc<Self>,
        key: RecordKey,
        response: bool,
    ) -> impl Future<Output = Answer<RecordLook>> + Send + 'static {
        answered(self.0.reach(|| self.memory().inspect(key, response)))
    }

    fn forget(self: Arc<Self>, key: RecordKey) -> impl Future<Output = Answer<ForgetReply>> + Send + 'static {
        answered(self.0.reach(|| self.memory().forget(key)))
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.memory().watch(key)
    }
}
