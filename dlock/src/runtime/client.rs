//! What the parts of a client share, and its background work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::base::own_line::OwnLine;
use crate::engine::unanswered;
use crate::runtime::beat::Beat;
use crate::runtime::calls::Calls;
use crate::runtime::emit::events::Listeners;
use crate::runtime::emit::meter::Meter;
use crate::runtime::ending::Ending;
use crate::runtime::fairness::Fairness;
use crate::runtime::grants::Issuer;
use crate::runtime::presence::{self, Identity, Publicity};
use crate::runtime::release::{self, Job};
use crate::runtime::unfinished::Unfinished;
use crate::runtime::waiters::{self, Waiters};
use crate::runtime::waits::Waits;
use crate::runtime::watchdog::{self, Watchdog};
use crate::store::counter::Counters;
use crate::store::{Capabilities, Kind};
use crate::store::{GrantId, Store};
use crate::{Error, Loss};

/// Keeps a client alive; the client, its locks and its guards have it. Apart from the count of these references, which each
/// acquire changes.
#[repr(align(128))]
pub(crate) struct Handle {
    shared: Arc<Shared>,
    worker: mpsc::UnboundedSender<Job>,
}

/// The shared state of a client. Background tasks hold this and not the [`Handle`], so that they end when the last
/// handle is gone.
pub(crate) struct Shared {
    pub(crate) issuer: Arc<Issuer>,
    /// The number of the next one.
    grants: OwnLine<AtomicU64>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) capabilities: Capabilities,
    pub(crate) settings: Settings,
    pub(crate) watchdog: Watchdog,
    pub(crate) waiters: Arc<Waiters>,
    /// The calls that wait.
    pub(crate) waits: Arc<Waits>,
    pub(crate) identity: Identity,
    pub(crate) fairness: Fairness,
    pub(crate) unfinished: Unfinished,
    /// Store operations without a reply yet.
    pub(crate) calls: Arc<Calls>,
    /// Operations in flight whose callers may be gone.
    pub(crate) pending: TaskTracker,
    /// How many releases ended without a reply from the store: those locks end with their leases.
    pub(crate) given_up: AtomicUsize,
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
    ) -> Arc<Handle> {
        let entered = runtime.enter();
        // Without timers every lease would expire: fail here instead.
        drop(tokio::time::sleep(Duration::ZERO));
        // Before the first request, whose grant may be in doubt before the watchdog runs.
        let doubts = store.doubts();
        drop(entered);
        let told_after = unanswered::told_after(settings.timeout);
        let calls = Arc::new(Calls::new(told_after, settings.retry_for));
        let beat: Arc<Beat> = Arc::default();
        let shared = Arc::new_cyclic(|client| Shared {
            issuer: Arc::new(Issuer {
                uuid,
                client: client.clone(),
                listeners: Listeners::default(),
            }),
            grants: OwnLine::new(AtomicU64::new(1)),
            capabilities: store.capabilities(),
            store,
            identity: Identity::new(&settings.publicity.service),
            settings,
            watchdog: Watchdog::new(beat.clone()),
            waiters: Arc::default(),
            waits: Arc::new(Waits::new(beat)),
            fairness: Fairness::default(),
            unfinished: Unfinished::default(),
            calls,
            pending: TaskTracker::new(),
            given_up: AtomicUsize::new(0),
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
            runtime.spawn(async move { presence::attend(shared, finished.cancelled()).await });
        }
        Arc::new(Handle { shared, worker })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn worker(&self) -> &mpsc::UnboundedSender<Job> {
        &self.worker
    }
}

impl Drop for Handle {
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

    /// Returns the error of an outermost call while the client drains, and of every call once it is shut down.
    pub(crate) fn refusal(&self) -> Error {
        match self.closing.is_given() {
            true => Error::ClientClosed,
            false => Error::Draining,
        }
    }

    pub(crate) fn next_grant(&self) -> GrantId {
        GrantId::new(self.issuer.uuid, self.grants.fetch_add(1, Ordering::Relaxed))
    }
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
