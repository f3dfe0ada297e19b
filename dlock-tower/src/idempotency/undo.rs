//! Claims whose request was dropped before the store answered.

use std::time::Duration;

use dlock::record::{ClaimRequest, OnOrphan};
use dlock::store::StoreError;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep, timeout};

use super::settlement::is_final;
use super::shared::{Core, Shared};

/// The longest pause between two releases, while the claim may be alive and after its lease.
const LONGEST: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// A distant store is not silent because a lease is short.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// A place among the claims that are undone, within their lease or later.
enum Place {
    Prompt { _place: OwnedSemaphorePermit },
    Late { _place: OwnedSemaphorePermit },
}

impl Place {
    fn prompt(shared: &Shared) -> Option<Place> {
        let place = shared.undos.clone().try_acquire_owned();
        place.ok().map(|_place| Place::Prompt { _place })
    }

    fn late(shared: &Shared) -> Option<Place> {
        let place = shared.late_undos.clone().try_acquire_owned();
        place.ok().map(|_place| Place::Late { _place })
    }

    fn is_late(&self) -> bool {
        matches!(self, Place::Late { .. })
    }
}

/// Releases a claim that the store may or may not have granted, in the background. A claim that cannot be released is
/// left to its lease, unless no other attempt takes orphans over: then its key would be blocked although nothing was begun.
pub(super) fn undo(core: &Core, runtime: &Handle, claim: &ClaimRequest) {
    let shared = core.shared.clone();
    let (record, token, lease) = (claim.key.clone(), claim.token.clone(), claim.lease);
    let outlives_lease = claim.on_orphan == OnOrphan::Leave;
    let lease_over = Instant::now() + lease;
    let until = match outlives_lease {
        true => Instant::now() + claim.retention,
        false => lease_over,
    };
    let late = || Place::late(&shared).filter(|_| outlives_lease);
    let Some(mut place) = Place::prompt(&shared).or_else(late) else {
        return shared.counters.abandoned();
    };
    // Called now, so that the store gets it after the claim; this thread may be one without a runtime.
    let _entered = runtime.enter();
    let first = (!place.is_late()).then(|| shared.records.release(&record, &token));
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
            if outlives_lease && !place.is_late() && Instant::now() >= lease_over {
                match Place::late(&shared) {
                    Some(late) => place = late,
                    None => return shared.counters.abandoned(),
                }
            }
            let (longest, turn) = match place.is_late() {
                false => (LONGEST.0, None),
                // There may be many of them after a long outage.
                true => (LONGEST.1, shared.late_turns.acquire().await.ok()),
            };
            pause = (pause * 2).min(longest);
            let patience = (lease / 3).max(LEAST_PATIENCE);
            let step = timeout(patience, shared.records.release(&record, &token));
            let silent = |_| Err(StoreError::unknown("the store does not answer"));
            reply = Some(step.await.unwrap_or_else(silent));
            drop(turn);
        }
    };
    core.shared.tasks.spawn_on(work, runtime);
}
