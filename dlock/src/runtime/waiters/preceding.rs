//! A release of this process that precedes the next request of the queue head.

use std::time::Duration;

use tokio::sync::oneshot;

use crate::base::moment::Moment;
use crate::engine::fairness::{NextRequest, ReleaseInLine, ReleaseReplied, YieldEvent};
use crate::store::Watch;

/// A release that was sent to the store while others wait here. It belongs to the queue head, and passes on with that role
/// until the lock is acquired, unless the head misses its poll deadline. Boxed, because few heads have one.
#[derive(Debug)]
pub(crate) struct PrecedingRelease {
    release: ReleaseInLine,
    reply: Reply,
}

#[derive(Debug)]
enum Reply {
    Awaited(oneshot::Receiver<ReleaseReplied>),
    Arrived(ReleaseReplied),
    /// It is not needed, or did not come in time.
    Unavailable,
}

impl PrecedingRelease {
    /// A release whose reply decides whether others go first, with the subscription of the head, if that is known;
    /// `was_subscribed` says whether one has just ended, `others_here` whether other waiters of this process share it,
    /// `head_waited` whether there was a head before.
    pub(crate) fn awaited(
        watch: Option<&Watch>,
        was_subscribed: bool,
        others_here: bool,
        head_waited: bool,
    ) -> (Box<PrecedingRelease>, oneshot::Sender<ReleaseReplied>) {
        let (sender, receivers) = oneshot::channel();
        let notifications = watch.and_then(|watch| watch.is_confirmed().then(|| watch.count()));
        // The store may have it, and the confirmation be on its way.
        let may_be_subscribed = was_subscribed || watch.is_some();
        let preceding = PrecedingRelease {
            release: ReleaseInLine {
                sent: Moment::now(),
                notifications,
                may_be_subscribed,
                others_here,
                head_waited,
                next: NextRequest::AfterReply,
            },
            reply: Reply::Awaited(receivers),
        };
        (Box::new(preceding), sender)
    }

    /// A release that the next request follows at once.
    pub(crate) fn followed() -> Box<PrecedingRelease> {
        Box::new(PrecedingRelease {
            release: ReleaseInLine {
                sent: Moment::now(),
                notifications: None,
                may_be_subscribed: false,
                others_here: false,
                head_waited: true,
                next: NextRequest::AtOnce,
            },
            reply: Reply::Unavailable,
        })
    }

    /// Returns it as the engine sees it.
    pub(crate) fn release(&self) -> ReleaseInLine {
        self.release
    }

    /// Records the subscription of the head that takes it, the first one if several do: a notification that it has not seen
    /// may be that of this release. The readers of a lock are kept out while a preferred writer has a position, so it does not
    /// let them go first.
    pub(crate) fn set_head(&mut self, watch: Option<&Watch>, has_position: bool) {
        if self.release.head_waited && self.release.notifications.is_none() {
            let watch = watch.filter(|watch| watch.began() <= self.release.sent);
            self.release.may_be_subscribed |= watch.is_some();
            let watch = watch.filter(|watch| watch.is_confirmed());
            self.release.notifications = watch.map(Watch::count_seen);
            self.release.others_here &= !has_position;
        }
    }

    /// When it was sent, if the store has not replied.
    pub(super) fn unanswered_since(&self) -> Option<Moment> {
        (!matches!(self.reply, Reply::Arrived(_))).then_some(self.release.sent)
    }

    /// Waits for the reply of the store, at most `at_most`.
    pub(crate) async fn replied(&mut self, at_most: Duration) -> YieldEvent {
        if let Reply::Awaited(receivers) = &mut self.reply {
            self.reply = match tokio::time::timeout(at_most, receivers).await {
                Ok(Ok(reply)) => Reply::Arrived(reply),
                Ok(Err(_)) | Err(_) => Reply::Unavailable,
            };
        }
        match self.reply {
            Reply::Arrived(reply) => YieldEvent::Released(reply),
            Reply::Awaited(_) | Reply::Unavailable => YieldEvent::NoReply,
        }
    }
}
