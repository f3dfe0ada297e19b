//! Locks on ZooKeeper over the end of a leader, and where a server, a client or a session stands still or ends.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dlock::store::{AcquireReply, Store};
use dlock::{Error, LockClient};
use dlock_tests::bins::Running;
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
use dlock_tests::zookeeper::{Ensemble, ZkProxy, ZkRequest, Zookeeper};
use dlock_tests::{Clock, Inside, eventually};
use futures_util::future::join_all;
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until};

use crate::scenes::{MS, SEC, is_lost_before};
use crate::zookeeper_support::{LONG, TIMEOUT, client, fresh_root, patient, request, store};

/// Of clients whose session ends in a test.
const SHORT: Duration = Duration::from_secs(2);
const HOUR: Duration = Duration::from_secs(3600);

async fn waits(client: &LockClient) -> JoinHandle<dlock::LockGuard> {
    let lock = client.lock("k").wait(PATIENCE);
    let waiting = tokio::spawn(async move { lock.acquire().await.unwrap() });
    // It is as good when it has not asked yet.
    sleep(200 * MS).await;
    assert!(!waiting.is_finished(), "another one has it");
    waiting
}

async fn is_busy(client: &LockClient) {
    let busy = answered(|| client.lock("k").try_acquire()).await;
    assert!(matches!(busy, Err(Error::NotAcquired { .. })), "{busy:?}");
}

async fn no_node_is_left(client: &LockClient) {
    eventually("no node is left", async || {
        client.list("").await.is_ok_and(|holders| holders.is_empty())
    })
    .await;
}

/// An election takes about a second, and each server is killed once or twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_survive_leaders_that_are_killed_and_waiters_go_on() {
    let servers = Ensemble::start().await;
    let (root, session) = (fresh_root(), 40 * SEC);
    let to_all = async || client(&store(servers.addrs(), &root, session, 3 * SEC).await).await;
    let holder = to_all().await;
    let waiters = [to_all().await, to_all().await, to_all().await];
    let inside = Arc::new(Inside::default());
    for round in 1..=2 {
        let guard = within(PATIENCE, "the lock", holder.lock("k").acquire())
            .await
            .unwrap();
        inside.write(guard.fencing_token());
        let end = inside.turns() + 60;
        let working: Vec<_> = waiters
            .iter()
            .map(|waiter| {
                let (lock, inside) = (waiter.lock("k"), inside.clone());
                tokio::spawn(async move {
                    while inside.turns() < end {
                        let guard = within(PATIENCE, "its turn", lock.acquire()).await.unwrap();
                        inside.write(guard.fencing_token());
                        sleep(fastrand::u32(0..10) * MS).await;
                        inside.written();
                        guard.release().await.unwrap();
                    }
                })
            })
            .collect();
        // The leader is killed while they wait, and the next one while they take turns.
        let mut killed = servers.leader().await;
        servers.servers()[killed].kill();
        let other = holder.lock(format!("other-{round}")).acquire();
        drop(within(PATIENCE, "a leader is elected", other).await.unwrap());
        is_confirmed(&guard).await;
        assert!(!working.iter().any(JoinHandle::is_finished));
        servers.servers()[killed].restart().await;
        inside.written();
        guard.release().await.unwrap();
        eventually("they take turns", async || inside.turns() > end - 50).await;
        killed = servers.leader().await;
        servers.servers()[killed].kill();
        for done in join_all(working).await {
            done.unwrap();
        }
        servers.servers()[killed].restart().await;
    }
    no_node_is_left(&holder).await;
}

/// Its followers leave it after two seconds, and the session of its client ends six seconds later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_beside_a_leader_that_stands_still_is_lost_before_the_next_leader_gives_its_lock_away() {
    let servers = Ensemble::start_with("syncLimit=10\n").await;
    let leader = servers.leader().await;
    let root = fresh_root();
    let beside = store(servers.servers()[leader].addr(), &root, 6 * SEC, TIMEOUT).await;
    let to_all = async || client(&store(servers.addrs(), &root, 40 * SEC, 2 * SEC).await).await;
    let (stuck, waiter, other) = (client(&beside).await, to_all().await, to_all().await);
    let guard = stuck.lock("k").wait(PATIENCE).acquire().await.unwrap();
    let kept = other.lock("kept").wait(PATIENCE).acquire().await.unwrap();
    let waiting = waits(&waiter).await;
    servers.servers()[leader].stop();
    let taken = waiting.await.unwrap();
    assert!(!guard.is_held(), "two clients hold the lock");
    assert!(taken.fencing_token() > guard.fencing_token());
    is_confirmed(&kept).await;
    servers.servers()[leader].cont();
    // Late, and of a session that is over.
    let _ = guard.release().await;
    is_confirmed(&taken).await;
    is_busy(&stuck).await;
    taken.release().await.unwrap();
    kept.release().await.unwrap();
    let again = stuck.lock("k").wait(PATIENCE).acquire().await.unwrap();
    drop(again);
    no_node_is_left(&stuck).await;
}

/// The server may give the lock away when it has not heard of the client for the session, which is longer than a busy
/// machine delays a task.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_is_lost_before_its_session_is_over_when_the_server_stands_still() {
    const SESSION: Duration = Duration::from_secs(8);
    let server = Zookeeper::start().await;
    let root = fresh_root();
    let hasty = client(&store(server.addr(), &root, SESSION, TIMEOUT).await).await;
    let waiter = client(&store(server.addr(), &root, LONG, TIMEOUT).await).await;
    let guard = hasty.lock("k").wait(PATIENCE).acquire().await.unwrap();
    let waiting = waits(&waiter).await;
    server.stop();
    let over = Instant::now() + SESSION;
    is_lost_before(over, &guard).await;
    let error = hasty.lock("new").wait(SEC / 2).acquire().await.unwrap_err();
    assert!(!error.is_busy(), "{error}");
    sleep_until(over.into()).await;
    server.cont();
    let taken = within(PATIENCE, "the waiter goes on", waiting).await.unwrap();
    assert!(taken.fencing_token() > guard.fencing_token());
    let _ = guard.release().await;
    is_confirmed(&taken).await;
    is_busy(&hasty).await;
    taken.release().await.unwrap();
    no_node_is_left(&waiter).await;
}

/// The other process: it holds the lock, says so again and again, and in the end releases it though it is lost.
#[tokio::test]
#[ignore = "it is what a test starts as another process"]
async fn as_another_process() {
    let var = |name: &str| std::env::var(name).unwrap();
    let locks = store(var("ZK_SERVER"), &var("ZK_ROOT"), SHORT, 5 * SEC).await;
    let client = client(&locks).await;
    println!("asks");
    let guard = client.lock("k").acquire().await.unwrap();
    println!("holds {}", guard.fencing_token());
    loop {
        // Before it is asked: whenever the process stops, what it says of this moment or later is true.
        let asked = micros();
        if !guard.is_held() {
            break;
        }
        println!("held {asked}");
        sleep(5 * MS).await;
    }
    println!("lost");
    let released = guard.release().await;
    println!("released {}", released.is_ok());
    std::process::exit(0);
}

fn micros() -> u128 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.unwrap_or_default().as_micros()
}

/// It, on this server, by this clock.
fn another_process(server: &Zookeeper, root: &str, clock: &Clock) -> Running {
    let this = std::env::current_exe().unwrap();
    let args = [
        &format!("ZK_SERVER={}", server.addr()),
        &format!("ZK_ROOT={root}"),
        this.to_str().unwrap(),
        "--exact",
        "zookeeper_sessions::as_another_process",
        "--ignored",
        "--nocapture",
    ];
    Running::with_clock(Path::new("env"), clock, &args)
}

/// What it has said after this word, as numbers.
fn said(process: &Running, word: &str) -> Vec<u128> {
    let log = process.log();
    let lines = log.lines().filter_map(|line| line.strip_prefix(word));
    lines.filter_map(|rest| rest.trim().parse().ok()).collect()
}

async fn says(process: &Running, what: &str) {
    eventually(&format!("it says {what}"), async || process.log().contains(what)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_stood_still_for_longer_than_its_session_is_told_before_it_works_on() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let clock = Clock::new().expect("libfaketime");
    let process = another_process(&server, &root, &clock);
    says(&process, "held ").await;
    process.signal(Signal::SIGSTOP);
    let taken = beside.lock("k").wait(PATIENCE).acquire().await.unwrap();
    let since = micros();
    assert!(u128::from(taken.fencing_token()) > said(&process, "holds")[0]);
    process.signal(Signal::SIGCONT);
    says(&process, "released ").await;
    let held = said(&process, "held");
    assert!(held.iter().all(|asked| *asked < since), "two hold the lock");
    is_confirmed(&taken).await;
    is_busy(&client(&patient(server.addr(), &root, LONG).await).await).await;
    taken.release().await.unwrap();
    no_node_is_left(&beside).await;
}

/// The first holds it for twice its session, by clocks that are two hours apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_of_clients_an_hour_ahead_and_behind_change_nothing() {
    let server = Zookeeper::shared().await;
    let root = fresh_root();
    let beside = client(&patient(server.addr(), &root, LONG).await).await;
    let clocks = [Clock::new().expect("libfaketime"), Clock::new().unwrap()];
    clocks[0].set(HOUR).expect("its file can be written");
    clocks[1].set_behind(HOUR).expect("its file can be written");
    let mut first = another_process(&server, &root, &clocks[0]);
    says(&first, "held ").await;
    let apart = micros().abs_diff(*said(&first, "held").last().unwrap());
    assert!(apart > HOUR.as_micros() / 2, "its clock is not moved");
    let second = another_process(&server, &root, &clocks[1]);
    says(&second, "asks").await;
    sleep(2 * SHORT).await;
    assert!(said(&second, "holds").is_empty(), "two hold the lock");
    is_busy(&beside).await;
    assert!(!first.log().contains("lost"), "a clock has cost the lock");
    first.kill();
    says(&second, "held ").await;
    assert!(said(&second, "holds")[0] > said(&first, "holds")[0]);
    assert!(beside.force_release("k").await.unwrap());
    says(&second, "released ").await;
    no_node_is_left(&beside).await;
}

/// In one round nothing gets through for longer than the session lasts, in the other an operator ends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquire_whose_session_ends_on_the_way_goes_on_with_the_next_one() {
    let server = Zookeeper::start().await;
    for ended in [false, true] {
        let (root, proxy) = (fresh_root(), ZkProxy::start(server.addr()));
        let beside = patient(server.addr(), &root, LONG).await;
        let there = client(&beside).await;
        let before = server.connected_sessions().await;
        let behind = client(&store(proxy.addr(), &root, SHORT, 5 * SEC).await).await;
        let session = server.connected_sessions().await;
        let session = *session.difference(&before).next().expect("it has one");
        let late = proxy.hold(1, ZkRequest::creates);
        let acquiring = tokio::spawn(behind.lock("k").acquire());
        late.caught().await;
        if ended {
            server.end_session(session).await;
        } else {
            proxy.refuse();
            proxy.cut();
            let count = before.len() as u64;
            eventually("the session is over", async || server.sessions().await == count).await;
        }
        late.release();
        late.delivered().await;
        proxy.accept();
        let acquired = within(PATIENCE, "it goes on", acquiring).await.unwrap();
        let guard = acquired.unwrap();
        is_confirmed(&guard).await;
        is_busy(&there).await;
        guard.release().await.unwrap();
        // Nothing of the first session is left, or comes.
        let reply = Arc::new(beside.clone()).acquire(request("k", 1)).await.unwrap();
        assert!(matches!(reply, AcquireReply::Acquired(_)), "{reply:?}");
        drop((beside, there, behind));
        eventually("all sessions are over", async || server.sessions().await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_and_waiter_whose_sessions_an_operator_ends_are_told_and_go_on() {
    let server = Zookeeper::start().await;
    let root = fresh_root();
    let to_it = async || {
        let before = server.connected_sessions().await;
        let client = client(&store(server.addr(), &root, LONG, 2 * SEC).await).await;
        let now = server.connected_sessions().await;
        (client, *now.difference(&before).next().expect("it has one"))
    };
    let ((holder, held), (waiter, waited)) = (to_it().await, to_it().await);
    let guard = within(PATIENCE, "the lock", holder.lock("k").acquire())
        .await
        .unwrap();
    let waiting = waits(&waiter).await;
    server.end_session(waited).await;
    sleep(200 * MS).await;
    assert!(!waiting.is_finished());
    server.end_session(held).await;
    let taken = within(PATIENCE, "the waiter goes on", waiting).await.unwrap();
    assert!(taken.fencing_token() > guard.fencing_token());
    within(PATIENCE, "the holder is told", guard.lost()).await;
    let _ = guard.release().await;
    is_confirmed(&taken).await;
    is_busy(&holder).await;
    taken.release().await.unwrap();
    let again = holder.lock("k").wait(PATIENCE).acquire().await.unwrap();
    again.release().await.unwrap();
    no_node_is_left(&holder).await;
}
