//! The task that runs operations.

use std::sync::Arc;

use dlock::store::{DoubtSender, GrantId, Lane};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until};

use crate::core::Core;
use crate::gather::Gathered;
use crate::layout::semaphore_of;
use crate::queues::{Inbox, LockQueues, Step, Work};
use crate::session::Event;
use crate::wire::Changed;

/// The locks whose operation is done.
type Done = Vec<Arc<str>>;

pub(crate) struct Driver {
    pub(crate) core: Arc<Core>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) doubts: DoubtSender,
    pub(crate) events: UnboundedReceiver<Event>,
    queues: LockQueues,
    running: FuturesUnordered<BoxFuture<'static, Done>>,
    renewals: Gathered,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The store may outlive the runtime.
        self.inbox.end();
    }
}

impl Driver {
    pub(crate) fn new(
        core: Arc<Core>,
        inbox: Arc<Inbox>,
        doubts: DoubtSender,
        events: UnboundedReceiver<Event>,
    ) -> Driver {
        Driver {
            core,
            inbox,
            doubts,
            events,
            queues: LockQueues::default(),
            running: FuturesUnordered::new(),
            renewals: Gathered::default(),
        }
    }

    /// Runs until the store is dropped and every operation has its reply; then closes the session.
    pub(crate) async fn run(mut self) {
        loop {
            let (steps, closed) = self.inbox.take();
            for (lock, step) in steps {
                self.enter(lock, step);
            }
            let (next_end, next_renewal) = (self.expire(), self.renew());
            let wakes_at = next_end.into_iter().chain(next_renewal).min();
            if closed && self.queues.is_empty() {
                return self.core.session.close();
            }
            let waking = async {
                match wakes_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(done) = self.running.next(), if !self.running.is_empty() => self.leave(done),
                () = self.inbox.woken() => {}
                Some(event) = self.events.recv() => self.event(event),
                () = waking => {}
            }
        }
    }

    fn enter(&mut self, lock: Option<Arc<str>>, step: Step) {
        match lock {
            None => self.begin(None, step),
            Some(lock) => {
                match self.queues.enter(&lock, step) {
                    Some(step) => self.begin(Some(lock), step),
                    // The operation before it may be a renewal that waits for others.
                    None => self.renewals.hurry(),
                }
            }
        }
    }

    fn begin(&mut self, lock: Option<Arc<str>>, step: Step) {
        match (step, lock) {
            (Step::Renew(renew), Some(lock)) => self.renewals.push(lock, renew, self.core.grants.len()),
            (Step::Renew(_), None) => {}
            (Step::Of(_, work) | Step::Work(work), lock) => {
                let work = work();
                self.running.push(Box::pin(async move {
                    work.await;
                    lock.into_iter().collect()
                }));
            }
        }
    }

    fn leave(&mut self, done: Done) {
        for lock in done {
            for next in self.queues.leave(&lock) {
                self.begin(Some(lock.clone()), next);
            }
        }
    }

    /// Sends the renewals that are due, and returns when the next ones are due.
    fn renew(&mut self) -> Option<Instant> {
        let bytes = self.core.root.len();
        while let Some(batch) = self.renewals.take(bytes, Instant::now()) {
            let core = self.core.clone();
            self.running
                .push(Box::pin(async move { core.renew(batch).await }));
        }
        self.renewals.due()
    }

    /// Starts to end expired leases, and returns when the next one expires.
    fn expire(&mut self) -> Option<Instant> {
        let (over, next) = self.core.grants.over(Instant::now());
        for (grant, lock) in over {
            self.work(lock, grant, move |core| async move { core.expire(grant).await });
        }
        next
    }

    /// Queues an internal operation on a grant.
    fn work<F>(&mut self, lock: Arc<str>, grant: GrantId, work: impl FnOnce(Arc<Core>) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let core = self.core.clone();
        let work = move || -> Work { Box::pin(work(core)) };
        self.enter(Some(lock), Step::Of(grant, Box::new(work)));
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Expired => {
                self.core.grants.forget_before(self.core.session.epoch());
                // Makes holders renew at once; the renewals find their grants gone.
                self.doubts.tell(Lane::default());
            }
            Event::Connected => {
                self.doubts.tell(Lane::default());
                self.core.followers.clear();
                self.core.hub.tell_all(false);
                for queue in self.core.grants.queues() {
                    if let Some(semaphore) = semaphore_of(&queue) {
                        self.core.tell_permits(semaphore);
                    }
                }
                for (lock, topic) in self.core.waited_for() {
                    self.watch(move |core| async move { core.watch(lock, &topic).await });
                }
                for (grant, lock) in self.core.grants.absent() {
                    self.work(
                        lock,
                        grant,
                        move |core| async move { core.look_again(grant).await },
                    );
                }
            }
            Event::Changed(Changed { path, is_deleted }) => {
                if let Some(lock) = self.core.watched(&path) {
                    self.watch(move |core| async move { core.watch_lock(lock, None).await });
                } else if let Some(counter) = self.core.counter_with(&path) {
                    self.watch(move |core| async move { core.counter_changed(&path, counter).await });
                } else {
                    self.core.tell_follower(&path, is_deleted);
                }
            }
        }
    }

    fn watch<F>(&mut self, work: impl FnOnce(Arc<Core>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let watching = work(self.core.clone());
        self.running.push(Box::pin(async move {
            watching.await;
            Done::new()
        }));
    }
}
