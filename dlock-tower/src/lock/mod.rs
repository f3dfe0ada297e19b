//! A lock per request: the handler runs while the request's lock is held.
//!
//! [`LockLayer`] holds the options, [`LockService`] is what it makes of a service, [`ResponseFuture`] is
//! the course of one request, and [`ResponseBody`] what goes out: the handler's body (with the lock inside,
//! if that is held until the body's end), or an answer of the layer's own. [`RequestLocks`] lets work that
//! outlives the request keep its locks. The guide is in the [crate's documentation](crate).

mod ahead;
mod body;
mod future;
mod kept;
mod layer;
mod lost;
mod service;

pub use ahead::{DEFAULT_BODY_LIMIT, DEFAULT_BODY_TIMEOUT, PrepareBody, ReadAhead, Streaming};
pub use body::ResponseBody;
pub use future::ResponseFuture;
pub use kept::{KeptLocks, RequestLocks};
pub use layer::{DEFAULT_WAIT, InvalidOptions, LockLayer, OnLost};
pub use lost::LockLost;
pub use service::LockService;
