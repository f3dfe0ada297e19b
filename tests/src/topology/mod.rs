//! Several servers that belong together: a Cluster, and a replica set with its sentinels.

mod cluster;
mod sentinel;

pub use cluster::{Cluster, ClusterBuilder, slot_of};
pub(crate) use sentinel::SERVICE;
pub use sentinel::{Replicas, ReplicasBuilder};
