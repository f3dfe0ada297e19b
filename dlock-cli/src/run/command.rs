//! The running command: a process group, and the state of its first process.

use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{self, Signal};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::process::{WaitOptions, WaitStatus};
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

/// A change of its state. Signals are numbers: `nix` knows no real-time signals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// Stopped by this signal; it can be resumed.
    Stopped(i32),
    /// Exited with this status.
    Exited(i32),
    /// Ended by this signal.
    Killed(i32),
}

impl Change {
    fn of(status: WaitStatus) -> Option<Change> {
        let exited = status.exit_status().map(Change::Exited);
        let killed = || status.terminating_signal().map(Change::Killed);
        let stopped = || status.stopping_signal().map(Change::Stopped);
        exited.or_else(killed).or_else(stopped)
    }
}

/// Waits for a change of the first process of this group. Collects the other children that have ended: orphans of the
/// command, which would stay as zombies.
fn wait(group: Pid) -> Change {
    loop {
        match rustix::process::wait(WaitOptions::UNTRACED) {
            Ok(Some((pid, status))) if pid.as_raw_pid() == group.as_raw() => {
                if let Some(change) = Change::of(status) {
                    return change;
                }
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Another task has waited for it, which none does.
            Err(_) => return Change::Exited(i32::from(super::end::NOT_STARTED)),
        }
    }
}

impl Running {
    /// Starts it. Call this from the main thread: the command ends with the thread that started it.
    pub(super) fn start(mut command: Command) -> std::io::Result<Running> {
        // Orphans become our children, so that we can tell whether they have ended.
        #[cfg(target_os = "linux")]
        let _ = nix::sys::prctl::set_child_subreaper(true);
        let (sender, changes) = mpsc::unbounded_channel();
        let (started, is_started) = std::sync::mpsc::channel();
        // Before the command, which would go on without a lock if this failed.
        std::thread::Builder::new()
            .name("wait".to_owned())
            .spawn(move || {
                let Ok(group) = is_started.recv() else { return };
                loop {
                    let change = wait(group);
                    if sender.send(change).is_err() || !matches!(change, Change::Stopped(_)) {
                        return;
                    }
                }
            })?;
        let child = command.spawn()?;
        let group = Pid::from_raw(child.id() as i32);
        let _ = started.send(group);
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
    /// without the others and without the lock; otherwise to the command alone, which interprets it. Returns false if the
    /// kernel does not permit it, as all the others here: the processes run as another user.
    pub(super) fn pass_on(&self, signal: Signal) -> bool {
        match signal {
            Signal::SIGUSR1 | Signal::SIGUSR2 => signal::kill(self.group, signal) != Err(Errno::EPERM),
            _ => self.tell(signal),
        }
    }

    fn tell(&self, signal: Signal) -> bool {
        signal::killpg(self.group, signal) != Err(Errno::EPERM)
    }

    /// Resumes the stopped processes.
    pub(super) fn resume(&self) {
        self.tell(Signal::SIGCONT);
    }

    /// Asks the whole group to end.
    pub(super) fn terminate(&self) -> bool {
        let is_told = self.tell(Signal::SIGTERM);
        // A stopped process gets the signal only when it is resumed.
        self.resume();
        is_told
    }

    /// Kills the whole group.
    pub(super) fn kill(&self) -> bool {
        self.tell(Signal::SIGKILL)
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
