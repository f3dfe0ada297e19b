//! Transactions of different locks, combined into one request: a request costs the server more than the transaction in
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlock::store::queue::{Carrier, Gather, Unanswered};
use dlock::store::{Reason, StoreError};
use futures_util::future::join_all;
use tokio::runtime;
use tokio::time::Instant;

use super::names::Name;
use crate::client::proto::{RequestOp, TxnRequest, TxnResponse};
use crate::client::{Failure, Links, Refusal};

/// The most transactions in one request. By default a server accepts 128 operations, including those of inner
/// transactions.
const MOST: usize = 64;

/// Combines transactions into requests.
#[derive(Debug)]
pub(crate) struct Batches {
    links: Arc<Links>,
    gather: Gather<Nested>,
}

impl Batches {
    pub(crate) fn new(links: Arc<Links>, runtime: runtime::Handle) -> Batches {
        let nested = Nested {
            links: links.clone(),
            most: AtomicUsize::new(MOST),
        };
        let gather = Gather::new(nested, runtime);
        Batches { links, gather }
    }

    /// Executes a transaction of one lock.
    pub(crate) async fn call(
        &self,
        lock: &Name,
        txn: TxnRequest,
        deadline: Instant,
    ) -> Result<TxnResponse, Failure> {
        let one = One {
            lock: lock.clone(),
            txn,
            deadline,
        };
        let why = || self.links.silence();
        self.gather
            .ask(one, deadline)
            .await
            .unwrap_or_else(|unanswered| match unanswered {
                Unanswered::NotSent => Err(Failure::Elsewhere(StoreError::not_done(
                    Reason::Unreachable,
                    why(),
                ))),
                Unanswered::Unknown => Err(Failure::Broken(StoreError::unknown(why()))),
            })
    }
}

/// A transaction of one lock.
struct One {
    lock: Name,
    txn: TxnRequest,
    deadline: Instant,
}

/// Sends transactions inside one transaction.
#[derive(Debug)]
struct Nested {
    links: Arc<Links>,
    /// The most transactions that this server accepts in one request.
    most: AtomicUsize,
}

impl Carrier for Nested {
    type Request = One;
    type Answer = Result<TxnResponse, Failure>;

    /// The server evaluates all conditions before the first operation, so a batch has one transaction per lock.
    fn key(one: &One) -> &Name {
        &one.lock
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    async fn one(&self, one: One) -> Result<TxnResponse, Failure> {
        self.links.call(one.txn, one.deadline).await
    }

    async fn several(&self, all: Vec<One>) -> Vec<Result<TxnResponse, Failure>> {
        // A server without space refuses what puts keys, but sees no keys of inner transactions. It counts the branch that
        // is never executed, too.
        let counted = all.iter().find_map(|one| one.txn.first_put());
        let counted = counted.map(|key| RequestOp::put(key.to_vec(), Vec::new(), 0));
        let txn = TxnRequest {
            success: all.iter().map(|one| RequestOp::from(one.txn.clone())).collect(),
            failure: counted.into_iter().collect(),
            ..TxnRequest::default()
        };
        let last = all.iter().map(|one| one.deadline).max();
        match self.links.call(txn, last.unwrap_or_else(Instant::now)).await {
            Ok(mut reply) => (0..all.len())
                .map(|at| reply.take_inner(at).ok_or_else(no_reply))
                .collect(),
            // None was carried out, and a single transaction may be the cause.
            Err(Failure::Answered(refusal, _)) if refusal != Refusal::Full => {
                if refusal == Refusal::TooLarge {
                    self.most.fetch_min((all.len() / 2).max(1), Ordering::Relaxed);
                }
                join_all(all.into_iter().map(|one| self.one(one))).await
            }
            Err(failure) => vec![Err(failure); all.len()],
        }
    }
}

fn no_reply() -> Failure {
    let error = StoreError::unknown("etcd did not reply to a transaction in a transaction");
    Failure::Answered(Refusal::Other, error)
}
