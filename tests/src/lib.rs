//! The harness of the suites: real servers, and a network that fails on command.
//!
//! | part | for |
//! |---|---|
//! | [`Server`] | a real Redis or Valkey of the test's own, which can be frozen, killed and started again |
//! | [`Cluster`], [`Replicas`] | several of them, as a Cluster or with sentinels, with fail-overs and slots that move |
//! | [`Proxy`] | the network before it: slow, cut, deaf, or losing exactly one reply; [`Gateway`] before other stores |
//! | [`Monitor`] | what the server was asked |
//! | [`postgres`] | the same of PostgreSQL |
//! | [`etcd`] | the same of etcd |
//! | [`zookeeper`] | the same of ZooKeeper |
//! | [`mysql`] | the same of MariaDB |
//! | [`Process::fill_disk`] | a server whose disk is full |
//! | [`child`] | other processes that must die with the tests |
//! | [`chaos`] | the machine that tries to break it all |
//! | [`eventually`] | waiting for what another process does |
//!
//! None of it works under a paused clock: time would jump while the servers work.

pub mod bins;
mod certificates;
pub mod chaos;
pub mod child;
pub mod curator;
mod disk;
pub mod etcd;
mod faketime;
pub mod faults;
mod inside;
mod log;
mod monitor;
pub mod mysql;
mod network;
pub mod permissions;
mod port;
pub mod postgres;
mod process;
mod proxy;
pub mod records;
pub mod redisson;
mod resp;
mod running;
mod server;
pub mod soak;
mod sql;
mod store;
mod topology;
mod watched;
pub mod zookeeper;

use std::time::{Duration, Instant};

pub use certificates::Certificates;
pub use faketime::Clock;
pub use inside::Inside;
pub use log::Log;
pub use monitor::{Monitor, Seen};
pub use network::{Direction, Door, Gateway, NetFault, Protocol, Swallow, Weather};
pub use process::{Node, Process};
pub use proxy::{ConnectionInfo, Fault, Held, Proxy, Sent};
pub use resp::Command;
pub use running::{Ended, Running};
pub use server::{Flavor, Server, ServerBuilder};
pub use sql::Request;
pub use store::{Shared, Store, features, is_of_a_step, settle};
pub use topology::{Cluster, ClusterBuilder, Independent, Replicas, ReplicasBuilder, slot_of};
pub use watched::{Seen as StepsSeen, Watched, watched};

/// What a lease is shortened by on the side of the holder.
#[must_use]
pub fn margin(lease: Duration) -> Duration {
    (lease / 100).max(Duration::from_millis(10))
}

/// Waits until `holds` does, looking again every few milliseconds.
///
/// # Panics
/// After a minute, naming `what`.
pub async fn eventually<F, Fut>(what: &str, mut holds: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = bool>,
{
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(
            Instant::now() < deadline,
            "waited a minute without success: {what}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Runs a test by a paused clock, inside two virtual hours: a dead-lock never idles once there is a watchdog.
///
/// # Panics
/// When it has not ended by then.
pub fn paused(test: impl Future<Output = ()>) {
    paused_for(Duration::from_secs(7200), test);
}

/// The same with another limit.
///
/// # Panics
/// When it has not ended by then.
pub fn paused_for(limit: Duration, test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(limit, test).await.expect("a dead-lock");
    });
}

/// The examples of pages compile, and run where they can.
macro_rules! pages {
    ($($page:ident: $path:literal,)*) => {$(
        #[cfg(doctest)]
        #[doc = include_str!(concat!("../../", $path))]
        pub struct $page;
    )*};
}

pages! {
    Readme: "README.md",
    MacrosPackage: "dlock-macros/README.md",
    TowerPackage: "dlock-tower/README.md",
    Console: "docs/console.md",
    Cron: "docs/cron.md",
    Doctor: "docs/doctor.md",
    Etcd: "docs/etcd.md",
    Http: "docs/http.md",
    Keys: "docs/keys.md",
    Kubernetes: "docs/kubernetes.md",
    Metrics: "docs/metrics.md",
    Migrating: "docs/migrating.md",
    Mysql: "docs/mysql.md",
    Once: "docs/once.md",
    Postgres: "docs/postgres.md",
    Redisson: "docs/redisson.md",
    Stores: "docs/stores.md",
    Tasks: "docs/tasks.md",
    TestingPage: "docs/testing.md",
    Traces: "docs/traces.md",
    Urls: "docs/urls.md",
    Zookeeper: "docs/zookeeper.md",
}
