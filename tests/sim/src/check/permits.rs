//! Invariants of permits.

use std::collections::BTreeMap;
use std::sync::Arc;

use dlock::LockKey;
use dlock::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use dlock::store::member::Vote;
use dlock::store::{AcquireReply, GrantId, Kind, StoreError};
use futures_util::FutureExt;

use super::{EXCLUSION, LOSS, Section, Waiter};
use crate::plan::Millis;
use crate::store::{Reply, Request, inside};
use crate::world::{World, with};

/// How often a waiter asks for the number of permits of a semaphore that has too few in all.
const ASKS_FOR_PERMITS_EVERY: Millis = 100;

#[derive(Default)]
pub(super) struct Permits {
    /// How many there are in all, since when, and how many there were when the last were granted.
    totals: BTreeMap<LockKey, (i64, Millis)>,
    at_grant: BTreeMap<LockKey, BTreeMap<u64, i64>>,
}

/// How many permits there are, after a step that granted some or changed their number.
pub(super) fn look(store: usize, request: &Request, result: &Result<Reply, StoreError>) -> Option<i64> {
    let (key, id) = match (request, result) {
        (Request::Acquire(request, _), Ok(Reply::Acquire(_, Vote::Cast(AcquireReply::Acquired(_)))))
            if request.kind == Kind::Permit =>
        {
            (&request.key, request.grant)
        }
        (Request::Count(request), Ok(_)) if request.step.kind() == Kind::Permit => (&request.key, request.id),
        _ => return None,
    };
    let looks = CounterRequest::new(key.clone(), id, CounterStep::Permits);
    let reply = inside(store, |memory| {
        Arc::new(memory.clone()).count(looks).now_or_never()
    });
    let Some(Ok(CounterReply::Permits { free, held })) = reply else {
        return None;
    };
    let total = free? + i64::try_from(held).unwrap_or(i64::MAX);
    with(|world| {
        let now = world.now;
        let known = world
            .checks
            .permits
            .totals
            .entry(key.clone())
            .or_insert((total, now));
        if known.0 != total {
            *known = (total, now);
        }
    });
    Some(total)
}

impl World {
    /// How many permits those have that are told that they hold them.
    fn believed(&self, key: &LockKey) -> i64 {
        let all = self.checks.by_key.get(key).into_iter().flatten();
        all.map(|id| &self.checks.sections[id])
            .filter(|section| section.kind == Kind::Permit && self.is_held(section))
            .map(|section| i64::from(section.amount))
            .sum()
    }

    /// A store has granted permits.
    pub(super) fn permits_granted(
        &mut self,
        key: &LockKey,
        (amount, total): (u32, Option<i64>),
        to: GrantId,
    ) {
        let Some(total) = total else { return };
        let token = self.checks.granted.get(key).copied().unwrap_or_default();
        let at_grant = self.checks.permits.at_grant.entry(key.clone()).or_default();
        at_grant.insert(token, total);
        let believed = self.believed(key);
        if self.checks.assumes.exclusion && believed + i64::from(amount) > total {
            let name = self.checks.name_of(to);
            let story = format!(
                "the store granted {amount} permits of {key} to {name} while {believed} of {total} are held by users \
                 that are told so"
            );
            self.violated(LOSS, story);
        }
    }

    /// A section with permits begins: the last of those that are granted now found enough of them.
    pub(super) fn has_permits(&mut self, section: &Section) {
        if !self.checks.assumes.exclusion {
            return;
        }
        let Section { key, amount, .. } = section;
        let others = self.checks.by_key.get(key).into_iter().flatten();
        let newest = others
            .map(|id| &self.checks.sections[id])
            .filter(|other| self.is_held(other))
            .map(|other| other.token)
            .chain([section.token])
            .max();
        let at_grant = self.checks.permits.at_grant.get(key);
        let Some(total) = newest.and_then(|newest| at_grant?.get(&newest).copied()) else {
            return;
        };
        let others = self.believed(key);
        if others + i64::from(*amount) > total {
            let story = format!(
                "p{}/u{} has {amount} permits of {key} beside {others} others, and there are {total}",
                section.process, section.user
            );
            self.violated(EXCLUSION, story);
        }
    }

    /// Whether there are as many permits as this waiter wants since then, and it knows.
    pub(crate) fn can_have_permits(&self, waiter: &Waiter, since: Millis) -> bool {
        if waiter.kind != Kind::Permit {
            return true;
        }
        let Some((total, changed)) = self.checks.permits.totals.get(&waiter.key) else {
            return false;
        };
        // A waiter that found too few permits in all asks for their number now and then, and not at each notification.
        let known = if *changed < waiter.since {
            *changed
        } else {
            changed + ASKS_FOR_PERMITS_EVERY + self.plan.network.round_trip()
        };
        i64::from(waiter.amount) <= *total && known <= since
    }
}
