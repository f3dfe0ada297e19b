//! What is counted, through the `metrics` facade; nothing without the feature of that name.

use std::time::Duration;

use crate::{Error, Loss};

macro_rules! count {
    ($name:literal $(, $label:literal => $value:expr)*) => {{
        #[cfg(feature = "metrics")]
        metrics::counter!($name $(, $label => $value)*).increment(1);
        #[cfg(not(feature = "metrics"))]
        { $(let _ = &$value;)* }
    }};
}

/// `dlock_acquired_total`, and the histogram `dlock_wait_seconds`.
pub(crate) fn acquired(waited: Duration) {
    count!("dlock_acquired_total");
    #[cfg(feature = "metrics")]
    metrics::histogram!("dlock_wait_seconds").record(waited.as_secs_f64());
    #[cfg(not(feature = "metrics"))]
    let _ = waited;
}

/// `dlock_acquire_failed_total{reason}`.
pub(crate) fn not_acquired(error: &Error) {
    let reason = match error {
        Error::NotAcquired { .. } => "busy",
        Error::TooManyWaiters { .. } => "too_many_waiters",
        Error::Lost { .. } => "lost",
        Error::WouldDeadlock { .. } => "would_deadlock",
        error if error.is_unavailable() => "unavailable",
        _ => "invalid",
    };
    count!("dlock_acquire_failed_total", "reason" => reason);
}

/// `dlock_released_total`.
pub(crate) fn released() {
    count!("dlock_released_total");
}

/// `dlock_release_failed_total`.
pub(crate) fn release_failed() {
    count!("dlock_release_failed_total");
}

/// `dlock_lost_total{reason}`.
pub(crate) fn lost(loss: Loss) {
    let reason = match loss {
        Loss::Expired => "expired",
        Loss::Gone => "gone",
        Loss::MaxHold => "max_hold",
        Loss::Shutdown => "shutdown",
        Loss::RuntimeEnded => "runtime_ended",
        Loss::Released => "released",
    };
    count!("dlock_lost_total", "reason" => reason);
}
