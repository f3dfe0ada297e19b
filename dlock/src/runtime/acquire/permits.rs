//! Waits until a semaphore has as many permits in all as a call wants.

use std::time::Duration;

use super::{AcquireTarget, Wait, changed};
use crate::Error;
use crate::base::clock;
use crate::base::moment::Moment;
use crate::engine::evidence::Evidence;
use crate::engine::timing::{ASK_FOR_PERMITS_EVERY, LONGEST_SLEEP};
use crate::runtime::acquire::AcquireCall;
use crate::runtime::emit::Event;
use crate::store::counter::{CounterReply, CounterRequest, CounterStep};

impl<G: AcquireTarget> Wait<'_, G> {
    /// Lets all others pass until the number of permits was changed, so that there may be as many as are wanted.
    pub(super) async fn until_there_are_more(&self, evidence: &mut Evidence) -> Result<(), Error> {
        let AcquireCall {
            handle, key, options, ..
        } = self.call;
        let shared = handle.shared();
        let counters = (shared.counters(options.kind)).map_err(|error| self.call.failed(error))?;
        let mut watch = Some(shared.call_watch(options.kind, key, shared.next_grant()));
        let mut pause = Duration::ZERO;
        Event::TooFewPermits {
            semaphore: key,
            wanted: self.call.amount(),
        }
        .emit();
        loop {
            let notifications = async {
                tokio::time::sleep(pause).await;
                let _ = tokio::time::timeout(LONGEST_SLEEP, changed(&mut watch)).await;
            };
            tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                () = self.over() => return Err(self.gave_up(evidence, false)),
                () = notifications => {}
            }
            let request = CounterRequest::new(key.clone(), shared.next_grant(), CounterStep::Permits);
            let asked = clock::now();
            evidence.asks(Moment::of(asked));
            let reply = tokio::select! {
                biased;
                () = shared.closing.cancelled() => return Err(Error::ClientClosed),
                reply = counters.clone().count(request) => reply,
                () = self.over() => return Err(self.gave_up(evidence, true)),
            };
            pause = match reply {
                Ok(CounterReply::Permits {
                    free: Some(free),
                    held,
                }) if free.saturating_add_unsigned(held) < i64::from(self.call.amount()) => {
                    self.is_busy(None, evidence);
                    ASK_FOR_PERMITS_EVERY
                }
                Ok(_) => {
                    evidence.replied();
                    return Ok(());
                }
                Err(error) => {
                    // What was told meanwhile is not waited for a second time.
                    watch = Some(shared.call_watch(options.kind, key, shared.next_grant()));
                    self.failed(asked, error, evidence)?
                }
            };
        }
    }
}
