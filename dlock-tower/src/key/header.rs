//! Keys from headers.

use std::future::{Future, ready};

use http::header::HeaderName;
use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::{in_parts, twice};
use crate::Rejection;

/// Uses the value of a header. A missing one, one given twice, or one that is not UTF-8 is answered with 400.
///
/// A name that no header can have, such as `x account`, is answered with 500 and an error in the log, also with
/// [`optional`](Key::optional); with [`or`](Key::or) where this key is looked for.
pub fn header(name: impl Into<String>) -> Key<Header> {
    let name = name.into();
    Key::new(Header {
        header: HeaderName::from_bytes(name.as_bytes()).ok(),
        name,
    })
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
    /// `None` if no header can have that name.
    header: Option<HeaderName>,
}

impl Header {
    fn find(&self, parts: &Parts) -> Result<Found, Rejection> {
        let what = || format!("header {}", self.name);
        let Some(header) = &self.header else {
            return Err(Rejection::internal(format!(
                "no header can have the name {:?} of `key::header`",
                self.name
            )));
        };
        let mut values = parts.headers.get_all(header).iter();
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
