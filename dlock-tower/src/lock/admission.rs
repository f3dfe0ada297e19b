//! The steps before the handler: find the key, prepare the body, acquire the lock.

use std::pin::pin;
use std::sync::Arc;

use dlock::{Held, LockClient, MAX_AT_ONCE, MultiLock};
use http::Request;
use smallvec::smallvec;

use super::ahead::PrepareBody;
use super::kept::{Hold, RequestLocks};
use super::outcome::Outcome;
use super::settings::{InvalidOptions, Keys, Settings};
use crate::Rejection;
use crate::key::{ExtractKey, Found, Unrouted};

/// The locks of a layer.
pub(super) struct Locks<K> {
    pub(super) client: LockClient,
    pub(super) key: Arc<K>,
    pub(super) settings: Arc<Settings>,
    /// The first invalid option.
    pub(super) invalid: Option<InvalidOptions>,
}

/// A request that may run.
pub(super) struct Admitted<B> {
    pub(super) request: Request<B>,
    /// Its locks, usually one, unless it needs none or runs without.
    pub(super) hold: Option<Arc<Hold>>,
    /// Whether a lock is left out because no route was matched for it.
    pub(super) is_unrouted: bool,
}

/// Acquires the locks of a request.
#[allow(
    clippy::manual_async_fn,
    reason = "the future of an async fn has room for its arguments twice"
)]
pub(super) fn admit<B: Send, K: ExtractKey<B>, P: PrepareBody<B>>(
    locks: Arc<Locks<K>>,
    body: P,
    mut request: Request<B>,
) -> impl Future<Output = Result<Admitted<B>, Rejection>> + Send {
    async move {
        let Locks {
            client,
            key,
            settings,
            invalid,
        } = &*locks;
        let rejected = |_: &Rejection| settings.outcomes.count(Outcome::Rejected);
        if let Some(invalid) = invalid {
            return Err(Rejection::internal(invalid.to_string())).inspect_err(rejected);
        }
        let found;
        (request, found) = key.extract(request).await.inspect_err(rejected)?;
        let is_unrouted = request.extensions_mut().remove::<Unrouted>().is_some();
        let keys: Keys = match found.normalized() {
            Found::Key(key) => smallvec![key],
            Found::Keys(keys) => keys.into(),
            Found::Missing(rejection) => return Err(rejection).inspect_err(rejected),
            Found::PassThrough => {
                settings.outcomes.count(Outcome::Passed);
                request.extensions_mut().remove::<Held>();
                return Ok(Admitted {
                    request,
                    hold: None,
                    is_unrouted,
                });
            }
        };
        // Once the lock is held, nothing waits for the client any more.
        request = body.prepare(request).await.inspect_err(rejected)?;
        let lock = settings.lock(client, &request, keys);
        check_number(&lock).inspect_err(rejected)?;
        // Pinned where it is made: to await it directly would move it first, and it is large.
        let acquired = pin!(lock.__acquire_at(!settings.waits(), settings.by)).await;
        match acquired {
            Ok(guard) => {
                settings.outcomes.count(Outcome::Ran);
                let extensions = request.extensions_mut();
                extensions.insert(guard.held());
                let hold = Hold::new(guard, settings.on_lost);
                let outer = extensions.remove::<RequestLocks>().unwrap_or_default();
                extensions.insert(outer.with(&hold));
                Ok(Admitted {
                    request,
                    hold: Some(hold),
                    is_unrouted,
                })
            }
            // A client that drains or is shut down is not a failure of the store: the service is about to end.
            Err(error)
                if settings.fail_open
                    && error.is_unavailable()
                    && !matches!(error, dlock::Error::ClientClosed | dlock::Error::Draining) =>
            {
                tracing::warn!(keys = ?lock.keys(), %error, "the lock store is down: a request runs without its lock");
                settings.outcomes.count(Outcome::Unlocked);
                request.extensions_mut().remove::<Held>();
                Ok(Admitted {
                    request,
                    hold: None,
                    is_unrouted: false,
                })
            }
            Err(error) => {
                settings.outcomes.count(match &error {
                    error if error.is_busy() => Outcome::Conflict,
                    error if error.is_unavailable() => Outcome::Unavailable,
                    _ => Outcome::Rejected,
                });
                Err(settings.refusal(error))
            }
        }
    }
}

/// Checks how many locks the request names: it is the client that names them.
fn check_number(lock: &MultiLock) -> Result<(), Rejection> {
    match lock.keys().len() {
        ..=MAX_AT_ONCE => Ok(()),
        number => Err(Rejection::invalid_key(format!(
            "the request names {number} locks, and at most {MAX_AT_ONCE} can be acquired at once"
        ))),
    }
}
