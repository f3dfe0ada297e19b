//! What the leader does: runs what is due.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::Held;
use futures_util::future::join_all;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::args::Job;
use crate::ledger::{Ledger, Refusal};

/// Runs all jobs while this future is polled: until the leadership is lost.
pub(crate) async fn run(jobs: Vec<Job>, ledger: Arc<Ledger>, term: Held) {
    tracing::info!("leading with token {}", term.fencing_token());
    join_all(jobs.iter().map(|job| repeat(job, &ledger, &term))).await;
}

async fn repeat(job: &Job, ledger: &Ledger, term: &Held) {
    let (name, token) = (&job.name, term.fencing_token());
    loop {
        let (slot, next) = slot(job.every);
        // Recorded before the run: the next leader does not begin an interrupted job again.
        match ledger.begin(name, slot, token).await {
            Ok(true) => execute(job, slot, token).await,
            Ok(false) => {}
            Err(Refusal::Fenced(newer)) => {
                tracing::warn!("{name} {slot} refused: token {token} is older than {newer}");
            }
            Err(Refusal::Unavailable(why)) => tracing::warn!("{name} {slot} not run: {why}"),
        }
        sleep(next).await;
    }
}

/// The number of the current period, and the time until the next one.
fn slot(every: Duration) -> (u64, Duration) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let every = every.as_millis().max(1);
    let slot = now.as_millis() / every;
    let next = (slot + 1) * every - now.as_millis();
    // One millisecond later is certainly in the right period.
    (slot as u64, Duration::from_millis(next as u64 + 1))
}

async fn execute(job: &Job, slot: u64, token: u64) {
    let name = &job.name;
    match shell(&job.command, token).await {
        Ok(status) if status.success() => tracing::info!("{name} {slot} done token={token}"),
        Ok(status) => tracing::warn!("{name} {slot} failed ({status}) token={token}"),
        Err(error) => tracing::warn!("{name} {slot} cannot be started: {error}"),
    }
}

/// Runs a command. Dropped with the lead, it ends the command.
async fn shell(line: &str, token: u64) -> io::Result<ExitStatus> {
    let mut command = Command::new("sh");
    command
        .args(["-c", line])
        .env("DLOCK_FENCING_TOKEN", token.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    #[cfg(unix)]
    command.process_group(0);
    let mut shell = Shell(command.spawn()?);
    shell.0.wait().await
}

/// A shell that leads a process group. If it is dropped while it runs, the processes of the group are killed, too: a pipeline
/// must not go on beside the jobs of the next leader.
struct Shell(Child);

#[cfg(unix)]
impl Drop for Shell {
    fn drop(&mut self) {
        use nix::sys::signal::{Signal, killpg};
        use nix::unistd::Pid;

        // `None` once it has ended: another process may have its id then.
        if let Some(group) = self.0.id().and_then(|id| i32::try_from(id).ok()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }
}
