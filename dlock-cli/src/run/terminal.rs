//! The terminal, which is lent to the command.
//!
//! The command has a separate process group, so that it can be ended with everything that it has started and nothing
//! else. To the terminal it must be what dlock was: the foreground, which may read, and which Ctrl-C and Ctrl-Z reach.

use std::fs::{self, File};
use std::io::{self, IsTerminal};
use std::os::unix::fs::FileTypeExt;

use nix::sys::signal::{self, Signal};
use nix::unistd::{self, Pid};

use super::signals::is_ignored;

/// The controlling terminal of this process.
#[derive(Debug)]
pub(super) struct Terminal {
    tty: File,
    ours: Pid,
}

impl Terminal {
    /// `None` for a process without one, as under cron or a service manager.
    pub(super) fn controlling() -> Option<Terminal> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        Some(Terminal {
            tty,
            ours: unistd::getpgrp(),
        })
    }

    fn foreground(&self) -> Option<Pid> {
        unistd::tcgetpgrp(&self.tty).ok()
    }

    /// Whether this process is in the foreground.
    pub(super) fn is_ours(&self) -> bool {
        self.foreground() == Some(self.ours)
    }

    /// Whether a command gets the foreground from the beginning. Other commands get it when they ask for it, since another
    /// process may need it just as well: a pager at the end of a pipeline, or a script that has started this one with `&`. A
    /// shell without jobs gives those an empty input, and has them ignore Ctrl-C.
    pub(super) fn is_for_the_command(&self) -> bool {
        let is_piped = fs::metadata("/dev/stdout").is_ok_and(|data| data.file_type().is_fifo());
        self.is_ours() && io::stdin().is_terminal() && !is_piped && !is_ignored(Signal::SIGINT)
    }

    /// Whether the keyboard is for the command's group, or for this one as a part of a pipeline.
    pub(super) fn is_at(&self, group: Pid) -> bool {
        self.foreground() == Some(group) || self.is_ours() && !is_ignored(Signal::SIGINT)
    }

    /// Puts a process group into the foreground, if this one is there now.
    pub(super) fn lend(&self, group: Pid) -> bool {
        self.is_ours() && unistd::tcsetpgrp(&self.tty, group).is_ok()
    }

    /// Takes the foreground back from the group to which it was lent, or from a group that does not exist any more (the
    /// last job of an interactive shell that was killed). Any other group keeps it.
    pub(super) fn take_back(&self, group: Pid) {
        let gone = |of: Pid| signal::killpg(of, None) == Err(nix::errno::Errno::ESRCH);
        if self.foreground().is_some_and(|of| of == group || gone(of)) {
            let _ = unistd::tcsetpgrp(&self.tty, self.ours);
        }
    }
}
