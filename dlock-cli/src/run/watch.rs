//! The command and its lock: which of them ends first, and what follows.

use std::io::{self, PipeReader, Read};
use std::os::fd::AsRawFd;
use std::time::Duration;

use dlock::Loss;
use nix::sys::signal::Signal;
use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use super::args::{OnLost, Plan};
use super::command::{Change, Running};
use super::end::{End, LOST, NOT_STARTED};
use super::hold::View;
use super::keeper::Keeper;
use super::say::Say;
use super::signals::{ENDING, Signals, is_ignored};
use super::start::{self, StartArgs};
use super::terminal::Terminal;
use crate::look::clean;

/// How often to check how long the lock is certain to be held, at most and at least.
const LOOKS: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// How many checks in the time of a lease.
const LOOKS_A_LEASE: u32 = 10;
/// How often to try to kill a command that runs as another user, which may be for a part of its work only.
const AGAIN: Duration = Duration::from_secs(1);
/// How long to wait at the end for a message, which a full pipe may hold up.
const TOLD_WITHIN: Duration = Duration::from_secs(1);
/// What is said of a command that dlock may not signal.
const OUT_OF_REACH: &str = "the command cannot be ended: it runs as another user";
/// The longest timer; longer ones are not needed.
const NEVER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The outcome of a command, for the later settlement.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) end: End,
    pub(super) how: How,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// It could not be started.
    NotStarted,
    /// It ran while its lock or claim was lost.
    Lost,
    /// It was asked to end, and exited with a failure status.
    Interrupted,
    /// Otherwise.
    Ended(Change),
}

/// Runs the command until it has ended by itself or was ended.
pub(super) async fn run(
    plan: &Plan,
    held: View,
    grace: Duration,
    terminal: Option<Terminal>,
    signals: &mut Signals,
    say: Say,
) -> Ended {
    let not_started = |status| Ended {
        end: End::With(status),
        how: How::NotStarted,
    };
    let program = &plan.command[0];
    if let Err(error) = start::look_for(program) {
        return not_started(start::not_started(program, &error));
    }
    let mut watch = match Watch::start(plan, held, grace, terminal, say) {
        Ok(watch) => watch,
        Err(error) => {
            say.line(&format!("the command cannot be started: {error}"));
            return not_started(NOT_STARTED);
        }
    };
    let change = watch.until_ended(signals).await;
    watch.end(change, signals).await
}

struct Watch {
    held: View,
    /// What is held, for messages.
    locks: String,
    running: Running,
    /// Has a byte if the command could not be started.
    failure: PipeReader,
    /// `None` if the command need not be ended.
    keeper: Option<Keeper>,
    /// Whether the command waits until the keeper knows about it.
    held_back: bool,
    terminal: Option<Terminal>,
    /// Whether the command had the terminal, so that keys reached it and not this process.
    lent: bool,
    grace: Duration,
    on_lost: OnLost,
    /// Whether the lock was lost, or its end is near.
    lost: bool,
    /// When to kill the processes that do not end by themselves.
    kill_at: Option<Instant>,
    /// Whether a message says that they cannot be ended.
    out_of_reach: bool,
    /// Whether the command was told that no process can give it the terminal.
    hung_up: bool,
    /// The last ending signal that was passed on, or that came with the end of the command.
    passed_on: Option<Signal>,
    /// Completes when the message about the loss is printed.
    told: Option<oneshot::Receiver<()>>,
    say: Say,
}

impl Watch {
    fn start(
        plan: &Plan,
        held: View,
        grace: Duration,
        terminal: Option<Terminal>,
        say: Say,
    ) -> io::Result<Watch> {
        // A parent may have had it ignored, and then nothing tells how a child ended.
        let _ = signal(SignalKind::child())?;
        let ended = plan.on_lost == OnLost::End;
        let keeper = ended.then(Keeper::start).transpose()?;
        let lent = terminal.as_ref().is_some_and(Terminal::is_for_the_command);
        if !lent && terminal.as_ref().is_some_and(Terminal::is_ours) && is_ignored(Signal::SIGTTIN) {
            // As in $(…) of an interactive shell. The command would be refused the terminal, and not stopped when it asks
            // for it; a signal with a handler has its default action in a child.
            let _ = signal(SignalKind::from_raw(Signal::SIGTTIN as i32))?;
        }
        let (failure, inherited) = io::pipe()?;
        ioctl_fionbio(&failure, true)?;
        fcntl_setfd(&inherited, FdFlags::empty())?;
        let mut command = StartArgs::command(&plan.command, ended, lent, inherited.as_raw_fd());
        held.tell(&mut command, plan);
        Ok(Watch {
            held,
            locks: plan.locks(),
            running: Running::start(command)?,
            failure,
            keeper,
            held_back: ended,
            terminal,
            lent,
            // If the command is not ended, the loss need not be detected early.
            grace: if ended { grace } else { Duration::ZERO },
            on_lost: plan.on_lost,
            lost: false,
            kill_at: None,
            out_of_reach: false,
            hung_up: false,
            passed_on: None,
            told: None,
            say,
        })
    }

    fn tell_keeper(&self) {
        if self.held_back {
            return;
        }
        if let Some(keeper) = &self.keeper {
            keeper.allow(self.running.group, || self.held.remaining());
        }
    }

    async fn until_ended(&mut self, signals: &mut Signals) -> Change {
        let lost = self.held.lost();
        tokio::pin!(lost);
        let mut look_at = self.next_look();
        loop {
            let wake = self.kill_at.unwrap_or(look_at);
            tokio::select! {
                biased;
                change = self.running.change() => match change {
                    Change::Stopped(signal) => self.stopped(signal, signals).await,
                    ended => {
                        // One that a whole service gets may end the command before this process sees it.
                        if let Some(signal) = signals.command_has_ended() {
                            self.signalled(signal);
                        }
                        return ended;
                    }
                },
                // Before the look, which would find no time left.
                loss = &mut lost, if !self.lost => {
                    self.lost(loss);
                    look_at = self.next_look();
                }
                () = sleep_until(wake) => {
                    self.look();
                    look_at = self.next_look();
                }
                // Last, since they may keep coming.
                signal = signals.next() => self.signalled(signal),
            }
        }
    }

    fn next_look(&self) -> Instant {
        if self.lost {
            return Instant::now() + NEVER;
        }
        let left = self.held.remaining();
        let [least, most] = LOOKS;
        let often = (left / LOOKS_A_LEASE).clamp(least, most);
        Instant::now() + left.saturating_sub(self.grace).min(often)
    }

    /// Checks how long the lock is certain to be held: whether the command must be asked to end, or killed.
    fn look(&mut self) {
        if self.kill_at.take().is_some() {
            return self.kill();
        }
        let left = self.held.remaining();
        if left > self.grace {
            return self.tell_keeper();
        }
        self.lost = true;
        self.ask_to_end(left, "its time is up");
    }

    fn lost(&mut self, loss: Loss) {
        self.lost = true;
        // Nothing is left of the lease. After every other loss the command may take the time.
        let grace = match loss {
            Loss::Expired => Duration::ZERO,
            _ => self.grace,
        };
        self.ask_to_end(grace, &clean(&loss.to_string()));
    }

    fn ask_to_end(&mut self, within: Duration, why: &str) {
        let on_lost = self.on_lost;
        let what = match on_lost {
            OnLost::Ignore => "the command goes on without",
            OnLost::End if self.end_within(within) => "the command is ended",
            OnLost::End => OUT_OF_REACH,
        };
        let line = format!("{}: lost, {why}; {what}", self.locks);
        self.told = Some(self.say.line_beside(line));
    }

    /// Returns false if the command runs as another user.
    fn end_within(&mut self, within: Duration) -> bool {
        let (is_told, next) = match within.is_zero() {
            true => (self.running.kill(), AGAIN),
            false => (self.running.terminate(), within),
        };
        if !is_told || !within.is_zero() {
            self.kill_at = Some(Instant::now() + next);
        }
        self.out_of_reach = !is_told;
        is_told
    }

    /// Kills the command; as often as it takes, if it runs as another user.
    fn kill(&mut self) {
        if self.running.kill() {
            return;
        }
        self.kill_at = Some(Instant::now() + AGAIN);
        if !std::mem::replace(&mut self.out_of_reach, true) {
            let line = format!("{}: {OUT_OF_REACH}", self.locks);
            self.told = Some(self.say.line_beside(line));
        }
    }

    fn signalled(&mut self, signal: Signal) {
        if signal == Signal::SIGCONT {
            return self.go_on(false);
        }
        if ENDING.contains(&signal) {
            self.passed_on = Some(signal);
        }
        if !self.running.pass_on(signal) {
            let line = format!("{signal} cannot be passed on: the command runs as another user");
            self.told = Some(self.say.line_beside(line));
        }
    }

    /// Handles a stopped command: by itself before it begins, or by another process. If it wants the terminal it can
    /// have it. On Ctrl-Z or the like, dlock follows, as the rest of the shell's job would. SIGSTOP to a
    /// command that has the terminal is the like: with it a shell suspends itself. To any other command an operator has sent
    /// it, and the operator resumes the command as well.
    async fn stopped(&mut self, by: i32, signals: &mut Signals) {
        let Ok(by) = Signal::try_from(by) else { return };
        if self.held_back && by == Signal::SIGSTOP {
            self.held_back = false;
            self.tell_keeper();
            return self.running.resume();
        }
        let Some(terminal) = &self.terminal else {
            return;
        };
        let wants_terminal = matches!(by, Signal::SIGTTIN | Signal::SIGTTOU);
        match by {
            Signal::SIGTTIN | Signal::SIGTTOU if terminal.is_ours() => {}
            Signal::SIGSTOP if !terminal.is_at(self.running.group) => return,
            Signal::SIGTSTP | Signal::SIGSTOP | Signal::SIGTTIN | Signal::SIGTTOU => {
                terminal.take_back(self.running.group);
                let arrived = signals.stop_all().await;
                let was_stopped = arrived.contains(&Signal::SIGCONT);
                // The terminal is lent before the command goes on: it would ask again.
                for signal in arrived.into_iter().filter(|signal| *signal != Signal::SIGCONT) {
                    self.signalled(signal);
                }
                let goes_on = match by {
                    Signal::SIGTSTP => true,
                    Signal::SIGSTOP => was_stopped,
                    _ => was_stopped || self.hang_up(),
                };
                if !goes_on {
                    return;
                }
            }
            _ => return,
        }
        self.go_on(wants_terminal || self.lent);
    }

    /// Tells a command that wants the terminal that it cannot have it: no shell is left that could bring dlock to the
    /// foreground. The kernel does so for the stopped processes of a job whose shell ends; it does not see that those of the
    /// command belong to such a job, and would stop them again and again. Returns whether the command may go on. A command that
    /// runs as another user may not: dlock can send it only the signal that resumes it.
    fn hang_up(&mut self) -> bool {
        if self.terminal.as_ref().is_some_and(Terminal::is_ours) {
            return true;
        }
        if std::mem::replace(&mut self.hung_up, true) {
            // It has ignored that, and has asked again.
            return self.running.pass_on(Signal::SIGTERM);
        }
        let is_told = self.running.pass_on(Signal::SIGHUP);
        let becomes = match is_told {
            true => "it gets SIGHUP",
            false => "it stays stopped, as it runs as another user",
        };
        let line = format!("the command wants the terminal, which no shell can give it any more: {becomes}");
        self.told = Some(self.say.line_beside(line));
        is_told
    }

    /// dlock was resumed, or brought to the foreground.
    fn go_on(&mut self, wants_terminal: bool) {
        if self.held_back {
            return;
        }
        if !self.held.is_held() && self.on_lost == OnLost::End {
            // It must not do anything any more, not even clean up.
            return self.kill();
        }
        if let Some(terminal) = &self.terminal
            && (wants_terminal || terminal.is_for_the_command())
        {
            self.lent |= terminal.lend(self.running.group);
        }
        self.running.resume();
    }

    /// Ends the remaining processes of a command that did not end voluntarily, before the lock is released.
    async fn rest(&mut self, how: Change) {
        let soon = Instant::now() + self.grace.min(self.held.remaining());
        let until = match (self.lost, self.passed_on, how) {
            (true, ..) => self.kill_at.unwrap_or_else(Instant::now),
            // The whole group was asked.
            (_, Some(_), _) => soon,
            (_, _, Change::Killed(_)) => {
                self.running.terminate();
                soon
            }
            _ => return,
        };
        if !self.running.rest(until).await {
            self.running.kill();
            // No process of this user survives that, but it may take a moment.
            let is_gone = self.running.rest(Instant::now() + self.grace).await;
            if !is_gone && !self.running.kill() {
                let line = format!(
                    "{}: processes of the command are left: they run as another user",
                    self.locks
                );
                self.told = Some(self.say.line_beside(line));
            }
        }
    }

    /// Handles the end of the command: the rest of its group, and the message.
    async fn end(mut self, how: Change, signals: &mut Signals) -> Ended {
        if self.on_lost == OnLost::End && !self.lost && !self.held.is_held() {
            self.lost = true;
            let line = format!("{}: lost before the command had ended", self.locks);
            self.told = Some(self.say.line_beside(line));
        }
        let lost = self.lost && self.on_lost == OnLost::End;
        if self.on_lost == OnLost::End {
            self.rest(how).await;
        }
        if let Some(told) = self.told.take() {
            let _ = timeout(TOLD_WITHIN, told).await;
        }
        if let Some(keeper) = self.keeper {
            keeper.dismiss().await;
        }
        if !matches!(how, Change::Exited(0)) {
            self.passed_on = self.passed_on.or(signals.late().await);
        }
        let at_terminal = self.terminal.is_some_and(|terminal| {
            terminal.take_back(self.running.group);
            terminal.is_ours()
        });
        let end = match how {
            _ if lost => End::With(LOST),
            Change::Exited(code) => End::With(code as u8),
            Change::Killed(number) | Change::Stopped(number) => {
                let told = self.passed_on.is_some_and(|signal| signal as i32 == number);
                End::signalled(number, at_terminal && (told || self.lent), told)
            }
        };
        let how = match (lost, self.passed_on, how) {
            (true, ..) => How::Lost,
            _ if self.failure.read(&mut [0]).is_ok_and(|bytes| bytes > 0) => How::NotStarted,
            (_, Some(_), Change::Exited(status)) if status != 0 => How::Interrupted,
            _ => How::Ended(how),
        };
        Ended { end, how }
    }
}
