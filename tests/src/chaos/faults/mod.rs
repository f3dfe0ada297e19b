//! The kinds of faults, what each of them strikes, and how long it lasts.

mod masters;
mod network;
mod process;
mod server;
mod slots;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::ValueEnum;
use dlock::LockClient;
use fastrand::Rng;
use parking_lot::Mutex;

use super::clock::Nanos;
use super::event::{Done, word};
use super::lineage::Lineage;
use super::log::Log;
use super::store::KEYS;
use super::team::Team;
use super::topology::Deployment;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Kind {
    /// A worker is killed, and another takes its place.
    ProcessKill,
    /// A worker is stopped for a while.
    ProcessStop,
    /// A server is killed, and started again with its data.
    ServerKill,
    /// A server is stopped for a while.
    ServerStop,
    /// A server loses its data.
    Wipe,
    /// A lock is released by force.
    ForceRelease,
    /// Connections are closed, and new ones refused.
    NetCut,
    /// Nothing passes the network, and no side is told.
    NetHang,
    /// Nothing comes to the server.
    NetHangToServer,
    /// Nothing comes to the client.
    NetHangToClient,
    /// New connections are refused or not answered, and some that are open break.
    NetRefuse,
    /// The network is slow.
    NetSlow,
    /// The server carries out a command, and its reply is lost.
    ReplyLost,
    /// A command is late, and arrives after its caller has given up.
    LateCommand,
    /// Messages of pub/sub are lost.
    MessagesLost,
    /// The server lets its clients wait (`CLIENT PAUSE`).
    ClientPause,
    /// The server closes the connections of its clients (`CLIENT KILL`).
    ClientKill,
    /// The server forgets its scripts.
    ScriptFlush,
    /// A minority of the servers is cut off from clients and servers.
    Partition,
    /// A follower hears nothing of its leader, and its clients reach it.
    FollowerCut,
    /// The clocks of the servers step forward.
    ClockStep,
    /// A replica takes over in good order.
    FailOver,
    /// A master is killed, now and then while it is ahead of its replicas, and comes back when another took over.
    MasterKill,
    /// A master is stopped, and goes on when another took over.
    MasterStop,
    /// A slot moves to another shard with the locks in it.
    SlotMove,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is skipped");
        f.write_str(value.get_name())
    }
}

/// What a fault strikes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Target {
    Slot(usize),
    Servers(Vec<usize>),
    /// Places in [`Deployment::links`].
    Links(Vec<usize>),
    Key(usize),
    /// Servers for something that is over at once, whatever else happens to them.
    Lightly(Vec<usize>),
    /// The master of a group.
    Master(usize),
    /// The slot of a key, from a group to another one.
    Move {
        key: usize,
        from: usize,
        to: usize,
    },
    /// All servers.
    Clocks,
}

/// Something that one fault strikes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Slot(usize),
    Server(usize),
    Link(usize),
    /// Servers with the same data.
    Group(usize),
    /// One of the sentinels.
    Sentinels,
    /// A master that has to be replaced, for which most of the others are needed.
    Election,
}

/// Whether a fault came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    Yes,
    /// It could not be made, as when the server that it is for is not there any more.
    No,
}

/// A fault of the plan: what it will be depends on its seed and on what is free when its time comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Planned {
    pub(crate) kind: Kind,
    pub(crate) seed: u64,
}

/// A fault that can begin now.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    target: Target,
    rng: Rng,
}

/// The tasks that inject faults.
#[derive(Debug)]
pub(crate) struct Fiend {
    pub(crate) deployment: Arc<Deployment>,
    pub(crate) team: Arc<Team>,
    pub(crate) log: Arc<Log>,
    /// To take locks away, as long as it may.
    client: Mutex<Option<LockClient>>,
    struck: Mutex<BTreeSet<Part>>,
    faults: AtomicU64,
    lineage: Lineage,
}

impl Fiend {
    pub(crate) fn new(
        deployment: Arc<Deployment>,
        team: Arc<Team>,
        log: Arc<Log>,
        client: LockClient,
    ) -> Fiend {
        Fiend {
            lineage: Lineage::new(deployment.clone(), log.clone()),
            deployment,
            team,
            log,
            client: Mutex::new(Some(client)),
            struck: Mutex::default(),
            faults: AtomicU64::new(0),
        }
    }

    /// How many faults have begun.
    pub(crate) fn faults(&self) -> u64 {
        self.faults.load(Ordering::SeqCst)
    }

    /// Waits until each group has one master again that all others follow. Whether that was in time.
    pub(crate) async fn is_whole(&self, within: Duration) -> bool {
        self.lineage.are_whole(within).await
    }

    /// The ids of the data of all masters; `None` while a group has not one master that all others follow.
    pub(crate) fn histories(&self) -> Option<Vec<String>> {
        self.lineage.histories()
    }

    /// Closes its own connections.
    pub(crate) async fn leave(&self) {
        self.lineage.end();
        let client = self.client.lock().take();
        if let Some(client) = client {
            client.shutdown(Duration::ZERO).await;
        }
    }

    /// What the planned fault strikes, if that is free now.
    pub(crate) fn place(&self, planned: Planned) -> Option<Fault> {
        let mut rng = Rng::with_seed(planned.seed);
        let mut struck = self.struck.lock();
        let target = self.target(planned.kind, &struck, &mut rng)?;
        let parts = self.parts(&target);
        if parts.iter().any(|part| struck.contains(part)) {
            return None;
        }
        struck.extend(parts);
        let kind = planned.kind;
        Some(Fault { kind, target, rng })
    }

    fn target(&self, kind: Kind, struck: &BTreeSet<Part>, rng: &mut Rng) -> Option<Target> {
        match kind {
            Kind::ProcessKill | Kind::ProcessStop => {
                let free = (0..self.team.len()).filter(|slot| !struck.contains(&Part::Slot(*slot)));
                rng.choice(free.collect::<Vec<_>>()).map(Target::Slot)
            }
            Kind::FailOver | Kind::MasterKill | Kind::MasterStop => {
                self.group(struck, rng).map(Target::Master)
            }
            Kind::SlotMove => {
                let key = rng.usize(..KEYS);
                let from = self.deployment.home(key);
                let to =
                    (from + rng.usize(1..self.deployment.groups().len())) % self.deployment.groups().len();
                Some(Target::Move { key, from, to })
            }
            Kind::ClockStep => Some(Target::Clocks),
            Kind::ClientKill | Kind::ScriptFlush if self.deployment.topology.fails_over() => {
                let groups = 0..self.deployment.groups().len();
                let masters: Vec<_> = groups.filter_map(|group| self.lineage.master(group)).collect();
                (!masters.is_empty()).then_some(Target::Lightly(masters))
            }
            Kind::ServerKill
            | Kind::ServerStop
            | Kind::Wipe
            | Kind::FollowerCut
            | Kind::ClientPause
            | Kind::ClientKill
            | Kind::ScriptFlush => match self.deployment.topology.fails_over() {
                true => self
                    .member(kind, struck, rng)
                    .map(|server| Target::Servers(vec![server])),
                false => self.servers(struck, rng).map(Target::Servers),
            },
            Kind::ForceRelease => Some(Target::Key(rng.usize(..KEYS))),
            Kind::Partition => {
                let away = self.servers(struck, rng)?;
                Some(Target::Links(self.links(|link| away.contains(&link.server))))
            }
            _ => {
                // One worker mostly, from everything or from some of it; now and then all of them.
                let slot = rng.usize(..self.team.len());
                let everybody = self.deployment.topology.may_be_away() == 1 && rng.u32(..4) == 0;
                let all = 0..self.deployment.nodes().len();
                let away = match rng.bool() {
                    true if self.deployment.topology.fails_over() => all.filter(|_| rng.bool()).collect(),
                    true => self.servers(struck, rng)?,
                    false => all.collect::<Vec<_>>(),
                };
                let struck = |link: &super::topology::Link| {
                    (everybody || link.slot == slot) && away.contains(&link.server)
                };
                Some(Target::Links(self.links(struck)))
            }
        }
    }

    fn links(&self, which: impl Fn(&super::topology::Link) -> bool) -> Vec<usize> {
        let links = self.deployment.links.iter().enumerate();
        links.filter(|(_, link)| which(link)).map(|(at, _)| at).collect()
    }

    /// What is struck, and by nothing else meanwhile.
    fn parts(&self, target: &Target) -> Vec<Part> {
        let topology = self.deployment.topology;
        match target {
            Target::Slot(slot) => vec![Part::Slot(*slot)],
            Target::Servers(servers) if topology.fails_over() => {
                let groups = self.deployment.groups();
                let part = |server: &usize| {
                    let group = groups.iter().position(|group| group.contains(server));
                    group.map_or(Part::Sentinels, Part::Group)
                };
                servers.iter().map(part).collect()
            }
            Target::Servers(servers) => servers.iter().copied().map(Part::Server).collect(),
            Target::Links(links) => links.iter().copied().map(Part::Link).collect(),
            Target::Master(group) => vec![Part::Group(*group), Part::Election],
            Target::Move { from, to, .. } => vec![Part::Group(*from), Part::Group(*to)],
            Target::Key(_) | Target::Lightly(_) | Target::Clocks => Vec::new(),
        }
    }

    /// A group that nothing strikes.
    fn group(&self, struck: &BTreeSet<Part>, rng: &mut Rng) -> Option<usize> {
        let all = 0..self.deployment.groups().len();
        let free = all.filter(|group| !struck.contains(&Part::Group(*group)));
        rng.choice(free.collect::<Vec<_>>())
    }

    /// One server of a group: most often its master, and for some faults a sentinel now and then.
    fn member(&self, kind: Kind, struck: &BTreeSet<Part>, rng: &mut Rng) -> Option<usize> {
        let sentinels = self.deployment.sentinels();
        let may_be_sentinel = matches!(kind, Kind::ServerKill | Kind::ServerStop) && !sentinels.is_empty();
        if may_be_sentinel && rng.u32(..4) == 0 && !struck.contains(&Part::Sentinels) {
            return Some(rng.usize(sentinels));
        }
        let group = self.group(struck, rng)?;
        let master = self.lineage.master(group)?;
        match kind {
            // Replicas take nothing away.
            Kind::Wipe => Some(master),
            _ if rng.u32(..4) > 0 => Some(master),
            _ => rng.choice(self.deployment.groups().swap_remove(group)),
        }
    }

    /// As many servers as may be away at a time, less those that are.
    fn servers(&self, struck: &BTreeSet<Part>, rng: &mut Rng) -> Option<Vec<usize>> {
        let count = self.deployment.count();
        let mut servers: Vec<_> = (0..count).collect();
        servers.retain(|server| !struck.contains(&Part::Server(*server)));
        let away = count - servers.len();
        let most = self.deployment.topology.may_be_away().checked_sub(away)?;
        if most == 0 {
            return None;
        }
        rng.shuffle(&mut servers);
        servers.truncate(rng.usize(1..=most));
        Some(servers)
    }

    /// Strikes, and heals what was struck.
    ///
    /// # Errors
    /// When the harness fails.
    pub(crate) async fn inflict(&self, mut fault: Fault) -> anyhow::Result<()> {
        let number = self.faults.fetch_add(1, Ordering::SeqCst) + 1;
        let rng = &mut fault.rng;
        let lasts = duration(fault.kind, rng);
        let reach = self.reach(&fault.target);
        let what = word(format!("{:?} for {lasts:?}", fault.target));
        self.log.say(Done::Begin {
            fault: number,
            kind: fault.kind.to_string(),
            reach,
            what,
        });
        let outcome = match &fault.target {
            Target::Slot(slot) => self.strike_process(fault.kind, *slot, lasts).await,
            Target::Servers(servers) => self.strike_servers(fault.kind, servers, lasts, rng).await,
            Target::Lightly(servers) => self.strike(fault.kind, servers, lasts, rng).await,
            Target::Links(links) => self.strike_network(fault.kind, links, lasts, rng).await,
            Target::Key(key) => self.force(*key).await,
            Target::Master(group) => self.strike_master(fault.kind, *group, rng).await,
            Target::Move { key, from, to } => self.move_slot(*key, *from, *to, lasts).await,
            Target::Clocks => self.step_clocks(rng),
        };
        self.log.say(Done::End { fault: number });
        if matches!(outcome, Ok(Made::No)) {
            self.log.say(Done::Missed { fault: number });
        }
        let mut struck = self.struck.lock();
        for part in self.parts(&fault.target) {
            struck.remove(&part);
        }
        outcome.map(drop)
    }

    /// The slot that is struck, if it is one.
    fn reach(&self, target: &Target) -> String {
        let slot = match target {
            Target::Slot(slot) => Some(*slot),
            Target::Links(links) => {
                let mut slots = links.iter().map(|link| self.deployment.links[*link].slot);
                let first = slots.next();
                first.filter(|first| slots.all(|slot| slot == *first))
            }
            _ => None,
        };
        slot.map_or_else(|| "*".to_owned(), |slot| format!("p{slot}"))
    }

    /// Says that the store may have forgotten its grants between `from` and now.
    fn forgot(&self, from: Nanos, key: Option<usize>) {
        let key = key.map_or_else(|| "*".to_owned(), |key| key.to_string());
        self.log.say(Done::Loses { from, key });
    }
}

/// How long a fault lasts: often shorter than what a step may take, often longer than a lease.
fn duration(kind: Kind, rng: &mut Rng) -> Duration {
    let millis = match kind {
        Kind::ScriptFlush | Kind::ClientKill | Kind::ForceRelease | Kind::Wipe | Kind::ClockStep => 0..1,
        // They last until another one has taken over.
        Kind::FailOver | Kind::MasterKill | Kind::MasterStop => 0..1,
        Kind::SlotMove => 0..800,
        Kind::ProcessKill => 50..600,
        Kind::ServerKill if rng.u32(..4) > 0 => 20..700,
        Kind::MessagesLost | Kind::NetSlow => 500..2000,
        Kind::ReplyLost => 300..1000,
        _ if rng.u32(..3) > 0 => 150..900,
        _ => 2200..4000,
    };
    Duration::from_millis(rng.u64(millis))
}
