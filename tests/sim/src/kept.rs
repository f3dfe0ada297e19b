//! Plans that are kept: of worlds that found something, and what they have to show now.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use dlock::sim::breaks;
use serde::{Deserialize, Serialize};

use crate::batch;
use crate::chance::mix;
use crate::plan::Plan;
use crate::run;
use crate::trace::Keep;

/// A plan, what it found, and what its world has to show.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kept {
    pub(crate) found: String,
    pub(crate) expect: Expect,
    /// Of its trace, on every machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<String>,
    pub(crate) plan: Plan,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Expect {
    /// No promise is broken.
    Nothing,
    /// With this rule taken back that invariant is violated; without, nothing is.
    Broken { rule: String, violates: String },
}

/// When the library sends other messages, a plan takes another course. A rule that is turned off must therefore be
/// detected with one of this many seeds of the open details.
const SEEDS: u64 = 64;

/// Reads a kept plan, or a bare one.
pub(crate) fn read(path: &Path) -> Result<Kept, String> {
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = fs::read_to_string(path).map_err(|error| told(&error))?;
    serde_json::from_str::<Kept>(&text).or_else(|error| {
        let plan = serde_json::from_str::<Plan>(&text).map_err(|_| told(&error))?;
        Ok(Kept {
            found: String::new(),
            expect: Expect::Nothing,
            digest: None,
            plan,
        })
    })
}

pub(crate) fn write(path: &Path, kept: &Kept) -> Result<(), String> {
    let mut text = serde_json::to_string_pretty(kept).map_err(|error| error.to_string())?;
    text.push('\n');
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// The plans of a directory, by their names.
pub(crate) fn list(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let told = |error: std::io::Error| format!("{}: {error}", directory.display());
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).map_err(told)? {
        let path = entry.map_err(told)?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            all.push(path);
        }
    }
    all.sort();
    Ok(all)
}

/// Where the plans of this package are.
pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("plans")
}

/// The unexpected result of a plan, if any. Each world runs twice.
pub(crate) fn check(kept: &Kept) -> Result<(), String> {
    let plan = Rc::new(kept.plan.clone());
    shows(&plan, None)?;
    let Expect::Broken { rule, violates } = &kept.expect else {
        return Ok(());
    };
    let known = breaks::RULES.iter().find(|known| known.name == rule);
    let rule = known.ok_or_else(|| format!("no rule is named {rule}"))?.name;
    let mut others = None;
    for attempt in 0..SEEDS {
        let mut plan = kept.plan.clone();
        if attempt > 0 {
            plan.seed = mix(plan.seed ^ mix(attempt)) >> 40;
        }
        match shows(&Rc::new(plan), Some(rule)) {
            Err(found) if found.starts_with(violates.as_str()) => return Ok(()),
            Err(found) => others = Some(found),
            Ok(()) => {}
        }
    }
    Err(format!(
        "with {rule} taken back, {SEEDS} seeds do not violate {violates}, but {}",
        others.unwrap_or_else(|| "nothing".to_owned())
    ))
}

fn shows(plan: &Rc<Plan>, broken: Option<&'static str>) -> Result<(), String> {
    breaks::set(broken);
    let outcome = run::run(plan, Keep::Digest);
    let differs = batch::differs(plan, &outcome);
    breaks::set(None);
    if let Some(violation) = outcome.violation {
        return Err(format!("{}: {}", violation.of, violation.story));
    }
    differs.map_or(Ok(()), Err)
}
