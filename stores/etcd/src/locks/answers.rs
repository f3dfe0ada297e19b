//! The leases of the replies to operations that may arrive again.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::queue::Moment;
use dlock::store::{Reason, StoreError};
use tokio::time::{Instant, timeout_at};

use super::pool::seconds;
use super::session::not_done;
use crate::client::Links;
use crate::client::proto::LeaseGrantRequest;

/// The most replies on one lease.
const MOST: usize = 1000;

/// The lease for the next replies: many share one, which is never renewed.
#[derive(Debug)]
pub(crate) struct Answers {
    links: Arc<Links>,
    current: tokio::sync::Mutex<Option<Lease>>,
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    id: i64,
    ends: Moment,
    replies: usize,
}

impl Answers {
    pub(crate) fn new(links: Arc<Links>) -> Answers {
        Answers {
            links,
            current: tokio::sync::Mutex::default(),
        }
    }

    /// Returns a lease that lasts for at least this long. After an error nothing was done.
    pub(crate) async fn lease(&self, lasts: Duration, deadline: Instant) -> Result<i64, StoreError> {
        let late = |_| StoreError::not_done(Reason::Unreachable, self.links.silence());
        let mut current = timeout_at(deadline, self.current.lock()).await.map_err(late)?;
        let now = Moment::now();
        if let Some(lease) = &mut *current
            && lease.replies < MOST
            && lease.ends.since(now) >= lasts
        {
            lease.replies += 1;
            return Ok(lease.id);
        }
        let ttl = seconds(2 * lasts);
        let request = LeaseGrantRequest {
            ttl: i64::try_from(ttl).unwrap_or(i64::MAX),
        };
        let granted = self.links.call(request, deadline).await;
        let granted = granted.map_err(|failure| not_done(failure.error()))?;
        *current = Some(Lease {
            id: granted.id,
            ends: now + Duration::from_secs(granted.ttl.unsigned_abs()),
            replies: 1,
        });
        Ok(granted.id)
    }

    /// Records that the server has no such lease.
    pub(crate) async fn is_gone(&self, id: i64) {
        let mut current = self.current.lock().await;
        if current.is_some_and(|lease| lease.id == id) {
            *current = None;
        }
    }
}
