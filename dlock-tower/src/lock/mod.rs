//! A lock per request: the handler runs while the request's lock is held.
//!
//! [`LockLayer`] holds the options, [`LockService`] is what it makes of a service, [`ResponseFuture`] is
//! the course of one request, and [`ResponseBody`] what goes out: the handler's body (with the lock inside,
//! if that is held until the body's end), or an answer of the layer's own. The guide is in the
//! [crate's documentation](crate).

mod body;
mod future;
mod layer;
mod service;

pub use body::{LockLost, ResponseBody};
pub use future::ResponseFuture;
pub use layer::{DEFAULT_WAIT, InvalidOptions, LockLayer, OnLost};
pub use service::LockService;
