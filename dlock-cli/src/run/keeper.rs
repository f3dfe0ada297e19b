//! A process that ends the command if dlock cannot: because it was killed, or stopped for longer than the lease.
//!
//! It is repeatedly told until when the lock is certain to be held. When that has passed, or when dlock is gone, it
//! kills the command's whole process group: the command itself ends with dlock at once (on Linux), but its children
//! would not.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitCode, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::Pid;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::{Instant, sleep};

use super::start::this_program;

/// A timer that was set before a suspend fires late, so the clock is checked at least this often.
const EVERY: Duration = Duration::from_secs(1);
const DONE: &str = "done";
/// A keeper ends within a few milliseconds.
const COLLECTED_WITHIN: Duration = Duration::from_millis(200);

/// dlock's end of the connection.
#[derive(Debug)]
pub(super) struct Keeper {
    orders: UnixStream,
    process: Child,
}

impl Keeper {
    /// Starts it; it does nothing until it is told of a command.
    pub(super) fn start() -> std::io::Result<Keeper> {
        let (ours, theirs) = UnixStream::pair()?;
        // A keeper that does not read must not block this process.
        ours.set_nonblocking(true)?;
        let mut command = this_program();
        // It keeps no file of the command open, and ignores Ctrl-C.
        command
            .arg("run-keeper")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/")
            .env_clear()
            .process_group(0);
        let process = command.spawn()?;
        Ok(Keeper {
            orders: ours,
            process,
        })
    }

    /// Allows the command of this group to run for `remaining` from the time of this call, or a little less.
    pub(super) fn allow(&self, group: Pid, remaining: impl FnOnce() -> Duration) {
        let now = clock();
        let until = now + remaining();
        self.tell(&format!("{group} {}", until.as_nanos()));
    }

    /// Reports that the command has ended, and waits a moment for the end of the keeper: the first process of a container, which
    /// would inherit it, may collect no children.
    pub(super) async fn dismiss(mut self) {
        self.tell(DONE);
        let until = Instant::now() + COLLECTED_WITHIN;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < until {
            sleep(Duration::from_millis(1)).await;
        }
    }

    fn tell(&self, line: &str) {
        // A keeper that is gone counts as a loss by itself, which cannot be repaired here.
        let _ = (&self.orders).write_all(format!("{line}\n").as_bytes());
    }
}

/// A message to the keeper.
enum Order {
    Allow { group: Pid, until: Duration },
    Done,
}

impl Order {
    fn parse(line: &str) -> Option<Order> {
        if line == DONE {
            return Some(Order::Done);
        }
        let (group, until) = line.split_once(' ')?;
        // Group 1 and below means several groups.
        let group = group.parse().ok().filter(|group| *group > 1)?;
        Some(Order::Allow {
            group: Pid::from_raw(group),
            until: Duration::from_nanos(until.parse().ok()?),
        })
    }
}

/// `dlock run-keeper`.
pub(crate) fn keep() -> ExitCode {
    // Signals are blocked: a signal to all processes of dlock also asks the command to end, which may take a while.
    let _ = SigSet::all().thread_block();
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_name(c"dlock-keeper");
    let (sender, orders) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lines().map_while(Result::ok);
        lines
            .filter_map(|line| Order::parse(&line))
            .try_for_each(|order| sender.send(order).map_err(drop))
    });
    let mut allowed: Option<(Pid, Duration)> = None;
    loop {
        let left = allowed.map_or(EVERY, |(_, until)| until.saturating_sub(clock()));
        match orders.recv_timeout(left.min(EVERY)) {
            Ok(Order::Allow { group, until }) => allowed = Some((group, until)),
            Ok(Order::Done) => return ExitCode::SUCCESS,
            Err(RecvTimeoutError::Timeout) if allowed.is_none_or(|(_, until)| clock() < until) => {}
            Err(_) => {
                if let Some((group, _)) = allowed {
                    let _ = signal::killpg(group, Signal::SIGKILL);
                }
                return ExitCode::SUCCESS;
            }
        }
    }
}

/// A clock that both processes share, and that runs while the machine sleeps, if there is one.
fn clock() -> Duration {
    #[cfg(target_os = "linux")]
    let id = ClockId::Boottime;
    #[cfg(not(target_os = "linux"))]
    let id = ClockId::Monotonic;
    let now = clock_gettime(id);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}
