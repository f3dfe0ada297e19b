//! One process that is measured.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use serde::de::DeserializeOwned;

/// How a driver says that it does not know a workload.
const UNKNOWN_WORKLOAD: i32 = 3;
/// How long any of them may be silent.
const PATIENCE: Duration = Duration::from_secs(180);
/// The kernel counts CPU in these.
const TICKS_PER_SECOND: f64 = 100.0;

/// A process that is measured; ended with this.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    complaint: Arc<Mutex<String>>,
}

/// What it has used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) cpu_s: f64,
    pub(crate) rss_mb: f64,
}

impl Process {
    pub(crate) fn start(name: &str, command: &Command) -> anyhow::Result<Process> {
        // It must not outlive this process, whatever becomes of that.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{name} cannot be started"))?;
        let output = child.stdout.take().context("it has an output")?;
        let complaints = child.stderr.take().context("it has an error output")?;
        let complaint = Arc::<Mutex<String>>::default();
        let first = complaint.clone();
        thread::spawn(move || {
            for line in BufReader::new(complaints).lines().map_while(Result::ok) {
                eprintln!("{line}");
                let mut complaint = first.lock().expect("no task panics with it");
                if complaint.is_empty() {
                    *complaint = line;
                }
            }
        });
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Process {
            name: name.to_owned(),
            input: child.stdin.take(),
            child,
            lines,
            complaint,
        })
    }

    /// The next line; an error when it ends instead.
    fn line(&mut self) -> anyhow::Result<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => bail!("{} says nothing", self.name),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait()?;
                if status.code() == Some(UNKNOWN_WORKLOAD) {
                    bail!("{} cannot do that", self.name);
                }
                // what it wrote may still be on its way
                thread::sleep(Duration::from_millis(100));
                match &*self.complaint.lock().expect("no task panics with it") {
                    complaint if complaint.is_empty() => bail!("{} ended with {status}", self.name),
                    complaint => bail!("{complaint}"),
                }
            }
        }
    }

    pub(crate) fn expect(&mut self, word: &str) -> anyhow::Result<()> {
        match self.line()? {
            line if line == word => Ok(()),
            line => Err(anyhow!("{} says {line:?} instead of {word}", self.name)),
        }
    }

    pub(crate) fn go(&mut self) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("it was started with an input")?;
        writeln!(input, "go").with_context(|| format!("{} is gone", self.name))
    }

    pub(crate) fn answer<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{} says {line:?}", self.name))
    }

    pub(crate) fn usage(&self) -> anyhow::Result<Usage> {
        let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", self.child.id()));
        let stat = of("stat")?;
        // the name of the program stands in brackets and may have any form
        let (_, numbers) = stat.rsplit_once(')').context("its stat has a name")?;
        let ticks = numbers.split_whitespace().skip(11).take(2);
        let ticks: f64 = ticks.filter_map(|number| number.parse::<f64>().ok()).sum();
        let status = of("status")?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = kib.and_then(|text| text.split_whitespace().next());
        let kib: f64 = kib.context("its status has a size")?.parse()?;
        Ok(Usage {
            cpu_s: ticks / TICKS_PER_SECOND,
            rss_mb: kib * 1024.0 / 1e6,
        })
    }

    /// Ends it in good order.
    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        drop(self.input.take());
        let begin = Instant::now();
        while begin.elapsed() < PATIENCE {
            if self.child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        bail!("{} does not end", self.name)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
