//! Renewals, by which members that lost a held grant get it again.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;

use super::{Answers, Held, Quorum};
use crate::LockKey;
use crate::store::{AcquireRequest, GrantId, Kind, RenewRequest, Renewal, StoreError};

impl Quorum {
    pub(super) async fn renewed(
        self: Arc<Self>,
        requests: Vec<RenewRequest>,
        mut asked: Answers<Vec<Result<Renewal, StoreError>>>,
    ) -> Result<Vec<Result<Renewal, StoreError>>, StoreError> {
        let majority = self.majority();
        let mut counts = vec![(0, 0); requests.len()];
        // The grants that are missing, by member.
        let mut missing = Vec::new();
        let mut trouble = StoreError::unknown("too few members of the quorum answered");
        let decided =
            |(renewed, gone): &(usize, usize)| *renewed >= majority || *gone > self.members.len() - majority;
        while !counts.iter().all(decided)
            && let Some((at, answer)) = asked.next().await
        {
            let answers = match answer {
                Ok(answers) => answers,
                Err(error) => {
                    trouble = self.named(at, error);
                    continue;
                }
            };
            for (place, answer) in answers.into_iter().take(counts.len()).enumerate() {
                match answer {
                    Ok(Renewal::Renewed) => counts[place].0 += 1,
                    Ok(Renewal::RenewedFor(_) | Renewal::Held) => {
                        let error = StoreError::unknown("it gave another lease than was asked for");
                        trouble = self.named(at, error);
                    }
                    Ok(Renewal::Gone) => {
                        counts[place].1 += 1;
                        missing.push((at, place));
                    }
                    Err(error) => trouble = self.named(at, error),
                }
            }
        }
        let answers = counts.iter().map(|(renewed, gone)| {
            if *renewed >= majority {
                Ok(Renewal::Renewed)
            } else if *gone > self.members.len() - majority {
                Ok(Renewal::Gone)
            } else {
                Err(trouble.clone())
            }
        });
        let answers = answers.collect();
        let this = self.clone();
        self.runtime.spawn(async move {
            while let Some((at, answer)) = asked.next().await {
                let answers = answer.into_iter().flatten().enumerate();
                let gone = answers.filter(|(_, answer)| matches!(answer, Ok(Renewal::Gone)));
                missing.extend(gone.map(|(place, _)| (at, place)));
            }
            for (at, place) in missing {
                // Only what a majority has is held.
                if counts.get(place).is_some_and(|(renewed, _)| *renewed >= majority) {
                    let RenewRequest {
                        kind,
                        key,
                        grant,
                        lease,
                        ..
                    } = &requests[place];
                    this.ask_again(at, *kind, key, *grant, *lease);
                }
            }
        });
        Ok(answers)
    }

    /// A member does not have a held grant: it was not there when the lock was acquired, or has lost its data. It is
    /// asked for it again, so that members can be replaced one after the other under a long hold. Queued before the
    /// release, since nothing is requested that is not held.
    pub(super) fn ask_again(&self, at: usize, kind: Kind, key: &LockKey, grant: GrantId, lease: Duration) {
        let held = self.held.lock();
        let Some(Held { nested_in, .. }) = held.get(&grant) else {
            return;
        };
        let mut ask = AcquireRequest::new(kind, key.clone(), grant, lease);
        // A downgraded lock holds only the read.
        ask.nested_in = nested_in.filter(|write| held.contains_key(write));
        let step = self.members[at].store.clone().vote(ask, self.vote_after());
        drop(held);
        self.runtime.spawn(step);
    }
}
