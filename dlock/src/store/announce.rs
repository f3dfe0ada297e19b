//! What processes that wait for the same key tell each other.

/// What an acquire tells the processes that listen for the key. With it, after a release only a few of many processes
/// ask, and the others only if none of those took the lock. A store may ignore it.
///
/// ```
/// use dlock::store::Announce;
///
/// /// Whether this acquire is announced to the processes that listen for the key.
/// fn is_told(announce: Announce, granted: bool) -> bool {
///     match announce {
///         Announce::Grant => granted,
///         Announce::Taken => true,
///         _ => false,
///     }
/// }
/// # assert!(is_told(Announce::Taken, false) && !is_told(Announce::Nothing, true));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Announce {
    /// Nothing.
    #[default]
    Nothing,
    /// That the lock is taken, if this acquire took it.
    Grant,
    /// The lock is taken, by whichever client.
    Taken,
}
