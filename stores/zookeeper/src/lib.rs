#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod builder;
mod core;
mod counts;
mod deletes;
mod doctor;
mod drive;
mod fair;
mod followers;
mod gather;
mod grants;
mod inspect;
mod jute;
mod layout;
mod names;
mod permits;
mod proof;
mod queues;
mod release;
mod renew;
mod scheme;
mod seen;
mod session;
mod steps;
mod store;
mod watches;
mod wire;

pub use self::builder::ZookeeperLocksBuilder;
pub use self::proof::{HolderNode, WriteError, Writes};
pub use self::scheme::scheme;
pub use self::store::ZookeeperLocks;
