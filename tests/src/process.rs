//! What all servers of the harness have in common: a port, a directory, a log, and signals.

use std::ffi::OsStr;
use std::fmt::{Debug, Display};
use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::time::sleep;

use crate::disk::Disk;
use crate::etcd::Etcd;
use crate::mysql::Mysql;
use crate::port::Port;
use crate::postgres::Postgres;
use crate::zookeeper::Zookeeper;
use crate::{Server, child};

/// How long a server may take to start, to stop, or to answer the harness.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);
/// The user of servers that refuse to run as root, where the tests do.
const OWNER: &str = "nobody:nogroup";

/// A server that can be started again.
pub trait Node: Debug + Send + Sync + Deref<Target = Process> {
    /// Starts it again on the same port with its data, killing it first if it runs, and waits until it serves.
    fn restart(&self) -> BoxFuture<'_, ()>;
}

macro_rules! nodes {
    ($($server:ty),*) => {$(
        impl Node for $server {
            fn restart(&self) -> BoxFuture<'_, ()> {
                self.restart().boxed()
            }
        }
    )*};
}

nodes!(Server, Postgres, Mysql, Etcd, Zookeeper);

/// The process of a server, on a free port of 127.0.0.1, with its data in memory where that can be. It is killed when this
/// is dropped, and when the test process ends in any other way.
pub struct Process {
    port: Port,
    child: Mutex<Option<Child>>,
    // after the child, which writes into it
    disk: Option<Disk>,
    dir: TempDir,
}

impl Process {
    /// A process that does not run yet, with an empty directory whose name begins so.
    pub(crate) fn new(name: &str) -> Process {
        Process::on(Port::reserve(), name)
    }

    /// The same on this port.
    pub(crate) fn on(port: Port, name: &str) -> Process {
        let memory = Path::new("/dev/shm");
        let mut builder = tempfile::Builder::new();
        builder.prefix(name);
        let dir = match memory.is_dir() {
            true => builder.tempdir_in(memory).or_else(|_| builder.tempdir()),
            false => builder.tempdir(),
        };
        let dir = dir.expect("a directory can be made");
        // Servers that do not run as root go through it.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("it is ours");
        Process {
            port,
            child: Mutex::new(None),
            disk: None,
            dir,
        }
    }

    /// Puts its data, of which there are none yet, on a disk of this many bytes.
    pub(crate) fn on_a_disk(mut self, bytes: u64) -> Process {
        self.disk = Some(Disk::new(bytes, self.dir.path()));
        self
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Its address.
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port()).into()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where its data are.
    pub(crate) fn data(&self) -> &Path {
        self.disk.as_ref().map_or(self.dir.path(), Disk::path)
    }

    /// The disk that it was started on.
    ///
    /// # Panics
    /// When it has none of its own.
    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("it was started on a disk")
    }

    /// A command for a program that refuses to run as root, which is to be added. It finds the data in [`dir`](Self::dir),
    /// also if they are on a disk.
    pub(crate) fn unprivileged(&self) -> Command {
        let user = unprivileged();
        let Some(disk) = &self.disk else { return user };
        let mut command = disk.inside();
        command.arg(user.get_program()).args(user.get_args());
        command
    }

    /// Takes all the space that is left on its disk.
    ///
    /// # Panics
    /// When it has no disk of its own.
    pub fn fill_disk(&self) {
        self.disk().fill();
    }

    /// Gives that space back.
    ///
    /// # Panics
    /// When it was not taken.
    pub fn free_disk(&self) {
        self.disk().free();
    }

    /// Its process id while it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.lock().as_ref().map(Child::id)
    }

    /// How it ended, once, where it has.
    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        let mut child = self.child.lock();
        let status = child.as_mut()?.try_wait().ok()??;
        child.take();
        Some(status)
    }

    /// Whether it runs and is not frozen.
    pub fn is_awake(&self) -> bool {
        let awake = |pid| state_of(pid).is_some_and(|state| !matches!(state, 'T' | 'Z'));
        self.processes().first().copied().is_some_and(awake)
    }

    /// The server and all the processes that it works with.
    fn processes(&self) -> Vec<Pid> {
        let Some(pid) = self.pid() else { return Vec::new() };
        let all = [pid].into_iter().chain(children_of(pid));
        all.map(pid_of).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        for process in self.processes() {
            // some may have ended
            let _ = signal::kill(process, signal);
        }
    }

    /// Freezes it (`SIGSTOP`), every process of it. The kernel goes on to accept connections and bytes for it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn stop(&self) {
        assert!(self.pid().is_some(), "the server runs");
        let deadline = Instant::now() + PATIENCE;
        // Only the first of them could start more.
        loop {
            self.signal(Signal::SIGSTOP);
            let still = |pid: &Pid| state_of(*pid).is_none_or(|state| matches!(state, 'T' | 'Z'));
            if self.processes().iter().all(still) {
                return;
            }
            assert!(Instant::now() < deadline, "the server does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets a frozen server go on (`SIGCONT`).
    pub fn cont(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills it (`SIGKILL`) with all its processes, frozen or not. Does nothing when it does not run.
    pub fn kill(&self) {
        let processes = self.processes();
        if let Some(status) = self.ended() {
            // what is wrong with the server must not be lost with its files
            eprintln!(
                "{self:?} had ended by itself ({status}); it said:\n{}",
                self.last_words()
            );
        }
        self.signal(Signal::SIGKILL);
        if let Some(mut child) = self.child.lock().take() {
            let _ = child.wait();
        }
        let deadline = Instant::now() + PATIENCE;
        // The next start waits for none of them, and fails.
        while processes
            .iter()
            .any(|pid| state_of(*pid).is_some_and(|state| state != 'Z'))
        {
            assert!(Instant::now() < deadline, "the server does not die");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends its first process this signal, and says whether it ended in time.
    pub(crate) fn ends_by(&self, signal: Signal) -> bool {
        let Some(pid) = self.pid() else { return true };
        let _ = signal::kill(pid_of(pid), signal);
        let deadline = Instant::now() + PATIENCE;
        while self.ended().is_none() {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(Duration::from_millis(2));
        }
        true
    }

    /// Starts it, killing it first if it runs, and waits for nothing.
    ///
    /// # Panics
    /// When it cannot be started.
    pub(crate) fn launch(&self, mut command: Command) {
        self.kill();
        let log = File::options().create(true).append(true).open(self.log_file());
        let log = log.expect("a log can be written");
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be shared"))
            .stderr(log)
            .current_dir(self.dir());
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        self.child.lock().replace(child);
    }

    /// The pause before the next check whether a process that was launched at this time serves.
    ///
    /// # Panics
    /// When it has ended, or takes too long.
    pub(crate) async fn is_starting(&self, launched: Instant, trouble: impl Display) {
        let ended = self.ended();
        assert!(
            ended.is_none() && launched.elapsed() < PATIENCE,
            "the server does not answer ({trouble}); it said:\n{}",
            self.last_words()
        );
        sleep(Duration::from_millis(20)).await;
    }

    fn log_file(&self) -> PathBuf {
        self.dir().join("server.log")
    }

    /// All that it printed so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }

    /// The end of that; of a crash of Redis how it begins, since its report ends with a dump of the memory.
    pub(crate) fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = match log.find("BUG REPORT START") {
            Some(at) => log[at..].lines().take(60).collect(),
            None => log.lines().collect(),
        };
        lines[lines.len().saturating_sub(60)..].join("\n")
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("port", &self.port())
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A server that the tests of this process share while several of them hold it.
pub(crate) struct SharedServer<T>(tokio::sync::Mutex<Weak<T>>);

impl<T> SharedServer<T> {
    pub(crate) const fn new() -> Self {
        SharedServer(tokio::sync::Mutex::const_new(Weak::new()))
    }

    /// The one that there is, or else this one.
    pub(crate) async fn or(&self, start: impl Future<Output = T>) -> Arc<T> {
        let mut shared = self.0.lock().await;
        if let Some(server) = shared.upgrade() {
            return server;
        }
        let server = Arc::new(start.await);
        *shared = Arc::downgrade(&server);
        server
    }
}

/// A command for a program that refuses to run as root, which is to be added.
pub(crate) fn unprivileged() -> Command {
    let mut command = child::command("setpriv");
    if is_root() {
        command.args(["--reuid=nobody", "--regid=nogroup", "--clear-groups"]);
    }
    // Once more: changing the user takes the death signal back.
    command.args(["--pdeathsig", "KILL", "--"]);
    command
}

/// Gives a path to the user of [`unprivileged`] programs.
///
/// # Panics
/// When that fails.
pub(crate) fn give_away(path: impl AsRef<OsStr>) {
    if is_root() {
        let owned = Command::new("chown").arg(OWNER).arg(path).status();
        assert!(
            owned.is_ok_and(|status| status.success()),
            "chown to {OWNER} failed"
        );
    }
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

fn pid_of(id: u32) -> Pid {
    Pid::from_raw(id.try_into().expect("process ids are small"))
}

/// What `/proc` says of a process after its name: its state, its parent, …
fn stat_of(pid: Pid) -> Option<Vec<String>> {
    // the name stands in parentheses and may hold anything
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

fn state_of(pid: Pid) -> Option<char> {
    stat_of(pid)?.first()?.chars().next()
}

fn children_of(parent: u32) -> Vec<u32> {
    // each thread has its own
    let threads = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let numbers = |list: String| {
        list.split(' ')
            .filter_map(|number| number.parse().ok())
            .collect::<Vec<u32>>()
    };
    lists.flat_map(numbers).collect()
}
