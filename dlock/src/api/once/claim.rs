//! The claim under which work is done: asked for, renewed, and settled or given up.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use super::stored;
use crate::LockKey;
use crate::base::{chance, clock};
use crate::engine::grant::safety_margin;
use crate::engine::timing::{FIRST_PAUSE, pause_after_failed_renewal};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::store::records::{ClaimReply, ClaimRequest, ClaimToken, OwnerReply, RecordKey, Records};
use crate::store::{Outcome, Reason, StoreError};

/// Between two attempts to settle a claim.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The record, and how it is used.
pub(super) struct Target {
    pub(super) name: LockKey,
    pub(super) records: Records,
    pub(super) record: RecordKey,
    pub(super) lease: Duration,
    pub(super) keep: Duration,
    pub(super) retry_for: Duration,
    pub(super) runtime: runtime::Handle,
    /// The client, where there is one: it is not shut down before its claims are settled.
    pub(super) client: Option<Arc<Shared>>,
}

impl Target {
    fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        match &self.client {
            Some(client) => client.pending.spawn_on(work, &self.runtime),
            None => self.runtime.spawn(work),
        }
    }

    /// Until the client is shut down.
    pub(super) async fn closing(&self) {
        match &self.client {
            Some(client) => client.closing.cancelled().await,
            None => std::future::pending().await,
        }
    }
}

/// A claim that is asked for. Dropped while it is unknown whether it stands, it is taken back.
pub(super) struct Asking {
    target: Arc<Target>,
    request: ClaimRequest,
    /// Before the claim was sent the last time.
    sent: Instant,
    in_doubt: bool,
}

impl Asking {
    pub(super) fn new(target: Arc<Target>, request: ClaimRequest) -> Asking {
        Asking {
            target,
            request,
            sent: clock::now(),
            in_doubt: false,
        }
    }

    /// Asks once, or again where the store was not reached: the same token gets the same answer.
    pub(super) async fn ask(&mut self) -> Result<ClaimReply, StoreError> {
        let begun = clock::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let was_in_doubt = std::mem::replace(&mut self.in_doubt, true);
            self.sent = clock::now();
            let error = match self.target.records.claim(self.request.clone()).await {
                Ok(reply) => {
                    self.in_doubt = false;
                    return Ok(reply);
                }
                Err(error) => error,
            };
            self.in_doubt = was_in_doubt || error.outcome == Outcome::Unknown;
            let gone_by = clock::now().saturating_duration_since(begun);
            if error.reason != Reason::Unreachable || gone_by + pause > self.target.retry_for {
                return Err(error);
            }
            sleep(jittered(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Takes charge of the claim, which was granted.
    pub(super) fn granted(self, attempt: u32, fence: u64) -> Claim {
        Claim::begin(
            self.target.clone(),
            self.request.token.clone(),
            self.sent,
            attempt,
            fence,
        )
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if self.in_doubt {
            // Nothing was begun under it.
            let (target, token) = (self.target.clone(), self.request.token.clone());
            self.target.spawn(settle(target, token, Settlement::Release));
        }
    }
}

/// What becomes of a claim.
#[derive(Debug)]
pub(super) enum Settlement {
    /// This is stored, for later calls.
    Keep(Vec<u8>),
    /// The next attempt is counted as one more.
    Abandon,
    /// It was as if there had been no claim.
    Release,
}

/// What became of a settlement.
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

/// A claim that was granted. It is renewed until it is settled; dropped unsettled, it is given up.
pub(super) struct Claim {
    target: Arc<Target>,
    token: ClaimToken,
    attempt: u32,
    fence: u64,
    deadline: watch::Receiver<Deadline>,
    renewal: AbortHandle,
    is_settled: bool,
}

impl Claim {
    fn begin(target: Arc<Target>, token: ClaimToken, sent: Instant, attempt: u32, fence: u64) -> Claim {
        let (sender, deadline) = watch::channel(Some(held_until(sent, target.lease)));
        // Not by `spawn`: a client that shuts down waits for those.
        let renewal = target
            .runtime
            .spawn(renew(target.clone(), token.clone(), sent, sender));
        Claim {
            target,
            token,
            attempt,
            fence,
            deadline,
            renewal: renewal.abort_handle(),
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
            deadline: self.deadline.clone(),
        }
    }

    /// Until another attempt may begin.
    pub(super) async fn lost(&self) {
        let mut deadline = self.deadline.clone();
        while let Some(until) = current(&deadline) {
            if until <= clock::now() {
                return;
            }
            tokio::select! {
                biased;
                renewed = deadline.changed() => if renewed.is_err() {
                    // The runtime that renewed it has ended.
                    return clock::sleep_until(until).await;
                },
                () = clock::sleep_until(until) => {}
            }
        }
    }

    /// Settles it, and goes on until that is done, also when nothing waits for the answer.
    pub(super) fn settle(mut self, settlement: Settlement) -> JoinHandle<Settled> {
        self.is_settled = true;
        let (target, token) = (self.target.clone(), self.token.clone());
        let settling = settle(target.clone(), token, settlement);
        target.spawn(async move {
            let renewed_until_then = self;
            let settled = settling.await;
            drop(renewed_until_then);
            settled
        })
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

/// The claim under which work runs: what it may ask for.
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
    deadline: watch::Receiver<Deadline>,
}

impl OnceClaim {
    /// 1 for the first time, one more for each attempt before that ended without a result.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Greater than that of every attempt before. A resource that refuses smaller ones is safe from an attempt that was
    /// stopped for longer than its lease, and goes on.
    #[must_use]
    pub fn fencing_token(&self) -> u64 {
        self.fence
    }

    /// Whether no other attempt can have begun. Work in a future needs not ask: it is dropped when the claim is lost.
    #[must_use]
    pub fn is_held(&self) -> bool {
        current(&self.deadline).is_some_and(|until| clock::now() < until)
    }
}

/// Not borrowed for longer than this.
fn current(deadline: &watch::Receiver<Deadline>) -> Deadline {
    *deadline.borrow()
}

/// By this process's clock, for a claim that was sent then.
fn held_until(sent: Instant, lease: Duration) -> Instant {
    sent + (lease - safety_margin(lease).min(lease))
}

/// Renews a claim every third of its lease, with growing urgency when that fails.
async fn renew(target: Arc<Target>, token: ClaimToken, mut sent: Instant, deadline: watch::Sender<Deadline>) {
    let lease = target.lease;
    let mut next = sent + lease / 3;
    loop {
        clock::sleep_until(next).await;
        let asked = clock::now();
        let step = target.records.extend(&target.record, &token, lease, target.keep);
        match tokio::time::timeout(lease / 3, step).await {
            Ok(Ok(OwnerReply::NotOwner)) => {
                deadline.send_replace(None);
                return;
            }
            Ok(Ok(OwnerReply::Done)) => {
                sent = asked;
                deadline.send_replace(Some(held_until(sent, lease)));
                next = sent + lease / 3;
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

/// Settles a claim: asks again and again until the store has it, or it is of no use any more. A release is sent now, so
/// that it comes behind the claim.
fn settle(
    target: Arc<Target>,
    token: ClaimToken,
    mut settlement: Settlement,
) -> impl Future<Output = Settled> + Send + 'static {
    let mut step = send(&target, &token, &settlement);
    let until = clock::now()
        + match settlement {
            Settlement::Keep(_) => target.keep,
            // By then the lease has ended it.
            Settlement::Abandon | Settlement::Release => target.lease,
        };
    async move {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match step.await {
                Ok(OwnerReply::Done) => return Settled::Done,
                Ok(OwnerReply::NotOwner) => return Settled::NotOwner,
                Err(error) => error,
            };
            let name = &target.name;
            Event::ClaimNotSettled { name, error: &error }.emit();
            match &mut settlement {
                // Work that was done must not be done again: at least that is kept.
                Settlement::Keep(result) if is_refused(&error) && *result != stored::unavailable() => {
                    *result = stored::unavailable();
                }
                _ if is_final(&error) || clock::now() + pause > until => return Settled::Failed(error),
                _ => {}
            }
            sleep(jittered(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            step = send(&target, &token, &settlement);
        }
    }
}

type Step = futures_util::future::BoxFuture<'static, Result<OwnerReply, StoreError>>;

fn send(target: &Target, token: &ClaimToken, settlement: &Settlement) -> Step {
    let (records, record, token) = (target.records.clone(), target.record.clone(), token.clone());
    match settlement {
        Settlement::Release => Box::pin(records.release(&record, &token)),
        Settlement::Abandon => Box::pin(async move { records.abandon(&record, &token).await }),
        Settlement::Keep(result) => {
            let (result, keep) = (result.clone(), target.keep);
            Box::pin(async move { records.complete(&record, &token, result, keep).await })
        }
    }
}

/// The store has decided not to take it.
fn is_refused(error: &StoreError) -> bool {
    error.outcome == Outcome::NotDone && matches!(error.reason, Reason::Refused)
}

/// Asking again changes nothing.
fn is_final(error: &StoreError) -> bool {
    is_refused(error)
        || matches!(
            error.reason,
            Reason::KeyTaken(_) | Reason::Closed | Reason::Unsupported
        )
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + chance::fraction() / 2.0)
}

pub(super) async fn sleep(time: Duration) {
    clock::sleep_until(clock::now() + time).await;
}
