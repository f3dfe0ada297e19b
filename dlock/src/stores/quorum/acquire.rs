//! An acquire: the votes of the members, the token of those that granted it, and what becomes of the others.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use super::votes::{Verdict, Vote, Votes};
use super::{Answers, Held, KINDS, Quorum, SHORT};
use crate::base::broken;
use crate::base::chance;
use crate::base::clock;
use crate::store::member;
use crate::store::{AcquireReply, AcquireRequest, Busy, GrantId, Kind, Reason, StoreError, timeout_anywhere};

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

impl Quorum {
    pub(super) fn check(&self, request: &AcquireRequest) -> Result<(), StoreError> {
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

    /// Decides by the votes of the members that were asked.
    pub(super) async fn decide(
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
                let splits = self.note_replies(&request, votes.told(), is_split);
                // A member that is silent abstains as before, also where only some were asked.
                let stays = !all_asked && votes.in_doubt().next().is_some();
                let abstains_for = self.note_abstention(votes.abstention(), stays);
                let remaining = remaining.map(|left| left.max(abstains_for));
                let round_trip = clock::now().saturating_duration_since(begun);
                self.withdraw(&request, &votes).await;
                // The votes are split among several clients, which are all notified when these are released: they ask
                // again at different moments, or they are split again and again.
                let pause = match is_split {
                    true => spread(round_trip, splits).mul_f64(chance::fraction()),
                    false => Duration::ZERO,
                };
                return Ok(AcquireReply::Busy(Busy {
                    pause,
                    ..Busy::new(remaining)
                }));
            }
            Verdict::Failed(error) => return Err(error),
        };
        if !self.raise(&request, token, &votes).await {
            // The caller releases the grants.
            return Err(StoreError::unknown(
                "a majority had granted the lock and did not confirm its fencing token",
            ));
        }
        self.last_replies.lock().forget(request.kind, &request.key);
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
            let has_another =
                |answer: &Result<_, _>| matches!(answer, Ok(member::Vote::Cast(AcquireReply::Busy(_))));
            let ask_again = |at| {
                // No longer than the others have it.
                let elapsed = clock::now().saturating_duration_since(begun);
                let left = request.lease.saturating_sub(elapsed);
                if !left.is_zero() {
                    this.ask_again(at, request.kind, &request.key, request.grant, left);
                }
            };
            let split = begun + SPLIT;
            let left = split.saturating_duration_since(clock::now());
            let early = async {
                while let Some((at, answer)) = asked.next().await {
                    busy.extend(has_another(&answer).then_some(at));
                }
            };
            let _ = tokio::time::timeout(left, early).await;
            if !busy.is_empty() {
                clock::sleep_until(split).await;
                busy.into_iter().for_each(ask_again);
            }
            // Slower members: where the lease is fixed, no renewal asks them.
            while let Some((at, answer)) = asked.next().await {
                if has_another(&answer) {
                    ask_again(at);
                }
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
    fn note_replies(&self, request: &AcquireRequest, said: String, is_split: bool) -> u32 {
        let of = (request.kind, &request.key);
        let (splits, forgotten) = self.last_replies.lock().put(of, said, is_split, clock::now());
        drop(forgotten);
        splits
    }

    /// Releases what a minority granted, or may have.
    async fn withdraw(&self, request: &AcquireRequest, votes: &Votes<'_>) {
        let (lease, release) = (request.lease, request.undone());
        for at in votes.in_doubt() {
            self.release_later(at, release.clone(), lease);
        }
        let granted = votes.granted();
        let released = join_all(granted.map(|at| self.release_later(at, release.clone(), lease)));
        // The caller learns that the lock is busy, however long one of them takes.
        match self.answer_times.patience() {
            Some(patience) => drop(timeout_anywhere(Instant::now() + patience, released).await),
            None => drop(released.await),
        }
    }

    /// Returns the members that still abstain or fail, if these are too many for a majority. Only they are asked in
    /// that time: a minority that granted and released the lock would wake all waiters, which would ask again at once.
    pub(super) fn abstaining(&self) -> Option<Arc<[usize]>> {
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
}

/// A grant that is being acquired; dropped, it is not held.
pub(super) struct Entered {
    quorum: Arc<Quorum>,
    grant: Option<GrantId>,
}

impl Entered {
    pub(super) fn new(quorum: Arc<Quorum>, request: &AcquireRequest) -> Entered {
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

    pub(super) fn stays(mut self) {
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

#[cfg(all(test, dlock_sim))]
mod tests {
    use super::*;
    use crate::LockKey;
    use crate::base::sim::Process;
    use crate::store::member::QuorumMember;
    use crate::store::{ReleaseRequest, Store};
    use crate::stores::memory::MemoryStore;

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
