//! Faults of the workers, and locks that are taken away from them.

use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::sleep;

use super::{Fiend, Kind, Made};
use crate::chaos::clock;
use crate::chaos::store::key_name;

impl Fiend {
    pub(super) async fn strike_process(
        &self,
        kind: Kind,
        slot: usize,
        lasts: Duration,
    ) -> anyhow::Result<Made> {
        if kind == Kind::ProcessKill {
            self.team.kill(slot);
            sleep(lasts).await;
            self.team.start(slot)?;
            return Ok(Made::Yes);
        }
        self.team.signal(slot, Signal::SIGSTOP);
        sleep(lasts).await;
        self.team.signal(slot, Signal::SIGCONT);
        Ok(Made::Yes)
    }

    pub(super) async fn force(&self, key: usize) -> anyhow::Result<Made> {
        let from = clock::now();
        let client = self.client.lock().clone();
        if let Some(client) = client {
            // Whatever it answers, it may have been done.
            let _ = client.force_release(key_name(key)).await;
            self.forgot(from, Some(key));
        }
        Ok(Made::Yes)
    }
}
