//! etcd's API: messages, calls, and a connection that moves to another server when one fails.

mod config;
mod connect;
mod failure;
mod link;
mod pem;
pub(crate) mod proto;
mod rpc;
pub(crate) mod version;

pub(crate) use self::config::{Config, Login, Tls};
pub(crate) use self::failure::{Failure, Refusal, wants_login};
pub(crate) use self::link::{Link, Links};
pub(crate) use self::pem::Pem;
pub(crate) use self::rpc::{Call, Rpc, Trouble};
