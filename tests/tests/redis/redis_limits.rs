//! A limit of a tenant over several clients on a real server, as the limit layer has it, while it is configured anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, LockClient, LockKey};
use dlock_tests::faults::ordinary;
use dlock_tests::{Flavor, Server};
use dlock_tower::task::{LimitLayer, TaskError};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};

const MS: Duration = Duration::from_millis(1);

/// A limit stores nothing at the name itself, so a lock of that name is granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permit_is_renewed_and_released_beside_a_lock_of_its_name() {
    let server = Server::start(Flavor::from_env()).await;
    let lease = Duration::from_secs(3);
    let client = LockClient::builder().url(server.url()).lease(lease).build();
    let client = client.await.unwrap();
    let semaphore = || client.semaphore("k").limit(1);
    let permit = semaphore().acquire().await.unwrap();
    let lock = client.lock("k").try_acquire().await.unwrap();
    sleep(lease + lease / 2).await;
    permit.release().await.unwrap();
    lock.release().await.unwrap();
    semaphore().try_acquire().await.unwrap().release().await.unwrap();
}

/// A job of the tenant, under the limit that was configured when it was sent.
struct Job {
    limit: u32,
}

/// The jobs that run now: fencing tokens, which grow in the order of the grants, with the limit of each.
#[derive(Default)]
struct Running {
    now: Vec<(u64, u32)>,
    most: usize,
    done: usize,
}

impl Running {
    /// The last grant was judged with all of these held already, by its own limit.
    fn enters(&mut self, token: u64, limit: u32) {
        self.now.push((token, limit));
        self.most = self.most.max(self.now.len());
        let (_, last) = *self.now.iter().max().expect("at least this one");
        assert!(
            self.now.len() <= last as usize,
            "{:?} run, and the last of them was granted below {last}",
            self.now
        );
    }
}

async fn sends(
    client: LockClient,
    limit: Arc<AtomicU32>,
    running: Arc<Mutex<Running>>,
    wait: Option<Duration>,
) {
    let layer = LimitLayer::new(client, |_: &Job| LockKey::from("tenant:7"), |job: &Job| job.limit).unwrap();
    let layer = match wait {
        Some(wait) => layer.wait(wait),
        None => layer,
    };
    let worker = layer.layer(service_fn(move |job: Job| {
        let running = running.clone();
        async move {
            let token = dlock::current().expect("a permit").fencing_token();
            running.lock().enters(token, job.limit);
            sleep(15 * MS).await;
            let mut running = running.lock();
            running.now.retain(|(other, _)| *other != token);
            running.done += 1;
            Ok::<_, std::convert::Infallible>(())
        }
    }));
    let jobs = (0..10).map(|_| async {
        loop {
            let job = Job {
                limit: limit.load(Ordering::SeqCst),
            };
            match worker.clone().oneshot(job).await {
                Ok(()) => return,
                // Requeued, by whichever limit is configured then; on a slow machine also where the server answers too late.
                Err(TaskError::Busy { .. } | TaskError::Store(Error::OutcomeUnknown { .. })) => {
                    sleep(10 * MS).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    });
    join_all(jobs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_jobs_of_a_tenant_run_than_the_last_one_allows_while_the_limit_changes() {
    let server = Server::start(Flavor::from_env()).await;
    let limit = Arc::new(AtomicU32::new(3));
    let running = Arc::new(Mutex::new(Running::default()));
    let over = Arc::new(AtomicBool::new(false));
    let mut senders = Vec::new();
    for n in 0..6 {
        // Half of them requeue, half of them wait.
        let wait = (n % 2 == 0).then_some(300 * MS);
        let client = ordinary(&server.url()).await;
        senders.push(tokio::spawn(sends(client, limit.clone(), running.clone(), wait)));
    }
    let (turned, ended) = (limit.clone(), over.clone());
    let operator = tokio::spawn(async move {
        for next in [3, 1, 5, 0, 2, 3].into_iter().cycle() {
            if ended.load(Ordering::SeqCst) {
                return;
            }
            turned.store(next, Ordering::SeqCst);
            sleep(80 * MS).await;
        }
    });
    let begun = Instant::now();
    for sender in senders {
        sender.await.unwrap();
    }
    over.store(true, Ordering::SeqCst);
    operator.await.unwrap();
    let (done, left, most) = {
        let running = running.lock();
        (running.done, running.now.len(), running.most)
    };
    assert_eq!((done, left), (60, 0));
    assert!((3..=5).contains(&most), "at most {most} ran at a time");
    println!("60 jobs in {:?}", begun.elapsed());
    let mut keys = server.keys().await;
    keys.retain(|key| key != "dlock:fence");
    assert!(keys.is_empty(), "left behind: {keys:?}");
}
