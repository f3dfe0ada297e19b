//! A release, or the undo of an acquire, in flight: what each reply means, and when another copy is sent.
//!
//! Copies are sent until the store replies, at most until the lease has ended. That is safe: a release ends its own
//! grant and nothing else, and grant ids are never used again.

use std::time::Duration;

use crate::base::broken;
use crate::base::moment::Moment;
use crate::engine::grant::safety_margin;
use crate::engine::timing::Backoff;
use crate::store::{Outcome, ReleaseReply, StoreError};

/// One release. Its first copy is sent when it is created.
#[derive(Debug)]
pub(crate) struct Release {
    /// Until then no other client can have the lock, by this process's clock.
    ours_until: Moment,
    /// By then its lease has ended by this process's clock, whatever is known about renewals.
    ends_by: Moment,
    /// How much later it may end at the store, whose clock is another.
    margin: Duration,
    /// Until then the key stays held, for a `min_hold`.
    keep_until: Moment,
    /// When the last copy was sent.
    sent: Moment,
    /// Whether an earlier copy may have been carried out.
    in_doubt: bool,
    backoff: Backoff,
}

/// What follows from a reply.
#[derive(Debug)]
pub(crate) enum ReleaseAction {
    /// It is over.
    Report(ReleaseReport),
    /// Another copy is sent, after the pause if there is one.
    Repeat {
        pause: Option<Duration>,
        failure: StoreError,
    },
}

/// The outcome of a release.
#[derive(Debug)]
pub(crate) enum ReleaseReport {
    Released,
    /// An earlier copy of the release has ended the grant.
    ReleasedBefore,
    /// The store no longer knew the grant, whose lease had not ended.
    Gone,
    /// The lease ended before the store could release the grant.
    Expired,
    /// The lease ended before the reply, so it is unknown whether an earlier copy ended the grant.
    RanOut,
    /// No further copy is sent: the grant ends with its lease.
    Failed(StoreError),
}

impl Release {
    /// Creates the release of a grant that is held until `deadline`. If it is renewed, renewals may have reached the
    /// store, or may still do so, whatever their replies. The key stays held for `keep_for`.
    pub(crate) fn of_grant(
        now: Moment,
        keep_for: Duration,
        deadline: Moment,
        lease: Duration,
        is_renewed: bool,
    ) -> Release {
        Release {
            ours_until: deadline,
            ends_by: match is_renewed {
                true => deadline.max(now + lease),
                false => deadline,
            },
            margin: safety_margin(lease),
            keep_until: now + keep_for,
            sent: now,
            in_doubt: false,
            backoff: Backoff::default(),
        }
    }

    /// Creates the undo of an acquire with an unknown outcome and this requested lease.
    pub(crate) fn of_acquire(now: Moment, keep_for: Duration, lease: Duration) -> Release {
        Release::of_grant(now, keep_for, now + lease, lease, false)
    }

    /// When the last copy was sent.
    pub(crate) fn sent(&self) -> Moment {
        self.sent
    }

    /// Returns until when the store may have the grant if no copy arrives: its lease began there when the acquire or the renewal
    /// arrived, at most the time for one request later than by this process's clock.
    pub(crate) fn store_has_it_until(&self, now: Moment, timeout: Duration) -> Moment {
        self.ends_by.max(now) + timeout + self.margin
    }

    /// Records that another copy is sent: returns how long it must keep the key held.
    pub(crate) fn sends(&mut self, now: Moment) -> Duration {
        self.sent = now;
        self.keep_until.since(now)
    }

    /// Handles the reply to the last copy.
    pub(crate) fn handle(&mut self, reply: Result<ReleaseReply, StoreError>, now: Moment) -> ReleaseAction {
        let mut failure = match reply {
            Ok(ReleaseReply::Released { .. }) => return ReleaseAction::Report(ReleaseReport::Released),
            Ok(ReleaseReply::NotHeld { repeated }) => {
                return ReleaseAction::Report(
                    match (self.in_doubt || repeated) && !broken!(ReleaseInDoubtIsLoss) {
                        false if now >= self.ours_until => ReleaseReport::Expired,
                        false => ReleaseReport::Gone,
                        // Ours until now by our clock: only an earlier copy can have ended it.
                        true if now < self.ours_until || broken!(LateReleaseIsDone) => {
                            ReleaseReport::ReleasedBefore
                        }
                        true => ReleaseReport::RanOut,
                    },
                );
            }
            Err(failure) => failure,
        };
        self.in_doubt |= failure.outcome == Outcome::Unknown;
        if self.in_doubt {
            // An earlier copy may have done it, whatever is known about this one.
            failure.outcome = Outcome::Unknown;
        }
        if !failure.is_outlasted() || now >= self.ends_by || broken!(ReleaseNotRepeated) {
            return ReleaseAction::Report(ReleaseReport::Failed(failure));
        }
        ReleaseAction::Repeat {
            pause: self.backoff.next(self.sent, &failure, now),
            failure,
        }
    }
}

/// Returns how many clients received the notification of a release by this reply; `None` if the store does not know.
pub(crate) fn listeners(reply: &Result<ReleaseReply, StoreError>) -> Option<u64> {
    match reply {
        Ok(ReleaseReply::Released { receivers }) => *receivers,
        // Another client may have the lock, which the next acquire shows.
        _ => Some(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Reason;

    const START: Moment = Moment::from_nanos(1_000_000_000_000);
    const LEASE: Duration = Duration::from_secs(30);

    fn s(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn released() -> Result<ReleaseReply, StoreError> {
        Ok(ReleaseReply::Released { receivers: Some(2) })
    }

    fn not_held(repeated: bool) -> Result<ReleaseReply, StoreError> {
        Ok(ReleaseReply::NotHeld { repeated })
    }

    fn not_done(reason: Reason) -> Result<ReleaseReply, StoreError> {
        Err(StoreError::not_done(reason, "connection refused"))
    }

    fn unknown() -> Result<ReleaseReply, StoreError> {
        Err(StoreError::unknown("connection lost"))
    }

    /// What follows, in short.
    fn said(action: &ReleaseAction) -> &'static str {
        match action {
            ReleaseAction::Repeat { failure, .. } if failure.outcome == Outcome::Unknown => "repeat in doubt",
            ReleaseAction::Repeat { .. } => "repeat",
            ReleaseAction::Report(ReleaseReport::Released) => "released",
            ReleaseAction::Report(ReleaseReport::ReleasedBefore) => "released before",
            ReleaseAction::Report(ReleaseReport::Gone) => "gone",
            ReleaseAction::Report(ReleaseReport::Expired) => "expired",
            ReleaseAction::Report(ReleaseReport::RanOut) => "ran out",
            ReleaseAction::Report(ReleaseReport::Failed(failure)) => match failure.outcome {
                Outcome::Unknown => "failed in doubt",
                Outcome::NotDone => "failed",
            },
        }
    }

    #[test]
    fn release_is_repeated_until_a_reply_or_the_end_of_the_lease() {
        // A grant of 30 s that is released after 10 s; replies, with the seconds after which they come, and what follows.
        for replies in [
            vec![(10, released(), "released")],
            vec![(10, not_held(false), "gone")],
            vec![(10, not_held(true), "released before")],
            vec![(30, not_held(true), "ran out")],
            vec![
                (29, not_done(Reason::Unreachable), "repeat"),
                (30, not_held(false), "expired"),
            ],
            vec![(10, not_done(Reason::Refused), "failed")],
            vec![
                (10, not_done(Reason::RefusedForNow), "repeat"),
                (11, not_held(false), "gone"),
            ],
            vec![(10, unknown(), "repeat in doubt"), (11, released(), "released")],
            vec![
                (10, unknown(), "repeat in doubt"),
                (29, not_held(false), "released before"),
            ],
            vec![
                (10, unknown(), "repeat in doubt"),
                (30, not_held(false), "ran out"),
            ],
            vec![
                (10, unknown(), "repeat in doubt"),
                (11, not_done(Reason::Unreachable), "repeat in doubt"),
                (12, not_done(Reason::Refused), "failed in doubt"),
            ],
            // A renewal that was sent just before may have prolonged the lease.
            vec![
                (39, not_done(Reason::Unreachable), "repeat"),
                (40, not_done(Reason::Unreachable), "failed"),
            ],
        ] {
            let row = format!("{replies:?}");
            let mut release = Release::of_grant(START + s(10), Duration::ZERO, START + LEASE, LEASE, true);
            for (after, reply, follows) in replies {
                let action = release.handle(reply, START + s(after));
                assert_eq!(said(&action), follows, "{after} s: {row}");
                release.sends(START + s(after));
            }
        }
    }

    #[test]
    fn release_that_nothing_renews_is_repeated_until_its_own_deadline() {
        let fixed = Release::of_grant(START, Duration::ZERO, START + s(5), s(5), false);
        let undo = Release::of_acquire(START, Duration::ZERO, s(5));
        for mut release in [fixed, undo] {
            assert_eq!(said(&release.handle(unknown(), START + s(4))), "repeat in doubt");
            assert_eq!(said(&release.handle(unknown(), START + s(5))), "failed in doubt");
        }
    }

    #[test]
    fn copies_pause_only_where_the_store_fails_at_once() {
        let mut release = Release::of_acquire(START, Duration::ZERO, LEASE);
        let mut now = START;
        // the time until the reply, the pause after it
        for (took, pause) in [(0, Some(50)), (2000, None), (10, Some(100))] {
            now = now + Duration::from_millis(took);
            let ReleaseAction::Repeat { pause: next, .. } = release.handle(unknown(), now) else {
                panic!("it is repeated");
            };
            assert_eq!(next, pause.map(Duration::from_millis), "{took}");
            now = now + next.unwrap_or_default();
            release.sends(now);
            assert_eq!(release.sent(), now);
        }
    }

    #[test]
    fn each_copy_keeps_the_key_for_the_rest_of_min_hold() {
        let mut release = Release::of_grant(START, s(5), START + LEASE, LEASE, false);
        for (after, keep_for) in [(s(1), s(4)), (s(5), s(0)), (s(9), s(0))] {
            assert_eq!(release.sends(START + after), keep_for);
        }
    }

    #[test]
    fn only_a_release_is_notified() {
        let unsaid = Ok(ReleaseReply::Released { receivers: None });
        for (reply, heard) in [
            (released(), Some(2)),
            (unsaid, None),
            (not_held(true), Some(0)),
            (unknown(), Some(0)),
        ] {
            assert_eq!(listeners(&reply), heard, "{reply:?}");
        }
    }
}
