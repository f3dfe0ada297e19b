//! The headers of a response that are kept, and those that a replay has of its own.

use http::StatusCode;
use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, RETRY_AFTER};

/// Marks a replayed response, which was not made for this request: `true`.
pub const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// How many seconds ago the replayed response was stored, by the clocks of the servers.
pub const REPLAYED_AGE: HeaderName = HeaderName::from_static("idempotent-replayed-age");

/// For how many more seconds it is kept: a later retry is carried out anew.
pub const REPLAYED_EXPIRES_IN: HeaderName = HeaderName::from_static("idempotent-replayed-expires-in");

/// The headers of a response that are kept and replayed, unless [`keep_header`](super::IdempotencyLayer::keep_header) or
/// [`keep_all_headers`](super::IdempotencyLayer::keep_all_headers) add others; and `Retry-After` of a 2xx or 3xx.
pub const KEPT_HEADERS: [HeaderName; 31] = [
    http::header::ACCEPT_RANGES,
    http::header::ALLOW,
    http::header::CONTENT_DISPOSITION,
    http::header::CONTENT_ENCODING,
    http::header::CONTENT_LANGUAGE,
    http::header::CONTENT_LOCATION,
    http::header::CONTENT_RANGE,
    http::header::CONTENT_SECURITY_POLICY,
    http::header::CONTENT_SECURITY_POLICY_REPORT_ONLY,
    CONTENT_TYPE,
    http::header::ETAG,
    http::header::LAST_MODIFIED,
    http::header::LINK,
    http::header::LOCATION,
    http::header::REFERRER_POLICY,
    http::header::STRICT_TRANSPORT_SECURITY,
    http::header::WWW_AUTHENTICATE,
    http::header::X_CONTENT_TYPE_OPTIONS,
    http::header::X_FRAME_OPTIONS,
    HeaderName::from_static("accept-patch"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("cross-origin-embedder-policy"),
    HeaderName::from_static("cross-origin-opener-policy"),
    HeaderName::from_static("cross-origin-resource-policy"),
    HeaderName::from_static("permissions-policy"),
    HeaderName::from_static("preference-applied"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-message"),
    HeaderName::from_static("grpc-status"),
    HeaderName::from_static("grpc-status-details-bin"),
];

/// Whether a header belongs to a single exchange: it is never replayed.
fn is_of_one_exchange(name: &HeaderName) -> bool {
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

/// Why a header is not kept, even if it is asked for.
pub(super) fn refusal(name: &HeaderName) -> Option<&'static str> {
    if is_of_one_exchange(name) {
        return Some("belongs to one response only");
    }
    if *name == CACHE_CONTROL {
        return Some("is `no-store` in each replay");
    }
    let is_ours = [REPLAYED, REPLAYED_AGE, REPLAYED_EXPIRES_IN].contains(name);
    is_ours.then_some("is set by the layer in each replay")
}

/// Which headers of a response are kept, in addition to [`KEPT_HEADERS`].
#[derive(Debug, Clone, Default)]
pub(super) struct KeptHeaders {
    pub(super) more: Vec<HeaderName>,
    pub(super) all: bool,
}

impl KeptHeaders {
    /// Returns the kept headers of a response, multi-valued ones whole.
    pub(super) fn of(&self, status: StatusCode, headers: &HeaderMap) -> HeaderMap {
        let mut kept = HeaderMap::new();
        for (name, value) in headers {
            if self.has(name, status) && !is_of_connection(name, headers) {
                kept.append(name.clone(), value.clone());
            }
        }
        kept
    }

    fn has(&self, name: &HeaderName, status: StatusCode) -> bool {
        // A failure that is kept does not change, however late the client asks again.
        let is_default = match *name == RETRY_AFTER {
            true => status.is_success() || status.is_redirection(),
            false => self.all || KEPT_HEADERS.contains(name),
        };
        (is_default || self.more.contains(name)) && refusal(name).is_none()
    }
}

/// Whether `Connection` names the header, which then belongs to the connection.
fn is_of_connection(name: &HeaderName, headers: &HeaderMap) -> bool {
    headers.get_all(CONNECTION).iter().any(|value| {
        let named = value.as_bytes().split(|byte| *byte == b',');
        named
            .map(<[u8]>::trim_ascii)
            .any(|named| named.eq_ignore_ascii_case(name.as_str().as_bytes()))
    })
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

/// Whether a response has no body, whatever length it announces.
///
/// <https://www.rfc-editor.org/rfc/rfc9112#section-6.3>
pub(super) fn has_no_body(status: StatusCode) -> bool {
    status.is_informational() || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}
