//! The claim under which work is done: requested, renewed, and settled or given up.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use tokio::runtime;
use tokio::sync::watch;
use tokio::task::{self, AbortHandle, JoinHandle};
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::stored;
use crate::base::waking::waking;
use crate::base::{broken, chance, clock};
use crate::engine::grant::surely_lasts;
use crate::engine::timing::{FIRST_PAUSE, may_outlast_lease, pause_after_failed_renewal, pause_while_held};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::ending::Ending;
use crate::runtime::outside::with_timers_of;
use crate::store::records::{
    ClaimReply, ClaimRequest, ClaimToken, OnOrphan, OwnerReply, RecordKey, Records, SlotOutcome, SlotReply,
    SlotRequest,
};
use crate::store::{Outcome, Reason, StoreError, StoreFuture};
use crate::{Error, LockKey, Loss};

/// The longest pause between two attempts to settle a claim.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The record, and how it is used.
pub(super) struct Target {
    pub(super) name: LockKey,
    pub(super) records: Records,
    pub(super) record: RecordKey,
    pub(super) lease: Duration,
    pub(super) keep: Duration,
    pub(super) on_orphan: OnOrphan,
    pub(super) retry_for: Duration,
    pub(super) runtime: runtime::Handle,
    /// The client, if there is one: its shutdown waits for the work under its claims, and until they are settled.
    pub(super) client: Option<Arc<Shared>>,
    /// Whether it is inside a hold of that client, which lets it pass while the client drains.
    pub(super) nested: bool,
}

/// Given when a pending claim request has to end.
pub(super) fn ending(client: &Shared, nested: bool) -> &Ending {
    match nested {
        true => &client.closing,
        false => &client.draining,
    }
}

impl Target {
    fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        match &self.client {
            Some(client) => client.pending.spawn_on(work, &self.runtime),
            None => self.runtime.spawn(work),
        }
    }

    /// Counts work that is about to begin, unless the client accepts no new work. Counted first: a shutdown that does not see
    /// the work was noticed here.
    fn begin(&self) -> Result<Option<TaskTrackerToken>, Error> {
        let Some(client) = &self.client else {
            return Ok(None);
        };
        let running = client.claims.token();
        match ending(client, self.nested).is_given() {
            true => Err(client.refusal()),
            false => Ok(Some(running)),
        }
    }

    /// Waits until the client accepts no new work, and returns why.
    pub(super) async fn refused(&self) -> Error {
        match &self.client {
            Some(client) => {
                ending(client, self.nested).given().await;
                client.refusal()
            }
            None => std::future::pending().await,
        }
    }
}

/// A request for a claim. Dropped while the outcome is unknown, it is undone.
pub(super) struct Asking {
    target: Arc<Target>,
    request: ClaimRequest,
    slot: Option<SlotRequest>,
    /// Taken before the claim was last sent.
    sent: Instant,
    in_doubt: bool,
    /// A shutdown waits for a request in flight, and for what it has brought.
    counted: Option<TaskTrackerToken>,
}

impl Asking {
    pub(super) fn new(target: Arc<Target>, request: ClaimRequest, slot: Option<SlotRequest>) -> Asking {
        Asking {
            target,
            request,
            slot,
            sent: clock::now(),
            in_doubt: false,
            counted: None,
        }
    }

    /// Counts the request that follows. Fails once the client is shut down: then nothing waits for it.
    fn count(&mut self) -> Result<(), StoreError> {
        let Some(client) = &self.target.client else {
            return Ok(());
        };
        self.counted = Some(client.pending.token());
        client.check_open()
    }

    /// Asks once, and again if the store was not reached: the same token gets the same answer.
    ///
    /// For work with slots, the claim reply may be missing: the slot alone may decide.
    pub(super) async fn ask(&mut self) -> Result<(Option<ClaimReply>, Option<SlotReply>), StoreError> {
        let begun = clock::now();
        let mut pause = FIRST_PAUSE;
        loop {
            self.count()?;
            let was_in_doubt = std::mem::replace(&mut self.in_doubt, true);
            self.sent = clock::now();
            let mut error = match self.step().await {
                Ok(reply) => {
                    // The attempt in progress may be that of an earlier request of this one.
                    self.in_doubt = was_in_doubt && matches!(reply.0, Some(ClaimReply::InProgress { .. }));
                    let is_claimed = matches!(reply.0, Some(ClaimReply::Claimed { .. }));
                    if !is_claimed && !self.in_doubt {
                        self.counted = None;
                    }
                    return Ok(reply);
                }
                Err(error) => error,
            };
            self.in_doubt = was_in_doubt || error.outcome == Outcome::Unknown;
            match self.in_doubt {
                // An earlier request may have claimed it, whatever is known about this one.
                true => error.outcome = Outcome::Unknown,
                false => self.counted = None,
            }
            let gone_by = clock::now().saturating_duration_since(begun);
            if error.reason != Reason::Unreachable || gone_by + pause > self.target.retry_for {
                return Err(error);
            }
            sleep(chance::shortened(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn step(&self) -> Result<(Option<ClaimReply>, Option<SlotReply>), StoreError> {
        let (records, request) = (&self.target.records, self.request.clone());
        let Some(slot) = self.slot else {
            return records.claim(request).await.map(|reply| (Some(reply), None));
        };
        let reply = records.claim_slot(request, slot).await?;
        let claim = match &reply.outcome {
            SlotOutcome::Claim(claim) => Some(claim.clone()),
            _ => None,
        };
        Ok((claim, Some(reply)))
    }

    /// Asks for this slot from now on, not for a nearer one.
    pub(super) fn stay_with(&mut self, time: SystemTime) {
        if let Some(slot) = &mut self.slot {
            let period = slot.period();
            *slot = SlotRequest::at(time);
            if let Some(period) = period {
                *slot = slot.with_period(period);
            }
        }
    }

    /// Takes ownership of the granted claim, or gives it back if the client accepts no new work any more.
    pub(super) fn granted(
        mut self,
        attempt: u32,
        fence: u64,
        reply: Option<&SlotReply>,
    ) -> Result<Claim, Error> {
        self.in_doubt = true;
        let running = self.target.begin()?;
        self.in_doubt = false;
        let period = self.slot.and_then(|slot| slot.period());
        let slot = reply.map(|reply| ClaimedSlot {
            time: reply.slot,
            skipped: skipped(reply, period),
        });
        if let Some(ClaimedSlot {
            skipped: count @ 1.., ..
        }) = slot
        {
            let name = &self.target.name;
            Event::SlotsSkipped { name, count }.emit();
        }
        Ok(Claim::begin(
            self.target.clone(),
            self.request.token.clone(),
            self.sent,
            running,
            attempt,
            fence,
            slot,
        ))
    }
}

/// The slot of a claim.
#[derive(Debug, Clone, Copy)]
struct ClaimedSlot {
    time: SystemTime,
    skipped: u64,
}

/// How many slots lie between the claimed slot and the last one before it.
fn skipped(reply: &SlotReply, period: Option<Duration>) -> u64 {
    let (Some(last), Some(period)) = (reply.last, period) else {
        return 0;
    };
    let between = reply.slot.duration_since(last).unwrap_or_default();
    let slots = between.as_nanos() / period.as_nanos().max(1);
    u64::try_from(slots.saturating_sub(1)).unwrap_or(u64::MAX)
}

/// Runs an operation that changes nothing; repeats it if the store was not reached.
pub(super) async fn retried<T, Fut>(target: &Target, mut step: impl FnMut() -> Fut) -> Result<T, StoreError>
where
    Fut: Future<Output = Result<T, StoreError>>,
{
    let begun = clock::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match step().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let gone_by = clock::now().saturating_duration_since(begun);
        if error.reason != Reason::Unreachable || gone_by + pause > target.retry_for {
            return Err(error);
        }
        sleep(chance::shortened(pause)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.in_doubt {
            // No work was started under it.
            let (target, token) = (self.target.clone(), self.request.token.clone());
            self.target.spawn(settle(target, token, Settlement::Release));
        }
    }
}

/// What to do with a claim.
#[derive(Debug)]
pub(super) enum Settlement {
    /// Stores this for later calls.
    Keep(Vec<u8>),
    /// Counts the next attempt as one more.
    Abandon,
    /// Undoes the claim, as if there had been none.
    Release,
}

/// The outcome of a settlement.
#[derive(Debug)]
pub(super) enum Settled {
    Done,
    /// Another attempt has taken over.
    NotOwner,
    /// It did not reach the store, or was refused there.
    Failed(StoreError),
}

/// Until when the claim is held for certain; `None` when it is lost.
type Deadline = Option<Instant>;

/// A granted claim. It is renewed until it is settled; dropped unsettled, it is given up.
pub(super) struct Claim {
    target: Arc<Target>,
    token: ClaimToken,
    attempt: u32,
    fence: u64,
    slot: Option<ClaimedSlot>,
    deadline: watch::Receiver<Deadline>,
    renewal: AbortHandle,
    not_started: Arc<AtomicBool>,
    /// A shutdown waits for the work, until it is settled: then for that.
    running: Option<TaskTrackerToken>,
    is_settled: bool,
}

impl Claim {
    fn begin(
        target: Arc<Target>,
        token: ClaimToken,
        sent: Instant,
        running: Option<TaskTrackerToken>,
        attempt: u32,
        fence: u64,
        slot: Option<ClaimedSlot>,
    ) -> Claim {
        let (sender, deadline) = watch::channel(Some(held_until(sent, target.lease)));
        // Not with `spawn`: a client that shuts down waits for those tasks.
        let renewal = target
            .runtime
            .spawn(renew(target.clone(), token.clone(), sent, sender));
        Claim {
            target,
            token,
            attempt,
            fence,
            slot,
            deadline,
            renewal: renewal.abort_handle(),
            not_started: Arc::default(),
            running,
            is_settled: false,
        }
    }

    pub(super) fn attempt(&self) -> u32 {
        self.attempt
    }

    pub(super) fn view(&self) -> OnceClaim {
        OnceClaim {
            attempt: self.attempt,
            fence: self.fence,
            slot: self.slot,
            record: self.target.record.clone(),
            token: self.token.clone(),
            keep: self.target.keep,
            deadline: self.deadline.clone(),
            not_started: self.not_started.clone(),
            runtime: self.target.runtime.clone(),
            client: self.target.client.as_ref().map(Arc::downgrade),
        }
    }

    /// Whether the work reported that it was not started.
    pub(super) fn is_not_started(&self) -> bool {
        self.not_started.load(Ordering::Relaxed)
    }

    /// Completes when another attempt may begin.
    pub(super) async fn lost(&self) {
        let client = self.target.client.as_ref().map(Arc::downgrade);
        lost(&self.deadline, client.as_ref()).await;
    }

    /// Settles it, and keeps trying until that is done, even if the answer is not awaited.
    pub(super) fn settle(mut self, settlement: Settlement) -> JoinHandle<Settled> {
        self.is_settled = true;
        let (target, token) = (self.target.clone(), self.token.clone());
        let settling = settle(target.clone(), token, settlement);
        let running = self.running.take();
        let settled = target.spawn(async move {
            let renewed_until_then = self;
            let settled = settling.await;
            drop(renewed_until_then);
            settled
        });
        drop(running);
        settled
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.renewal.abort();
        if !self.is_settled {
            let (target, token) = (self.target.clone(), self.token.clone());
            self.target.spawn(settle(target, token, Settlement::Abandon));
        }
    }
}

tokio::task_local! {
    /// The innermost claim around the code, and the task that works under it: others may be polled inside of that.
    static CURRENT: (OnceClaim, Option<task::Id>);
}

/// Does work under its claim.
pub(super) async fn under<W, Fut>(claim: OnceClaim, work: W) -> Fut::Output
where
    W: FnOnce(OnceClaim) -> Fut,
    Fut: Future,
{
    let seen = (claim.clone(), task::try_id());
    CURRENT.scope(seen, async { work(claim).await }).await
}

/// The claim under which work runs, as the work sees it. Code further inside, and a function under `#[once]`, finds it by
/// [`current`](Self::current).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # let client = dlock::LockClient::memory();
/// # let write = async |_token: u64| Ok::<_, String>(());
/// let done = client.once("close-the-month").run(async |claim| {
///     if claim.attempt() > 1 {
///         // an earlier attempt ended in the middle: see what it has left
///     }
///     write(claim.fencing_token()).await
/// });
/// assert!(done.await.is_ok());
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct OnceClaim {
    attempt: u32,
    fence: u64,
    slot: Option<ClaimedSlot>,
    record: RecordKey,
    token: ClaimToken,
    keep: Duration,
    deadline: watch::Receiver<Deadline>,
    not_started: Arc<AtomicBool>,
    runtime: runtime::Handle,
    client: Option<Weak<Shared>>,
}

impl OnceClaim {
    /// Returns the innermost claim under which the calling code runs; `None` outside of all work that is done once, and in a
    /// task that the work spawned.
    ///
    /// For a function under `#[once]`, which has no argument for its claim, and for code deep inside the work.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock::{LockClient, OnceClaim};
    ///
    /// async fn write() -> Result<u64, String> {
    ///     let claim = OnceClaim::current().ok_or("it is only called from the work")?;
    ///     Ok(claim.fencing_token()) // goes with what is written
    /// }
    ///
    /// let done = LockClient::memory().once("report").run(async |_claim| write().await);
    /// assert!(done.await.is_ok());
    /// assert!(OnceClaim::current().is_none());
    /// # }
    /// ```
    #[must_use]
    pub fn current() -> Option<OnceClaim> {
        let here = |(claim, of): &(OnceClaim, _)| (*of == task::try_id()).then(|| claim.clone());
        CURRENT.try_with(here).ok().flatten()
    }

    /// Returns the number of this attempt: 1 for the first, and one more after each attempt that ended without a
    /// result.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns a token greater than that of every earlier attempt. A resource that refuses smaller tokens is safe from
    /// an attempt that was stopped for longer than its lease, and resumes.
    #[must_use]
    pub fn fencing_token(&self) -> u64 {
        self.fence
    }

    /// Returns the slot of time that the work is for: its beginning, by the store's clock or as it was
    /// [named](crate::Once::slot). `None` for work without slots.
    #[must_use]
    pub fn slot(&self) -> Option<SystemTime> {
        self.slot.map(|slot| slot.time)
    }

    /// Returns how many slots before this one were left out: no process asked for them, or an earlier run was still
    /// going. 0 if the slots have no period.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.slot.map_or(0, |slot| slot.skipped)
    }

    /// Returns the key of the claimed record. Together with [`token`](Self::token) it is for stores that complete the
    /// record themselves, such as in a PostgreSQL transaction (`dlock-postgres`).
    #[must_use]
    pub fn record_key(&self) -> &RecordKey {
        &self.record
    }

    /// Returns the token of the claim. A process that has it can settle the claim.
    #[must_use]
    pub fn token(&self) -> &ClaimToken {
        &self.token
    }

    /// Returns the form in which [`Once`](crate::Once) stores a result, for a store that completes the claim itself.
    ///
    /// # Errors
    ///
    /// Why it cannot be kept: it is longer than 1 MiB, or has no JSON form.
    ///
    /// ```
    /// assert!(dlock::OnceClaim::stored_form(&42).is_ok());
    /// assert!(dlock::OnceClaim::stored_form(&"x".repeat(2 * 1024 * 1024)).is_err());
    /// ```
    pub fn stored_form<T: serde::Serialize>(value: &T) -> Result<Vec<u8>, String> {
        stored::result(value)
    }

    /// Returns how long the result is kept, see [`Once::keep`](crate::Once::keep).
    #[must_use]
    pub fn keep(&self) -> Duration {
        self.keep
    }

    /// States that the work was not started: the error that it then returns is not a failure. The claim is released,
    /// whatever [`on_failure`](crate::Once::on_failure) says, and this attempt does not count: the next has its number.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use dlock::{LockClient, OnFailure, OnceReply};
    ///
    /// let client = LockClient::memory();
    /// let import = client.once("import").on_failure(OnFailure::Keep);
    /// let refused = import.run(async |claim| {
    ///     claim.not_started(); // no room on this machine
    ///     Err::<(), _>("disk full")
    /// });
    /// assert!(refused.await.is_err());
    /// let done = import.run(async |_| Ok::<(), &str>(())).await; // on another machine
    /// assert!(matches!(done, Ok(OnceReply::Ran(()))));
    /// # }
    /// ```
    pub fn not_started(&self) {
        self.not_started.store(true, Ordering::Relaxed);
    }

    /// Returns how long it is certain that no other attempt can begin; zero when the claim is lost. The claim is
    /// renewed every third of the lease.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let until = current(&self.deadline);
        until.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(clock::now())
        })
    }

    /// Waits until the claim is lost, for work that is not dropped then, such as a started process: [`Loss::Gone`] when
    /// the store says so, [`Loss::Expired`] when it could not be renewed in time. Cancel safe. After the claim was
    /// settled, this completes when the lease would have ended, or as soon as a renewal that was under way tells that it
    /// was settled, or when the client was shut down: it is for the time before.
    pub fn lost(&self) -> impl Future<Output = Loss> + Send + use<> {
        let (deadline, runtime) = (self.deadline.clone(), self.runtime.clone());
        let client = self.client.clone();
        async move {
            with_timers_of(&runtime, lost(&deadline, client.as_ref())).await;
            match current(&deadline) {
                Some(_) => Loss::Expired,
                None => Loss::Gone,
            }
        }
    }

    /// Returns whether it is certain that no other attempt has begun. Work in a future need not ask: it is dropped when
    /// the claim is lost.
    ///
    /// On PostgreSQL, after the rollback of a transaction of the work that lasted longer than the lease, it is certain only
    /// once the claim was extended again: 50 ms later, or half a lease later for a process that was cut off from the server
    /// at that moment. Do not go on with effects outside of the database before that.
    #[must_use]
    pub fn is_held(&self) -> bool {
        current(&self.deadline).is_some_and(|until| clock::now() < until)
    }
}

/// Copies the deadline, so that the channel is not borrowed for longer.
fn current(deadline: &watch::Receiver<Deadline>) -> Deadline {
    *deadline.borrow()
}

/// Completes when the claim is lost. Each poll checks the clock, since the timer of a suspended machine fires late.
async fn lost(deadline: &watch::Receiver<Deadline>, client: Option<&Weak<Shared>>) {
    let mut told = pin!(told_of_loss(deadline, client));
    poll_fn(|cx| match current(deadline) {
        Some(until) if clock::now() < until => told.as_mut().poll(cx),
        _ => Poll::Ready(()),
    })
    .await;
}

async fn told_of_loss(deadline: &watch::Receiver<Deadline>, client: Option<&Weak<Shared>>) {
    let mut deadline = deadline.clone();
    while let Some(until) = current(&deadline) {
        if until <= clock::now() {
            return;
        }
        tokio::select! {
            biased;
            renewed = deadline.changed() => if renewed.is_err() {
                // It was settled, or the runtime that renewed it has ended: that has no timers any more, and its claims end soon.
                let ended = |client: &Weak<Shared>| {
                    client
                        .upgrade()
                        .is_none_or(|client| may_have_no_runtime(&client))
                };
                return sleep_unless(|| client.is_some_and(ended), until).await;
            },
            () = clock::sleep_until(until) => {}
        }
    }
}

/// Sleeps until then, unless there are no timers any more: each poll asks first.
pub(super) async fn sleep_unless(has_no_timers: impl Fn() -> bool, until: Instant) {
    let mut over = pin!(clock::sleep_until(until));
    poll_fn(|cx| match has_no_timers() {
        true => Poll::Ready(()),
        false => over.as_mut().poll(cx),
    })
    .await;
}

/// Whether the runtime of the client may have ended, by which it renews: that has no timers then.
pub(super) fn may_have_no_runtime(client: &Shared) -> bool {
    client.has_lost_its_runtime() || client.finished.is_cancelled()
}

/// When a claim sent at `sent` ends, by this process's clock.
fn held_until(sent: Instant, lease: Duration) -> Instant {
    sent + surely_lasts(lease)
}

/// Renews a claim every third of its lease, and more often when that fails.
async fn renew(target: Arc<Target>, token: ClaimToken, mut sent: Instant, deadline: watch::Sender<Deadline>) {
    let lease = target.lease;
    let mut next = sent + lease / 3;
    let tell = |until: Deadline| waking(|| _ = deadline.send_replace(until));
    loop {
        clock::sleep_until(next).await;
        if broken!(OnceNotRenewed) {
            return;
        }
        let asked = clock::now();
        let step = target.records.extend(&target.record, &token, lease, target.keep);
        match tokio::time::timeout(lease / 3, step).await {
            Ok(Ok(OwnerReply::NotOwner)) => {
                tell(None);
                return;
            }
            Ok(Ok(OwnerReply::Done)) => {
                sent = asked;
                tell(Some(held_until(sent, lease)));
                next = sent + lease / 3;
            }
            Ok(Ok(OwnerReply::Held)) => {
                let now = clock::now();
                let left = (sent + lease).saturating_duration_since(now);
                if may_outlast_lease(left, lease, now - asked) {
                    // The next extension waits for the row for a quarter of the lease at most.
                    tell(Some(held_until(sent, lease).max(now + lease / 2)));
                }
                next = now + pause_while_held(left, lease);
            }
            failed => {
                let error = failed.as_ref().ok().and_then(|step| step.as_ref().err());
                let name = &target.name;
                Event::ClaimNotRenewed { name, error }.emit();
                let left = (sent + lease).saturating_duration_since(clock::now());
                next = clock::now() + pause_after_failed_renewal(left, lease);
            }
        }
    }
}

/// Settles a claim: retries until the store has the outcome, or it is useless. A release is sent now, so that it comes
/// behind the claim.
fn settle(
    target: Arc<Target>,
    token: ClaimToken,
    settlement: Settlement,
) -> impl Future<Output = Settled> + Send + 'static {
    let mut step = send(&target, &token, &settlement);
    let lease_over = clock::now() + target.lease;
    let until = clock::now()
        + match settlement {
            Settlement::Keep(_) => target.keep,
            // What an ended lease leaves behind is an orphan, which nobody takes over.
            Settlement::Release if target.on_orphan == OnOrphan::Leave => target.keep,
            // By then the lease has ended it.
            Settlement::Abandon | Settlement::Release => target.lease,
        };
    async move {
        let mut pause = FIRST_PAUSE;
        let mut turn = None;
        loop {
            let reply = step.await;
            drop(turn);
            let error = match reply {
                Ok(OwnerReply::Done) => return Settled::Done,
                Ok(OwnerReply::NotOwner) => return Settled::NotOwner,
                Ok(OwnerReply::Held) => {
                    StoreError::not_done(Reason::Unreachable, "a transaction of the work has the record")
                }
                Err(error) => error,
            };
            let name = &target.name;
            Event::ClaimNotSettled { name, error: &error }.emit();
            if is_final(&error) || clock::now() + pause > until {
                return Settled::Failed(error);
            }
            sleep(chance::shortened(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            turn = match (&settlement, &target.client) {
                // There may be many of them after a long outage.
                (Settlement::Release, Some(client)) if clock::now() > lease_over => {
                    client.late_releases.acquire().await.ok()
                }
                _ => None,
            };
            step = send(&target, &token, &settlement);
        }
    }
}

fn send(target: &Arc<Target>, token: &ClaimToken, settlement: &Settlement) -> StoreFuture<OwnerReply> {
    let (records, record, token) = (target.records.clone(), target.record.clone(), token.clone());
    match settlement {
        Settlement::Release => Box::pin(records.release(&record, &token)),
        Settlement::Abandon => Box::pin(async move { records.abandon(&record, &token).await }),
        Settlement::Keep(result) => Box::pin(keep(target.clone(), token, result.clone())),
    }
}

/// Stores the result; or, if the store refuses it, as a full store does, only its existence: finished work must not be
/// done again.
async fn keep(target: Arc<Target>, token: ClaimToken, result: Vec<u8>) -> Result<OwnerReply, StoreError> {
    let complete = |result| {
        target
            .records
            .complete(&target.record, &token, result, target.keep)
    };
    let is_mark = result == stored::unavailable();
    let error = match complete(result).await {
        Err(error) if is_refused(&error) && !is_mark => error,
        reply => return reply,
    };
    let name = &target.name;
    Event::ClaimNotSettled { name, error: &error }.emit();
    let marked = complete(stored::unavailable()).await;
    marked.map_err(|of_mark| if is_final(&of_mark) { error } else { of_mark })
}

/// Whether the store decided to refuse it, perhaps only for now.
fn is_refused(error: &StoreError) -> bool {
    error.outcome == Outcome::NotDone && matches!(error.reason, Reason::Refused | Reason::RefusedForNow)
}

/// Whether retrying is useless.
fn is_final(error: &StoreError) -> bool {
    match error.reason {
        Reason::Refused => error.outcome == Outcome::NotDone,
        Reason::KeyTaken(_) | Reason::Closed | Reason::Unsupported => true,
        _ => false,
    }
}

pub(super) async fn sleep(time: Duration) {
    clock::sleep_until(clock::now() + time).await;
}
