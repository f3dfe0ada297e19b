//! Requests that share a round trip, for stores on connections that carry several at once.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::base::chance::HashSet;
use crate::base::waking::reply_to;
use crate::store::timeout_anywhere;

/// The longest time that a request waits for another one in flight.
const WAIT: Duration = Duration::from_millis(2);

/// Sends requests, one alone or several in one.
///
/// ```
/// use std::sync::Arc;
/// use dlock::store::queue::Carrier;
///
/// /// Deletes keys, and says how many were deleted by the same request.
/// struct Deletions;
///
/// impl Carrier for Deletions {
///     type Request = Arc<str>;
///     type Answer = usize;
///
///     fn key(request: &Arc<str>) -> &Arc<str> {
///         request
///     }
///
///     fn most(&self) -> usize {
///         64
///     }
///
///     async fn one(&self, request: Arc<str>) -> usize {
///         self.several(vec![request]).await[0]
///     }
///
///     async fn several(&self, requests: Vec<Arc<str>>) -> Vec<usize> {
///         tokio::task::yield_now().await; // to the server and back
///         vec![requests.len(); requests.len()]
///     }
/// }
/// ```
pub trait Carrier: Send + Sync + 'static {
    /// The request.
    type Request: Send + 'static;
    /// Its reply.
    type Answer: Send + 'static;

    /// Requests with the same key are never sent in one.
    fn key(request: &Self::Request) -> &Arc<str>;

    /// The maximum number of requests that can be sent in one.
    fn most(&self) -> usize;

    /// Sends one request.
    fn one(&self, request: Self::Request) -> impl Future<Output = Self::Answer> + Send;

    /// Sends several requests in one; the replies are in their order.
    fn several(&self, requests: Vec<Self::Request>) -> impl Future<Output = Vec<Self::Answer>> + Send;
}

/// Why a request has no reply.
///
/// ```
/// use dlock::store::queue::Unanswered;
/// use dlock::store::{Reason, StoreError};
///
/// fn error(unanswered: Unanswered) -> StoreError {
///     match unanswered {
///         Unanswered::NotSent => StoreError::not_done(Reason::Unreachable, "db:5432 did not answer"),
///         Unanswered::Unknown => StoreError::unknown("db:5432 did not answer"),
///     }
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// It was not sent, and never will be.
    NotSent,
    /// It may have been carried out, or may still be.
    Unknown,
}

/// Lets requests share round trips: a request is sent alone while none is in flight. Those that arrive in the meantime
/// are sent together when that one is answered, or 2 ms after the first of them; those that do not fit are sent when the next
/// one is answered.
///
/// ```
/// # use {dlock::store::queue::Carrier, std::sync::Arc};
/// # struct Deletions;
/// # impl Carrier for Deletions {
/// #     type Request = Arc<str>;
/// #     type Answer = usize;
/// #     fn key(request: &Arc<str>) -> &Arc<str> { request }
/// #     fn most(&self) -> usize { 64 }
/// #     async fn one(&self, request: Arc<str>) -> usize { self.several(vec![request]).await[0] }
/// #     async fn several(&self, requests: Vec<Arc<str>>) -> Vec<usize> {
/// #         tokio::task::yield_now().await;
/// #         vec![requests.len(); requests.len()]
/// #     }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use std::time::Duration;
/// use dlock::store::queue::Gather;
/// use tokio::time::Instant;
///
/// // `Deletions` is the example of `Carrier`.
/// let gather = Gather::new(Deletions, tokio::runtime::Handle::current());
/// let deadline = Instant::now() + Duration::from_secs(1);
/// let [a, b, c] = ["a", "b", "c"].map(|key| gather.ask(key.into(), deadline));
/// assert_eq!(tokio::join!(a, b, c), (Ok(1), Ok(2), Ok(2)));
/// # }
/// ```
pub struct Gather<C: Carrier>(Arc<Shared<C>>);

struct Shared<C: Carrier> {
    carrier: C,
    runtime: runtime::Handle,
    state: Mutex<State<C>>,
}

struct State<C: Carrier> {
    /// In the order of their numbers.
    waiting: VecDeque<Waiting<C>>,
    under_way: usize,
    count: u64,
}

struct Waiting<C: Carrier> {
    number: u64,
    request: C::Request,
    reply: oneshot::Sender<C::Answer>,
}

/// A round trip in flight. Dropping it sends the waiting requests.
struct UnderWay<C: Carrier>(Arc<Shared<C>>);

enum Entered<C: Carrier> {
    Goes(C::Request, UnderWay<C>),
    Waits(u64, oneshot::Receiver<C::Answer>),
}

impl<C: Carrier> Gather<C> {
    /// Creates it; requests that share round trips are sent by tasks of this runtime.
    pub fn new(carrier: C, runtime: runtime::Handle) -> Gather<C> {
        let state = State {
            waiting: VecDeque::new(),
            under_way: 0,
            count: 0,
        };
        Gather(Arc::new(Shared {
            carrier,
            runtime,
            state: Mutex::new(state),
        }))
    }

    /// Sends a request, alone or with others, and returns the reply. The previous request of its key must be answered,
    /// or have ended without a reply.
    ///
    /// # Errors
    ///
    /// [`Unanswered`] at the deadline, if the request was not sent alone: then only [`Carrier::one`] limits it.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: when dropped, the request may have been carried out, or may still be.
    pub async fn ask(&self, request: C::Request, deadline: Instant) -> Result<C::Answer, Unanswered> {
        let (number, answer) = match self.0.enter(request) {
            Entered::Goes(request, _under_way) => return Ok(self.0.carrier.one(request).await),
            Entered::Waits(number, answer) => (number, answer),
        };
        match timeout_anywhere(deadline, answer).await {
            Some(Ok(answer)) => Ok(answer),
            None if self.0.withdraw(number) => Err(Unanswered::NotSent),
            // Also if the runtime has ended.
            _ => Err(Unanswered::Unknown),
        }
    }
}

impl<C: Carrier> fmt::Debug for Gather<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("Gather")
            .field("waiting", &state.waiting.len())
            .field("under_way", &state.under_way)
            .finish_non_exhaustive()
    }
}

impl<C: Carrier> Shared<C> {
    fn enter(self: &Arc<Self>, request: C::Request) -> Entered<C> {
        let mut state = self.state.lock();
        if state.under_way == 0 {
            state.under_way = 1;
            return Entered::Goes(request, UnderWay(self.clone()));
        }
        let (reply, answer) = oneshot::channel();
        state.count += 1;
        let number = state.count;
        if state.waiting.is_empty() {
            self.send_soon(number);
        }
        state.waiting.push_back(Waiting {
            number,
            request,
            reply,
        });
        Entered::Waits(number, answer)
    }

    /// Takes a request back. Returns whether it was not sent yet.
    fn withdraw(self: &Arc<Self>, number: u64) -> bool {
        let mut state = self.state.lock();
        let found = state
            .waiting
            .binary_search_by_key(&number, |waiting| waiting.number);
        let withdrawn = found.ok().and_then(|at| state.waiting.remove(at));
        if let (Ok(0), Some(first)) = (found, state.waiting.front()) {
            // The timer was that of the request before.
            self.send_soon(first.number);
        }
        // The request is dropped without the mutex.
        drop(state);
        withdrawn.is_some()
    }

    /// Sends the waiting requests in a moment, if this one is the first of them then.
    fn send_soon(self: &Arc<Self>, number: u64) {
        let shared = self.clone();
        self.runtime.spawn(async move {
            sleep(WAIT).await;
            shared.send_if_waits(number);
        });
    }

    /// Sends the waiting requests, if this request is the first of them.
    fn send_if_waits(self: &Arc<Self>, number: u64) {
        let mut state = self.state.lock();
        if state.waiting.front().is_some_and(|first| first.number == number) {
            state.under_way += 1;
            drop(state);
            drop(UnderWay(self.clone()));
        }
    }

    async fn send(&self, batch: Vec<Waiting<C>>) {
        let (requests, replies): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .map(|waiting| (waiting.request, waiting.reply))
            .unzip();
        let answers = match <[_; 1]>::try_from(requests) {
            Ok([request]) => vec![self.carrier.one(request).await],
            Err(requests) => self.carrier.several(requests).await,
        };
        for (reply, answer) in replies.into_iter().zip(answers) {
            reply_to(reply, answer);
        }
    }
}

impl<C: Carrier> State<C> {
    /// Takes the requests to send in one next.
    fn take(&mut self, most: usize) -> Vec<Waiting<C>> {
        let mut keys: HashSet<Arc<str>> = HashSet::default();
        let (mut batch, mut stay) = (Vec::new(), Vec::new());
        while batch.len() < most
            && let Some(waiting) = self.waiting.pop_front()
        {
            match keys.insert(C::key(&waiting.request).clone()) {
                true => batch.push(waiting),
                false => stay.push(waiting),
            }
        }
        for waiting in stay.into_iter().rev() {
            self.waiting.push_front(waiting);
        }
        batch
    }
}

impl<C: Carrier> Drop for UnderWay<C> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let batch = state.take(self.0.carrier.most());
        if batch.is_empty() {
            state.under_way -= 1;
            return;
        }
        drop(state);
        let next = UnderWay(self.0.clone());
        self.0.runtime.spawn(async move { next.0.send(batch).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replies after 10 ms with the number of requests that were sent in one.
    struct Slow {
        most: usize,
    }

    impl Carrier for Slow {
        type Request = Arc<str>;
        type Answer = usize;

        fn key(request: &Arc<str>) -> &Arc<str> {
            request
        }

        fn most(&self) -> usize {
            self.most
        }

        async fn one(&self, _request: Arc<str>) -> usize {
            sleep(5 * WAIT).await;
            1
        }

        async fn several(&self, requests: Vec<Arc<str>>) -> Vec<usize> {
            sleep(5 * WAIT).await;
            vec![requests.len(); requests.len()]
        }
    }

    fn gather(most: usize) -> Gather<Slow> {
        Gather::new(Slow { most }, runtime::Handle::current())
    }

    async fn ask(gather: &Gather<Slow>, keys: &[&str]) -> Vec<usize> {
        let until = Instant::now() + 100 * WAIT;
        let asked = keys.iter().map(|key| gather.ask((*key).into(), until));
        let answers = futures_util::future::join_all(asked).await;
        answers.into_iter().map(Result::unwrap).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_come_while_one_is_under_way_share_the_next_round_trip() {
        let gather = gather(9);
        assert_eq!(ask(&gather, &["a", "b", "c"]).await, [1, 2, 2]);
        assert_eq!(ask(&gather, &["a"]).await, [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn request_of_a_key_shares_no_round_trip_with_another_one_of_it() {
        assert_eq!(ask(&gather(9), &["a", "b", "c", "b", "b"]).await, [1, 2, 2, 1, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_requests_share_a_round_trip_than_the_carrier_takes() {
        assert_eq!(ask(&gather(2), &["a", "b", "c", "d"]).await, [1, 2, 2, 1]);
    }

    #[tokio::test(start_paused = true)]
    async fn request_waits_no_longer_for_others_than_it_has_to() {
        let gather = gather(9);
        let begun = Instant::now();
        ask(&gather, &["a", "b"]).await;
        // 2 ms for the first, and 10 for its own round trip.
        assert_eq!(begun.elapsed().as_millis(), (6 * WAIT).as_millis());
    }

    #[tokio::test(start_paused = true)]
    async fn request_without_an_answer_was_sent_or_not() {
        let gather = gather(1);
        let begun = Instant::now();
        let asked = ["a", "b", "c"].map(|key| gather.ask(key.into(), begun + 3 * WAIT));
        let [a, b, c] = asked;
        let answers = tokio::join!(a, b, c);
        assert_eq!(
            answers,
            (Ok(1), Err(Unanswered::Unknown), Err(Unanswered::NotSent))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_are_withdrawn_leave_the_others_in_their_order() {
        let gather = gather(3);
        let begun = Instant::now();
        let (soon, late) = (begun + WAIT / 2, begun + 100 * WAIT);
        let keys = ["a", "b", "c", "d", "b", "e", "f"];
        let asked = keys.map(|key| {
            let deadline = if ["c", "e"].contains(&key) { soon } else { late };
            let answer = gather.ask(key.into(), deadline);
            async move { (key, answer.await, begun.elapsed()) }
        });
        let mut answers = futures_util::future::join_all(asked).await;
        let withdrawn: Vec<_> = answers
            .extract_if(.., |(.., answer, _)| *answer == Err(Unanswered::NotSent))
            .map(|(key, ..)| key)
            .collect();
        assert_eq!(withdrawn, ["c", "e"]);
        // The second request of b has not changed places with the one behind it, and shares a round trip with that.
        let shared: Vec<_> = answers
            .iter()
            .map(|(key, answer, _)| (*key, answer.unwrap()))
            .collect();
        assert_eq!(shared, [("a", 1), ("b", 3), ("d", 3), ("b", 1), ("f", 3)]);
    }

    /// The timer was that of the request which is withdrawn.
    #[tokio::test(start_paused = true)]
    async fn request_behind_one_that_is_withdrawn_waits_no_longer_for_others_than_it_has_to() {
        let gather = gather(9);
        let begun = Instant::now();
        let (soon, late) = (begun + WAIT / 2, begun + 100 * WAIT);
        let asked = [("a", late), ("b", soon), ("c", late), ("d", late)].map(|(key, deadline)| {
            let answer = gather.ask(key.into(), deadline);
            async move { (answer.await, begun.elapsed()) }
        });
        let [a, b, c, d] = asked;
        let (a, b, c, d) = tokio::join!(a, b, c, d);
        assert_eq!(
            (a.0, b.0, c.0, d.0),
            (Ok(1), Err(Unanswered::NotSent), Ok(2), Ok(2))
        );
        // Less than the 5 until the first answer, and its own 5.
        assert!(c.1 < 8 * WAIT, "{c:?}");
    }

    #[test]
    fn requests_that_stay_keep_their_order() {
        let mut state: State<Slow> = State {
            waiting: VecDeque::new(),
            under_way: 1,
            count: 0,
        };
        for key in ["a", "a", "b", "a", "c", "b"] {
            state.count += 1;
            state.waiting.push_back(Waiting {
                number: state.count,
                request: key.into(),
                reply: oneshot::channel().0,
            });
        }
        let numbers = |batch: Vec<Waiting<Slow>>| batch.iter().map(|one| one.number).collect::<Vec<_>>();
        assert_eq!(numbers(state.take(2)), [1, 3]);
        assert_eq!(numbers(state.take(9)), [2, 5, 6]);
        assert_eq!(numbers(state.take(9)), [4]);
        assert!(state.take(9).is_empty());
    }
}
