//! Acquires and claims of which a copy may be on its way, though their callers have gone.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::clock;

/// How long after its time a copy is remembered, in µs: what no caller came to settle in all that time needs no
/// settling.
const KEPT: u64 = 60_000_000;

pub(super) struct LateCopies {
    /// By the id of the grant or claim, the server time (µs) after which no copy can take effect any more.
    until: HashMap<String, u64>,
    /// How many there may be before the old ones are forgotten.
    enough: usize,
    /// The server's clock (µs) not after this moment of ours.
    anchor: (u64, Instant),
}

impl LateCopies {
    /// What it says of the server's clock holds once the server has told it.
    pub(super) fn new() -> LateCopies {
        LateCopies {
            until: HashMap::new(),
            enough: 1024,
            anchor: (0, clock::now()),
        }
    }

    /// Another server has taken over: what the former one does from now on stays unseen.
    pub(super) fn settle_all(&mut self) {
        self.until.clear();
    }

    /// The server told its time; it was asked for at `asked_at`.
    pub(super) fn server_says(&mut self, server_time: u64, asked_at: Instant) {
        self.anchor = (server_time, asked_at);
    }

    /// What the server's clock shows at the latest.
    pub(super) fn server_time(&self, now: Instant) -> u64 {
        let (server, at) = self.anchor;
        server.saturating_add(micros(now.saturating_duration_since(at)))
    }

    /// A copy may be on its way, until then.
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

    /// No copy can do anything any more.
    pub(super) fn settle(&mut self, id: &(impl ToString + ?Sized)) {
        if !self.until.is_empty() {
            self.until.remove(&id.to_string());
        }
    }
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX / 4)
}
