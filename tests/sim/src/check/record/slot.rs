//! Work that is done once, and once in each slot of time: not again while its result is kept, and no slot after a later
//! one.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dlock::record::{ClaimReply, ClaimRequest, SlotOutcome, SlotReply, SlotRequest};
use tokio::time::Instant;

use super::{Claim, Expected, Ledger, RECORDS, State, Work};
use crate::plan::Millis;
use crate::store::BEGINS;
use crate::store::record::Reply;
use crate::words;
use crate::world::World;

/// The answer to a claim for a slot, as it has to be.
#[derive(Debug)]
enum Due {
    AsAnyClaim(Expected),
    Missed,
    ClockWentBack,
    TooFarAhead,
}

impl Due {
    /// What a user would have suffered by another answer.
    fn suffered(&self, outcome: &SlotOutcome) -> &'static str {
        match (self, outcome) {
            (Due::Missed, SlotOutcome::Claim(ClaimReply::Claimed { .. })) => {
                "a slot is done twice, or after a later one"
            }
            (Due::TooFarAhead | Due::ClockWentBack, SlotOutcome::Claim(ClaimReply::Claimed { .. })) => {
                "a slot is done that is not due"
            }
            _ => "nobody does the slot",
        }
    }
}

/// Counted from the beginning of the world.
fn moment(slot: SystemTime) -> String {
    let begin = UNIX_EPOCH + BEGINS;
    match slot.duration_since(begin) {
        Ok(since) => words::time(since),
        Err(before) => format!("-{}", words::time(before.duration())),
    }
}

/// The slot that a claim is for, and the latest one that makes sense, where the store's clock shows `now`.
fn judged(asked: SlotRequest, now: SystemTime) -> (SystemTime, SystemTime) {
    let nearest = asked.period().map_or(now, |period| {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let whole = (since + period / 2).as_micros() / period.as_micros();
        UNIX_EPOCH + Duration::from_micros(u64::try_from(whole * period.as_micros()).unwrap_or(u64::MAX))
    });
    (asked.time().unwrap_or(nearest), nearest + asked.ahead())
}

impl Ledger {
    /// The slot that the answer has to name, and the answer.
    fn due(
        &self,
        request: &ClaimRequest,
        asked: SlotRequest,
        claim: Claim,
        (shown, now): (SystemTime, Instant),
    ) -> (SystemTime, Due) {
        let (slot, latest) = judged(asked, shown);
        let entry = self.get(&request.key, now);
        if let Some(entry) = entry {
            let Some(last) = entry.work.slot() else {
                return (slot, Due::AsAnyClaim(Expected::Mismatch));
            };
            if entry.claim == claim {
                let due = match entry.state {
                    State::Claimed { .. } => Due::AsAnyClaim(Expected::Claimed {
                        attempt: entry.attempt,
                        fence: Some(entry.fence),
                    }),
                    _ => Due::Missed,
                };
                return (last, due);
            }
            if slot <= latest && last > slot {
                let went_back = last > latest;
                return (
                    slot,
                    if went_back {
                        Due::ClockWentBack
                    } else {
                        Due::Missed
                    },
                );
            }
            if slot <= latest && last < slot {
                let is_late = shown.duration_since(slot).unwrap_or_default() > request.retention;
                let due = match entry.state {
                    _ if is_late => Due::Missed,
                    State::Claimed { until } if until > now => Due::AsAnyClaim(Expected::InProgress),
                    _ => Due::AsAnyClaim(Expected::Claimed {
                        attempt: 1,
                        fence: None,
                    }),
                };
                return (slot, due);
            }
        }
        if slot > latest {
            return (slot, Due::TooFarAhead);
        }
        if shown.duration_since(slot).unwrap_or_default() > request.retention {
            return (slot, Due::Missed);
        }
        let expected = self.expected(request, Work::InSlot(slot), claim, now);
        (slot, Due::AsAnyClaim(expected))
    }
}

impl World {
    /// A store has answered a claim for a slot.
    pub(super) fn slot_step(
        &mut self,
        request: &ClaimRequest,
        asked: SlotRequest,
        reply: &SlotReply,
        now: Instant,
    ) {
        let records = &mut self.checks.records;
        let claim = records.name_claim(&request.token);
        let last = records
            .ledger
            .get(&request.key, now)
            .and_then(|entry| entry.work.slot());
        let (slot, due) = records.ledger.due(request, asked, claim, (reply.now, now));
        let is_as = match (&due, &reply.outcome) {
            (Due::AsAnyClaim(expected), SlotOutcome::Claim(told)) => {
                if !self.is_due(request, expected, told) {
                    return;
                }
                true
            }
            (Due::Missed, SlotOutcome::Missed)
            | (Due::ClockWentBack, SlotOutcome::ClockWentBack)
            | (Due::TooFarAhead, SlotOutcome::TooFarAhead) => true,
            _ => false,
        };
        let name = || self.checks.records.name_of(&request.key);
        if !is_as {
            let story = format!(
                "the store answers a claim for a slot of record {} by \"{}\" where {due:?} is due: {}",
                name(),
                Reply::Slot(reply.clone()).told(),
                due.suffered(&reply.outcome)
            );
            return self.violated(RECORDS, story);
        }
        if (reply.slot, reply.last) != (slot, last) {
            let after = |slot: SystemTime, last: Option<SystemTime>| match last {
                Some(last) => format!("{} after {}", moment(slot), moment(last)),
                None => format!("{} as the first", moment(slot)),
            };
            let story = format!(
                "the store answers a claim for a slot of record {} with that of {}, where that of {} is due: a slot may be done \
                 after a later one",
                name(),
                after(reply.slot, reply.last),
                after(slot, last)
            );
            return self.violated(RECORDS, story);
        }
        match (&due, &reply.outcome) {
            (Due::AsAnyClaim(expected), SlotOutcome::Claim(told)) => {
                let mut kept = request.clone();
                // From the beginning of the slot on, which may be still to come.
                let ahead = slot.duration_since(reply.now).unwrap_or_default();
                kept.retention = kept.retention.saturating_add(ahead);
                self.claim_granted(&kept, Work::InSlot(slot), expected, told, now);
            }
            (Due::Missed, _) => self.counts.sometimes("a slot that was missed"),
            _ => {}
        }
    }

    /// Work that is done once has begun, under a claim that stands: it was not done before.
    pub(crate) fn once_begins(&mut self, effect: u64, slot: Option<SystemTime>) {
        let records = &self.checks.records;
        let Some(effect) = records.effects.get(&effect) else {
            return;
        };
        if !self.checks.assumes.exclusion || !self.is_relied_on(effect.claim) {
            return;
        }
        let kept = records.completions.get(&effect.key).into_iter().flatten();
        let mut kept = kept.filter(|it| records.forgot.is_none_or(|forgot| it.at > forgot));
        let before = kept.find(|it| match (slot, it.slot) {
            (Some(slot), Some(done)) => slot <= done,
            _ => it.until > self.now,
        });
        let Some(before) = before else { return };
        let (name, at) = (records.name_of(&effect.key), before.at);
        let (process, user, claim) = (effect.process, effect.user, effect.claim);
        let story = match slot {
            Some(_) if before.slot == slot => format!(
                "p{process}/u{user} does a slot of record {name} under claim {claim}, which was done at {at} ms: it is done twice"
            ),
            Some(_) => format!(
                "p{process}/u{user} does a slot of record {name} under claim {claim}, after a later one was done at {at} ms"
            ),
            None => format!(
                "p{process}/u{user} does the work of record {name} under claim {claim}, whose result is kept since {at} ms: \
                 it is done twice"
            ),
        };
        self.violated(RECORDS, story);
    }

    /// The code of work that is done once runs on: its claim has not run out by the clock of its process, or the library
    /// would have dropped it.
    pub(crate) fn once_goes_on(&mut self, effect: u64) {
        let records = &self.checks.records;
        let Some(effect) = records.effects.get(&effect) else {
            return;
        };
        let Some(known) = records.known.get(&effect.claim) else {
            return;
        };
        let now = self.clocks[effect.process].millis(self.now);
        if now >= known.until {
            let story = format!(
                "p{}/u{} goes on with the work of record {} under claim {}, which has run out {} ms ago: another one may do it \
                 at the same time",
                effect.process,
                effect.user,
                records.name_of(&effect.key),
                effect.claim,
                now - known.until
            );
            self.violated(RECORDS, story);
        }
    }

    /// The library has dropped work, since its claim was lost.
    pub(crate) fn once_lost(&mut self, (process, user): (usize, usize), record: &str, since: Millis) {
        if self.is_settled(since) {
            let story = format!(
                "p{process}/u{user} asked for the work of {record} in a calm, at {since} ms, and its claim was lost: the work was \
                 dropped for no reason"
            );
            self.violated(RECORDS, story);
        }
    }
}
