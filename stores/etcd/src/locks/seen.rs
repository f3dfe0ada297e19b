//! The keys of a semaphore or latch, as one look at the server finds them.

use std::time::Duration;

use dlock::store::{GrantId, Kind, StoreError};
use tokio::time::Instant;

use super::acquire::taken;
use super::inner::Inner;
use super::names::{Name, State, amount, other_lock};
use super::session::not_done;
use crate::client::Failure;
use crate::client::proto::{Compare, KeyValue, RequestOp, TxnRequest, TxnResponse};

/// The state of a semaphore or latch.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The revision of the store at which this was the state.
    revision: i64,
    /// The total of a semaphore.
    pub(crate) total: Option<i64>,
    /// The count of a latch.
    pub(crate) count: Option<u64>,
    /// How many permits are held.
    pub(crate) held: i64,
    /// The longest time until the first of the grants ends, unless it is renewed.
    pub(crate) first_end: Option<Duration>,
    /// The waiters for permits that have positions, in their order.
    pub(crate) waiting: Vec<Waiting>,
    /// The value of the key that was looked up beside them.
    pub(crate) operation: Option<String>,
    /// Whether the total was set before that key was created: the semaphore has not been deleted since.
    pub(crate) total_is_older: bool,
    /// The kind of something that is neither a semaphore nor a latch.
    other: Option<Kind>,
    /// The revisions that changed the total and the count last; 0 without one.
    changed: [i64; 2],
}

/// The position of a waiter for permits.
#[derive(Debug)]
pub(crate) struct Waiting {
    waiter: String,
    pub(crate) key: Vec<u8>,
    pub(crate) amount: i64,
}

impl Waiting {
    pub(crate) fn is_of(&self, waiter: GrantId) -> bool {
        self.waiter == waiter.to_string()
    }
}

/// Reads the keys of a semaphore or latch, and of an operation on it. After an error nothing was done.
pub(crate) async fn look(
    inner: &Inner,
    name: &Name,
    operation: Option<GrantId>,
    deadline: Instant,
) -> Result<Seen, StoreError> {
    let operation = operation.map(|id| inner.names.operation(id));
    let operation = operation.map(|key| RequestOp::range(key, Vec::new(), 1));
    let txn = TxnRequest {
        success: ranges(inner, name).into_iter().chain(operation).collect(),
        ..TxnRequest::default()
    };
    let reply = inner.releases.call(name, txn, deadline).await;
    let reply = reply.map_err(|failure: Failure| not_done(failure.error()))?;
    Ok(read(inner, name, &reply))
}

/// The first operations of a transaction that reads the keys of a semaphore or latch.
pub(crate) fn ranges(inner: &Inner, name: &Name) -> [RequestOp; 2] {
    let ranges = [inner.names.grants(name), inner.names.waiting_for_permits(name)];
    ranges.map(|(from, to)| RequestOp::range(from, to, 0))
}

/// Reads the results of these operations, and that of the operation behind them.
pub(crate) fn read(inner: &Inner, name: &Name, reply: &TxnResponse) -> Seen {
    let operation = reply.found(2).first();
    let mut seen = Seen {
        revision: reply.revision(),
        total: None,
        count: None,
        held: 0,
        first_end: None,
        waiting: positions(reply.found(1)),
        operation: operation.map(|found| text(found).to_owned()),
        total_is_older: false,
        other: None,
        changed: [0; 2],
    };
    for found in reply.found(0) {
        if *found.key == *inner.names.total(name) {
            seen.total = text(found).parse().ok();
            seen.changed[0] = found.mod_revision;
            seen.total_is_older = operation.is_some_and(|key| found.create_revision < key.create_revision);
        } else if *found.key == *inner.names.count(name) {
            seen.count = text(found).parse().ok();
            seen.changed[1] = found.mod_revision;
        } else if let Some(kind) = inner.names.kind(&found.key).filter(|kind| *kind != Kind::Permit) {
            seen.other = Some(kind);
        } else {
            seen.held += i64::from(amount(&found.key));
            let ends = State::read(&found.value).1.lasts();
            seen.first_end = Some(seen.first_end.map_or(ends, |first| first.min(ends)));
        }
    }
    seen
}

fn positions(found: &[KeyValue]) -> Vec<Waiting> {
    let mut found: Vec<_> = found.iter().collect();
    found.sort_by_key(|found| found.create_revision);
    let waiting = found.into_iter().map(|found| Waiting {
        waiter: State::read(&found.value).0.to_owned(),
        key: found.key.clone(),
        amount: i64::from(amount(&found.key)),
    });
    waiting.collect()
}

fn text(found: &KeyValue) -> &str {
    std::str::from_utf8(&found.value).unwrap_or_default()
}

impl Seen {
    /// Refuses a key that holds something other than this kind.
    pub(crate) fn is_for(&self, name: &Name, kind: Kind) -> Result<(), StoreError> {
        let is_semaphore = self.total.is_some() || self.held > 0;
        let held = (self.other)
            .or(self.count.map(|_| Kind::Latch))
            .or(is_semaphore.then_some(Kind::Permit));
        match held.and_then(|held| other_lock(kind, held)) {
            Some(what) => Err(taken(name, what)),
            None => Ok(()),
        }
    }

    /// Requires that nothing has come or changed since, and that the numbers have not been deleted. A grant that is gone
    /// harms no decision: it leaves more permits.
    pub(crate) fn still(&self, inner: &Inner, name: &Name) -> [Compare; 3] {
        let names = &inner.names;
        let [total, count] = self.changed;
        [
            Compare::unchanged_since(names.grants(name), self.revision),
            Compare::changed(&names.total(name), total),
            Compare::changed(&names.count(name), count),
        ]
    }
}
