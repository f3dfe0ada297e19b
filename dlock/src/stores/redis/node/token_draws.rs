//! Fencing tokens that acquires by commands draw with `INCRBY`.
//!
//! A token of the script is the server's time in µs, so that tokens grow although the last of them is lost. `INCRBY` only
//! counts on, so it follows the script: on each connection the script comes first, and again after [`FRESH`]. A last token
//! that is lost in between comes to light, because the next one is too small. A drawn token is behind the clock by up to
//! [`FRESH`] and the time that its call is under way, and so would be those of a former master that still grants; so none are
//! drawn where sentinels name the master.

use std::time::Duration;

use tokio::time::Instant;

use super::Step;
use super::late_copies::micros;
use crate::base::clock;
use crate::stores::redis::script::{Answer, Reply};

/// How long tokens are drawn after the script has set the last one to the server's clock: so they stay close to it.
const FRESH: Duration = Duration::from_millis(20);
/// How many tokens more than one for each acquire are drawn at most: what other clients have drawn is not known, so that the
/// last token may come to be ahead of the server's clock by these, in µs.
const MOST_SPARE: u64 = 32;
/// From 2^53 on the script does not count any more.
const NO_TOKEN: u64 = 1 << 53;

#[derive(Debug, Clone, Copy)]
struct Set {
    /// The server's clock (µs) then.
    server_time: u64,
    sent_at: Instant,
    answered_at: Instant,
}

/// The draws on one connection.
#[derive(Debug, Default)]
pub(super) struct TokenDraws {
    /// Whether the server refuses them on this connection.
    forbidden: bool,
    /// Whether a reply to them made no sense, on this connection or an earlier one.
    distrusted: bool,
    /// The greatest token that is known to be taken.
    last: u64,
    /// The last answer of the script that set it to the server's clock.
    set: Option<Set>,
}

impl TokenDraws {
    /// Begins anew, on another connection.
    pub(super) fn begin(&mut self) {
        *self = TokenDraws {
            distrusted: self.distrusted,
            ..TokenDraws::default()
        };
    }

    /// Whether tokens may be drawn now; not where the last one is ahead of the server's clock (µs), which shows at most this.
    pub(super) fn are_possible(&self, now: Instant, server_time: u64) -> bool {
        let is_fresh = |set: Set| now.saturating_duration_since(set.sent_at) < FRESH;
        let is_allowed = !self.forbidden && !self.distrusted;
        is_allowed && self.set.is_some_and(is_fresh) && self.last <= server_time
    }

    /// Chooses how many tokens to draw for these acquires: at least one for each, and a few more as far as that leaves the last
    /// one that is known behind the server's clock. So many are being drawn already.
    pub(super) fn count_for(&self, acquires: &[Step], now: Instant, in_flight: u64) -> u64 {
        let wanted = acquires.iter().filter_map(|step| step.call.plain_acquire());
        let wanted: u64 = wanted.map(|acquire| u64::from(acquire.tokens)).sum();
        let fewest = acquires.len() as u64;
        // Other clients draw, too.
        let spare = self.server_time(now).saturating_sub(self.last + in_flight) / 4;
        let spare = spare.min(MOST_SPARE);
        wanted.min(fewest + spare).max(fewest)
    }

    /// Takes note of the tokens that a call of the script, sent at this moment, gave to acquires.
    pub(super) fn observe(&mut self, steps: &[Step], reply: &Reply, sent_at: Instant) {
        for (step, answer) in steps.iter().zip(&reply.answers) {
            if let Ok(Answer::Acquired { last, .. }) = answer
                && step.call.plain_acquire().is_some()
            {
                self.last = self.last.max(*last);
                self.set = Some(Set {
                    // The token is ahead where the clock was set back.
                    server_time: reply.server_time.map_or(*last, |told| told.min(*last)),
                    sent_at,
                    answered_at: clock::now(),
                });
            }
        }
    }

    /// The least time (µs) that the server's clock may show.
    fn server_time(&self, now: Instant) -> u64 {
        self.set.map_or(0, |set| {
            let since = now.saturating_duration_since(set.answered_at);
            set.server_time.saturating_add(micros(since))
        })
    }

    /// Draws no more tokens on this connection.
    pub(super) fn forbid(&mut self) {
        self.forbidden = true;
    }

    /// Draws no more tokens, not on later connections either.
    pub(super) fn distrust(&mut self) {
        self.distrusted = true;
    }

    /// Returns the first of so many drawn tokens; `None` if they are of no use: the last token before them was lost, or the script
    /// could not count on.
    pub(super) fn accept(&mut self, count: u64, last: u64) -> Option<u64> {
        let before = last.checked_sub(count).filter(|before| *before >= self.last);
        match before.filter(|_| last < NO_TOKEN) {
            Some(before) => {
                self.last = last;
                Some(before + 1)
            }
            None => {
                self.set = None;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn possible(draws: &TokenDraws) -> bool {
        draws.are_possible(clock::now(), 1000)
    }

    fn seen(draws: &mut TokenDraws, last: u64) {
        let now = clock::now();
        let set = Set {
            server_time: last,
            sent_at: now,
            answered_at: now,
        };
        (draws.last, draws.set) = (last, Some(set));
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_are_drawn_for_a_while_after_the_script_set_the_last() {
        let mut draws = TokenDraws::default();
        assert!(!possible(&draws));
        seen(&mut draws, 100);
        assert!(possible(&draws));
        tokio::time::advance(FRESH).await;
        assert!(!possible(&draws));
        seen(&mut draws, 200);
        assert!(possible(&draws));
        seen(&mut draws, 1001);
        assert!(!possible(&draws), "it is ahead of the clock");
        draws.begin();
        draws.forbid();
        seen(&mut draws, 300);
        assert!(!possible(&draws));
        draws.begin();
        seen(&mut draws, 400);
        assert!(possible(&draws));
        draws.distrust();
        draws.begin();
        seen(&mut draws, 100);
        assert!(!possible(&draws), "on no later connection either");
    }

    #[tokio::test]
    async fn last_token_that_was_lost_comes_to_light() {
        let mut draws = TokenDraws::default();
        seen(&mut draws, 100);
        assert_eq!(draws.accept(3, 103), Some(101));
        // Another client has drawn 2.
        assert_eq!(draws.accept(1, 106), Some(106));
        for lost in [106, 7, 1, 0, NO_TOKEN] {
            assert_eq!(draws.accept(1, lost), None);
            assert!(!possible(&draws), "the script is needed");
            seen(&mut draws, 106);
        }
    }
}
