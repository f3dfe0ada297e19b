//! What a request is recognized by: the name of its record, and the digest of what it asks.

use bytes::Bytes;
use dlock::record::{Fingerprint, RecordKey};
use http::header::{self, HeaderName};
use http::request::Parts;
use sha2::{Digest, Sha256};

use super::caller::Caller;
use super::settings::Settings;
use crate::Rejection;
use crate::key::original_uri;

/// A hash over parts, of which each is told from the next by its length.
struct Parted(Sha256);

impl Parted {
    /// `what` keeps hashes of different things apart.
    fn new(what: &str) -> Parted {
        Parted(Sha256::new()).with(what)
    }

    fn with(mut self, part: impl AsRef<[u8]>) -> Parted {
        let part = part.as_ref();
        self.0.update((part.len() as u64).to_be_bytes());
        self.0.update(part);
        self
    }

    fn with_optional(self, part: Option<impl AsRef<[u8]>>) -> Parted {
        match part {
            Some(part) => self.with([1]).with(part),
            None => self.with([0]),
        }
    }

    fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// The name of the record: of the caller, the method, the path and the key.
pub(super) fn record_key(
    settings: &Settings,
    caller: &Caller,
    parts: &Parts,
    route: Option<&str>,
    key: &str,
) -> Result<RecordKey, Rejection> {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut name = Parted::new("dlock idempotency key 1")
        .with(&settings.namespace)
        .with_optional(caller.id())
        .with(parts.method.as_str());
    if settings.per_host {
        name = name.with("host").with_optional(host(parts));
    }
    let name = match route {
        Some(route) => name.with("given").with(route),
        // As it was sent: what the router makes of it changes from one deploy to the next.
        None => name.with("path").with(original_uri(parts).path()),
    };
    let digest = name.with(key).digest();
    let hex: String = digest
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(HEX[usize::from(digit)]))
        .collect();
    RecordKey::new(hex).map_err(|error| Rejection::internal(error.to_string()))
}

/// The authority that the request was sent to: of the URI (HTTP/2), otherwise the `Host` header.
fn host(parts: &Parts) -> Option<String> {
    let authority = match original_uri(parts).authority() {
        Some(authority) => authority.as_str(),
        None => parts.headers.get(header::HOST)?.to_str().ok()?,
    };
    Some(authority.to_ascii_lowercase())
}

/// Headers that change what a request asks for: on which state of the resource and to which part of it, and how its
/// body is to be read. They may be absent, and count then as well.
const MEANINGFUL: [HeaderName; 8] = [
    header::CONTENT_ENCODING,
    header::CONTENT_RANGE,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
    header::RANGE,
];

/// The digest of method, path, query, content type, the other [`MEANINGFUL`] headers and the body's bytes.
pub(super) fn fingerprint(parts: &Parts, body: &Bytes) -> Fingerprint {
    let uri = original_uri(parts);
    let mut all = Parted::new("dlock idempotency fingerprint 1")
        .with(parts.method.as_str())
        .with(uri.path())
        .with_optional(uri.query());
    for content_type in parts.headers.get_all(header::CONTENT_TYPE) {
        all = all.with_optional(Some(content_type));
    }
    for name in MEANINGFUL {
        for value in parts.headers.get_all(&name) {
            all = all.with_optional(Some(&name)).with(value);
        }
    }
    all.with_optional(None::<&str>).with(body).digest()
}
