//! The state of the board, and notifications to the pages when it changes.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use axum::response::sse::Event;
use serde::Serialize;
use tokio::sync::broadcast;

use crate::store::Item;

/// How many articles are kept; those that were idle for longest are removed first.
const MOST_ROWS: usize = 12;
/// How many of the last sales and replays are kept.
const LAST: usize = 12;

pub(super) struct State {
    /// Nothing when the service is about to end, and the pages with it.
    pub(super) events: Option<broadcast::Sender<Event>>,
    pub(super) items: BTreeMap<String, ItemRow>,
    pub(super) sales: VecDeque<SaleRow>,
    pub(super) replays: VecDeque<ReplayRow>,
    pub(super) replayed: u64,
}

/// An article.
#[derive(Serialize)]
pub(super) struct ItemRow {
    pub(super) sku: String,
    pub(super) stock: u64,
    pub(super) sold: u64,
    /// How many pieces all copies together have told buyers that they have, since the stock was set. More than there
    /// were means that some buyers will be disappointed.
    pub(super) promised: u64,
    #[serde(skip)]
    pub(super) token: u64,
    #[serde(skip)]
    pub(super) touched: Instant,
}

#[derive(Serialize, Clone)]
pub(super) struct SaleRow {
    pub(super) at: u64,
    pub(super) sku: String,
    pub(super) quantity: u64,
    pub(super) order: String,
    pub(super) token: Option<u64>,
    pub(super) copy: String,
    pub(super) replays: u64,
}

#[derive(Serialize, Clone)]
pub(super) struct ReplayRow {
    pub(super) at: u64,
    pub(super) path: String,
    pub(super) order: Option<String>,
}

impl State {
    pub(super) fn new(events: broadcast::Sender<Event>) -> State {
        State {
            events: Some(events),
            items: BTreeMap::new(),
            sales: VecDeque::new(),
            replays: VecDeque::new(),
            replayed: 0,
        }
    }

    pub(super) fn change_item(&mut self, sku: &str, change: impl FnOnce(&mut ItemRow)) {
        if !self.items.contains_key(sku) && self.items.len() >= MOST_ROWS {
            let oldest = self.items.values().min_by_key(|row| row.touched);
            let oldest = oldest.map(|row| row.sku.clone());
            oldest.map(|sku| self.items.remove(&sku));
        }
        let row = self.items.entry(sku.to_owned()).or_insert_with(|| ItemRow {
            sku: sku.to_owned(),
            stock: 0,
            sold: 0,
            promised: 0,
            token: 0,
            touched: Instant::now(),
        });
        let before = (row.stock, row.sold, row.promised, row.token);
        change(row);
        let new = before == (0, 0, 0, 0);
        if new || before != (row.stock, row.sold, row.promised, row.token) {
            row.touched = Instant::now();
            send(self.events.as_ref(), "item", row);
        }
    }

    pub(super) fn send(&self, name: &str, row: &impl Serialize) {
        send(self.events.as_ref(), name, row);
    }
}

impl ItemRow {
    pub(super) fn put(&mut self, item: &Item) {
        (self.stock, self.sold, self.token) = (item.stock, item.sold, item.token);
    }
}

fn send(events: Option<&broadcast::Sender<Event>>, name: &str, row: &impl Serialize) {
    if let Some(events) = events.filter(|events| events.receiver_count() > 0)
        && let Ok(text) = serde_json::to_string(row)
    {
        // A page that has disconnected needs no event.
        let _ = events.send(Event::default().event(name).data(text));
    }
}

pub(super) fn remember<T>(rows: &mut VecDeque<T>, row: T) {
    rows.push_front(row);
    rows.truncate(LAST);
}

pub(super) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    ms(now.unwrap_or_default())
}

pub(super) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
