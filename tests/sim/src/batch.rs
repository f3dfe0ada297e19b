//! Runs many worlds, several at a time, and sums up their results.

use std::io::IsTerminal;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::check::{PANIC, Violation};
use crate::count::Counts;
use crate::draw;
use crate::plan::{Plan, Runtimes};
use crate::run::{self, Outcome};
use crate::trace::Keep;

/// Which sort of worlds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// All processes of a world in one runtime: fast.
    One,
    /// A runtime, and so a clock, for each process.
    Each,
    /// Both in turns.
    Both,
}

impl Mode {
    pub(crate) fn of(self, seed: u64) -> Runtimes {
        match self {
            Mode::One => Runtimes::One,
            Mode::Each => Runtimes::Each,
            Mode::Both if seed.is_multiple_of(2) => Runtimes::One,
            Mode::Both => Runtimes::Each,
        }
    }
}

/// Which worlds are run, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) seed: u64,
    pub(crate) worlds: Option<u64>,
    pub(crate) limit: Option<Duration>,
    pub(crate) mode: Mode,
    pub(crate) threads: usize,
    /// The rule of the library that is turned off.
    pub(crate) broken: Option<&'static str>,
    pub(crate) keep: Keep,
    pub(crate) twice: bool,
    /// Goes on after a violation.
    pub(crate) goes_on: bool,
}

/// A world that broke a promise.
pub(crate) struct Found {
    pub(crate) seed: u64,
    pub(crate) plan: Plan,
    pub(crate) violation: Violation,
}

/// The results of all worlds.
#[derive(Default)]
pub(crate) struct Total {
    pub(crate) worlds: u64,
    pub(crate) counts: Counts,
    pub(crate) found: Vec<Found>,
}

impl Batch {
    /// Runs them. `tells` is called for each world with a violation, one after the other.
    pub(crate) fn run(&self, tells: impl Fn(&Found) + Sync) -> Total {
        let begun = Instant::now();
        let next = AtomicU64::new(0);
        let done = AtomicBool::new(false);
        let total = Mutex::new(Total::default());
        let told = Mutex::new(begun);
        let work = || {
            dlock::sim::breaks::set(self.broken);
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let enough = self.worlds.is_some_and(|worlds| number >= worlds)
                    || self.limit.is_some_and(|limit| begun.elapsed() >= limit);
                if enough || done.load(Ordering::Relaxed) {
                    break;
                }
                let seed = self.seed.wrapping_add(number);
                let plan = Rc::new(draw::plan(seed, self.mode.of(seed)));
                let outcome = run_as_asked(&plan, self.keep, self.twice);
                let mut total = total.lock().expect("no thread panics under it");
                total.worlds += 1;
                total.counts.add(&outcome.counts);
                if let Some(violation) = outcome.violation {
                    let plan = Plan::clone(&plan);
                    let found = Found {
                        seed,
                        plan,
                        violation,
                    };
                    if self.goes_on || total.found.is_empty() {
                        tells(&found);
                        total.found.push(found);
                    }
                    if !self.goes_on {
                        done.store(true, Ordering::Relaxed);
                    }
                }
                progress(
                    &total,
                    begun,
                    &mut told.lock().expect("no thread panics under it"),
                );
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.threads {
                scope.spawn(work);
            }
        });
        total.into_inner().expect("no thread panics under it")
    }
}

/// Runs a world, prints its trace if one is kept, and runs the world again if requested.
pub(crate) fn run_as_asked(plan: &Rc<Plan>, keep: Keep, twice: bool) -> Outcome {
    let keep = match (keep, twice) {
        (Keep::Nothing, true) => Keep::Digest,
        (keep, _) => keep,
    };
    let mut outcome = run::run(plan, keep);
    for line in &outcome.trace {
        println!("{line}");
    }
    if twice
        && let Some(story) = differs(plan, &outcome)
        && outcome.violation.is_none()
    {
        let of = PANIC;
        outcome.violation = Some(Violation { of, at: 0, story });
    }
    outcome
}

/// What is different when a world is run again.
pub(crate) fn differs(plan: &Rc<Plan>, outcome: &Outcome) -> Option<String> {
    let again = run::run(plan, Keep::Digest);
    if again.digest == outcome.digest {
        return None;
    }
    let (one, other) = (
        run::run(plan, Keep::Lines).trace,
        run::run(plan, Keep::Lines).trace,
    );
    let at = one.iter().zip(&other).position(|(one, other)| one != other);
    let at = at.unwrap_or(one.len().min(other.len()));
    let line = |of: &[crate::trace::Line]| {
        of.get(at)
            .map_or_else(|| "its end".to_owned(), |line| line.to_string())
    };
    Some(format!(
        "the same plan went another way the second time; line {}:\n  {}\n  {}",
        at + 1,
        line(&one),
        line(&other)
    ))
}

/// Reports the progress of a long run: each second on a terminal, otherwise every 10 s.
fn progress(total: &Total, begun: Instant, told: &mut Instant) {
    let is_terminal = std::io::stderr().is_terminal();
    let pause = Duration::from_secs(if is_terminal { 1 } else { 10 });
    if told.elapsed() < pause {
        return;
    }
    *told = Instant::now();
    let Counts {
        acquisitions, faults, ..
    } = total.counts;
    let line = format!(
        "{:>5} s  {} worlds, {acquisitions} acquisitions, {faults} faults, {} violations",
        begun.elapsed().as_secs(),
        total.worlds,
        total.found.len()
    );
    match is_terminal {
        true => eprint!("\r{line} "),
        false => eprintln!("{line}"),
    }
}
