//! Opening a store on the runtime of its client.

use std::future::Future;

use tokio::runtime::Handle;
use tokio_util::task::AbortOnDropHandle;

use crate::Error;

/// Opens a store, or a part of it, on the runtime that will serve its connections: sockets belong to the runtime that made
/// them. A panic there, as of a runtime without timers, is that of the caller.
pub(crate) fn opened_on<T: Send + 'static>(
    runtime: &Handle,
    opening: impl Future<Output = T> + Send + 'static,
) -> impl Future<Output = Result<T, Error>> + Send {
    // Begun here, so that the future of the caller has no room for it. Given up with this call.
    let opening = AbortOnDropHandle::new(runtime.spawn(opening));
    async move {
        opening.await.map_err(|ended| match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Error::ClientClosed,
        })
    }
}
