//! The way of one answer from the connection's task to its caller, in memory that is used again: what one thread allocates
//! for each step and another frees keeps both waiting for the allocator.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use tokio::task::coop::poll_proceed;

use crate::base::waking::waking;

/// What can be [opened](Self::open) again and again, for one answer each time.
pub(super) struct Channel<T>(Arc<Mutex<State<T>>>);

enum State<T> {
    /// With the waker of the caller, once it waits.
    Open(Option<Waker>),
    Answered(T),
    /// The answer was taken, or cannot come any more.
    Ended,
    /// The caller is gone.
    Closed,
}

impl<T> Channel<T> {
    pub(super) fn new() -> Channel<T> {
        Channel(Arc::new(Mutex::new(State::Ended)))
    }

    /// Begins the way of another answer. While one of the last is still on its way, that keeps the memory.
    pub(super) fn open(&mut self) -> (Reply<T>, Awaited<T>) {
        match Arc::get_mut(&mut self.0) {
            Some(state) => *state.get_mut() = State::Open(None),
            None => self.0 = Arc::new(Mutex::new(State::Open(None))),
        }
        (Reply(Some(self.0.clone())), Awaited(self.0.clone()))
    }
}

/// The side that answers. Dropped without an answer, it tells the caller that none will come.
pub(super) struct Reply<T>(Option<Arc<Mutex<State<T>>>>);

impl<T> Reply<T> {
    /// Answers, and wakes the caller if it is still there.
    pub(super) fn answer(mut self, answer: T) {
        self.end(State::Answered(answer));
    }

    /// Whether the caller is gone.
    pub(super) fn is_closed(&self) -> bool {
        (self.0.as_ref()).is_none_or(|state| matches!(*state.lock(), State::Closed))
    }

    fn end(&mut self, end: State<T>) {
        let Some(shared) = self.0.take() else { return };
        let mut state = shared.lock();
        let State::Open(waker) = &mut *state else {
            // What is dropped may want this mutex.
            drop(state);
            return;
        };
        let waker = waker.take();
        *state = end;
        drop(state);
        // Before the caller runs: once it is done, the memory is free.
        drop(shared);
        if let Some(waker) = waker {
            waking(|| waker.wake());
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.end(State::Ended);
    }
}

/// The side of the caller: completes with the answer, or with `None` if none will come. Cancel safe.
pub(crate) struct Awaited<T>(Arc<Mutex<State<T>>>);

impl<T> Future for Awaited<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        // As tokio's channels: a task that finds one answer after the other lets others run.
        let turn = ready!(poll_proceed(cx));
        let mut state = self.0.lock();
        if let State::Open(waker) = &mut *state {
            let is_known = waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker()));
            let before = (!is_known).then(|| waker.replace(cx.waker().clone()));
            drop(state);
            drop(before);
            return Poll::Pending;
        }
        turn.made_progress();
        match std::mem::replace(&mut *state, State::Ended) {
            State::Answered(answer) => Poll::Ready(Some(answer)),
            State::Open(_) | State::Ended | State::Closed => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Awaited<T> {
    fn drop(&mut self) {
        let last = std::mem::replace(&mut *self.0.lock(), State::Closed);
        drop(last);
    }
}

impl<T> fmt::Debug for Awaited<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Awaited").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;
    use futures_util::task::{ArcWake, waker};

    use super::*;

    struct Counts(AtomicUsize);

    impl ArcWake for Counts {
        fn wake_by_ref(counts: &Arc<Counts>) {
            counts.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(awaited: &mut Awaited<T>, counts: &Arc<Counts>) -> Poll<Option<T>> {
        Pin::new(awaited).poll(&mut Context::from_waker(&waker(counts.clone())))
    }

    #[test]
    fn answer_wakes_its_caller_once_and_comes_once() {
        let counts = Arc::new(Counts(AtomicUsize::new(0)));
        let mut channel = Channel::new();
        let (reply, mut awaited) = channel.open();
        for _ in 0..2 {
            assert_eq!(poll(&mut awaited, &counts), Poll::Pending);
        }
        assert!(!reply.is_closed());
        reply.answer(7);
        assert_eq!(counts.0.load(Ordering::Relaxed), 1);
        assert_eq!(poll(&mut awaited, &counts), Poll::Ready(Some(7)));
        assert_eq!(poll(&mut awaited, &counts), Poll::Ready(None));
    }

    #[test]
    fn caller_learns_that_no_answer_comes_and_the_other_side_that_it_is_gone() {
        let counts = Arc::new(Counts(AtomicUsize::new(0)));
        let mut channel = Channel::<u8>::new();
        let (reply, mut awaited) = channel.open();
        assert_eq!(poll(&mut awaited, &counts), Poll::Pending);
        drop(reply);
        assert_eq!(counts.0.load(Ordering::Relaxed), 1);
        assert_eq!(poll(&mut awaited, &counts), Poll::Ready(None));

        let (reply, awaited) = channel.open();
        drop(awaited);
        assert!(reply.is_closed());
        reply.answer(1);
    }

    #[test]
    fn answer_is_never_that_of_another_opening() {
        let mut channel = Channel::new();
        let (late, mut first) = channel.open();
        let (reply, mut second) = channel.open();
        late.answer(1);
        assert_eq!((&mut second).now_or_never(), None);
        reply.answer(2);
        assert_eq!((&mut first).now_or_never(), Some(Some(1)));
        assert_eq!((&mut second).now_or_never(), Some(Some(2)));
        drop((first, second));

        let memory = Arc::as_ptr(&channel.0);
        let (_reply, mut third) = channel.open();
        assert_eq!(Arc::as_ptr(&channel.0), memory);
        assert_eq!((&mut third).now_or_never(), None);
    }

    #[tokio::test]
    async fn caller_of_many_answers_lets_other_tasks_run() {
        let other = tokio::spawn(async {});
        for _ in 0..1000 {
            let mut channel = Channel::new();
            let (reply, awaited) = channel.open();
            reply.answer(());
            awaited.await;
        }
        assert!(other.is_finished());
    }

    #[test]
    fn waker_and_answer_go_with_the_caller() {
        let counts = Arc::new(Counts(AtomicUsize::new(0)));
        let mut channel = Channel::new();
        let (reply, mut awaited) = channel.open();
        assert!(poll(&mut awaited, &counts).is_pending());
        drop(awaited);
        assert_eq!(Arc::strong_count(&counts), 1);
        reply.answer(counts.clone());
        assert_eq!(Arc::strong_count(&counts), 1);

        let (reply, awaited) = channel.open();
        reply.answer(counts.clone());
        drop(awaited);
        assert_eq!(Arc::strong_count(&counts), 1);
    }
}
