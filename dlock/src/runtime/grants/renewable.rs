//! Grants as the renewal table sees them.

use std::sync::Arc;
use std::time::Duration;

use super::Grant;
use crate::base::moment::Moment;
use crate::engine::grant::Terms;
use crate::engine::renewal::Renewable;
use crate::runtime::calls::lane_of;
use crate::runtime::emit::Event;
use crate::store::{Kind, Lane};
use crate::{HoldState, Loss};

impl Renewable for Arc<Grant> {
    fn number(&self) -> &u64 {
        &self.number
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn terms(&self) -> Terms {
        Grant::terms(self)
    }

    fn lane(&self) -> Lane {
        // The client owns the table, so it exists.
        let client = self.client().upgrade();
        client.map_or_else(Lane::default, |shared| lane_of(&*shared.store, &self.key))
    }

    fn judge(&self, now: Moment) -> (HoldState, Moment) {
        self.peek_at(now)
    }

    fn confirmed(
        &self,
        now: Moment,
        sent: Moment,
        lease: Duration,
        ends_doubt: bool,
    ) -> Result<Moment, Loss> {
        let mut state = self.state.lock();
        let terms = Grant::terms(self);
        let (was_suspect, deadline) = (state.grant.is_suspect(), state.grant.deadline());
        // Such a renewal gains no time, so it is not late either.
        let prolongs = !terms.ends_with_max_hold(deadline);
        let confirmed = state.grant.confirmed(&terms, now, sent, lease, ends_doubt);
        let (is_held, is_suspect) = (state.grant.ended().is_none(), state.grant.is_suspect());
        let left = deadline.since(now);
        if confirmed.is_ok() && is_held && self.renewed {
            state.room.renewed_with(left);
        }
        drop(state);
        let (series, of) = (&self.series, self.of());
        if confirmed.is_ok() && is_held {
            if was_suspect && !is_suspect {
                Event::Confirmed { series, of }.emit();
            }
            if self.renewed && prolongs {
                let lease = terms.lease;
                Event::Renewed {
                    series,
                    of,
                    left,
                    lease,
                }
                .emit();
            }
        }
        confirmed
    }

    fn doubt(&self) -> bool {
        let is_new = self.state.lock().grant.doubt();
        if is_new {
            let (series, of) = (&self.series, self.of());
            Event::BecameSuspect { series, of }.emit();
        }
        is_new
    }

    fn is_suspect(&self) -> bool {
        self.state.lock().grant.is_suspect()
    }

    fn is_asked(&self) -> bool {
        self.is_asked.get()
    }

    fn set_asked(&self, is_asked: bool) {
        self.is_asked.set(is_asked);
    }
}
