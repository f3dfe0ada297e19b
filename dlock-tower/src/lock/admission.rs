//! The steps before the handler: find the key, prepare the body, acquire the lock.

use std::sync::Arc;

use dlock::LockClient;
use http::Request;

use super::ahead::PrepareBody;
use super::kept::{Hold, RequestLocks};
use super::settings::Settings;
use crate::Rejection;
use crate::key::{ExtractKey, Found};

/// A request that may run.
pub(super) struct Admitted<B> {
    pub(super) request: Request<B>,
    /// Its locks, usually one, unless it needs none or runs without.
    pub(super) hold: Option<Arc<Hold>>,
}

/// Acquires the locks of a request.
pub(super) async fn admit<B, K: ExtractKey<B>, P: PrepareBody<B>>(
    client: LockClient,
    key: Arc<K>,
    settings: Arc<Settings>,
    body: P,
    request: Request<B>,
) -> Result<Admitted<B>, Rejection> {
    let (request, found) = key.extract(request).await?;
    let keys = match found {
        Found::Key(key) => vec![key],
        Found::Keys(keys) => keys,
        Found::Missing(rejection) => {
            counted("rejected");
            return Err(rejection);
        }
        Found::PassThrough => {
            counted("passed");
            return Ok(Admitted { request, hold: None });
        }
    };
    // Once the lock is held, nothing waits for the client any more.
    let mut request = body.prepare(request).await?;
    let lock = settings.lock(&client, &request, keys);
    let acquired = if settings.waits() {
        lock.acquire().await
    } else {
        lock.try_acquire().await
    };
    match acquired {
        Ok(guard) => {
            counted("ran");
            let extensions = request.extensions_mut();
            extensions.insert(guard.held());
            let hold = Hold::new(guard, settings.on_lost);
            let outer = extensions.remove::<RequestLocks>().unwrap_or_default();
            extensions.insert(outer.with(&hold));
            Ok(Admitted {
                request,
                hold: Some(hold),
            })
        }
        // A client that drains or is shut down is not a failure of the store: the service is about to end.
        Err(error)
            if settings.fail_open
                && error.is_unavailable()
                && !matches!(error, dlock::Error::ClientClosed | dlock::Error::Draining) =>
        {
            tracing::warn!(keys = ?lock.keys(), %error, "the lock store is down: a request runs without its lock");
            counted("unlocked");
            Ok(Admitted { request, hold: None })
        }
        Err(error) => {
            counted(match &error {
                error if error.is_busy() => "conflict",
                error if error.is_unavailable() => "unavailable",
                _ => "rejected",
            });
            Err(settings.refusal(error))
        }
    }
}

/// Counts a request by its outcome here.
fn counted(outcome: &'static str) {
    #[cfg(feature = "metrics")]
    metrics::counter!("dlock_http_requests_total", "layer" => "lock", "outcome" => outcome).increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = outcome;
}
