//! The step between dlock and the command: dlock itself, started again, sets up what only the new process can, waits
//! until the keeper watches it, and then becomes the command.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use clap::Args;
use nix::errno::Errno;
use nix::sys::signal::{self, SigSet, Signal};
use nix::unistd;

use super::end::{NOT_FOUND, NOT_STARTED};
use crate::output::print_error;

#[derive(Debug, Args)]
pub(crate) struct StartArgs {
    /// The process that it must not outlive.
    #[arg(long)]
    tied_to: Option<i32>,
    /// Take the terminal.
    #[arg(long)]
    foreground: bool,
    /// The pipe that gets a byte if the command cannot be started.
    #[arg(long)]
    failure: Option<RawFd>,
    #[arg(required = true, last = true)]
    command: Vec<OsString>,
}

impl StartArgs {
    /// Builds a command that starts this program for that, in a separate process group.
    pub(super) fn command(command: &[OsString], tied: bool, foreground: bool, failure: RawFd) -> Command {
        let mut start = this_program();
        start.arg("run-start").process_group(0);
        start.arg(format!("--failure={failure}"));
        if tied {
            start.arg(format!("--tied-to={}", std::process::id()));
        }
        if foreground {
            start.arg("--foreground");
        }
        start.arg("--").args(command);
        start
    }
}

/// This program, to be started again.
pub(super) fn this_program() -> Command {
    // On Linux the running program, even if its file was replaced.
    let path = match cfg!(target_os = "linux") {
        true => Ok("/proc/self/exe".into()),
        false => std::env::current_exe(),
    };
    let name = || std::env::args_os().next().unwrap_or_else(|| "dlock".into());
    let mut command = Command::new(path.unwrap_or_else(|_| name().into()));
    command.arg0(name());
    command
}

/// `dlock run-start`.
pub(crate) fn start(args: StartArgs) -> ExitCode {
    if let Some(parent) = args.tied_to
        && !tie(parent)
    {
        return ExitCode::from(NOT_STARTED);
    }
    if args.foreground {
        take_terminal();
    }
    if args.tied_to.is_some() {
        // Continues when the keeper knows about it.
        let _ = signal::raise(Signal::SIGSTOP);
    }
    let [program, arguments @ ..] = &args.command[..] else {
        return ExitCode::from(NOT_STARTED);
    };
    let failure = args.failure.and_then(kept_from_command);
    super::signals::let_through();
    // Returns only on failure.
    let error = Command::new(program).args(arguments).exec();
    // It has restored the default action, which would end this process where standard error has no reader.
    let _ = SigSet::from_iter([Signal::SIGPIPE]).thread_block();
    if let Some(mut failure) = failure {
        let _ = failure.write_all(b"x");
    }
    ExitCode::from(not_started(program, &error))
}

/// Reports the reason, and returns the exit status for it.
pub(super) fn not_started(program: &OsStr, error: &io::Error) -> u8 {
    let name = match program.is_empty() {
        true => "\"\"".into(),
        false => program.to_string_lossy(),
    };
    print_error(format_args!("dlock: {name}: {error}"));
    match error.kind() {
        ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_STARTED,
    }
}

/// Looks for the program as the start will.
pub(super) fn look_for(program: &OsStr) -> io::Result<()> {
    let paths = match std::env::var_os("PATH") {
        // An empty name is not looked for in the directories.
        _ if program.is_empty() || program.as_bytes().contains(&b'/') => vec![program.into()],
        Some(dirs) => std::env::split_paths(&dirs)
            .map(|dir| dir.join(program))
            .collect(),
        None => return Ok(()),
    };
    let mut error = Errno::ENOENT;
    for path in paths {
        match path.metadata() {
            Ok(file) if file.is_file() && file.permissions().mode() & 0o111 != 0 => return Ok(()),
            Ok(_) => error = Errno::EACCES,
            Err(_) => {}
        }
    }
    Err(error.into())
}

/// The inherited pipe, reopened so that the command does not inherit it.
fn kept_from_command(pipe: RawFd) -> Option<File> {
    let file = File::options().write(true).open(format!("/dev/fd/{pipe}"));
    let _ = unistd::close(pipe);
    file.ok()
}

/// Makes the kernel kill this process when its parent ends in any way; returns false if it has already ended.
fn tie(parent: i32) -> bool {
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL);
    unistd::getppid().as_raw() == parent
}

fn take_terminal() {
    // dlock has blocked SIGTTOU, so this works from the background.
    if let Ok(tty) = File::open("/dev/tty") {
        let _ = unistd::tcsetpgrp(&tty, unistd::getpgrp());
    }
}
