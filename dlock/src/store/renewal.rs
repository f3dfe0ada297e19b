//! How renewals are grouped, and their replies.

use super::GivenLease;

/// A set of keys that are slow or broken together: a server, a shard. Renewals are sent per lane, so that trouble in
/// one lane does not delay the others.
///
/// ```
/// use dlock::store::Lane;
///
/// /// One lane for each shard of the store.
/// fn lane(key: &str, shards: u32) -> Lane {
///     Lane(key.bytes().map(u32::from).sum::<u32>() % shards)
/// }
/// # assert!(lane("order:42", 3).0 < 3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lane(pub u32);

/// The reply to a renewal of one grant.
///
/// ```
/// use dlock::store::{GivenLease, Renewal};
/// use std::time::Duration;
///
/// fn renewal(row: Option<Duration>, asked: Duration) -> Renewal {
///     match row {
///         None => Renewal::Gone,
///         Some(given) if given == asked => Renewal::Renewed,
///         Some(given) => Renewal::RenewedFor(GivenLease::new(given)),
///     }
/// }
/// # assert_eq!(renewal(None, Duration::ZERO), Renewal::Gone);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// The requested lease counts from the call of the operation.
    Renewed,
    /// The grant exists, with another lease than the requested one.
    RenewedFor(GivenLease),
    /// The grant exists, but its lease was not extended: ask again. This moves no deadline, and a suspect hold stays
    /// suspect.
    Held,
    /// The store has no such grant, or it was released and keeps the key for a while; nothing is changed.
    Gone,
}
