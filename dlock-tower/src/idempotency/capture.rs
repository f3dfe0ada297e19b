//! Capturing a response while it passes.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::response::Parts;
use http::{HeaderMap, StatusCode, Version};
use http_body::{Frame, SizeHint};

use super::claim::Claim;
use super::headers::{self, has_no_body};
use super::policy::{Ending, Outcome, RecordAction};
use super::settlement::Settlement;
use super::stored::{Kept, Stored};
use crate::body::BoxError;
use crate::grpc;

/// The captured part of a response.
pub(super) struct Capture {
    status: StatusCode,
    /// The kept headers.
    headers: HeaderMap,
    /// What to do with the record; known only at the end of a gRPC call.
    action: Option<RecordAction>,
    rolled_back: bool,
    body: Vec<Bytes>,
    len: usize,
    limit: usize,
    trailers: Option<HeaderMap>,
    /// How many bytes the server announces: by the head, or as the body knows its length.
    announced: Option<usize>,
    /// Whether trailers may follow those.
    trailers_may_follow: bool,
    /// Whether the body had more bytes than those.
    is_cut: bool,
}

impl Capture {
    /// `rolled_back`: all effects of the handler were in a transaction that was not committed.
    pub(super) fn new(parts: &Parts, claim: &Claim, rolled_back: bool) -> Capture {
        let settings = &claim.core.settings;
        Capture {
            status: parts.status,
            headers: settings.kept_headers.of(parts.status, &parts.headers),
            action: action(parts, claim, rolled_back),
            rolled_back,
            body: Vec::new(),
            len: 0,
            limit: settings.response_limit,
            trailers: None,
            announced: announced(&parts.headers),
            trailers_may_follow: false,
            is_cut: false,
        }
    }

    /// The settlement, if it does not depend on the body: the key is released.
    pub(super) fn released(&self) -> Option<Settlement> {
        Settlement::releasing(self.action?)
    }

    /// Whether a response of this many bytes is too long.
    pub(super) fn exceeds(&self, len: u64) -> bool {
        len > self.limit as u64
    }

    /// Captures a frame and returns it, without bytes that were not announced: a server would not send them, or fail the
    /// response.
    ///
    /// # Errors
    ///
    /// The whole frame, of which nothing is captured, if it is too much.
    pub(super) fn take(&mut self, mut frame: Frame<Bytes>) -> Result<Frame<Bytes>, Frame<Bytes>> {
        if let Some(data) = frame.data_mut() {
            let announced = self.announced.unwrap_or(usize::MAX) - self.len;
            if data.len().min(announced) > self.limit - self.len {
                return Err(frame);
            }
            self.is_cut |= data.len() > announced;
            data.truncate(announced);
            if !data.is_empty() {
                self.len += data.len();
                self.body.push(data.clone());
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers.get_or_insert_default().extend(trailers.clone());
        }
        Ok(frame)
    }

    /// Expects as many bytes as the body says to have, which the server announces in place of the head.
    pub(super) fn expect_bytes(&mut self, exactly: Option<u64>) {
        let exactly = exactly.and_then(|bytes| usize::try_from(bytes).ok());
        self.announced = self.announced.or(exactly);
    }

    /// Expects no body after the head, whose length is that of another response (to `HEAD`).
    pub(super) fn expect_no_body(&mut self) {
        self.announced = None;
    }

    /// Expects what a response of this version may have: trailers after all bytes that it announces, but not in HTTP/1.
    pub(super) fn expect_version(&mut self, version: Version) {
        self.trailers_may_follow = version > Version::HTTP_11;
    }

    /// How many of the bytes that the rest of the body says to have are sent.
    pub(super) fn rest(&self, hint: SizeHint) -> SizeHint {
        let Some(announced) = self.announced else {
            return hint;
        };
        let most = (announced - self.len) as u64;
        let mut rest = SizeHint::new();
        rest.set_lower(hint.lower().min(most));
        rest.set_upper(hint.upper().map_or(most, |upper| upper.min(most)));
        rest
    }

    /// The error for a body that ends now, if more was announced.
    pub(super) fn cut_short(&self) -> Option<BoxError> {
        let announced = self.announced.filter(|announced| self.len < *announced)?;
        Some(format!("the response ended after {} of {announced} bytes", self.len).into())
    }

    /// Whether all bytes that were announced have arrived, and the record does not depend on trailers.
    pub(super) fn has_all_bytes(&self) -> bool {
        self.announced == Some(self.len) && self.action.is_some()
    }

    /// Whether trailers have arrived, after all bytes that were announced, or more bytes than those. Either is the end of a
    /// body, whether or not it says so: a server asks for nothing after trailers.
    pub(super) fn has_ended(&self) -> bool {
        self.is_cut || self.trailers.is_some() && self.cut_short().is_none()
    }

    /// Whether the body had more bytes than were announced: its rest is nothing to send.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Whether nothing can follow, so that the server may not even ask for the end.
    pub(super) fn is_complete(&self) -> bool {
        self.has_ended() || self.has_all_bytes() && !self.trailers_may_follow
    }

    /// Returns the captured pieces, as they arrived, for the first caller.
    pub(super) fn pieces(&self) -> (Vec<Bytes>, Option<HeaderMap>) {
        (self.body.clone(), self.trailers.clone())
    }

    /// Returns what to store of a response whose end failed or is not waited for.
    pub(super) fn conclude_without_end(self, claim: &Claim) -> Settlement {
        match self.has_all_bytes() {
            true => self.conclude(claim),
            false => Stored::Unavailable.into(),
        }
    }

    /// Returns what to store at the end of the response.
    pub(super) fn conclude(self, claim: &Claim) -> Settlement {
        let action = self.action.unwrap_or_else(|| {
            let code = self.trailers.as_ref().and_then(grpc_status);
            let ending = Ending::Grpc {
                code: code.unwrap_or(2),
                not_started: false,
            };
            claim.judge(&ending, self.rolled_back)
        });
        Settlement::releasing(action).unwrap_or_else(|| {
            let kept = Kept {
                status: self.status,
                headers: self.headers,
                body: self.body,
                trailers: self.trailers.map(headers::kept_trailers),
                stamp: None,
            };
            Stored::Response(Box::new(kept)).into()
        })
    }
}

/// How many bytes the head announces.
pub(super) fn announced(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// What the head decides about the key.
fn action(parts: &Parts, claim: &Claim, rolled_back: bool) -> Option<RecordAction> {
    if let Some(outcome) = parts.extensions.get::<Outcome>() {
        return Some((*outcome).into());
    }
    let not_started = claim.was_not_begun();
    if parts.status == StatusCode::OK && grpc::content_type(&parts.headers).is_some() {
        let code = match grpc_status(&parts.headers) {
            // With this mark the code does not matter.
            None if not_started => Some(2),
            None if grpc::has_trailers(&parts.headers) => return None,
            code => code,
        };
        if let Some(code) = code {
            return Some(claim.judge(&Ending::Grpc { code, not_started }, rolled_back));
        }
    }
    let ending = Ending::Response {
        status: parts.status,
        headers: &parts.headers,
        not_started,
    };
    Some(claim.judge(&ending, rolled_back))
}

fn grpc_status(headers: &HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// Whether the response has no end to wait for.
pub(super) fn is_endless(parts: &Parts) -> bool {
    const EVENTS: &[u8] = b"text/event-stream";
    let events = parts.headers.get(CONTENT_TYPE).is_some_and(|value| {
        let start = value.as_bytes().get(..EVENTS.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(EVENTS))
    });
    events && !has_no_body(parts.status) || parts.status == StatusCode::SWITCHING_PROTOCOLS
}
