//! The decisions: which waiter is served, when a hold is lost, when to ask the store again. Small machines without
//! async, clock or I/O: an event goes in with its [`Moment`](crate::base::moment::Moment), actions come out.
//!
//! The crate in `tests/engine` compiles these files without a runtime, and tests them with tables.

pub(crate) mod acquire;
pub(crate) mod crowd;
pub(crate) mod evidence;
pub(crate) mod fairness;
pub(crate) mod grant;
pub(crate) mod handoff;
pub(crate) mod permits;
pub(crate) mod position;
pub(crate) mod reentry;
pub(crate) mod release;
pub(crate) mod renewal;
pub(crate) mod timing;
pub(crate) mod unanswered;
pub(crate) mod wait_queue;
