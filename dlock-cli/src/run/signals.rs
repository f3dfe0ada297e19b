//! The signals that `dlock run` passes on.
//!
//! They are blocked and waited for by a thread of their own, and no handler is ever set: so the command starts with the
//! dispositions that dlock was started with (under nohup(1) it ignores SIGHUP too), and dlock can end by a signal itself.
//! What was started has them blocked as well, until it [lets them through](let_through).

use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::Pid;
use tokio::sync::mpsc;

/// Those that end a command which does nothing about them.
pub(super) const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
/// Those that mean whatever the command makes of them.
const OTHERS: [Signal; 2] = [Signal::SIGUSR1, Signal::SIGUSR2];

/// A process that blocks it may take the terminal from the background.
const TERMINAL: Signal = Signal::SIGTTOU;

fn waited_for() -> impl Iterator<Item = Signal> {
    let stops = [Signal::SIGTSTP, Signal::SIGCONT];
    ENDING.into_iter().chain(OTHERS).chain(stops)
}

/// Unblocks them all, in a process that was started by one that has blocked them.
pub(super) fn let_through() {
    let blocked: SigSet = waited_for().chain([TERMINAL]).collect();
    let _ = blocked.thread_unblock();
}

/// The signals that this process is sent.
#[derive(Debug)]
pub(super) struct Signals(mpsc::UnboundedReceiver<Signal>);

impl Signals {
    /// From now on they do nothing but come here. To be called before any other thread is started, for each has a mask
    /// of its own, inherited from its parent.
    pub(super) fn catch() -> std::io::Result<Signals> {
        let wanted: SigSet = waited_for().filter(|signal| !is_ignored(*signal)).collect();
        let mut blocked = wanted;
        blocked.add(TERMINAL);
        blocked.thread_block()?;
        let (sender, receiver) = mpsc::unbounded_channel();
        let wait = move || {
            while let Ok(signal) = wanted.wait() {
                if sender.send(signal).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(wait)?;
        Ok(Signals(receiver))
    }

    /// The next one. Cancel safe.
    pub(super) async fn next(&mut self) -> Signal {
        match self.0.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }

    /// The next one that asks for an end, while there is no command yet, or none any more. Cancel safe.
    pub(super) async fn end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => take(Signal::SIGTSTP),
                signal if ENDING.contains(&signal) => return signal,
                _ => {}
            }
        }
    }

    /// Stops this process and the rest of its group, as Ctrl-Z would. Returns when they go on, or at once where no
    /// process could have them go on. Returns the signals that came meanwhile.
    pub(super) async fn stop_all(&mut self) -> Vec<Signal> {
        let mut others = Vec::new();
        if !is_ignored(Signal::SIGTSTP) && tell_group(Signal::SIGTSTP) {
            // This process was told with the others, and must not hear of it when it goes on.
            loop {
                match self.next().await {
                    Signal::SIGTSTP => break,
                    signal => others.push(signal),
                }
            }
            take(Signal::SIGTSTP);
        }
        others
    }
}

/// Sends a signal to this process and the others of its group.
pub(super) fn tell_group(signal: Signal) -> bool {
    signal::kill(Pid::from_raw(0), signal).is_ok()
}

/// Has a signal do to this process what it does to one that has never caught it: comes back only if that is no end.
pub(super) fn take(signal: Signal) {
    let one: SigSet = [signal].into_iter().collect();
    if signal::raise(signal).is_ok() {
        let _ = one.thread_unblock();
        let _ = one.thread_block();
    }
}

/// Whether the parent of this process has it ignore the signal. Blocked, it would not be ignored any more.
#[cfg(target_os = "linux")]
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal as i32 - 1) & 1 == 1)
}

/// Elsewhere an ignored signal is dropped even if it is blocked.
#[cfg(not(target_os = "linux"))]
fn is_ignored(_signal: Signal) -> bool {
    false
}
