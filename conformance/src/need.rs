//! What a test needs of a store.

use std::future::Future;
use std::pin::Pin;

use dlock::store::Kind;

use crate::case::Case;

/// What a group of tests needs. Where a store says that it does not have it, the tests are left out; kinds have to be
/// refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Kind(Kind),
    MinHold,
    PreferWriters,
    Notifications,
    Inspection,
}

/// One test.
pub type Check = fn(Case) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// A test with its place in the contract.
#[derive(Debug, Clone, Copy)]
pub struct Listed {
    pub group: &'static str,
    pub needs: &'static [Need],
    pub name: &'static str,
    pub check: Check,
}
