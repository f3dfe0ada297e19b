//! The stored form of a finished request, as bytes.
//!
//! The first byte is the version of the format, the second selects one of three forms, and for a response there follow
//! status, headers, body and trailers, each preceded by its length, big-endian. Bytes that do not decode completely are
//! an error: a record that cannot be read never counts as missing.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf, BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

const VERSION: u8 = 1;
const RESPONSE: u8 = 1;
const UNAVAILABLE: u8 = 2;
const FAILED: u8 = 3;

/// The header with the [`Stamp`] of a response, in its stored form only.
const STAMP: HeaderName = HeaderName::from_static("dlock-idempotency-stamp");

/// When a result was stored, by the clock of the storing process, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Since the Unix epoch.
    at: Duration,
    retention: Duration,
}

impl Stamp {
    pub(super) fn now(retention: Duration) -> Stamp {
        Stamp {
            at: since_epoch(),
            retention,
        }
    }

    /// Returns how long ago that was; zero if the clocks of two processes differ by more.
    pub(super) fn age(self) -> Duration {
        since_epoch().saturating_sub(self.at)
    }

    /// Returns how long it is kept from now on.
    pub(super) fn expires_in(self) -> Duration {
        self.retention.saturating_sub(self.age())
    }

    fn write(self) -> Option<HeaderValue> {
        let text = format!("{} {}", self.at.as_millis(), self.retention.as_millis());
        HeaderValue::try_from(text).ok()
    }

    fn read(value: &HeaderValue) -> Option<Stamp> {
        let (at, retention) = value.to_str().ok()?.split_once(' ')?;
        Some(Stamp {
            at: Duration::from_millis(at.parse().ok()?),
            retention: Duration::from_millis(retention.parse().ok()?),
        })
    }
}

fn since_epoch() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // In the precision of the stored form.
    Duration::from_millis(u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stored {
    /// A response to replay.
    Response(Box<Kept>),
    /// There was a response, but it was too large to keep, or a stream.
    Unavailable,
    /// There was no response: the handler panicked, or the service failed.
    Failed,
}

/// A kept response: the headers are the replayed ones.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Kept {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// In the pieces in which it arrived.
    pub(super) body: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    /// Of one that was read; `None` for an earlier version.
    pub(super) stamp: Option<Stamp>,
}

/// Why stored bytes could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unreadable {
    Newer(u8),
    Broken,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unreadable::Newer(version) => {
                write!(f, "its format is of version {version}, this one reads {VERSION}")
            }
            Unreadable::Broken => f.write_str("its bytes are malformed"),
        }
    }
}

impl Stored {
    /// Encodes it, for a response with the stamp. Versions that do not know stamps ignore it, as a header.
    pub(super) fn encode(&self, stamp: Stamp) -> Vec<u8> {
        match self {
            Stored::Unavailable => vec![VERSION, UNAVAILABLE],
            Stored::Failed => vec![VERSION, FAILED],
            Stored::Response(kept) => {
                let body: usize = kept.body.iter().map(Bytes::len).sum();
                let mut out = Vec::with_capacity(body + 256);
                out.put_slice(&[VERSION, RESPONSE]);
                out.put_u16(kept.status.as_u16());
                let mut headers = kept.headers.clone();
                headers.extend(stamp.write().map(|value| (STAMP, value)));
                put_headers(&mut out, &headers);
                out.put_u32(length(body));
                for piece in &kept.body {
                    out.put_slice(piece);
                }
                match &kept.trailers {
                    Some(trailers) => {
                        out.put_u8(1);
                        put_headers(&mut out, trailers);
                    }
                    None => out.put_u8(0),
                }
                out
            }
        }
    }

    /// Whether both are equal, whenever they were stored.
    pub(super) fn is_of(&self, other: &Stored) -> bool {
        let at = Stamp {
            at: Duration::ZERO,
            retention: Duration::ZERO,
        };
        self.encode(at) == other.encode(at)
    }

    /// Whether this is the stored form of [`Stored::Unavailable`].
    pub(super) fn is_tombstone(bytes: &[u8]) -> bool {
        *bytes == [VERSION, UNAVAILABLE]
    }

    pub(super) fn decode(bytes: Vec<u8>) -> Result<Stored, Unreadable> {
        let mut rest = Bytes::from(bytes);
        match take_u8(&mut rest)? {
            VERSION => {}
            0 => return Err(Unreadable::Broken),
            newer => return Err(Unreadable::Newer(newer)),
        }
        let stored = match take_u8(&mut rest)? {
            UNAVAILABLE => Stored::Unavailable,
            FAILED => Stored::Failed,
            RESPONSE => Stored::Response(Box::new(take_response(&mut rest)?)),
            _ => return Err(Unreadable::Broken),
        };
        if rest.is_empty() {
            Ok(stored)
        } else {
            Err(Unreadable::Broken)
        }
    }
}

/// Bodies and headers are limited long before this: it never saturates.
fn length(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

fn put_headers(out: &mut Vec<u8>, headers: &HeaderMap) {
    out.put_u32(length(headers.len()));
    for (name, value) in headers {
        for text in [name.as_str().as_bytes(), value.as_bytes()] {
            out.put_u32(length(text.len()));
            out.put_slice(text);
        }
    }
}

fn take_response(rest: &mut Bytes) -> Result<Kept, Unreadable> {
    let status = rest.try_get_u16().map_err(|_| Unreadable::Broken)?;
    let status = StatusCode::from_u16(status).map_err(|_| Unreadable::Broken)?;
    let mut headers = take_headers(rest)?;
    let stamp = headers.remove(STAMP).as_ref().and_then(Stamp::read);
    let body = take_bytes(rest)?;
    let trailers = match take_u8(rest)? {
        0 => None,
        1 => Some(take_headers(rest)?),
        _ => return Err(Unreadable::Broken),
    };
    let body = if body.is_empty() { Vec::new() } else { vec![body] };
    Ok(Kept {
        status,
        headers,
        body,
        trailers,
        stamp,
    })
}

fn take_u8(rest: &mut Bytes) -> Result<u8, Unreadable> {
    rest.try_get_u8().map_err(|_| Unreadable::Broken)
}

fn take_u32(rest: &mut Bytes) -> Result<usize, Unreadable> {
    let value = rest.try_get_u32().map_err(|_| Unreadable::Broken)?;
    usize::try_from(value).map_err(|_| Unreadable::Broken)
}

fn take_bytes(rest: &mut Bytes) -> Result<Bytes, Unreadable> {
    let len = take_u32(rest)?;
    if len > rest.len() {
        return Err(Unreadable::Broken);
    }
    Ok(rest.split_to(len))
}

fn take_headers(rest: &mut Bytes) -> Result<HeaderMap, Unreadable> {
    let mut headers = HeaderMap::new();
    for _ in 0..take_u32(rest)? {
        let name = HeaderName::from_bytes(&take_bytes(rest)?).map_err(|_| Unreadable::Broken)?;
        let value = HeaderValue::from_maybe_shared(take_bytes(rest)?).map_err(|_| Unreadable::Broken)?;
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMPED: Stamp = Stamp {
        at: Duration::from_millis(1_763_780_400_123),
        retention: Duration::from_secs(60),
    };

    fn kept() -> Stored {
        let mut headers = HeaderMap::new();
        headers.append("link", HeaderValue::from_static("</a>"));
        headers.append("link", HeaderValue::from_static("</b>"));
        headers.append("location", HeaderValue::from_bytes(b"/\xe9").unwrap());
        let trailers = HeaderMap::from_iter([(
            HeaderName::from_static("grpc-status"),
            HeaderValue::from_static("0"),
        )]);
        Stored::Response(Box::new(Kept {
            status: StatusCode::CREATED,
            headers,
            body: vec![Bytes::from_static(b"one"), Bytes::from_static(b"\0two")],
            trailers: Some(trailers),
            stamp: None,
        }))
    }

    #[test]
    fn what_is_stored_comes_back() {
        for stored in [Stored::Unavailable, Stored::Failed] {
            assert_eq!(Stored::decode(stored.encode(STAMPED)), Ok(stored));
        }
        let Stored::Response(before) = kept() else {
            unreachable!()
        };
        let Ok(Stored::Response(after)) = Stored::decode(kept().encode(STAMPED)) else {
            panic!("not a response")
        };
        assert_eq!(after.body.concat(), before.body.concat());
        assert_eq!(
            (after.status, after.headers, after.trailers),
            (before.status, before.headers, before.trailers)
        );
        assert_eq!(after.stamp, Some(STAMPED));
    }

    #[test]
    fn bytes_that_are_cut_or_too_many_are_an_error() {
        let whole = kept().encode(STAMPED);
        for cut in 0..whole.len() {
            assert_eq!(
                Stored::decode(whole[..cut].to_vec()),
                Err(Unreadable::Broken),
                "{cut}"
            );
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(Stored::decode(longer), Err(Unreadable::Broken));
        assert_eq!(Stored::decode(vec![VERSION, 9]), Err(Unreadable::Broken));
    }

    #[test]
    fn stamp_says_how_old_and_for_how_long() {
        let seconds = Duration::from_secs;
        let ago = |age| Stamp {
            at: since_epoch() - age,
            retention: seconds(60),
        };
        let old = ago(seconds(20));
        assert!(old.age() >= seconds(20) && old.expires_in() <= seconds(40));
        assert_eq!(ago(seconds(100)).expires_in(), seconds(0));
        let of_a_clock_ahead = Stamp {
            at: since_epoch() + seconds(100),
            ..old
        };
        assert_eq!(
            (of_a_clock_ahead.age(), of_a_clock_ahead.expires_in()),
            (seconds(0), seconds(60))
        );
        assert_eq!(Stamp::read(&HeaderValue::from_static("soon")), None);
    }

    #[test]
    fn a_newer_format_is_told_apart() {
        let mut newer = kept().encode(STAMPED);
        newer[0] = 2;
        assert_eq!(Stored::decode(newer), Err(Unreadable::Newer(2)));
    }
}
