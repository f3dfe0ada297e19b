//! Taking a response down while it passes.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::response::Parts;
use http::{Extensions, HeaderMap, StatusCode};
use http_body::Frame;

use super::claim::{Claim, Settlement};
use super::policy::{Ending, Outcome, Verdict};
use super::replay;
use super::stored::{Kept, Stored};
use crate::body::BoxError;
use crate::{NotStarted, grpc};

/// A response, as far as it was seen.
pub(super) struct Capture {
    status: StatusCode,
    /// Those that are kept.
    headers: HeaderMap,
    /// What becomes of the key; a gRPC call tells only at its end.
    verdict: Option<Verdict>,
    body: Vec<Bytes>,
    len: usize,
    limit: usize,
    trailers: Option<HeaderMap>,
    /// How many bytes the head says will come.
    announced: Option<usize>,
}

impl Capture {
    pub(super) fn new(parts: &Parts, claim: &Claim) -> Capture {
        let settings = &claim.core.settings;
        let announced = parts.headers.get(http::header::CONTENT_LENGTH);
        Capture {
            status: parts.status,
            headers: replay::kept(&parts.headers, &settings.kept_headers),
            verdict: verdict(parts, claim),
            body: Vec::new(),
            len: 0,
            limit: settings.response_limit,
            trailers: None,
            announced: announced.and_then(|len| len.to_str().ok()?.parse().ok()),
        }
    }

    /// The key is to be released, whatever the body says.
    pub(super) fn is_released(&self) -> bool {
        self.verdict == Some(Verdict::Release)
    }

    /// A response of so many bytes is too long.
    pub(super) fn exceeds(&self, len: u64) -> bool {
        len > self.limit as u64
    }

    /// Takes a frame down; answers false, and takes nothing, when it is the one that is too much.
    pub(super) fn take(&mut self, frame: &Frame<Bytes>) -> bool {
        if let Some(data) = frame.data_ref() {
            if data.len() > self.limit - self.len {
                return false;
            }
            if !data.is_empty() {
                self.len += data.len();
                self.body.push(data.clone());
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers.get_or_insert_default().extend(trailers.clone());
        }
        true
    }

    /// The body ends with its head, whose length is that of another response (to `HEAD`, of a 304).
    pub(super) fn expect_no_body(&mut self) {
        self.announced = None;
    }

    /// The error of a body that ends now, if the head announced more.
    pub(super) fn cut_short(&self) -> Option<BoxError> {
        let announced = self.announced.filter(|announced| self.len < *announced)?;
        Some(format!("the response ended after {} of {announced} bytes", self.len).into())
    }

    /// Whether all has come that the head announced.
    pub(super) fn has_all_announced(&self) -> bool {
        self.announced == Some(self.len)
    }

    /// What was taken down, in the pieces in which it came, for the first caller.
    pub(super) fn pieces(&self) -> (Vec<Bytes>, Option<HeaderMap>) {
        (self.body.clone(), self.trailers.clone())
    }

    /// What is to be stored at the end of the response.
    pub(super) fn conclude(self, claim: &Claim) -> Settlement {
        let verdict = self.verdict.unwrap_or_else(|| {
            let code = self.trailers.as_ref().and_then(grpc_status);
            let extensions = &Extensions::new();
            claim.judge(&Ending::Grpc {
                code: code.unwrap_or(2),
                extensions,
            })
        });
        match verdict {
            Verdict::Release => Settlement::Release,
            Verdict::Keep => Stored::Response(Box::new(Kept {
                status: self.status,
                headers: self.headers,
                body: self.body,
                trailers: self.trailers.map(replay::kept_trailers),
            }))
            .into(),
        }
    }
}

/// What the head tells of the key.
fn verdict(parts: &Parts, claim: &Claim) -> Option<Verdict> {
    if let Some(outcome) = parts.extensions.get::<Outcome>() {
        return Some((*outcome).into());
    }
    let extensions = &parts.extensions;
    if parts.status == StatusCode::OK && grpc::content_type(&parts.headers).is_some() {
        let code = match grpc_status(&parts.headers) {
            // With this the code does not matter.
            None if extensions.get::<NotStarted>().is_some() => 2,
            code => code?,
        };
        return Some(claim.judge(&Ending::Grpc { code, extensions }));
    }
    let (status, headers) = (parts.status, &parts.headers);
    Some(claim.judge(&Ending::Response {
        status,
        headers,
        extensions,
    }))
}

fn grpc_status(headers: &HeaderMap) -> Option<u16> {
    headers.get("grpc-status")?.to_str().ok()?.parse().ok()
}

/// Responses that have no end to wait for.
pub(super) fn is_endless(parts: &Parts) -> bool {
    const EVENTS: &[u8] = b"text/event-stream";
    let events = parts.headers.get(CONTENT_TYPE).is_some_and(|value| {
        let start = value.as_bytes().get(..EVENTS.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(EVENTS))
    });
    events || parts.status == StatusCode::SWITCHING_PROTOCOLS
}
