//! A store: the code of the memory store, behind a network, with its own clock.

pub(crate) mod record;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::sim;
use dlock::store::counter::Counters;
use dlock::store::counter::{CounterReply, CounterRequest};
use dlock::store::member::{QuorumMember, Vote};
use dlock::store::{
    AcquireAllReply, AcquireRequest, GrantId, Holder, Kind, Reason, ReleaseReply, ReleaseRequest,
    RenewRequest, Renewal, Store, StoreError, Watch,
};
use dlock::stores::memory::MemoryStore;
use futures_util::FutureExt;

use crate::drift;
use crate::plan::{Millis, Plan, StoreClock};
use crate::trace::Who;
use crate::world::{tell, with};

/// What a store that is full says of a request that it refuses.
pub(crate) const FULL: &str = "the store is full";

/// When the world begins, by the wall clocks of stores: a day of 2026.
pub(crate) const BEGINS: Duration = Duration::from_secs(1_767_225_600);
/// What the clocks of stores show when the world begins, so that they can go back.
pub(crate) const AT_FIRST: Millis = 3_600_000;

#[derive(Debug, Clone)]
pub(crate) enum Request {
    /// With how a member of a quorum votes.
    Acquire(AcquireRequest, Option<Ballot>),
    AcquireAll(Vec<AcquireRequest>),
    Release(ReleaseRequest),
    Renew(Vec<RenewRequest>),
    Inspect(LockKey),
    List(String),
    ForceRelease(LockKey),
    Count(CounterRequest),
    RaiseFence(Kind, LockKey, GrantId, u64),
    Record(record::Request),
}

/// After how long with its data a member of a quorum votes.
pub(crate) type Ballot = Option<Duration>;

impl Request {
    /// Whether it asks for locks.
    pub(crate) fn takes(&self) -> bool {
        matches!(self, Request::Acquire(..) | Request::AcquireAll(_))
    }
}

#[derive(Debug)]
pub(crate) enum Reply {
    Acquire(LockKey, Vote),
    AcquireAll(Vec<LockKey>, AcquireAllReply),
    Release(ReleaseReply),
    Renew(Vec<Result<Renewal, StoreError>>),
    Inspect(Vec<Holder>),
    List(Vec<(LockKey, Holder)>),
    ForceRelease(bool),
    Count(CounterReply),
    RaiseFence(bool),
    Record(record::Reply),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mood {
    Well,
    /// Nothing is taken any more; what is held is renewed and released.
    Full,
    /// Refuses everything that changes something.
    Refuses,
}

/// A clock of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    drift: i64,
    ahead: i64,
}

impl Clock {
    /// What it shows.
    pub(crate) fn shows(self, now: Millis) -> Duration {
        Duration::from_millis((AT_FIRST + drift::shows(now, self.drift)).saturating_add_signed(self.ahead))
    }

    /// How long it takes until it shows so much more.
    pub(crate) fn lasts(self, left: Duration) -> Millis {
        drift::lasts(drift::whole_millis(left), self.drift)
    }
}

/// What a store knows.
#[derive(Clone)]
struct Data {
    memory: MemoryStore,
    /// Grants that were released: an acquire of one that comes later is refused.
    given_back: HashSet<GrantId>,
}

pub(crate) struct SimStore {
    pub(crate) memory: MemoryStore,
    pub(crate) clock: Clock,
    /// When it may have lost its data, if ever.
    lost_at: Option<Millis>,
    /// What a replica of it knows.
    replica: Option<Data>,
    /// How long a request takes where it is slow, and when it has done all that came so far.
    each: Millis,
    busy_until: Millis,
    /// How many times it was started again.
    pub(crate) epoch: u32,
    up: bool,
    mood: Mood,
    /// Grants that were released: an acquire of one that comes later is refused.
    given_back: HashSet<GrantId>,
    subscriptions: BTreeMap<Arc<str>, BTreeMap<usize, Watch>>,
}

impl SimStore {
    pub(crate) fn new(plan: &Plan, store: usize) -> SimStore {
        let StoreClock { drift, ahead } = plan.store_clocks.get(store).copied().unwrap_or_default();
        SimStore {
            memory: MemoryStore::new(),
            clock: Clock { drift, ahead },
            lost_at: plan.settings.members_abstain.then_some(0),
            replica: None,
            each: 0,
            busy_until: 0,
            epoch: 0,
            up: true,
            mood: Mood::Well,
            given_back: HashSet::new(),
            subscriptions: BTreeMap::new(),
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it would grant what no client holds: after a loss of data it abstains for a while.
    pub(crate) fn votes(&self, plan: &Plan, now: Millis) -> bool {
        let abstains = plan.settings.members_abstain;
        // By a clock that may be fast.
        let least = plan.settings.max_lease() * 19 / 20;
        !abstains || self.lost_at.is_none_or(|at| at + least <= now)
    }

    pub(crate) fn slow_down(&mut self, each: Millis) {
        self.each = each;
    }

    /// When it is done with a request that comes now, if not at once.
    pub(crate) fn served_at(&mut self, now: Millis) -> Option<Millis> {
        self.busy_until = self.busy_until.max(now) + self.each;
        (self.busy_until > now).then_some(self.busy_until)
    }

    pub(crate) fn step_clock(&mut self, by: i64) {
        self.clock.ahead += by;
    }

    fn data(&self) -> Data {
        Data {
            memory: sim::fork(&self.memory),
            given_back: self.given_back.clone(),
        }
    }

    fn put(&mut self, data: Data) {
        self.memory = data.memory;
        self.given_back = data.given_back;
    }

    /// From now on its replica falls behind.
    pub(crate) fn replicate(&mut self) {
        self.replica = Some(self.data());
    }

    pub(crate) fn refuse(&mut self, full: bool) {
        self.mood = if full { Mood::Full } else { Mood::Refuses };
    }

    pub(crate) fn refuse_no_more(&mut self) {
        self.mood = Mood::Well;
    }

    pub(crate) fn subscribe(&mut self, process: usize, topic: Arc<str>) {
        let watch = sim::listen(&self.memory, topic.clone());
        self.subscriptions
            .entry(topic)
            .or_default()
            .insert(process, watch);
    }

    pub(crate) fn unsubscribe(&mut self, process: usize, topic: &Arc<str>) {
        if let Some(all) = self.subscriptions.get_mut(topic) {
            all.remove(&process);
            if all.is_empty() {
                self.subscriptions.remove(topic);
            }
        }
    }

    pub(crate) fn unsubscribe_all(&mut self, process: usize) {
        self.subscriptions.retain(|_, all| {
            all.remove(&process);
            !all.is_empty()
        });
    }

    /// How many subscriptions there are.
    pub(crate) fn subscribed(&self) -> usize {
        self.subscriptions.values().map(BTreeMap::len).sum()
    }

    pub(crate) fn subscribers(&self, topic: &str) -> Vec<usize> {
        let all = self.subscriptions.get(topic);
        all.into_iter().flat_map(|all| all.keys().copied()).collect()
    }

    /// Its notifications since the last call, and whether they were of a client that took the lock.
    pub(crate) fn told(&self) -> Vec<(Arc<str>, bool)> {
        let notifications = sim::told(&self.memory).into_iter().map(|topic| (topic, false));
        let taken = sim::taken(&self.memory).into_iter().map(|topic| (topic, true));
        notifications.chain(taken).collect()
    }

    fn refuses(&self, request: &Request) -> Option<StoreError> {
        let takes = match request {
            Request::Record(request) => request.grows(),
            request => request.takes(),
        };
        let looks = matches!(request, Request::Inspect(_) | Request::List(_));
        let refused = match self.mood {
            Mood::Well => false,
            Mood::Full => takes,
            Mood::Refuses => !looks,
        };
        refused.then(|| StoreError::not_done(Reason::RefusedForNow, FULL))
    }

    fn is_given_back(&self, request: &AcquireRequest) -> bool {
        self.given_back.contains(&request.grant)
    }
}

/// Runs the code of a store, by its clock.
pub(crate) fn inside<T>(store: usize, step: impl FnOnce(&MemoryStore) -> T) -> T {
    let (memory, now, wall) = with(|world| {
        let shown = world.stores[store].clock.shows(world.now);
        (
            world.stores[store].memory.clone(),
            world.store_instant(store),
            BEGINS + shown,
        )
    });
    sim::at_store(now, wall, || step(&memory))
}

/// A request has come to a store that is up.
pub(crate) fn carry_out(
    store: usize,
    (process, sent): (usize, Millis),
    request: &Request,
) -> Result<Reply, StoreError> {
    if let Some(refused) = with(|world| world.stores[store].refuses(request)) {
        with(|world| {
            world.counts.faults += 1;
            tell!(world, Who::Store(store), "refuses a request of p{process}");
        });
        return Err(refused);
    }
    let came_late = with(|world| {
        // No task waits for its reply, and the store knows this by its clock.
        let is_outdated = world.now > sent + world.plan.settings.timeout;
        let store = &mut world.stores[store];
        let is_given_back = match request {
            Request::Acquire(request, _) => store.is_given_back(request),
            Request::AcquireAll(all) => all.iter().any(|request| store.is_given_back(request)),
            Request::Release(request) => {
                store.given_back.insert(request.grant);
                false
            }
            _ => false,
        };
        if is_given_back {
            world.counts.sometimes("an acquire that came after its release");
        }
        is_given_back || is_outdated && request.takes()
    });
    if came_late {
        with(|world| {
            world.counts.sometimes("an acquire that came too late");
            tell!(
                world,
                Who::Store(store),
                "refuses {}: it comes too late",
                request.about(&world.checks)
            );
        });
        return Err(StoreError::not_done(Reason::Unreachable, "it came too late"));
    }
    let result = inside(store, |memory| step(Arc::new(memory.clone()), request.clone()));
    crate::check::carried_out(store, request, &result);
    result
}

fn step(memory: Arc<MemoryStore>, request: Request) -> Result<Reply, StoreError> {
    fn now<T>(step: impl Future<Output = T>) -> T {
        step.now_or_never().expect("the memory store answers at once")
    }
    Ok(match request {
        Request::Acquire(request, ballot) => {
            let key = request.key.clone();
            let vote = match ballot {
                Some(vote_after) => now(memory.vote(request, vote_after))?,
                None => Vote::Cast(now(memory.acquire(request))?),
            };
            Reply::Acquire(key, vote)
        }
        Request::AcquireAll(requests) => {
            let keys = requests.iter().map(|request| request.key.clone()).collect();
            Reply::AcquireAll(keys, now(Store::acquire_all(memory, requests))?)
        }
        Request::Release(request) => Reply::Release(now(Store::release(memory, request))?),
        Request::Renew(requests) => Reply::Renew(now(Store::renew(memory, requests))?),
        Request::Inspect(key) => Reply::Inspect(now(Store::inspect(memory, key))?),
        Request::List(prefix) => Reply::List(now(Store::list(memory, prefix))?),
        Request::ForceRelease(key) => Reply::ForceRelease(now(Store::force_release(memory, key))?),
        Request::Count(request) => Reply::Count(now(memory.count(request))?),
        Request::RaiseFence(kind, key, grant, at_least) => {
            Reply::RaiseFence(now(memory.raise_fence(kind, key, grant, at_least))?)
        }
        Request::Record(request) => Reply::Record(record::step(memory, request)?),
    })
}

pub(crate) fn stop(store: usize, loses_data: bool) {
    if loses_data {
        with(|world| {
            let now = world.now;
            let it = &mut world.stores[store];
            it.put(Data {
                memory: MemoryStore::new(),
                given_back: HashSet::new(),
            });
            it.lost_at = Some(now);
            world.records_lost();
            tell!(world, Who::Store(store), "has lost its data");
        });
    }
    goes_down(store);
}

/// Its replica, which may have fallen behind, is what comes back.
pub(crate) fn fail_over(store: usize, lag: Millis) {
    with(|world| {
        let it = &mut world.stores[store];
        if let Some(replica) = it.replica.take_if(|_| lag > 0) {
            it.put(replica);
            world.records_lost();
            world.counts.sometimes("a fail-over to a replica");
        }
    });
    goes_down(store);
}

fn goes_down(store: usize) {
    with(|world| {
        let it = &mut world.stores[store];
        it.up = false;
        it.epoch += 1;
        it.subscriptions.clear();
        world.store_gone(store);
    });
}

pub(crate) fn come_back(store: usize) {
    with(|world| {
        world.stores[store].up = true;
        for process in 0..world.plan.processes.len() {
            world.reconnects(process, store);
        }
    });
}

pub(crate) fn lose_data(store: usize) {
    inside(store, MemoryStore::clear);
    with(|world| {
        world.stores[store].given_back.clear();
        world.records_lost();
        world.stores[store].lost_at = Some(world.now);
        tell!(world, Who::Store(store), "has lost its data");
    });
}

/// Forces a lock open on all stores, as an operator does.
pub(crate) fn force_open(key: &LockKey) {
    for store in 0..with(|world| world.stores.len()) {
        if !with(|world| world.stores[store].is_up()) {
            continue;
        }
        let key = key.clone();
        let forced = inside(store, |memory| {
            step(Arc::new(memory.clone()), Request::ForceRelease(key))
        });
        if matches!(forced, Ok(Reply::ForceRelease(true))) {
            with(|world| world.counts.sometimes("a lock that was forced open"));
        }
        crate::net::tell_listeners(store);
    }
}
