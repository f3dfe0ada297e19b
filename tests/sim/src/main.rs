//! dlock's own code in simulated worlds: see docs/simulation.md.

mod backend;
mod chance;
mod check;
mod count;
mod draw;
mod fault;
mod host;
mod net;
mod plan;
mod run;
mod store;
mod trace;
mod user;
mod world;

use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::json;

use crate::count::Counts;
use crate::plan::{Plan, Runtimes};
use crate::run::Outcome;
use crate::trace::Keep;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// All processes of a world in one runtime: fast.
    One,
    /// A runtime, and so a clock, for each process.
    Each,
    /// Both in turns.
    Both,
}

/// Runs dlock's own code in simulated worlds, each of which follows from a seed.
#[derive(Debug, Parser)]
struct Args {
    /// The seed of the first world; each further world has the next one.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many worlds.
    #[arg(long, conflicts_with = "seconds")]
    worlds: Option<u64>,
    /// For how long to run worlds; 10 s unless said otherwise.
    #[arg(long)]
    seconds: Option<u64>,
    /// Which sort of worlds.
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    runtimes: Mode,
    /// Prints the events of the worlds.
    #[arg(long)]
    trace: bool,
    /// Runs each world twice and compares the traces.
    #[arg(long)]
    twice: bool,
    /// Worlds at a time; as many as there are processors unless said otherwise.
    #[arg(long)]
    threads: Option<usize>,
    /// Goes on after a violation.
    #[arg(long)]
    keep_going: bool,
    /// Ends with one JSON object.
    #[arg(long)]
    json: bool,
}

/// What came of all worlds.
#[derive(Default)]
struct Total {
    worlds: u64,
    counts: Counts,
    violations: Vec<(u64, String)>,
}

fn runtimes_of(mode: Mode, seed: u64) -> Runtimes {
    match mode {
        Mode::One => Runtimes::One,
        Mode::Each => Runtimes::Each,
        Mode::Both if seed % 2 == 0 => Runtimes::One,
        Mode::Both => Runtimes::Each,
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let silent = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<user::OnPurpose>() {
            silent(info);
        }
    }));
    let begun = Instant::now();
    let limit = args
        .worlds
        .is_none()
        .then(|| Duration::from_secs(args.seconds.unwrap_or(10)));
    let next = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let total = Mutex::new(Total::default());
    let threads = args.threads.unwrap_or_else(|| {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        if args.trace { 1 } else { all }
    });
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let enough = match (args.worlds, limit) {
                        (Some(worlds), _) => number >= worlds,
                        (None, Some(limit)) => begun.elapsed() >= limit,
                        (None, None) => false,
                    };
                    if enough || done.load(Ordering::Relaxed) {
                        break;
                    }
                    let seed = args.seed + number;
                    let plan = Rc::new(draw::plan(seed, runtimes_of(args.runtimes, seed)));
                    let outcome = one(&args, &plan);
                    let mut total = total.lock().expect("no thread panics under it");
                    total.worlds += 1;
                    total.counts.add(&outcome.counts);
                    if let Some(violation) = outcome.violation {
                        eprintln!(
                            "seed {seed}: violation of {} at {} ms: {}",
                            violation.of, violation.at, violation.story
                        );
                        total.violations.push((seed, violation.of.to_owned()));
                        if !args.keep_going {
                            done.store(true, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let total = total.into_inner().expect("no thread panics under it");
    report(&args, &total, begun.elapsed());
    if total.violations.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn one(args: &Args, plan: &Rc<Plan>) -> Outcome {
    let keep = match (args.trace, args.twice) {
        (true, _) => Keep::Lines,
        (false, true) => Keep::Digest,
        (false, false) => Keep::Nothing,
    };
    let outcome = run::run(plan, keep);
    if args.trace {
        print!("{}", outcome.trace);
    }
    if args.twice {
        let again = run::run(plan, keep);
        assert!(
            again.digest == outcome.digest && again.trace == outcome.trace,
            "seed {}: the second time was another story",
            plan.seed
        );
    }
    outcome
}

fn report(args: &Args, total: &Total, took: Duration) {
    let Counts {
        acquisitions,
        faults,
        requests,
        ..
    } = total.counts;
    let seconds = took.as_secs_f64();
    if args.json {
        let mut kinds: Vec<_> = total.violations.iter().map(|(_, kind)| kind.as_str()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let object = json!({
            "seed": args.seed,
            "worlds": total.worlds,
            "acquisitions": acquisitions,
            "faults": faults,
            "requests": requests,
            "violations": total.violations.len(),
            "seconds": seconds,
            "kinds": kinds,
        });
        println!("{object}");
        return;
    }
    for (what, times) in total.counts.each() {
        println!("{times:>10}  {what}");
    }
    println!(
        "{} worlds, {acquisitions} acquisitions, {faults} faults, {requests} requests in {seconds:.1} s: {} violations",
        total.worlds,
        total.violations.len()
    );
}
