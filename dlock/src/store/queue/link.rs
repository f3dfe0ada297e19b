//! A connection that serves a queue and is restored when it breaks.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{Step, StepQueue};
use crate::base::chance;
use crate::store::{Reason, StoreError};

/// The pause between two attempts to connect, initially and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

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
///                         link.queue().done(&job.step);
///                         job.answer(Ok(true));
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

/// A connection of a [`StepQueue`]: it connects when there is something to do, and again when the connection broke.
/// Then it reports doubts about all grants, so that their holders soon learn their state.
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
    queue: Arc<StepQueue<S>>,
    /// Whether a connection broke: grants may have been lost until the next connection.
    broke: bool,
    /// Whether its connection was usable.
    served: bool,
    /// The next pause between two attempts.
    pause: Duration,
    /// Whether the trouble was logged already.
    told: bool,
}

impl<S: Step> Link<S> {
    pub(super) fn new(queue: Arc<StepQueue<S>>) -> Link<S> {
        Link {
            queue,
            broke: false,
            served: false,
            pause: PAUSE.0,
            told: false,
        }
    }

    /// Returns the queue that it serves.
    #[must_use]
    pub fn queue(&self) -> &Arc<StepQueue<S>> {
        &self.queue
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
            self.queue.connected();
            let ended = connect.serve(session, &mut self).await;
            self.queue.disconnected();
            let Some(trouble) = ended else { return };
            self.tell_trouble(&trouble);
            if !std::mem::take(&mut self.served) {
                // For example the table is missing: do not reconnect as fast as possible.
                self.pause().await;
            }
        }
    }

    /// Records that steps can be sent on the new connection.
    pub fn is_ready(&mut self) {
        *self.queue.trouble.lock() = None;
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %self.queue.address(), "connected to the lock store again");
        }
        if std::mem::replace(&mut self.broke, true) {
            self.queue.doubt();
        }
        self.served = true;
        self.pause = PAUSE.0;
    }

    fn tell_trouble(&mut self, trouble: &str) {
        if !std::mem::replace(&mut self.told, true) {
            let address = self.queue.address();
            tracing::warn!(server = %address, %trouble, "no connection to the lock store, trying again");
        }
        *self.queue.trouble.lock() = Some(trouble.to_owned());
    }

    async fn pause(&mut self) {
        tokio::time::sleep(self.pause.mul_f64(0.5 + chance::fraction())).await;
        self.pause = (2 * self.pause).min(PAUSE.1);
    }

    /// Tries until there is a connection; `None` when it is not needed any more.
    async fn connect<C: Connect<S>>(&mut self, connect: &C) -> Option<C::Session> {
        // After a loss at once, so that holders learn soon whether their grants still exist.
        while !self.broke && !self.queue.is_wanted() {
            self.queue.woken().await;
        }
        loop {
            if self.queue.is_ended() {
                return None;
            }
            match connect.connect().await {
                Ok(session) => return Some(session),
                Err(error) => {
                    self.tell_trouble(&error.message);
                    if error.reason == Reason::Refused {
                        self.queue.refused(&error);
                    }
                }
            }
            self.pause().await;
        }
    }
}
