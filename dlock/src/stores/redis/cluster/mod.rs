//! A Cluster: each step goes to the server that has the slot of its key.
//!
//! There is a [`Node`] for each master, with its own send queue and connection, so that a shard that is down delays no
//! lock of another. The client learns the slots from the servers: at start, from redirections, and by asking
//! (`topology`). Steps that a server redirects keep their order, see `node/slot_migration.rs`.
//!
//! The master of a key's slot serves subscriptions to its releases, on the sharded channel of that slot; they move
//! along with the slot.

mod shard;
pub(super) mod slot;
mod slot_map;
mod topology;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::runtime;
use tokio::sync::Notify;
use tokio::time::Instant;

pub(super) use self::shard::Shard;
use self::slot::{SLOTS, Slot};
use self::slot_map::SlotMap;
use super::connect::Connector;
use super::node::{CALLS_IN_ALL, Node, Part, Queued, Step};
use super::pubsub::{ChannelKind, PubSub};
use super::script::Call;
use super::settings::ConnectSettings;
use crate::base::clock;
use crate::base::observed::log;
use crate::store::Hub;
use crate::store::url::Address;
use crate::store::{Lane, StoreError, Watch};

/// How long a server without slots is kept after a redirection named it, at least: a slot may be moving there.
const MOVING: Duration = Duration::from_secs(60);

/// The servers of a Cluster.
pub(super) struct Cluster {
    access: Arc<ConnectSettings>,
    seeds: Vec<Address>,
    runtime: runtime::Handle,
    /// The data that the nodes share.
    part: Part,
    map: RwLock<Map>,
    hub: Arc<Hub>,
    /// The channels with listeners, with their slots and the server of the subscription.
    channels: Mutex<HashMap<Arc<str>, (Slot, Lane)>>,
    /// Asks for the slots.
    wanted: Arc<Notify>,
}

/// The servers, by slot.
struct Map {
    /// For each slot the lane of its master.
    owners: Vec<Lane>,
    /// The same as it was when the servers were last asked.
    settled: Vec<Lane>,
    /// The masters; their number is their lane, and is never reused.
    members: BTreeMap<Lane, Member>,
    next: u32,
    /// The epoch of the known slots.
    epoch: u64,
    /// Servers that were not masters of slots when the servers were last asked.
    replicas: Vec<Address>,
}

struct Member {
    address: Address,
    node: Node,
    pubsub: PubSub,
    /// Whether it has slots, or had some.
    served: bool,
    /// When a server last named it.
    named: Instant,
}

impl Map {
    fn owner(&self, slot: Slot) -> Lane {
        self.owners[slot.index()]
    }

    fn member(&self, lane: Lane) -> &Member {
        &self.members[&lane]
    }

    fn find(&self, address: &Address) -> Option<Lane> {
        let found = self.members.iter().find(|(_, member)| member.address == *address);
        found.map(|(lane, _)| *lane)
    }

    /// Moves the slots to another member, with their steps in order.
    fn give(&mut self, slots: Vec<Slot>, from: Lane, to: Lane) {
        for slot in &slots {
            self.owners[slot.index()] = to;
        }
        if let Some(member) = self.members.get_mut(&to) {
            member.served = true;
        }
        self.member(from).node.give(&slots.into(), &self.member(to).node);
    }
}

impl Cluster {
    /// Asks the seeds for the slots.
    ///
    /// Fails if none of them can tell within the timeout.
    pub(super) async fn connect(
        access: ConnectSettings,
        seeds: Vec<Address>,
        part: Part,
        runtime: &runtime::Handle,
    ) -> Result<Arc<Cluster>, StoreError> {
        // The default is made for callers that wait for each other.
        let access = Arc::new(access.with_buffer(CALLS_IN_ALL));
        let slot_map = topology::first_view(&access, &seeds).await?;
        let wanted = Arc::new(Notify::new());
        let cluster = Arc::new_cyclic(|this: &Weak<Cluster>| Cluster {
            access,
            seeds,
            runtime: runtime.clone(),
            part: Part {
                cluster: Some(this.clone()),
                ..part
            },
            map: RwLock::new(Map {
                owners: vec![Lane::default(); usize::from(SLOTS)],
                settled: Vec::new(),
                members: BTreeMap::new(),
                next: 0,
                epoch: 0,
                replicas: Vec::new(),
            }),
            hub: Arc::default(),
            channels: Mutex::default(),
            wanted: wanted.clone(),
        });
        cluster.learn(&slot_map);
        runtime.spawn(topology::keep(Arc::downgrade(&cluster), wanted));
        Ok(cluster)
    }

    /// Queues a step now.
    pub(super) fn queue(&self, call: Call) -> Queued {
        let map = self.map.read();
        let lane = call.slot.map_or(Lane::default(), |slot| map.owner(slot));
        // Under the mutex: once a slot has moved, none of its steps is queued at the old server.
        map.member(lane).node.queue(call)
    }

    /// The timeout of a step.
    pub(super) fn timeout(&self) -> Duration {
        self.access.patience()
    }

    /// The lane of a slot.
    pub(super) fn lane(&self, slot: Slot) -> Lane {
        self.map.read().owner(slot)
    }

    /// Returns all masters, to be asked one by one.
    pub(super) fn nodes(&self) -> Vec<Node> {
        let map = self.map.read();
        map.members.values().map(|member| member.node.clone()).collect()
    }

    /// Subscribes to a channel that belongs to a key of this slot.
    pub(super) fn watch(self: &Arc<Self>, slot: Slot, channel: String) -> Watch {
        let (begin, end) = (self.clone(), Arc::downgrade(self));
        self.hub.listen(
            channel.into(),
            move |channel| {
                let mut channels = begin.channels.lock();
                let map = begin.map.read();
                let lane = map.owner(slot);
                channels.insert(channel.clone(), (slot, lane));
                map.member(lane).pubsub.subscribe(channel, way(channel, slot));
                false
            },
            move |channel| {
                let Some(cluster) = end.upgrade() else { return };
                let mut channels = cluster.channels.lock();
                if let Some((_, lane)) = channels.remove(&channel)
                    && let Some(member) = cluster.map.read().members.get(&lane)
                {
                    member.pubsub.unsubscribe(channel);
                }
            },
        )
    }

    /// Moves subscriptions to the servers of their slots.
    fn move_channels(&self) {
        let mut moved = Vec::new();
        let mut channels = self.channels.lock();
        let map = self.map.read();
        for (channel, (slot, lane)) in channels.iter_mut() {
            let owner = map.owner(*slot);
            if owner == *lane {
                continue;
            }
            let before = std::mem::replace(lane, owner);
            moved.push(channel.clone());
            map.member(owner).pubsub.subscribe(channel, way(channel, *slot));
            if let Some(member) = map.members.get(&before) {
                member.pubsub.unsubscribe(channel.clone());
            }
        }
        drop((channels, map));
        // A message may be missed in between: the waiters check once more when the new subscription is confirmed.
        self.hub.doubt(&moved);
    }

    /// Asks for the slots: something has changed.
    pub(super) fn look(&self) {
        self.wanted.notify_one();
    }

    /// Handles the redirection of a slot: these steps go to the named server.
    pub(super) fn moved(&self, by: Lane, slot: Slot, to: &str, steps: Vec<Step>) {
        let mut map = self.map.write();
        let asked = map.members.get(&by).map(|member| member.address.clone());
        // Only the owner's redirection changes the map: the steps of all others go to the owner.
        if map.owner(slot) == by
            && let Some(address) = slot_map::redirect(to, asked.as_ref())
        {
            let lane = self.member_at(&mut map, &address);
            if lane != by {
                log!(debug, slot = slot.index(), to = %address, "a slot has moved");
                map.give(vec![slot], by, lane);
            }
        }
        map.member(map.owner(slot)).node.pass_on(steps);
        drop(map);
        self.move_channels();
        self.look();
    }

    /// Handles a server's reply that the keys of these steps have moved ahead of their slot.
    pub(super) fn ask_at(&self, by: Lane, to: &str, steps: Vec<Step>) {
        let mut map = self.map.write();
        let asked = map.members.get(&by).map(|member| member.address.clone());
        match slot_map::redirect(to, asked.as_ref()) {
            Some(address) => {
                let lane = self.member_at(&mut map, &address);
                if let Some(member) = map.members.get_mut(&lane) {
                    member.named = clock::now();
                }
                map.member(lane).node.pass_on(steps);
            }
            None => {
                drop(map);
                self.look();
                self.reroute(steps);
            }
        }
    }

    /// Passes steps on to the servers of their slots.
    pub(super) fn reroute(&self, steps: Vec<Step>) {
        let map = self.map.read();
        for step in steps {
            let lane = step.call.slot.map_or(Lane::default(), |slot| map.owner(slot));
            map.member(lane).node.pass_on(vec![step]);
        }
    }

    /// Returns the member at an address, created if needed.
    fn member_at(&self, map: &mut Map, address: &Address) -> Lane {
        if let Some(lane) = map.find(address) {
            return lane;
        }
        let lane = Lane(map.next);
        map.next += 1;
        let connector = Connector::to_node(self.access.clone(), address.clone());
        let part = Part {
            lane,
            ..self.part.clone()
        };
        let shard = self.part.cluster.clone().map(|cluster| Shard::new(cluster, lane));
        let pubsub = PubSub::start(connector.clone(), self.hub.clone(), shard, &self.runtime);
        let node = Node::start(connector, None, part, &self.runtime);
        let member = Member {
            address: address.clone(),
            node,
            pubsub,
            served: false,
            named: clock::now(),
        };
        map.members.insert(lane, member);
        lane
    }

    /// Adopts a server's view of the slots, unless it is older than the known one. Returns whether anything is new in
    /// it.
    fn learn(&self, slot_map: &SlotMap) -> bool {
        !self.is_behind(slot_map) && self.adopt(slot_map)
    }

    /// Whether the view is older than the known one, or of a Cluster that was set up anew.
    fn is_behind(&self, slot_map: &SlotMap) -> bool {
        slot_map.epoch < self.map.read().epoch
    }

    /// Adopts a server's view of the slots. Returns whether anything is new in it.
    fn adopt(&self, slot_map: &SlotMap) -> bool {
        let mut map = self.map.write();
        map.epoch = slot_map.epoch;
        let first = map.members.is_empty();
        let mut changes = HashMap::<(Lane, Lane), Vec<Slot>>::new();
        for (address, shard) in &slot_map.shards {
            let to = self.member_at(&mut map, address);
            for slot in shard.slots() {
                let from = map.owner(slot);
                if first {
                    map.owners[slot.index()] = to;
                } else if from != to {
                    changes.entry((from, to)).or_default().push(slot);
                }
            }
            if let Some(member) = map.members.get_mut(&to) {
                member.served = true;
            }
        }
        let changed = !changes.is_empty();
        for ((from, to), slots) in changes {
            map.give(slots, from, to);
        }
        let replicas = slot_map
            .servers()
            .filter(|address| !slot_map.shards.contains_key(*address));
        map.replicas = replicas.cloned().collect();
        let gone = map.dismiss(slot_map);
        let successors = map.successors(&gone);
        map.settled = map.owners.clone();
        drop(map);
        self.move_channels();
        // Only now, since their subscriptions have moved to other servers.
        for member in gone.into_values() {
            log!(info, server = %member.address, "a server of the cluster has no slots any more");
            member.node.retire();
        }
        for lane in successors {
            self.part.doubts.tell(lane);
        }
        changed
    }
}

impl Map {
    /// Drops members that are no longer masters.
    fn dismiss(&mut self, slot_map: &SlotMap) -> BTreeMap<Lane, Member> {
        let owners: HashSet<Lane> = self.owners.iter().copied().collect();
        let now = clock::now();
        let (stay, gone) = std::mem::take(&mut self.members)
            .into_iter()
            .partition(|(lane, member)| {
                let is_replica = self.replicas.contains(&member.address);
                owners.contains(lane)
                || slot_map.shards.contains_key(&member.address)
                // A server to which slots are just moving, unless that was given up.
                || !(member.served || is_replica) && now < member.named + MOVING
            });
        self.members = stay;
        gone
    }

    /// Reports the masters that have taken over from others: their holds must be confirmed.
    fn successors(&self, gone: &BTreeMap<Lane, Member>) -> HashSet<Lane> {
        let now_and_then = self.owners.iter().zip(&self.settled);
        let taken_over = now_and_then.filter(|(_, then)| gone.contains_key(then));
        taken_over.map(|(now, _)| *now).collect()
    }
}

/// How notifications of a key in this slot come on a channel. If the braces of the channel differ from the key's, it
/// has another slot, maybe on another server; the scripts publish there with plain PUBLISH.
fn way(channel: &str, slot: Slot) -> ChannelKind {
    match Slot::of(channel) == slot {
        true => ChannelKind::Sharded,
        false => ChannelKind::Plain,
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let map = self.map.read();
        let servers = map.members.values().map(|member| member.address.to_string());
        f.debug_struct("Cluster")
            .field("epoch", &map.epoch)
            .field("servers", &servers.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // So that the keeper ends.
        self.wanted.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{GrantId, Kind};
    use crate::stores::redis::kinds;

    #[test]
    fn a_channel_is_in_the_slot_of_its_key_unless_the_braces_of_its_name_are_in_the_way() {
        let grant = GrantId::from_parts(1, 1);
        let of = |kind, key: &str| way(&kinds::channel(kind, key, grant), Slot::of(key));
        for &kind in Kind::ALL {
            for key in ["order:42", "shop:order:42", "größe"] {
                assert_eq!(of(kind, key), ChannelKind::Sharded, "{kind} {key}");
            }
            // The braces of a latch's channel stand around those of its name.
            let tagged = match kind {
                Kind::Latch => ChannelKind::Plain,
                _ => ChannelKind::Sharded,
            };
            for key in ["{42}:order", "shop:{42}:order", "order:{4}:{2}"] {
                assert_eq!(of(kind, key), tagged, "{kind} {key}");
            }
            for key in ["none:{}", "back:}x"] {
                assert_eq!(of(kind, key), ChannelKind::Plain, "{kind} {key}");
            }
        }
    }
}
