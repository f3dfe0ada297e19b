//! The state that all requests of a layer share.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use dlock::record::Records;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::active::ActiveCount;
use super::renewal::Renewals;
use super::settings::Settings;
use super::stats::Counters;

/// How many results are resent at the same time after the store was unavailable, at most.
const CONCURRENT_REPEATS: usize = 16;
/// How many claims of unknown state are undone within their lease, at most.
const CONCURRENT_UNDOS: usize = 1024;
/// How many may be undone later, where no other attempt takes an orphan over, and how many at the same time.
const LATE_UNDOS: usize = 65_536;
const CONCURRENT_LATE_UNDOS: usize = 16;

/// The state that all requests of a layer share, on every route.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) records: Records,
    /// Work that continues without its client.
    pub(super) tasks: TaskTracker,
    pub(super) renewals: Arc<Renewals>,
    pub(super) counters: Arc<Counters>,
    pub(super) repeats: Semaphore,
    pub(super) undos: Arc<Semaphore>,
    pub(super) late_undos: Arc<Semaphore>,
    /// The turns of these: not those of results, which are worth more.
    pub(super) late_turns: Semaphore,
    pub(super) claims: AtomicU64,
    /// Work whose client went away.
    pub(super) detached: ActiveCount,
    /// Requests that wait for an equal one.
    pub(super) waiting: ActiveCount,
    pub(super) closing: watch::Sender<Closing>,
}

/// The shutdowns of a layer: each of its handles may begin one.
#[derive(Debug, Default)]
pub(super) struct Closing {
    /// How many are under way.
    pub(super) shutdowns: usize,
    /// Until when bodies are read on; the earliest that one of them has set.
    pub(super) until: Option<Instant>,
}

impl Shared {
    pub(super) fn new(records: Records) -> Shared {
        let counters = Arc::<Counters>::default();
        Shared {
            renewals: Arc::new(Renewals::new(records.clone(), counters.clone())),
            records,
            tasks: TaskTracker::new(),
            counters,
            repeats: Semaphore::new(CONCURRENT_REPEATS),
            undos: Arc::new(Semaphore::new(CONCURRENT_UNDOS)),
            late_undos: Arc::new(Semaphore::new(LATE_UNDOS)),
            late_turns: Semaphore::new(CONCURRENT_LATE_UNDOS),
            claims: AtomicU64::new(0),
            detached: ActiveCount::default(),
            waiting: ActiveCount::default(),
            closing: watch::Sender::default(),
        }
    }
}

impl Shared {
    /// Completes after `limit`, or earlier if the layer is shut down.
    pub(super) async fn read_on(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut closing = self.closing.subscribe();
        loop {
            let closes = closing.borrow_and_update().until;
            tokio::select! {
                biased;
                () = sleep_until(closes.map_or(until, |closes| closes.min(until))) => return,
                Ok(()) = closing.changed() => {}
            }
        }
    }
}

/// A layer, as its requests see it.
#[derive(Debug, Clone)]
pub(super) struct Core {
    pub(super) shared: Arc<Shared>,
    pub(super) settings: Arc<Settings>,
}
