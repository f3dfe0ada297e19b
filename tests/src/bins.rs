//! The programs of `dlock-examples` and the `dlock` command, built and run as other processes.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use parking_lot::Mutex;
use reqwest::{Method, Response};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::child;
use crate::faketime::{self, Clock};

/// How long a program may take to start, or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program `name` of `dlock-examples`, built by the same cargo, with the same profile and into the same
/// directory as this test. (Cargo tells a test only the programs of its own package.)
///
/// # Panics
/// When it cannot be built.
pub fn example(name: &str) -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&["-p", "dlock-examples", "--bins"]));
    find(built, name)
}

/// The example `payment`, which has a feature of its own.
///
/// # Panics
/// When it cannot be built.
pub fn payment() -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&["--workspace", "--all-features", "--bin", "payment"]));
    find(built, "payment")
}

/// The example `config`, which has a feature of its own.
///
/// # Panics
/// When it cannot be built.
pub fn config() -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&["--workspace", "--all-features", "--bin", "config"]));
    find(built, "config")
}

/// The example `fleet`, which has a feature of its own.
///
/// # Panics
/// When it cannot be built.
pub fn fleet() -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&["--workspace", "--all-features", "--bin", "fleet"]));
    find(built, "fleet")
}

/// The example `teller`, which has a feature of its own.
///
/// # Panics
/// When it cannot be built.
pub fn teller() -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| build(&["--workspace", "--all-features", "--bin", "teller"]));
    find(built, "teller")
}

/// The `dlock` command, built in the same way.
///
/// # Panics
/// When it cannot be built.
pub fn dlock() -> PathBuf {
    static BUILT: OnceLock<Vec<PathBuf>> = OnceLock::new();
    // Of the whole workspace, as the tests are: so nothing is built anew for it but the command.
    let built = BUILT.get_or_init(|| build(&["--workspace", "--all-features", "--bin", "dlock"]));
    find(built, "dlock")
}

fn find(built: &[PathBuf], name: &str) -> PathBuf {
    let found = built
        .iter()
        .find(|path| path.file_stem().is_some_and(|stem| stem == name));
    found
        .unwrap_or_else(|| panic!("there is no program {name}, only {built:?}"))
        .clone()
}

fn build(what: &[&str]) -> Vec<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests lie in the workspace");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    cargo.current_dir(workspace);
    // What cargo tells this test of its package would make build scripts run anew that look at it.
    for (name, _) in env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
        if name
            .to_str()
            .is_some_and(|name| of_package.iter().any(|part| name.starts_with(part)))
        {
            cargo.env_remove(name);
        }
    }
    cargo
        .arg("build")
        .args(what)
        .arg("--message-format=json-render-diagnostics");
    let here = env::current_exe().expect("this test is a file");
    let profile = here
        .parent()
        .and_then(Path::parent)
        .expect("it lies in <target>/<profile>/deps");
    match profile.file_name().and_then(|name| name.to_str()) {
        None | Some("debug") => {}
        Some(other) => drop(cargo.args(["--profile", other])),
    }
    if let Some(target) = profile.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file()) {
        cargo.arg("--target-dir").arg(target);
    }
    let output = cargo
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo can be started");
    assert!(output.status.success(), "{what:?} does not build");
    let messages = String::from_utf8(output.stdout).expect("cargo writes UTF-8");
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .collect()
}

/// Runs an example until it ends.
///
/// # Panics
/// When it does not end within `limit`.
pub fn run(name: &str, args: &[&str], limit: Duration) -> Output {
    let mut command = child::command(example(name));
    command.args(args).env_remove("RUST_LOG");
    output(command, limit)
}

/// Runs a command of [`child::command`] until it ends.
///
/// # Panics
/// When it does not end within `limit`.
pub fn output(mut command: Command, limit: Duration) -> Output {
    let what = format!("{:?}", command.get_args().collect::<Vec<_>>());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
    finish(child, &what, limit)
}

/// An example that runs in the background, with its output in a file; killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    log: NamedTempFile,
}

impl Running {
    /// Starts a program of [`example`], or another path.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start(program: &Path, args: &[&str]) -> Running {
        Running::begin(child::command(program), args)
    }

    /// The same with this clock.
    ///
    /// # Panics
    /// When it cannot be started, or without libfaketime.
    pub fn with_clock(program: &Path, clock: &Clock, args: &[&str]) -> Running {
        let mut command = child::command(program);
        faketime::preload(&mut command, &clock.file()).expect("libfaketime is there");
        Running::begin(command, args)
    }

    fn begin(mut command: Command, args: &[&str]) -> Running {
        let log = NamedTempFile::new().expect("a file can be made");
        let output = || log.reopen().expect("the file is there");
        command
            .args(args)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(output())
            .stderr(output());
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        Running { child, log }
    }

    /// Kills it with SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends a signal to it.
    ///
    /// # Panics
    /// When it has ended.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        signal::kill(Pid::from_raw(pid), signal).expect("it runs");
    }

    /// Whether it runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has written.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap_or_default()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until a child has ended whose output has no other reader.
///
/// # Panics
/// When it does not end within `limit`.
pub fn finish(mut child: Child, what: &str, limit: Duration) -> Output {
    let readers = [
        child
            .stdout
            .take()
            .map(|stdout| thread::spawn(move || read_all(stdout))),
        child
            .stderr
            .take()
            .map(|stderr| thread::spawn(move || read_all(stderr))),
    ];
    let status = ended(&mut child, limit);
    if status.is_none() {
        let _ = child.kill();
    }
    let [stdout, stderr] =
        readers.map(|reader| reader.and_then(|reader| reader.join().ok()).unwrap_or_default());
    let status = status.unwrap_or_else(|| {
        let (out, err) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        panic!("{what} did not end within {limit:?}; it said:\n{out}{err}")
    });
    Output {
        status,
        stdout,
        stderr,
    }
}

fn read_all(mut from: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    let _ = from.read_to_end(&mut all);
    all
}

fn ended(child: &mut Child, within: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        if Instant::now() > deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A running copy of the checkout on a free port. It is killed when this is dropped, and when the test
/// process ends in any other way.
#[derive(Debug)]
pub struct Checkout {
    child: Mutex<Child>,
    url: String,
    log: NamedTempFile,
    client: reqwest::Client,
}

/// What a copy answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body; null when it is not JSON.
    pub body: Value,
    /// The media type.
    pub content_type: String,
    /// Seconds, if the answer says when to come again.
    pub retry_after: Option<u64>,
    /// Whether it was stored before, under the key of the request.
    pub replayed: bool,
}

impl Answer {
    async fn read(response: Response) -> reqwest::Result<Answer> {
        let status = response.status().as_u16();
        let header = |name: &str| {
            response
                .headers()
                .get(name)
                .and_then(|value| value.to_str().ok())
                .unwrap_or_default()
                .to_owned()
        };
        let (content_type, retry_after) = (header("content-type"), header("retry-after").parse().ok());
        let replayed = header("idempotent-replayed") == "true";
        let body = serde_json::from_slice(&response.bytes().await?).unwrap_or_default();
        Ok(Answer {
            status,
            body,
            content_type,
            retry_after,
            replayed,
        })
    }

    /// The token of the lock under which it was done.
    pub fn token(&self) -> Option<u64> {
        self.body["fencing_token"].as_u64()
    }

    /// Whether it is a problem document of this status and type, complete and consistent.
    pub fn is_problem(&self, status: u16, kind: &str) -> bool {
        self.status == status
            && self.content_type == "application/problem+json"
            && self.body["type"] == kind
            && self.body["status"] == status
            && ["title", "detail"]
                .iter()
                .all(|part| self.body[*part].as_str().is_some_and(|text| !text.is_empty()))
    }
}

fn said_in(log: &NamedTempFile) -> String {
    String::from_utf8_lossy(&fs::read(log).expect("the file is there")).into_owned()
}

impl Checkout {
    /// Starts a copy with further arguments, and waits until it listens.
    ///
    /// # Panics
    /// When it does not.
    pub fn start(args: &[&str]) -> Checkout {
        Checkout::start_at("127.0.0.1:0", args)
    }

    /// The same at an address, such as that of a copy that has ended.
    ///
    /// # Panics
    /// When it does not listen there.
    pub fn start_at(address: &str, args: &[&str]) -> Checkout {
        let mut command = child::command(example("checkout"));
        command
            .args(["--listen", address])
            .args(args)
            .env_remove("RUST_LOG");
        // A file has what was printed before an answer when the answer comes; a pipe is read a moment later.
        let log = NamedTempFile::with_prefix("dlock-").expect("a file for what it says");
        let writer = || fs::OpenOptions::new().append(true).open(log.path());
        command
            .stdin(Stdio::null())
            .stdout(writer().expect("it can be written to"))
            .stderr(writer().expect("it can be written to"));
        let child = child::spawn(command).expect("setpriv (package util-linux) can be started");
        let deadline = Instant::now() + PATIENCE;
        let url = loop {
            let said = said_in(&log);
            if let Some((_, rest)) = said.split_once("listening on ") {
                break rest.lines().next().unwrap_or_default().to_owned();
            }
            assert!(
                Instant::now() < deadline,
                "checkout {args:?} does not listen; it said:\n{said}"
            );
            thread::sleep(Duration::from_millis(5));
        };
        let client = reqwest::Client::builder()
            .pool_max_idle_per_host(64)
            .build()
            .expect("a client");
        Checkout {
            child: Mutex::new(child),
            url,
            log,
            client,
        }
    }

    /// Where it listens, as in `http://127.0.0.1:34567`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// All that it said so far.
    pub fn log(&self) -> String {
        said_in(&self.log)
    }

    /// Sends one request.
    ///
    /// # Errors
    /// When no whole answer comes.
    pub async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> reqwest::Result<Answer> {
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        if let Some(body) = body {
            request = request.json(&body);
        }
        Answer::read(request.send().await?).await
    }

    /// `POST path` with a JSON body and an idempotency key.
    ///
    /// # Errors
    /// When no whole answer comes.
    pub async fn post_once(&self, key: &str, path: &str, body: Value) -> reqwest::Result<Answer> {
        let request = self.client.post(format!("{}{path}", self.url)).json(&body);
        Answer::read(request.header("idempotency-key", key).send().await?).await
    }

    /// Everything that the page is told until one of the events has this text in it.
    ///
    /// # Panics
    /// When that does not come.
    pub async fn events(&self, until: &str) -> String {
        let request = self.client.get(format!("{}/events", self.url));
        let mut response = request.send().await.expect("an answer");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut said = String::new();
        let whole = |said: &str| {
            said.split_inclusive("\n\n")
                .any(|event| event.contains(until) && event.ends_with("\n\n"))
        };
        while !whole(&said) {
            let next = tokio::time::timeout(PATIENCE, response.chunk()).await;
            match next.unwrap_or_else(|_| panic!("no {until:?} in:\n{said}")) {
                Ok(Some(bytes)) => said += &String::from_utf8_lossy(&bytes),
                end => panic!("{end:?} before {until:?} in:\n{said}"),
            }
        }
        said
    }

    /// `GET path`.
    ///
    /// # Panics
    /// When no whole answer comes.
    pub async fn get(&self, path: &str) -> Answer {
        self.ask(Method::GET, path, None).await.expect("an answer")
    }

    /// `POST path` with a JSON body.
    ///
    /// # Panics
    /// When no whole answer comes.
    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.ask(Method::POST, path, Some(body)).await.expect("an answer")
    }

    /// Sets the stock of an article.
    ///
    /// # Panics
    /// When that is refused.
    pub async fn put(&self, sku: &str, stock: u64) {
        let answer = self
            .ask(
                Method::PUT,
                &format!("/items/{sku}"),
                Some(json!({ "stock": stock })),
            )
            .await;
        assert_eq!(answer.expect("an answer").status, 200);
    }

    /// Buys one piece.
    ///
    /// # Errors
    /// When no whole answer comes.
    pub async fn buy(&self, sku: &str) -> reqwest::Result<Answer> {
        self.ask(
            Method::POST,
            &format!("/items/{sku}/buy"),
            Some(json!({ "quantity": 1 })),
        )
        .await
    }

    /// Stock and sales of an article.
    ///
    /// # Panics
    /// When that is refused.
    pub async fn item(&self, sku: &str) -> (u64, u64) {
        let answer = self.get(&format!("/items/{sku}")).await;
        assert_eq!((answer.status, &answer.body["sku"]), (200, &json!(sku)));
        let number = |name: &str| answer.body[name].as_u64().expect("a number");
        (number("stock"), number("sold"))
    }

    /// Sends a signal; returns from `SIGSTOP` when it stands still.
    ///
    /// # Panics
    /// When it does not run.
    pub fn signal(&self, signal: Signal) {
        let pid = self.child.lock().id();
        signal::kill(
            Pid::from_raw(pid.try_into().expect("process ids are small")),
            signal,
        )
        .expect("it runs");
        let stopped = || {
            // the state follows the program's name, which stands in parentheses and may hold anything
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| rest.starts_with('T'))
        };
        let deadline = Instant::now() + PATIENCE;
        while signal == Signal::SIGSTOP && !stopped() {
            assert!(Instant::now() < deadline, "it does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// When that takes longer than `limit`.
    pub fn ended(&self, limit: Duration) -> ExitStatus {
        let status = ended(&mut self.child.lock(), limit);
        status.unwrap_or_else(|| panic!("it did not end within {limit:?}; it said:\n{}", self.log()))
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "{} said at last:\n{}",
                self.url,
                lines[lines.len().saturating_sub(20)..].join("\n")
            );
        }
    }
}
