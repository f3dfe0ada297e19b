//! The tests, by subject.

pub mod client;
pub mod counters;
pub mod exclusion;
pub mod expiry;
pub mod fair;
pub mod faults;
pub mod inspection;
pub mod kinds;
pub mod latches;
pub mod limits;
pub mod min_hold;
pub mod names;
pub mod notifications;
pub mod order;
pub mod permits;
pub mod prefer_writers;
pub mod random;
pub mod read_write;
pub mod release;
pub mod renewal;
pub mod sets;
pub mod tokens;
pub mod unowned;
