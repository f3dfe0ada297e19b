//! Whether the next waiter of this process asks right behind a release, or waits for its reply.
//!
//! While no other process waits, the next waiter need not know how many clients received the notification: release and
//! request are sent together. The reply to the release then arrives too late for this waiter, but not for the next one:
//! as soon as a reply counts another process, waiters wait for it, and let that process go first, until a reply counts
//! none again. So a process that begins to wait elsewhere misses at most [`MOST_UNKNOWN`] releases.

/// How many releases in a row may be followed at once before the reply to one of them is known.
const MOST_UNKNOWN: u32 = 2;

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
    /// How many releases were sent since.
    unknown: u32,
    /// Whether this process is one of the receivers.
    listens: bool,
}

impl Following {
    /// Decides on the waiter behind a release that is sent now.
    pub(super) fn releases(&mut self) -> NextRequest {
        self.unknown = self.unknown.saturating_add(1);
        match self.is_alone && self.unknown <= MOST_UNKNOWN {
            true => NextRequest::AtOnce,
            false => NextRequest::AfterReply,
        }
    }

    /// Records whether the waiter that asks right behind a release is subscribed.
    pub(super) fn listens(&mut self, listens: bool) {
        self.listens = listens;
    }

    /// Records how many clients have received the notification of a release, `None` if unknown.
    pub(super) fn reached(&mut self, receivers: Option<u64>) {
        self.knows(receivers.is_some_and(|receivers| receivers <= u64::from(self.listens)));
    }

    /// Records whether a release has certainly reached no other process.
    pub(super) fn knows(&mut self, is_alone: bool) {
        (self.is_alone, self.unknown) = (is_alone, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Event {
        Releases(NextRequest),
        Listens(bool),
        Reached(Option<u64>),
        /// After the next waiter has waited for the reply.
        Knows(bool),
    }
    use Event::{Knows, Listens, Reached, Releases};
    use NextRequest::{AfterReply, AtOnce};

    #[track_caller]
    fn run(events: &[Event]) {
        let mut following = Following::default();
        for (row, event) in events.iter().enumerate() {
            match event {
                Releases(next) => assert_eq!(following.releases(), *next, "row {row}"),
                Listens(listens) => following.listens(*listens),
                Reached(receivers) => following.reached(*receivers),
                Knows(is_alone) => following.knows(*is_alone),
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
    fn process_that_begins_to_wait_elsewhere_misses_two_releases_at_most() {
        // None of the replies is known.
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
        for (listens, receivers, next) in [
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
                Listens(listens),
                Reached(receivers),
                Releases(next),
            ]);
        }
    }
}
