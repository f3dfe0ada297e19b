//! The queues of operations: those on one lock run one after another, in call order.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;

use dlock::store::{GrantId, Renewal, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// A running operation, which sends the reply to its caller itself.
pub(crate) type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Starts an operation.
pub(crate) type Start = Box<dyn FnOnce() -> Work + Send>;

/// A queued operation.
pub(crate) enum Step {
    /// Concerns this grant or waiter alone.
    Of(GrantId, Start),
    /// Any other operation.
    Work(Start),
    /// A renewal, which is combined with others.
    Renew(Renew),
}

impl Step {
    fn concerns_another(&self, than: GrantId) -> bool {
        matches!(self, Step::Of(grant, _) if *grant != than)
    }
}

/// The renewal of one grant.
pub(crate) struct Renew {
    pub(crate) grant: GrantId,
    /// When the caller requested it.
    pub(crate) called: Instant,
    pub(crate) lease: std::time::Duration,
    pub(crate) reply: oneshot::Sender<Result<Renewal, StoreError>>,
}

/// An operation, with the node of its lock, if any.
pub(crate) type Arrival = (Option<Arc<str>>, Step);

/// Operations that the driver has not taken yet.
#[derive(Default)]
pub(crate) struct Inbox {
    state: Mutex<Arrived>,
    wake: Notify,
}

#[derive(Default)]
struct Arrived {
    steps: Vec<Arrival>,
    closed: bool,
    /// There is no driver any more.
    ended: bool,
}

impl Inbox {
    /// Adds an operation. Can be called from any thread.
    pub(crate) fn push(&self, lock: Option<Arc<str>>, step: Step) {
        self.push_all([(lock, step)]);
    }

    pub(crate) fn push_all(&self, steps: impl IntoIterator<Item = Arrival>) {
        // Not under the mutex: dropping an operation wakes its caller.
        let steps: Vec<Arrival> = steps.into_iter().collect();
        let mut state = self.state.lock();
        if !state.ended {
            state.steps.extend(steps);
            self.wake.notify_one();
        }
    }

    /// Declares that no more operations follow.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// Drops the operations, and all that follow: their callers learn that they have no reply.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        state.ended = true;
        let steps = std::mem::take(&mut state.steps);
        drop(state);
        drop(steps);
    }

    /// Waits until there may be something new.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Takes the new operations; also returns whether the inbox is closed.
    pub(crate) fn take(&self) -> (Vec<Arrival>, bool) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.steps), state.closed)
    }
}

/// The locks with running operations, and the operations that wait for them.
#[derive(Default)]
pub(crate) struct LockQueues(HashMap<Arc<str>, Queue>);

#[derive(Default)]
struct Queue {
    /// How many renewals run, or `None` for another operation. Renewals of several grants run together.
    renewals: Option<usize>,
    waiting: VecDeque<Step>,
}

impl LockQueues {
    /// Returns the operation if it can run now; otherwise queues it. A renewal is ahead of what concerns other grants: many
    /// waiters must not delay it until its lease is over.
    pub(crate) fn enter(&mut self, lock: &Arc<str>, step: Step) -> Option<Step> {
        let is_renewal = matches!(step, Step::Renew(_));
        match self.0.get_mut(lock) {
            Some(Queue {
                renewals: Some(running),
                waiting,
            }) if is_renewal && waiting.is_empty() => {
                *running += 1;
                Some(step)
            }
            Some(Queue { waiting: queue, .. }) => {
                let passed = match &step {
                    Step::Renew(renew) => queue
                        .iter()
                        .rev()
                        .take_while(|step| step.concerns_another(renew.grant))
                        .count(),
                    Step::Of(..) | Step::Work(_) => 0,
                };
                queue.insert(queue.len() - passed, step);
                None
            }
            None => {
                let queue = Queue {
                    renewals: is_renewal.then_some(1),
                    ..Queue::default()
                };
                self.0.insert(lock.clone(), queue);
                Some(step)
            }
        }
    }

    /// Ends a running operation of a lock, and returns the next ones, which can run now.
    pub(crate) fn leave(&mut self, lock: &Arc<str>) -> Vec<Step> {
        let Some(queue) = self.0.get_mut(lock) else {
            return Vec::new();
        };
        if let Some(running) = queue.renewals.as_mut().filter(|running| **running > 1) {
            *running -= 1;
            return Vec::new();
        }
        let renewals = (queue.waiting.iter())
            .take_while(|step| matches!(step, Step::Renew(_)))
            .count();
        let next: Vec<Step> = queue
            .waiting
            .drain(..renewals.max(1).min(queue.waiting.len()))
            .collect();
        queue.renewals = (renewals > 0).then_some(renewals);
        if next.is_empty() {
            self.0.remove(lock);
        }
        next
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renewal(number: u64) -> Step {
        let (reply, _) = oneshot::channel();
        Step::Renew(Renew {
            grant: GrantId::from_parts(1, number),
            called: Instant::now(),
            lease: std::time::Duration::ZERO,
            reply,
        })
    }

    fn of(number: u64) -> Step {
        Step::Of(GrantId::from_parts(1, number), Box::new(|| Box::pin(async {})))
    }

    fn number(step: Step) -> String {
        let grant = match step {
            Step::Renew(Renew { grant, .. }) | Step::Of(grant, _) => grant,
            Step::Work(_) => return "work".to_owned(),
        };
        grant.to_string()[37..].to_owned()
    }

    fn leave(queues: &mut LockQueues, lock: &Arc<str>) -> Vec<String> {
        queues.leave(lock).into_iter().map(number).collect()
    }

    #[tokio::test]
    async fn ended_inbox_drops_all_operations() {
        let inbox = Inbox::default();
        let step = || {
            let (reply, answer) = oneshot::channel::<()>();
            let work = move || -> Work { Box::pin(async move { drop(reply) }) };
            (answer, Step::Work(Box::new(work)))
        };
        let (before, first) = step();
        inbox.push(None, first);
        inbox.end();
        let (after, second) = step();
        inbox.push(None, second);
        assert!(before.await.is_err() && after.await.is_err());
        assert!(inbox.take().0.is_empty());
    }

    #[test]
    fn renewal_is_ahead_of_what_concerns_other_grants_and_of_nothing_else() {
        let (mut queues, a): (_, Arc<str>) = (LockQueues::default(), "a".into());
        let work = || Step::Work(Box::new(|| Box::pin(async {})));
        let steps = [
            of(1),
            of(2),
            work(),
            of(3),
            of(4),
            renewal(1),
            of(5),
            renewal(2),
            renewal(5),
        ];
        for (nth, step) in steps.into_iter().enumerate() {
            assert_eq!(queues.enter(&a, step).is_some(), nth == 0);
        }
        let mut order = Vec::new();
        while !queues.is_empty() {
            order.extend(leave(&mut queues, &a));
        }
        assert_eq!(order, ["2", "work", "1", "2", "3", "4", "5", "5"]);
    }

    #[test]
    fn steps_of_one_key_have_their_turns_in_order() {
        let (mut queues, a, b): (_, Arc<str>, Arc<str>) = (LockQueues::default(), "a".into(), "b".into());
        assert_eq!(queues.enter(&a, of(1)).map(number), Some("1".to_owned()));
        assert!(queues.enter(&a, of(2)).is_none());
        assert_eq!(queues.enter(&b, of(3)).map(number), Some("3".to_owned()));
        assert!(queues.enter(&a, of(4)).is_none());
        assert_eq!(leave(&mut queues, &a), ["2"]);
        assert_eq!(leave(&mut queues, &a), ["4"]);
        assert!(leave(&mut queues, &a).is_empty() && leave(&mut queues, &b).is_empty());
        assert!(queues.is_empty());
    }

    #[test]
    fn renewals_of_one_key_run_together() {
        let (mut queues, a): (_, Arc<str>) = (LockQueues::default(), "a".into());
        assert!(queues.enter(&a, renewal(1)).is_some() && queues.enter(&a, renewal(2)).is_some());
        assert!(queues.enter(&a, of(2)).is_none() && queues.enter(&a, of(3)).is_none());
        // It may not pass the step of its own grant.
        assert!(queues.enter(&a, renewal(2)).is_none());
        assert!(queues.enter(&a, renewal(4)).is_none() && queues.enter(&a, renewal(5)).is_none());
        assert!(leave(&mut queues, &a).is_empty());
        assert_eq!(leave(&mut queues, &a), ["2"]);
        assert_eq!(leave(&mut queues, &a), ["2", "4", "5"]);
        for _ in 0..2 {
            assert!(leave(&mut queues, &a).is_empty());
        }
        assert_eq!(leave(&mut queues, &a), ["3"]);
        assert!(leave(&mut queues, &a).is_empty() && queues.is_empty());
    }
}
