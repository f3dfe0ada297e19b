//! A majority of stores in memory, by a paused clock: members that are away, that hang, whose answers are lost, that
//! lost their data; votes that are split; tokens that members count apart.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use dlock::operations::{Intervention, LossReason};
use dlock::store::Kind;
use dlock::store::doctor::Verdict;
use dlock::store::member::{QuorumMember, Vote};
use dlock::store::operations::{Entry, EntryName, Operations};
use dlock::store::{
    AcquireReply, AcquireRequest, Capabilities, GivenLease, GrantId, Holder, Outcome, Reason, ReleaseReply,
    ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;
use dlock::stores::quorum::Quorum;
use dlock::{Error, HoldState, LockClient, LockKey, LockKind, Loss};
use dlock_tests::paused;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

const SEC: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const MAX_LEASE: Duration = Duration::from_secs(60);

/// What is the matter with a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Is {
    Fine,
    /// Nothing arrives.
    Down,
    /// Everything is done, and no answer comes back.
    Mute,
    /// Everything is done, and the answer takes half a second.
    Slow,
    /// Nothing is done, and nothing is answered for a second.
    Hanging,
    /// Everything is done, with a lease of a second.
    Brief,
    /// Nothing is done: the user has no permission.
    Refusing,
    /// The same is said, and something may have been done.
    RefusingInDoubt,
    /// Nothing is done, and each step panics.
    Panicking,
}

#[derive(Debug, Clone)]
struct Member {
    memory: MemoryStore,
    is: Arc<AtomicU8>,
    /// How often it was asked for anything.
    asked: Arc<AtomicU32>,
}

impl Member {
    fn set(&self, is: Is) {
        self.is.store(is as u8, Ordering::SeqCst);
    }

    fn is(&self, is: Is) -> bool {
        self.is.load(Ordering::SeqCst) == is as u8
    }

    fn restarts_empty(&self) {
        self.memory.clear();
    }

    fn play<S, T, F>(&self, step: S) -> impl Future<Output = Result<T, StoreError>> + Send + use<S, T, F>
    where
        S: FnOnce(Arc<MemoryStore>) -> F,
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let (down, mute, hanging) = (self.is(Is::Down), self.is(Is::Mute), self.is(Is::Hanging));
        let (slow, panicking) = (self.is(Is::Slow), self.is(Is::Panicking));
        let in_doubt = self.is(Is::RefusingInDoubt);
        let refusing = in_doubt || self.is(Is::Refusing);
        let step =
            (!down && !hanging && !refusing && !panicking).then(|| step(Arc::new(self.memory.clone())));
        async move {
            assert!(!panicking, "the store panics");
            if down {
                return Err(StoreError::not_done(Reason::Unreachable, "no server is there"));
            }
            // A round trip.
            sleep(if slow { SEC / 2 } else { MS }).await;
            if refusing {
                let mut refusal = StoreError::not_done(Reason::Refused, "no permission");
                if in_doubt {
                    refusal.outcome = Outcome::Unknown;
                }
                return Err(refusal);
            }
            match step {
                Some(step) if !mute => step.await,
                _ => {
                    sleep(SEC).await;
                    Err(StoreError::unknown("no answer within 1s"))
                }
            }
        }
    }
}

impl Store for Member {
    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        Box::pin(self.play(|memory| memory.acquire(request)))
    }
    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        Box::pin(self.play(|memory| memory.release(request)))
    }
    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        let is_brief = self.is(Is::Brief);
        let renewals = self.play(|memory| memory.renew(requests));
        Box::pin(async move {
            let mut renewals = renewals.await?;
            if is_brief {
                renewals.fill_with(|| Ok(Renewal::RenewedFor(GivenLease::new(SEC))));
            }
            Ok(renewals)
        })
    }
    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        Box::pin(self.play(|memory| memory.inspect(key)))
    }
    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(self.play(|memory| memory.list(prefix)))
    }
    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        Box::pin(self.play(|memory| memory.force_release(key)))
    }
    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        Store::watch(Arc::new(self.memory.clone()), kind, key, grant)
    }
    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        Some(self)
    }
}

impl Operations for Member {
    fn put(self: Arc<Self>, name: EntryName, value: Vec<u8>, ttl: Duration, tell: bool) -> StoreFuture<()> {
        Box::pin(self.play(move |memory| memory.put(name, value, ttl, tell)))
    }
    fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
        Box::pin(self.play(|memory| memory.get(name)))
    }
    fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
        Box::pin(self.play(|memory| memory.remove(name)))
    }
    fn post(
        self: Arc<Self>,
        name: EntryName,
        id: String,
        message: Vec<u8>,
        ttl: Duration,
    ) -> StoreFuture<u64> {
        Box::pin(self.play(move |memory| memory.post(name, id, message, ttl)))
    }
    fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
        Box::pin(self.play(|memory| memory.mail(name)))
    }
    fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
        Box::pin(self.play(|memory| memory.clients()))
    }
    fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
        Operations::watch(Arc::new(self.memory.clone()), name)
    }
    fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
        Box::pin(self.play(|memory| memory.audit(fields)))
    }
    fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
        Box::pin(self.play(|memory| memory.end(key, holder)))
    }
}

impl QuorumMember for Member {
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote> {
        let is_brief = self.is(Is::Brief);
        let vote = self.play(move |memory| memory.vote(request, vote_after));
        Box::pin(async move {
            let mut vote = vote.await?;
            if let Vote::Cast(AcquireReply::Acquired(granted)) = &mut vote {
                granted.lease = is_brief.then_some(GivenLease::new(SEC));
            }
            Ok(vote)
        })
    }
    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool> {
        Box::pin(self.play(move |memory| memory.raise_fence(kind, key, grant, at_least)))
    }
}

/// So many members, each up for long enough to vote.
async fn members(count: usize) -> Vec<Member> {
    let member = |_| Member {
        memory: MemoryStore::new(),
        is: Arc::default(),
        asked: Arc::default(),
    };
    let members: Vec<_> = (0..count).map(member).collect();
    let first = client(&members).await;
    assert!(first.lock("first").try_acquire().await.unwrap_err().is_busy());
    sleep(MAX_LEASE).await;
    members
}

fn quorum(members: &[Member]) -> Quorum {
    let named = members.iter().zip('a'..).map(|(member, name)| {
        (
            name.to_string(),
            Arc::new(member.clone()) as Arc<dyn QuorumMember>,
        )
    });
    Quorum::new(named)
}

async fn client(members: &[Member]) -> LockClient {
    let builder = LockClient::builder().store(quorum(members));
    builder.build().await.unwrap()
}

/// Another client takes "k" on one member; returns its grant, and the member's store.
async fn somebody_has(member: &Member, lease: Duration) -> (GrantId, Arc<MemoryStore>) {
    let (other, store) = (GrantId::from_parts(7, 7), Arc::new(member.memory.clone()));
    let ask = AcquireRequest::new(Kind::Mutex, LockKey::from("k"), other, lease);
    store.clone().acquire(ask).await.unwrap();
    (other, store)
}

/// Nothing is held anywhere, and there are no subscribers.
async fn assert_clean(members: &[Member]) {
    sleep(5 * SEC).await;
    for (at, member) in members.iter().enumerate() {
        assert_eq!(
            (member.memory.len(), member.memory.watched()),
            (0, 0),
            "member {at}"
        );
    }
}

#[test]
fn a_minority_may_be_away_and_a_majority_is_told_apart() {
    paused(async {
        let m = members(5).await;
        let (a, b) = (client(&m).await, client(&m).await);
        m[0].set(Is::Down);
        m[3].set(Is::Down);
        let guard = a.lock("k").acquire().await.unwrap();
        let error = b.lock("k").try_acquire().await.unwrap_err();
        let Error::NotAcquired {
            votes: Some(votes),
            remaining,
            ..
        } = &error
        else {
            panic!("{error:?}")
        };
        assert!(
            remaining.is_some() && votes.contains("a: no server is there") && votes.contains("b: busy"),
            "{votes}"
        );
        assert!(votes.starts_with("0 of 5 servers granted it"), "{votes}");
        assert!(error.to_string().contains("d: no server is there"), "{error}");
        let told_to_clients = error.problem().detail;
        assert!(
            told_to_clients.starts_with("lock \"k\" is held"),
            "{told_to_clients}"
        );
        assert!(
            !told_to_clients.contains("no server is there"),
            "{told_to_clients}"
        );
        guard.release().await.unwrap();
        b.lock("k").try_acquire().await.unwrap().release().await.unwrap();
        m[1].set(Is::Down);
        let error = b.lock("k").try_acquire().await.unwrap_err();
        assert!(
            matches!(error, Error::OutcomeUnknown { .. } | Error::Unreachable { .. }),
            "{error:?}"
        );
        let told = error.to_string();
        assert!(
            told.contains("2 of 5 servers granted it") && told.contains("b: no server is there"),
            "{told}"
        );
        assert_clean(&m[2..3]).await;
        assert_clean(&m[4..]).await;
    });
}

/// A refusal that leaves open whether the member did it counts as a vote that is unknown.
#[test]
fn refusal_is_told_where_no_member_can_have_done_it() {
    use Is::{Fine, Refusing, RefusingInDoubt};
    for (members_are, is_refused) in [
        ([Refusing, Refusing, Refusing], true),
        ([Fine, Refusing, Refusing], false),
        ([RefusingInDoubt, Refusing, Refusing], false),
    ] {
        paused(async {
            let m = members(3).await;
            let a = client(&m).await;
            let are = || m.iter().zip(members_are).for_each(|(member, is)| member.set(is));
            are();
            let acquired = a.lock("k").acquire().await.map(drop).unwrap_err();
            m.iter().for_each(|member| member.set(Fine));
            sleep(SEC).await;
            let guard = a.lock("k").acquire().await.unwrap();
            are();
            let released = guard.release().await.unwrap_err();
            for error in [acquired, released] {
                let told = matches!(error, Error::Refused { .. });
                assert_eq!(told, is_refused, "{members_are:?}: {error:?}");
                let unknown = matches!(error, Error::OutcomeUnknown { .. });
                assert_eq!(unknown, !is_refused, "{members_are:?}: {error:?}");
            }
        });
    }
}

#[test]
fn hanging_or_mute_member_delays_no_caller() {
    for state in [Is::Hanging, Is::Mute] {
        paused(async {
            let m = members(3).await;
            let a = client(&m).await;
            m[1].set(state);
            let begun = Instant::now();
            let guard = a.lock("k").acquire().await.unwrap();
            assert_eq!(guard.state(), HoldState::Held);
            guard.release().await.unwrap();
            assert!(begun.elapsed() < 100 * MS, "{state:?}: {:?}", begun.elapsed());
            m[1].set(Is::Fine);
            assert_clean(&m).await;
        });
    }
}

/// It hangs, or lacks an answer that could decide it, and the others are known to be quick.
#[test]
fn hanging_or_mute_member_delays_no_caller_whose_votes_are_split_or_whose_lock_is_lost() {
    for state in [Is::Hanging, Is::Mute] {
        paused(async {
            let m = members(3).await;
            let a = client(&m).await;
            let guard = a.lock("lost").acquire().await.unwrap();
            a.lock("k").acquire().await.unwrap().release().await.unwrap();
            sleep(SEC).await;
            m[2].set(state);
            let (_, store) = somebody_has(&m[1], 30 * SEC).await;
            let begun = Instant::now();
            let busy = a.lock("k").try_acquire().await.unwrap_err();
            assert!(busy.is_busy(), "{busy:?}");
            store.force_release(LockKey::from("k")).await.unwrap();
            a.lock("k").acquire().await.unwrap().release().await.unwrap();
            assert!(begun.elapsed() < 100 * MS, "{state:?}: {:?}", begun.elapsed());
            m[..2].iter().for_each(Member::restarts_empty);
            let begun = Instant::now();
            let lost = guard.release().await.unwrap_err();
            assert!(matches!(lost, Error::Lost { .. }), "{lost:?}");
            assert!(begun.elapsed() < 100 * MS, "{state:?}: {:?}", begun.elapsed());
            m[2].set(Is::Fine);
            assert_clean(&m).await;
        });
    }
}

/// A single member that still had it does not make it a lock that was held to its end.
#[test]
fn release_of_a_lock_that_a_majority_no_longer_had_is_a_loss() {
    for restart in [false, true] {
        paused(async {
            let m = members(3).await;
            let (a, b) = (client(&m).await, client(&m).await);
            let guard = a.lock("k").acquire().await.unwrap();
            sleep(SEC).await;
            for member in &m[..2] {
                if restart {
                    member.restarts_empty();
                } else {
                    let store = Arc::new(member.memory.clone());
                    assert!(store.force_release(LockKey::from("k")).await.unwrap());
                }
            }
            let other = b.lock("k").try_acquire().await;
            assert_eq!(other.is_ok(), !restart, "{other:?}");
            let error = guard.release().await.unwrap_err();
            assert!(error.is_lost(), "restart {restart}: {error:?}");
            drop(other);
            sleep(60 * SEC).await;
            assert_clean(&m).await;
        });
    }
}

/// What keeps the clients apart that split the votes is a pause before the next request, not a part of the reply.
#[test]
fn caller_whose_votes_are_split_again_and_again_learns_at_once_that_the_lock_is_busy() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        a.lock("k").acquire().await.unwrap().release().await.unwrap();
        somebody_has(&m[1], 60 * SEC).await;
        somebody_has(&m[2], 60 * SEC).await;
        for _ in 0..10 {
            let begun = Instant::now();
            let error = a.lock("k").try_acquire().await.unwrap_err();
            assert!(error.is_busy(), "{error:?}");
            assert!(begun.elapsed() < 20 * MS, "{:?}", begun.elapsed());
        }
        for wait in [20 * MS, 50 * MS, 300 * MS, SEC] {
            let error = a.lock("k").wait(wait).acquire().await.unwrap_err();
            assert!(error.is_busy(), "{wait:?}: {error:?}");
            let keys = ["k", "other"];
            let error = a.multi(keys).wait(wait).acquire().await.unwrap_err();
            assert!(error.is_busy(), "{wait:?}: {error:?}");
        }
    });
}

/// The slower of two that decide it is waited for, however long it takes.
#[test]
fn member_that_is_slow_has_its_vote_where_another_has_somebody_else() {
    paused(async {
        let m = members(3).await;
        m[2].set(Is::Slow);
        somebody_has(&m[1], 30 * SEC).await;
        for _ in 0..2 {
            let a = client(&m).await;
            for _ in 0..3 {
                a.lock("k").try_acquire().await.unwrap().release().await.unwrap();
                sleep(SEC).await;
            }
        }
    });
}

/// Only its late answers to requests that were decided without it tell that.
#[test]
fn member_that_comes_back_slow_has_its_vote_soon() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        a.lock("k").acquire().await.unwrap().release().await.unwrap();
        let (other, store) = somebody_has(&m[0], 60 * SEC).await;
        somebody_has(&m[1], 60 * SEC).await;
        for is in [Is::Down, Is::Slow] {
            m[2].set(is);
            assert!(a.lock("k").try_acquire().await.unwrap_err().is_busy(), "{is:?}");
            sleep(SEC).await;
        }
        let release = ReleaseRequest::new(Kind::Mutex, LockKey::from("k"), other);
        store.release(release).await.unwrap();
        a.lock("k").try_acquire().await.unwrap().release().await.unwrap();
    });
}

#[test]
fn member_that_is_away_for_long_is_not_asked_for_every_release_again_and_again() {
    const LOCKS: u32 = 500;
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let locks = (0..LOCKS).map(|n| a.lock(format!("k{n}")));
        let guards: Vec<_> =
            futures_util::future::try_join_all(locks.map(|lock| async move { lock.acquire().await }))
                .await
                .unwrap();
        sleep(SEC).await;
        m[2].set(Is::Down);
        let before = m[2].asked.load(Ordering::SeqCst);
        for guard in guards {
            guard.release().await.unwrap();
        }
        sleep(15 * SEC).await;
        let asked = m[2].asked.load(Ordering::SeqCst) - before;
        assert!((LOCKS..LOCKS + 50).contains(&asked), "{asked}");
        assert_eq!(m[2].memory.len(), LOCKS as usize);
        m[2].set(Is::Fine);
        sleep(2 * SEC).await;
        assert_eq!(m[2].memory.len(), 0);
        // Those that are over are not asked for.
        let guard = a.lock("k").acquire().await.unwrap();
        m[2].set(Is::Down);
        guard.release().await.unwrap();
        sleep(40 * SEC).await;
        let before = m[2].asked.load(Ordering::SeqCst);
        sleep(10 * SEC).await;
        assert_eq!(m[2].asked.load(Ordering::SeqCst), before);
    });
}

#[test]
fn answers_that_are_lost_leave_nothing_behind() {
    paused(async {
        let m = members(3).await;
        let (a, b) = (client(&m).await, client(&m).await);
        m[0].set(Is::Mute);
        m[1].set(Is::Mute);
        assert!(a.lock("k").try_acquire().await.is_err());
        m[0].set(Is::Fine);
        m[1].set(Is::Fine);
        sleep(5 * SEC).await;
        b.lock("k").try_acquire().await.unwrap().release().await.unwrap();
        assert_clean(&m).await;
    });
}

#[test]
fn a_member_that_lost_its_data_does_not_vote_until_every_lease_is_over() {
    paused(async {
        let m = members(3).await;
        let (a, b) = (client(&m).await, client(&m).await);
        // Held on two of three, without renewal.
        m[2].set(Is::Down);
        let guard = a.lock("k").fixed_lease(10 * SEC).acquire().await.unwrap();
        m[2].set(Is::Fine);
        m[1].restarts_empty();
        // A majority does not know of it.
        let error = b.lock("k").try_acquire().await.unwrap_err();
        assert!(error.to_string().contains("b: votes in"), "{error}");
        assert!(guard.is_held());
        let begun = Instant::now();
        let next = b.lock("k").acquire().await.unwrap();
        assert!(begun.elapsed() >= 9 * SEC, "{:?}", begun.elapsed());
        assert!(!guard.is_held());
        assert!(next.fencing_token() > guard.fencing_token());
        assert!(guard.release().await.unwrap_err().is_lost());
        assert!(next.is_held());
        next.release().await.unwrap();
        assert_clean(&m).await;
    });
}

#[test]
fn without_that_rule_two_hold_it_at_a_time() {
    paused(async {
        let m = members(3).await;
        let trusting = async || {
            let quorum = quorum(&m).trust_fresh_servers(true);
            LockClient::builder().store(quorum).build().await.unwrap()
        };
        let (a, b) = (trusting().await, trusting().await);
        m[2].set(Is::Down);
        let guard = a.lock("k").fixed_lease(50 * SEC).acquire().await.unwrap();
        m[2].set(Is::Fine);
        m[1].restarts_empty();
        let next = b.lock("k").try_acquire().await.unwrap();
        assert!(guard.is_held() && next.is_held());
        // What still protects.
        assert!(next.fencing_token() > guard.fencing_token());
    });
}

#[test]
fn what_a_bare_majority_granted_is_soon_on_every_member() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        // Another client has one member, and releases it when the others have decided.
        let (other, of_other) = somebody_has(&m[2], SEC).await;
        let guard = a.lock("k").acquire().await.unwrap();
        let fixed = a.lock("j").fixed_lease(SEC).acquire().await.unwrap();
        sleep(10 * MS).await;
        assert!(of_other.clone().force_release(LockKey::from("k")).await.unwrap());
        sleep(200 * MS).await;
        let known = of_other.clone().inspect(LockKey::from("k")).await.unwrap();
        assert_eq!(known.len(), 1, "{known:?}");
        assert_ne!(known[0].id, other.to_string());
        assert!(
            known[0].remaining.is_some_and(|left| left < 30 * SEC),
            "{known:?}"
        );
        // So the loss of one of the majority is none of the lock, long before the first renewal.
        m[0].restarts_empty();
        sleep(60 * SEC).await;
        assert!(guard.is_held());
        guard.release().await.unwrap();
        drop(fixed);
        assert_clean(&m).await;
    });
}

/// Its "busy" comes long after the others have granted the lock.
#[test]
fn lock_is_soon_on_a_slow_member_that_another_client_had() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let (other, of_other) = somebody_has(&m[2], 10 * SEC).await;
        m[2].set(Is::Slow);
        let guard = a.lock("k").fixed_lease(10 * SEC).acquire().await.unwrap();
        sleep(10 * MS).await;
        of_other.clone().force_release(LockKey::from("k")).await.unwrap();
        sleep(2 * SEC).await;
        let known = of_other.inspect(LockKey::from("k")).await.unwrap();
        assert_eq!(known.len(), 1, "{known:?}");
        assert_ne!(known[0].id, other.to_string());
        assert!(
            known[0].remaining.is_some_and(|left| left <= 8 * SEC),
            "{known:?}"
        );
        m[0].restarts_empty();
        guard.release().await.unwrap();
        m[2].set(Is::Fine);
        assert_clean(&m).await;
    });
}

/// Its votes are there, and its token is on the way, when its caller leaves: nobody asks the rest for it any more.
#[test]
fn acquire_that_is_given_up_in_its_second_round_trip_leaves_nothing_behind() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let (_, of_other) = somebody_has(&m[2], 10 * SEC).await;
        m[0].set(Is::Slow);
        m[1].set(Is::Slow);
        timeout(750 * MS, a.lock("k").acquire()).await.unwrap_err();
        assert!(of_other.force_release(LockKey::from("k")).await.unwrap());
        assert_clean(&m).await;
    });
}

/// "No limit" is a year.
#[test]
fn longest_of_all_leases_is_no_mistake() {
    paused(async {
        let m: [MemoryStore; 3] = std::array::from_fn(|_| MemoryStore::new());
        let quorum = || {
            let members = m.iter().map(|store| {
                let store: Arc<dyn QuorumMember> = Arc::new(store.clone());
                ("member".to_owned(), store)
            });
            Quorum::new(members).max_lease(Duration::MAX)
        };
        let client = |quorum| LockClient::builder().store(quorum).build();
        let trusting = client(quorum().trust_fresh_servers(true)).await.unwrap();
        trusting
            .lock("k")
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let careful = client(quorum()).await.unwrap();
        let error = careful.lock("k").try_acquire().await.map(drop).unwrap_err();
        assert!(error.is_busy(), "{error:?}");
    });
}

#[test]
fn a_cold_start_waits_once_and_says_until_when() {
    paused(async {
        let m: Vec<_> = (0..3)
            .map(|_| Member {
                memory: MemoryStore::new(),
                is: Arc::default(),
                asked: Arc::default(),
            })
            .collect();
        let a = client(&m).await;
        let error = a.lock("k").try_acquire().await.unwrap_err();
        let told = error.to_string();
        assert!(
            error.is_busy() && told.contains("a: votes in 60.0s") && told.contains("c: votes in"),
            "{told}"
        );
        let begun = Instant::now();
        a.lock("k").acquire().await.unwrap().release().await.unwrap();
        assert!(begun.elapsed() >= MAX_LEASE - SEC && begun.elapsed() <= MAX_LEASE + SEC);
        let begun = Instant::now();
        a.lock("j").acquire().await.unwrap().release().await.unwrap();
        assert!(begun.elapsed() < SEC);
    });
}

#[test]
fn tokens_grow_whichever_majority_gives_them() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        // One counts far ahead of the others.
        let key = LockKey::from("ahead");
        let grant = GrantId::from_parts(7, 7);
        let ask = AcquireRequest::new(Kind::Mutex, key.clone(), grant, SEC);
        let ahead = Arc::new(m[0].memory.clone());
        ahead.clone().acquire(ask).await.unwrap();
        ahead.raise_fence(Kind::Mutex, key, grant, 1 << 60).await.unwrap();
        let mut last = 0;
        for away in [2, 0, 1, 0, 2, 1, 0] {
            m[away].set(Is::Down);
            let guard = a.lock("k").acquire().await.unwrap();
            assert!(
                guard.fencing_token() > last,
                "without {away}: {} after {last}",
                guard.fencing_token()
            );
            last = guard.fencing_token();
            guard.release().await.unwrap();
            m[away].set(Is::Fine);
            sleep(5 * SEC).await;
        }
        assert!(last > 1 << 60);
        assert_clean(&m).await;
    });
}

#[test]
fn member_that_gives_another_lease_is_not_counted() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let guard = a.lock("k").acquire().await.unwrap();
        m[0].set(Is::Brief);
        sleep(40 * SEC).await;
        assert!(guard.is_held(), "two of three renew it");
        m[1].set(Is::Brief);
        sleep(40 * SEC).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
        drop(guard);
        let error = a.lock("l").try_acquire().await.unwrap_err();
        assert!(error.to_string().contains("another lease"), "{error}");
        m[0].set(Is::Fine);
        a.lock("l").acquire().await.unwrap().release().await.unwrap();
        m[1].set(Is::Fine);
        assert_clean(&m).await;
    });
}

#[test]
fn split_votes_go_round_until_all_clients_had_the_lock() {
    paused(async {
        let m = members(3).await;
        let inside = Arc::new(AtomicU32::new(0));
        let mut tasks = Vec::new();
        let mut clients = Vec::new();
        for _ in 0..7 {
            let client = client(&m).await;
            for _ in 0..3 {
                let (lock, inside) = (client.lock("k"), inside.clone());
                tasks.push(tokio::spawn(async move {
                    for _ in 0..5 {
                        let guard = lock.acquire().await.unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        sleep(3 * MS).await;
                        inside.fetch_sub(1, Ordering::SeqCst);
                        guard.release().await.unwrap();
                    }
                }));
            }
            clients.push(client);
        }
        let begun = Instant::now();
        for task in tasks {
            task.await.unwrap();
        }
        // 105 times three milliseconds, and what the rounds add.
        assert!(begun.elapsed() < 60 * SEC, "{:?}", begun.elapsed());
        assert_clean(&m).await;
    });
}

/// Each of them asks for one lock after the other.
#[test]
fn split_votes_go_round_until_all_clients_had_the_set() {
    paused(async {
        let m = members(3).await;
        let inside = Arc::new(AtomicU32::new(0));
        let mut tasks = Vec::new();
        for _ in 0..7 {
            let (client, inside) = (client(&m).await, inside.clone());
            tasks.push(tokio::spawn(async move {
                for _ in 0..5 {
                    let guard = client.multi(["j", "k"]).acquire().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    sleep(3 * MS).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            }));
        }
        let begun = Instant::now();
        for task in tasks {
            task.await.unwrap();
        }
        assert!(begun.elapsed() < 60 * SEC, "{:?}", begun.elapsed());
        assert_clean(&m).await;
    });
}

#[test]
fn members_are_replaced_one_after_the_other_under_a_lock_that_is_held() {
    paused(async {
        let m = members(3).await;
        let (a, b) = (client(&m).await, client(&m).await);
        let guard = a.lock("k").acquire().await.unwrap();
        for member in &m {
            member.set(Is::Down);
            sleep(15 * SEC).await;
            member.restarts_empty();
            member.set(Is::Fine);
            // Until it votes again, and is asked.
            sleep(MAX_LEASE + 25 * SEC).await;
            assert!(guard.is_held());
            assert!(b.lock("k").try_acquire().await.unwrap_err().is_busy());
        }
        guard.release().await.unwrap();
        assert_clean(&m).await;
    });
}

/// A member that has neither is asked for both, and lets the read in under its own writer.
#[test]
fn members_are_replaced_one_after_the_other_under_a_writer_that_reads() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let lock = a.rw_lock("k");
        let writing = lock.write().acquire().await.unwrap();
        let reading = writing.scope(lock.read().acquire()).await.unwrap();
        for member in &m {
            member.set(Is::Down);
            sleep(15 * SEC).await;
            member.restarts_empty();
            member.set(Is::Fine);
            sleep(MAX_LEASE + 35 * SEC).await;
            let known = Arc::new(member.memory.clone());
            let known = known.inspect(LockKey::from("k")).await.unwrap();
            let kinds: Vec<_> = known.iter().map(|holder| holder.kind).collect();
            assert!(
                kinds.len() == 2 && kinds.contains(&Kind::Read) && kinds.contains(&Kind::Write),
                "{kinds:?}"
            );
            assert!(writing.is_held() && reading.is_held());
        }
        reading.release().await.unwrap();
        writing.release().await.unwrap();
        assert_clean(&m).await;
    });
}

/// Also by the step for its second lock.
#[test]
fn dropped_set_is_undone_before_the_next_attempt() {
    for polls in 1..12 {
        paused(async {
            let m = members(3).await;
            let a = client(&m).await;
            let mut acquire = Box::pin(a.multi(["j", "k"]).acquire());
            let mut is_acquired = false;
            for _ in 0..polls {
                is_acquired |= timeout(MS / 2, &mut acquire).await.is_ok();
                if is_acquired {
                    break;
                }
            }
            drop(acquire);
            for key in ["k", "j"] {
                let acquired = a.lock(key).try_acquire().await;
                assert!(acquired.is_ok(), "{key} after {polls}: {acquired:?}");
            }
            assert_clean(&m).await;
        });
    }
}

/// The answer of each tells for how long.
#[test]
fn slow_member_that_abstains_too_does_not_have_the_others_asked_again_and_again() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        m[..2].iter().for_each(Member::restarts_empty);
        m[1].set(Is::Slow);
        let before = m[0].asked.load(Ordering::SeqCst);
        let error = a.lock("k").wait(20 * SEC).acquire().await.unwrap_err();
        assert!(error.is_busy(), "{error:?}");
        let asked = m[0].asked.load(Ordering::SeqCst) - before;
        assert!(asked < 10, "{asked}");
    });
}

#[test]
fn even_number_of_distant_members_of_which_half_abstain_is_busy() {
    paused(async {
        let m = members(4).await;
        let a = client(&m).await;
        m[..2].iter().for_each(Member::restarts_empty);
        m.iter().for_each(|member| member.set(Is::Slow));
        let error = a.lock("k").wait(10 * SEC).acquire().await.unwrap_err();
        assert!(error.is_busy(), "{error:?}");
        let error = a.lock("k").try_acquire().await.unwrap_err();
        assert!(error.is_busy(), "{error:?}");
        let begun = Instant::now();
        a.lock("k").acquire().await.unwrap().release().await.unwrap();
        assert!(begun.elapsed() < MAX_LEASE, "{:?}", begun.elapsed());
    });
}

#[test]
fn a_majority_that_forgot_it_is_a_loss() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let guard = a.lock("k").acquire().await.unwrap();
        m[0].restarts_empty();
        sleep(11 * SEC).await;
        assert_eq!(guard.state(), HoldState::Held);
        m[1].restarts_empty();
        sleep(11 * SEC).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        assert!(guard.release().await.unwrap_err().is_lost());
        assert_clean(&m).await;
    });
}

#[test]
fn a_majority_that_is_away_costs_the_lock_before_the_lease_ends() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        let begun = Instant::now();
        let guard = a.lock("k").acquire().await.unwrap();
        m[0].set(Is::Hanging);
        m[2].set(Is::Down);
        sleep(12 * SEC).await;
        assert_eq!(guard.state(), HoldState::Suspect);
        guard.lost().await;
        assert!(
            begun.elapsed() < 30 * SEC && begun.elapsed() > 29 * SEC,
            "{:?}",
            begun.elapsed()
        );
        m[0].set(Is::Fine);
        m[2].set(Is::Fine);
        drop(guard);
        assert_clean(&m).await;
    });
}

#[test]
fn what_a_quorum_cannot_do_it_refuses_clearly() {
    paused(async {
        let m = members(3).await;
        let a = client(&m).await;
        for kind in [LockKind::Fair, LockKind::Fenced] {
            let error = a.lock("k").kind(kind).try_acquire().await.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            assert!(error.to_string().contains("quorum"), "{error}");
        }
        let error = a.semaphore("s").permits(3).try_acquire().await.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        let error = a.lock("k").fixed_lease(61 * SEC).try_acquire().await.unwrap_err();
        assert!(error.to_string().contains("max_lease"), "{error}");
        assert!(a.records().is_err());
        assert_clean(&m).await;
    });
}

#[test]
fn looks_see_what_a_majority_sees() {
    paused(async {
        let m = members(3).await;
        let (a, b) = (client(&m).await, client(&m).await);
        assert!(b.inspect("k").await.unwrap().is_none());
        let guard = a.lock("k").acquire().await.unwrap();
        m[0].set(Is::Down);
        let holder = b.inspect("k").await.unwrap().unwrap();
        assert_eq!(holder.holds, 1);
        assert_eq!(b.list("").await.unwrap().len(), 1);
        m[1].set(Is::Down);
        assert!(b.inspect("k").await.is_err());
        m[1].set(Is::Fine);
        assert!(b.force_release("k").await.unwrap());
        assert!(!b.force_release("k").await.unwrap());
        sleep(11 * SEC).await;
        assert_eq!(guard.state(), HoldState::Lost(Loss::Gone));
        drop(guard);
        m[0].set(Is::Fine);
        sleep(60 * SEC).await;
        assert_clean(&m).await;
    });
}

/// A hold of the one member that replied has ended, whatever the others have.
#[test]
fn forced_release_that_only_a_minority_answers_says_whether_it_may_have_ended_the_hold() {
    for is_held in [false, true] {
        paused(async {
            let m = members(3).await;
            let (a, b) = (client(&m).await, client(&m).await);
            let guard = a.lock("k").acquire().await.unwrap();
            sleep(SEC).await;
            if !is_held {
                guard.release().await.unwrap();
                sleep(SEC).await;
            }
            m[1..].iter().for_each(|member| member.set(Is::Down));
            let error = b.force_release("k").await.unwrap_err();
            let is_unknown = matches!(error, Error::OutcomeUnknown { .. });
            assert_eq!(is_unknown, is_held, "{error:?}");
            assert!(is_held || matches!(error, Error::Unreachable { .. }), "{error:?}");
        });
    }
}

#[test]
fn readers_of_a_quorum_stand_back_for_no_writer() {
    paused(async {
        let members = members(3).await;
        let client = client(&members).await;
        let lock = client.rw_lock("k").prefer_writers();
        for side in [lock.write(), lock.read()] {
            let error = side.acquire().await.unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("prefer_writers"), "{error}");
        }
    });
}

/// The mailbox of a client, and the entries of a quorum.
fn mailbox(members: &[Member]) -> (EntryName, Arc<dyn Operations>) {
    let operations = Arc::new(quorum(members)).operations().expect("it keeps entries");
    (EntryName::presence(7), operations)
}

async fn post(operations: &Arc<dyn Operations>, mailbox: &EntryName) {
    let posted = operations.clone();
    let posted = posted.post(mailbox.clone(), "id".to_owned(), b"hello".to_vec(), 30 * SEC);
    posted.await.unwrap();
}

#[test]
fn holder_answers_and_is_asked_to_stop_while_a_member_is_away() {
    for state in [Is::Hanging, Is::Mute, Is::Slow] {
        paused(async {
            let m = members(3).await;
            let builder = LockClient::builder().store(quorum(&m));
            let (a, b) = (builder.control(true).build().await.unwrap(), client(&m).await);
            m[1].set(state);
            let guard = a.lock("k").acquire().await.unwrap();
            let begun = Instant::now();
            let report = b.ask(&a.id()).await.unwrap().expect("the holder answers");
            assert_eq!(report.holds.len(), 1);
            let id = b.inspect("k").await.unwrap().expect("it is held").id;
            let why = || Intervention::new("a deploy").by("anna");
            assert!(b.revoke("k", &id, why()).await.unwrap());
            guard.revoked().await.expect("the holder is asked to stop");
            assert!(b.break_hold("k", &id, why()).await.unwrap());
            assert_eq!(guard.lost().await, Loss::Gone);
            assert!(matches!(guard.why_lost().await, Some(LossReason::Broken(_))));
            assert!(begun.elapsed() < SEC, "{state:?}: {:?}", begun.elapsed());
        });
    }
}

#[test]
fn hold_that_a_majority_may_still_have_is_not_said_to_be_broken() {
    paused(async {
        let m = members(3).await;
        let client = client(&m).await;
        let guard = client.lock("k").lease(10 * SEC).acquire().await.unwrap();
        let id = client.inspect("k").await.unwrap().expect("it is held").id;
        let end = || {
            let operations = Arc::new(quorum(&m)).operations().expect("it keeps entries");
            operations.end("k".into(), id.clone())
        };
        m[1..].iter().for_each(|member| member.set(Is::Down));
        let error = end().await.unwrap_err();
        assert_eq!(error.outcome, Outcome::Unknown, "{error}");
        // The first does not have it any more.
        let error = end().await.unwrap_err();
        assert_eq!(error.outcome, Outcome::NotDone, "{error}");
        m[1].set(Is::Fine);
        assert!(end().await.unwrap());
        m[2].set(Is::Fine);
        assert!(end().await.unwrap());
        assert!(!end().await.unwrap());
        assert_eq!(guard.lost().await, Loss::Gone);
    });
}

#[test]
fn holder_without_control_is_asked_to_stop_while_a_member_is_away() {
    for state in [Is::Hanging, Is::Mute] {
        paused(async {
            let m = members(3).await;
            let builder = LockClient::builder().store(quorum(&m));
            let (a, b) = (builder.presence(true).build().await.unwrap(), client(&m).await);
            m[1].set(state);
            let guard = a.lock("k").acquire().await.unwrap();
            let id = b.inspect("k").await.unwrap().expect("it is held").id;
            let why = Intervention::new("a deploy").by("anna");
            assert!(b.revoke("k", &id, why).await.unwrap());
            let revoked = timeout(10 * SEC, guard.revoked()).await;
            assert!(revoked.is_ok_and(|why| why.is_some()), "{state:?}");
        });
    }
}

#[test]
fn holder_is_found_though_a_member_of_its_majority_is_slow() {
    paused(async {
        let m = members(3).await;
        let (a, b) = (client(&m).await, client(&m).await);
        m[1].set(Is::Down);
        let guard = a.lock("k").fixed_lease(10 * SEC).acquire().await.unwrap();
        m[1].set(Is::Fine);
        m[2].set(Is::Slow);
        assert!(b.inspect("k").await.unwrap().is_some());
        assert_eq!(b.list("").await.unwrap().len(), 1);
        // All that answered are of one mind.
        let begun = Instant::now();
        assert!(b.inspect("other").await.unwrap().is_none());
        assert!(begun.elapsed() < 100 * MS, "{:?}", begun.elapsed());
        drop(guard);
    });
}

#[test]
fn dropped_mail_loses_no_message() {
    paused(async {
        let m = members(3).await;
        let (mailbox, operations) = mailbox(&m);
        let set_others = |is| m[1..].iter().for_each(|member| member.set(is));
        set_others(Is::Down);
        post(&operations, &mailbox).await;
        set_others(Is::Hanging);
        let mail = operations.clone().mail(mailbox.clone());
        assert!(timeout(SEC / 2, mail).await.is_err());
        set_others(Is::Fine);
        sleep(SEC).await;
        let mail = operations.clone().mail(mailbox.clone());
        assert_eq!(mail.await.unwrap(), [b"hello"]);
        assert!(operations.mail(mailbox).await.unwrap().is_empty());
    });
}

#[test]
fn mail_of_a_slow_member_is_announced_and_returned_later_once() {
    paused(async {
        let m = members(3).await;
        let (mailbox, operations) = mailbox(&m);
        let mail = || operations.clone().mail(mailbox.clone());
        let set_others = |is| m[..2].iter().for_each(|member| member.set(is));
        let mut watch = operations.clone().watch(&mailbox);
        set_others(Is::Down);
        post(&operations, &mailbox).await;
        set_others(Is::Fine);
        m[2].set(Is::Slow);
        sleep(SEC).await;
        watch.changed().await;
        let begun = Instant::now();
        assert!(mail().await.unwrap().is_empty());
        assert!(begun.elapsed() < 100 * MS, "{:?}", begun.elapsed());
        timeout(SEC, watch.changed())
            .await
            .expect("its owner is notified");
        assert_eq!(mail().await.unwrap(), [b"hello"]);
        // A message that all members have.
        post(&operations, &mailbox).await;
        assert_eq!(mail().await.unwrap(), [b"hello"]);
        sleep(SEC).await;
        assert!(mail().await.unwrap().is_empty());
    });
}

#[test]
fn client_says_again_what_it_does_after_its_store_has_panicked() {
    paused(async {
        let store = Member {
            memory: MemoryStore::new(),
            is: Arc::default(),
            asked: Arc::default(),
        };
        let builder = LockClient::builder()
            .shared_store(Arc::new(store.clone()))
            .presence(true);
        let client = builder.build().await.unwrap();
        let guard = client.lock("k").acquire().await.unwrap();
        store.set(Is::Panicking);
        sleep(3 * SEC).await;
        store.set(Is::Fine);
        sleep(3 * SEC).await;
        let clients = Operations::clients(Arc::new(store.memory.clone()));
        assert_eq!(clients.await.unwrap().len(), 1);
        guard.release().await.unwrap();
    });
}

#[test]
fn audit_log_needs_a_majority_and_waits_for_no_more() {
    paused(async {
        let m = members(3).await;
        let (_, operations) = mailbox(&m);
        let audit = || {
            operations
                .clone()
                .audit(vec![("what".to_owned(), "break".to_owned())])
        };
        m[0].set(Is::Hanging);
        let begun = Instant::now();
        audit().await.unwrap();
        assert!(begun.elapsed() < 100 * MS, "{:?}", begun.elapsed());
        m[1].set(Is::Refusing);
        let error = audit().await.unwrap_err();
        assert!(error.to_string().contains("no answer"), "{error}");
    });
}

#[test]
fn doctor_warns_of_members_that_vote_without_their_data() {
    paused(async {
        let m = members(3).await;
        for trust in [false, true] {
            let quorum = quorum(&m).trust_fresh_servers(trust);
            let client = LockClient::builder().store(quorum).build().await.unwrap();
            let diagnosis = client.doctor().await.unwrap();
            let mut findings = diagnosis.findings.iter();
            let finding = findings
                .find(|finding| finding.check == "quorum-restarts")
                .unwrap();
            assert_eq!(finding.verdict == Verdict::Bad, trust, "{diagnosis}");
            let restart = &diagnosis.what_if[1];
            assert_eq!(restart.lost.starts_with("none"), !trust, "{diagnosis}");
        }
    });
}
