//! What the simulation in `tests/sim` puts in place of chance and time, and what it looks at. Compiled only with `--cfg
//! dlock_sim`; it changes without notice.

mod look;
mod notifications;
mod store;

pub use self::look::{
    Client, Left, client_of, grants, id_of, left, peek, ran_out, time_slice, was_lost, yield_to_first,
};
pub use self::notifications::Notifications;
pub use self::store::{
    entries, fork, holder, holders_of, listen, listen_record, positions, taken, told, topic,
};
pub use crate::base::sim::{Entered, Process, at_store, breaks, on_preempt, reset};
pub use crate::stores::memory::records::record_topic;
pub use crate::stores::memory::sim::Entry;
