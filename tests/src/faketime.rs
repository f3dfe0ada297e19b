//! Servers whose clock is moved: libfaketime, loaded before everything else, reads how far from a file.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs, io};

use anyhow::Context;
use tempfile::TempDir;

/// The environment variable that says where libfaketime is.
const VARIABLE: &str = "DLOCK_FAKETIME";
/// The library for programs with threads.
const LIBRARY: &str = "libfaketimeMT.so.1";

/// Where the library is: as the variable says, else where the distribution's package puts it.
///
/// # Errors
/// When it is not there. The message says what to do.
fn library() -> anyhow::Result<PathBuf> {
    let named = env::var_os(VARIABLE).map(PathBuf::from);
    let found = named.into_iter().chain(installed()).find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "no libfaketime to move the clocks of servers: set {VARIABLE} to the path of {LIBRARY}, or run \
             scripts/servers.sh, which installs the package libfaketime"
        )
    })
}

/// In each directory of libraries, which are named after the machine on some distributions.
fn installed() -> Vec<PathBuf> {
    let mut dirs = vec![PathBuf::from("/usr/lib"), PathBuf::from("/usr/lib64")];
    let more = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    dirs.extend(more.map(|dir| dir.path()));
    dirs.into_iter()
        .map(|dir| dir.join("faketime").join(LIBRARY))
        .collect()
}

/// A clock that servers have in common, and that is moved: see [`ServerBuilder::clock`](crate::ServerBuilder::clock).
#[derive(Debug)]
pub struct Clock {
    dir: TempDir,
}

impl Clock {
    /// One that goes with the machine's so far.
    ///
    /// # Errors
    /// When libfaketime is not there.
    pub fn new() -> anyhow::Result<Clock> {
        library()?;
        let dir = tempfile::Builder::new().prefix("dlock-clock-").tempdir()?;
        // A server that runs as another user looks into it as well.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let clock = Clock { dir };
        clock.set(Duration::ZERO)?;
        Ok(clock)
    }

    /// Has it run ahead of the machine's by so much, for all of its users, from this moment on. Their timers do not
    /// notice.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn set(&self, ahead: Duration) -> io::Result<()> {
        self.write(&format!("+{:.3}\n", ahead.as_secs_f64()))
    }

    /// The same behind the machine's.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn set_behind(&self, behind: Duration) -> io::Result<()> {
        self.write(&format!("-{:.3}\n", behind.as_secs_f64()))
    }

    /// Has it run at this rate, counted from the start of each of its users.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn run_at(&self, rate: f64) -> io::Result<()> {
        self.write(&format!("+0 x{rate}\n"))
    }

    fn write(&self, line: &str) -> io::Result<()> {
        // As a whole: a file that is half written is an offset, too.
        let new = self.dir.path().join("new");
        fs::write(&new, line)?;
        fs::rename(&new, self.file())
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join("ahead")
    }
}

/// Has the command load the library, which looks into the file of a clock each time that it is asked for the time.
pub(crate) fn preload(command: &mut Command, file: &Path) -> anyhow::Result<()> {
    // The C library comes next, before the jemalloc that Redis may use: that asks for the time before libfaketime can
    // tell it.
    command.env("LD_PRELOAD", format!("{}:libc.so.6", library()?.display()));
    command.env("FAKETIME_TIMESTAMP_FILE", file);
    command.env("FAKETIME_NO_CACHE", "1");
    // Timers go on as they were; the variable has two names, by release.
    command.env("DONT_FAKE_MONOTONIC", "1");
    command.env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    Ok(())
}

/// The same by the program `env`, for what another program starts.
pub(crate) fn preload_by_env(command: &mut Command, file: &Path) -> anyhow::Result<()> {
    let mut variables = Command::new("env");
    preload(&mut variables, file)?;
    command.arg("env");
    for (name, value) in variables.get_envs() {
        let mut assignment = name.to_os_string();
        assignment.push("=");
        assignment.push(value.unwrap_or_default());
        command.arg(assignment);
    }
    Ok(())
}
