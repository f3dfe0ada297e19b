//! A connection that serves a queue and is restored when it breaks.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::{Serving, Step, StepQueue};
use crate::base::chance;
use crate::base::observed::log;
use crate::store::{Reason, StoreError};

/// The pause between two attempts to connect, initially and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// A connection that was usable for a shorter time was of no use: for example the server only reads, and each step that
/// follows a connection breaks it.
const BRIEF: Duration = Duration::from_secs(1);

/// How a store connects to its server, and runs the steps of its queue there.
///
/// ```
/// use dlock::store::StoreError;
/// use dlock::store::queue::{Connect, Link, Next, Step};
/// use tokio::time::Instant;
///
/// /// A database in this process, that does everything at once.
/// struct Toy;
///
/// impl<S: Step<Answer = bool>> Connect<S> for Toy {
///     type Session = ();
///
///     async fn connect(&self) -> Result<(), StoreError> {
///         Ok(())
///     }
///
///     async fn serve(&self, _session: (), link: &mut Link<S>) -> Option<String> {
///         link.is_ready();
///         loop {
///             match link.queue().next(Instant::now(), |_| true) {
///                 Next::Send(jobs) => {
///                     for job in jobs {
///                         link.queue().answer(job, Ok(true));
///                     }
///                 }
///                 Next::Wait(_) => link.queue().woken().await,
///                 Next::End => return None,
///             }
///         }
///     }
/// }
/// ```
pub trait Connect<S: Step>: Send + Sync + 'static {
    /// A connection.
    type Session: Send;

    /// Connects, in bounded time.
    fn connect(&self) -> impl Future<Output = Result<Self::Session, StoreError>> + Send;

    /// Serves the queue until the connection is unusable, and returns why; `None` when the queue has ended. Calls
    /// [`Link::is_ready`] when steps can be sent.
    fn serve(
        &self,
        session: Self::Session,
        link: &mut Link<S>,
    ) -> impl Future<Output = Option<String>> + Send;
}

/// A connection of a [`StepQueue`]: it connects when there is something to do and no other connection is idle, and again
/// when the connection broke. Then it reports doubts about all grants, so that their holders soon learn their state.
///
/// ```
/// use dlock::store::queue::{Connect, Step, StepQueue};
/// use std::sync::Arc;
///
/// /// Two connections, of which the second comes when the first is busy.
/// fn start<S: Step>(queue: &Arc<StepQueue<S>>, connect: &Arc<impl Connect<S>>) {
///     for _ in 0..2 {
///         tokio::spawn(queue.serve(connect.clone(), None));
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Link<S: Step> {
    serving: Serving<S>,
    /// Whether a connection broke: grants may have been lost until the next connection.
    broke: bool,
    /// Since when its connection is usable.
    ready: Option<Instant>,
    /// The next pause between two attempts.
    pause: Duration,
    /// Whether the trouble was logged already.
    told: bool,
    /// Logs that the trouble is over, once the connection was usable for a while.
    over: Option<JoinHandle<()>>,
}

impl<S: Step> Link<S> {
    pub(super) fn new(queue: &Arc<StepQueue<S>>) -> Link<S> {
        Link {
            serving: queue.serving(),
            broke: false,
            ready: None,
            pause: PAUSE.0,
            told: false,
            over: None,
        }
    }

    /// Returns the queue that it serves.
    #[must_use]
    pub fn queue(&self) -> &Arc<StepQueue<S>> {
        self.serving.queue()
    }

    /// Serves the queue until the store is gone.
    pub(super) async fn run<C: Connect<S>>(mut self, connect: Arc<C>, mut first: Option<C::Session>) {
        loop {
            let session = match first.take() {
                Some(session) => session,
                None => match self.connect(&*connect).await {
                    Some(session) => session,
                    None => return,
                },
            };
            let connected = self.queue().connected();
            let ended = connect.serve(session, &mut self).await;
            drop(connected);
            let Some(trouble) = ended else { return };
            let was_of_use = self.was_of_use();
            self.tell_trouble(&trouble);
            if !was_of_use {
                // For example the table is missing: do not reconnect as fast as possible.
                self.pause().await;
            }
        }
    }

    /// Records that steps can be sent on the new connection.
    pub fn is_ready(&mut self) {
        *self.queue().trouble.lock() = None;
        if std::mem::replace(&mut self.broke, true) {
            self.queue().doubt();
        }
        self.ready = Some(Instant::now());
        if self.told {
            let address = self.queue().address().to_owned();
            self.over = Some(tokio::spawn(async move {
                sleep(BRIEF).await;
                log!(info, server = %address, "connected to the lock store again");
            }));
        }
    }

    /// Whether the connection that ended was usable for a while. If so, the next one is tried at once.
    fn was_of_use(&mut self) -> bool {
        let ready = self.ready.take();
        let was_of_use = ready.is_some_and(|ready| ready.elapsed() >= BRIEF);
        let over = self.over.take();
        if was_of_use {
            self.pause = PAUSE.0;
            self.told = false;
        } else if let Some(over) = over {
            over.abort();
        }
        was_of_use
    }

    fn tell_trouble(&mut self, trouble: &str) {
        if !std::mem::replace(&mut self.told, true) {
            let address = self.queue().address();
            log!(warn, server = %address, %trouble, "no connection to the lock store, trying again");
        }
        self.queue().has_trouble(trouble);
    }

    async fn pause(&mut self) {
        sleep(self.pause.mul_f64(0.5 + chance::fraction())).await;
        self.pause = (2 * self.pause).min(PAUSE.1);
    }

    /// Tries until there is a connection; `None` when it is not needed any more.
    async fn connect<C: Connect<S>>(&mut self, connect: &C) -> Option<C::Session> {
        loop {
            // After a loss at once, so that holders learn soon whether their grants still exist.
            if !self.broke {
                self.queue().wanted().await;
            }
            if self.queue().is_ended() {
                return None;
            }
            match connect.connect().await {
                Ok(session) => return Some(session),
                Err(error) => {
                    self.tell_trouble(&error.message);
                    if error.reason == Reason::Refused {
                        self.queue().refused(&error);
                    }
                }
            }
            self.pause().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::Next;
    use super::*;

    #[derive(Debug)]
    struct Toy;

    impl Step for Toy {
        type Answer = ();

        fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
            std::iter::empty()
        }

        fn acquires(&self) -> bool {
            false
        }
    }

    /// Connections that break after this time.
    struct Breaks {
        after: Duration,
        connections: AtomicU32,
    }

    impl Connect<Toy> for Breaks {
        type Session = ();

        async fn connect(&self) -> Result<(), StoreError> {
            self.connections.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        async fn serve(&self, _session: (), link: &mut Link<Toy>) -> Option<String> {
            link.is_ready();
            sleep(self.after).await;
            Some("the server only reads".to_owned())
        }
    }

    /// How many connections are made within this time.
    async fn connections(after: Duration, within: Duration) -> u32 {
        let queue: Arc<StepQueue<Toy>> = Arc::new(StepQueue::new("db", Duration::from_secs(60)));
        let connect = Arc::new(Breaks {
            after,
            connections: AtomicU32::new(0),
        });
        let serving = tokio::spawn(queue.serve(connect.clone(), Some(())));
        sleep(within).await;
        serving.abort();
        connect.connections.load(Ordering::Relaxed)
    }

    /// Connections of which further ones are not made, or only slowly.
    struct Further {
        refused: bool,
        attempts: AtomicU32,
    }

    impl Connect<Toy> for Further {
        type Session = ();

        async fn connect(&self) -> Result<(), StoreError> {
            self.attempts.fetch_add(1, Ordering::Relaxed);
            match self.refused {
                true => Err(StoreError::not_done(Reason::Unreachable, "too many connections")),
                false => std::future::pending().await,
            }
        }

        async fn serve(&self, _session: (), link: &mut Link<Toy>) -> Option<String> {
            link.is_ready();
            loop {
                match link.queue().next(Instant::now(), |_| true) {
                    Next::Send(jobs) => {
                        sleep(TRIP).await;
                        for job in jobs {
                            link.queue().answer(job, Ok(()));
                        }
                    }
                    Next::Wait(_) => link.queue().woken().await,
                    Next::End => return None,
                }
            }
        }
    }

    const TRIP: Duration = Duration::from_millis(5);

    /// A queue with one connection and a task that would make a further one.
    async fn one_of_two(connect: &Arc<Further>, connected_first: bool) -> Arc<StepQueue<Toy>> {
        let queue = Arc::new(StepQueue::new("db", Duration::from_secs(1)));
        for connected in [connected_first, !connected_first] {
            tokio::spawn(queue.serve(connect.clone(), connected.then_some(())));
            sleep(TRIP).await;
        }
        queue
    }

    #[tokio::test(start_paused = true)]
    async fn lone_step_goes_to_the_idle_connection() {
        for connected_first in [true, false] {
            let connect = Arc::new(Further {
                refused: false,
                attempts: AtomicU32::new(0),
            });
            let queue = one_of_two(&connect, connected_first).await;
            for _ in 0..3 {
                let asked = Instant::now();
                queue.ask(Toy).await.unwrap();
                assert!(asked.elapsed() <= 2 * TRIP, "{:?}", asked.elapsed());
                sleep(TRIP).await;
            }
            assert_eq!(connect.attempts.load(Ordering::Relaxed), 0);
            // While the connection is busy a further one may be of use.
            let busy = [queue.ask(Toy), queue.ask(Toy)];
            sleep(TRIP / 2).await;
            let more = queue.ask(Toy);
            sleep(TRIP / 2).await;
            assert_eq!(connect.attempts.load(Ordering::Relaxed), 1);
            futures_util::future::try_join_all(busy).await.unwrap();
            more.await.unwrap();
            queue.close();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn further_connection_that_fails_is_not_tried_while_there_is_nothing_to_do() {
        let connect = Arc::new(Further {
            refused: true,
            attempts: AtomicU32::new(0),
        });
        let queue = one_of_two(&connect, true).await;
        let busy = queue.ask(Toy);
        sleep(TRIP / 2).await;
        let more = queue.ask(Toy);
        sleep(TRIP / 4).await;
        assert_eq!(connect.attempts.load(Ordering::Relaxed), 1);
        assert!(!queue.silence().contains("too many"), "{}", queue.silence());
        busy.await.unwrap();
        more.await.unwrap();
        sleep(Duration::from_secs(60)).await;
        assert!(connect.attempts.load(Ordering::Relaxed) <= 2);
        queue.close();
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_break_at_once_are_followed_by_growing_pauses() {
        let minute = Duration::from_secs(60);
        let number = connections(Duration::from_millis(1), minute).await;
        assert!((80..250).contains(&number), "{number}");
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_breaks_after_a_while_is_replaced_at_once() {
        let life = 2 * BRIEF;
        assert_eq!(connections(life, 10 * life + BRIEF).await, 10);
    }
}
