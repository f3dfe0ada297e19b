//! A release of this process that comes before the next request of the queue head.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::moment::Moment;
use crate::engine::fairness::{ReleaseInLine, YieldEvent};
use crate::store::Watch;

/// A release that was sent to the store while others wait here.
#[derive(Debug)]
pub(crate) struct After {
    pub(crate) release: ReleaseInLine,
    /// How many clients received the notification, and when the store has replied.
    receivers: oneshot::Receiver<(Option<u64>, Moment)>,
    /// Whether a head is told of it that was one before.
    is_told: bool,
}

impl After {
    /// `notifications` counts those that this process has received, if it had a subscription; `others_here` says
    /// whether other waiters of this process share it.
    pub(crate) fn new(
        notifications: Option<u64>,
        others_here: bool,
        receivers: oneshot::Receiver<(Option<u64>, Moment)>,
    ) -> After {
        let release = ReleaseInLine {
            sent: Moment::now(),
            notifications,
            others_here,
        };
        After {
            release,
            receivers,
            is_told: false,
        }
    }

    /// Records that a queue head is told of it, which may listen: a notification that it has not seen may be that of this
    /// release. The readers of a lock are kept out while a preferred writer has a position, so it does not let them go first.
    pub(crate) fn is_told(&mut self, watch: Option<&Watch>, has_position: bool) {
        self.is_told = true;
        self.release.notifications = watch.map(Watch::count_seen);
        self.release.others_here &= !has_position;
    }

    /// Returns when the release was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.release.sent
    }

    /// Waits for the reply of the store, at most `at_most`.
    pub(crate) async fn reply(&mut self, at_most: Duration) -> YieldEvent {
        match tokio::time::timeout(at_most, &mut self.receivers).await {
            // If the store does not count them, there may be none at all.
            Ok(Ok((None, _))) if self.is_told => YieldEvent::NoReply,
            Ok(Ok((receivers, at))) => YieldEvent::Released { receivers, at },
            Ok(Err(_)) | Err(_) => YieldEvent::NoReply,
        }
    }
}
