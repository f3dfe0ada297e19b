//! `dlock run` as another process, and what its command says.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Instant;
use std::{mem, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;

use crate::faketime::{self, Clock};
use crate::faults::PATIENCE;
use crate::{bins, child, eventually};

/// A `dlock run` that has no terminal. It is killed when this is dropped, and when the test process ends in any other way.
#[derive(Debug)]
pub struct Running {
    child: Mutex<Child>,
    stdin: Mutex<Option<ChildStdin>>,
    stdout: Pipe,
    stderr: Pipe,
}

/// The output so far, and whether no writer is left.
#[derive(Debug, Clone, Default)]
struct Pipe(Arc<Mutex<(String, bool)>>);

impl Pipe {
    fn read(&self, from: impl std::io::Read + Send + 'static) {
        let this = self.clone();
        let mut from = BufReader::new(from);
        thread::spawn(move || {
            let mut line = Vec::new();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                this.0.lock().0 += &String::from_utf8_lossy(&mem::take(&mut line));
            }
            this.0.lock().1 = true;
        });
    }

    fn said(&self) -> String {
        self.0.lock().0.clone()
    }

    fn has_ended(&self) -> bool {
        self.0.lock().1
    }
}

/// How it has ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// What the command has said.
    pub stdout: String,
    /// What both have said there.
    pub stderr: String,
}

impl Running {
    /// Starts it, with the arguments of `run` on the store of the URL.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(url: &str, args: &[impl AsRef<OsStr>]) -> Running {
        Running::begin(url, child::command("setsid"), args)
    }

    /// The same with this clock.
    ///
    /// # Panics
    /// When it cannot be started, or without libfaketime.
    pub fn with_clock(url: &str, clock: &Clock, args: &[&str]) -> Running {
        let mut command = child::command("setsid");
        faketime::preload_by_env(&mut command, &clock.file()).expect("libfaketime is there");
        Running::begin(url, command, args)
    }

    fn begin(url: &str, mut command: Command, args: &[impl AsRef<OsStr>]) -> Running {
        // Away from the terminal that the tests may have been started from.
        command.arg(bins::dlock()).arg("run").args(args);
        command.env("DLOCK_URL", url).env_remove("RUST_LOG");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let (stdout, stderr) = (Pipe::default(), Pipe::default());
        stdout.read(child.stdout.take().expect("it is piped"));
        stderr.read(child.stderr.take().expect("it is piped"));
        Running {
            stdin: Mutex::new(child.stdin.take()),
            child: Mutex::new(child),
            stdout,
            stderr,
        }
    }

    /// The same with a script for the shell as the command.
    pub fn script(url: &str, args: &[&str], script: &str) -> Running {
        Running::start(url, &[args, &["--", "sh", "-c", script]].concat())
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.lock().id() as i32)
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it has ended.
    pub fn signal(&self, signal: Signal) {
        signal::kill(self.pid(), signal).expect("it is a process of ours");
    }

    /// Writes to the command's standard input.
    ///
    /// # Panics
    /// When it has no reader.
    pub fn write(&self, text: &[u8]) {
        let mut stdin = self.stdin.lock();
        let stdin = stdin.as_mut().expect("it is open");
        stdin.write_all(text).expect("the process reads it");
    }

    /// Ends the command's standard input.
    pub fn close(&self) {
        self.stdin.lock().take();
    }

    /// What the command has said so far.
    pub fn said(&self) -> String {
        self.stdout.said()
    }

    /// What both have said so far on standard error.
    pub fn complained(&self) -> String {
        self.stderr.said()
    }

    /// Waits until the command has said this.
    ///
    /// # Panics
    /// When it does not.
    pub async fn says(&self, what: &str) {
        eventually(&format!("{what:?} is said"), || async {
            let said = self.said();
            assert!(
                said.contains(what) || !self.stdout.has_ended(),
                "it has ended without {what:?}; it said:\n{said}{}",
                self.stderr.said()
            );
            said.contains(what)
        })
        .await;
    }

    /// Waits until neither it nor anything that it has started is left: until no process has its standard output open.
    pub async fn is_gone(&self) {
        eventually("all processes of the command have ended", || async {
            self.stdout.has_ended()
        })
        .await;
    }

    /// Whether it is still running, its command or not.
    pub fn is_running(&self) -> bool {
        self.child
            .lock()
            .try_wait()
            .expect("a child can be waited for")
            .is_none()
    }

    /// Waits until it has ended. What it leaves behind may go on.
    ///
    /// # Panics
    /// When it does not end.
    pub async fn ended(&self) -> Ended {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.lock().try_wait().expect("a child can be waited for") {
                break status;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "it does not end; it said:\n{}{}",
                self.said(),
                self.stderr.said()
            );
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        };
        Ended {
            status,
            stdout: self.said(),
            stderr: self.stderr.said(),
        }
    }

    /// The same, with all that it has started; everything that was said is there then.
    pub async fn all_ended(&self) -> Ended {
        self.close();
        self.is_gone().await;
        eventually("no process has its standard error open", || async {
            self.stderr.has_ended()
        })
        .await;
        self.ended().await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        let _ = child.kill();
        let _ = child.wait();
    }
}
