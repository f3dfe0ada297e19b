//! What a simulation substitutes for randomness and time, and the rules that it breaks.

pub mod breaks;
pub(crate) mod chance;
mod lost;
mod preempt;
mod process;
mod store_clock;

pub(crate) use self::lost::{grant_lost, was_lost};
pub use self::preempt::on_preempt;
pub(crate) use self::preempt::preempt;
pub use self::process::{Entered, Process, reset};
pub(crate) use self::process::{origin, suspended};
pub use self::store_clock::at_store;
pub(crate) use self::store_clock::{store_clock, wall};
