//! What happened in this process: the one place that knows where that comes from, which is the client's own table of
//! holds, looked at once a second. What begins and ends between two looks is not seen.

use std::collections::{HashMap, VecDeque};
use std::sync::Weak;
use std::time::{Duration, SystemTime};

use dlock::{LockClient, LockKey};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::view::{millis, short, since_epoch};

/// How many entries are kept.
const MOST: usize = 200;
const EVERY: Duration = Duration::from_secs(1);

/// The last that happened, the oldest first.
pub(super) struct Timeline {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    count: u64,
    /// Holds that were not confirmed when that was due, by their ids.
    suspect: HashMap<String, LockKey>,
    reconnects: u64,
    is_draining: bool,
}

struct Entry {
    number: u64,
    at: SystemTime,
    what: &'static str,
    mood: &'static str,
    key: Option<LockKey>,
    text: String,
}

impl Timeline {
    pub(super) fn new() -> Timeline {
        Timeline {
            state: Mutex::new(State::default()),
        }
    }

    /// Looks at the client now.
    pub(super) fn look(&self, client: &LockClient) {
        let health = client.health();
        let mut state = self.state.lock();
        if health.is_draining && !state.is_draining {
            let text = "it begins nothing new and is about to end";
            state.add("drains", "warn", None, text.to_owned());
        }
        state.is_draining = health.is_draining;
        let broke = health.reconnects.saturating_sub(state.reconnects);
        if broke > 0 {
            let text =
                format!("connections to the store broke and came back, or another server took over: {broke}");
            state.add("reconnected", "warn", None, text);
        }
        state.reconnects = health.reconnects;
        if health.suspect == 0 && state.suspect.is_empty() {
            return;
        }
        let holds = client.active().holds;
        let mut before = std::mem::take(&mut state.suspect);
        for hold in holds {
            match (hold.suspect, before.remove(&hold.grant)) {
                (true, Some(key)) => drop(state.suspect.insert(hold.grant, key)),
                (true, None) => {
                    let left = hold.lease_left.as_secs();
                    let text = format!(
                        "the store did not confirm it when that was due; {left} s of its lease are left"
                    );
                    state.add("near miss", "warn", Some(hold.key.clone()), text);
                    state.suspect.insert(hold.grant, hold.key);
                }
                (false, Some(key)) => {
                    let text = "the store has confirmed it again";
                    state.add("confirmed", "good", Some(key), text.to_owned());
                }
                (false, None) => {}
            }
        }
        for key in before.into_values() {
            let text = "it ended while it was not confirmed: lost, or released meanwhile; the log says which";
            state.add("ended", "bad", Some(key), text.to_owned());
        }
    }

    pub(super) fn json(&self) -> Value {
        let state = self.state.lock();
        let entries = state.entries.iter().map(|entry| {
            json!({
                "number": entry.number,
                "at_ms": since_epoch(entry.at),
                "what": entry.what,
                "mood": entry.mood,
                "key": entry.key.as_ref().map(|key| short(key.as_str())),
                "text": entry.text,
            })
        });
        json!({ "every_ms": millis(EVERY), "entries": entries.collect::<Vec<_>>() })
    }
}

impl State {
    fn add(&mut self, what: &'static str, mood: &'static str, key: Option<LockKey>, text: String) {
        self.count += 1;
        self.entries.push_back(Entry {
            number: self.count,
            at: SystemTime::now(),
            what,
            mood,
            key,
            text,
        });
        if self.entries.len() > MOST {
            self.entries.pop_front();
        }
    }
}

/// Looks for as long as the console is there. Nothing happens outside of a runtime.
pub(super) fn watch<T: Send + Sync + 'static>(of: Weak<T>, look: impl Fn(&T) + Send + 'static) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else {
        return;
    };
    runtime.spawn(async move {
        while let Some(console) = of.upgrade() {
            look(&console);
            drop(console);
            tokio::time::sleep(EVERY).await;
        }
    });
}
