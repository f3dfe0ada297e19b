//! What everything else is built on, and what the simulation puts something else in the place of.

pub(crate) mod chance;
