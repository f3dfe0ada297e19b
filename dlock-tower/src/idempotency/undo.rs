//! Claims whose request was dropped before the store answered.

use std::time::Duration;

use dlock::record::{ClaimToken, RecordKey};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

use super::shared::Core;

/// Releases a claim that the store may or may not have granted, in the background. A claim that cannot be released
/// is left to its lease.
pub(super) fn undo(core: &Core, runtime: &Handle, record: RecordKey, token: ClaimToken) {
    let Ok(place) = core.shared.undos.clone().try_acquire_owned() else {
        core.shared.counters.abandoned();
        return;
    };
    let (records, lease) = (core.shared.records.clone(), core.settings.lease);
    // Called now, so that the store gets it after the claim; this thread may be one without a runtime.
    let _entered = runtime.enter();
    let first = records.release(&record, &token);
    let work = async move {
        let _place = place;
        let until = Instant::now() + lease;
        let mut answer = first.await;
        let mut pause = Duration::from_millis(50);
        while answer.is_err() && Instant::now() < until {
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
            answer = records.release(&record, &token).await;
        }
    };
    core.shared.tasks.spawn_on(work, runtime);
}
