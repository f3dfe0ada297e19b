//! A server of a Cluster, as its subscribers see it.

use std::collections::HashMap;
use std::sync::Weak;
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::time::Instant;

use super::Cluster;
use super::slot::Slot;
use crate::store::Lane;

/// How soon a second redirection of the same slot is doubted: two servers may each name the other for a while.
const AGAIN: Duration = Duration::from_millis(250);

/// The position of a server in its Cluster.
pub(in super::super) struct Shard {
    cluster: Weak<Cluster>,
    lane: Lane,
    /// Slots that have left, and when.
    left: Mutex<HashMap<Slot, Instant>>,
}

impl Shard {
    pub(super) fn new(cluster: Weak<Cluster>, lane: Lane) -> Shard {
        Shard {
            cluster,
            lane,
            left: Mutex::default(),
        }
    }

    /// Handles a refused subscription: it goes to the server that the reply names, or the slots are asked for.
    pub(in super::super) fn refused(&self, error: &RedisError) {
        let Some(cluster) = self.cluster.upgrade() else {
            return;
        };
        let moved = error.kind() == ErrorKind::Server(ServerErrorKind::Moved);
        match Slot::redirected(error).filter(|_| moved) {
            Some((to, slot)) if self.has_left(slot) => cluster.moved(self.lane, slot, to, Vec::new()),
            _ => cluster.look(),
        }
    }

    /// Whether it is the first redirection of this slot for a while.
    fn has_left(&self, slot: Slot) -> bool {
        let now = Instant::now();
        let mut left = self.left.lock();
        left.retain(|_, at| now < *at + AGAIN);
        left.insert(slot, now).is_none()
    }
}
