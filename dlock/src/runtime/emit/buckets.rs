//! The upper bounds of histogram buckets that suit the metrics of locks.
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

/// Tenths: `dlock_lease_remaining_ratio`. A renewal on time finds two thirds of the lease left; less than a third was a
/// near miss.
pub const RATIO: &[f64] = &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// The histograms, and their buckets.
pub const ALL: [(&str, &[f64]); 4] = [
    ("dlock_wait_seconds", WAIT_SECONDS),
    ("dlock_hold_seconds", HOLD_SECONDS),
    ("dlock_store_request_seconds", REQUEST_SECONDS),
    ("dlock_lease_remaining_ratio", RATIO),
];
