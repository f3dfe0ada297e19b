//! `dlock bench`: that it runs, that its figures fit together, and that it leaves nothing behind. No figure is judged.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use dlock_tests::{Flavor, Server, bins, child, eventually};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: &[&str] = &["--seconds", "0.4", "--warmup", "0.1"];

async fn server() -> Server {
    Server::start(Flavor::from_env()).await
}

fn command(url: &str, args: &[&str]) -> Command {
    let mut command = child::command(bins::dlock());
    command
        .arg("bench")
        .args(args)
        .env("DLOCK_URL", url)
        .env_remove("RUST_LOG");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn run(url: &str, args: &[&str]) -> Output {
    let command = command(url, args);
    tokio::task::spawn_blocking(move || bins::output(command, PATIENCE))
        .await
        .expect("it ends")
}

/// Runs it with `--json`, and takes the one object.
async fn figures(url: &str, args: &[&str]) -> Value {
    let output = run(url, &[args, &["--json"]].concat()).await;
    let said = text(&output.stdout);
    assert!(
        output.status.success(),
        "{args:?}: {said}{}",
        text(&output.stderr)
    );
    assert_eq!(text(&output.stderr), "", "{args:?}");
    assert_eq!(said.lines().count(), 1, "{args:?}: {said}");
    serde_json::from_str(&said).expect("JSON")
}

fn number(of: &Value, name: &str) -> f64 {
    of[name]
        .as_f64()
        .unwrap_or_else(|| panic!("no number {name} in {of}"))
}

/// What must hold of every result.
fn assert_sensible(of: &Value, workload: &str) {
    assert_eq!(of["workload"], workload);
    assert_eq!(of["errors"], 0, "{of}");
    assert_eq!(of["errors_by_kind"], serde_json::json!({}), "{of}");
    assert_eq!(of["interrupted"], false);
    assert!(number(of, "pairs") >= 1.0, "{of}");
    assert!(number(of, "pairs_per_s") > 0.0, "{of}");
    let times = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(|name| number(of, name));
    assert!(times[0] > 0.0 && times.is_sorted(), "{of}");
    for (min, max, parts) in [
        (
            "share_min",
            "share_max",
            number(of, "tasks") * number(of, "processes"),
        ),
        ("process_share_min", "process_share_max", number(of, "processes")),
    ] {
        let (min, max) = (number(of, min), number(of, max));
        assert!(0.0 <= min && min <= max && max <= 1.0, "{of}");
        // The busiest has no less than its part, the idlest no more; a wake-up has two sides.
        assert!(
            max >= 1.0 / (2.0 * parts) - 1e-9 && min <= 1.0 / parts + 1e-9,
            "{of}"
        );
    }
    assert!(number(of, "client_cpu_s") > 0.0, "{of}");
    assert!(number(of, "rss_mb") > 0.5, "{of}");
    let each = of["rss_mb_by_process"].as_array().expect("an array");
    assert_eq!(each.len() as f64, number(of, "processes"));
}

/// What must hold besides when it ran on a server.
fn assert_server_asked(of: &Value) {
    let name = of["server"].as_str().expect("a name");
    let flavor = match Flavor::from_env() {
        Flavor::Redis | Flavor::Redis62 => "Redis ",
        Flavor::Valkey => "Valkey ",
    };
    assert!(name.starts_with(flavor), "{name}");
    assert!(
        number(of, "server_commands_in_scripts_too") >= number(of, "server_commands"),
        "{of}"
    );
    assert!(number(of, "server_cpu_s") >= 0.0, "{of}");
}

/// Nothing of a lock is left; records go by themselves.
async fn assert_clean(server: &Server) {
    eventually("nothing is left on the server", || async {
        server.keys().await.iter().all(|key| key == "dlock:fence")
            && server.pubsub_channels().await.is_empty()
    })
    .await;
    eventually("no connection is left", || async {
        let clients = server.client_list().await;
        !clients
            .iter()
            .any(|client| client["name"].contains("dlock-bench"))
    })
    .await;
}

/// All workloads with what makes them short.
const WORKLOADS: &[(&str, &[&str])] = &[
    ("sequential", SHORT),
    (
        "parallel",
        &[
            "--seconds",
            "0.4",
            "--warmup",
            "0.1",
            "--tasks",
            "8",
            "--keys",
            "40",
        ],
    ),
    (
        "contended",
        &["--seconds", "0.4", "--warmup", "0.1", "--tasks", "4"],
    ),
    ("wakeup", &["--seconds", "0.8", "--warmup", "0.1", "--tasks", "2"]),
    (
        "held",
        &[
            "--seconds",
            "5",
            "--keys",
            "300",
            "--tasks",
            "8",
            "--lease",
            "12s",
        ],
    ),
    ("reentrant", SHORT),
    ("layer", SHORT),
    ("idempotency", SHORT),
];

fn assert_own_figures(of: &Value, workload: &str) {
    match workload {
        "held" => {
            let held = &of["held"];
            assert_eq!(
                (&held["held"], &held["lost"], &of["pairs"]),
                (&300.into(), &0.into(), &300.into())
            );
            assert!(number(held, "least_left_s") > 0.0, "{of}");
            assert!(number(held, "renewals") > 0.0, "{of}");
        }
        "layer" | "idempotency" => {
            assert!(number(&of["bare"], "p50_us") > 0.0, "{of}");
            assert!(number(&of["bare"], "p50_us") < number(of, "p50_us"), "{of}");
        }
        _ => {}
    }
    assert_eq!(of["replay"].is_object(), workload == "idempotency", "{of}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_workload_runs_on_a_server_and_leaves_nothing_there() {
    let server = server().await;
    for (workload, short) in WORKLOADS {
        let args = [&["--workload", workload], *short].concat();
        let of = figures(&server.url(), &args).await;
        assert_sensible(&of, workload);
        assert_server_asked(&of);
        assert_own_figures(&of, workload);
        // Re-entry sends no request.
        let least = if *workload == "reentrant" { 0.0 } else { 1.0 };
        assert!(number(&of, "server_commands") >= least, "{of}");
        assert_clean(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_workload_runs_in_memory() {
    for (workload, short) in WORKLOADS {
        let args = [&["--workload", workload], *short].concat();
        let of = figures("memory://", &args).await;
        assert_sensible(&of, workload);
        assert_own_figures(&of, workload);
        assert_eq!(
            (&of["server"], &of["server_commands"]),
            (&"memory".into(), &Value::Null)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_measure_together() {
    let server = server().await;
    for workload in [
        "sequential",
        "parallel",
        "contended",
        "wakeup",
        "held",
        "idempotency",
    ] {
        let (_, short) = WORKLOADS
            .iter()
            .find(|(name, _)| *name == workload)
            .expect("known");
        let args = [&["--workload", workload, "--processes", "2"], *short].concat();
        let of = figures(&server.url(), &args).await;
        assert_sensible(&of, workload);
        assert_server_asked(&of);
        assert_own_figures(&of, workload);
        assert_eq!(of["processes"], 2);
        let shares = number(&of, "process_share_min") + number(&of, "process_share_max");
        assert!((shares - 1.0).abs() < 1e-9, "{of}");
        assert_clean(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_may_go_on_in_the_background() {
    let server = server().await;
    for workload in ["sequential", "contended", "held"] {
        let (_, short) = WORKLOADS
            .iter()
            .find(|(name, _)| *name == workload)
            .expect("known");
        let args = [&["--workload", workload, "--no-await-release"], *short].concat();
        let of = figures(&server.url(), &args).await;
        assert_sensible(&of, workload);
        assert_eq!(of["await_release"], false);
        assert_clean(&server).await;
    }
}

/// Starts it in a process group of its own, and waits until it has locks of this prefix.
async fn started(server: &Server, prefix: &str, args: &[&str]) -> Child {
    let mut command = command(&server.url(), &[args, &["--prefix", prefix, "--json"]].concat());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let child = child::spawn(command).expect("it can be started");
    eventually("it has locks", || async {
        let keys = server.keys().await;
        keys.iter()
            .any(|key| key.contains(prefix) && !key.contains("probe"))
    })
    .await;
    // Through the warm-up.
    tokio::time::sleep(Duration::from_millis(400)).await;
    child
}

fn tell(child: &Child, signal: Signal) {
    let pid = child.id().try_into().expect("process ids are small");
    signal::kill(Pid::from_raw(pid), signal).expect("it runs");
}

/// Ends a measurement that goes on for long, and returns what it tells.
async fn ended_by(child: Child, signal: Signal) -> Value {
    tell(&child, signal);
    told(child).await
}

/// What a measurement tells that a signal has ended.
async fn told(child: Child) -> Value {
    let output = tokio::task::spawn_blocking(move || bins::finish(child, "dlock bench", PATIENCE))
        .await
        .expect("it ends");
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_early_it_tells_what_it_has_measured_and_leaves_nothing() {
    let server = server().await;
    for (args, signal) in [
        (
            &["--workload", "contended", "--tasks", "4", "--warmup", "0"][..],
            Signal::SIGINT,
        ),
        (
            &["--workload", "parallel", "--processes", "2", "--warmup", "0"],
            Signal::SIGTERM,
        ),
        (
            &["--workload", "held", "--keys", "100", "--processes", "2"],
            Signal::SIGINT,
        ),
        (&["--workload", "held", "--keys", "100"], Signal::SIGHUP),
    ] {
        let args = [args, &["--seconds", "3600"]].concat();
        let child = started(&server, "ended-early:", &args).await;
        let of = ended_by(child, signal).await;
        assert_eq!(of["interrupted"], true);
        assert!(number(&of, "pairs") >= 1.0, "{of}");
        assert_clean(&server).await;
    }
}

/// As timeout(1) and systemd do; timeout(1) tells the first process twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signal_to_all_its_processes_ends_it_in_good_order() {
    let server = server().await;
    let args = ["--workload", "held", "--keys", "100", "--processes", "3"];
    let args = [&args[..], &["--seconds", "3600"]].concat();
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        let child = started(&server, "all:", &args).await;
        tell(&child, signal);
        let group = child.id().try_into().expect("process ids are small");
        signal::killpg(Pid::from_raw(group), signal).expect("it runs");
        let of = told(child).await;
        assert_eq!(of["interrupted"], true);
        assert_clean(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_that_is_lost_while_it_is_held_counts_as_one_error() {
    let server = server().await;
    let args = [
        "--workload",
        "held",
        "--keys",
        "100",
        "--seconds",
        "3600",
        "--lease",
        "1s",
    ];
    let child = started(&server, "lost:", &args).await;
    eventually("all are held", || async {
        let keys = server.keys().await;
        let locks = keys
            .iter()
            .filter(|key| key.contains("lost:") && !key.ends_with("fence"));
        locks.count() >= 100
    })
    .await;
    // The reply to the last one is on its way.
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.stop();
    // By then each lease has ended.
    tokio::time::sleep(Duration::from_secs(2)).await;
    server.cont();
    let of = ended_by(child, Signal::SIGINT).await;
    assert_eq!(
        (&of["held"]["held"], &of["held"]["lost"]),
        (&100.into(), &100.into())
    );
    assert_eq!(of["errors"], 100, "{of}");
    assert_eq!(
        of["errors_by_kind"],
        serde_json::json!({ "lost_while_held": 100 }),
        "{of}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_its_other_processes_end_as_well() {
    let server = server().await;
    let args = [
        "--workload",
        "held",
        "--keys",
        "100",
        "--processes",
        "3",
        "--seconds",
        "3600",
    ];
    let child = started(&server, "killed:", &[&args[..], &["--lease", "2s"]].concat()).await;
    tell(&child, Signal::SIGKILL);
    // Theirs are released, its own end with their lease.
    assert_clean(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_dies_is_told_of() {
    let server = server().await;
    let args = [
        "--workload",
        "parallel",
        "--processes",
        "2",
        "--seconds",
        "3600",
        "--warmup",
        "0",
    ];
    let child = started(&server, "worker:", &[&args[..], &["--lease", "2s"]].concat()).await;
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
    let worker: i32 = children.expect("/proc").trim().parse().expect("it has one child");
    signal::kill(Pid::from_raw(worker), Signal::SIGKILL).expect("it runs");
    let output = tokio::task::spawn_blocking(move || bins::finish(child, "dlock bench", PATIENCE))
        .await
        .expect("it ends");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("process 1 ended before it was done"));
    assert_eq!(text(&output.stdout), "");
    assert_clean(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_is_for_people() {
    let server = server().await;
    for (workload, row) in [
        ("contended", "busiest task's share"),
        ("held", "locks held"),
        ("idempotency", "replay, median"),
    ] {
        let (_, short) = WORKLOADS
            .iter()
            .find(|(name, _)| *name == workload)
            .expect("known");
        let output = run(&server.url(), &[&["--workload", workload], *short].concat()).await;
        let table = text(&output.stdout);
        assert!(output.status.success() && table.starts_with(workload), "{table}");
        assert!(table.contains(row) && table.contains("per second"), "{table}");
        // Progress is for terminals only.
        assert_eq!(text(&output.stderr), "");
    }
}

/// Whether each element that is opened is closed in its place, and attributes and texts are escaped.
fn assert_well_formed(xml: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = xml
        .strip_prefix("<?xml version=\"1.0\" encoding=\"UTF-8\"?>")
        .expect("a declaration");
    while let Some((before, after)) = rest.split_once('<') {
        assert!(!before.contains('>'), "{before}");
        for (at, _) in before.match_indices('&') {
            let known = ["&amp;", "&lt;", "&gt;"];
            assert!(
                known.iter().any(|entity| before[at..].starts_with(entity)),
                "{before}"
            );
        }
        let (tag, after) = after.split_once('>').expect("a tag has an end");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if tag.ends_with('/') => {}
            None => open.push(tag.split_whitespace().next().expect("a name")),
        }
        rest = after;
    }
    assert!(open.is_empty(), "{open:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_picture_is_a_whole_svg() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("a & b.svg");
    let path = file.to_str().expect("UTF-8");
    for (workload, lines) in [("sequential", 1), ("wakeup", 1), ("idempotency", 3)] {
        let (_, short) = WORKLOADS
            .iter()
            .find(|(name, _)| *name == workload)
            .expect("known");
        let args = [&["--workload", workload, "--plot", path], *short].concat();
        figures("memory://", &args).await;
        let svg = std::fs::read_to_string(&file).expect("it was written");
        assert_well_formed(&svg);
        assert!(
            svg.contains("<svg ") && !svg.contains("NaN") && !svg.contains("inf"),
            "{svg}"
        );
        assert_eq!(svg.matches("fill-opacity=\"0.25\"").count(), lines, "{svg}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_fails_leaves_no_new_picture_and_an_old_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let [new, old] = ["new", "old"].map(|name| dir.path().join(name));
    std::fs::write(&old, "of the last time").expect("a directory of ours");
    for file in [&new, &old] {
        let path = file.to_str().expect("UTF-8");
        let args = [&["--workload", "sequential", "--plot", path], SHORT].concat();
        // No server listens there.
        let output = run("redis://127.0.0.1:1", &args).await;
        assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    }
    assert!(!new.exists());
    assert_eq!(
        std::fs::read_to_string(&old).expect("it is there"),
        "of the last time"
    );
}

async fn assert_refused(url: &str, args: &[&str], why: &str) {
    let output = run(url, args).await;
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
    assert!(said.contains(why), "{args:?}: {said}");
    assert_eq!(text(&output.stdout), "", "{args:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_makes_no_sense_is_told_at_once() {
    let nowhere = Path::new("/nonexistent/x.svg").to_str().expect("UTF-8");
    for (args, why) in [
        (&[][..], "--workload"),
        (&["--workload", "nothing"], "possible values"),
        (
            &["--workload", "parallel", "--tasks", "0"],
            "--tasks: 0 is not between",
        ),
        (
            &["--workload", "parallel", "--tasks", "1000000"],
            "--tasks: 1000000 is not between",
        ),
        (&["--workload", "parallel", "--tasks=-1"], "--tasks"),
        (
            &["--workload", "parallel", "--seconds", "0"],
            "--seconds: 0 is not between",
        ),
        (
            &["--workload", "parallel", "--seconds", "NaN"],
            "--seconds: NaN is not between",
        ),
        (
            &["--workload", "parallel", "--seconds", "1e9"],
            "--seconds: 1000000000 is not between",
        ),
        (
            &["--workload", "parallel", "--warmup=-1"],
            "--warmup: -1 is not between",
        ),
        (
            &["--workload", "parallel", "--keys", "0"],
            "--keys: 0 is not between",
        ),
        (
            &["--workload", "parallel", "--keys", "3"],
            "at least as many keys",
        ),
        (
            &["--workload", "parallel", "--processes", "0"],
            "--processes: 0 is not between",
        ),
        (
            &["--workload", "parallel", "--processes", "2"],
            "memory:// is in one process",
        ),
        (
            &["--workload", "parallel", "--threads", "0"],
            "--threads: 0 is not between",
        ),
        (&["--workload", "parallel", "--lease", "10"], "--lease"),
        (&["--workload", "parallel", "--lease", "1ms"], "lease"),
        (
            &["--workload", "parallel", "--prefix", "new\nline"],
            "cannot be the name of a lock",
        ),
        (
            &["--workload", "parallel", "--plot", nowhere],
            "cannot be written",
        ),
        (
            &["--workload", "sequential", "--tasks", "2"],
            "sequential is one task",
        ),
        (&["--workload", "wakeup", "--kind", "read"], "readers do not wait"),
        (
            &["--workload", "layer", "--kind", "lock"],
            "--kind does not go with layer",
        ),
        (
            &["--workload", "held", "--warmup", "1"],
            "--warmup does not go with held",
        ),
        (
            &["--workload", "idempotency", "--lease", "9s"],
            "--lease does not go with idempotency",
        ),
    ] {
        assert_refused("memory://", args, why).await;
    }
    let parallel = &["--workload", "parallel"];
    assert_refused("redis://u:secret@[x", parallel, "invalid lock store URL").await;
    assert_refused("redis://127.0.0.1:1", parallel, "could not be reached").await;
    assert_refused("redis://127.0.0.1:1", parallel, "[E0005]").await;
    let worker = tokio::task::spawn_blocking(|| {
        let mut command = child::command(bins::dlock());
        command.arg("bench-worker");
        bins::output(command, PATIENCE)
    });
    let worker = worker.await.expect("it ends");
    assert_eq!(worker.status.code(), Some(2));
    assert!(text(&worker.stderr).contains("is started by bench"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kind_runs_or_is_said_not_to_be_there() {
    let server = server().await;
    for kind in ["lock", "fair", "fenced", "read", "write"] {
        let args = [
            &[
                "--workload",
                "contended",
                "--kind",
                kind,
                "--tasks",
                "3",
                "--json",
            ],
            SHORT,
        ]
        .concat();
        let output = run(&server.url(), &args).await;
        if output.status.success() {
            let of: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!((&of["kind"], &of["errors"]), (&kind.into(), &0.into()));
        } else {
            let said = text(&output.stderr);
            assert!(
                kind != "lock" && said.contains("is not supported"),
                "{kind}: {said}"
            );
        }
        // Of fenced locks the counters stay, as they must.
        for key in server.keys().await {
            if kind == "fenced" && key.starts_with("redisson_lock_token:") {
                server.command(&["DEL", &key]).await;
            }
        }
        assert_clean(&server).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn password_goes_to_all_processes_of_the_benchmark_only() {
    let server = Server::builder(Flavor::from_env())
        .password("s@cret")
        .start()
        .await;
    let url = format!("redis://:s%40cret@127.0.0.1:{}/1", server.port());
    let args = ["--workload", "parallel", "--tasks", "2", "--processes", "2"];
    let of = figures(&url, &[&args[..], SHORT].concat()).await;
    assert_sensible(&of, "parallel");
    assert_server_asked(&of);
    assert!(!of.to_string().contains("cret"), "{of}");
    assert_refused(&url.replace("s%40", "no"), &args, "refused").await;
}

/// The try-out succeeds, and nothing after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_measures_nothing_fails_after_its_report() {
    let server = Server::builder(Flavor::from_env())
        .acl("svc on >pw ~*probe* ~dlock:* &* +@all")
        .start()
        .await;
    let args = ["--workload", "sequential", "--json"];
    let output = run(&server.url_as("svc", "pw"), &[&args, SHORT].concat()).await;
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        text(&output.stderr).contains("nothing was measured"),
        "{output:?}"
    );
    let of: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(of["pairs"], 0, "{of}");
    assert!(number(&of["errors_by_kind"], "refused") >= 1.0, "{of}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_may_not_be_asked_is_measured_all_the_same() {
    let server = Server::builder(Flavor::from_env())
        .acl("svc on >pw ~* &* +@all -info")
        .start()
        .await;
    let of = figures(
        &server.url_as("svc", "pw"),
        &[&["--workload", "sequential"], SHORT].concat(),
    )
    .await;
    assert_sensible(&of, "sequential");
    for unknown in [
        "server",
        "server_commands",
        "server_commands_in_scripts_too",
        "server_cpu_s",
    ] {
        assert_eq!(of[unknown], Value::Null, "{unknown}");
    }
}
