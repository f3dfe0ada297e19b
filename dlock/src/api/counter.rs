//! Counter operations, repeated until the store answers: each takes effect once, however often it is sent.

use std::sync::Arc;
use std::time::Duration;

use crate::base::moment::Moment;
use crate::engine::timing::Backoff;
use crate::runtime::client::{Handle, Shared};
use crate::runtime::emit::Event;
use crate::runtime::release::pauses;
use crate::store::counter::{CounterReply, CounterRequest, CounterStep, Counters};
use crate::store::{Outcome, StoreError};
use crate::{Error, LockKey};

/// For how long at least a store remembers an operation.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Sends an operation; `what` names it in error messages. One that changes something takes effect even if this future
/// is dropped.
pub(crate) async fn count(
    handle: &Arc<Handle>,
    key: &LockKey,
    step: CounterStep,
    what: &str,
) -> Result<CounterReply, Error> {
    key.check()?;
    let shared = handle.shared().clone();
    let counters = shared.counters(step.kind())?;
    let request = CounterRequest {
        repeated_for: REMEMBERED.max(shared.settings.retry_for.saturating_mul(2)),
        ..CounterRequest::new(key.clone(), shared.next_grant(), step)
    };
    let outcome = async {
        match step.is_look() {
            true => repeat(shared, counters, request).await,
            false => handle.run_to_completion(repeat(shared, counters, request)).await,
        }
    };
    let outcome = handle.with_timers(outcome).await;
    outcome.map_err(|error| error.into_error(what, key))
}

/// Sends it until it is answered, or until `retry_for` is over.
async fn repeat(
    shared: Arc<Shared>,
    counters: Arc<dyn Counters>,
    request: CounterRequest,
) -> Result<CounterReply, StoreError> {
    let begun = Moment::now();
    let mut backoff = Backoff::default();
    let mut unknown = false;
    loop {
        let sent = Moment::now();
        let mut error = match shared.counted(&counters, &request).await {
            Ok(reply) => return Ok(reply),
            Err(error) => error,
        };
        // A read has no outcome.
        unknown |= error.outcome == Outcome::Unknown && !request.step.is_look();
        let now = Moment::now();
        let is_repeated = match request.step {
            CounterStep::Give { .. } | CounterStep::CountDown => error.is_outlasted(),
            _ => error.is_passing(),
        };
        // Also for a copy that was refused: an earlier copy without a reply may have taken effect.
        error.outcome = match unknown {
            true => Outcome::Unknown,
            false => Outcome::NotDone,
        };
        if !is_repeated || now.since(begun) >= shared.settings.retry_for {
            return Err(error);
        }
        Event::CounterRepeated {
            key: &request.key,
            error: &error,
        }
        .emit();
        if let Some(pause) = backoff.next(sent, &error, now)
            && !pauses(shared.clone(), pause).await
        {
            return Err(error);
        }
    }
}

/// The error for a reply that does not fit the request.
pub(crate) fn strange(what: &str, key: &LockKey, reply: CounterReply) -> Error {
    StoreError::unknown(format!("the store's reply does not fit the request: {reply:?}"))
        .into_error(what, key)
}
