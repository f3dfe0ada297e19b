//! What users look on with: subscribers of `tracing` and recorders of metrics. One that panics must end no task of the client, and no
//! acquire whose lock the store has granted.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Reports something to them. The hook of the program has told a panic already.
pub(crate) fn observed(report: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(report));
}

/// Writes an entry to the log, as `tracing::event!` with this level does.
macro_rules! log {
    ($level:ident, $($entry:tt)+) => {
        $crate::base::observed::observed(|| tracing::$level!($($entry)+))
    };
}

pub(crate) use log;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_of_an_observer_is_the_end_of_its_report() {
        let mut reports = 0;
        observed(|| {
            reports += 1;
            assert!(reports != 1, "the observer panics");
            reports += 1;
        });
        assert_eq!(reports, 1);
    }
}
