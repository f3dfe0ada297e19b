//! The recent history of this process: the events of its locks, and its connections and drain, checked once a second.
//! Successes without a wait are left out.

use std::collections::VecDeque;
use std::sync::Weak;
use std::time::{Duration, SystemTime};

use dlock::operations::{LockEvent, LockEventKind};
use dlock::{LockClient, LockKey};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::Shared;
use super::view::{short, since_epoch};

/// How many entries are kept.
const MOST: usize = 200;
const EVERY: Duration = Duration::from_secs(1);
/// The shortest wait that is recorded.
const LONG: Duration = Duration::from_secs(1);

/// The recent events, the oldest first.
pub(super) struct Timeline {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    entries: VecDeque<Entry>,
    count: u64,
    missed: u64,
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
    /// How often it happened in a row.
    times: u64,
}

impl Timeline {
    /// Begins now: earlier connections and drains of the client are not told.
    pub(super) fn new(client: &LockClient) -> Timeline {
        let health = client.health();
        let state = State {
            reconnects: health.reconnects,
            is_draining: health.is_draining,
            ..State::default()
        };
        Timeline {
            state: Mutex::new(state),
        }
    }

    /// Checks the client now.
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
    }

    fn tell(&self, event: LockEvent) {
        if let Some((what, mood, text)) = said(event.what) {
            self.state.lock().add(what, mood, Some(event.key), text);
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
                "text": short(&entry.text),
                "times": entry.times,
            })
        });
        json!({ "missed": state.missed, "entries": entries.collect::<Vec<_>>() })
    }
}

/// Whether the history has this event.
fn is_told(what: &LockEventKind) -> bool {
    match what {
        LockEventKind::Granted { .. } | LockEventKind::Ended { .. } => false,
        LockEventKind::Acquired { waited, .. }
        | LockEventKind::NotAcquired { waited, .. }
        | LockEventKind::Cancelled { waited, .. } => *waited >= LONG,
        _ => true,
    }
}

/// Describes an event.
fn said(what: LockEventKind) -> Option<(&'static str, &'static str, String)> {
    Some(match what {
        LockEventKind::Lost { reason, .. } => ("lost", "bad", reason.to_string()),
        LockEventKind::NearMiss { left, .. } => {
            let text = format!("it was renewed late: for another {left:.1?} it would have been held");
            ("near miss", "warn", text)
        }
        LockEventKind::Suspect => {
            let text = "the store did not confirm it when that was due; it is held until its lease ends";
            ("not confirmed", "warn", text.to_owned())
        }
        LockEventKind::Confirmed => ("confirmed", "good", "the store has confirmed it again".to_owned()),
        LockEventKind::Revoked { intervention, .. } => {
            let text = format!(
                "its holder is asked to stop by {}: {}",
                intervention.by, intervention.reason
            );
            ("asked to stop", "warn", text)
        }
        LockEventKind::NotAcquired { waited, error, .. } => {
            ("gave up", "bad", format!("a call waited {waited:.1?}: {error}"))
        }
        LockEventKind::Cancelled { waited, .. } => (
            "gave up",
            "warn",
            format!("a call was dropped after it had waited {waited:.1?}"),
        ),
        LockEventKind::Acquired { waited, .. } => (
            "waited",
            "",
            format!("a call has it after it had waited {waited:.1?}"),
        ),
        _ => return None,
    })
}

impl State {
    fn add(&mut self, what: &'static str, mood: &'static str, key: Option<LockKey>, text: String) {
        let at = SystemTime::now();
        if let Some(last) = self.entries.back_mut()
            && last.what == what
            && last.key == key
        {
            (last.at, last.text, last.times) = (at, text, last.times + 1);
            return;
        }
        self.count += 1;
        self.entries.push_back(Entry {
            number: self.count,
            at,
            what,
            mood,
            key,
            text,
            times: 1,
        });
        if self.entries.len() > MOST {
            self.entries.pop_front();
        }
    }
}

/// Listens and checks for as long as the console lives. Does nothing outside a runtime.
pub(super) fn watch(of: Weak<Shared>) {
    let (Ok(runtime), Some(shared)) = (tokio::runtime::Handle::try_current(), of.upgrade()) else {
        return;
    };
    let mut events = shared.client.events_where(|_, what| is_told(what));
    runtime.spawn(async move {
        let mut due = Instant::now();
        loop {
            let event = timeout_at(due, events.next()).await;
            let Some(shared) = of.upgrade() else { return };
            match event {
                Ok(Some(event)) => shared.timeline.tell(event),
                // The console keeps the client, so that its events do not end.
                Ok(None) => return,
                Err(_) => {
                    shared.timeline.look(&shared.client);
                    shared.look.tidy();
                    shared.timeline.state.lock().missed = events.dropped();
                    due = Instant::now() + EVERY;
                }
            }
        }
    });
}
