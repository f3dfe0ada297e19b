//! What everything else is built on, and what the simulation puts something else in the place of.

mod broken;
pub(crate) mod chance;

pub(crate) use self::broken::broken;
