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
//! | [`child`] | other processes that must die with the tests |
//! | [`chaos`] | the machine that tries to break it all |
//! | [`property`] | random sequences of operations, compared with a model |
//! | [`eventually`] | waiting for what another process does |
//!
//! None of it works under a paused clock: time would jump while the servers work.

pub mod bins;
mod certificates;
pub mod chaos;
pub mod child;
pub mod curator;
pub mod etcd;
mod faketime;
pub mod faults;
mod log;
mod monitor;
pub mod mysql;
mod network;
pub mod permissions;
mod port;
pub mod postgres;
mod process;
pub mod property;
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
pub use log::Log;
pub use monitor::{Monitor, Seen};
pub use network::{Direction, Door, Gateway, NetFault, Protocol, Swallow, Weather};
pub use process::{Node, Process};
pub use proxy::{ConnectionInfo, Fault, Held, Proxy, Sent};
pub use resp::Command;
pub use running::{Ended, Running};
pub use server::{Flavor, Server, ServerBuilder};
pub use sql::Request;
pub use store::{Shared, Store, is_of_a_step, settle};
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

/// The examples of the README compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The examples of the page about keys.
#[cfg(doctest)]
#[doc = include_str!("../../docs/keys.md")]
pub struct Keys;

/// The example of the page about the console.
#[cfg(doctest)]
#[doc = include_str!("../../docs/console.md")]
pub struct ConsolePage;

/// The examples of the page about layers for HTTP requests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/http.md")]
pub struct Http;

/// The examples of the page about locks that Java services share.
#[cfg(doctest)]
#[doc = include_str!("../../docs/redisson.md")]
pub struct Redisson;

/// The examples of the page about stores and their URLs.
#[cfg(doctest)]
#[doc = include_str!("../../docs/urls.md")]
pub struct Urls;

/// The examples of the page about the doctor.
#[cfg(doctest)]
#[doc = include_str!("../../docs/doctor.md")]
pub struct DoctorPage;

/// The examples of the page about traces.
#[cfg(doctest)]
#[doc = include_str!("../../docs/traces.md")]
pub struct Traces;

/// The examples of the page about deploys.
#[cfg(doctest)]
#[doc = include_str!("../../docs/kubernetes.md")]
pub struct Kubernetes;

/// The examples of the page about dlock in tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/testing.md")]
pub struct Testing;

/// The examples of the page about schedules.
#[cfg(doctest)]
#[doc = include_str!("../../docs/cron.md")]
pub struct Cron;
