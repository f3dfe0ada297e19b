//! The clocks of a simulated store.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::Instant;

/// The clocks of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreClock {
    pub(crate) now: Instant,
    wall: Duration,
}

thread_local! {
    static STORE: Cell<Option<StoreClock>> = const { Cell::new(None) };
}

/// Restores the clock of the outer operation, also after a panic.
struct Restored(Option<StoreClock>);

impl Drop for Restored {
    fn drop(&mut self) {
        STORE.set(self.0);
    }
}

/// Runs an operation of a store whose clocks show this: `now` for leases, and `wall`, the time since the Unix epoch,
/// for fencing tokens. It needs no runtime.
pub fn at_store<T>(now: Instant, wall: Duration, step: impl FnOnce() -> T) -> T {
    let _outer = Restored(STORE.replace(Some(StoreClock { now, wall })));
    step()
}

/// The clock of the store that runs an operation.
pub(crate) fn store_clock() -> Option<StoreClock> {
    STORE.get()
}

/// The time since the Unix epoch: of the store, or as if the process had started with the year 2026.
pub(crate) fn wall() -> Duration {
    const BEGIN: Duration = Duration::from_secs(1_767_225_600);
    match store_clock() {
        Some(of_store) => of_store.wall,
        None => {
            let now = crate::base::clock::now().into_std();
            BEGIN + now.saturating_duration_since(super::process::origin())
        }
    }
}
