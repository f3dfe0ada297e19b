//! What the leader does: runs what is due.

use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::Held;
use futures_util::future::join_all;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::args::Job;
use crate::ledger::{Ledger, Refusal};

/// When a ledger that did not answer is asked again, in the same period.
const RETRY: Duration = Duration::from_secs(1);

/// Runs all jobs while this future is polled: until the leadership is lost.
pub(crate) async fn run(jobs: Vec<Job>, ledger: Arc<Ledger>, term: Held) {
    tracing::info!("leading with token {}", term.fencing_token());
    join_all(jobs.iter().map(|job| repeat(job, &ledger, &term))).await;
}

async fn repeat(job: &Job, ledger: &Ledger, term: &Held) {
    let (name, token) = (&job.name, term.fencing_token());
    // The period for which the ledger was asked without an answer: it may have noted the run.
    let mut unanswered = None;
    let mut told_of = 0;
    loop {
        let (slot, next) = slot(job.every);
        // Recorded before the run: the next leader does not begin an interrupted job again.
        let begun = match unanswered.take() == Some(slot) {
            false => ledger.begin(name, slot, token).await,
            true => ledger.begin_again(name, slot, token).await,
        };
        match begun {
            Ok(()) => {
                let begun = Instant::now();
                execute(job, slot, token).await;
                if begun.elapsed() < job.every && self::slot(job.every).0 > slot {
                    // The next period has begun, and is late, but the run was no longer than one.
                    continue;
                }
            }
            Err(Refusal::Begun(last)) if is_ahead(last, slot, job.every) => {
                if std::mem::replace(&mut told_of, last) != last {
                    tracing::warn!(
                        "{name} {slot} not run: its last run was noted for {last}, by a clock that is ahead"
                    );
                }
            }
            Err(Refusal::Begun(_)) => {}
            Err(Refusal::Fenced(newer)) => {
                tracing::warn!("{name} {slot} refused: token {token} is older than {newer}");
            }
            Err(Refusal::Unavailable(why)) => {
                tracing::warn!("{name} {slot} not run yet: {why}");
                unanswered = Some(slot);
                sleep(next.min(RETRY)).await;
                continue;
            }
        }
        // Not `next`: the run has taken a part of it, or more.
        sleep(self::slot(job.every).1).await;
    }
}

/// The beginning of the current period, in milliseconds since 1970, and the time until the next one.
fn slot(every: Duration) -> (u64, Duration) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (now, every) = (now.as_millis(), every.as_millis().max(1));
    let slot = now / every * every;
    // One millisecond later is certainly in the right period.
    let next = slot + every - now + 1;
    (slot as u64, Duration::from_millis(next as u64))
}

/// Whether the last run was noted for a period that this clock reaches only after the next one.
fn is_ahead(last: u64, slot: u64, every: Duration) -> bool {
    u128::from(last) > u128::from(slot) + every.as_millis()
}

async fn execute(job: &Job, slot: u64, token: u64) {
    let name = &job.name;
    match shell(&job.command, token).await {
        Ok(status) if status.success() => tracing::info!("{name} {slot} done token={token}"),
        Ok(status) => tracing::warn!("{name} {slot} failed ({status}) token={token}"),
        Err(error) => tracing::warn!("{name} {slot} cannot be started: {error}"),
    }
}

/// Runs a command, and ends what it has left running. Dropped with the lead, it ends the command, too.
async fn shell(line: &str, token: u64) -> io::Result<ExitStatus> {
    let mut command = Command::new("sh");
    command
        .args(["-c", line])
        .env("DLOCK_FENCING_TOKEN", token.to_string())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    #[cfg(unix)]
    command.process_group(0);
    let child = command.spawn()?;
    let mut shell = Shell {
        #[cfg(unix)]
        group: child.id(),
        child,
    };
    shell.child.wait().await
}

/// A shell that leads a process group. If it is dropped, the processes of the group are killed: a pipeline, or what a job
/// has left in the background, must not go on beside the jobs of the next leader.
struct Shell {
    /// Remembered: once the shell has ended, its id is not known any more, but processes of its group may run.
    #[cfg(unix)]
    group: Option<u32>,
    child: Child,
}

#[cfg(unix)]
impl Drop for Shell {
    fn drop(&mut self) {
        use nix::sys::signal::{Signal, killpg};
        use nix::unistd::Pid;

        // While a process of the group runs, no other process gets its id. An empty group has ended at this very poll: its id
        // would have to be the leader's of a new group already.
        if let Some(group) = self.group.and_then(|id| i32::try_from(id).ok()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_a_period_is_a_time_whatever_the_period() {
        let hour = Duration::from_secs(3600);
        let (slots, now) = (
            [100, 200, 400].map(|ms| slot(Duration::from_millis(ms)).0),
            SystemTime::now(),
        );
        let now = now.duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        assert!(
            slots.iter().all(|slot| (now - 100_000..=now).contains(slot)),
            "{slots:?} {now}"
        );
        let (begin, next) = slot(hour);
        assert_eq!(begin % 3_600_000, 0);
        assert!(next > Duration::ZERO && next <= hour + Duration::from_millis(1));
        // A period of another length may have begun meanwhile.
        assert!(!is_ahead(begin + 3_600_000, begin, hour));
        assert!(is_ahead(begin + 86_400_000, begin, hour));
    }
}
