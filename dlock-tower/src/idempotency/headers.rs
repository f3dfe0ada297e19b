//! The kept headers of a response.

use http::header::{CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName};

/// The headers of a response that are kept and replayed, unless [`keep_header`](super::IdempotencyLayer::keep_header)
/// adds others.
pub const KEPT_HEADERS: [HeaderName; 17] = [
    http::header::ALLOW,
    http::header::CONTENT_DISPOSITION,
    http::header::CONTENT_ENCODING,
    http::header::CONTENT_LANGUAGE,
    http::header::CONTENT_LOCATION,
    http::header::CONTENT_RANGE,
    CONTENT_TYPE,
    http::header::ETAG,
    http::header::LAST_MODIFIED,
    http::header::LINK,
    http::header::LOCATION,
    http::header::WWW_AUTHENTICATE,
    HeaderName::from_static("preference-applied"),
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-message"),
    HeaderName::from_static("grpc-status"),
    HeaderName::from_static("grpc-status-details-bin"),
];

/// Whether a header belongs to a single exchange: it is never replayed.
pub(super) fn is_of_one_exchange(name: &HeaderName) -> bool {
    const NAMES: [&str; 27] = [
        "age",
        "connection",
        "content-length",
        "correlation-id",
        "date",
        "dlock-idempotency-stamp",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "request-id",
        "server-timing",
        "set-cookie",
        "set-cookie2",
        "te",
        "trace-id",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-amzn-requestid",
        "x-amzn-trace-id",
        "x-b3-traceid",
        "x-correlation-id",
        "x-request-id",
        "x-trace-id",
    ];
    NAMES.contains(&name.as_str()) || name.as_str().starts_with("access-control-")
}

/// Returns the kept headers of a response, multi-valued ones whole.
pub(super) fn kept(headers: &HeaderMap, more: &[HeaderName]) -> HeaderMap {
    // Headers named by `Connection` belong to the connection.
    let of_connection = |name: &HeaderName| {
        headers.get_all(CONNECTION).iter().any(|value| {
            let named = value.as_bytes().split(|byte| *byte == b',');
            named
                .map(<[u8]>::trim_ascii)
                .any(|named| named.eq_ignore_ascii_case(name.as_str().as_bytes()))
        })
    };
    let mut kept = HeaderMap::new();
    for name in KEPT_HEADERS.iter().chain(more) {
        if headers.contains_key(name)
            && !kept.contains_key(name)
            && !is_of_one_exchange(name)
            && !of_connection(name)
        {
            for value in headers.get_all(name) {
                kept.append(name.clone(), value.clone());
            }
        }
    }
    kept
}

/// Returns the kept trailers of a response: all but those of a single exchange.
pub(super) fn kept_trailers(trailers: HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::with_capacity(trailers.len());
    for (name, value) in &trailers {
        if !is_of_one_exchange(name) {
            kept.append(name.clone(), value.clone());
        }
    }
    kept
}
