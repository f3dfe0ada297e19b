//! dlock's own code in simulated worlds: see docs/simulation.md.

mod args;
mod assume;
mod batch;
mod chance;
mod check;
mod connection;
mod count;
mod draw;
mod drift;
mod events;
mod fault;
mod host;
mod kept;
mod look;
mod net;
mod panics;
mod plan;
mod run;
#[cfg(test)]
mod same;
mod shrink;
mod store;
mod story;
mod trace;
mod user;
mod words;
mod world;

use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clap::Parser;
use dlock::sim::breaks;
use serde_json::json;

use crate::args::Args;
use crate::batch::{Batch, Found, Total};
use crate::count::Counts;
use crate::kept::{Expect, Kept};
use crate::plan::Plan;
use crate::trace::Keep;

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list_breaks {
        for rule in breaks::RULES {
            println!("{}", rule.name);
        }
        return ExitCode::SUCCESS;
    }
    if args.print_plan {
        let plan = draw::plan(args.seed, args.runtimes.of(args.seed));
        println!("{}", serde_json::to_string_pretty(&plan).expect("a plan as JSON"));
        return ExitCode::SUCCESS;
    }
    panics::install();
    let begun = Instant::now();
    let batch = args.batch();
    if let Some(directory) = &args.plans {
        let directory = directory.clone().unwrap_or_else(kept::directory);
        return all_kept(&directory).unwrap_or_else(|error| {
            eprintln!("{error}");
            ExitCode::from(2)
        });
    }
    let total = match args.plan.as_deref().map(kept::read) {
        Some(Ok(kept)) => {
            let total = alone(&batch, kept);
            total.found.iter().for_each(|found| tell(&args, found));
            total
        }
        Some(Err(error)) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
        None => batch.run(|found| tell(&args, found)),
    };
    if let (true, Some(found)) = (args.shrink, total.found.first()) {
        shrink(&args, found);
    }
    report(&args, &total, begun.elapsed());
    match total.found.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs the world of one plan.
fn alone(batch: &Batch, kept: Kept) -> Total {
    breaks::set(batch.broken);
    let plan = Rc::new(kept.plan);
    let keep = match batch.keep {
        Keep::Nothing => Keep::Digest,
        keep => keep,
    };
    let outcome = batch::run_as_asked(&plan, keep, batch.twice);
    breaks::set(None);
    eprintln!("the digest of its trace is {:016x}", outcome.digest);
    let found = outcome.violation.map(|violation| Found {
        seed: plan.seed,
        plan: Plan::clone(&plan),
        violation,
    });
    Total {
        worlds: 1,
        counts: outcome.counts,
        found: found.into_iter().collect(),
    }
}

/// Runs all kept plans, and says which of them show something else than they have to.
fn all_kept(directory: &Path) -> Result<ExitCode, String> {
    let (mut good, mut bad) = (0, 0);
    for path in kept::list(directory)? {
        let kept = kept::read(&path)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        match kept::check(&kept) {
            Ok(()) => {
                good += 1;
                println!("ok      {name}");
            }
            Err(why) => {
                bad += 1;
                println!("FAILED  {name}: {why}\n        it found: {}", kept.found);
            }
        }
    }
    println!("kept plans: {good} passed, {bad} failed");
    Ok(ExitCode::from(u8::from(bad > 0)))
}

fn tell(args: &Args, found: &Found) {
    let Found {
        seed, violation: it, ..
    } = found;
    eprintln!(
        "seed {seed}: violation of {} at {} ms: {}",
        it.of, it.at, it.story
    );
    eprintln!("its story: {}", args.again(*seed));
}

/// Makes the world of a violation small, and tells its story.
fn shrink(args: &Args, found: &Found) {
    eprintln!("shrinking: {}", found.plan.size());
    breaks::set(args.rule());
    let shrunk = shrink::shrink(
        &found.plan,
        &found.violation,
        Duration::from_secs(args.shrink_for),
    );
    let outcome = run::run(&shrunk.plan, Keep::Lines);
    breaks::set(None);
    let Some(violation) = &outcome.violation else {
        eprintln!("it depends on something else than its plan, and does not happen again");
        return;
    };
    eprintln!("shrunk to: {} ({} tries)\n", shrunk.plan.size(), shrunk.tries);
    for line in story::told(&outcome.trace) {
        println!("{line}");
    }
    println!("{}", story::moral(violation));
    let Some(path) = &args.save else {
        return;
    };
    let rule = breaks::RULES.iter().find(|rule| Some(rule.name) == args.rule());
    let story = words::with_short_tokens(&violation.story);
    let kept = Kept {
        found: rule.map_or_else(
            || story.clone(),
            |rule| format!("without \"{}\": {story}", rule.what),
        ),
        expect: match rule {
            None => Expect::Nothing,
            Some(rule) => Expect::Broken {
                rule: rule.name.to_owned(),
                violates: violation.of.to_owned(),
            },
        },
        digest: None,
        plan: Plan::clone(&shrunk.plan),
    };
    match kept::write(path, &kept) {
        Ok(()) => eprintln!("kept in {}", path.display()),
        Err(error) => eprintln!("{error}"),
    }
}

fn report(args: &Args, total: &Total, took: Duration) {
    let Counts {
        acquisitions,
        faults,
        requests,
        effects,
        ..
    } = total.counts;
    let seconds = took.as_secs_f64();
    for what in total.counts.missing(args.runtimes) {
        eprintln!("in all these worlds there was never {what}: they try less than they should");
    }
    if args.json {
        let mut kinds: Vec<_> = total.found.iter().map(|found| found.violation.of).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let object = json!({
            "seed": args.seed,
            "worlds": total.worlds,
            "acquisitions": acquisitions,
            "faults": faults,
            "requests": requests,
            "violations": total.found.len(),
            "effects": effects,
            "seconds": seconds,
            "kinds": kinds,
        });
        println!("{object}");
        return;
    }
    if !args.shrink {
        for (what, times) in total.counts.each() {
            println!("{times:>10}  {what}");
        }
    }
    println!(
        "{} worlds, {acquisitions} acquisitions, {faults} faults, {requests} requests, {effects} effects in {seconds:.1} s: {} violations",
        total.worlds,
        total.found.len()
    );
}
