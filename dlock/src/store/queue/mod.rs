//! The requests of a store that wait to be sent to a server, for stores on connections that answer one request after
//! another.
//!
//! Steps that wait while a connection is busy go into its next round trip. Steps of one key are sent one after the
//! other, in the order in which they were queued: as long as one of them has no reply, the next ones stay here. So it
//! does not matter which connection sends which step, nor how many round trips a step takes.
//!
//! A store queues steps in its [`StepQueue`]; a [`Link`] maintains a connection that serves it. `dlock-postgres` and
//! `dlock-mysql` are built on them. A store whose connections carry several requests at once needs only [`Gather`], as
//! `dlock-etcd` and `dlock-zookeeper` do.

mod clock;
mod gather;
mod job;
mod link;
mod moment;
mod options;
mod send_state;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

pub use self::clock::ServerClock;
pub use self::gather::{Carrier, Gather, Unanswered};
pub use self::job::{Job, Step};
pub use self::link::{Connect, Link};
#[doc(hidden)]
pub use self::moment::Moment;
#[doc(hidden)]
pub use self::options::{check_connections, check_interval, check_timeout};
pub use self::send_state::SendState;
use super::{DoubtSender, Doubts, GrantId, Lane, Reason, StoreError, StoreFuture};
use crate::base::chance::{HashMap, HashSet};

/// The steps that wait for the connections of a store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::store::StoreError> {
/// use dlock::store::queue::{Next, Step, StepQueue};
/// use std::sync::Arc;
/// use std::time::Duration;
/// use tokio::time::Instant;
///
/// #[derive(Debug)]
/// struct Release(Arc<str>);
///
/// impl Step for Release {
///     type Answer = bool;
///     fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
///         std::iter::once(&self.0)
///     }
///     fn acquires(&self) -> bool {
///         false
///     }
/// }
///
/// let queue = Arc::new(StepQueue::new("db:5432", Duration::from_secs(1)));
/// let first = queue.ask(Release("a".into())); // queued by the call, polled or not
/// let second = queue.ask(Release("a".into()));
///
/// // A connection that is free takes what may go together: of each key one step.
/// let Next::Send(jobs) = queue.next(Instant::now(), |_| true) else { panic!() };
/// assert_eq!(jobs.len(), 1);
/// for job in jobs {
///     queue.done(&job.step);
///     job.answer(Ok(true));
/// }
/// assert!(first.await?);
/// # drop(second); Ok(()) }
/// ```
#[derive(Debug)]
pub struct StepQueue<S: Step> {
    address: String,
    timeout: Duration,
    state: Mutex<State<S>>,
    /// There may be something to send, or the queue has ended.
    wake: Notify,
    doubts: DoubtSender,
    /// Why there is no connection, for messages.
    trouble: Mutex<Option<String>>,
}

#[derive(Debug)]
struct State<S: Step> {
    waiting: VecDeque<Job<S>>,
    /// The keys of the steps in flight.
    busy: HashSet<Arc<str>>,
    /// Acquires without a reply, with the server's time after which they can no longer take effect.
    unknown: HashMap<GrantId, i64>,
    /// Connections that serve the queue.
    connected: usize,
    closed: bool,
}

/// What an idle connection does next.
///
/// ```
/// use dlock::store::queue::{Next, Step};
///
/// fn how_many<S: Step>(next: &Next<S>) -> usize {
///     match next {
///         Next::Send(jobs) => jobs.len(),
///         Next::Wait(_) | Next::End => 0,
///     }
/// }
/// ```
#[derive(Debug)]
pub enum Next<S: Step> {
    /// Send these together; report each of them with [`done`](StepQueue::done), [`again`](StepQueue::again) or
    /// [`put_back`](StepQueue::put_back).
    Send(Vec<Job<S>>),
    /// Nothing yet; at this time the first delayed step may be sent.
    Wait(Option<Instant>),
    /// The store is gone, and everything has been sent.
    End,
}

impl<S: Step> StepQueue<S> {
    /// Creates an empty queue for the server at this address, which appears in messages, with this timeout for each
    /// step.
    #[must_use]
    pub fn new(address: impl Into<String>, timeout: Duration) -> StepQueue<S> {
        StepQueue {
            address: address.into(),
            timeout,
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                busy: HashSet::default(),
                unknown: HashMap::default(),
                connected: 0,
                closed: false,
            }),
            wake: Notify::new(),
            doubts: DoubtSender::new(),
            trouble: Mutex::default(),
        }
    }

    /// Queues a step at once, from any thread. The future only returns the reply: within the queue's `timeout`, and
    /// [`NotDone`](super::Outcome::NotDone) if the step was not sent by then, and never will be.
    pub fn ask(self: &Arc<Self>, step: S) -> StoreFuture<S::Answer> {
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + self.timeout;
        let send_state = Arc::new(SendState::default());
        self.push(Job {
            step,
            deadline,
            looks: 0,
            alone: false,
            not_before: None,
            send_state: send_state.clone(),
            reply,
        });
        let queue = self.clone();
        Box::pin(async move {
            let why = match timeout_at(deadline, answer).await {
                Ok(Ok(answer)) => return answer,
                // No task works on it any more, although its time is not over.
                Ok(Err(_)) if Instant::now() < deadline => {
                    return Err(StoreError::unknown(
                        "the runtime that served the connections has ended",
                    ));
                }
                _ => queue.silence(),
            };
            match send_state.give_up() {
                true => Err(StoreError::not_done(Reason::Unreachable, why)),
                false => Err(StoreError::unknown(why)),
            }
        })
    }

    fn push(&self, job: Job<S>) {
        self.state.lock().waiting.push_back(job);
        self.wake.notify_one();
    }

    /// Returns how long a step may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the server's address, for messages.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns why no reply came in time, for messages.
    #[must_use]
    pub fn silence(&self) -> String {
        let trouble = self.trouble.lock().clone();
        trouble.unwrap_or_else(|| self.no_answer())
    }

    /// Returns the message for a step without a reply in time.
    #[must_use]
    pub fn no_answer(&self) -> String {
        format!("{} did not answer within {:?}", self.address, self.timeout)
    }

    /// Returns a receiver of doubts about grants: one each time that a broken connection was replaced.
    #[must_use]
    pub fn doubts(&self) -> Doubts {
        self.doubts.subscribe()
    }

    fn doubt(&self) {
        self.doubts.tell(Lane::default());
    }

    /// Closes the queue: connections end when everything is sent.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
    }

    /// Returns when there may be something to do.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn woken(&self) {
        self.wake.notified().await;
    }

    /// Whether there is something that a further connection could do; another connection does the rest.
    fn is_wanted(&self) -> bool {
        let state = self.state.lock();
        if state.closed {
            self.wake.notify_one();
        }
        !state.waiting.is_empty() || state.closed
    }

    /// Takes the steps to send now, in the order in which they were queued: one per key at a time. `has_room` is called
    /// for each candidate, and counts it if it returns true.
    pub fn next(&self, now: Instant, has_room: impl FnMut(&Job<S>) -> bool) -> Next<S> {
        let mut state = self.state.lock();
        let (jobs, due) = state.take(now, has_room);
        if state.closed && state.waiting.is_empty() {
            // The other connections end as well.
            self.wake.notify_one();
            if jobs.is_empty() {
                return Next::End;
            }
        }
        if jobs.is_empty() {
            return Next::Wait(due);
        }
        if !state.waiting.is_empty() {
            self.wake.notify_one();
        }
        Next::Send(jobs)
    }

    /// Reports that a step has its reply: the next of its keys may be sent.
    pub fn done(&self, step: &S) {
        let mut state = self.state.lock();
        for key in step.keys() {
            state.busy.remove(key);
        }
        if !state.waiting.is_empty() {
            self.wake.notify_one();
        }
    }

    /// Reports that a step was not carried out and is to be sent again after a while, before all others of its keys.
    pub fn again(&self, mut job: Job<S>, after: Duration) {
        job.not_before = Some(Instant::now() + after);
        job.looks += 1;
        self.put_back(job);
    }

    /// Reports that a step was not sent after all: it stays before all others of its keys.
    pub fn put_back(&self, job: Job<S>) {
        job.send_state.take_back();
        let mut state = self.state.lock();
        for key in job.step.keys() {
            state.busy.remove(key);
        }
        state.waiting.push_front(job);
        self.wake.notify_one();
    }

    /// Reports that an acquire has no reply: it may take effect until the server's clock shows this.
    pub fn is_unknown(&self, grant: GrantId, until: i64) {
        self.state.lock().unknown.insert(grant, until);
    }

    /// Returns until when an acquire of this id may still take effect, by the server's clock; `None` if it cannot.
    #[must_use]
    pub fn unknown_until(&self, grant: GrantId) -> Option<i64> {
        self.state.lock().unknown.get(&grant).copied()
    }

    /// Reports that the acquire of this id was undone.
    pub fn is_known(&self, grant: GrantId, server_now: i64) {
        /// Ids that are never released are forgotten, long after they could take effect.
        const KEPT: usize = 1024;
        const LONG_AGO: i64 = 60_000_000;
        let mut state = self.state.lock();
        state.unknown.remove(&grant);
        if state.unknown.len() > KEPT {
            state.unknown.retain(|_, until| *until > server_now - LONG_AGO);
        }
    }

    fn connected(&self) {
        self.state.lock().connected += 1;
    }

    fn disconnected(&self) {
        self.state.lock().connected -= 1;
        self.wake.notify_one();
    }

    /// Fails all waiting steps, unless another connection serves the queue: the server refuses connections.
    fn refused(&self, error: &StoreError) {
        if self.state.lock().connected == 0 {
            self.fail_all(error);
        }
    }

    /// Fails all waiting steps: the server does not serve this store.
    pub fn fail_all(&self, error: &StoreError) {
        let failed = std::mem::take(&mut self.state.lock().waiting);
        for job in failed {
            job.answer(Err(error.clone()));
        }
    }

    /// Drops steps without a waiting caller; returns whether the store is gone and nothing is left to send.
    fn is_ended(&self) -> bool {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.waiting.retain(|job| job.is_due(now));
        let ended = state.closed && state.waiting.is_empty();
        if ended {
            self.wake.notify_one();
        }
        ended
    }

    /// Serves the queue by a connection until the store is gone; see [`Link`].
    pub fn serve<C: Connect<S>>(
        self: &Arc<Self>,
        connect: Arc<C>,
        first: Option<C::Session>,
    ) -> impl Future<Output = ()> + Send + use<S, C> {
        Link::new(self.clone()).run(connect, first)
    }
}

impl<S: Step> State<S> {
    /// Takes the steps that may be sent, one per key; also returns when the first delayed one may be sent.
    fn take(
        &mut self,
        now: Instant,
        mut has_room: impl FnMut(&Job<S>) -> bool,
    ) -> (Vec<Job<S>>, Option<Instant>) {
        let mut taken = Vec::with_capacity(self.waiting.len());
        let mut due: Option<Instant> = None;
        let mut blocked: HashSet<Arc<str>> = HashSet::default();
        // Each waiting step once; those that stay go to the end, and so keep their order.
        for _ in 0..self.waiting.len() {
            let Some(job) = self.waiting.pop_front() else {
                break;
            };
            if !job.is_due(now) {
                continue;
            }
            let early = job.not_before.filter(|time| *time > now);
            if let Some(time) = early {
                due = Some(due.map_or(time, |before| before.min(time)));
            }
            let is_taken = |key| self.busy.contains(key) || blocked.contains(key);
            let waits = early.is_some() || job.step.keys().any(is_taken);
            if waits || !has_room(&job) {
                blocked.extend(job.step.keys().cloned());
                self.waiting.push_back(job);
            } else if job.send_state.send() {
                self.busy.extend(job.step.keys().cloned());
                taken.push(job);
            }
        }
        (taken, due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Toy {
        Acquire(Arc<str>),
        Release(Arc<str>),
    }

    impl Step for Toy {
        type Answer = u32;

        fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
            let (Toy::Acquire(key) | Toy::Release(key)) = self;
            std::iter::once(key)
        }

        fn acquires(&self) -> bool {
            matches!(self, Toy::Acquire(_))
        }
    }

    type Queue = Arc<StepQueue<Toy>>;

    fn queue() -> Queue {
        Arc::new(StepQueue::new("db", Duration::from_secs(60)))
    }

    fn take(queue: &Queue, most: usize) -> Vec<Job<Toy>> {
        let mut taken = 0;
        let has_room = |_: &Job<Toy>| {
            taken += 1;
            taken <= most
        };
        match queue.next(Instant::now(), has_room) {
            Next::Send(jobs) => jobs,
            other => panic!("{other:?}"),
        }
    }

    fn keys(jobs: &[Job<Toy>]) -> Vec<&str> {
        jobs.iter()
            .flat_map(|job| job.step.keys())
            .map(|key| &**key)
            .collect()
    }

    /// Queues steps whose callers wait.
    fn ask(queue: &Queue, steps: &[&str]) -> Vec<StoreFuture<u32>> {
        steps
            .iter()
            .map(|key| queue.ask(Toy::Release((*key).into())))
            .collect()
    }

    #[test]
    fn steps_of_one_key_go_one_after_the_other() {
        let queue = queue();
        let _asked = ask(&queue, &["a", "b", "a", "b", "c"]);
        let first = take(&queue, 10);
        assert_eq!(keys(&first), ["a", "b", "c"]);
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::Wait(None)));
        queue.done(&first[0].step);
        assert_eq!(keys(&take(&queue, 10)), ["a"]);
    }

    #[test]
    fn step_without_room_keeps_the_later_ones_of_its_key_back() {
        let queue = queue();
        let _asked = ask(&queue, &["a", "b", "b", "c"]);
        let first = take(&queue, 1);
        assert_eq!(keys(&first), ["a"]);
        assert_eq!(keys(&take(&queue, 9)), ["b", "c"]);
    }

    #[test]
    fn step_that_is_sent_again_stays_before_later_ones() {
        let queue = queue();
        let _asked = [
            queue.ask(Toy::Release("a".into())),
            queue.ask(Toy::Acquire("a".into())),
        ];
        let first = take(&queue, 9).pop().unwrap();
        queue.again(first, Duration::from_secs(5));
        let Next::Wait(Some(due)) = queue.next(Instant::now(), |_| true) else {
            panic!("it is sent too early");
        };
        let Next::Send(next) = queue.next(due, |_| true) else {
            panic!("it is not sent");
        };
        assert_eq!((next.len(), next[0].looks), (1, 1));
        assert_eq!(next[0].step, Toy::Release("a".into()));
    }

    #[test]
    fn step_that_is_put_back_goes_first_and_at_once() {
        let queue = queue();
        let _asked = ask(&queue, &["a", "b", "a"]);
        let first = take(&queue, 9);
        for job in first.into_iter().rev() {
            queue.put_back(job);
        }
        let next = take(&queue, 9);
        assert_eq!((keys(&next), next[0].looks), (vec!["a", "b"], 0));
    }

    #[test]
    fn acquire_without_a_caller_is_not_sent_and_a_release_is() {
        let queue = queue();
        drop(queue.ask(Toy::Acquire("a".into())));
        drop(queue.ask(Toy::Release("b".into())));
        assert_eq!(keys(&take(&queue, 9)), ["b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn step_that_was_never_sent_is_certainly_not_done() {
        let queue = queue();
        let (never, sent) = (
            queue.ask(Toy::Release("a".into())),
            queue.ask(Toy::Release("b".into())),
        );
        let only_b = |job: &Job<Toy>| keys(std::slice::from_ref(job)) == ["b"];
        let Next::Send(jobs) = queue.next(Instant::now(), only_b) else {
            panic!("it is not sent");
        };
        assert_eq!(never.await.unwrap_err().outcome, crate::store::Outcome::NotDone);
        assert_eq!(sent.await.unwrap_err().outcome, crate::store::Outcome::Unknown);
        assert_eq!(keys(&jobs), ["b"]);
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::Wait(None)));
    }

    #[test]
    fn closed_queue_ends_when_everything_is_sent() {
        let queue = queue();
        let _asked = ask(&queue, &["a", "a"]);
        queue.close();
        let first = take(&queue, 9);
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::Wait(None)));
        queue.done(&first[0].step);
        take(&queue, 9);
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::End));
    }
}
