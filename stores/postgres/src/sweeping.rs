//! The background removal of rows.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dlock::store::StoreError;

/// Removes rows now and then, as long as the store exists. A failure is a warning, once until a removal succeeds.
pub(crate) async fn sweep<S, F>(store: Weak<S>, every: Duration, rows: &str, remove: impl Fn(Arc<S>) -> F)
where
    F: Future<Output = Result<u64, StoreError>>,
{
    let mut is_told = false;
    loop {
        tokio::time::sleep(every.mul_f64(0.5 + fastrand::f64())).await;
        let Some(store) = store.upgrade() else { return };
        let removed = remove(store).await;
        match &removed {
            Err(error) if !is_told => {
                tracing::warn!(%error, "{rows} were not removed, trying again every {every:?}");
            }
            Err(error) => tracing::debug!(%error, "{rows} were not removed"),
            Ok(_) => {}
        }
        is_told = removed.is_err();
    }
}
