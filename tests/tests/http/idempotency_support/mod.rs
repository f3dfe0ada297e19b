//! What the suites of the idempotency layer share: a store that fails on command, requests, and handlers
//! that count.
#![allow(dead_code, reason = "each suite uses its part")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dlock::record::{
    ClaimReply, ClaimRequest, ClaimState, ClaimToken, Fingerprint, OnOrphan, OwnerReply, RecordKey,
    RecordStore, Records,
};
use dlock::store::{Reason, Store, StoreError, Watch};
use dlock::stores::memory::MemoryStore;
use dlock_tower::idempotency::caller::{Public, public};
use dlock_tower::idempotency::{IdempotencyLayer, ResponseBody};
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt};

pub(crate) type Req = Request<Full<Bytes>>;
pub(crate) type Res = Response<Full<Bytes>>;

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// Records in memory.
pub(crate) fn records() -> Records {
    Arc::new(MemoryStore::new()).records_of()
}

trait RecordsOf {
    fn records_of(self) -> Records;
}

impl RecordsOf for Arc<MemoryStore> {
    fn records_of(self) -> Records {
        Store::records(self).expect("memory keeps records")
    }
}

/// A layer for everybody on records in memory.
pub(crate) fn layer() -> IdempotencyLayer<Public> {
    IdempotencyLayer::new(records(), public())
}

/// `POST /pay` with this key.
pub(crate) fn post(key: &str) -> Req {
    request("POST", "/pay", key, "")
}

pub(crate) fn request(method: &str, uri: &str, key: &str, body: &'static str) -> Req {
    Request::builder()
        .method(method)
        .uri(uri)
        .header("idempotency-key", key)
        .body(Full::from(body))
        .unwrap()
}

/// The future of a handler.
type Answering<R> = Pin<Box<dyn Future<Output = Result<Response<R>, Infallible>> + Send>>;

/// A handler that counts, and answers with the count.
#[derive(Clone, Default)]
pub(crate) struct Counting(pub(crate) Arc<AtomicUsize>);

impl Counting {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn next(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// A service that answers `run N`.
    pub(crate) fn service(
        &self,
    ) -> impl Service<Req, Response = Res, Error = Infallible, Future = Answering<Full<Bytes>>>
    + Clone
    + Send
    + 'static {
        self.answering(|n| async move { Response::new(Full::from(format!("run {n}"))) })
    }

    /// A service that takes so long.
    pub(crate) fn taking(
        &self,
        time: Duration,
    ) -> impl Service<Req, Response = Res, Error = Infallible, Future = Answering<Full<Bytes>>>
    + Clone
    + Send
    + 'static {
        self.answering(move |n| async move {
            sleep(time).await;
            Response::new(Full::from(format!("run {n}")))
        })
    }

    /// A service that answers by what is made of the count.
    pub(crate) fn answering<F, Fut, R>(
        &self,
        answer: F,
    ) -> impl Service<Req, Response = Response<R>, Error = Infallible, Future = Answering<R>>
    + Clone
    + Send
    + 'static
    where
        F: Fn(usize) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Response<R>> + Send + 'static,
        R: 'static,
    {
        let counting = self.clone();
        tower::service_fn(move |_: Req| {
            let answer = answer(counting.next());
            Box::pin(async move { Ok(answer.await) }) as Answering<R>
        })
    }
}

/// Sends a request through a layered service.
pub(crate) async fn send<S, R>(service: &S, request: Req) -> Answer
where
    S: Service<Req, Response = Response<ResponseBody<R>>, Error = Infallible> + Clone,
    R: Body<Data = Bytes>,
    R::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Ok(response) = service.clone().oneshot(request).await;
    answer(response).await
}

pub(crate) async fn answer<B>(response: Response<B>) -> Answer
where
    B: Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = response.into_parts();
    let collected = body.collect().await.expect("the body came to its end");
    let trailers = collected.trailers().cloned();
    Answer {
        body: collected.to_bytes(),
        trailers,
        parts,
    }
}

/// A response with its body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) parts: http::response::Parts,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<http::HeaderMap>,
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        self.parts.status.as_u16()
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// Status and body.
    pub(crate) fn both(&self) -> (u16, &str) {
        (self.status(), self.text())
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.parts.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Status and the last word of the problem's type.
    pub(crate) fn problem(&self) -> (u16, String) {
        let json = self.json();
        let kind = json["type"].as_str().unwrap();
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert_eq!(json["status"], self.status());
        let short = kind.strip_prefix("urn:dlock:problem:").unwrap();
        (
            self.status(),
            short.strip_prefix("idempotency-").unwrap_or(short).to_owned(),
        )
    }

    pub(crate) fn not_started(&self) -> bool {
        self.parts.extensions.get::<dlock_tower::NotStarted>().is_some()
    }
}

pub(crate) fn problem(status: u16, kind: &str) -> (u16, String) {
    (status, kind.to_owned())
}

/// A store in memory that fails on command, and counts what it is asked.
#[derive(Clone)]
pub(crate) struct Faulty {
    inner: Records,
    fingerprints: Arc<Mutex<HashMap<RecordKey, Fingerprint>>>,
    pub(crate) faults: Arc<Faults>,
}

#[derive(Default)]
pub(crate) struct Faults {
    /// No step is done.
    pub(crate) down: AtomicBool,
    /// Renewals are not done.
    pub(crate) extend_down: AtomicBool,
    /// Releases are not done.
    pub(crate) release_down: AtomicBool,
    /// So many of the next steps panic: claims, renewals and releases.
    pub(crate) panics: AtomicUsize,
    /// So many of the next claims are done, and their answers lost.
    pub(crate) claim_answers_lost: AtomicUsize,
    /// So many of the next completions are done, and their answers lost.
    pub(crate) complete_answers_lost: AtomicUsize,
    /// So many of the next releases are done, and their answers lost.
    pub(crate) release_answers_lost: AtomicUsize,
    /// Claims are done, and answered only when this is off again.
    pub(crate) claim_answers_held: AtomicBool,
    /// Completions are neither done nor answered while this is on.
    pub(crate) complete_held: AtomicBool,
    /// Releases are neither done nor answered while this is on.
    pub(crate) release_held: AtomicBool,
    /// Results of more bytes are refused; 0 for no bound.
    pub(crate) room: AtomicUsize,
    pub(crate) claims: AtomicUsize,
    pub(crate) extends: AtomicUsize,
    pub(crate) completes: AtomicUsize,
    pub(crate) releases: AtomicUsize,
    pub(crate) reads: AtomicUsize,
    /// Completions under way, and the most there ever were.
    pub(crate) completing: AtomicUsize,
    pub(crate) most_completing: AtomicUsize,
}

impl Faults {
    fn may_panic(&self) {
        assert!(!take(&self.panics), "on purpose");
    }

    pub(crate) fn set_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    pub(crate) fn seen(&self) -> (usize, usize, usize, usize) {
        let get = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
        (
            get(&self.claims),
            get(&self.extends),
            get(&self.completes),
            get(&self.releases),
        )
    }
}

fn unreachable<T>() -> Result<T, StoreError> {
    Err(StoreError::not_done(
        Reason::Unreachable,
        "10.0.0.7 does not answer",
    ))
}

fn take(counter: &AtomicUsize) -> bool {
    counter
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
        .is_ok()
}

async fn until_off(switch: &AtomicBool) {
    while switch.load(Ordering::SeqCst) {
        sleep(Duration::from_millis(1)).await;
    }
}

impl Faulty {
    pub(crate) fn new() -> Faulty {
        Faulty::of(&records())
    }

    /// The store as another process finds it, with faults of its own.
    pub(crate) fn of(inner: &Records) -> Faulty {
        Faulty {
            inner: inner.clone(),
            fingerprints: Arc::default(),
            faults: Arc::default(),
        }
    }

    pub(crate) fn records(&self) -> Records {
        Records::new(self.clone())
    }

    /// The store itself, without the faults.
    pub(crate) fn inner(&self) -> &Records {
        &self.inner
    }

    pub(crate) fn layer(&self) -> IdempotencyLayer<Public> {
        IdempotencyLayer::new(self.records(), public()).retry_for(Duration::from_millis(100))
    }
}

impl RecordStore for Faulty {
    async fn claim(self: Arc<Self>, request: ClaimRequest) -> Result<ClaimReply, StoreError> {
        self.faults.claims.fetch_add(1, Ordering::SeqCst);
        self.faults.may_panic();
        if self.faults.down.load(Ordering::SeqCst) {
            return unreachable();
        }
        self.fingerprints
            .lock()
            .unwrap()
            .insert(request.key.clone(), request.fingerprint);
        let reply = self.inner.claim(request).await;
        until_off(&self.faults.claim_answers_held).await;
        if take(&self.faults.claim_answers_lost) {
            return Err(StoreError::unknown("the connection broke"));
        }
        reply
    }

    async fn extend(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        self.faults.extends.fetch_add(1, Ordering::SeqCst);
        self.faults.may_panic();
        if self.faults.down.load(Ordering::SeqCst) || self.faults.extend_down.load(Ordering::SeqCst) {
            return unreachable();
        }
        self.inner.extend(&key, &token, lease, retention).await
    }

    async fn complete(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> Result<OwnerReply, StoreError> {
        let faults = &self.faults;
        faults.completes.fetch_add(1, Ordering::SeqCst);
        let now = faults.completing.fetch_add(1, Ordering::SeqCst) + 1;
        faults.most_completing.fetch_max(now, Ordering::SeqCst);
        tokio::task::yield_now().await;
        until_off(&faults.complete_held).await;
        faults.completing.fetch_sub(1, Ordering::SeqCst);
        if faults.down.load(Ordering::SeqCst) {
            return unreachable();
        }
        let room = faults.room.load(Ordering::SeqCst);
        if room > 0 && response.len() > room {
            return Err(StoreError::not_done(Reason::RefusedForNow, "OOM"));
        }
        let reply = self.inner.complete(&key, &token, response, retention).await;
        if take(&faults.complete_answers_lost) {
            return Err(StoreError::unknown("the connection broke"));
        }
        reply
    }

    fn release(
        self: Arc<Self>,
        key: RecordKey,
        token: ClaimToken,
    ) -> impl Future<Output = Result<OwnerReply, StoreError>> + Send + 'static {
        let faults = &self.faults;
        faults.releases.fetch_add(1, Ordering::SeqCst);
        faults.may_panic();
        let down = faults.down.load(Ordering::SeqCst) || faults.release_down.load(Ordering::SeqCst);
        let step = (!down).then(|| self.inner.release(&key, &token));
        async move {
            let Some(step) = step else { return unreachable() };
            until_off(&self.faults.release_held).await;
            let reply = step.await;
            if take(&self.faults.release_answers_lost) {
                return Err(StoreError::unknown("the connection broke"));
            }
            reply
        }
    }

    async fn abandon(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> Result<OwnerReply, StoreError> {
        self.faults.releases.fetch_add(1, Ordering::SeqCst);
        if self.faults.down.load(Ordering::SeqCst) {
            return unreachable();
        }
        self.inner.abandon(&key, &token).await
    }

    async fn read(self: Arc<Self>, key: RecordKey, token: ClaimToken) -> Result<ClaimState, StoreError> {
        self.faults.reads.fetch_add(1, Ordering::SeqCst);
        if self.faults.down.load(Ordering::SeqCst) {
            return unreachable();
        }
        let fingerprint = self.fingerprints.lock().unwrap()[&key];
        // The same token gets the same answer.
        let mut again = ClaimRequest::new(key, token, fingerprint, SECOND, SECOND * 60);
        again.on_orphan = OnOrphan::Leave;
        Ok(match self.inner.claim(again).await? {
            ClaimReply::Claimed { .. } => ClaimState::Open,
            ClaimReply::Completed { response } => ClaimState::Completed { response },
            _ => ClaimState::Lost,
        })
    }

    fn watch(self: Arc<Self>, key: &RecordKey) -> Watch {
        self.inner.watch(key)
    }
}

/// Puts a layer around a handler.
pub(crate) fn around<L: Layer<S>, S>(layer: &L, service: S) -> L::Service {
    layer.layer(service)
}
