//! The requirements of a test.

use std::future::Future;
use std::pin::Pin;

use dlock::store::Kind;

use crate::case::Case;

/// The requirement of a group of tests. If a store reports that it does not meet the requirement, the tests are
/// skipped; kinds must be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Kind(Kind),
    MinHold,
    PreferWriters,
    Limits,
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
