//! The one connection by which this process hears of releases.
//!
//! One subscription for each key that is waited for. After each (re)subscribe everybody who waits looks
//! once, because a message may have been missed. While there is no connection, or where the server forbids
//! subscriptions, waiters are told to look now and then.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::mpsc;

use super::connect::Connector;
use crate::backend::Watch;
use crate::backend::hub::Hub;

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
    hub: Arc<Hub>,
    orders: mpsc::UnboundedSender<Order>,
}

#[derive(Debug)]
enum Order {
    Subscribe(Arc<str>),
    Unsubscribe(Arc<str>),
}

impl PubSub {
    /// Connects when somebody waits for the first time; ends when the last of these is gone.
    pub(super) fn start(connector: Connector, runtime: &tokio::runtime::Handle) -> PubSub {
        let hub: Arc<Hub> = Arc::default();
        let (orders, received) = mpsc::unbounded_channel();
        runtime.spawn(
            Actor {
                connector,
                hub: hub.clone(),
                orders: received,
                told: false,
                forbidden: HashSet::new(),
            }
            .run(),
        );
        PubSub { hub, orders }
    }

    pub(super) fn watch(&self, channel: String) -> Watch {
        let (subscribe, unsubscribe) = (self.orders.clone(), self.orders.clone());
        self.hub.listen(
            channel.into(),
            move |channel| {
                let _ = subscribe.send(Order::Subscribe(channel.clone()));
                false
            },
            move |channel| {
                let _ = unsubscribe.send(Order::Unsubscribe(channel));
            },
        )
    }
}

struct Actor {
    connector: Connector,
    hub: Arc<Hub>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// The trouble was told; no need to say it again until it is over.
    told: bool,
    /// Channels that the server forbids: who waits there looks now and then.
    forbidden: HashSet<Arc<str>>,
}

/// Nobody wants subscriptions any more.
struct Closed;

/// What the server sends without being asked.
type Pushes = mpsc::UnboundedReceiver<PushInfo>;

impl Actor {
    async fn run(mut self) {
        // What was ordered before a connection stands is in the hub as well.
        while self.orders.recv().await.is_some() {
            if self.hub.len() == 0 {
                continue;
            }
            if self.keep_connected().await.is_err() {
                return;
            }
        }
    }

    /// Serves until nobody wants subscriptions, through broken connections.
    async fn keep_connected(&mut self) -> Result<(), Closed> {
        let mut pause = SHORTEST_PAUSE;
        loop {
            let trouble = match self.connect().await {
                Ok((sink, stream)) => self.serve(sink, stream).await?,
                Err(trouble) => trouble,
            };
            if !std::mem::replace(&mut self.told, true) {
                // A subscription stood: a connection that does not come to that is no progress.
                pause = SHORTEST_PAUSE;
                tracing::warn!(
                    server = %self.connector.address, %trouble,
                    "no subscription to releases: waiters look now and then until there is one"
                );
            }
            // No news from here on: everybody looks, now and in a while.
            self.hub.tell_all(false);
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(POLL);
            while let Ok(order) = self.orders.try_recv() {
                drop(order);
            }
            if self.orders.is_closed() {
                return Err(Closed);
            }
            if self.hub.len() == 0 {
                return Ok(());
            }
        }
    }

    async fn connect(&self) -> Result<(MultiplexedConnection, Pushes), String> {
        in_time(self.connector.timeout, self.connector.open()).await
    }

    /// Serves until the connection is of no use any more, and tells why.
    async fn serve(&mut self, sink: MultiplexedConnection, mut pushes: Pushes) -> Result<String, Closed> {
        self.forbidden.clear();
        if let Err(trouble) = self.subscribe(&sink, self.hub.names()).await {
            return Ok(trouble);
        }
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %self.connector.address, "subscribed to releases again");
        }
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
                () = tokio::time::sleep_until(polled + POLL), if !self.forbidden.is_empty() => {
                    self.poll();
                    polled = tokio::time::Instant::now();
                }
                () = tokio::time::sleep_until(quiet + PING), if self.hub.len() > 0 => {
                    let mut sink = sink.clone();
                    let ping = async move { redis::cmd("PING").query_async::<Value>(&mut sink).await };
                    if let Err(trouble) = in_time(self.connector.timeout, ping).await {
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
            let (mut channels, subscribe) = match order {
                Order::Subscribe(channel) => (vec![channel], true),
                Order::Unsubscribe(channel) => (vec![channel], false),
            };
            while channels.len() < MANY {
                match (self.orders.try_recv(), subscribe) {
                    (Ok(Order::Subscribe(channel)), true) | (Ok(Order::Unsubscribe(channel)), false) => {
                        channels.push(channel);
                    }
                    (Ok(other), _) => {
                        next = Some(other);
                        break;
                    }
                    (Err(_), _) => break,
                }
            }
            if subscribe {
                self.subscribe(sink, channels).await?;
            } else {
                let mut sink = sink.clone();
                let command = async move { sink.unsubscribe(&names(&channels)).await };
                in_time(self.connector.timeout, command).await?;
            }
        }
        Ok(())
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
                        server = %self.connector.address, channel = %one,
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
        let subscribed = in_time(self.connector.timeout, command).await?;
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
