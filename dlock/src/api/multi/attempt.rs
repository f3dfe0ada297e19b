//! One attempt on several keys: all of them are acquired, or none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;

use crate::base::clock;
use crate::runtime::acquire::AcquireCall;
use crate::runtime::attempt::AcquireAttempt;
use crate::runtime::calls::{StoreCall, called, lane_of, reply_of, together_with};
use crate::runtime::client::Handle;
use crate::runtime::hold::Hold;
use crate::store::{
    AcquireAllReply, AcquireReply, Busy, GrantId, Granted, Lane, Reason, ReleaseRequest, RenewRequest,
    Renewal, StoreError, StoreFuture,
};

/// A value for the key at this index among all keys of the call.
pub(super) type At<T> = (usize, T);

/// Keys that can be acquired in one operation.
pub(super) type Group = Vec<At<AcquireCall>>;

/// The guards of all keys.
pub(super) type Guards = Vec<At<Hold>>;

/// The result of an attempt.
pub(super) enum Round<T> {
    /// All of them.
    All(T),
    /// None: this key is busy.
    Busy(At<Busy>),
    /// None: this key cannot be acquired.
    Failed(At<StoreError>),
}

/// Groups keys that one operation can acquire. The groups are in the order of their first keys.
pub(super) fn groups(keys: impl Iterator<Item = At<AcquireCall>>) -> Vec<Group> {
    let mut groups: Vec<(Option<u32>, Group)> = Vec::new();
    for (at, one) in keys {
        let shared = one.handle.shared();
        let (store, most) = (&shared.store, shared.capabilities.largest_set);
        let number = together_with(&**store, one.options.kind, &one.key);
        let group = groups
            .iter_mut()
            .find(|(of, group)| number.is_some() && *of == number && group.len() < most);
        match group {
            Some((_, group)) => group.push((at, one)),
            None => groups.push((number, vec![(at, one)])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// What was requested so far, for a caller that leaves before the reply to the last request.
#[derive(Default)]
pub(super) struct Sent {
    requests: Mutex<Vec<(Arc<Handle>, ReleaseRequest, Duration)>>,
    is_gone: AtomicBool,
}

impl Sent {
    fn add(&self, attempts: &[At<AcquireAttempt>]) {
        let requests = attempts.iter().map(|(_, attempt)| {
            let (handle, request) = (attempt.handle.clone(), &attempt.request);
            (handle, request.undone(), request.lease)
        });
        self.requests.lock().extend(requests);
    }

    /// Queues the releases right behind the requests: the caller is gone.
    pub(super) fn undo(&self) {
        self.is_gone.store(true, Ordering::Relaxed);
        let requests = std::mem::take(&mut *self.requests.lock());
        for (handle, request, lease) in requests {
            drop(handle.undo(request, lease));
        }
    }

    /// Whether the caller is gone: nothing more is requested.
    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Relaxed)
    }
}

/// A step that has its position in the order of steps.
pub(super) struct Step {
    attempts: Vec<At<AcquireAttempt>>,
    answer: Answer,
}

/// The reply of the store to come.
enum Answer {
    One(StoreFuture<AcquireReply>),
    Several(StoreFuture<AcquireAllReply>),
}

impl Answer {
    /// Waits for the reply to these attempts.
    async fn to(self, attempts: &[At<AcquireAttempt>]) -> Result<Round<Vec<Granted>>, StoreError> {
        let Some((_, attempt)) = attempts.first() else {
            return Ok(Round::All(Vec::new()));
        };
        let (by, key) = (attempt.counted_by(), &attempt.request.key);
        let round = match self {
            Answer::One(step) => alone(StoreCall::new(step).reply(by, key).await?),
            Answer::Several(step) => together(StoreCall::new(step).reply(by, key).await?),
        };
        match round {
            // A lock without a grant is not held, whatever the store has done.
            Round::All(grants) if grants.len() != attempts.len() => Err(StoreError::unknown(format!(
                "the store granted {} of {} locks",
                grants.len(),
                attempts.len()
            ))),
            round => Ok(round),
        }
    }
}

impl Step {
    /// `waiter` is the id under which the call waits, and the key that it waits for.
    pub(super) fn new(group: Group, handed: u32, waiter: Option<At<GrantId>>, sent: &Sent) -> Step {
        let attempt = |(at, one): At<AcquireCall>| {
            let waiter = waiter.filter(|(waits_for, _)| *waits_for == at);
            (at, AcquireAttempt::new(&one, handed, waiter.map(|(_, id)| id)))
        };
        let attempts: Vec<_> = group.into_iter().map(attempt).collect();
        sent.add(&attempts);
        let requests = attempts.iter().map(|(_, attempt)| attempt.request.clone());
        let answer = match &attempts[..] {
            [(_, only)] => Answer::One(only.handle.shared().call_acquire(&only.request)),
            [(_, first), ..] => {
                let shared = first.handle.shared();
                Answer::Several(shared.call_acquire_all(&first.request.key, requests.collect()))
            }
            [] => Answer::Several(Box::pin(std::future::ready(Ok(AcquireAllReply::Acquired {
                grants: Vec::new(),
            })))),
        };
        Step { attempts, answer }
    }
}

/// Converts the reply for one key.
fn alone(reply: AcquireReply) -> Round<Vec<Granted>> {
    match reply {
        AcquireReply::Acquired(granted) => Round::All(vec![granted]),
        AcquireReply::Busy(busy) => Round::Busy((0, busy)),
        AcquireReply::TooFewPermits => Round::Busy((0, Busy::default())),
    }
}

/// Converts the reply for several keys.
fn together(reply: AcquireAllReply) -> Round<Vec<Granted>> {
    match reply {
        AcquireAllReply::Acquired { grants } => Round::All(grants),
        AcquireAllReply::Busy { at, remaining } => Round::Busy((at, Busy::new(remaining))),
        AcquireAllReply::Failed { at, error } => Round::Failed((at, error)),
    }
}

/// Acquires one group after the other until a key is busy; granted keys are held from now on.
pub(super) async fn acquire_groups(
    first: Step,
    others: impl Iterator<Item = Group>,
    handed: u32,
    waiter: Option<At<GrantId>>,
    sent: Arc<Sent>,
) -> Result<Round<Guards>, StoreError> {
    let mut others = others.peekable();
    let in_one_step = others.peek().is_none();
    Ok(match take(first, others, handed, waiter, sent.clone()).await? {
        Round::All(mut taken) => {
            if !in_one_step {
                taken.begin_now(taken.is_old()).await?;
            }
            // Released already: a guard would hand off what is not held.
            if sent.is_gone() {
                return Err(caller_has_gone());
            }
            Round::All(taken.guards()?)
        }
        Round::Busy(busy) => Round::Busy(busy),
        Round::Failed(failed) => Round::Failed(failed),
    })
}

/// Acquires one group after the other, until a key is busy.
pub(super) async fn take(
    first: Step,
    mut others: impl Iterator<Item = Group>,
    handed: u32,
    waiter: Option<At<GrantId>>,
    sent: Arc<Sent>,
) -> Result<Round<Taken>, StoreError> {
    let mut taken = Taken::default();
    let mut step = first;
    loop {
        let Step { attempts, answer } = step;
        match answer.to(&attempts).await {
            Ok(Round::All(grants)) => {
                attempts.iter().for_each(|(_, attempt)| attempt.unfinished(true));
                let granted = attempts.into_iter().zip(grants);
                taken
                    .0
                    .extend(granted.map(|((at, attempt), granted)| (at, (attempt, granted))));
            }
            Ok(Round::Busy((at, busy))) => return Ok(Round::Busy((place(&attempts, at), busy))),
            Ok(Round::Failed((at, error))) => return failed(place(&attempts, at), error),
            Err(error) => {
                attempts.iter().for_each(|(_, attempt)| attempt.failed(&error));
                return failed(place(&attempts, 0), error);
            }
        }
        let Some(group) = others.next() else {
            return Ok(Round::All(taken));
        };
        if taken.is_old() && !sent.is_gone() {
            taken.begin_now(true).await?;
        }
        if sent.is_gone() {
            return Err(caller_has_gone());
        }
        step = Step::new(group, handed, waiter, &sent);
    }
}

fn caller_has_gone() -> StoreError {
    StoreError::not_done(
        Reason::Unreachable,
        "the caller has gone before all locks were acquired",
    )
}

fn place(attempts: &[At<AcquireAttempt>], at: usize) -> usize {
    attempts.get(at).map_or(0, |(at, _)| *at)
}

/// Retries a transient failure; reports every other failure with the key that it concerns.
fn failed<T>(at: usize, error: StoreError) -> Result<Round<T>, StoreError> {
    match error.is_passing() {
        true => Err(error),
        false => Ok(Round::Failed((at, error))),
    }
}

/// What the store has granted so far. Dropping it releases that.
#[derive(Default)]
pub(super) struct Taken(Vec<At<(AcquireAttempt, Granted)>>);

impl Taken {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the grants of another operation.
    pub(super) fn add(&mut self, mut other: Taken) {
        self.0.append(&mut other.0);
    }

    /// Whether a quarter of a lease is over.
    fn is_old(&self) -> bool {
        let now = clock::now();
        let mut attempts = self.0.iter().map(|(_, (attempt, _))| attempt);
        attempts.any(|attempt| now >= attempt.sent() + attempt.request.lease / 4)
    }

    /// Renews the grants; ends when a renewal has failed.
    pub(super) async fn keep(&mut self) {
        let leases = self.0.iter().map(|(_, (attempt, _))| attempt.request.lease);
        let since = self.0.iter().map(|(_, (attempt, _))| attempt.sent());
        let (Some(lease), Some(mut renewed)) = (leases.min(), since.min()) else {
            return std::future::pending().await;
        };
        loop {
            clock::sleep_until(renewed + lease / 4).await;
            let sent = clock::now();
            match self.begin_now(true).await {
                Ok(()) => renewed = sent,
                Err(error) if error.is_passing() && clock::now() < renewed + lease / 2 => {
                    tokio::time::sleep((lease / 20).min(Duration::from_millis(200))).await;
                }
                Err(_) => return,
            }
        }
    }

    /// Restarts the leases now, so that all end at the same time: those of locks that are not renewed, or of `all`.
    pub(super) async fn begin_now(&mut self, all: bool) -> Result<(), StoreError> {
        let sent = clock::now();
        let mut lanes: BTreeMap<Lane, (Vec<usize>, Vec<RenewRequest>)> = BTreeMap::new();
        let mut client: Option<Arc<Handle>> = None;
        for (place, (_, (attempt, _))) in self.0.iter().enumerate() {
            if all || attempt.ends_by_itself() {
                let request = attempt.begin_anew();
                let shared = client.insert(attempt.handle.clone()).shared();
                let (places, requests) = lanes.entry(lane_of(&*shared.store, &request.key)).or_default();
                places.push(place);
                requests.push(request);
            }
        }
        let Some(client) = client else { return Ok(()) };
        let shared = client.shared();
        let steps = lanes.into_values().map(|(places, requests)| {
            let key = requests[0].key.clone();
            let step = called(&key, || shared.store.clone().renew(requests));
            async move {
                let answers = reply_of(step, &key).await;
                shared.renewals_ended(&answers, sent);
                (places, answers)
            }
        });
        for (places, answers) in join_all(steps).await {
            for (place, answer) in places.into_iter().zip(answers?) {
                let renewal = answer?;
                if renewal == Renewal::Gone {
                    return Err(StoreError::not_done(
                        Reason::Unreachable,
                        "the lease of one lock expired before the last was acquired",
                    ));
                }
                self.0[place].1.0.begun_anew(sent, renewal);
            }
        }
        Ok(())
    }

    pub(super) fn guards(mut self) -> Result<Guards, StoreError> {
        let granted = std::mem::take(&mut self.0).into_iter();
        // Converts all of them first, so that the held ones are released if one is not held.
        let guards: Vec<_> = granted
            .map(|(at, (attempt, granted))| match attempt.finished() {
                true => attempt.granted(&granted).map(|guard| (at, guard)),
                false => Err(StoreError::not_done(
                    Reason::Closed,
                    "the client was shut down before the last lock was acquired",
                )),
            })
            .collect();
        guards.into_iter().collect()
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        for (_, (attempt, _)) in &self.0 {
            if attempt.finished() {
                drop(attempt.undo());
            }
        }
    }
}
