//! The activity of this process, for the page: sales and replays.
//!
//! These are the notes of this process about its own calls, and nothing depends on them. All of it is bounded, however
//! many articles and sales there are. The locks are what the console shows.

mod state;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::response::sse::Event;
use futures_util::Stream;
use serde_json::json;
use tokio::sync::broadcast;

use self::state::{ReplayRow, SaleRow, State, now_ms, remember};
use crate::store::Item;

/// How many events a page may fall behind before it gets a new snapshot instead.
const BACKLOG: usize = 512;
/// How many pages may watch at the same time.
const MOST_WATCHERS: usize = 64;
/// How long a page that fell behind is left alone, so that it does not get snapshots only.
const BEHIND: Duration = Duration::from_millis(100);

/// The board on which all tasks note what they do.
pub(crate) struct Board {
    copy: String,
    locked: bool,
    state: Mutex<State>,
}

impl Board {
    /// An empty board of the copy that is known by this name.
    pub(crate) fn new(copy: String, locked: bool) -> Arc<Board> {
        let state = Mutex::new(State::new(broadcast::channel(BACKLOG).0));
        Arc::new(Board { copy, locked, state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // These are notes for people: a wrong number is better than no page.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stock of an article was set, and counting restarts.
    pub(crate) fn stock_set(&self, sku: &str, item: &Item) {
        self.state().change_item(sku, |row| {
            row.put(item);
            row.promised = 0;
        });
    }

    /// The article was looked at: all copies together have promised so many pieces of it.
    pub(crate) fn looked(&self, sku: &str, item: &Item, promised: u64) {
        self.state().change_item(sku, |row| {
            if item.token < row.token {
                return; // a change came in since
            }
            row.put(item);
            row.promised = promised;
        });
    }

    /// A buyer was told that the sale is done; `item` is what the store was told. All copies together have
    /// `promised` so many pieces of it.
    pub(crate) fn sold(&self, sale: &Sold<'_>, item: &Item, promised: u64) {
        let mut state = self.state();
        state.change_item(sale.sku, |row| {
            row.put(item);
            // Answers to two sales may come in the other order.
            row.promised = row.promised.max(promised);
        });
        let row = SaleRow {
            at: now_ms(),
            sku: sale.sku.to_owned(),
            quantity: sale.quantity,
            order: sale.order.to_owned(),
            token: sale.token,
            copy: self.copy.clone(),
            replays: 0,
        };
        state.send("sale", &row);
        remember(&mut state.sales, row);
    }

    /// A stored answer was replayed; `order` is its order.
    pub(crate) fn replayed(&self, path: &str, order: Option<String>) {
        let mut state = self.state();
        let sale = (state.sales.iter_mut()).find(|sale| Some(&sale.order) == order.as_ref());
        if let Some(sale) = sale {
            sale.replays += 1;
        }
        state.replayed += 1;
        let row = ReplayRow {
            at: now_ms(),
            path: path.to_owned(),
            order,
        };
        state.send("replay", &row);
        remember(&mut state.replays, row);
    }

    /// The articles that an open page shows; nothing without an open page.
    pub(crate) fn watched(&self) -> Option<Vec<String>> {
        let state = self.state();
        let watched = state.events.as_ref()?.receiver_count() > 0;
        watched.then(|| state.items.keys().cloned().collect())
    }

    /// Everything as it is now, and then what changes, as server-sent events. Nothing when too many watch
    /// already, or the service is about to end.
    pub(crate) fn watch(self: &Arc<Self>) -> Option<impl Stream<Item = Result<Event, Infallible>> + use<>> {
        let (snapshot, changes) = self.snapshot()?;
        let begin = (self.clone(), Some(snapshot), changes);
        Some(futures_util::stream::unfold(
            begin,
            |(board, first, mut changes)| async move {
                if let Some(snapshot) = first {
                    return Some((Ok(snapshot), (board, None, changes)));
                }
                match changes.recv().await {
                    Ok(event) => Some((Ok(event), (board, None, changes))),
                    Err(broadcast::error::RecvError::Closed) => None,
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        drop(changes);
                        tokio::time::sleep(BEHIND).await;
                        let (snapshot, changes) = board.snapshot()?;
                        Some((Ok(snapshot), (board, None, changes)))
                    }
                }
            },
        ))
    }

    /// Both in one step, so that no change falls in between.
    fn snapshot(&self) -> Option<(Event, broadcast::Receiver<Event>)> {
        let state = self.state();
        let events = state.events.as_ref()?;
        if events.receiver_count() >= MOST_WATCHERS {
            return None;
        }
        let snapshot = json!({
            "copy": self.copy,
            "locked": self.locked,
            "items": state.items.values().collect::<Vec<_>>(),
            "sales": state.sales,
            "replays": state.replays,
            "replayed": state.replayed,
        });
        let event = Event::default()
            .event("snapshot")
            .retry(Duration::from_secs(1))
            .data(snapshot.to_string());
        Some((event, events.subscribe()))
    }

    /// Disconnects all pages, so that they do not keep the service from ending.
    pub(crate) fn close(&self) {
        self.state().events = None;
    }
}

/// A sale, as it is told to the board.
pub(crate) struct Sold<'a> {
    pub(crate) sku: &'a str,
    pub(crate) quantity: u64,
    pub(crate) order: &'a str,
    pub(crate) token: Option<u64>,
}
