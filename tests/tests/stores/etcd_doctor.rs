//! The doctor on etcd, on servers that are set up wrongly on purpose.

use std::time::Duration;

use dlock::LockClient;
use dlock::store::doctor::Verdict::{Bad, Good, Unknown};
use dlock_etcd::{EtcdLocks, EtcdLocksBuilder};
use dlock_tests::etcd::{Etcd, EtcdCluster, fresh_namespace};
use dlock_tests::eventually;

use crate::doctor_support::{are_good, found, is, read, tried};

const PATIENCE: Duration = Duration::from_secs(30);

async fn client(builder: EtcdLocksBuilder) -> LockClient {
    let store = builder
        .timeout(PATIENCE)
        .connect()
        .await
        .expect("a server is there");
    let client = LockClient::builder().store(store).timeout(PATIENCE).build();
    client.await.expect("a client")
}

#[tokio::test]
async fn healthy_server_is_good_and_keeps_nothing_of_the_doctor() {
    let server = Etcd::shared().await;
    let namespace = fresh_namespace();
    let client = client(server.builder(&namespace)).await;
    let diagnosis = tried(&client).await;
    are_good(
        &diagnosis,
        &[
            "lease-budget",
            "members",
            "leader",
            "alarms",
            "lag",
            "request-times",
        ],
    );
    // The tests run on an old one, too; and only 3.6 tells its quota.
    let (versions, space) = (found(&diagnosis, "versions"), found(&diagnosis, "space"));
    assert!(versions.why.contains("etcd 3."), "{versions:?}");
    assert!(matches!(space.verdict, Good | Unknown), "{space:?}");
    assert_eq!(
        versions.verdict == Bad,
        versions.why.contains("15247"),
        "{versions:?}"
    );
    // The client has the option already.
    assert!(!versions.why.contains("allow_old_server"), "{versions:?}");
    let mut keys = server.keys(&namespace).await;
    // What the session of the client has until it ends.
    keys.retain(|(key, _)| !key.contains("/c/"));
    assert_eq!(keys, [], "no key stays");
    is(&read(&client).await, "request-times", Unknown, "only reads");
}

#[tokio::test]
async fn member_that_is_down_or_not_named_is_told() {
    let cluster = EtcdCluster::start().await;
    let all = client(cluster.builder(&fresh_namespace())).await;
    let diagnosis = read(&all).await;
    is(&diagnosis, "members", Good, "3 members serve, 1 may fail");
    is(&diagnosis, "leader", Good, "agree");
    is(&diagnosis, "lease-budget", Unknown, "election timeout");
    let address = cluster.members[0].addr().to_string();
    let one = EtcdLocks::builder([address])
        .namespace(fresh_namespace())
        .allow_old_server(true);
    is(
        &read(&client(one).await).await,
        "members",
        Bad,
        "names 1 of 3 members",
    );
    let follower = (cluster.leader().await + 1) % 3;
    cluster.members[follower].kill();
    is(&read(&all).await, "members", Bad, "does not serve");
}

#[tokio::test]
async fn server_without_space_is_told() {
    let server = Etcd::start_with(&["--quota-backend-bytes", "2000000"]).await;
    let client = client(server.builder(&fresh_namespace())).await;
    is(&read(&client).await, "alarms", Good, "none");
    let mut number = 0;
    while server.put(&format!("full/{number}"), &[7; 100_000]).await {
        number += 1;
        assert!(number < 1000, "the quota is never reached");
    }
    eventually("the alarm is raised", async || {
        found(&read(&client).await, "alarms").verdict == Bad
    })
    .await;
    is(&read(&client).await, "alarms", Bad, "no space left");
}
