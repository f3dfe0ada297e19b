//! The contract of dlock's stores as tests, for a store of your own.
//!
//! Implement [`Fixture`] for your store, write one line, and `cargo test` says which promises the store keeps:
//!
//! ```
//! use std::sync::Arc;
//!
//! use dlock::store::Store;
//! use dlock::stores::memory::MemoryStore;
//! use dlock_conformance::{Fixture, conform};
//!
//! struct Memory(MemoryStore);
//!
//! impl Fixture for Memory {
//!     async fn store(&self) -> Arc<dyn Store> {
//!         Arc::new(self.0.clone())
//!     }
//!
//!     async fn forget(&self) -> bool {
//!         self.0.clear();
//!         true
//!     }
//! }
//!
//! async fn memory() -> Memory {
//!     Memory(MemoryStore::new())
//! }
//!
//! conform!(memory);
//! # fn main() {}
//! ```
//!
//! [`conform!`] creates one `#[test]` for each promise, in modules by subject:
//! `exclusion::held_lock_is_busy_for_other_clients`. A failing test quotes the broken promise and says what it found.
//! [`run`] does the same outside a test harness and returns a [`Report`].
//!
//! Features that a store does not support are not tested: there the tests check that it refuses. Tests that need a fault
//! (a restart, a lost reply, a broken network) run where the [`Fixture`] can inject it, and are skipped elsewhere.
//! Records, operations and members of a quorum are not tested.
//!
//! No test fails because a machine is slow: expected events are awaited with [`Fixture::patience`], and forbidden events
//! are judged only while they are forbidden.
mod case;
#[doc(hidden)]
pub mod checks;
mod contract;
mod fixture;
mod harness;
#[doc(hidden)]
pub mod need;
mod promise;
mod report;
mod verbs;

#[doc(hidden)]
pub use case::Case;
#[doc(hidden)]
pub use dlock::store::Kind as __Kind;
pub use fixture::Fixture;
#[doc(hidden)]
pub use harness::__test;
#[doc(hidden)]
pub use need::Need;
pub use report::{CheckReport, Report, Verdict, run, run_only};
