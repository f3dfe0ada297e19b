//! How `dlock run` ends, and its exit codes.

use nix::sys::signal::Signal;

use super::terminal::Terminal;

/// The lock was not acquired: the code that sendmail and users of flock take as "try again later" (`EX_TEMPFAIL`).
pub(super) const NOT_ACQUIRED: u8 = 75;
/// The lock was lost.
pub(super) const LOST: u8 = 76;
/// Work that is done once was given up: it failed or crashed, and is not tried again.
pub(super) const GIVEN_UP: u8 = 77;
/// The convention of shells.
pub(super) const NOT_STARTED: u8 = 126;
pub(super) const NOT_FOUND: u8 = 127;
pub(super) const BY_SIGNAL: u8 = 128;

/// How `dlock run` ends.
#[derive(Debug)]
pub(super) enum End {
    With(u8),
    /// With the signal of the command, so that the shell knows that Ctrl-C was pressed; the rest of the shell's job has
    /// been told or not.
    By {
        signal: Signal,
        told: bool,
    },
    /// The arguments are invalid.
    Misused(String),
}

impl End {
    /// By a signal while there is no command.
    pub(super) fn given_up(signal: Signal, terminal: Option<&Terminal>) -> End {
        End::signalled(signal as i32, terminal.is_some_and(Terminal::is_ours), true)
    }

    /// For a command that the signal of this number has ended, or for dlock while there is none.
    pub(super) fn signalled(number: i32, from_terminal: bool, told: bool) -> End {
        match Signal::try_from(number) {
            Ok(signal @ (Signal::SIGINT | Signal::SIGQUIT)) if from_terminal => End::By { signal, told },
            _ => End::With(BY_SIGNAL + number as u8),
        }
    }
}
