//! Acquires and claims of which a copy may be in flight, although their callers are gone.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::clock;

/// How long after its time a copy is remembered, in µs: what no caller settled in all that time needs no settling.
const KEPT: u64 = 60_000_000;

pub(super) struct LateCopies {
    /// By the id of the grant or claim, the server time (µs) after which no copy can take effect any more; one of an acquire by
    /// commands cannot even before, see [`former_connections`](super::former_connections).
    until: HashMap<String, u64>,
    /// How many there may be before old ones are forgotten.
    enough: usize,
    /// The server's clock (µs) at or before this moment of ours.
    anchor: (u64, Instant),
}

impl LateCopies {
    /// Its times hold once the server has told its clock.
    pub(super) fn new() -> LateCopies {
        LateCopies {
            until: HashMap::new(),
            enough: 1024,
            anchor: (0, clock::now()),
        }
    }

    /// Records that another server has taken over: later effects on the former one stay unseen.
    pub(super) fn settle_all(&mut self) {
        self.until.clear();
    }

    /// Records the server's time, asked for at `asked_at`.
    pub(super) fn server_says(&mut self, server_time: u64, asked_at: Instant) {
        self.anchor = (server_time, asked_at);
    }

    /// The latest time that the server's clock may show.
    pub(super) fn server_time(&self, now: Instant) -> u64 {
        let (server, at) = self.anchor;
        server.saturating_add(micros(now.saturating_duration_since(at)))
    }

    /// Records that a copy may be in flight until then.
    pub(super) fn remember(&mut self, id: &(impl ToString + ?Sized), refuse_after: u64) {
        if self.until.len() >= self.enough {
            let now = self.server_time(clock::now());
            self.until.retain(|_, until| until.saturating_add(KEPT) > now);
            self.enough = (2 * self.until.len()).max(1024);
        }
        let until = self.until.entry(id.to_string()).or_default();
        *until = refuse_after.max(*until);
    }

    pub(super) fn get(&self, id: &(impl ToString + ?Sized)) -> Option<u64> {
        // Nearly always there are none.
        if self.until.is_empty() {
            return None;
        }
        self.until.get(&id.to_string()).copied()
    }

    /// Records that no copy can do anything any more.
    pub(super) fn settle(&mut self, id: &(impl ToString + ?Sized)) {
        if !self.until.is_empty() {
            self.until.remove(&id.to_string());
        }
    }
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX / 4)
}
