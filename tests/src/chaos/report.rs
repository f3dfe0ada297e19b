//! The final report: numbers for programs, a summary for people, and the evidence.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::check::{Finding, Findings, check};
use super::clock::{Nanos, since};
use super::history::{Found, History};
use super::witness::{ENOUGH, witnessed};

/// How many findings of a sort are shown with their lines.
const SHOWN: usize = 3;
/// How many lines of each log are shown of a finding.
const LINES: usize = 30;

/// A history that was judged.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    history: &'a History,
    findings: Findings,
    /// For each kind, how many faults counted.
    kinds: BTreeMap<String, u64>,
    acquisitions: usize,
    crashed: &'a [String],
}

impl<'a> Report<'a> {
    pub(crate) fn new(history: &'a History, crashed: &'a [String]) -> Report<'a> {
        let mut kinds = witnessed(history);
        for kind in &history.kinds {
            kinds.entry(kind.clone()).or_default();
        }
        let acquired = history.holds.iter().filter(|hold| hold.granted.is_some());
        Report {
            findings: check(history),
            kinds,
            acquisitions: acquired.count(),
            history,
            crashed,
        }
    }

    /// Whether nothing is wrong.
    pub(crate) fn is_clean(&self) -> bool {
        self.findings.violations.is_empty()
            && self.findings.late_losses.is_empty()
            && self.history.stuck.is_empty()
            && self.history.leftovers.is_empty()
            && self.crashed.is_empty()
    }

    /// The kinds that came too rarely.
    pub(crate) fn too_rare(&self) -> Vec<&str> {
        let rare = self.kinds.iter().filter(|(_, count)| **count < ENOUGH);
        rare.map(|(kind, _)| kind.as_str()).collect()
    }

    fn faults(&self) -> u64 {
        self.kinds.values().sum()
    }

    fn lost(&self) -> usize {
        self.history
            .holds
            .iter()
            .filter(|hold| hold.lost.is_some())
            .count()
    }

    /// The one object.
    pub(crate) fn json(&self) -> Value {
        json!({
            "topology": self.history.topology,
            "seed": self.history.seed,
            "seconds": (self.history.end - self.history.origin) / 1_000_000_000,
            "counts": self.too_rare().is_empty(),
            "acquisitions": self.acquisitions,
            "losses_told": self.lost(),
            "writes": self.history.writes.len(),
            "faults": self.faults(),
            "fault_kinds": self.kinds,
            "violations": self.findings.violations.len(),
            "late_losses": self.findings.late_losses.len(),
            "unprotected": self.findings.unprotected.len(),
            "stuck": self.history.stuck.len(),
            "leftovers": self.history.leftovers.len(),
            "crashed": self.crashed.len(),
        })
    }

    /// The same for people.
    pub(crate) fn summary(&self) -> String {
        let kinds: Vec<_> = self
            .kinds
            .iter()
            .map(|(kind, count)| format!("{kind} {count}"))
            .collect();
        let seconds = (self.history.end - self.history.origin) / 1_000_000_000;
        format!(
            "{} for {seconds} s, seed {}\n\
             acquisitions  {}, of which {} were told that they are lost\n\
             faults        {}: {}\n\
             violations    {}\n\
             late losses   {}\n\
             unprotected   {}\n\
             stuck         {}\n\
             leftovers     {}\n\
             crashed       {}",
            self.history.topology,
            self.history.seed,
            self.acquisitions,
            self.lost(),
            self.faults(),
            kinds.join(", "),
            self.findings.violations.len(),
            self.findings.late_losses.len(),
            self.findings.unprotected.len(),
            self.history.stuck.len(),
            self.history.leftovers.len(),
            self.crashed.len(),
        )
    }

    /// What shows what is wrong, from the logs in `dir`.
    pub(crate) fn evidence(&self, dir: &Path) -> String {
        let mut text = String::new();
        let sorts = [
            ("violation", &self.findings.violations),
            ("late loss", &self.findings.late_losses),
        ];
        for (sort, findings) in sorts {
            for finding in findings.iter().take(SHOWN) {
                let _ = writeln!(text, "\n{sort}: {}", finding.what);
                for line in self.lines(finding, dir) {
                    let _ = writeln!(text, "  {line}");
                }
            }
            if findings.len() > SHOWN {
                let _ = writeln!(text, "\nand {} more of this sort: {sort}", findings.len() - SHOWN);
            }
        }
        for (sort, found) in [
            ("stuck", &self.history.stuck),
            ("leftover", &self.history.leftovers),
        ] {
            for Found { at, what, why } in found {
                let (at, why) = (since(self.history.origin, *at), why.replace('_', " "));
                let _ = writeln!(text, "\n{sort} at {at}: {}: {why}", what.replace('_', " "));
            }
        }
        for crashed in self.crashed {
            let _ = writeln!(text, "\n{crashed}");
        }
        text
    }

    /// The lines of the holds, and the faults of that time.
    fn lines(&self, finding: &Finding, dir: &Path) -> Vec<String> {
        let mut lines: Vec<(Nanos, String)> = Vec::new();
        let holds: BTreeSet<_> = finding
            .holds
            .iter()
            .map(|at| self.history.holds[*at].id)
            .collect();
        for hold in holds {
            let log = fs::read_to_string(dir.join(format!("{}.log", hold.life))).unwrap_or_default();
            let number = hold.number.to_string();
            let of_hold = log.lines().filter_map(|line| {
                let (at, rest) = line.split_once(' ')?;
                (rest.split(' ').nth(1)? == number).then(|| (at.parse().ok(), format!("{hold} {rest}")))
            });
            let of_hold: Vec<_> = of_hold.filter_map(|(at, line)| Some((at?, line))).collect();
            lines.extend(shortened(of_hold));
        }
        for fault in &self.history.faults {
            if fault.begin <= finding.to && fault.end.is_none_or(|end| end >= finding.from) {
                let what = format!("fault {} {} {}", fault.number, fault.kind, fault.what);
                lines.push((fault.begin, format!("begin of {what}")));
                lines.extend(fault.end.map(|end| (end, format!("end of {what}"))));
            }
        }
        lines.sort();
        let line = |(at, line)| format!("{:>14} {line}", since(self.history.origin, at));
        lines.into_iter().map(line).collect()
    }
}

/// The beginning and the end of what is too long.
fn shortened(mut lines: Vec<(Nanos, String)>) -> Vec<(Nanos, String)> {
    if lines.len() > LINES {
        let cut = lines.len() - LINES;
        let at = lines[LINES / 2].0;
        lines.drain(LINES / 2..LINES / 2 + cut);
        lines.push((at, format!("... {cut} more lines")));
    }
    lines
}
