//! The number of permits of a semaphore, with or without owners.

use std::sync::Arc;

use super::SemaphoreStatus;
use crate::api::counter::{count, strange};
use crate::runtime::client::Handle;
use crate::runtime::options::{check_permits, check_total, too_many_permits};
use crate::store::Kind;
use crate::store::counter::{CounterReply, CounterStep};
use crate::{Error, LockKey};

pub(super) struct Number<'a> {
    pub(super) handle: &'a Arc<Handle>,
    pub(super) key: &'a LockKey,
    /// The permits have no owners.
    pub(super) unowned: bool,
}

impl Number<'_> {
    /// With the limit of the caller, if it has one.
    pub(super) async fn status(&self, limit: Option<u32>) -> Result<Option<SemaphoreStatus>, Error> {
        const WHAT: &str = "the number of permits of semaphore";
        let (set, held) = match self.step(CounterStep::Permits, WHAT).await? {
            CounterReply::Permits { free: None, held } => (None, held),
            reply => {
                let status = self.permits(reply, WHAT)?;
                (Some(status), status.held)
            }
        };
        let Some(limit) = limit.map(i64::from) else {
            return Ok(set);
        };
        let total = set.map_or(limit, |set| set.total.min(limit));
        Ok(Some(SemaphoreStatus {
            total,
            held,
            available: total.saturating_sub_unsigned(held),
        }))
    }

    pub(super) async fn available(&self) -> Result<i64, Error> {
        Ok(self.status(None).await?.map_or(0, |status| status.available))
    }

    pub(super) async fn set(&self, total: u32, only_unset: bool) -> Result<bool, Error> {
        check_total(Some(total))?;
        let step = CounterStep::SetPermits { total, only_unset };
        self.done(step, "setting the permits of semaphore").await
    }

    /// Adds or removes permits.
    pub(super) async fn add(&self, by: i64, permits: u32) -> Result<SemaphoreStatus, Error> {
        check_permits("permits", permits)?;
        let step = CounterStep::AddPermits {
            by,
            unowned: self.unowned,
        };
        self.changed(step, "a change of the permits of semaphore").await
    }

    pub(super) async fn give(&self, permits: u32) -> Result<SemaphoreStatus, Error> {
        check_permits("release_many", permits)?;
        let step = CounterStep::Give { amount: permits };
        match self.changed(step, "the release of permits of semaphore").await {
            Err(Error::TooFewPermits { key, .. }) => Err(Error::NoPermitsSet { key }),
            outcome => outcome,
        }
    }

    pub(super) async fn drain(&self) -> Result<u64, Error> {
        const WHAT: &str = "draining semaphore";
        match self.step(CounterStep::Drain, WHAT).await? {
            CounterReply::Number(number) => Ok(number),
            reply => Err(strange(WHAT, self.key, reply)),
        }
    }

    pub(super) async fn delete(&self) -> Result<bool, Error> {
        self.done(CounterStep::DeletePermits, "the deletion of semaphore")
            .await
    }

    async fn done(&self, step: CounterStep, what: &str) -> Result<bool, Error> {
        match self.step(step, what).await? {
            CounterReply::Done(done) => Ok(done),
            reply => Err(strange(what, self.key, reply)),
        }
    }

    async fn changed(&self, step: CounterStep, what: &str) -> Result<SemaphoreStatus, Error> {
        let reply = self.step(step, what).await?;
        self.permits(reply, what)
    }

    async fn step(&self, step: CounterStep, what: &str) -> Result<CounterReply, Error> {
        if self.unowned {
            // The store may have the others, under the same name.
            self.handle.shared().capabilities.require(Kind::Unowned)?;
        }
        count(self.handle, self.key, step, what).await
    }

    fn permits(&self, reply: CounterReply, what: &str) -> Result<SemaphoreStatus, Error> {
        match reply {
            CounterReply::Permits {
                free: Some(free),
                held,
            } => Ok(SemaphoreStatus {
                total: free.saturating_add_unsigned(held),
                held,
                available: free,
            }),
            CounterReply::TooFew { is } => Err(Error::TooFewPermits {
                key: self.key.clone(),
                total: is,
            }),
            CounterReply::TooMany => Err(too_many_permits("in all, those are more than")),
            reply => Err(strange(what, self.key, reply)),
        }
    }
}
