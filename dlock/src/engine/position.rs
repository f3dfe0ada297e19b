//! The queue position of one waiter at the store, as far as its replies tell: whether it must be given up.

use std::time::Duration;

use crate::base::broken;
use crate::base::moment::Moment;

/// What is known about one position. A store takes it with a request that finds the lock busy, and forgets it when the
/// lock is granted.
#[derive(Debug, Default)]
pub(crate) struct PositionState {
    /// When the store was last asked; `None` while it certainly has no such position.
    asked: Option<Moment>,
    /// Whether the store may have had the position before that request.
    before: bool,
}

/// What a reply means for the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PositionReply {
    /// The lock is granted, and the position is over.
    Granted,
    /// The store has the position.
    Kept,
    /// The request changed nothing: an earlier position still exists.
    Unchanged,
    /// The request may have been carried out.
    Unknown,
}

impl PositionState {
    /// Records that a request is sent: until its reply the position may exist. Returns how long ago the last one was
    /// sent; `None` for the first.
    pub(crate) fn asks(&mut self, now: Moment) -> Option<Duration> {
        let last = self.asked.replace(now);
        self.before = last.is_some();
        last.map(|last| now.since(last))
    }

    pub(crate) fn replied(&mut self, reply: PositionReply) {
        match reply {
            PositionReply::Granted => self.asked = None,
            PositionReply::Unchanged if !self.before || broken!(PositionForgottenWhenRefused) => {
                self.asked = None
            }
            PositionReply::Unchanged | PositionReply::Kept | PositionReply::Unknown => {}
        }
    }

    /// Whether the leaving waiter must give it up.
    pub(crate) fn may_exist(&self) -> bool {
        self.asked.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::PositionReply::{Granted, Kept, Unchanged, Unknown};
    use super::*;

    #[test]
    fn position_is_given_up_unless_the_store_certainly_has_none() {
        for (replies, may_exist) in [
            (vec![], false),
            (vec![None], true),
            (vec![Some(Granted)], false),
            (vec![Some(Kept)], true),
            (vec![Some(Unchanged)], false),
            (vec![Some(Unknown)], true),
            (vec![Some(Kept), None], true),
            (vec![Some(Kept), Some(Unchanged)], true),
            (vec![Some(Unknown), Some(Unchanged)], true),
            (vec![Some(Kept), Some(Granted)], false),
            (vec![Some(Granted), Some(Unchanged)], false),
        ] {
            let mut position = PositionState::default();
            for reply in &replies {
                position.asks(Moment::from_nanos(5));
                reply.iter().for_each(|reply| position.replied(*reply));
            }
            assert_eq!(position.may_exist(), may_exist, "{replies:?}");
        }
    }

    #[test]
    fn request_says_when_the_one_before_was_sent() {
        let mut position = PositionState::default();
        let at = |s: u64| Moment::from_nanos(s * 1_000_000_000);
        for (now, reply, last) in [
            (1, Kept, None),
            (3, Kept, Some(2)),
            (8, Granted, Some(5)),
            (9, Kept, None),
        ] {
            assert_eq!(position.asks(at(now)), last.map(Duration::from_secs), "{now}");
            position.replied(reply);
        }
    }
}
