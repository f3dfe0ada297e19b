//! The handoff inside the process: a released lock goes to its next waiter in this process, without a request to the
//! store.
//!
//! To the store the process continues to hold one grant; here each holder has a separate grant, with its own fencing
//! token out of the block that was reserved when the lock came from the store. The grant is handed off only while it is
//! certainly valid for long enough, and only a limited number of times or for a short while: then it goes back to the
//! store, and if others may be waiting elsewhere this process lets them go first.

use std::sync::Arc;

use crate::base::lock_id::LockId;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::engine::fairness::NextRequest;
use crate::engine::handoff::HandoffTerms;
use crate::engine::renewal::Renewable;
use crate::runtime::client::{Handle, Shared};
use crate::runtime::emit::Event;
use crate::runtime::emit::meter::Ended;
use crate::runtime::grants::{Grant, Left};
use crate::runtime::hold::Hold;
use crate::runtime::release::{Releasing, Told};
use crate::runtime::scope::HoldRef;
use crate::runtime::waiters::{PrecedingRelease, QueueHead, Waiter};
use crate::store::Kind;

/// Passes on a grant that the last hold has just left: to the next waiter in this process, or to the store, whose reply
/// is the result.
pub(crate) fn pass_on(
    handle: &Arc<Handle>,
    grant: Arc<Grant>,
    left: Left,
    now: Moment,
    ended: Ended,
) -> Option<Releasing> {
    let Left {
        mut head,
        leaving,
        may_be_handed_off,
        // Dropped at the end: by then another holder has the lock, or the release is queued.
        end: _end,
        ..
    } = left;
    // Not needed where the role of the head is in the grant.
    let of = head.is_none().then(|| LockId::new(grant.kind, &grant.key));
    if may_be_handed_off && hand_off(handle, &grant, of.as_ref(), &mut head, now) {
        grant.ends_span(Ended::Handoff);
        Event::HandedOff {
            series: &grant.series,
        }
        .emit();
        return None;
    }
    grant.ends_span(ended);
    let told = tell_next(handle, &grant, of.as_ref(), head.as_deref_mut());
    let follows = matches!(told, Some(Told::Followed));
    let kept = told.as_ref().and_then(Told::kept);
    let releasing = handle.release(grant, told, now, leaving, Some(ended));
    // Only now, so that the next acquire is right behind the release.
    if let Some(of) = of.filter(|_| follows) {
        let waiters = handle.shared().waiters.of(&of);
        waiters.tell_head(&of, PrecedingRelease::followed());
    }
    if let Some(head) = head {
        let subscription = head.ends();
        match kept {
            Some(kept) => kept.keep(subscription),
            None => drop(subscription),
        }
    }
    Some(releasing)
}

/// Tells the next waiter here that its request comes after the release of this grant, unless it follows at once. Returns how
/// the reply is used, `None` without a waiter here. `head` is the role that was kept in the grant; without it the waiters are
/// found by `of`.
fn tell_next(
    handle: &Handle,
    grant: &Grant,
    of: Option<&LockId>,
    head: Option<&mut QueueHead>,
) -> Option<Told> {
    // The store's queue decides which waiter is next.
    if grant.kind.waits_in_store() {
        return None;
    }
    let Shared {
        waiters, fairness, ..
    } = &**handle.shared();
    // Waiting readers here are other callers: where writers follow each other, readers are admitted in between.
    let are_waiting = |of: &LockId| waiters.of(of).any(of);
    let readers = || grant.kind == Kind::Write && are_waiting(&LockId::new(Kind::Read, &grant.key));
    if let Some(head) = head {
        let (released, told) = PrecedingRelease::awaited(head.watch.as_ref(), false, readers(), false);
        head.released = Some(released);
        let kept = Some(Arc::default());
        return Some(Told::Awaited { by: told, kept });
    }
    // It became the head after the lock was acquired, or the lock cannot be handed off.
    let of = of.filter(|of| grant.kind.is_exclusive() && waiters.of(of).has_head(of))?;
    let readers = readers();
    match fairness.next_request(of, readers) {
        NextRequest::AtOnce => Some(Told::Followed),
        NextRequest::AfterReply => {
            let was_subscribed = waiters.of(of).take_ended(of);
            let (released, told) = PrecedingRelease::awaited(None, was_subscribed, readers, true);
            waiters.of(of).tell_head(of, released);
            Some(Told::Awaited { by: told, kept: None })
        }
    }
}

/// Hands the grant off, if a waiter accepts it.
fn hand_off(
    handle: &Arc<Handle>,
    grant: &Arc<Grant>,
    of: Option<&LockId>,
    head: &mut Option<Reused<QueueHead>>,
    now: Moment,
) -> bool {
    let shared = handle.shared();
    if shared.draining.is_given() {
        return false;
    }
    let fits = |terms: &HandoffTerms| terms.lease == grant.lease();
    let next = match head {
        Some(head) => head.successor(fits),
        // If the store has a queue, its next waiter may be another process.
        None if grant.kind.waits_in_store() => None,
        // As the queue head it sleeps until the store notifies it.
        None => {
            let offered = of.and_then(|of| shared.waiters.of(of).offer_to_head(of));
            offered.filter(|waiter| waiter.handoff_terms.as_ref().is_some_and(fits))
        }
    };
    let Some(waiter) = next else { return false };
    let Some((successor, hold)) = successor(shared, grant, &waiter, now) else {
        return false;
    };
    let was_suspect = successor.is_suspect();
    if !shared.watchdog.replace(&successor) {
        if let Some(head) = head {
            head.put_back(waiter.clone());
            // A client that drained in the meantime has not found it.
            waiter.rouse();
        }
        return false;
    }
    // Before the next holder has it, whose events have the same id.
    grant.tell_passed_on(now);
    successor.tell_handed_off(was_suspect);
    if let Some(mut head) = head.take() {
        head.handed = head.handed.saturating_add(1);
        successor.put_head(head);
    }
    // The waiter has just left: dropped, the lock passes on as from any other holder.
    drop(waiter.give(Hold::new(hold, handle.clone())));
    true
}

/// Returns the grant for the next holder.
fn successor(shared: &Shared, grant: &Grant, waiter: &Waiter, now: Moment) -> Option<(Arc<Grant>, HoldRef)> {
    let (terms, group) = (waiter.handoff_terms?, waiter.caller.group);
    let series = match group == grant.group {
        true => grant.series.clone(),
        false => shared.meter.series(group, grant.kind),
    };
    let (successor, id) = grant.successor(&terms, now, waiter.caller, series);
    let grant = Arc::new(successor);
    let hold = HoldRef {
        id,
        grant: grant.clone(),
    };
    Some((grant, hold))
}
