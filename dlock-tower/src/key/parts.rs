//! Helpers that the key extractors share.

use http::header::HOST;
use http::request::{Parts, Request};

use super::found::Found;
use crate::Rejection;

/// Looks for a key in everything but the body.
pub(super) fn in_parts<B>(
    request: Request<B>,
    find: impl FnOnce(&mut Parts) -> Result<Found, Rejection>,
) -> Result<(Request<B>, Found), Rejection> {
    let (mut parts, body) = request.into_parts();
    let found = find(&mut parts)?;
    Ok((Request::from_parts(parts, body), found))
}

/// The URI as the client sent it: axum strips the prefix of a nested router.
pub(crate) fn original_uri(parts: &Parts) -> &http::Uri {
    #[cfg(feature = "axum")]
    if let Some(original) = parts.extensions.get::<axum::extract::OriginalUri>() {
        return &original.0;
    }
    &parts.uri
}

/// The host of the request, with its port if the client gives one: the authority of the URI (HTTP/2), otherwise the `Host`
/// header.
pub(crate) fn host(parts: &Parts) -> Option<&str> {
    match original_uri(parts).authority() {
        Some(authority) => Some(authority.as_str()),
        None => parts.headers.get(HOST)?.to_str().ok(),
    }
}

pub(super) fn decoded(text: &str, what: impl FnOnce() -> String) -> Result<String, Rejection> {
    percent_encoding::percent_decode_str(text)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| Rejection::invalid_key(format!("{} is not UTF-8", what())))
}

pub(super) fn twice(what: String) -> Rejection {
    Rejection::invalid_key(what + " is given more than once")
}

pub(super) fn empty() -> Rejection {
    Rejection::invalid_key("what names the lock is empty")
}
