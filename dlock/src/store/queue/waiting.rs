//! The steps that wait, and the order of those that have a key in common.

use std::collections::VecDeque;
use std::mem::{Discriminant, discriminant, take};
use std::sync::Arc;

use tokio::time::Instant;

use super::job::{Job, Step};
use crate::base::chance::HashMap;

/// So many steps of a sort in a row without room are a sign that there is none for the rest of it either: a hundred thousand
/// that wait are not looked at for each round trip. A few may only be larger than those behind them.
const REFUSED: usize = 64;

/// The steps that wait.
#[derive(Debug)]
pub(super) struct Waiting<S: Step> {
    sorts: Vec<Sort<S>>,
    lines: Lines,
    /// The numbers of the next step that goes before all others, and of the next one behind them.
    next: (i64, i64),
}

/// The steps of a sort, in the order of their numbers. It is expected that they need the same room.
#[derive(Debug)]
struct Sort<S: Step> {
    of: (Discriminant<S>, bool),
    jobs: VecDeque<Job<S>>,
}

/// For each key, the numbers of its steps: one is sent after the other.
#[derive(Debug, Default)]
struct Lines(HashMap<Arc<str>, Line>);

#[derive(Debug, Default)]
struct Line {
    in_flight: Option<i64>,
    /// In ascending order.
    waiting: VecDeque<i64>,
}

/// The steps that are sent next.
#[derive(Debug)]
pub(super) struct Taken<S: Step> {
    pub(super) jobs: Vec<Job<S>>,
    /// Those that nobody waits for any more. Drop them without the queue's mutex: that wakes their callers.
    pub(super) late: Vec<Job<S>>,
    /// When the first delayed step may be sent.
    pub(super) due: Option<Instant>,
}

/// The steps of a sort that stay, and how many there was no room for since the last one that goes.
#[derive(Debug)]
struct Look<S: Step> {
    stay: Vec<Job<S>>,
    refused: usize,
}

impl<S: Step> Waiting<S> {
    pub(super) fn new() -> Waiting<S> {
        Waiting {
            sorts: Vec::new(),
            lines: Lines::default(),
            next: (-1, 0),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sorts.iter().all(|sort| sort.jobs.is_empty())
    }

    /// Adds a step behind all others.
    pub(super) fn push(&mut self, mut job: Job<S>) {
        job.number = self.next.1;
        self.next.1 += 1;
        for key in job.step.keys() {
            let line = self.lines.of(key);
            if line.waiting.back() != Some(&job.number) {
                line.waiting.push_back(job.number);
            }
        }
        self.sort_of(&job.step).push_back(job);
    }

    /// Puts a step that was taken before all others.
    pub(super) fn put_back(&mut self, mut job: Job<S>) {
        job.number = self.next.0;
        self.next.0 -= 1;
        for key in job.step.keys() {
            let line = self.lines.of(key);
            line.in_flight = None;
            if line.waiting.front() != Some(&job.number) {
                line.waiting.push_front(job.number);
            }
        }
        self.sort_of(&job.step).push_front(job);
    }

    fn sort_of(&mut self, step: &S) -> &mut VecDeque<Job<S>> {
        let of = (discriminant(step), step.acquires());
        let at = self.sorts.iter().position(|sort| sort.of == of);
        let at = at.unwrap_or_else(|| {
            let jobs = VecDeque::new();
            self.sorts.push(Sort { of, jobs });
            self.sorts.len() - 1
        });
        &mut self.sorts[at].jobs
    }

    /// Records that a step is no longer in flight.
    pub(super) fn done(&mut self, step: &S) {
        for key in step.keys() {
            self.lines.change(key, |line| line.in_flight = None);
        }
    }

    /// Records that the step of this number is no longer in flight. Returns false if that was known.
    pub(super) fn ended(&mut self, number: i64, keys: &[Arc<str>]) -> bool {
        let mut is_news = false;
        for key in keys {
            self.lines.change(key, |line| {
                let was_in_flight = line.in_flight.take_if(|in_flight| *in_flight == number);
                is_news |= was_in_flight.is_some();
            });
        }
        is_news
    }

    /// Takes the steps that may be sent, in their order: of each key the first, unless another one is in flight.
    pub(super) fn take(&mut self, now: Instant, mut has_room: impl FnMut(&Job<S>) -> bool) -> Taken<S> {
        let (mut jobs, mut late, mut due) = (Vec::new(), Vec::new(), None::<Instant>);
        let mut looks: Vec<Look<S>> = self.sorts.iter().map(|_| Look::new()).collect();
        while let Some(at) = self.next_sort(&looks)
            && let Some(job) = self.sorts[at].jobs.pop_front()
        {
            let look = &mut looks[at];
            if !job.is_due(now) {
                self.lines.leave(&job);
                late.push(job);
                continue;
            }
            let early = job.not_before.filter(|time| *time > now);
            if let Some(time) = early {
                due = Some(due.map_or(time, |before| before.min(time)));
            }
            if early.is_some() || !self.may_go(&job, now, &mut late) {
                look.stay.push(job);
            } else if !has_room(&job) {
                look.refused += 1;
                look.stay.push(job);
            } else if job.send_state.send() {
                look.refused = 0;
                self.lines.go(&job);
                jobs.push(job);
            } else {
                // Its caller has just given it up.
                self.lines.leave(&job);
                late.push(job);
            }
        }
        for (sort, look) in self.sorts.iter_mut().zip(looks) {
            for job in look.stay.into_iter().rev() {
                sort.jobs.push_front(job);
            }
        }
        Taken { jobs, late, due }
    }

    /// Whether a step is the next one of all of its keys. Takes those out before it that nobody waits for any more: they may stand
    /// far behind, among steps that are not looked at.
    fn may_go(&mut self, job: &Job<S>, now: Instant, late: &mut Vec<Job<S>>) -> bool {
        loop {
            let Some(first) = self.lines.before(job) else {
                return self.lines.may_go(job);
            };
            let found = self.sorts.iter_mut().find_map(|Sort { jobs, .. }| {
                let at = jobs.binary_search_by_key(&first, |job| job.number).ok()?;
                (!jobs[at].is_due(now)).then(|| jobs.remove(at)).flatten()
            });
            let Some(found) = found else { return false };
            self.lines.leave(&found);
            late.push(found);
        }
    }

    /// The sort of the first step that was not looked at yet, among those that may have room.
    fn next_sort(&self, looks: &[Look<S>]) -> Option<usize> {
        let open = self.sorts.iter().zip(looks).enumerate();
        let first = open.filter_map(|(at, (sort, look))| match look.refused < REFUSED {
            true => sort.jobs.front().map(|job| (job.number, at)),
            false => None,
        });
        first.min().map(|(_, at)| at)
    }

    /// Takes the steps out that nobody waits for any more.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<Job<S>> {
        let mut late = Vec::new();
        for sort in &mut self.sorts {
            for job in take(&mut sort.jobs) {
                match job.is_due(now) {
                    true => sort.jobs.push_back(job),
                    false => late.push(job),
                }
            }
        }
        late.iter().for_each(|job| self.lines.leave(job));
        late
    }

    /// Takes all steps out, in their order.
    pub(super) fn take_all(&mut self) -> Vec<Job<S>> {
        let sorts = self.sorts.iter_mut();
        let mut all: Vec<_> = sorts.flat_map(|sort| take(&mut sort.jobs)).collect();
        all.sort_unstable_by_key(|job| job.number);
        all.iter().for_each(|job| self.lines.leave(job));
        all
    }
}

impl<S: Step> Look<S> {
    fn new() -> Look<S> {
        Look {
            stay: Vec::new(),
            refused: 0,
        }
    }
}

impl Lines {
    fn of(&mut self, key: &Arc<str>) -> &mut Line {
        self.0.entry(key.clone()).or_default()
    }

    /// Changes the line of a key, and forgets it if nothing is left in it.
    fn change(&mut self, key: &Arc<str>, change: impl FnOnce(&mut Line)) {
        let Some(line) = self.0.get_mut(key) else { return };
        change(line);
        if line.in_flight.is_none() && line.waiting.is_empty() {
            self.0.remove(key);
        }
    }

    /// Whether a step is the next one of all of its keys.
    fn may_go<S: Step>(&self, job: &Job<S>) -> bool {
        let is_next = |line: &Line| {
            line.in_flight.is_none() && line.waiting.front().is_none_or(|first| *first == job.number)
        };
        job.step.keys().all(|key| self.0.get(key).is_none_or(is_next))
    }

    /// Returns the number of a step that goes before this one, if there is one.
    fn before<S: Step>(&self, job: &Job<S>) -> Option<i64> {
        let lines = job.step.keys().filter_map(|key| self.0.get(key));
        let mut firsts = lines.filter_map(|line| line.waiting.front());
        firsts.find(|first| **first != job.number).copied()
    }

    /// Records that a step that may go is in flight.
    fn go<S: Step>(&mut self, job: &Job<S>) {
        for key in job.step.keys() {
            let line = self.of(key);
            if line.waiting.front() == Some(&job.number) {
                line.waiting.pop_front();
            }
            line.in_flight = Some(job.number);
        }
    }

    /// Forgets a step that waits.
    fn leave<S: Step>(&mut self, job: &Job<S>) {
        for key in job.step.keys() {
            self.change(key, |line| {
                if let Ok(at) = line.waiting.binary_search(&job.number) {
                    line.waiting.remove(at);
                }
            });
        }
    }
}
