//! Repeated checks: grants that no client knows of, and unused locks with waiters.

use std::collections::{BTreeMap, BTreeSet};

use dlock::sim::{self, Client, Entry};
use dlock::store::{GrantId, Kind};
use dlock::{LockClient, LockKey};

use crate::check::{CLEANUP, LOSS, WAITING, Waiter};
use crate::plan::Millis;
use crate::world::{Event, World, with};

/// Between two looks.
const EVERY: Millis = 100;
/// A woken waiter that is not polled loses its grant within this time (`POLL_DEADLINE`, twice).
const UNPOLLED: Millis = 2_500;

/// How long a store keeps the position of a waiter that no longer sends requests.
pub(crate) const POSITION: Millis = 5_500;

/// A fair waiter sends its next request within this time; only the next waiter is woken. No notification reports the
/// end of a lease, and a lease that began after its last request may be shorter than this.
const ASKS_AGAIN: Millis = 1_500;

/// What was seen at the looks before.
#[derive(Default)]
pub(crate) struct Looks {
    clients: BTreeMap<u128, (usize, Client)>,
    /// Grants of stores that their clients did not know of.
    unknown: BTreeSet<(usize, GrantId)>,
    /// Sections whose leases had not run out.
    renewed: BTreeSet<u64>,
    /// Sections whose users were told that their locks are lost.
    lost: BTreeSet<u64>,
    /// Since when no code runs that these protect.
    unused_since: BTreeMap<LockKey, Millis>,
}

impl World {
    /// A client is there.
    pub(crate) fn client_begins(&mut self, process: usize, client: &LockClient) {
        let known = (process, Client::of(client));
        self.looks.clients.insert(sim::id_of(client), known);
    }

    /// The clients of a process are gone.
    pub(crate) fn clients_end(&mut self, process: usize) {
        self.looks.clients.retain(|_, (of, _)| *of != process);
    }

    /// The process that has a grant, if that lives.
    pub(crate) fn process_of(&self, grant: GrantId) -> Option<usize> {
        let of = self.looks.clients.get(&sim::client_of(grant));
        of.map(|(process, _)| *process)
    }

    pub(crate) fn looks_again(&mut self) {
        self.schedule(self.now + EVERY, Event::Look);
    }

    /// A grant that its client does not know of, and does nothing about, keeps everybody out for a lease.
    fn finds_orphans(&mut self, store: usize, entries: &[Entry]) {
        let calm = self.checks.assumes.cleanup && self.calm_for(2 * self.plan.settings.timeout + 2_000);
        let mut unknown = BTreeSet::new();
        for Entry { key, grant, kept, .. } in entries {
            let Some((process, client)) = self.looks.clients.get(&sim::client_of(*grant)) else {
                continue;
            };
            let (process, is_stopped) = (*process, self.clocks[*process].stopped.is_some());
            if *kept || is_stopped || client.is_busy() || client.has(*grant) {
                continue;
            }
            // A lost one whose late renewals came through is released when its guard is dropped.
            if self.checks.has_guard(*grant) {
                continue;
            }
            if calm && self.looks.unknown.contains(&(store, *grant)) {
                let name = self.checks.name_of(*grant);
                let story = format!(
                    "store {store} has {key} granted to {name}, of which p{process} does not know: nobody gives it back, and \
                     it is busy until the lease is over"
                );
                self.violated(CLEANUP, story);
            }
            unknown.insert((store, *grant));
        }
        self.looks.unknown.retain(|(of, _)| *of != store);
        self.looks.unknown.append(&mut unknown);
    }

    /// A waiter soon acquires an unused lock.
    fn finds_unused(&mut self, kept: &BTreeSet<LockKey>) {
        let now = self.now;
        if self.checks.waiting().next().is_none() {
            return self.looks.unused_since.clear();
        }
        // A set that was never free at once is taken one by one, and what is there already is kept for a while.
        let by_sets = self.checks.waiting().filter(|waiter| waiter.is_set());
        let by_sets = by_sets.flat_map(|waiter| waiter.also.iter().chain([&waiter.key]));
        let used: BTreeSet<_> = self.checks.used().chain(by_sets).chain(kept).collect();
        let awaited: BTreeSet<_> = self.checks.waiting().map(|waiter| &waiter.key).collect();
        let unused_since = &mut self.looks.unused_since;
        unused_since.retain(|key, _| awaited.contains(key) && !used.contains(key));
        for key in awaited {
            if !used.contains(key) && !unused_since.contains_key(key) {
                unused_since.insert(key.clone(), now);
            }
        }
        let Some(calm_since) = self.weather.calm_since() else {
            return;
        };
        let has_unpolled = self.checks.some_unpolled;
        // Clients of a quorum may each get a minority, and try again after a pause.
        let attempts = if self.plan.stores.count() > 1 { 10 } else { 1 };
        let anyway = attempts * (2 * self.plan.network.round_trip() + self.plan.settings.lease + 500);
        // One that is polled once in between has its time anew.
        let unpolled = |key: &LockKey| {
            let others = self
                .checks
                .waiting()
                .filter(|other| other.key == *key && !other.attentive);
            UNPOLLED * Millis::try_from(others.count().max(1)).unwrap_or(1)
        };
        let patience = |waiter: &Waiter| match waiter.kind {
            Kind::Fair if !has_unpolled => anyway + ASKS_AGAIN,
            _ if !has_unpolled => anyway,
            Kind::Fair | Kind::Read | Kind::Write => anyway + unpolled(&waiter.key) + POSITION,
            _ => anyway + unpolled(&waiter.key),
        };
        let left_out = self.checks.waiting().find(|waiter| {
            let from = self.looks.unused_since.get(&waiter.key).copied();
            // It may have been used between two looks.
            let from = from.map(|from| from.max(self.checks.last_used(&waiter.key).unwrap_or_default()));
            let settled = calm_since + self.settling(waiter);
            waiter.attentive
                && !waiter.nested
                && from.is_some_and(|from| {
                    from.max(waiter.since).max(settled) + patience(waiter) < now
                        && self.can_have_permits(waiter, from)
                })
        });
        if let Some(waiter) = left_out {
            let most = patience(waiter);
            let Waiter {
                process,
                user,
                key,
                since,
                ..
            } = waiter;
            let story = format!(
                "nobody uses {key} for more than {} ms, and p{process}/u{user}, which waits for it since {since} \
                 ms, does not get it",
                most
            );
            self.violated(WAITING, story);
        }
    }

    /// Where nothing goes wrong, a lease that is renewed does not run out.
    fn finds_run_out(&mut self) {
        let settled = self.calm_for(2 * self.plan.settings.lease + 2 * self.plan.settings.timeout + 1_000);
        if !settled && self.weather.has_been() {
            return self.looks.renewed.clear();
        }
        let (mut renewed, mut run_out) = (BTreeSet::new(), None);
        for (id, ran_out) in self.sections_that_ran_out() {
            if !ran_out {
                renewed.insert(id);
            } else if self.looks.renewed.contains(&id) {
                run_out = Some(id);
            }
        }
        self.looks.renewed = renewed;
        if let Some((process, user, key)) = run_out.and_then(|id| self.section_of(id)) {
            let story = format!(
                "the lease of {key} is renewed and ran out all the same, while nothing went wrong: p{process}/u{user} has \
                 lost it"
            );
            self.violated(LOSS, story);
        }
    }

    /// What is lost stays lost.
    fn finds_revived(&mut self) {
        let (mut lost, mut revived) = (BTreeSet::new(), None);
        for (id, is_held) in self.sections_held() {
            if !is_held {
                lost.insert(id);
            } else if self.looks.lost.contains(&id) {
                revived = Some(id);
            }
        }
        self.looks.lost = lost;
        if let Some((process, user, key)) = revived.and_then(|id| self.section_of(id)) {
            let story =
                format!("p{process}/u{user} was told that {key} is lost, and is told now that it holds it");
            self.violated(LOSS, story);
        }
    }

    fn calm_for(&self, time: Millis) -> bool {
        let since = self.weather.calm_since();
        since.is_some_and(|since| since + time <= self.now)
    }
}

/// Looks at the world.
pub(crate) fn look() {
    // By a `min_hold`.
    let mut kept = BTreeSet::new();
    for store in 0..with(|world| world.stores.len()) {
        let entries = crate::store::inside(store, sim::entries);
        kept.extend(
            entries
                .iter()
                .filter(|entry| entry.kept)
                .map(|entry| entry.key.clone()),
        );
        with(|world| world.finds_orphans(store, &entries));
    }
    with(|world| {
        world.finds_unused(&kept);
        world.finds_left_positions();
        world.finds_too_many_waiters();
        world.finds_run_out();
        world.finds_revived();
        world.looks_again();
    });
}
