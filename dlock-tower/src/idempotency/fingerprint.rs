//! What a request is recognized by: the name of its record, and the digest of what it asks.

use bytes::Bytes;
use dlock::record::{Fingerprint, RecordKey};
use http::header::{self, HeaderName};
use http::request::Parts;

use super::caller::Caller;
use super::keyed::KeyedRequest;
use super::parted::Parted;
use super::settings::Settings;
use crate::Rejection;
use crate::key::original_uri;

/// The name of the record: of the caller, the method, the path and the key.
pub(super) fn record_key(
    settings: &Settings,
    caller: &Caller,
    parts: &Parts,
    route: Option<&str>,
    key: &str,
) -> Result<RecordKey, Rejection> {
    // As it was sent: what the router makes of it changes from one deploy to the next.
    let mut request = KeyedRequest::new(&parts.method, original_uri(parts).path(), key)
        .namespace(&settings.namespace)
        .caller(caller);
    if settings.per_host {
        request = request.host_if_any(host(parts));
    }
    if let Some(route) = route {
        request = request.route(route);
    }
    let record = request.record_key();
    record.map_err(|error| Rejection::internal(error.to_string()))
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

/// The digest of method, path, query, content type, the other [`MEANINGFUL`] headers and the body's bytes; or of method, path
/// and what the service chooses.
pub(super) fn fingerprint(settings: &Settings, parts: &Parts, body: &Bytes) -> Fingerprint {
    let uri = original_uri(parts);
    if let Some(fingerprint_of) = &settings.fingerprint_of {
        return Parted::new("dlock idempotency fingerprint 1, chosen")
            .with(parts.method.as_str())
            .with(uri.path())
            .with(fingerprint_of(parts, body))
            .digest();
    }
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
