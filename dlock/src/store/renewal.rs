//! How renewals travel, and what comes back.

/// What is slow or broken together: a server, a shard. Renewals are sent per lane, so that one lane's
/// trouble delays no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lane(pub u32);

/// The reply to a renewal of one grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// The lease runs anew.
    Renewed,
    /// The store knows no such grant, or it was released and keeps the key for a while; nothing is changed.
    Gone,
}
