//! tonic's body, read ahead.

use super::buffered::{Buffered, FromBuffered};

impl FromBuffered for ::tonic::body::Body {
    fn from_buffered(buffered: Buffered) -> Self {
        ::tonic::body::Body::new(buffered)
    }
}
