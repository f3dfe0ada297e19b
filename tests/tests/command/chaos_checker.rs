//! `chaos`: that it finds what is broken on purpose, whatever the seed, and nothing where nothing is wrong.

use std::process::Output;
use std::time::Duration;

use dlock_tests::{bins, child};
use serde_json::Value;

/// A run, its quiet times, and what a slow machine adds.
const PATIENCE: Duration = Duration::from_secs(600);

fn chaos(args: &[&str]) -> Output {
    let mut command = child::command(env!("CARGO_BIN_EXE_chaos"));
    command.args(args);
    bins::output(command, PATIENCE)
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// The one object that it prints.
fn numbers(output: &Output) -> Value {
    let object = String::from_utf8_lossy(&output.stdout);
    assert_eq!(object.lines().count(), 1, "{}", said(output));
    serde_json::from_str(&object).unwrap_or_else(|error| panic!("{error}: {}", said(output)))
}

fn number(of: &Value, name: &str) -> u64 {
    of[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no number {name} in {of}"))
}

/// Runs it with a store that is broken in this way, which shows in one number of each of these, with a seed that no run had
/// before. A run ends when something was found, which takes some seconds; a ghost is looked for when all are at rest.
fn is_found(how: &str, by: &[&[&str]]) {
    let seed = fastrand::u64(1..1_000_000);
    let logs = tempfile::tempdir().unwrap();
    let (seed_text, path) = (seed.to_string(), logs.path().to_str().unwrap());
    let output = chaos(&[
        "--topology=standalone",
        "--minutes=2.5",
        "--margin=3",
        "--json",
        "--break",
        how,
        "--seed",
        &seed_text,
        "--logs",
        path,
    ]);
    let found = numbers(&output);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(number(&found, "seed"), seed);
    for either in by {
        assert!(
            either.iter().any(|name| number(&found, name) > 0),
            "{how} with seed {seed}, {either:?}: {found}"
        );
    }
}

#[test]
fn tokens_that_do_not_grow_are_found() {
    is_found("no-fence", &[&["violations"]]);
}

#[test]
fn a_lease_that_is_shorter_than_it_looks_is_found() {
    // Whichever comes first: two holders at once, or one that is told of its loss after another client has the lock.
    is_found("early-grant", &[&["violations", "late_losses"]]);
}

#[test]
fn renewals_that_are_not_sent_are_found() {
    // A request in time is a violation, a late notice of a loss is a late loss: a slow machine has few of these.
    is_found("late-loss", &[&["violations", "late_losses"]]);
}

#[test]
fn shares_that_the_store_does_not_know_are_found() {
    is_found("shares", &[&["violations"]]);
}

#[test]
fn a_ghost_is_found() {
    // Where it is all that is wrong: a key that is left is one that no client can acquire.
    is_found("ghost", &[&["stuck", "leftovers"]]);
}

#[test]
fn where_nothing_is_wrong_nothing_is_found() {
    let output = chaos(&[
        "--topology=standalone",
        "--minutes=0.25",
        "--processes=2",
        "--faults=process-kill,script-flush,client-kill",
        "--seed=5",
        "--json",
    ]);
    let found = numbers(&output);
    for name in ["violations", "late_losses", "stuck", "leftovers", "crashed"] {
        assert_eq!(number(&found, name), 0, "{name}: {}", said(&output));
    }
    assert!(number(&found, "acquisitions") > 0, "{found}");
    let kinds = found["fault_kinds"].as_object().expect("a number for each kind");
    let names: Vec<_> = kinds.keys().map(String::as_str).collect();
    assert_eq!(names, ["client-kill", "process-kill", "script-flush"]);
    let all: u64 = kinds.values().filter_map(Value::as_u64).sum();
    assert_eq!(number(&found, "faults"), all, "{found}");
    // It counts, or says what was missing.
    let counts = found["counts"].as_bool().expect("whether it counts");
    assert_eq!(output.status.success(), counts, "{}", said(&output));
    assert_eq!(
        said(&output).contains("does not count"),
        !counts,
        "{}",
        said(&output)
    );
}

#[test]
fn the_history_that_is_left_can_be_checked_again() {
    let logs = tempfile::tempdir().unwrap();
    let path = logs.path().to_str().unwrap();
    let run = [
        "--topology=standalone",
        "--minutes=0.1",
        "--seed=6",
        "--json",
        "--faults=wipe",
        "--logs",
        path,
    ];
    let (first, again) = (numbers(&chaos(&run)), numbers(&chaos(&["check", path, "--json"])));
    assert_eq!(first, again);
}

#[test]
fn arguments_that_make_no_sense_are_refused_with_what_would() {
    for (args, says) in [
        (&["--topology=standalone", "--faults=meteor"][..], "process-kill"),
        (&["--topology=standalone", "--faults=partition"], "process-kill"),
        (&["--topology=sentinel", "--faults=slot-move"], "fail-over"),
        (&["--topology=quorum", "--faults=fail-over"], "partition"),
        (&["--topology=moon"], "quorum"),
        (&["--topology=standalone", "--minutes=0"], "minutes"),
        (&["--topology=standalone", "--break=heart"], "early-grant"),
        (&[], "--topology"),
    ] {
        let output = chaos(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(says), "{args:?}: {}", said(&output));
    }
}
