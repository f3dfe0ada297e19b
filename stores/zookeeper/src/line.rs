//! Steps of one key are carried out one after the other, in the order in which they were called.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;

use dlock::store::{GrantId, Renewal, StoreError};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// A step that is carried out; it answers its caller itself.
pub(crate) type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A step that waits for its turn.
pub(crate) enum Step {
    /// Anything else.
    Work(Box<dyn FnOnce() -> Work + Send>),
    /// A renewal, which goes together with others.
    Renew(Renew),
}

/// The renewal of one grant.
pub(crate) struct Renew {
    pub(crate) grant: GrantId,
    /// When it was called.
    pub(crate) called: Instant,
    pub(crate) lease: std::time::Duration,
    pub(crate) reply: oneshot::Sender<Result<Renewal, StoreError>>,
}

/// A step, with the node of the lock that it is about, if it is one.
pub(crate) type Arrival = (Option<Arc<str>>, Step);

/// Steps that were called, and are not begun.
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
    /// Adds a step; callable from anywhere.
    pub(crate) fn push(&self, lock: Option<Arc<str>>, step: Step) {
        self.state.lock().steps.push((lock, step));
        self.wake.notify_one();
    }

    pub(crate) fn push_all(&self, steps: impl IntoIterator<Item = Arrival>) {
        self.state.lock().steps.extend(steps);
        self.wake.notify_one();
    }

    /// No step comes any more.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// Returns when there may be something new.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
    }

    /// What is new; and whether nothing comes any more.
    pub(crate) fn take(&self) -> (Vec<Arrival>, bool) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.steps), state.closed)
    }
}

/// The keys that a step is being carried out for, and what waits for them.
#[derive(Default)]
pub(crate) struct Lines(HashMap<Arc<str>, VecDeque<Step>>);

impl Lines {
    /// The step, if it is its turn; otherwise it waits.
    pub(crate) fn enter(&mut self, lock: &Arc<str>, step: Step) -> Option<Step> {
        match self.0.get_mut(lock) {
            Some(line) => {
                line.push_back(step);
                None
            }
            None => {
                self.0.insert(lock.clone(), VecDeque::new());
                Some(step)
            }
        }
    }

    /// A step has its end: the next one of the key, whose turn it is.
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
        let (mut lines, a, b): (_, Arc<str>, Arc<str>) = (Lines::default(), "a".into(), "b".into());
        assert_eq!(number(lines.enter(&a, renewal(1))), Some("1".to_owned()));
        assert_eq!(number(lines.enter(&a, renewal(2))), None);
        assert_eq!(number(lines.enter(&b, renewal(3))), Some("3".to_owned()));
        assert_eq!(number(lines.enter(&a, renewal(4))), None);
        assert_eq!(number(lines.leave(&a)), Some("2".to_owned()));
        assert_eq!(number(lines.leave(&a)), Some("4".to_owned()));
        assert!(lines.leave(&a).is_none() && lines.leave(&b).is_none());
        assert!(lines.is_empty());
    }
}
