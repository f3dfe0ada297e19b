//! How long a body is.

use bytes::Bytes;
use http_body::{Frame, SizeHint};

/// Adds the data of these frames, which come before the rest of a body, to the hint of that rest.
pub(crate) fn add_frames<'a>(hint: &mut SizeHint, frames: impl Iterator<Item = &'a Frame<Bytes>>) {
    let more: usize = frames.filter_map(Frame::data_ref).map(Bytes::len).sum();
    let more = more as u64;
    if let Some(upper) = hint.upper() {
        hint.set_upper(upper + more);
    }
    hint.set_lower(hint.lower() + more);
}
