//! Answers on their way to their callers.
//!
//! Each caller that a worker thread wakes makes it wake another worker, if one sleeps: that takes the one caller, goes back
//! to sleep, and is woken again by the next. On a busy machine it does so on the same processor, between two callers. So
//! answers that come together are handed out where the thread would otherwise sleep, as the runtime does it with tasks
//! that yield: it wakes one other worker then, which takes half of the callers.
//!
//! Callers have no order among each other: answers that are delivered one after the other may arrive the other way round.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use tokio::time::Instant;

use super::flow_control::LATE;
use super::{Done, Reply};
use crate::base::clock;
use crate::store::StoreError;

type Answer = (Reply, Result<Done, StoreError>);

pub(super) struct Answers {
    ready: Vec<Answer>,
    /// Whether callers run on several threads; else each has its answer when it is delivered.
    has_threads: bool,
    were_late: Arc<AtomicBool>,
}

/// Answers that their callers have once this is dropped.
struct Delivery {
    answers: Vec<Answer>,
    since: Instant,
    were_late: Arc<AtomicBool>,
}

impl Answers {
    pub(super) fn new(has_threads: bool) -> Answers {
        Answers {
            ready: Vec::new(),
            has_threads,
            were_late: Arc::default(),
        }
    }

    /// Accepts an answer, for the next [delivery](Self::deliver).
    pub(super) fn push(&mut self, reply: Reply, answer: Result<Done, StoreError>) {
        self.ready.push((reply, answer));
    }

    /// How many answers wait for delivery.
    pub(super) fn len(&self) -> usize {
        self.ready.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether answers were handed out later than [`LATE`], because the thread had other tasks; forgets it.
    pub(super) fn take_late(&self) -> bool {
        self.were_late.swap(false, Ordering::Relaxed)
    }

    /// Hands out the first answers, at most this many: at once, or when the ready tasks of this thread have run. Returns how
    /// many.
    pub(super) fn deliver(&mut self, most: usize) -> usize {
        let count = self.len().min(most);
        if count > 1 && self.has_threads {
            let rest = self.ready.split_off(count);
            let delivery = Delivery {
                answers: std::mem::replace(&mut self.ready, rest),
                since: clock::now(),
                were_late: self.were_late.clone(),
            };
            let waker = Waker::from(Arc::new(delivery));
            // The runtime wakes it as if it were a task that yielded.
            let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
        } else {
            self.ready.drain(..count).for_each(hand_out);
        }
        count
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.ready.drain(..).for_each(hand_out);
    }
}

impl Wake for Delivery {
    /// Drops the delivery.
    fn wake(self: Arc<Self>) {}
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if clock::now().saturating_duration_since(self.since) > LATE {
            self.were_late.store(true, Ordering::Relaxed);
        }
        self.answers.drain(..).for_each(hand_out);
    }
}

fn hand_out((reply, answer): Answer) {
    reply.answer(answer);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::super::answering::{Awaited, Channel};
    use super::*;
    use crate::stores::redis::script;

    const ALL: usize = usize::MAX;

    type Receiver = Awaited<Result<Done, StoreError>>;

    fn push(answers: &mut Answers) -> Receiver {
        let (reply, receiver) = Channel::new().open();
        let done = Done {
            answer: script::Answer::Gone,
            repeated: false,
        };
        answers.push(reply, Ok(done));
        receiver
    }

    fn is_there(receiver: &mut Receiver) -> bool {
        matches!(receiver.now_or_never(), Some(Some(Ok(_))))
    }

    #[tokio::test]
    async fn answers_that_come_together_are_handed_out_when_the_thread_has_nothing_else() {
        let mut answers = Answers::new(true);
        let mut all = [push(&mut answers), push(&mut answers)];
        assert_eq!(answers.deliver(ALL), 2);
        assert_eq!(all.each_mut().map(is_there), [false; 2]);
        tokio::task::yield_now().await;
        assert_eq!(all.each_mut().map(is_there), [true; 2]);
        assert_eq!(answers.deliver(ALL), 0);
    }

    #[tokio::test]
    async fn rest_waits_for_the_next_delivery() {
        let mut answers = Answers::new(true);
        let mut all: [Receiver; 3] = std::array::from_fn(|_| push(&mut answers));
        assert_eq!((answers.deliver(2), answers.len()), (2, 1));
        tokio::task::yield_now().await;
        assert_eq!(all.each_mut().map(is_there), [true, true, false]);
        assert_eq!((answers.deliver(2), answers.len()), (1, 0));
        assert!(is_there(&mut all[2]));
        push(&mut answers);
        assert_eq!((answers.deliver(0), answers.len()), (0, 1));
    }

    #[tokio::test]
    async fn a_single_answer_waits_for_nothing() {
        let mut answers = Answers::new(true);
        let mut one = push(&mut answers);
        assert_eq!(answers.deliver(ALL), 1);
        assert!(is_there(&mut one));
    }

    #[tokio::test]
    async fn answers_are_there_at_once_on_one_thread() {
        let mut answers = Answers::new(false);
        let mut all: [Receiver; 3] = std::array::from_fn(|_| push(&mut answers));
        assert_eq!(answers.deliver(2), 2);
        assert_eq!(all.each_mut().map(is_there), [true, true, false]);
        assert_eq!(answers.deliver(ALL), 1);
        assert!(is_there(&mut all[2]));
    }

    #[tokio::test(start_paused = true)]
    async fn answers_behind_a_task_that_runs_for_long_are_late() {
        for (runs_for, late) in [(Duration::ZERO, false), (LATE * 2, true)] {
            let mut answers = Answers::new(true);
            let _all = [push(&mut answers), push(&mut answers)];
            answers.deliver(ALL);
            tokio::time::advance(runs_for).await;
            assert_eq!([answers.take_late(), answers.take_late()], [late, false]);
        }
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
            answers.deliver(ALL);
            all
        });
        drop(runtime);
        assert_eq!(all.each_mut().map(is_there), [true; 2]);

        let mut answers = Answers::new(true);
        let mut outside = [push(&mut answers), push(&mut answers)];
        answers.deliver(ALL);
        assert_eq!(outside.each_mut().map(is_there), [true; 2]);
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker panics")
        }
    }

    #[tokio::test]
    async fn answers_behind_a_waker_that_panics_are_handed_out() {
        for has_threads in [true, false] {
            let mut answers = Answers::new(has_threads);
            let mut all: [Receiver; 3] = std::array::from_fn(|_| push(&mut answers));
            let waker = Waker::from(Arc::new(Panics));
            for receiver in &mut all[..2] {
                assert!(pin!(receiver).poll(&mut Context::from_waker(&waker)).is_pending());
            }
            answers.deliver(ALL);
            tokio::task::yield_now().await;
            assert_eq!(all.each_mut().map(is_there), [true; 3]);
        }
    }
}
