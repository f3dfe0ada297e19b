//! The outcomes of requests at a lock layer, as metrics.

#[cfg(feature = "metrics")]
use std::sync::OnceLock;

#[cfg(feature = "metrics")]
use metrics::{Counter, counter, with_recorder};
#[cfg(feature = "metrics")]
use parking_lot::RwLock;

#[cfg(feature = "metrics")]
use crate::observed::observed;

/// How a request passed a lock layer, or why it did not.
#[derive(Clone, Copy)]
pub(super) enum Outcome {
    Ran,
    Passed,
    Unlocked,
    Conflict,
    Unavailable,
    Rejected,
}

#[cfg(feature = "metrics")]
impl Outcome {
    /// In the order of the variants.
    const NAMES: [&str; 6] = ["ran", "passed", "unlocked", "conflict", "unavailable", "rejected"];
}

/// The counters of a layer, each registered when it is first used: a lookup costs more than a count.
#[derive(Default)]
pub(super) struct Outcomes {
    #[cfg(feature = "metrics")]
    registered: RwLock<Registered>,
}

#[cfg(feature = "metrics")]
#[derive(Default)]
struct Registered {
    /// The address of the recorder: a program may install its own after the first request.
    recorder: usize,
    counters: [OnceLock<Counter>; Outcome::NAMES.len()],
}

impl Outcomes {
    /// Counts a request.
    #[cfg(feature = "metrics")]
    pub(super) fn count(&self, outcome: Outcome) {
        observed(|| self.record(outcome));
    }

    #[cfg(feature = "metrics")]
    fn record(&self, outcome: Outcome) {
        let recorder = with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>().addr());
        let registered = self.registered.read();
        if registered.recorder == recorder {
            return registered.count(outcome);
        }
        drop(registered);
        let mut registered = self.registered.write();
        if registered.recorder != recorder {
            *registered = Registered {
                recorder,
                ..Registered::default()
            };
        }
        registered.count(outcome);
    }

    /// Counts nothing.
    #[cfg(not(feature = "metrics"))]
    pub(super) fn count(&self, _: Outcome) {}
}

#[cfg(feature = "metrics")]
impl Registered {
    fn count(&self, outcome: Outcome) {
        let counter = self.counters[outcome as usize].get_or_init(|| {
            let outcome = Outcome::NAMES[outcome as usize];
            counter!("dlock_http_requests_total", "layer" => "lock", "outcome" => outcome)
        });
        counter.increment(1);
    }
}
