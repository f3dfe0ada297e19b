//! One connection after the other, for as long as the node is needed.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::actor::Actor;
use super::alarm::sleep_until;
use super::replicas::ConnectionRole;
use super::served::End;
use crate::base::chance;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::observed::log;
use crate::store::{Reason, StoreError};
use crate::stores::redis::connect::Connected;

/// The first pause between two attempts to connect.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause, after many failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Actor {
    pub(super) async fn run(mut self, first: Option<Connected>) {
        let mut first = first;
        self.is_cut_off();
        loop {
            let connected = match first.take() {
                Some(connected) => connected,
                None => match self.reconnect().await {
                    Some(connected) => connected,
                    None => break,
                },
            };
            self.begin(&connected);
            let begun = clock::now();
            self.standing.cut_off_since.store(0, Ordering::Relaxed);
            let end = self.serve(connected).await;
            self.is_cut_off();
            if clock::now() >= begun + LONGEST_PAUSE {
                // It was not useless, though perhaps idle.
                self.setbacks = 0;
            }
            match end {
                End::Closed => break,
                End::Broken => {}
                End::Replaced(connected) => first = Some(*connected),
            }
            if self.retired {
                break;
            }
            log!(warn, server = %self.connector.endpoint, trouble = %self.trouble, "the connection to the lock store is lost");
            let elsewhere = self
                .address
                .as_ref()
                .is_some_and(|at| !self.connector.endpoint.is_at(at));
            if elsewhere {
                // Reported at once, and again when the other server can be asked.
                self.part.doubts.tell(self.part.lane);
            }
            if let Some(cluster) = self.cluster() {
                cluster.look();
            }
        }
        if self.retired {
            self.wind_up().await;
        }
    }

    /// From now on nothing is sent.
    fn is_cut_off(&self) {
        let now = Moment::now().as_nanos();
        self.standing.cut_off_since.store(now, Ordering::Relaxed);
    }

    /// Handles an established connection.
    fn begin(&mut self, connected: &Connected) {
        let address = self.address.replace(connected.address.clone());
        if address
            .as_ref()
            .is_some_and(|before| *before != connected.address)
        {
            self.late_copies.settle_all();
        }
        self.late_copies
            .server_says(connected.server_time, connected.asked_at);
        self.token_draws.begin();
        self.script_is_next = false;
        self.trouble.clear();
        let before = std::mem::replace(&mut self.run_id, connected.run_id.clone());
        // A server that was demoted may be its own successor: it had only to load its data.
        let is_known = !before.is_empty() && !self.run_id.is_empty();
        if !is_known || before != self.run_id {
            self.standing.processes.fetch_add(1, Ordering::Relaxed);
        }
        let is_another = match is_known {
            true => before != self.run_id,
            false => self.was_demoted,
        };
        if !connected.is_replica && !self.run_id.is_empty() {
            let master = std::mem::replace(&mut self.master_run_id, self.run_id.clone());
            if !master.is_empty() && master != self.run_id {
                self.late_copies.settle_all();
            }
        }
        for (cmd, reply) in self.former_connections.replace(&self.run_id, connected.id) {
            let close = self.plain(
                cmd,
                ConnectionRole::Usual,
                self.connector.access.patience() * 4,
                reply,
            );
            self.plain.push_front(close);
        }
        // They may have been carried out long after their callers gave up the undoing: a server can stand still for any time.
        for undo in self.undos.take() {
            self.keep_release(undo);
        }
        self.was_master |= !connected.is_replica;
        if address.is_some() {
            self.was_demoted = false;
            if is_another {
                self.connector.endpoint.changed();
            }
            log!(info, server = %self.connector.endpoint, "connected to the lock store again");
            self.send_queue.releases_first();
            self.part.doubts.tell(self.part.lane);
        }
    }

    /// Connects, for as long as it takes. `None` if it is not needed any more.
    async fn reconnect(&mut self) -> Option<Connected> {
        let mut pause = SHORTEST_PAUSE;
        // The last connection was useless: no hurry.
        let setbacks = self.setbacks;
        self.setbacks = setbacks.saturating_add(1);
        let mut at_once = setbacks == 0;
        for _ in 1..setbacks.min(10) {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        loop {
            if !std::mem::replace(&mut at_once, false) {
                self.wait_between(pause).await?;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            let (connector, was_master) = (self.connector.clone(), self.was_master);
            let attempt = async move {
                let connected = connector.connect().await?;
                match was_master {
                    true => is_ready(connected),
                    false => Ok(connected),
                }
            };
            tokio::pin!(attempt);
            let outcome = loop {
                let due = self.due();
                tokio::select! {
                    outcome = &mut attempt => break outcome,
                    request = self.requests.recv() => self.take_in(request?),
                    () = sleep_until(due) => self.look_at_the_clock(),
                }
                if self.retired {
                    return None;
                }
            };
            match outcome {
                Ok(connected) => return Some(connected),
                Err(error) => {
                    if self.address.is_none() && self.trouble.is_empty() {
                        log!(warn, trouble = %error.message, "a server of the lock store cannot be reached");
                    }
                    self.trouble = error.message;
                }
            }
            if let Some(cluster) = self.cluster() {
                cluster.look();
            }
        }
    }

    /// Waits for about this long before the next attempt to connect. `None` if it is not needed any more.
    async fn wait_between(&mut self, pause: Duration) -> Option<()> {
        let again = clock::now() + chance::jittered(pause);
        loop {
            let due = self.due().map_or(again, |due| due.min(again));
            tokio::select! {
                request = self.requests.recv() => self.take_in(request?),
                () = clock::sleep_until(due) => self.look_at_the_clock(),
            }
            if self.retired {
                return None;
            }
            if clock::now() >= again {
                return Some(());
            }
        }
    }
}

/// A server where there was a master, unless it is none, or none yet.
fn is_ready(connected: Connected) -> Result<Connected, StoreError> {
    let trouble = match (connected.is_replica, connected.is_loading) {
        (true, _) => "is a read-only replica now: its master is looked for at the same address",
        (false, true) => "is still loading its data",
        (false, false) => return Ok(connected),
    };
    let message = format!("{} {trouble}", connected.address);
    Err(StoreError::not_done(Reason::Unreachable, message))
}
