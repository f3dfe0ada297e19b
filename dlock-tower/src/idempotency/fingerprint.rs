//! What identifies a request: the name of its record, and the digest of its contents.

use bytes::Bytes;
use dlock::record::{Fingerprint, RecordKey};
use http::header::{self, HeaderName};
use http::request::Parts;

use super::caller::Caller;
use super::keyed::KeyedRequest;
use super::parted::Parted;
use super::settings::Settings;
use crate::Rejection;
use crate::key::{host, original_uri};

/// Returns the name of the record: from the caller, the method, the path and the key.
pub(super) fn record_key(
    settings: &Settings,
    caller: &Caller,
    parts: &Parts,
    route: Option<&str>,
    key: &str,
) -> Result<RecordKey, Rejection> {
    // As it was sent: the router's form may change from one deploy to the next.
    let mut request = KeyedRequest::new(&parts.method, original_uri(parts).path(), key)
        .namespace(&settings.namespace)
        .caller(caller);
    if settings.per_host {
        request = request.host_if_any(host(parts).map(str::to_ascii_lowercase));
    }
    if let Some(route) = route {
        request = request.route(route);
    }
    let record = request.record_key();
    record.map_err(|error| Rejection::internal(error.to_string()))
}

/// Headers that change the meaning of a request: the state and the part of the resource, and how to read the body. They
/// may be absent, which counts as well.
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

/// Returns the digest of method, path, query, content type, the other [`MEANINGFUL`] headers and the body's bytes; or
/// of method, path and the service's choice.
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
