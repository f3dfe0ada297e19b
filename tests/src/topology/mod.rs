//! Several servers that belong together: a Cluster, a replica set with its sentinels, and those of a quorum.

mod cluster;
mod quorum;
mod sentinel;

pub use cluster::{Cluster, ClusterBuilder, slot_of};
pub use quorum::Independent;
pub(crate) use sentinel::SERVICE;
pub use sentinel::{Replicas, ReplicasBuilder};

/// What stands in a URL before the hosts.
fn login(password: Option<&str>) -> String {
    password
        .map(|password| format!(":{password}@"))
        .unwrap_or_default()
}
