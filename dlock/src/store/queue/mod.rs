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
mod waiting;

use std::future::{Future, ready};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

pub use self::clock::ServerClock;
pub use self::gather::{Carrier, Gather, Unanswered};
pub use self::job::{Job, Step};
pub use self::link::{Connect, Link};
#[doc(hidden)]
pub use self::moment::Moment;
#[doc(hidden)]
pub use self::options::{check_connections, check_interval, check_timeout};
pub use self::send_state::SendState;
use self::waiting::{Taken, Waiting};
use super::{DoubtSender, Doubts, GrantId, Lane, Reason, StoreError, StoreFuture, timeout_anywhere};
use crate::base::chance::HashMap;
use crate::base::waking::waking;

const ENDED: &str = "the runtime that served the connections has ended";
const PANICKED: &str = "the task that served the connections has panicked";

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
///     queue.answer(job, Ok(true));
/// }
/// assert!(first.await?);
/// # drop(second); Ok(()) }
/// ```
#[derive(Debug)]
pub struct StepQueue<S: Step> {
    address: String,
    timeout: Duration,
    shared: Arc<Shared<S>>,
    doubts: DoubtSender,
    /// Why there is no connection, for messages.
    trouble: Mutex<Option<String>>,
}

/// What a queue shares with its steps in flight.
#[derive(Debug)]
struct Shared<S: Step> {
    state: Mutex<State<S>>,
    /// There may be something to send, or the queue has ended: for connections.
    wake: Notify,
    /// The same for the tasks without a connection, where no connection is idle.
    wake_spare: Notify,
}

impl<S: Step> Shared<S> {
    /// Wakes an idle connection; without any, also a task that connects.
    fn wake(&self, state: MutexGuard<'_, State<S>>) {
        let is_idle = state.idle > 0;
        drop(state);
        self.wake.notify_one();
        if !is_idle {
            self.wake_spare.notify_one();
        }
    }
}

#[derive(Debug)]
struct State<S: Step> {
    waiting: Waiting<S>,
    /// Acquires without a reply, with the server's time after which they can no longer take effect.
    unknown: HashMap<GrantId, i64>,
    /// The tasks that serve the queue; `None` before the first one.
    links: Option<usize>,
    /// Whether the last one of them that ended has panicked.
    panicked: bool,
    /// Connections that serve the queue.
    connected: usize,
    /// Those of them that wait for something to do.
    idle: usize,
    closed: bool,
}

impl<S: Step> State<S> {
    /// Whether nothing serves the queue any more.
    fn is_over(&self) -> bool {
        self.links == Some(0)
    }

    /// The error of a step that nothing has sent and nothing will send.
    fn over(&self) -> StoreError {
        match self.panicked {
            true => StoreError::not_done(Reason::Unreachable, PANICKED),
            false => StoreError::not_done(Reason::Closed, ENDED),
        }
    }
}

/// A step in flight. Its keys are free again when this is dropped: then its task has ended without a report.
#[derive(Debug)]
struct InFlight<S: Step> {
    /// `None` if the step waits again.
    of: Option<Arc<Shared<S>>>,
    number: i64,
    keys: Vec<Arc<str>>,
}

impl<S: Step> Drop for InFlight<S> {
    fn drop(&mut self) {
        if let Some(shared) = self.of.take() {
            let mut state = shared.state.lock();
            if state.waiting.ended(self.number, &self.keys) && !state.waiting.is_empty() {
                shared.wake(state);
            }
        }
    }
}

/// A task that serves a queue, from its creation on: a runtime that has ended does not even begin it.
#[derive(Debug)]
struct Serving<S: Step>(Arc<StepQueue<S>>);

impl<S: Step> Serving<S> {
    fn queue(&self) -> &Arc<StepQueue<S>> {
        &self.0
    }
}

impl<S: Step> Drop for Serving<S> {
    /// The last one fails what waits, as nothing will send it.
    fn drop(&mut self) {
        let shared = &self.0.shared;
        let mut state = shared.state.lock();
        state.links = state.links.map(|links| links - 1);
        state.panicked = std::thread::panicking();
        let left = match state.is_over() {
            true => state.waiting.take_all(),
            false => Vec::new(),
        };
        // It may have been woken for a step that another one can send.
        shared.wake(state);
        drop_each(left);
    }
}

/// A connection of a queue.
struct Connected<S: Step>(Arc<StepQueue<S>>);

impl<S: Step> Drop for Connected<S> {
    fn drop(&mut self) {
        let shared = &self.0.shared;
        let mut state = shared.state.lock();
        state.connected -= 1;
        shared.wake(state);
    }
}

/// A connection that waits for something to do.
struct Idle<'a, S: Step>(&'a Shared<S>);

impl<S: Step> Idle<'_, S> {
    fn new(shared: &Shared<S>) -> Idle<'_, S> {
        shared.state.lock().idle += 1;
        Idle(shared)
    }
}

impl<S: Step> Drop for Idle<'_, S> {
    fn drop(&mut self) {
        self.0.state.lock().idle -= 1;
    }
}

/// Drops jobs without a reply, which wakes their callers.
fn drop_each<S: Step>(jobs: Vec<Job<S>>) {
    for job in jobs {
        waking(|| drop(job));
    }
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
    /// Send these together; report each of them with [`answer`](StepQueue::answer), [`retry`](StepQueue::retry) or
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
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    waiting: Waiting::new(),
                    unknown: HashMap::default(),
                    links: None,
                    panicked: false,
                    connected: 0,
                    idle: 0,
                    closed: false,
                }),
                wake: Notify::new(),
                wake_spare: Notify::new(),
            }),
            doubts: DoubtSender::new(),
            trouble: Mutex::default(),
        }
    }

    /// Queues a step at once, from any thread. The future only returns the reply: within the queue's `timeout`, and
    /// [`NotDone`](super::Outcome::NotDone) if the step was not sent by then, and never will be. Once the runtime of all
    /// connections has ended, it fails at once with [`Reason::Closed`].
    pub fn ask(self: &Arc<Self>, step: S) -> StoreFuture<S::Answer> {
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + self.timeout;
        let send_state = Arc::new(SendState::default());
        let is_queued = self.push(Job {
            step,
            deadline,
            looks: 0,
            alone: false,
            not_before: None,
            send_state: send_state.clone(),
            number: 0,
            in_flight: None,
            reply,
        });
        if !is_queued {
            return Box::pin(ready(Err(self.shared.state.lock().over())));
        }
        let queue = self.clone();
        Box::pin(async move {
            let why = match timeout_anywhere(deadline, answer).await {
                Some(Ok(answer)) => return answer,
                // No task works on it any more, although its time is not over.
                Some(Err(_)) if Instant::now() < deadline => {
                    let state = queue.shared.state.lock();
                    return Err(match send_state.give_up() {
                        true => state.over(),
                        // One that panics has dropped its steps before it has ended.
                        false if state.is_over() && !state.panicked => StoreError::unknown(ENDED),
                        false => StoreError::unknown(PANICKED),
                    });
                }
                _ => queue.silence(),
            };
            match send_state.give_up() {
                true => Err(StoreError::not_done(Reason::Unreachable, why)),
                false => Err(StoreError::unknown(why)),
            }
        })
    }

    /// Queues a step; returns whether anything may send it.
    fn push(&self, job: Job<S>) -> bool {
        let mut state = self.shared.state.lock();
        if state.is_over() {
            return false;
        }
        state.waiting.push(job);
        self.shared.wake(state);
        true
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
        let mut state = self.shared.state.lock();
        state.closed = true;
        // Those without a connection end as well.
        self.shared.wake_spare.notify_one();
        self.shared.wake(state);
    }

    /// Returns when there may be something to do. A connection that waits here is idle: as long as there is one, no further
    /// task connects.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn woken(&self) {
        let _idle = Idle::new(&self.shared);
        self.shared.wake.notified().await;
    }

    /// Returns when there is something that a further connection could do, and no other is idle; or the queue is closed.
    async fn wanted(&self) {
        while !self.is_wanted() {
            self.shared.wake_spare.notified().await;
        }
    }

    fn is_wanted(&self) -> bool {
        let state = self.shared.state.lock();
        if state.closed {
            // The next one ends as well.
            self.shared.wake_spare.notify_one();
        }
        !state.waiting.is_empty() && state.idle == 0 || state.closed
    }

    /// Takes the steps to send now, in the order in which they were queued: one per key at a time. `has_room` is called
    /// for each candidate, and counts it if it returns true.
    ///
    /// Where it has no room for many steps in a row, the other steps of that sort are not looked at, and stay: those that
    /// are the same variant of the enum [`S`](Step), and [acquire](Step::acquires) as they do or not. So do not refuse a
    /// step for anything but the room that it takes.
    pub fn next(&self, now: Instant, has_room: impl FnMut(&Job<S>) -> bool) -> Next<S> {
        let mut state = self.shared.state.lock();
        let Taken { mut jobs, late, due } = state.waiting.take(now, has_room);
        let (is_empty, closed) = (state.waiting.is_empty(), state.closed);
        let has_ended = closed && is_empty;
        // The other connections send the rest, or end as well.
        match has_ended || !is_empty && !jobs.is_empty() {
            true => self.shared.wake(state),
            false => drop(state),
        }
        drop_each(late);
        for job in &mut jobs {
            job.in_flight = Some(InFlight {
                of: Some(self.shared.clone()),
                number: job.number,
                keys: job.step.keys().cloned().collect(),
            });
        }
        match jobs.is_empty() {
            true if has_ended => Next::End,
            true => Next::Wait(due),
            false => Next::Send(jobs),
        }
    }

    /// Replies to the caller of a step, if it is still there. The next step of its keys may be sent.
    pub fn answer(&self, job: Job<S>, answer: Result<S::Answer, StoreError>) {
        self.done(&job.step);
        job.answer(answer);
    }

    /// Lets the next step of these keys be sent.
    fn done(&self, step: &S) {
        let mut state = self.shared.state.lock();
        state.waiting.done(step);
        if !state.waiting.is_empty() {
            self.shared.wake(state);
        }
    }

    /// Reports that a step was not carried out and is to be sent again after a while, before all others of its keys. It fails
    /// with this reason if its deadline is earlier.
    pub fn retry(&self, mut job: Job<S>, after: Duration, why: &str) {
        let at = Instant::now() + after;
        if at >= job.deadline {
            return self.answer(job, Err(StoreError::not_done(Reason::Unreachable, why)));
        }
        job.not_before = Some(at);
        job.looks += 1;
        self.put_back(job);
    }

    /// Reports that a step was not sent after all: it stays before all others of its keys.
    pub fn put_back(&self, mut job: Job<S>) {
        job.send_state.take_back();
        if let Some(in_flight) = &mut job.in_flight {
            // Its keys are not free: the steps behind it stay there.
            in_flight.of = None;
        }
        job.in_flight = None;
        let mut state = self.shared.state.lock();
        state.waiting.put_back(job);
        self.shared.wake(state);
    }

    /// Reports that an acquire has no reply: it may take effect until the server's clock shows this.
    pub fn is_unknown(&self, grant: GrantId, until: i64) {
        self.shared.state.lock().unknown.insert(grant, until);
    }

    /// Returns until when an acquire of this id may still take effect, by the server's clock; `None` if it cannot.
    #[must_use]
    pub fn unknown_until(&self, grant: GrantId) -> Option<i64> {
        self.shared.state.lock().unknown.get(&grant).copied()
    }

    /// Reports that the acquire of this id was undone.
    pub fn is_known(&self, grant: GrantId, server_now: i64) {
        /// Ids that are never released are forgotten, long after they could take effect.
        const KEPT: usize = 1024;
        const LONG_AGO: i64 = 60_000_000;
        let mut state = self.shared.state.lock();
        state.unknown.remove(&grant);
        if state.unknown.len() > KEPT {
            state.unknown.retain(|_, until| *until > server_now - LONG_AGO);
        }
    }

    /// Records why a task has no connection, unless others have: then that is no reason for a step without a reply.
    fn has_trouble(&self, trouble: &str) {
        // A connection that is made meanwhile ends the trouble afterwards.
        let state = self.shared.state.lock();
        if state.connected == 0 {
            *self.trouble.lock() = Some(trouble.to_owned());
        }
    }

    fn serving(self: &Arc<Self>) -> Serving<S> {
        let mut state = self.shared.state.lock();
        state.links = Some(state.links.unwrap_or(0) + 1);
        Serving(self.clone())
    }

    fn connected(self: &Arc<Self>) -> Connected<S> {
        self.shared.state.lock().connected += 1;
        Connected(self.clone())
    }

    /// Fails all waiting steps, unless another connection serves the queue: the server refuses connections.
    fn refused(&self, error: &StoreError) {
        if self.shared.state.lock().connected == 0 {
            self.fail_all(error);
        }
    }

    /// Fails all waiting steps: the server does not serve this store.
    pub fn fail_all(&self, error: &StoreError) {
        let failed = self.shared.state.lock().waiting.take_all();
        for job in failed {
            job.answer(Err(error.clone()));
        }
    }

    /// Drops steps without a waiting caller; returns whether the store is gone and nothing is left to send.
    fn is_ended(&self) -> bool {
        let mut state = self.shared.state.lock();
        let late = state.waiting.take_late(Instant::now());
        let ended = state.closed && state.waiting.is_empty();
        match ended {
            true => self.shared.wake(state),
            false => drop(state),
        }
        drop_each(late);
        ended
    }

    /// Serves the queue by a connection until the store is gone; see [`Link`].
    pub fn serve<C: Connect<S>>(
        self: &Arc<Self>,
        connect: Arc<C>,
        first: Option<C::Session>,
    ) -> impl Future<Output = ()> + Send + use<S, C> {
        Link::new(self).run(connect, first)
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Wake};

    use futures_util::FutureExt;
    use tokio::runtime;

    use super::super::Outcome;
    use super::*;

    #[derive(Debug, PartialEq)]
    enum Toy {
        Acquire(Arc<str>),
        Release(Arc<str>),
        Both(Arc<str>, Arc<str>),
    }

    impl Step for Toy {
        type Answer = u32;

        fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
            let (first, second) = match self {
                Toy::Acquire(key) | Toy::Release(key) => (key, None),
                Toy::Both(first, second) => (first, Some(second)),
            };
            std::iter::once(first).chain(second)
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
        queue.retry(first, Duration::from_secs(5), "not yet");
        let Next::Wait(Some(due)) = queue.next(Instant::now(), |_| true) else {
            panic!("it is sent too early");
        };
        let Next::Send(next) = queue.next(due, |_| true) else {
            panic!("it is not sent");
        };
        assert_eq!((next.len(), next[0].looks), (1, 1));
        assert_eq!(next[0].step, Toy::Release("a".into()));
    }

    #[tokio::test]
    async fn step_that_would_be_sent_again_after_its_deadline_fails_with_the_reason() {
        let queue = queue();
        let asked = ask(&queue, &["a", "a"]);
        let first = take(&queue, 9).pop().unwrap();
        let deadline = first.deadline;
        queue.retry(
            first,
            deadline - Instant::now() + Duration::from_secs(1),
            "it is locked",
        );
        let error = asked.into_iter().next().unwrap().await.unwrap_err();
        assert_eq!(
            (error.outcome, &*error.message),
            (Outcome::NotDone, "it is locked")
        );
        assert_eq!(keys(&take(&queue, 9)), ["a"]);
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

    /// What wakes a caller.
    struct Wakes<F>(F);

    impl<F: Fn() + Send + Sync + 'static> Wake for Wakes<F> {
        fn wake(self: Arc<Self>) {
            (self.0)();
        }
    }

    /// Polls a reply that is not there yet, for a caller that is woken like this.
    fn waits(reply: &mut StoreFuture<u32>, wake: impl Fn() + Send + Sync + 'static) {
        let waker = Arc::new(Wakes(wake)).into();
        assert!(reply.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }

    #[tokio::test]
    async fn panic_of_a_waker_is_not_that_of_the_connection() {
        let queue = queue();
        let mut asked = ask(&queue, &["a", "b", "c"]);
        waits(&mut asked[0], || panic!("a waker panics"));
        waits(&mut asked[1], || panic!("a waker panics"));
        for job in take(&queue, 2) {
            queue.answer(job, Ok(7));
        }
        waits(&mut asked[2], || panic!("a waker panics"));
        queue.fail_all(&StoreError::unknown("it is down"));
        let answers = futures_util::future::join_all(asked).await;
        assert!(matches!(answers[..], [Ok(7), Ok(7), Err(_)]), "{answers:?}");
    }

    #[tokio::test]
    async fn late_step_is_dropped_where_its_caller_may_queue_another() {
        let queue = queue();
        let mut late = queue.ask(Toy::Release("a".into()));
        let of_waker = queue.clone();
        waits(&mut late, move || drop(of_waker.ask(Toy::Release("b".into()))));
        let over = Instant::now() + Duration::from_secs(61);
        assert!(matches!(queue.next(over, |_| true), Next::Wait(None)));
        assert_eq!(keys(&take(&queue, 9)), ["b"]);
    }

    #[test]
    fn step_that_is_dropped_in_flight_frees_its_key() {
        let queue = queue();
        let _asked = ask(&queue, &["a", "a", "a"]);
        drop(take(&queue, 9));
        let second = take(&queue, 9).pop().unwrap();
        queue.done(&second.step);
        let third = take(&queue, 9);
        // It was reported before: the key is that of the third one.
        drop(second);
        let _fourth = ask(&queue, &["a"]);
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::Wait(None)));
        drop(third);
        assert_eq!(keys(&take(&queue, 9)), ["a"]);
        assert!(queue.shared.state.lock().waiting.is_empty());
    }

    /// Takes a step, and then hangs or panics.
    struct Stuck {
        panics: bool,
    }

    impl Connect<Toy> for Stuck {
        type Session = ();

        async fn connect(&self) -> Result<(), StoreError> {
            Ok(())
        }

        async fn serve(&self, _session: (), link: &mut Link<Toy>) -> Option<String> {
            loop {
                let next = link.queue().next(Instant::now(), |_| true);
                if let Next::Send(_jobs) = next {
                    assert!(!self.panics, "the connection panics");
                    std::future::pending::<()>().await;
                }
                link.queue().woken().await;
            }
        }
    }

    #[test]
    fn queue_whose_runtime_has_ended_takes_no_steps() {
        let of_store = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let queue = queue();
        of_store.spawn(queue.serve(Arc::new(Stuck { panics: false }), Some(())));
        of_store.spawn(queue.serve(Arc::new(Stuck { panics: false }), None));
        let mut asked = ask(&queue, &["a", "a"]);
        of_store.block_on(async { tokio::time::sleep(Duration::from_millis(20)).await });
        drop(of_store);
        asked.extend(ask(&queue, &["a", "b"]));
        let caller = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let errors: Vec<_> = asked
            .into_iter()
            .map(|reply| caller.block_on(reply).unwrap_err())
            .collect();
        assert!(errors.iter().all(|error| error.message == ENDED), "{errors:?}");
        let outcomes: Vec<_> = errors.iter().map(|error| error.outcome).collect();
        let never = Outcome::NotDone;
        assert_eq!(outcomes, [Outcome::Unknown, never, never, never]);
        assert!(errors[1..].iter().all(|error| error.reason == Reason::Closed));
        assert!(queue.shared.state.lock().waiting.is_empty());
        // Another runtime may serve it.
        let again = caller.spawn(queue.serve(Arc::new(Stuck { panics: false }), None));
        let mut reply = queue.ask(Toy::Release("a".into()));
        caller.block_on(async { waits(&mut reply, || ()) });
        drop(again);
    }

    #[test]
    fn task_that_was_never_polled_has_ended_with_its_runtime() {
        let queue = queue();
        drop(queue.serve(Arc::new(Stuck { panics: false }), None));
        let refused = queue.ask(Toy::Release("a".into())).now_or_never();
        assert!(
            refused
                .unwrap()
                .is_err_and(|error| error.reason == Reason::Closed)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_panics_leaves_its_steps_to_the_others() {
        let queue = queue();
        let other = queue.serving();
        let asked = ask(&queue, &["a", "a"]);
        let panics = tokio::spawn(queue.serve(Arc::new(Stuck { panics: true }), None));
        assert!(panics.await.unwrap_err().is_panic());
        assert_eq!(queue.shared.state.lock().connected, 0);
        let second = take(&queue, 9).pop().unwrap();
        queue.answer(second, Ok(2));
        let [first, second] = futures_util::future::join_all(asked).await.try_into().unwrap();
        let error = first.unwrap_err();
        assert_eq!((error.outcome, second.unwrap()), (Outcome::Unknown, 2));
        assert!(error.message.contains("panicked"), "{error}");
        drop(other);
    }

    /// Queues so many steps, each of a key of its own.
    fn crowd(queue: &Queue, count: usize, step: impl Fn(Arc<str>) -> Toy) -> Vec<StoreFuture<u32>> {
        let keys = (0..count).map(|at| Arc::from(at.to_string()));
        keys.map(|key| queue.ask(step(key))).collect()
    }

    #[test]
    fn crowd_without_room_is_not_looked_at_and_keeps_its_order() {
        let queue = queue();
        let _crowd = crowd(&queue, 10_000, Toy::Acquire);
        let _asked = ask(&queue, &["x", "9000", "x"]);
        let mut looked_at = 0;
        let (mut acquires, mut has_room) = (0, |job: &Job<Toy>| {
            looked_at += 1;
            !job.step.acquires()
        });
        let Next::Send(first) = queue.next(Instant::now(), &mut has_room) else {
            panic!("nothing is sent");
        };
        // Found behind the crowd, and none before an acquire of its key.
        assert_eq!(keys(&first), ["x"]);
        assert!(looked_at < 100, "{looked_at}");
        let mut seen = Vec::new();
        while let Next::Send(jobs) = queue.next(Instant::now(), |_| true) {
            acquires += jobs.iter().filter(|job| job.step.acquires()).count();
            seen.extend(keys(&jobs).into_iter().map(str::to_owned));
            jobs.iter().for_each(|job| queue.done(&job.step));
            if acquires == 10_000 {
                queue.done(&first[0].step);
            }
        }
        let crowd: Vec<_> = (0..10_000).map(|at| at.to_string()).collect();
        assert_eq!(seen[..10_000], crowd);
        assert_eq!(seen[10_000..], ["9000", "x"]);
    }

    #[test]
    fn step_of_several_keys_waits_for_all_of_them() {
        let queue = queue();
        let _asked = [
            queue.ask(Toy::Release("a".into())),
            queue.ask(Toy::Both("a".into(), "b".into())),
            queue.ask(Toy::Both("b".into(), "b".into())),
            queue.ask(Toy::Release("a".into())),
        ];
        for expected in [&["a"][..], &["a", "b"], &["b", "b", "a"]] {
            let jobs = take(&queue, 9);
            assert_eq!(keys(&jobs), expected);
            jobs.iter().for_each(|job| queue.done(&job.step));
        }
        assert!(matches!(queue.next(Instant::now(), |_| true), Next::Wait(None)));
    }

    #[test]
    fn step_that_nobody_waits_for_keeps_no_step_behind_a_crowd() {
        let queue = queue();
        let _crowd = crowd(&queue, 1000, Toy::Acquire);
        drop(queue.ask(Toy::Acquire("x".into())));
        let _release = queue.ask(Toy::Release("x".into()));
        let Next::Send(jobs) = queue.next(Instant::now(), |job| !job.step.acquires()) else {
            panic!("nothing is sent");
        };
        assert_eq!(keys(&jobs), ["x"]);
        // Nor does it go itself.
        let later = take(&queue, 2000);
        assert_eq!(later.len(), 1000);
    }

    #[tokio::test]
    async fn last_connection_that_panics_is_not_an_end_of_the_client() {
        let queue = queue();
        let asked = queue.ask(Toy::Release("a".into()));
        let panics = tokio::spawn(queue.serve(Arc::new(Stuck { panics: true }), None));
        assert!(panics.await.unwrap_err().is_panic());
        assert_eq!(asked.await.unwrap_err().message, PANICKED);
        let error = queue.ask(Toy::Release("b".into())).await.unwrap_err();
        assert_eq!((error.reason, &*error.message), (Reason::Unreachable, PANICKED));
    }
}
