//! What the log says when nothing else can.

use std::time::Duration;

use dlock::testing::{Fault, Step, TestStore};
use dlock::{Error, LockClient, distributed_lock};
use dlock_tests::Log;
use tokio::time::{Instant, sleep};

#[tokio::test(start_paused = true)]
async fn self_deadlock_is_warned_of_once_with_both_locations() {
    let log = Log::default();
    let _listening = log.listen();
    let client = LockClient::memory();
    let lock = client.lock("k");
    let inner = lock.clone().wait(Duration::from_secs(60));
    lock.run(|_| async move {
        let bare = inner.acquire().await.unwrap();
        let inside = line!() - 1;
        let waiting = inner.acquire().await;
        let waits = line!() - 1;
        assert!(waiting.unwrap_err().is_busy());
        drop(bare);
        assert_eq!(log.count("inside the lock's own frame"), 1);
        assert_eq!(log.count(&format!("memory_warnings.rs:{inside}:")), 1);
        assert_eq!(log.count(&format!("memory_warnings.rs:{waits}:")), 1);
    })
    .await
    .unwrap();
}

const ATTRIBUTE: u32 = line!() + 1;
#[distributed_lock(key = "k", lock = client, wait = "60s")]
async fn locked(client: &LockClient) -> Result<(), Error> {
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn call_of_a_locked_function_is_located_at_its_attribute() {
    let log = Log::default();
    let _listening = log.listen();
    let client = LockClient::memory();
    let (lock, inner) = (client.lock("k"), client.clone());
    lock.run(|_| async move {
        let _bare = inner.lock("k").acquire().await.unwrap();
        assert!(locked(&inner).await.unwrap_err().is_busy());
        assert_eq!(log.count(&format!("memory_warnings.rs:{ATTRIBUTE}:")), 1);
    })
    .await
    .unwrap();
}

#[tokio::test(start_paused = true)]
async fn alternating_siblings_cause_no_warning() {
    let log = Log::default();
    let _listening = log.listen();
    let client = LockClient::memory();
    let lock = client.lock("k");
    let inner = lock.clone();
    lock.run(|_| async move {
        let visit = || inner.run(|_| sleep(Duration::from_millis(100)));
        let (a, b, c) = tokio::join!(visit(), visit(), visit());
        a.and(b).and(c).unwrap();
    })
    .await
    .unwrap();
    assert_eq!(log.count("WARN"), 0);
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_cycles_and_an_hour_later_nothing_is_left() {
    let store = dlock::stores::memory::MemoryStore::new();
    let client = LockClient::builder().store(store.clone()).build().await.unwrap();
    for i in 0..10_000_u32 {
        let guard = client.lock(format!("key:{i}")).acquire().await.unwrap();
        if i % 2 == 0 {
            drop(guard)
        } else {
            guard.release().await.unwrap()
        }
    }
    sleep(Duration::from_secs(3600)).await;
    assert!(store.is_empty());
    assert_eq!((store.watched(), client.held(), client.waited_for()), (0, 0, 0));
    let metrics = tokio::runtime::Handle::current().metrics();
    assert_eq!(
        metrics.num_alive_tasks(),
        2,
        "the watchdog and the release worker of the client"
    );
    drop(client);
    sleep(Duration::from_millis(1)).await;
    assert_eq!(metrics.num_alive_tasks(), 0);
}

/// A wait for more permits than there are is no dead-lock, and the log says what is missing.
#[tokio::test(start_paused = true)]
async fn wait_for_more_permits_than_there_are_is_warned_of() {
    let log = Log::default();
    let _listening = log.listen();
    let client = LockClient::memory();
    let semaphore = client.semaphore("s");
    semaphore.try_set_permits(1).await.unwrap();
    let waiting = tokio::spawn(semaphore.acquire_many(2));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(!waiting.is_finished());
    assert_eq!(log.count("fewer permits in all"), 1);
    semaphore.set_permits(2).await.unwrap();
    drop(waiting.await.unwrap().unwrap());
}

/// A call waits for a semaphore without permits, and the log says what is missing.
#[tokio::test(start_paused = true)]
async fn semaphore_without_permits_is_warned_of_and_waited_for() {
    let log = Log::default();
    let _listening = log.listen();
    let client = LockClient::memory();
    let semaphore = client.semaphore("s");
    let waiting = tokio::spawn(semaphore.acquire());
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert!(!waiting.is_finished());
    assert_eq!(log.count("waiting until permits are set"), 1);
    semaphore.try_set_permits(1).await.unwrap();
    drop(waiting.await.unwrap().unwrap());
}

#[tokio::test(start_paused = true)]
async fn release_that_is_refused_for_good_is_warned_of_once() {
    let log = Log::default();
    let _listening = log.listen();
    let store = TestStore::new();
    let lock = store.client().lock("k");
    store.fail_next(Step::Release, Fault::Refused);
    lock.run(|_| async {}).await.unwrap();
    assert_eq!(log.count("WARN"), 1);
    assert_eq!(log.count("ends with its lease"), 1);
}

/// The caller waits for `retry_for`; the release is sent until the store is back.
#[tokio::test(start_paused = true)]
async fn release_that_the_store_gets_late_is_not_said_to_have_failed() {
    let log = Log::default();
    let _listening = log.listen();
    let store = TestStore::new();
    let lock = store.client().lock("k");
    let (away, begun) = (store.clone(), Instant::now());
    lock.run(|_| async move { away.set_down(true) }).await.unwrap();
    assert!(
        begun.elapsed() > Duration::from_secs(1),
        "it waits for the release"
    );
    assert_eq!(store.held(), 1);
    sleep(Duration::from_secs(2)).await;
    store.set_down(false);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(store.held(), 0);
    assert_eq!(log.count("WARN"), 0);
}
