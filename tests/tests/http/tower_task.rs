//! The layers for services of any request: what a worker is told, what is under the lock, and the bound of one process.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use crate::idempotency_support::Faulty;
use dlock::record::OnOrphan;
use dlock::stores::memory::MemoryStore;
use dlock::testing::TestStore;
use dlock::{Error, LockClient, LockKey, LockKind, OnFailure};
use dlock_tests::{Store, paused};
use dlock_tower::task::{Done, LimitLayer, TaskError, TaskLockLayer, TaskOnceError, TaskOnceLayer};
use futures_util::FutureExt;
use futures_util::future::{join_all, poll_fn};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};

const MS: Duration = Duration::from_millis(1);

/// A job on an account, with the time that it takes in ms.
#[derive(Clone)]
struct Job {
    account: &'static str,
    takes: u32,
}

fn job(account: &'static str, takes: u32) -> Job {
    Job { account, takes }
}

fn account(job: &Job) -> LockKey {
    job.account.into()
}

/// A client of a store with records.
async fn recording() -> LockClient {
    let built = LockClient::builder().store(MemoryStore::new()).build();
    built.await.unwrap()
}

/// Does a job and tells the fencing token under which.
async fn does(job: Job) -> Result<u64, String> {
    sleep(job.takes * MS).await;
    match job.account {
        "broken" => Err("no such account".to_owned()),
        _ => Ok(dlock::current().expect("a lock").fencing_token()),
    }
}

/// Options that were set before it stay.
#[test]
fn locks_and_permits_count_in_the_group_of_their_layer() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let shown = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        paused(async {
            let client = LockClient::memory();
            let exclusive = TaskLockLayer::new(client.clone(), account).wait(60_000 * MS);
            let limited = LimitLayer::new(client.clone(), account, |_: &Job| 1).unwrap();
            let limited = limited.wait(60_000 * MS);
            let [exclusive, limited] = [
                exclusive.group("exports").layer(service_fn(does)).boxed_clone(),
                limited.group("uploads").layer(service_fn(does)).boxed_clone(),
            ];
            for (worker, key) in [(exclusive, "a"), (limited, "b")] {
                let [one, two] = [job(key, 100), job(key, 100)].map(|job| worker.clone().oneshot(job));
                let (one, two) = tokio::join!(one, two);
                assert!(one.is_ok() && two.is_ok(), "{one:?}, {two:?}");
            }
            let text = shown.render();
            let groups = text
                .lines()
                .filter(|line| line.starts_with("dlock_hold_seconds_count{") && !line.ends_with(" 0"))
                .filter_map(|line| line.split_once("group=\"")?.1.split_once('"'))
                .map(|(group, _)| group);
            let groups: BTreeSet<_> = groups.collect();
            assert_eq!(groups, BTreeSet::from(["exports", "uploads"]), "{text}");
        });
    });
}

#[tokio::test(start_paused = true)]
async fn busy_is_told_at_once_with_the_name_and_the_lease_and_nothing_was_started() {
    let client = LockClient::memory();
    let elsewhere = client.lock("a").acquire().await.unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let worker = TaskLockLayer::new(client, account).layer(service_fn(move |job| {
        counted.fetch_add(1, Ordering::SeqCst);
        does(job)
    }));
    let begun = tokio::time::Instant::now();
    let busy = worker.clone().oneshot(job("a", 1)).await.unwrap_err();
    assert!(begun.elapsed() < MS, "it waited for {:?}", begun.elapsed());
    assert!(busy.is_busy() && busy.is_not_started() && busy.retry_after().is_some());
    match busy {
        TaskError::Busy { key, remaining, .. } => {
            assert_eq!(key.as_str(), "a");
            assert!(
                remaining.is_some_and(|left| left > Duration::from_secs(20)),
                "{remaining:?}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    elsewhere.release().await.unwrap();
    assert!(worker.oneshot(job("a", 1)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn jobs_of_an_account_exclude_each_other_and_release_before_they_answer() {
    let client = LockClient::memory();
    let inside = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
    let counted = inside.clone();
    let service = service_fn(move |job: Job| {
        let counted = counted.clone();
        async move {
            let now = counted.0.fetch_add(1, Ordering::SeqCst) + 1;
            counted.1.fetch_max(now, Ordering::SeqCst);
            let done = does(job).await;
            counted.0.fetch_sub(1, Ordering::SeqCst);
            done
        }
    });
    let worker = TaskLockLayer::new(client.clone(), account)
        .wait(Duration::from_secs(600))
        .layer(service);
    let jobs = (0..20).map(|_| worker.clone().oneshot(job("a", 10)));
    let mut tokens: Vec<u64> = join_all(jobs).await.into_iter().map(Result::unwrap).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!((tokens.len(), inside.1.load(Ordering::SeqCst)), (20, 1));
    assert!(
        client.lock("a").try_acquire().await.is_ok(),
        "answered while it was held"
    );
}

#[tokio::test(start_paused = true)]
async fn error_of_the_work_and_of_the_set_up_are_told_apart() {
    let client = LockClient::memory();
    let worker = TaskLockLayer::new(client.clone(), account).layer(service_fn(does));
    let failed = worker.oneshot(job("broken", 1)).await.unwrap_err();
    assert!(!failed.is_not_started());
    assert_eq!(failed.into_inner().as_deref(), Some("no such account"));
    assert!(client.lock("broken").try_acquire().await.is_ok());

    for layer in [
        TaskLockLayer::new(client.clone(), account).lease(Duration::ZERO),
        TaskLockLayer::new(client.clone(), account).at_most_here(0),
    ] {
        assert!(layer.check().is_err());
        let refused = layer.layer(service_fn(does)).oneshot(job("a", 1)).await;
        assert!(
            matches!(refused, Err(TaskError::Store(Error::InvalidOption { .. }))),
            "{refused:?}"
        );
    }
    client.shutdown(Duration::ZERO).await;
    let worker = TaskLockLayer::new(client, account).layer(service_fn(does));
    let closed = worker.oneshot(job("a", 1)).await.unwrap_err();
    assert!(matches!(closed, TaskError::Store(Error::ClientClosed)) && closed.is_not_started());
}

/// Tells whether it was dropped before its end, and whether the lock was held then.
struct Witness(LockClient, Arc<parking_lot::Mutex<Option<bool>>>);

impl Drop for Witness {
    fn drop(&mut self) {
        let busy = self.0.lock("a").try_acquire().now_or_never();
        *self.1.lock() = Some(matches!(busy, Some(Err(error)) if error.is_busy()));
    }
}

#[tokio::test(start_paused = true)]
async fn work_whose_lock_is_lost_or_whose_caller_goes_away_is_dropped_under_the_lock() {
    let store = TestStore::new();
    let client = store.client();
    let other = store.client();
    let dropped = Arc::new(parking_lot::Mutex::new(None));
    let (told, witnessed) = (dropped.clone(), other.clone());
    let service = service_fn(move |_: Job| {
        let witness = Witness(witnessed.clone(), told.clone());
        async move {
            let _witness = witness;
            pending::<()>().await;
            Ok::<_, Infallible>(())
        }
    });
    let worker = TaskLockLayer::new(client.clone(), account);
    // lost
    let limited = worker.clone().max_hold(50 * MS).layer(service.clone());
    let lost = limited.oneshot(job("a", 0)).await.unwrap_err();
    assert!(
        matches!(&lost, TaskError::Lost { key, .. } if key.as_str() == "a"),
        "{lost:?}"
    );
    assert!(!lost.is_not_started() && lost.retry_after().is_none());
    assert_eq!(dropped.lock().take(), Some(true));
    // gone
    let gone = timeout(50 * MS, worker.layer(service).oneshot(job("a", 0)));
    assert!(gone.await.is_err());
    assert_eq!(dropped.lock().take(), Some(true));
    let again = other.lock("a").wait(Duration::from_secs(1)).acquire().await;
    assert!(again.is_ok(), "the lock of a dropped job stays held");
}

#[tokio::test(start_paused = true)]
async fn readers_share_and_inner_acquires_of_the_key_reenter() {
    let client = LockClient::memory();
    let readers = TaskLockLayer::new(client.clone(), account)
        .kind(LockKind::Read)
        .unwrap();
    let worker = readers.layer(service_fn(|job: Job| async move {
        sleep(job.takes * MS).await;
        Ok::<_, Infallible>(())
    }));
    let begun = tokio::time::Instant::now();
    let both = join_all([
        worker.clone().oneshot(job("r", 100)),
        worker.oneshot(job("r", 100)),
    ])
    .await;
    assert!(both.iter().all(Result::is_ok) && begun.elapsed() < 150 * MS);

    let inner = client.clone();
    let nested = TaskLockLayer::new(client, account).layer(service_fn(move |_: Job| {
        let inner = inner.clone();
        async move { inner.lock("a").try_acquire().await.map(drop) }
    }));
    assert!(nested.oneshot(job("a", 0)).await.is_ok());
}

async fn is_ready<S: Service<Job>>(service: &mut S) -> bool {
    poll_fn(|cx| std::task::Poll::Ready(service.poll_ready(cx).is_ready())).await
}

#[tokio::test(start_paused = true)]
async fn bound_of_the_process_is_kept_and_places_return_from_dropped_and_cloned_services() {
    let layer = TaskLockLayer::new(LockClient::memory(), account).at_most_here(2);
    let mut one = layer.layer(service_fn(does));
    // The bound is of the layer, with its clones.
    let mut two = layer.clone().layer(service_fn(does));
    assert!(is_ready(&mut one).await && is_ready(&mut two).await);
    assert!(is_ready(&mut one).await, "a second poll takes a second place");
    // A clone of a ready service has no place.
    let mut clone = one.clone();
    assert!(!is_ready(&mut clone).await);
    // Dropped while it was ready, it returns its place, and wakes the next.
    let waiting = tokio::spawn(async move {
        let clone = clone.ready().await.unwrap();
        clone.call(job("a", 10)).await
    });
    sleep(MS).await;
    drop(one);
    sleep(MS).await;
    assert!(
        !is_ready(&mut layer.layer(service_fn(does))).await,
        "more than two"
    );
    assert!(waiting.await.unwrap().is_ok());
    // A call keeps its place to its end, also when it fails, is busy or is dropped.
    assert!(is_ready(&mut layer.layer(service_fn(does))).await);
    let mut three = layer.layer(service_fn(does));
    assert!(is_ready(&mut three).await);
    let call = three.call(job("broken", 50));
    assert!(!is_ready(&mut layer.layer(service_fn(does))).await);
    assert!(call.await.is_err());
    let gone = timeout(5 * MS, three.ready().await.unwrap().call(job("a", 50)));
    assert!(gone.await.is_err());
    assert!(is_ready(&mut layer.layer(service_fn(does))).await);
    drop(two);
    // Called without having been ready, it waits for a place.
    let calls: Vec<_> = (0..6)
        .map(|n| {
            layer
                .layer(service_fn(does))
                .call(job(["a", "b", "c", "d", "e", "f"][n], 10))
        })
        .collect();
    let begun = tokio::time::Instant::now();
    assert!(join_all(calls).await.iter().all(Result::is_ok));
    assert!(begun.elapsed() >= 30 * MS, "more than two at a time");
}

fn tenants(
    client: LockClient,
    limit: Arc<AtomicU32>,
) -> LimitLayer<Job, impl Fn(&Job) -> LockKey, impl Fn(&Job) -> u32> {
    LimitLayer::new(client, account, move |_: &Job| limit.load(Ordering::SeqCst)).unwrap()
}

#[tokio::test(start_paused = true)]
async fn limit_of_a_tenant_is_that_of_each_request_and_leaves_nothing_behind() {
    let store = TestStore::new();
    let limit = Arc::new(AtomicU32::new(2));
    let services: Vec<_> = (0..3)
        .map(|_| tenants(store.client(), limit.clone()).layer(service_fn(does)))
        .collect();
    let running: Vec<_> = (0..2)
        .map(|n| tokio::spawn(services[n].clone().oneshot(job("t", 100))))
        .collect();
    sleep(10 * MS).await;
    let busy = services[2].clone().oneshot(job("t", 1)).await.unwrap_err();
    assert!(busy.is_busy() && busy.is_not_started(), "{busy:?}");
    // Another tenant has a limit of its own.
    assert!(services[2].clone().oneshot(job("u", 1)).await.is_ok());
    // Raised and lowered at run time, without a step at the store.
    limit.store(3, Ordering::SeqCst);
    assert!(services[2].clone().oneshot(job("t", 1)).await.is_ok());
    limit.store(1, Ordering::SeqCst);
    assert!(services[2].clone().oneshot(job("t", 1)).await.is_err());
    let permits = store.client().semaphore("t").limit(1);
    let status = permits.status().await.unwrap().expect("a limit is a total");
    assert_eq!((status.total, status.held, status.available), (1, 2, -1));
    for job in running {
        assert!(job.await.unwrap().is_ok(), "a smaller limit stopped what ran");
    }
    assert_eq!(permits.available().await.unwrap(), 1);
    assert_eq!(
        store.client().semaphore("t").status().await.unwrap(),
        None,
        "a number is stored"
    );
    assert!(services[2].clone().oneshot(job("t", 1)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn request_waits_for_a_permit_of_its_tenant_and_a_limit_of_zero_admits_nothing() {
    let store = TestStore::new();
    let limit = Arc::new(AtomicU32::new(2));
    let layers = [0, 1].map(|_| tenants(store.client(), limit.clone()).wait(Duration::from_secs(60)));
    let begun = tokio::time::Instant::now();
    let jobs = (0..8).map(|n| layers[n % 2].layer(service_fn(does)).oneshot(job("t", 100)));
    assert!(join_all(jobs).await.iter().all(Result::is_ok));
    let took = begun.elapsed();
    assert!(took >= 400 * MS && took < 600 * MS, "{took:?}");
    limit.store(0, Ordering::SeqCst);
    let begun = tokio::time::Instant::now();
    let refused = layers[0].layer(service_fn(does)).oneshot(job("t", 1)).await;
    assert!(refused.is_err_and(|error| error.is_busy()));
    assert!(begun.elapsed() >= Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn highest_limit_is_as_good_as_none() {
    let limit = LockClient::memory().semaphore("t").limit(u32::MAX);
    let (one, other) = (
        limit.try_acquire().await.unwrap(),
        limit.acquire_many(2).await.unwrap(),
    );
    let status = limit.status().await.unwrap().unwrap();
    assert_eq!((status.total, status.held), (i64::from(u32::MAX), 3));
    drop((one, other));
}

#[tokio::test(start_paused = true)]
async fn limit_and_number_of_permits_are_not_given_together() {
    let client = LockClient::memory();
    let both = client.semaphore("t").permits(2).limit(3).try_acquire().await;
    assert!(
        matches!(both, Err(Error::InvalidOption { option: "limit", .. })),
        "{both:?}"
    );
    // The call could never acquire them, and later callers would wait behind it.
    let more = client.semaphore("t").limit(3).acquire_many(4).await;
    assert!(
        matches!(
            more,
            Err(Error::InvalidOption {
                option: "acquire_many",
                ..
            })
        ),
        "{more:?}"
    );
    drop(client.semaphore("t").limit(3).acquire_many(3).await.unwrap());
    // On one name both bind.
    client.semaphore("t").set_permits(1).await.unwrap();
    let limit = client.semaphore("t").limit(3);
    let one = limit.try_acquire().await.unwrap();
    assert!(limit.try_acquire().await.is_err_and(|error| error.is_busy()));
    assert_eq!(limit.available().await.unwrap(), 0);
    one.release().await.unwrap();
    assert_eq!(limit.available().await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn message_that_is_delivered_again_gets_the_response_of_the_first_time() {
    let client = recording().await;
    let calls = Arc::new(AtomicUsize::new(0));
    let consumer = || {
        let calls = calls.clone();
        let layer = TaskOnceLayer::new(client.clone(), account).unwrap();
        layer.layer(service_fn(move |job: Job| {
            let attempt = calls.fetch_add(1, Ordering::SeqCst);
            async move {
                sleep(job.takes * MS).await;
                match job.account {
                    "fails once" if attempt == 0 => Err("no".to_owned()),
                    _ => Ok(job.takes),
                }
            }
        }))
    };
    let first = consumer().oneshot(job("m", 5)).await.unwrap();
    assert!(matches!(first, Done::Ran(5)) && first.ran_here());
    let again = consumer().oneshot(job("m", 7)).await.unwrap();
    assert!(matches!(again, Done::Earlier(5)) && !again.ran_here());
    assert_eq!(calls.swap(0, Ordering::SeqCst), 1);

    let failed = consumer().oneshot(job("fails once", 1)).await.unwrap_err();
    assert!(!failed.is_not_started() && !failed.is_done() && !failed.is_given_up());
    assert_eq!(failed.into_inner().as_deref(), Some("no"));
    assert!(matches!(
        consumer().oneshot(job("fails once", 1)).await,
        Ok(Done::Ran(1))
    ));
}

#[tokio::test]
async fn store_without_records_is_told_by_the_check() {
    let client = Store::memory_quorum().client().await;
    let work = client.once("mail");
    for checked in [
        work.check(),
        work.clone().every(1000 * MS).check(),
        TaskOnceLayer::new(client, account).map(drop),
    ] {
        assert!(matches!(checked, Err(Error::Unsupported { .. })), "{checked:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn message_that_is_done_elsewhere_is_an_error_for_its_consumer_until_it_is_done() {
    let client = recording().await;
    let answers = service_fn(|job: Job| async move {
        sleep(job.takes * MS).await;
        Ok::<_, String>(job.takes)
    });
    let layer = || TaskOnceLayer::new(client.clone(), account).unwrap();
    let running = tokio::spawn(layer().layer(answers).oneshot(job("m", 100)));
    sleep(10 * MS).await;
    let elsewhere = layer().layer(answers).oneshot(job("m", 1)).await.unwrap_err();
    match &elsewhere {
        TaskOnceError::Elsewhere {
            key,
            attempt: 1,
            remaining,
            ..
        } => {
            assert!(key.as_str() == "m" && *remaining > Duration::from_secs(20));
        }
        other => panic!("{other:?}"),
    }
    assert!(elsewhere.is_not_started() && !elsewhere.is_done());
    let expired = layer().wait(20 * MS).layer(answers).oneshot(job("m", 1)).await;
    assert!(matches!(expired, Err(TaskOnceError::Elsewhere { .. })));
    let waited = layer()
        .wait(Duration::from_secs(9))
        .layer(answers)
        .oneshot(job("m", 1))
        .await;
    assert!(matches!(waited, Ok(Done::Earlier(100))), "{waited:?}");
    assert!(matches!(running.await.unwrap(), Ok(Done::Ran(100))));
}

/// A store that is full takes the little that says that the work was done. One that takes nothing at all gets the whole
/// result as soon as it takes one.
#[tokio::test(start_paused = true)]
async fn response_that_a_full_store_refuses_is_not_made_again() {
    let store = Faulty::new();
    let room = &store.faults.room;
    let layer = TaskOnceLayer::on_records(store.records(), account);
    let answers = service_fn(|_: Job| async { Ok::<_, String>("x".repeat(2000)) });
    let deliver = |name| layer.layer(answers).oneshot(job(name, 0));

    room.store(1000, Ordering::SeqCst);
    let done = timeout(1000 * MS, deliver("large")).await.expect("at once");
    assert!(matches!(done, Ok(Done::Ran(_))), "{done:?}");
    let again = deliver("large").await.unwrap_err();
    assert!(
        matches!(again, TaskOnceError::ResultUnavailable { .. }) && again.is_done(),
        "{again:?}"
    );

    room.store(1, Ordering::SeqCst);
    let waits = tokio::spawn(deliver("later"));
    sleep(1000 * MS).await;
    room.store(0, Ordering::SeqCst);
    assert!(matches!(waits.await.unwrap(), Ok(Done::Ran(_))));
    let again = deliver("later").await;
    assert!(
        matches!(&again, Ok(Done::Earlier(text)) if text.len() == 2000),
        "{again:?}"
    );
}

/// As on a machine that stood still between the claim and its reply.
#[tokio::test(start_paused = true)]
async fn claim_that_is_over_when_its_reply_comes_starts_nothing_and_is_told_apart() {
    let store = Faulty::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let layer = TaskOnceLayer::on_records(store.records(), account).lease(200 * MS);
    let consumer = layer.layer(service_fn(move |_: Job| {
        counted.fetch_add(1, Ordering::SeqCst);
        sleep(1000 * MS).map(Ok::<(), String>)
    }));
    store.faults.claim_answers_held.store(true, Ordering::SeqCst);
    let late = tokio::spawn(consumer.clone().oneshot(job("m", 0)));
    sleep(300 * MS).await;
    store.faults.claim_answers_held.store(false, Ordering::SeqCst);
    let late = late.await.unwrap().unwrap_err();
    assert!(
        matches!(
            &late,
            TaskOnceError::Lost {
                attempt: 1,
                started: false,
                ..
            }
        ) && late.is_not_started(),
        "{late:?}"
    );
    assert_eq!(late.retry_after(), Some(1000 * MS));
    assert_eq!(calls.load(Ordering::SeqCst), 0);

    store.faults.extend_down.store(true, Ordering::SeqCst);
    let stopped = consumer.oneshot(job("m", 0)).await.unwrap_err();
    assert!(
        matches!(
            &stopped,
            TaskOnceError::Lost {
                attempt: 1,
                started: true,
                ..
            }
        ) && !stopped.is_not_started(),
        "{stopped:?}"
    );
    assert_eq!((stopped.retry_after(), calls.load(Ordering::SeqCst)), (None, 1));
}

#[tokio::test(start_paused = true)]
async fn attempt_that_is_dropped_is_repeated_or_given_up_and_each_request_learns_its_attempt() {
    let client = recording().await;
    let layer = || {
        TaskOnceLayer::new(client.clone(), account)
            .unwrap()
            .tell_claim(|job: &mut Job, claim| job.takes += claim.attempt())
            .at_most_here(1)
    };
    let answers = service_fn(|job: Job| async move {
        sleep(100 * MS).await;
        Ok::<_, String>(job.takes)
    });
    assert!(
        timeout(50 * MS, layer().layer(answers).oneshot(job("m", 10)))
            .await
            .is_err()
    );
    sleep(MS).await;
    let second = layer().layer(answers).oneshot(job("m", 10)).await;
    assert!(matches!(second, Ok(Done::Ran(12))), "{second:?}");

    let left = layer().on_orphan(OnOrphan::Leave);
    assert!(
        timeout(50 * MS, left.layer(answers).oneshot(job("n", 10)))
            .await
            .is_err()
    );
    sleep(MS).await;
    let given_up = left.layer(answers).oneshot(job("n", 10)).await.unwrap_err();
    assert!(
        given_up.is_given_up() && !given_up.is_not_started(),
        "{given_up:?}"
    );

    let once = layer().on_failure(OnFailure::Keep);
    let fails = service_fn(|_: Job| async { Err::<u32, _>("no".to_owned()) });
    assert!(
        once.layer(fails)
            .oneshot(job("o", 1))
            .await
            .unwrap_err()
            .into_inner()
            .is_some()
    );
    assert!(
        once.layer(fails)
            .oneshot(job("o", 1))
            .await
            .unwrap_err()
            .is_given_up()
    );

    // The work was done: a consumer acknowledges, whatever there is to read.
    let other = TaskOnceLayer::new(client.clone(), account).unwrap();
    let text = service_fn(|_: Job| async { Ok::<_, String>("text".to_owned()) });
    let unreadable = other.layer(text).oneshot(job("m", 1)).await.unwrap_err();
    assert!(
        unreadable.is_done() && !unreadable.is_not_started(),
        "{unreadable:?}"
    );
    assert!(layer().keep(MS).check().is_err() && layer().at_most_here(0).check().is_err());
}

/// An inner service with one place, as a buffer or a concurrency limit has.
#[tokio::test(start_paused = true)]
async fn readiness_is_that_of_the_inner_service_and_the_one_that_was_ready_is_called() {
    let client = LockClient::memory();
    let inner = tower::limit::ConcurrencyLimit::new(service_fn(does), 1);
    let mut worker = TaskLockLayer::new(client.clone(), account).layer(inner);
    let running = tokio::spawn(worker.ready().await.unwrap().call(job("a", 50)));
    sleep(MS).await;
    // Of a clone, which goes: one that waits to become ready stands in the inner service's queue.
    assert!(
        !is_ready(&mut worker.clone()).await,
        "a job is fetched that nothing could run"
    );
    assert!(running.await.unwrap().is_ok());
    // A busy job, and one that ran, return the inner service's place.
    let elsewhere = client.lock("a").acquire().await.unwrap();
    assert!(
        worker
            .clone()
            .oneshot(job("a", 1))
            .await
            .is_err_and(|error| error.is_busy())
    );
    elsewhere.release().await.unwrap();
    assert!(worker.clone().oneshot(job("a", 1)).await.is_ok());
    assert!(is_ready(&mut worker).await);
    // Around a service whose error is a `BoxError`, which is no `Error` itself, it is one all the same.
    let boxed = service_fn(|_: Job| async { Err::<(), tower::BoxError>("inner".into()) });
    let worker = TaskLockLayer::new(LockClient::memory(), account).layer(boxed);
    let error: tower::BoxError = worker.oneshot(job("a", 1)).await.unwrap_err().into();
    assert_eq!(error.to_string(), "inner");
}

#[tokio::test(start_paused = true)]
async fn request_that_can_never_run_is_told_apart() {
    let client = recording().await;
    let lock = TaskLockLayer::new(client.clone(), account);
    let limit = tenants(client.clone(), Arc::new(AtomicU32::new(1)));
    let once = TaskOnceLayer::new(client.clone(), account).unwrap();
    let writer = lock.clone().kind(LockKind::Write).unwrap();
    let reader = client.lock("r").kind(LockKind::Read).acquire().await.unwrap();
    let waits_for_itself = reader.scope(writer.layer(service_fn(does)).oneshot(job("r", 1)));
    for never in [
        lock.layer(service_fn(does)).oneshot(job("", 1)).await,
        lock.clone()
            .lease(Duration::ZERO)
            .layer(service_fn(does))
            .oneshot(job("a", 1))
            .await,
        limit.layer(service_fn(does)).oneshot(job("", 1)).await,
        waits_for_itself.await,
    ] {
        let error = never.unwrap_err();
        assert!(error.is_permanent() && error.is_not_started(), "{error:?}");
        assert_eq!(error.retry_after(), None, "{error:?}");
    }
    let never = once
        .layer(service_fn(does))
        .oneshot(job("", 1))
        .await
        .unwrap_err();
    assert!(never.is_permanent() && never.is_not_started(), "{never:?}");
    assert_eq!(
        (never.retry_after(), never.is_given_up(), never.is_done()),
        (None, false, false)
    );

    // The key holds other data, and may not for long.
    let reader = client.lock("taken").kind(LockKind::Read).acquire().await.unwrap();
    let taken = lock
        .layer(service_fn(does))
        .oneshot(job("taken", 1))
        .await
        .unwrap_err();
    assert!(
        matches!(taken, TaskError::Store(Error::KeyTaken { .. })),
        "{taken:?}"
    );
    assert!(!taken.is_permanent() && taken.is_not_started());
    assert_eq!(taken.retry_after(), Some(10_000 * MS));
    drop(reader);

    // A hold further out was lost: the next attempt, outside of it, acquires the lock anew.
    let outer = client.lock("a").max_hold(50 * MS).acquire().await.unwrap();
    sleep(100 * MS).await;
    let again = outer
        .scope(lock.layer(service_fn(does)).oneshot(job("a", 1)))
        .await
        .unwrap_err();
    assert!(matches!(again, TaskError::Store(Error::Lost { .. })), "{again:?}");
    assert!(!again.is_permanent() && again.is_not_started());
    assert_eq!(again.retry_after(), Some(1000 * MS));

    client.shutdown(Duration::ZERO).await;
    let closed = lock
        .layer(service_fn(does))
        .oneshot(job("a", 1))
        .await
        .unwrap_err();
    assert!(
        !closed.is_permanent() && closed.retry_after().is_some(),
        "{closed:?}"
    );
    let closed = once
        .layer(service_fn(does))
        .oneshot(job("a", 1))
        .await
        .unwrap_err();
    assert!(
        !closed.is_permanent() && closed.retry_after().is_some(),
        "{closed:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn message_that_is_done_elsewhere_is_tried_again_when_the_lease_ends_or_sooner() {
    let client = recording().await;
    for (lease, expected) in [(10_000 * MS, 1000 * MS), (600 * MS, 600 * MS)] {
        let layer = TaskOnceLayer::new(client.clone(), account)
            .unwrap()
            .lease(lease)
            .keep(60_000 * MS);
        let running = tokio::spawn(
            layer
                .layer(service_fn(|_: Job| pending::<Result<(), String>>()))
                .oneshot(job("m", 1)),
        );
        sleep(MS).await;
        let consumer = layer.layer(service_fn(|_: Job| async { Ok::<_, String>(()) }));
        let after = consumer
            .oneshot(job("m", 1))
            .await
            .unwrap_err()
            .retry_after()
            .unwrap();
        assert!(after <= expected && after + 100 * MS > expected, "{after:?}");
        running.abort();
        assert!(running.await.is_err());
        sleep(MS).await;
    }
}

#[tokio::test(start_paused = true)]
async fn holder_is_where_the_layer_was_made() {
    let client = LockClient::memory();
    let lock = TaskLockLayer::new(client.clone(), account);
    let limit = LimitLayer::new(client.clone(), account, |_: &Job| 1).unwrap();
    let line = line!();
    let holder = async || {
        sleep(50 * MS).await;
        client.active().holds[0].location.clone()
    };
    let (_, location) = tokio::join!(lock.layer(service_fn(does)).oneshot(job("a", 100)), holder());
    assert!(
        location.contains(&format!("tower_task.rs:{}:", line - 2)),
        "{location}"
    );
    let pauses = service_fn(|_: Job| async {
        sleep(100 * MS).await;
        Ok::<_, String>(())
    });
    let (_, location) = tokio::join!(limit.layer(pauses).oneshot(job("t", 100)), holder());
    assert!(
        location.contains(&format!("tower_task.rs:{}:", line - 1)),
        "{location}"
    );
}
