//! A scheduler for a fleet: `cargo run -p dlock-examples --bin scheduler`, and `--help` for what it can do.
//!
//! Every machine runs it; one machine leads and runs the jobs. When the leader goes away, another machine takes over.
//!
//! | file | |
//! |---|---|
//! | `args.rs` | the command line |
//! | `jobs.rs` | what the leader does: runs what is due |
//! | `ledger.rs` | which run was the last of each job, with the check of the fencing token |

mod args;
mod jobs;
mod ledger;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use dlock::LockClient;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use crate::args::Args;
use crate::ledger::Ledger;

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(color)
        .with_target(false)
        .init();
    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scheduler: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), String> {
    args.check()?;
    let ledger = Arc::new(Ledger::open(&args.url, &args.name)?);
    let client = LockClient::builder().url(&args.url).service_name("scheduler");
    let client = client
        .build()
        .await
        .map_err(|error| format!("cannot open --url: {error}"))?;
    let leader = client.leader(args.name.as_str()).lease(args.lease);
    leader.check().map_err(|error| error.to_string())?;
    tracing::info!("standing for \"{}\" as {}", args.name, client.id());

    let lead = leader.lead(|term| jobs::run(args.jobs.clone(), ledger.clone(), term));
    let ended = tokio::select! {
        ended = lead => ended.map_err(|error| error.to_string()),
        // Running jobs are killed with the leadership, and another machine leads at once.
        () = end() => Ok(()),
    };
    client.shutdown(Duration::from_secs(5)).await;
    tracing::info!("resigned");
    ended
}

/// Waits until the service is asked to end.
async fn end() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
