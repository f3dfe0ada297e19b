#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod connect;
mod failure;
mod greeting;
mod hosts;
mod locks;
mod micros;
mod names;
mod pooler;
pub mod records;
mod sweeping;
#[cfg(feature = "tls")]
mod tls;

/// The driver whose types are part of this API, in the version that it uses.
pub use tokio_postgres;

pub use locks::{HoldError, LockInError, PostgresLocks, PostgresLocksBuilder, scheme, scheme_with};
pub use records::{CompleteError, PostgresClaim, PostgresRecords};
