//! Keys from the path.

use std::future::{Future, ready};

use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::{decoded, in_parts, original_uri};
use crate::Rejection;

/// Uses the path of the URI, as in `/accounts/42`: one lock for all operations on a resource.
///
/// It is the whole path that the client sent, also inside a nested axum router (with the feature `axum`; without it,
/// only the rest of the path is seen, and equal sub-paths share a key). It is percent-decoded, so that two spellings of
/// a path are one key.
pub fn path() -> Key<Path> {
    Key::new(Path { method: false })
}

/// Uses the method and the path, as in `POST /accounts/42`; see [`path`].
pub fn method_and_path() -> Key<Path> {
    Key::new(Path { method: true })
}

/// See [`path`] and [`method_and_path`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/jobs/nightly").body(()).unwrap();
/// let (_, found) = key::path().extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "/jobs/nightly"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Path {
    method: bool,
}

impl Path {
    fn find(&self, parts: &Parts) -> Result<Found, Rejection> {
        let path = decoded(original_uri(parts).path(), || "the path".to_owned())?;
        Ok(Found::Key(if self.method {
            format!("{} {path}", parts.method).into()
        } else {
            path.into()
        }))
    }
}

impl<B: Send> ExtractKey<B> for Path {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self.find(parts)))
    }
}
