//! The order of operations: those on one lock run one after another, in call order.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::names::Name;

/// The last operation of each lock that has one.
#[derive(Debug, Clone, Default)]
pub(crate) struct LockQueues(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    last: HashMap<Name, Last>,
    count: u64,
}

#[derive(Debug)]
struct Last {
    number: u64,
    /// Closed when the operation is done.
    done: oneshot::Receiver<()>,
}

/// The position of an operation in the queues of its locks. Dropping it lets the next operations run.
#[derive(Debug)]
pub(crate) struct Position {
    queues: LockQueues,
    number: u64,
    names: Vec<(Name, oneshot::Sender<()>)>,
    before: Vec<oneshot::Receiver<()>>,
}

impl LockQueues {
    /// Joins the queues of these locks atomically.
    pub(crate) fn join(&self, names: impl IntoIterator<Item = Name>) -> Position {
        let mut waiting = self.0.lock();
        waiting.count += 1;
        let number = waiting.count;
        let mut position = Position {
            queues: self.clone(),
            number,
            names: Vec::new(),
            before: Vec::new(),
        };
        for name in names {
            let (sender, done) = oneshot::channel();
            if let Some(last) = waiting.last.insert(name.clone(), Last { number, done }) {
                // An operation that names a lock twice does not wait for itself.
                if last.number != number {
                    position.before.push(last.done);
                }
            }
            position.names.push((name, sender));
        }
        position
    }
}

impl Position {
    /// Waits until the earlier operations are done. If the position is dropped earlier, later operations pass: an operation
    /// that gives up must continue to wait.
    ///
    /// Cancel safe.
    pub(crate) async fn comes(&mut self) {
        while let Some(before) = self.before.last_mut() {
            // Nothing is sent on the channel; it only closes.
            let _ = before.await;
            self.before.pop();
        }
    }
}

impl Drop for Position {
    fn drop(&mut self) {
        let mut waiting = self.queues.0.lock();
        for (name, _) in &self.names {
            if waiting
                .last
                .get(name)
                .is_some_and(|last| last.number == self.number)
            {
                waiting.last.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn join(queues: &LockQueues, names: &[&str]) -> Position {
        queues.join(names.iter().map(|name| Name::from(*name)))
    }

    #[test]
    fn steps_of_one_lock_follow_each_other_and_those_of_others_do_not() {
        let queues = LockQueues::default();
        let mut first = join(&queues, &["a"]);
        let mut second = join(&queues, &["a", "b"]);
        let mut third = join(&queues, &["b"]);
        let mut other = join(&queues, &["c"]);
        assert!(first.comes().now_or_never().is_some());
        assert!(other.comes().now_or_never().is_some());
        assert!(second.comes().now_or_never().is_none());
        drop(first);
        assert!(third.comes().now_or_never().is_none());
        assert!(second.comes().now_or_never().is_some());
        drop(second);
        assert!(third.comes().now_or_never().is_some());
        drop((third, other));
        assert!(queues.0.lock().last.is_empty());
    }

    #[test]
    fn lock_named_twice_does_not_wait_for_itself() {
        let queues = LockQueues::default();
        assert!(join(&queues, &["a", "a"]).comes().now_or_never().is_some());
        assert!(queues.0.lock().last.is_empty());
    }
}
