//! Keeps the grants of a client alive and signals their loss.
//!
//! One task for all grants. It sleeps until the renewal table's next deadline, sends as many requests as the table
//! allows, and parks without any timer when nothing is held. The [table](RenewalTable) decides what is renewed when,
//! and what a reply means.

mod entering;

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::entering::Entering;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::observed::observed;
use crate::base::own_line::OwnLine;
use crate::base::waking::waking;
use crate::engine::renewal::{Action, Actions, Renewable, RenewalTable, Reply, Request, SLOW};
use crate::runtime::beat::Beat;
use crate::runtime::calls::{called, poll_step};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::emit::events::Listeners;
use crate::runtime::emit::meter::Operation;
use crate::runtime::grants::{Grant, UnreportedLoss};
use crate::runtime::outside::is_outside;
use crate::store::{self, Doubt, Doubts, Kind, Lane, Renewal, StoreError};
use crate::{Error, HoldState, LockKey, Loss};

type Table = RenewalTable<Arc<Grant>>;

/// How many locks that became suspect together are named in the log: a reconnect concerns all, and their renewals wait.
const NAMED: usize = 100;

/// The renewal table of a client, and what wakes its watchdog.
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    table: OwnLine<Mutex<Table>>,
    entering: Entering,
    /// Something is due sooner than the watchdog thinks, or there is room for a request.
    sooner: Notify,
    /// The last grant has gone.
    emptied: Notify,
    /// Whether anything waits for that.
    is_awaited: AtomicBool,
    /// Wakes the presence task.
    pub(crate) beat: Arc<Beat>,
    listeners: Arc<Listeners>,
}

impl Watchdog {
    pub(crate) fn new(beat: Arc<Beat>, listeners: Arc<Listeners>) -> Watchdog {
        Watchdog {
            beat,
            listeners,
            ..Watchdog::default()
        }
    }

    /// Enters a new grant, obtained by a request sent at `sent`.
    pub(crate) fn add(&self, grant: &Arc<Grant>, sent: Moment, now: Moment) {
        if !self.entering.add(grant, sent, now) {
            self.perform(|table| {
                let actions = table.add(grant, sent, now);
                self.entering.open(table);
                actions
            });
        }
        self.beat.rouse();
    }

    /// Returns the grant with this number, if it is held.
    pub(crate) fn grant(&self, number: u64) -> Option<Arc<Grant>> {
        self.with_all(|table| table.grant(number).cloned())
    }

    /// Returns the grant of a key, if it is held as this kind; any of several. Looks through all of them.
    pub(crate) fn grant_of(&self, kind: Kind, key: &LockKey) -> Option<Arc<Grant>> {
        let now = Moment::now();
        let is_it = |grant: &&Arc<Grant>| {
            grant.kind == kind && grant.key == *key && !matches!(grant.peek_at(now).0, HoldState::Lost(_))
        };
        self.with_all(|table| table.grants().find(is_it).cloned())
    }

    /// Returns at most this many of the held grants.
    pub(crate) fn grants(&self, most: usize) -> Vec<Arc<Grant>> {
        self.with_all(|table| table.grants().take(most).cloned().collect())
    }

    /// Replaces a grant by its successor, see [`RenewalTable::replace`].
    pub(crate) fn replace(&self, successor: &Arc<Grant>) -> bool {
        let replaced = self.entering.replace(successor);
        replaced.unwrap_or_else(|| self.table.lock().replace(successor))
    }

    /// Removes a grant: it is not renewed any more, and the reply to a renewal in flight is ignored.
    pub(crate) fn remove(&self, number: u64) {
        if !self.entering.remove(number) {
            self.perform(|table| table.remove(number));
        } else if self.is_awaited.load(Ordering::Relaxed) {
            self.tell_empty();
        }
    }

    /// Returns how many grants are held.
    pub(crate) fn len(&self) -> usize {
        self.with_all(|table| table.len())
    }

    #[cfg(dlock_sim)]
    pub(crate) fn has(&self, number: u64) -> bool {
        self.with_all(|table| table.has(number))
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        // Seen by each removal that comes after the look below: both lock the same mutexes.
        self.is_awaited.store(true, Ordering::Relaxed);
        loop {
            let emptied = self.emptied.notified();
            if self.len() == 0 {
                return;
            }
            emptied.await;
        }
    }

    fn tell_empty(&self) {
        waking(|| self.emptied.notify_waiters());
    }

    /// Ends every grant, and each future one. Returns those that their holders have not left meanwhile.
    pub(crate) fn close(&self, loss: Loss) -> Vec<Arc<Grant>> {
        let mut grants = self.with_all(|table| table.close(loss));
        report(grants.iter().filter_map(|grant| signal(grant, loss)).collect());
        grants.retain(|grant| grant.status() != HoldState::Lost(Loss::Released));
        self.tell_empty();
        grants
    }

    /// Ends the grant of a key, if there is one.
    pub(crate) fn lose(&self, key: &LockKey, loss: Loss) {
        let actions = self.with_all(|table| table.end(loss, |grant| grant.key == *key));
        self.act(actions);
    }

    /// Ends the grants that were taken away on the store. One that is still on its way here is confirmed when it enters.
    pub(crate) fn lose_taken(&self, was_taken: impl Fn(&Grant) -> bool, now: Moment) {
        let actions = self.with_all(|table| {
            table.doubt_entering(now);
            self.entering.doubt(now);
            table.end(Loss::Gone, |grant| was_taken(grant))
        });
        self.act(actions);
    }

    /// Has every grant of a lane, or of all lanes, confirmed at once.
    fn doubt(&self, lane: Option<Lane>, now: Moment) {
        let actions = self.with_all(|table| {
            let actions = table.doubt(lane, now);
            self.entering.doubt(now);
            actions
        });
        self.act(actions);
    }

    /// Enters the replies to renewals that were sent at `sent`.
    fn replies(&self, sent: Instant, replies: impl Iterator<Item = Reply>) {
        let actions = self.with_all(|table| {
            let now = Moment::of(clock::now());
            table.replies(now, Moment::of(sent), replies, chance::fraction)
        });
        self.act(actions);
    }

    /// Handles everything that is due about now.
    fn look(&self, now: Moment) {
        let actions = self.with_all(|table| table.look(now));
        self.act(actions);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let next = self.with_all(|table| table.next_deadline(Moment::now()));
        next.map(Moment::instant)
    }

    /// Reads or changes the table with all grants in it.
    fn with_all<T>(&self, with: impl FnOnce(&mut Table) -> T) -> T {
        let mut table = self.table.lock();
        let actions = self.entering.enter(&mut table);
        let outcome = with(&mut table);
        self.entering.open(&table);
        drop(table);
        self.act(actions);
        outcome
    }

    /// Lets the table decide under its mutex, and performs the actions without it.
    fn perform(&self, decide: impl FnOnce(&mut Table) -> Actions<Arc<Grant>>) {
        let mut table = self.table.lock();
        let actions = decide(&mut table);
        drop(table);
        self.act(actions);
    }

    /// Performs actions, not under the mutex: a holder that learns of a loss may call back.
    fn act(&self, actions: Actions<Arc<Grant>>) {
        // A log or a filter of events may be slow: all holders learn of their losses first.
        let mut losses = Vec::new();
        for action in &actions {
            match action {
                Action::End(grant, loss) => losses.extend(signal(grant, *loss)),
                Action::TellFailed(grant, error) => grant.renewal_failed(error),
                _ => {}
            }
        }
        self.listeners.tell_left();
        let mut suspects = 0;
        for action in actions {
            match action {
                Action::End(..) => {}
                Action::TellSuspect(grant, error) => {
                    suspects += 1;
                    if suspects <= NAMED {
                        grant.tell_suspect(error.as_deref());
                    }
                }
                Action::TellFailed(grant, error) => Event::RenewalFailed {
                    key: &grant.key,
                    error: &error,
                }
                .emit(),
                Action::Wake => self.sooner.notify_one(),
                Action::TellEmpty => self.tell_empty(),
            }
        }
        if let Some(count) = suspects.checked_sub(NAMED).filter(|count| *count > 0) {
            Event::MoreSuspect { count }.emit();
        }
        report(losses);
    }

    fn next_request(&self, now: Instant) -> Option<Request<Arc<Grant>>> {
        self.table.lock().next_request(Moment::of(now))
    }
}

fn signal(grant: &Arc<Grant>, loss: Loss) -> Option<(Arc<Grant>, UnreportedLoss)> {
    Some((grant.clone(), grant.signal_loss(loss)?))
}

fn report(losses: Vec<(Arc<Grant>, UnreportedLoss)>) {
    for (grant, loss) in losses {
        grant.report_loss(loss);
    }
}

/// Runs the watchdog of a client with the doubts of its store, until `over` completes.
pub(crate) async fn watch(shared: Arc<Shared>, mut doubts: Doubts, over: impl Future<Output = ()>) {
    let watchdog = &shared.watchdog;
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
                watchdog.doubt(lane, now);
                true
            }
            // What was due is not due any more after the check, so nothing below waits for long.
            () = sleep_until(due) => true,
            () = watchdog.sooner.notified() => false,
            // Only makes room: what just failed is not due yet, or only nearly.
            Some(_) = requests.join_next(), if !requests.is_empty() => false,
        };
        if is_due {
            watchdog.look(Moment::of(clock::now()));
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
    /// Renews grants of one lane, each for its lease, counted from `sent`, when the remaining leases were computed,
    /// however much later this is polled.
    ///
    /// If the reply does not arrive in time, the renewal has failed, and the grants are renewed again. A later reply
    /// still counts: a store may need longer for each reply than the timeout.
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
        shared.renewals_ended(&results, sent);
        replied_to(&shared, sent, &grants, results);
        drop(self);
        if is_late {
            let longest = grants.iter().map(|(_, lease)| *lease).max();
            let useless = sent + longest.unwrap_or_default();
            let useful = useless.saturating_duration_since(clock::now());
            if let Ok(Ok(Ok(results))) = tokio::time::timeout(useful, step).await {
                // A failure was already recorded.
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

/// Enters the replies to a request that was sent at `sent`.
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

/// How a request for several renewals ended: it has failed if none of them succeeded.
fn outcome_of_renewals(
    results: &Result<Vec<Result<Renewal, StoreError>>, StoreError>,
) -> Result<(), StoreError> {
    let results = results.as_ref().map_err(StoreError::clone)?;
    match results.iter().find_map(|result| result.as_ref().err()) {
        Some(error) if results.iter().all(Result::is_err) => Err(error.clone()),
        _ => Ok(()),
    }
}

/// A store must answer every renewal of a request.
fn too_few_replies(answered: usize, asked: usize) -> StoreError {
    StoreError::unknown(format!("the store answered {answered} of {asked} renewals"))
}

impl Grant {
    /// Renews it now.
    pub(crate) async fn confirm(self: &Arc<Grant>) -> Result<(), Error> {
        if let HoldState::Lost(loss) = self.status() {
            return Err(self.lost(loss));
        }
        let Some(client) = self.client().upgrade() else {
            return Err(Error::ClientClosed);
        };
        let renewed = client.renew_one(self).await;
        match self.status() {
            HoldState::Lost(loss) => Err(self.lost(loss)),
            // A failure says that it is still held.
            HoldState::Held | HoldState::Suspect => renewed,
        }
    }
}

impl store::Renewable for Grant {
    fn confirm(self: Arc<Self>) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>> {
        Box::pin(async move { Grant::confirm(&self).await })
    }
}

impl Shared {
    /// Records how a request to renew grants ended.
    pub(crate) fn renewals_ended(
        &self,
        results: &Result<Vec<Result<Renewal, StoreError>>, StoreError>,
        sent: Instant,
    ) {
        let outcome = outcome_of_renewals(results);
        self.calls.ended(&outcome);
        // The first one registers the series.
        observed(|| (self.meter.client()).request_ended(Operation::Renew, &outcome, sent));
    }

    /// Renews one grant now, for its holder.
    pub(crate) async fn renew_one(&self, grant: &Arc<Grant>) -> Result<(), Error> {
        let sent = clock::now();
        let (_, deadline) = grant.judge(Moment::of(sent));
        let Some(lease) = grant.terms().next_lease(deadline, Moment::of(sent)) else {
            return Ok(());
        };
        let request = grant.renew_request(lease);
        let mut step = called(&grant.key, || self.store.clone().renew(vec![request]));
        let renewed = std::future::poll_fn(|cx| {
            // The holder may have no runtime, and a step needs timers.
            let _entered = is_outside().then(|| self.runtime.enter());
            poll_step(&mut step, cx, &grant.key)
        });
        let results = renewed.await;
        self.renewals_ended(&results, sent);
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
                Err(error.into_error(&format!("the renewal of {}", grant.kind.noun()), &grant.key))
            }
            _ => Ok(()),
        }
    }
}
