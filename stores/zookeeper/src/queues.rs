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
}

impl Inbox {
    /// Adds an operation. Can be called from any thread.
    pub(crate) fn push(&self, lock: Option<Arc<str>>, step: Step) {
        self.state.lock().steps.push((lock, step));
        self.wake.notify_one();
    }

    pub(crate) fn push_all(&self, steps: impl IntoIterator<Item = Arrival>) {
        self.state.lock().steps.extend(steps);
        self.wake.notify_one();
    }

    /// Declares that no more operations follow.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
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

/// The locks with a running operation, and the operations that wait for it.
#[derive(Default)]
pub(crate) struct LockQueues(HashMap<Arc<str>, VecDeque<Step>>);

impl LockQueues {
    /// Returns the operation if it can run now; otherwise queues it. A renewal is ahead of what concerns other grants: many
    /// waiters must not delay it until its lease is over.
    pub(crate) fn enter(&mut self, lock: &Arc<str>, step: Step) -> Option<Step> {
        match self.0.get_mut(lock) {
            Some(queue) => {
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
                self.0.insert(lock.clone(), VecDeque::new());
                Some(step)
            }
        }
    }

    /// Ends the running operation of a lock, and returns the next one, which can run now.
    pub(crate) fn leave(&mut self, lock: &Arc<str>) -> Option<Step> {
        let next = self.0.get_mut(lock)?.pop_front();
        if next.is_none() {
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

    fn number(step: Option<Step>) -> Option<String> {
        let grant = match step? {
            Step::Renew(Renew { grant, .. }) | Step::Of(grant, _) => grant,
            Step::Work(_) => return Some("work".to_owned()),
        };
        Some(grant.to_string()[37..].to_owned())
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
        let order: Vec<_> = std::iter::from_fn(|| number(queues.leave(&a))).collect();
        assert_eq!(order, ["2", "work", "1", "2", "3", "4", "5", "5"]);
    }

    #[test]
    fn steps_of_one_key_have_their_turns_in_order() {
        let (mut queues, a, b): (_, Arc<str>, Arc<str>) = (LockQueues::default(), "a".into(), "b".into());
        assert_eq!(number(queues.enter(&a, renewal(1))), Some("1".to_owned()));
        assert_eq!(number(queues.enter(&a, renewal(2))), None);
        assert_eq!(number(queues.enter(&b, renewal(3))), Some("3".to_owned()));
        assert_eq!(number(queues.enter(&a, renewal(4))), None);
        assert_eq!(number(queues.leave(&a)), Some("2".to_owned()));
        assert_eq!(number(queues.leave(&a)), Some("4".to_owned()));
        assert!(queues.leave(&a).is_none() && queues.leave(&b).is_none());
        assert!(queues.is_empty());
    }
}
