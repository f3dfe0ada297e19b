//! The signals that `dlock run` passes on.
//!
//! They are blocked and a separate thread waits for them; no handler is set for them. So the command starts with the
//! dispositions with which dlock was started (under nohup(1) it ignores SIGHUP too), and a signal can end dlock itself.
//! Started processes have them blocked as well, until they [let them through](let_through). Of other signals the command
//! has the default action of SIGPIPE, which the standard library ignores before `main` and restores in a child, and of
//! SIGCHLD, for which dlock has a handler.

use std::pin::pin;
use std::time::Duration;

use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd::Pid;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

/// Signals that end a command by default.
pub(super) const ENDING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
/// Signals whose meaning is up to the command.
const OTHERS: [Signal; 2] = [Signal::SIGUSR1, Signal::SIGUSR2];

/// A process that blocks it may take the terminal from the background.
const TERMINAL: Signal = Signal::SIGTTOU;

fn waited_for() -> impl Iterator<Item = Signal> {
    let stops = [Signal::SIGTSTP, Signal::SIGCONT];
    ENDING.into_iter().chain(OTHERS).chain(stops)
}

/// Unblocks them all, in a process whose parent has blocked them.
pub(super) fn let_through() {
    let blocked: SigSet = waited_for().chain([TERMINAL]).collect();
    let _ = blocked.thread_unblock();
}

/// How long [`Signals::let_finish`] lets work go on after a signal.
pub(super) const A_MOMENT: Duration = Duration::from_secs(2);

/// How late the thread that waits for signals may be.
const LATE: Duration = Duration::from_secs(1);
/// How often that is looked at.
const SHORT: Duration = Duration::from_millis(1);

/// The signals sent to this process.
#[derive(Debug)]
pub(super) struct Signals {
    arrived: mpsc::UnboundedReceiver<Signal>,
    /// Whether one has asked to end, while there was no command.
    hurried: bool,
}

impl Signals {
    /// From now on they only arrive here. Call this before any other thread is started, since each thread inherits its
    /// mask from its parent.
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
        Ok(Signals {
            arrived: receiver,
            hurried: false,
        })
    }

    /// Waits for the next one. Cancel safe.
    pub(super) async fn next(&mut self) -> Signal {
        match self.arrived.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }

    /// Waits for the next one that asks to end, before or after the command. Cancel safe.
    pub(super) async fn end(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => take(Signal::SIGTSTP),
                signal if ENDING.contains(&signal) => {
                    self.hurried = true;
                    return signal;
                }
                _ => {}
            }
        }
    }

    /// Takes the signals that have arrived: they were for the command, which has ended. Returns the last one that asks to
    /// end.
    pub(super) fn command_has_ended(&mut self) -> Option<Signal> {
        let arrived = std::iter::from_fn(|| self.arrived.try_recv().ok());
        arrived.filter(|signal| ENDING.contains(signal)).last()
    }

    /// As [`command_has_ended`](Self::command_has_ended), also those that the thread has still to take: on a busy machine it
    /// may be late.
    pub(super) async fn late(&mut self) -> Option<Signal> {
        let until = Instant::now() + LATE;
        while ENDING.into_iter().any(is_pending) && Instant::now() < until {
            sleep(SHORT).await;
        }
        // What it has just taken.
        sleep(SHORT).await;
        self.command_has_ended()
    }

    /// Waits for work without a command, such as the release. A signal leaves the work, and all that follows, a moment; `None`
    /// if that was too short.
    pub(super) async fn let_finish<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        if !self.hurried {
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                _ = self.end() => {}
            }
        }
        timeout(A_MOMENT, work).await.ok()
    }

    /// Stops this process and the rest of its group, as Ctrl-Z would. Returns when they are resumed, or soon if the kernel
    /// does not stop them, since no process could resume them. Returns the signals that arrived in the meantime: SIGCONT is
    /// among them if this process was resumed.
    pub(super) async fn stop_all(&mut self) -> Vec<Signal> {
        let mut others = Vec::new();
        if is_ignored(Signal::SIGTSTP) {
            return others;
        }
        // A stop from before is part of this one, which its SIGCONT does not end.
        others.extend(std::iter::from_fn(|| self.arrived.try_recv().ok()));
        others.retain(|signal| ![Signal::SIGTSTP, Signal::SIGCONT].contains(signal));
        if !tell_group(Signal::SIGTSTP) {
            return others;
        }
        // This process got the signal with the others, and must not handle it again when it is resumed.
        loop {
            match self.next().await {
                Signal::SIGTSTP => break,
                signal => others.push(signal),
            }
            // The kernel drops a stop that was not taken when its SIGCONT is sent.
            if others.last() == Some(&Signal::SIGCONT) && !is_pending(Signal::SIGTSTP) {
                return others;
            }
        }
        take(Signal::SIGTSTP);
        let until = Instant::now() + LATE;
        while !others.contains(&Signal::SIGCONT) && (is_pending(Signal::SIGCONT) || Instant::now() < until) {
            if let Ok(signal) = timeout(SHORT, self.next()).await {
                others.push(signal);
            }
        }
        others
    }
}

/// Sends a signal to this process and the others of its group.
pub(super) fn tell_group(signal: Signal) -> bool {
    signal::kill(Pid::from_raw(0), signal).is_ok()
}

/// Applies the default action of a signal to this process: returns only if that does not end it.
pub(super) fn take(signal: Signal) {
    let one: SigSet = [signal].into_iter().collect();
    if signal::raise(signal).is_ok() {
        let _ = one.thread_unblock();
        let _ = one.thread_block();
    }
}

/// Whether the parent made this process ignore the signal. Blocked, it would not be ignored any more.
#[cfg(target_os = "linux")]
pub(crate) fn is_ignored(signal: Signal) -> bool {
    is_among("SigIgn:", signal)
}

/// Whether the signal was sent to this process, and no thread has taken it.
#[cfg(target_os = "linux")]
fn is_pending(signal: Signal) -> bool {
    is_among("ShdPnd:", signal)
}

#[cfg(target_os = "linux")]
fn is_among(signals: &str, signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(signals));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal as i32 - 1) & 1 == 1)
}

/// Elsewhere an ignored signal is dropped even if it is blocked.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_ignored(_signal: Signal) -> bool {
    false
}

/// Elsewhere that is not known.
#[cfg(not(target_os = "linux"))]
fn is_pending(_signal: Signal) -> bool {
    false
}
