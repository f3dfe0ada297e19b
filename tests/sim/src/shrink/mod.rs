//! Cuts a world down to the smallest plan that still breaks the same promise.
//!
//! It works on the plan as JSON, so that future parts of plans are shrunk too: arrays lose elements, objects lose
//! optional fields, numbers become smaller. Steps that depend on the meaning of a plan are in `moves`.

mod moves;

use std::io::IsTerminal;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::chance::mix;
use crate::check::Violation;
use crate::plan::{Plan, Runtimes};
use crate::run::{self, Outcome};
use crate::story;
use crate::trace::Keep;

/// What is left of a plan.
pub(crate) struct Shrunk {
    pub(crate) plan: Rc<Plan>,
    pub(crate) tries: u64,
}

/// Shrinks a plan whose world ended with this violation, for at most this time.
pub(crate) fn shrink(plan: &Plan, violation: &Violation, limit: Duration) -> Shrunk {
    let mut shrinker = Shrinker {
        plan: serde_json::to_value(plan).expect("a plan as JSON"),
        sought: Sought::of(violation),
        begun: Instant::now(),
        // The rest is for the choice among stories.
        limit: limit.mul_f32(0.85),
        told: Instant::now(),
        tries: 0,
        more: 2,
        last: None,
    };
    shrinker.cut();
    shrinker.limit = limit;
    shrinker.choose_story();
    Shrunk {
        plan: Rc::new(parsed(&shrinker.plan).expect("a plan that has run")),
        tries: shrinker.tries,
    }
}

/// What a violation has in common with one that is the same.
#[derive(PartialEq, Eq)]
struct Sought {
    of: &'static str,
    /// The first words of its story, without names and numbers.
    words: Vec<String>,
}

impl Sought {
    fn of(violation: &Violation) -> Sought {
        let is_word = |word: &&str| word.len() > 2 && word.bytes().all(|byte| byte.is_ascii_alphabetic());
        let words = violation.story.split_whitespace().filter(is_word);
        Sought {
            of: violation.of,
            words: words.take(5).map(str::to_owned).collect(),
        }
    }
}

struct Shrinker {
    plan: Value,
    sought: Sought,
    begun: Instant,
    limit: Duration,
    told: Instant,
    tries: u64,
    /// How many other seeds each step is tried with.
    more: u64,
    /// The length of the last story.
    last: Option<usize>,
}

impl Shrinker {
    fn is_over(&self) -> bool {
        self.begun.elapsed() >= self.limit
    }

    fn cut(&mut self) {
        loop {
            let before = self.plan.clone();
            moves::all(self);
            if self.is_over() {
                return;
            }
            let is_same = without_seed(&before) == without_seed(&self.plan);
            match (is_same, self.more) {
                (true, 2) => self.more = 12,
                (true, 12) => self.more = 40,
                (true, _) => return,
                (false, _) => {}
            }
        }
    }

    /// Takes this plan, with its seed or another one, if it breaks the same promise.
    fn takes(&mut self, candidate: Value) -> bool {
        let Some(mut plan) = parsed(&candidate) else {
            return false;
        };
        let first = plan.seed;
        for attempt in 0..=self.more {
            if self.is_over() {
                return false;
            }
            if attempt > 0 {
                plan.seed = mix(first ^ mix(self.tries)) >> 40;
            }
            let plan = Rc::new(plan.clone());
            if self.breaks(&plan, Keep::Nothing).is_some() {
                self.plan = candidate;
                self.plan["seed"] = plan.seed.into();
                return true;
            }
        }
        false
    }

    /// The result of this world, if it breaks the same promise.
    fn breaks(&mut self, plan: &Rc<Plan>, keep: Keep) -> Option<Outcome> {
        self.tries += 1;
        self.tell();
        let outcome = run::run(plan, keep);
        let is_same = Sought::of(outcome.violation.as_ref()?) == self.sought;
        is_same.then_some(outcome)
    }

    /// The seed with the shortest story.
    fn choose_story(&mut self) {
        let Some(mut plan) = parsed(&self.plan) else {
            return;
        };
        for attempt in 0..400 {
            if attempt > 0 {
                if self.is_over() {
                    return;
                }
                plan.seed = if attempt < 100 {
                    attempt
                } else {
                    mix(attempt) >> 40
                };
            }
            let candidate = Rc::new(plan.clone());
            let Some(outcome) = self.breaks(&candidate, Keep::Lines) else {
                continue;
            };
            let length = story::length(&outcome.trace);
            if self.last.is_none_or(|last| length < last) {
                self.last = Some(length);
                self.plan["seed"] = candidate.seed.into();
            }
        }
    }

    fn tell(&mut self) {
        let pause = if std::io::stderr().is_terminal() { 1 } else { 5 };
        if self.told.elapsed() >= Duration::from_secs(pause) {
            self.told = Instant::now();
            let left = self.limit.saturating_sub(self.begun.elapsed()).as_secs();
            if let Some(plan) = parsed(&self.plan) {
                eprintln!("shrinking: {} ({} tries, {left} s left)", plan.size(), self.tries);
            }
        }
    }
}

/// The plan of this JSON; `None` if it cannot be run.
fn parsed(json: &Value) -> Option<Plan> {
    let plan = Plan::deserialize(json).ok()?;
    let is_known = |fault: &Value| {
        let Some((name, what)) = fault["what"].as_object().and_then(|what| what.iter().next()) else {
            return true;
        };
        let below = |name: &str, all: usize| what[name].as_u64().is_none_or(|it| it < all as u64);
        let has_runtime = plan.runtimes == Runtimes::Each || !name.starts_with("process_");
        has_runtime && below("process", plan.processes.len()) && below("store", plan.stores.count())
    };
    let faults = json["faults"].as_array()?;
    (!plan.processes.is_empty() && faults.iter().all(is_known)).then_some(plan)
}

fn without_seed(plan: &Value) -> Value {
    let mut plan = plan.clone();
    plan["seed"] = 0.into();
    plan
}
