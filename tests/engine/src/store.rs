//! Of the layer `store`, what the engine needs.

#[path = "../../../dlock/src/store/failure.rs"]
mod failure;

pub(crate) use self::failure::{BackendError, Outcome, Reason};
