//! Renewals of permits: a semaphore may have thousands of them, and steps of one key are sent one after the other.

use std::collections::HashMap;
use std::sync::Arc;

use dlock::store::{RenewRequest, Renewal, StoreError};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::PostgresLocks;
use super::job::{Answer, Step, sendable};
use super::wave::MOST_RENEWALS;
use crate::micros::micros;

/// Renewals, with their places in the request.
pub(super) type Renewals = Vec<(usize, Result<Renewal, StoreError>)>;

impl PostgresLocks {
    /// Queues the renewals of permits, those of one semaphore in as few steps as possible.
    pub(super) fn renew_permits(
        &self,
        requests: Vec<(usize, &RenewRequest)>,
    ) -> Vec<BoxFuture<'static, Renewals>> {
        let mut names: HashMap<Arc<str>, Vec<(usize, &RenewRequest)>> = HashMap::new();
        for (at, request) in requests {
            names
                .entry(self.name(&request.key))
                .or_default()
                .push((at, request));
        }
        let mut steps = Vec::new();
        for (name, requests) in names {
            for requests in requests.chunks(MOST_RENEWALS) {
                let grants = requests
                    .iter()
                    .map(|(_, request)| (request.grant, micros(request.lease).max(1)));
                let step = sendable(name.clone()).map(|key| Step::PermitRenew(key, grants.collect()));
                let places: Vec<usize> = requests.iter().map(|(at, _)| *at).collect();
                let answer = self.step(step);
                steps.push(
                    async move {
                        let renewals: Vec<_> = match answer.await {
                            Ok(Answer::RenewedAll(renewals)) => renewals.into_iter().map(Ok).collect(),
                            Ok(other) => {
                                let message = format!("the answer of another step came: {other:?}");
                                vec![Err(StoreError::unknown(message)); places.len()]
                            }
                            Err(error) => vec![Err(error); places.len()],
                        };
                        places.into_iter().zip(renewals).collect()
                    }
                    .boxed(),
                );
            }
        }
        steps
    }
}
