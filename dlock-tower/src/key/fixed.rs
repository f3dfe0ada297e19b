//! One key for all requests.

use std::future::{Future, ready};

use dlock::LockKey;
use http::Request;

use super::change::Key;
use super::found::{ExtractKey, Found};
use crate::Rejection;

/// Uses the same key for every request. An invalid lock name is answered with 500 and an error in the log.
pub fn fixed(key: impl Into<LockKey>) -> Key<Fixed> {
    Key::new(Fixed { key: key.into() })
}

/// See [`fixed`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/").body(()).unwrap();
/// let (_, found) = key::fixed("import").extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "import"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Fixed {
    key: LockKey,
}

impl<B: Send> ExtractKey<B> for Fixed {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(match self.key.check() {
            Ok(()) => Ok((request, Found::Key(self.key.clone()))),
            Err(error) => Err(Rejection::internal(error.to_string())),
        })
    }
}
