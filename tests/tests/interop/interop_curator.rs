//! dlock and Apache Curator on one ZooKeeper, in both directions: the same paths are the same locks.

use std::time::Duration;

use dlock::{Error, LockClient, LockKey};
use dlock_tests::curator::Curator;
use dlock_tests::faults::PATIENCE;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tests::{Inside, eventually};
use dlock_zookeeper::ZookeeperLocks;
use futures_util::future::join_all;

const NO_WAIT: Duration = Duration::ZERO;

struct Setting {
    curator: Curator,
    locks: ZookeeperLocks,
    client: LockClient,
    server: Zookeeper,
}

async fn setting() -> Setting {
    let server = Zookeeper::start().await;
    let curator = Curator::start(server.addr(), Duration::from_secs(20)).await;
    let builder = ZookeeperLocks::builder(&server.addr().to_string()).root("/shop/locks");
    let locks = builder
        .timeout(PATIENCE)
        .connect()
        .await
        .expect("the server is there");
    let client = LockClient::builder().store(locks.clone()).retry_for(PATIENCE);
    Setting {
        curator,
        locks,
        client: client.build().await.expect("a client on the store"),
        server,
    }
}

impl Setting {
    fn path(&self, key: &str) -> String {
        self.locks.path(&LockKey::from(key))
    }
}

/// Two processes of Java and a server have to start: these share them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_of_curator_and_dlock_exclude_each_other() {
    let setting = setting().await;
    mutex_of_dlock_keeps_curator_out_until_its_release(&setting).await;
    mutex_of_curator_keeps_dlock_out_until_its_release(&setting).await;
    read_write_locks_are_the_same(&setting).await;
    waiters_of_both_stand_in_one_queue(&setting).await;
    waiter_of_either_that_gives_up_delays_no_other(&setting).await;
    no_two_hold_at_once(&setting).await;
    readers_and_writers_of_both_never_overlap(&setting).await;
    permits_of_both_are_of_one_semaphore(&setting).await;
    waiters_for_permits_of_both_stand_in_one_queue(&setting).await;
    no_more_permits_are_held_than_exist(&setting).await;
    total_of_dlock_is_the_shared_count_of_curator(&setting).await;
    check_of_the_holders_node_stops_a_write_of_curator(&setting).await;
    lock_of_a_java_process_that_dies_is_free(setting).await;
}

async fn mutex_of_dlock_keeps_curator_out_until_its_release(setting: &Setting) {
    let Setting { curator, client, .. } = setting;
    let path = setting.path("a/b");
    let guard = client.lock("a/b").acquire().await.unwrap();
    assert!(!curator.acquire(1, "mutex", &path, NO_WAIT).await);
    let waits = curator.acquire(1, "mutex", &path, PATIENCE);
    let releases = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        guard.release().await.unwrap();
    };
    let (got, ()) = tokio::join!(waits, releases);
    assert!(got, "the waiter of Curator is not served");
    curator.release(1, "mutex", &path).await;
}

async fn mutex_of_curator_keeps_dlock_out_until_its_release(setting: &Setting) {
    let Setting { curator, client, .. } = setting;
    let path = setting.path("b");
    assert!(curator.acquire(1, "mutex", &path, NO_WAIT).await);
    let busy = client.lock("b").try_acquire().await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    let holder = client.inspect("b").await.unwrap().expect("Curator holds it");
    assert_eq!(holder.id.len(), 36, "{holder:?}");
    let lock = client.lock("b").wait(PATIENCE);
    let waits = lock.acquire();
    let releases = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        curator.release(1, "mutex", &path).await;
    };
    let (guard, ()) = tokio::join!(waits, releases);
    guard.unwrap().release().await.unwrap();
}

/// Waits until so many nodes are in the queues of all locks.
async fn in_queue(setting: &Setting, count: u64) {
    eventually(&format!("{count} nodes are in the queue"), async || {
        setting.server.counted("zk_ephemerals_count").await == count
    })
    .await;
}

/// Who was served, in order: threads of Curator, and tasks of dlock from 100 on.
type Served = parking_lot::Mutex<Vec<u32>>;

async fn java_waits(setting: &Setting, thread: u32, served: &Served) {
    let path = setting.path("fifo");
    assert!(setting.curator.acquire(thread, "mutex", &path, PATIENCE).await);
    served.lock().push(thread);
    setting.curator.release(thread, "mutex", &path).await;
}

async fn rust_waits(setting: &Setting, task: u32, served: &Served) {
    let guard = setting.client.fair_lock("fifo").wait(PATIENCE).acquire().await;
    served.lock().push(task);
    guard.unwrap().release().await.unwrap();
}

/// A fair lock of dlock and an `InterProcessMutex` have the same queue, whoever holds the lock at first.
async fn waiters_of_both_stand_in_one_queue(setting: &Setting) {
    let path = setting.path("fifo");
    for java_holds in [true, false] {
        let served = Served::default();
        let guard = match java_holds {
            true => {
                assert!(setting.curator.acquire(99, "mutex", &path, NO_WAIT).await);
                None
            }
            false => Some(setting.client.fair_lock("fifo").acquire().await.unwrap()),
        };
        in_queue(setting, 1).await;
        // Each begins when the one before it is in the queue.
        let begins = |at: u64| in_queue(setting, at + 1);
        let orders = [1_u32, 100, 101, 2, 3, 102, 4];
        let waits = orders.iter().zip(0..).map(|(who, at)| {
            let served = &served;
            async move {
                // The nodes of the holder and of those before it.
                begins(at).await;
                match *who < 100 {
                    true => java_waits(setting, *who, served).await,
                    false => rust_waits(setting, *who, served).await,
                }
            }
        });
        let releases = async {
            in_queue(setting, 1 + orders.len() as u64).await;
            match guard {
                Some(guard) => guard.release().await.unwrap(),
                None => setting.curator.release(99, "mutex", &path).await,
            }
        };
        tokio::join!(join_all(waits), releases);
        assert_eq!(*served.lock(), orders);
        in_queue(setting, 0).await;
    }
}

async fn waiter_of_either_that_gives_up_delays_no_other(setting: &Setting) {
    let Setting { curator, client, .. } = setting;
    let path = setting.path("fifo");
    for java_gives_up in [true, false] {
        let served = Served::default();
        let guard = client.fair_lock("fifo").acquire().await.unwrap();
        let short = Duration::from_millis(300);
        let gives_up = async {
            match java_gives_up {
                true => assert!(!curator.acquire(1, "mutex", &path, short).await),
                false => {
                    let late = client.fair_lock("fifo").wait(short).acquire().await;
                    assert!(matches!(late, Err(Error::NotAcquired { .. })), "{late:?}");
                }
            }
            in_queue(setting, 2).await;
            guard.release().await.unwrap();
        };
        let waits = async {
            match java_gives_up {
                true => rust_waits(setting, 100, &served).await,
                false => java_waits(setting, 2, &served).await,
            }
        };
        tokio::join!(gives_up, waits);
        in_queue(setting, 0).await;
    }
}

async fn read_write_locks_are_the_same(setting: &Setting) {
    let Setting { curator, client, .. } = setting;
    let path = setting.path("rw");
    let lock = client.rw_lock("rw");
    let reader = lock.read().acquire().await.unwrap();
    assert!(curator.acquire(1, "read", &path, NO_WAIT).await, "readers share");
    assert!(
        !curator.acquire(2, "write", &path, NO_WAIT).await,
        "a writer is alone"
    );
    reader.release().await.unwrap();
    let busy = lock.write().try_acquire().await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    curator.release(1, "read", &path).await;
    let writer = lock.write().wait(PATIENCE).acquire().await.unwrap();
    assert!(
        !curator.acquire(1, "read", &path, NO_WAIT).await,
        "a reader beside a writer"
    );
    writer.release().await.unwrap();
    assert!(curator.acquire(1, "write", &path, PATIENCE).await);
    let busy = lock.read().try_acquire().await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    curator.release(1, "write", &path).await;
}

/// Both take it in turns, and each looks whether it is alone.
async fn no_two_hold_at_once(setting: &Setting) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let Setting { curator, client, .. } = setting;
    let path = setting.path("storm");
    let inside = AtomicBool::new(false);
    let java = |thread: u32| {
        let (path, inside) = (&path, &inside);
        async move {
            for _ in 0..10 {
                assert!(curator.acquire(thread, "mutex", path, PATIENCE).await);
                assert!(!inside.swap(true, Ordering::SeqCst), "two hold the lock");
                inside.store(false, Ordering::SeqCst);
                curator.release(thread, "mutex", path).await;
            }
        }
    };
    let rust = async {
        let mut last = 0;
        for round in 0..20 {
            let lock = match round % 2 {
                0 => client.lock("storm"),
                _ => client.fair_lock("storm"),
            };
            let guard = lock.wait(PATIENCE).acquire().await.unwrap();
            assert!(!inside.swap(true, Ordering::SeqCst), "two hold the lock");
            assert!(guard.fencing_token() > last);
            last = guard.fencing_token();
            inside.store(false, Ordering::SeqCst);
            guard.release().await.unwrap();
        }
    };
    tokio::join!(java(1), java(2), rust);
}

/// Many of both at once, and some of each give up on the way.
async fn readers_and_writers_of_both_never_overlap(setting: &Setting) {
    let Setting { curator, client, .. } = setting;
    let (path, inside) = (setting.path("race"), Inside::default());
    let patience = || match fastrand::u32(0..3) {
        0 => Duration::from_millis(fastrand::u64(1..15)),
        _ => PATIENCE,
    };
    let works = || tokio::time::sleep(Duration::from_millis(fastrand::u64(0..3)));
    let java = (0..6_u32).map(|thread| {
        let (path, inside) = (&path, &inside);
        async move {
            for round in 0..10 {
                let writes = (thread + round) % 3 == 0;
                let kind = if writes { "write" } else { "read" };
                if !curator.acquire(10 + thread, kind, path, patience()).await {
                    continue;
                }
                // Curator knows no tokens.
                if writes {
                    inside.write(0)
                } else {
                    inside.read(u64::MAX)
                }
                works().await;
                if writes {
                    inside.written()
                } else {
                    inside.was_read()
                }
                curator.release(10 + thread, kind, path).await;
            }
        }
    });
    let rust = (0..6_u32).map(|task| {
        let (lock, inside) = (client.rw_lock("race"), &inside);
        async move {
            for round in 0..10 {
                let writes = (task + round) % 3 == 0;
                let side = if writes { lock.write() } else { lock.read() };
                let Ok(guard) = tokio::time::timeout(patience(), side.acquire()).await else {
                    continue;
                };
                let guard = guard.unwrap();
                let token = guard.fencing_token();
                if writes {
                    inside.write(token)
                } else {
                    inside.read(token)
                }
                works().await;
                if writes {
                    inside.written()
                } else {
                    inside.was_read()
                }
                guard.release().await.unwrap();
            }
        }
    });
    tokio::join!(join_all(java), join_all(rust));
    assert!(inside.turns() > 40 && inside.together() > 1, "{inside:?}");
    eventually("no process holds the lock", async || {
        client.list("race").await.is_ok_and(|holders| holders.is_empty())
    })
    .await;
}

/// Whether Java takes so many permits, of as many in all; with 0 in all, of the shared count.
async fn java_takes(
    setting: &Setting,
    thread: u32,
    key: &str,
    total: u32,
    amount: u32,
    wait: Duration,
) -> bool {
    let take = format!("take {} {total} {amount} {}", setting.path(key), wait.as_millis());
    let said = setting.curator.call(thread, &take).await;
    assert!(["true", "false"].contains(&said.as_str()), "{take}: {said}");
    said == "true"
}

async fn java_gives(setting: &Setting, thread: u32, key: &str) {
    let give = format!("give {}", setting.path(key));
    assert_eq!(setting.curator.call(thread, &give).await, "true");
}

async fn permits_of_both_are_of_one_semaphore(setting: &Setting) {
    let semaphore = setting.client.semaphore("s").permits(3);
    let short = Duration::from_millis(200);
    assert!(java_takes(setting, 1, "s", 3, 2, PATIENCE).await);
    let busy = semaphore.try_acquire_many(2).await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
    let one = semaphore.try_acquire().await.unwrap();
    assert!(!java_takes(setting, 2, "s", 3, 1, short).await);
    let held = setting.client.list("s").await.unwrap();
    assert_eq!(held.len(), 3, "{held:?}");
    let waiting = tokio::spawn(semaphore.clone().wait(PATIENCE).acquire_many(2));
    tokio::time::sleep(short).await;
    java_gives(setting, 1, "s").await;
    let two = waiting.await.unwrap().unwrap();
    let gives = async {
        tokio::time::sleep(short).await;
        two.release().await.unwrap();
    };
    let (taken, ()) = tokio::join!(java_takes(setting, 1, "s", 3, 1, PATIENCE), gives);
    assert!(taken, "the waiter of Curator is not served");
    java_gives(setting, 1, "s").await;
    one.release().await.unwrap();
    in_queue(setting, 0).await;
}

/// Curator's queue is that of its processes' threads, with its lease taken when it is first.
async fn waiters_for_permits_of_both_stand_in_one_queue(setting: &Setting) {
    let served = Served::default();
    let semaphore = setting.client.semaphore("queue").permits(2).wait(PATIENCE);
    let held = semaphore.acquire_many(2).await.unwrap();
    in_queue(setting, 2).await;
    let java = async {
        // Its place in the queue, and the lease for which it waits.
        assert!(java_takes(setting, 1, "queue", 2, 1, PATIENCE).await);
        served.lock().push(1);
        java_gives(setting, 1, "queue").await;
    };
    let rust = async {
        in_queue(setting, 4).await;
        let two = semaphore.acquire_many(2).await.unwrap();
        served.lock().push(100);
        two.release().await.unwrap();
    };
    let late = async {
        in_queue(setting, 5).await;
        assert!(java_takes(setting, 2, "queue", 2, 1, PATIENCE).await);
        served.lock().push(2);
        java_gives(setting, 2, "queue").await;
    };
    let releases = async {
        in_queue(setting, 6).await;
        held.release().await.unwrap();
    };
    tokio::join!(java, rust, late, releases);
    assert_eq!(*served.lock(), [1, 100, 2]);
    in_queue(setting, 0).await;
}

async fn no_more_permits_are_held_than_exist(setting: &Setting) {
    use std::sync::atomic::{AtomicU32, Ordering};
    const TOTAL: u32 = 3;
    let (inside, most) = (AtomicU32::new(0), AtomicU32::new(0));
    let visit = async |permits: u32| {
        let now = inside.fetch_add(permits, Ordering::SeqCst) + permits;
        most.fetch_max(now, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..5))).await;
        inside.fetch_sub(permits, Ordering::SeqCst);
    };
    // One each: Curator takes several one by one, and two such callers may wait for each other.
    let java = (0..3_u32).map(async |thread| {
        for _ in 0..8 {
            let wait = Duration::from_millis(*fastrand::choice(&[20, 60_000]).unwrap());
            if java_takes(setting, 20 + thread, "room", TOTAL, 1, wait).await {
                visit(1).await;
                java_gives(setting, 20 + thread, "room").await;
            }
        }
    });
    let rust = (0..4_u32).map(async |_| {
        for _ in 0..8 {
            let amount = fastrand::u32(1..=TOTAL);
            let semaphore = setting.client.semaphore("room").permits(TOTAL);
            let wait = Duration::from_millis(*fastrand::choice(&[10, 60_000]).unwrap());
            let Ok(permit) = tokio::time::timeout(wait, semaphore.acquire_many(amount)).await else {
                continue;
            };
            visit(amount).await;
            permit.unwrap().release().await.unwrap();
        }
    });
    tokio::join!(join_all(java), join_all(rust));
    let most = most.into_inner();
    assert!((2..=TOTAL).contains(&most), "{most} at once");
    in_queue(setting, 0).await;
}

async fn total_of_dlock_is_the_shared_count_of_curator(setting: &Setting) {
    let semaphore = setting.client.semaphore("shared").wait(PATIENCE);
    let total = async |wanted: &str| {
        let ask = format!("total {}", setting.path("shared"));
        eventually("Java knows the total", async || {
            setting.curator.call(1, &ask).await == wanted
        })
        .await;
    };
    assert!(semaphore.set_permits(2).await.unwrap());
    total("2").await;
    assert!(java_takes(setting, 1, "shared", 0, 2, PATIENCE).await);
    // A greater total wakes the waiters of Java.
    let adds = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(semaphore.add_permits(1).await.unwrap().total, 3);
    };
    let (taken, ()) = tokio::join!(java_takes(setting, 2, "shared", 0, 1, PATIENCE), adds);
    assert!(taken, "the waiter of Curator is not served");
    // And one that Java sets those of dlock.
    let waiting = tokio::spawn(semaphore.acquire());
    let set = format!("set {} 4", setting.path("shared"));
    assert_eq!(setting.curator.call(3, &set).await, "true");
    let one = waiting.await.unwrap().unwrap();
    assert_eq!(semaphore.status().await.unwrap().unwrap().total, 4);
    one.release().await.unwrap();
    java_gives(setting, 1, "shared").await;
    java_gives(setting, 2, "shared").await;
}

async fn check_of_the_holders_node_stops_a_write_of_curator(setting: &Setting) {
    let Setting {
        curator,
        client,
        locks,
        ..
    } = setting;
    let guard = client.lock("leader").acquire().await.unwrap();
    assert_eq!(curator.call(1, "create /shop/leader").await, "true");
    let node = locks.nodes(&guard).unwrap().remove(0);
    let write = format!("write {} {} /shop/leader me", node.path, node.version);
    assert_eq!(curator.call(1, &write).await, "true");
    assert!(client.force_release("leader").await.unwrap());
    assert_eq!(curator.call(1, &write).await, "!NoNodeException");
}

async fn lock_of_a_java_process_that_dies_is_free(setting: Setting) {
    let path = setting.path("died");
    let Setting {
        curator,
        client,
        server,
        ..
    } = setting;
    // The server bounds its session to what a test can wait for.
    let short = Curator::start(server.addr(), Duration::from_secs(2)).await;
    assert!(short.acquire(1, "mutex", &path, PATIENCE).await);
    drop(short);
    let next = client.lock("died").wait(PATIENCE).acquire().await.unwrap();
    drop(next);
    drop(curator);
}
