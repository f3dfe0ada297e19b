//! Several servers that belong together: a Cluster, a replica set with its sentinels, and those of a quorum.

mod cluster;
mod quorum;
mod sentinel;

pub use cluster::{Cluster, ClusterBuilder, slot_of};
pub use quorum::Independent;
pub(crate) use sentinel::SERVICE;
pub use sentinel::{Replicas, ReplicasBuilder};

use crate::{Certificates, ServerBuilder};

/// What stands in a URL before the hosts.
fn login(password: Option<&str>) -> String {
    password
        .map(|password| format!(":{password}@"))
        .unwrap_or_default()
}

/// A server that has data, with what it and its replicas ask for, and further settings.
fn configured(
    mut builder: ServerBuilder,
    tls: Option<&Certificates>,
    password: Option<&str>,
    config: &[(String, String)],
) -> ServerBuilder {
    if let Some(certificates) = tls {
        builder = builder.tls(certificates);
    }
    if let Some(password) = password {
        builder = builder.password(password).config("masterauth", password);
    }
    for (name, value) in config {
        builder = builder.config(name, value);
    }
    builder
}
