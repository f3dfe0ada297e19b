//! How the rate grows with the tasks: every Rust library on the runtime that services have, and on one thread.

use std::fs;
use std::path::Path;
use std::thread;

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::measure::{Benched, Driven, Options};
use crate::process::Process;
use crate::results::{self, Median};
use crate::server::Server;

/// How many tasks there are, each with a lock of its own.
pub const TASKS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 256];
/// How long each runs before it is measured, in seconds.
const WARMUP: f64 = 0.4;

/// What is measured at each number of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// rslock.
    Rslock,
    /// The two scripts of a lock through the `redis` crate, and nothing else.
    Scripts,
    /// This library, each release awaited.
    Dlock,
    /// This library, guards dropped.
    DlockUnawaited,
}

impl Line {
    /// All, in the order in which they are shown.
    pub const ALL: [Line; 4] = [Line::Rslock, Line::Scripts, Line::Dlock, Line::DlockUnawaited];

    /// As it is written in the results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Line::Rslock => "rslock",
            Line::Scripts => "scripts",
            Line::Dlock => "dlock",
            Line::DlockUnawaited => "dlock-unawaited",
        }
    }

    /// As people read it.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Line::Rslock => "rslock",
            Line::Scripts => "two bare scripts",
            Line::Dlock => "dlock",
            Line::DlockUnawaited => "dlock, release not awaited",
        }
    }

    /// Whether it is this library.
    #[must_use]
    pub fn is_dlock(self) -> bool {
        matches!(self, Line::Dlock | Line::DlockUnawaited)
    }
}

/// The curves on one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// As in `Redis 7.0.15`.
    pub server: String,
    /// The day, as in `2026-01-31`.
    pub day: String,
    /// Cores of the machine, which the server, the clients and nothing else used.
    pub cores: usize,
    /// How often each point was measured, in turns.
    pub rounds: u32,
    /// For how long.
    pub seconds: f64,
    /// Remarks, such as other load on the machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// In the order in which they were measured.
    pub points: Vec<Point>,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// The round, from 1.
    pub round: u32,
    /// As in [`Line::name`].
    pub line: String,
    /// Worker threads; 1 is a runtime on one thread.
    pub threads: usize,
    /// Tasks, each with a lock of its own.
    pub tasks: usize,
    /// Acquisitions with their releases.
    pub pairs_per_s: f64,
    /// CPU of the client for a pair, kernel included, in µs.
    pub client_us: f64,
    /// CPU of the server for a pair, kernel included, in µs.
    pub server_us: f64,
    /// Time for a pair in scripts and in the commands that dlock sends instead, by the server's own count, in µs.
    pub script_us: f64,
    /// Acquisitions and releases that failed.
    pub errors: u64,
}

impl Curve {
    /// Reads a file that [`Curve::write`] has written.
    ///
    /// # Errors
    /// When it cannot be read, or is no such file.
    pub fn read(path: &Path) -> anyhow::Result<Curve> {
        results::read(path)
    }

    /// Writes it, one line for each measurement.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let points: Result<Vec<_>, _> = self.points.iter().map(serde_json::to_string).collect();
        let note = match &self.note {
            Some(note) => format!("  \"note\": {},\n", serde_json::to_string(note)?),
            None => String::new(),
        };
        let text = format!(
            "{{\n  \"server\": {},\n  \"day\": {},\n  \"cores\": {},\n  \"rounds\": {},\n  \"seconds\": {},\n{note}  \
             \"points\": [\n    {}\n  ]\n}}\n",
            serde_json::to_string(&self.server)?,
            serde_json::to_string(&self.day)?,
            self.cores,
            self.rounds,
            self.seconds,
            points?.join(",\n    ")
        );
        fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
    }

    /// The numbers of worker threads, those of services first.
    #[must_use]
    pub fn runtimes(&self) -> Vec<usize> {
        let mut all: Vec<usize> = self.points.iter().map(|point| point.threads).collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        all.dedup();
        all
    }

    /// The median over the rounds of a value of this point.
    pub fn median(
        &self,
        line: Line,
        threads: usize,
        tasks: usize,
        value: impl Fn(&Point) -> f64,
    ) -> Option<Median> {
        let here = self
            .points
            .iter()
            .filter(|point| point.line == line.name() && point.threads == threads && point.tasks == tasks);
        Median::of(here.map(value).collect())
    }
}

/// Measures in turns, and reports each point.
///
/// # Errors
/// When the server cannot be used, or one of the libraries fails.
pub fn measure(options: &Options, mut tell: impl FnMut(&Point)) -> anyhow::Result<Curve> {
    let server = Server::start(&options.server)?;
    let cores = thread::available_parallelism()?.get();
    let mut curve = Curve {
        server: server.version()?,
        day: options.day.clone(),
        cores,
        rounds: options.rounds,
        seconds: options.seconds,
        note: None,
        points: Vec::new(),
    };
    for round in 1..=options.rounds {
        for threads in [cores.max(2), 1] {
            for tasks in TASKS {
                let mut lines = Line::ALL;
                // another one comes first each time
                lines.rotate_left(round as usize % Line::ALL.len());
                for line in lines {
                    let mut point = one(options, &server, line, threads, tasks)
                        .with_context(|| format!("{} with {tasks} tasks", line.name()))?;
                    point.round = round;
                    tell(&point);
                    curve.points.push(point);
                    server.flush()?;
                }
            }
        }
    }
    Ok(curve)
}

fn one(
    options: &Options,
    server: &Server,
    line: Line,
    threads: usize,
    tasks: usize,
) -> anyhow::Result<Point> {
    let point = Point {
        line: line.name().to_owned(),
        threads,
        tasks,
        ..Point::default()
    };
    let numbers = [tasks as f64, options.seconds, WARMUP].map(|number| number.to_string());
    let [tasks, seconds, warmup] = &numbers;
    let (url, prefix) = (server.url(), format!("curve:{}:{threads}:{tasks}:", line.name()));
    let threads = threads.to_string();
    if line.is_dlock() {
        let mut args = vec!["bench", "--json", "--workload", "parallel", "--url", &url];
        args.extend(["--threads", &threads, "--tasks", tasks, "--prefix", &prefix]);
        args.extend(["--seconds", seconds, "--warmup", warmup]);
        if line == Line::DlockUnawaited {
            args.push("--no-await-release");
        }
        return benched(point, answer(&options.dlock, line, &args)?);
    }
    let workload = match line {
        Line::Scripts => "scripts",
        _ => "parallel",
    };
    let program = options.drivers.join("rslock/target/release/dlock-peers-rslock");
    let args = [workload, &url, tasks, seconds, warmup, &prefix, "0", &threads];
    driven(point, server, &program, line, &args)
}

/// Starts a program with these arguments.
fn started(program: &Path, line: Line, args: &[&str]) -> anyhow::Result<Process> {
    let mut command = std::process::Command::new(program);
    command.args(args);
    Process::start(line.name(), &command)
}

fn answer<T: DeserializeOwned>(program: &Path, line: Line, args: &[&str]) -> anyhow::Result<T> {
    let mut process = started(program, line, args)?;
    let answer = process.answer()?;
    process.end()?;
    Ok(answer)
}

fn benched(point: Point, answer: Benched) -> anyhow::Result<Point> {
    let pairs = answer.pairs_per_s * answer.seconds;
    let server = "the server says nothing of itself";
    Ok(Point {
        pairs_per_s: answer.pairs_per_s.round(),
        client_us: tenths(
            answer
                .client_cpu_s
                .context("the CPU of the client is not known")?
                * 1e6
                / pairs,
        ),
        server_us: tenths(answer.server_us_per_pair.context(server)?),
        script_us: tenths(answer.server_script_us_per_pair.context(server)?),
        errors: answer.errors,
        ..point
    })
}

fn driven(point: Point, server: &Server, program: &Path, line: Line, args: &[&str]) -> anyhow::Result<Point> {
    let mut process = started(program, line, args)?;
    process.expect("ready")?;
    let (cpu, before) = (process.usage()?.cpu_s, server.usage()?);
    process.go()?;
    process.expect("done")?;
    let (cpu, after) = (process.usage()?.cpu_s - cpu, server.usage()?);
    let answer: Driven = process.answer()?;
    process.end()?;
    let pairs = answer.task_pairs.iter().sum::<u64>() as f64;
    Ok(Point {
        pairs_per_s: (pairs / answer.seconds).round(),
        client_us: tenths(cpu * 1e6 / pairs),
        server_us: tenths((after.cpu_s - before.cpu_s) * 1e6 / pairs),
        script_us: tenths((after.script_s - before.script_s) * 1e6 / pairs),
        errors: answer.errors,
        ..point
    })
}

fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
