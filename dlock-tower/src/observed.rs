//! What users count with: recorders of metrics. One that panics must end no renewal, and no request whose claim the store has granted.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Reports something to them. The hook of the program has told a panic already.
pub(crate) fn observed(report: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(report));
}
