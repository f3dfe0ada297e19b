//! Keys from headers.

use std::future::{Future, ready};

use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::{in_parts, twice};
use crate::Rejection;

/// Uses the value of a header. A missing one, one given twice, or one that is not UTF-8 is answered with 400.
pub fn header(name: impl Into<String>) -> Key<Header> {
    Key::new(Header { name: name.into() })
}

/// See [`header`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/").header("x-account", "7").body(()).unwrap();
/// let (_, found) = key::header("x-account").extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "7"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Header {
    name: String,
}

impl Header {
    fn find(&self, parts: &Parts) -> Result<Found, Rejection> {
        let what = || format!("header {}", self.name);
        let mut values = parts.headers.get_all(&self.name).iter();
        let Some(value) = values.next() else {
            return Ok(Found::missing(what()));
        };
        if values.next().is_some() {
            return Err(twice(what()));
        }
        match std::str::from_utf8(value.as_bytes()) {
            Ok(value) => Ok(Found::Key(value.into())),
            Err(_) => Err(Rejection::invalid_key(format!("{} is not UTF-8", what()))),
        }
    }
}

impl<B: Send> ExtractKey<B> for Header {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self.find(parts)))
    }
}
