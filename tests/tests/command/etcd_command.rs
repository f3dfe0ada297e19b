//! Programs on etcd: the command `dlock`, and the example of a configuration.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::LockClient;
use dlock_tests::etcd::{Etcd, fresh_namespace};
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Clock, Running, bins, child};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use tempfile::NamedTempFile;

use crate::command_support::runs_lists_and_measures;

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn command_runs_lists_and_measures_on_etcd() {
    let server = Etcd::shared().await;
    let url = format!("{}&lease=60s&timeout=20s", server.url(&fresh_namespace()));
    let builder = LockClient::builder().scheme(dlock_etcd::scheme());
    runs_lists_and_measures(&url, builder, 1 << 16).await;
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

/// Each holds the lock for longer than its lease, and the clock of one jumps by two hours meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_whose_clocks_are_hours_apart_never_hold_the_lock_at_once() {
    let server = Etcd::shared().await;
    let url = format!(
        "{}&lease=2s&timeout=20s&retry_for=60s",
        server.url(&fresh_namespace())
    );
    let log = NamedTempFile::new().unwrap();
    let script = format!(
        "echo \"begin $DLOCK_FENCING_TOKEN\" >> {log}; date +%s; sleep 3; echo end >> {log}",
        log = log.path().display()
    );
    let clocks = [1, 0, -1].map(|hours: i64| {
        let (clock, by) = (Clock::new().unwrap(), HOUR * hours.unsigned_abs() as u32);
        match hours < 0 {
            true => clock.set_behind(by).unwrap(),
            false => clock.set(by).unwrap(),
        }
        (clock, hours)
    });
    let args = ["--wait", "60s", "k", "--", "sh", "-c", &script];
    let begun = seconds(SystemTime::now());
    let machines = clocks
        .each_ref()
        .map(|(clock, _)| Running::with_clock(&url, clock, &args));
    machines[0].says("\n").await;
    clocks[0].0.set_behind(HOUR).unwrap();
    for (machine, (_, hours)) in machines.iter().zip(&clocks) {
        let ended = machine.all_ended().await;
        assert!(ended.status.success(), "{ended:?}");
        let ahead = ended.stdout.trim().parse::<i64>().unwrap() - begun;
        assert!(
            (hours * 3600 - 1..hours * 3600 + 600).contains(&ahead),
            "its clock is set: {ended:?}"
        );
    }
    let lines = fs::read_to_string(log.path()).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines.len(), 6, "{lines:?}");
    let tokens = lines.chunks(2).map(|hold| {
        assert!(
            hold[0].starts_with("begin ") && hold[1] == "end",
            "two at a time: {lines:?}"
        );
        hold[0][6..].parse::<u64>().unwrap()
    });
    assert!(tokens.is_sorted_by(|a, b| a < b), "{lines:?}");
}

fn seconds(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}
