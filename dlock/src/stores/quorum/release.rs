//! A release: what a majority has carried out, and what is owed to the members that could not be asked.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::task::JoinHandle;

use super::{Answers, Quorum};
use crate::base::clock;
use crate::store::{Outcome, ReleaseReply, ReleaseRequest, StoreError};

impl Quorum {
    /// A member that could not be asked does not delay the others: it is asked again until the lease is over.
    pub(super) fn release_later(
        &self,
        at: usize,
        request: ReleaseRequest,
        lease: Duration,
    ) -> JoinHandle<()> {
        let until = clock::now() + lease;
        // It takes its position in the order of operations now.
        let step = self.members[at].store.clone().release(request.clone());
        let (owed, runtime) = (self.owed_releases[at].clone(), self.runtime.clone());
        self.runtime.spawn(async move {
            if matches!(step.await, Err(error) if error.is_outlasted()) {
                owed.add(request, until, &runtime);
            }
        })
    }

    pub(super) async fn released(
        self: Arc<Self>,
        request: ReleaseRequest,
        lease: Duration,
        mut asked: Answers<ReleaseReply>,
    ) -> Result<ReleaseReply, StoreError> {
        let begun = clock::now();
        let (mut released, mut notified, mut failed) = (0, Some(0), Vec::new());
        let (mut not_held, mut repeats) = (0, 0);
        while released < self.majority() {
            let is_lost = not_held >= self.majority();
            let Some((at, answer)) = self.next_answer(&mut asked, begun, is_lost).await else {
                break;
            };
            match answer {
                Ok(ReleaseReply::Released { receivers }) => {
                    released += 1;
                    notified = notified.max(receivers);
                }
                Ok(ReleaseReply::NotHeld { repeated }) => {
                    not_held += 1;
                    repeats += usize::from(repeated);
                }
                Err(error) => failed.push((at, error)),
            }
        }
        let is_released = released >= self.majority();
        if !is_released && released + failed.len() >= self.majority() {
            let said = failed
                .iter()
                .map(|(at, error)| format!("{}: {error}", self.members[*at].name));
            let said: Vec<_> = said.collect();
            // Repeated as long as one of the failures may be transient.
            let first = failed.iter().position(|(_, error)| error.is_outlasted());
            // A release by one member, certain or possible, is part of the outcome.
            let may_be_done = |(_, error): &(usize, StoreError)| error.outcome == Outcome::Unknown;
            let outcome = match released > 0 || failed.iter().any(may_be_done) {
                true => Outcome::Unknown,
                false => Outcome::NotDone,
            };
            let first = failed.swap_remove(first.unwrap_or(0)).1;
            return Err(StoreError {
                outcome,
                message: format!("too few members of the quorum answered: {}", said.join("; ")),
                ..first
            });
        }
        // Each of the others is notified as soon as it can be; one may have alone what a majority does not, from an acquire whose
        // replies were lost.
        let until = begun + lease;
        let this = self.clone();
        let rest = async move {
            while let Some((at, answer)) = asked.next().await {
                failed.extend(answer.err().map(|error| (at, error)));
            }
            failed.retain(|(_, error)| error.is_outlasted());
            for (at, _) in failed {
                this.owed_releases[at].add(request.clone(), until, &this.runtime);
            }
        };
        self.runtime.spawn(rest);
        Ok(match is_released {
            true => ReleaseReply::Released { receivers: notified },
            // What a majority no longer had before any copy of the release was lost, whatever a minority still had.
            false => ReleaseReply::NotHeld {
                repeated: not_held - repeats < self.majority() && repeats + released > 0,
            },
        })
    }
}
