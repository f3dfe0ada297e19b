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

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::name::Name;
use crate::engine::handoff::HandoffTerms;
use crate::runtime::client::Handle;
use crate::runtime::fairness::After;
use crate::runtime::grants::Grant;
use crate::runtime::hold::Hold;
use crate::runtime::release::ReleaseOutcome;
use crate::runtime::scope::HoldRef;
use crate::runtime::waiters::{Seat, Turn};
use crate::store::{Kind, Watch};

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
    let fits = |wanted: &HandoffTerms| wanted.lease == grant.lease();
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
    if !shared.watchdog.replace(&heir) {
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
