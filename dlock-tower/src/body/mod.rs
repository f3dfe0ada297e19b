//! Request bodies that are read ahead of the handler and then given to it all the same.

mod buffered;
pub(crate) mod read;
#[cfg(feature = "tonic")]
mod tonic;

pub(crate) use buffered::BoxError;
pub use buffered::{Buffered, FromBuffered};
