//! How locks are acquired, kept, handed off and released: the client's tasks, queues and tables. Knows the `Store`
//! trait, but no particular store.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod beat;
pub(crate) mod calls;
mod capable;
pub(crate) mod client;
pub(crate) mod emit;
pub(crate) mod ending;
pub(crate) mod fairness;
pub(crate) mod given_up;
pub(crate) mod grants;
pub(crate) mod group;
pub(crate) mod handoff;
pub(crate) mod hold;
pub(crate) mod members;
pub(crate) mod nested_read;
pub(crate) mod options;
pub(crate) mod outside;
pub(crate) mod pending;
pub(crate) mod presence;
pub(crate) mod release;
pub mod scope;
pub(crate) mod unfinished;
pub(crate) mod waiters;
pub(crate) mod waits;
pub(crate) mod watchdog;
