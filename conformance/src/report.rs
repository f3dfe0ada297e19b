//! Runs tests, in a harness or without one.

use std::fmt;
use std::sync::Arc;

use crate::case::Case;
use crate::contract;
use crate::fixture::{AnyFixture, Fixture};
use crate::harness::checked;
use crate::need::Listed;

/// How a test ended.
///
/// ```
/// # use std::sync::Arc;
/// # use dlock::{store::Store, stores::memory::MemoryStore};
/// # use dlock_conformance::{Fixture, run_only};
/// # struct Memory(MemoryStore);
/// # impl Fixture for Memory {
/// #     async fn store(&self) -> Arc<dyn Store> { Arc::new(self.0.clone()) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let fixture = Memory(MemoryStore::new());
/// use dlock_conformance::Verdict;
///
/// let report = run_only(fixture, |name| name.starts_with("exclusion::")).await;
/// let left_out = report.checks.iter().filter(|check| matches!(check.verdict, Verdict::LeftOut(_)));
/// println!("{} of {} promises were left out", left_out.count(), report.checks.len());
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The store keeps the promise.
    Kept,
    /// The store does not support the subject of the test, and refuses it as it must; or the fixture cannot provide
    /// what the test needs.
    LeftOut(String),
    /// The store breaks the quoted promise.
    Broken(String),
}

/// One test and how it ended.
///
/// ```
/// # use std::sync::Arc;
/// # use dlock::{store::Store, stores::memory::MemoryStore};
/// # use dlock_conformance::{Fixture, run_only};
/// # struct Memory(MemoryStore);
/// # impl Fixture for Memory {
/// #     async fn store(&self) -> Arc<dyn Store> { Arc::new(self.0.clone()) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let fixture = Memory(MemoryStore::new());
/// let report = run_only(fixture, |name| name.starts_with("exclusion::")).await;
/// for check in report.broken() {
///     println!("{}::{} is broken: {:?}", check.group, check.name, check.verdict);
/// }
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckReport {
    /// The group of the test.
    pub group: &'static str,
    /// Its name.
    pub name: &'static str,
    /// How it ended.
    pub verdict: Verdict,
}

/// How all tests ended.
///
/// Its [`Display`](fmt::Display) has a line for each test.
///
/// ```
/// # use std::sync::Arc;
/// # use dlock::{store::Store, stores::memory::MemoryStore};
/// # use dlock_conformance::{Fixture, run_only};
/// # struct Memory(MemoryStore);
/// # impl Fixture for Memory {
/// #     async fn store(&self) -> Arc<dyn Store> { Arc::new(self.0.clone()) }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let fixture = Memory(MemoryStore::new());
/// let report = run_only(fixture, |name| name.starts_with("exclusion::")).await;
/// assert!(report.is_kept(), "{report}");
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Report {
    /// Each of them, in the order of the contract.
    pub checks: Vec<CheckReport>,
}

impl Report {
    /// Whether no promise is broken.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.broken().next().is_none()
    }

    /// The tests that failed.
    pub fn broken(&self) -> impl Iterator<Item = &CheckReport> {
        let is_broken = |check: &&CheckReport| matches!(check.verdict, Verdict::Broken(_));
        self.checks.iter().filter(is_broken)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for CheckReport { group, name, verdict } in &self.checks {
            match verdict {
                Verdict::Kept => writeln!(f, "kept      {group}::{name}")?,
                Verdict::LeftOut(why) => writeln!(f, "left out  {group}::{name}: {why}")?,
                Verdict::Broken(what) => writeln!(f, "BROKEN    {group}::{name}: {what}")?,
            }
        }
        Ok(())
    }
}

/// Runs the whole contract on a store, one test after the other, outside a test harness.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use dlock::{store::Store, stores::memory::MemoryStore};
/// # use dlock_conformance::{Fixture, run};
/// # struct Memory(MemoryStore);
/// # impl Fixture for Memory {
/// #     async fn store(&self) -> Arc<dyn Store> { Arc::new(self.0.clone()) }
/// # }
/// # async fn example() {
/// let report = run(Memory(MemoryStore::new())).await;
/// println!("{report}");
/// assert!(report.is_kept());
/// # }
/// ```
///
/// # Panics
///
/// Outside a tokio runtime, and when the fixture panics.
pub async fn run(fixture: impl Fixture) -> Report {
    run_only(fixture, |_| true).await
}

/// The same with only the chosen tests, by names such as `order::verbs_can_be_called_outside_of_a_runtime`.
///
/// # Panics
///
/// Like [`run`].
pub async fn run_only(fixture: impl Fixture, choose: impl Fn(&str) -> bool) -> Report {
    let fixture: Arc<dyn AnyFixture> = Arc::new(fixture);
    let mut all = Vec::new();
    let chosen = |listed: &Listed| choose(&format!("{}::{}", listed.group, listed.name));
    for listed in contract::all().into_iter().filter(chosen) {
        let Listed {
            group,
            needs,
            name,
            check,
        } = listed;
        let case = Case::new(fixture.clone()).await;
        let ended = tokio::spawn(checked(case.clone(), needs, check)).await;
        let ended = match ended {
            Ok(()) => {
                let cleaned = case.clone();
                tokio::spawn(async move { cleaned.clean_up().await }).await
            }
            broken => {
                case.heal().await;
                broken
            }
        };
        let verdict = match ended {
            Ok(()) => case.left_out().map_or(Verdict::Kept, Verdict::LeftOut),
            Err(error) => Verdict::Broken(message(error)),
        };
        all.push(CheckReport { group, name, verdict });
    }
    Report { checks: all }
}

fn message(error: tokio::task::JoinError) -> String {
    let Ok(panic) = error.try_into_panic() else {
        return "the test was cancelled".to_owned();
    };
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => {
            (panic.downcast_ref::<&str>()).map_or_else(|| "it panicked".to_owned(), ToString::to_string)
        }
    }
}
