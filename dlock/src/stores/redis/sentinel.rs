//! Sentinel: finds the current master.
//!
//! A task for each sentinel keeps a connection to it, listens for `+switch-master` there, and also polls. If sentinels
//! disagree, the one with the highest configuration epoch is right: a sentinel that was cut off from the others keeps
//! naming a former master.
//!
//! The sentinel that leads a fail-over reports the new epoch with the former master until all replicas follow the new one, which may
//! take minutes. Asked for the address alone, it names the new master (`sentinelGetCurrentMasterAddress` in Redis).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisError};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::connect::explain_with;
use super::settings::{ConnectSettings, Open, Pushes};
use crate::base::chance;
use crate::base::observed::log;
use crate::store::url::Address;
use crate::store::{Outcome, Reason, StoreError};

/// How often each sentinel is polled, in addition to its messages.
const POLL: Duration = Duration::from_secs(1);
/// How long a sentinel that was not named in the URL has been silent when it counts no more, and gives up its place.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// The pause between two attempts to reach a sentinel.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// The channel on which a new master is announced.
const SWITCH: &str = "+switch-master";
/// The flag of a master that a sentinel is replacing.
const FAILING_OVER: &str = "failover_in_progress";
/// The flag of a sentinel that another one cannot reach.
const DOWN: &str = "s_down";
/// How to give the sentinels' own password.
const PASSWORD: &str = "as sentinel_password";
/// The maximum number of sentinels to ask.
const MANY: usize = 16;

/// The master of a service, as its sentinels name it. They are listened to until the last handle is dropped.
#[derive(Debug, Clone)]
pub(super) struct Master {
    council: Arc<Council>,
    named: watch::Receiver<Option<Address>>,
}

impl Master {
    /// Begins to listen to these sentinels.
    pub(super) fn of(
        access: ConnectSettings,
        sentinels: Vec<Address>,
        service: String,
        runtime: &tokio::runtime::Handle,
    ) -> Master {
        let council = Arc::new(Council {
            service,
            look: Notify::new(),
            minutes: Mutex::default(),
            hopeless: AtomicBool::new(false),
        });
        let (names, named) = watch::channel(None);
        let table = Arc::new(Table {
            access,
            council: council.clone(),
            names,
            runtime: runtime.clone(),
        });
        for sentinel in sentinels {
            table.invite(sentinel);
        }
        Master { council, named }
    }

    /// Returns its address, once there is one; fails if none of the sentinels has named one so far.
    pub(super) async fn named(&self) -> Result<Address, StoreError> {
        let mut named = self.named.clone();
        let is_over =
            |named: &Option<Address>| named.is_some() || self.council.hopeless.load(Ordering::SeqCst);
        let found = named.wait_for(is_over).await.map(|named| named.clone());
        match found {
            Ok(Some(address)) => Ok(address),
            Ok(None) => Err(self.missing()),
            // The runtime has ended.
            _ => std::future::pending().await,
        }
    }

    pub(super) fn is_at(&self, address: &Address) -> bool {
        self.named.borrow().as_ref() == Some(address)
    }

    /// Completes when the master is somewhere else.
    pub(super) async fn left(&self, address: &Address) {
        let mut named = self.named.clone();
        let is_elsewhere = |named: &Option<Address>| named.as_ref() != Some(address);
        let over = named.wait_for(is_elsewhere).await.map(drop).is_err();
        if over {
            std::future::pending::<()>().await;
        }
    }

    /// The longest down-after time of the sentinels.
    pub(super) fn down_after(&self) -> Option<Duration> {
        self.council.minutes.lock().down_after.values().max().copied()
    }

    /// Asks the sentinels at once.
    pub(super) fn look(&self) {
        self.council.look.notify_waiters();
    }

    /// Why no master is named.
    pub(super) fn missing(&self) -> StoreError {
        let minutes = self.council.minutes.lock();
        let troubles = &minutes.troubles;
        // Access refused, or no such master: that is permanent.
        let for_good = troubles.len() == minutes.known.len() && troubles.values().all(|t| !t.is_passing());
        let reason = match for_good {
            true => Reason::Refused,
            false => Reason::Unreachable,
        };
        let why: Vec<_> = troubles
            .values()
            .map(|trouble| trouble.message.as_str())
            .collect();
        let silent = minutes
            .known
            .iter()
            .filter(|sentinel| !troubles.contains_key(sentinel));
        let silent: Vec<_> = silent.map(Address::to_string).collect();
        let why = match why.is_empty() {
            true => format!("{} did not answer in time", silent.join(", ")),
            false => why.join("; "),
        };
        StoreError::not_done(reason, format!("no sentinel names {self}: {why}"))
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = &self.council.service;
        match &*self.named.borrow() {
            Some(address) => write!(f, "{address}, the master of \"{service}\""),
            None => write!(f, "the master of \"{service}\""),
        }
    }
}

/// The request to the sentinels, and their answers.
#[derive(Debug)]
struct Council {
    service: String,
    look: Notify,
    minutes: Mutex<Minutes>,
    /// Whether each of them was asked, and none has named a master so far.
    hopeless: AtomicBool,
}

/// The master, as one sentinel names it.
#[derive(Debug)]
struct View {
    epoch: u64,
    /// It is about to be replaced, and the sentinel may not be asked by which one.
    is_former: bool,
    master: Address,
}

#[derive(Debug, Default)]
struct Minutes {
    /// Those that are listened to.
    known: BTreeSet<Address>,
    /// The answer of each reachable sentinel.
    views: BTreeMap<Address, View>,
    /// The down-after time of each.
    down_after: HashMap<Address, Duration>,
    /// The trouble of the others.
    troubles: BTreeMap<Address, StoreError>,
    /// The other sentinels that each named last, and which of them it cannot reach.
    others: BTreeMap<Address, Vec<Other>>,
    /// Those of them that are not listened to, in case none of the known ones can be reached: the most promising first.
    spares: VecDeque<Address>,
    /// Those of the known ones that were spares. One that was silent for long may be gone for good.
    invited: BTreeMap<Address, Invited>,
    /// The epoch of the current master.
    epoch: u64,
}

/// A sentinel, as another one names it.
#[derive(Debug, Clone)]
struct Other {
    address: Address,
    is_down: bool,
}

/// When a spare was invited, and when it last answered.
#[derive(Debug, Clone, Copy)]
struct Invited {
    at: Instant,
    answered: Option<Instant>,
}

impl Minutes {
    /// Notes which other sentinels this one knows. It has answered: those that are silent know no better, and whom nobody
    /// else names may be gone for good.
    fn knows(&mut self, sentinel: &Address, others: Vec<Other>) {
        self.others.insert(sentinel.clone(), others);
        self.others
            .retain(|sentinel, _| self.views.contains_key(sentinel));
        let mut spares: BTreeMap<&Address, bool> = BTreeMap::new();
        for other in self.others.values().flatten() {
            if !self.known.contains(&other.address) {
                *spares.entry(&other.address).or_insert(true) &= other.is_down;
            }
        }
        let of = |are_down| spares.iter().filter(move |(_, is_down)| **is_down == are_down);
        self.spares = of(false)
            .chain(of(true))
            .map(|(spare, _)| (*spare).clone())
            .collect();
    }

    /// The next spare to listen to, if there is one, and room for it.
    fn next_spare(&mut self, now: Instant) -> Option<Address> {
        if self.known.len() >= MANY {
            return None;
        }
        let spare = self.spares.pop_front()?;
        self.known.insert(spare.clone());
        let invited = Invited {
            at: now,
            answered: None,
        };
        self.invited.insert(spare.clone(), invited);
        Some(spare)
    }

    /// Whether this sentinel is not listened to any more: it was a spare, has been silent for long, and is not the only
    /// hope. It is tried again behind the other spares.
    fn dismiss(&mut self, sentinel: &Address, now: Instant) -> bool {
        let Some(Invited { at, answered }) = self.invited.get(sentinel).copied() else {
            return false;
        };
        let is_silent = now >= answered.unwrap_or(at) + GONE_AFTER;
        if !is_silent || (self.views.is_empty() && self.spares.is_empty()) {
            return false;
        }
        self.known.remove(sentinel);
        self.invited.remove(sentinel);
        self.troubles.remove(sentinel);
        self.down_after.remove(sentinel);
        // Where none answers, the network may be gone: those that have answered are tried first when it is back.
        match answered {
            Some(_) if self.views.is_empty() => self.spares.push_front(sentinel.clone()),
            _ => self.spares.push_back(sentinel.clone()),
        }
        true
    }

    /// The master by the latest epoch; of several, the one that most of the sentinels name. An epoch before the known one needs
    /// more than half of the sentinels, as when all were set up anew.
    fn verdict(&self) -> Option<(u64, Address)> {
        let named_by = |master: &Address| {
            self.views
                .values()
                .filter(|other| other.master == *master)
                .count()
        };
        let rank = |view: &&View| (view.epoch, !view.is_former, named_by(&view.master));
        let View { epoch, master, .. } = self.views.values().max_by_key(rank)?;
        let alike = named_by(master);
        let is_gone = |sentinel: &&Address| match self.invited.get(sentinel) {
            _ if self.views.contains_key(sentinel) => false,
            None => false,
            Some(invited) => invited
                .answered
                .is_none_or(|answered| answered.elapsed() >= GONE_AFTER),
        };
        let all = self.known.iter().filter(|sentinel| !is_gone(sentinel)).count();
        (*epoch >= self.epoch || 2 * alike > all).then(|| (*epoch, master.clone()))
    }
}

/// The sentinels' side: dropped with the last listening task.
struct Table {
    access: ConnectSettings,
    council: Arc<Council>,
    names: watch::Sender<Option<Address>>,
    runtime: tokio::runtime::Handle,
}

/// The address is not needed any more.
struct Closed;

impl Table {
    /// Listens to one more sentinel.
    fn invite(self: &Arc<Self>, sentinel: Address) {
        let mut minutes = self.council.minutes.lock();
        if minutes.known.len() < MANY && minutes.known.insert(sentinel.clone()) {
            self.council.hopeless.store(false, Ordering::SeqCst);
            self.runtime.spawn(self.clone().listen(sentinel));
        }
    }

    async fn listen(self: Arc<Self>, sentinel: Address) {
        let mut pause = PAUSES.0;
        loop {
            match self.attend(&sentinel, &mut pause).await {
                Ok(trouble) => self.lost(&sentinel, trouble),
                Err(Closed) => return,
            }
            if self.dismisses(&sentinel) {
                return;
            }
            tokio::select! {
                () = self.names.closed() => return,
                () = self.council.look.notified() => {}
                () = tokio::time::sleep(chance::jittered(pause)) => {}
            }
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Listens until the connection to the sentinel fails, and returns the trouble.
    async fn attend(
        self: &Arc<Self>,
        sentinel: &Address,
        pause: &mut Duration,
    ) -> Result<StoreError, Closed> {
        let opening = async {
            let open = self.access.open(sentinel).await;
            open.map_err(|error| explain_with(sentinel, error, PASSWORD))
        };
        let opened = tokio::select! {
            () = self.names.closed() => return Err(Closed),
            opened = opening => opened,
        };
        let open = match opened {
            Ok(open) => open,
            Err(trouble) => return Ok(trouble),
        };
        tokio::select! {
            () = self.names.closed() => Err(Closed),
            trouble = self.hear(sentinel, open, pause) => Ok(trouble),
        }
    }

    async fn hear(self: &Arc<Self>, sentinel: &Address, mut open: Open, pause: &mut Duration) -> StoreError {
        let Open {
            connection, pushes, ..
        } = &mut open;
        // If it forbids that, polling suffices.
        let subscription = async {
            let _ = connection.subscribe(SWITCH).await;
            Ok(())
        };
        if let Err(trouble) = self.in_time(sentinel, subscription).await {
            return trouble;
        }
        loop {
            // Before the request, so that nothing after it is missed.
            let look = self.council.look.notified();
            let request = self.request(sentinel, connection);
            match self.in_time(sentinel, request).await {
                Ok(view) => {
                    *pause = PAUSES.0;
                    self.says(sentinel, view);
                }
                Err(trouble) => return trouble,
            }
            let others = self.others(connection);
            if let Ok(others) = self.in_time(sentinel, others).await {
                self.council.minutes.lock().knows(sentinel, others);
            }
            tokio::select! {
                () = tokio::time::sleep(POLL) => {}
                () = look => {}
                gone = switched(pushes) => if gone {
                    let message = format!("{sentinel}: the sentinel closed the connection");
                    return StoreError::not_done(Reason::Unreachable, message);
                },
            }
        }
    }

    async fn request(
        &self,
        sentinel: &Address,
        connection: &mut MultiplexedConnection,
    ) -> Result<View, RedisError> {
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("MASTER").arg(&self.council.service);
        let fields: HashMap<String, String> = cmd.query_async(connection).await?;
        let down_after = fields
            .get("down-after-milliseconds")
            .and_then(|ms| ms.parse().ok());
        if let Some(down_after) = down_after.map(Duration::from_millis) {
            (self.council.minutes.lock().down_after).insert(sentinel.clone(), down_after);
        }
        let epoch = fields.get("config-epoch").and_then(|epoch| epoch.parse().ok());
        let is_failing_over = fields
            .get("flags")
            .is_some_and(|flags| flags.contains(FAILING_OVER));
        let promoted = match is_failing_over {
            true => self.promoted(connection).await?,
            false => None,
        };
        let is_former = is_failing_over && promoted.is_none();
        let master = promoted.or_else(|| address(&fields)).ok_or((
            redis::ErrorKind::UnexpectedReturnType,
            "the sentinel names no address",
        ))?;
        Ok(View {
            epoch: epoch.unwrap_or(0),
            is_former,
            master,
        })
    }

    /// The master that a sentinel in the middle of a fail-over would send clients to; `None` if it does not tell.
    async fn promoted(&self, connection: &mut MultiplexedConnection) -> Result<Option<Address>, RedisError> {
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.council.service);
        match cmd.query_async::<Option<(String, u16)>>(connection).await {
            Ok(named) => Ok(named.map(|(host, port)| Address::Tcp { host, port })),
            // Not permitted.
            Err(error) if error.code().is_some() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The other sentinels that it knows.
    async fn others(&self, connection: &mut MultiplexedConnection) -> Result<Vec<Other>, RedisError> {
        let mut cmd = redis::cmd("SENTINEL");
        cmd.arg("SENTINELS").arg(&self.council.service);
        let others: Vec<HashMap<String, String>> = cmd.query_async(connection).await?;
        let other = |fields: &HashMap<String, String>| {
            let is_down = fields.get("flags").is_some_and(|flags| flags.contains(DOWN));
            address(fields).map(|address| Other { address, is_down })
        };
        Ok(others.iter().filter_map(other).collect())
    }

    async fn in_time<T>(
        &self,
        sentinel: &Address,
        work: impl Future<Output = Result<T, RedisError>>,
    ) -> Result<T, StoreError> {
        let timeout = self.access.timeout;
        match tokio::time::timeout(timeout, work).await {
            Ok(outcome) => outcome.map_err(|error| explain_with(sentinel, error, PASSWORD)),
            Err(_) => Err(StoreError {
                outcome: Outcome::NotDone,
                ..StoreError::unknown(format!("{sentinel} did not answer within {timeout:?}"))
            }),
        }
    }

    fn says(&self, sentinel: &Address, view: View) {
        let mut minutes = self.council.minutes.lock();
        minutes.troubles.remove(sentinel);
        minutes.views.insert(sentinel.clone(), view);
        if let Some(invited) = minutes.invited.get_mut(sentinel) {
            invited.answered = Some(Instant::now());
        }
        self.council.hopeless.store(false, Ordering::SeqCst);
        let Some((epoch, master)) = minutes.verdict() else {
            return;
        };
        minutes.epoch = epoch;
        // Under the mutex, so that the last decision stays.
        self.names.send_if_modified(|named| {
            if named.as_ref() == Some(&master) {
                return false;
            }
            if let Some(before) = named {
                log!(warn, service = %self.council.service, %before, now = %master, "the master has changed");
            }
            *named = Some(master);
            true
        });
    }

    fn lost(self: &Arc<Self>, sentinel: &Address, trouble: StoreError) {
        log!(debug, %sentinel, %trouble, "a sentinel does not help");
        let mut minutes = self.council.minutes.lock();
        minutes.views.remove(sentinel);
        minutes.troubles.insert(sentinel.clone(), trouble);
        if minutes.views.is_empty() {
            self.invite_spares(&mut minutes);
            let hopeless = minutes.troubles.len() == minutes.known.len();
            self.council.hopeless.store(hopeless, Ordering::SeqCst);
            drop(minutes);
            // Waiters for the first name need not wait for the end of the timeout.
            self.names.send_if_modified(|named| hopeless && named.is_none());
        }
    }

    /// Stops listening to a sentinel that is of no use, for the sake of others that may be.
    fn dismisses(self: &Arc<Self>, sentinel: &Address) -> bool {
        let mut minutes = self.council.minutes.lock();
        let is_dismissed = minutes.dismiss(sentinel, Instant::now());
        if is_dismissed && minutes.views.is_empty() {
            self.invite_spares(&mut minutes);
        }
        is_dismissed
    }

    fn invite_spares(self: &Arc<Self>, minutes: &mut Minutes) {
        while let Some(spare) = minutes.next_spare(Instant::now()) {
            self.council.hopeless.store(false, Ordering::SeqCst);
            self.runtime.spawn(self.clone().listen(spare));
        }
    }
}

/// Waits until a master was announced, or the connection is gone: then returns true.
async fn switched(pushes: &mut Pushes) -> bool {
    loop {
        match pushes.recv().await {
            Some(PushInfo {
                kind: PushKind::Message,
                ..
            }) => return false,
            Some(PushInfo {
                kind: PushKind::Disconnection,
                ..
            })
            | None => return true,
            Some(_) => {}
        }
    }
}

fn address(fields: &HashMap<String, String>) -> Option<Address> {
    Some(Address::Tcp {
        host: fields.get("ip").filter(|ip| !ip.is_empty())?.clone(),
        port: fields.get("port")?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn server(port: u16) -> Address {
        let host = "h".to_owned();
        Address::Tcp { host, port }
    }

    fn invited(answered: Option<Instant>) -> Invited {
        Invited {
            at: Instant::now(),
            answered,
        }
    }

    fn view(epoch: u64, master: u16) -> View {
        View {
            epoch,
            is_former: false,
            master: server(master),
        }
    }

    fn minutes(epoch: u64, views: &[(u64, u16)]) -> Minutes {
        let mut minutes = Minutes {
            epoch,
            ..Minutes::default()
        };
        for (at, (epoch, master)) in views.iter().enumerate() {
            let sentinel = server(26_000 + at as u16);
            minutes.known.insert(sentinel.clone());
            minutes.views.insert(sentinel, view(*epoch, *master));
        }
        minutes
    }

    #[test]
    fn the_latest_epoch_names_the_master_and_the_others_do_not_outvote_it() {
        let verdict = |epoch, views: &[(u64, u16)]| minutes(epoch, views).verdict();
        assert_eq!(verdict(0, &[]), None);
        assert_eq!(verdict(0, &[(3, 1), (3, 1)]), Some((3, server(1))));
        assert_eq!(verdict(3, &[(3, 1), (4, 2), (3, 1)]), Some((4, server(2))));
        // The first does not tell that it is still about to replace the master.
        for views in [
            [(7, 1), (7, 2), (7, 2)],
            [(7, 2), (7, 1), (7, 2)],
            [(7, 2), (7, 2), (7, 1)],
        ] {
            assert_eq!(verdict(6, &views), Some((7, server(2))));
        }
        // It tells that, but not by which one.
        for former in [26_000, 26_001] {
            let mut two = minutes(6, &[(7, 2), (7, 2)]);
            let view = View {
                is_former: true,
                ..view(7, 1)
            };
            two.views.insert(server(former), view);
            assert_eq!(two.verdict(), Some((7, server(2))));
        }
        // One that was cut off, while the others cannot be asked.
        let mut cut_off = minutes(4, &[(3, 1)]);
        cut_off.known.extend([server(1), server(2)]);
        assert_eq!(cut_off.verdict(), None);
        // All of them were set up anew.
        assert_eq!(verdict(4, &[(0, 5), (0, 5), (0, 5)]), Some((0, server(5))));
        // At new addresses, behind the name in the URL. Those that were invited before are gone.
        let mut moved = minutes(4, &[(0, 5)]);
        moved.known.extend([server(1), server(2)]);
        let silent = |port| (server(port), invited(None));
        moved.invited.extend([silent(1), silent(2)]);
        assert_eq!(moved.verdict(), Some((0, server(5))));
        // One that answers has a say, and one that did so a moment ago.
        moved.views.insert(server(1), view(0, 6));
        assert_eq!(moved.verdict(), None);
        moved.views.remove(&server(1));
        moved.invited.insert(server(1), invited(Some(Instant::now())));
        assert_eq!(moved.verdict(), None);
    }

    /// More spares than are listened to at a time, of which one is there.
    #[tokio::test(start_paused = true)]
    async fn every_spare_has_its_turn_and_those_that_nobody_names_any_more_are_forgotten() {
        let mut minutes = minutes(4, &[(4, 5)]);
        let (of_url, there) = (server(26_000), server(40));
        let named = |ports: Range<u16>, down: bool| {
            let other = |port| Other {
                address: server(port),
                is_down: down,
            };
            ports.map(other).collect::<Vec<_>>()
        };
        let invite = |minutes: &mut Minutes| {
            std::iter::from_fn(|| minutes.next_spare(Instant::now())).collect::<Vec<_>>()
        };
        minutes.knows(&of_url, named(1..100, false));
        minutes.knows(&of_url, named(21..41, false));
        minutes.views.clear();
        let mut listened_to = invite(&mut minutes);
        assert_eq!(listened_to, (21..36).map(server).collect::<Vec<_>>());
        // Those that are gone make room, one by one.
        let first = listened_to[0].clone();
        assert!(!minutes.dismiss(&first, Instant::now()));
        tokio::time::advance(GONE_AFTER).await;
        while !listened_to.contains(&there) {
            let silent = listened_to.remove(0);
            assert!(minutes.dismiss(&silent, Instant::now()), "{silent}");
            let next = invite(&mut minutes);
            assert_eq!(next.len(), 1);
            listened_to.extend(next);
        }
        assert_eq!(minutes.known.len(), MANY);
        // It answers: the others are not needed, and are known to be gone.
        minutes.views.insert(there.clone(), view(4, 5));
        tokio::time::advance(GONE_AFTER).await;
        minutes
            .invited
            .insert(there.clone(), invited(Some(Instant::now())));
        for gone in listened_to.iter().filter(|sentinel| **sentinel != there) {
            assert!(minutes.dismiss(gone, Instant::now()), "{gone}");
        }
        assert!(!minutes.dismiss(&there, Instant::now()) && !minutes.dismiss(&of_url, Instant::now()));
        minutes.knows(&there, [named(21..23, true), named(50..51, false)].concat());
        assert_eq!(minutes.spares, [server(50), server(21), server(22)]);
    }
}
