//! Maintains the slot map: asks servers when something has changed, and periodically.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, RedisError, Value};
use tokio::sync::Notify;

use super::Cluster;
use super::slot_map::SlotMap;
use crate::base::chance;
use crate::base::observed::log;
use crate::store::url::Address;
use crate::store::{Reason, StoreError};
use crate::stores::redis::connect::explain;
use crate::stores::redis::node::Node;
use crate::stores::redis::settings::ConnectSettings;

/// How often to ask for the slots when all is well.
const PERIOD: Duration = Duration::from_secs(5);
/// The shortest and the longest time between two requests during trouble.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How many servers are asked together.
const SOME: usize = 3;
/// How long to wait for the others when one has answered: it may be behind.
const OTHERS: Duration = Duration::from_millis(50);

/// Asks for as long as there is a cluster.
pub(super) async fn keep(cluster: Weak<Cluster>, wanted: Arc<Notify>) {
    let mut pause = PAUSES.0;
    loop {
        let amiss = tokio::select! {
            () = wanted.notified() => true,
            () = tokio::time::sleep(PERIOD.mul_f64(0.8 + 0.4 * chance::fraction())) => false,
        };
        let Some(cluster) = cluster.upgrade() else { return };
        let changed = match ask(&cluster).await {
            Ok(slot_map) if cluster.is_behind(&slot_map) => match confirmed(&cluster, slot_map).await {
                Some(slot_map) => cluster.adopt(&slot_map),
                None => false,
            },
            Ok(slot_map) => cluster.learn(&slot_map),
            Err(trouble) => {
                log!(debug, %trouble, "no cluster node returned a slot map");
                false
            }
        };
        drop(cluster);
        pause = match amiss && !changed {
            true => (pause * 2).min(PAUSES.1),
            false => PAUSES.0,
        };
        tokio::time::sleep(pause).await;
    }
}

/// The newest view of some servers.
async fn ask(cluster: &Cluster) -> Result<SlotMap, StoreError> {
    let (mut members, mut others) = {
        let map = cluster.map.read();
        let members = map.members.values();
        let members: Vec<_> = members.map(|m| (m.address.clone(), m.node.clone())).collect();
        let mut others = map.replicas.clone();
        others.extend(cluster.seeds.iter().cloned());
        (members, others)
    };
    chance::shuffle(&mut members);
    members.truncate(SOME);
    let known = newest(members.iter().map(|(address, node)| of_node(address, node))).await;
    if let Ok(slot_map) = known {
        return Ok(slot_map);
    }
    // Servers that were not asked yet may know the new master.
    chance::shuffle(&mut others);
    others.truncate(SOME);
    newest(others.iter().map(|address| of_stranger(&cluster.access, address))).await
}

/// A view that is older than the known one counts only if the Cluster was set up anew: more than half of the masters
/// that it names agree, and none of them knows a later epoch. A server that was cut off from the others finds no such
/// majority.
async fn confirmed(cluster: &Cluster, slot_map: SlotMap) -> Option<SlotMap> {
    let nodes: Vec<_> = {
        let map = cluster.map.read();
        let node_at = |address| Some(map.member(map.find(address)?).node.clone());
        let masters = slot_map.shards.keys();
        masters
            .map(|address| (address.clone(), node_at(address)))
            .collect()
    };
    let asking = nodes.iter().map(|(address, node)| async move {
        match node {
            Some(node) => of_node(address, node).await,
            None => of_stranger(&cluster.access, address).await,
        }
    });
    let answers = futures_util::future::join_all(asking).await;
    let answers: Vec<SlotMap> = answers.into_iter().flatten().collect();
    let verdict = slot_map.confirmed_by(&answers);
    if verdict && cluster.is_behind(&slot_map) {
        log!(
            warn,
            epoch = slot_map.epoch,
            "the cluster was set up anew: its masters agree on slots of an earlier epoch"
        );
    }
    verdict.then_some(slot_map)
}

/// The first view, from the servers in the URL.
pub(super) async fn first_view(access: &ConnectSettings, seeds: &[Address]) -> Result<SlotMap, StoreError> {
    newest(seeds.iter().map(|seed| of_stranger(access, seed))).await
}

/// The newest of the views that arrive soon.
async fn newest<F>(views: impl Iterator<Item = F>) -> Result<SlotMap, StoreError>
where
    F: Future<Output = Result<SlotMap, StoreError>>,
{
    let mut views: FuturesUnordered<F> = views.collect();
    let mut troubles = Vec::new();
    let mut best: Option<SlotMap> = None;
    while best.is_none() {
        match views.next().await {
            Some(Ok(slot_map)) => best = Some(slot_map),
            Some(Err(trouble)) => troubles.push(trouble),
            None => break,
        }
    }
    let Some(mut best) = best else {
        return Err(none(troubles));
    };
    let others = async {
        while let Some(slot_map) = views.next().await {
            if let Ok(slot_map) = slot_map
                && slot_map.epoch > best.epoch
            {
                best = slot_map;
            }
        }
    };
    let _ = tokio::time::timeout(OTHERS, others).await;
    Ok(best)
}

/// None of them knows the slots.
fn none(troubles: Vec<StoreError>) -> StoreError {
    let reason = troubles.iter().find(|trouble| !trouble.is_passing());
    let reason = reason.map_or(Reason::Unreachable, |trouble| trouble.reason.clone());
    let all: Vec<_> = troubles.iter().map(|trouble| trouble.message.as_str()).collect();
    StoreError::not_done(
        reason,
        format!("no cluster node returned a slot map: {}", all.join("; ")),
    )
}

fn slots() -> Cmd {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("SLOTS");
    cmd
}

fn info() -> Cmd {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("INFO");
    cmd
}

/// Asks a server over its connection.
async fn of_node(address: &Address, node: &Node) -> Result<SlotMap, StoreError> {
    let (slots, info) = futures_util::future::join(node.plain(slots()), node.plain(info())).await;
    read(&slots?, info.ok(), address)
}

/// Asks a server over a new connection.
async fn of_stranger(access: &ConnectSettings, address: &Address) -> Result<SlotMap, StoreError> {
    let explained = |error: RedisError| {
        let mut explained = explain(address, error);
        if explained.message.contains("cluster support disabled") {
            explained
                .message
                .push_str(" (this is a server of its own: give redis://)");
        }
        explained
    };
    let mut open = access.open(address).await.map_err(explained)?;
    let mut commands = redis::pipe();
    commands.add_command(slots()).add_command(info());
    let asking = open.connection.send_packed_commands(&commands, 0, 2);
    let answers = access.in_time(asking).await.map_err(explained)?;
    let mut answers = answers.into_iter();
    let mut answer = || answers.next().unwrap_or(Value::Nil).extract_error();
    let (slots, info) = (answer(), answer());
    read(&slots.map_err(explained)?, info.ok(), address)
}

fn read(slots: &Value, info: Option<Value>, address: &Address) -> Result<SlotMap, StoreError> {
    let info: Option<String> = info.and_then(|info| redis::from_redis_value(info).ok());
    SlotMap::read(slots, info.as_deref(), address).ok_or_else(|| {
        StoreError::not_done(
            Reason::Unreachable,
            format!("{address} knows no server that has slots"),
        )
    })
}
