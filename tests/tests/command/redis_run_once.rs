//! `dlock run --once`, `--every` and `--slot`: over several processes, of which some are killed or stopped, and on
//! machines whose clocks differ.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock_tests::faults::{SOON, within};
use dlock_tests::{Clock, Ended, Flavor, Running, Server, eventually};
use nix::sys::signal::Signal;

/// No test waits for the end of this lease.
const LASTING: &str = "lease=300s&timeout=20s&retry_for=60s";

async fn server() -> (Server, String) {
    let server = Server::start(Flavor::from_env()).await;
    let url = format!("{}?{LASTING}", server.url());
    (server, url)
}

async fn run(url: &str, args: &[&str]) -> Ended {
    Running::start(url, args).all_ended().await
}

/// The same with a script for the shell.
async fn sh(url: &str, args: &[&str], script: &str) -> Ended {
    run(url, &[args, &["--", "sh", "-c", script]].concat()).await
}

fn code(ended: &Ended) -> i32 {
    ended.status.code().unwrap_or_else(|| panic!("{ended:?}"))
}

/// What the commands write down, a line each.
struct Log(PathBuf);

impl Log {
    fn new(server: &Server) -> Log {
        Log(server.data_dir().join("log"))
    }

    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn lines_with(&self, word: &str) -> Vec<String> {
        let lines = self.lines().into_iter();
        lines.filter(|line| line.starts_with(word)).collect()
    }
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap().as_secs()
}

#[tokio::test]
async fn command_runs_once_over_several_processes() {
    let (server, url) = server().await;
    let log = Log::new(&server);
    let script = format!(
        "echo \"$DLOCK_KEY $DLOCK_KIND $DLOCK_ATTEMPT ${{DLOCK_SLOT-none}} $DLOCK_FENCING_TOKEN\" >> {}; sleep 0.3",
        log.0.display()
    );
    let runs: Vec<_> = (0..6)
        .map(|_| Running::script(&url, &["--once", "an import"], &script))
        .collect();
    let mut before = 0;
    for running in &runs {
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 0, "{ended:?}");
        before += u32::from(ended.stderr.contains("work \"an import\": was run before, on "));
    }
    let lines = log.lines();
    assert_eq!((lines.len(), before), (1, 5), "{lines:?}");
    let token = lines[0]
        .strip_prefix("an import once 1 none ")
        .expect("all of it");
    assert!(token.parse::<u64>().is_ok_and(|token| token > 0), "{lines:?}");

    for (args, status) in [(&[][..], 0), (&["-E", "9"], 9), (&["--try"], 0)] {
        let ended = sh(&url, &[args, &["--once", "an import"]].concat(), &script).await;
        assert_eq!(
            (code(&ended), ended.stderr.lines().count()),
            (status, 1),
            "{ended:?}"
        );
    }
    let quiet = sh(&url, &["--once", "--quiet", "an import"], &script).await;
    assert_eq!((code(&quiet), quiet.stderr.as_str()), (0, ""));
    assert_eq!(log.lines().len(), 1);
}

#[tokio::test]
async fn command_that_runs_elsewhere_is_waited_for_or_is_75() {
    let (_server, url) = server().await;
    let first = Running::script(&url, &["--once", "k"], "echo here; read line; exit \"$line\"");
    first.says("here").await;
    for (args, status) in [
        (&["--try"][..], 75),
        (&["--wait", "200ms"], 75),
        (&["-n", "-E", "0"], 0),
    ] {
        let ended = sh(&url, &[args, &["--once", "k"]].concat(), "echo run").await;
        assert_eq!((code(&ended), ended.stdout.as_str()), (status, ""), "{ended:?}");
        assert!(
            ended
                .stderr
                .contains("work \"k\": runs on another machine, in attempt 1"),
            "{ended:?}"
        );
    }
    let waiter = Running::script(&url, &["--once", "k"], "echo \"attempt $DLOCK_ATTEMPT\"");
    let other = Running::script(&url, &["--every", "1h", "other"], "true");
    assert_eq!(code(&other.all_ended().await), 0, "other names do not wait");
    assert!(waiter.is_running() && waiter.said().is_empty());
    first.write(b"3\n");
    let failed = first.all_ended().await;
    assert_eq!(code(&failed), 3, "{failed:?}");
    let ended = within(SOON, "the waiter takes over", waiter.all_ended()).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (0, "attempt 2\n"));
}

#[tokio::test]
async fn failures_and_crashes_follow_the_policy() {
    let (server, url) = server().await;
    let attempt = "echo \"$DLOCK_ATTEMPT\"; ";
    let script = |how: &str| format!("{attempt}{how}");
    // Again and again, with the status of the command.
    for (nth, how, status) in [(1, "exit 7", 7), (2, "kill -TERM $$", 143), (3, "true", 0)] {
        let ended = sh(&url, &["--once", "again"], &script(how)).await;
        assert_eq!(
            (code(&ended), ended.stdout),
            (status, format!("{nth}\n")),
            "{how}"
        );
    }
    // What is not there on this machine has not failed, nor has what needs a program that is not there.
    let not_executable = server.data_dir().join("not-executable");
    fs::write(&not_executable, "").unwrap();
    let interpreted = server.data_dir().join("interpreted");
    // Written by another process: a file that this one has open for writing, or a child that it starts meanwhile, cannot run.
    let write = format!(
        "printf '#!/no/such/interpreter\n' > {0} && chmod 755 {0}",
        interpreted.display()
    );
    assert!(
        Command::new("sh")
            .args(["-c", &write])
            .status()
            .unwrap()
            .success()
    );
    for (program, status) in [
        ("no-such-command-anywhere", 127),
        (not_executable.to_str().unwrap(), 126),
        (interpreted.to_str().unwrap(), 127),
    ] {
        for quiet in [&[][..], &["--quiet"]] {
            let args = [
                quiet,
                &["--once", "--on-failure", "keep", "not-there", "--", program],
            ]
            .concat();
            let ended = run(&url, &args).await;
            assert!(
                code(&ended) == status && ended.stderr.contains(program),
                "{ended:?}"
            );
        }
    }
    let ended = sh(&url, &["--once", "not-there"], &script("true")).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (0, "1\n"));

    type Attempts<'a> = &'a [(&'a str, i32)];
    let cases: [(&[&str], Attempts<'_>); 5] = [
        (
            &["--on-failure", "keep"],
            &[("exit 7", 7), ("true", 77), ("true", 77)],
        ),
        // The status of the command itself.
        (&["--on-failure", "keep"], &[("exit 127", 127), ("true", 77)]),
        // What a signal ended has not failed.
        (
            &["--on-failure", "keep"],
            &[
                ("kill -KILL $$", 137),
                ("kill -35 $$", 163),
                ("exit 1", 1),
                ("true", 77),
            ],
        ),
        (
            &["--attempts", "3"],
            &[("exit 1", 1), ("kill -KILL $$", 137), ("exit 2", 2), ("true", 77)],
        ),
        (
            &["--on-crash", "leave"],
            &[("exit 1", 1), ("kill -TERM $$", 143), ("true", 77), ("true", 77)],
        ),
    ];
    for (case, (options, attempts)) in cases.iter().enumerate() {
        let key = format!("policy-{case}");
        for (how, status) in *attempts {
            let ended = sh(&url, &[*options, &["--once", &key]].concat(), &script(how)).await;
            assert_eq!(code(&ended), *status, "{options:?}, {how}: {ended:?}");
            let ran = *status != 77;
            assert_eq!(!ended.stdout.is_empty(), ran, "{ended:?}");
            assert_eq!(ended.stderr.contains("not "), !ran, "it says why: {ended:?}");
        }
    }
}

/// The lease is six seconds, so that a machine that stands still for some seconds does not lose it. What is judged: an
/// attempt begins only after the one before was ended, its children included, and one succeeds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_whose_processes_are_killed_is_taken_over_until_it_has_succeeded_once() {
    let (server, _) = server().await;
    let url = format!("{}?lease=6s&timeout=20s&retry_for=60s", server.url());
    let log = Log::new(&server);
    let go = server.data_dir().join("go");
    let script = format!(
        "echo \"begin $PPID $DLOCK_ATTEMPT $DLOCK_FENCING_TOKEN\" >> {log}; \
         (while [ ! -e {go} ]; do echo \"work $DLOCK_ATTEMPT\" >> {log}; sleep 0.1; done) & wait; \
         echo \"end $DLOCK_ATTEMPT\" >> {log}",
        log = log.0.display(),
        go = go.display()
    );
    let mut runs: Vec<_> = (0..3)
        .map(|_| Running::script(&url, &["--once", "k"], &script))
        .collect();
    let mut seen = 0;
    for (fault, signal) in [
        ("killed", Signal::SIGKILL),
        ("stopped", Signal::SIGSTOP),
        ("asked to end", Signal::SIGTERM),
        ("killed", Signal::SIGKILL),
    ] {
        eventually("an attempt begins", async || log.lines_with("begin").len() > seen).await;
        let begun = log.lines_with("begin");
        seen = begun.len();
        let last = begun[seen - 1].clone();
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..300))).await;
        let at = runs
            .iter()
            .position(|run| last.split(' ').nth(1) == Some(&run.pid().to_string()));
        let victim = runs.swap_remove(at.unwrap_or_else(|| panic!("{last} is of none of them")));
        victim.signal(signal);
        runs.push(Running::script(&url, &["--once", "k"], &script));
        if fault == "stopped" {
            eventually("another attempt begins", async || {
                log.lines_with("begin").len() > seen
            })
            .await;
            victim.signal(Signal::SIGCONT);
            let ended = victim.all_ended().await;
            assert_eq!(code(&ended), 76, "{ended:?}");
        } else {
            victim.is_gone().await;
        }
    }
    eventually("the last attempt begins", async || {
        log.lines_with("begin").len() > seen
    })
    .await;
    fs::write(&go, "").unwrap();
    for running in &runs {
        let ended = running.all_ended().await;
        assert_eq!(code(&ended), 0, "{ended:?}");
    }
    let lines = log.lines();
    assert_eq!(log.lines_with("end").len(), 1, "{lines:?}");
    let number = |line: &str, nth| line.split(' ').nth(nth).unwrap().parse::<u64>().unwrap();
    let mut current = (0, 0);
    for line in &lines {
        match line.split(' ').next() {
            Some("begin") => {
                let next = (number(line, 2), number(line, 3));
                assert!(next.0 > current.0 && next.1 > current.1, "{lines:?}");
                current = next;
            }
            _ => assert_eq!(
                number(line, 1),
                current.0,
                "an attempt works on after the next began: {lines:?}"
            ),
        }
    }
}

#[tokio::test]
async fn named_slot_is_run_once_and_none_after_a_later_one() {
    let (_server, url) = server().await;
    let now = seconds(SystemTime::now());
    let hour = |nth: u64| now - now % 3600 - 10 * 3600 + nth * 3600;
    let at = |time: u64| format!("@{time}");
    let rfc3339 = |time: u64| humantime::format_rfc3339(UNIX_EPOCH + Duration::from_secs(time)).to_string();
    let show = "echo \"$DLOCK_SLOT $DLOCK_SKIPPED $DLOCK_ATTEMPT\"";
    for (slot, status, says) in [
        (at(hour(1)), 0, format!("{} 0 1\n", rfc3339(hour(1)))),
        (rfc3339(hour(1)), 0, String::new()),
        (
            format!("{}-01:00", rfc3339(hour(1)).trim_end_matches('Z')),
            0,
            format!("{} 0 1\n", rfc3339(hour(2))),
        ),
        (at(hour(1)), 0, String::new()),
        (at(hour(5)), 0, format!("{} 2 1\n", rfc3339(hour(5)))),
        (at(now + 4 * 3600), 75, String::new()),
    ] {
        let args = ["--every", "1h", "--slot", &slot, "report"];
        let ended = sh(&url, &args, show).await;
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (status, says.as_str()),
            "{slot}: {ended:?}"
        );
        assert_eq!(ended.stderr.is_empty(), !says.is_empty(), "{ended:?}");
    }
    // Without a period none was left out, and the exit status for what was run before is chosen.
    let args = ["--slot", &at(hour(1)), "-E", "3", "daily"];
    let ended = sh(&url, &args, show).await;
    assert_eq!(
        (code(&ended), ended.stdout),
        (0, format!("{} 0 1\n", rfc3339(hour(1))))
    );
    assert_eq!(code(&sh(&url, &args, show).await), 3);
    // A name with slots is none without.
    let mixed = sh(&url, &["--once", "daily"], show).await;
    assert_eq!((code(&mixed), mixed.stdout.as_str()), (2, ""), "{mixed:?}");
}

#[tokio::test]
async fn slot_behind_a_run_that_goes_on_is_skipped_and_not_waited_for() {
    let (_server, url) = server().await;
    let now = seconds(SystemTime::now());
    let [first, second, third] = [now - 3, now - 2, now - 1].map(|time| format!("@{time}"));
    let slot = |slot: &str, script: &str| Running::script(&url, &["--slot", slot, "poll"], script);
    let long = slot(&first, "echo here; read line");
    long.says("here").await;
    let skipped = slot(&second, "echo run").all_ended().await;
    assert_eq!((code(&skipped), skipped.stdout.as_str()), (75, ""), "{skipped:?}");
    assert!(skipped.stderr.contains("is skipped: that of "), "{skipped:?}");
    // The same slot on another machine is waited for.
    let same = slot(&first, "echo run");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(same.is_running());
    long.write(b"\n");
    assert_eq!(code(&long.all_ended().await), 0);
    let same = same.all_ended().await;
    assert_eq!((code(&same), same.stdout.as_str()), (0, ""), "{same:?}");
    let next = slot(&third, "echo run").all_ended().await;
    assert_eq!((code(&next), next.stdout.as_str()), (0, "run\n"), "{next:?}");
}

/// Ten seconds, for five machines that tick each second. What is judged: no slot is run twice, nor two at a time, and each
/// machine knows the slot by the clock of the store. A slot may be missing where the machine that runs the test was slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machines_whose_clocks_differ_run_each_slot_once() {
    const TICKS: u32 = 10;
    let (server, url) = server().await;
    let log = Log::new(&server);
    let script = format!(
        "echo \"begin $DLOCK_SLOT\" >> {log}; sleep 0.05; echo end >> {log}",
        log = log.0.display()
    );
    let args = ["--every", "1s", "poll", "--", "sh", "-c", &script];
    let machines = [0, 30, 60, 90, 120].map(|ahead| {
        let clock = Clock::new().unwrap();
        clock.set(Duration::from_secs(ahead)).unwrap();
        clock
    });
    let begun = seconds(SystemTime::now());
    let [.., fastest] = &machines;
    let shown = Running::with_clock(&url, fastest, &["--once", "look", "--", "date", "+%s"]);
    let shown = shown.all_ended().await.stdout;
    assert!(
        shown.trim().parse::<u64>().unwrap() >= begun + 119,
        "its clock is that of the others"
    );
    let ticks = machines.iter().map(async |clock| {
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        for _ in 0..TICKS {
            tick.tick().await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..50))).await;
            let ended = Running::with_clock(&url, clock, &args).all_ended().await;
            assert!(matches!(code(&ended), 0 | 75), "{ended:?}");
        }
    });
    futures_util::future::join_all(ticks).await;
    let over = seconds(SystemTime::now());
    let lines = log.lines();
    let mut slots = Vec::new();
    for pair in lines.chunks(2) {
        let [begin, end] = pair else { panic!("{lines:?}") };
        assert_eq!(end, "end", "two run at a time: {lines:?}");
        let slot = begin
            .strip_prefix("begin ")
            .and_then(|slot| humantime::parse_rfc3339(slot).ok());
        let slot = seconds(slot.unwrap_or_else(|| panic!("{begin}")));
        assert!(
            (begun - 1..=over + 1).contains(&slot),
            "{slot} is not by the store's clock"
        );
        slots.push(slot);
    }
    assert!(slots.is_sorted_by(|a, b| a < b), "{slots:?}");
    assert!(slots.len() >= 2, "{slots:?}");
}

#[tokio::test]
async fn record_that_is_lost_ends_the_command() {
    let (server, _) = server().await;
    let url = format!("{}?lease=3s&timeout=20s&retry_for=20s", server.url());
    let polite = "trap 'echo asked; kill $!; exit 0' TERM; sleep 600 & echo ready; while :; do wait; done";
    let running = Running::script(&url, &["--once", "--grace", "1s", "k"], polite);
    running.says("ready").await;
    server.flush().await;
    let ended = running.all_ended().await;
    assert_eq!(
        (code(&ended), ended.stdout.as_str()),
        (76, "ready\nasked\n"),
        "{ended:?}"
    );
    assert!(ended.stderr.contains("work \"k\": lost"), "{ended:?}");

    let args = ["--once", "--on-lost", "ignore", "goes-on"];
    let running = Running::script(&url, &args, "echo ready; read line; exit 5");
    running.says("ready").await;
    server.flush().await;
    eventually("it knows", async || {
        running.complained().contains("goes on without")
    })
    .await;
    running.write(b"\n");
    assert_eq!(code(&running.all_ended().await), 5);
}

#[tokio::test]
async fn options_that_make_no_sense_say_so() {
    let (_server, url) = server().await;
    let closed = "redis://127.0.0.1:1";
    for (args, says) in [
        (&["--once", "--kind", "fair", "k"][..], "--kind"),
        (&["--every", "1h", "--min-hold", "1s", "k"], "--min-hold"),
        (&["--once", "--fixed-lease", "1h", "k"], "--fixed-lease"),
        (&["--once", "a", "b"], "one KEY"),
        (&["--keep", "1h", "k"], "--once"),
        (&["--attempts", "2", "k"], "--once"),
        (&["--once", "--attempts", "0", "k"], "--attempts"),
        (&["--every", "often", "k"], "--every"),
        (&["--every", "1us", "k"], "10ms"),
        (&["--every", "10h", "--keep", "15h", "k"], "two periods"),
        (&["--once", "--keep", "1s", "k"], "two leases"),
        (&["--slot", "tomorrow", "k"], "2026-11-22T03:00:00Z"),
        (&["--once", "--grace", "1h", "k"], "--grace"),
        (&["--once", ""], "empty"),
    ] {
        let ended = run(&url, &[args, &["--", "echo", "run"]].concat()).await;
        assert_eq!(
            (code(&ended), ended.stdout.as_str()),
            (2, ""),
            "{args:?}: {ended:?}"
        );
        assert!(ended.stderr.contains(says), "{args:?}: {ended:?}");
    }
    let ended = run(closed, &["-E", "0", "--once", "k", "--", "echo", "run"]).await;
    assert_eq!((code(&ended), ended.stdout.as_str()), (75, ""), "{ended:?}");
}
