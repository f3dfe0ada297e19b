//! The invariants that must be true at every step, and the harm to a user if one is not.

mod budget;
mod counter;
pub(crate) mod grants;
mod order;
mod patience;
mod permits;
mod read_write;
pub(crate) mod record;
mod starving;
pub(crate) mod time;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dlock::sim;
use dlock::store::Granted;
use dlock::store::member::Vote;
use dlock::store::{AcquireAllReply, AcquireReply, AcquireRequest, GrantId, Kind, ReleaseReply, StoreError};
use dlock::{Held, HoldState, LockClient, LockKey};

pub(crate) use self::counter::balance;
use crate::assume::Assumptions;
use crate::plan::{Millis, Plan, Runtimes};
use crate::store::{Reply, Request};
use crate::trace::{VIOLATION, Who};
use crate::words;
use crate::world::{Event, World, tell, with};

/// A promise that was broken.
#[derive(Debug, Clone)]
pub(crate) struct Violation {
    /// The number and the name of the invariant.
    pub(crate) of: &'static str,
    pub(crate) at: Millis,
    pub(crate) story: String,
}

pub(crate) const EXCLUSION: &str = "1 exclusion";
pub(crate) const LOSS: &str = "2 loss is told in time";
pub(crate) const FENCING: &str = "3 fencing tokens";
pub(crate) const WAITING: &str = "4 waiting";
pub(crate) const CLEANUP: &str = "5 cleanup";
/// Of the library or of the simulation.
pub(crate) const PANIC: &str = "panic";
pub(crate) const ORDER: &str = "6 order";
pub(crate) const HOLD_TIMES: &str = "7 min_hold and max_hold";
pub(crate) const BUDGET: &str = "9 requests to the store";

/// A piece of a user's code that a lock protects.
struct Section {
    process: usize,
    user: usize,
    key: LockKey,
    kind: Kind,
    held: Held,
    token: u64,
    /// How many permits it has.
    amount: u32,
    /// It was downgraded from the write lock with this token, which may have been entered several times.
    stands_for: Option<u64>,
    is_second: bool,
    /// In which it began.
    inside: Vec<Frame>,
}

/// A section around others, as the inner sections know it.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) section: u64,
    key: LockKey,
    kind: Kind,
    token: u64,
}

/// How a section begins.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begins {
    /// Process and user.
    pub(crate) who: (usize, usize),
    pub(crate) kind: Kind,
    pub(crate) amount: u32,
    pub(crate) stands_for: Option<u64>,
    /// By a second guard that was made out of the first, whatever is inside of the lock then.
    pub(crate) is_second: bool,
}

/// A user that waits for a lock.
#[derive(Debug, Clone)]
pub(crate) struct Waiter {
    pub(crate) process: usize,
    pub(crate) user: usize,
    pub(crate) key: LockKey,
    pub(crate) kind: Kind,
    pub(crate) since: Millis,
    pub(crate) until: Option<Millis>,
    /// How many calls it makes at once.
    pub(crate) calls: u32,
    /// It asks once, and takes no place in the queue.
    pub(crate) once: bool,
    /// Whether it is polled whenever it is woken.
    pub(crate) attentive: bool,
    /// Inside a frame, which has an order of its own.
    pub(crate) nested: bool,
    /// Keys that it waits for at once with this one.
    pub(crate) also: Vec<LockKey>,
    /// It began to wait when its client was shut down.
    is_closed: bool,
    /// It pauses for long when the store fails.
    pub(crate) is_leader: bool,
    /// How many permits it wants.
    pub(crate) amount: u32,
    /// Writers: readers stand back while it waits.
    pub(crate) preferred: bool,
    /// It accepts at most this many other waiters.
    pub(crate) max_waiters: Option<usize>,
    /// Since when the queue is there in which it waits.
    queue_since: Millis,
}

/// A write to the resource that a lock protects.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) section: u64,
    pub(crate) process: usize,
    pub(crate) user: usize,
    pub(crate) key: LockKey,
    pub(crate) token: u64,
}

/// A check that is made later.
#[derive(Debug)]
pub(crate) enum Due {
    /// A key became available at that time: a waiter must have it by now.
    Taken { key: LockKey, free_since: Millis },
    /// A latch was opened then.
    Opened { key: LockKey, at: Millis },
    /// A record was completed then: its waiters know by now.
    Answered { record: String, since: Millis },
    /// The `max_hold` of a section is over.
    Over { section: u64 },
}

pub(crate) struct Checks {
    pub(crate) assumes: Assumptions,
    pub(crate) times: time::Times,
    single_store: bool,
    /// Some acquires are kept and not polled.
    pub(crate) some_unpolled: bool,
    names: BTreeMap<u128, String>,
    next: u64,
    sections: BTreeMap<u64, Section>,
    by_key: BTreeMap<LockKey, Vec<u64>>,
    waiters: BTreeMap<u64, Waiter>,
    /// One of their calls has what they wanted; another may be at the head of a queue until it is dropped.
    left_in_line: BTreeMap<u64, Waiter>,
    /// The last token that a store granted, and that a section had.
    granted: BTreeMap<LockKey, u64>,
    begun: BTreeMap<LockKey, u64>,
    registers: BTreeMap<LockKey, u64>,
    free_since: BTreeMap<LockKey, Millis>,
    /// The longest requested lease.
    longest_lease: Millis,
    grants: grants::Grants,
    permits: permits::Permits,
    orders: order::Orders,
    counters: counter::CounterChecks,
    starving: starving::Starving,
    budgets: budget::Budgets,
    judged: budget::Judged,
    /// Processes whose client is shut down.
    closed: BTreeSet<usize>,
    /// Until when a process knows that another process has a lock or goes first, and when it was last known to have had
    /// the lock itself.
    heard_busy: BTreeMap<(usize, LockKey), Millis>,
    held_here: BTreeMap<(usize, LockKey), Millis>,
    /// The replies to releases that have come to processes which stand still, with when the requests were sent.
    unread_releases: Vec<(usize, LockKey, Millis, ReleaseReply)>,
    pub(crate) records: record::Records,
    pub(crate) violation: Option<Violation>,
}

impl Checks {
    pub(crate) fn new(plan: &Plan) -> Checks {
        Checks {
            assumes: Assumptions::of(plan),
            times: time::Times::default(),
            single_store: plan.stores.count() == 1,
            some_unpolled: plan.has_unpolled(),
            names: BTreeMap::new(),
            next: 0,
            sections: BTreeMap::new(),
            by_key: BTreeMap::new(),
            waiters: BTreeMap::new(),
            left_in_line: BTreeMap::new(),
            granted: BTreeMap::new(),
            begun: BTreeMap::new(),
            registers: BTreeMap::new(),
            free_since: BTreeMap::new(),
            longest_lease: grants::longest_lease(plan),
            grants: grants::Grants::default(),
            permits: permits::Permits::default(),
            orders: order::Orders::default(),
            counters: counter::CounterChecks::default(),
            starving: starving::Starving::of(plan),
            budgets: budget::Budgets::default(),
            judged: budget::Judged::of(plan),
            closed: BTreeSet::new(),
            heard_busy: BTreeMap::new(),
            held_here: BTreeMap::new(),
            unread_releases: Vec::new(),
            records: record::Records::default(),
            violation: None,
        }
    }

    /// What a trace calls a client.
    pub(crate) fn name_client(&mut self, client: u128, name: String) {
        self.names.insert(client, name);
    }

    /// What a trace calls a grant.
    pub(crate) fn name_of(&self, grant: GrantId) -> String {
        let number = grant.to_string();
        let number = number.rsplit(':').next().unwrap_or_default();
        match self.names.get(&sim::client_of(grant)) {
            Some(name) => format!("{name}#{number}"),
            None => format!("?#{number}"),
        }
    }

    /// When code that a lock of this key protects was last at its end.
    pub(crate) fn last_used(&self, key: &LockKey) -> Option<Millis> {
        let ends = self.held_here.iter().filter(|((_, of), _)| of == key);
        ends.map(|(_, at)| *at).max()
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.values()
    }

    /// Whether some user has a guard of this grant, held or lost.
    pub(crate) fn has_guard(&self, grant: GrantId) -> bool {
        self.sections
            .values()
            .any(|section| sim::grants(&section.held).any(|(_, _, id)| id == grant))
    }

    /// The locks whose users are at work.
    pub(crate) fn used(&self) -> impl Iterator<Item = &LockKey> {
        self.sections.values().map(|section| &section.key)
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Section {
    /// Whether it began in a frame of this hold.
    fn is_inside_of(&self, hold: &Section) -> bool {
        let of_hold = |frame: &Frame| frame.key == hold.key && frame.token == hold.token;
        self.inside.iter().any(of_hold)
    }

    /// Whether it must not be while the other one is.
    fn is_excluded_by(&self, id: u64, other: &Section) -> bool {
        let both_read = self.kind == Kind::Read && other.kind == Kind::Read;
        // Other guards of a write lock that was downgraded keep it.
        let one_lock = self.kind == Kind::Write && other.stands_for == Some(self.token)
            || other.kind == Kind::Write && self.stands_for == Some(other.token);
        !both_read && !one_lock && !self.inside.iter().any(|frame| frame.section == id)
    }
}

impl World {
    pub(crate) fn violated(&mut self, of: &'static str, story: String) {
        let story = words::with_short_tokens(&story);
        tell!(self, Who::World, "{VIOLATION} {of}: {story}");
        let at = self.now;
        self.checks.violation.get_or_insert(Violation { of, at, story });
    }

    fn is_held(&self, section: &Section) -> bool {
        !self.is_lost(section.process, &section.held)
    }

    /// The sections, and whether their users are told that they hold their locks.
    pub(crate) fn sections_held(&self) -> impl Iterator<Item = (u64, bool)> {
        let sections = self.checks.sections.iter();
        sections.map(|(id, section)| (*id, self.is_held(section)))
    }

    /// The sections, and whether a lease of theirs that is renewed has run out.
    pub(crate) fn sections_that_ran_out(&self) -> impl Iterator<Item = (u64, bool)> {
        let sections = self.checks.sections.iter();
        sections.map(|(id, section)| {
            let now = self.instant_of(section.process);
            let context = self.clocks[section.process].context.as_ref();
            let _entered = context.map(sim::Process::enter);
            (*id, sim::ran_out(&section.held, now))
        })
    }

    /// Whose section it is, and of which lock.
    pub(crate) fn section_of(&self, id: u64) -> Option<(usize, usize, LockKey)> {
        let section = self.checks.sections.get(&id)?;
        Some((section.process, section.user, section.key.clone()))
    }

    /// Whether a hold of this process would answer that it is lost.
    pub(crate) fn is_lost(&self, process: usize, held: &Held) -> bool {
        let now = self.instant_of(process);
        // Its moments are counted from the beginning of its process.
        let _entered = self.clocks[process].context.as_ref().map(sim::Process::enter);
        matches!(sim::peek(held, now), HoldState::Lost(_))
    }

    /// An acquire ended with a wrong loss: the lock was released.
    pub(crate) fn told_released(&mut self, (process, user): (usize, usize), key: &LockKey) {
        let story = format!(
            "p{process}/u{user} wants {key} and is told that it is lost, though it was released: the lock was available"
        );
        self.violated(WAITING, story);
    }

    /// A guard was asked; before, it was lost or not.
    pub(crate) fn answered(&mut self, who: (usize, usize), held: &Held, was_lost: bool, state: HoldState) {
        let says_lost = matches!(state, HoldState::Lost(_));
        if says_lost {
            self.counts.sometimes("a guard that said it is lost");
        }
        if was_lost && !says_lost {
            let (process, user) = who;
            let keys: Vec<_> = held.keys().map(LockKey::as_str).collect();
            let story = format!(
                "p{process}/u{user} asks whether it holds {}, of which one is lost, and is told {state:?}",
                keys.join(" and ")
            );
            self.violated(LOSS, story);
        }
    }

    /// A user's code begins that a lock protects.
    pub(crate) fn section_begins(
        &mut self,
        begins: Begins,
        key: LockKey,
        held: Held,
        inside: &[Frame],
    ) -> Frame {
        let Begins {
            who: (process, user),
            kind,
            amount,
            stands_for,
            is_second,
        } = begins;
        let id = self.checks.next();
        let token = held.fencing_token_of(key.clone()).unwrap_or_default();
        self.counts.acquisitions += 1;
        tell!(
            self,
            Who::User(process, user),
            "holds {key} now, token {}",
            words::token(token)
        );
        let section = Section {
            process,
            user,
            key: key.clone(),
            kind,
            held,
            token,
            amount,
            stands_for,
            is_second,
            inside: inside.to_vec(),
        };
        if self.is_held(&section) {
            match kind {
                Kind::Permit => self.has_permits(&section),
                _ => self.excludes_others(&section, is_second),
            }
            self.nobody_wrote(&section);
            self.has_greater_token(&section);
            self.has_granted_token(&section);
            self.is_within_slice(&section);
        } else {
            self.counts
                .sometimes("a lock that was lost before its user could work");
        }
        self.gets_on(process, &key, 0);
        if kind == Kind::Read {
            self.opens(process, &key);
        }
        self.checks.by_key.entry(key.clone()).or_default().push(id);
        self.checks.sections.insert(id, section);
        self.begins_in_time(id);
        Frame {
            section: id,
            key,
            kind,
            token,
        }
    }

    fn excludes_others(&mut self, section: &Section, is_second: bool) {
        if !self.checks.assumes.exclusion {
            return;
        }
        let Some(others) = self.checks.by_key.get(&section.key) else {
            return;
        };
        let other = others.iter().copied().find(|id| {
            let other = &self.checks.sections[id];
            // A second guard is made whatever is inside of the first, and the first is entered whatever the second is for.
            let shares = is_second && (other.token == section.token || other.is_inside_of(section))
                || other.is_second && section.is_inside_of(other);
            section.is_excluded_by(*id, other) && !shares && self.is_held(other)
        });
        if let Some(other) = other {
            let Section {
                process, user, token, ..
            } = self.checks.sections[&other];
            let Section { key, token: ours, .. } = section;
            self.violated(
                EXCLUSION,
                format!(
                    "p{}/u{} is inside {key} with token {ours} while p{process}/u{user} is, with token {token}, and both \
                     are told that they hold it",
                    section.process, section.user
                ),
            );
        }
    }

    fn has_greater_token(&mut self, section: &Section) {
        // What is entered has the token of the hold around it, which may be over by now where a task carries it on.
        if matches!(section.kind, Kind::Read | Kind::Permit) || section.is_inside_of(section) {
            return;
        }
        let before = self.checks.begun.insert(section.key.clone(), section.token);
        let before = before.unwrap_or_default();
        if section.token == before && self.checks.assumes.tokens
            || section.token < before && self.checks.assumes.exclusion
        {
            let Section { key, token, .. } = section;
            self.violated(
                FENCING,
                format!("{key} has token {token} now and had {before} before: a resource refuses its holder"),
            );
        }
    }

    pub(crate) fn section_ends(&mut self, id: u64) {
        let Some(section) = self.checks.sections.remove(&id) else {
            return;
        };
        if let Some(all) = self.checks.by_key.get_mut(&section.key) {
            all.retain(|other| *other != id);
        }
        self.checks.times.left(id);
        self.gets_on(section.process, &section.key, 2);
        let now = self.now;
        self.checks.held_here.insert((section.process, section.key), now);
    }

    /// The sections of a process that is gone.
    pub(crate) fn process_gone(&mut self, process: usize) {
        let of_process = |section: &Section| section.process == process;
        self.checks.sections.retain(|_, section| !of_process(section));
        let sections = &self.checks.sections;
        for all in self.checks.by_key.values_mut() {
            all.retain(|id| sections.contains_key(id));
        }
        self.checks.waiters.retain(|_, waiter| waiter.process != process);
        self.checks.closed.remove(&process);
        self.counters_are_inexact();
        self.clients_end(process);
        for store in &mut self.stores {
            store.unsubscribe_all(process);
        }
        self.checks.records.process_gone(process);
    }

    /// Sends a write to the resource.
    pub(crate) fn writes(&mut self, section: u64) {
        let Some(of) = self.checks.sections.get(&section) else {
            return;
        };
        if matches!(of.kind, Kind::Read | Kind::Permit) {
            return;
        }
        let write = Write {
            section,
            process: of.process,
            user: of.user,
            key: of.key.clone(),
            token: of.token,
        };
        let delay = crate::chance::mix(self.plan.seed ^ section ^ self.now) % 20;
        self.schedule(
            self.now + delay,
            Event::Arrival(crate::net::Arrival::Write(write)),
        );
    }

    pub(crate) fn begins_to_wait(&mut self, mut waiter: Waiter) -> u64 {
        let id = self.checks.next();
        waiter.is_closed = self.checks.closed.contains(&waiter.process);
        // A set waits behind others of any of its keys.
        let same = |other: &&Waiter| {
            other.process == waiter.process
                && other.kind == waiter.kind
                && (other.key == waiter.key || waiter.is_set() || other.is_set())
        };
        let checks = &self.checks;
        let others = checks.waiters.values().chain(checks.left_in_line.values());
        let others = others.filter(same).map(|other| other.queue_since);
        waiter.queue_since = others.min().unwrap_or(waiter.since);
        self.call_begins(&waiter);
        self.checks.waiters.insert(id, waiter);
        id
    }

    /// The client of a process is shut down from now on.
    pub(crate) fn closes(&mut self, process: usize) {
        self.counts.sometimes("a client that was shut down");
        self.checks.closed.insert(process);
    }

    pub(crate) fn waits_no_longer(&mut self, id: u64) -> Option<Waiter> {
        let waiter = self.checks.waiters.remove(&id)?;
        self.gets_on(waiter.process, &waiter.key, 2);
        if waiter.calls > 1 {
            self.checks.left_in_line.insert(id, waiter.clone());
        }
        Some(waiter)
    }

    /// All calls of a waiter are over.
    pub(crate) fn calls_end(&mut self, id: u64) {
        self.waits_no_longer(id);
        self.checks.left_in_line.remove(&id);
    }

    /// A waiter has the lock: no earlier waiter of its process still waits.
    pub(crate) fn served(&mut self, waiter: &Waiter) {
        if waiter.is_closed && !waiter.nested {
            let Waiter {
                process, user, key, ..
            } = waiter;
            let story = format!("p{process}/u{user} gets {key} from a client that is shut down");
            self.violated(CLEANUP, story);
        }
        self.has_its_turn(waiter);
        if waiter.once
            || waiter.nested
            || waiter.is_set()
            || matches!(waiter.kind, Kind::Read | Kind::Fair | Kind::Permit)
        {
            return;
        }
        let now = self.now;
        let passed_by = self.checks.waiters.values().find(|other| {
            other.process == waiter.process
                && other.key == waiter.key
                && other.kind == waiter.kind
                && other.attentive
                && !other.nested
                && !other.is_set()
                && !other.is_leader
                && !other.once
                && other.since + 2 < waiter.since
                && other.until.is_none_or(|until| until > now + 2)
        });
        if let Some(other) = passed_by {
            let story = format!(
                "u{} waits for {} since {} ms, and u{} of the same process has it, which waits since {} ms",
                other.user, other.key, other.since, waiter.user, waiter.since
            );
            self.violated(ORDER, story);
        }
    }

    /// A call ended with "held by others".
    pub(crate) fn told_busy(&mut self, waiter: &Waiter, key: &LockKey) {
        let at = (waiter.process, key.clone());
        let from = waiter.queue_since;
        let heard = self
            .checks
            .heard_busy
            .get(&at)
            .is_some_and(|heard| *heard >= from);
        let here = self.checks.held_here.get(&at).is_some_and(|until| *until >= from)
            || self.checks.by_key.get(&at.1).is_some_and(|all| {
                all.iter()
                    .any(|id| self.checks.sections[id].process == waiter.process)
            });
        if !heard && !here {
            let story = format!(
                "u{} was told that {} is held by others, which no store has said since {from} ms",
                waiter.user, key
            );
            self.violated(WAITING, story);
        }
    }

    /// A reply has come to a process.
    pub(crate) fn replied(&mut self, process: usize, about: &str, reply: &Reply) {
        let now = self.now;
        tell!(self, Who::Process(process), "{}", words::learned(about, reply));
        match reply {
            Reply::Acquire(key, reply) if is_granted(reply) => self.set_may_have(process, key),
            Reply::Acquire(key, _) => {
                self.hears_busy(process, key, now);
            }
            Reply::AcquireAll(keys, _) => {
                for key in keys {
                    self.hears_busy(process, key, now);
                }
            }
            _ => {}
        }
    }

    /// A store has told others that the lock which this process released is free: they go first for a while, in which its
    /// calls do not ask.
    pub(crate) fn lets_go_first(
        &mut self,
        process: usize,
        (key, sent): &(LockKey, Millis),
        reply: ReleaseReply,
    ) {
        let others = match reply {
            ReleaseReply::Released { receivers } => receivers.unwrap_or(1) as Millis,
            _ => return,
        };
        if self.clocks[process].stopped.is_some() {
            let unread = (process, key.clone(), *sent, reply);
            self.checks.unread_releases.push(unread);
            return;
        }
        let late = self.hears_late();
        let each = order::yields(self.now - sent + 2 * late);
        // The future that released may be polled later.
        let until = self.now + late + others * each + self.unpolled();
        self.hears_busy(process, key, until);
    }

    /// A process that stood still reads the replies that have come meanwhile: its time for others begins only now.
    pub(crate) fn reads_releases(&mut self, process: usize) {
        let unread = std::mem::take(&mut self.checks.unread_releases);
        for (of, key, sent, reply) in unread {
            match of == process {
                true => self.lets_go_first(of, &(key, sent), reply),
                false => self.checks.unread_releases.push((of, key, sent, reply)),
            }
        }
    }

    fn hears_busy(&mut self, process: usize, key: &LockKey, until: Millis) {
        let known = self.checks.heard_busy.entry((process, key.clone())).or_default();
        *known = until.max(*known);
    }

    /// A call for a set that has all of its keys from the store gives them back where it cannot enter those of its frames.
    /// Calls that wait behind it know that it had them.
    fn set_may_have(&mut self, process: usize, key: &LockKey) {
        let wants =
            |waiter: &&Waiter| waiter.process == process && (waiter.key == *key || waiter.also.contains(key));
        let all: Vec<_> = self.checks.waiters.values().filter(wants).collect();
        if all.len() > 1 && all.iter().any(|waiter| waiter.is_set()) {
            let now = self.now;
            self.checks.held_here.insert((process, key.clone()), now);
        }
    }

    /// How long a lock may be free while a task waits for it.
    fn patience(&self) -> Millis {
        // Those that wait for sets are before others, ask when the key becomes available, and find another one busy.
        let sets = self
            .checks
            .waiters
            .values()
            .filter(|waiter| waiter.is_set())
            .count() as Millis;
        let (round_trip, late) = (self.plan.network.round_trip(), self.hears_late());
        // It has to hear of it and to ask. In between it lets those go first that waited when it had the lock itself.
        let others_first = order::time_slice(round_trip + late);
        (1 + 2 * sets) * round_trip + late + others_first + 20 + self.unpolled()
    }

    /// How long calls that are not polled may delay others: each keeps what it has for up to two seconds, the poll deadline.
    fn unpolled(&self) -> Millis {
        match self.checks.some_unpolled {
            true => 30_000,
            false => 0,
        }
    }

    /// How long after its arrival a process handles a message: with its own runtime up to a step later.
    fn hears_late(&self) -> Millis {
        match self.plan.runtimes {
            Runtimes::One => 0,
            Runtimes::Each => 2 * self.plan.network.least,
        }
    }

    /// How long a world must be without faults until earlier faults have no effect any more.
    pub(crate) fn settling(&self, waiter: &Waiter) -> Millis {
        // Positions of dead waiters are kept for so long, and a candidate pauses after a failure.
        let kept = match waiter.kind {
            Kind::Fair | Kind::Read | Kind::Write | Kind::Permit => 5_000,
            _ if waiter.is_leader => 1_500,
            _ => 0,
        };
        kept + 2 * self.plan.settings.lease + 2 * self.plan.settings.timeout + 1_000
    }

    /// The invariants of a world whose users have all ended.
    pub(crate) fn all_done(&mut self, left: &[(usize, sim::Left)]) {
        for (process, left) in left {
            let sim::Left {
                grants,
                unfinished,
                waiters,
                pending,
                ..
            } = left;
            if grants + unfinished + waiters + pending > 0 {
                let story = format!(
                    "p{process} has nothing to do and keeps {grants} grants, {unfinished} parts of sets, {waiters} \
                     queues and {pending} requests"
                );
                self.violated(CLEANUP, story);
            }
        }
        for store in 0..self.stores.len() {
            let subscribed = self.stores[store].subscribed();
            if subscribed > 0 {
                self.violated(
                    CLEANUP,
                    format!("store {store} has {subscribed} subscriptions that nobody needs"),
                );
            }
        }
    }

    /// The grants that a store has of clients that live.
    pub(crate) fn orphans(&mut self, store: usize, entries: &[sim::Entry], living: &[u128]) {
        let orphan = entries
            .iter()
            .find(|entry| !entry.kept && living.contains(&sim::client_of(entry.grant)));
        if let Some(sim::Entry { key, grant, .. }) = orphan {
            let story = format!(
                "store {store} has {key} granted to {}, where nobody holds it: it is busy for a lease",
                self.checks.name_of(*grant)
            );
            self.violated(CLEANUP, story);
        }
    }
}

/// A client was shut down, and reports the number of its unconfirmed releases: if there are none, its store has
/// nothing of this client.
pub(crate) fn closed((process, user): (usize, usize), client: &LockClient, unconfirmed: usize) {
    if unconfirmed > 0 {
        return with(World::counters_are_inexact);
    }
    if !with(|world| world.checks.single_store && world.checks.assumes.cleanup) {
        return;
    }
    let id = sim::id_of(client);
    let entries = crate::store::inside(0, sim::entries);
    let left = entries.into_iter().find(|entry| {
        // The lease of one that was lost before runs out.
        !entry.kept && sim::client_of(entry.grant) == id && !sim::was_lost(entry.grant)
    });
    if let Some(sim::Entry { key, grant, .. }) = left {
        with(|world| {
            let story = format!(
                "p{process}/u{user} is told that its client has released all, and the store has {key} granted to {}",
                world.checks.name_of(grant)
            );
            world.violated(CLEANUP, story);
        });
    }
}

/// A store has carried out a request.
pub(crate) fn carried_out(store: usize, request: &Request, result: &Result<Reply, StoreError>) {
    if with(|world| world.trace.is_on()) {
        let holders = match request {
            Request::Acquire(request, _) => {
                crate::store::inside(store, |memory| sim::holders_of(memory, &request.key))
            }
            _ => Vec::new(),
        };
        with(|world| {
            let event = words::carried_out(request, result, &holders, &world.checks);
            tell!(world, Who::Store(store), "{event}");
        });
    }
    counter::look(store, request, result);
    let total = permits::look(store, request, result);
    match (request, result) {
        (
            Request::Acquire(request, _),
            Ok(Reply::Acquire(_, Vote::Cast(AcquireReply::Acquired(granted)))),
        ) => with(|world| world.granted(request, granted, total)),
        (Request::AcquireAll(all), Ok(Reply::AcquireAll(_, AcquireAllReply::Acquired { grants }))) => {
            with(|world| {
                world.counts.sometimes("a set that was granted by one step");
                for (request, granted) in all.iter().zip(grants) {
                    world.granted(request, granted, None);
                }
            });
        }
        _ => {}
    }
    if let (Request::Record(request), Ok(Reply::Record(reply))) = (request, result) {
        with(|world| world.record_step(store, request, reply));
    }
    match (request, result) {
        (Request::Acquire(request, _), Ok(Reply::Acquire(_, reply))) => {
            with(|world| {
                world.takes_position(request, is_granted(reply));
                if is_granted(reply) {
                    world.passes_by(request);
                }
            });
        }
        (Request::Release(request), Ok(_)) => with(|world| world.leaves_position(request)),
        _ => {}
    }
    match (request, result) {
        (Request::Acquire(request, _), Ok(Reply::Acquire(key, reply))) if is_granted(reply) => {
            time::granted(store, key, request.grant);
        }
        (Request::AcquireAll(all), Ok(Reply::AcquireAll(_, AcquireAllReply::Acquired { .. }))) => {
            for request in all {
                time::granted(store, &request.key, request.grant);
            }
        }
        _ => {}
    }
    if let (Request::Release(request), Ok(reply)) = (request, result) {
        let key = &request.key;
        let is_released = matches!(reply, Reply::Release(ReleaseReply::Released { .. }));
        let keep_for = if is_released {
            request.keep_for
        } else {
            Duration::ZERO
        };
        time::released(store, key, request.grant, keep_for);
        if is_released && store == 0 {
            with(|world| world.checks.grants.released(request.grant));
        }
        // What was not held has been free before.
        if is_released && crate::store::inside(store, |memory| sim::holders_of(memory, key).is_empty()) {
            with(|world| world.comes_free(key, 0));
        }
    }
}

/// The number of a lock in the plan, by the name that `holder::key_of` gives it.
fn lock_number(key: &LockKey) -> Option<u32> {
    key.as_str().strip_prefix('k')?.parse().ok()
}

fn is_granted(reply: &Vote) -> bool {
    matches!(reply, Vote::Cast(AcquireReply::Acquired(_)))
}

impl World {
    fn granted(&mut self, request: &AcquireRequest, granted: &Granted, total: Option<i64>) {
        let tokens = (granted.first_token, granted.last_token);
        let AcquireRequest {
            kind,
            ref key,
            grant,
            amount,
            ..
        } = *request;
        self.checks.free_since.remove(key);
        if !self.checks.single_store {
            return;
        }
        let (first, last) = tokens;
        self.checks.grants.granted(grant, tokens);
        let before = self.checks.granted.insert(key.clone(), last).unwrap_or_default();
        if first <= before && self.checks.assumes.tokens {
            self.violated(
                FENCING,
                format!("the store granted {key} with token {first} after {before}"),
            );
        }
        if kind == Kind::Unowned {
            return;
        }
        if kind == Kind::Permit {
            return self.permits_granted(key, (amount, total), grant);
        }
        if !self.checks.assumes.exclusion {
            return;
        }
        let Some(all) = self.checks.by_key.get(key) else {
            return;
        };
        let believer = all.iter().copied().find(|id| {
            let section = &self.checks.sections[id];
            let excludes = kind != Kind::Read || section.kind != Kind::Read;
            let is_other = sim::grants(&section.held).all(|(_, _, other)| other != grant);
            // A writer that reads under its own lock.
            let reads_under = request.nested_in.is_some() && section.kind == Kind::Write;
            excludes && is_other && !reads_under && self.is_held(section)
        });
        if let Some(id) = believer {
            let Section {
                process, user, token, ..
            } = self.checks.sections[&id];
            let name = self.checks.name_of(grant);
            self.violated(
                LOSS,
                format!("the store granted {key} to {name} while p{process}/u{user} is told that it holds it (token {token})"),
            );
        }
    }

    /// Those that wait hear of it at once, or so much later.
    fn comes_free(&mut self, key: &LockKey, unheard: Millis) {
        if !self.checks.single_store {
            return;
        }
        let free_since = self.now;
        self.checks.free_since.insert(key.clone(), free_since);
        if self.checks.waiters.values().any(|waiter| waiter.key == *key) {
            let key = key.clone();
            self.schedule(
                free_since + self.patience() + unheard,
                Event::Check(Due::Taken { key, free_since }),
            );
        }
    }
}

/// Makes the checks that are due.
pub(crate) fn due(world: &mut World, due: Due) {
    match due {
        Due::Over { section } => world.is_over(section),
        Due::Opened { key, at } => world.latch_was_opened(&key, at),
        Due::Taken { key, free_since } => {
            let calm_since = world.weather.calm_since();
            let settled = |waiter: &Waiter| {
                calm_since.is_some_and(|since| since + world.settling(waiter) <= free_since)
            };
            if world.checks.free_since.get(&key) != Some(&free_since) {
                return;
            }
            let patience = world.now - free_since;
            // A writer that waits for a set and is preferred keeps the readers of each of its keys out.
            let mut waiters = world.checks.waiters.values();
            let sets = waiters.any(|waiter| waiter.is_set() && waiter.kind == Kind::Write);
            let waits = |waiter: &&Waiter| {
                waiter.key == key
                    && !(waiter.kind == Kind::Read && sets)
                    && waiter.attentive
                    && !waiter.nested
                    && !waiter.is_set()
                    && waiter.since < free_since
                    && settled(waiter)
                    && world.can_have_permits(waiter, free_since)
            };
            if let Some(waiter) = world.checks.waiters.values().find(waits) {
                let Waiter {
                    process, user, since, ..
                } = waiter;
                let story = format!(
                    "{key} is free since {patience} ms, and p{process}/u{user}, which waits for it since {since} ms, \
                     does not get it"
                );
                world.violated(WAITING, story);
            }
        }
        Due::Answered { record, since } => world.is_answered(&record, since),
    }
}

/// A write has come to the resource.
pub(crate) fn written(world: &mut World, write: Write) {
    let Write {
        section,
        process,
        user,
        key,
        token,
    } = write;
    let newest = world.checks.registers.get(&key).copied().unwrap_or_default();
    if token >= newest {
        world.checks.registers.insert(key, token);
        return;
    }
    let is_held = world
        .checks
        .sections
        .get(&section)
        .is_some_and(|section| world.is_held(section));
    if is_held && world.checks.assumes.exclusion {
        let story = format!(
            "the resource of {key} refuses token {token} of p{process}/u{user}, which holds it: it has {newest}"
        );
        world.violated(FENCING, story);
    } else {
        world.counts.sometimes("a stale write that was refused");
        tell!(
            world,
            Who::User(process, user),
            "its late write to {key} with token {token} is refused"
        );
    }
}

impl Waiter {
    /// Whether it waits for several keys at once.
    pub(crate) fn is_set(&self) -> bool {
        !self.also.is_empty()
    }

    pub(crate) fn new(
        (process, user): (usize, usize),
        (kind, key): (Kind, LockKey),
        since: Millis,
    ) -> Waiter {
        Waiter {
            process,
            user,
            key,
            kind,
            since,
            until: None,
            calls: 1,
            once: false,
            attentive: true,
            nested: false,
            also: Vec::new(),
            is_closed: false,
            is_leader: false,
            amount: 1,
            preferred: false,
            max_waiters: None,
            queue_since: since,
        }
    }
}
