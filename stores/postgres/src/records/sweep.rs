//! How many expired rows one statement removes.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The most rows that one statement removes.
const MOST: u32 = 1000;

/// Adapts the number of rows of the next statement. The size of rows says little about the time to remove them, so the
/// time is measured: a statement must end long before the server cancels it, and other operations wait for it.
#[derive(Debug)]
pub(super) struct SweepBatch {
    rows: AtomicU32,
    target: Duration,
}

impl SweepBatch {
    /// Creates a batch size for operations with this timeout.
    pub(super) fn new(timeout: Duration) -> SweepBatch {
        SweepBatch {
            rows: AtomicU32::new(MOST),
            target: timeout / 20,
        }
    }

    pub(super) fn rows(&self) -> u32 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Records how long a statement took.
    pub(super) fn took(&self, rows: u32, time: Duration) {
        let factor = self.target.as_secs_f64() / time.as_secs_f64().max(1e-6);
        // A single slow or fast statement must not count for much.
        let next = f64::from(rows) * factor.clamp(0.25, 2.0);
        self.rows.store((next as u32).clamp(1, MOST), Ordering::Relaxed);
    }

    /// Records that a statement was cancelled.
    pub(super) fn took_too_long(&self, rows: u32) {
        self.rows.store((rows / 4).max(1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_follows_the_time_that_its_rows_take() {
        let batch = SweepBatch::new(Duration::from_secs(1));
        let after = |per_row: Duration| {
            for _ in 0..40 {
                let rows = batch.rows();
                assert!((1..=MOST).contains(&rows));
                match per_row * rows {
                    time if time > Duration::from_millis(800) => batch.took_too_long(rows),
                    time => batch.took(rows, time),
                }
            }
            batch.rows()
        };
        assert_eq!(after(Duration::from_micros(1)), MOST);
        assert!((8..=12).contains(&after(Duration::from_millis(5))));
        assert_eq!(after(Duration::from_millis(700)), 1);
        // Rows that are never removed in time are still tried one by one; small rows are removed in large batches
        // again.
        assert_eq!(after(Duration::from_secs(9)), 1);
        assert_eq!(after(Duration::ZERO), MOST);
    }
}
