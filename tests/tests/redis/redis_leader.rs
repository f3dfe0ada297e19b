//! Leaders in processes of their own: the example `scheduler`, which is killed, stopped, and asked to end.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dlock_tests::faults::{SOON, patient, within};
use dlock_tests::{Flavor, Server, bins, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;

/// One of a fleet of schedulers.
struct Scheduler {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Scheduler {
    fn start(server: &Server, lease: &str) -> Scheduler {
        let mut command = child::command(bins::example("scheduler"));
        command
            .args([
                "--url",
                &server.url(),
                "--lease",
                lease,
                "--job",
                "tick 200ms true",
            ])
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, to) = (
            BufReader::new(child.stdout.take().expect("it is piped")).lines(),
            log.clone(),
        );
        thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .for_each(|line| *to.lock() += &(line + "\n"))
        });
        Scheduler { child, log }
    }

    fn signal(&self, signal: Signal) {
        signal::kill(Pid::from_raw(self.child.id() as i32), signal).expect("it runs");
    }

    fn said(&self) -> String {
        self.log.lock().clone()
    }

    fn leads(&self) -> bool {
        self.said().contains("leading with token")
    }

    /// The runs that it has done: period and token.
    fn runs(&self) -> Vec<(u64, u64)> {
        let said = self.said();
        let runs = said.lines().filter_map(|line| {
            let (_, run) = line.split_once("tick ")?;
            let (slot, token) = run.split_once(" done token=")?;
            Some((slot.parse().ok()?, token.parse().ok()?))
        });
        runs.collect()
    }

    async fn has_run(&self, more: usize) {
        let before = self.runs().len();
        eventually("the leader runs its job", || async {
            self.runs().len() >= before + more
        })
        .await;
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("it said:\n{}", self.said());
        }
    }
}

/// No period was run twice, and no period under an older token than one before it.
fn assert_once_each(fleet: &[&Scheduler]) {
    let mut all: Vec<_> = fleet.iter().flat_map(|scheduler| scheduler.runs()).collect();
    all.sort_unstable();
    let slots: BTreeSet<_> = all.iter().map(|(slot, _)| slot).collect();
    assert_eq!(slots.len(), all.len(), "a period was run twice: {all:?}");
    assert!(
        all.is_sorted_by_key(|(_, token)| token),
        "an old leader has run: {all:?}"
    );
}

#[tokio::test]
async fn when_the_leader_is_killed_another_process_leads_once_its_lease_is_over() {
    let server = Server::start(Flavor::from_env()).await;
    let first = Scheduler::start(&server, "3s");
    first.has_run(2).await;
    let others = [Scheduler::start(&server, "3s"), Scheduler::start(&server, "3s")];
    first.has_run(2).await;
    assert!(!others.iter().any(Scheduler::leads), "two lead at a time");
    first.signal(Signal::SIGKILL);
    eventually("another one leads", || async {
        others.iter().any(Scheduler::leads)
    })
    .await;
    assert!(!others.iter().all(Scheduler::leads), "two lead at a time");
    let next = others.iter().find(|other| other.leads()).expect("one leads");
    next.has_run(2).await;
    assert_once_each(&[&first, &others[0], &others[1]]);
}

#[tokio::test]
async fn a_leader_that_is_asked_to_end_is_followed_at_once() {
    let server = Server::start(Flavor::from_env()).await;
    // No task waits for the end of this lease.
    let first = Scheduler::start(&server, "300s");
    first.has_run(1).await;
    let second = Scheduler::start(&server, "300s");
    eventually("the second one stands", || async {
        second.said().contains("standing") && !server.pubsub_channels().await.is_empty()
    })
    .await;
    first.signal(Signal::SIGTERM);
    within(SOON, "the next term", second.has_run(2)).await;
    assert!(first.said().contains("resigned"), "{}", first.said());
    assert_once_each(&[&first, &second]);
}

#[tokio::test]
async fn a_leader_that_was_stopped_follows_when_it_goes_on() {
    let server = Server::start(Flavor::from_env()).await;
    let first = Scheduler::start(&server, "2s");
    first.has_run(1).await;
    let second = Scheduler::start(&server, "2s");
    first.signal(Signal::SIGSTOP);
    second.has_run(2).await;
    first.signal(Signal::SIGCONT);
    eventually("the first one is told", || async {
        first.said().contains("stood for again")
    })
    .await;
    second.has_run(2).await;
    assert_once_each(&[&first, &second]);
}

#[tokio::test]
async fn the_resource_refuses_a_leader_with_an_older_token() {
    let server = Server::start(Flavor::from_env()).await;
    let leader = Scheduler::start(&server, "300s");
    leader.has_run(1).await;
    let client = patient(&server.url()).await;
    let led_by = client
        .leader("scheduler")
        .current()
        .await
        .unwrap()
        .expect("a candidate leads");
    assert!(leader.said().contains(led_by.id.split(':').next().unwrap()));
    // As if a newer leader had been at it, whose token is one greater.
    let newer = leader.runs()[0].1 + 1;
    let _: i64 = server
        .query(&["HSET", "ledger:scheduler:tick", "token", &newer.to_string()])
        .await;
    eventually("it is refused", || async {
        leader.said().contains("refused: token")
    })
    .await;
    let runs = leader.runs().len();
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(leader.runs().len() <= runs + 1, "it goes on");
}
