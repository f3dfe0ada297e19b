//! Whether the next waiter of this process asks right behind a release, or waits for its reply.
//!
//! While no other process waits, the next waiter need not know how many clients received the notification: release and
//! request are sent together. The reply to the release then arrives too late for this waiter, but not for the next one:
//! as soon as a reply counts another process, waiters wait for it, and let that process go first, until a reply counts
//! none again. So a process that begins to wait elsewhere misses only the releases until the reply to the first of them.
//! What is known is forgotten with the rest of the [history](super::YieldHistory): the next release is waited for.

/// How many releases in a row may be followed at once without a reply to any.
const MAX_UNANSWERED_RELEASES: u32 = 2;

/// When the next waiter of this process asks after a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextRequest {
    /// Right behind the release.
    AtOnce,
    /// When the store has replied to the release, and after the processes that its notification has reached.
    AfterReply,
}

/// What the replies to the releases of one key say.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Following {
    /// Whether the notification of the last release whose reply is known has reached no other process.
    is_alone: bool,
    /// How many releases were sent since the last reply.
    unanswered: u32,
    /// Whether this process is one of the receivers of the last release.
    is_subscribed: bool,
}

impl Following {
    /// Decides on the waiter behind a release that is sent now.
    pub(super) fn next_request(&mut self) -> NextRequest {
        self.is_subscribed = false;
        self.unanswered = self.unanswered.saturating_add(1);
        match self.is_alone && self.unanswered <= MAX_UNANSWERED_RELEASES {
            true => NextRequest::AtOnce,
            false => NextRequest::AfterReply,
        }
    }

    /// Records whether the waiter that asks right behind a release is subscribed.
    pub(super) fn set_subscribed(&mut self, is_subscribed: bool) {
        self.is_subscribed = is_subscribed;
    }

    /// Records how many clients have received the notification of a release, `None` if unknown.
    pub(super) fn record_receivers(&mut self, receivers: Option<u64>) {
        let own = u64::from(self.is_subscribed);
        self.record_alone(receivers.is_some_and(|receivers| receivers <= own));
    }

    /// Records whether a release has certainly reached no other process.
    pub(super) fn record_alone(&mut self, is_alone: bool) {
        (self.is_alone, self.unanswered) = (is_alone, 0);
    }

    /// Whether the last release whose reply is known has reached no other process.
    pub(super) fn is_alone(self) -> bool {
        self.is_alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Event {
        Releases(NextRequest),
        Subscribed(bool),
        Reached(Option<u64>),
        /// After the next waiter has waited for the reply.
        Knows(bool),
    }
    use Event::{Knows, Reached, Releases, Subscribed};
    use NextRequest::{AfterReply, AtOnce};

    #[track_caller]
    fn run(events: &[Event]) {
        let mut following = Following::default();
        for (row, event) in events.iter().enumerate() {
            match event {
                Releases(next) => assert_eq!(following.next_request(), *next, "row {row}"),
                Subscribed(is_subscribed) => following.set_subscribed(*is_subscribed),
                Reached(receivers) => following.record_receivers(*receivers),
                Knows(is_alone) => following.record_alone(*is_alone),
            }
        }
    }

    #[test]
    fn next_waiter_asks_at_once_while_releases_reach_no_other_process() {
        run(&[
            Releases(AfterReply),
            Knows(true),
            Releases(AtOnce),
            Reached(Some(0)),
            Releases(AtOnce),
            Reached(Some(1)),
            Releases(AfterReply),
            Knows(false),
            Releases(AfterReply),
            Knows(true),
            Releases(AtOnce),
        ]);
    }

    #[test]
    fn two_releases_at_most_are_followed_at_once_without_a_reply() {
        run(&[
            Knows(true),
            Releases(AtOnce),
            Releases(AtOnce),
            Releases(AfterReply),
            Releases(AfterReply),
        ]);
    }

    #[test]
    fn own_subscription_is_no_other_process() {
        for (is_subscribed, receivers, next) in [
            (true, Some(1), AtOnce),
            (true, Some(2), AfterReply),
            (false, Some(1), AfterReply),
            (false, Some(0), AtOnce),
            // Its subscription was not there yet.
            (true, Some(0), AtOnce),
            // The reply was lost, or the store does not count.
            (true, None, AfterReply),
            (false, None, AfterReply),
        ] {
            run(&[
                Knows(true),
                Releases(AtOnce),
                Subscribed(is_subscribed),
                Reached(receivers),
                Releases(next),
            ]);
        }
    }

    #[test]
    fn subscription_of_an_earlier_waiter_does_not_count() {
        run(&[
            Knows(true),
            Releases(AtOnce),
            Subscribed(true),
            Reached(Some(1)),
            Releases(AtOnce),
            Reached(Some(1)),
            Releases(AfterReply),
        ]);
    }
}
