//! A call waits as its options say: not behind more waiters than it accepts, and not for a shorter time while the
//! store fails.

use dlock::Error;
use dlock::store::Kind;

use super::{WAITING, Waiter};
use crate::plan::{Millis, Runtimes};
use crate::store::FULL;
use crate::world::World;

/// So many of those that wait may not be in the queue at this moment: one has the lock and is not polled yet, the head does
/// not count before it knows that it waits.
const ON_THE_WAY: usize = 3;
/// A call is in the queue by then.
const IN_LINE: Millis = 500;

impl Waiter {
    /// Whether it is one place in the queue of its process, once it is polled.
    fn is_in_line(&self) -> bool {
        let plain = matches!(self.kind, Kind::Mutex | Kind::Fenced | Kind::Write);
        let alone = self.calls == 1 && !self.once && !self.nested && !self.is_set();
        plain && alone && self.attentive && !self.is_leader && !self.is_closed
    }
}

impl World {
    /// No call waits behind more waiters than it accepts: waiters that arrived before the call and are still present
    /// were present when it arrived.
    pub(crate) fn finds_too_many_waiters(&mut self) {
        let all = || self.checks.waiters.values().filter(|waiter| waiter.is_in_line());
        let ahead_of = |waiter: &Waiter| {
            let ahead = all().filter(|other| {
                (other.process, other.kind) == (waiter.process, waiter.kind)
                    && other.key == waiter.key
                    && other.since + IN_LINE < waiter.since
            });
            ahead.count()
        };
        let found = all().find_map(|waiter| {
            let most = waiter.max_waiters?;
            let ahead = ahead_of(waiter);
            let came = waiter.since + IN_LINE < self.now && self.clocks[waiter.process].stopped.is_none();
            (came && ahead >= most + ON_THE_WAY).then_some((waiter, most, ahead))
        });
        if let Some((waiter, most, ahead)) = found {
            let Waiter {
                process, user, key, ..
            } = waiter;
            let story = format!(
                "p{process}/u{user} wants {key} if no more than {most} wait with it, and waits behind {ahead}: it should \
                 have been told so"
            );
            self.violated(WAITING, story);
        }
    }

    /// A call ended with an error while its wait was not over, by the one clock of the world.
    pub(crate) fn gave_up(&mut self, waiter: &Waiter, error: &Error) {
        let fails = match error {
            Error::Unreachable { .. } => true,
            // It says what the last request met, which a refusal made the last.
            Error::OutcomeUnknown { message, .. } => message != FULL,
            _ => false,
        };
        // By a clock that may run fast.
        let patience = self.plan.settings.retry_for;
        let least = (patience - patience / 100).saturating_sub(5);
        let waited = self.now - waiter.since;
        // A quorum has failures of several sorts at once, of which some are final.
        if !fails
            || !self.checks.single_store
            || self.plan.runtimes == Runtimes::Each
            || waited >= least
            || waiter.once
            || waiter.is_set()
            || waiter.is_leader
            || waiter.is_closed
            || self.checks.closed.contains(&waiter.process)
            || waiter
                .until
                .is_some_and(|until| until <= self.now + 5 + waited / 100)
        {
            return;
        }
        let Waiter {
            process, user, key, ..
        } = waiter;
        let story = format!(
            "p{process}/u{user} is to ask for {key} for {patience} ms while the store fails, and gives up after {waited} ms: \
             {error}"
        );
        self.violated(WAITING, story);
    }
}
