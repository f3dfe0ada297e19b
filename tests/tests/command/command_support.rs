//! The command `dlock` on the stores that are crates of their own.

use dlock::LockClientBuilder;
use dlock_tests::faults::PATIENCE;
use dlock_tests::{Running, bins, child};

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
