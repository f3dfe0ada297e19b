//! The lineage of data: the master of each group, and what is lost when another server takes over.
//!
//! Replication is asynchronous, so a fail-over may lose the last requests to the old master, and requests until the
//! old master learns that it is no longer master. This interval is measured, so that it excuses nothing else: all
//! servers are asked repeatedly for the identity of their data and their offset in it. The new master reports its
//! offset in the data of the old master; requests before the old master was seen at this offset are not lost. The
//! interval ends when the old master is seen dead, or as a replica. If the old master could continue as a replica
//! without a full resynchronization, nothing was lost.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use tokio::task::JoinHandle;

use super::clock::{self, Nanos};
use super::event::{Done, word};
use super::log::Log;
use super::topology::Deployment;
use crate::Server;

/// The pause between two requests to a server.
const PERIOD: Duration = Duration::from_millis(25);
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_millis(300);
/// How many replies are kept for one history of data.
const KEPT: usize = 20_000;
/// How long a server may take to continue as a replica before it counts as unable to.
const TO_FOLLOW: Duration = Duration::from_secs(4);

/// The state that a server reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    /// Its process has ended.
    Gone,
    /// It does not answer in time.
    Mute,
    /// It is a master with this history of data, up to this offset.
    Master {
        history: String,
        upto: i64,
        /// The history that it had as a replica, and the first place in it that it does not have.
        before: (String, i64),
        /// How often it has sent all data to a replica.
        sent: u64,
    },
    Replica {
        history: String,
        /// Whether it is connected to its master.
        follows: bool,
        sent: u64,
    },
}

#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// When the request was sent, and when the reply had arrived.
    pub(super) asked: Nanos,
    pub(super) heard: Nanos,
    pub(super) role: Role,
}

/// A time in which a group may have lost requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) from: Nanos,
    pub(super) to: Nanos,
    pub(super) why: String,
}

/// A change of masters that has not ended: another server may still act as a master.
#[derive(Debug, Clone)]
struct Change {
    master: usize,
    from: Nanos,
    why: String,
    /// How often the new master had sent all data when it took over; `None` where some data are certainly missing.
    sent: Option<u64>,
    /// When all others had ceased to be masters.
    over: Option<(Nanos, Instant)>,
    /// When all others were seen to follow the new master.
    followed: bool,
}

/// What is known of the servers of a group.
#[derive(Debug, Default)]
pub(super) struct Group {
    last: BTreeMap<usize, Seen>,
    /// The role that each server reported last.
    known: BTreeMap<usize, Role>,
    /// When each was first seen as no master since it was one.
    resigned: BTreeMap<usize, Nanos>,
    /// The offsets of a history, with times.
    histories: HashMap<String, VecDeque<(Nanos, i64)>>,
    changes: Vec<Change>,
    /// While there are two masters: the last time at which there was at most one.
    two_since: Option<Nanos>,
    one_until: Nanos,
}

impl Group {
    /// Records what the servers reported, and returns what was lost.
    pub(super) fn learn(&mut self, round: BTreeMap<usize, Seen>) -> Vec<Lost> {
        for (&at, seen) in &round {
            match &seen.role {
                Role::Master {
                    history,
                    upto,
                    before,
                    ..
                } => {
                    let was = self.known.get(&at);
                    if let Some(Role::Replica { sent, .. }) = was {
                        let (from, why) = self.lost_from(at, before);
                        self.changes.push(Change {
                            master: at,
                            from,
                            why,
                            sent: Some(*sent),
                            over: None,
                            followed: false,
                        });
                    }
                    let places = self.histories.entry(history.clone()).or_default();
                    places.push_back((seen.asked, *upto));
                    if places.len() > KEPT {
                        places.pop_front();
                    }
                    self.resigned.remove(&at);
                }
                Role::Gone | Role::Replica { .. } => {
                    self.resigned.entry(at).or_insert(seen.heard);
                }
                // It is what it was.
                Role::Mute => {}
            }
            if seen.role != Role::Mute {
                self.known.insert(at, seen.role.clone());
            }
        }
        self.last = round;
        let mut lost: Vec<_> = self.two_at_a_time().into_iter().collect();
        lost.extend(self.end_changes());
        lost
    }

    /// The time from which on the new master may lack requests to the old one.
    fn lost_from(&self, at: usize, before: &(String, i64)) -> (Nanos, String) {
        let (history, lacks) = before;
        let places = self.histories.get(history);
        let last = places.and_then(|places| places.iter().rev().find(|(_, upto)| upto < lacks));
        match last {
            Some((asked, upto)) => (
                *asked,
                format!("server {at} took over at {lacks}, the master was seen at {upto}"),
            ),
            None => (
                0,
                format!("server {at} took over at {lacks} of data that no server was seen to have"),
            ),
        }
    }

    /// The servers that are, or may be, masters.
    fn masters(&self) -> Vec<usize> {
        let known = self.known.iter();
        known
            .filter(|(_, role)| matches!(role, Role::Master { .. }))
            .map(|(at, _)| *at)
            .collect()
    }

    /// While there are two masters, each lacks the requests to the other.
    fn two_at_a_time(&mut self) -> Option<Lost> {
        let asked = self.last.values().map(|seen| seen.asked).min().unwrap_or(0);
        let heard = self.last.values().map(|seen| seen.heard).max().unwrap_or(0);
        let masters = self.masters();
        // The loss by a change is reported with that change.
        if masters.len() > 1 && self.changes.iter().all(|change| change.over.is_some()) {
            self.two_since.get_or_insert(self.one_until);
            return None;
        }
        if masters.len() < 2 {
            self.one_until = asked;
            let from = self.two_since.take()?;
            let why = "there were two masters".to_owned();
            return Some(Lost { from, to: heard, why });
        }
        None
    }

    fn end_changes(&mut self) -> Vec<Lost> {
        let mut lost = Vec::new();
        for mut change in std::mem::take(&mut self.changes) {
            let others = || self.known.iter().filter(|(at, _)| **at != change.master);
            if !matches!(self.known.get(&change.master), Some(Role::Master { .. })) {
                // It is no longer master: the next master is another change, and this one recovered no data.
                change.sent = None;
                change.over.get_or_insert((clock::now(), Instant::now()));
            }
            if change.over.is_none() {
                let resigned: Option<Vec<_>> =
                    others().map(|(at, _)| self.resigned.get(at).copied()).collect();
                let Some(resigned) = resigned else {
                    self.changes.push(change);
                    continue;
                };
                let to = resigned.into_iter().max().unwrap_or(change.from).max(change.from);
                change.over = Some((to, Instant::now()));
            }
            let (to, since) = change.over.unwrap_or((0, Instant::now()));
            let history = match self.known.get(&change.master) {
                Some(Role::Master { history, .. }) => Some(history),
                _ => None,
            };
            let all_follow = others().all(|(_, role)| {
                matches!(role, Role::Replica { history: theirs, follows: true, .. } if Some(theirs) == history)
            });
            let sent = match self.known.get(&change.master) {
                Some(Role::Master { sent, .. }) => Some(*sent),
                _ => None,
            };
            // A replica that needed all data had some that the new master lacks, or was restarted.
            let may_be = change.sent.is_some() && sent == change.sent;
            // What the new one says counts when it was asked after all others were seen to follow: of one round, answers
            // may be as far apart as a server is slow.
            let says = self.last.get(&change.master).map(|seen| &seen.role);
            let is_sure = change.followed && matches!(says, Some(Role::Master { .. }));
            if may_be && all_follow && is_sure {
                continue;
            }
            if may_be && (all_follow || since.elapsed() < TO_FOLLOW) {
                change.followed |= all_follow;
                self.changes.push(change);
                continue;
            }
            lost.push(Lost {
                from: change.from,
                to,
                why: change.why,
            });
        }
        lost
    }

    /// What is not reported yet.
    fn rest(&mut self) -> Vec<Lost> {
        let now = clock::now();
        let changes = std::mem::take(&mut self.changes).into_iter();
        let mut lost: Vec<_> = changes
            .map(|change| Lost {
                from: change.from,
                to: change.over.map_or(now, |(at, _)| at),
                why: change.why,
            })
            .collect();
        lost.extend(self.two_since.take().map(|from| Lost {
            from,
            to: now,
            why: "there were two masters".to_owned(),
        }));
        lost
    }

    /// The master, if there is exactly one.
    fn master(&self) -> Option<usize> {
        match self.masters()[..] {
            [master] if matches!(self.last.get(&master)?.role, Role::Master { .. }) => Some(master),
            _ => None,
        }
    }

    /// Whether all others are replicas of the one master, and connected to it.
    fn is_whole(&self) -> bool {
        self.history().is_some()
    }

    /// The id of the data of the one master, if all others are connected replicas of it. It changes with the master.
    fn history(&self) -> Option<&str> {
        let master = self.master()?;
        let Role::Master { history, .. } = &self.last.get(&master)?.role else {
            return None;
        };
        let follows = |role: &Role| matches!(role, Role::Replica { history: theirs, follows: true, .. } if theirs == history);
        let mut others = self.last.iter().filter(|(at, _)| **at != master);
        others.all(|(_, seen)| follows(&seen.role)).then_some(history)
    }
}

/// The tasks that follow the lineage of data, in each group with replicas.
#[derive(Debug)]
pub(super) struct Lineage {
    groups: Vec<Arc<Mutex<Group>>>,
    watchers: Vec<JoinHandle<()>>,
    deployment: Arc<Deployment>,
    log: Arc<Log>,
}

impl Lineage {
    /// Starts observing.
    pub(super) fn new(deployment: Arc<Deployment>, log: Arc<Log>) -> Lineage {
        let groups: Vec<Arc<Mutex<Group>>> = match deployment.topology.fails_over() {
            true => deployment.groups().iter().map(|_| Arc::default()).collect(),
            false => Vec::new(),
        };
        let watchers = groups.iter().enumerate().map(|(at, group)| {
            let (deployment, log) = (deployment.clone(), log.clone());
            tokio::spawn(watch(at, group.clone(), deployment, log))
        });
        Lineage {
            watchers: watchers.collect(),
            groups,
            deployment,
            log,
        }
    }

    /// The master of a group, if there is exactly one and it is known.
    pub(super) fn master(&self, group: usize) -> Option<usize> {
        self.groups[group].lock().master()
    }

    /// Whether a server of a group that is not this one is a master.
    pub(super) fn has_other_master(&self, group: usize, master: usize) -> bool {
        let group = self.groups[group].lock();
        group.masters().iter().any(|at| *at != master)
    }

    /// Waits until the replicas of a group follow its one master. Whether they did in time.
    pub(super) async fn is_whole(&self, group: usize, within: Duration) -> bool {
        let until = Instant::now() + within;
        loop {
            if self.groups.get(group).is_none_or(|group| group.lock().is_whole()) {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Waits until all are.
    pub(super) async fn are_whole(&self, within: Duration) -> bool {
        let all = (0..self.groups.len()).map(|group| self.is_whole(group, within));
        futures_util::future::join_all(all)
            .await
            .into_iter()
            .all(|whole| whole)
    }

    /// The ids of the data of all masters, unless one is missing or has not all its replicas.
    pub(super) fn histories(&self) -> Option<Vec<String>> {
        let of_one = |group: &Arc<Mutex<Group>>| group.lock().history().map(str::to_owned);
        self.groups.iter().map(of_one).collect()
    }

    /// Stops observing, and reports the rest.
    pub(super) fn end(&self) {
        for (at, (watcher, group)) in self.watchers.iter().zip(&self.groups).enumerate() {
            watcher.abort();
            tell(at, group.lock().rest(), &self.deployment, &self.log);
        }
    }
}

fn tell(group: usize, lost: Vec<Lost>, deployment: &Deployment, log: &Log) {
    for Lost { from, to, why } in lost {
        for key in deployment.keys_since(group, from) {
            let why = word(&why);
            log.say(Done::Splits { from, to, key, why });
        }
    }
}

async fn watch(at: usize, group: Arc<Mutex<Group>>, deployment: Arc<Deployment>, log: Arc<Log>) {
    let members = deployment.groups().swap_remove(at);
    let mut connections: BTreeMap<usize, Option<MultiplexedConnection>> = BTreeMap::new();
    for member in &members {
        connections.insert(*member, None);
    }
    loop {
        let round = connections.iter_mut().map(|(&at, connection)| {
            let server = deployment.server(at);
            async move { (at, look(server, connection).await) }
        });
        let round = futures_util::future::join_all(round).await.into_iter().collect();
        let lost = group.lock().learn(round);
        tell(at, lost, &deployment, &log);
        tokio::time::sleep(PERIOD).await;
    }
}

async fn look(server: &Server, connection: &mut Option<MultiplexedConnection>) -> Seen {
    let asked = clock::now();
    // A server that ended before the request and is back is seen at the next one.
    let ran = server.pid();
    let answer = tokio::time::timeout(PATIENCE, async {
        if connection.is_none() {
            *connection = server.open_connection(PATIENCE).await.ok();
        }
        let info: redis::RedisResult<String> = redis::cmd("INFO").query_async(connection.as_mut()?).await;
        read(&info.ok()?)
    });
    let role = answer.await.ok().flatten();
    if role.is_none() {
        *connection = None;
    }
    let is_gone = ran.is_none() && server.pid().is_none();
    Seen {
        asked,
        heard: clock::now(),
        role: role.unwrap_or(if is_gone { Role::Gone } else { Role::Mute }),
    }
}

/// The reply of a server.
pub(super) fn read(info: &str) -> Option<Role> {
    let fields: HashMap<_, _> = info
        .lines()
        .filter_map(|line| line.trim().split_once(':'))
        .collect();
    let text = |name: &str| fields.get(name).map(|text| (*text).to_owned());
    let number = |name: &str| fields.get(name)?.parse::<i64>().ok();
    let sent = number("sync_full")?.unsigned_abs();
    match *fields.get("role")? {
        "master" => Some(Role::Master {
            history: text("master_replid")?,
            upto: number("master_repl_offset")?,
            before: (text("master_replid2")?, number("second_repl_offset")?),
            sent,
        }),
        _ => Some(Role::Replica {
            history: text("master_replid")?,
            follows: *fields.get("master_link_status")? == "up",
            sent,
        }),
    }
}

#[cfg(test)]
mod tests;
