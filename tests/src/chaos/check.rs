//! What is wrong with a history.
//!
//! Every finding is proved, none is a guess. A hold is certain from the return of its acquire to the beginning of the
//! last check that answered held (a loss is final, so a check in between would have had the same answer), and two
//! certain holds of one key at a time are a violation whatever the reason, unless both read, or both have permits and
//! there are enough.
//!
//! A late loss is harder to prove: a stopped process cannot learn anything, so a check that answers lost long after
//! the previous check may be late for reasons outside dlock. But between a check that answers held and the moment at
//! which the store grants the lock to another client there is the safety margin of the lease, at least 10 ms. So when
//! checks follow each other faster than that and another client is granted the lock between a "held" and a "lost",
//! the margin was not kept.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::clock::{Nanos, nanos};
use super::event::Share;
use super::history::{Forgotten, History, Hold};
use super::store::{LONGEST_LEASE, TIMEOUT};

/// The least margin of a lease, less what is lost to whole milliseconds on the server.
const MARGIN: Nanos = 9_000_000;

/// How long the reply to an acquire may be in flight after its process is gone: a step ends by then.
const ANSWER: Duration = TIMEOUT;

/// What is wrong, and the holds that show it.
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    pub(crate) what: String,
    pub(crate) from: Nanos,
    pub(crate) to: Nanos,
    pub(crate) holds: Vec<usize>,
}

/// All violations, by kind.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) violations: Vec<Finding>,
    pub(crate) late_losses: Vec<Finding>,
    /// The same where the store had lost its data in between.
    pub(crate) unprotected: Vec<Finding>,
}

/// Checks the whole history.
pub(crate) fn check(history: &History) -> Findings {
    let mut findings = Findings::default();
    let mut keys: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (at, hold) in history.holds.iter().enumerate() {
        keys.entry(hold.key).or_default().push(at);
        for wrong in &hold.wrong {
            findings.violations.push(Finding {
                what: format!("{hold}: {wrong}"),
                from: hold.asked,
                to: hold.over.unwrap_or(history.end),
                holds: vec![at],
            });
        }
    }
    for holds in keys.values() {
        let mut of_key = OfKey {
            history,
            findings: &mut findings,
            certain: certain(history, holds),
        };
        of_key.overlaps();
        of_key.late_losses();
        of_key.tokens_in_order_of_holds();
        tokens_in_order_of_requests(history, holds, &mut findings);
    }
    register(history, &mut findings);
    for found in [
        &mut findings.violations,
        &mut findings.late_losses,
        &mut findings.unprotected,
    ] {
        found.sort_by_key(|finding| finding.from);
    }
    findings
}

/// A certain hold.
#[derive(Debug, Clone, Copy)]
struct Certain {
    at: usize,
    from: Nanos,
    to: Nanos,
}

fn certain(history: &History, holds: &[usize]) -> Vec<Certain> {
    let of = |at: &usize| {
        let (from, to) = history.holds[*at].certain()?;
        Some(Certain { at: *at, from, to })
    };
    let mut certain: Vec<_> = holds.iter().filter_map(of).collect();
    certain.sort_by_key(|hold| hold.from);
    certain
}

/// Whether the store may have forgotten the first of two grants before it gave the second; or whether there were two
/// stores, and the second grant was lost.
fn excused(forgotten: &[Forgotten], first: &Hold, second: &Hold) -> bool {
    let until = second.granted.unwrap_or(Nanos::MAX);
    let second_is_lost = |lost: &Forgotten| lost.splits && loses(lost, second, second.origin, until);
    lost_data(forgotten, first, until) || forgotten.iter().any(second_is_lost)
}

fn lost_data(forgotten: &[Forgotten], hold: &Hold, until: Nanos) -> bool {
    forgotten.iter().any(|lost| loses(lost, hold, hold.origin, until))
}

/// Whether a grant that was asked for at `asked` may have been lost before `until`: that was before the end of the time, which
/// had begun by then. No server confirms a lost grant, so its holder believed in it for one more lease at most.
fn loses(lost: &Forgotten, hold: &Hold, asked: Nanos, until: Nanos) -> bool {
    lost.key.is_none_or(|key| key == hold.key)
        && lost.from <= until
        && lost.to >= asked
        && hold
            .held
            .is_none_or(|held| held <= lost.to + nanos(LONGEST_LEASE))
}

struct OfKey<'a> {
    history: &'a History,
    findings: &'a mut Findings,
    certain: Vec<Certain>,
}

impl OfKey<'_> {
    fn hold(&self, of: Certain) -> &Hold {
        &self.history.holds[of.at]
    }

    fn excused(&self, first: Certain, second: Certain) -> bool {
        excused(&self.history.forgotten, self.hold(first), self.hold(second))
    }

    /// The same where the second grant may be the lost one, as its token says: a process may hear of a grant, or hand
    /// it off, only after the store has forgotten it and has granted another one.
    fn either_excused(&self, first: Certain, second: Certain) -> bool {
        let was_before = self.hold(second).token < self.hold(first).token;
        self.excused(first, second) || was_before && self.excused(second, first)
    }

    fn excludes(&self, first: Certain, second: Certain) -> bool {
        self.hold(first).share.excludes(self.hold(second).share)
    }

    /// The permits of a hold; none of those that ask for something else.
    fn permits(&self, of: Certain) -> u32 {
        match self.hold(of).share {
            Share::Permits { amount, .. } => amount,
            Share::All | Share::Read => 0,
        }
    }

    /// Whether a semaphore has fewer permits than these holds and the last one have together.
    fn too_few_for(&self, others: &[Certain], last: Certain) -> bool {
        let Share::Permits { amount, total } = self.hold(last).share else {
            return false;
        };
        let held: u32 = others.iter().map(|other| self.permits(*other)).sum();
        amount + held > total
    }

    /// Those of these holds that the store still had, and knew of, when it granted the last one.
    fn known_to_store(&self, others: &[Certain], last: Certain) -> Vec<Certain> {
        let others = others.iter().copied();
        others
            .filter(|other| !self.either_excused(*other, last))
            .collect()
    }

    /// Two holders at a time, or more permits than there are.
    fn overlaps(&mut self) {
        let mut open: Vec<Certain> = Vec::new();
        for second in self.certain.clone() {
            open.retain(|first| first.to > second.from);
            if self.too_few_for(&open, second) {
                let b = self.hold(second);
                let finding = Finding {
                    what: format!("{b} was granted while others held too many permits"),
                    from: open.iter().map(|first| first.from).min().unwrap_or(second.from),
                    to: second.to,
                    holds: open.iter().chain([&second]).map(|hold| hold.at).collect(),
                };
                match self.too_few_for(&self.known_to_store(&open, second), second) {
                    true => self.findings.violations.push(finding),
                    false => self.findings.unprotected.push(finding),
                }
            }
            for first in open.clone() {
                if !self.excludes(first, second) {
                    continue;
                }
                let (a, b) = (self.hold(first), self.hold(second));
                let finding = Finding {
                    what: format!("{a} answered held after {b} was granted"),
                    from: first.from,
                    to: first.to.min(second.to),
                    holds: vec![first.at, second.at],
                };
                match self.either_excused(first, second) {
                    true => self.findings.unprotected.push(finding),
                    false => self.findings.violations.push(finding),
                }
            }
            open.push(second);
        }
    }

    /// Losses that were told after another client was granted the lock.
    fn late_losses(&mut self) {
        for at in 0..self.certain.len() {
            let first = self.certain[at];
            let hold = self.hold(first);
            let all_told = told(self.history, hold);
            if all_told.is_empty() {
                continue;
            }
            // The first client that was granted what this one had.
            let mut later = self.certain[at + 1..].iter().copied();
            let Some(second) = later.find(|second| second.from > first.from && self.replaces(first, *second))
            else {
                continue;
            };
            let late = all_told.into_iter().find(|told| match *told {
                // A later check answered held.
                _ if first.to > second.from => true,
                Told::Asked { before, heard } => {
                    second.from > before && heard > second.from && heard - before <= MARGIN
                }
                Told::Signal { since, at } => second.from > since && at > second.from,
                Told::AtRelease { .. } => false,
            });
            let Some(told) = late else { continue };
            let b = self.hold(second);
            let finding = Finding {
                what: format!("{hold} was told that it is lost after {b} was granted"),
                from: first.from,
                to: told.last(),
                holds: vec![first.at, second.at],
            };
            let overlap = first.to > second.from;
            let excused = match overlap {
                true => self.either_excused(first, second),
                false => self.excused(first, second),
            };
            match (excused, overlap) {
                (false, _) => self.findings.late_losses.push(finding),
                (true, false) => self.findings.unprotected.push(finding),
                // That kind counts it already.
                (true, true) => {}
            }
        }
    }

    /// Whether the store could grant the second only after the first had ended.
    fn replaces(&self, first: Certain, second: Certain) -> bool {
        if self.excludes(first, second) || self.permits(second) == 0 {
            return self.excludes(first, second);
        }
        let begun = self.certain.iter().take_while(|other| other.from <= second.from);
        let others = begun
            .copied()
            .filter(|other| other.at != first.at && other.at != second.at && second.from < other.to);
        let mut held = self.known_to_store(&others.collect::<Vec<_>>(), second);
        held.push(first);
        self.too_few_for(&held, second)
    }

    /// A later holder has the greater token; those that share a key may learn of their grants in any order.
    fn tokens_in_order_of_holds(&mut self) {
        for at in 1..self.certain.len() {
            let (first, second) = (self.certain[at - 1], self.certain[at]);
            let (a, b) = (self.hold(first), self.hold(second));
            let in_order = a.token < b.token || !self.excludes(first, second);
            if in_order || second.from <= first.to || self.either_excused(first, second) {
                continue;
            }
            let finding = Finding {
                what: format!("{b} came after {a}, and its token is not greater"),
                from: first.from,
                to: second.to,
                holds: vec![first.at, second.at],
            };
            self.findings.violations.push(finding);
        }
    }
}

/// How a hold was told that it is lost.
#[derive(Debug, Clone, Copy)]
enum Told {
    /// By a check, the first after one that had answered held.
    Asked { before: Nanos, heard: Nanos },
    /// By `lost()`, long after a check had answered lost, though the runtime ran all the time.
    Signal { since: Nanos, at: Nanos },
    /// By the answer to its release.
    AtRelease { at: Nanos },
}

impl Told {
    fn last(self) -> Nanos {
        match self {
            Told::Asked { heard: at, .. } | Told::Signal { at, .. } | Told::AtRelease { at } => at,
        }
    }
}

/// All ways in which a hold was told that it is lost.
fn told(history: &History, hold: &Hold) -> Vec<Told> {
    let Some(lost) = &hold.lost else {
        return match &hold.gone {
            Some((at, answer)) if answer.starts_with("lost") => vec![Told::AtRelease { at: *at }],
            _ => Vec::new(),
        };
    };
    let (before, heard) = (lost.before, lost.heard);
    let mut told = vec![Told::Asked { before, heard }];
    // With other threads the thread that gives the signal may stand still alone.
    if let Some((at, gap)) = hold.told
        && at > heard
        && gap <= MARGIN
        && history.single.contains(&hold.id.life)
    {
        told.push(Told::Signal { since: heard, at });
    }
    told
}

/// A grant that was asked for after another one was given has greater tokens, whatever happened in between; and no
/// token is given twice. (What a process hands off of a grant that its store has lost meanwhile keeps the tokens of
/// that grant: it is the fenced resource that refuses them then, as it should.)
fn tokens_in_order_of_requests(history: &History, holds: &[usize], findings: &mut Findings) {
    let granted = |at: &usize| {
        let hold = &history.holds[*at];
        hold.granted.map(|granted| (granted, *at))
    };
    let mut by_grant: Vec<_> = holds.iter().filter_map(granted).collect();
    by_grant.sort_unstable();
    let mut by_request: Vec<_> = by_grant
        .iter()
        .map(|(_, at)| (history.holds[*at].origin, *at))
        .collect();
    by_request.sort_unstable();
    let mut owners: HashMap<u64, usize> = HashMap::new();
    let (mut granted, mut greatest) = (0, None::<(u64, usize)>);
    for (asked, second) in by_request {
        while let Some((_, first)) = by_grant.get(granted).filter(|(at, _)| *at < asked) {
            greatest = greatest.max(Some((history.holds[*first].token, *first)));
            granted += 1;
        }
        let b = &history.holds[second];
        let twice = owners.insert(b.token, second);
        let older = greatest
            .filter(|(token, _)| *token >= b.token)
            .map(|(_, first)| first);
        if let Some(first) = twice.or(older) {
            let a = &history.holds[first];
            let what = match twice {
                Some(_) => format!("{a} and {b} have the same token"),
                None => format!("{b} was asked for after {a} was granted, and its token is not greater"),
            };
            let finding = Finding {
                what,
                from: a.asked.min(b.asked),
                to: b.granted.max(a.granted).unwrap_or(history.end),
                holds: vec![first, second],
            };
            match twice.is_none() && is_left_by_another(history, holds, a, b) {
                true => findings.unprotected.push(finding),
                false => findings.violations.push(finding),
            }
        }
    }
}

/// Whether the second may have been handed a grant that another task of its process had asked for before the first was
/// granted, and had not waited for; and that grant was lost.
fn is_left_by_another(history: &History, holds: &[usize], first: &Hold, second: &Hold) -> bool {
    let (Some(granted), Some(until)) = (first.granted, second.granted) else {
        return false;
    };
    let left_it = |other: &&Hold| {
        other.id.life == second.id.life
            && other.granted.is_none()
            && other.asked < granted
            && other
                .over
                .is_some_and(|over| over + nanos(ANSWER) >= second.asked)
    };
    let others = holds.iter().map(|at| &history.holds[*at]).filter(left_it);
    let origins: Vec<_> = others.map(|other| other.asked).collect();
    history
        .forgotten
        .iter()
        .any(|lost| origins.iter().any(|asked| loses(lost, second, *asked, until)))
}

/// The register accepted no older token, and refused no holder of the lock.
fn register(history: &History, findings: &mut Findings) {
    let by_id: HashMap<_, _> = history
        .holds
        .iter()
        .enumerate()
        .map(|(at, hold)| (hold.id, at))
        .collect();
    let mut last: HashMap<usize, u64> = HashMap::new();
    for write in &history.writes {
        let known = by_id.get(&write.hold).copied();
        let mut wrong = |what: String| {
            findings.violations.push(Finding {
                what,
                from: write.at,
                to: write.at,
                holds: known.into_iter().collect(),
            });
        };
        let last = last.entry(write.key).or_default();
        let (hold, token) = (write.hold, write.token);
        match write.refused_by {
            None => {
                if token < *last {
                    wrong(format!(
                        "the register took a write of {hold} with token {token} after {last}"
                    ));
                }
                *last = token.max(*last);
            }
            Some(newer) => {
                let Some(hold) = known.map(|at| &history.holds[at]) else {
                    continue;
                };
                let held = hold
                    .certain()
                    .is_some_and(|(from, to)| from <= write.at && write.at <= to);
                if held && !lost_data(&history.forgotten, hold, write.at) {
                    wrong(format!(
                        "{hold} held the lock, and the register refused its write for {newer}"
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
