//! The terminal, which is lent to the command.
//!
//! The command has a separate process group, so that it can be ended with everything that it has started and nothing
//! else. To the terminal it must be what dlock was: the foreground, which may read, and which Ctrl-C and Ctrl-Z reach.

use std::fs::{self, File, FileType};
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
    /// shell without jobs gives those an empty input (`/dev/null`), and has them ignore Ctrl-C. A command that reads a file
    /// gets it: with `< hosts` it may start programs that ask for a password.
    pub(super) fn is_for_the_command(&self) -> bool {
        let is_a =
            |path, kind: fn(&FileType) -> bool| fs::metadata(path).is_ok_and(|data| kind(&data.file_type()));
        self.is_ours()
            && (io::stdin().is_terminal() || is_a("/dev/stdin", FileType::is_file))
            && !is_a("/dev/stdout", FileType::is_fifo)
            && !is_ignored(Signal::SIGINT)
    }

    /// Whether the keyboard is for the command's group.
    pub(super) fn is_at(&self, group: Pid) -> bool {
        self.foreground() == Some(group)
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
