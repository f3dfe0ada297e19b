//! Notifies the waiters of this process of releases: one stream with one watch for each awaited lock.
//!
//! A watch starts at the present. When the server confirms it, its waiters ask once, so that no release is missed, and
//! no watch has to catch up on the past, which a server does only ten times a second. Watches report expired leases as
//! well.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::{Hub, Watch};
use futures_util::stream;
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::names::{Name, Names};
use crate::client::proto::{
    Filter, WatchCancelRequest, WatchCreateRequest, WatchOrder, WatchRequest, WatchResponse,
};
use crate::client::{Link, Links};

/// The pause before the next attempt to watch; meanwhile waiters poll.
const PAUSE: Duration = Duration::from_millis(250);

/// The waiters of this process.
#[derive(Debug)]
pub(crate) struct Waiters {
    hub: Arc<Hub>,
    orders: mpsc::UnboundedSender<Order>,
}

/// A change of the watches.
#[derive(Debug)]
enum Order {
    Watch(Name),
    Leave(Name),
}

impl Waiters {
    /// Starts the watching task, which runs until `ended`.
    pub(crate) fn start(
        links: Arc<Links>,
        names: Names,
        ended: CancellationToken,
        runtime: &runtime::Handle,
    ) -> Waiters {
        let (orders, inbox) = mpsc::unbounded_channel();
        let hub = Arc::new(Hub::default());
        let watcher = Watcher {
            hub: hub.clone(),
            links,
            names,
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

    pub(crate) fn watch(&self, name: Name) -> Watch {
        let (first, last) = (self.orders.clone(), self.orders.clone());
        // Without a receiver the store has ended.
        let first = move |name: &Name| {
            let _ = first.send(Order::Watch(name.clone()));
            false
        };
        let last = move |name: Name| {
            let _ = last.send(Order::Leave(name));
        };
        self.hub.listen(name, first, last)
    }
}

/// The task that owns the stream.
struct Watcher {
    hub: Arc<Hub>,
    links: Arc<Links>,
    names: Names,
    orders: mpsc::UnboundedReceiver<Order>,
    /// The locks by the ids of their watches on the stream.
    ids: HashMap<i64, Name>,
    /// The locks to watch, and the ids of their watches.
    watched: HashMap<Name, i64>,
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

    /// Records an order, and returns the request for the server.
    fn take(&mut self, order: Order) -> WatchRequest {
        let order = match order {
            Order::Watch(name) => self.create(name),
            Order::Leave(name) => {
                let id = self.watched.remove(&name).unwrap_or_default();
                self.ids.remove(&id);
                WatchOrder::Cancel(WatchCancelRequest { watch_id: id })
            }
        };
        WatchRequest { order: Some(order) }
    }

    fn create(&mut self, name: Name) -> WatchOrder {
        let (key, range_end) = self.names.all(&name);
        let id = self.next;
        self.next += 1;
        if let Some(before) = self.watched.insert(name.clone(), id) {
            self.ids.remove(&before);
        }
        self.ids.insert(id, name);
        WatchOrder::Create(WatchCreateRequest {
            key,
            range_end,
            filters: vec![Filter::NoPut.into()],
            watch_id: id,
        })
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
            let order = Some(self.create(name));
            let _ = send.send(WatchRequest { order });
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
                    Ok(Some(reply)) => {
                        if let Some(order) = self.hear(&reply) {
                            let _ = send.send(order);
                        }
                    }
                    Ok(None) => return Some(self.broken(&link, "the server ended the watches")),
                    Err(status) => return Some(self.broken(&link, &status.to_string())),
                },
                order = self.orders.recv() => match order {
                    Some(order) => drop(send.send(self.take(order))),
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

    /// Notifies the waiters of a reply. Returns the request that the reply requires, if any.
    fn hear(&mut self, reply: &WatchResponse) -> Option<WatchRequest> {
        let name = self.ids.get(&reply.watch_id)?.clone();
        if reply.canceled {
            // Too far behind, for example. A new watch starts, and its waiters ask when it is confirmed.
            tracing::debug!(%name, why = %reply.cancel_reason, "a watch was cancelled");
            let order = Some(self.create(name));
            return Some(WatchRequest { order });
        }
        if reply.created {
            if std::mem::take(&mut self.told) {
                tracing::info!("notifications of releases again");
            }
            self.hub.confirm(&name);
        }
        if !reply.events.is_empty() {
            self.hub.tell(&name);
        }
        None
    }
}
