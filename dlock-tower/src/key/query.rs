//! Keys from the query.

use std::future::{Future, ready};

use http::request::{Parts, Request};

use super::change::Key;
use super::found::{ExtractKey, Found};
use super::parts::{decoded, in_parts, original_uri, twice};
use crate::Rejection;

/// Uses the value of a query parameter, form-decoded. A missing one, one given twice, or one that is not UTF-8 is
/// answered with 400.
pub fn query(name: impl Into<String>) -> Key<Query> {
    Key::new(Query { name: name.into() })
}

/// See [`query`].
///
/// ```
/// use dlock_tower::key::{self, ExtractKey, Found};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock_tower::Rejection> {
/// let request = http::Request::get("/book?seat=12").body(()).unwrap();
/// let (_, found) = key::query("seat").extract(request).await?;
/// assert!(matches!(found, Found::Key(key) if key.as_str() == "12"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Query {
    name: String,
}

impl Query {
    fn find(&self, parts: &Parts) -> Result<Found, Rejection> {
        let what = || format!("query parameter {}", self.name);
        let mut found = None;
        for pair in original_uri(parts).query().unwrap_or_default().split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            // A name that cannot be decoded belongs to another parameter.
            if form(name, String::new).is_ok_and(|name| name == self.name)
                && found.replace(form(value, what)?).is_some()
            {
                return Err(twice(what()));
            }
        }
        Ok(found.map_or_else(|| Found::missing(what()), |value| Found::Key(value.into())))
    }
}

fn form(text: &str, what: impl FnOnce() -> String) -> Result<String, Rejection> {
    decoded(&text.replace('+', " "), what)
}

impl<B: Send> ExtractKey<B> for Query {
    fn extract(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = Result<(Request<B>, Found), Rejection>> + Send {
        ready(in_parts(request, |parts| self.find(parts)))
    }
}
