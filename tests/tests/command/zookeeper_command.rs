//! The command `dlock` on ZooKeeper.

use dlock::LockClient;
use dlock_tests::zookeeper::Zookeeper;
use dlock_tests::{Running, eventually};

use crate::command_support::{look, runs_lists_and_measures, runs_readers_together_and_a_writer_alone};

#[tokio::test]
async fn command_runs_lists_and_measures_on_zookeeper() {
    let server = Zookeeper::shared().await;
    let url = format!(
        "zookeeper://{}/command-{:x}?timeout=20s",
        server.addr(),
        fastrand::u64(..)
    );
    let builder = LockClient::builder().scheme(dlock_zookeeper::scheme());
    runs_lists_and_measures(&url, builder, 0).await;
    runs_readers_together_and_a_writer_alone(&url).await;
}

#[tokio::test]
async fn command_whose_lock_is_forced_open_on_zookeeper_is_ended() {
    let server = Zookeeper::shared().await;
    let root = format!("{}/command-{:x}", server.addr(), fastrand::u64(..));
    let url = format!("zookeeper://{root}?timeout=20s");
    let running = Running::script(&url, &["a job"], "echo ready; read line");
    running.says("ready").await;
    let (code, said) = look(&url, &["show", "a job"]);
    assert!(code == Some(0) && said.contains("session"), "{said}");
    let forced = ["force-unlock", "a job"];
    let (code, said) = look(&url, &forced);
    assert_eq!(code, Some(0), "{said}");
    let ended = running.ended().await;
    assert_eq!(ended.status.code(), Some(76), "{ended:?}");
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && !said.contains("a job"), "{said}");
}

/// The time between SIGTERM and SIGKILL is a part of the session, not of the client's lease.
#[tokio::test]
async fn command_runs_in_a_session_much_shorter_than_the_lease() {
    let server = Zookeeper::shared().await;
    let root = format!("{}/command-{:x}", server.addr(), fastrand::u64(..));
    let url = format!("zookeeper://{root}?timeout=20s&session=5s&lease=30s");
    let ended = Running::script(&url, &["a job"], "sleep 6; echo done")
        .ended()
        .await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
}

/// The command that waits for a fair lock takes it over when the lock is forced open.
#[tokio::test]
async fn command_that_waits_for_a_fair_lock_on_zookeeper_is_no_holder_and_takes_over() {
    let server = Zookeeper::start().await;
    let root = format!("{}/command-{:x}", server.addr(), fastrand::u64(..));
    let url = format!("zookeeper://{root}?timeout=20s");
    let options = ["--kind", "fair", "a job"];
    let first = Running::script(&url, &options, "echo ready; read line");
    first.says("ready").await;
    let second = Running::script(&url, &options, "echo ready; read line");
    eventually("the second one waits", async || {
        server.counted("zk_ephemerals_count").await == 2
    })
    .await;
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.matches("a job").count() == 1, "{said}");
    let (code, said) = look(&url, &["force-unlock", "a job"]);
    assert_eq!(code, Some(0), "{said}");
    second.says("ready").await;
    let ended = first.ended().await;
    assert_eq!(ended.status.code(), Some(76), "{ended:?}");
}

#[tokio::test]
async fn commands_share_a_semaphore_on_zookeeper() {
    let server = Zookeeper::shared().await;
    let root = format!("{}/command-{:x}", server.addr(), fastrand::u64(..));
    let url = format!("zookeeper://{root}?timeout=20s");
    let options = ["--kind", "semaphore=2", "a job"];
    let begins = || Running::script(&url, &options, "echo ready; read line");
    let (first, second) = (begins(), begins());
    first.says("ready").await;
    second.says("ready").await;
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.matches("a job").count() == 2, "{said}");
    let (code, said) = look(&url, &["show", "a job"]);
    assert!(code == Some(0) && said.contains("session"), "{said}");
    let third = begins();
    let (code, said) = look(&url, &["force-unlock", "a job"]);
    assert_eq!(code, Some(0), "{said}");
    third.says("ready").await;
    for lost in [first, second] {
        let ended = lost.ended().await;
        assert_eq!(ended.status.code(), Some(76), "{ended:?}");
    }
}
