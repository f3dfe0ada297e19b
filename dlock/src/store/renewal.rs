//! How renewals travel, and what comes back.

use super::GivenLease;

/// What is slow or broken together: a server, a shard. Renewals are sent per lane, so that one lane's
/// trouble delays no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lane(pub u32);

/// The reply to a renewal of one grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// The lease that was asked for runs from when the step was called.
    Renewed,
    /// The grant is there, with another lease than was asked for.
    RenewedFor(GivenLease),
    /// The grant is there, and its lease was not extended: ask again. This moves no deadline and ends no suspicion.
    Held,
    /// The store knows no such grant, or it was released and keeps the key for a while; nothing is changed.
    Gone,
}
