//! The `dlock` command: runs a command under a lock, and looks at the locks of a store and measures what it gives, for
//! people.

mod bench;
#[cfg(unix)]
mod run;
mod show;
mod stores;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use dlock::Error;

/// Run a command under a lock; look at the locks of a store, and measure what it gives.
#[derive(Debug, Parser)]
#[command(version, about, long_about = None)]
struct Args {
    /// The store, as in redis://localhost:6379.
    ///
    /// A password belongs into the variable, where the list of processes does not show it.
    #[arg(
        long,
        env = "DLOCK_URL",
        default_value = "redis://localhost",
        hide_env_values = true,
        global = true
    )]
    url: String,
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
    /// Show who holds a lock.
    Show {
        /// The name of the lock.
        key: String,
    },
    /// List the locks that are held now.
    List {
        /// Only those whose names begin like this.
        #[arg(default_value = "")]
        prefix: String,
    },
    /// End the hold of a lock, whichever client has it. The holder finds out at its next renewal.
    ForceUnlock {
        /// The name of the lock.
        key: String,
    },
    /// Measure how many locks a second the store gives from here, and how soon.
    Bench(Box<bench::BenchArgs>),
    /// One of the processes of a measurement; started by `bench`.
    #[command(hide = true)]
    BenchWorker,
}

/// Exit code of a command that failed.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.command {
        #[cfg(unix)]
        Command::Run(run) => run::run(&args.url, *run),
        #[cfg(unix)]
        Command::RunStart(start) => Ok(run::start(start)),
        #[cfg(unix)]
        Command::RunKeeper => Ok(run::keep()),
        Command::Bench(bench) => bench::run(args.url, *bench),
        Command::BenchWorker => bench::run_worker(),
        command => look(args.url, command).map_err(|error| error.to_string()),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("dlock: {error}");
        ExitCode::from(FAILED)
    })
}

#[tokio::main(flavor = "current_thread")]
async fn look(url: String, command: Command) -> Result<ExitCode, Error> {
    let client = stores::client(url).service_name("dlock-cli").build().await?;
    let code = match command {
        Command::Show { key } => show::show(&client, &key).await?,
        Command::List { prefix } => show::list(&client, &prefix).await?,
        Command::ForceUnlock { key } => show::force_unlock(&client, &key).await?,
        _ => ExitCode::SUCCESS,
    };
    client.shutdown(Duration::ZERO).await;
    Ok(code)
}
