//! The measurements of the tasks of one process.
//!
//! Counting must not slow the tasks down: each counts separately, and passes on a few hundred times at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use dlock::Error;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The longest time that is distinguished: an hour.
const LONGEST: u64 = 3_600_000_000_000;
/// How many times a task keeps before it passes them on.
const BATCH: usize = 256;
/// The pause after a failure, so that a lasting one does not fill the measurement.
const PAUSE: Duration = Duration::from_millis(10);

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const OVER: u8 = 2;

/// The distribution of times, in nanoseconds to three digits.
#[derive(Debug, Clone)]
pub(super) struct Times(Histogram<u64>);

impl Times {
    pub(super) fn new() -> Times {
        Times(Histogram::new_with_bounds(1, LONGEST, 3).expect("the bounds are constant"))
    }

    pub(super) fn record(&mut self, nanos: u64) {
        self.0.saturating_record(nanos);
    }

    pub(super) fn add(&mut self, other: &Times) {
        self.0.add(&other.0).expect("all have the same bounds");
    }

    pub(super) fn len(&self) -> u64 {
        self.0.len()
    }

    /// The microseconds that this share of the times does not exceed; `None` if there are none.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        (self.len() > 0).then(|| micros(self.0.value_at_quantile(share)))
    }

    pub(super) fn mean(&self) -> Option<f64> {
        (self.len() > 0).then(|| self.0.mean() / 1000.0)
    }

    pub(super) fn max(&self) -> Option<f64> {
        (self.len() > 0).then(|| micros(self.0.max()))
    }

    /// Each time in nanoseconds with its count, ascending.
    pub(super) fn each(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0
            .iter_recorded()
            .map(|value| (value.value_iterated_to(), value.count_since_last_iteration()))
    }
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

impl Serialize for Times {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.each())
    }
}

impl<'de> Deserialize<'de> for Times {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Times, D::Error> {
        let mut times = Times::new();
        for (nanos, count) in Vec::<(u64, u64)>::deserialize(from)? {
            times.0.saturating_record_n(nanos, count);
        }
        Ok(times)
    }
}

/// A series of measured times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Series {
    /// The subject of the workload. Counted per task.
    Main,
    /// The service without its layer.
    Bare,
    /// A request answered from its record.
    Replay,
    /// Acquisitions that wait for the other client's hold. Counted per task.
    Holds,
}

/// The counters of the tasks of one process.
#[derive(Debug)]
pub(super) struct Tally {
    phase: AtomicU8,
    /// The count of each task during the measurement.
    counts: Vec<AtomicU64>,
    sums: Mutex<Sums>,
}

/// The sums.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Sums {
    pub(super) times: BTreeMap<Series, Times>,
    pub(super) errors: BTreeMap<String, u64>,
}

impl Sums {
    pub(super) fn times(&mut self, series: Series) -> &mut Times {
        self.times.entry(series).or_insert_with(Times::new)
    }

    pub(super) fn failed(&mut self, kind: &str, times: u64) {
        *self.errors.entry(kind.to_owned()).or_default() += times;
    }

    pub(super) fn add(&mut self, other: &Sums) {
        for (series, times) in &other.times {
            self.times(*series).add(times);
        }
        for (kind, times) in &other.errors {
            self.failed(kind, *times);
        }
    }
}

impl Tally {
    pub(super) fn new(tasks: usize) -> Arc<Tally> {
        Arc::new(Tally {
            phase: AtomicU8::new(WARM_UP),
            counts: (0..tasks).map(|_| AtomicU64::new(0)).collect(),
            sums: Mutex::default(),
        })
    }

    pub(super) fn begin(&self) {
        self.phase.store(MEASURE, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.phase.store(OVER, Ordering::Relaxed);
    }

    pub(super) fn is_measuring(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == MEASURE
    }

    /// Whether the tasks must end.
    pub(super) fn is_over(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == OVER
    }

    pub(super) fn counts(&self) -> Vec<u64> {
        self.counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    }

    /// Returns what has been passed on; everything once the recorders are gone.
    pub(super) fn sums(&self) -> Sums {
        self.sums.lock().clone()
    }

    /// Adds times that were measured elsewhere.
    pub(super) fn add(&self, series: Series, times: &Times) {
        self.sums.lock().times(series).add(times);
    }

    /// Counts failures outside a task, or in one without a time.
    pub(super) fn failed(&self, kind: &str, times: u64) {
        self.sums.lock().failed(kind, times);
    }

    /// Creates the recorder of the task with this number.
    pub(super) fn recorder(self: &Arc<Self>, task: usize, series: Series) -> Recorder {
        Recorder {
            tally: self.clone(),
            task,
            series,
            times: Vec::with_capacity(BATCH),
        }
    }
}

/// Records the times of one task.
#[derive(Debug)]
pub(super) struct Recorder {
    tally: Arc<Tally>,
    task: usize,
    series: Series,
    times: Vec<u64>,
}

impl Recorder {
    /// Records an operation that took this long. It counts if it ended during the measurement.
    pub(super) fn done(&mut self, took: Duration) {
        if !self.tally.is_measuring() {
            return;
        }
        if matches!(self.series, Series::Main | Series::Holds) {
            self.tally.counts[self.task].fetch_add(1, Ordering::Relaxed);
        }
        self.times.push(took.as_nanos() as u64);
        if self.times.len() == BATCH {
            self.hand_on();
        }
    }

    /// Records a failure; returns after a pause.
    pub(super) async fn failed(&self, kind: &str) {
        if self.tally.is_measuring() {
            self.tally.failed(kind, 1);
        }
        tokio::time::sleep(PAUSE).await;
    }

    fn hand_on(&mut self) {
        let mut sums = self.tally.sums.lock();
        let into = sums.times(self.series);
        for nanos in self.times.drain(..) {
            into.record(nanos);
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.hand_on();
    }
}

/// The name under which an error is counted.
pub(super) fn kind_of(error: &Error) -> &'static str {
    match error {
        Error::NotAcquired { .. } => "busy",
        Error::Lost { .. } => "lost",
        Error::TooManyWaiters { .. } => "too_many_waiters",
        Error::Unreachable { .. } => "unreachable",
        Error::OutcomeUnknown { .. } => "outcome_unknown",
        Error::Refused { .. } => "refused",
        Error::NotReplicated { .. } => "not_replicated",
        Error::Draining => "draining",
        Error::ClientClosed => "closed",
        _ => "other",
    }
}
