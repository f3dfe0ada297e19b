//! Programs on etcd: the command `dlock`, and the example of a configuration.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use dlock::LockClient;
use dlock_tests::etcd::{Etcd, fresh_namespace};
use dlock_tests::faults::PATIENCE;
use dlock_tests::{bins, child};

use crate::command_support::runs_lists_and_measures;

#[tokio::test]
async fn command_runs_lists_and_measures_on_etcd() {
    let server = Etcd::shared().await;
    let url = format!("{}&lease=60s&timeout=20s", server.url(&fresh_namespace()));
    let builder = LockClient::builder().scheme(dlock_etcd::scheme());
    runs_lists_and_measures(&url, builder, 1 << 16).await;
}

/// The lease is 2 s, and the first process stands still for five seconds.
#[tokio::test]
async fn writer_that_stands_still_writes_nothing_over_what_came_after_it() {
    let server = Etcd::shared().await;
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
    let mut late = write("late", &["--stall", "5s"]);
    late.stdout(Stdio::piped());
    let mut late = child::spawn(late).unwrap();
    let mut said = BufReader::new(late.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "standing still\n");
    let next = write("next", &[]);
    let next = tokio::task::spawn_blocking(move || bins::output(next, PATIENCE))
        .await
        .unwrap();
    let told = String::from_utf8(next.stdout).unwrap();
    assert!(told.starts_with("written at revision"), "{told}");
    let ended = tokio::task::spawn_blocking(move || late.wait()).await.unwrap();
    assert_eq!(ended.unwrap().code(), Some(2));
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(line.starts_with("not written"), "{line}");
    assert_eq!(server.keys(&key).await, [(key.clone(), "next".to_owned())]);
}
