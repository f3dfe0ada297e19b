//! Goes through all states of a model, and says what was seen.

use std::fmt::{self, Write as _};
use std::hash::Hash;
use std::time::{Duration, Instant};

use stateright::{Checker, Expectation, HasDiscoveries, Model, Path};

/// A model whose steps can be told in words.
pub trait Told: Model {
    /// What happens in this step, in half a line; `None` where time goes on and nothing else.
    fn step(&self, before: &Self::State, action: &Self::Action) -> Option<String>;

    /// The holders, in half a line.
    fn situation(&self, state: &Self::State) -> String;

    /// Whether time goes on in this step.
    fn is_tick(&self, action: &Self::Action) -> bool;
}

/// A rule of the protocol that can be taken out of a model.
pub trait Rule: fmt::Debug + Copy + 'static {
    /// The model.
    type World: Told<State: Hash + Clone + PartialEq + Send + Sync, Action: Clone + PartialEq>
        + Send
        + Sync
        + Clone;
    /// Its name.
    const MODEL: &'static str;
    /// All rules of it.
    const ALL: &'static [Self];

    /// The worlds with all rules that are gone through, each by its name.
    fn worlds() -> Vec<(&'static str, Self::World)>;

    /// What must not be and is, without the rule.
    fn prevents(self) -> &'static str;

    /// The smallest world in which that is seen.
    fn taken_out(self) -> Self::World;
}

/// What was gone through.
#[derive(Debug, Clone)]
pub struct Report {
    /// The model and the world.
    pub name: String,
    /// States that were reached, each as often as it was.
    pub reached: usize,
    /// Those of them that differ.
    pub states: usize,
    /// Steps from the beginning to the farthest of them.
    pub depth: usize,
    /// Time that it took.
    pub took: Duration,
    /// What was seen that must not be, and how it came about.
    pub broken: Vec<(&'static str, String)>,
    /// What must be possible, and was not seen.
    pub missing: Vec<&'static str>,
    /// How much must never be, and how much must be possible.
    pub properties: (usize, usize),
}

impl Report {
    /// Whether all is as it must be.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.broken.is_empty() && self.missing.is_empty()
    }

    /// What does not change from run to run, as a row of a table.
    #[must_use]
    pub fn row(&self) -> String {
        let (states, reached) = (grouped(self.states), grouped(self.reached));
        format!("| {} | {states} | {reached} | {} |", self.name, self.depth)
    }

    /// What came of it.
    #[must_use]
    pub fn result(&self) -> String {
        let (never, possible) = self.properties;
        let mut text = match (&self.broken[..], &self.missing[..]) {
            ([], []) => return format!("{never} never broken, {possible} seen"),
            _ => String::new(),
        };
        for (property, trace) in &self.broken {
            let _ = write!(text, "not so: {property}\n{trace}");
        }
        for property in &self.missing {
            let _ = writeln!(text, "never seen: {property}");
        }
        text
    }
}

/// How a rule that was taken out was missed.
#[derive(Debug, Clone)]
pub struct Example {
    /// The model and the rule.
    pub name: String,
    /// What is not so any more.
    pub broken: &'static str,
    /// States that were looked at, that differ.
    pub states: usize,
    /// Steps to the first of them in which it is seen.
    pub steps: usize,
    /// Time that it took.
    pub took: Duration,
    /// These steps in words.
    pub trace: String,
}

impl Example {
    /// What does not change from run to run, as a row of a table.
    #[must_use]
    pub fn row(&self) -> String {
        format!("| {} | {} | {} |", self.name, self.broken, self.steps)
    }

    /// The steps with a headline.
    #[must_use]
    pub fn told(&self) -> String {
        format!("Without `{}`:\n\n```text\n{}```\n", self.name, self.trace)
    }
}

/// Something to look at, by its name.
pub struct Case<T> {
    /// The model, and the world or the rule.
    pub name: String,
    /// Looks at it.
    pub look: Box<dyn FnOnce() -> T>,
}

impl<T> fmt::Debug for Case<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// All worlds of a model, in which all rules hold.
#[must_use]
pub fn worlds<R: Rule>() -> Vec<Case<Report>> {
    let worlds = R::worlds().into_iter().map(|(world, model)| {
        let name = format!("{}: {world}", R::MODEL);
        Case {
            name: name.clone(),
            look: Box::new(move || all_states(name, model)),
        }
    });
    worlds.collect()
}

/// All rules of a model, each to be taken out. Nothing is found where it is not needed.
#[must_use]
pub fn rules<R: Rule>() -> Vec<Case<Option<Example>>> {
    let rules = R::ALL.iter().map(|rule| {
        let name = format!("{}: {rule:?}", R::MODEL);
        Case {
            name: name.clone(),
            look: Box::new(move || counter_example(name, &rule.taken_out(), rule.prevents())),
        }
    });
    rules.collect()
}

/// Goes through all states of a model.
fn all_states<M>(name: String, model: M) -> Report
where
    M: Told<State: Hash + Clone + PartialEq + Send + Sync, Action: Clone + PartialEq> + Send + Sync + 'static,
{
    let began = Instant::now();
    // Nothing bounds it: it ends when there is no state that was not looked at.
    let checker = model.checker().spawn_bfs().join();
    let mut report = Report {
        name,
        reached: checker.state_count(),
        states: checker.unique_state_count(),
        depth: checker.max_depth() - 1,
        took: began.elapsed(),
        broken: Vec::new(),
        missing: Vec::new(),
        properties: (0, 0),
    };
    let mut seen = checker.discoveries();
    for property in checker.model().properties() {
        let count = match property.expectation {
            Expectation::Sometimes => &mut report.properties.1,
            _ => &mut report.properties.0,
        };
        *count += 1;
        match (property.expectation, seen.remove(property.name)) {
            (Expectation::Sometimes, None) => report.missing.push(property.name),
            (Expectation::Always, Some(path)) => {
                report.broken.push((property.name, trace(checker.model(), path)));
            }
            _ => {}
        }
    }
    report
}

/// The shortest way to a state that does not have this property, if there is one.
fn counter_example<M>(name: String, model: &M, property: &'static str) -> Option<Example>
where
    M: Told<State: Hash + Clone + PartialEq + Send + Sync, Action: Clone + PartialEq>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let began = Instant::now();
    let mut states = 0;
    let mut found = |depth: Option<usize>| {
        let first = HasDiscoveries::AnyOf([property].into());
        let checker = model.clone().checker().finish_when(first);
        let checker = match depth {
            Some(depth) => checker.target_max_depth(depth),
            None => checker,
        };
        let checker = checker.spawn_bfs().join();
        states = states.max(checker.unique_state_count());
        checker.discovery(property)
    };
    // What is found first need not be the shortest, since states are looked at in blocks.
    let mut path = found(None)?;
    while let Some(shorter) = found(Some(path.clone().into_actions().len() + 1)) {
        path = shorter;
    }
    Some(Example {
        name,
        broken: property,
        states,
        steps: path.clone().into_actions().len(),
        took: began.elapsed(),
        trace: trace(model, path),
    })
}

/// A way through the model, in words: a line for each step, with the time in ticks in front.
fn trace<M: Told>(model: &M, path: Path<M::State, M::Action>) -> String {
    let (mut text, mut now) = (String::new(), 0);
    for (state, action) in path.into_vec() {
        let told = match action {
            Some(action) => {
                now += usize::from(model.is_tick(&action));
                model.step(&state, &action)
            }
            None => Some(format!("=> {}", model.situation(&state))),
        };
        if let Some(told) = told {
            let _ = writeln!(text, "{now:>2}  {told}");
        }
    }
    text
}

/// A number as people read it.
#[must_use]
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
