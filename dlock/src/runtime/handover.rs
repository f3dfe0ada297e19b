//! The hand-over inside the process: a lock that is released goes to the next who waits for it here,
//! without a word to the store.
//!
//! To the store the process goes on holding the one grant; here each holder has a grant of its own, with
//! its own fencing token out of the block that was reserved when the lock came from the store. The grant is
//! handed on only while it is certainly valid for long enough, and only so many times or for a short
//! while: then it goes back to the store, and where others may be waiting elsewhere this process lets them
//! go first.

use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::broken;
use crate::base::clock::Moment;
use crate::base::name::Name;
use crate::runtime::client::Handle;
use crate::runtime::courtesy;
use crate::runtime::courtesy::After;
use crate::runtime::grants::Grant;
use crate::runtime::hold::Hold;
use crate::runtime::release::ReleaseOutcome;
use crate::runtime::scope::HoldRef;
use crate::runtime::waiters::{Seat, Turn};
use crate::store::{Kind, Watch};

/// How many times a lock is handed on, unless said otherwise: more than fit into a slice.
pub(crate) const DEFAULT_HANDOVERS: u32 = 4096;
/// The time slice of a process, where four round trips of the store are no longer than that.
const SLICE: Duration = Duration::from_millis(5);
/// For so long the end of a subscription may be on its way.
const YOUNG: Duration = Duration::from_millis(1);
/// Tokens that an acquire reserves for hand-overs at least.
const FEW: u32 = 16;

/// What one who waits takes over: a renewed grant of this lease.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) lease: Duration,
    pub(crate) max_hold: Option<Duration>,
    /// How many times it hands the lock on.
    pub(crate) handovers: u32,
}

/// How far a grant may be handed on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chain {
    /// Hand-overs that are left, and until when: there is a reserved token for each, one after the other.
    left: u32,
    /// The time slice, in microseconds; it ends then.
    slice: u32,
    until: Moment,
}

impl Chain {
    /// Of a grant that comes from the store `now`, by a step sent at `sent`.
    pub(crate) fn new(
        kind: Kind,
        handovers: u32,
        (first, last): (u64, u64),
        sent: Instant,
        now: Instant,
    ) -> Chain {
        let tokens = u32::try_from(last.saturating_sub(first)).unwrap_or(u32::MAX);
        let slice = courtesy::some_round_trips(sent, now, SLICE);
        Chain {
            left: if kind.is_handed_on() {
                handovers.min(tokens)
            } else {
                0
            },
            slice: u32::try_from(slice.as_micros()).unwrap_or(u32::MAX),
            until: Moment::of(now + slice),
        }
    }

    /// Whether anything can be handed on at all.
    pub(crate) fn is_open(self, now: Instant) -> bool {
        self.left > 0 && (Moment::of(now) < self.until || broken!(SliceNeverEnds))
    }

    /// Whether it came from the store so short a time ago that who waited for it may still be counted among those
    /// who listen.
    pub(crate) fn is_young(self, now: Instant) -> bool {
        Moment::of(now) + Duration::from_micros(self.slice.into()) < self.until + YOUNG
    }

    /// Nothing is handed on any more: the next token has to come from the store.
    pub(crate) fn close(&mut self) {
        self.left = 0;
    }

    /// The chain after a hand-over to one who hands on at most so many times.
    pub(crate) fn step(self, most: u32) -> Chain {
        Chain {
            left: (self.left - 1).min(most),
            ..self
        }
    }
}

/// How many fencing tokens an acquire reserves, where the lock was handed over `before` times after the
/// last one. What is too many is a waste only while the store counts tokens faster than its clock does.
pub(crate) fn tokens(handovers: u32, before: u32) -> u32 {
    1 + handovers.min(FEW.max(before.saturating_mul(2)))
}

/// Passes on a grant that the last hold has just left: to the next who waits here, or to the store, whose
/// answer is the result.
pub(crate) fn pass_on(handle: &Arc<Handle>, grant: Arc<Grant>, now: Instant) -> Option<ReleaseOutcome> {
    let mut turn = grant.take_turn();
    if hand_over(handle, &grant, &mut turn, now) {
        return None;
    }
    let Some(mut turn) = turn else {
        return Some(handle.release(grant, None, now));
    };
    if grant.kind.waits_in_store() {
        let outcome = handle.release(grant, None, now);
        // Only now, so that the question of who has it next is right behind the release.
        drop(turn);
        return Some(outcome);
    }
    let (told, heard) = oneshot::channel();
    let news = turn.watch.as_ref().map(Watch::count);
    // Who waits here to read is somebody else: where writers follow each other, readers come in between.
    let readers =
        grant.kind == Kind::Write && handle.shared().waiters.any(&Name::new(Kind::Read, &grant.key));
    turn.after = Some(After::new(news, readers, heard));
    let outcome = handle.release(grant, Some(told), now);
    // Only now, so that the next acquire is behind the release.
    drop(turn);
    Some(outcome)
}

/// Hands the grant over, if it may be and somebody takes it.
fn hand_over(handle: &Arc<Handle>, grant: &Arc<Grant>, turn: &mut Option<Box<Turn>>, now: Instant) -> bool {
    let shared = handle.shared();
    if shared.closing.is_cancelled() || !grant.may_be_handed_on(now) {
        return false;
    }
    let fits = |wanted: &Wanted| wanted.lease == grant.lease();
    let next = match turn {
        Some(turn) => turn.heir(fits),
        // Where the store has a queue, who is next in that may be somebody else.
        None if grant.kind.waits_in_store() => None,
        // It sleeps until the store has news, with the turn in its hands.
        None => {
            let front = shared.waiters.front(grant.kind, &grant.key);
            front.filter(|seat| seat.wanted.as_ref().is_some_and(fits))
        }
    };
    let Some(seat) = next else { return false };
    let Some((heir, hold)) = heir(grant, &seat) else {
        return false;
    };
    if !shared.registry.replace(&heir) {
        if let Some(turn) = turn {
            turn.back_in_line(seat);
        }
        return false;
    }
    if let Some(mut turn) = turn.take() {
        turn.handed = turn.handed.saturating_add(1);
        heir.put_turn(turn);
    }
    // One that went away in this moment: dropped, the lock passes on as from any other holder.
    drop(seat.give(Hold::new(hold, handle.clone())));
    true
}

/// The grant as the next holder has it.
fn heir(grant: &Arc<Grant>, seat: &Seat) -> Option<(Arc<Grant>, HoldRef)> {
    let wanted = seat.wanted?;
    let by: &'static Location<'static> = seat.by;
    let (heir, id) = grant.heir(&wanted, by);
    let grant = Arc::new(heir);
    let hold = HoldRef {
        id,
        grant: grant.clone(),
    };
    Some((grant, hold))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A grant is young for a millisecond, however long the time slice is that the store's round trips make.
    #[test]
    fn grant_is_young_for_a_millisecond_at_any_round_trip() {
        let now = Instant::now();
        for round_trip in [0, 1, 25, 200].map(Duration::from_millis) {
            let chain = Chain::new(Kind::Lock, 8, (1, 9), now, now + round_trip);
            let after = |time| chain.is_young(now + round_trip + time);
            assert!(after(Duration::from_micros(900)), "{round_trip:?}");
            assert!(!after(Duration::from_micros(1100)), "{round_trip:?}");
        }
    }
}
