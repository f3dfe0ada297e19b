//! A Java process that locks with Redisson, for the tests in which Rust and Java share locks.
//!
//! The program is in `tests/interop`; it is built once, when first started, and told what to do line by line. Every
//! `thread` of a call is a Java thread of its own: Redisson's owners are threads, so calls of one thread run one after
//! the other and those of different threads overlap. All calls take `&self` and may be pending together; dropping the
//! future of a call does not stop what Java is doing.
//!
//! To know that a Java thread is waiting, look at the server: `PUBSUB NUMSUB <channel>` counts one subscription per
//! process, made before its second try for the lock.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fmt;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::sync::{OnceCell, oneshot};

use crate::Store;

const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/interop");
const BUILD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/java.sh");
const START_WITHIN: Duration = Duration::from_secs(60);
const STDERR_LINES_KEPT: usize = 40;

/// The Java thread of the requests in which the caller does not matter: no caller's blocking call holds them up.
const ANY_THREAD: u32 = u32::MAX;

/// What a call gave, and when.
#[derive(Debug, Clone)]
pub struct Answer {
    /// `true`, a number, a fencing token, a permit id; `false` where Java did not get what it tried to get.
    pub value: Value,
    /// How long the call of Redisson took, measured in Java.
    pub took: Duration,
    /// The wall clock of the Java process when the call returned: the same clock as [`SystemTime::now`] here.
    pub done_at: SystemTime,
    /// The `uuid:thread` that Redisson writes as the holder when this thread locks.
    pub holder: String,
}

impl Answer {
    /// Whether a `lock`, `tryLock`, `acquire` or `tryAcquire` got it, whatever it answers on success.
    #[must_use]
    pub fn acquired(&self) -> bool {
        !matches!(self.value, Value::Bool(false) | Value::Null)
    }

    /// The number that Java answered.
    ///
    /// # Panics
    ///
    /// Panics when the answer is not a number.
    #[must_use]
    pub fn number(&self) -> i64 {
        self.value
            .as_i64()
            .unwrap_or_else(|| panic!("{self:?} is not a number"))
    }

    /// The text that Java answered, such as a permit id.
    ///
    /// # Panics
    ///
    /// Panics when the answer is not a text.
    #[must_use]
    pub fn text(&self) -> &str {
        self.value
            .as_str()
            .unwrap_or_else(|| panic!("{self:?} is not a text"))
    }

    /// How long after `moment` the call returned, zero if before: the wake-up time of a release made at `moment`.
    #[must_use]
    pub fn since(&self, moment: SystemTime) -> Duration {
        self.done_at.duration_since(moment).unwrap_or_default()
    }
}

/// Why a call gave no answer.
#[derive(Debug, Clone)]
pub enum Error {
    /// Java threw, after the time given.
    Thrown {
        /// Simple name of the exception's class, such as `IllegalMonitorStateException`.
        class: String,
        /// The exception's message.
        message: String,
        /// How long the call ran, measured in Java.
        took: Duration,
    },
    /// The process has ended or could not be started; with what it last wrote to standard error.
    Gone(String),
}

impl Error {
    /// Whether Java threw an exception of this simple class name.
    #[must_use]
    pub fn is_thrown(&self, name: &str) -> bool {
        matches!(self, Error::Thrown { class, .. } if class == name)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Thrown { class, message, .. } => write!(f, "java threw {class}: {message}"),
            Error::Gone(why) => write!(f, "the redisson process is gone: {why}"),
        }
    }
}

impl std::error::Error for Error {}

/// What kind of object a name stands for in Java.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `getLock`.
    Plain,
    /// `getFairLock`.
    Fair,
    /// `getReadWriteLock().readLock()`.
    Read,
    /// `getReadWriteLock().writeLock()`.
    Write,
    /// `getFencedLock`: `lock` and `tryLock` answer the token.
    Fenced,
    /// `getMultiLock` of plain locks, whose names stand with commas between them.
    Multi,
    /// `getSemaphore`.
    Semaphore,
    /// `getPermitExpirableSemaphore`: acquiring answers the permit's id.
    Permits,
    /// `getCountDownLatch`.
    Latch,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Plain => "plain",
            Kind::Fair => "fair",
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Fenced => "fenced",
            Kind::Multi => "multi",
            Kind::Semaphore => "semaphore",
            Kind::Permits => "permits",
            Kind::Latch => "latch",
        }
    }
}

/// How the Java process is configured; what is not said keeps Redisson's default.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct Options {
    watchdog: Option<Duration>,
    fair_wait: Option<Duration>,
    timeout: Option<Duration>,
    retries: Option<u32>,
}

impl Options {
    /// Redisson's defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// `lockWatchdogTimeout`, the lease that is renewed (default 30 s).
    pub fn watchdog(mut self, lease: Duration) -> Self {
        self.watchdog = Some(lease);
        self
    }

    /// `fairLockWaitTimeout`, how long a fair lock waits for a waiter that may be dead (default 300 s).
    pub fn fair_wait(mut self, wait: Duration) -> Self {
        self.fair_wait = Some(wait);
        self
    }

    /// `timeout` of a command (default 3 s).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// `retryAttempts` of a command (default 4).
    pub fn retries(mut self, retries: u32) -> Self {
        self.retries = Some(retries);
        self
    }

    fn words(&self) -> Vec<String> {
        let millis =
            |name: &str, time: Option<Duration>| time.map(|time| format!("{name}={}", time.as_millis()));
        [
            millis("watchdog", self.watchdog),
            millis("fair-wait", self.fair_wait),
            millis("timeout", self.timeout),
            self.retries.map(|retries| format!("retries={retries}")),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// One Java process with one Redisson client. Dropping it kills the process and leaves its locks to their leases.
pub struct Redisson {
    uuid: String,
    pid: Pid,
    next_id: AtomicU64,
    input: tokio::sync::Mutex<ChildStdin>,
    shared: Arc<Shared>,
    child: Mutex<Child>,
}

impl fmt::Debug for Redisson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redisson")
            .field("uuid", &self.uuid)
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}

impl Redisson {
    /// Whether Java 17 and Maven are here (Maven only as long as the driver is not built), or what is missing.
    ///
    /// # Errors
    ///
    /// Says which program is missing or too old.
    pub fn available() -> Result<(), String> {
        let java = output("java", &["-version"]).ok_or("java is not installed")?;
        let major = java
            .split('"')
            .nth(1)
            .and_then(|version| version.split(|c: char| !c.is_ascii_digit()).next())
            .and_then(|major| major.parse::<u32>().ok())
            .ok_or_else(|| format!("cannot tell the version of java from {java:?}"))?;
        if major < 17 {
            return Err(format!("java is {major}, redisson's driver needs 17"));
        }
        if output(BUILD, &["interop", "--check"]).is_none() && output("mvn", &["--version"]).is_none() {
            return Err("mvn is not installed and the driver is not built".to_owned());
        }
        Ok(())
    }

    /// A process with Redisson's defaults on a store's server, for a suite that cannot do without.
    ///
    /// # Panics
    ///
    /// When Java or Maven is missing, or it does not start.
    pub async fn on(store: &Store) -> Self {
        Self::on_with(store, &Options::new()).await
    }

    /// Like [`on`](Self::on), with settings.
    ///
    /// # Panics
    ///
    /// As [`on`](Self::on).
    pub async fn on_with(store: &Store, options: &Options) -> Self {
        if let Err(missing) = Self::available() {
            panic!("no tests with Redisson: {missing} (tests/run leaves this suite out)");
        }
        let started = Self::start_with(&store.as_server().url(), options).await;
        started.unwrap_or_else(|error| panic!("no Redisson: {error}"))
    }

    /// Builds the driver if need be, then starts a process with Redisson's defaults and waits until it is connected.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`] when the driver cannot be built, or does not connect within 60 s.
    pub async fn start(url: &str) -> Result<Self, Error> {
        Self::start_with(url, &Options::new()).await
    }

    /// Like [`start`](Self::start), with settings.
    ///
    /// `url` is `redis://[user:password@]host:port[/db]` or `redis+cluster://[user:password@]host:port,host:port`.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_with(url: &str, options: &Options) -> Result<Self, Error> {
        build().await?;

        let mut arguments: Vec<OsString> = Vec::new();
        let classpath = format!("{PROJECT}/target/classes:{PROJECT}/target/lib/*");
        // A small, quickly started machine: the tests measure waits for messages, not the speed of compiled code.
        let machine = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx192m"];
        arguments.extend(machine.map(OsString::from));
        arguments.extend(["-cp", &classpath, "dlock.interop.Driver", url].map(OsString::from));
        arguments.extend(options.words().into_iter().map(OsString::from));

        let mut child = spawn(arguments).await?;
        let pid = child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .map(Pid::from_raw);
        let (Some(pid), Some(input), Some(stdout), Some(stderr)) =
            (pid, child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::Gone("it ended at once".to_owned()));
        };

        let shared = Arc::new(Shared::default());
        let errors = tokio::spawn(Arc::clone(&shared).keep_errors(pid, BufReader::new(stderr).lines()));
        let mut answers = BufReader::new(stdout).lines();
        let ready = tokio::time::timeout(START_WITHIN, answers.next_line()).await;
        let uuid = match ready {
            Ok(Ok(Some(line))) if line.starts_with("ready ") => line["ready ".len()..].to_owned(),
            Ok(Ok(Some(line))) => {
                return Err(Error::Gone(format!("it said {line:?} instead of being ready")));
            }
            Ok(_) => {
                // It has closed its output: wait for the reason, which goes to standard error.
                let _ = tokio::time::timeout(Duration::from_secs(1), errors).await;
                return Err(shared.gone());
            }
            Err(_) => {
                return Err(Error::Gone(format!(
                    "not connected after {START_WITHIN:?}; {}",
                    shared.gone()
                )));
            }
        };
        tokio::spawn(Arc::clone(&shared).deliver(answers));

        Ok(Self {
            uuid,
            pid,
            next_id: AtomicU64::new(1),
            input: tokio::sync::Mutex::new(input),
            shared,
            child: Mutex::new(child),
        })
    }

    /// The client's id: the first part of every holder of this process, `uuid:thread`.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Runs a request on a Java thread and waits for the answer. The words are `method kind name arguments…` as
    /// described in `Commands.java`; times are in milliseconds.
    ///
    /// # Errors
    ///
    /// [`Error::Thrown`] when Java throws, [`Error::Gone`] when the process has ended.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the request may have been sent; dropping the future only discards the answer.
    pub async fn call(&self, thread: u32, words: &[&str]) -> Result<Answer, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed).to_string();
        let mut line = format!("{id} {thread}");
        for word in words {
            line.push(' ');
            percent_encode(word, &mut line);
        }
        line.push('\n');

        let (sender, receiver) = oneshot::channel();
        {
            let mut pending = self.shared.pending.lock();
            let Some(pending) = pending.as_mut() else {
                return Err(self.shared.gone());
            };
            pending.insert(id, sender);
        }
        // A line is far shorter than what a pipe takes at once: a future dropped here has written all of it or nothing.
        let written = self.input.lock().await.write_all(line.as_bytes()).await;
        written.map_err(|_| self.shared.gone())?;
        let Ok(answer) = receiver.await else {
            return Err(self.shared.gone());
        };
        answer.into_result()
    }

    /// `lock(lease)`, or `lock()` with renewal when there is none. Waits without end.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call); so for all that follow.
    pub async fn lock(
        &self,
        thread: u32,
        kind: Kind,
        name: &str,
        lease: Option<Duration>,
    ) -> Result<Answer, Error> {
        match lease {
            Some(lease) => {
                self.call(thread, &["lock", kind.word(), name, &millis(lease)])
                    .await
            }
            None => self.call(thread, &["lock", kind.word(), name]).await,
        }
    }

    /// `tryLock(wait, lease)`; no lease means renewal. See [`Answer::acquired`].
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn try_lock(
        &self,
        thread: u32,
        kind: Kind,
        name: &str,
        wait: Duration,
        lease: Option<Duration>,
    ) -> Result<Answer, Error> {
        let lease = lease.map_or_else(|| "-1".to_owned(), millis);
        self.call(thread, &["tryLock", kind.word(), name, &millis(wait), &lease])
            .await
    }

    /// `unlock()`; throws `IllegalMonitorStateException` when this thread does not hold it.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn unlock(&self, thread: u32, kind: Kind, name: &str) -> Result<Answer, Error> {
        self.call(thread, &["unlock", kind.word(), name]).await
    }

    /// `lockAsync(lease, id)`: the holder is `uuid:id`, as with the reactive API, which draws ids at random. Waits without
    /// end.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn lock_as(&self, id: i64, kind: Kind, name: &str, lease: Duration) -> Result<Answer, Error> {
        let words = ["lockAs", kind.word(), name, &id.to_string(), &millis(lease)];
        self.call(ANY_THREAD, &words).await
    }

    /// `unlockAsync(id)`.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn unlock_as(&self, id: i64, kind: Kind, name: &str) -> Result<Answer, Error> {
        self.call(ANY_THREAD, &["unlockAs", kind.word(), name, &id.to_string()])
            .await
    }

    /// `forceUnlock()`: whether there was a lock to remove.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn force_unlock(&self, kind: Kind, name: &str) -> Result<bool, Error> {
        Ok(self
            .call(ANY_THREAD, &["forceUnlock", kind.word(), name])
            .await?
            .acquired())
    }

    /// `isLocked()`, by any holder.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn is_locked(&self, kind: Kind, name: &str) -> Result<bool, Error> {
        Ok(self
            .call(ANY_THREAD, &["isLocked", kind.word(), name])
            .await?
            .acquired())
    }

    /// `isHeldByCurrentThread()` of that thread.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn is_held(&self, thread: u32, kind: Kind, name: &str) -> Result<bool, Error> {
        Ok(self
            .call(thread, &["isHeldByCurrentThread", kind.word(), name])
            .await?
            .acquired())
    }

    /// `getHoldCount()` of that thread.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn hold_count(&self, thread: u32, kind: Kind, name: &str) -> Result<i64, Error> {
        Ok(self
            .call(thread, &["getHoldCount", kind.word(), name])
            .await?
            .number())
    }

    /// `remainTimeToLive()` in milliseconds: -2 without a holder, -1 when it never expires.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn remaining(&self, kind: Kind, name: &str) -> Result<i64, Error> {
        Ok(self
            .call(ANY_THREAD, &["remainTimeToLive", kind.word(), name])
            .await?
            .number())
    }

    /// Adds one to the plain number in `key`, `times` times, reading and writing in two steps with `think` between
    /// them, each time under the lock. Answers how many rounds ended with an exception.
    ///
    /// # Errors
    ///
    /// As for [`call`](Self::call).
    pub async fn counter(
        &self,
        thread: u32,
        kind: Kind,
        name: &str,
        key: &str,
        times: u32,
        think: Duration,
    ) -> Result<i64, Error> {
        let (times, think) = (times.to_string(), think.as_micros().to_string());
        Ok(self
            .call(thread, &["counter", kind.word(), name, &times, key, &think])
            .await?
            .number())
    }

    /// Stops the process where it stands (`SIGSTOP`): its locks are no longer renewed.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Kills the process (`SIGKILL`) and leaves its locks to their leases. Pending calls end with [`Error::Gone`].
    pub fn kill(&self) {
        // Through the child, not by number: the number of an ended process may belong to another process.
        let _ = self.child.lock().start_kill();
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.lock();
        if child.id().is_some() {
            let _ = kill(self.pid, signal);
        }
    }
}

/// What the tasks that read from the process share with its handle.
#[derive(Debug)]
struct Shared {
    /// Calls that wait for their answer, by id; `None` once the process has closed its output.
    pending: Mutex<Option<HashMap<String, oneshot::Sender<Line>>>>,
    errors: Mutex<VecDeque<String>>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            pending: Mutex::new(Some(HashMap::new())),
            errors: Mutex::default(),
        }
    }
}

impl Shared {
    async fn deliver(self: Arc<Self>, mut answers: Lines<BufReader<ChildStdout>>) {
        while let Ok(Some(line)) = answers.next_line().await {
            match serde_json::from_str::<Line>(&line) {
                Ok(answer) => {
                    let sender = self
                        .pending
                        .lock()
                        .as_mut()
                        .and_then(|pending| pending.remove(&answer.id));
                    if let Some(sender) = sender {
                        let _ = sender.send(answer);
                    }
                }
                Err(error) => self.keep_error(format!("not an answer: {line:?}: {error}")),
            }
        }
        // Dropping the senders ends all pending calls.
        *self.pending.lock() = None;
    }

    async fn keep_errors(self: Arc<Self>, pid: Pid, mut lines: Lines<BufReader<ChildStderr>>) {
        while let Ok(Some(line)) = lines.next_line().await {
            eprintln!("[redisson {pid}] {line}");
            self.keep_error(line);
        }
    }

    fn keep_error(&self, line: String) {
        let mut errors = self.errors.lock();
        if errors.len() == STDERR_LINES_KEPT {
            errors.pop_front();
        }
        errors.push_back(line);
    }

    fn gone(&self) -> Error {
        let errors = self.errors.lock();
        if errors.is_empty() {
            return Error::Gone("it wrote nothing to standard error".to_owned());
        }
        let lines: Vec<&str> = errors.iter().map(String::as_str).collect();
        Error::Gone(format!("its last words:\n{}", lines.join("\n")))
    }
}

/// One answer as it is written.
#[derive(Debug, Deserialize)]
struct Line {
    id: String,
    #[serde(default)]
    value: Value,
    error: Option<String>,
    #[serde(default)]
    message: String,
    took_us: u64,
    done_us: u64,
    #[serde(default)]
    holder: String,
}

impl Line {
    fn into_result(self) -> Result<Answer, Error> {
        let took = Duration::from_micros(self.took_us);
        if let Some(class) = self.error {
            return Err(Error::Thrown {
                class,
                message: self.message,
                took,
            });
        }
        let done_at = SystemTime::UNIX_EPOCH + Duration::from_micros(self.done_us);
        Ok(Answer {
            value: self.value,
            took,
            done_at,
            holder: self.holder,
        })
    }
}

/// Builds the driver once per process; the script sees to it that processes do not build at the same time.
async fn build() -> Result<(), Error> {
    static BUILT: OnceCell<()> = OnceCell::const_new();
    BUILT
        .get_or_try_init(|| async {
            let output = Command::new(BUILD)
                .arg("interop")
                .stdin(Stdio::null())
                .output()
                .await
                .map_err(|error| Error::Gone(format!("{BUILD} cannot be run: {error}")))?;
            if output.status.success() {
                return Ok(());
            }
            let said = [output.stdout, output.stderr].concat();
            Err(Error::Gone(format!(
                "the driver cannot be built:\n{}",
                String::from_utf8_lossy(&said)
            )))
        })
        .await
        .copied()
}

/// Starts `java` so that it dies with this process, whatever ends it.
///
/// The signal that `setpriv` asks for comes when the *thread* that started the child ends, and threads of a runtime end
/// with their test: all children are started by one thread that lives as long as the process. Without `setpriv` the end
/// of its standard input ends the child, unless it is stopped.
async fn spawn(arguments: Vec<OsString>) -> Result<Child, Error> {
    type Job = Box<dyn FnOnce() + Send>;
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Job>>> = OnceLock::new();

    let spawner = SPAWNER.get_or_init(|| {
        let (sender, jobs) = mpsc::channel::<Job>();
        let run = move || jobs.into_iter().for_each(|job| job());
        std::thread::Builder::new()
            .name("redisson-spawner".to_owned())
            .spawn(run)
            .expect("cannot start a thread");
        Mutex::new(sender)
    });

    let runtime = tokio::runtime::Handle::current();
    let (sender, receiver) = oneshot::channel();
    let job: Job = Box::new(move || {
        let _entered = runtime.enter();
        let mut command = if output("setpriv", &["--version"]).is_some() {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "java"]);
            command
        } else {
            Command::new("java")
        };
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let _ = sender.send(command.spawn());
    });
    spawner.lock().send(job).expect("the spawning thread never ends");
    let child = receiver
        .await
        .map_err(|_| Error::Gone("the spawning thread died".to_owned()))?;
    child.map_err(|error| Error::Gone(format!("java cannot be started: {error}")))
}

/// What a program printed, `None` when it is missing or failed.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let said = [output.stdout, output.stderr].concat();
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&said).into_owned())
}

fn millis(time: Duration) -> String {
    time.as_millis().to_string()
}

fn percent_encode(word: &str, line: &mut String) {
    for byte in word.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._:".contains(&byte) {
            line.push(char::from(byte));
        } else {
            line.push_str(&format!("%{byte:02X}"));
        }
    }
}

/// Adds one to a number on the server in two steps with time between them, as [`Redisson::counter`] does: the sum is
/// right where one does so at a time.
///
/// # Panics
///
/// When the server does not answer.
pub async fn add_one(conn: &mut MultiplexedConnection, key: &str) {
    let before: Option<u64> = redis::cmd("GET")
        .arg(key)
        .query_async(conn)
        .await
        .expect("the server is there");
    tokio::time::sleep(Duration::from_micros(500)).await;
    let mut set = redis::cmd("SET");
    let set = set.arg(key).arg(before.unwrap_or(0) + 1);
    let () = set.query_async(conn).await.expect("the server is there");
}
