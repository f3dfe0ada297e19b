//! The connection on which this process is notified of releases.
//!
//! It is opened for the first waiter, listens to one channel for the whole table, and holds a shared advisory lock for
//! each group of keys that has waiters here. A release tries to lock it exclusively: if that succeeds, the group has no
//! waiters and no notification is sent. This writes nothing, and a process that dies stops waiting.
//!
//! After each connect all waiters ask once, because a notification may have been missed. While there is no connection,
//! or notifications do not arrive, waiters poll.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dlock::store::{GrantId, Hub, Watch};
use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_postgres::types::{ToSql, Type};
use tokio_util::sync::CancellationToken;

use super::link::Setup;
use super::table::bucket;
use crate::connect::{Session, answered};

/// How often the connection is tested and groups without waiters are left, while there are waiters.
const PING: Duration = Duration::from_secs(5);
/// How often waiters poll while they get no notifications.
pub(crate) const POLL: Duration = Duration::from_millis(250);
/// The longest pause before the next attempt to listen.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Between a key and the id of the first waiter for a fair lock, in a notification. No key contains this character.
const SEPARATOR: char = '\u{1}';

/// The name under which a waiter for a fair lock listens: only the first one of a queue is notified.
pub(crate) fn place(key: &str, grant: GrantId) -> Arc<str> {
    format!("{key}{SEPARATOR}{grant}").into()
}

/// The group of the key that a listener waits for.
fn group_of(name: &str) -> i32 {
    bucket(name.split(SEPARATOR).next().unwrap_or(name))
}

/// The waiters in this process, and how they are notified.
#[derive(Debug, Clone)]
pub(crate) struct Waiters {
    hub: Arc<Hub>,
    groups: Arc<Mutex<Groups>>,
    wanted: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Groups {
    /// How many keys of each group have waiters.
    keys: HashMap<i32, usize>,
    /// The groups whose releases are notified.
    live: HashSet<i32>,
    /// The [`place`]s that have listeners, by key.
    places: HashMap<Arc<str>, HashSet<Arc<str>>>,
}

impl Groups {
    /// Counts a name that has its first listener. Returns whether its releases are notified.
    fn add(&mut self, name: &Arc<str>) -> bool {
        let group = group_of(name);
        *self.keys.entry(group).or_default() += 1;
        if let Some((key, _)) = name.split_once(SEPARATOR) {
            self.places.entry(key.into()).or_default().insert(name.clone());
        }
        self.live.contains(&group)
    }

    /// Removes a name that has no listener any more.
    fn remove(&mut self, name: &Arc<str>) {
        if let Some(keys) = self.keys.get_mut(&group_of(name)) {
            *keys = keys.saturating_sub(1);
        }
        if let Some((key, _)) = name.split_once(SEPARATOR)
            && let Some(places) = self.places.get_mut(key)
        {
            places.remove(name);
            if places.is_empty() {
                self.places.remove(key);
            }
        }
    }
}

impl Waiters {
    /// Starts the listening task, which connects for the first waiter and runs until `ended`.
    pub(crate) fn start(setup: Arc<Setup>, ended: CancellationToken, runtime: &runtime::Handle) -> Waiters {
        let waiters = Waiters {
            hub: Arc::default(),
            groups: Arc::default(),
            wanted: Arc::default(),
        };
        let listener = Listener {
            waiters: waiters.clone(),
            setup,
            told: false,
        };
        runtime.spawn(async move {
            tokio::select! {
                () = ended.cancelled() => {}
                () = listener.run() => {}
            }
        });
        waiters
    }

    /// Listens for a key, or for a [`place`].
    pub(crate) fn watch(&self, name: Arc<str>) -> Watch {
        let (here, there) = (self.clone(), self.groups.clone());
        let first = move |name: &Arc<str>| {
            let live = here.groups.lock().add(name);
            // Behind it, so that the listener finds it.
            here.wanted.notify_one();
            live
        };
        let last = move |name: Arc<str>| there.lock().remove(&name);
        self.hub.listen(name, first, last)
    }

    /// Notifies the waiters for a plain lock, and the first one for a fair lock. If the release saw no waiter for a fair lock,
    /// some may have come before it was committed: then all of them look.
    fn tell(&self, payload: &str) {
        self.hub.tell(payload);
        match payload.split_once(SEPARATOR) {
            Some((key, _)) => {
                self.hub.tell(key);
            }
            None => {
                let places = self.groups.lock().places.get(payload).cloned();
                for place in places.unwrap_or_default() {
                    self.hub.tell(&place);
                }
            }
        }
    }

    /// The groups with waiters whose releases are not notified yet.
    fn missing(&self) -> Vec<i32> {
        let groups = self.groups.lock();
        let wanted = groups
            .keys
            .iter()
            .filter(|(_, keys)| **keys > 0)
            .map(|(group, _)| *group);
        wanted.filter(|group| !groups.live.contains(group)).collect()
    }

    /// Removes and returns the groups without waiters.
    fn take_idle(&self) -> Vec<i32> {
        let mut groups = self.groups.lock();
        groups.keys.retain(|_, keys| *keys > 0);
        let Groups { keys, live, .. } = &mut *groups;
        let idle = live
            .iter()
            .filter(|group| !keys.contains_key(group))
            .copied()
            .collect();
        live.retain(|group| keys.contains_key(group));
        idle
    }

    /// Records that releases of these groups are notified from now on.
    fn confirm(&self, groups: &[i32]) {
        self.groups.lock().live.extend(groups);
        // In this order, so that a waiter that arrives in between is confirmed as well.
        for name in self.hub.names() {
            if groups.contains(&group_of(&name)) {
                self.hub.confirm(&name);
            }
        }
    }

    /// Records that nothing is notified any more.
    fn lose(&self) {
        self.groups.lock().live.clear();
        self.hub.tell_all(false);
    }
}

struct Listener {
    waiters: Waiters,
    setup: Arc<Setup>,
    /// Whether the trouble was logged; it is logged once until notifications work again.
    told: bool,
}

impl Listener {
    async fn run(mut self) {
        loop {
            self.waiters.wanted.notified().await;
            let mut pause = POLL;
            while !self.waiters.hub.names().is_empty() {
                let begun = Instant::now();
                let trouble = self.listen().await;
                self.waiters.lose();
                if !std::mem::replace(&mut self.told, true) {
                    tracing::warn!(
                        server = %self.setup.connector.address, %trouble,
                        "no notifications of releases: waiters look now and then until there are some"
                    );
                }
                if begun.elapsed() > PING {
                    pause = POLL;
                }
                let next = Instant::now() + pause;
                while Instant::now() < next {
                    tokio::time::sleep(POLL.mul_f64(0.75 + fastrand::f64() / 2.0)).await;
                    self.waiters.lose();
                }
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
    }

    /// Listens until the connection is unusable, and returns the reason.
    async fn listen(&mut self) -> String {
        let limit = self.setup.connector.timeout;
        if self.setup.pooled.load(Ordering::Relaxed) {
            return "a transaction pooler is in between".to_owned();
        }
        let mut session = match self.setup.connector.connect().await {
            Ok(session) => session,
            Err(error) => return error.message,
        };
        match timeout(limit, self.subscribe(&mut session)).await {
            Ok(Ok(())) => {}
            Ok(Err(trouble)) => return trouble,
            Err(_) => {
                return format!(
                    "a notification did not arrive within {limit:?}: is a transaction pooler in between?"
                );
            }
        }
        if std::mem::take(&mut self.told) {
            tracing::info!(server = %self.setup.connector.address, "notifications of releases again");
        }
        self.waiters.groups.lock().live.clear();
        let mut tested = Instant::now();
        loop {
            let missing = self.waiters.missing();
            if !missing.is_empty() {
                match answered(limit, self.join(&session, &missing, "pg_advisory_lock_shared")).await {
                    Ok(()) => self.waiters.confirm(&missing),
                    Err(trouble) => return trouble,
                }
            }
            tokio::select! {
                notification = session.notifications.recv() => match notification {
                    Some(notification) => self.waiters.tell(notification.payload()),
                    None => return "the server closed the connection".to_owned(),
                },
                () = self.waiters.wanted.notified() => {}
                () = tokio::time::sleep_until(tested + PING) => {
                    match answered(limit, self.test(&session)).await {
                        Ok(Ok(())) => tested = Instant::now(),
                        Ok(Err(trouble)) => return trouble.to_owned(),
                        Err(trouble) => return trouble,
                    }
                }
            }
        }
    }

    /// Listens, and waits for a notification to itself, which does not arrive through a transaction pooler.
    async fn subscribe(&self, session: &mut Session) -> Result<(), String> {
        let channel = &self.setup.table.name;
        let nonce = format!("{SEPARATOR}{:016x}", fastrand::u64(..));
        let sql =
            format!("LISTEN \"{channel}\"; SET synchronous_commit = off; NOTIFY \"{channel}\", '{nonce}'");
        session
            .client
            .batch_execute(&sql)
            .await
            .map_err(|error| error.to_string())?;
        while let Some(notification) = session.notifications.recv().await {
            if notification.payload() == nonce {
                let heard = session.hears().await.map_err(|error| error.to_string())?;
                return heard.map_err(str::to_owned);
            }
        }
        Err("the server closed the connection".to_owned())
    }

    /// Locks or unlocks the advisory locks of these groups.
    async fn join(&self, session: &Session, groups: &[i32], call: &str) -> Result<(), tokio_postgres::Error> {
        let sql = format!("SELECT count({call}($1, g)::text) FROM unnest($2::int4[]) AS g");
        let class = self.setup.table.class;
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&class, Type::INT4), (&groups, Type::INT4_ARRAY)];
        session.client.query_typed(&sql, &values).await.map(drop)
    }

    /// Whether the holders' notifications still arrive; if not, why. Also leaves groups without waiters.
    async fn test(&self, session: &Session) -> Result<Result<(), &'static str>, tokio_postgres::Error> {
        let idle = self.waiters.take_idle();
        if !idle.is_empty() {
            self.join(session, &idle, "pg_advisory_unlock_shared").await?;
        }
        session.hears().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the watch says to look, after it has said so for the last time.
    async fn looks(watch: &mut Watch) -> bool {
        timeout(Duration::from_millis(50), watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn release_that_saw_no_waiter_tells_all_who_came_since() {
        let waiters = Waiters {
            hub: Arc::default(),
            groups: Arc::default(),
            wanted: Arc::default(),
        };
        let id = |number| GrantId::from_parts(7, number);
        let mut plain = waiters.watch("k".into());
        let mut first = waiters.watch(place("k", id(1)));
        let mut second = waiters.watch(place("k", id(2)));
        let mut other = waiters.watch(place("kk", id(3)));
        waiters.confirm(&(0..256).collect::<Vec<_>>());
        for watch in [&mut plain, &mut first, &mut second, &mut other] {
            assert!(looks(watch).await);
        }
        waiters.tell("k");
        assert!(looks(&mut plain).await && looks(&mut first).await && looks(&mut second).await);
        assert!(!looks(&mut other).await);
        waiters.tell(&place("k", id(1)));
        assert!(looks(&mut plain).await && looks(&mut first).await);
        assert!(!looks(&mut second).await);
        drop((plain, first, second, other));
        let groups = waiters.groups.lock();
        assert!(groups.places.is_empty() && groups.keys.values().all(|keys| *keys == 0));
    }
}
