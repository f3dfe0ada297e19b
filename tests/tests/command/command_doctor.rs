//! `dlock doctor` as a program: what it prints, and how it ends.

use std::process::Output;
use std::time::Duration;

use dlock_tests::bins::{dlock, output};
use dlock_tests::{Flavor, Server, child};
use serde_json::Value;

async fn doctor(url: &str, args: &[&str]) -> Output {
    let mut command = child::command(dlock());
    command.args(["--url", url, "doctor"]).args(args);
    tokio::task::spawn_blocking(|| output(command, Duration::from_secs(60)))
        .await
        .expect("it ends")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[tokio::test]
async fn doctor_ends_with_the_status_of_the_worst_finding() {
    let builder = Server::builder(Flavor::Valkey).persistence(true);
    let server = builder.config("slowlog-log-slower-than", "-1").start().await;
    let healthy = doctor(
        &server.url(),
        &["--read-only", "--callers-wait", "1min", "--json"],
    )
    .await;
    assert_eq!(healthy.status.code(), Some(0), "{healthy:?}");
    let strict = doctor(
        &server.url(),
        &["--read-only", "--callers-wait", "1min", "--strict"],
    )
    .await;
    assert_eq!(
        strict.status.code(),
        Some(1),
        "what was not tried is unknown: {strict:?}"
    );
    let impatient = doctor(&server.url(), &["--read-only", "--callers-wait", "5s"]).await;
    assert_eq!(impatient.status.code(), Some(1), "{impatient:?}");
    let text = String::from_utf8(impatient.stdout).expect("text");
    assert!(text.starts_with("bad      takeover"), "{text}");
    assert!(text.contains("What happens here if"), "{text}");
    server.kill();
    let away = doctor(&server.url(), &["--json"]).await;
    assert_eq!(away.status.code(), Some(2), "{away:?}");
    assert!(away.stdout.is_empty() && !away.stderr.is_empty(), "{away:?}");
}

#[tokio::test]
async fn doctor_prints_an_object_with_findings() {
    let builder = Server::builder(Flavor::from_env()).config("maxmemory", "100mb");
    let server = builder.maxmemory_policy("volatile-lru").start().await;
    let output = doctor(&server.url(), &["--json"]).await;
    assert_eq!(output.status.code(), Some(1));
    let object = json(&output);
    let findings = object["findings"].as_array().expect("findings");
    for finding in findings {
        assert!(
            finding["check"].is_string() && finding["why"].is_string(),
            "{finding}"
        );
        assert!(["good", "bad", "unknown"].contains(&finding["verdict"].as_str().unwrap_or_default()));
    }
    let eviction = findings
        .iter()
        .find(|finding| finding["check"] == "eviction")
        .expect("the check");
    assert_eq!(eviction["verdict"], "bad");
    assert!(
        eviction["remedy"]
            .as_str()
            .is_some_and(|remedy| remedy.contains("noeviction"))
    );
    assert_eq!(object["what_if"].as_array().map(Vec::len), Some(5));
    assert_eq!(server.keys().await, [""; 0]);
}
