//! The command line.

use std::collections::HashSet;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;

const EXAMPLES: &str = "\
Examples:
  scheduler --job 'tick 2s echo hello'
      alone, in memory
  scheduler --url redis://localhost --job 'report 1h ./report.sh' --job 'clean 5min ./clean.sh'
      the same line on every machine: one of them runs the jobs

Each job is run by sh, at the beginning of each of its periods, once in the whole fleet; later in a period that had no
leader at its beginning. A run that takes longer than a period skips the periods that begin meanwhile. DLOCK_FENCING_TOKEN is
in its environment. What a job has started in its process group is killed when the job ends, or when its machine no longer
leads. Logs go to stdout, as RUST_LOG says (info by default). Ctrl-C or SIGTERM ends it.";

/// Runs jobs on one machine of a fleet.
#[derive(Debug, Parser)]
#[command(name = "scheduler", version, after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where leaders are elected and runs are noted: memory:// (of this process), redis://…
    #[arg(long, value_name = "URL", default_value = "memory://")]
    pub(crate) url: String,

    /// What is led: machines with the same name and URL are one fleet
    #[arg(long, default_value = "scheduler")]
    pub(crate) name: String,

    /// After a crash of the leader, another one leads within this time
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    pub(crate) lease: Duration,

    /// A job: its name, which no other job has, its period, and its command for the shell
    #[arg(long = "job", value_name = "JOB", required = true)]
    pub(crate) jobs: Vec<Job>,
}

impl Args {
    /// Refuses jobs that would share a record of the ledger: only one of them would run in a period.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut names = HashSet::new();
        match self.jobs.iter().find(|job| !names.insert(&job.name)) {
            Some(Job { name, .. }) => Err(format!("two jobs have the name {name}")),
            None => Ok(()),
        }
    }
}

/// Something to be done again and again.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) name: String,
    pub(crate) every: Duration,
    pub(crate) command: String,
}

impl FromStr for Job {
    type Err = String;

    fn from_str(text: &str) -> Result<Job, String> {
        let mut parts = text.trim().splitn(3, ' ');
        let (Some(name), Some(every), Some(command)) = (parts.next(), parts.next(), parts.next()) else {
            return Err("it is a name, a period and a command, as in 'tick 2s echo hello'".to_owned());
        };
        let every = humantime::parse_duration(every).map_err(|error| format!("the period: {error}"))?;
        if every < Duration::from_millis(100) {
            return Err("the period is less than 100ms".to_owned());
        }
        Ok(Job {
            name: name.to_owned(),
            every,
            command: command.to_owned(),
        })
    }
}
