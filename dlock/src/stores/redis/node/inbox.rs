//! The requests of many threads for one task.
//!
//! A channel that many threads write is fetched from one to another with each message. Here a message is one entry under one
//! mutex, the task takes all messages at once, and is woken only when it has gone to sleep. Under the same mutex the memory of
//! messages goes back to the senders.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use parking_lot::{Mutex, MutexGuard};

use tokio::task::coop;

use crate::base::own_line::OwnLine;

/// How much memory of messages is kept, by the senders and by the reader.
const MOST_SPARES: usize = 256;

/// Creates an inbox, and the first of its senders.
pub(super) fn inbox<T, S>() -> (Sender<T, S>, Inbox<T, S>) {
    let shared: Arc<Shared<T, S>> = Arc::new(Shared {
        mail: OwnLine::new(Mutex::new(Mail {
            waiting: VecDeque::new(),
            spares: VecDeque::new(),
            sleeps: false,
            is_over: false,
        })),
        task: AtomicWaker::new(),
    });
    let inbox = Inbox {
        shared: shared.clone(),
        taken: VecDeque::new(),
        spares: Vec::new(),
    };
    (Sender(Arc::new(Senders(shared))), inbox)
}

struct Shared<T, S> {
    mail: OwnLine<Mutex<Mail<T, S>>>,
    task: AtomicWaker,
}

struct Mail<T, S> {
    waiting: VecDeque<T>,
    /// Memory of messages, for others.
    spares: VecDeque<S>,
    /// Whether the task has to be woken.
    sleeps: bool,
    /// Whether all senders, or the inbox, are gone.
    is_over: bool,
}

impl<T, S> Mail<T, S> {
    fn take_back(&mut self, spares: &mut Vec<S>) {
        let room = MOST_SPARES.saturating_sub(self.spares.len());
        let kept = spares.len().saturating_sub(room);
        self.spares.extend(spares.drain(kept..));
    }
}

pub(super) struct Sender<T, S>(Arc<Senders<T, S>>);

impl<T, S> Clone for Sender<T, S> {
    fn clone(&self) -> Sender<T, S> {
        Sender(self.0.clone())
    }
}

impl<T, S> fmt::Debug for Sender<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").finish_non_exhaustive()
    }
}

impl<T, S> Sender<T, S> {
    /// Whether both send to the same task.
    pub(super) fn is(&self, other: &Sender<T, S>) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Leaves a message. Returns false if its task has gone.
    pub(super) fn send(&self, message: T) -> bool {
        self.left(self.mail(), message)
    }

    /// Leaves a message that is made in memory of another, if there is any; returns what was made along with it. `None` if its
    /// task has gone.
    pub(super) fn send_with<A>(&self, make: impl FnOnce(Option<S>) -> (T, A)) -> Option<A> {
        let mut mail = self.mail();
        if mail.is_over {
            // What would be sent is dropped without the mutex.
            drop(mail);
            return None;
        }
        // The oldest: others may still be read by the callers before.
        let (mail, (message, along)) = match mail.spares.pop_front() {
            Some(spare) => (mail, make(Some(spare))),
            None => {
                // Memory is allocated without the mutex.
                drop(mail);
                let made = make(None);
                (self.mail(), made)
            }
        };
        self.left(mail, message).then_some(along)
    }

    fn mail(&self) -> MutexGuard<'_, Mail<T, S>> {
        self.0.0.mail.lock()
    }

    fn left(&self, mut mail: MutexGuard<'_, Mail<T, S>>, message: T) -> bool {
        if mail.is_over {
            // The message is dropped without the mutex.
            drop(mail);
            return false;
        }
        mail.waiting.push_back(message);
        let sleeps = std::mem::take(&mut mail.sleeps);
        drop(mail);
        if sleeps {
            self.0.0.task.wake();
        }
        true
    }
}

/// Ends with the last sender.
struct Senders<T, S>(Arc<Shared<T, S>>);

impl<T, S> Drop for Senders<T, S> {
    fn drop(&mut self) {
        self.0.mail.lock().is_over = true;
        self.0.task.wake();
    }
}

/// The only reader.
pub(super) struct Inbox<T, S> {
    shared: Arc<Shared<T, S>>,
    taken: VecDeque<T>,
    /// Memory for the senders.
    spares: Vec<S>,
}

impl<T, S> Inbox<T, S> {
    /// Lets senders use the memory of a message, once it is [returned](Self::return_spares).
    pub(super) fn reuse(&mut self, spare: S) {
        if self.spares.len() < MOST_SPARES {
            self.spares.push(spare);
        }
    }

    /// Returns memory to the senders; so does each look for messages.
    pub(super) fn return_spares(&mut self) {
        if !self.spares.is_empty() {
            self.shared.mail.lock().take_back(&mut self.spares);
        }
    }

    /// Takes the next message, if there is one.
    pub(super) fn try_recv(&mut self) -> Option<T> {
        if self.taken.is_empty() {
            std::mem::swap(&mut self.taken, &mut self.shared.mail.lock().waiting);
        }
        self.taken.pop_front()
    }

    /// Accepts no further message; those that are there can be taken.
    pub(super) fn close(&mut self) {
        self.shared.mail.lock().is_over = true;
    }

    /// Whether no message comes any more once those that are there have been taken.
    pub(super) fn is_over(&self) -> bool {
        self.shared.mail.lock().is_over
    }

    /// Waits for the next message; `None` when no sender is left. Cancel safe.
    pub(super) async fn recv(&mut self) -> Option<T> {
        std::future::poll_fn(|cx| self.poll(cx).map(|_| self.taken.pop_front())).await
    }

    /// Moves at most this many messages into `to`, or waits for one. Returns how many; 0 when no sender is left.
    pub(super) fn poll_many(&mut self, cx: &mut Context<'_>, to: &mut Vec<T>, most: usize) -> Poll<usize> {
        self.poll(cx).map(|()| {
            let count = self.taken.len().min(most);
            to.extend(self.taken.drain(..count));
            count
        })
    }

    /// Completes when messages have been taken, or none comes any more.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // The senders may be faster than this task for ever.
        if !coop::has_budget_remaining() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if !self.taken.is_empty() {
            return Poll::Ready(());
        }
        let mut mail = self.shared.mail.lock();
        std::mem::swap(&mut self.taken, &mut mail.waiting);
        mail.take_back(&mut self.spares);
        if !self.taken.is_empty() || mail.is_over {
            mail.sleeps = false;
            return Poll::Ready(());
        }
        self.shared.task.register(cx.waker());
        mail.sleeps = true;
        Poll::Pending
    }
}

impl<T, S> Drop for Inbox<T, S> {
    fn drop(&mut self) {
        let mut mail = self.shared.mail.lock();
        mail.is_over = true;
        let (unread, spares) = (
            std::mem::take(&mut mail.waiting),
            std::mem::take(&mut mail.spares),
        );
        // Not under the mutex: a message tells its sender that it is gone.
        drop(mail);
        drop((unread, spares));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn messages_come_in_order_and_the_last_sender_ends_them() {
        let (sender, mut inbox) = inbox::<_, ()>();
        assert_eq!(inbox.try_recv(), None);
        let other = sender.clone();
        assert!(sender.send(1) && other.send(2) && sender.send(3));
        assert_eq!(inbox.recv().await, Some(1));
        assert!(other.send(4));
        assert_eq!(inbox.try_recv(), Some(2));
        drop(sender);
        assert!(!inbox.is_over());
        drop(other);
        assert!(inbox.is_over());
        let mut rest = Vec::new();
        let taken = std::future::poll_fn(|cx| inbox.poll_many(cx, &mut rest, 1)).await;
        assert_eq!((taken, rest), (1, vec![3]));
        assert_eq!(inbox.recv().await, Some(4));
        assert_eq!(inbox.recv().await, None);
    }

    #[tokio::test]
    async fn inbox_that_is_gone_takes_nothing_and_keeps_nothing() {
        let (sender, inbox) = inbox::<_, ()>();
        let message = Arc::new(());
        assert!(sender.send(message.clone()));
        drop(inbox);
        assert_eq!(Arc::strong_count(&message), 1);
        assert!(!sender.send(message.clone()));
        assert_eq!(Arc::strong_count(&message), 1);
    }

    #[tokio::test]
    async fn memory_of_messages_is_used_once_and_kept_in_part() {
        let (sender, mut inbox) = inbox();
        let made = |spare: Option<u32>| (spare.unwrap_or(0), spare);
        assert_eq!(sender.send_with(made), Some(None));
        inbox.recv().await;
        inbox.reuse(1);
        assert_eq!(sender.send_with(made), Some(None));
        inbox.recv().await;
        // It is there since the task asked again.
        assert_eq!(sender.send_with(made), Some(Some(1)));
        assert_eq!(sender.send_with(made), Some(None));
        inbox.reuse(2);
        inbox.return_spares();
        assert_eq!(sender.send_with(made), Some(Some(2)));

        for _ in 0..3 {
            (0..300).for_each(|spare| inbox.reuse(spare));
            while inbox.recv().now_or_never().is_some() {}
        }
        let used = (0..400).filter_map(|_| sender.send_with(made)).flatten();
        assert_eq!(used.count(), MOST_SPARES);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_message_is_missed_by_a_task_that_falls_asleep() {
        const EACH: u64 = 20_000;
        let (sender, mut inbox) = inbox::<_, ()>();
        let senders: Vec<_> = (0..3)
            .map(|_| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for number in 0..EACH {
                        assert!(sender.send(number));
                        if number % 64 == 0 {
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        drop(sender);
        let read = tokio::spawn(async move {
            let mut sum = 0;
            while let Some(number) = inbox.recv().await {
                sum += number;
            }
            sum
        });
        let sum = tokio::time::timeout(Duration::from_secs(60), read).await;
        assert_eq!(sum.unwrap().unwrap(), 3 * (0..EACH).sum::<u64>());
        for sender in senders {
            sender.join().unwrap();
        }
    }
}
