//! What the parts of a client share, and its background work.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime;
#[cfg(feature = "once")]
use tokio::sync::Semaphore;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::base::int_hash;
use crate::base::per_thread::{self, PerThread, SLOTS};
use crate::engine::unanswered;
use crate::runtime::beat::Beat;
use crate::runtime::calls::Calls;
use crate::runtime::emit::Event;
use crate::runtime::emit::events::Listeners;
use crate::runtime::emit::meter::Meter;
use crate::runtime::ending::Ending;
use crate::runtime::fairness::Fairness;
use crate::runtime::given_up::GivenUp;
use crate::runtime::grants::Issuer;
use crate::runtime::pending::Pending;
use crate::runtime::presence::{self, Identity, Publicity};
use crate::runtime::release::{self, Job};
use crate::runtime::unfinished::Unfinished;
use crate::runtime::waiters::{self, AllWaiters};
use crate::runtime::waits::Waits;
use crate::runtime::watchdog::{self, Watchdog};
use crate::store::counter::Counters;
use crate::store::records::Records;
use crate::store::{Capabilities, Kind};
use crate::store::{GrantId, Store};
use crate::{Error, Loss};

/// Keeps a client alive; the client, its locks and its guards have one. A client has a handle for each thread: every
/// acquire counts references to one.
#[repr(align(128))]
pub(crate) struct Handle {
    shared: Arc<Shared>,
    alive: Arc<Alive>,
    slot: usize,
    others: Arc<PerThread<OnceLock<Weak<Handle>>>>,
}

/// The handles of a client, one for each thread.
pub(crate) struct Handles(PerThread<Arc<Handle>>);

/// Ends with the last handle.
struct Alive {
    shared: Arc<Shared>,
    worker: mpsc::UnboundedSender<Job>,
}

/// The shared state of a client. Background tasks hold this and not the [`Handle`], so that they end when the last
/// handle is gone.
pub(crate) struct Shared {
    issuers: PerThread<Arc<Issuer>>,
    /// How many ids each thread has drawn.
    grants: PerThread<AtomicU64>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) capabilities: Capabilities,
    pub(crate) settings: Settings,
    pub(crate) watchdog: Watchdog,
    pub(crate) waiters: Arc<AllWaiters>,
    /// The calls that wait.
    pub(crate) waits: Arc<Waits>,
    pub(crate) identity: Identity,
    pub(crate) fairness: Fairness,
    pub(crate) unfinished: Unfinished,
    /// Store operations without a reply yet.
    pub(crate) calls: Arc<Calls>,
    /// Operations in flight whose callers may be gone.
    pub(crate) pending: Pending,
    /// Work that runs under claims.
    pub(crate) claims: Pending,
    pub(crate) given_up: GivenUp,
    /// How many claims whose lease is over are released at a time.
    #[cfg(feature = "once")]
    pub(crate) late_releases: Semaphore,
    /// How often the store reported a restored connection.
    pub(crate) reconnects: AtomicU64,
    /// The metrics of this client.
    pub(crate) meter: Arc<Meter>,
    /// No lock is acquired any more.
    pub(crate) closing: Ending,
    /// Locks are acquired only inside held ones; given with `closing` too.
    pub(crate) draining: Ending,
    /// The background work is done, after all releases.
    pub(crate) finished: CancellationToken,
    /// Where the background work runs.
    pub(crate) runtime: runtime::Handle,
    runtime_ended: AtomicBool,
}

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) lease: Duration,
    pub(crate) retry_for: Duration,
    /// The timeout of one store operation.
    pub(crate) timeout: Duration,
    pub(crate) publicity: Publicity,
}

impl Handle {
    /// Begins the background work of a client, on this runtime.
    pub(crate) fn start(
        store: Arc<dyn Store>,
        settings: Settings,
        uuid: Uuid,
        runtime: &runtime::Handle,
    ) -> Arc<Handles> {
        let entered = runtime.enter();
        // Without timers every lease would expire: fail here instead.
        drop(tokio::time::sleep(Duration::ZERO));
        // Before the first request, whose grant may be in doubt before the watchdog runs.
        let doubts = store.doubts();
        drop(entered);
        let told_after = unanswered::told_after(settings.timeout);
        let calls = Arc::new(Calls::new(told_after, settings.retry_for));
        let beat: Arc<Beat> = Arc::default();
        let listeners: Arc<Listeners> = Arc::default();
        let shared = Arc::new_cyclic(|client| Shared {
            issuers: PerThread::new(|_| {
                Arc::new(Issuer {
                    uuid,
                    client: client.clone(),
                    listeners: listeners.clone(),
                })
            }),
            // No id has the number zero.
            grants: PerThread::new(|_| AtomicU64::new(1)),
            capabilities: store.capabilities(),
            store,
            identity: Identity::new(&settings.publicity.service),
            settings,
            watchdog: Watchdog::new(beat.clone(), listeners.clone()),
            waiters: Arc::default(),
            waits: Arc::new(Waits::new(beat)),
            fairness: Fairness::default(),
            unfinished: Unfinished::default(),
            calls,
            pending: Pending::default(),
            claims: Pending::closed(),
            given_up: GivenUp::default(),
            #[cfg(feature = "once")]
            late_releases: Semaphore::new(16),
            reconnects: AtomicU64::new(0),
            meter: Arc::default(),
            closing: Ending::default(),
            draining: Ending::default(),
            finished: CancellationToken::new(),
            runtime: runtime.clone(),
            runtime_ended: AtomicBool::new(false),
        });
        let (worker, queue) = mpsc::unbounded_channel();
        runtime.spawn({
            let (waiters, calls) = (shared.waiters.clone(), shared.calls.clone());
            async move {
                tokio::select! {
                    biased;
                    () = release::work(queue) => {}
                    () = waiters::attend(waiters) => {}
                    () = calls.attend() => {}
                }
            }
        });
        let runtime_watch = RuntimeWatch(shared.clone());
        runtime.spawn(async move {
            let shared = runtime_watch.0.clone();
            let finished = shared.finished.clone();
            watchdog::watch(shared, doubts, finished.cancelled()).await;
            drop(runtime_watch);
        });
        if shared.settings.publicity.presence {
            let (shared, finished) = (shared.clone(), shared.finished.clone());
            runtime.spawn(async move {
                let mut after_a_panic = false;
                loop {
                    let attended = presence::attend(&shared, after_a_panic, finished.cancelled());
                    if AssertUnwindSafe(attended).catch_unwind().await.is_ok() {
                        return;
                    }
                    after_a_panic = true;
                    Event::StorePanicked { key: None }.emit();
                    tokio::time::sleep(presence::AFTER_A_PANIC).await;
                    // Whatever it was doing: it looks at the tables again.
                    shared.watchdog.beat.sleeps();
                    shared.watchdog.beat.rouse();
                }
            });
        }
        Handles::new(&Arc::new(Alive { shared, worker }))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn worker(&self) -> &mpsc::UnboundedSender<Job> {
        &self.alive.worker
    }

    /// Returns the handle for this thread, or this one if the client itself is gone.
    pub(crate) fn here(self: &Arc<Self>) -> Arc<Handle> {
        let slot = per_thread::slot();
        let other = match slot == self.slot {
            true => None,
            false => self.others.at(slot).get().and_then(Weak::upgrade),
        };
        other.unwrap_or_else(|| self.clone())
    }
}

impl Handles {
    fn new(alive: &Arc<Alive>) -> Arc<Handles> {
        let others: Arc<PerThread<OnceLock<Weak<Handle>>>> = Arc::default();
        let handles = Arc::new(Handles(PerThread::new(|slot| {
            Arc::new(Handle {
                shared: alive.shared.clone(),
                alive: alive.clone(),
                slot,
                others: others.clone(),
            })
        })));
        for (known, handle) in others.iter().zip(handles.0.iter()) {
            let _ = known.set(Arc::downgrade(handle));
        }
        handles
    }

    /// Returns the handle for this thread.
    pub(crate) fn here(&self) -> &Arc<Handle> {
        self.0.here()
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.shared.finished.cancel();
    }
}

impl Shared {
    /// Returns the counters of the store, for operations on semaphores and latches.
    pub(crate) fn counters(&self, kind: Kind) -> Result<Arc<dyn Counters>, Error> {
        self.capabilities.require(kind)?;
        (self.store.clone().counters()).ok_or_else(|| self.capabilities.lacks(kind))
    }

    /// Returns the records of the store.
    pub(crate) fn records(&self) -> Result<Records, Error> {
        let records = self.store.clone().records();
        let records = records.map(|records| records.told_to(self.calls.clone()));
        records.ok_or_else(|| Error::Unsupported {
            what: "keeping records".to_owned(),
            reason: self.store.no_records().to_owned(),
        })
    }

    /// Whether the runtime ended while the client was at work: nothing waits and nothing is sent any more.
    pub(crate) fn has_lost_its_runtime(&self) -> bool {
        self.runtime_ended.load(Ordering::SeqCst)
    }

    /// Ends all calls: no lock is acquired any more.
    pub(crate) fn close(&self) {
        self.closing.give();
        self.drain();
    }

    /// Ends all outermost calls.
    pub(crate) fn drain(&self) {
        self.draining.give();
        self.waiters.rouse_all();
    }

    /// Waits until nothing is held, and no work runs under a claim.
    pub(crate) async fn idle(&self) {
        loop {
            self.watchdog.empty().await;
            self.claims.wait().await;
            // Work under a claim may have acquired a lock meanwhile, and a holder may have claimed work.
            if self.watchdog.len() == 0 && self.claims.is_empty() {
                return;
            }
        }
    }

    /// Returns the error of an outermost call while the client drains, and of every call once it is shut down.
    pub(crate) fn refusal(&self) -> Error {
        match self.closing.is_given() {
            true => Error::ClientClosed,
            false => Error::Draining,
        }
    }

    pub(crate) fn issuer(&self) -> &Arc<Issuer> {
        self.issuers.here()
    }

    /// Returns an id that was not used yet.
    pub(crate) fn next_grant(&self) -> GrantId {
        self.draw_grant(per_thread::slot())
    }

    /// Returns an id that was not used yet, for a position in the store's queue. Drawn in one place: stores order positions of
    /// a client by their numbers where they lost the queue.
    pub(crate) fn next_position(&self) -> GrantId {
        self.draw_grant(0)
    }

    fn draw_grant(&self, slot: usize) -> GrantId {
        let drawn = self.grants.at(slot).fetch_add(1, Ordering::Relaxed);
        GrantId::new(self.issuer().uuid, number_of_grant(slot as u64, drawn))
    }
}

/// Returns the number of the grant that a thread draws after so many others. The threads take the rows of
/// [neighbours](int_hash::ROW) by turns.
fn number_of_grant(slot: u64, drawn: u64) -> u64 {
    let row = drawn / int_hash::ROW * SLOTS as u64 + slot;
    row * int_hash::ROW + drawn % int_hash::ROW
}

/// Returns the slot of the thread that drew this number.
pub(crate) fn slot_of_grant(number: u64) -> usize {
    (number / int_hash::ROW) as usize % SLOTS
}

/// Notices that the runtime is gone: dropped with the watchdog's task, before that was asked to finish.
struct RuntimeWatch(Arc<Shared>);

impl Drop for RuntimeWatch {
    fn drop(&mut self) {
        if !self.0.finished.is_cancelled() {
            self.0.runtime_ended.store(true, Ordering::SeqCst);
            self.0.calls.rouse_releasing();
            self.0.close();
            self.0.watchdog.close(Loss::RuntimeEnded);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::LockClient;

    /// One thread has drawn many ids, another one none.
    #[tokio::test]
    async fn positions_are_numbered_as_they_come_on_whichever_thread() {
        let client = LockClient::memory();
        let shared = client.shared();
        for _ in 0..100 {
            shared.next_grant();
        }
        let mut before = shared.next_position();
        for _ in 0..20 {
            let drawn = std::thread::scope(|scope| scope.spawn(|| shared.next_position()).join());
            let position = drawn.unwrap();
            assert!(position.came_after(before), "{position} after {before}");
            before = position;
        }
    }
}
