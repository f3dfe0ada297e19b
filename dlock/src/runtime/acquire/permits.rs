//! Waits until the total of a semaphore is as large as a call needs;
//! [`engine::permits`](crate::engine::permits) decides.

use std::sync::Arc;

use super::{AcquireTarget, Wait};
use crate::Error;
use crate::base::chance;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::permits::{Event, MorePermits, Next, Report, Rules};
use crate::runtime::acquire::AcquireCall;
use crate::runtime::emit;
use crate::store::changed;
use crate::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};

impl<G: AcquireTarget> Wait<'_, G> {
    /// Lets all others pass until the number of permits has changed, so that there may be enough.
    pub(super) async fn until_there_are_more(&self, evidence: &mut Evidence) -> Result<(), Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let counters = shared.counters(options.kind)?;
        let listens = || Some(shared.call_watch(options.kind, key, shared.next_grant()));
        let mut watch = listens();
        let wanted = self.call.amount();
        emit::Event::TooFewPermits {
            semaphore: key,
            wanted,
        }
        .emit();
        let rules = Rules {
            wants: wanted,
            patience: self.patience(),
            started: Moment::of(self.started),
            until: self.until.map(Moment::of),
        };
        let mut machine = MorePermits::new(rules, evidence);
        let mut next = machine.begin(Moment::now());
        loop {
            let event = match next {
                Next::Wait { pause, at_most, anew } => {
                    if anew {
                        watch = listens();
                    }
                    let notifications = async {
                        tokio::time::sleep(pause).await;
                        let _ = tokio::time::timeout(at_most, changed(&mut watch)).await;
                    };
                    tokio::select! {
                        biased;
                        () = self.call.ending().given() => Event::Closed,
                        () = self.over() => Event::WaitOver,
                        () = notifications => Event::Due,
                    }
                }
                Next::Ask => self.counts_permits(&counters).await,
                Next::Report(Report::Enough) => return Ok(()),
                Next::Report(Report::GaveUp(verdict)) => return Err(self.verdict(verdict)),
                Next::Report(Report::Closed) => return Err(self.call.ended()),
            };
            next = machine.handle(event, Moment::now());
        }
    }

    /// Asks the store how many permits there are.
    async fn counts_permits(&self, counters: &Arc<dyn Counters>) -> Event {
        let shared = self.call.handle.shared();
        let request = CounterRequest::new(self.call.key.clone(), shared.next_grant(), CounterStep::Permits);
        tokio::select! {
            biased;
            () = self.call.ending().given() => Event::Closed,
            reply = shared.counted(counters, &request) => match reply {
                Ok(CounterReply::Permits { free, held }) => Event::Counted { free, held },
                Ok(_) => Event::Counted { free: None, held: 0 },
                Err(error) => Event::Failed { error, fraction: chance::fraction },
            },
            () = self.over() => Event::WaitOver,
        }
    }
}
