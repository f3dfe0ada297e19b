//! Child processes that never outlive the harness.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::{io, thread};

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// A command for `program` that [`spawn`] can tie to this process.
///
/// Add arguments, environment and stdio as with any other command.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Removes these directories when this process has ended, in whichever way: for what lives as long as the process, and
/// is never dropped.
///
/// # Errors
/// When no shell can be started.
pub fn remove_at_the_end(dirs: impl Iterator<Item = impl AsRef<OsStr>>) -> io::Result<()> {
    // Its standard input ends with us.
    let script = "trap '' INT TERM; cat >/dev/null; sleep 1; rm -rf -- \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).args(dirs);
    shell
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    std::mem::forget(shell.spawn()?);
    Ok(())
}

/// Starts a [`command`] so that it is killed when this process ends, in whichever way that happens.
///
/// The kernel ties the death signal to the *thread* that forked, not to the process: a server started from a test's own
/// thread would die with that test, and one started from a runtime's worker whenever that worker is retired. So one
/// thread, which ends only with the process, starts them all.
///
/// # Errors
/// When `setpriv` (package util-linux) cannot be started.
pub fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        thread::Builder::new()
            .name("dlock-tests-spawner".into())
            .spawn(move || {
                for (mut command, reply) in inbox {
                    let _ = reply.send(command.spawn());
                }
            })
            .expect("a thread can be started");
        orders
    });
    let (reply, answer) = mpsc::channel();
    spawner
        .send((command, reply))
        .expect("the spawner lives as long as the process");
    answer.recv().expect("the spawner answers every order")
}
