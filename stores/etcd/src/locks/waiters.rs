//! Notifies the waiters of this process of releases: one stream with one watch for each awaited lock.
//!
//! A deleted grant is told to all waiters for a plain lock. Of those for a fair lock it is told to the head of the queue,
//! and a deleted position to the waiter behind it.
//!
//! A watch starts at the present. When the server confirms it, its waiters ask once, so that no release is missed, and
//! no watch has to catch up on the past, which a server does only ten times a second. Watches report expired leases as
//! well.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{GrantId, Hub, Watch};
use futures_util::stream;
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::names::{Name, Names};
use super::positions::Positions;
use crate::client::proto::{
    EventKind, Filter, KeyValue, WatchCancelRequest, WatchCreateRequest, WatchOrder, WatchRequest,
    WatchResponse,
};
use crate::client::{Link, Links, wants_login};

/// The pause before the next attempt to watch; meanwhile waiters poll.
const PAUSE: Duration = Duration::from_millis(250);

/// The waiters of this process.
#[derive(Debug)]
pub(crate) struct Waiters {
    hub: Arc<Hub>,
    orders: mpsc::UnboundedSender<Order>,
}

/// The name of the notifications of some waiters for a lock.
type Topic = Arc<str>;

/// What to watch of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) enum Changes {
    #[default]
    Deletions,
    /// Writes as well: a greater total of a semaphore is one.
    All,
}

/// A change of the watches.
#[derive(Debug)]
enum Order {
    Watch(Name, Topic, Changes),
    Leave(Name, Topic),
}

/// Returns the topic of a waiter for a fair lock.
pub(crate) fn position_topic(name: &Name, grant: GrantId) -> Topic {
    // No key has a line break.
    format!("{name}\n{grant}").into()
}

impl Waiters {
    /// Starts the watching task, which runs until `ended`.
    pub(crate) fn start(
        links: Arc<Links>,
        names: Names,
        positions: Arc<Positions>,
        ended: CancellationToken,
        runtime: &runtime::Handle,
    ) -> Waiters {
        let (orders, inbox) = mpsc::unbounded_channel();
        let hub = Arc::new(Hub::default());
        let watcher = Watcher {
            hub: hub.clone(),
            links,
            names,
            positions,
            orders: inbox,
            ids: HashMap::new(),
            watched: HashMap::new(),
            next: 1,
            told: false,
        };
        runtime.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = watcher.run() => {}
            }
        });
        Waiters { hub, orders }
    }

    /// Listens for releases of this lock that concern the waiters of this topic.
    pub(crate) fn watch(&self, name: Name, topic: Topic, changes: Changes) -> Watch {
        let (first, last) = (self.orders.clone(), self.orders.clone());
        let of = name.clone();
        // Without a receiver the store has ended.
        let first = move |topic: &Topic| {
            let _ = first.send(Order::Watch(of, topic.clone(), changes));
            false
        };
        let last = move |topic: Topic| {
            let _ = last.send(Order::Leave(name, topic));
        };
        self.hub.listen(topic, first, last)
    }

    pub(crate) fn tell(&self, topic: &str) {
        self.hub.tell(topic);
    }
}

/// The watch of a lock.
#[derive(Debug, Default)]
struct Watched {
    /// Its id on the stream.
    id: i64,
    topics: HashSet<Topic>,
    changes: Changes,
    is_confirmed: bool,
}

/// The task that owns the stream.
struct Watcher {
    hub: Arc<Hub>,
    links: Arc<Links>,
    names: Names,
    positions: Arc<Positions>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// The locks by the ids of their watches on the stream.
    ids: HashMap<i64, Name>,
    watched: HashMap<Name, Watched>,
    next: i64,
    /// Whether the trouble was logged.
    told: bool,
}

impl Watcher {
    async fn run(mut self) {
        loop {
            while self.watched.is_empty() {
                let Some(order) = self.orders.recv().await else {
                    return;
                };
                self.take(order);
            }
            let trouble = self.serve().await;
            // Notifications may have been missed.
            self.ids.clear();
            for (name, watched) in &mut self.watched {
                watched.is_confirmed = false;
                self.positions.watched(name, None);
            }
            self.hub.tell_all(false);
            let Some(trouble) = trouble else { continue };
            if !std::mem::replace(&mut self.told, true) {
                tracing::warn!(%trouble, "no notifications of releases: waiters look now and then until there are some");
            }
            let until = Instant::now() + PAUSE.mul_f64(0.75 + fastrand::f64() / 2.0);
            loop {
                tokio::select! {
                    () = sleep_until(until) => break,
                    order = self.orders.recv() => match order {
                        Some(order) => drop(self.take(order)),
                        None => return,
                    },
                }
            }
            self.hub.tell_all(false);
        }
    }

    /// Records an order, and returns the requests for the server that it requires.
    fn take(&mut self, order: Order) -> Vec<WatchRequest> {
        match order {
            Order::Watch(name, topic, changes) => match self.watched.get_mut(&name) {
                Some(watched) if watched.changes >= changes => {
                    if watched.is_confirmed {
                        self.hub.confirm(&topic);
                    }
                    watched.topics.insert(topic);
                    Vec::new()
                }
                before => {
                    let before = before.map(|watched| cancel(watched.id));
                    let watched = self.watched.entry(name.clone()).or_default();
                    watched.topics.insert(topic);
                    watched.changes = watched.changes.max(changes);
                    before.into_iter().chain([self.create(name)]).collect()
                }
            },
            Order::Leave(name, topic) => {
                let Some(watched) = self.watched.get_mut(&name) else {
                    return Vec::new();
                };
                watched.topics.remove(&topic);
                if !watched.topics.is_empty() {
                    return Vec::new();
                }
                let watch_id = watched.id;
                self.watched.remove(&name);
                self.ids.remove(&watch_id);
                self.positions.watched(&name, None);
                vec![cancel(watch_id)]
            }
        }
    }

    /// Returns the request for a new watch of a lock.
    fn create(&mut self, name: Name) -> WatchRequest {
        let (key, range_end) = self.names.all(&name);
        let id = self.next;
        self.next += 1;
        let watched = self.watched.entry(name.clone()).or_default();
        self.ids.remove(&std::mem::replace(&mut watched.id, id));
        watched.is_confirmed = false;
        let filters = match watched.changes {
            Changes::Deletions => vec![Filter::NoPut.into()],
            Changes::All => Vec::new(),
        };
        self.positions.watched(&name, None);
        self.ids.insert(id, name);
        let order = WatchOrder::Create(WatchCreateRequest {
            key,
            range_end,
            filters,
            watch_id: id,
        });
        WatchRequest { order: Some(order) }
    }

    /// Watches until the stream is unusable, and returns the reason; `None` if another stream can be opened at once.
    async fn serve(&mut self) -> Option<String> {
        let limit = self.links.config.timeout;
        let link = match self.links.get(Instant::now() + limit).await {
            Ok(link) => link,
            Err(error) => return Some(error.message),
        };
        let (send, mut orders) = mpsc::unbounded_channel();
        let all: Vec<Name> = self.watched.keys().cloned().collect();
        for name in all {
            let _ = send.send(self.create(name));
        }
        let orders = stream::poll_fn(move |context| orders.poll_recv(context));
        let mut replies = match timeout(limit, link.rpc.watch(orders)).await {
            Ok(Ok(replies)) => replies,
            Ok(Err(trouble)) => return Some(self.broken(&link, &format!("{trouble:?}"))),
            Err(_) => return Some(self.broken(&link, "the server does not watch")),
        };
        let left = self.links.clone();
        let left = left.is_left(&link);
        tokio::pin!(left);
        loop {
            tokio::select! {
                reply = replies.message() => match reply {
                    Ok(Some(reply)) => match self.hear(&reply) {
                        Ok(Some(order)) => drop(send.send(order)),
                        Ok(None) => {}
                        Err(why) => return Some(self.refused(&link, &why)),
                    },
                    Ok(None) => return Some(self.broken(&link, "the server ended the watches")),
                    Err(status) => return Some(self.broken(&link, &status.to_string())),
                },
                order = self.orders.recv() => match order {
                    Some(order) => {
                        for request in self.take(order) {
                            let _ = send.send(request);
                        }
                    }
                    None => return None,
                },
                // Requests use another connection now.
                () = &mut left => return None,
            }
        }
    }

    fn broken(&self, link: &Link, why: &str) -> String {
        self.links.is_broken(link, why);
        format!("etcd at {}: {why}", link.address)
    }

    /// Describes that the server refuses to watch. A new login may help; otherwise requests go on by this connection.
    fn refused(&self, link: &Link, reason: &str) -> String {
        let why = format!("the server refuses to watch: {reason}");
        match wants_login(reason, self.links.config.login.is_some()) {
            true => self.broken(link, &why),
            false => format!("etcd at {}: {why}", link.address),
        }
    }

    /// Notifies the waiters of a reply. Returns the request that the reply requires, if any; fails with the reason of the
    /// server if it refuses to watch.
    fn hear(&mut self, reply: &WatchResponse) -> Result<Option<WatchRequest>, String> {
        let refused = Err(reply.cancel_reason.clone());
        let Some(name) = self.ids.get(&reply.watch_id).cloned() else {
            // Newer servers do not say which watch they refuse.
            let is_refused = reply.canceled && reply.watch_id < 0;
            return if is_refused { refused } else { Ok(None) };
        };
        if reply.canceled && reply.created {
            return refused;
        }
        if reply.canceled {
            // Too far behind, for example. A new watch starts, and its waiters ask when it is confirmed.
            tracing::debug!(%name, why = %reply.cancel_reason, "a watch was cancelled");
            return Ok(Some(self.create(name)));
        }
        if reply.created {
            self.is_confirmed(&name, reply);
        }
        for event in &reply.events {
            let Some(key) = &event.kv else { continue };
            if event.kind() == EventKind::Delete {
                self.is_deleted(&name, key);
            } else if *key.key == *self.names.total(&name) {
                self.hub.tell(&name);
            }
        }
        Ok(None)
    }

    /// Records that the server watches a lock.
    fn is_confirmed(&mut self, name: &Name, reply: &WatchResponse) {
        let from = reply.header.as_ref().map_or(0, |header| header.revision);
        self.positions.watched(name, Some(from));
        if let Some(watched) = self.watched.get_mut(name) {
            watched.is_confirmed = true;
            watched.topics.iter().for_each(|topic| self.hub.confirm(topic));
        }
        if self.told && self.watched.values().all(|watched| watched.is_confirmed) {
            self.told = false;
            tracing::info!("notifications of releases again");
        }
    }

    /// Notifies the waiters that a deleted key concerns.
    fn is_deleted(&self, name: &Name, deleted: &KeyValue) {
        let is_grant = self.names.is_grant(name, &deleted.key);
        if is_grant || self.names.is_position_for_permits(name, &deleted.key) {
            self.hub.tell(name);
        }
        let revision = deleted.mod_revision;
        for waiter in (self.positions).deleted(name, &deleted.key, is_grant, revision) {
            self.hub.tell(&position_topic(name, waiter));
        }
    }
}

fn cancel(watch_id: i64) -> WatchRequest {
    let order = Some(WatchOrder::Cancel(WatchCancelRequest { watch_id }));
    WatchRequest { order }
}
