//! The trace of a shrunk world, for people.

use std::collections::BTreeMap;

use crate::check::Violation;
use crate::trace::{Line, Who};
use crate::words;

/// A line that processes and stores have repeated this many times is omitted from then on.
const OFTEN: usize = 2;
/// So many lines of a row that could be left out are told: those before something happens.
const LAST: usize = 3;

/// How many lines a story has.
pub(crate) fn length(lines: &[Line]) -> usize {
    told(lines).len()
}

/// A story, line by line, up to its violation.
pub(crate) fn told(lines: &[Line]) -> Vec<String> {
    let end = lines.iter().position(Line::is_violation);
    let lines = end.map_or(lines, |end| &lines[..=end]);
    // Replies come, unless a line says that they do not.
    let is_new = |line: &&Line| !line.event.starts_with(words::AS_EXPECTED);
    let mut lines: Vec<_> = lines.iter().filter(is_new).cloned().collect();
    // Processes with clocks of their own run one after the other for some milliseconds.
    lines.sort_by_key(|line| (line.is_violation(), line.at));
    let lines = lines.as_slice();
    let repeats = repeats(lines);
    let mut told = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let row = repeats[at..].iter().take_while(|repeats| **repeats).count();
        if row > LAST + 1 {
            let left = row - LAST;
            told.push(format!("{:>9}  {:<8}  … {left} more lines like these", "", ""));
            at += left;
        }
        for line in &lines[at..(at + row.clamp(1, LAST + 1)).min(lines.len())] {
            told.push(words::with_short_tokens(&line.to_string()));
            at += 1;
        }
    }
    told
}

/// What the violation at the end of a story means.
pub(crate) fn moral(violation: &Violation) -> String {
    format!("{:>9}  {:<8}  so {}", "", "", words::suffered(violation.of))
}

/// Which lines only say what was said often: the same but for times, tokens and numbers of grants.
fn repeats(lines: &[Line]) -> Vec<bool> {
    let mut seen = BTreeMap::new();
    let said_often = |line: &Line| {
        if matches!(line.who, Who::User(..) | Who::World) {
            return false;
        }
        let times = seen
            .entry((line.who.to_string(), shape(&line.event)))
            .or_insert(0);
        *times += 1;
        *times > OFTEN
    };
    lines.iter().map(said_often).collect()
}

/// An event without its numbers, but with those of keys, processes and stores.
fn shape(event: &str) -> String {
    let is_amount = |word: &&str| !word.starts_with(|first: char| first.is_ascii_digit());
    let words = event.split([' ', '(', ')']).filter(is_amount);
    let words = words.map(|word| word.split('#').next().unwrap_or_default());
    words.collect::<Vec<_>>().join(" ")
}
