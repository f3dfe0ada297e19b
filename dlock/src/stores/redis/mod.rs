//! Locks on Redis or Valkey, with the data format of Redisson's lock: on one server, on the master that sentinels name,
//! or in a Cluster.

mod cluster;
mod command;
mod connect;
mod dial;
mod doctor;
mod endpoint;
mod fence;
mod hint;
mod kinds;
mod lent;
mod login;
mod node;
mod open;
mod operations;
mod permits;
mod pubsub;
mod records;
mod renewals;
mod scan;
mod script;
mod sentinel;
mod servers;
mod settings;
#[cfg(feature = "tls")]
mod tls;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;
use uuid::Uuid;

use self::kinds::KindStep;
use self::node::Node;
pub(crate) use self::node::{Done, Queued};
pub(crate) use self::open::quorum;
use self::scan::Scan;
use self::script::OneAcquire;
pub(crate) use self::script::{Answer, Response, Verb};
use self::servers::Servers;
use crate::LockKey;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::store::counter::Counters;
use crate::store::counter::{CounterReply, CounterRequest};
use crate::store::doctor::Diagnose;
use crate::store::member::{QuorumMember, Vote};
use crate::store::operations::Operations;
use crate::store::records::{RecordKey, Records};
use crate::store::url::Address;
use crate::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Announce, GrantId, Holder, Kind, Lane, Outcome, Reason,
    ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use crate::store::{Busy, Capabilities, DoubtSender, Doubts, Granted, Notifications};
use crate::stores::redis::records::RedisRecords;

/// A store on Redis or Valkey. Apart from the count of references to it, which each call changes.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct RedisStore {
    servers: Servers,
    doubts: DoubtSender,
    prefix: String,
    /// One of the servers that the URL names.
    peer: Option<Address>,
}

impl RedisStore {
    fn name(&self, key: &LockKey) -> Arc<str> {
        self.name_of(key.clone())
    }

    fn name_of(&self, key: LockKey) -> Arc<str> {
        match self.prefix.as_str() {
            "" => key.into_shared(),
            prefix => format!("{prefix}{}", key.as_str()).into(),
        }
    }

    /// A step on a record.
    pub(crate) fn record_step(&self, key: &RecordKey, verb: Verb) -> Queued {
        self.step_on(self.record_name(key).into(), verb)
    }

    /// Subscribes to a record; its channel has the name of its key.
    pub(crate) fn watch_record(&self, key: &RecordKey) -> Watch {
        let name = self.record_name(key);
        self.servers.watch(&name.clone(), name)
    }

    fn record_name(&self, key: &RecordKey) -> String {
        format!("{}dlock:record:{}", self.prefix, key.as_str())
    }

    /// Asks for a lock, as a member of a quorum with `vote_after`, see [`Call::vote_after`](script::Call::vote_after).
    fn asked(&self, request: AcquireRequest, vote_after: Option<Duration>) -> Queued {
        if let Err(error) = kinds::exists(request.kind) {
            return Queued::turned_away(error);
        }
        let AcquireRequest {
            grant, lease, tokens, ..
        } = request;
        let key = self.name(&request.key);
        let verb = match request.kind {
            Kind::Mutex if request.announce == Announce::Nothing => Verb::Acquire { grant, lease, tokens },
            _ => Verb::As(KindStep::Acquire(Box::new(request))),
        };
        self.servers.step(key, verb, vote_after)
    }

    fn step(&self, key: &LockKey, verb: Verb) -> Queued {
        self.step_on(self.name(key), verb)
    }

    /// Lists the holders of the locks whose keys, or those of their holders, match a pattern. `names_of` extracts
    /// the name of the lock from the key, or those that it may have.
    async fn scan<I: IntoIterator<Item = String>>(
        &self,
        pattern: &str,
        of_type: &str,
        names_of: impl Fn(String) -> I,
        found: &mut BTreeMap<LockKey, Vec<Holder>>,
    ) -> Result<(), StoreError> {
        // A lock that moves between servers may be found twice.
        for node in self.servers.nodes() {
            self.scan_on(&node, pattern, of_type, &names_of, found).await?;
        }
        Ok(())
    }

    /// Lists the holders on one of several servers.
    async fn scan_on<I: IntoIterator<Item = String>>(
        &self,
        node: &Node,
        pattern: &str,
        of_type: &str,
        names_of: impl Fn(String) -> I,
        found: &mut BTreeMap<LockKey, Vec<Holder>>,
    ) -> Result<(), StoreError> {
        let mut scan = Scan::new(node, pattern, of_type);
        while let Some(names) = scan.next().await? {
            let keys: Vec<_> = names
                .into_iter()
                .flat_map(&names_of)
                .filter_map(|name| name.strip_prefix(&self.prefix).map(LockKey::raw))
                .collect();
            for keys in keys.chunks(node.queued_together()) {
                self.inspect_all(keys, found).await?;
            }
        }
        Ok(())
    }

    /// Adds the holders of these keys.
    async fn inspect_all(
        &self,
        keys: &[LockKey],
        found: &mut BTreeMap<LockKey, Vec<Holder>>,
    ) -> Result<(), StoreError> {
        // Requested together: they go into few calls.
        let steps = keys.iter().map(|key| (self.step(key, Verb::Inspect), key));
        let steps: Vec<_> = steps.collect();
        for (step, key) in steps {
            match step.await.map(|done| done.answer) {
                Ok(Answer::Holders(all)) if all.iter().all(is_holder) => {
                    found.insert(key.clone(), all);
                }
                // Skips other applications' hashes, and locks that have ended since.
                Ok(_) => {}
                // Also keys that this user may not see.
                Err(error) if matches!(error.reason, Reason::KeyTaken(_)) || error.is_refused() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The same with the key as the server knows it.
    fn step_on(&self, key: Arc<str>, verb: Verb) -> Queued {
        self.servers.step(key, verb, None)
    }
}

/// Whether a key in braces was found with the permits of the one without: nothing tells whose permits without a total they
/// are, and one name suffices to find them.
fn is_twice(key: &LockKey, prefix: &str, found: &BTreeMap<LockKey, Vec<Holder>>) -> bool {
    let permits = |key: &LockKey| {
        let holders = found.get(key).into_iter().flatten();
        holders.filter(|holder| holder.kind == Kind::Permit)
    };
    let other = kinds::in_braces(key.as_str()).map(LockKey::raw);
    let Some(other) = other.filter(|other| other.as_str().starts_with(prefix)) else {
        return false;
    };
    // One of them suffices: the two looks are not at the same time.
    permits(key).any(|one| permits(&other).any(|same| same.id == one.id))
}

pub(crate) fn strange(answer: &Answer) -> StoreError {
    StoreError::unknown(format!("the server gave the answer of another step: {answer:?}"))
}

impl Store for RedisStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Kind::ALL.iter().copied())
            .token_blocks(true)
            .limits(true)
            .min_hold(true)
            .prefer_writers(true)
            .restores_positions(true)
            .notifications(Notifications::Certain)
            .largest_set(usize::MAX)
            .inspection(true)
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        let grant = request.grant;
        // Here and below no async block: that would store the step twice.
        Box::pin(
            self.asked(request, None)
                .map(move |done| granted(done?.answer, grant)),
        )
    }

    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        let can_be = match kind {
            Kind::Mutex | Kind::Fenced | Kind::Read | Kind::Write => true,
            Kind::Fair | Kind::Permit | Kind::Unowned | Kind::Latch => false,
        };
        can_be.then(|| self.servers.together(key, |key| self.name(key)))
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        let one = |request: AcquireRequest| OneAcquire::new(self.name(&request.key), request);
        let all: Vec<_> = requests.into_iter().map(one).collect();
        let first = all.first().map(|one| one.key.clone());
        let step = first.map(|key| self.step_on(key, Verb::All(all)));
        Box::pin(async move {
            let Some(step) = step else {
                return Ok(AcquireAllReply::Acquired { grants: Vec::new() });
            };
            match step.await?.answer {
                Answer::All(tokens) => {
                    let granted = |(first, last)| Granted::with_tokens(first, last);
                    let grants = tokens.into_iter().map(granted).collect();
                    Ok(AcquireAllReply::Acquired { grants })
                }
                Answer::None { at, answer } => match *answer {
                    Ok(Answer::Busy { remaining, .. }) => Ok(AcquireAllReply::Busy { at, remaining }),
                    Ok(other) => Err(strange(&other)),
                    Err(error) if error.outcome == Outcome::NotDone => {
                        Ok(AcquireAllReply::Failed { at, error })
                    }
                    Err(error) => Err(error),
                },
                other => Err(strange(&other)),
            }
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        let ReleaseRequest {
            grant,
            keep_for,
            undoes_acquire,
            ..
        } = request;
        let keep_until = (!keep_for.is_zero()).then(|| clock::now() + keep_for);
        let key = self.name(&request.key);
        let verb = match request.kind {
            Kind::Mutex | Kind::Fenced => Verb::Release {
                grant,
                keep_until,
                undoes_acquire,
            },
            Kind::Fair | Kind::Read | Kind::Write | Kind::Permit | Kind::Unowned | Kind::Latch => {
                Verb::As(KindStep::Release {
                    request: Box::new(request),
                    keep_until,
                })
            }
        };
        Box::pin(self.step_on(key, verb).map(|done| {
            let Done { answer, repeated } = done?;
            match answer {
                Answer::Released { receivers } => Ok(ReleaseReply::Released { receivers }),
                Answer::Gone => Ok(ReleaseReply::NotHeld { repeated }),
                other => Err(strange(&other)),
            }
        }))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        Box::pin(renewals::renew(self, requests))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        let step = self.step(&key, Verb::Inspect);
        Box::pin(async move {
            match step.await?.answer {
                Answer::Holders(all) => Ok(all),
                Answer::Free => Ok(Vec::new()),
                other => Err(strange(&other)),
            }
        })
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        Box::pin(async move {
            let begin = format!("{}{prefix}", self.prefix);
            let locks = format!("{}*", glob_escaped(&begin));
            let mut found = BTreeMap::new();
            self.scan(&locks, "hash", Some, &mut found).await?;
            // Semaphores are found by their holders' keys, which are named after them.
            let of_holders = |name: String| {
                let names: Vec<_> = kinds::semaphores_of(&name).map(str::to_owned).collect();
                let is_listed = names.iter().any(|name| name.starts_with(&begin));
                names.into_iter().filter(move |_| is_listed)
            };
            self.scan("*:timeout", "zset", of_holders, &mut found).await?;
            let is_listed =
                |key: &LockKey| key.as_str().starts_with(&prefix) && !is_twice(key, &prefix, &found);
            let listed: Vec<_> = found.keys().filter(|key| is_listed(key)).cloned().collect();
            found.retain(|key, _| listed.binary_search(key).is_ok());
            let each =
                |(key, all): (LockKey, Vec<Holder>)| all.into_iter().map(move |holder| (key.clone(), holder));
            Ok(found.into_iter().flat_map(each).collect())
        })
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        let step = self.step(&key, Verb::Force(None));
        Box::pin(async move {
            match step.await?.answer {
                Answer::Released { .. } => Ok(true),
                Answer::Gone => Ok(false),
                other => Err(strange(&other)),
            }
        })
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        let name = self.name(key);
        self.servers.watch(&name, kinds::channel(kind, &name, grant))
    }

    fn lane(&self, key: &LockKey) -> Lane {
        self.servers.lane(key, |key| self.name(key))
    }

    fn was_unreachable_since(&self, since: Instant) -> bool {
        self.servers.were_cut_off_since(Moment::of(since))
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(Records::new(RedisRecords(self)))
    }

    fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
        Some(self)
    }

    fn quorum_member(self: Arc<Self>) -> Option<Arc<dyn QuorumMember>> {
        // The servers of a Cluster lose their data one by one.
        (!self.servers.has_slots()).then_some(self as Arc<dyn QuorumMember>)
    }

    fn doubts(&self) -> Doubts {
        self.doubts.subscribe()
    }

    fn diagnose(self: Arc<Self>) -> Option<Arc<dyn Diagnose>> {
        Some(self)
    }
}

impl Counters for RedisStore {
    fn count(self: Arc<Self>, mut request: CounterRequest) -> StoreFuture<CounterReply> {
        // Until the last copy that is sent in that time can take no effect any more.
        request.repeated_for += self.servers.timeout();
        let key = request.key.clone();
        let step = self.step(&key, Verb::Count(request));
        Box::pin(async move {
            match step.await?.answer {
                Answer::Counted(reply) => Ok(reply),
                other => Err(strange(&other)),
            }
        })
    }
}

impl QuorumMember for RedisStore {
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote> {
        let grant = request.grant;
        Box::pin(
            self.asked(request, vote_after)
                .map(move |done| match done?.answer {
                    Answer::Abstains { votes_in } => Ok(Vote::Abstained { votes_in }),
                    answer => granted(answer, grant).map(Vote::Cast),
                }),
        )
    }

    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool> {
        let field = kinds::field(kind, grant);
        let step = self.step(&key, Verb::RaiseFence { field, at_least });
        Box::pin(async move {
            match step.await?.answer {
                Answer::There(there) => Ok(there),
                other => Err(strange(&other)),
            }
        })
    }
}

/// Handles the reply to an acquire of this grant.
fn granted(answer: Answer, grant: GrantId) -> Result<AcquireReply, StoreError> {
    match answer {
        Answer::Acquired { first, last } => Ok(AcquireReply::Acquired(Granted::with_tokens(first, last))),
        Answer::InLine { first, last, behind } => {
            let behind = behind.into_iter().map(|number| grant.with_number(number));
            Ok(AcquireReply::Acquired(
                Granted::with_tokens(first, last).behind(behind.collect()),
            ))
        }
        Answer::Busy {
            remaining,
            again,
            listeners,
        } => {
            let mut busy = Busy::new(remaining);
            (busy.again, busy.listeners) = (again, listeners);
            Ok(AcquireReply::Busy(busy))
        }
        Answer::TooFew => Ok(AcquireReply::TooFewPermits),
        other => Err(strange(&other)),
    }
}

/// Whether the value looks like the holder of a lock, `uuid:number`, or holds permits.
fn is_holder(holder: &Holder) -> bool {
    let is_permit = holder.kind == Kind::Permit;
    is_permit
        || holder.id.split_once(':').is_some_and(|(uuid, number)| {
            let digits = number.strip_prefix('-').unwrap_or(number);
            Uuid::parse_str(uuid).is_ok() && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
        })
}

/// Escapes `text` as a pattern that matches itself.
fn glob_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}
