//! Releases on a member that could not be asked: it is asked again until the leases are over.
//!
//! A member may be away for hours while its quorum works. So one release at a time is tried, and the others follow when it
//! arrives.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::base::clock;
use crate::store::ReleaseRequest;
use crate::store::member::QuorumMember;

/// The pauses between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How many follow at a time.
const AT_A_TIME: usize = 64;

/// Those on one member.
pub(super) struct OwedReleases {
    store: Arc<dyn QuorumMember>,
    owed: Mutex<Owed>,
}

#[derive(Default)]
struct Owed {
    releases: VecDeque<Release>,
    /// Whether a task sees to them.
    are_attended: bool,
}

struct Release {
    request: ReleaseRequest,
    /// Until then the key stays held, for a `min_hold`.
    keep_until: Instant,
    /// When the lease is over.
    until: Instant,
}

impl Owed {
    /// Takes the next ones, without those that are over. With none left, nobody attends any more.
    fn take(&mut self, most: usize) -> Vec<Release> {
        let now = clock::now();
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(release) = self.releases.pop_front()
        {
            if now < release.until {
                taken.push(release);
            }
        }
        self.are_attended = !taken.is_empty();
        taken
    }
}

impl OwedReleases {
    pub(super) fn on(store: Arc<dyn QuorumMember>) -> Arc<OwedReleases> {
        Arc::new(OwedReleases {
            store,
            owed: Mutex::default(),
        })
    }

    /// Has the member release it once it can be asked, before `until`.
    pub(super) fn add(self: &Arc<Self>, request: ReleaseRequest, until: Instant, runtime: &Handle) {
        let keep_until = clock::now() + request.keep_for;
        let mut owed = self.owed.lock();
        owed.releases.push_back(Release {
            request,
            keep_until,
            until,
        });
        if !std::mem::replace(&mut owed.are_attended, true) {
            runtime.spawn(self.clone().attend());
        }
    }

    async fn attend(self: Arc<Self>) {
        let mut pause = PAUSES.0;
        let mut at_a_time = 1;
        loop {
            if at_a_time == 1 {
                tokio::time::sleep(pause).await;
            }
            let taken = self.owed.lock().take(at_a_time);
            if taken.is_empty() {
                return;
            }
            let asked = stream::iter(taken).map(|release| self.ask(release));
            let failed: Vec<_> = asked
                .buffer_unordered(AT_A_TIME)
                .filter_map(std::future::ready)
                .collect()
                .await;
            (at_a_time, pause) = match failed.is_empty() {
                true => (AT_A_TIME, PAUSES.0),
                false => (1, (pause * 2).min(PAUSES.1)),
            };
            // Behind the others: one that always fails does not keep them waiting.
            self.owed.lock().releases.extend(failed);
        }
    }

    /// Returns the release if it must be tried again.
    async fn ask(&self, release: Release) -> Option<Release> {
        let keep_for = release.keep_until.saturating_duration_since(clock::now());
        let request = ReleaseRequest {
            keep_for,
            ..release.request.clone()
        };
        let step = async { self.store.clone().release(request).await };
        let answer = AssertUnwindSafe(step).catch_unwind().await;
        matches!(answer, Ok(Err(error)) if error.is_outlasted()).then_some(release)
    }
}
