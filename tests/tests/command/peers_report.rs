//! `BENCHMARKS.md` says what was measured: it is what its generator makes of the committed results.

use std::fs;
use std::path::{Path, PathBuf};

use dlock_peers::entrant::Entrant;
use dlock_peers::report;
use dlock_peers::results::Results;
use dlock_peers::workload::Workload;

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the tests lie in the workspace").to_owned()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn all_results() -> Vec<(PathBuf, Results)> {
    results_in("benches/peers/results")
}

fn results_in(dir: &str) -> Vec<(PathBuf, Results)> {
    let dir = fs::read_dir(root().join(dir)).expect("there are results");
    let paths = dir.map(|entry| entry.expect("it can be listed").path());
    paths
        .map(|path| {
            let results = Results::read(&path).unwrap_or_else(|error| panic!("{error:#}"));
            (path, results)
        })
        .collect()
}

#[test]
fn the_page_and_its_charts_are_made_of_the_committed_results() {
    let files = report::files(&root()).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(files.len() > 1, "a page and at least one chart");
    for (path, made) in files {
        let committed = read(&path.display().to_string());
        let differs = made
            .lines()
            .zip(committed.lines())
            .find(|(made, committed)| made != committed);
        assert!(
            made == committed,
            "{} is not what the results give; `benches/peers/run --report` makes it again; first difference: {differs:?}",
            path.display()
        );
    }
}

#[test]
fn the_measured_versions_are_the_pinned_ones() {
    let pins = [
        (
            "redisson",
            read("benches/peers/redisson/pom.xml"),
            "<version>{}</version>",
        ),
        (
            "redsync",
            read("benches/peers/redsync/go.mod"),
            "redsync/v4 v{}\n",
        ),
        (
            "node-redlock",
            read("benches/peers/node-redlock/package.json"),
            "\"redlock\": \"{}\"",
        ),
        (
            "redis-py",
            read("benches/peers/redis-py/requirements.txt"),
            "redis=={}\n",
        ),
        (
            "rslock",
            read("benches/peers/rslock/Cargo.toml"),
            "rslock = { version = \"={}\"",
        ),
        (
            "etcd-go",
            read("benches/peers/etcd-go/go.mod"),
            "go.etcd.io/etcd/client/v3 v{}\n",
        ),
        (
            "curator",
            read("benches/peers/curator/pom.xml"),
            "<version>{}</version>",
        ),
    ];
    let all = all_results()
        .into_iter()
        .chain(results_in("benches/peers/stores"));
    for (path, results) in all {
        for (peer, file, pin) in &pins {
            for run in results.runs.iter().filter(|run| run.entrant == *peer) {
                let pin = pin.replace("{}", &run.version);
                assert!(
                    file.contains(&pin),
                    "{} has {peer} {}, which is not what is pinned",
                    path.display(),
                    run.version
                );
            }
        }
    }
}

#[test]
fn no_peer_is_missing_without_a_reason() {
    for (path, results) in all_results() {
        for workload in Workload::ALL {
            for entrant in Entrant::all_of(workload) {
                let measured = results.of(workload.name(), &entrant.name()).count() as u32;
                let peers = [Some(entrant.peer), entrant.lone];
                let explained = results.left_out.iter().any(|left_out| match &left_out.workload {
                    Some(name) => name == workload.name() && left_out.entrant == entrant.name(),
                    None => peers
                        .iter()
                        .flatten()
                        .any(|peer| peer.driver() == left_out.entrant),
                });
                assert!(
                    measured == results.rounds || explained,
                    "{}: {} of {} was measured {measured} times in {} rounds",
                    path.display(),
                    workload.name(),
                    entrant.name(),
                    results.rounds
                );
            }
        }
    }
}

#[test]
fn what_is_committed_names_no_machine() {
    let lock = read("benches/peers/node-redlock/package-lock.json");
    assert!(
        !lock.contains("\"resolved\""),
        "package-lock.json names a registry's host"
    );
    for (path, _) in all_results() {
        let text = fs::read_to_string(&path).expect("it was read before");
        for word in ["127.0.0.1", "localhost", "/tmp", "/home", "/root", "://"] {
            assert!(!text.contains(word), "{} has {word}", path.display());
        }
    }
}
