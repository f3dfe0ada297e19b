//! The grants that their clients lost before a shutdown.

use std::cell::RefCell;
use std::collections::BTreeSet;

/// A client and its number for the grant.
type Name = (u128, u64);

thread_local! {
    static LOST: RefCell<BTreeSet<Name>> = const { RefCell::new(BTreeSet::new()) };
}

/// Records that a client has lost this grant, and sends no release for it.
pub(crate) fn grant_lost(name: Name) {
    LOST.with_borrow_mut(|lost| lost.insert(name));
}

pub(crate) fn was_lost(name: Name) -> bool {
    LOST.with_borrow(|lost| lost.contains(&name))
}

/// Called before a world begins.
pub(super) fn forget() {
    LOST.with_borrow_mut(BTreeSet::clear);
}
