//! `dlock bench`: measures what a store achieves from here, with the library that its users use.
//!
//! | file | for |
//! |---|---|
//! | `args` | what is asked for |
//! | `team`, `messages` | the processes, and what they tell each other |
//! | `signals` | what ends them |
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
mod signals;
mod tally;
mod team;
mod usage;
mod workloads;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub(crate) use args::BenchArgs;
use args::{Output, Plan};
use messages::{Answer, Outcome};
use process::Around;
use report::Report;
use team::Team;

use crate::runtime::block_on_threads;

/// The exit status of an end without a result.
const INTERRUPTED: u8 = 130;
/// How long after a signal the next one is the same: timeout(1) sends its signal to the process and to its group.
const AT_ONCE: Duration = Duration::from_millis(500);
/// How long a measurement that a signal has ended waits for a terminal that takes no output.
const SHOWN_WITHIN: Duration = Duration::from_secs(2);

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
    let Some(path) = output.plot.clone() else {
        return measure(plan, output).await;
    };
    // Checked before measuring, not after; the chart of the last time stays until there is another.
    let is_new = match File::create_new(&path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let old = File::options().append(true).create(true).open(&path);
            old.map(|_| false)
        }
        created => created.map(|_| true),
    };
    let is_new = is_new.map_err(|error| unwritable(&path, &error))?;
    let ended = measure(plan, output).await;
    if is_new && fs::metadata(&path).is_ok_and(|chart| chart.len() == 0) {
        let _ = fs::remove_file(&path);
    }
    ended
}

async fn measure(plan: Plan, output: Output) -> Result<ExitCode, String> {
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
    let interrupted = stop.is_cancelled();
    // In a thread that may wait for the terminal: a signal ends the others.
    let shown = tokio::task::spawn_blocking(move || show(&plan, &outcomes, around, interrupted, output));
    let ended = async {
        stop.cancelled().await;
        tokio::time::sleep(SHOWN_WITHIN).await;
    };
    tokio::select! {
        shown = shown => shown.map_err(|error| error.to_string())?,
        () = ended => Ok(ExitCode::from(INTERRUPTED)),
    }
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
        fs::write(path, report.plot()).map_err(|error| unwritable(path, &error))?;
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
    // Ctrl-C at a terminal, and timeout(1), reach all processes; the leader decides.
    tokio::spawn(async {
        loop {
            signals::asked_to_end().await;
        }
    });
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
    signals::asked_to_end().await;
    stop.cancel();
    tokio::time::sleep(AT_ONCE).await;
    signals::asked_to_end().await;
    std::process::exit(INTERRUPTED.into());
}
