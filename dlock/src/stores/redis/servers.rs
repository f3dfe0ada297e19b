//! The servers of a store: one, the master that sentinels name, or a Cluster.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;

use super::cluster::Cluster;
use super::cluster::slot::Slot;
use super::connect::{Connected, Connector};
use super::node::{Node, Part, Queued};
use super::pubsub::{ChannelKind, PubSub};
use super::script::{Call, Verb};
use crate::LockKey;
use crate::base::moment::Moment;
use crate::store::Hub;
use crate::store::{Lane, Reason, StoreError, Watch};

/// Carries steps, and notifies of releases.
#[derive(Debug)]
pub(super) enum Servers {
    /// One server at a time has all keys.
    One {
        node: Node,
        pubsub: PubSub,
        hub: Arc<Hub>,
    },
    Cluster(Arc<Cluster>),
}

impl Servers {
    /// Connects to a single server.
    pub(super) async fn one(
        connector: Connector,
        part: Part,
        runtime: &runtime::Handle,
    ) -> Result<Servers, StoreError> {
        let connected = connector.connect().await?;
        Ok(Servers::start(connector, Some(connected), part, runtime))
    }

    /// Connects to a server that may be unreachable now; then also returns the trouble.
    pub(super) async fn one_or_later(
        connector: Connector,
        part: Part,
        runtime: &runtime::Handle,
    ) -> (Servers, Option<StoreError>) {
        let (connected, trouble) = match connector.connect().await {
            Ok(connected) => (Some(connected), None),
            Err(error) => (None, Some(error)),
        };
        (Servers::start(connector, connected, part, runtime), trouble)
    }

    fn start(
        connector: Connector,
        connected: Option<Connected>,
        part: Part,
        runtime: &runtime::Handle,
    ) -> Servers {
        let hub: Arc<Hub> = Arc::default();
        let pubsub = PubSub::start(connector.clone(), hub.clone(), None, runtime);
        let node = Node::start(connector, connected, part, runtime);
        Servers::One { node, pubsub, hub }
    }

    /// Queues a step now.
    pub(super) fn step(&self, key: Arc<str>, verb: Verb, vote_after: Option<Duration>) -> Queued {
        let slot = self.slot(&key);
        let call = Call {
            key,
            slot,
            verb,
            vote_after,
        };
        match self {
            Servers::One { node, .. } => node.queue(call),
            Servers::Cluster(cluster) => match call.is_parted() {
                Some(key) => Queued::turned_away(parted(key)),
                None => cluster.queue(call),
            },
        }
    }

    fn slot(&self, key: &str) -> Option<Slot> {
        match self {
            Servers::One { .. } => None,
            Servers::Cluster(_) => Some(Slot::of(key)),
        }
    }

    /// Subscribes to a channel that belongs to this key.
    pub(super) fn watch(&self, key: &str, channel: String) -> Watch {
        match self {
            Servers::One { pubsub, hub, .. } => {
                let (subscribe, unsubscribe) = (pubsub.clone(), pubsub.clone());
                hub.listen(
                    channel.into(),
                    move |channel| {
                        subscribe.subscribe(channel, ChannelKind::Plain);
                        false
                    },
                    move |channel| unsubscribe.unsubscribe(channel),
                )
            }
            Servers::Cluster(cluster) => cluster.watch(Slot::of(key), channel),
        }
    }

    /// The lane of this key: what is slow or broken together with it.
    pub(super) fn lane(&self, key: &LockKey, name: impl FnOnce(&LockKey) -> Arc<str>) -> Lane {
        match self {
            Servers::One { .. } => Lane::default(),
            Servers::Cluster(cluster) => cluster.lane(Slot::of(&name(key))),
        }
    }

    /// The lane of a key as the server knows it.
    pub(super) fn lane_of(&self, key: &str) -> Lane {
        match self {
            Servers::One { .. } => Lane::default(),
            Servers::Cluster(cluster) => cluster.lane(Slot::of(key)),
        }
    }

    /// The number that is the same for keys that one call may carry.
    pub(super) fn together(&self, key: &LockKey, name: impl FnOnce(&LockKey) -> Arc<str>) -> u32 {
        match self {
            Servers::One { .. } => 0,
            Servers::Cluster(_) => Slot::of(&name(key)).number(),
        }
    }

    /// Whether the keys are in different slots, so that no call carries any two of them.
    pub(super) fn has_slots(&self) -> bool {
        matches!(self, Servers::Cluster(_))
    }

    /// Whether none of the servers has had a connection since then.
    pub(super) fn were_cut_off_since(&self, since: Moment) -> bool {
        match self {
            Servers::One { node, .. } => node.was_cut_off_since(since),
            // A step may have been sent to the server that had its slot before.
            Servers::Cluster(cluster) => cluster.nodes().iter().all(|node| node.was_cut_off_since(since)),
        }
    }

    /// The timeout of a step.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Servers::One { node, .. } => node.timeout,
            Servers::Cluster(cluster) => cluster.timeout(),
        }
    }

    /// All servers with keys, to be asked one by one.
    pub(super) fn nodes(&self) -> Vec<Node> {
        match self {
            Servers::One { node, .. } => vec![node.clone()],
            Servers::Cluster(cluster) => cluster.nodes(),
        }
    }
}

/// Why a name is not possible in a Cluster.
fn parted(key: &str) -> StoreError {
    let message = format!(
        "in a Cluster, what belongs to \"{key}\" would be in several hash slots, since its braces are no tag: use a name without \
         braces, or with a tag, as {{order:42}}:refund"
    );
    StoreError::not_done(Reason::Unsupported, message)
}
