//! Claims whose request was dropped before the store answered.

use std::time::Duration;

use dlock::record::{ClaimRequest, OnOrphan};
use dlock::store::StoreError;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use super::settlement::is_final;
use super::shared::Core;

/// The longest pause between two releases, while the claim may be alive and after its lease.
const LONGEST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// Releases a claim that the store may or may not have granted, in the background. A claim that cannot be released is
/// left to its lease, unless nobody takes orphans over: then its key would be blocked although nothing was begun.
pub(super) fn undo(core: &Core, runtime: &Handle, claim: &ClaimRequest) {
    let shared = core.shared.clone();
    let (record, token, lease) = (claim.key.clone(), claim.token.clone(), claim.lease);
    let mut place = shared.undos.clone().try_acquire_owned().ok();
    let lease_over = Instant::now() + lease;
    let until = match claim.on_orphan {
        OnOrphan::Leave => Instant::now() + claim.retention,
        _ if place.is_none() => return shared.counters.abandoned(),
        _ => lease_over,
    };
    // Called now, so that the store gets it after the claim; this thread may be one without a runtime.
    let _entered = runtime.enter();
    let first = place.is_some().then(|| shared.records.release(&record, &token));
    let work = async move {
        let mut reply = match first {
            Some(first) => Some(first.await),
            None => None,
        };
        let mut pause = Duration::from_millis(50);
        loop {
            match &reply {
                Some(Ok(_)) => return,
                Some(Err(error)) if is_final(error) || Instant::now() >= until => {
                    return shared.counters.abandoned();
                }
                _ => {}
            }
            sleep(pause).await;
            if Instant::now() >= lease_over {
                place = None;
            }
            let longest = if place.is_some() { LONGEST.0 } else { LONGEST.1 };
            pause = (pause * 2).min(longest);
            // There may be many of them after a long outage.
            let turn = match place {
                Some(_) => None,
                None => shared.repeats.acquire().await.ok(),
            };
            let step = timeout(lease / 3, shared.records.release(&record, &token));
            let silent = |_| Err(StoreError::unknown("the store does not answer"));
            reply = Some(step.await.unwrap_or_else(silent));
            drop(turn);
        }
    };
    core.shared.tasks.spawn_on(work, runtime);
}
