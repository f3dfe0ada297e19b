//! A lease that many locks share, and its epoch.
//!
//! While a lock is on the lease, it is renewed every third of its time. A renewal of locks requests a round: the
//! session renews the lease and reads its keys, on behalf of all callers that asked before the request was sent. With many
//! locks on the lease, whose renewals come at any time, a round also serves those that ask within a sixth of the lease,
//! if their locks were on the lease when it was sent.
//!
//! The epoch is a key on the lease. Each acquire compares the revision at which it was written; deleting the key makes
//! every late copy of an acquire harmless, without any clock.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{GivenLease, Reason, StoreError};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::client::proto::{
    LeaseGrantRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest, PutRequest, RequestOp, TxnRequest,
    TxnResponse,
};
use crate::client::{Failure, Links, Refusal};

/// How long a round of many locks waits for further requests.
const GATHER: Duration = Duration::from_millis(30);
/// The shortest time between two rounds of many locks, as a part of the lease: locks that are acquired all the time, and
/// renewed soon after, would have one every [`GATHER`].
const APART: u32 = 60;
/// Many renewals share a round within this part of the lease: the third in which each lock is renewed once takes two.
const SHARED: u32 = 6;
/// The number of locks on a lease that are many.
const MANY: usize = 50;
/// The shortest lease that a server with the default election timeout grants.
pub(crate) const SHORTEST: Duration = Duration::from_secs(2);

/// A lease with its epoch.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: i64,
    pub(crate) ttl: Duration,
    epoch_key: Vec<u8>,
    service: String,
    state: Mutex<State>,
    /// Serializes writes of the epoch.
    writing: tokio::sync::Mutex<()>,
    /// How many keys are on the lease.
    members: AtomicUsize,
    is_over: AtomicBool,
    is_retired: AtomicBool,
    asked: watch::Sender<Asked>,
    /// How many of the requests are answered, and the last round.
    done: watch::Sender<(u64, Arc<Round>)>,
}

#[derive(Debug)]
struct State {
    /// The revision at which the epoch was written; `None` if it must be written first.
    epoch: Option<i64>,
    /// When the last successful renewal was sent.
    kept: Moment,
    /// When a lock was last put on the lease or removed from it.
    used: Moment,
    /// When the last of its grants ends, unless it is renewed.
    needed_until: Moment,
}

/// The requests for rounds.
#[derive(Debug, Clone, Copy)]
struct Asked {
    /// How many rounds were requested.
    count: u64,
    /// When the last of the locks for which they were requested was put on the lease.
    placed: Moment,
}

/// The result of a round.
#[derive(Debug)]
pub(crate) struct Round {
    /// When it was sent, and over which connection.
    sent: Moment,
    link: u64,
    pub(crate) found: Result<Found, StoreError>,
}

impl Round {
    fn over() -> Arc<Round> {
        Arc::new(Round {
            sent: Moment::now(),
            link: 0,
            found: Ok(Found::Over),
        })
    }

    /// Whether it found keys over the connection that is still in use: after a new connection holds are confirmed anew.
    fn is_of(&self, link: u64) -> bool {
        link != 0 && self.link == link && matches!(self.found, Ok(Found::Keys(_)))
    }
}

/// The state of the lease.
#[derive(Debug)]
pub(crate) enum Found {
    /// The lease ended, and all of its keys are gone.
    Over,
    /// The lease was renewed, and has these keys.
    Keys(HashSet<Vec<u8>>),
}

impl Session {
    /// Creates a lease and its epoch. After an error nothing was done: an unused lease expires.
    pub(crate) async fn open(
        links: &Links,
        epoch_key: impl FnOnce(i64) -> Vec<u8>,
        service: &str,
        ttl: u64,
        deadline: Instant,
    ) -> Result<Arc<Session>, StoreError> {
        let kept = Moment::now();
        let ttl = i64::try_from(ttl).unwrap_or(i64::MAX);
        let granted = links.call(LeaseGrantRequest { ttl }, deadline).await;
        let granted = granted.map_err(|failure| not_done(failure.error()))?;
        if !granted.error.is_empty() {
            return Err(StoreError::not_done(Reason::Refused, granted.error));
        }
        let ttl = Duration::from_secs(granted.ttl.unsigned_abs());
        let session = Arc::new(Session {
            service: service.to_owned(),
            ..Session::new(granted.id, ttl, epoch_key(granted.id), kept)
        });
        session.epoch(links, deadline).await?;
        Ok(session)
    }

    /// A lease that was granted after `kept`, still without its epoch.
    pub(crate) fn new(id: i64, ttl: Duration, epoch_key: Vec<u8>, kept: Moment) -> Session {
        Session {
            id,
            ttl,
            epoch_key,
            service: String::new(),
            state: Mutex::new(State {
                epoch: None,
                kept,
                used: kept,
                needed_until: kept,
            }),
            writing: tokio::sync::Mutex::default(),
            members: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            is_retired: AtomicBool::new(false),
            asked: watch::Sender::new(Asked {
                count: 0,
                placed: kept,
            }),
            done: watch::Sender::new((0, Round::over())),
        }
    }

    /// Returns the revision of the epoch; writes the epoch first if necessary. After an error nothing was done.
    pub(crate) async fn epoch(&self, links: &Links, deadline: Instant) -> Result<i64, StoreError> {
        if let Some(epoch) = self.state.lock().epoch {
            return Ok(epoch);
        }
        let late = |_| StoreError::not_done(Reason::Unreachable, links.silence());
        let _one = timeout_at(deadline, self.writing.lock()).await.map_err(late)?;
        if let Some(epoch) = self.state.lock().epoch {
            return Ok(epoch);
        }
        let put = PutRequest {
            key: self.epoch_key.clone(),
            value: self.service.clone().into_bytes(),
            lease: self.id,
        };
        match links.call(put, deadline).await {
            Ok(reply) => {
                let revision = reply.header.map_or(0, |header| header.revision);
                self.state.lock().epoch = Some(revision);
                Ok(revision)
            }
            Err(failure) => {
                if failure.is(Refusal::NoLease) {
                    self.end();
                }
                Err(not_done(failure.error()))
            }
        }
    }

    pub(crate) fn epoch_key(&self) -> &[u8] {
        &self.epoch_key
    }

    /// Records that the epoch was deleted or rewritten: the next acquire writes it.
    pub(crate) fn epoch_is_not(&self, epoch: i64) {
        let mut state = self.state.lock();
        if state.epoch == Some(epoch) {
            state.epoch = None;
        }
    }

    /// Deletes the keys of a grant, and makes every copy of the request that may still create them harmless. Returns the
    /// reply to the deletions.
    ///
    /// Only deletes: a server whose space is used up accepts that too.
    pub(crate) async fn undo(
        &self,
        links: &Links,
        deletions: Vec<RequestOp>,
        deadline: Instant,
    ) -> Result<TxnResponse, Failure> {
        // Locked first: an acquire that reads the epoch now would fail, and ask again.
        let _one = timeout_at(deadline, self.writing.lock())
            .await
            .map_err(|_| Failure::Elsewhere(StoreError::not_done(Reason::Unreachable, links.silence())))?;
        self.state.lock().epoch = None;
        let epoch = RequestOp::delete(self.epoch_key.clone());
        let txn = TxnRequest {
            success: deletions.into_iter().chain([epoch]).collect(),
            ..TxnRequest::default()
        };
        links.call(txn, deadline).await
    }

    /// The lease of an operation that was called at this moment.
    pub(crate) fn lease(&self, called: Moment) -> GivenLease {
        let kept = self.state.lock().kept;
        GivenLease::new(self.ttl).elapsed(called.since(kept))
    }

    fn was_kept(&self, sent: Moment) {
        let mut state = self.state.lock();
        state.kept = state.kept.max(sent);
    }

    /// Reserves room for keys.
    pub(crate) fn reserve(&self, keys: usize) {
        self.members.fetch_add(keys, Ordering::Relaxed);
        self.state.lock().used = Moment::now();
    }

    /// Releases room for keys.
    pub(crate) fn leave(&self, keys: usize) {
        self.members.fetch_sub(keys, Ordering::Relaxed);
        self.state.lock().used = Moment::now();
    }

    pub(crate) fn members(&self) -> usize {
        self.members.load(Ordering::Relaxed)
    }

    /// Whether the session has had no locks for longer than its lease.
    pub(crate) fn is_idle(&self) -> bool {
        self.members() == 0 && Moment::now().since(self.state.lock().used) > self.ttl
    }

    /// Records that a grant on the lease ends at this moment, unless it is renewed.
    pub(crate) fn is_needed_until(&self, ends: Moment) {
        let mut state = self.state.lock();
        state.needed_until = state.needed_until.max(ends);
    }

    /// Gives the session no more locks, and ends it with the last of its grants: the server refuses to delete the key of one
    /// that is over, which goes with the lease.
    pub(crate) fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Relaxed)
    }

    /// Whether it is retired, and all of its grants are over.
    fn is_spent(&self) -> bool {
        self.is_retired() && self.state.lock().needed_until <= Moment::now()
    }

    /// Whether the server has ended the lease.
    pub(crate) fn ended(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Records that the server has no such lease. Returns whether that is new.
    pub(crate) fn end(&self) -> bool {
        let is_new = !self.is_over.swap(true, Ordering::Relaxed);
        if is_new {
            self.done.send_replace((u64::MAX, Round::over()));
            // The holders are told now, not at the next keep-alive.
            self.asked.send_modify(|_| {});
        }
        is_new
    }

    /// Waits for a round that is sent after this call, or that is [shared](Self::shared) with it, on behalf of a lock that
    /// was put on the lease at `placed`.
    pub(crate) async fn round(&self, placed: Moment) -> Arc<Round> {
        let mut done = self.done.subscribe();
        let mut number = 0;
        self.asked.send_modify(|asked| {
            asked.count += 1;
            asked.placed = asked.placed.max(placed);
            number = asked.count;
        });
        match done.wait_for(|(answered, _)| *answered >= number).await {
            Ok(done) => done.1.clone(),
            Err(_) => unreachable!("the session has the sender"),
        }
    }

    /// The last round, if it found keys over this connection.
    fn last_round(&self, links: &Links) -> Option<Arc<Round>> {
        let last = self.done.borrow().1.clone();
        last.is_of(links.number()).then_some(last)
    }

    /// The last round, if it also serves locks that were put on the lease up to `placed`.
    fn shared(&self, links: &Links, placed: Moment) -> Option<Arc<Round>> {
        let is_recent = |round: &Arc<Round>| Moment::now().since(round.sent) <= self.ttl / SHARED;
        self.last_round(links)
            .filter(|round| is_recent(round) && round.sent >= placed)
    }

    /// How long the next round of many locks waits for further requests.
    fn gathers(&self, links: &Links) -> Duration {
        // Far less than the step of a renewal may take.
        let apart = (self.ttl / APART).min(links.config.timeout / 4);
        self.last_round(links).map_or(GATHER, |last| {
            apart.saturating_sub(Moment::now().since(last.sent)).max(GATHER)
        })
    }

    /// Answers the requests up to this one, unless the session has ended meanwhile.
    fn answer(&self, upto: u64, round: Arc<Round>) {
        self.done.send_if_modified(|done| {
            let goes_on = done.0 < u64::MAX;
            if goes_on {
                *done = (upto, round);
            }
            goes_on
        });
    }

    /// Renews the lease until it ends or is idle. Calls `ended` when the server has ended it.
    pub(crate) async fn serve(
        self: Arc<Session>,
        links: Arc<Links>,
        leave_idle: impl Fn(&Arc<Session>) -> bool,
        ended: impl Fn(),
    ) {
        let mut asked = self.asked.subscribe();
        let mut pause = self.ttl / 3;
        loop {
            let due = Instant::now() + pause.saturating_sub(Moment::now().since(self.state.lock().kept));
            let is_round = tokio::select! {
                biased;
                _ = asked.changed() => true,
                () = sleep_until(due) => false,
            };
            if self.ended() {
                return ended();
            }
            if !is_round && leave_idle(&self) {
                let deadline = Instant::now() + links.config.timeout;
                // If this fails, the lease expires.
                let _ = links.call(LeaseRevokeRequest { id: self.id }, deadline).await;
                return;
            }
            if !is_round && self.is_spent() {
                // Not revoked: a lock that is just being put on it has what is left of the lease.
                sleep(self.ttl).await;
                self.end();
                return ended();
            }
            let mut upto = 0;
            if is_round {
                if self.members() >= MANY {
                    let Asked { count, placed } = *asked.borrow_and_update();
                    if let Some(last) = self.shared(&links, placed) {
                        self.answer(count, last);
                        continue;
                    }
                    sleep(self.gathers(&links)).await;
                }
                upto = asked.borrow_and_update().count;
            }
            let (sent, link) = (Moment::now(), links.number());
            let kept = self.keep_alive(&links).await;
            pause = match &kept {
                Ok(_) => self.ttl / 3,
                // Due a twelfth of the lease from now, not a third after the last success.
                Err(_) => {
                    sleep(Duration::from_millis(20)).await;
                    Moment::now().since(self.state.lock().kept) + self.ttl / 12
                }
            };
            if self.ended() {
                return ended();
            }
            if is_round {
                let found = match kept {
                    Ok(()) => self.keys(&links).await,
                    Err(error) => Err(error),
                };
                if self.ended() {
                    return ended();
                }
                self.answer(upto, Arc::new(Round { sent, link, found }));
            }
        }
    }

    /// Renews the lease, or records that it has ended.
    pub(crate) async fn keep_alive(&self, links: &Links) -> Result<(), StoreError> {
        let sent = Moment::now();
        let deadline = Instant::now() + links.config.timeout;
        let reply = links.keep_alive(self.id, deadline).await;
        match reply {
            Ok(reply) if reply.ttl > 0 => {
                self.was_kept(sent);
                Ok(())
            }
            Ok(_) => {
                self.end();
                Ok(())
            }
            Err(failure) if failure.is(Refusal::NoLease) => {
                self.end();
                Ok(())
            }
            Err(failure) => Err(failure.error()),
        }
    }

    async fn keys(&self, links: &Links) -> Result<Found, StoreError> {
        let request = LeaseTimeToLiveRequest {
            id: self.id,
            keys: true,
        };
        let deadline = Instant::now() + links.config.timeout;
        match links.call(request, deadline).await {
            Ok(reply) if reply.ttl < 0 => {
                self.end();
                Ok(Found::Over)
            }
            Ok(reply) => Ok(Found::Keys(reply.keys.into_iter().collect())),
            Err(failure) if failure.is(Refusal::NoLease) => {
                self.end();
                Ok(Found::Over)
            }
            Err(failure) => Err(failure.error()),
        }
    }
}

/// Marks the failure of a preparatory request as not done: the operation itself was not sent.
pub(crate) fn not_done(mut error: StoreError) -> StoreError {
    error.outcome = dlock::store::Outcome::NotDone;
    error
}
