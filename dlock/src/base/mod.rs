//! The base of all other modules: names, errors, time, randomness. Depends on no other part of the library.

mod broken;
pub(crate) mod cause;
pub(crate) mod chance;
pub(crate) mod clock;
pub(crate) mod error;
pub(crate) mod hold_state;
pub(crate) mod holder;
pub(crate) mod int_hash;
pub(crate) mod key;
pub(crate) mod kind;
pub(crate) mod lock_id;
pub(crate) mod moment;
pub(crate) mod observed;
pub(crate) mod own_line;
pub(crate) mod per_thread;
pub(crate) mod problem;
pub(crate) mod report;
pub mod request;
pub(crate) mod reused;
#[cfg(dlock_sim)]
pub(crate) mod sim;
pub(crate) mod text;
pub(crate) mod waking;

pub(crate) use self::broken::broken;
