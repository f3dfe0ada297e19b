//! The steps that wait to be sent, in their order, and which of them go together.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::Step;
use super::plain_acquire;
use super::replicas::Gate;
use crate::store::GrantId;
use crate::stores::redis::cluster::slot::Slot;
use crate::stores::redis::script::Verb;

/// The maximum number of steps in one call.
const BATCH: usize = 256;
/// The maximum number of bytes of the steps of one call, unless one alone has more: so that a large result delays few
/// others.
const HEAVY: usize = 1024 * 1024;
/// How far to search, from the front, for a step that can be sent now.
const WINDOW: usize = 1024;
/// How far to search, from that step on, for others of its slot.
const NEAR: usize = BATCH;

pub(super) struct SendQueue {
    steps: VecDeque<Step>,
    /// The number of the next step. The servers of a Cluster share the count, so that steps keep their order when they
    /// move.
    next: Arc<AtomicU64>,
    /// Steps from this number on may time out before the releases that overtook them.
    overtaken_from: Option<u64>,
    /// When the first held-back step can be sent, as of the last check.
    pub(super) wakes_at: Option<Instant>,
    /// Failed releases, until their callers ask again: an acquire in between must not find the lock taken. They are
    /// sent before everything else.
    failed_releases: VecDeque<Step>,
}

impl SendQueue {
    pub(super) fn new(next: Arc<AtomicU64>) -> SendQueue {
        SendQueue {
            steps: VecDeque::new(),
            next,
            overtaken_from: None,
            wakes_at: None,
            failed_releases: VecDeque::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len() + self.failed_releases.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.failed_releases.is_empty()
    }

    /// Keeps a failed release until its deadline, which is never before that of one kept earlier.
    pub(super) fn keep(&mut self, release: Step) {
        self.failed_releases.push_back(release);
    }

    pub(super) fn push(&mut self, mut step: Step) {
        step.number = 1 + self.next.fetch_add(1, Ordering::Relaxed);
        self.steps.push_back(step);
    }

    /// Puts steps to be resent back to their positions: before all later ones.
    pub(super) fn put_back(&mut self, steps: impl IntoIterator<Item = Step>) {
        let (before, kept) = (self.steps.len(), self.failed_releases.len());
        for step in steps {
            match step.number {
                // It was kept, and may have much longer than the others.
                0 => self.failed_releases.push_back(step),
                _ => self.steps.push_back(step),
            }
        }
        if self.steps.len() > before {
            self.steps.make_contiguous().sort_by_key(|step| step.number);
        }
        if self.failed_releases.len() > kept {
            self.failed_releases
                .make_contiguous()
                .sort_by_key(|step| step.deadline);
        }
    }

    /// Sends releases first from now on, so that released locks are seen as available. A release whose acquire is in
    /// the queue too stays behind that: a quorum that has decided waits for no member.
    pub(super) fn releases_first(&mut self) {
        let acquires = self.steps.iter().filter(|step| step.call.is_acquire());
        let taken: HashSet<String> = acquires.flat_map(|step| step.call.takes()).collect();
        let goes_first = |step: &Step| {
            let ends = step.call.releases();
            ends.is_some_and(|grant| taken.is_empty() || !taken.contains(&grant.to_string()))
        };
        let (releases, others): (Vec<_>, Vec<_>) = self.steps.drain(..).partition(goes_first);
        releases.into_iter().for_each(|step| self.push(step));
        self.overtaken_from = Some(1 + self.next.load(Ordering::Relaxed));
        others.into_iter().for_each(|step| self.push(step));
    }

    /// The index of the first step that releases have overtaken.
    fn first_overtaken(&self) -> Option<usize> {
        let from = self.overtaken_from?;
        let index = self.steps.partition_point(|step| step.number < from);
        (index < self.steps.len()).then_some(index)
    }

    /// When the first of them times out.
    pub(super) fn due(&self) -> Option<Instant> {
        let overtaken = self.first_overtaken().map(|index| &self.steps[index]);
        let fronts = [self.steps.front(), overtaken, self.failed_releases.front()];
        fronts.into_iter().flatten().map(|step| step.deadline).min()
    }

    pub(super) fn pop_overdue(&mut self, now: Instant) -> Option<Step> {
        // The step may be gone; else the next choice finds it.
        self.wakes_at.take_if(|at| *at <= now);
        let is_overdue = |step: &Step| step.deadline <= now;
        if self.steps.front().is_some_and(is_overdue) {
            return self.steps.pop_front();
        }
        let overtaken = self.first_overtaken();
        if let Some(index) = overtaken.filter(|index| is_overdue(&self.steps[*index])) {
            return self.steps.remove(index);
        }
        match self.failed_releases.front().is_some_and(is_overdue) {
            true => self.failed_releases.pop_front(),
            false => None,
        }
    }

    /// The key that all of them are about, if they are cheaper in company.
    pub(super) fn company_on(&self) -> Option<&str> {
        let key = &self.steps.front()?.call.key;
        let is_company = |step: &Step| step.call.is_cheaper_in_company() && step.call.key == *key;
        (self.failed_releases.is_empty() && self.steps.iter().all(is_company)).then_some(key)
    }

    /// Takes the steps to send together next: steps of one slot, if another call may be made there, and at most [`BATCH`]
    /// unless one alone is more.
    pub(super) fn take(
        &mut self,
        now: Instant,
        mut gate: Gate,
        mut may_send: impl FnMut(Option<Slot>) -> bool,
    ) -> Option<Vec<Step>> {
        let mut held_back = HeldBack::default();
        let mut kept = self.failed_releases.iter().take(WINDOW);
        let first = kept.position(|step| !held_back.keeps(step, now) && may_send(step.call.slot));
        if let Some(at) = first {
            let may_go = |step: &Step| !held_back.keeps(step, now);
            return Some(company(&mut self.failed_releases, at, may_go));
        }
        let mut may_go = |step: &Step| !held_back.keeps(step, now) && gate.lets(step);
        let mut steps = self.steps.iter().take(WINDOW);
        let at = steps.position(|step| may_go(step) && may_send(step.call.slot));
        let taken = at.map(|at| company(&mut self.steps, at, may_go));
        self.wakes_at = held_back.wakes_at;
        taken
    }

    /// Takes the releases that commands can carry out, failed ones first, and behind them, if wanted, such acquires. Releases
    /// overtake releases, and plain acquires of other grants; acquires overtake acquires of other locks; any other step keeps
    /// later ones behind it. Returns whether it found steps that only the script can do now.
    pub(super) fn take_by_commands(&mut self, now: Instant, with_acquires: bool) -> (Vec<Step>, bool) {
        let can_go = |step: &Step| !step.by_script && step.not_before.is_none_or(|at| at <= now);
        let mut steps = Vec::new();
        if !self.failed_releases.is_empty() {
            let kept = self.failed_releases.iter().enumerate().take(BATCH);
            let kept = kept.filter(|(_, step)| step.call.plain_release().is_some() && can_go(step));
            let kept: Vec<_> = kept.map(|(index, _)| index).collect();
            steps = pick(&mut self.failed_releases, &kept);
        }
        let mut needs_script = !self.failed_releases.is_empty();
        let mut with_acquires = with_acquires && !needs_script;
        let mut acquired: SmallVec<[GrantId; 32]> = SmallVec::new();
        // The locks of acquires that stay.
        let mut later: SmallVec<[&str; 8]> = SmallVec::new();
        let mut indices: SmallVec<[usize; 32]> = SmallVec::new();
        for (index, step) in self.steps.iter().enumerate().take(BATCH - steps.len()) {
            match (step.call.plain_release(), &step.call.verb) {
                (_, Verb::Acquire { grant, .. }) => {
                    acquired.push(*grant);
                    let may_go = with_acquires && can_go(step) && plain_acquire::can_do(step);
                    if may_go && !later.contains(&&*step.call.key) {
                        indices.push(index);
                    } else {
                        needs_script = true;
                        later.push(&step.call.key);
                    }
                }
                (Some(grant), _) if can_go(step) && !acquired.contains(&grant) => indices.push(index),
                (None, _) if step.call.releases().is_none() => {
                    needs_script = true;
                    break;
                }
                // A release that stays may be of a lock that is acquired next.
                _ => (needs_script, with_acquires) = (true, false),
            }
        }
        drop(later);
        match steps.is_empty() {
            true => steps = pick(&mut self.steps, &indices),
            false => steps.extend(pick(&mut self.steps, &indices)),
        }
        // The order of releases stays, and that of acquires.
        steps.sort_by_key(|step| step.call.plain_release().is_none());
        (steps, needs_script)
    }

    /// Whether one of the first steps, all of them releases, was sent by commands before. It may have been carried out without
    /// its notification, for which only the same commands make up.
    pub(super) fn may_begin_with_untold_release(&self) -> bool {
        // Nothing prevents commands from taking it.
        let first = self
            .steps
            .iter()
            .take_while(|step| step.call.releases().is_some());
        let mut first = self.failed_releases.iter().chain(first).take(BATCH);
        first.any(|step| {
            // A failed release is kept as a new step.
            let was_sent = step.sent > 0 || step.number == 0;
            was_sent && !step.by_script && step.call.plain_release().is_some()
        })
    }

    /// Takes all steps of these slots: the queued ones, and the failed releases.
    pub(super) fn drain(&mut self, slots: &HashSet<Slot>) -> (Vec<Step>, Vec<Step>) {
        let is_theirs = |step: &Step| step.call.slot.is_some_and(|slot| slots.contains(&slot));
        (
            extract(&mut self.steps, is_theirs),
            extract(&mut self.failed_releases, is_theirs),
        )
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Step> {
        self.failed_releases.iter_mut().chain(&mut self.steps)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Step> {
        self.failed_releases.iter().chain(&self.steps)
    }

    /// Takes everything.
    pub(super) fn drain_all(&mut self) -> impl Iterator<Item = Step> + use<> {
        let kept = std::mem::take(&mut self.failed_releases);
        kept.into_iter().chain(std::mem::take(&mut self.steps))
    }
}

/// The steps that are held back, of those looked at so far.
#[derive(Default)]
struct HeldBack {
    /// When the first of them can be sent.
    wakes_at: Option<Instant>,
    slots: HashSet<Option<Slot>>,
    /// The ids of the grants that they take.
    grants: HashSet<String>,
}

impl HeldBack {
    /// Whether a step stays: it is held back itself, or waits behind another one.
    fn keeps(&mut self, step: &Step, now: Instant) -> bool {
        let call = &step.call;
        if step.not_before.is_some_and(|at| now < at) {
            self.wakes_at = self.wakes_at.into_iter().chain(step.not_before).min();
            self.slots.insert(call.slot);
            self.grants.extend(call.takes());
            return true;
        }
        if self.slots.is_empty() {
            return false;
        }
        // A step that begins something: one of these may be the release that makes that possible.
        let may_be_too_early = call.takes_token() && self.slots.contains(&call.slot);
        // A release before its acquire would find nothing.
        let ends = call.releases().filter(|_| !self.grants.is_empty());
        let stays = may_be_too_early || ends.is_some_and(|grant| self.grants.contains(&grant.to_string()));
        if stays {
            self.grants.extend(call.takes());
        }
        stays
    }
}

/// Takes the step at this index out of the queue, and later steps of its slot with it.
fn company(queue: &mut VecDeque<Step>, at: usize, mut may_go: impl FnMut(&Step) -> bool) -> Vec<Step> {
    let Some(first) = queue.get(at) else {
        return Vec::new();
    };
    let slot = first.call.slot;
    let (mut weight, mut work) = (first.call.weight(), first.call.work());
    let mut indices: SmallVec<[usize; 32]> = smallvec![at];
    if !first.alone {
        for (index, step) in queue.iter().enumerate().skip(at + 1).take(NEAR) {
            if step.call.slot != slot {
                continue;
            }
            weight += step.call.weight();
            work += step.call.work();
            if step.alone || weight > HEAVY || work > BATCH || !may_go(step) {
                break;
            }
            indices.push(index);
        }
    }
    pick(queue, &indices)
}

/// Takes the steps at these ascending indices out of the queue.
fn pick(queue: &mut VecDeque<Step>, indices: &[usize]) -> Vec<Step> {
    let (Some(first), Some(last)) = (indices.first(), indices.last()) else {
        return Vec::new();
    };
    if indices.len() == last - first + 1 {
        return queue.drain(*first..=*last).collect();
    }
    // From the back, so that the earlier indices stay valid.
    let mut steps: Vec<_> = indices
        .iter()
        .rev()
        .filter_map(|index| queue.remove(*index))
        .collect();
    steps.reverse();
    steps
}

fn extract(queue: &mut VecDeque<Step>, is_wanted: impl Fn(&Step) -> bool) -> Vec<Step> {
    if !queue.iter().any(&is_wanted) {
        return Vec::new();
    }
    let (wanted, others): (VecDeque<_>, _) = std::mem::take(queue).into_iter().partition(is_wanted);
    *queue = others;
    wanted.into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::test_steps::{self, release, step, undo};
    use super::*;
    use crate::base::clock;

    fn queue(steps: impl IntoIterator<Item = Step>) -> SendQueue {
        let mut queue = SendQueue::new(Arc::default());
        steps.into_iter().for_each(|step| queue.push(step));
        queue
    }

    fn taken(queue: &mut SendQueue) -> Vec<String> {
        let (steps, _) = queue.take_by_commands(clock::now(), false);
        steps.iter().map(|step| step.call.key.to_string()).collect()
    }

    fn acquire(key: &str, number: u64) -> Step {
        test_steps::acquire(key, number, 1)
    }

    #[tokio::test]
    async fn releases_go_before_acquires_but_not_before_that_of_the_same_grant() {
        let mut queue = queue([
            acquire("a", 1),
            release("b", 2),
            release("a", 1),
            acquire("c", 3),
            release("d", 4),
        ]);
        assert_eq!(taken(&mut queue), ["b", "d"]);
        assert_eq!((queue.len(), taken(&mut queue).len()), (3, 0));
    }

    #[tokio::test]
    async fn releases_stay_in_their_order_with_all_that_is_no_acquire() {
        let mut queue = queue([release("a", 1), step("b", Verb::Inspect), release("b", 2)]);
        assert_eq!(taken(&mut queue), ["a"]);
        assert_eq!(taken(&mut queue).len(), 0);
    }

    #[tokio::test]
    async fn what_the_script_has_to_release_is_not_taken() {
        let (undo, mut refused) = (undo("a", 1), release("b", 2));
        refused.by_script = true;
        let mut queue = queue([undo, refused, release("c", 3)]);
        assert_eq!(taken(&mut queue), ["c"]);
    }

    #[tokio::test]
    async fn acquires_follow_releases_and_wait_for_those_that_stay() {
        let keys =
            |steps: &[Step]| -> Vec<String> { steps.iter().map(|step| step.call.key.to_string()).collect() };
        let mut by_script = release("c", 3);
        by_script.by_script = true;
        let mut queue = queue([
            acquire("a", 1),
            release("b", 2),
            acquire("b", 4),
            by_script,
            acquire("c", 5),
            release("d", 6),
        ]);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert_eq!(
            (keys(&taken), needs_script),
            (["b", "d", "a", "b"].map(str::to_owned).to_vec(), true)
        );
        // The script takes the others, in their order.
        assert_eq!(queue.len(), 2);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert_eq!((keys(&taken), needs_script), (vec![], true));
    }

    #[tokio::test]
    async fn acquires_stay_behind_what_only_the_script_can_do() {
        let mut busy = acquire("a", 1);
        busy.by_script = true;
        let mut queue = queue([busy, acquire("b", 2), step("c", Verb::Inspect), acquire("d", 3)]);
        let (taken, needs_script) = queue.take_by_commands(clock::now(), true);
        assert!(needs_script && taken.len() == 1 && &*taken[0].call.key == "b");
    }

    #[tokio::test]
    async fn failed_releases_go_first() {
        let mut queue = queue([release("a", 1)]);
        queue.keep(release("b", 2));
        assert_eq!(taken(&mut queue), ["b", "a"]);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn failed_release_that_is_put_back_keeps_no_step_from_timing_out() {
        let mut queue = queue([acquire("a", 1)]);
        let mut kept = release("b", 2);
        kept.deadline += Duration::from_secs(3600);
        queue.put_back([kept]);
        let overdue = clock::now() + Duration::from_secs(60);
        assert_eq!(
            queue.pop_overdue(overdue).map(|step| step.call.key.to_string()),
            Some("a".to_owned())
        );
        assert_eq!(taken(&mut queue), ["b"]);
    }

    #[tokio::test]
    async fn steps_that_releases_have_overtaken_time_out_in_time() {
        let now = clock::now();
        let due_at = |mut step: Step, secs| {
            step.deadline = now + Duration::from_secs(secs);
            step
        };
        let mut queue = queue([due_at(acquire("a", 1), 1), due_at(release("b", 2), 3)]);
        queue.releases_first();
        queue.push(due_at(acquire("c", 3), 4));
        queue.push(due_at(release("d", 4), 5));
        queue.releases_first();
        let mut overdue = Vec::new();
        while let Some(due) = queue.due() {
            let step = queue.pop_overdue(due).unwrap();
            overdue.push((due.duration_since(now).as_secs(), step.call.key.to_string()));
        }
        let in_order = [(1, "a"), (3, "b"), (4, "c"), (5, "d")];
        assert_eq!(overdue, in_order.map(|(secs, key)| (secs, key.to_owned())));
    }

    #[tokio::test]
    async fn step_that_times_out_while_it_is_held_back_wakes_nobody_later() {
        let now = clock::now();
        let mut held_back = acquire("a", 1);
        held_back.deadline = now + Duration::from_millis(10);
        held_back.not_before = Some(now + Duration::from_millis(20));
        let mut queue = queue([held_back]);
        let gate = Gate::default();
        assert!(queue.take(now, gate, |_| true).is_none());
        assert!(queue.wakes_at.is_some());
        assert!(queue.pop_overdue(now + Duration::from_millis(10)).is_some());
        assert!(queue.is_empty());
        assert!(queue.pop_overdue(now + Duration::from_millis(20)).is_none());
        assert_eq!(queue.wakes_at, None);
    }

    fn held_back(mut step: Step, until: Instant) -> Step {
        step.not_before = Some(until);
        step
    }

    /// The keys of the steps that the script takes.
    fn sent(queue: &mut SendQueue, now: Instant) -> Vec<String> {
        let steps = queue.take(now, Gate::default(), |_| true);
        let steps = steps.into_iter().flatten();
        steps.map(|step| step.call.key.to_string()).collect()
    }

    #[tokio::test]
    async fn failed_release_that_is_held_back_is_not_sent_and_acquires_wait_behind_it() {
        let now = clock::now();
        let at = now + Duration::from_millis(20);
        let mut queue = queue([acquire("b", 2), release("c", 3)]);
        queue.put_back([held_back(release("a", 1), at)]);
        assert_eq!(sent(&mut queue, now), ["c"]);
        assert_eq!((sent(&mut queue, now).len(), queue.wakes_at), (0, Some(at)));
        assert_eq!((sent(&mut queue, at), queue.len()), (vec!["a".to_owned()], 1));
        assert_eq!(sent(&mut queue, at), ["b"]);
    }

    #[tokio::test]
    async fn release_stays_behind_its_acquire_that_is_held_back() {
        let now = clock::now();
        let at = now + Duration::from_millis(20);
        let mut queue = queue([held_back(acquire("a", 1), at), undo("a", 1), release("b", 2)]);
        assert_eq!(sent(&mut queue, now), ["b"]);
        assert_eq!(sent(&mut queue, now).len(), 0);
        assert_eq!(sent(&mut queue, at), ["a", "a"]);
    }

    #[tokio::test]
    async fn release_stays_behind_its_acquire_that_waits_behind_one_that_is_held_back() {
        let now = clock::now();
        let at = now + Duration::from_millis(20);
        let mut queue = queue([acquire("b", 2), undo("b", 2), release("c", 3)]);
        queue.put_back([held_back(release("a", 1), at)]);
        assert_eq!(sent(&mut queue, now), ["c"]);
        assert_eq!(sent(&mut queue, now).len(), 0);
        assert_eq!(sent(&mut queue, at), ["a"]);
        assert_eq!(sent(&mut queue, at), ["b", "b"]);
    }

    #[tokio::test]
    async fn release_that_was_sent_by_commands_goes_by_them_again() {
        let sent_before = |by_script| {
            let mut step = release("a", 1);
            (step.sent, step.by_script) = (1, by_script);
            step
        };
        for (steps, kept, untold) in [
            (vec![release("b", 2), sent_before(false)], None, true),
            (vec![release("b", 2)], Some(release("a", 1)), true),
            (vec![release("a", 1)], None, false),
            (vec![sent_before(true)], None, false),
            (vec![], Some(undo("a", 1)), false),
            // It may have to stay there.
            (vec![acquire("a", 1), sent_before(false)], None, false),
        ] {
            let mut queue = queue(steps);
            queue.put_back(kept);
            assert_eq!(queue.may_begin_with_untold_release(), untold);
            if untold {
                assert!(taken(&mut queue).contains(&"a".to_owned()));
                assert!(!queue.may_begin_with_untold_release());
            }
        }
    }

    #[tokio::test]
    async fn one_call_has_no_more_steps_than_any_other() {
        let mut queue = queue((0..300).map(|number| release("a", number)));
        (300..500).for_each(|number| queue.keep(release("a", number)));
        assert_eq!((taken(&mut queue).len(), taken(&mut queue).len()), (256, 244));
    }
}
