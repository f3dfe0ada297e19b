//! The store of a client in a simulated process: every step goes over the simulated network.

mod record;

use std::sync::Arc;
use std::time::Duration;

use dlock::LockKey;
use dlock::record::Records;
use dlock::sim::{self, Notifications};
use dlock::store::counter::{CounterReply, CounterRequest, Counters};
use dlock::store::member::{QuorumMember, Vote};
use dlock::store::{
    AcquireAllReply, AcquireReply, AcquireRequest, Capabilities, DoubtSender, Doubts, GrantId, Holder, Kind,
    ReleaseReply, ReleaseRequest, RenewRequest, Renewal, Store, StoreError, StoreFuture, Watch,
};
use dlock::stores::memory::MemoryStore;

use self::record::SimRecords;
use crate::net::{self, End};
use crate::plan::Sets;
use crate::store::{Reply, Request};
use crate::world::with;

/// The connection of a process to a store.
pub(crate) struct SimConnection {
    process: (usize, u32),
    store: usize,
    sets: Sets,
    notifications: Notifications,
    doubts: DoubtSender,
}

impl SimConnection {
    pub(crate) fn connect(process: usize, incarnation: u32, store: usize) -> SimConnection {
        let doubts = DoubtSender::new();
        let notifications = Notifications::new();
        let end = End {
            incarnation,
            notifications: notifications.clone(),
            doubts: doubts.clone(),
        };
        let sets = with(|world| {
            world.links.connect(process, store, end);
            world.plan.settings.sets
        });
        SimConnection {
            process: (process, incarnation),
            store,
            sets,
            notifications,
            doubts,
        }
    }

    /// Sends a request now; its reply, as the right sort of it.
    fn ask<T: 'static>(&self, request: Request, sort: fn(Reply) -> Option<T>) -> StoreFuture<T> {
        let reply = net::send(self.process, self.store, request);
        Box::pin(async move {
            match reply.await {
                Ok(Ok(reply)) => Ok(sort(reply).expect("the reply to this request")),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(StoreError::unknown("the connection is gone")),
            }
        })
    }

    fn listen(&self, topic: Arc<str>) -> Watch {
        let (process, store) = (self.process, self.store);
        let first = {
            let topic = topic.clone();
            move || net::subscribe(process, store, topic, true)
        };
        let last = {
            let topic = topic.clone();
            move || net::subscribe(process, store, topic, false)
        };
        self.notifications.listen(topic, first, last)
    }
}

macro_rules! of_sort {
    ($sort:ident) => {
        |reply| match reply {
            Reply::$sort(value) => Some(value),
            _ => None,
        }
    };
}

impl Store for SimConnection {
    fn capabilities(&self) -> Capabilities {
        MemoryStore::new().capabilities()
    }

    fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
        self.ask(Request::Acquire(request, None), |reply| match reply {
            Reply::Acquire(_, Vote::Cast(reply)) => Some(reply),
            _ => None,
        })
    }

    fn together(&self, kind: Kind, key: &LockKey) -> Option<u32> {
        let shard = match self.sets {
            Sets::InOneStep => 0,
            Sets::ByShard => u32::from(key.as_str().bytes().next_back().is_some_and(|last| last % 2 == 1)),
            Sets::OneByOne => return None,
        };
        (kind != Kind::Fair).then_some(shard)
    }

    fn acquire_all(self: Arc<Self>, requests: Vec<AcquireRequest>) -> StoreFuture<AcquireAllReply> {
        self.ask(Request::AcquireAll(requests), |reply| match reply {
            Reply::AcquireAll(_, reply) => Some(reply),
            _ => None,
        })
    }

    fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
        self.ask(Request::Release(request), of_sort!(Release))
    }

    fn renew(self: Arc<Self>, requests: Vec<RenewRequest>) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
        self.ask(Request::Renew(requests), of_sort!(Renew))
    }

    fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
        self.ask(Request::Inspect(key), of_sort!(Inspect))
    }

    fn list(self: Arc<Self>, prefix: String) -> StoreFuture<Vec<(LockKey, Holder)>> {
        self.ask(Request::List(prefix), of_sort!(List))
    }

    fn force_release(self: Arc<Self>, key: LockKey) -> StoreFuture<bool> {
        self.ask(Request::ForceRelease(key), of_sort!(ForceRelease))
    }

    fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
        self.listen(sim::topic(kind, key, grant))
    }

    fn counters(self: Arc<Self>) -> Option<Arc<dyn Counters>> {
        Some(self)
    }

    fn records(self: Arc<Self>) -> Option<Records> {
        Some(Records::new(SimRecords(self)))
    }

    fn doubts(&self) -> Doubts {
        self.doubts.subscribe()
    }
}

impl Counters for SimConnection {
    fn count(self: Arc<Self>, request: CounterRequest) -> StoreFuture<CounterReply> {
        self.ask(Request::Count(request), of_sort!(Count))
    }
}

impl QuorumMember for SimConnection {
    fn vote(self: Arc<Self>, request: AcquireRequest, vote_after: Option<Duration>) -> StoreFuture<Vote> {
        self.ask(Request::Acquire(request, Some(vote_after)), |reply| match reply {
            Reply::Acquire(_, vote) => Some(vote),
            _ => None,
        })
    }

    fn raise_fence(
        self: Arc<Self>,
        kind: Kind,
        key: LockKey,
        grant: GrantId,
        at_least: u64,
    ) -> StoreFuture<bool> {
        self.ask(
            Request::RaiseFence(kind, key, grant, at_least),
            of_sort!(RaiseFence),
        )
    }
}
