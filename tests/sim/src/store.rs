//! A store: the code of the memory store, behind a network, by a clock of its own.

pub(crate) mod record;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::backend::counter::{CounterReply, CounterRequest};
use dlock::backend::memory::MemoryBackend;
use dlock::backend::{
    AcquireAllReply, AcquireReply, AcquireRequest, Backend, BackendError, GrantId, Holder, Kind, Reason,
    ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Watch,
};
use dlock::sim;
use futures_util::FutureExt;

use crate::plan::Millis;
use crate::trace::Who;
use crate::world::{tell, with};

/// When the world begins, by the wall clocks of stores: a day of 2026.
pub(crate) const BEGINS: Duration = Duration::from_secs(1_767_225_600);

#[derive(Debug, Clone)]
pub(crate) enum Request {
    Acquire(AcquireRequest),
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

impl Request {
    /// Whether it asks for locks.
    pub(crate) fn takes(&self) -> bool {
        matches!(self, Request::Acquire(_) | Request::AcquireAll(_))
    }
}

#[derive(Debug)]
pub(crate) enum Reply {
    Acquire(LockKey, AcquireReply),
    AcquireAll(Vec<LockKey>, AcquireAllReply),
    Release(ReleaseReply),
    Renew(Vec<Result<Renewal, BackendError>>),
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
    /// Nothing is taken any more; what is held is renewed and given back.
    Full,
    /// Refuses everything that changes something.
    Refuses,
}

pub(crate) struct SimStore {
    pub(crate) memory: MemoryBackend,
    /// By how much its clock is ahead of the world's.
    pub(crate) clock_ahead: Millis,
    /// How many times it was started again.
    pub(crate) epoch: u32,
    up: bool,
    mood: Mood,
    /// Grants that were given back: an acquire of one that comes later is refused.
    given_back: HashSet<GrantId>,
    subscriptions: BTreeMap<Arc<str>, BTreeMap<usize, Watch>>,
}

impl SimStore {
    pub(crate) fn new(_index: usize) -> SimStore {
        SimStore {
            memory: MemoryBackend::new(),
            clock_ahead: 0,
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

    /// What it has told since this was asked last, and whether that was of somebody who took the lock.
    pub(crate) fn told(&self) -> Vec<(Arc<str>, bool)> {
        let news = sim::told(&self.memory).into_iter().map(|topic| (topic, false));
        let taken = sim::taken(&self.memory).into_iter().map(|topic| (topic, true));
        news.chain(taken).collect()
    }

    fn refuses(&self, request: &Request) -> Option<BackendError> {
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
        refused.then(|| BackendError::not_done(Reason::RefusedForNow, "the store is full"))
    }

    fn is_given_back(&self, request: &AcquireRequest) -> bool {
        self.given_back.contains(&request.grant)
    }
}

/// Runs the code of a store, by its clock.
pub(crate) fn inside<T>(store: usize, step: impl FnOnce(&MemoryBackend) -> T) -> T {
    let (memory, now, wall) = with(|world| {
        let ahead = Duration::from_millis(world.now + world.stores[store].clock_ahead);
        (
            world.stores[store].memory.clone(),
            world.store_instant(store),
            BEGINS + ahead,
        )
    });
    sim::at_store(now, wall, || step(&memory))
}

/// A request has come to a store that is up.
pub(crate) fn carry_out(store: usize, process: usize, request: &Request) -> Result<Reply, BackendError> {
    if let Some(refused) = with(|world| world.stores[store].refuses(request)) {
        with(|world| {
            world.counts.faults += 1;
            tell!(world, Who::Store(store), "refuses a request of p{process}");
        });
        return Err(refused);
    }
    let came_late = with(|world| {
        let store = &mut world.stores[store];
        match request {
            Request::Acquire(request) => store.is_given_back(request),
            Request::AcquireAll(all) => all.iter().any(|request| store.is_given_back(request)),
            Request::Release(request) => {
                store.given_back.insert(request.grant);
                false
            }
            _ => false,
        }
    });
    if came_late {
        with(|world| {
            world.counts.sometimes("an acquire that came after its release");
            tell!(
                world,
                Who::Store(store),
                "refuses {}: that was given back before it came",
                request.about(&world.checks)
            );
        });
        return Err(BackendError::not_done(Reason::Unreachable, "it came too late"));
    }
    let result = inside(store, |memory| step(Arc::new(memory.clone()), request.clone()));
    crate::check::carried_out(store, request, &result);
    result
}

fn step(memory: Arc<MemoryBackend>, request: Request) -> Result<Reply, BackendError> {
    fn now<T>(step: impl Future<Output = T>) -> T {
        step.now_or_never().expect("the memory store answers at once")
    }
    Ok(match request {
        Request::Acquire(request) => {
            let key = request.key.clone();
            Reply::Acquire(key, now(Backend::acquire(memory, request))?)
        }
        Request::AcquireAll(requests) => {
            let keys = requests.iter().map(|request| request.key.clone()).collect();
            Reply::AcquireAll(keys, now(Backend::acquire_all(memory, requests))?)
        }
        Request::Release(request) => Reply::Release(now(Backend::release(memory, request))?),
        Request::Renew(requests) => Reply::Renew(now(Backend::renew(memory, requests))?),
        Request::Inspect(key) => Reply::Inspect(now(Backend::inspect(memory, key))?),
        Request::List(prefix) => Reply::List(now(Backend::list(memory, prefix))?),
        Request::ForceRelease(key) => Reply::ForceRelease(now(Backend::force_release(memory, key))?),
        Request::Count(request) => Reply::Count(now(Backend::count(memory, request))?),
        Request::RaiseFence(kind, key, grant, at_least) => {
            Reply::RaiseFence(now(Backend::raise_fence(memory, kind, key, grant, at_least))?)
        }
        Request::Record(request) => Reply::Record(record::step(memory, request)?),
    })
}

pub(crate) fn stop(store: usize, loses_data: bool) {
    if loses_data {
        lose_data(store);
    }
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
    inside(store, MemoryBackend::clear);
    with(|world| {
        world.stores[store].given_back.clear();
        world.checks.records.lose_data();
        tell!(world, Who::Store(store), "has lost its data");
    });
}
