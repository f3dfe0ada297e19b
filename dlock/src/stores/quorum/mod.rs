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

mod acquire;
mod answer_times;
mod doctor;
mod last_replies;
mod late_mail;
mod notifications;
mod operations;
mod owed_releases;
mod release;
mod renew;
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

use self::acquire::Entered;
use self::answer_times::AnswerTimes;
use self::last_replies::LastReplies;
use self::late_mail::LateMail;
use self::notifications::MemberNotifications;
use self::owed_releases::OwedReleases;
use crate::LockKey;
use crate::base::broken;
use crate::base::chance::HashMap;
use crate::base::clock;
use crate::base::moment::LONGEST_LEASE;
use crate::store::doctor::Diagnose;
use crate::store::member::QuorumMember;
use crate::store::operations::Operations;
use crate::store::timeout_anywhere;
use crate::store::{
    AcquireReply, AcquireRequest, GrantId, Holder, Kind, Lane, Outcome, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use crate::store::{Capabilities, DoubtSender, Doubts, Notifications};

pub use crate::store::url::DEFAULT_MAX_LEASE;

/// The kinds that a majority can grant.
const KINDS: [Kind; 3] = [Kind::Mutex, Kind::Read, Kind::Write];

/// Extra time for the slower members, when the lock is not available anyway, and for a complete reply.
const SHORT: Duration = Duration::from_millis(5);

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
    last_replies: Mutex<LastReplies>,
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
            last_replies: Mutex::default(),
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

    fn named(&self, at: usize, error: StoreError) -> StoreError {
        StoreError {
            message: format!("{}: {error}", self.members[at].name),
            ..error
        }
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

    /// Returns whether a hold was ended on the members that were asked to: a majority has it, so one of those that reply
    /// does.
    async fn ended(self: Arc<Self>, mut asked: Answers<bool>) -> Result<bool, StoreError> {
        let (ended, trouble) = self.gather(&mut asked, |_, _| true).await;
        let is_ended = ended.contains(&true);
        match trouble {
            // A hold that the other members have goes on.
            Some(mut error) if ended.len() < self.majority() => {
                if is_ended {
                    error.outcome = Outcome::Unknown;
                }
                Err(error)
            }
            _ => Ok(is_ended),
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
            let reply = self.decide(request, asked?, is_asked).await?;
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
        Box::pin(self.ended(asked))
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.notifications.watch(kind, key, grant)
    }

    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        (!self.boards().is_empty()).then_some(self as Arc<dyn Operations>)
    }

    fn explain(&self, kind: Kind, key: &LockKey) -> Option<Arc<str>> {
        self.last_replies.lock().get(kind, key)
    }

    fn doubts(&self) -> Doubts {
        self.doubts.subscribe()
    }

    fn was_unreachable_since(&self, since: Instant) -> bool {
        self.members
            .iter()
            .all(|member| member.store.was_unreachable_since(since))
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
