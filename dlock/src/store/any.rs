//! The store of a URL as a value, for those who build on it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::broadcast;

use super::counter::{CounterReply, CounterRequest};
use super::{
    AcquireAllReply, AcquireReply, AcquireRequest, Backend, BackendError, DynBackend, GrantId, Holder, Kind,
    Lane, ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Watch,
};
use crate::LockKey;
use crate::store::records::Records;

/// A store of any sort, opened by
/// [`LockClientBuilder::build_backend`](crate::LockClientBuilder::build_backend): to wrap it into a backend of your
/// own that counts, restricts or fails on purpose, or to make a [quorum](crate::backend::quorum::Quorum) of several.
///
/// It passes every verb on.
#[derive(Clone)]
pub struct AnyBackend(pub(crate) Arc<dyn DynBackend>);

impl fmt::Debug for AnyBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyBackend").finish_non_exhaustive()
    }
}

impl Backend for AnyBackend {
    fn acquire(
        self: Arc<Self>,
        request: AcquireRequest,
    ) -> impl Future<Output = Result<AcquireReply, BackendError>> + Send + 'static {
        self.0.clone().acquire(request)
    }

    fn release(
        self: Arc<Self>,
        request: ReleaseRequest,
    ) -> impl Future<Output = Result<ReleaseReply, BackendError>> + Send + 'static {
        self.0.clone().release(request)
    }

    fn renew(
        self: Arc<Self>,
        requests: Vec<RenewRequest>,
    ) -> impl Future<Output = Result<Vec<Result<Renewal, BackendError>>, BackendError>> + Send + 'static {
        self.0.clone().renew(requests)
    }

    fn inspect(
        self: Arc<Self>,
        key: LockKey,
    ) -> impl Future<Output = Result<Vec<Holder>, BackendError>> + Send + 'static {
        self.0.clone().inspect(key)
    }

    fn list(
        self: Arc<Self>,
        prefix: String,
    ) -> impl Future<Output = Result<Vec<(LockKey, Holder)>, BackendError>> + Send + 'static {
        self.0.clone().list(prefix)
    }

    fn force_release(
        self: Arc<Self>,
        key: LockKey,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send + 'static {
        self.0.clone().force_release(key)
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.0.clone().watch(kind, key, grant)
    }

    fn count(
        self: Arc<Self>,
        request: CounterRequest,
    ) -> impl Future<Output = Result<CounterReply, BackendError>> + Send + 'static {
        self.0.clone().count(request)
    }

    fn lane(&self, key: &LockKey) -> Lane {
        self.0.lane(key)
    }

    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        self.0.together(kind, key)
    }

    fn acquire_all(
        self: Arc<Self>,
        requests: Vec<AcquireRequest>,
    ) -> impl Future<Output = Result<AcquireAllReply, BackendError>> + Send + 'static {
        self.0.clone().acquire_all(requests)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        self.0.clone().records()
    }

    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send + 'static {
        self.0.clone().raise_fence(kind, key, grant, at_least)
    }

    fn explain(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        self.0.explain(kind, key)
    }

    fn doubts(&self) -> Option<broadcast::Receiver<Lane>> {
        self.0.doubts()
    }
}
