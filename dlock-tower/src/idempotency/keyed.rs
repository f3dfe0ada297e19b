//! The record of a request, found by the parts of the request.

use dlock::Error;
use dlock::record::RecordKey;
use http::Method;

use super::caller::Caller;
use super::parted::Parted;

/// A request with a key, reduced to the parts of its record's name: for operators that know the request and look for its
/// record. The options are those of the layer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use dlock::operations::Intervention;
/// use dlock_tower::idempotency::{Caller, KeyedRequest};
/// use http::Method;
///
/// # let client = dlock::LockClient::memory();
/// let request = KeyedRequest::new(&Method::POST, "/orders", "cart-42").caller(&Caller::new("user-7"));
/// let why = Intervention::new("its price was wrong, see ticket 815");
/// client.forget_record(&request.record_key()?, why).await?; // a retry is carried out anew
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "it names a record, and changes nothing"]
pub struct KeyedRequest {
    method: String,
    place: Place,
    key: String,
    namespace: String,
    caller: Caller,
    /// With `per_host`; the request may have no host.
    host: Option<Option<String>>,
}

#[derive(Debug, Clone)]
enum Place {
    Path(String),
    Route(String),
}

impl KeyedRequest {
    /// Creates a request of any caller to this path, as it was sent, without its query; with this key, without quotes.
    pub fn new(method: &Method, path: impl Into<String>, key: impl Into<String>) -> KeyedRequest {
        KeyedRequest {
            method: method.as_str().to_owned(),
            place: Place::Path(path.into()),
            key: key.into(),
            namespace: String::new(),
            caller: Caller::any(),
            host: None,
        }
    }

    /// Sets the caller, as the layer [finds](super::caller) it.
    pub fn caller(mut self, caller: &Caller) -> KeyedRequest {
        self.caller = caller.clone();
        self
    }

    /// Sets the namespace, see [`IdempotencyLayer::namespace`](super::IdempotencyLayer::namespace).
    pub fn namespace(mut self, namespace: impl Into<String>) -> KeyedRequest {
        self.namespace = namespace.into();
        self
    }

    /// Sets the host, if the layer is [`per_host`](super::IdempotencyLayer::per_host).
    pub fn host(self, host: impl AsRef<str>) -> KeyedRequest {
        self.host_if_any(Some(host.as_ref().to_ascii_lowercase()))
    }

    pub(super) fn host_if_any(mut self, host: Option<String>) -> KeyedRequest {
        self.host = Some(host);
        self
    }

    /// Sets the result of the layer's [`route`](super::IdempotencyLayer::route), which replaces the path.
    pub fn route(mut self, route: impl Into<String>) -> KeyedRequest {
        self.place = Place::Route(route.into());
        self
    }

    /// Returns the name of the record.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], which cannot happen: the name is a hash.
    pub fn record_key(&self) -> Result<RecordKey, Error> {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut name = Parted::new("dlock idempotency key 1")
            .with(&self.namespace)
            .with_optional(self.caller.id())
            .with(&self.method);
        if let Some(host) = &self.host {
            name = name.with("host").with_optional(host.as_ref());
        }
        let name = match &self.place {
            Place::Route(route) => name.with("given").with(route),
            Place::Path(path) => name.with("path").with(path),
        };
        let digest = name.with(&self.key).digest();
        let hex: String = digest
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .map(|digit| char::from(HEX[usize::from(digit)]))
            .collect();
        RecordKey::new(hex)
    }
}
