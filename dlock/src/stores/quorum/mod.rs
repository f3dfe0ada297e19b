//! A majority of independent stores, itself a store: known as Redlock, with the rules that its critics missed.
//!
//! A lock is held when more than half of the members granted it, and its lease counts from before the first of them was
//! asked. So it survives the loss of a minority, with all its data: no fail-over is needed, and none can lose a lock.
//! That requires two rules:
//!
//! - **A member that lost its data does not vote** until every lease that it may have forgotten is over: the longest
//!   lease is [`max_lease`](Quorum::max_lease), and a mark stored with the data tells their age. So a cold start waits
//!   that long, once.
//! - **The fencing token takes a second round.** Members count separately; the highest token of a majority is written
//!   to a majority, which confirms at the same time that the grant still exists.
//!
//! Limits: a member that lost its data derives its tokens from its clock alone, so that they may go back if the clocks
//! of the members differ by more than `max_lease`, or if its clock went back. A member whose clock jumps forward by
//! more than the margin ends leases early, as on a single server; a majority of such members at the same time would do
//! harm. Locks are not handed off inside the process, tokens are not reserved, and there are no fair locks, no permits,
//! and no records.

mod answer_times;
mod doctor;
mod late_mail;
mod notifications;
mod operations;
mod owed_releases;
mod sayings;
mod votes;

use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use self::answer_times::AnswerTimes;
use self::late_mail::LateMail;
use self::notifications::MemberNotifications;
use self::owed_releases::OwedReleases;
use self::sayings::Sayings;
use self::votes::{Verdict, Vote, Votes};
use crate::LockKey;
use crate::base::broken;
use crate::base::chance::{self, HashMap};
use crate::base::clock;
use crate::base::moment::LONGEST_LEASE;
use crate::store::doctor::Diagnose;
use crate::store::member::{self, QuorumMember};
use crate::store::operations::Operations;
use crate::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, Lane, Outcome, Reason, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use crate::store::{Capabilities, DoubtSender, Doubts, Notifications};
use crate::store::{sleep_anywhere, timeout_anywhere};

pub use crate::store::url::DEFAULT_MAX_LEASE;

/// The kinds that a majority can grant.
const KINDS: [Kind; 3] = [Kind::Mutex, Kind::Read, Kind::Write];

/// Extra time for the slower members, when the lock is not available anyway, and for a complete reply.
const SHORT: Duration = Duration::from_millis(5);

/// Clients that have split the votes ask again at different moments, at most two round trips apart, of at most this
/// length.
const LONGEST_SPREAD: Duration = Duration::from_millis(250);

/// The pause before the members with another holder are asked again after an acquire: by then a client with only a
/// minority has released it.
const SPLIT: Duration = Duration::from_millis(50);

/// The time over which the clients spread that have repeatedly split the votes. It doubles from the second time on: if
/// one member abstains and another one has a different holder, no client gets a majority for a while, and each released
/// vote wakes the other clients.
fn spread(round_trip: Duration, splits: u32) -> Duration {
    let times = 1 << splits.saturating_sub(1).min(6);
    (2 * round_trip.min(LONGEST_SPREAD) * times).min(2 * LONGEST_SPREAD)
}

/// One of the stores of a quorum, by a name for messages.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) name: Arc<str>,
    pub(crate) store: Arc<dyn QuorumMember>,
}

/// What is known of a grant that is acquired or held.
#[derive(Debug, Clone, Copy)]
struct Held {
    lease: Duration,
    /// The write grant that a read is nested in.
    nested_in: Option<GrantId>,
}

/// A store that consists of several.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use dlock::LockClient;
/// use dlock::store::member::QuorumMember;
/// use dlock::stores::memory::MemoryStore;
/// use dlock::stores::quorum::Quorum;
/// use std::sync::Arc;
///
/// let members = ["a", "b", "c"].map(|name| {
///     let store: Arc<dyn QuorumMember> = Arc::new(MemoryStore::new()); // one per server in a service
///     (name.to_owned(), store)
/// });
/// let quorum = Quorum::new(members).trust_fresh_servers(true); // in tests only
/// let client = LockClient::builder().store(quorum).build().await?;
/// client.lock("report").acquire().await?.release().await?;
/// # Ok(()) }
/// ```
pub struct Quorum {
    members: Vec<Member>,
    max_lease: Duration,
    trust_fresh: bool,
    /// What is acquired or held: members that lost it, or could not be asked, are asked again.
    held: Mutex<HashMap<GrantId, Held>>,
    /// By member.
    owed_releases: Vec<Arc<OwedReleases>>,
    answer_times: Arc<AnswerTimes>,
    /// The members' replies when a lock was not available.
    said: Mutex<Sayings>,
    /// Until when these members abstain, if they are too many for a majority.
    abstention: Mutex<Option<(Instant, Arc<[usize]>)>>,
    notifications: MemberNotifications,
    late_mail: LateMail,
    doubts: DoubtSender,
    runtime: Handle,
}

impl Quorum {
    /// Creates a quorum of these stores, each with a name for messages. At least three, and an odd number: one more
    /// would not survive more failures.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(members: impl IntoIterator<Item = (String, Arc<dyn QuorumMember>)>) -> Quorum {
        let member = |(name, store): (String, Arc<dyn QuorumMember>)| Member {
            name: name.into(),
            store,
        };
        Quorum::of(members.into_iter().map(member).collect(), Handle::current())
    }

    pub(crate) fn of(members: Vec<Member>, runtime: Handle) -> Quorum {
        let doubts = DoubtSender::new();
        for member in &members {
            let (mut of_member, doubts) = (member.store.doubts(), doubts.clone());
            // Ends with the member.
            runtime.spawn(async move {
                while of_member.next_or_end().await.is_some() {
                    doubts.tell(Lane::default());
                }
            });
        }
        Quorum {
            notifications: MemberNotifications::new(members.clone(), runtime.clone()),
            owed_releases: members
                .iter()
                .map(|member| OwedReleases::on(member.store.clone()))
                .collect(),
            answer_times: Arc::new(AnswerTimes::of(members.len())),
            members,
            max_lease: DEFAULT_MAX_LEASE,
            trust_fresh: false,
            held: Mutex::default(),
            said: Mutex::default(),
            abstention: Mutex::default(),
            late_mail: LateMail::default(),
            doubts,
            runtime,
        }
    }

    /// Sets the longest lease that a client may ask for, which is also how long a member that may have lost its data
    /// does not vote; 60 s by default, a year at most. Use the same value for all clients of the quorum.
    #[must_use]
    pub fn max_lease(mut self, max_lease: Duration) -> Quorum {
        self.max_lease = max_lease.min(LONGEST_LEASE);
        self
    }

    /// Lets members vote at once, without proof that they kept their data: for a first installation, and for tests. Not
    /// while anything may be held.
    #[must_use]
    pub fn trust_fresh_servers(mut self, trust: bool) -> Quorum {
        self.trust_fresh = trust;
        self
    }

    fn majority(&self) -> usize {
        votes::majority(self.members.len())
    }

    /// Runs the same operation on all members, queued now; the replies have the index of the member.
    fn ask<T, F>(&self, step: impl Fn(Arc<dyn QuorumMember>) -> F) -> Answers<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        self.ask_those(|_| true, |_, member| step(member))
    }

    /// Runs the same operation on some of the members, and records how long each takes: for what takes one round trip.
    fn ask_timed<T, F>(
        &self,
        is_asked: impl Fn(usize) -> bool,
        step: impl Fn(Arc<dyn QuorumMember>) -> F,
    ) -> Answers<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let begun = clock::now();
        self.ask_those(is_asked, |at, member| {
            let (step, times) = (step(member), self.answer_times.clone());
            async move {
                let answer = step.await;
                let took = clock::now().saturating_duration_since(begun);
                times.record(at, answer.is_ok().then_some(took));
                answer
            }
        })
    }

    fn ask_those<T, F>(
        &self,
        is_asked: impl Fn(usize) -> bool,
        step: impl Fn(usize, Arc<dyn QuorumMember>) -> F,
    ) -> Answers<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let members = self.members.iter().enumerate().filter(|(at, _)| is_asked(*at));
        let answers = members.map(|(at, member)| {
            let step = step(at, member.store.clone());
            let answer: Answer<T> = Box::pin(async move { (at, step.await) });
            answer
        });
        answers.collect()
    }

    /// Returns the next answer to what was asked at that time. One that can be done without is not waited for longer than the
    /// members take: `None` then, and when all have answered.
    async fn next_answer<T>(
        &self,
        asked: &mut Answers<T>,
        begun: Instant,
        can_do_without: bool,
    ) -> Option<(usize, Result<T, StoreError>)> {
        let Some(patience) = self.answer_times.patience().filter(|_| can_do_without) else {
            return asked.next().await;
        };
        let left = patience.saturating_sub(clock::now().saturating_duration_since(begun));
        let next = timeout_anywhere(Instant::now() + left, asked.next()).await;
        next.flatten()
    }

    fn check(&self, request: &AcquireRequest) -> Result<(), StoreError> {
        let refused = |message| Err(StoreError::not_done(Reason::Unsupported, message));
        if !KINDS.contains(&request.kind) {
            return refused(format!(
                "a quorum of servers has no locks of kind {}",
                request.kind
            ));
        }
        if request.kind == Kind::Write && request.waiter.is_some() {
            // Each member would make readers yield separately, and votes would be split by waiter.
            return refused(
                "a quorum of servers has no readers that stand back: leave prefer_writers out".to_owned(),
            );
        }
        if request.lease > self.max_lease {
            let (lease, most) = (request.lease, self.max_lease);
            return refused(format!(
                "a lease of {lease:?} is longer than the quorum's max_lease, which is {most:?}"
            ));
        }
        Ok(())
    }

    async fn count(
        self: Arc<Self>,
        request: AcquireRequest,
        mut asked: Answers<member::Vote>,
        is_asked: impl Fn(usize) -> bool,
    ) -> Result<AcquireReply, StoreError> {
        let mut votes = Votes::new(&self.members);
        let all_asked = asked.len() == self.members.len();
        let not_asked = (0..self.members.len()).filter(|at| !is_asked(*at));
        not_asked.for_each(|at| votes.put(at, Vote::NotAsked));
        let begun = clock::now();
        while !votes.is_decided()
            && let Some((at, answer)) = self.next_answer(&mut asked, begun, votes.are_contested()).await
        {
            votes.put(at, Vote::of(answer));
        }
        if votes.is_decided() && !votes.are_for_it() && !all_asked {
            // The first reply decides it, and each tells when its member votes.
            while let Some((at, answer)) = self.next_answer(&mut asked, begun, true).await {
                votes.put(at, Vote::of(answer));
            }
        } else if votes.is_decided() && !votes.are_for_it() {
            // Waits for replies of members that are no slower than the others, so that all can be notified.
            let took = clock::now().saturating_duration_since(begun);
            let rest = async {
                while let Some((at, answer)) = asked.next().await {
                    votes.put(at, Vote::of(answer));
                }
            };
            let _ = timeout_anywhere(Instant::now() + took + SHORT, rest).await;
        }
        let verdict = votes.verdict();
        if !matches!(verdict, Verdict::Granted { .. }) && !asked.is_empty() {
            // Later answers do not count, and what they grant is released. How long they take is recorded.
            self.runtime
                .spawn(async move { while asked.next().await.is_some() {} });
            asked = Answers::new();
        }
        let token = match verdict {
            Verdict::Granted { token } => token,
            Verdict::Busy { remaining } => {
                let is_split = votes.granted().next().is_some();
                let splits = self.say(&request, votes.told(), is_split);
                // A member that is silent abstains as before, also where only some were asked.
                let stays = !all_asked && votes.in_doubt().next().is_some();
                let abstains_for = self.note_abstention(votes.abstention(), stays);
                let remaining = remaining.map(|left| left.max(abstains_for));
                let round_trip = clock::now().saturating_duration_since(begun);
                self.withdraw(&request, &votes).await;
                if is_split {
                    // The votes are split among several clients, which all ask again when these are released: at
                    // different moments, or they are split again and again.
                    let apart = spread(round_trip, splits).mul_f64(chance::fraction());
                    sleep_anywhere(Instant::now() + apart).await;
                }
                return Ok(AcquireReply::busy(remaining));
            }
            Verdict::Failed(error) => return Err(error),
        };
        if !self.raise(&request, token, &votes).await {
            // The caller releases the grants.
            return Err(StoreError::unknown(
                "a majority had granted the lock and did not confirm its fencing token",
            ));
        }
        self.said.lock().forget(request.kind, &request.key);
        let busy = votes.busy().collect();
        self.ask_the_rest(request, begun, busy, asked);
        Ok(AcquireReply::acquired(token))
    }

    /// Other clients that wanted the lock at the same moment had some of the members. Those are asked again a moment
    /// later: a lock on a bare majority is lost with the next member that fails.
    fn ask_the_rest(
        self: Arc<Self>,
        request: AcquireRequest,
        begun: Instant,
        mut busy: Vec<usize>,
        mut asked: Answers<member::Vote>,
    ) {
        if busy.is_empty() && asked.is_empty() {
            return;
        }
        let this = self.clone();
        self.runtime.spawn(async move {
            let rest = async {
                while let Some((at, answer)) = asked.next().await {
                    if matches!(answer, Ok(member::Vote::Cast(AcquireReply::Busy(_)))) {
                        busy.push(at);
                    }
                }
            };
            let split = begun + SPLIT;
            let left = split.saturating_duration_since(clock::now());
            let _ = tokio::time::timeout(left, rest).await;
            if busy.is_empty() {
                return;
            }
            clock::sleep_until(split).await;
            // No longer than the others have it.
            let left = request
                .lease
                .saturating_sub(clock::now().saturating_duration_since(begun));
            if left.is_zero() {
                return;
            }
            for at in busy {
                this.ask_again(at, request.kind, &request.key, request.grant, left);
            }
        });
    }

    /// Writes the token to a majority that still has the grant.
    async fn raise(&self, request: &AcquireRequest, token: u64, votes: &Votes<'_>) -> bool {
        if broken!(QuorumForgetsTokens) {
            return true;
        }
        let AcquireRequest { kind, grant, .. } = *request;
        let granted = votes.granted().map(|at| {
            let (store, key) = (self.members[at].store.clone(), request.key.clone());
            store.raise_fence(kind, key, grant, token)
        });
        let mut asked: FuturesUnordered<_> = granted.collect();
        let mut confirmed = 0;
        while let Some(answer) = asked.next().await {
            confirmed += usize::from(matches!(answer, Ok(true)));
            if confirmed == self.majority() {
                return true;
            }
        }
        false
    }

    /// Stores the replies about a key, for the error. Returns how many times in a row its votes were split.
    fn say(&self, request: &AcquireRequest, said: String, is_split: bool) -> u32 {
        let of = (request.kind, &request.key);
        let (splits, forgotten) = self.said.lock().put(of, said, is_split, clock::now());
        drop(forgotten);
        splits
    }

    /// Releases what a minority granted, or may have.
    async fn withdraw(&self, request: &AcquireRequest, votes: &Votes<'_>) {
        let (lease, release) = (request.lease, request.undone());
        for at in votes.in_doubt() {
            self.release_later(at, release.clone(), lease);
        }
        let granted = votes.granted().map(|at| {
            let step = self.members[at].store.clone().release(release.clone());
            async move { (at, step.await) }
        });
        let mut asked: FuturesUnordered<_> = granted.collect();
        while let Some((at, answer)) = asked.next().await {
            if matches!(&answer, Err(error) if error.is_outlasted()) {
                self.release_later(at, release.clone(), lease);
            }
        }
    }

    /// A member that could not be asked does not delay the others: it is asked again until the lease is over.
    fn release_later(&self, at: usize, request: ReleaseRequest, lease: Duration) {
        let until = clock::now() + lease;
        // It takes its position in the order of operations now.
        let step = self.members[at].store.clone().release(request.clone());
        let (owed, runtime) = (self.owed_releases[at].clone(), self.runtime.clone());
        self.runtime.spawn(async move {
            if matches!(step.await, Err(error) if error.is_outlasted()) {
                owed.add(request, until, &runtime);
            }
        });
    }

    async fn released(
        self: Arc<Self>,
        request: ReleaseRequest,
        lease: Duration,
        mut asked: Answers<ReleaseReply>,
    ) -> Result<ReleaseReply, StoreError> {
        let begun = clock::now();
        let (mut released, mut told, mut failed) = (0, Some(0), Vec::new());
        let (mut not_held, mut repeats) = (0, false);
        while released < self.majority() {
            let is_lost = not_held >= self.majority();
            let Some((at, answer)) = self.next_answer(&mut asked, begun, is_lost).await else {
                break;
            };
            match answer {
                Ok(ReleaseReply::Released { receivers }) => {
                    released += 1;
                    told = told.max(receivers);
                }
                Ok(ReleaseReply::NotHeld { repeated }) => {
                    not_held += 1;
                    repeats |= repeated;
                }
                Err(error) => failed.push((at, error)),
            }
        }
        let is_released = released >= self.majority();
        if !is_released && released + failed.len() >= self.majority() {
            let said = failed
                .iter()
                .map(|(at, error)| format!("{}: {error}", self.members[*at].name));
            let said: Vec<_> = said.collect();
            // Repeated as long as one of the failures may be transient.
            let first = failed.iter().position(|(_, error)| error.is_outlasted());
            // A release by one member, certain or possible, is part of the outcome.
            let may_be_done = |(_, error): &(usize, StoreError)| error.outcome == Outcome::Unknown;
            let outcome = match released > 0 || failed.iter().any(may_be_done) {
                true => Outcome::Unknown,
                false => Outcome::NotDone,
            };
            let first = failed.swap_remove(first.unwrap_or(0)).1;
            return Err(StoreError {
                outcome,
                message: format!("too few members of the quorum answered: {}", said.join("; ")),
                ..first
            });
        }
        // Each of the others is notified as soon as it can be; one may have alone what a majority does not, from an acquire whose
        // replies were lost.
        let until = begun + lease;
        let this = self.clone();
        let rest = async move {
            while let Some((at, answer)) = asked.next().await {
                failed.extend(answer.err().map(|error| (at, error)));
            }
            failed.retain(|(_, error)| error.is_outlasted());
            for (at, _) in failed {
                this.owed_releases[at].add(request.clone(), until, &this.runtime);
            }
        };
        self.runtime.spawn(rest);
        Ok(match is_released {
            true => ReleaseReply::Released { receivers: told },
            false => ReleaseReply::NotHeld {
                repeated: repeats || released > 0,
            },
        })
    }

    async fn renewed(
        self: Arc<Self>,
        requests: Vec<RenewRequest>,
        mut asked: Answers<Vec<Result<Renewal, StoreError>>>,
    ) -> Result<Vec<Result<Renewal, StoreError>>, StoreError> {
        let majority = self.majority();
        let mut counts = vec![(0, 0); requests.len()];
        // The grants that are missing, by member.
        let mut missing = Vec::new();
        let mut trouble = StoreError::unknown("too few members of the quorum answered");
        let decided =
            |(renewed, gone): &(usize, usize)| *renewed >= majority || *gone > self.members.len() - majority;
        while !counts.iter().all(decided)
            && let Some((at, answer)) = asked.next().await
        {
            let answers = match answer {
                Ok(answers) => answers,
                Err(error) => {
                    trouble = self.named(at, error);
                    continue;
                }
            };
            for (place, answer) in answers.into_iter().take(counts.len()).enumerate() {
                match answer {
                    Ok(Renewal::Renewed) => counts[place].0 += 1,
                    Ok(Renewal::RenewedFor(_) | Renewal::Held) => {
                        let error = StoreError::unknown("it gave another lease than was asked for");
                        trouble = self.named(at, error);
                    }
                    Ok(Renewal::Gone) => {
                        counts[place].1 += 1;
                        missing.push((at, place));
                    }
                    Err(error) => trouble = self.named(at, error),
                }
            }
        }
        let answers = counts.iter().map(|(renewed, gone)| {
            if *renewed >= majority {
                Ok(Renewal::Renewed)
            } else if *gone > self.members.len() - majority {
                Ok(Renewal::Gone)
            } else {
                Err(trouble.clone())
            }
        });
        let answers = answers.collect();
        let this = self.clone();
        self.runtime.spawn(async move {
            while let Some((at, answer)) = asked.next().await {
                let answers = answer.into_iter().flatten().enumerate();
                let gone = answers.filter(|(_, answer)| matches!(answer, Ok(Renewal::Gone)));
                missing.extend(gone.map(|(place, _)| (at, place)));
            }
            for (at, place) in missing {
                // Only what a majority has is held.
                if counts.get(place).is_some_and(|(renewed, _)| *renewed >= majority) {
                    let RenewRequest {
                        kind,
                        key,
                        grant,
                        lease,
                        ..
                    } = &requests[place];
                    this.ask_again(at, *kind, key, *grant, *lease);
                }
            }
        });
        Ok(answers)
    }

    fn named(&self, at: usize, error: StoreError) -> StoreError {
        StoreError {
            message: format!("{}: {error}", self.members[at].name),
            ..error
        }
    }

    /// A member does not have a held grant: it was not there when the lock was acquired, or has lost its data. It is
    /// asked for it again, so that members can be replaced one after the other under a long hold. Queued before the
    /// release, since nothing is requested that is not held.
    fn ask_again(&self, at: usize, kind: Kind, key: &LockKey, grant: GrantId, lease: Duration) {
        let held = self.held.lock();
        let Some(Held { nested_in, .. }) = held.get(&grant) else {
            return;
        };
        let mut ask = AcquireRequest::new(kind, key.clone(), grant, lease);
        // A downgraded lock holds only the read.
        ask.nested_in = nested_in.filter(|write| held.contains_key(write));
        let step = self.members[at].store.clone().vote(ask, self.vote_after());
        drop(held);
        self.runtime.spawn(step);
    }

    /// Returns the members that still abstain or fail, if these are too many for a majority. Only they are asked in
    /// that time: a minority that granted and released the lock would wake all waiters, which would ask again at once.
    fn abstaining(&self) -> Option<Arc<[usize]>> {
        let abstention = self.abstention.lock();
        let (until, members) = abstention.as_ref()?;
        (clock::now() < *until).then(|| members.clone())
    }

    /// Stores for how long which members abstain, if they are too many for a majority; returns for how long they still do.
    /// Without any, what was stored `stays` or is deleted.
    fn note_abstention(&self, found: Option<(Duration, Arc<[usize]>)>, stays: bool) -> Duration {
        let now = clock::now();
        let mut abstention = self.abstention.lock();
        if found.is_some() || !stays {
            *abstention = found.map(|(left, members)| (now + left, members));
        }
        let until = abstention.as_ref().map(|(until, _)| *until);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    fn vote_after(&self) -> Option<Duration> {
        let votes_at_once = self.trust_fresh || broken!(QuorumMemberVotesWithoutData);
        (!votes_at_once).then_some(self.max_lease)
    }

    /// Collects the replies of a majority, until they are `enough` with that many still to come, and those that arrive
    /// shortly after; the others stay in `asked`. Also returns a failure, of unknown outcome if there was one.
    async fn gather<T>(
        &self,
        asked: &mut Answers<T>,
        enough: impl Fn(&[T], usize) -> bool,
    ) -> (Vec<T>, Option<StoreError>) {
        let is_certain = |failure: &StoreError| failure.outcome == Outcome::NotDone;
        let (mut seen, mut trouble) = (Vec::new(), None);
        let majority = votes::majority(asked.len());
        let begun = clock::now();
        while (seen.len() < majority || !enough(&seen, asked.len()))
            && let Some((at, answer)) = asked.next().await
        {
            match answer {
                Ok(answer) => seen.push(answer),
                Err(error) if trouble.as_ref().is_none_or(is_certain) => {
                    trouble = Some(self.named(at, error))
                }
                Err(_) => {}
            }
        }
        let took = clock::now().saturating_duration_since(begun);
        let rest = async {
            while let Some((_, answer)) = asked.next().await {
                seen.extend(answer);
            }
        };
        let _ = timeout_anywhere(Instant::now() + took + SHORT, rest).await;
        (seen, trouble)
    }

    /// Returns the replies of a majority of the members, and of those that are no slower, see [`gather`](Self::gather).
    async fn looks<T>(
        &self,
        mut asked: Answers<T>,
        enough: impl Fn(&[T], usize) -> bool,
    ) -> Result<Vec<T>, StoreError> {
        let (seen, trouble) = self.gather(&mut asked, enough).await;
        match trouble {
            Some(error) if seen.len() < self.majority() => Err(error),
            _ => Ok(seen),
        }
    }

    /// Whether the replies of `left` more members cannot add a holder of a key to those that a majority knows.
    fn is_settled<'h>(&self, seen: impl IntoIterator<Item = &'h Holder>, left: usize) -> bool {
        let mut known: HashMap<(Kind, &str), usize> = HashMap::default();
        for holder in seen {
            *known.entry((holder.kind, &holder.id)).or_default() += 1;
        }
        let majority = self.majority();
        let is_exclusive = known
            .iter()
            .any(|((kind, _), count)| kind.is_exclusive() && *count >= majority);
        let is_open = |count: &usize| *count < majority && *count + left >= majority;
        is_exclusive || !known.values().any(is_open)
    }

    /// Returns the holders that a majority knows, each with the lease that a majority gives it at least.
    fn agreed(&self, seen: impl IntoIterator<Item = Holder>) -> Vec<Holder> {
        let mut known: HashMap<(Kind, String), Vec<Holder>> = HashMap::default();
        for holder in seen {
            known
                .entry((holder.kind, holder.id.clone()))
                .or_default()
                .push(holder);
        }
        let mut agreed = Vec::new();
        for mut holders in known.into_values() {
            if holders.len() >= self.majority() {
                // A lease without end is the longest.
                holders.sort_by_key(|holder| std::cmp::Reverse(holder.remaining.unwrap_or(Duration::MAX)));
                agreed.push(holders.swap_remove(self.majority() - 1));
            }
        }
        agreed.sort_by(|a, b| a.id.cmp(&b.id));
        agreed
    }
}

/// A grant that is being acquired; dropped, it is not held.
struct Entered {
    quorum: Arc<Quorum>,
    grant: Option<GrantId>,
}

impl Entered {
    fn new(quorum: Arc<Quorum>, request: &AcquireRequest) -> Entered {
        let AcquireRequest {
            grant,
            lease,
            nested_in,
            ..
        } = *request;
        quorum.held.lock().insert(grant, Held { lease, nested_in });
        Entered {
            quorum,
            grant: Some(grant),
        }
    }

    fn stays(mut self) {
        self.grant = None;
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(grant) = self.grant {
            self.quorum.held.lock().remove(&grant);
        }
    }
}

fn by_key<K: Eq + Hash, H>(holders: impl Iterator<Item = (K, H)>) -> HashMap<K, Vec<H>> {
    let mut by_key: HashMap<K, Vec<H>> = HashMap::default();
    for (key, holder) in holders {
        by_key.entry(key).or_default().push(holder);
    }
    by_key
}

type Answer<T> = std::pin::Pin<Box<dyn Future<Output = (usize, Result<T, StoreError>)> + Send>>;
type Answers<T> = FuturesUnordered<Answer<T>>;

impl Store for Quorum {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(KINDS)
            .name("a quorum of servers")
            .longest_lease(self.max_lease)
            .min_hold(true)
            .notifications(Notifications::Certain)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let mut ask = request.clone();
        ask.tokens = 1;
        let vote_after = self.vote_after();
        let abstaining = self.abstaining();
        // A release that comes in the meantime ends it.
        let entered = Entered::new(self.clone(), &request);
        let is_asked = move |at: usize| abstaining.as_ref().is_none_or(|those| those.contains(&at));
        let asked = self
            .check(&request)
            .map(|()| self.ask_timed(&is_asked, |member| member.vote(ask.clone(), vote_after)));
        Box::pin(async move {
            let reply = self.count(request, asked?, is_asked).await?;
            if matches!(reply, AcquireReply::Acquired(_)) {
                entered.stays();
            }
            Ok(reply)
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        // An acquire that was given up may not be over yet.
        let held = self.held.lock().remove(&request.grant);
        let lease = held.map_or(self.max_lease, |held| held.lease);
        let asked = self.ask_timed(|_| true, |member| member.release(request.clone()));
        Box::pin(self.released(request, lease, asked))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let mut held = self.held.lock();
        for RenewRequest { grant, lease, .. } in &requests {
            if let Some(held) = held.get_mut(grant) {
                held.lease = held.lease.max(*lease);
            }
        }
        drop(held);
        let asked = self.ask(|member| member.renew(requests.clone()));
        Box::pin(self.renewed(requests, asked))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let asked = self.ask(|member| member.inspect(key.clone()));
        Box::pin(async move {
            let enough = |seen: &[Vec<Holder>], left| self.is_settled(seen.iter().flatten(), left);
            let seen = self.looks(asked, enough).await?;
            Ok(self.agreed(seen.into_iter().flatten()))
        })
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(async move {
            let asked = self.ask(|member| member.list(prefix.clone()));
            let enough = |seen: &[Vec<(LockKey, Holder)>], left| {
                let holders = seen.iter().flatten().map(|(key, holder)| (key, holder));
                by_key(holders)
                    .into_values()
                    .all(|holders| self.is_settled(holders, left))
            };
            let seen = self.looks(asked, enough).await?;
            let agreed = by_key(seen.into_iter().flatten()).into_iter();
            let agreed = agreed.flat_map(|(key, holders)| {
                let holders = self.agreed(holders);
                holders.into_iter().map(move |holder| (key.clone(), holder))
            });
            Ok(agreed.collect())
        })
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let asked = self.ask(|member| member.force_release(key.clone()));
        // A majority has the holder, so one of those that reply does.
        Box::pin(async move { Ok(self.looks(asked, |_, _| true).await?.contains(&true)) })
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.notifications.watch(kind, key, grant)
    }

    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        (!self.boards().is_empty()).then_some(self as Arc<dyn Operations>)
    }

    fn explain(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        self.said.lock().get(kind, key)
    }

    fn doubts(&self) -> Doubts {
        self.doubts.subscribe()
    }

    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        Some(self)
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.members.iter().map(|member| &member.name);
        f.debug_struct("Quorum")
            .field("members", &names.collect::<Vec<_>>())
            .field("max_lease", &self.max_lease)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, dlock_sim))]
mod tests {
    use super::*;

    #[test]
    fn clients_that_split_the_votes_again_and_again_spread_over_more_and_more_time() {
        let ms = Duration::from_millis;
        for (round_trip, splits, over) in [
            (ms(1), 1, ms(2)),
            (ms(1), 2, ms(4)),
            (ms(1), 5, ms(32)),
            (ms(1), 1000, ms(128)),
            (ms(50), 5, ms(500)),
            (ms(1000), 1, ms(500)),
        ] {
            assert_eq!(spread(round_trip, splits), over, "{round_trip:?} {splits}");
        }
    }
    use crate::base::sim::Process;
    use crate::stores::memory::MemoryStore;

    /// After a suspend the clock of leases is ahead of that of tokio's timers.
    #[tokio::test(start_paused = true)]
    async fn members_are_asked_again_soon_on_a_machine_that_was_suspended() {
        let process = Process::new(1, Instant::now().into_std());
        let _inside = process.enter();
        process.set_suspended(Duration::from_secs(8 * 60 * 60));
        let stores: [MemoryStore; 3] = std::array::from_fn(|_| MemoryStore::new());
        let member = |store: &MemoryStore| {
            let store: Arc<dyn QuorumMember> = Arc::new(store.clone());
            ("member".to_owned(), store)
        };
        let members = stores.iter().map(member);
        let quorum = Arc::new(Quorum::new(members).trust_fresh_servers(true));
        let (key, lease) = (LockKey::from("k"), Duration::from_secs(10));
        let [ours, other] = [1, 2].map(|client| GrantId::from_parts(client, 1));
        let of_third = Arc::new(stores[2].clone());
        let request = AcquireRequest::new(Kind::Mutex, key.clone(), other, lease);
        Store::acquire(of_third.clone(), request).await.unwrap();
        let request = AcquireRequest::new(Kind::Mutex, key.clone(), ours, lease);
        Store::acquire(quorum, request).await.unwrap();
        let release = ReleaseRequest::new(Kind::Mutex, key.clone(), other);
        Store::release(of_third, release).await.unwrap();
        tokio::time::sleep(2 * SPLIT).await;
        assert_eq!(stores[2].grants_of(&key)[0].grant, ours);
    }
}
