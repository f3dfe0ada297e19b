//! Programs on etcd: the command `dlock`, and the example of a configuration.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use dlock::LockClient;
use dlock_tests::etcd::{Etcd, fresh_namespace};
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Running, bins, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

use crate::command_support::{
    hold_one_by_one_with_clocks_hours_apart, look, runs_lists_and_measures,
    runs_readers_together_and_a_writer_alone,
};

#[tokio::test]
async fn command_runs_lists_and_measures_on_etcd() {
    let server = Etcd::shared().await;
    let url = format!("{}&lease=60s&timeout=20s", server.url(&fresh_namespace()));
    let builder = LockClient::builder().scheme(dlock_etcd::scheme());
    runs_lists_and_measures(&url, builder, 1 << 16).await;
    runs_readers_together_and_a_writer_alone(&url).await;
}

#[tokio::test]
async fn commands_wait_for_a_fair_lock_in_order() {
    let server = Etcd::shared().await;
    let namespace = fresh_namespace();
    let url = format!("{}&lease=60s&timeout=20s", server.url(&namespace));
    let builder = LockClient::builder().scheme(dlock_etcd::scheme());
    let client = builder.url(&url).build().await.unwrap();
    let guard = client.fair_lock("a job").acquire().await.unwrap();
    let mut before = guard.fencing_token();
    let mut jobs = Vec::new();
    for waiting in 1..=3 {
        let job = Running::script(
            &url,
            &["--kind", "fair", "a job"],
            "echo \"$DLOCK_FENCING_TOKEN\"",
        );
        eventually("it waits", async || {
            server.keys(&format!("{namespace}q/")).await.len() == 1 + waiting
        })
        .await;
        jobs.push(job);
    }
    guard.release().await.unwrap();
    for job in jobs {
        let ended = job.all_ended().await;
        let token = ended.stdout.trim().parse().expect("a token");
        assert!(before < token, "{ended:?}");
        before = token;
    }
}

#[tokio::test]
async fn commands_share_the_permits_of_a_semaphore() {
    let server = Etcd::shared().await;
    let url = format!("{}&lease=60s&timeout=20s", server.url(&fresh_namespace()));
    let wanted = ["--kind", "semaphore=2", "a job"];
    let job = || Running::script(&url, &wanted, "echo \"$DLOCK_KIND\"; read line");
    let (one, two) = (job(), job());
    one.says("permit\n").await;
    two.says("permit\n").await;
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.contains("a job"), "{said}");
    let third = Running::script(&url, &[&["--try"][..], &wanted].concat(), "echo run");
    let third = third.all_ended().await;
    assert!(!third.status.success() && third.stdout.is_empty(), "{third:?}");
    let waiting = job();
    one.write(b"end\n");
    assert!(one.all_ended().await.status.success());
    waiting.says("permit\n").await;
    for job in [two, waiting] {
        job.write(b"end\n");
        assert!(job.all_ended().await.status.success());
    }
}

/// The lease is 2 s, and the first process stands still for five seconds: by itself, or because it was stopped.
#[tokio::test]
async fn writer_that_stands_still_writes_nothing_over_what_came_after_it() {
    let server = Etcd::shared().await;
    for is_stopped in [false, true] {
        let namespace = fresh_namespace();
        let (key, address) = (format!("{namespace}version"), server.addr().to_string());
        let write = |value: &str, more: &[&str]| -> Command {
            let mut command = child::command(bins::config());
            let locks = format!("{namespace}locks/");
            command.args([
                "--etcd",
                &address,
                "--namespace",
                &locks,
                "--key",
                &key,
                "--lease",
                "2s",
            ]);
            command.args(["--allow-old-server", value]).args(more);
            command
        };
        let mut late = write("late", &["--stall", if is_stopped { "500ms" } else { "5s" }]);
        late.stdout(Stdio::piped());
        let mut late = child::spawn(late).unwrap();
        let mut said = BufReader::new(late.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "standing still\n");
        let process = Pid::from_raw(late.id().try_into().unwrap());
        if is_stopped {
            signal::kill(process, Signal::SIGSTOP).unwrap();
        }
        let next = write("next", &[]);
        let next = tokio::task::spawn_blocking(move || bins::output(next, PATIENCE))
            .await
            .unwrap();
        let told = String::from_utf8(next.stdout).unwrap();
        assert!(told.starts_with("written at revision"), "{told}");
        if is_stopped {
            signal::kill(process, Signal::SIGCONT).unwrap();
        }
        let ended = tokio::task::spawn_blocking(move || late.wait()).await.unwrap();
        assert_eq!(ended.unwrap().code(), Some(2));
        line.clear();
        said.read_line(&mut line).unwrap();
        assert!(line.starts_with("not written"), "{line}");
        assert_eq!(server.keys(&key).await, [(key.clone(), "next".to_owned())]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_whose_clocks_are_hours_apart_never_hold_the_lock_at_once() {
    let server = Etcd::shared().await;
    hold_one_by_one_with_clocks_hours_apart(&server.url(&fresh_namespace())).await;
}
