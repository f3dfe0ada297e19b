//! Slots that move, with the locks in them, while these are held and waited for.

use std::time::{Duration, Instant};

use redis::{RedisResult, Value};
use tokio::time::{sleep, timeout};

use super::{Fiend, Made};
use crate::chaos::clock;
use crate::chaos::store::key_name;
use crate::{Cluster, Server, slot_of};

/// How long a move may take, with all that is in its way.
const TO_MOVE: Duration = Duration::from_secs(20);
/// How long the others may take to hear of it.
const TO_HEAR: Duration = Duration::from_secs(10);

impl Fiend {
    /// Moves the slot of a key to another group; for `lasts` it is on both.
    pub(super) async fn move_slot(
        &self,
        key: usize,
        from: usize,
        to: usize,
        lasts: Duration,
    ) -> anyhow::Result<Made> {
        // It may have moved since this was planned.
        let Some(cluster) = self
            .deployment
            .cluster()
            .filter(|_| self.deployment.home(key) == from)
        else {
            return Ok(Made::No);
        };
        let begun = clock::now();
        self.deployment.moves(key, to);
        let until = Instant::now() + TO_MOVE;
        let (mut lasts, mut tries) = (lasts, 0);
        while Instant::now() < until {
            let masters = (self.lineage.master(from), self.lineage.master(to));
            if let (Some(from), Some(to)) = masters {
                tries += 1;
                let (from, to) = (self.deployment.server(from), self.deployment.server(to));
                let slot = Slot {
                    cluster,
                    number: slot_of(&key_name(key)),
                };
                if slot.go(from, to, lasts).await.is_ok() {
                    let _ = timeout(TO_HEAR, cluster.owner(slot.number)).await;
                    if tries > 1 {
                        // A fail-over in the middle forgets that a slot is on its way: then both have it.
                        self.forgot(begun, Some(key));
                    }
                    return Ok(Made::Yes);
                }
                lasts = Duration::ZERO;
            }
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("the slot of key {key} does not come from group {from} to group {to}")
    }
}

struct Slot<'a> {
    cluster: &'a Cluster,
    number: u16,
}

impl Slot<'_> {
    async fn set(&self, on: &Server, state: &str, other: &Server) -> RedisResult<Value> {
        let (number, id) = (self.number.to_string(), self.cluster.id(other));
        on.try_query(&["CLUSTER", "SETSLOT", &number, state, id]).await
    }

    async fn go(&self, from: &Server, to: &Server, lasts: Duration) -> RedisResult<()> {
        let number = self.number.to_string();
        // A retry may find it there.
        let is_there = match self.set(to, "IMPORTING", from).await {
            Err(error) if error.to_string().contains("already the owner") => true,
            outcome => outcome.map(|_| false)?,
        };
        if !is_there {
            self.set(from, "MIGRATING", to).await?;
            sleep(lasts / 2).await;
            self.carry(from, to, &number).await?;
            sleep(lasts / 2).await;
            self.carry(from, to, &number).await?;
        }
        // Its new owner first, so that there is one at any time.
        self.set(to, "NODE", to).await?;
        self.set(from, "NODE", to).await?;
        Ok(())
    }

    /// Moves the keys that there are.
    async fn carry(&self, from: &Server, to: &Server, number: &str) -> RedisResult<()> {
        loop {
            let keys: Vec<String> = from
                .try_query(&["CLUSTER", "GETKEYSINSLOT", number, "1000"])
                .await?;
            if keys.is_empty() {
                return Ok(());
            }
            let port = to.port().to_string();
            for key in keys {
                let _: Value = from
                    .try_query(&["MIGRATE", "127.0.0.1", &port, &key, "0", "10000"])
                    .await?;
            }
        }
    }
}
