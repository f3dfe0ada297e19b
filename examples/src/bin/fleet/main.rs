//! Workers of [apalis](https://docs.rs/apalis) on every machine of a fleet: `cargo run -p dlock-examples --features apalis --bin
//! fleet`, and `--help` for what it can do.
//!
//! It shows two layers of dlock-tower in apalis workers, which are Tower services:
//!
//! | worker | layer | |
//! |---|---|---|
//! | `report`, by cron | [`TaskOnceLayer`], by the firing | each machine has the schedule, and each firing is done **once per fleet** |
//! | `export`, from a queue | [`LimitLayer`], by the tenant | at most so many exports of a tenant at a time, **on all machines together** |
//!
//! A machine whose firing is done elsewhere waits for the result: if the other machine crashes, it takes over the
//! firing. An export beyond its limit does not begin: apalis retries it later, and does not count this as an attempt.

use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use apalis::layers::retry::RetryPolicy;
use apalis::layers::retry::backoff::{ExponentialBackoffMaker, MakeBackoff};
use apalis::prelude::{BoxDynError, MemoryStorage, Task, TaskSink, WorkerBuilder, WorkerBuilderExt};
use apalis_cron::{CronScheduler, Tick};
use clap::Parser;
use dlock::{LockClient, LockKey};
use dlock_tower::task::{LimitLayer, TaskError, TaskOnceLayer};
use tokio::time::sleep;
use tower::util::rng::HasherRng;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

const EXAMPLES: &str = "\
Examples:
  fleet                                  alone, in memory: a report every two seconds, and exports
  fleet --url redis://localhost          the same line on every machine";

/// Reports and exports on one machine of a fleet.
#[derive(Debug, Parser)]
#[command(name = "fleet", version, after_help = EXAMPLES)]
struct Args {
    /// Where firings and permits are claimed: memory:// (of this process), redis://…
    #[arg(long, env = "DLOCK_URL", value_name = "URL", default_value = "memory://")]
    url: String,

    /// When reports are made: seconds, minutes, hours, days, months, weekdays
    #[arg(long, value_name = "CRON", default_value = "*/2 * * * * *")]
    schedule: String,

    /// How long a report or an export takes
    #[arg(long, value_name = "DURATION", default_value = "300ms", value_parser = humantime::parse_duration)]
    takes: Duration,

    /// After a crash, another machine does the firing within this time
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = humantime::parse_duration)]
    lease: Duration,

    /// Tenants, each of which this machine makes so many exports for
    #[arg(long, default_value_t = 2)]
    tenants: u64,

    /// Exports of each tenant
    #[arg(long, default_value_t = 5)]
    exports: u64,

    /// How many exports of a tenant run at a time, on all machines
    #[arg(long, default_value_t = 2)]
    limit: u32,
}

/// An export for a tenant.
#[derive(Debug, Clone)]
struct Export {
    tenant: u64,
    number: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_target(false)
        .init();
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fleet: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<(), BoxDynError> {
    let client = LockClient::builder().url(&args.url).build().await?;
    tokio::select! {
        ended = reports(&args, client.clone()) => ended?,
        ended = exports(&args, client.clone()) => ended?,
        () = end() => {}
    }
    // Interrupted work releases its claim and its permit at once.
    client.shutdown(Duration::from_secs(5)).await;
    tracing::info!("ended");
    Ok(())
}

/// A report for each firing of the schedule, once in the fleet.
async fn reports(args: &Args, client: LockClient) -> Result<(), BoxDynError> {
    let takes = args.takes;
    let report = move |tick: Tick| async move {
        let firing = tick.get_timestamp();
        tracing::info!("report {firing} begins");
        sleep(takes).await;
        tracing::info!("report {firing} done");
        Ok::<_, BoxDynError>(())
    };
    let once = TaskOnceLayer::new(client, |task: &Task<Tick>| -> LockKey {
        format!("report:{}", task.args.get_timestamp()).into()
    })?;
    let once = once
        .lease(args.lease)
        .keep(Duration::from_secs(60 * 60).max(2 * args.lease))
        // For its result, or its crash.
        .wait(4 * (args.takes + args.lease));
    once.check()?;
    WorkerBuilder::new("report")
        .backend(CronScheduler::new(cron(&args.schedule)?))
        .layer(once)
        .build(report)
        .run()
        .await?;
    Ok(())
}

fn cron(text: &str) -> Result<cron::Schedule, String> {
    cron::Schedule::from_str(text).map_err(|error| format!("--schedule: {error}"))
}

/// The exports of this machine.
async fn exports(args: &Args, client: LockClient) -> Result<(), BoxDynError> {
    let mut queue = MemoryStorage::new();
    for number in 0..args.exports {
        for tenant in 0..args.tenants {
            queue.push(Export { tenant, number }).await?;
        }
    }
    let takes = args.takes;
    let export = move |export: Export| async move {
        let Export { tenant, number } = export;
        tracing::info!("export {number} of tenant {tenant} begins");
        sleep(takes).await;
        tracing::info!("export {number} of tenant {tenant} done");
        Ok::<_, BoxDynError>(())
    };
    let most = args.limit;
    let limit = LimitLayer::new(
        client,
        |task: &Task<Export>| -> LockKey { format!("exports:{}", task.args.tenant).into() },
        // Configure the limit where you like: it is read for each export.
        move |_: &Task<Export>| most,
    )?;
    let pauses = ExponentialBackoffMaker::new(
        Duration::from_millis(20),
        Duration::from_millis(500),
        0.5,
        HasherRng::default(),
    );
    let later = RetryPolicy::retries(3)
        .with_backoff(pauses?.make_backoff())
        .retry_if(|error: &TaskError<BoxDynError>| error.is_not_started() && !error.is_permanent());
    WorkerBuilder::new("export")
        .backend(queue)
        .retry(later)
        .layer(limit)
        .build(export)
        .run()
        .await?;
    Ok(())
}

/// Waits until the machine is asked to end.
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
