//! Requests to the store stay within a budget. Without faults, a call sends one request, and further requests only
//! for a reason: the lock became available, the lease that the store reported is about to end, or the queue position
//! must be kept. A lease is renewed a few times, and no request is repeated while no call makes progress. In storms,
//! a call repeats a failed request only after a pause.

use std::collections::{BTreeMap, BTreeSet};

use dlock::LockKey;
use dlock::store::{GrantId, Kind};

use super::{BUDGET, Checks, Waiter, lock_number};
use crate::plan::{Lock, Millis, Plan};
use crate::store::Request;
use crate::world::World;

/// Requests for which there is a reason are counted in thousandths.
const ONE: i64 = 1_000;
/// How many requests a waiter may send within a lease, even without a reason; a waiter of the library sends at most
/// four.
const LOOKS: u64 = 6;
/// How often a lease may be renewed within its length; the library does three times, and four times for parts of sets.
const RENEWALS: u64 = 6;
/// So many requests more than there were reasons for are too many, beside as many as there are calls that wait.
const TOO_MANY: i64 = 10;
/// The same without an end or a beginning of any call, or of the use of any lock.
const IN_VAIN: u64 = 100;
/// How many requests a user may cause in a second, whatever happens: a call repeats after 25 ms at the least.
const A_SECOND: u64 = 100;
/// How many requests a call may cause for each of its keys, beside those.
const A_CALL: u64 = 12;

/// What these checks remember.
#[derive(Default)]
pub(super) struct Budgets {
    asks: BTreeMap<(usize, LockKey), Bucket>,
    renewals: BTreeMap<(usize, GrantId), Bucket>,
    idle: Idle,
    second: Second,
}

/// Reasons that were not used yet, and not more than a few of them.
struct Bucket {
    /// In thousandths.
    left: i64,
    at: Millis,
    since: Millis,
    sent: u32,
}

impl Bucket {
    fn new(now: Millis, left: i64) -> Bucket {
        Bucket {
            left,
            at: now,
            since: now,
            sent: 0,
        }
    }

    /// Time has passed, in which there were `rate` reasons for each `period`; more than `most` are not kept.
    fn passes(&mut self, now: Millis, rate: u64, period: Millis, most: i64) {
        let passed = now.saturating_sub(self.at).min(1_000_000);
        let reasons = ONE * i64::try_from(passed * rate).unwrap_or(i64::MAX / ONE) / period.max(1) as i64;
        self.left = (self.left + reasons).min(most);
        self.at = now;
        if self.left >= most {
            (self.since, self.sent) = (now, 0);
        }
    }

    fn sends(&mut self) {
        self.left -= ONE;
        self.sent += 1;
    }
}

/// What was sent since any call began or ended, or any use of a lock.
#[derive(Default)]
struct Idle {
    since: Millis,
    sent: u64,
}

/// What was sent in a second of the world.
#[derive(Default)]
struct Second {
    number: Millis,
    sent: u64,
    calls: u64,
}

/// Which keys are judged, and by which lease.
pub(super) struct Judged {
    /// Keys of sets are asked for with others, for the reasons of those.
    of_sets: Vec<u32>,
    shortest_lease: Millis,
    users: u64,
}

impl Judged {
    pub(super) fn of(plan: &Plan) -> Judged {
        let mut judged = Judged {
            of_sets: Vec::new(),
            shortest_lease: plan.settings.lease,
            users: plan
                .processes
                .iter()
                .map(|process| process.users.len() as u64)
                .sum(),
        };
        plan.each_lock(&mut |lock: &Lock| {
            if !lock.also.is_empty() {
                judged.of_sets.extend(lock.also.iter().chain([&lock.key]));
            }
            let shorter = lock.fixed_lease.into_iter().chain(lock.max_hold);
            judged.shortest_lease = shorter.fold(judged.shortest_lease, Millis::min);
        });
        judged
    }

    fn is_of_set(&self, key: &LockKey) -> bool {
        lock_number(key).is_some_and(|number| self.of_sets.contains(&number))
    }
}

impl Checks {
    /// How many calls of a process wait for a key.
    fn calls_for(&self, process: usize, key: &LockKey) -> i64 {
        let of_key = self
            .waiters
            .values()
            .filter(|waiter| waiter.process == process && (waiter.key == *key || waiter.also.contains(key)));
        of_key.map(|waiter| i64::from(waiter.calls)).sum()
    }
}

impl World {
    /// There is a reason to ask for a key, so many times for each call that waits for it and `more` times.
    fn has_reason(&mut self, process: usize, key: &LockKey, for_each: i64, more: i64) {
        if !self.checks.single_store {
            return;
        }
        let calls = self.checks.calls_for(process, key);
        let now = self.now;
        let bucket = self.checks.budgets.asks.entry((process, key.clone()));
        let bucket = bucket.or_insert_with(|| Bucket::new(now, 0));
        bucket.left = (bucket.left + ONE * (for_each * calls + more)).min(most_left(calls));
    }

    /// A call begins or has ended, or the use of a lock, which is a reason to ask so many times.
    pub(super) fn gets_on(&mut self, process: usize, key: &LockKey, reasons: i64) {
        self.checks.budgets.idle = Idle {
            since: self.now,
            sent: 0,
        };
        self.has_reason(process, key, 0, reasons);
    }

    /// A reader is let in, and all others of its process ask.
    pub(super) fn opens(&mut self, process: usize, key: &LockKey) {
        self.has_reason(process, key, 1, 0);
    }

    /// A call begins.
    pub(super) fn call_begins(&mut self, waiter: &Waiter) {
        self.begins_second();
        self.checks.budgets.second.calls += u64::from(waiter.calls) * (1 + waiter.also.len() as u64);
        self.gets_on(waiter.process, &waiter.key, 2 * i64::from(waiter.calls));
    }

    /// A process hears of a key, or that it will.
    pub(crate) fn hears_of(&mut self, process: usize, topic: &str) {
        if !self.checks.single_store {
            return;
        }
        let key = LockKey::from(topic.split('\n').next().unwrap_or(topic).to_owned());
        self.has_reason(process, &key, 1, 1);
    }

    /// A process has a connection again, so what it waits for is asked for at once.
    pub(crate) fn may_ask_again(&mut self, process: usize) {
        self.begins_second();
        let waiters = self.checks.waiters.values();
        let of_process = waiters.filter(|waiter| waiter.process == process);
        let keys: BTreeSet<_> = of_process
            .flat_map(|waiter| waiter.also.iter().chain([&waiter.key]))
            .collect();
        self.checks.budgets.second.calls += keys.len() as u64;
    }

    fn begins_second(&mut self) {
        let number = self.now / 1_000;
        if self.checks.budgets.second.number != number {
            let before = std::mem::take(&mut self.checks.budgets.second);
            // Calls may begin at the end of a second.
            self.checks.budgets.second = Second {
                number,
                calls: if before.number + 1 == number {
                    before.calls
                } else {
                    0
                },
                ..Second::default()
            };
        }
    }

    /// A process sends a request to a store.
    pub(crate) fn costs(&mut self, process: usize, request: &Request) {
        match request {
            Request::Acquire(..) | Request::AcquireAll(_) | Request::Renew(_) | Request::Release(_) => {}
            _ => return,
        }
        self.begins_second();
        self.checks.budgets.second.sent += 1;
        self.is_within_second();
        if !self.checks.single_store || !self.is_settled_for(0, self.now) {
            let budgets = &mut self.checks.budgets;
            budgets.asks.clear();
            budgets.renewals.clear();
            budgets.idle = Idle {
                since: self.now,
                sent: 0,
            };
            return;
        }
        self.checks.budgets.idle.sent += 1;
        match request {
            Request::Acquire(request, _) if request.kind != Kind::Unowned => {
                self.asks_for(process, &request.key);
            }
            Request::Renew(all) => {
                for request in all {
                    let lease = u64::try_from(request.lease.as_millis()).unwrap_or(Millis::MAX);
                    self.renews(process, &request.key, request.grant, lease);
                }
            }
            Request::Release(request) => {
                self.checks.budgets.renewals.remove(&(process, request.grant));
                // The next one here asks right behind it.
                self.has_reason(process, &request.key, 0, 2);
            }
            _ => {}
        }
        self.is_not_in_vain();
    }

    fn asks_for(&mut self, process: usize, key: &LockKey) {
        let judged = &self.checks.judged;
        if judged.is_of_set(key) {
            return;
        }
        let (lease, now) = (judged.shortest_lease, self.now);
        let calls = self.checks.calls_for(process, key);
        let most = most_left(calls);
        let bucket = self.checks.budgets.asks.entry((process, key.clone()));
        let bucket = bucket.or_insert_with(|| Bucket::new(now, most));
        bucket.passes(now, LOOKS * u64::try_from(calls).unwrap_or(0).max(1), lease, most);
        bucket.sends();
        if bucket.left < -ONE * (TOO_MANY + calls) {
            let story = format!(
                "p{process} has asked for {key} {} times since {} ms for {calls} calls that wait there, and there was no \
                 reason for the last {} of them: no notification, no end of a lease",
                bucket.sent,
                bucket.since,
                -bucket.left / ONE
            );
            self.violated(BUDGET, story);
        }
    }

    fn renews(&mut self, process: usize, key: &LockKey, grant: GrantId, lease: Millis) {
        let (now, lease) = (self.now, lease.min(self.plan.settings.lease));
        let bucket = self.checks.budgets.renewals.entry((process, grant));
        let bucket = bucket.or_insert_with(|| Bucket::new(now, 3 * ONE));
        bucket.passes(now, RENEWALS, lease, 3 * ONE);
        bucket.sends();
        if bucket.left < -2 * ONE {
            let (sent, since) = (bucket.sent, bucket.since);
            let name = self.checks.name_of(grant);
            let story = format!(
                "p{process} has renewed {key} of {name} {sent} times since {since} ms, for {lease} ms each"
            );
            self.violated(BUDGET, story);
        }
    }

    /// While no call begins or ends, waiters look now and then, and holders renew.
    fn is_not_in_vain(&mut self) {
        let Idle { since, sent } = self.checks.budgets.idle;
        if sent <= IN_VAIN {
            return;
        }
        let waiters = self.checks.waiters.values();
        let calls: u64 = waiters
            .map(|waiter| u64::from(waiter.calls) * (1 + waiter.also.len() as u64))
            .sum();
        let some = calls + self.checks.sections.len() as u64 + self.at_work as u64;
        let looks = LOOKS + RENEWALS;
        let most = IN_VAIN + some * (looks + looks * (self.now - since) / self.checks.judged.shortest_lease);
        if sent > most {
            let story = format!(
                "{sent} requests were sent since {since} ms, and no call has got its lock or ended since: there is a reason \
                 for {most} at the most"
            );
            self.violated(BUDGET, story);
        }
    }

    /// In storms, too.
    fn is_within_second(&mut self) {
        let Second { number, sent, calls } = self.checks.budgets.second;
        let stores = self.plan.stores.count() as u64;
        let users = self.checks.judged.users;
        let most = stores * (users * A_SECOND + calls * A_CALL + IN_VAIN);
        if sent > most {
            let story = format!(
                "{sent} requests were sent since {} ms, and {users} users have a reason for {most} in a second at the most",
                number * 1_000
            );
            self.violated(BUDGET, story);
        }
    }
}

/// How many unused reasons are kept.
fn most_left(calls: i64) -> i64 {
    ONE * (4 + 2 * calls)
}
