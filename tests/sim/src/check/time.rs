//! Invariants about time: a loss is told before the store can grant the lock to another holder, `min_hold` and `max_hold`
//! are kept, and tokens grow from one hold to each hold that was requested later.

use std::collections::BTreeMap;
use std::time::Duration;

use dlock::store::{GrantId, Kind};
use dlock::{Held, HoldState, LockKey, sim};
use tokio::time::Instant;

use super::{Due, FENCING, HOLD_TIMES, LOSS, Section};
use crate::plan::{Millis, Plan, Trouble};
use crate::store::Request;
use crate::trace::Who;
use crate::world::{Event, World, tell, with};

/// What these checks remember.
#[derive(Default)]
pub(crate) struct Times {
    /// When a grant was first asked for, and last.
    sent: BTreeMap<GrantId, (Millis, Millis)>,
    /// When what a store granted was asked for.
    asked: BTreeMap<GrantId, Millis>,
    /// Until when `min_hold` keeps others out.
    kept: BTreeMap<LockKey, Vec<Kept>>,
    /// Holds with a `max_hold` whose lock no other client acquired since.
    limited: BTreeMap<GrantId, u64>,
    /// The greatest token that a section had which began up to then.
    order: BTreeMap<LockKey, Vec<(Millis, u64)>>,
}

impl Times {
    /// A section has ended: its grant may be another user's now, without a word to the store.
    pub(super) fn left(&mut self, section: u64) {
        self.limited.retain(|_, of| *of != section);
    }
}

struct Kept {
    section: u64,
    grant: GrantId,
    /// The sections of the frames around it, under which others are the same holder's.
    around: Vec<u64>,
    kind: Kind,
    until: Millis,
    told: String,
}

/// A time by a clock that may run 1 % slow, and what is rounded.
fn at_most(time: Millis) -> Millis {
    time + time / 100 + 3
}

fn at_least(time: Millis) -> Millis {
    (time - time / 100).saturating_sub(3)
}

/// Until when a store has a grant, by its clock, and whether only its `min_hold` keeps it.
pub(super) fn entry(store: usize, key: &LockKey, grant: GrantId) -> Option<(Instant, bool)> {
    let entry = crate::store::inside(store, |memory| sim::holder(memory, key, grant))?;
    let now = with(|world| world.store_instant(store));
    (entry.until > now).then_some((entry.until, entry.kept))
}

/// A store has granted a key: it is looked at when the lease is over.
pub(crate) fn granted(store: usize, key: &LockKey, grant: GrantId) {
    with(|world| {
        let soonest = world.now.saturating_sub(world.plan.network.least);
        let times = &mut world.checks.times;
        if let Some((first, last)) = times.sent.get(&grant) {
            let asked = if *last <= soonest { *last } else { *first };
            times.asked.entry(grant).or_insert(asked);
        }
    });
    lapses(store, key, grant);
}

/// A lease may be over by now, unless it was renewed.
pub(crate) fn lapses(store: usize, key: &LockKey, grant: GrantId) {
    match entry(store, key, grant) {
        Some((until, _)) => with(|world| {
            let at = world.when_at_store(store, until).max(world.now + 1);
            world.schedule(at, Event::Lapses(store, key.clone(), grant));
        }),
        None => {
            judge(key, grant);
            super::grants::lapsed(store, key);
        }
    }
}

/// A store has carried out a release.
pub(crate) fn released(store: usize, key: &LockKey, grant: GrantId, keep_for: Duration) {
    if keep_for > Duration::ZERO {
        with(|world| {
            let kept = Millis::try_from(keep_for.as_millis()).unwrap_or(Millis::MAX);
            let over = world.now + at_most(kept) + 20;
            world.schedule(over, Event::KeptNoMore(store, key.clone(), grant));
        });
    }
    if entry(store, key, grant).is_none() {
        judge(key, grant);
    }
}

/// Leases have ended that would have lasted.
pub(crate) fn clock_stepped() {
    for (key, grant) in with(|world| world.grants_of_sections()) {
        judge(&key, grant);
    }
}

/// No guard may answer "held" if enough stores could grant the lock to another client.
fn judge(key: &LockKey, grant: GrantId) {
    let (stores, exclusion) = with(|world| (world.stores.len(), world.checks.assumes.exclusion));
    if !exclusion || !with(|world| world.is_anybody_inside(key, grant)) {
        return;
    }
    let could_grant = |store: &usize| {
        entry(*store, key, grant).is_none()
            && with(|world| world.stores[*store].votes(&world.plan, world.now))
    };
    let could = (0..stores).filter(could_grant).count();
    if could > stores / 2 {
        with(|world| {
            world
                .counts
                .sometimes("a lease that ended while its holder was inside");
            world.still_believes(key, grant, (could, stores));
        });
    }
}

/// A hold with a `max_hold` is not the stores' any more.
pub(crate) fn kept_no_more(store: usize, key: &LockKey, grant: GrantId) {
    if with(|world| world.checks.assumes.hold_times) && entry(store, key, grant).is_some() {
        with(|world| {
            let name = world.checks.name_of(grant);
            let story =
                format!("store {store} keeps {key} of {name} longer than its min_hold, which nobody holds");
            world.violated(HOLD_TIMES, story);
        });
    }
}

/// A lock with a `max_hold` must be free at the stores by now.
pub(crate) fn must_be_free(key: &LockKey, grant: GrantId, section: u64) {
    let (stores, limited) = with(|world| (world.stores.len(), world.checks.times.limited.remove(&grant)));
    if limited != Some(section) {
        return;
    }
    let has = |store: &usize| matches!(entry(*store, key, grant), Some((_, false)));
    let having = (0..stores).filter(has).count();
    if having > stores / 2 {
        with(|world| {
            let name = world.checks.name_of(grant);
            let story =
                format!("{name} has {key} longer than its max_hold, by the stores: others wait for it");
            world.violated(HOLD_TIMES, story);
        });
    }
}

/// A process that was not running is: every guard that is asked now, before any of its tasks runs, says what its clock
/// says.
pub(crate) fn ask_all(process: usize) {
    for (user, key, held, is_lost) in with(|world| world.holds_of(process)) {
        let says = matches!(held.state(), HoldState::Lost(_));
        with(|world| {
            let event = if is_lost {
                "a process that goes on after its loss"
            } else {
                "a process that goes on in time"
            };
            world.counts.sometimes(event);
            if says != is_lost {
                let story = format!(
                    "p{process}/u{user} asks its guard of {key} right after it stood still, and is told {} while the clock \
                     says {}",
                    word(says),
                    word(is_lost)
                );
                world.violated(LOSS, story);
            }
        });
        for (key, _, grant) in sim::grants(&held) {
            judge(key, grant);
        }
    }
}

fn word(is_lost: bool) -> &'static str {
    if is_lost {
        "that it is lost"
    } else {
        "that it is held"
    }
}

/// By how much a message can be late.
fn lateness(plan: &Plan) -> Millis {
    let by = plan.faults.iter().map(|fault| match fault.what {
        Trouble::Storm { by, .. } => by,
        _ => 0,
    });
    plan.network.most + 2 * by.max().unwrap_or(0)
}

impl World {
    /// A request leaves a process.
    pub(crate) fn is_sent(&mut self, request: &Request) {
        let now = self.now;
        let sent = &mut self.checks.times.sent;
        let mut asks = |grant| sent.entry(grant).or_insert((now, now)).1 = now;
        match request {
            Request::Acquire(request, _) => asks(request.grant),
            Request::AcquireAll(all) => all.iter().for_each(|request| asks(request.grant)),
            Request::Release(request) => self.checks.grants.gives_up(request),
            _ => {}
        }
    }

    fn is_anybody_inside(&self, key: &LockKey, grant: GrantId) -> bool {
        self.inside_by(key, grant).next().is_some()
    }

    fn inside_by(&self, key: &LockKey, grant: GrantId) -> impl Iterator<Item = &Section> {
        let sections = &self.checks.sections;
        let all = self.checks.by_key.get(key).into_iter().flatten();
        all.filter_map(|id| sections.get(id))
            .filter(move |section| has(&section.held, grant))
    }

    fn grants_of_sections(&self) -> Vec<(LockKey, GrantId)> {
        let sections = self.checks.sections.values();
        let grants = sections.flat_map(|section| sim::grants(&section.held));
        grants.map(|(key, _, grant)| (key.clone(), grant)).collect()
    }

    fn still_believes(&mut self, key: &LockKey, grant: GrantId, (could, stores): (usize, usize)) {
        let believes = self.inside_by(key, grant).find(|section| self.is_held(section));
        if let Some(Section {
            process, user, token, ..
        }) = believes
        {
            let by = match stores {
                1 => "the store".to_owned(),
                _ => format!("{could} of {stores} stores"),
            };
            let story = format!(
                "{by} could grant {key} to another one now, and p{process}/u{user} is told that it holds it (token {token})"
            );
            self.violated(LOSS, story);
        }
    }

    /// A release ended with a loss, of a hold that had so much left when it began.
    pub(crate) fn release_lost(
        &mut self,
        (process, user): (usize, usize),
        key: &LockKey,
        (began, left): (Millis, Duration),
    ) {
        let took = Duration::from_millis(at_most(self.now - began));
        // A copy of a request that comes twice may be refused, and the other one carried out after that was told.
        let refuses = |what| matches!(what, Trouble::StoreRefuses { .. });
        let is_certain = self.checks.assumes.exclusion
            && self.checks.assumes.cleanup
            && !self.plan.faults.iter().any(|fault| refuses(fault.what));
        if took < left && is_certain {
            let story = format!(
                "p{process}/u{user} releases {key}, which is its own for another {left:?}, and is told that it was lost"
            );
            self.violated(LOSS, story);
        }
    }

    /// What the guards of a process have to say.
    fn holds_of(&self, process: usize) -> Vec<(usize, LockKey, Held, bool)> {
        let sections = self.checks.sections.values();
        let of_process = sections.filter(|section| section.process == process);
        let holds = of_process.map(|section| {
            let is_lost = !self.is_held(section);
            (section.user, section.key.clone(), section.held.clone(), is_lost)
        });
        holds.collect()
    }

    /// A section begins that no other one of the same hold is around.
    pub(crate) fn begins_in_time(&mut self, id: u64) {
        let section = &self.checks.sections[&id];
        let Some(grant) = grant_of(section) else {
            return;
        };
        let (key, token, kind) = (section.key.clone(), section.token, section.kind);
        let inside = frames_of(section);
        let stands_for = section.stands_for;
        let (process, user) = (section.process, section.user);
        let user_told = format!("p{process}/u{user}");
        let now = self.now;
        let (exclusion, tokens) = (self.checks.assumes.hold_times, self.checks.assumes.tokens);
        let on_quorum = !self.checks.single_store;
        let times = &mut self.checks.times;
        times.limited.remove(&grant);
        if let Some(kept) = times.kept.get_mut(&key) {
            kept.retain(|kept| kept.until > now);
            // What was a write lock of the same user, and is a read lock now.
            let reads_on = |kept: &Kept| stands_for.is_some() || kind == Kind::Read && kept.told == user_told;
            let in_the_way = |kept: &&Kept| {
                let is_own = inside
                    .iter()
                    .any(|outer| *outer == kept.section || kept.around.contains(outer));
                !is_own
                    && kept.grant != grant
                    && !reads_on(kept)
                    && (kept.kind != Kind::Read || kind != Kind::Read)
            };
            if let Some(kept) = kept.iter().find(in_the_way).filter(|_| exclusion) {
                let story = format!(
                    "p{process}/u{user} is inside {key}, which the min_hold of {} keeps until {} ms at least",
                    kept.told, kept.until
                );
                self.violated(HOLD_TIMES, story);
                return;
            }
        }
        // Inside a process holds are handed off with reserved tokens, and the order is asked for in another way.
        if !on_quorum || !tokens {
            return;
        }
        let order = times.order.entry(key.clone()).or_default();
        let asked = times.sent.get(&grant).map_or(0, |(first, _)| *first);
        let earlier = order.partition_point(|(begun, _)| *begun < asked);
        let before = earlier.checked_sub(1).map(|at| order[at].1).unwrap_or_default();
        let greatest = order.last().map_or(token, |(_, greatest)| token.max(*greatest));
        order.push((now, greatest));
        if token <= before {
            let story = format!(
                "p{process}/u{user} has token {token} of {key}, which it asked for at {asked} ms: somebody had {before} before"
            );
            self.violated(FENCING, story);
        }
    }

    /// A hold that has begun has these limits.
    pub(crate) fn has_limits(&mut self, id: u64, min_hold: Option<Millis>, max_hold: Option<Millis>) {
        let Some(section) = self.checks.sections.get(&id) else {
            return;
        };
        let Some(grant) = grant_of(section).filter(|_| self.checks.assumes.hold_times) else {
            return;
        };
        let is_outer = |id: &u64| {
            self.checks
                .sections
                .get(id)
                .is_some_and(|outer| has(&outer.held, grant))
        };
        if frames_of(section).iter().any(is_outer) {
            // It has entered a hold that has limits of its own.
            return;
        }
        let (key, kind, now) = (section.key.clone(), section.kind, self.now);
        let told = format!("p{}/u{}", section.process, section.user);
        let around = frames_of(section);
        if let (Some(min_hold), Some(asked)) = (min_hold, self.checks.times.asked.get(&grant)) {
            let until = asked + at_least(min_hold);
            let kept = self.checks.times.kept.entry(key.clone()).or_default();
            kept.push(Kept {
                section: id,
                grant,
                around,
                kind,
                until,
                told,
            });
            self.counts.sometimes("a hold with a min_hold");
        }
        if let Some(max_hold) = max_hold {
            let over = now + at_most(max_hold);
            self.schedule(over, Event::Check(Due::Over { section: id }));
            self.checks.times.limited.insert(grant, id);
            // What is asked for before the end comes to the store a little later.
            let free = over + lateness(&self.plan) + Duration::from_millis(20).as_millis() as Millis;
            if !self
                .plan
                .faults
                .iter()
                .any(|fault| matches!(fault.what, Trouble::StoreIsSlow { .. }))
            {
                self.schedule(free, Event::MustBeFree(key, grant, id));
            }
            self.counts.sometimes("a hold with a max_hold");
        }
    }

    /// A `max_hold` is over.
    pub(crate) fn is_over(&mut self, id: u64) {
        let Some(section) = self.checks.sections.get(&id) else {
            return;
        };
        if self.is_held(section) {
            let Section {
                process, user, key, ..
            } = section;
            let story = format!("p{process}/u{user} is told that it holds {key} after its max_hold");
            self.violated(HOLD_TIMES, story);
        } else {
            let who = Who::User(section.process, section.user);
            self.counts.sometimes("a hold that its max_hold ended");
            tell!(self, who, "has its lock no longer: its max_hold is over");
        }
    }
}

fn has(held: &Held, grant: GrantId) -> bool {
    sim::grants(held).any(|(_, _, other)| other == grant)
}

fn frames_of(section: &Section) -> Vec<u64> {
    section.inside.iter().map(|frame| frame.section).collect()
}

/// What the stores know the hold of a section by.
fn grant_of(section: &Section) -> Option<GrantId> {
    let of_key = sim::grants(&section.held).find(|(key, _, _)| **key == section.key);
    of_key.map(|(_, _, grant)| grant)
}
