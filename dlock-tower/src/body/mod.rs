//! Request bodies that are read before the handler runs and then passed to it unchanged.

mod buffered;
mod hint;
pub(crate) mod read;
#[cfg(feature = "tonic")]
mod tonic;

pub(crate) use buffered::BoxError;
pub use buffered::{Buffered, FromBuffered};
pub(crate) use hint::add_frames;
