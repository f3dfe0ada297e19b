//! The public API.

pub(crate) mod builder;
pub(crate) mod client;
pub(crate) mod counter;
pub(crate) mod default;
pub(crate) mod doctor;
pub(crate) mod guard;
pub(crate) mod health;
pub(crate) mod held;
pub(crate) mod latch;
pub(crate) mod leader;
pub(crate) mod lock;
pub(crate) mod lost;
pub mod macro_support;
pub(crate) mod methods;
pub(crate) mod multi;
#[cfg(feature = "once")]
pub(crate) mod once;
pub(crate) mod operations;
pub(crate) mod options;
pub(crate) mod read_write;
pub(crate) mod run;
pub(crate) mod semaphore;
pub(crate) mod survey;
