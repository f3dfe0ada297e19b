#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod locks;

pub use locks::{Committed, EtcdLocks, EtcdLocksBuilder, FencedTransaction, Proof, TransactionError, scheme};
