//! A lock per request: the handler runs while the request's lock is held.
//!
//! [`LockLayer`] holds the options, [`LockService`] wraps a service, [`ResponseFuture`] is the course of one request,
//! and [`ResponseBody`] is sent: the handler's body (with the lock inside, if that is held until the body's end), or
//! the layer's own answer. [`RequestLocks`] lets work that outlives the request keep its locks. The guide is in the
//! [crate's documentation](crate).

mod admission;
mod ahead;
mod body;
mod call;
mod future;
pub(crate) mod kept;
mod layer;
mod lost;
mod outcome;
mod service;
mod settings;

pub use crate::body::read::DEFAULT_BODY_TIMEOUT;
pub use ahead::{DEFAULT_BODY_LIMIT, PrepareBody, ReadAhead, Streaming};
pub use body::ResponseBody;
pub use future::ResponseFuture;
pub use kept::{KeptLocks, RequestLocks};
pub use layer::LockLayer;
pub use lost::{LockLost, OnLost};
pub use service::LockService;
pub use settings::{DEFAULT_WAIT, InvalidOptions};
