#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod connect;
mod failure;
mod perform;
mod row;
mod scheme;
mod script;
mod step;
mod store;
mod table;
#[cfg(feature = "tls")]
mod tls;

pub use mysql_async::{Opts, OptsBuilder};
pub use scheme::scheme;
pub use store::{MysqlLocks, MysqlLocksBuilder};
