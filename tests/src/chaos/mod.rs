//! The machine that tries to break dlock, see `docs/chaos.md`.
//!
//! | part | for |
//! |---|---|
//! | `run`, `storm`, `rest` | the course of a run: storms of faults, and quiet times in which all must be well |
//! | `topology`, `stores`, `way`, `faults` | the servers and the network, and what is done to them |
//! | `lineage` | which server has whose data, and what a fail-over lost |
//! | `worker`, `wanted`, `team`, `store` | the processes that lock, what they lock, and their supervisor |
//! | `register` | what the locks protect |
//! | `event`, `log`, `history` | what is written down, and read again |
//! | `check`, `witness`, `report` | what is wrong with it, and which faults count |
//! | `broken` | stores that are broken on purpose |

mod broken;
mod check;
mod clock;
mod event;
mod faults;
mod history;
mod lineage;
mod log;
mod options;
mod progress;
mod register;
mod report;
mod rest;
mod run;
mod store;
mod stores;
mod storm;
mod team;
mod topology;
mod wanted;
mod way;
mod witness;
mod worker;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use anyhow::Context;
use clap::Parser;

use history::History;
use options::{Check, Options};
use report::Report;

/// The program `chaos`.
pub fn main() -> ExitCode {
    let args: Vec<OsString> = env::args_os().collect();
    match args.get(1).and_then(|word| word.to_str()) {
        Some("worker") => worker::main(
            &args
                .get(2)
                .map(|orders| orders.to_string_lossy())
                .unwrap_or_default(),
        ),
        Some("check") => {
            let check = Check::parse_from(args.iter().skip(1));
            failed(look_again(&check))
        }
        _ => failed(start(&Options::parse())),
    }
}

/// Exit code of a run that could not be gone through, which says nothing of dlock.
const NOT_RUN: u8 = 3;

fn failed(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        eprintln!("chaos: {error:#}");
        ExitCode::from(NOT_RUN)
    })
}

fn look_again(check: &Check) -> anyhow::Result<ExitCode> {
    let history = History::load(&check.logs)?;
    Ok(tell(&Report::new(&history, &[]), check.json, &check.logs))
}

fn start(options: &Options) -> anyhow::Result<ExitCode> {
    let known = options.topology.knows();
    let mut kinds = options.faults.clone();
    kinds.sort();
    kinds.dedup();
    if kinds.is_empty() {
        kinds.clone_from(&known);
    }
    if let Some(unknown) = kinds.iter().find(|kind| !known.contains(kind)) {
        let known: Vec<_> = known.iter().map(ToString::to_string).collect();
        let topology = options.topology.name();
        eprintln!(
            "chaos: fault {unknown} cannot be made on {topology}, which knows {}",
            known.join(", ")
        );
        return Ok(ExitCode::from(2));
    }
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    eprintln!("chaos: seed {seed} on {}", options.topology.name());
    let mut dir = Logs::new(options.logs.clone())?;
    let runtime = tokio::runtime::Runtime::new()?;
    let ran = runtime.block_on(run::run(options, seed, &kinds, &dir.path));
    let ran = ran.inspect_err(|_| dir.keep())?;
    eprintln!("chaos: ran for {:.0?}", ran.took);
    let report = Report::new(&ran.history, &ran.crashed);
    if !report.is_clean() {
        dir.keep();
    }
    Ok(tell(&report, options.json, &dir.path))
}

/// Says how it went; the exit code.
fn tell(report: &Report<'_>, json: bool, logs: &Path) -> ExitCode {
    if !report.is_clean() {
        eprintln!("{}", report.evidence(logs));
        eprintln!("the logs are in {}", logs.display());
    }
    match json {
        true => println!("{}", report.json()),
        false => println!("{}", report.summary()),
    }
    let rare = report.too_rare();
    if !rare.is_empty() {
        eprintln!(
            "the run does not count, these came less than {} times while a lock was held and waited for: {}",
            witness::ENOUGH,
            rare.join(", ")
        );
    }
    match (report.is_clean(), rare.is_empty()) {
        (false, _) => ExitCode::FAILURE,
        (true, false) => ExitCode::from(3),
        (true, true) => ExitCode::SUCCESS,
    }
}

/// The directory of the logs: one that was asked for stays, another one only if it is needed.
struct Logs {
    path: PathBuf,
    temporary: Option<tempfile::TempDir>,
}

impl Logs {
    fn new(asked: Option<PathBuf>) -> anyhow::Result<Logs> {
        if let Some(path) = asked {
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
            let mut files = fs::read_dir(&path)?;
            anyhow::ensure!(files.next().is_none(), "{} is not empty", path.display());
            let temporary = None;
            return Ok(Logs { path, temporary });
        }
        let temporary = tempfile::Builder::new().prefix("dlock-chaos-").tempdir()?;
        Ok(Logs {
            path: temporary.path().to_owned(),
            temporary: Some(temporary),
        })
    }

    fn keep(&mut self) {
        if let Some(temporary) = self.temporary.take() {
            let _ = temporary.keep();
        }
    }
}
