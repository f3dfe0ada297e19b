//! Why a hold was lost, where the server is the reason.

use std::time::Duration;

use dlock::operations::LossReason;
use dlock::{LockClient, LockGuard, Loss};
use dlock_tests::faults::{PATIENCE, hasty, in_rounds, within};
use dlock_tests::{Flavor, Server};

const LEASE: Duration = Duration::from_secs(3);

async fn acquired(client: &LockClient) -> LockGuard {
    within(PATIENCE, "the lock", client.lock("k").lease(LEASE).acquire())
        .await
        .unwrap()
}

async fn lost(guard: &LockGuard) -> LossReason {
    assert_eq!(within(PATIENCE, "the loss", guard.lost()).await, Loss::Expired);
    guard.why_lost().await.expect("it is lost")
}

#[tokio::test]
async fn renewals_that_the_server_refuses_are_the_reason_with_its_reply() {
    let server = Server::start(Flavor::from_env()).await;
    let client = hasty(&server.url()).await;
    // A process that stood still until the lease was over has another reason.
    in_rounds("the server refused renewals", async || {
        let guard = acquired(&client).await;
        server
            .command(&["CONFIG", "SET", "min-replicas-to-write", "1"])
            .await;
        let reason = lost(&guard).await;
        server
            .command(&["CONFIG", "SET", "min-replicas-to-write", "0"])
            .await;
        match reason {
            LossReason::Refused(reply) if reply.contains("NOREPLICAS") => Ok(()),
            other => Err(other),
        }
    })
    .await;
}
