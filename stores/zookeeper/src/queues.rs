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

/// A queued operation.
pub(crate) enum Step {
    /// Any other operation.
    Work(Box<dyn FnOnce() -> Work + Send>),
    /// A renewal, which is combined with others.
    Renew(Renew),
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
    /// Returns the operation if it can run now; otherwise queues it.
    pub(crate) fn enter(&mut self, lock: &Arc<str>, step: Step) -> Option<Step> {
        match self.0.get_mut(lock) {
            Some(queue) => {
                queue.push_back(step);
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

    fn number(step: Option<Step>) -> Option<String> {
        match step? {
            Step::Renew(renew) => Some(renew.grant.to_string()[37..].to_owned()),
            Step::Work(_) => None,
        }
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
