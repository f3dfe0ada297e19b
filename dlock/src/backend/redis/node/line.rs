//! The steps that wait to be sent, in their order.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::Step;

/// Steps in one call.
const BATCH: usize = 256;
/// Bytes that the steps of one call may bring along, unless one alone has more: so that a large result
/// delays few others.
const HEAVY: usize = 1024 * 1024;

#[derive(Default)]
pub(super) struct Line {
    steps: VecDeque<Step>,
    next: u64,
    /// Releases that have failed, for the time until whoever asked for them asks again: an acquire that comes
    /// in between shall not find the lock taken. They go out before everything else.
    failed_releases: VecDeque<Step>,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.failed_releases.is_empty()
    }

    /// Keeps a release that has failed until its deadline, which is never before that of one kept earlier.
    pub(super) fn keep(&mut self, release: Step) {
        self.failed_releases.push_back(release);
    }

    pub(super) fn push(&mut self, mut step: Step) {
        step.place = self.next;
        self.next += 1;
        self.steps.push_back(step);
    }

    /// Steps that were sent and are to be sent again go to where they were: before all that came after them.
    pub(super) fn put_back(&mut self, steps: impl IntoIterator<Item = Step>) {
        let before = self.steps.len();
        self.steps.extend(steps);
        if self.steps.len() > before {
            self.steps.make_contiguous().sort_by_key(|step| step.place);
        }
    }

    /// Releases go first from now on: what is free shall be seen as free.
    pub(super) fn releases_first(&mut self) {
        let (releases, others): (Vec<_>, Vec<_>) = self
            .steps
            .drain(..)
            .partition(|step| step.call.releases().is_some());
        for step in releases.into_iter().chain(others) {
            self.push(step);
        }
    }

    /// When the first of them is over its time.
    pub(super) fn due(&self) -> Option<Instant> {
        let queues = [&self.steps, &self.failed_releases];
        let fronts = queues.into_iter().filter_map(VecDeque::front);
        fronts.map(|step| step.deadline).min()
    }

    pub(super) fn pop_overdue(&mut self, now: Instant) -> Option<Step> {
        let queues = [&mut self.steps, &mut self.failed_releases];
        let is_overdue = |queue: &&mut VecDeque<Step>| queue.front().is_some_and(|step| step.deadline <= now);
        queues.into_iter().find(is_overdue)?.pop_front()
    }

    /// Those that go out together next.
    pub(super) fn take(&mut self) -> Option<Vec<Step>> {
        if !self.failed_releases.is_empty() {
            let count = self.failed_releases.len().min(BATCH);
            return Some(self.failed_releases.drain(..count).collect());
        }
        let first = self.steps.front()?;
        let (mut weight, mut width) = (0, 0);
        let count = if first.alone {
            1
        } else {
            let company = self.steps.iter().take_while(|step| {
                weight += step.call.weight();
                width += step.call.width();
                !step.alone && weight <= HEAVY && width <= BATCH
            });
            company.count().max(1)
        };
        Some(self.steps.drain(..count).collect())
    }
}
