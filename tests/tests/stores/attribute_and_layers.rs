//! The attribute and the layers on the stores that are crates of their own: the lock of each excludes those of the others,
//! in all processes, and its loss ends the work.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dlock::{Error, LockClient, LockKey, LockKind, distributed_lock};
use dlock_tests::etcd::Etcd;
use dlock_tests::faults::{PATIENCE, within};
use dlock_tests::mysql::Mysql;
use dlock_tests::postgres::Postgres;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tower::key::header;
use dlock_tower::task::{TaskError, TaskLockLayer};
use dlock_tower::{LockLayer, NotStarted};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join, join_all};
use http::{Request, Response};
use http_body_util::Empty;
use parking_lot::Mutex;
use tokio::sync::Barrier;
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};

use crate::backend::Backend;
use crate::scenes::{LEASE, MS, SEC};
use crate::{etcd_conformance, mysql_conformance, postgres_conformance, zookeeper_conformance};

type Body = Empty<bytes::Bytes>;

const KEY: &str = "account:7";

/// What is done under the lock.
type Work = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// What has the lock while it works.
#[derive(Debug, Clone, Copy)]
enum Way {
    Attribute,
    Layer,
    TaskLayer,
}

const WAYS: [Way; 3] = [Way::Attribute, Way::Layer, Way::TaskLayer];

#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Done,
    Busy,
    Lost,
}

/// Defines a function that does work under a lock of this kind.
macro_rules! works_under {
    ($name:ident, $kind:ident) => {
        #[distributed_lock(key = KEY, kind = $kind, lock = client, wait = wait)]
        async fn $name<F: Future<Output = ()>>(
            client: &LockClient,
            wait: Duration,
            work: F,
        ) -> Result<(), Error> {
            work.await;
            Ok(())
        }
    };
}

works_under!(plain, lock);
works_under!(fair, fair);
works_under!(read, read);
works_under!(write, write);

impl Way {
    /// Does the work under the plain lock, for which it waits no longer than this.
    async fn run(self, client: &LockClient, wait: Duration, work: Work) -> Ended {
        self.under(LockKind::Mutex, client, wait, work).await
    }

    /// The same under a lock of this kind.
    async fn under(self, kind: LockKind, client: &LockClient, wait: Duration, work: Work) -> Ended {
        match self {
            Way::Attribute => {
                let worked = match kind {
                    LockKind::Mutex => plain(client, wait, work()).await,
                    LockKind::Fair => fair(client, wait, work()).await,
                    LockKind::Read => read(client, wait, work()).await,
                    LockKind::Write => write(client, wait, work()).await,
                    other => panic!("no function has {other}"),
                };
                match worked {
                    Ok(()) => Ended::Done,
                    Err(error) if error.is_busy() => Ended::Busy,
                    Err(error) if error.is_lost() => Ended::Lost,
                    Err(error) => panic!("{error}"),
                }
            }
            Way::Layer => {
                let works = service_fn(move |_: Request<Body>| {
                    work().map(|()| Ok::<_, Infallible>(Response::new(Body::default())))
                });
                let layer = LockLayer::new(client.clone(), header("account").prefix("account:")).wait(wait);
                let layer = layer.kind(kind).expect("the store has it");
                let request = Request::builder().header("account", "7").body(Body::default());
                let response = layer.layer(works).oneshot(request.unwrap()).await.unwrap();
                let started = response.extensions().get::<NotStarted>().is_none();
                match (response.status().as_u16(), started) {
                    (200, true) => Ended::Done,
                    (423, false) => Ended::Busy,
                    (503, true) => Ended::Lost,
                    other => panic!("{other:?}"),
                }
            }
            Way::TaskLayer => {
                let works = service_fn(move |_: ()| work().map(Ok::<_, Infallible>));
                let layer = TaskLockLayer::new(client.clone(), |(): &()| LockKey::from(KEY)).wait(wait);
                let layer = layer.kind(kind).expect("the store has it");
                match layer.layer(works).oneshot(()).await {
                    Ok(()) => Ended::Done,
                    Err(TaskError::Busy { .. }) => Ended::Busy,
                    Err(TaskError::Lost { .. }) => Ended::Lost,
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

/// A client of a process of its own.
async fn client<B: Backend>(backend: &B, lease: Duration) -> LockClient {
    let store = backend.store(None, PATIENCE).await;
    let builder = LockClient::builder().shared_store(store).lease(lease);
    let built = builder.retry_for(PATIENCE).build().await;
    built.expect("the server is there")
}

fn work<F>(work: impl Fn() -> F + Send + Sync + 'static) -> Work
where
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move || work().boxed())
}

async fn attribute_and_layers_share_a_lock<B: Backend>(server: Arc<B::Server>) {
    let backend = B::on(server).await;
    let (here, there) = (client(&backend, LEASE).await, client(&backend, LEASE).await);
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let (inside, drawn) = (Arc::new(AtomicBool::new(false)), tokens.clone());
    let alone = work(move || {
        let (inside, drawn) = (inside.clone(), drawn.clone());
        async move {
            assert!(!inside.swap(true, Ordering::SeqCst), "another one is inside");
            drawn
                .lock()
                .push(dlock::current().expect("the lock").fencing_token());
            sleep(5 * MS).await;
            inside.store(false, Ordering::SeqCst);
        }
    });
    let calls = (0..24).map(|n| WAYS[n % 3].run([&here, &there][n % 2], PATIENCE, alone.clone()));
    let ended = join_all(calls).await;
    assert!(ended.iter().all(|ended| *ended == Ended::Done), "{ended:?}");
    let tokens = std::mem::take(&mut *tokens.lock());
    assert_eq!(tokens.len(), 24);
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");

    let beside = work(|| async { panic!("it works beside the holder") });
    let elsewhere = there.clone();
    let finds_it_busy = work(move || {
        let elsewhere = elsewhere.clone();
        async move {
            let error = elsewhere.lock(KEY).try_acquire().await.unwrap_err();
            assert!(error.is_busy(), "{error}");
        }
    });
    let guard = there.lock(KEY).try_acquire().await.unwrap();
    let busy = join_all(WAYS.map(|way| way.run(&here, 3 * SEC, beside.clone()))).await;
    assert!(busy.iter().all(|ended| *ended == Ended::Busy), "{busy:?}");
    guard.release().await.unwrap();
    for way in WAYS {
        let done = way.run(&here, PATIENCE, finds_it_busy.clone()).await;
        assert_eq!(done, Ended::Done, "{way:?}");
        // Released before the call ends.
        let guard = there.lock(KEY).try_acquire().await.expect("it is free");
        guard.release().await.unwrap();
    }

    // It learns of its loss by its next renewal.
    let here = client(&backend, 3 * SEC).await;
    let taken = Arc::new(Mutex::new(None));
    let (elsewhere, next) = (there, taken.clone());
    let loses = work(move || {
        let (elsewhere, next) = (elsewhere.clone(), next.clone());
        async move {
            assert!(elsewhere.force_release(KEY).await.unwrap());
            let guard = elsewhere.lock(KEY).acquire().await.unwrap();
            *next.lock() = Some(guard);
            pending().await
        }
    });
    for way in WAYS {
        let lost = way.run(&here, PATIENCE, loses.clone());
        let ended = within(PATIENCE, "the loss ends the work", lost).await;
        assert_eq!(ended, Ended::Lost, "{way:?}");
        let guard = taken.lock().take().expect("the work was under the lock");
        guard.check().expect("the next holder keeps it");
        guard.release().await.unwrap();
    }
}

async fn attribute_and_layers_have_the_other_kinds<B: Backend>(server: Arc<B::Server>) {
    let backend = B::on(server).await;
    let (here, there) = (client(&backend, LEASE).await, client(&backend, LEASE).await);
    // Each reader works until all are there.
    let all = Arc::new(Barrier::new(2 * WAYS.len()));
    let meets = work(move || {
        let all = all.clone();
        async move {
            all.wait().await;
        }
    });
    let readers = [&here, &there].into_iter().flat_map(|client| {
        let meets = meets.clone();
        WAYS.map(move |way| way.under(LockKind::Read, client, PATIENCE, meets.clone()))
    });
    let met = within(PATIENCE, "the readers meet", join_all(readers)).await;
    assert!(met.iter().all(|ended| *ended == Ended::Done), "{met:?}");

    let none = work(|| async { panic!("it works beside the holder") });
    let some = work(|| async {});
    let are_busy = async |kinds: &[LockKind]| {
        let calls = kinds
            .iter()
            .flat_map(|kind| WAYS.map(|way| way.under(*kind, &here, 3 * SEC, none.clone())));
        let ended = join_all(calls).await;
        assert!(ended.iter().all(|ended| *ended == Ended::Busy), "{ended:?}");
    };
    let are_done = async |kind: LockKind| {
        for way in WAYS {
            let ended = way.under(kind, &here, PATIENCE, some.clone()).await;
            assert_eq!(ended, Ended::Done, "{kind} {way:?}");
        }
    };
    let lock = there.rw_lock(KEY);
    let reader = lock.read().try_acquire().await.unwrap();
    are_busy(&[LockKind::Write]).await;
    are_done(LockKind::Read).await;
    reader.release().await.unwrap();
    let writer = lock.write().acquire().await.unwrap();
    are_busy(&[LockKind::Read, LockKind::Write]).await;
    writer.release().await.unwrap();
    are_done(LockKind::Write).await;

    let holder = there.fair_lock(KEY).acquire().await.unwrap();
    are_busy(&[LockKind::Fair]).await;
    let released = async {
        sleep(50 * MS).await;
        holder.release().await.unwrap();
    };
    within(
        PATIENCE,
        "they are served",
        join(are_done(LockKind::Fair), released),
    )
    .await;
}

#[tokio::test]
async fn attribute_and_layers_share_a_lock_on_postgres() {
    attribute_and_layers_share_a_lock::<postgres_conformance::Table>(Postgres::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_share_a_lock_on_mysql() {
    attribute_and_layers_share_a_lock::<mysql_conformance::Table>(Mysql::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_share_a_lock_on_etcd() {
    attribute_and_layers_share_a_lock::<etcd_conformance::Namespace>(Etcd::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_share_a_lock_on_zookeeper() {
    attribute_and_layers_share_a_lock::<zookeeper_conformance::Root>(Zookeeper::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_have_the_other_kinds_on_postgres() {
    attribute_and_layers_have_the_other_kinds::<postgres_conformance::Table>(Postgres::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_have_the_other_kinds_on_etcd() {
    attribute_and_layers_have_the_other_kinds::<etcd_conformance::Namespace>(Etcd::shared().await).await;
}

#[tokio::test]
async fn attribute_and_layers_have_the_other_kinds_on_zookeeper() {
    attribute_and_layers_have_the_other_kinds::<zookeeper_conformance::Root>(Zookeeper::shared().await).await;
}
