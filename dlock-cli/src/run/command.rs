//! The running command: a process group, and the state of its first process.

use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
#[cfg(target_os = "linux")]
use nix::sys::wait::{Id, waitid};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// How often to check whether a process of a group is left.
const LOOK: Duration = Duration::from_millis(10);

/// A started command.
#[derive(Debug)]
pub(super) struct Running {
    /// The group, which has the number of its first process.
    pub(super) group: Pid,
    changes: mpsc::UnboundedReceiver<Change>,
}

/// A change of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Stopped by this signal; it can be resumed.
    Stopped(Signal),
    /// Exited with this status.
    Exited(i32),
    /// Ended by this signal.
    Killed(Signal),
}

/// Waits for a change of the first process of this group.
fn wait(group: Pid) -> nix::Result<WaitStatus> {
    // Orphans that have ended exist until we have waited for them.
    #[cfg(target_os = "linux")]
    loop {
        let any = WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
        let at_once = Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED);
        match waitid(Id::All, any).map(|status| status.pid()) {
            Ok(Some(orphan)) if orphan != group => {
                let _ = waitpid(orphan, at_once);
            }
            // Not for long: another process may have resumed it since.
            Ok(_) => return waitpid(group, at_once),
            // A real-time signal has ended a process: `nix` knows none of them.
            Err(Errno::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    waitpid(group, Some(WaitPidFlag::WUNTRACED))
}

impl Running {
    /// Starts it. Call this from the main thread: the command ends with the thread that started it.
    pub(super) fn start(mut command: Command) -> std::io::Result<Running> {
        // Orphans become our children, so that we can tell whether they have ended.
        #[cfg(target_os = "linux")]
        let _ = nix::sys::prctl::set_child_subreaper(true);
        let child = command.spawn()?;
        let group = Pid::from_raw(child.id() as i32);
        let (sender, changes) = mpsc::unbounded_channel();
        std::thread::Builder::new()
            .name("wait".to_owned())
            .spawn(move || {
                loop {
                    let change = match wait(group) {
                        Ok(WaitStatus::Stopped(_, signal)) => Change::Stopped(signal),
                        Ok(WaitStatus::Exited(_, code)) => Change::Exited(code),
                        Ok(WaitStatus::Signaled(_, signal, _)) => Change::Killed(signal),
                        Ok(_) | Err(Errno::EINTR) => continue,
                        // Another task has waited for it, which none does.
                        Err(_) => Change::Exited(i32::from(super::end::NOT_STARTED)),
                    };
                    if sender.send(change).is_err() || !matches!(change, Change::Stopped(_)) {
                        return;
                    }
                }
            })?;
        Ok(Running { group, changes })
    }

    /// Waits for its next change of state. Cancel safe.
    pub(super) async fn change(&mut self) -> Change {
        match self.changes.recv().await {
            Some(change) => change,
            None => std::future::pending().await,
        }
    }

    /// Passes a signal on: to the whole group if it ends or stops processes by default, so that no part continues
    /// without the others and without the lock; otherwise to the command alone, which interprets it.
    pub(super) fn pass_on(&self, signal: Signal) {
        let _ = match signal {
            Signal::SIGUSR1 | Signal::SIGUSR2 => signal::kill(self.group, signal),
            _ => signal::killpg(self.group, signal),
        };
    }

    /// Resumes the stopped processes.
    pub(super) fn resume(&self) {
        let _ = signal::killpg(self.group, Signal::SIGCONT);
    }

    /// Asks the whole group to end.
    pub(super) fn terminate(&self) {
        let _ = signal::killpg(self.group, Signal::SIGTERM);
        // A stopped process gets the signal only when it is resumed.
        self.resume();
    }

    /// Kills the whole group.
    pub(super) fn kill(&self) {
        let _ = signal::killpg(self.group, Signal::SIGKILL);
    }

    /// Waits until nothing of the group is left, after its first process has ended; returns false if something still is
    /// at `until`.
    pub(super) async fn rest(&self, until: Instant) -> bool {
        loop {
            // Processes that have ended exist until their parent has waited for them.
            let all = Pid::from_raw(-self.group.as_raw());
            while matches!(waitpid(all, Some(WaitPidFlag::WNOHANG)), Ok(status) if status.pid().is_some()) {}
            if signal::killpg(self.group, None) == Err(Errno::ESRCH) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
