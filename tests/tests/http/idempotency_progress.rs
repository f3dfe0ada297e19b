//! The idempotency layer: requests while an equal one is in progress, and after one whose process is gone.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::idempotency_support::*;
use bytes::Bytes;
use dlock::record::{ClaimRequest, ClaimToken, OnOrphan};
use dlock_tower::Idempotency;
use http::{Response, StatusCode};
use http_body_util::Full;
use tokio::time::{Instant, sleep};
use tower::Layer;

/// Answers with this status and the number of the run.
fn with_status(status: u16, n: usize) -> Res {
    let mut response = Response::new(Full::from(format!("run {n}")));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

#[tokio::test(start_paused = true)]
async fn while_a_request_is_in_progress_an_equal_one_is_told_so() {
    let run = Counting::default();
    let service = around(&layer(), run.taking(SECOND));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await }
    });
    sleep(SECOND / 2).await;
    let second = send(&service, post("k")).await;
    assert_eq!(second.problem(), problem(409, "in-progress"));
    assert_eq!(second.header("retry-after"), Some("1"));
    assert_eq!(second.json()["retryable"], true);
    assert!(!second.not_started(), "the work has begun");
    assert_eq!(
        send(&service, request("POST", "/pay", "k", "other"))
            .await
            .status(),
        422
    );
    assert_eq!(first.await.unwrap().text(), "run 1");
    assert!(send(&service, post("k")).await.is_replay());
    assert_eq!(run.count(), 1);
}

/// Two layers with one record are no two requests: the one further in lets the request pass, whatever it would compare.
#[tokio::test(start_paused = true)]
async fn request_is_not_in_progress_because_of_its_own_claim() {
    let (store, run) = (Faulty::new(), Counting::default());
    let outer = store.layer().wait(SECOND * 60);
    let others = [
        outer.clone(),
        store.layer(),
        store.layer().fingerprint(|_, _| "something else"),
    ];
    for (n, inner) in others.into_iter().enumerate() {
        let service = outer.layer(inner.layer(run.service()));
        let key = format!("k{n}");
        let begun = Instant::now();
        let first = send(&service, post(&key)).await;
        assert_eq!(first.both(), (200, format!("run {}", n + 1).as_str()));
        assert_eq!(begun.elapsed(), Duration::ZERO);
        assert!(send(&service, post(&key)).await.is_replay());
        assert_eq!(run.count(), n + 1);
    }
    assert_eq!(outer.handle().claims(), 0);
}

/// The record of another store is another one, and so is that of another namespace.
#[tokio::test(start_paused = true)]
async fn layer_inside_with_its_own_record_claims_it() {
    for (inside, namespace) in [(Faulty::new(), ""), (Faulty::new(), "inside")] {
        let (outside, run) = (Faulty::new(), Counting::default());
        let service = outside
            .layer()
            .layer(inside.layer().namespace(namespace).layer(run.service()));
        assert_eq!(send(&service, post("k")).await.text(), "run 1");
        let (claims, _, completes, _) = inside.faults.seen();
        assert_eq!((claims, completes), (1, 1), "{namespace}");
    }
}

#[tokio::test(start_paused = true)]
async fn or_waits_for_its_result() {
    let run = Counting::default();
    let service = around(&layer().wait(SECOND * 5), run.taking(SECOND * 2));
    let all = futures_util::future::join_all((0..10).map(|_| send(&service, post("k")))).await;
    assert!(all.iter().all(|answer| answer.both() == (200, "run 1")));
    assert_eq!(all.iter().filter(|answer| answer.is_replay()).count(), 9);
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_bounded() {
    let service = around(&layer().wait(SECOND), Counting::default().taking(SECOND * 60));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await }
    });
    sleep(SECOND).await;
    let begun = Instant::now();
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "in-progress")
    );
    assert_eq!(begun.elapsed(), SECOND);
    assert_eq!(first.await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn waiter_for_a_request_that_releases_runs_itself() {
    let run = Counting::default();
    let service = around(
        &layer().wait(SECOND * 10),
        run.answering(|n| async move {
            sleep(SECOND).await;
            let mut response = with_status(if n < 3 { 429 } else { 200 }, n);
            if n < 3 {
                response
                    .extensions_mut()
                    .insert(dlock_tower::idempotency::Outcome::Retry);
            }
            response
        }),
    );
    let all = futures_util::future::join_all((0..5).map(|_| send(&service, post("k")))).await;
    let mut statuses: Vec<u16> = all.iter().map(Answer::status).collect();
    statuses.sort_unstable();
    assert_eq!((run.count(), statuses), (3, vec![200, 200, 200, 429, 429]));
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_with_the_client_and_leaves_nothing() {
    let store = Faulty::new();
    let layer = store.layer().wait(SECOND * 30);
    let service = around(&layer, Counting::default().taking(SECOND * 20));
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service, post("k")).await }
    });
    sleep(SECOND).await;
    let waiter = send(&service, post("k"));
    assert!(tokio::time::timeout(SECOND, waiter).await.is_err());
    let (claims, ..) = store.faults.seen();
    assert_eq!(layer.handle().tasks(), 0);
    first.await.unwrap();
    assert_eq!((store.faults.seen().0, layer.handle().claims()), (claims, 0));
}

#[tokio::test]
async fn a_thousand_equal_requests_at_once_run_once() {
    let run = Counting::default();
    let service = around(
        &layer().wait(SECOND * 20).max_waiters(1000),
        run.taking(Duration::from_millis(50)),
    );
    let replays = Arc::new(AtomicUsize::new(0));
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..1000 {
        let (service, replays) = (service.clone(), replays.clone());
        all.spawn(async move {
            let answer = send(&service, post("k")).await;
            assert_eq!(answer.both(), (200, "run 1"));
            replays.fetch_add(usize::from(answer.is_replay()), Ordering::SeqCst);
        });
    }
    all.join_all().await;
    assert_eq!((run.count(), replays.load(Ordering::SeqCst)), (1, 999));
}

/// Claims the key of `post("k")` as a process does that crashes then. Answers what the handler of the layer
/// saw of it.
async fn orphan(store: &Faulty, lease: Duration) {
    let seen = Arc::new(std::sync::Mutex::new(None));
    let probe = {
        let seen = seen.clone();
        tower::service_fn(move |request: Req| {
            let idempotency = request.extensions().get::<Idempotency>().unwrap();
            *seen.lock().unwrap() = Some(idempotency.record_key().clone());
            idempotency.forget();
            async { Ok::<_, Infallible>(Res::default()) }
        })
    };
    // The layer's own fingerprint is needed too: watch it being claimed.
    let claims = Recording::default();
    let layer = dlock_tower::IdempotencyLayer::new(
        claims.records(store.inner().clone()),
        dlock_tower::idempotency::caller::public(),
    );
    send(&around(&layer, probe), post("k")).await;
    let record = seen.lock().unwrap().take().unwrap();
    let fingerprint = claims.0.lock().unwrap().take().unwrap();
    let claim = ClaimRequest::new(record, ClaimToken::new(), fingerprint, lease, SECOND * 3600);
    store.inner().claim(claim).await.unwrap();
}

/// Notes the fingerprint of a claim.
#[derive(Clone, Default)]
struct Recording(Arc<std::sync::Mutex<Option<[u8; 32]>>>);

impl Recording {
    fn records(&self, inner: dlock::record::Records) -> dlock::record::Records {
        dlock::record::Records::new(Noting {
            inner,
            noted: self.clone(),
        })
    }
}

struct Noting {
    inner: dlock::record::Records,
    noted: Recording,
}

impl dlock::record::RecordStore for Noting {
    async fn claim(
        self: Arc<Self>,
        request: ClaimRequest,
    ) -> Result<dlock::record::ClaimReply, dlock::store::StoreError> {
        *self.noted.0.lock().unwrap() = Some(request.fingerprint);
        self.inner.claim(request).await
    }
    async fn extend(
        self: Arc<Self>,
        key: dlock::record::RecordKey,
        token: ClaimToken,
        lease: Duration,
        retention: Duration,
    ) -> Result<dlock::record::OwnerReply, dlock::store::StoreError> {
        self.inner.extend(&key, &token, lease, retention).await
    }
    async fn complete(
        self: Arc<Self>,
        key: dlock::record::RecordKey,
        token: ClaimToken,
        response: Vec<u8>,
        retention: Duration,
    ) -> Result<dlock::record::OwnerReply, dlock::store::StoreError> {
        self.inner.complete(&key, &token, response, retention).await
    }
    async fn release(
        self: Arc<Self>,
        key: dlock::record::RecordKey,
        token: ClaimToken,
    ) -> Result<dlock::record::OwnerReply, dlock::store::StoreError> {
        self.inner.release(&key, &token).await
    }
    async fn abandon(
        self: Arc<Self>,
        key: dlock::record::RecordKey,
        token: ClaimToken,
    ) -> Result<dlock::record::OwnerReply, dlock::store::StoreError> {
        self.inner.abandon(&key, &token).await
    }
    fn watch(self: Arc<Self>, key: &dlock::record::RecordKey) -> dlock::store::Watch {
        self.inner.watch(key)
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_crashed_process_began_is_run_again_as_the_next_attempt() {
    let store = Faulty::new();
    orphan(&store, SECOND * 10).await;
    let handler = tower::service_fn(|request: Req| {
        let idempotency = request.extensions().get::<Idempotency>().unwrap().clone();
        async move {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(format!(
                "attempt {} fence {}",
                idempotency.attempt(),
                idempotency.fence() > 0
            ))))
        }
    });
    let layer = store.layer();
    let service = around(&layer, handler);
    assert_eq!(
        send(&service, post("k")).await.problem(),
        problem(409, "in-progress")
    );
    assert_eq!(
        send(&service, request("POST", "/pay", "k", "other"))
            .await
            .status(),
        422
    );
    sleep(SECOND * 11).await;
    assert_eq!(
        send(&service, request("POST", "/pay", "k", "other"))
            .await
            .status(),
        422,
        "of orphans too"
    );
    assert_eq!(send(&service, post("k")).await.text(), "attempt 2 fence true");
    assert!(send(&service, post("k")).await.is_replay());
    assert_eq!(layer.stats().taken_over, 1);
}

#[tokio::test(start_paused = true)]
async fn or_its_outcome_is_unknown_for_good() {
    let store = Faulty::new();
    orphan(&store, SECOND * 10).await;
    let run = Counting::default();
    let service = around(&store.layer().on_orphan(OnOrphan::Leave), run.service());
    for wait in [11, 3000] {
        sleep(SECOND * wait).await;
        let answer = send(&service, post("k")).await;
        assert_eq!(answer.problem(), problem(409, "outcome-unknown"));
        assert_eq!(
            (answer.header("retry-after"), answer.not_started()),
            (None, false)
        );
        assert_eq!(answer.json()["retryable"], false);
    }
    assert_eq!(run.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn waiter_for_a_crashed_owner_takes_over_at_the_end_of_its_lease() {
    let store = Faulty::new();
    orphan(&store, SECOND * 4).await;
    let run = Counting::default();
    let service = around(&store.layer().wait(SECOND * 30), run.service());
    let begun = Instant::now();
    assert_eq!(send(&service, post("k")).await.text(), "run 1");
    assert!(begun.elapsed() < SECOND * 5, "{:?}", begun.elapsed());
}
