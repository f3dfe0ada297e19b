//! Answers as they come, and how they are compared with those that the rules give.

use std::time::Duration;

use dlock::Error;
use tokio::time::Instant;

use super::{Done, SLACK, World, wrong};
use crate::property::model::{Answer, Span};

/// An answer as it came.
#[derive(Debug, PartialEq)]
pub(super) enum Seen {
    Busy {
        key: Option<usize>,
        remaining: Option<Duration>,
    },
    Taken {
        key: Option<usize>,
    },
    Other(Answer),
    Strange(String),
}

impl World<'_> {
    pub(super) fn seen(&self, error: Error) -> Seen {
        match error {
            Error::NotAcquired {
                key,
                remaining,
                waited: Duration::ZERO,
                ..
            } => Seen::Busy {
                key: self.key(key.as_str()),
                remaining,
            },
            Error::KeyTaken { key, .. } => Seen::Taken {
                key: self.key(key.as_str()),
            },
            Error::WouldDeadlock { .. } => Seen::Other(Answer::Deadlock),
            Error::Lost { loss, .. } => Seen::Other(Answer::Lost(loss)),
            Error::NotReleased { .. } => Seen::Other(Answer::LostSeveral),
            Error::InvalidOption { .. } => Seen::Other(Answer::Invalid),
            Error::TooFewPermits { total, .. } => Seen::Other(Answer::TooFew(total)),
            Error::NoPermitsSet { .. } => Seen::Other(Answer::NoPermits),
            Error::LatchOpen { .. } => Seen::Other(Answer::Open),
            other => Seen::Strange(other.to_string()),
        }
    }

    /// Compares an answer that is no guard with what it should be; `began` is when it was asked for.
    pub(super) fn compare(&self, expected: Answer, seen: Seen, began: Instant) -> Done {
        self.in_time()?;
        let now = Instant::now();
        let agrees = match (&expected, &seen) {
            (Answer::Busy { key, until }, Seen::Busy { key: of, remaining }) => {
                Some(*key) == *of && is_left(*until, *remaining, began, now)
            }
            (Answer::Taken { key }, Seen::Taken { key: of }) => Some(*key) == *of,
            (Answer::LostOne, Seen::Other(Answer::Lost(_))) => true,
            (expected, Seen::Other(seen)) => expected == seen,
            _ => false,
        };
        if agrees { Ok(()) } else { wrong(expected, seen) }
    }

    pub(super) fn answered<T>(
        &self,
        expected: Answer,
        outcome: Result<T, Error>,
        answer: impl FnOnce(T) -> Answer,
        began: Instant,
    ) -> Done {
        let seen = match outcome {
            Ok(value) => Seen::Other(answer(value)),
            Err(error) => self.seen(error),
        };
        self.compare(expected, seen, began)
    }
}

/// Whether what is left is right, as far as the clocks can tell.
pub(super) fn is_left(
    until: Option<Span>,
    remaining: Option<Duration>,
    began: Instant,
    now: Instant,
) -> bool {
    match (until, remaining) {
        (None, None) => true,
        (Some(until), Some(left)) => {
            let least = until.min.saturating_duration_since(now);
            let most = until.max.saturating_duration_since(began);
            left + SLACK >= least && left <= most + SLACK
        }
        _ => false,
    }
}
