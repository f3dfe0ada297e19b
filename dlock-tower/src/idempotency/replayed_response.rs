//! Replaying a stored response.

use http::header::{CACHE_CONTROL, HeaderMap, HeaderName, HeaderValue, TRAILER};
use http::{Response, Version};

use super::body::ResponseBody;
use super::headers::{REPLAYED, REPLAYED_AGE, REPLAYED_EXPIRES_IN};
use super::stored::Kept;

/// Builds the response to replay.
pub(super) fn response<R>(kept: Kept, version: Version) -> Response<ResponseBody<R>> {
    let Kept {
        status,
        mut headers,
        body,
        trailers,
        stamp,
    } = kept;
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
    if let Some(stamp) = stamp {
        headers.insert(REPLAYED_AGE, stamp.age().as_secs().into());
        headers.insert(REPLAYED_EXPIRES_IN, stamp.expires_in().as_secs().into());
    }
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    if let Some(trailers) = &trailers {
        announce(&mut headers, trailers, version);
    }
    let mut response = Response::new(ResponseBody::stored(status, body, trailers));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// HTTP/1 sends only trailers that a header of this message names.
fn announce(headers: &mut HeaderMap, trailers: &HeaderMap, version: Version) {
    if version > Version::HTTP_11 {
        return;
    }
    let names: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
    if let Ok(names) = HeaderValue::try_from(names.join(", ")) {
        headers.insert(TRAILER, names);
    }
}
