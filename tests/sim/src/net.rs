//! The network between processes and stores: a message arrives later, twice, out of order, or not at all.
//!
//! Between a process and a store there is a connection: messages over one connection arrive in order. When it breaks,
//! requests in flight may still be carried out, even after requests of the next connection; their replies are lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use dlock::LockKey;
use dlock::sim::Notifications;
use dlock::store::{DoubtSender, Lane, Reason, StoreError};
use fastrand::Rng;
use tokio::sync::oneshot;

use crate::chance::{Draws, stream};
use crate::plan::{Millis, Plan, Scheduler};
use crate::store::{self, Reply, Request};
use crate::trace::Who;
use crate::world::{Event, World, streams, tell, with};

/// One end of a connection, as the other end knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) process: usize,
    pub(crate) incarnation: u32,
    pub(crate) store: usize,
    connection: u32,
    /// How many times the store had begun anew.
    epoch: u32,
}

/// What comes at its destination.
#[derive(Debug)]
pub(crate) enum Arrival {
    Request {
        peer: Peer,
        id: u64,
        request: Box<Request>,
        /// Of a message that was doubled, the second: its reply has no receiver.
        copy: bool,
        sent: Millis,
        /// It has waited for its turn at the store.
        served: bool,
    },
    Reply {
        id: u64,
        result: Box<Result<Reply, StoreError>>,
    },
    Timeout {
        id: u64,
    },
    Subscription {
        peer: Peer,
        topic: Arc<str>,
        on: bool,
    },
    Subscribed {
        peer: Peer,
        topic: Arc<str>,
    },
    Notifications {
        peer: Peer,
        topic: Arc<str>,
        taken: bool,
    },
    Reconnected {
        peer: Peer,
    },
    Write(crate::check::Write),
}

struct Link {
    rng: Rng,
    tie: u32,
    connection: u32,
    /// When the last message of the connection arrives, each way.
    to_store: Millis,
    to_process: Millis,
    end: Option<End>,
}

/// What a process has of a connection.
#[derive(Clone)]
pub(crate) struct End {
    pub(crate) incarnation: u32,
    pub(crate) notifications: Notifications,
    pub(crate) doubts: DoubtSender,
}

struct Waiting {
    peer: Peer,
    /// What the request was about; empty without a trace.
    about: String,
    /// The lock that it releases, and when it was sent.
    released: Option<(LockKey, Millis)>,
    reply: oneshot::Sender<Result<Reply, StoreError>>,
}

/// All connections.
pub(crate) struct Links {
    stores: usize,
    links: Vec<Link>,
    waiting: BTreeMap<u64, Waiting>,
    next_id: u64,
}

impl Links {
    pub(crate) fn new(plan: &Plan) -> Links {
        let stores = plan.stores.count();
        let link = |at: usize| {
            let mut rng = stream(plan.seed, &[streams::LINK, at as u64]);
            let tie = rng.u32(..);
            Link {
                tie: match plan.scheduler {
                    Scheduler::Random => tie,
                    Scheduler::InOrder => 0,
                },
                rng,
                connection: 0,
                to_store: 0,
                to_process: 0,
                end: None,
            }
        };
        Links {
            stores,
            links: (0..plan.processes.len() * stores).map(link).collect(),
            waiting: BTreeMap::new(),
            next_id: 0,
        }
    }

    fn of(&mut self, process: usize, store: usize) -> &mut Link {
        &mut self.links[process * self.stores + store]
    }

    /// A process is there, or again.
    pub(crate) fn connect(&mut self, process: usize, store: usize, end: End) {
        let link = self.of(process, store);
        link.connection += 1;
        link.end = Some(end);
    }
}

impl World {
    /// Names a store, where there are several.
    fn at_which(&self, store: usize) -> String {
        match self.stores.len() {
            1 => String::new(),
            _ => format!(", at store {store}"),
        }
    }

    fn peer(&mut self, process: usize, store: usize) -> Option<(Peer, End)> {
        let epoch = self.stores[store].epoch;
        let link = self.links.of(process, store);
        let end = link.end.clone()?;
        let peer = Peer {
            process,
            incarnation: end.incarnation,
            store,
            connection: link.connection,
            epoch,
        };
        Some((peer, end))
    }

    /// Whether messages from and to this peer are still valid.
    fn is_current(&mut self, peer: Peer) -> bool {
        self.lives(peer.process, peer.incarnation)
            && self.stores[peer.store].epoch == peer.epoch
            && self.links.of(peer.process, peer.store).connection == peer.connection
    }

    /// When a message arrives; `None` where it does not. And when a second one does.
    fn travels(&mut self, peer: Peer, to_store: bool) -> (Option<Millis>, Option<Millis>) {
        let chances = self.weather.chances(&self.plan);
        let is_cut = (self.weather).is_cut(&self.plan, (peer.process, peer.store), to_store);
        let now = self.now;
        let link = self.links.of(peer.process, peer.store);
        let mut delay = link.rng.between(self.plan.network.least, self.plan.network.most);
        // Drawn in any case, so that the next draws are the same in a storm and out of it.
        let (lost, late, doubled) = (link.rng.u32(..1000), link.rng.u32(..1000), link.rng.u32(..1000));
        let by = link.rng.between(1, chances.by.max(1));
        let mut faults = 0;
        if late < chances.late {
            delay += by;
            faults += 1;
        }
        let last = if to_store {
            &mut link.to_store
        } else {
            &mut link.to_process
        };
        let at = (now + delay).max(*last);
        let is_lost = is_cut || lost < chances.lost;
        let mut copy = None;
        if is_lost {
            faults += 1;
        } else {
            *last = at;
            if doubled < chances.doubled {
                faults += 1;
                copy = Some(at + by);
            }
        }
        self.counts.faults += faults;
        ((!is_lost).then_some(at), copy)
    }

    /// A connection breaks, and there is a new one.
    pub(crate) fn break_connection(&mut self, process: usize, store: usize) {
        let Some((old, _)) = self.peer(process, store) else {
            return;
        };
        self.counts.faults += 1;
        tell!(
            self,
            Who::Process(process),
            "loses its connection to store {store}"
        );
        let link = self.links.of(process, store);
        link.connection += 1;
        (link.to_store, link.to_process) = (0, 0);
        let ids: Vec<_> = self
            .links
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.peer == old)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            if let Some(waiting) = self.links.waiting.remove(&id) {
                let _ = waiting
                    .reply
                    .send(Err(StoreError::unknown("the connection broke")));
            }
        }
        self.stores[store].unsubscribe_all(process);
        self.reconnects(process, store);
    }

    /// Has a process connect again, a round trip from now.
    pub(crate) fn reconnects(&mut self, process: usize, store: usize) {
        let at = self.now + self.plan.network.round_trip();
        if let Some((peer, _)) = self.peer(process, store) {
            self.schedule(at, Event::Arrival(Arrival::Reconnected { peer }));
        }
    }

    /// Fails what waits for a reply from a store that is gone.
    pub(crate) fn store_gone(&mut self, store: usize) {
        for process in 0..self.plan.processes.len() {
            if self.links.of(process, store).end.is_some() {
                self.break_connection(process, store);
            }
        }
    }

    /// Sends messages that a connection loses only when it breaks.
    fn deliver(&mut self, peer: Peer, arrival: Arrival, to_store: bool) {
        let tie = self.links.of(peer.process, peer.store).tie;
        match self.travels(peer, to_store) {
            (Some(at), _) => self.schedule_in_order(at, tie, Event::Arrival(arrival)),
            (None, _) => self.break_connection(peer.process, peer.store),
        }
    }
}

/// Sends a request; what comes of it.
pub(crate) fn send(
    (process, incarnation): (usize, u32),
    store: usize,
    request: Request,
) -> oneshot::Receiver<Result<Reply, StoreError>> {
    let (reply, outcome) = oneshot::channel();
    crate::world::if_any(|world| {
        if !world.lives(process, incarnation) {
            // Nothing leaves a process that has crashed.
            return;
        }
        let Some((peer, _)) = world.peer(process, store) else {
            return;
        };
        world.counts.requests += 1;
        tell!(
            world,
            Who::Process(process),
            "{}{}",
            request.told(&world.checks),
            world.at_which(store)
        );
        let about = match world.trace.is_on() {
            true => request.about(&world.checks) + &world.at_which(store),
            false => String::new(),
        };
        world.is_sent(&request);
        world.costs(process, &request);
        let released = match &request {
            Request::Release(release) => Some((release.key.clone(), world.now)),
            _ => None,
        };
        world.links.next_id += 1;
        let id = world.links.next_id;
        world.links.waiting.insert(
            id,
            Waiting {
                peer,
                about: about.clone(),
                released,
                reply,
            },
        );
        if !world.stores[store].is_up() && world.links.of(process, store).rng.bool() {
            tell!(world, Who::Process(process), "finds store {store} down");
            world.counts.faults += 1;
            let error = StoreError::not_done(Reason::Unreachable, "the connection was refused");
            let at = world.now + world.plan.network.round_trip();
            let result = Box::new(Err(error));
            world.schedule(at, Event::Arrival(Arrival::Reply { id, result }));
            return;
        }
        let timeout = world.now + world.plan.settings.timeout;
        world.schedule(timeout, Event::Arrival(Arrival::Timeout { id }));
        let (at, copy_at) = world.travels(peer, true);
        let tie = world.links.of(process, store).tie;
        let sent = world.now;
        let arrival = |request, copy| {
            Event::Arrival(Arrival::Request {
                peer,
                id,
                request: Box::new(request),
                copy,
                sent,
                served: false,
            })
        };
        // An acquire is sent once, and a connection carries it once: a store need not know the second one.
        let copy = copy_at.filter(|_| !request.takes());
        let copy = copy.map(|at| (at, request.clone()));
        match at {
            Some(at) => world.schedule_in_order(at, tie, arrival(request, false)),
            None => tell!(world, Who::World, "the request about {about} is lost"),
        }
        if let Some((at, request)) = copy {
            tell!(world, Who::World, "the request about {about} will come twice");
            world.schedule(at, arrival(request, true));
        }
        let broken = world.weather.chances(&world.plan).broken;
        if world.links.of(process, store).rng.permille(broken) {
            world.break_connection(process, store);
        }
    });
    outcome
}

/// A process listens for a topic of a store, or does so no longer.
pub(crate) fn subscribe((process, incarnation): (usize, u32), store: usize, topic: Arc<str>, on: bool) {
    crate::world::if_any(|world| {
        if !world.lives(process, incarnation) {
            return;
        }
        let Some((peer, _)) = world.peer(process, store) else {
            return;
        };
        world.deliver(peer, Arrival::Subscription { peer, topic, on }, true);
    });
}

/// A message arrives.
pub(crate) fn arrive(arrival: Arrival) {
    match arrival {
        Arrival::Request {
            peer,
            id,
            request,
            copy,
            sent,
            served,
        } => {
            let later = (!served)
                .then(|| with(|world| world.stores[peer.store].served_at(world.now)))
                .flatten();
            let Some(at) = later else {
                return at_store(peer, id, *request, (copy, sent));
            };
            with(|world| {
                world.counts.sometimes("a request that waited at its store");
                let served = Arrival::Request {
                    peer,
                    id,
                    request,
                    copy,
                    sent,
                    served: true,
                };
                world.schedule_in_order(at, 0, Event::Arrival(served));
            });
        }
        Arrival::Reply { id, result } => with(|world| world.reply_arrives(id, *result)),
        Arrival::Timeout { id } => with(|world| world.times_out(id)),
        Arrival::Subscription { peer, topic, on } => {
            with(|world| world.subscription_arrives(peer, topic, on))
        }
        Arrival::Subscribed { peer, topic } => {
            if let Some(end) = current_end(peer) {
                with(|world| world.hears_of(peer.process, &topic));
                end.notifications.confirm(&topic);
            }
        }
        Arrival::Notifications { peer, topic, taken } => notification_arrives(peer, &topic, taken),
        Arrival::Reconnected { peer } => reconnected(peer),
        Arrival::Write(write) => with(|world| crate::check::written(world, write)),
    }
}

impl World {
    fn reply_arrives(&mut self, id: u64, result: Result<Reply, StoreError>) {
        let Some(waiting) = self.links.waiting.remove(&id) else {
            self.counts.sometimes("a late reply");
            return;
        };
        if !self.lives(waiting.peer.process, waiting.peer.incarnation) {
            return;
        }
        if let Ok(reply) = &result {
            self.replied(waiting.peer.process, &waiting.about, reply);
            if let (Reply::Release(reply), Some(released)) = (reply, &waiting.released) {
                self.lets_go_first(waiting.peer.process, released, *reply);
            }
        }
        if waiting.reply.send(result).is_err() {
            self.counts.sometimes("a reply that nobody waits for");
        }
    }

    fn times_out(&mut self, id: u64) {
        if let Some(waiting) = self.links.waiting.remove(&id) {
            tell!(
                self,
                Who::Process(waiting.peer.process),
                "has no reply about {} in time",
                waiting.about
            );
            let _ = waiting.reply.send(Err(StoreError::unknown("no reply in time")));
        }
    }

    fn subscription_arrives(&mut self, peer: Peer, topic: Arc<str>, on: bool) {
        if !self.is_current(peer) || !self.stores[peer.store].is_up() {
            return;
        }
        if on {
            self.stores[peer.store].subscribe(peer.process, topic.clone());
            self.deliver(peer, Arrival::Subscribed { peer, topic }, false);
        } else {
            self.stores[peer.store].unsubscribe(peer.process, &topic);
        }
    }
}

fn notification_arrives(peer: Peer, topic: &str, taken: bool) {
    let Some(end) = current_end(peer) else {
        return;
    };
    let state = match taken {
        true => "is taken by another one",
        false => "is available",
    };
    with(|world| {
        tell!(
            world,
            Who::Process(peer.process),
            "hears that {} {state}",
            readable(topic)
        );
        world.hears_of(peer.process, topic);
    });
    match taken {
        true => end.notifications.taken(topic),
        false => drop(end.notifications.tell(topic)),
    }
}

/// A broken connection is there again, unless the network between the two is cut.
fn reconnected(peer: Peer) {
    let is_cut = with(|world| {
        let link = (peer.process, peer.store);
        let is_cut = |to_store| world.weather.is_cut(&world.plan, link, to_store);
        is_cut(true) || is_cut(false)
    });
    if is_cut {
        with(|world| world.reconnects(peer.process, peer.store));
        return;
    }
    let is_up = || with(|world| world.stores[peer.store].is_up());
    let Some(end) = current_end(peer).filter(|_| is_up()) else {
        return;
    };
    with(|world| {
        tell!(
            world,
            Who::Process(peer.process),
            "is connected to store {} again",
            peer.store
        );
        world.may_ask_again(peer.process);
    });
    end.notifications.doubt_all();
    end.doubts.tell(Lane::default());
    for topic in end.notifications.topics() {
        subscribe((peer.process, peer.incarnation), peer.store, topic, true);
    }
}

fn current_end(peer: Peer) -> Option<End> {
    with(|world| {
        if !world.is_current(peer) {
            return None;
        }
        world.peer(peer.process, peer.store).map(|(_, end)| end)
    })
}

fn at_store(peer: Peer, id: u64, request: Request, (copy, sent): (bool, Millis)) {
    // What is sent again is sent before its reply is there: a later copy of an acquire that was busy would be granted
    // to no waiter.
    if copy && request.takes() && !with(|world| world.links.waiting.contains_key(&id)) {
        return;
    }
    let Peer { process, store, .. } = peer;
    let carried_out = with(|world| {
        let is_there = world.stores[store].is_up() && world.stores[store].epoch == peer.epoch;
        let link = world.links.of(process, store);
        // A request over a connection that broke since may or may not have arrived.
        let comes = link.connection == peer.connection || link.rng.bool();
        is_there && comes
    });
    if !carried_out {
        return;
    }
    let result = store::carry_out(store, (process, sent), &request);
    tell_listeners(store);
    with(|world| {
        if copy || !world.is_current(peer) {
            return;
        }
        let (at, _) = world.travels(peer, false);
        let tie = world.links.of(process, store).tie;
        match at {
            Some(at) => {
                let result = Box::new(result);
                world.schedule_in_order(at, tie, Event::Arrival(Arrival::Reply { id, result }));
            }
            None => tell!(
                world,
                Who::World,
                "the reply about {} is lost",
                request.about(&world.checks)
            ),
        }
    });
}

/// Sends what a store has told its listeners.
pub(crate) fn tell_listeners(store: usize) {
    with(|world| {
        for (topic, taken) in world.stores[store].told() {
            let topic = &topic;
            for listener in world.stores[store].subscribers(topic) {
                let Some((peer, _)) = world.peer(listener, store) else {
                    continue;
                };
                let (at, copy_at) = world.travels(peer, false);
                if at.is_none() {
                    tell!(
                        world,
                        Who::World,
                        "the notification about {} is lost for p{listener}",
                        readable(topic)
                    );
                }
                for at in at.into_iter().chain(copy_at) {
                    let topic = topic.clone();
                    world.schedule(at, Event::Arrival(Arrival::Notifications { peer, topic, taken }));
                }
            }
        }
    });
}

/// A topic as a trace has it.
pub(crate) fn readable(topic: &str) -> &str {
    // That of a record begins with a line break.
    topic.trim_start().split('\n').next().unwrap_or(topic)
}
