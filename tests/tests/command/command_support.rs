//! The command `dlock` on the stores that are crates of their own.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::LockClientBuilder;
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Clock, Running, bins, child};
use tempfile::NamedTempFile;

const HOUR: Duration = Duration::from_secs(3600);

/// What it says there, and its exit code.
pub(crate) fn look(url: &str, args: &[&str]) -> (Option<i32>, String) {
    let mut command = child::command(bins::dlock());
    command.args(["--url", url]).args(args);
    let output = bins::output(command, PATIENCE);
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output.status.code(), said.concat())
}

/// Runs a job whose lock is listed and kept from others, and then measures. The token of the job is greater than this.
pub(crate) async fn runs_lists_and_measures(url: &str, builder: LockClientBuilder, before: u64) {
    let running = Running::script(url, &["a job"], "echo \"$DLOCK_FENCING_TOKEN\"; read line");
    running.says("\n").await;
    let (code, said) = look(url, &["list"]);
    assert!(code == Some(0) && said.contains("a job"), "{said}");
    let client = builder.url(url).build().await.unwrap();
    assert!(client.lock("a job").try_acquire().await.unwrap_err().is_busy());
    running.write(b"end\n");
    let ended = running.all_ended().await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let token = ended.stdout.trim().parse::<u64>();
    assert!(token.is_ok_and(|token| token > before), "{ended:?}");
    let guard = client.lock("a job").try_acquire().await.unwrap();
    let (code, said) = look(url, &["show", "a job"]);
    assert!(code == Some(0) && said.contains("a job"), "{said}");
    // Another job is told that it is busy, and its command does not run.
    let busy = Running::script(url, &["--try", "a job"], "echo run")
        .all_ended()
        .await;
    assert!(!busy.status.success() && busy.stdout.is_empty(), "{busy:?}");
    let (code, said) = look(url, &["force-unlock", "a job"]);
    assert_eq!(code, Some(0), "{said}");
    let next = client.lock("a job").try_acquire().await.unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    next.release().await.unwrap();
    let bench = "bench --workload parallel --tasks 8 --seconds 1 --warmup 0";
    let (code, said) = look(url, &bench.split(' ').collect::<Vec<_>>());
    assert_eq!(code, Some(0), "{said}");
}

/// Runs jobs under a read-write lock: readers at the same time, a writer alone.
pub(crate) async fn runs_readers_together_and_a_writer_alone(url: &str) {
    let job = |kind: &str| {
        let script = "echo \"$DLOCK_KIND\"; read line";
        Running::script(url, &["--kind", kind, "a page"], script)
    };
    let refused = async |kind: &str| {
        let tries = Running::script(url, &["--try", "--kind", kind, "a page"], "echo run");
        let ended = tries.all_ended().await;
        assert!(!ended.status.success() && ended.stdout.is_empty(), "{ended:?}");
    };
    let readers = [job("read"), job("read")];
    for reader in &readers {
        reader.says("read\n").await;
    }
    refused("write").await;
    let writer = job("write");
    for reader in readers {
        reader.write(b"end\n");
        assert!(reader.all_ended().await.status.success());
    }
    writer.says("write\n").await;
    for kind in ["read", "write"] {
        refused(kind).await;
    }
    writer.write(b"end\n");
    assert!(writer.all_ended().await.status.success());
}

/// Runs a command on three machines, on each for longer than its lease. The clock of one jumps by two hours meanwhile.
pub(crate) async fn hold_one_by_one_with_clocks_hours_apart(url: &str) {
    let url = format!("{url}&lease=2s&timeout=20s&retry_for=60s");
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
