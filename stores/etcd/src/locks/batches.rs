//! Transactions of different locks that travel as one.
//!
//! A transaction goes by itself while none is under way. Those that come meanwhile share the next request, which is sent when
//! the one before is answered, or after two milliseconds: to the server, a request is more work than what a lock does in it.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{Reason, StoreError};
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use super::names::Name;
use crate::client::proto::{RequestOp, TxnRequest, TxnResponse};
use crate::client::{Failure, Links, Refusal};

/// How long a transaction waits at most for a request that is under way.
const GATHER: Duration = Duration::from_millis(2);
/// The most transactions in one request. A server takes 128 operations by default, those of an inner transaction included.
const MOST: usize = 64;

/// Gathers transactions.
#[derive(Debug, Clone)]
pub(crate) struct Batches(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    links: Arc<Links>,
    runtime: runtime::Handle,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<Waiting>,
    under_way: usize,
    /// The most transactions in one request of this server.
    most: usize,
    count: u64,
}

/// A transaction that waits to be sent.
#[derive(Debug)]
struct Waiting {
    number: u64,
    lock: Name,
    txn: TxnRequest,
    deadline: Instant,
    reply: oneshot::Sender<Result<TxnResponse, Failure>>,
}

/// A request that is under way. What waits is sent when it is dropped.
struct UnderWay(Arc<Shared>);

enum Entered {
    Goes(TxnRequest, UnderWay),
    Waits(u64, oneshot::Receiver<Result<TxnResponse, Failure>>),
}

impl Batches {
    pub(crate) fn new(links: Arc<Links>, runtime: runtime::Handle) -> Batches {
        Batches(Arc::new(Shared {
            links,
            runtime,
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                under_way: 0,
                most: MOST,
                count: 0,
            }),
        }))
    }

    /// Carries out a transaction of one lock. The previous one of this lock has to be over.
    pub(crate) async fn call(
        &self,
        lock: &Name,
        txn: TxnRequest,
        deadline: Instant,
    ) -> Result<TxnResponse, Failure> {
        let links = &self.0.links;
        let (number, reply) = match self.0.enter(lock, txn, deadline) {
            Entered::Goes(txn, _under_way) => return links.call(txn, deadline).await,
            Entered::Waits(number, reply) => (number, reply),
        };
        match timeout_at(deadline, reply).await {
            Ok(Ok(reply)) => reply,
            Ok(Err(_)) => Err(Failure::Broken(StoreError::unknown(
                "the runtime that served the store has ended",
            ))),
            Err(_) if self.0.withdraw(number) => {
                let error = StoreError::not_done(Reason::Unreachable, links.silence());
                Err(Failure::Elsewhere(error))
            }
            Err(_) => Err(Failure::Broken(StoreError::unknown(links.silence()))),
        }
    }
}

impl Shared {
    fn enter(self: &Arc<Self>, lock: &Name, txn: TxnRequest, deadline: Instant) -> Entered {
        let mut state = self.state.lock();
        if state.under_way == 0 {
            state.under_way = 1;
            return Entered::Goes(txn, UnderWay(self.clone()));
        }
        let (reply, answer) = oneshot::channel();
        state.count += 1;
        let number = state.count;
        if state.waiting.is_empty() {
            let shared = self.clone();
            self.runtime.spawn(async move {
                sleep(GATHER).await;
                shared.send_if_waits(number);
            });
        }
        state.waiting.push_back(Waiting {
            number,
            lock: lock.clone(),
            txn,
            deadline,
            reply,
        });
        Entered::Waits(number, answer)
    }

    /// Takes a transaction back. Returns whether it was not sent.
    fn withdraw(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let before = state.waiting.len();
        state.waiting.retain(|waiting| waiting.number != number);
        state.waiting.len() < before
    }

    /// Sends what waits, if this transaction does yet.
    fn send_if_waits(self: &Arc<Self>, number: u64) {
        let mut state = self.state.lock();
        if state.waiting.front().is_some_and(|first| first.number == number) {
            state.under_way += 1;
            drop(state);
            // Sent by its end.
            drop(UnderWay(self.clone()));
        }
    }

    async fn send(&self, batch: Vec<Waiting>) {
        let inner = batch.iter().map(|waiting| waiting.txn.clone().into());
        let txn = TxnRequest {
            success: inner.collect::<Vec<RequestOp>>(),
            ..TxnRequest::default()
        };
        let Some(deadline) = batch.iter().map(|waiting| waiting.deadline).max() else {
            return;
        };
        match self.links.call(txn, deadline).await {
            Ok(mut reply) => {
                for (at, waiting) in batch.into_iter().enumerate() {
                    let inner = reply.take_inner(at).ok_or_else(|| {
                        let error =
                            StoreError::unknown("etcd did not reply to a transaction in a transaction");
                        Failure::Answered(Refusal::Other, error)
                    });
                    let _ = waiting.reply.send(inner);
                }
            }
            // None was carried out, and it may be for one of them alone.
            Err(Failure::Answered(refusal, _)) if refusal != Refusal::Full => {
                if refusal == Refusal::TooLarge {
                    let mut state = self.state.lock();
                    state.most = state.most.min((batch.len() / 2).max(1));
                }
                let alone = batch.into_iter().map(|waiting| async move {
                    let reply = self.links.call(waiting.txn, waiting.deadline).await;
                    let _ = waiting.reply.send(reply);
                });
                join_all(alone).await;
            }
            Err(failure) => {
                for waiting in batch {
                    let _ = waiting.reply.send(Err(failure.clone()));
                }
            }
        }
    }
}

impl State {
    /// Of each lock one: conditions are judged before the first operation of the whole request.
    fn take(&mut self) -> Vec<Waiting> {
        let mut locks = HashSet::new();
        let (mut batch, mut left) = (Vec::new(), VecDeque::new());
        for waiting in self.waiting.drain(..) {
            if batch.len() < self.most && locks.insert(waiting.lock.clone()) {
                batch.push(waiting);
            } else {
                left.push_back(waiting);
            }
        }
        self.waiting = left;
        batch
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let batch = state.take();
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

    fn state(locks: &[&str], most: usize) -> State {
        let waiting = locks.iter().zip(1..).map(|(lock, number)| Waiting {
            number,
            lock: Name::from(*lock),
            txn: TxnRequest::default(),
            deadline: Instant::now(),
            reply: oneshot::channel().0,
        });
        State {
            waiting: waiting.collect(),
            under_way: 1,
            most,
            count: 0,
        }
    }

    fn take(state: &mut State) -> Vec<u64> {
        state.take().iter().map(|waiting| waiting.number).collect()
    }

    #[test]
    fn request_has_one_transaction_of_a_lock() {
        let mut state = state(&["a", "b", "a", "c", "a"], 9);
        assert_eq!(take(&mut state), [1, 2, 4]);
        assert_eq!(take(&mut state), [3]);
        assert_eq!(take(&mut state), [5]);
    }

    #[test]
    fn request_has_no_more_transactions_than_the_server_takes() {
        let mut state = state(&["a", "b", "c"], 2);
        assert_eq!(take(&mut state), [1, 2]);
        assert_eq!(take(&mut state), [3]);
    }
}
