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
    let never = doctor(&server.url(), &["--callers-wait", "0s"]).await;
    let said = String::from_utf8_lossy(&never.stderr);
    assert_eq!(never.status.code(), Some(2), "{never:?}");
    assert!(said.contains("--callers-wait") && said.contains("0s"), "{said}");
    server.kill();
    let away = doctor(&server.url(), &["--json"]).await;
    assert_eq!(away.status.code(), Some(2), "{away:?}");
    assert!(away.stdout.is_empty() && !away.stderr.is_empty(), "{away:?}");
}

/// The server quotes the name of its user.
#[tokio::test]
async fn text_of_the_server_cannot_disguise_a_finding() {
    let builder = Server::builder(Flavor::Valkey);
    let server = builder
        .acl("a\u{202e}b on >pw ~* &* +@all -info -config|get -latency|latest")
        .start()
        .await;
    for json in [&[][..], &["--json"]] {
        let url = server.url_as("a%E2%80%AEb", "pw");
        let output = doctor(&url, &[json, &["--read-only"]].concat()).await;
        let said = String::from_utf8(output.stdout).expect("text");
        assert!(said.contains("202e") && !said.contains('\u{202e}'), "{said}");
    }
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
