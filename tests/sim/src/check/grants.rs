//! Grants of the stores: a holder has a token of its grant, a successful release has ended the grant, an expired
//! lease leaves the lock to the waiters, and a waiter that leaves gives up its queue position.

use std::collections::{BTreeMap, BTreeSet};

use dlock::store::{GrantId, Kind, ReleaseRequest};
use dlock::{Held, LockKey, sim};

use super::{CLEANUP, FENCING, LOSS, Section, Waiter};
use crate::look::POSITION;
use crate::plan::Millis;
use crate::world::{World, with};

/// What these checks remember.
#[derive(Default)]
pub(super) struct Grants {
    /// The first and last token of each; a request that arrived twice may have been granted twice.
    tokens: BTreeMap<GrantId, Vec<(u64, u64)>>,
    /// The token of the last holder of each: earlier holders have handed it off.
    last_token: BTreeMap<GrantId, u64>,
    /// Those that a release has ended at the store.
    released: BTreeSet<GrantId>,
    /// Those, and queue positions, for which a release was sent.
    given_up: BTreeSet<GrantId>,
    /// Positions without a waiter, as of the previous look.
    left: BTreeSet<GrantId>,
}

impl Grants {
    pub(super) fn granted(&mut self, grant: GrantId, tokens: (u64, u64)) {
        self.tokens.entry(grant).or_default().push(tokens);
    }

    /// Whether the holder with this token has handed it off: what became of it then is not its business.
    fn was_handed_off(&self, grant: GrantId, token: Option<u64>) -> bool {
        let last = self.last_token.get(&grant).copied();
        last.zip(token).is_some_and(|(last, token)| token < last)
    }

    pub(super) fn released(&mut self, grant: GrantId) {
        self.released.insert(grant);
    }

    pub(super) fn gives_up(&mut self, request: &ReleaseRequest) {
        self.given_up.insert(request.grant);
    }
}

/// Checks a successful release: it has ended the grants with these ids, unless another holder of this process has
/// or had them after it.
pub(crate) fn released((process, user): (usize, usize), held: &Held) {
    if !with(|world| world.judges_grants()) {
        return;
    }
    for (key, _, grant) in sim::grants(held) {
        let token = held.fencing_token_of(key.clone());
        let is_fine = with(|world| {
            let (checks, grants) = (&world.checks, &world.checks.grants);
            checks.has_guard(grant) || grants.released.contains(&grant) || grants.was_handed_off(grant, token)
        });
        if is_fine {
            continue;
        }
        let is_there = super::time::entry(0, key, grant).is_some();
        with(|world| {
            if !is_there {
                let name = world.checks.name_of(grant);
                let story = format!(
                    "p{process}/u{user} is told that it has given {key} back, and no release of {name} has ended that at the \
                     store: the lease had run out before"
                );
                world.violated(LOSS, story);
            }
        });
    }
}

/// A lease is over at a store: the key may have become available.
pub(super) fn lapsed(store: usize, key: &LockKey) {
    if crate::store::inside(store, |memory| sim::holders_of(memory, key).is_empty()) {
        with(|world| world.lapses(key));
    }
}

impl World {
    /// Whether there is one store, which keeps its data.
    fn judges_grants(&self) -> bool {
        let checks = &self.checks;
        checks.single_store && checks.assumes.exclusion && checks.assumes.cleanup
    }

    /// A section begins: its token is one of those that the store gave.
    pub(super) fn has_granted_token(&mut self, section: &Section) {
        let mut of_key = sim::grants(&section.held).filter(|(key, ..)| **key == section.key);
        let Some((_, _, grant)) = of_key.next() else {
            return;
        };
        let grants = &mut self.checks.grants;
        let token = section.token;
        let last = grants.last_token.entry(grant).or_default();
        *last = token.max(*last);
        let Some(blocks) = grants.tokens.get(&grant) else {
            return;
        };
        let is_in = |(first, last): &(u64, u64)| (*first..=*last).contains(&token);
        if !blocks.iter().any(is_in) {
            let (first, last) = blocks.last().copied().unwrap_or_default();
            let Section {
                process, user, key, ..
            } = section;
            let story = format!(
                "p{process}/u{user} has {key} with token {token}, and the store gave {first} to {last}: somebody else may get \
                 the same one"
            );
            self.violated(FENCING, story);
        }
    }

    /// A place in a queue that the store keeps is given up by a waiter that leaves: those behind it would wait for it for
    /// seconds.
    pub(crate) fn finds_left_positions(&mut self) {
        if !self.judges_grants() {
            return;
        }
        let mut left = BTreeSet::new();
        let mut found = None;
        for (kind, key, grant) in self.checks.orders.positions() {
            let Some(process) = self.process_of(grant) else {
                continue;
            };
            let waits =
                |waiter: &Waiter| waiter.process == process && (waiter.key == *key || waiter.is_set());
            if self.checks.grants.given_up.contains(&grant)
                || self.clocks[process].stopped.is_some()
                || self.checks.waiters.values().any(waits)
                || self.checks.left_in_line.values().any(waits)
            {
                continue;
            }
            if self.checks.grants.left.contains(&grant) {
                found.get_or_insert((process, kind, key.clone()));
            }
            left.insert(grant);
        }
        self.checks.grants.left = left;
        if let Some((process, kind, key)) = found {
            let what = if kind == Kind::Fair {
                "a waiter"
            } else {
                "a writer"
            };
            let story = format!(
                "p{process} waits for {key} no longer, and has not given up its place in the store's queue: others wait for \
                 {what} that has left"
            );
            self.violated(CLEANUP, story);
        }
    }

    fn lapses(&mut self, key: &LockKey) {
        if !self.checks.free_since.contains_key(key) {
            // It may have ended a moment after its whole milliseconds, by clocks that run apart.
            let late = 2 + self.checks.longest_lease / 100;
            // A lease that began after the last request of a waiter may be shorter than the lease that the waiter
            // knows, or than the position of a preferred writer, which readers are told and which has become this lease.
            let unheard = match self.has_waiter(key, Kind::Fair) {
                true => 1_500,
                false if self.has_waiter(key, Kind::Read) && prefers_writers(&self.plan) => POSITION,
                false if self.plan.processes.len() > 4 => self.checks.longest_lease,
                false => 0,
            };
            self.comes_free(key, late + unheard);
        }
    }

    fn has_waiter(&self, key: &LockKey, kind: Kind) -> bool {
        let mut waiters = self.checks.waiters.values();
        waiters.any(|waiter| waiter.key == *key && waiter.kind == kind)
    }
}

fn prefers_writers(plan: &crate::plan::Plan) -> bool {
    let mut any = false;
    plan.each_lock(&mut |lock: &crate::plan::Lock| any |= lock.preferred);
    any
}

/// The longest requested lease.
pub(super) fn longest_lease(plan: &crate::plan::Plan) -> Millis {
    let mut longest = plan.settings.lease;
    plan.each_lock(&mut |lock: &crate::plan::Lock| {
        let longer = lock.fixed_lease.into_iter().chain(lock.min_hold);
        longest = longer.fold(longest, Millis::max);
    });
    longest
}
