//! The upper bounds of histogram buckets that suit the metrics of locks, and what the metrics mean.
//!
//! Exporters choose buckets for HTTP requests or none at all. With
//! [`metrics-exporter-prometheus`](https://docs.rs/metrics-exporter-prometheus):
//!
//! ```
//! for (metric, bounds) in dlock::buckets::ALL {
//!     // builder = builder.set_buckets_for_metric(Matcher::Full(metric.to_owned()), bounds)?;
//!     assert!(bounds.is_sorted(), "{metric}");
//! }
//! ```

/// Seconds, from a millisecond to a minute: `dlock_wait_seconds`.
pub const WAIT_SECONDS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];

/// Seconds, from a millisecond to an hour: `dlock_hold_seconds`.
pub const HOLD_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0,
];

/// Seconds, from 50 µs to a second: `dlock_store_request_seconds`.
pub const REQUEST_SECONDS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
];

/// Tenths: `dlock_lease_remaining_ratio`. A renewal on time finds two thirds of the lease; below a third was a near miss.
pub const RATIO: &[f64] = &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// The histograms, and their buckets.
pub const ALL: [(&str, &[f64]); 4] = [
    ("dlock_wait_seconds", WAIT_SECONDS),
    ("dlock_hold_seconds", HOLD_SECONDS),
    ("dlock_store_request_seconds", REQUEST_SECONDS),
    ("dlock_lease_remaining_ratio", RATIO),
];

/// Tells the recorder what the metrics mean, and their units.
#[cfg(feature = "metrics")]
pub(super) fn describe() {
    use metrics::Unit::{Count, Seconds};
    use metrics::{describe_counter, describe_gauge, describe_histogram};
    describe_histogram!(
        "dlock_wait_seconds",
        Seconds,
        "From the call of an acquire to its end, by outcome."
    );
    describe_histogram!(
        "dlock_hold_seconds",
        Seconds,
        "From the grant of a lock to its confirmed release, or its loss."
    );
    describe_gauge!("dlock_waiting", Count, "Acquires under way in this process.");
    describe_gauge!("dlock_held", Count, "Locks that this process holds.");
    describe_gauge!(
        "dlock_suspect",
        Count,
        "Of these, locks that the store has not confirmed when it was due."
    );
    describe_histogram!(
        "dlock_lease_remaining_ratio",
        Count,
        "What was left of a lease when it was renewed: 0 to 1."
    );
    describe_counter!(
        "dlock_lost_total",
        Count,
        "Locks that were lost while they were held, by reason."
    );
    describe_counter!(
        "dlock_handoffs_total",
        Count,
        "Locks that went to the next caller in this process."
    );
    describe_counter!(
        "dlock_store_reconnects_total",
        Count,
        "Connections to the store that came back."
    );
    describe_histogram!(
        "dlock_store_request_seconds",
        Seconds,
        "Requests to the store, by operation and outcome."
    );
}
