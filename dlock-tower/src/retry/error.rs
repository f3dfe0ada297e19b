use std::error::Error;
use std::fmt;

use http::HeaderValue;

use super::sent::Sent;
use crate::body::BoxError;

/// A request that got no response, or whose client was not ready for another try after one that is worth a retry.
///
/// It is unknown whether the server carried it out. [`key`](Self::key) is the key under which it was sent, even if the
/// layer generated it: a caller that sends the same request later, under the same key, does not repeat the work.
///
/// ```
/// use dlock_tower::retry::SendError;
///
/// /// What to keep of a payment whose outcome is unknown, to send it again under the same key.
/// fn key_of(error: &SendError) -> Option<String> {
///     Some(error.key()?.to_str().ok()?.to_owned())
/// }
/// # let _ = key_of;
/// ```
#[derive(Debug)]
pub struct SendError {
    sent: Option<Sent>,
    source: BoxError,
}

impl SendError {
    pub(super) fn new(error: impl Into<BoxError>, sent: Option<Sent>) -> SendError {
        SendError {
            sent,
            source: error.into(),
        }
    }

    /// Returns the value of the key's header, or `None` if the request was not sent or the layer does not apply to its
    /// method.
    #[must_use]
    pub fn key(&self) -> Option<&HeaderValue> {
        self.sent.as_ref().map(|sent| &sent.key)
    }

    /// The key and the number of tries; `None` as for [`key`](Self::key).
    #[must_use]
    pub fn sent(&self) -> Option<&Sent> {
        self.sent.as_ref()
    }

    /// Returns the last error of the client, with its type.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.source.downcast_ref()
    }

    /// The last error of the client.
    #[must_use]
    pub fn into_source(self) -> Box<dyn Error + Send + Sync> {
        self.source
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.sent {
            Some(Sent { key, attempts }) => write!(
                f,
                "the request got no response (idempotency key {}, sent {attempts} times)",
                String::from_utf8_lossy(key.as_bytes())
            ),
            None => f.write_str("the request got no response"),
        }
    }
}

impl Error for SendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}
