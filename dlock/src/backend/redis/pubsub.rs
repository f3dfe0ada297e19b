//! The one connection by which this process hears of releases on a server.
//!
//! One subscription for each key that is waited for. After each (re)subscribe everybody who waits looks
//! once, because a message may have been missed. While there is no connection, or where the server forbids
//! subscriptions, waiters are told to look now and then. Who waits stands in a hub, which the servers of a
//! Cluster have in common.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::mpsc;

use super::access::Open;
use super::connect::Connector;
use crate::backend::hub::Hub;
use crate::url::Address;

/// How often the connection is tested while somebody waits.
const PING: Duration = Duration::from_secs(5);
/// Before the first attempt to connect again.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// How often waiters look where nobody tells them.
const POLL: Duration = Duration::from_millis(250);
/// Channels in one command.
const MANY: usize = 500;

/// The subscriptions to one server.
#[derive(Debug, Clone)]
pub(super) struct PubSub {
    orders: mpsc::UnboundedSender<Order>,
}

#[derive(Debug)]
enum Order {
    Subscribe(Arc<str>),
    Unsubscribe(Arc<str>),
}

impl PubSub {
    /// Connects when somebody waits for the first time; ends when the last of these is gone. News are told to
    /// the hub.
    pub(super) fn start(connector: Connector, hub: Arc<Hub>, runtime: &tokio::runtime::Handle) -> PubSub {
        let (orders, received) = mpsc::unbounded_channel();
        runtime.spawn(
            Actor {
                connector,
                hub,
                orders: received,
                channels: HashSet::new(),
                told: false,
                forbidden: HashSet::new(),
            }
            .run(),
        );
        PubSub { orders }
    }

    pub(super) fn subscribe(&self, channel: &Arc<str>) {
        let _ = self.orders.send(Order::Subscribe(channel.clone()));
    }

    pub(super) fn unsubscribe(&self, channel: Arc<str>) {
        let _ = self.orders.send(Order::Unsubscribe(channel));
    }
}

struct Actor {
    connector: Connector,
    hub: Arc<Hub>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// What is wanted here.
    channels: HashSet<Arc<str>>,
    /// The trouble was told; no need to say it again until it is over.
    told: bool,
    /// Channels that the server forbids: who waits there looks now and then.
    forbidden: HashSet<Arc<str>>,
}

/// Nobody wants subscriptions any more.
struct Closed;

impl Actor {
    async fn run(mut self) {
        while let Some(order) = self.orders.recv().await {
            self.note(order);
            self.take_in();
            if !self.channels.is_empty() && self.keep_connected().await.is_err() {
                return;
            }
        }
    }

    /// Enters an order into what is wanted; whether there is anything to do.
    fn note(&mut self, order: Order) -> bool {
        match order {
            Order::Subscribe(channel) => {
                self.channels.insert(channel);
                true
            }
            Order::Unsubscribe(channel) => {
                self.forbidden.remove(&channel);
                self.channels.remove(&channel)
            }
        }
    }

    /// Enters the orders that wait.
    fn take_in(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            self.note(order);
        }
    }

    /// Serves until nobody wants subscriptions, through broken connections.
    async fn keep_connected(&mut self) -> Result<(), Closed> {
        let mut pause = SHORTEST_PAUSE;
        loop {
            let trouble = match self.connector.open().await {
                Ok((open, address)) => self.serve(open, address).await?,
                Err(trouble) => trouble.message,
            };
            if !std::mem::replace(&mut self.told, true) {
                // A subscription stood: a connection that does not come to that is no progress.
                pause = SHORTEST_PAUSE;
                tracing::warn!(
                    server = %self.connector.place, %trouble,
                    "no subscription to releases: waiters look now and then until there is one"
                );
            }
            // No news from here on: everybody looks, now and in a while.
            self.take_in();
            self.hub.doubt(&self.channels);
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(POLL);
            self.take_in();
            if self.orders.is_closed() {
                return Err(Closed);
            }
            if self.channels.is_empty() {
                return Ok(());
            }
        }
    }

    /// Serves until the connection is of no use any more, and tells why.
    async fn serve(&mut self, open: Open, address: Address) -> Result<String, Closed> {
        let Open {
            connection: sink,
            mut pushes,
            ..
        } = open;
        self.forbidden.clear();
        self.take_in();
        if let Err(trouble) = self
            .subscribe(&sink, self.channels.iter().cloned().collect())
            .await
        {
            return Ok(trouble);
        }
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %self.connector.place, "subscribed to releases again");
        }
        let place = self.connector.place.clone();
        let left = place.left(&address);
        tokio::pin!(left);
        let mut quiet = tokio::time::Instant::now();
        let mut polled = quiet;
        loop {
            tokio::select! {
                biased;
                push = pushes.recv() => match push {
                    Some(PushInfo { kind: PushKind::Message, data }) => {
                        if let Some(Value::BulkString(channel)) = data.first() {
                            self.hub.tell(&String::from_utf8_lossy(channel));
                        }
                        quiet = tokio::time::Instant::now();
                    }
                    Some(PushInfo { kind: PushKind::Disconnection, .. }) | None => {
                        return Ok("the server closed the connection".to_owned());
                    }
                    // Its answers to our own orders.
                    Some(_) => {}
                },
                order = self.orders.recv() => {
                    let Some(first) = order else { return Err(Closed) };
                    if let Err(trouble) = self.carry_out(first, &sink).await {
                        return Ok(trouble);
                    }
                }
                () = &mut left => return Ok(format!("{address} is the master no longer")),
                () = tokio::time::sleep_until(polled + POLL), if !self.forbidden.is_empty() => {
                    self.poll();
                    polled = tokio::time::Instant::now();
                }
                () = tokio::time::sleep_until(quiet + PING), if !self.channels.is_empty() => {
                    let mut sink = sink.clone();
                    let ping = async move { redis::cmd("PING").query_async::<Value>(&mut sink).await };
                    if let Err(trouble) = in_time(self.connector.access.timeout, ping).await {
                        return Ok(trouble);
                    }
                    quiet = tokio::time::Instant::now();
                }
            }
        }
    }

    /// Carries out an order, and with it those like it that wait behind it.
    async fn carry_out(&mut self, first: Order, sink: &MultiplexedConnection) -> Result<(), String> {
        let mut next = Some(first);
        while let Some(order) = next.take() {
            let subscribe = matches!(order, Order::Subscribe(_));
            let mut channels: Vec<_> = self.enter(order).into_iter().collect();
            while channels.len() < MANY {
                match self.orders.try_recv() {
                    Ok(order) if matches!(order, Order::Subscribe(_)) == subscribe => {
                        channels.extend(self.enter(order));
                    }
                    Ok(other) => {
                        next = Some(other);
                        break;
                    }
                    Err(_) => break,
                }
            }
            let outcome = if subscribe {
                self.subscribe(sink, channels).await
            } else if !channels.is_empty() {
                let mut sink = sink.clone();
                let command = async move { sink.unsubscribe(&names(&channels)).await };
                in_time(self.connector.access.timeout, command).await
            } else {
                Ok(())
            };
            if let Err(trouble) = outcome {
                // The one that was taken to come next counts on the next connection.
                if let Some(order) = next {
                    self.note(order);
                }
                return Err(trouble);
            }
        }
        Ok(())
    }

    /// The channel of an order, if there is anything to do.
    fn enter(&mut self, order: Order) -> Option<Arc<str>> {
        let (Order::Subscribe(channel) | Order::Unsubscribe(channel)) = &order;
        let channel = channel.clone();
        self.note(order).then_some(channel)
    }

    /// Subscribes, and has those who wait look once. A channel that the server forbids takes no other along.
    async fn subscribe(
        &mut self,
        sink: &MultiplexedConnection,
        channels: Vec<Arc<str>>,
    ) -> Result<(), String> {
        for some in channels.chunks(MANY) {
            if self.subscribe_to(sink, some).await? {
                continue;
            }
            for one in some {
                if !self.subscribe_to(sink, std::slice::from_ref(one)).await? {
                    tracing::warn!(
                        server = %self.connector.place, channel = %one,
                        "the server forbids this subscription: waiters look now and then"
                    );
                    self.forbidden.insert(one.clone());
                }
            }
        }
        Ok(())
    }

    /// Whether the server lets us.
    async fn subscribe_to(&self, sink: &MultiplexedConnection, some: &[Arc<str>]) -> Result<bool, String> {
        let (mut sink, wanted) = (sink.clone(), names(some));
        // Refusals are answers, so that only the rest is trouble with the connection.
        let command = async move {
            match sink.subscribe(&wanted).await {
                Err(error) if matches!(error.kind(), ErrorKind::Server(ServerErrorKind::NoPerm)) => Ok(false),
                other => other.map(|()| true),
            }
        };
        let subscribed = in_time(self.connector.access.timeout, command).await?;
        if subscribed {
            some.iter().for_each(|channel| self.hub.confirm(channel));
        }
        Ok(subscribed)
    }

    /// Has those look whom nobody tells.
    fn poll(&mut self) {
        self.forbidden.retain(|channel| self.hub.tell(channel) > 0);
    }
}

fn names(channels: &[Arc<str>]) -> Vec<String> {
    channels.iter().map(|channel| channel.to_string()).collect()
}

async fn in_time<T>(
    timeout: Duration,
    work: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, String> {
    match tokio::time::timeout(timeout, work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {timeout:?}")),
    }
}
