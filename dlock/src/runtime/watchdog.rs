//! Keeps the grants of a client alive and signals their loss.
//!
//! One task for all grants. It sleeps until the renewal table wants to be looked at, sends the requests that the table has
//! room for, and parks without any timer when nothing is held. What is renewed when, and what a reply means, is decided
//! by the [table](RenewalTable).

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::renewal::{Action, Actions, Renewable, RenewalTable, Reply, Request, SLOW};
use crate::runtime::beat::Beat;
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::Operation;
use crate::runtime::grants::Grant;
use crate::store::{Doubt, Lane, Renewal, StoreError};
use crate::{Error, HoldState, LockKey, Loss};

type Table = RenewalTable<Arc<Grant>>;

/// The renewal table of a client, and what its watchdog is woken by.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    table: Mutex<Table>,
    /// Something is due sooner than the watchdog thinks, or there is room for a request.
    sooner: Notify,
    /// The last grant has gone.
    emptied: Notify,
    /// Whoever writes down what this client does.
    pub(crate) beat: Arc<Beat>,
}

impl Watchdog {
    pub(crate) fn new(beat: Arc<Beat>) -> Watchdog {
        Watchdog {
            beat,
            ..Watchdog::default()
        }
    }

    /// Enters a grant that was just given, by a request sent at `sent`.
    pub(crate) fn add(&self, grant: &Arc<Grant>, sent: Instant, now: Instant) {
        let (sent, now) = (Moment::of(sent), Moment::of(now));
        self.perform(|table| table.add(grant, sent, now));
        self.beat.rouse();
    }

    /// The grant of this number, if it is held.
    pub(crate) fn grant(&self, number: u64) -> Option<Arc<Grant>> {
        self.table.lock().grant(number).cloned()
    }

    /// Some of the grants that are held, at most so many.
    pub(crate) fn grants(&self, most: usize) -> Vec<Arc<Grant>> {
        self.table.lock().grants().take(most).cloned().collect()
    }

    /// Replaces a grant by its successor, see [`RenewalTable::replace`].
    pub(crate) fn replace(&self, successor: &Arc<Grant>) -> bool {
        self.table.lock().replace(successor)
    }

    /// Takes a grant out: no renewal is sent for it any more, and the reply to one that is in flight says nothing.
    pub(crate) fn remove(&self, number: u64) {
        self.perform(|table| table.remove(number));
    }

    /// How many grants are held.
    pub(crate) fn len(&self) -> usize {
        self.table.lock().len()
    }

    #[cfg(dlock_sim)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.table.lock().has(number)
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.len() == 0 {
                return;
            }
            emptied.await;
        }
    }

    /// Ends every grant, and each that is still to come.
    pub(crate) fn close(&self, loss: Loss) -> Vec<Arc<Grant>> {
        let grants = self.table.lock().close(loss);
        for grant in &grants {
            grant.lose(loss);
        }
        self.emptied.notify_waiters();
        grants
    }

    /// Ends the grant of a key, if there is one.
    pub(crate) fn lose(&self, key: &LockKey, loss: Loss) {
        self.perform(|table| table.end(loss, |grant| grant.key == *key));
    }

    /// What renewals brought that were sent at `sent`.
    fn replies(&self, sent: Instant, replies: impl Iterator<Item = Reply>) {
        self.perform(|table| {
            let now = Moment::of(clock::now());
            table.replies(now, Moment::of(sent), replies, chance::fraction)
        });
    }

    /// Has the table decide under its lock, and does what follows without: a holder that learns of a loss may call
    /// back.
    fn perform(&self, decide: impl FnOnce(&mut MutexGuard<'_, Table>) -> Actions<Arc<Grant>>) {
        let mut table = self.table.lock();
        let actions = decide(&mut table);
        drop(table);
        for action in actions {
            match action {
                Action::End(grant, loss) => grant.lose(loss),
                Action::TellSuspect(grant, error) => grant.tell_suspect(error.as_deref()),
                Action::TellFailed(grant, error) => {
                    grant.renewal_failed(&error);
                    Event::RenewalFailed {
                        key: &grant.key,
                        error: &error,
                    }
                    .emit();
                }
                Action::Wake => self.sooner.notify_one(),
                Action::TellEmpty => self.emptied.notify_waiters(),
            }
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let next = self.table.lock().next_deadline(Moment::now());
        next.map(Moment::instant)
    }

    fn next_request(&self, now: Instant) -> Option<Request<Arc<Grant>>> {
        self.table.lock().next_request(Moment::of(now))
    }
}

/// The watchdog of a client. Ends when `over` says so.
pub(crate) async fn watch(shared: Arc<Shared>, over: impl Future<Output = ()>) {
    let watchdog = &shared.watchdog;
    let mut doubts = shared.store.doubts();
    let mut requests = JoinSet::new();
    tokio::pin!(over);
    loop {
        let due = watchdog.next_deadline();
        let is_due = tokio::select! {
            biased;
            () = &mut over => return,
            doubt = doubts.next() => {
                let lane = match doubt {
                    Doubt::Lane(lane) => Some(lane),
                    Doubt::All => None,
                };
                shared.reconnects.fetch_add(1, Ordering::Relaxed);
                Event::Reconnected { meter: &shared.meter }.emit();
                let now = Moment::of(clock::now());
                watchdog.perform(|table| table.doubt(lane, now));
                true
            }
            // What was due is not due any more after the look, so nothing below waits for long.
            () = sleep_until(due) => true,
            () = watchdog.sooner.notified() => false,
            // Only makes room: what failed a moment ago is not due yet, if nearly.
            Some(_) = requests.join_next(), if !requests.is_empty() => false,
        };
        if is_due {
            let now = Moment::of(clock::now());
            watchdog.perform(|table| table.look(now));
        }
        loop {
            let now = clock::now();
            let Some(request) = watchdog.next_request(now) else {
                break;
            };
            let in_flight = InFlight {
                shared: shared.clone(),
                lane: request.lane,
                is_slow: false,
            };
            requests.spawn(in_flight.renew(now, request));
        }
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => clock::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// A request that takes room in its lane until it is dropped.
struct InFlight {
    shared: Arc<Shared>,
    lane: Lane,
    is_slow: bool,
}

impl InFlight {
    /// Renews grants of one lane, each for its lease. That counts from `sent`, when it was seen how much is left to each,
    /// however much later this is polled.
    ///
    /// A reply that does not come in time has failed, and the grants are asked for again. It counts all the same if it comes
    /// after that: a store may take longer for each reply than is waited for it.
    async fn renew(mut self, sent: Instant, request: Request<Arc<Grant>>) {
        let Request { grants, patience, .. } = request;
        let requests = grants
            .iter()
            .map(|(grant, lease)| grant.renew_request(*lease))
            .collect();
        let (shared, store) = (self.shared.clone(), self.shared.store.clone());
        // A store that panics has failed, and is asked again.
        let step = AssertUnwindSafe(async move { store.renew(requests).await }).catch_unwind();
        tokio::pin!(step);
        let in_time = async {
            if let Ok(replied) = tokio::time::timeout(SLOW, &mut step).await {
                return replied;
            }
            self.slow();
            (&mut step).await
        };
        let replied = tokio::time::timeout(patience, in_time).await;
        let is_late = replied.is_err();
        let results = match replied {
            Ok(Ok(results)) => results,
            Ok(Err(_)) => {
                let key = grants.first().map(|(grant, _)| &grant.key);
                Event::StorePanicked { key }.emit();
                Err(StoreError::unknown("the step panicked"))
            }
            Err(_) => Err(StoreError::unknown(format!("no answer within {patience:?}"))),
        };
        shared.calls.ended(&results);
        (shared.meter).request_ended(Operation::Renew, &results, sent);
        replied_to(&shared, sent, &grants, results);
        drop(self);
        if is_late {
            let longest = grants.iter().map(|(_, lease)| *lease).max();
            let useless = sent + longest.unwrap_or_default();
            if let Ok(Ok(Ok(results))) = tokio::time::timeout_at(useless, step).await {
                // What failed has failed before.
                let brought = grants.into_iter().zip(results);
                let brought = brought.filter(|(_, result)| result.is_ok());
                let (grants, results): (Vec<_>, Vec<_>) = brought.unzip();
                replied_to(&shared, sent, &grants, Ok(results));
            }
        }
    }

    fn slow(&mut self) {
        self.is_slow = true;
        let watchdog = &self.shared.watchdog;
        watchdog.table.lock().request_slow(self.lane);
        watchdog.sooner.notify_one();
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut table = self.shared.watchdog.table.lock();
        table.request_done(self.lane, self.is_slow);
    }
}

/// Enters what a request brought that was sent at `sent`.
fn replied_to(
    shared: &Shared,
    sent: Instant,
    grants: &[(Arc<Grant>, Duration)],
    results: Result<Vec<Result<Renewal, StoreError>>, StoreError>,
) {
    let (asked, answered) = (grants.len(), results.as_ref().map_or(0, Vec::len));
    let mut results = results.map(Vec::into_iter);
    let replies = grants.iter().map(|(grant, lease)| Reply {
        number: grant.number,
        lease: *lease,
        result: match &mut results {
            Ok(results) => results
                .next()
                .unwrap_or_else(|| Err(too_few_replies(answered, asked))),
            Err(error) => Err(error.clone()),
        },
    });
    shared.watchdog.replies(sent, replies);
    for (grant, _) in grants {
        grant.tell_renewed();
    }
}

/// A store has to answer each of the renewals that it was asked for together.
fn too_few_replies(answered: usize, asked: usize) -> StoreError {
    StoreError::unknown(format!("the store answered {answered} of {asked} renewals"))
}

impl Shared {
    /// Renews one grant now, on behalf of its holder.
    pub(crate) async fn renew_one(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        let sent = clock::now();
        let (_, deadline) = grant.judge(Moment::of(sent));
        let Some(lease) = grant.terms().next_lease(deadline, Moment::of(sent)) else {
            return Ok(());
        };
        let results = self.store.clone().renew(vec![grant.renew_request(lease)]).await;
        self.calls.ended(&results);
        (self.meter).request_ended(Operation::Renew, &results, sent);
        let result =
            results.and_then(|mut results| results.pop().unwrap_or_else(|| Err(too_few_replies(0, 1))));
        let failed = result.as_ref().err().cloned();
        let number = grant.number;
        let reply = Reply {
            number,
            lease,
            result,
        };
        self.watchdog.replies(sent, std::iter::once(reply));
        grant.tell_renewed();
        match failed {
            Some(error) if grant.status() != HoldState::Lost(Loss::Gone) => {
                Err(error.into_error("the renewal of lock", &grant.key))
            }
            _ => Ok(()),
        }
    }
}
