//! dlock and Redisson, and dlock and Curator, on one server, in both directions.

mod interop_cluster;
mod interop_curator;
mod interop_fair;
mod interop_fenced;
mod interop_multi;
mod interop_permits;
mod interop_plain;
mod interop_rwlock;
