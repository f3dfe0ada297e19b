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
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
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
        let (releases, others): (Vec<_>, Vec<_>) =
            self.steps.drain(..).partition(|step| step.call.is_release());
        for step in releases.into_iter().chain(others) {
            self.push(step);
        }
    }

    /// When the first of them is over its time.
    pub(super) fn due(&self) -> Option<Instant> {
        self.steps.front().map(|step| step.deadline)
    }

    pub(super) fn pop_overdue(&mut self, now: Instant) -> Option<Step> {
        if self.due()? > now {
            return None;
        }
        self.steps.pop_front()
    }

    /// Those that go out together next.
    pub(super) fn take(&mut self) -> Option<Vec<Step>> {
        let first = self.steps.front()?;
        let mut weight = 0;
        let count = if first.alone {
            1
        } else {
            let company = self.steps.iter().take(BATCH).take_while(|step| {
                weight += step.call.weight();
                !step.alone && weight <= HEAVY
            });
            company.count().max(1)
        };
        Some(self.steps.drain(..count).collect())
    }
}
