//! The look of all pages at the store: one at a time, however many ask.

use std::time::Duration;

use bytes::Bytes;
use dlock::LockClient;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::survey::Survey;
use super::timeline::Timeline;
use super::view;

/// The answer to all who ask within a while.
pub(super) struct Look {
    every: Duration,
    last: Mutex<Option<(Instant, Bytes)>>,
}

impl Look {
    /// Looks so often at most.
    pub(super) fn new(every: Duration) -> Look {
        Look {
            every,
            last: Mutex::new(None),
        }
    }

    /// What is held and waited for, as JSON, with the token of actions. A request that comes while another one looks waits
    /// for what that finds, and looks itself if that one goes away. The store's own timeouts bound it.
    pub(super) async fn at(&self, client: &LockClient, timeline: &Timeline, token: Option<&str>) -> Bytes {
        let mut last = self.last.lock().await;
        if let Some((at, seen)) = &*last
            && at.elapsed() < self.every
        {
            return seen.clone();
        }
        let mut seen = view::of_survey(&Survey::of(client).await);
        timeline.look(client);
        seen["events"] = timeline.json();
        seen["actions"] = token.map_or(Value::Null, |token| json!({ "token": token }));
        let seen = Bytes::from(seen.to_string());
        *last = Some((Instant::now(), seen.clone()));
        seen
    }

    /// Has the next one who asks look again.
    pub(super) async fn again(&self) {
        *self.last.lock().await = None;
    }
}
