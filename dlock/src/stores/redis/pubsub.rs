//! The single connection on which this process is notified of a server's releases.
//!
//! One subscription for each key with waiters. After each (re)subscribe all waiters check once, because a message may
//! have been missed. While there is no connection, or if the server forbids subscriptions, waiters poll. The waiters
//! are kept in a hub, which the servers of a Cluster share.
//!
//! In a Cluster subscriptions are sharded: a channel belongs to the server with its slot, and when the slot leaves, the
//! server ends the subscription with a push. Such a push may arrive among the answers to our own commands, which the
//! `redis` crate then confuses. So the state of a channel is read from the pushes, and only refusals from the answers;
//! each batch of commands ends with one whose push tells that the batch is complete.

mod batch;

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{ErrorKind, Pipeline, PushInfo, PushKind, RedisError, ServerErrorKind, Value};
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::batch::Batch;
use super::cluster::Shard;
use super::connect::{Connector, Listening};
use super::script;
use super::settings::Open;
use crate::base::chance;
use crate::base::observed::log;
use crate::store::{Hub, Reason, StoreError};

/// How often the connection is tested while there are waiters.
const PING: Duration = Duration::from_secs(5);
/// A connection that was silent for this long may be dead: if the next answer does not come soon, a second connection
/// is made. A server that is only slow does not answer there either.
const IDLE: Duration = Duration::from_secs(1);
/// The pause before the first attempt to reconnect.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause between attempts, unless the server refuses the login.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often waiters check while they get no notifications.
const POLL: Duration = Duration::from_millis(250);
/// The first and the longest pause before a server that refuses subscriptions is asked again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Channels in one batch.
const MANY: usize = 500;

/// The subscriptions to one server.
#[derive(Debug, Clone)]
pub(super) struct PubSub {
    orders: mpsc::UnboundedSender<Order>,
}

#[derive(Debug)]
enum Order {
    Subscribe(Arc<str>, ChannelKind),
    Unsubscribe(Arc<str>),
}

/// The delivery of a channel's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChannelKind {
    /// From any server on which they are published.
    Plain,
    /// From the server with the slot of the channel; the plain way if servers are too old for that.
    Sharded,
}

impl PubSub {
    /// Connects for the first waiter; ends when the last handle is gone. Notifications go to the hub. In a Cluster this
    /// is the server of this shard.
    pub(super) fn start(
        connector: Connector,
        hub: Arc<Hub>,
        shard: Option<Shard>,
        runtime: &tokio::runtime::Handle,
    ) -> PubSub {
        let (orders, received) = mpsc::unbounded_channel();
        let actor = Actor {
            connector,
            hub,
            shard,
            orders: received,
            channels: HashMap::new(),
            wanted: VecDeque::new(),
            leaving: Vec::new(),
            refused: HashSet::new(),
            is_old: false,
            batches: 0,
            heard: Instant::now(),
            doubtful_from: None,
            spare: None,
            told: false,
            told_refusal: false,
            again: AGAIN.0,
            not_before: None,
            connects_at: None,
            connect_pause: SHORTEST_PAUSE,
            probe: None,
        };
        runtime.spawn(actor.run());
        PubSub { orders }
    }

    pub(super) fn subscribe(&self, channel: &Arc<str>, way: ChannelKind) {
        let _ = self.orders.send(Order::Subscribe(channel.clone(), way));
    }

    pub(super) fn unsubscribe(&self, channel: Arc<str>) {
        let _ = self.orders.send(Order::Unsubscribe(channel));
    }
}

struct Actor {
    connector: Connector,
    hub: Arc<Hub>,
    shard: Option<Shard>,
    orders: mpsc::UnboundedReceiver<Order>,
    /// The wanted subscriptions, and their states.
    channels: HashMap<Arc<str>, Channel>,
    /// Those among them that must be requested, and some that are no longer wanted.
    wanted: VecDeque<Arc<str>>,
    /// Subscriptions that are to end.
    leaving: Vec<(Arc<str>, ChannelKind)>,
    /// Channels that the server refuses: their waiters poll.
    refused: HashSet<Arc<str>>,
    /// The server has no sharded channels.
    is_old: bool,
    /// The number of batches so far.
    batches: u64,
    /// When something last arrived on the connection.
    heard: Instant,
    /// When an idle connection is doubted, unless an answer comes before.
    doubtful_from: Option<Instant>,
    /// The replacement connection.
    spare: Option<Listening>,
    /// Whether the trouble was logged already.
    told: bool,
    /// Whether it was logged that the server refuses subscriptions.
    told_refusal: bool,
    /// The pause before it is asked again.
    again: Duration,
    /// When it is asked next; `None` if no refusal is known.
    not_before: Option<Instant>,
    /// When to reconnect after a failed attempt, or a connection on which no subscription succeeded.
    connects_at: Option<Instant>,
    /// The pause after the next failed attempt.
    connect_pause: Duration,
    /// The channel with which it was asked again.
    probe: Option<Arc<str>>,
}

#[derive(Debug)]
struct Channel {
    way: ChannelKind,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Must be requested.
    Wanted,
    Asked,
    Stands,
    /// Not permitted for this user; perhaps on the next connection.
    Forbidden,
    /// Not on this server, or not now.
    Away,
}

/// Subscriptions are not needed any more.
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

    /// Applies an order to the wanted subscriptions.
    fn note(&mut self, order: Order) {
        match order {
            Order::Subscribe(channel, way) => {
                let state = State::Wanted;
                self.channels.insert(channel.clone(), Channel { way, state });
                self.wanted.push_back(channel);
            }
            Order::Unsubscribe(channel) => {
                self.refused.remove(&channel);
                if let Some(Channel { way, state }) = self.channels.remove(&channel)
                    && matches!(state, State::Asked | State::Stands)
                {
                    self.leaving.push((channel, way));
                }
            }
        }
    }

    /// Applies the waiting orders.
    fn take_in(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            self.note(order);
        }
    }

    /// Serves as long as subscriptions are needed, through broken connections.
    async fn keep_connected(&mut self) -> Result<(), Closed> {
        let mut pause = SHORTEST_PAUSE;
        loop {
            // A connection begins with all channels.
            self.wanted.clear();
            let now = Instant::now();
            if self.connects_at.is_none_or(|at| at <= now) {
                let opened = match self.spare.take() {
                    Some(spare) => Ok(spare),
                    None => self.open().await?,
                };
                let trouble = match opened {
                    Ok(listening) => {
                        let trouble = self.serve(listening).await?;
                        // The server is there but no subscription succeeded: it may take long until one does.
                        if self.told {
                            self.put_off();
                            self.connects_at = self.not_before;
                        }
                        self.take_in();
                        // An idle connection may be closed: nobody waits.
                        if self.channels.is_empty() {
                            return Ok(());
                        }
                        trouble
                    }
                    Err(trouble) => {
                        self.put_off_connecting(&trouble);
                        trouble.message
                    }
                };
                if !std::mem::replace(&mut self.told, true) {
                    // A subscription succeeded: a connection without one is not progress.
                    pause = SHORTEST_PAUSE;
                    log!(
                        warn, server = %self.connector.endpoint, %trouble,
                        "no subscription to releases: waiters poll until there is one"
                    );
                }
            }
            // No notifications from here on: all waiters check, now and later.
            self.take_in();
            self.hub.doubt(self.channels.keys());
            tokio::time::sleep(chance::jittered(pause)).await;
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

    /// Connects. That may take long, and waiters poll in the meantime.
    async fn open(&mut self) -> Result<Result<Listening, StoreError>, Closed> {
        let connector = self.connector.clone();
        let mut opening = pin!(connector.open());
        let mut polls = Instant::now() + POLL;
        loop {
            tokio::select! {
                biased;
                opened = &mut opening => return Ok(opened),
                () = tokio::time::sleep_until(polls) => {
                    self.hub.doubt(self.channels.keys());
                    polls = Instant::now() + POLL;
                }
                order = self.orders.recv() => self.note(order.ok_or(Closed)?),
            }
        }
    }

    /// Connects again only after a while, each time a longer one: a server that refused the login will hardly take the
    /// next one.
    fn put_off_connecting(&mut self, trouble: &StoreError) {
        if trouble.reason == Reason::Refused {
            self.put_off();
            self.connects_at = self.not_before;
            return;
        }
        let pause = chance::jittered(self.connect_pause);
        self.connects_at = Some(Instant::now() + pause);
        self.connect_pause = (self.connect_pause * 2).min(LONGEST_PAUSE);
    }

    /// Asks a server that refuses subscriptions again only after a while, each time a longer one.
    fn put_off(&mut self) {
        self.not_before = Some(Instant::now() + chance::shortened(self.again));
        self.again = (self.again * 2).min(AGAIN.1);
    }

    /// This subscription succeeded. If it was refused before, all other refused ones may succeed, too.
    fn is_granted(&mut self, channel: &Arc<str>) {
        let was_refused = self.probe.take_if(|probe| probe == channel).is_some();
        let was_told = std::mem::take(&mut self.told);
        if !was_refused && !was_told {
            return;
        }
        log!(info, server = %self.connector.endpoint, "subscribed to releases again");
        self.again = AGAIN.0;
        self.not_before = None;
        self.connects_at = None;
        self.connect_pause = SHORTEST_PAUSE;
        if was_refused {
            self.told_refusal = false;
            for channel in std::mem::take(&mut self.refused) {
                self.want(channel);
            }
        }
    }

    /// Serves until the connection is unusable, and returns why.
    async fn serve(&mut self, listening: Listening) -> Result<String, Closed> {
        let Listening {
            mut open,
            address,
            changes,
        } = listening;
        let Open {
            connection: sink,
            pushes,
            ..
        } = &mut open;
        let sink = &*sink;
        self.begin();
        self.heard = Instant::now();
        let endpoint = self.connector.endpoint.clone();
        let left = endpoint.left(&address, changes);
        tokio::pin!(left);
        let mut polled = self.heard;
        let opening = self.connector.clone();
        let mut spare = None;
        let mut batch = self.next_batch(sink);
        loop {
            tokio::select! {
                biased;
                push = pushes.recv() => {
                    if !self.hear(push, &mut batch) {
                        return Ok("the server closed the connection".to_owned());
                    }
                    self.heard = Instant::now();
                    (spare, self.doubtful_from) = (None, None);
                }
                outcome = answered(&mut batch) => {
                    if let Err(trouble) = outcome {
                        return Ok(trouble.unwrap_or_else(|| self.no_answer()));
                    }
                    // All earlier pushes.
                    while let Ok(push) = pushes.try_recv() {
                        if !self.hear(Some(push), &mut batch) {
                            return Ok("the server closed the connection".to_owned());
                        }
                    }
                    self.heard = Instant::now();
                    (spare, self.doubtful_from) = (None, None);
                }
                order = self.orders.recv() => {
                    let Some(order) = order else { return Err(Closed) };
                    self.note(order);
                }
                () = until(self.doubtful_from), if spare.is_none() => {
                    self.doubtful_from = None;
                    spare = Some(Box::pin(opening.open()));
                }
                Some(opened) = ready(&mut spare) => {
                    spare = None;
                    if let Ok(opened) = opened {
                        self.spare = Some(opened);
                        return Ok("a connection that was idle is dead".to_owned());
                    }
                }
                () = &mut left => return Ok(format!("another server has taken over from the one at {address}")),
                () = tokio::time::sleep_until(polled + POLL), if !self.refused.is_empty() => {
                    self.poll();
                    polled = Instant::now();
                }
                () = tokio::time::sleep_until(self.heard + PING), if batch.is_none() && !self.channels.is_empty() => {
                    batch = Some(self.send(redis::pipe(), 0, Vec::new(), sink));
                }
            }
            if let Some(over) = batch.take_if(|batch| batch.is_over())
                && let Err(trouble) = self.settle(over)
            {
                return Ok(trouble);
            }
            if batch.is_none() {
                self.take_in();
                batch = self.next_batch(sink);
            }
        }
    }

    /// Resets the subscriptions for a new connection.
    fn begin(&mut self) {
        self.take_in();
        self.leaving.clear();
        self.refused.clear();
        self.probe = None;
        self.is_old = false;
        for channel in self.channels.values_mut() {
            channel.state = State::Wanted;
        }
        self.wanted = self.channels.keys().cloned().collect();
    }

    /// The commands that begin and end subscriptions.
    fn words(&self, way: ChannelKind) -> (&'static str, &'static str) {
        match way {
            ChannelKind::Sharded if !self.is_old => ("SSUBSCRIBE", "SUNSUBSCRIBE"),
            _ => ("SUBSCRIBE", "UNSUBSCRIBE"),
        }
    }

    /// Sends the pending commands, if any. One command per channel: the server refuses them one by one, and several are
    /// seldom in one slot.
    fn next_batch(&mut self, sink: &MultiplexedConnection) -> Option<Batch> {
        let (mut commands, mut asked) = (redis::pipe(), Vec::new());
        // Unsubscribes come first: one of the channels may be wanted again.
        let leaving = self.leaving.len().min(MANY);
        for (channel, way) in self.leaving.drain(..leaving).collect::<Vec<_>>() {
            commands.cmd(self.words(way).1).arg(&*channel);
        }
        while leaving + asked.len() < MANY
            && let Some(channel) = self.wanted.pop_front()
        {
            let words = |way| self.words(way).0;
            let Some(Channel { way, .. }) =
                self.channels.get(&channel).filter(|it| it.state == State::Wanted)
            else {
                continue;
            };
            commands.cmd(words(*way)).arg(&*channel);
            self.enter(&channel, State::Asked);
            asked.push(channel);
        }
        (leaving + asked.len() > 0).then(|| self.send(commands, leaving, asked, sink))
    }

    /// Starts a batch with these commands; one without any tests the connection.
    fn send(
        &mut self,
        commands: Pipeline,
        leaving: usize,
        asked: Vec<Arc<str>>,
        sink: &MultiplexedConnection,
    ) -> Batch {
        self.batches += 1;
        let mark = format!("dlock:end-of-batch:{}", self.batches);
        let mark = self.shard.is_some().then_some(mark);
        let timeout = self.connector.access.timeout;
        let now = Instant::now();
        self.doubtful_from = (now >= self.heard + IDLE).then(|| now + timeout / 4);
        let deadline = now + timeout;
        Batch::send(commands, leaving, asked, mark, sink.clone(), deadline)
    }

    /// Handles a push or an answer. Returns whether the connection is still alive.
    fn hear(&mut self, push: Option<PushInfo>, batch: &mut Option<Batch>) -> bool {
        let Some(PushInfo { kind, data }) = push.filter(|push| push.kind != PushKind::Disconnection) else {
            return false;
        };
        let Some(Value::BulkString(channel)) = data.first() else {
            return true;
        };
        let channel = String::from_utf8_lossy(channel);
        let entry = self.channels.get_key_value(&*channel);
        let entry = entry.map(|(channel, entry)| (channel.clone(), entry.state));
        match (kind, entry) {
            (PushKind::Message | PushKind::SMessage, _) if script::says_taken(&channel, data.get(1)) => {
                self.hub.taken(&channel);
            }
            (PushKind::Message | PushKind::SMessage, _) => {
                self.hub.tell(&channel);
            }
            (PushKind::Subscribe | PushKind::SSubscribe, Some((channel, State::Asked))) => {
                self.enter(&channel, State::Stands);
                self.hub.confirm(&channel);
                self.is_granted(&channel);
            }
            // Its slot has left: its waiters check, and the server will name the new one.
            (PushKind::SUnsubscribe, Some((channel, State::Stands))) => {
                self.hub.doubt([&channel]);
                self.want(channel);
            }
            (PushKind::Unsubscribe, _) => {
                if let Some(batch) = batch {
                    batch.ended(&channel);
                }
            }
            // No longer wanted, or wanted again.
            _ => {}
        }
        true
    }

    /// Ends a batch: requests again what was neither granted nor refused, and handles refusals.
    fn settle(&mut self, batch: Batch) -> Result<(), String> {
        for (channel, refusal) in batch.refusals() {
            if self.channels.get(&channel).map(|it| it.state) != Some(State::Asked) {
                continue;
            }
            match refusal {
                Some(error) => self.is_refused(channel, &error)?,
                None => self.want(channel),
            }
        }
        Ok(())
    }

    /// A server, a proxy or the permissions of the user may forbid subscriptions, or not know the command: then waiters
    /// poll, on a live connection. Every other failure is trouble with the connection.
    fn is_refused(&mut self, channel: Arc<str>, error: &RedisError) -> Result<(), String> {
        use ServerErrorKind as S;
        match (&self.shard, error.kind()) {
            (
                Some(shard),
                ErrorKind::Server(
                    S::Moved | S::Ask | S::TryAgain | S::ClusterDown | S::MasterDown | S::BusyLoading,
                ),
            ) => {
                shard.refused(error);
                self.enter(&channel, State::Away);
            }
            (Some(_), _) if is_unknown_to(error, "SSUBSCRIBE") => {
                self.is_old = true;
                self.want(channel);
                return Ok(());
            }
            _ if error.is_io_error() || error.code() == Some("NOAUTH") => return Err(error.to_string()),
            _ => {
                if !std::mem::replace(&mut self.told_refusal, true) {
                    log!(
                        warn, server = %self.connector.endpoint, %channel, %error,
                        "the server takes no subscription to releases: waiters poll until it does"
                    );
                }
                self.enter(&channel, State::Forbidden);
                if self.not_before.is_none_or(|at| at <= Instant::now()) {
                    self.put_off();
                }
            }
        }
        self.refused.insert(channel);
        Ok(())
    }

    fn want(&mut self, channel: Arc<str>) {
        self.enter(&channel, State::Wanted);
        self.wanted.push_back(channel);
    }

    fn enter(&mut self, channel: &Arc<str>, state: State) {
        if let Some(entry) = self.channels.get_mut(channel) {
            entry.state = state;
        }
    }

    /// Makes waiters without notifications check, and asks again if that may help.
    fn poll(&mut self) {
        let mut may_ask = self.not_before.is_none_or(|at| at <= Instant::now());
        for channel in std::mem::take(&mut self.refused) {
            self.hub.tell(&channel);
            match self.channels.get(&channel).map(|it| it.state) {
                Some(State::Away) => self.want(channel),
                // One of them tells whether the others may be requested.
                Some(State::Forbidden) if std::mem::take(&mut may_ask) => {
                    self.probe = Some(channel.clone());
                    self.want(channel);
                }
                Some(State::Forbidden) => drop(self.refused.insert(channel)),
                _ => {}
            }
        }
    }

    fn no_answer(&self) -> String {
        format!("no answer within {:?}", self.connector.access.timeout)
    }
}

async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The outcome of the attempt, if there is one.
async fn ready<F: Future + Unpin>(attempt: &mut Option<F>) -> Option<F::Output> {
    match attempt {
        Some(attempt) => Some(attempt.await),
        None => None,
    }
}

/// Waits for the answers in flight, see [`Batch::answered`].
async fn answered(batch: &mut Option<Batch>) -> Result<(), Option<String>> {
    match batch {
        Some(batch) => batch.answered().await,
        None => std::future::pending().await,
    }
}

/// Whether the server does not know this command.
fn is_unknown_to(error: &RedisError, command: &str) -> bool {
    let text = error.to_string();
    text.contains("unknown command") && text.contains(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::options::Tls;
    use crate::store::url::{Address, Login};
    use crate::stores::redis::endpoint::Endpoint;
    use crate::stores::redis::settings::ConnectSettings;

    /// As where the login of the second connection is refused while the first one stays.
    #[tokio::test]
    async fn nothing_is_left_of_waiters_that_came_and_went_while_there_was_no_connection() {
        let login = Login {
            tls: false,
            user: None,
            password: None,
            database: 0,
        };
        let settings = ConnectSettings::new(login, "test".to_owned(), POLL, &Tls::default()).unwrap();
        let nowhere = Address::Tcp {
            host: "127.0.0.1".to_owned(),
            port: 1,
        };
        let connector = Connector::new(Arc::new(settings), Endpoint::fixed(nowhere));
        let hub = Arc::default();
        let subscriptions = PubSub::start(connector, hub, None, &tokio::runtime::Handle::current());
        let (stays, goes): (Arc<str>, Arc<str>) = ("stays".into(), "goes".into());
        subscriptions.subscribe(&stays, ChannelKind::Plain);
        for _ in 0..1000 {
            subscriptions.subscribe(&goes, ChannelKind::Plain);
            subscriptions.unsubscribe(goes.clone());
        }
        let until = Instant::now() + Duration::from_secs(10);
        while Arc::strong_count(&goes) > 1 {
            assert!(Instant::now() < until, "{}", Arc::strong_count(&goes));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
