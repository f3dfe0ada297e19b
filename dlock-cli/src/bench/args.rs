//! The arguments of `dlock bench`, and their checks.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::stores::is_memory;

/// Measures what a store achieves from here: acquisitions and releases per second, the latency of an acquire, how
/// fairly the lock is shared, and what it costs client and server.
///
/// It uses its own locks, whose names begin with a random prefix for each run, and leaves none behind (of --kind fenced,
/// the counter of each key): also when Ctrl-C ends it, which prints the results so far. Every figure is of this machine,
/// this network and this server while nothing else uses them; compare figures that were taken in turns. docs/bench.md
/// says how each is taken.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The operation to repeat.
    #[arg(long, value_enum)]
    workload: Workload,
    /// Tasks in each process [default: 1; parallel and held 64, contended 16].
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,
    /// Processes that run the same workload at the same time, including this one.
    #[arg(long, value_name = "P", default_value_t = 1)]
    processes: usize,
    /// How long to measure, in seconds [default: 5; held 30, when all are taken].
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// How long to run before measuring, in seconds [default: 1].
    #[arg(long, value_name = "S")]
    warmup: Option<f64>,
    /// Different keys, over all processes [default: one for each task; contended 1, held 100000].
    #[arg(long, value_name = "N")]
    keys: Option<u64>,
    /// The kind of lock [default: lock].
    #[arg(long, value_enum, value_name = "KIND")]
    kind: Option<KindArg>,
    /// Drop the guard, which releases the lock in the background, instead of waiting for the release.
    #[arg(long)]
    no_await_release: bool,
    /// How many times a process hands a lock off among its own tasks before it releases it to the store [default: the
    /// library's, 4096].
    #[arg(long, value_name = "N")]
    local_handoffs: Option<u32>,
    /// The lease, which is renewed, as in 10s [default: the URL's, 30s].
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    lease: Option<Duration>,
    /// The prefix of the locks' names. Runs with the same prefix share their locks.
    #[arg(long)]
    prefix: Option<String>,
    /// Worker threads of each process's runtime; 1 is a single-threaded runtime [default: the number of processors,
    /// like `#[tokio::main]`].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Draw the distribution of the times as SVG.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// The operation to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Workload {
    /// One task acquires a lock and releases it.
    Sequential,
    /// Many tasks do so at the same time, each with its own locks.
    Parallel,
    /// Many tasks want the same lock.
    Contended,
    /// One client releases a lock that another one waits for: how soon does that one have it?
    Wakeup,
    /// Many locks are acquired, kept for a while and released.
    Held,
    /// A lock is acquired again inside the code that holds it.
    Reentrant,
    /// Requests go through the lock layer, around a service that does nothing.
    Layer,
    /// Requests go through the idempotency layer, each twice: a first run and a replay.
    Idempotency,
}

impl Workload {
    pub(super) fn name(self) -> &'static str {
        match self {
            Workload::Sequential => "sequential",
            Workload::Parallel => "parallel",
            Workload::Contended => "contended",
            Workload::Wakeup => "wakeup",
            Workload::Held => "held",
            Workload::Reentrant => "reentrant",
            Workload::Layer => "layer",
            Workload::Idempotency => "idempotency",
        }
    }

    fn tasks(self) -> usize {
        match self {
            Workload::Parallel | Workload::Held => 64,
            Workload::Contended => 16,
            _ => 1,
        }
    }
}

/// The kinds of locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum KindArg {
    /// One holder at a time.
    Lock,
    /// One holder at a time, in arrival order.
    Fair,
    /// Many readers at a time.
    Read,
    /// One writer at a time.
    Write,
    /// One holder at a time, with the fencing tokens of Redisson's fenced lock, whose counters stay behind.
    Fenced,
}

impl From<KindArg> for dlock::LockKind {
    fn from(kind: KindArg) -> dlock::LockKind {
        match kind {
            KindArg::Lock => dlock::LockKind::Mutex,
            KindArg::Fair => dlock::LockKind::Fair,
            KindArg::Read => dlock::LockKind::Read,
            KindArg::Write => dlock::LockKind::Write,
            KindArg::Fenced => dlock::LockKind::Fenced,
        }
    }
}

/// The part of one process in a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Plan {
    /// May contain a password, so it is passed to the other processes by their standard input.
    pub(super) url: String,
    pub(super) workload: Workload,
    /// In each process.
    pub(super) tasks: usize,
    pub(super) processes: usize,
    /// Which of the processes this is; 0 is the process that was started by the user.
    pub(super) process: usize,
    pub(super) measure: Duration,
    pub(super) warmup: Duration,
    /// Over all processes.
    pub(super) keys: u64,
    pub(super) kind: KindArg,
    pub(super) await_release: bool,
    pub(super) local_handoffs: Option<u32>,
    pub(super) lease: Option<Duration>,
    pub(super) prefix: String,
    pub(super) threads: usize,
}

/// Where the result goes.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) json: bool,
    pub(super) plot: Option<PathBuf>,
}

const MOST_TASKS: usize = 100_000;
const MOST_PROCESSES: usize = 64;
const MOST_KEYS: u64 = 100_000_000;
const MOST_THREADS: usize = 1024;
const LONGEST: f64 = 86_400.0;

impl BenchArgs {
    /// Returns the plan, or what is wrong with the arguments.
    pub(super) fn plan(self, url: String) -> Result<(Plan, Output), String> {
        let workload = self.workload;
        let tasks = within("--tasks", self.tasks.unwrap_or(workload.tasks()), 1, MOST_TASKS)?;
        let processes = within("--processes", self.processes, 1, MOST_PROCESSES)?;
        let all_tasks = tasks * processes;
        if all_tasks > MOST_TASKS {
            return Err(format!(
                "{tasks} tasks in each of {processes} processes are more than {MOST_TASKS}"
            ));
        }
        if is_memory(&url) && processes > 1 {
            return Err("--processes: memory:// is in one process, others cannot see it".to_owned());
        }
        self.check_options()?;
        let keys = self.keys.unwrap_or(match workload {
            Workload::Contended => 1,
            Workload::Held => 100_000,
            // Both sides of a wake-up are one task of their process, on one key.
            Workload::Wakeup => tasks as u64,
            _ => all_tasks as u64,
        });
        within("--keys", keys, 1, MOST_KEYS)?;
        match workload {
            Workload::Sequential if tasks > 1 => {
                return Err(
                    "--tasks: sequential is one task, parallel and contended have several".to_owned(),
                );
            }
            Workload::Sequential | Workload::Parallel if keys < all_tasks as u64 => {
                return Err(format!(
                    "--keys: {all_tasks} tasks with keys of their own need at least as many keys, not {keys}; \
                     contended has tasks that share them"
                ));
            }
            Workload::Wakeup if processes > 2 => {
                return Err("--processes: wakeup takes at most two of them".to_owned());
            }
            Workload::Wakeup if self.kind == Some(KindArg::Read) => {
                return Err("--kind: readers do not wait for one another".to_owned());
            }
            _ => {}
        }
        let processors = || {
            std::thread::available_parallelism()
                .map_or(1, usize::from)
                .min(MOST_THREADS)
        };
        let threads = within(
            "--threads",
            self.threads.unwrap_or_else(processors),
            1,
            MOST_THREADS,
        )?;
        let seconds = self.seconds.unwrap_or(match workload {
            Workload::Held => 30.0,
            _ => 5.0,
        });
        let plan = Plan {
            url: with_name(url),
            workload,
            tasks,
            processes,
            process: 0,
            measure: seconds_within("--seconds", seconds, 0.01)?,
            warmup: seconds_within("--warmup", self.warmup.unwrap_or(1.0), 0.0)?,
            keys,
            kind: self.kind.unwrap_or(KindArg::Lock),
            await_release: !self.no_await_release,
            local_handoffs: self.local_handoffs,
            lease: self.lease,
            prefix: self
                .prefix
                .unwrap_or_else(|| format!("dlock-bench:{:016x}:", fastrand::u64(..))),
            threads,
        };
        let output = Output {
            json: self.json,
            plot: self.plot,
        };
        Ok((plan, output))
    }
}

impl BenchArgs {
    /// An option without effect on a workload is a mistake.
    fn check_options(&self) -> Result<(), String> {
        use Workload::{Contended, Held, Idempotency, Layer, Parallel, Sequential};
        let workload = self.workload;
        let given = [
            (
                "--keys",
                self.keys.is_some(),
                matches!(workload, Sequential | Parallel | Contended | Held),
                "it has one key for each task",
            ),
            (
                "--kind",
                self.kind.is_some(),
                !matches!(workload, Layer | Idempotency),
                "the layer has no choice",
            ),
            (
                "--no-await-release",
                self.no_await_release,
                !matches!(workload, Layer | Idempotency),
                "the layer has no choice",
            ),
            (
                "--local-handoffs",
                self.local_handoffs.is_some(),
                !matches!(workload, Layer | Idempotency),
                "the layer has no choice",
            ),
            (
                "--lease",
                self.lease.is_some(),
                workload != Idempotency,
                "it takes no locks",
            ),
            (
                "--warmup",
                self.warmup.is_some(),
                workload != Held,
                "what it does is done once",
            ),
        ];
        for (option, is_given, fits, why) in given {
            if is_given && !fits {
                return Err(format!("{option} does not go with {}: {why}", workload.name()));
            }
        }
        Ok(())
    }
}

/// `memory://` is a new store for each client; under a name they share it.
fn with_name(url: String) -> String {
    match url.split_once("://") {
        Some((_, rest)) if is_memory(&url) && (rest.is_empty() || rest.starts_with(['?', '/'])) => {
            format!("memory://dlock-bench-{:016x}{rest}", fastrand::u64(..))
        }
        _ => url,
    }
}

fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: T, least: T, most: T) -> Result<T, String> {
    if value < least || value > most {
        return Err(format!("{name}: {value} is not between {least} and {most}"));
    }
    Ok(value)
}

fn seconds_within(name: &str, seconds: f64, least: f64) -> Result<Duration, String> {
    // Also rejects NaN.
    if !(least..=LONGEST).contains(&seconds) {
        return Err(format!(
            "{name}: {seconds} is not between {least} and {LONGEST} seconds"
        ));
    }
    Ok(Duration::from_secs_f64(seconds))
}

impl Plan {
    /// The number of tasks of all processes.
    pub(super) fn all_tasks(&self) -> usize {
        self.tasks * self.processes
    }

    /// Whether the store is in this process.
    pub(super) fn is_memory(&self) -> bool {
        is_memory(&self.url)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_lock_can_be_measured() {
        let kinds = KindArg::value_variants().iter();
        let kinds: Vec<_> = kinds.map(|kind| dlock::LockKind::from(*kind)).collect();
        assert_eq!(kinds, dlock::LockKind::ALL);
    }
}
