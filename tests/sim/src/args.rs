//! What the program is asked to do.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use dlock::sim::breaks;

use crate::batch::{Batch, Mode};
use crate::trace::Keep;

/// Runs dlock's own code in simulated worlds, each of which follows from a seed.
#[derive(Debug, Parser)]
#[command(after_help = "Exit code: 0, 1 when a promise was broken, 2 for wrong arguments.")]
pub(crate) struct Args {
    /// The seed of the first world; each further world has the next one.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// How many worlds.
    #[arg(long, conflicts_with = "seconds")]
    worlds: Option<u64>,
    /// For how long to run worlds [default: 10].
    #[arg(long)]
    seconds: Option<u64>,
    /// Which sort of worlds.
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    pub(crate) runtimes: Mode,
    /// Takes a rule of the library back: see --list-breaks.
    #[arg(long = "break", value_name = "RULE", value_parser = rules())]
    pub(crate) broken: Option<String>,
    /// Prints the rules that --break takes back, and does nothing else.
    #[arg(long)]
    pub(crate) list_breaks: bool,
    /// Prints the events of the worlds.
    #[arg(long)]
    pub(crate) trace: bool,
    /// Makes the world of the first violation as small as it can, and tells its story.
    #[arg(long)]
    pub(crate) shrink: bool,
    /// For how many seconds to shrink.
    #[arg(long, default_value_t = 20)]
    pub(crate) shrink_for: u64,
    /// Writes the shrunk plan to a file.
    #[arg(long, value_name = "FILE", requires = "shrink")]
    pub(crate) save: Option<PathBuf>,
    /// Runs the world of a plan, and none that is drawn.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["worlds", "seconds"])]
    pub(crate) plan: Option<PathBuf>,
    /// Runs all kept plans of a directory, and compares them with what they must show [default: tests/sim/plans].
    #[arg(long, value_name = "DIR", num_args = 0..=1, conflicts_with_all = ["plan", "worlds", "seconds"])]
    pub(crate) plans: Option<Option<PathBuf>>,
    /// Prints the plan of the first world, and runs none.
    #[arg(long)]
    pub(crate) print_plan: bool,
    /// Runs each world twice and compares the traces.
    #[arg(long)]
    pub(crate) twice: bool,
    /// Worlds at a time [default: as many as there are processors].
    #[arg(long)]
    threads: Option<usize>,
    /// Goes on after a violation.
    #[arg(long)]
    keep_going: bool,
    /// Ends with one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

fn rules() -> PossibleValuesParser {
    PossibleValuesParser::new(breaks::RULES.iter().map(|rule| rule.name))
}

impl Args {
    /// The rule that is taken back.
    pub(crate) fn rule(&self) -> Option<&'static str> {
        let name = self.broken.as_deref()?;
        Some(breaks::RULES.iter().find(|rule| rule.name == name)?.name)
    }

    pub(crate) fn batch(&self) -> Batch {
        let default = || Duration::from_secs(self.seconds.unwrap_or(10));
        let all = || std::thread::available_parallelism().map_or(1, usize::from);
        Batch {
            seed: self.seed,
            worlds: self.worlds,
            limit: self.worlds.is_none().then(default),
            mode: self.runtimes,
            threads: if self.trace {
                1
            } else {
                self.threads.unwrap_or_else(all)
            },
            broken: self.rule(),
            keep: if self.trace { Keep::Lines } else { Keep::Nothing },
            twice: self.twice,
            goes_on: self.keep_going,
        }
    }

    /// The command that shows the world of a seed once more.
    pub(crate) fn again(&self, seed: u64) -> String {
        let mode = match self.runtimes {
            Mode::One => " --runtimes one",
            Mode::Each => " --runtimes each",
            Mode::Both => "",
        };
        let broken = self.broken.as_deref();
        let broken = broken.map_or_else(String::new, |rule| format!(" --break {rule}"));
        match &self.plan {
            Some(plan) => format!("tests/sim/run --plan {}{broken} --shrink", plan.display()),
            None => format!("tests/sim/run --seed {seed} --worlds 1{mode}{broken} --shrink"),
        }
    }
}
