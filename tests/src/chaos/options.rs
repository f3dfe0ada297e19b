//! What is said on the command line.

use std::path::PathBuf;

use clap::Parser;

use super::broken::Break;
use super::faults::Kind;
use super::topology::Topology;

/// Tries to break dlock: worker processes lock, work and write under random faults, and their history is checked.
///
/// The exit code is 0 when nothing is wrong with the history and every kind of fault came at least five times while a
/// lock was held and waited for; 1 when something is wrong; 2 when the arguments make no sense; 3 when the run does not
/// count.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "chaos",
    after_help = "chaos check DIR [--json] checks the logs of a run once more."
)]
pub(crate) struct Options {
    /// What the locks are on
    #[arg(long)]
    pub(crate) topology: Topology,
    /// How long faults are made; fractions are fine
    #[arg(long, default_value_t = 2.0, value_parser = minutes)]
    pub(crate) minutes: f64,
    /// How many processes lock
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) processes: u16,
    /// How many tasks lock in each process
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) tasks: u16,
    /// The same seed makes the same plan of faults and of work; random by default
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// The kinds of faults to make; all that the topology knows by default
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub(crate) faults: Vec<Kind>,
    /// One line of JSON on standard output instead of a text for people
    #[arg(long)]
    pub(crate) json: bool,
    /// Breaks the store on purpose, to see that it is found
    #[arg(long = "break", value_name = "HOW")]
    pub(crate) broken: Option<Break>,
    /// In how many seconds after the longest lease each lock must be available once everything is healed
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    pub(crate) margin: u16,
    /// Keeps the logs in this directory; by default they are kept only when something is wrong
    #[arg(long, value_name = "DIR")]
    pub(crate) logs: Option<PathBuf>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if minutes > 0.0 && minutes <= 10_000.0 => Ok(minutes),
        _ => Err("a number of minutes, as in 2 or 0.5".to_owned()),
    }
}

/// Checks the history that a run has left in a directory.
#[derive(Debug, Parser)]
#[command(name = "chaos check")]
pub(crate) struct Check {
    /// The directory
    pub(crate) logs: PathBuf,
    /// One line of JSON on standard output instead of a text for people
    #[arg(long)]
    pub(crate) json: bool,
}
