//! The numbers of a semaphore, and what they allow.

use dlock::store::{AcquireRequest, Reason, StoreError};

use crate::core::{Core, data};
use crate::layout::{leases_of, total_of};
use crate::session::{PendingReply, refused};
use crate::wire::Request;

/// What a semaphore has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// The number of leases.
    pub(crate) held: i64,
    /// The version of their parent, which each acquire of dlock changes; `None` if it does not exist.
    pub(crate) leases: Option<i32>,
    /// The total and its version.
    pub(crate) total: Option<(i64, i32)>,
}

impl Numbers {
    /// Whether the key is that of a semaphore. Whatever is beside it is the node of an attempt that is about to be refused.
    pub(crate) fn is_in_use(&self) -> bool {
        self.total.is_some() || self.held > 0
    }

    /// What the first in the queue does.
    pub(super) fn choice(&self, request: &AcquireRequest) -> Choice {
        if let (None, Some(total)) = (self.total, request.permits) {
            return Choice::SetTotal(total);
        }
        if self.free(request).is_none() {
            return Choice::NoTotal;
        }
        match (self.are_too_few(request), self.are_enough(request)) {
            (true, _) => Choice::TooFew,
            (false, true) => Choice::Take,
            (false, false) => Choice::Wait,
        }
    }

    /// Whether as many permits are available as are wanted.
    pub(super) fn are_enough(&self, request: &AcquireRequest) -> bool {
        self.free(request)
            .is_some_and(|free| free >= i64::from(amount(request)))
    }

    /// Whether more permits are wanted than exist, so that others must not wait for this request.
    pub(super) fn are_too_few(&self, request: &AcquireRequest) -> bool {
        let total = self.total.map(|(total, _)| total);
        request.limit.is_none() && total.is_some_and(|total| i64::from(amount(request)) > total)
    }

    /// How many permits are available, also below a limit; `None` if there is neither a total nor a limit.
    fn free(&self, request: &AcquireRequest) -> Option<i64> {
        let total = self.total.map(|(total, _)| total);
        let most = total.into_iter().chain(request.limit.map(i64::from)).min()?;
        Some(most - self.held)
    }
}

/// What the first in the queue for permits does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Choice {
    SetTotal(u32),
    /// There is neither a total nor a limit.
    NoTotal,
    TooFew,
    Take,
    Wait,
}

/// How many permits are wanted.
pub(super) fn amount(request: &AcquireRequest) -> u32 {
    request.amount.max(1)
}

impl Core {
    /// Requests the numbers of a semaphore.
    pub(crate) fn number_requests(&self, semaphore: &str) -> [Request; 2] {
        [leases_of(semaphore), total_of(semaphore)].map(|name| Request::Data {
            path: self.path(&name),
            watch: false,
        })
    }

    /// The numbers of a semaphore after the server has caught up with the leader.
    pub(super) async fn numbers(&self, semaphore: &str) -> Result<Numbers, StoreError> {
        let sync = Request::Sync {
            path: self.path(semaphore),
        };
        let [leases, total] = self.number_requests(semaphore);
        let [sync, leases, total] = self.session.send([sync, leases, total]);
        if let Err(code) = sync.answer().await?.reply {
            return Err(refused(code, "to catch up"));
        }
        numbers(leases, total).await
    }
}

/// Reads the replies to [`Core::number_requests`].
pub(crate) async fn numbers(leases: PendingReply, total: PendingReply) -> Result<Numbers, StoreError> {
    let leases = data(leases).await?;
    let total = data(total).await?;
    let total = total.map(|(data, stat)| match data.first_chunk() {
        Some(count) => Ok((i64::from(i32::from_be_bytes(*count)), stat.version)),
        None => Err(StoreError::not_done(
            Reason::Refused,
            "the node with the number of permits is not that of a SharedCount",
        )),
    });
    Ok(Numbers {
        held: leases.as_ref().map_or(0, |(_, stat)| i64::from(stat.children)),
        leases: leases.map(|(_, stat)| stat.version),
        total: total.transpose()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use dlock::store::{GrantId, Kind};
    use std::time::Duration;

    fn request(amount: u32, permits: Option<u32>, limit: Option<u32>) -> AcquireRequest {
        let (grant, lease) = (GrantId::from_parts(1, 1), Duration::from_secs(1));
        let mut request = AcquireRequest::new(Kind::Permit, "k".into(), grant, lease);
        (request.amount, request.permits, request.limit) = (amount, permits, limit);
        request
    }

    #[test]
    fn first_in_the_queue_takes_what_total_and_limit_allow() {
        for (total, held, request, choice) in [
            (None, 0, request(1, Some(3), None), Choice::SetTotal(3)),
            (None, 0, request(1, None, None), Choice::NoTotal),
            (None, 1, request(1, None, Some(2)), Choice::Take),
            (None, 2, request(1, None, Some(2)), Choice::Wait),
            (Some(3), 1, request(2, Some(9), None), Choice::Take),
            (Some(3), 2, request(2, None, None), Choice::Wait),
            (Some(3), 2, request(4, None, None), Choice::TooFew),
            // The lower one counts.
            (Some(3), 1, request(2, None, Some(2)), Choice::Wait),
            (Some(1), 0, request(2, None, Some(2)), Choice::Wait),
            // The total was lowered below what is held.
            (Some(1), 2, request(1, None, None), Choice::Wait),
        ] {
            let numbers = Numbers {
                held,
                leases: Some(0),
                total: total.map(|total| (total, 0)),
            };
            assert_eq!(numbers.choice(&request), choice, "{numbers:?} {request:?}");
        }
    }
}
