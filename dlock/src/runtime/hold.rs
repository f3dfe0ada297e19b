//! A hold of a grant that its owner gives up by dropping it.

use std::fmt;
use std::future::{poll_fn, ready};
use std::panic::Location;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::Either;

use crate::base::chance::next_id;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::reused::Reused;
use crate::runtime::client::Handle;
use crate::runtime::emit::meter::Ended;
use crate::runtime::emit::trace::Acquired;
use crate::runtime::grants::{EntryMode, EntryRequest, Grant, OuterHolds, Refused};
use crate::runtime::handoff;
use crate::runtime::release::Releasing;
use crate::runtime::scope::{Frames, HoldRef};
use crate::runtime::waiters::QueueHead;
use crate::{Error, HoldState, Loss};

/// The id of a hold that has left its grant.
const HAS_LEFT: u64 = 0;

/// One hold of a grant. Dropping it leaves the grant; the last hold passes the lock on or releases it.
pub(crate) struct Hold {
    /// With the id [`HAS_LEFT`] once it has left.
    hold: HoldRef,
    handle: Arc<Handle>,
}

impl Hold {
    pub(crate) fn new(hold: HoldRef, handle: Arc<Handle>) -> Hold {
        Hold { hold, handle }
    }

    pub(crate) fn grant(&self) -> &Arc<Grant> {
        &self.hold.grant
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    /// Whether the lock can ever be handed off in this process.
    pub(crate) fn can_be_handed_off(&self) -> bool {
        self.grant().can_be_handed_off()
    }

    /// Keeps the queue head's role in the grant until the grant ends.
    pub(crate) fn rest(&self, head: Reused<QueueHead>) {
        if head.leave_head() {
            self.grant().put_head(head);
        }
    }

    /// Whether the lock is still held, by the clock as of this call.
    pub(crate) fn is_held(&self) -> bool {
        !matches!(self.grant().status(), HoldState::Lost(_))
    }

    /// A second hold of the same grant.
    pub(crate) fn reenter(&self, by: &'static Location<'static>) -> Result<Hold, Error> {
        let request = EntryRequest {
            id: next_id(),
            by,
            around: OuterHolds::All,
            mode: EntryMode::TryFirst,
        };
        let key = || self.grant().key.clone();
        match self.grant().enter(&request) {
            Ok(()) => {
                let hold = HoldRef {
                    id: request.id,
                    grant: self.grant().clone(),
                };
                Ok(Hold::new(hold, self.handle.clone()))
            }
            Err(Refused::Lost(loss)) => Err(self.grant().lost(loss)),
            // Any caller may enter here, so none blocks it.
            Err(Refused::Sibling(_)) => Err(Error::NotHeld { key: key() }),
        }
    }

    /// Releases the hold at the first poll; the future returns the outcome.
    pub(crate) fn release(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let mut release = None;
        poll_fn(move |cx| {
            let _reading = clock::one_reading();
            release.get_or_insert_with(|| self.release_now()).poll_unpin(cx)
        })
    }

    /// Releases the hold at once; the future returns the outcome.
    pub(crate) fn release_now(&mut self) -> impl Future<Output = Result<(), Error>> + Unpin + Send + use<> {
        match self.leave(Ended::Released) {
            Some(Ok(releasing)) => Either::Left(releasing),
            Some(Err(error)) => Either::Right(ready(Err(error))),
            None => Either::Right(ready(Ok(()))),
        }
    }

    /// The frame of this hold alone.
    pub(crate) fn frames(&self) -> Frames {
        Frames::of(std::iter::once(self.hold.clone()), None)
    }

    /// Returns the hold as frames record it.
    pub(crate) fn hold_ref(&self) -> &HoldRef {
        &self.hold
    }

    /// Ends the hold here and leaves the store unchanged: the lock is neither renewed nor released any more. Fails if the
    /// client has ended, and has released it.
    pub(crate) fn leave_taken(mut self) -> Result<(), Error> {
        let hold = std::mem::replace(&mut self.hold.id, HAS_LEFT);
        let (now, grant) = (Moment::now(), &self.hold.grant);
        let left = (hold != HAS_LEFT).then(|| grant.leave(hold, now, &self.handle.shared().pending));
        let Some(left) = left.flatten() else {
            return Ok(());
        };
        if let Some(Loss::Shutdown | Loss::RuntimeEnded) = left.loss {
            drop(self.handle.release(grant.clone(), None, now, left.leaving, None));
            return Err(Error::ClientClosed);
        }
        self.handle.shared().watchdog.remove(grant.number);
        grant.ends_span(Ended::Released);
        Ok(())
    }

    /// Leaves the grant; the last hold passes it on. `None` when there is nothing left to do: other holds exist, this
    /// guard has left before, or another caller in this process has the lock now.
    pub(crate) fn leave(&mut self, ended: Ended) -> Option<Result<Releasing, Error>> {
        let hold = std::mem::replace(&mut self.hold.id, HAS_LEFT);
        if hold == HAS_LEFT {
            return None;
        }
        let _reading = clock::one_reading();
        let (now, grant) = (Moment::now(), &self.hold.grant);
        let Some(left) = grant.leave(hold, now, &self.handle.shared().pending) else {
            return match grant.status_at(now) {
                // Another guard of the grant was the last one in the meantime.
                HoldState::Lost(Loss::Released) => None,
                HoldState::Lost(loss) => Some(Err(grant.lost(loss))),
                _ => None,
            };
        };
        if let Some(loss) = left.loss {
            let lost = grant.lost(loss);
            drop(self.handle.release(grant.clone(), None, now, left.leaving, None));
            return Some(Err(lost));
        }
        handoff::pass_on(&self.handle, grant.clone(), left, now, ended).map(Ok)
    }
}

impl Acquired for Hold {
    fn each_grant(&self, with: &mut dyn FnMut(&Grant)) {
        with(self.grant());
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        drop(self.leave(Ended::Dropped));
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.grant().fmt(f)
    }
}
