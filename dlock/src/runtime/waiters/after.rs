//! The release after which a waiter became the queue head.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::moment::Moment;
use crate::engine::fairness::{ReleaseInLine, YieldEvent};
use crate::store::Watch;

/// A release that was sent to the store while others wait here.
#[derive(Debug)]
pub(crate) struct After {
    pub(crate) release: ReleaseInLine,
    /// How many clients received the notification.
    receivers: oneshot::Receiver<Option<u64>>,
}

impl After {
    /// `notifications` counts those that this process has received, if it had a subscription; `others_here` says
    /// whether other waiters of this process share it.
    pub(crate) fn new(
        notifications: Option<u64>,
        others_here: bool,
        receivers: oneshot::Receiver<Option<u64>>,
    ) -> After {
        let release = ReleaseInLine {
            sent: Moment::now(),
            notifications,
            others_here,
        };
        After { release, receivers }
    }

    /// Sets how many notifications the queue head had received: what it has not seen yet is that of this release.
    pub(crate) fn heard_by(&mut self, watch: Option<&Watch>) {
        self.release.notifications = watch.map(Watch::count_seen);
    }

    /// Returns when the release was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.release.sent
    }

    /// Waits for the reply of the store, at most `at_most`.
    pub(crate) async fn reply(&mut self, at_most: Duration) -> YieldEvent {
        match tokio::time::timeout(at_most, &mut self.receivers).await {
            Ok(Ok(receivers)) => YieldEvent::Released { receivers },
            Ok(Err(_)) | Err(_) => YieldEvent::NoReply,
        }
    }
}
