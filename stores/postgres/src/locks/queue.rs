//! The steps that wait to be sent, and which of them go together.
//!
//! What waits while a connection is busy goes into its next wave, a statement for each verb. Steps of one key are sent
//! one after the other, in the order in which they were asked for: as long as one of them has no answer, the next ones
//! stay here. So it does not matter which connection carries which, nor how many round trips a step takes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, StoreError};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::job::{Job, Step};

/// The most locks that one statement acquires or releases.
const MOST: usize = 128;
/// The most grants that one statement renews, and one wave: other steps are not to wait for thousands of them.
const MOST_RENEWALS: usize = 200;

/// The queue of all connections.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// There may be something to send, or nothing ever again.
    wake: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Job>,
    /// The keys of the steps that are on their way.
    busy: HashSet<Arc<str>>,
    /// Acquires without an answer, with the server's time after which they can no longer take effect.
    unknown: HashMap<GrantId, i64>,
    /// Connections that serve the queue.
    connected: usize,
    closed: bool,
}

/// Steps that go together, one statement for each verb.
#[derive(Debug, Default)]
pub(crate) struct Wave {
    pub(crate) releases: Vec<Job>,
    pub(crate) renewals: Vec<Job>,
    pub(crate) acquires: Vec<Job>,
    /// A statement for each.
    pub(crate) others: Vec<Job>,
}

/// What a connection that is free does next.
#[derive(Debug)]
pub(crate) enum Next {
    Send(Wave),
    /// Nothing yet; the first step that waits for its time may be sent then.
    Wait(Option<Instant>),
    /// The store is gone, and everything has been sent.
    End,
}

impl Queue {
    /// Queues a step; callable from anywhere.
    pub(crate) fn push(&self, job: Job) {
        self.state.lock().waiting.push_back(job);
        self.wake.notify_one();
    }

    /// No step comes any more.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// Returns when there may be something to do.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Whether there is something that a further connection could do; the rest of what there is goes to another one.
    pub(crate) fn is_wanted(&self) -> bool {
        let state = self.state.lock();
        if state.closed {
            self.wake.notify_one();
        }
        !state.waiting.is_empty() || state.closed
    }

    /// What to send now.
    pub(crate) fn next(&self, now: Instant) -> Next {
        let mut state = self.state.lock();
        let (wave, due) = state.take(now);
        if state.closed && state.waiting.is_empty() {
            // The others end as well.
            self.wake.notify_one();
            if wave.is_empty() {
                return Next::End;
            }
        }
        if wave.is_empty() {
            return Next::Wait(due);
        }
        if !state.waiting.is_empty() {
            self.wake.notify_one();
        }
        Next::Send(wave)
    }

    /// A step has its answer: the next of its keys may be sent.
    pub(crate) fn done(&self, step: &Step) {
        let mut state = self.state.lock();
        for key in step.keys() {
            state.busy.remove(key);
        }
        if !state.waiting.is_empty() {
            self.wake.notify_one();
        }
    }

    /// A step was not carried out and is to be sent again after a while, before all others of its keys.
    pub(crate) fn again(&self, mut job: Job, after: Duration) {
        job.not_before = Some(Instant::now() + after);
        job.looks += 1;
        job.send_state.take_back();
        let mut state = self.state.lock();
        for key in job.step.keys() {
            state.busy.remove(key);
        }
        state.waiting.push_front(job);
        self.wake.notify_one();
    }

    /// An acquire has no answer: it may take effect until the server's clock shows this.
    pub(crate) fn is_unknown(&self, grant: GrantId, until: i64) {
        self.state.lock().unknown.insert(grant, until);
    }

    /// Whether an acquire of this id may still take effect: until when.
    pub(crate) fn unknown_until(&self, grant: GrantId) -> Option<i64> {
        self.state.lock().unknown.get(&grant).copied()
    }

    /// The acquire of this id was undone.
    pub(crate) fn is_known(&self, grant: GrantId, server_now: i64) {
        /// Ids that nobody releases are forgotten, long after they could take effect.
        const KEPT: usize = 1024;
        const LONG_AGO: i64 = 60_000_000;
        let mut state = self.state.lock();
        state.unknown.remove(&grant);
        if state.unknown.len() > KEPT {
            state.unknown.retain(|_, until| *until > server_now - LONG_AGO);
        }
    }

    pub(crate) fn connected(&self) {
        self.state.lock().connected += 1;
    }

    pub(crate) fn disconnected(&self) {
        self.state.lock().connected -= 1;
        self.wake.notify_one();
    }

    /// The server refuses connections: everything that waits fails, unless another connection serves it.
    pub(crate) fn refused(&self, error: &StoreError) {
        if self.state.lock().connected == 0 {
            self.fail_all(error);
        }
    }

    /// Everything that waits fails.
    pub(crate) fn fail_all(&self, error: &StoreError) {
        let failed = std::mem::take(&mut self.state.lock().waiting);
        for job in failed {
            job.answer(Err(error.clone()));
        }
    }

    /// Drops what nobody waits for any more; whether the store is gone and nothing is left to send.
    pub(crate) fn is_ended(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.waiting.retain(|job| job.is_due(now));
        let ended = state.closed && state.waiting.is_empty();
        if ended {
            self.wake.notify_one();
        }
        ended
    }
}

impl State {
    /// Takes the steps that may be sent, each key once; and when the first may be that waits for its time.
    fn take(&mut self, now: Instant) -> (Wave, Option<Instant>) {
        let mut wave = Wave::default();
        let mut due: Option<Instant> = None;
        let mut blocked: HashSet<Arc<str>> = HashSet::new();
        let mut left = VecDeque::with_capacity(self.waiting.len());
        for job in std::mem::take(&mut self.waiting) {
            if !job.is_due(now) {
                continue;
            }
            let early = job.not_before.filter(|time| *time > now);
            if let Some(time) = early {
                due = Some(due.map_or(time, |before| before.min(time)));
            }
            let waits = early.is_some()
                || job
                    .step
                    .keys()
                    .any(|key| self.busy.contains(key) || blocked.contains(key))
                || !wave.has_room(&job);
            if waits {
                blocked.extend(job.step.keys().cloned());
                left.push_back(job);
            } else if job.send_state.send() {
                self.busy.extend(job.step.keys().cloned());
                wave.push(job);
            }
        }
        self.waiting = left;
        (wave, due)
    }
}

impl Wave {
    fn list(&mut self, step: &Step) -> (&mut Vec<Job>, usize) {
        match step {
            Step::Acquire(_) => (&mut self.acquires, MOST),
            Step::Release(..) => (&mut self.releases, MOST),
            Step::Renew(..) => (&mut self.renewals, MOST_RENEWALS),
            Step::AcquireAll(_) | Step::Inspect(_) | Step::List(_) | Step::Force(_) | Step::Make(_) => {
                (&mut self.others, MOST)
            }
        }
    }

    fn has_room(&mut self, job: &Job) -> bool {
        let (list, most) = self.list(&job.step);
        list.len() < most && list.first().is_none_or(|first| !first.alone && !job.alone)
    }

    fn push(&mut self, job: Job) {
        self.list(&job.step).0.push(job);
    }

    fn is_empty(&self) -> bool {
        self.releases.is_empty()
            && self.renewals.is_empty()
            && self.acquires.is_empty()
            && self.others.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::send_state::SendState;
    use tokio::sync::oneshot;

    fn job(step: Step) -> Job {
        let (reply, kept) = oneshot::channel();
        // Its caller waits.
        std::mem::forget(kept);
        Job {
            step,
            deadline: Instant::now() + Duration::from_secs(60),
            not_before: None,
            looks: 0,
            alone: false,
            send_state: Arc::new(SendState::default()),
            reply,
        }
    }

    fn release(key: &str) -> Job {
        job(Step::Release(key.into(), GrantId::from_parts(1, 1), 0))
    }

    fn renew(key: &str) -> Job {
        job(Step::Renew(key.into(), GrantId::from_parts(1, 1), 1))
    }

    fn wave(queue: &Queue) -> Wave {
        match queue.next(Instant::now()) {
            Next::Send(wave) => wave,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn steps_of_one_key_go_one_after_the_other() {
        let queue = Queue::default();
        for key in ["a", "b"] {
            queue.push(renew(key));
            queue.push(release(key));
            queue.push(renew(key));
        }
        let first = wave(&queue);
        assert_eq!((first.renewals.len(), first.releases.len()), (2, 0));
        assert!(matches!(queue.next(Instant::now()), Next::Wait(None)));
        queue.done(&first.renewals[0].step);
        let second = wave(&queue);
        assert_eq!((second.renewals.len(), second.releases.len()), (0, 1));
        assert_eq!(second.releases[0].step.keys().next().map(|key| &**key), Some("a"));
    }

    #[test]
    fn step_that_is_sent_again_stays_before_later_ones() {
        let queue = Queue::default();
        queue.push(release("a"));
        queue.push(renew("a"));
        let first = wave(&queue).releases.pop().unwrap();
        queue.again(first, Duration::from_secs(5));
        let Next::Wait(Some(due)) = queue.next(Instant::now()) else {
            panic!("it is sent too early");
        };
        let Next::Send(next) = queue.next(due) else {
            panic!("it is not sent");
        };
        assert_eq!(
            (next.releases.len(), next.renewals.len(), next.releases[0].looks),
            (1, 0, 1)
        );
    }

    #[test]
    fn waves_are_of_a_limited_size_and_releases_pass_renewals_of_other_keys() {
        let queue = Queue::default();
        for n in 0..500 {
            queue.push(renew(&format!("k{n}")));
        }
        queue.push(release("other"));
        queue.push(release("k499"));
        let first = wave(&queue);
        assert_eq!((first.renewals.len(), first.releases.len()), (MOST_RENEWALS, 1));
        let second = wave(&queue);
        assert_eq!((second.renewals.len(), second.releases.len()), (MOST_RENEWALS, 0));
    }

    #[test]
    fn step_that_goes_alone_shares_no_statement() {
        let queue = Queue::default();
        for key in ["a", "b", "c", "d"] {
            let mut job = renew(key);
            job.alone = ["a", "c"].contains(&key);
            queue.push(job);
        }
        let keys = |wave: Wave| -> Vec<String> {
            let keys = wave.renewals.iter().flat_map(|job| job.step.keys());
            keys.map(|key| key.to_string()).collect()
        };
        assert_eq!(keys(wave(&queue)), ["a"]);
        assert_eq!(keys(wave(&queue)), ["b", "d"]);
        assert_eq!(keys(wave(&queue)), ["c"]);
    }

    #[test]
    fn closed_queue_ends_when_everything_is_sent() {
        let queue = Queue::default();
        queue.push(release("a"));
        queue.push(release("a"));
        queue.close();
        let first = wave(&queue);
        assert!(matches!(queue.next(Instant::now()), Next::Wait(None)));
        queue.done(&first.releases[0].step);
        wave(&queue);
        assert!(matches!(queue.next(Instant::now()), Next::End));
    }
}
