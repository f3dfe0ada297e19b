//! The activity of this process, for the page: waiters, holders, sales and replays.
//!
//! These are the notes of this process about its own calls, not a look into the lock store: the functions of
//! the shop say when they begin to wait, when they are let in, and when they are done. Nothing depends on
//! them. All of it is bounded, however many articles, keys and sales there are.

mod state;

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::response::sse::Event;
use futures_util::Stream;
use serde_json::json;
use tokio::sync::broadcast;

use self::state::{ReplayRow, SaleRow, State, now_ms, remember};
use crate::store::Item;

/// How many events a page may fall behind before it is given a new snapshot instead.
const BACKLOG: usize = 512;
/// How many pages may watch at the same time.
const MOST_WATCHERS: usize = 64;
/// After how much quiet the highest numbers of a key begin anew.
const QUIET: Duration = Duration::from_secs(2);
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

    /// A request begins to wait for a key.
    pub(crate) fn turn(self: &Arc<Self>, key: impl Into<String>, locked: bool) -> Turn {
        let (key, now) = (key.into(), Instant::now());
        self.state().change_key(&key, |row| {
            if row.is_idle() && row.since.elapsed() > QUIET {
                (row.most_waiting, row.most_inside) = (0, 0);
            }
            row.locked = locked;
            row.waiting += 1;
            row.most_waiting = row.most_waiting.max(row.waiting);
        });
        Turn {
            board: self.clone(),
            key,
            asked: now,
            inside: AtomicBool::new(false),
        }
    }

    /// The stock of an article was set, and counting begins anew.
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

    /// A buyer is told that the pieces are theirs; `item` is what the store was told. All copies together have
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

    /// A stored answer was given once more; `order` is the one in it.
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
        let mut state = self.state();
        for row in state.keys.values_mut() {
            row.look();
        }
        let events = state.events.as_ref()?;
        if events.receiver_count() >= MOST_WATCHERS {
            return None;
        }
        let snapshot = json!({
            "copy": self.copy,
            "locked": self.locked,
            "items": state.items.values().collect::<Vec<_>>(),
            "keys": state.keys.values().collect::<Vec<_>>(),
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

    /// Lets all pages go, so that they do not keep the service from ending.
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

/// A request that waits for a key, then is let in, and is done when this is dropped.
pub(crate) struct Turn {
    board: Arc<Board>,
    key: String,
    asked: Instant,
    inside: AtomicBool,
}

impl Turn {
    /// The wait is over. Gives how long it was.
    pub(crate) fn enter(&self, token: Option<u64>) -> Duration {
        let waited = self.asked.elapsed();
        if !self.inside.swap(true, Ordering::Relaxed) {
            self.board.state().change_key(&self.key, |row| {
                row.waiting = row.waiting.saturating_sub(1);
                row.inside += 1;
                row.most_inside = row.most_inside.max(row.inside);
                (row.token, row.since) = (token, Instant::now());
            });
        }
        waited
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let inside = *self.inside.get_mut();
        self.board.state().change_key(&self.key, |row| {
            if inside {
                row.look();
                row.inside = row.inside.saturating_sub(1);
            } else {
                row.waiting = row.waiting.saturating_sub(1);
            }
        });
    }
}
