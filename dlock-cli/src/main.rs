//! The `dlock` command: runs a command under a lock, inspects the locks of a store, and measures the store.

#![deny(clippy::print_stderr, clippy::print_stdout)]

#[macro_use]
mod output;

mod bench;
mod doctor;
mod explain;
mod look;
mod pages;
#[cfg(unix)]
mod run;
mod runtime;
mod screen;
mod stores;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Run a command under a lock; inspect the locks of a store, and measure the store.
#[derive(Debug, Parser)]
#[command(name = "dlock", version, about, long_about = None)]
struct Args {
    /// The store, as in redis://localhost:6379.
    ///
    /// Put a password into the variable, where the list of processes does not show it.
    #[arg(
        long,
        env = "DLOCK_URL",
        default_value = "redis://localhost",
        hide_env_values = true,
        global = true
    )]
    url: OsString,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(unix)]
    Run(Box<run::RunArgs>),
    /// Becomes the command of `run`; started by it.
    #[cfg(unix)]
    #[command(hide = true)]
    RunStart(run::StartArgs),
    /// Watches over `run`; started by it.
    #[cfg(unix)]
    #[command(hide = true)]
    RunKeeper,
    #[command(flatten)]
    Look(look::Look),
    Doctor(doctor::DoctorArgs),
    /// Measure how many locks per second the store grants from here, and how fast.
    Bench(Box<bench::BenchArgs>),
    /// One of the processes of a measurement; started by `bench`.
    #[command(hide = true)]
    BenchWorker,
    /// Explain an error by its code or its name, as in E0007 or Refused; all errors without one. Exit status: 0, or 2 for
    /// an unknown error.
    Explain {
        /// The code at the end of an error, or the name of a `dlock::Error`, in any case.
        error: Option<String>,
        /// One JSON object per error, one per line.
        #[arg(long)]
        json: bool,
    },
    /// Print the completions for a shell, as in `dlock completions bash`.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of `dlock`, or of one of its commands, as in `dlock man run | man -l -`.
    Man {
        /// The command, as in `record show`.
        command: Vec<String>,
    },
}

fn main() -> ExitCode {
    carry_out(Args::parse()).unwrap_or_else(|error| {
        output::print_error(format_args!("dlock: {error}"));
        ExitCode::from(output::FAILED)
    })
}

fn carry_out(args: Args) -> Result<ExitCode, String> {
    // Not all commands need it, and the variable may have anything.
    let url = || {
        args.url
            .into_string()
            .map_err(|_| "the URL (--url, DLOCK_URL) is not UTF-8".to_owned())
    };
    match args.command {
        #[cfg(unix)]
        Command::Run(run) => run::run(&url()?, *run),
        #[cfg(unix)]
        Command::RunStart(start) => Ok(run::start(start)),
        #[cfg(unix)]
        Command::RunKeeper => Ok(run::keep()),
        Command::Bench(bench) => bench::run(url()?, *bench),
        Command::BenchWorker => bench::run_worker(),
        Command::Look(look) => look::run(url()?, look),
        Command::Doctor(doctor) => doctor::run(url()?, &doctor),
        Command::Explain { error, json } => explain::explain(error.as_deref(), json),
        Command::Completions { shell } => pages::completions(Args::command(), shell),
        Command::Man { command } => pages::man(Args::command(), &command),
    }
}
