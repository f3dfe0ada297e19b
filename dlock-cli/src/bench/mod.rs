//! `dlock bench`: measures what a store achieves from here, with the library that its users use.
//!
//! | file | for |
//! |---|---|
//! | `args` | what is asked for |
//! | `team`, `messages` | the processes, and what they tell each other |
//! | `process` | one process's part |
//! | `workloads` | what its tasks do |
//! | `tally`, `usage`, `server` | what is counted, of them, of the process and of the server |
//! | `report`, `plot`, `figures`, `progress` | what is shown |

mod args;
mod figures;
mod messages;
mod plot;
mod process;
mod progress;
mod report;
mod server;
mod tally;
mod team;
mod usage;
mod workloads;

use std::path::Path;
use std::process::ExitCode;

use tokio_util::sync::CancellationToken;

pub(crate) use args::BenchArgs;
use args::{Output, Plan};
use messages::{Answer, Outcome};
use process::Around;
use report::Report;
use team::Team;

use crate::runtime::block_on_threads;

/// `dlock bench`.
pub(crate) fn run(url: String, args: BenchArgs) -> Result<ExitCode, String> {
    let (plan, output) = args.plan(url)?;
    block_on_threads(plan.threads, lead(plan, output))?
}

/// One of the other processes, which the first one starts.
pub(crate) fn run_worker() -> Result<ExitCode, String> {
    // The plan has the number of threads, so it is read before they are started.
    let plan = team::read_plan()?;
    block_on_threads(plan.threads, follow(plan))?
}

async fn lead(plan: Plan, output: Output) -> Result<ExitCode, String> {
    // Checked before measuring, not after; the chart of the last time stays until there is another.
    if let Some(path) = &output.plot {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
        file.map_err(|error| unwritable(path, &error))?;
    }
    let stop = CancellationToken::new();
    tokio::spawn(end_on_signal(stop.clone()));
    let mut team = Team::start(&plan, &stop)?;
    let measured = process::measure(&plan, &mut team, &stop).await;
    let others = match measured {
        Ok(_) => team.outcomes().await,
        Err(_) => Ok(Vec::new()),
    };
    // Whatever failed, they release what they hold.
    team.dismiss().await;
    let (mine, around) = measured?;
    let mut outcomes = vec![mine];
    outcomes.extend(others?);
    show(&plan, &outcomes, around, stop.is_cancelled(), output)
}

fn show(
    plan: &Plan,
    outcomes: &[Outcome],
    around: Around,
    interrupted: bool,
    output: Output,
) -> Result<ExitCode, String> {
    let report = Report::new(plan, outcomes, around, interrupted);
    if interrupted && report.is_empty() {
        return Err("it was ended before anything was measured".to_owned());
    }
    if let Some(path) = &output.plot {
        std::fs::write(path, report.plot()).map_err(|error| unwritable(path, &error))?;
    }
    if output.json {
        let json = serde_json::to_string(&report).map_err(|error| error.to_string())?;
        say!("{json}");
    } else {
        say!("{report}");
    }
    // A script would compare the zeros with other figures.
    if report.is_empty() {
        return Err("nothing was measured: no acquire succeeded".to_owned());
    }
    Ok(ExitCode::SUCCESS)
}

fn unwritable(path: &Path, error: &std::io::Error) -> String {
    format!("--plot: {} cannot be written: {error}", path.display())
}

async fn follow(plan: Plan) -> Result<ExitCode, String> {
    let stop = CancellationToken::new();
    // Ctrl-C at a terminal reaches all processes; the leader decides.
    tokio::spawn(async { while tokio::signal::ctrl_c().await.is_ok() {} });
    let mut team = team::join(stop.clone());
    let answer = match process::measure(&plan, &mut team, &stop).await {
        Ok((outcome, _)) => Answer::Done(Box::new(outcome)),
        Err(why) => Answer::Failed(why),
    };
    team::say(&answer)?;
    Ok(ExitCode::SUCCESS)
}

/// The first signal ends the measurement in good order, the second one at once.
async fn end_on_signal(stop: CancellationToken) {
    signal().await;
    stop.cancel();
    signal().await;
    std::process::exit(130);
}

#[cfg(unix)]
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        },
        Err(_) => drop(tokio::signal::ctrl_c().await),
    }
}

#[cfg(not(unix))]
async fn signal() {
    let _ = tokio::signal::ctrl_c().await;
}
