//! Programs on etcd: the command `dlock`, and the example of a configuration.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use dlock::LockClient;
use dlock_tests::etcd::{Etcd, fresh_namespace};
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Running, bins, child};

fn look(url: &str, args: &[&str]) -> (Option<i32>, String) {
    let mut command = child::command(bins::dlock());
    command.args(["--url", url]).args(args);
    let output = bins::output(command, PATIENCE);
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), said.concat())
}

#[tokio::test]
async fn command_runs_lists_and_measures_on_etcd() {
    let server = Etcd::shared().await;
    let url = format!("{}&lease=60s&timeout=20s", server.url(&fresh_namespace()));
    let running = Running::script(&url, &["a job"], "echo \"$DLOCK_FENCING_TOKEN\"; read line");
    running.says("\n").await;
    let (code, said) = look(&url, &["list"]);
    assert!(code == Some(0) && said.contains("a job"), "{said}");
    let builder = LockClient::builder().scheme(dlock_etcd::scheme()).url(&url);
    let client = builder.build().await.unwrap();
    assert!(client.lock("a job").try_acquire().await.unwrap_err().is_busy());
    running.write(b"end\n");
    let ended = running.all_ended().await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(
        ended
            .stdout
            .trim()
            .parse::<u64>()
            .is_ok_and(|token| token > 1 << 16),
        "{ended:?}"
    );
    let guard = client.lock("a job").try_acquire().await.unwrap();
    guard.release().await.unwrap();
    let bench = [
        "bench",
        "--workload",
        "parallel",
        "--tasks",
        "8",
        "--seconds",
        "1",
        "--warmup",
        "0",
    ];
    let (code, said) = look(&url, &bench);
    assert_eq!(code, Some(0), "{said}");
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
