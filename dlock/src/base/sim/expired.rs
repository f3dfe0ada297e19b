//! The grants whose leases are over by the clocks of their clients.

use std::cell::RefCell;
use std::collections::BTreeSet;

/// A client and the number that it gave its grant.
type Name = (u128, u64);

thread_local! {
    static EXPIRED: RefCell<BTreeSet<Name>> = const { RefCell::new(BTreeSet::new()) };
}

/// The lease of this grant is over by the clock of its client, which sends no release for it.
pub(crate) fn grant_expired(name: Name) {
    EXPIRED.with_borrow_mut(|expired| expired.insert(name));
}

pub(crate) fn has_expired(name: Name) -> bool {
    EXPIRED.with_borrow(|expired| expired.contains(&name))
}

/// Before a world begins.
pub(super) fn forget() {
    EXPIRED.with_borrow_mut(BTreeSet::clear);
}
