//! Keys from JSON bodies.

use std::time::Duration;

use http::{Method, Request};
use http_body::Body;
use serde_json::Value;

use super::change::Key;
use super::found::{ExtractKey, Found};
use crate::Rejection;
use crate::body::read::DEFAULT_BODY_TIMEOUT;
use crate::body::{BoxError, Buffered, FromBuffered};

/// How many bytes of a body are read for a key by default: 1 MiB.
pub const DEFAULT_JSON_LIMIT: usize = 1024 * 1024;

/// Uses a field of the JSON body: `json_field("account.id")`, or a JSON pointer, `json_field("/account/id")`. It must
/// be a string, an integer or a boolean.
///
/// The body is read before the lock is acquired, and the handler gets it byte for byte, with its trailers. More than
/// [`DEFAULT_JSON_LIMIT`] bytes ([`limit`](Key::limit)) are answered with 413; a body that is not JSON, or has no such
/// field, with 400. A `CONNECT` request has none: its body is not read.
///
/// A client that takes longer than [`DEFAULT_BODY_TIMEOUT`] ([`timeout`](Key::timeout)) to send its body is
/// answered with 408.
///
/// If the handler reads the field as a number, give the key that type, so that `7` and `"007"` are one key:
/// `json_field("account").parsed::<u64>()`.
pub fn json_field(field: impl AsRef<str>) -> Key<JsonField> {
    let field = field.as_ref();
    let pointer = match field {
        pointer if pointer.is_empty() || pointer.starts_with('/') => pointer.to_owned(),
        dotted => dotted.split('.').fold(String::new(), |pointer, name| {
            pointer + "/" + &name.replace('~', "~0").replace('/', "~1")
        }),
    };
    Key::new(JsonField {
        pointer,
        limit: DEFAULT_JSON_LIMIT,
        timeout: DEFAULT_BODY_TIMEOUT,
    })
}

/// See [`json_field`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock_tower::{LockLayer, key};
///
/// let client = dlock::LockClient::memory();
/// let by_account = key::json_field("account.id").parsed::<u64>().prefix("account:");
/// let layer = LockLayer::new(client, by_account);
/// # let _ = layer;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct JsonField {
    pointer: String,
    limit: usize,
    timeout: Duration,
}

impl Key<JsonField> {
    /// Limits the bytes of a body; 1 MiB by default. A longer one is answered with 413.
    pub fn limit(mut self, bytes: usize) -> Key<JsonField> {
        self.extractor.limit = bytes;
        self
    }

    /// Limits how long a client may take to send its body; 30 s by default. A slower one is answered with 408.
    pub fn timeout(mut self, timeout: Duration) -> Key<JsonField> {
        self.extractor.timeout = timeout;
        self
    }
}

impl JsonField {
    fn name(&self) -> String {
        format!("JSON field {}", self.pointer)
    }

    fn find(&self, body: &[u8]) -> Result<Found, Rejection> {
        let body: Value = serde_json::from_slice(body)
            .map_err(|error| Rejection::invalid_key(format!("the body is not JSON: {error}")))?;
        Ok(Found::Key(match body.pointer(&self.pointer) {
            None | Some(Value::Null) => return Ok(Found::missing(self.name())),
            Some(Value::String(text)) => text.into(),
            Some(Value::Bool(value)) => value.to_string().into(),
            Some(Value::Number(number)) if !number.is_f64() => number.to_string().into(),
            // The handler may treat 1.0 and 1 as equal.
            Some(_) => {
                return Err(Rejection::invalid_key(format!(
                    "{} is neither a string nor an integer nor a boolean",
                    self.name()
                )));
            }
        }))
    }
}

impl<B> ExtractKey<B> for JsonField
where
    B: FromBuffered + Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    async fn extract(&self, request: Request<B>) -> Result<(Request<B>, Found), Rejection> {
        // The data of a tunnel has no end before the handler answers.
        if request.method() == Method::CONNECT {
            return Ok((request, Found::missing(self.name())));
        }
        let (parts, body) = request.into_parts();
        let body = Buffered::read_within(body, self.limit, self.timeout).await?;
        let found = self.find(body.data())?;
        Ok((Request::from_parts(parts, B::from_buffered(body)), found))
    }
}
