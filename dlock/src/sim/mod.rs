//! What the simulation in `tests/sim` puts in the place of chance and time, and what it looks at. Compiled only with
//! `--cfg dlock_sim`; it changes without notice.

pub mod breaks;
pub(crate) mod chance;
mod look;
mod news;
mod preempt;
mod process;
mod store;

pub use self::look::{Client, Left, client_of, grants, id_of, left, peek};
pub use self::news::News;
pub use self::preempt::on_preempt;
pub(crate) use self::preempt::preempt;
pub use self::process::{Entered, Process, reset};
pub(crate) use self::process::{origin, suspended};
pub use self::store::{
    Entry, at_store, entries, fork, holders_of, listen, listen_record, positions, record_topic, taken, told,
    topic,
};
pub(crate) use self::store::{store_clock, wall};
