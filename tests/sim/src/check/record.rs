//! Invariant 8: one effect for each key at a time, completions only under their own claim, replays equal to what was
//! stored.
//!
//! What a store says of records is compared with [`Ledger`], step by step. What users do and are told is compared with
//! what they know of their claims, whatever the store says.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, Fingerprint, OnOrphan, OwnerReply, RecordKey};
use dlock_tower::idempotency::IdempotencyHandle;
use tokio::time::Instant;

use super::{CLEANUP, Due};
use crate::plan::Millis;
use crate::store::record::{Reply, Request};
use crate::trace::Who;
use crate::world::{Event, World, tell};

mod slot;

pub(crate) const RECORDS: &str = "8 records";

/// A number for each token of a claim.
pub(crate) type Claim = u32;

#[derive(Default)]
pub(crate) struct Records {
    claims: BTreeMap<String, Claim>,
    names: BTreeMap<RecordKey, String>,
    ledger: Ledger,
    /// A request that comes twice is granted anew where the store lost its data in between.
    grants: BTreeMap<Claim, Vec<Grant>>,
    known: BTreeMap<Claim, Known>,
    next: u64,
    effects: BTreeMap<u64, Effect>,
    /// The newest claim of each record under which work began.
    begun: BTreeMap<RecordKey, (u64, Claim)>,
    /// What came of each effect that has a result.
    produced: BTreeMap<u64, Produced>,
    completions: BTreeMap<RecordKey, Vec<Completion>>,
    /// When the store lost its data for the last time.
    forgot: Option<Millis>,
    askers: BTreeMap<u64, Asker>,
    /// The idempotency layers of the processes that live.
    services: BTreeMap<usize, IdempotencyHandle>,
}

/// A claim that a store has granted.
struct Grant {
    key: RecordKey,
    attempt: u32,
    fence: u64,
}

/// Until when an owner relies on its claim, by the clock of its process.
struct Known {
    process: usize,
    until: Millis,
    lease: Millis,
}

/// The work that a claim protects.
pub(crate) struct Effect {
    pub(crate) process: usize,
    pub(crate) user: usize,
    pub(crate) key: RecordKey,
    pub(crate) claim: Claim,
    /// The claim is extended for as long as it lasts.
    pub(crate) extended: bool,
    began: Millis,
}

/// A record was completed under a claim.
struct Completion {
    claim: Claim,
    at: Millis,
    /// Until when it counts.
    until: Millis,
    slot: Option<SystemTime>,
}

struct Produced {
    claim: Claim,
    key: RecordKey,
    result: Vec<u8>,
}

/// A user that asks for a record, from its request to the reply.
pub(crate) struct Asker {
    pub(crate) process: usize,
    pub(crate) user: usize,
    /// The name of the record.
    pub(crate) record: String,
    /// It waits for the result of an equal one, and is polled whenever it is woken.
    pub(crate) waits: bool,
    pub(crate) since: Millis,
}

/// What a store has to say of its records.
#[derive(Default)]
struct Ledger {
    entries: BTreeMap<RecordKey, Entry>,
    /// The greatest fence of each record, which outlives the record.
    fences: BTreeMap<RecordKey, u64>,
}

struct Entry {
    claim: Claim,
    work: Work,
    attempt: u32,
    fence: u64,
    until: Instant,
    state: State,
}

/// What a record is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Of(Fingerprint),
    /// That of the slot of time which begins then.
    InSlot(SystemTime),
}

impl Work {
    fn slot(self) -> Option<SystemTime> {
        match self {
            Work::Of(_) => None,
            Work::InSlot(slot) => Some(slot),
        }
    }
}

enum State {
    Claimed {
        until: Instant,
    },
    Orphaned,
    /// Nothing was done in the slot.
    Released,
    Completed {
        response: Vec<u8>,
    },
}

/// The answer to a claim, as it has to be.
enum Expected {
    /// With this fence, or one that is greater than all before.
    Claimed {
        attempt: u32,
        fence: Option<u64>,
    },
    Completed(Vec<u8>),
    InProgress,
    Mismatch,
    Orphan,
}

impl fmt::Debug for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Claimed { attempt, fence: None } => {
                write!(f, "Claimed {{ attempt: {attempt} }} with a new fence")
            }
            Expected::Claimed {
                attempt,
                fence: Some(fence),
            } => write!(f, "Claimed {{ attempt: {attempt}, fence: {fence} }}"),
            Expected::Completed(response) => {
                write!(f, "Completed with {:?}", String::from_utf8_lossy(response))
            }
            Expected::InProgress => f.write_str("InProgress"),
            Expected::Mismatch => f.write_str("Mismatch"),
            Expected::Orphan => f.write_str("Orphan"),
        }
    }
}

impl Ledger {
    fn slot_of(&self, key: &RecordKey) -> Option<SystemTime> {
        self.entries.get(key)?.work.slot()
    }

    fn get(&self, key: &RecordKey, now: Instant) -> Option<&Entry> {
        self.entries.get(key).filter(|entry| entry.until > now)
    }

    fn expected(&self, request: &ClaimRequest, work: Work, claim: Claim, now: Instant) -> Expected {
        let Some(entry) = self.get(&request.key, now) else {
            return Expected::Claimed {
                attempt: 1,
                fence: None,
            };
        };
        if entry.work != work {
            return Expected::Mismatch;
        }
        match &entry.state {
            State::Released => Expected::Claimed {
                attempt: 1,
                fence: None,
            },
            State::Completed { response } => Expected::Completed(response.clone()),
            State::Claimed { .. } if entry.claim == claim => Expected::Claimed {
                attempt: entry.attempt,
                fence: Some(entry.fence),
            },
            State::Claimed { until } if *until > now => Expected::InProgress,
            _ if request.on_orphan == OnOrphan::Leave => Expected::Orphan,
            _ => Expected::Claimed {
                attempt: entry.attempt + 1,
                fence: None,
            },
        }
    }

    fn claimed(
        &mut self,
        request: &ClaimRequest,
        work: Work,
        claim: Claim,
        (attempt, fence): (u32, u64),
        now: Instant,
    ) {
        let before = self.get(&request.key, now);
        let mut until = now + request.retention.max(request.lease);
        let mut lease_until = now + request.lease;
        if let Some(before) = before {
            until = until.max(before.until);
            if let State::Claimed { until } = before.state
                && before.claim == claim
            {
                lease_until = lease_until.max(until);
            }
        }
        let greatest = self.fences.entry(request.key.clone()).or_default();
        *greatest = fence.max(*greatest);
        let entry = Entry {
            claim,
            work,
            attempt,
            fence,
            until,
            state: State::Claimed { until: lease_until },
        };
        self.entries.insert(request.key.clone(), entry);
    }

    fn extend(
        &mut self,
        key: &RecordKey,
        claim: Claim,
        times: (Duration, Duration),
        now: Instant,
    ) -> OwnerReply {
        let Some(entry) = self.entries.get_mut(key) else {
            return OwnerReply::NotOwner;
        };
        if entry.until <= now || entry.claim != claim {
            return OwnerReply::NotOwner;
        }
        let (lease, retention) = times;
        match &mut entry.state {
            State::Claimed { until } => {
                *until = now + lease;
                entry.until = entry.until.max(now + retention.max(lease));
                OwnerReply::Done
            }
            State::Completed { .. } => OwnerReply::Done,
            State::Orphaned | State::Released => OwnerReply::NotOwner,
        }
    }

    /// And whether this was the first result.
    fn complete(
        &mut self,
        key: &RecordKey,
        claim: Claim,
        (response, retention): (&[u8], Duration),
        now: Instant,
    ) -> (OwnerReply, bool) {
        let Some(entry) = self.entries.get_mut(key) else {
            return (OwnerReply::NotOwner, false);
        };
        if entry.until <= now || entry.claim != claim {
            return (OwnerReply::NotOwner, false);
        }
        match entry.state {
            State::Claimed { .. } => {
                entry.until = now + retention;
                entry.state = State::Completed {
                    response: response.to_vec(),
                };
                (OwnerReply::Done, true)
            }
            State::Completed { .. } => (OwnerReply::Done, false),
            State::Orphaned | State::Released => (OwnerReply::NotOwner, false),
        }
    }

    fn release_claim(&mut self, key: &RecordKey, claim: Claim, forget: bool, now: Instant) -> OwnerReply {
        let Some(entry) = self.entries.get_mut(key) else {
            return OwnerReply::Done;
        };
        if entry.until <= now {
            return OwnerReply::Done;
        }
        if entry.claim != claim {
            return OwnerReply::NotOwner;
        }
        match entry.state {
            State::Claimed { .. } if forget && entry.attempt == 1 && entry.work.slot().is_some() => {
                entry.state = State::Released;
                OwnerReply::Done
            }
            State::Claimed { .. } if forget && entry.attempt == 1 => {
                self.entries.remove(key);
                OwnerReply::Done
            }
            State::Claimed { .. } => {
                entry.state = State::Orphaned;
                entry.attempt -= u32::from(forget);
                OwnerReply::Done
            }
            State::Orphaned | State::Released => OwnerReply::Done,
            State::Completed { .. } => OwnerReply::NotOwner,
        }
    }
}

impl Records {
    pub(crate) fn name_claim(&mut self, token: &ClaimToken) -> Claim {
        let next = Claim::try_from(self.claims.len()).unwrap_or(Claim::MAX) + 1;
        *self.claims.entry(token.as_str().to_owned()).or_insert(next)
    }

    pub(crate) fn claim_name(&self, token: &ClaimToken) -> String {
        match self.claims.get(token.as_str()) {
            Some(claim) => format!("claim {claim}"),
            None => "a claim".to_owned(),
        }
    }

    /// What users call a record.
    pub(crate) fn name(&mut self, key: &RecordKey, name: &str) {
        if !self.names.contains_key(key) {
            self.names.insert(key.clone(), name.to_owned());
        }
    }

    pub(crate) fn name_of<'a>(&'a self, key: &'a RecordKey) -> &'a str {
        let short = key.as_str().get(..8).unwrap_or(key.as_str());
        self.names.get(key).map_or(short, String::as_str)
    }

    fn lose_data(&mut self, now: Millis) {
        self.ledger.entries.clear();
        self.forgot = Some(now);
    }

    pub(crate) fn service_begins(&mut self, process: usize, service: IdempotencyHandle) {
        self.services.insert(process, service);
    }

    pub(super) fn process_gone(&mut self, process: usize) {
        self.services.remove(&process);
        self.effects.retain(|_, effect| effect.process != process);
        self.askers.retain(|_, asker| asker.process != process);
    }
}

/// What a user would have suffered where a store answers a claim so.
fn suffered(expected: &Expected, reply: &ClaimReply) -> &'static str {
    match (expected, reply) {
        (Expected::Completed(_), ClaimReply::Completed { .. }) => {
            "a client is shown what another request has brought"
        }
        (Expected::Completed(_), ClaimReply::Claimed { .. }) => "work that was done is done again",
        (Expected::InProgress, ClaimReply::Claimed { .. }) => "the same work is done twice at a time",
        (Expected::Mismatch, _) => "a request is taken for another one",
        (Expected::Claimed { .. }, ClaimReply::Claimed { .. }) => {
            "an attempt takes itself for an earlier one"
        }
        (Expected::Claimed { .. }, _) => "nobody does the work",
        _ => "a client is told what is not so",
    }
}

fn is_as(expected: &Expected, reply: &ClaimReply, newest: u64) -> bool {
    match (expected, reply) {
        (
            Expected::Claimed { attempt, fence },
            ClaimReply::Claimed {
                attempt: got,
                fence: told,
            },
        ) => attempt == got && fence.map_or(*told > newest, |fence| fence == *told),
        (Expected::Completed(stored), ClaimReply::Completed { response }) => stored == response,
        (Expected::InProgress, ClaimReply::InProgress { .. })
        | (Expected::Mismatch, ClaimReply::Mismatch)
        | (Expected::Orphan, ClaimReply::Orphan { .. }) => true,
        _ => false,
    }
}

impl World {
    /// A store has lost its data.
    pub(crate) fn records_lost(&mut self) {
        let now = self.now;
        self.checks.records.lose_data(now);
    }

    /// A store has carried out a step of a record.
    pub(super) fn record_step(&mut self, store: usize, request: &Request, reply: &Reply) {
        let now = self.store_instant(store);
        match (request, reply) {
            (Request::Claim(request), Reply::Claim(reply)) => self.claim_step(request, reply, now),
            (Request::ClaimSlot(request, slot), Reply::Slot(reply)) => {
                self.slot_step(request, *slot, reply, now);
            }
            (request, Reply::Owner(reply)) => self.owner_step(request, *reply, now),
            (_, Reply::Claim(_) | Reply::Slot(_) | Reply::Look(_)) => {}
        }
    }

    fn claim_step(&mut self, request: &ClaimRequest, reply: &ClaimReply, now: Instant) {
        let records = &mut self.checks.records;
        let claim = records.name_claim(&request.token);
        let work = Work::Of(request.fingerprint);
        let expected = records.ledger.expected(request, work, claim, now);
        if self.is_due(request, &expected, reply) {
            self.claim_granted(request, work, &expected, reply, now);
        }
    }

    /// Whether a store's answer to a claim is the expected one.
    fn is_due(&mut self, request: &ClaimRequest, expected: &Expected, reply: &ClaimReply) -> bool {
        let records = &self.checks.records;
        let newest = records
            .ledger
            .fences
            .get(&request.key)
            .copied()
            .unwrap_or_default();
        if !is_as(expected, reply, newest) {
            let name = records.name_of(&request.key);
            let story = format!(
                "the store answers a claim of record {name} by \"{}\" where {expected:?} is due (newest fence {newest}): {}",
                Reply::Claim(reply.clone()).told(),
                suffered(expected, reply)
            );
            self.violated(RECORDS, story);
            return false;
        }
        self.counts.sometimes(match (reply, expected) {
            (ClaimReply::Claimed { .. }, Expected::Claimed { fence: Some(_), .. }) => {
                "a claim that was asked for again"
            }
            (ClaimReply::Claimed { attempt: 1, .. }, _) if newest > 0 => "a record that was used anew",
            (ClaimReply::Claimed { attempt: 1, .. }, _) => "a record that was claimed",
            (ClaimReply::Claimed { .. }, _) => "a claim that took over",
            (ClaimReply::Completed { .. }, _) => "a record whose result was told",
            (ClaimReply::InProgress { .. }, _) => "a claim that found an equal one at work",
            (ClaimReply::Mismatch, _) => "a claim that asked for something else",
            _ => "a claim that found an orphan which is left",
        });
        true
    }

    fn claim_granted(
        &mut self,
        request: &ClaimRequest,
        work: Work,
        expected: &Expected,
        reply: &ClaimReply,
        now: Instant,
    ) {
        let ClaimReply::Claimed { attempt, fence } = *reply else {
            return;
        };
        let claim = self.checks.records.name_claim(&request.token);
        if matches!(expected, Expected::Claimed { fence: None, .. }) {
            self.nobody_relies_on(request, claim, now);
        }
        let records = &mut self.checks.records;
        records
            .ledger
            .claimed(request, work, claim, (attempt, fence), now);
        let grant = Grant {
            key: request.key.clone(),
            attempt,
            fence,
        };
        records.grants.entry(claim).or_default().push(grant);
    }

    /// A record is granted to a new claim: the owner of the claim before does not rely on it any more.
    fn nobody_relies_on(&mut self, request: &ClaimRequest, by: Claim, now: Instant) {
        let records = &self.checks.records;
        let Some(entry) = records.ledger.get(&request.key, now) else {
            return;
        };
        let is_claimed = matches!(entry.state, State::Claimed { .. });
        if is_claimed && entry.claim != by && self.checks.assumes.exclusion && self.is_relied_on(entry.claim)
        {
            let story = format!(
                "the store gave record {} to claim {by} while the owner of claim {} relies on it: its work is done twice",
                records.name_of(&request.key),
                entry.claim
            );
            self.violated(RECORDS, story);
        }
    }

    /// Whether the owner of a claim knows that no client can have taken it over, by its own clock and less what clocks
    /// drift: records have no safety margin of their own.
    fn is_relied_on(&self, claim: Claim) -> bool {
        self.checks.records.known.get(&claim).is_some_and(|known| {
            let now = self.clocks[known.process].millis(self.now);
            now + known.lease / 50 + 1 < known.until
        })
    }

    fn owner_step(&mut self, request: &Request, reply: OwnerReply, now: Instant) {
        let records = &mut self.checks.records;
        let (key, expected, what, suffered) = match request {
            Request::Claim(_) | Request::ClaimSlot(..) | Request::Look(_) => return,
            Request::Extend {
                key,
                token,
                lease,
                retention,
            } => {
                let claim = records.name_claim(token);
                let expected = records.ledger.extend(key, claim, (*lease, *retention), now);
                (
                    key,
                    expected,
                    "an extension",
                    "work is stopped, or goes on, that must not",
                )
            }
            Request::Complete {
                key,
                token,
                response,
                retention,
            } => {
                let claim = records.name_claim(token);
                let (expected, first) = records.ledger.complete(key, claim, (response, *retention), now);
                if first && reply == OwnerReply::Done {
                    let kept = u64::try_from(retention.as_millis()).unwrap_or(Millis::MAX);
                    let completion = Completion {
                        claim,
                        at: self.now,
                        until: self.now + kept,
                        slot: records.ledger.slot_of(key),
                    };
                    records
                        .completions
                        .entry(key.clone())
                        .or_default()
                        .push(completion);
                    self.is_completed(key);
                }
                let suffered = "a result is stored under a claim that is not its owner's, or is thrown away";
                (key, expected, "a completion", suffered)
            }
            Request::Release { key, token } | Request::Abandon { key, token } => {
                let claim = records.name_claim(token);
                let forget = matches!(request, Request::Release { .. });
                let expected = records.ledger.release_claim(key, claim, forget, now);
                (
                    key,
                    expected,
                    "a release",
                    "a key is free that must not be, or the other way round",
                )
            }
        };
        if expected != reply {
            let name = self.checks.records.name_of(key).to_owned();
            let story = format!(
                "the store answers {what} of record {name} by {reply:?} where {expected:?} is due: {suffered}"
            );
            self.violated(RECORDS, story);
        } else if reply == OwnerReply::NotOwner {
            self.counts.sometimes(match what {
                "a completion" => "a completion under a claim that was taken over",
                "an extension" => "an extension of a claim that was lost",
                _ => "a release of a claim that was lost",
            });
        }
    }

    /// Waiters for a result are told of it soon.
    fn is_completed(&mut self, key: &RecordKey) {
        let records = &self.checks.records;
        let record = records.name_of(key).to_owned();
        if records.askers.values().any(|asker| asker.record == record) {
            let since = self.now;
            let at = since + self.answered_within();
            self.schedule(at, Event::Check(Due::Answered { record, since }));
        }
    }

    /// Four round trips and 20 ms: the notification, the claim that brings the result, and as much again.
    fn answered_within(&self) -> Millis {
        4 * self.plan.network.round_trip() + 20
    }

    pub(super) fn is_answered(&mut self, record: &str, since: Millis) {
        let is_settled = self.is_settled(since);
        let waits = |asker: &&Asker| asker.record == record && asker.waits && asker.since < since;
        let Some(asker) = self.checks.records.askers.values().find(waits) else {
            return;
        };
        if is_settled {
            let Asker {
                process,
                user,
                since: asked,
                ..
            } = asker;
            let story = format!(
                "record {record} has its result since {since} ms, and p{process}/u{user}, which waits for it since {asked} \
                 ms, has no answer"
            );
            self.violated(RECORDS, story);
        }
    }

    fn is_settled(&self, since: Millis) -> bool {
        let calm_since = self.weather.calm_since();
        let lease = self
            .plan
            .settings
            .lease
            .max(self.plan.records.map_or(0, |records| records.lease));
        let settling = 2 * lease + 2 * self.plan.settings.timeout + 1_000;
        calm_since.is_some_and(|calm| calm + settling <= since)
    }

    /// When a claim ends that a process asks for now, by its clock.
    pub(crate) fn claim_until(&self, process: usize, lease: Duration) -> (Millis, Millis) {
        let lease = u64::try_from(lease.as_millis()).unwrap_or(Millis::MAX);
        (self.clocks[process].millis(self.now) + lease, lease)
    }

    /// An owner has heard that its claim stands.
    pub(crate) fn claim_is_known(
        &mut self,
        process: usize,
        token: &ClaimToken,
        (until, lease): (Millis, Millis),
    ) {
        let claim = self.checks.records.name_claim(token);
        let known = Known {
            process,
            until,
            lease,
        };
        self.checks.records.known.insert(claim, known);
    }

    /// An owner has done with its claim.
    pub(crate) fn claim_is_given_up(&mut self, token: &ClaimToken) {
        let claim = self.checks.records.name_claim(token);
        self.checks.records.known.remove(&claim);
    }

    pub(crate) fn begins_to_ask(&mut self, asker: Asker) -> u64 {
        let records = &mut self.checks.records;
        records.next += 1;
        records.askers.insert(records.next, asker);
        records.next
    }

    pub(crate) fn asks_no_longer(&mut self, id: u64) {
        self.checks.records.askers.remove(&id);
    }

    /// A user works under a claim with this attempt and this fence.
    pub(crate) fn effect_begins(
        &mut self,
        (process, user): (usize, usize),
        (key, token): (&RecordKey, &ClaimToken),
        (attempt, fence): (u32, u64),
        extended: bool,
    ) -> u64 {
        let records = &mut self.checks.records;
        let claim = records.name_claim(token);
        let name = records.name_of(key).to_owned();
        let is_granted = records
            .grants
            .get(&claim)
            .into_iter()
            .flatten()
            .any(|grant| grant.key == *key && (grant.attempt, grant.fence) == (attempt, fence));
        tell!(
            self,
            Who::User(process, user),
            "works on record {name} under claim {claim} (attempt {attempt}, fence {fence})"
        );
        let effect = Effect {
            process,
            user,
            key: key.clone(),
            claim,
            // One that begins late, with a claim that has run out, may have been taken over before it extends it.
            extended: extended && self.is_relied_on(claim),
            began: self.now,
        };
        if !is_granted {
            let story = format!(
                "p{process}/u{user} works on record {name} as attempt {attempt} with fence {fence} under claim {claim}, \
                 which no store has granted so"
            );
            self.violated(RECORDS, story);
        }
        self.counts.effects += 1;
        self.is_newest(&effect, fence, &name);
        self.is_alone(&effect, &name);
        let records = &mut self.checks.records;
        records.next += 1;
        records.effects.insert(records.next, effect);
        records.next
    }

    fn is_newest(&mut self, effect: &Effect, fence: u64, name: &str) {
        let (newest, by) = self
            .checks
            .records
            .begun
            .get(&effect.key)
            .copied()
            .unwrap_or_default();
        let Effect {
            process, user, claim, ..
        } = *effect;
        if by == claim {
            let story =
                format!("p{process}/u{user} works on record {name} a second time under claim {claim}");
            self.violated(RECORDS, story);
        } else if fence <= newest {
            // Told late of a claim that was taken over since.
            if self.checks.assumes.exclusion && self.is_relied_on(claim) {
                let story = format!(
                    "p{process}/u{user} works on record {name} with fence {fence} after one with fence {newest}: a \
                     resource refuses it"
                );
                self.violated(RECORDS, story);
            }
        } else {
            self.checks
                .records
                .begun
                .insert(effect.key.clone(), (fence, claim));
        }
    }

    /// No other one works for this key and relies on its claim; in a calm, none that extends it at all.
    fn is_alone(&mut self, effect: &Effect, name: &str) {
        // One that begins late may have been taken over before.
        if !self.checks.assumes.exclusion || !self.is_relied_on(effect.claim) {
            return;
        }
        let other = self.checks.records.effects.values().find(|other| {
            let relies = self.is_relied_on(other.claim) || other.extended && self.is_settled(other.began);
            other.key == effect.key && relies
        });
        let overlaps = self
            .checks
            .records
            .effects
            .values()
            .any(|other| other.key == effect.key);
        if let Some(other) = other {
            let story = format!(
                "p{}/u{} works on record {name} under claim {} while p{}/u{} does under claim {}, since {} ms: the work is \
                 done twice",
                effect.process,
                effect.user,
                effect.claim,
                other.process,
                other.user,
                other.claim,
                other.began
            );
            self.violated(RECORDS, story);
        } else if overlaps {
            self.counts.sometimes("work that was taken over while it went on");
        }
    }

    /// Work has this result, which is not stored yet.
    pub(crate) fn effect_brings(&mut self, id: u64, result: &[u8]) {
        let records = &mut self.checks.records;
        if let Some(effect) = records.effects.get(&id) {
            let produced = Produced {
                claim: effect.claim,
                key: effect.key.clone(),
                result: result.to_vec(),
            };
            records.produced.insert(id, produced);
        }
    }

    pub(crate) fn effect_ends(&mut self, id: u64) {
        self.checks.records.effects.remove(&id);
    }

    /// A user that asked at `since` is given a result, not of its own work: it is what was stored, byte for byte.
    pub(crate) fn is_told_again(
        &mut self,
        (process, user): (usize, usize),
        record: &str,
        since: Millis,
        result: &[u8],
    ) {
        self.counts.sometimes("a result that was told again");
        let records = &self.checks.records;
        let produced = number_in(result).and_then(|effect| records.produced.get(&effect));
        let is_stored = produced.is_some_and(|produced| {
            let completions = records.completions.get(&produced.key);
            produced.result == result
                && records.name_of(&produced.key) == record
                && completions
                    .into_iter()
                    .flatten()
                    .any(|completion| completion.claim == produced.claim && completion.until >= since)
        });
        if !is_stored {
            let story = format!(
                "p{process}/u{user} is told again of record {record} what was not stored there: {:?}",
                String::from_utf8_lossy(result)
            );
            self.violated(RECORDS, story);
        }
    }

    /// A client is given a response that its own request has brought: the response of the handler.
    pub(crate) fn is_told_first(
        &mut self,
        (process, user): (usize, usize),
        record: &str,
        own: u64,
        result: &[u8],
    ) {
        let produced = self.checks.records.produced.get(&own);
        if produced.is_none_or(|produced| produced.result != result) {
            let story = format!(
                "p{process}/u{user} is answered for {record} what its handler did not say: {:?}",
                String::from_utf8_lossy(result)
            );
            self.violated(RECORDS, story);
        }
    }

    /// A response has the status that its handler gave it, the third word of its text.
    pub(crate) fn has_status(
        &mut self,
        (process, user): (usize, usize),
        record: &str,
        status: u16,
        result: &[u8],
    ) {
        let text = String::from_utf8_lossy(result);
        if text.split(' ').nth(2) != Some(&status.to_string()) {
            let story = format!("p{process}/u{user} is answered for {record} with status {status}: {text:?}");
            self.violated(RECORDS, story);
        }
    }

    /// A request works now, and waits for no other one.
    pub(crate) fn asker_works(&mut self, id: u64) {
        if let Some(asker) = self.checks.records.askers.get_mut(&id) {
            asker.waits = false;
        }
    }

    /// What must be true of the records of a world whose users have all ended.
    pub(crate) fn records_left(&mut self, store: usize) {
        let now = self.store_instant(store);
        let records = &self.checks.records;
        let busy = records
            .services
            .iter()
            .find(|(_, service)| service.claims() + service.tasks() > 0);
        if let Some((process, service)) = busy {
            let (claims, tasks) = (service.claims(), service.tasks());
            let story = format!(
                "p{process} has nothing to do, and its layer keeps {claims} claims and {tasks} tasks"
            );
            return self.violated(CLEANUP, story);
        }
        let mut entries = records.ledger.entries.iter();
        let claimed =
            entries.find(|(_, entry)| matches!(entry.state, State::Claimed { until } if until > now));
        if let Some((key, entry)) = claimed {
            let story = format!(
                "claim {} of record {} stands, and nobody works under it: who asks is told that it is in progress",
                entry.claim,
                records.name_of(key)
            );
            self.violated(CLEANUP, story);
        }
    }
}

/// The number of an effect, with which its result begins.
fn number_in(result: &[u8]) -> Option<u64> {
    let digits = result.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&result[..digits]).ok()?.parse().ok()
}
