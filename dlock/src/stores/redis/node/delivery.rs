//! Answers on their way to their callers.
//!
//! Each caller that a worker thread wakes makes it wake another worker, if one sleeps: that takes the one caller, goes back
//! to sleep, and is woken again by the next. On a busy machine it does so on the same processor, between two callers. So
//! answers that come together are handed out where the thread would otherwise sleep, as the runtime does it with tasks
//! that yield: it wakes one other worker then, which takes half of the callers.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

use super::{Done, Reply};
use crate::store::StoreError;

pub(super) struct Answers {
    ready: Delivery,
    /// Whether callers run on several threads; else each has its answer at once.
    has_threads: bool,
}

/// Answers that their callers have once this is dropped.
#[derive(Default)]
struct Delivery(Vec<(Reply, Result<Done, StoreError>)>);

impl Answers {
    pub(super) fn new(has_threads: bool) -> Answers {
        Answers {
            ready: Delivery::default(),
            has_threads,
        }
    }

    /// Accepts an answer, for the next [delivery](Self::deliver).
    pub(super) fn push(&mut self, reply: Reply, answer: Result<Done, StoreError>) {
        match self.has_threads {
            true => self.ready.0.push((reply, answer)),
            false => drop(reply.send(answer)),
        }
    }

    /// Hands out the answers: at once, or when the ready tasks of this thread have run. Returns how many.
    pub(super) fn deliver(&mut self) -> usize {
        let count = self.ready.0.len();
        if count > 1 {
            let waker = Waker::from(Arc::new(std::mem::take(&mut self.ready)));
            // The runtime wakes it as if it were a task that yielded.
            let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
        } else {
            self.ready.hand_out();
        }
        count
    }
}

impl Delivery {
    fn hand_out(&mut self) {
        for (reply, answer) in self.0.drain(..) {
            let _ = reply.send(answer);
        }
    }
}

impl Wake for Delivery {
    /// Drops the delivery.
    fn wake(self: Arc<Self>) {}
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.hand_out();
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;
    use crate::stores::redis::script::Answer;

    type Receiver = oneshot::Receiver<Result<Done, StoreError>>;

    fn push(answers: &mut Answers) -> Receiver {
        let (reply, receiver) = oneshot::channel();
        let done = Done {
            answer: Answer::Gone,
            repeated: false,
        };
        answers.push(reply, Ok(done));
        receiver
    }

    fn is_there(receiver: &mut Receiver) -> bool {
        receiver.try_recv().is_ok_and(|answer| answer.is_ok())
    }

    #[tokio::test]
    async fn answers_that_come_together_are_handed_out_when_the_thread_has_nothing_else() {
        let mut answers = Answers::new(true);
        let mut all = [push(&mut answers), push(&mut answers)];
        assert_eq!(answers.deliver(), 2);
        assert_eq!(all.each_mut().map(is_there), [false; 2]);
        tokio::task::yield_now().await;
        assert_eq!(all.each_mut().map(is_there), [true; 2]);
        assert_eq!(answers.deliver(), 0);
    }

    #[tokio::test]
    async fn a_single_answer_waits_for_nothing() {
        let mut answers = Answers::new(true);
        let mut one = push(&mut answers);
        assert_eq!(answers.deliver(), 1);
        assert!(is_there(&mut one));
        assert!(is_there(&mut push(&mut Answers::new(false))));
    }

    #[test]
    fn no_answer_is_lost_with_the_task_or_its_runtime() {
        let mut answers = Answers::new(true);
        let mut dropped = push(&mut answers);
        drop(answers);
        assert!(is_there(&mut dropped));

        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut all = runtime.block_on(async {
            let mut answers = Answers::new(true);
            let all = [push(&mut answers), push(&mut answers)];
            answers.deliver();
            all
        });
        drop(runtime);
        assert_eq!(all.each_mut().map(is_there), [true; 2]);

        let mut answers = Answers::new(true);
        let mut outside = [push(&mut answers), push(&mut answers)];
        answers.deliver();
        assert_eq!(outside.each_mut().map(is_there), [true; 2]);
    }
}
