//! What `benches/peers/run` calls once everything is built.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, Subcommand};
use dlock_peers::curve::{self, Curve};
use dlock_peers::measure::{Options, measure};
use dlock_peers::peer::Peer;
use dlock_peers::report;
use dlock_peers::stores::{self, Store};
use dlock_peers::workload::Workload;

/// dlock beside the locks that people use now.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure, and print one line of JSON for each measurement.
    Measure(Measure),
    /// Measure how the rate grows with the tasks, and print one line of JSON for each point.
    Curve(Measure),
    /// Measure another store, and print one line of JSON for each measurement.
    Store(StoreArgs),
    /// Make BENCHMARKS.md and the charts from the results.
    Report,
}

#[derive(Debug, clap::Args)]
struct Measure {
    /// How often each.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// For how many seconds rates are measured.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The program of the server.
    #[arg(long)]
    server: PathBuf,
    /// dlock's command.
    #[arg(long)]
    dlock: PathBuf,
    /// Only these libraries and workloads.
    #[arg(long)]
    only: Vec<String>,
    /// A driver that could not be built, as in `redsync=there is no Go`.
    #[arg(long, value_parser = pair)]
    missing: Vec<(String, String)>,
    /// Today, as in 2026-01-31.
    #[arg(long)]
    day: String,
    /// What readers of the curve are to bear in mind, as that other work was on the machine.
    #[arg(long)]
    note: Option<String>,
    /// Where the results go; nowhere without.
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
struct StoreArgs {
    /// The store.
    #[arg(long)]
    store: Store,
    /// As in `etcd 3.4.23`.
    #[arg(long)]
    server: String,
    /// Where other libraries find it.
    #[arg(long)]
    address: String,
    /// Where dlock finds it.
    #[arg(long)]
    url: String,
    /// How often each.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// For how many seconds.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// dlock's command.
    #[arg(long)]
    dlock: PathBuf,
    /// Today, as in 2026-01-31.
    #[arg(long)]
    day: String,
    /// Where the results go.
    #[arg(long)]
    out: PathBuf,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("there is no '='")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        Command::Measure(args) => measure_all(args),
        Command::Curve(args) => measure_curve(args),
        Command::Store(args) => measure_store(args),
        Command::Report => write_report(),
    }
}

/// Compiled in: this is only ever run out of the repository in which it was built.
fn drivers() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the runner lies beside the drivers")
}

fn measure_curve(args: Measure) -> anyhow::Result<()> {
    ensure!(args.only.is_empty(), "--only: the curve is measured as a whole");
    let (out, note) = (args.out.clone(), args.note.clone());
    let curve = Curve {
        note,
        ..curve::measure(&options(args)?, print)?
    };
    out.map_or(Ok(()), |path| curve.write(&path))
}

fn measure_store(args: StoreArgs) -> anyhow::Result<()> {
    let options = stores::Options {
        store: args.store,
        server: args.server,
        address: args.address,
        url: args.url,
        drivers: drivers().to_owned(),
        dlock: args.dlock,
        rounds: args.rounds,
        seconds: args.seconds,
        day: args.day,
    };
    stores::measure(&options, print)?.write(&args.out)
}

fn print(measured: &impl serde::Serialize) {
    match serde_json::to_string(measured) {
        Ok(line) => println!("{line}"),
        Err(error) => eprintln!("{error}"),
    }
}

fn measure_all(args: Measure) -> anyhow::Result<()> {
    for name in &args.only {
        let known =
            Peer::named(name).is_some() || Workload::ALL.iter().any(|workload| workload.name() == name);
        if !known {
            let peers = Peer::ALL.map(Peer::name).join(", ");
            let workloads = Workload::ALL.map(Workload::name).join(", ");
            bail!("--only: there is no {name}, but the libraries {peers} and the workloads {workloads}");
        }
    }
    let out = args.out.clone();
    let results = measure(&options(args)?, print)?;
    for left_out in &results.left_out {
        let workload = left_out.workload.as_deref().unwrap_or("all workloads");
        eprintln!("left out: {} in {workload}: {}", left_out.entrant, left_out.why);
    }
    out.map_or(Ok(()), |path| results.write(&path))
}

fn options(args: Measure) -> anyhow::Result<Options> {
    ensure!(args.rounds > 0, "--rounds: at least 1");
    ensure!(
        args.seconds > 0.0 && args.seconds <= 600.0,
        "--seconds: more than 0, at most 600"
    );
    Ok(Options {
        rounds: args.rounds,
        seconds: args.seconds,
        server: args.server,
        drivers: drivers().to_owned(),
        dlock: args.dlock,
        missing: args.missing.into_iter().collect::<BTreeMap<_, _>>(),
        only: args.only,
        day: args.day,
    })
}

fn write_report() -> anyhow::Result<()> {
    let root = drivers()
        .ancestors()
        .nth(2)
        .context("the drivers lie in the repository")?;
    for (path, text) in report::files(root)? {
        let path = root.join(path);
        fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(())
}
