//! The calls of a client that wait for a lock, for reports. A call that gets its lock at once is not among them.

use std::panic::Location;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::task;

use crate::LockKey;
use crate::base::chance::{HashMap, next_id};
use crate::base::int_hash::BuildIntHasher;
use crate::base::moment::Moment;
use crate::runtime::beat::Beat;
use crate::runtime::emit::trace::{AcquireTrace, Path};
use crate::runtime::group::Group;
use crate::runtime::scope;
use crate::store::{GrantId, Holder, Kind};

/// All waiting calls.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    calls: Mutex<HashMap<u64, Arc<WaitingCall>, BuildIntHasher>>,
    beat: Arc<Beat>,
}

/// A waiting call.
#[derive(Debug)]
pub(crate) struct WaitingCall {
    pub(crate) kind: Kind,
    pub(crate) key: LockKey,
    pub(crate) since: Moment,
    pub(crate) by: &'static Location<'static>,
    pub(crate) note: Option<Arc<str>>,
    pub(crate) task: Option<task::Id>,
    /// The holds in whose frames it waits.
    pub(crate) inside: Vec<GrantId>,
    /// The holder, once it was looked up.
    holder: Mutex<Option<Arc<Holder>>>,
}

impl WaitingCall {
    pub(crate) fn new(
        kind: Kind,
        key: &LockKey,
        since: Moment,
        by: &'static Location<'static>,
        note: Option<Arc<str>>,
    ) -> WaitingCall {
        WaitingCall {
            kind,
            key: key.clone(),
            since,
            by,
            note,
            task: task::try_id(),
            inside: scope::current().grants().map(|grant| grant.id()).collect(),
            holder: Mutex::default(),
        }
    }

    pub(crate) fn is_looked_up(&self) -> bool {
        self.holder.lock().is_some()
    }

    pub(crate) fn set_holder(&self, holder: Arc<Holder>) {
        *self.holder.lock() = Some(holder);
    }
}

impl Waits {
    pub(crate) fn new(beat: Arc<Beat>) -> Waits {
        Waits {
            beat,
            ..Waits::default()
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.lock().len()
    }

    /// Returns at most this many of the calls, with their numbers.
    pub(crate) fn calls(&self, most: usize) -> Vec<(u64, Arc<WaitingCall>)> {
        let calls = self.calls.lock();
        calls
            .iter()
            .take(most)
            .map(|(number, call)| (*number, call.clone()))
            .collect()
    }
}

/// The entry of a call that may come to wait; removed when it is dropped.
#[derive(Default)]
pub(crate) struct Waiting<'a> {
    entered: OnceLock<Box<Entered>>,
    trace: Option<&'a AcquireTrace>,
}

struct Entered {
    waits: Arc<Waits>,
    number: u64,
    call: Arc<WaitingCall>,
}

impl<'a> Waiting<'a> {
    /// The entry of an acquire with this trace.
    pub(crate) fn of(trace: &'a AcquireTrace) -> Waiting<'a> {
        Waiting {
            trace: Some(trace),
            ..Waiting::default()
        }
    }

    /// Records how the acquire obtains its lock, as far as known.
    pub(crate) fn comes_by(&self, path: Path) {
        if let Some(trace) = self.trace {
            trace.comes_by(path);
        }
    }

    /// Enters the call, the first time.
    pub(crate) fn begin(&self, call: impl FnOnce() -> (Arc<Waits>, WaitingCall, Group)) {
        self.entered.get_or_init(|| {
            let (waits, call, group) = call();
            if let Some(trace) = self.trace {
                trace.begins_to_wait(&call, group);
            }
            let (number, call) = (next_id(), Arc::new(call));
            waits.calls.lock().insert(number, call.clone());
            waits.beat.rouse();
            Box::new(Entered { waits, number, call })
        });
    }

    /// Returns the holder that it waits for, if that was looked up.
    pub(crate) fn holder(&self) -> Option<Arc<Holder>> {
        self.entered.get()?.call.holder.lock().clone()
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // The call itself is dropped without the mutex.
        let call = self.waits.calls.lock().remove(&self.number);
        drop(call);
    }
}
