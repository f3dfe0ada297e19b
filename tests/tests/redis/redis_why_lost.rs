//! Why a hold was lost, where the server is the reason.

use std::time::Duration;

use dlock::operations::LossReason;
use dlock::{LockClient, LockGuard, Loss};
use dlock_tests::faults::{PATIENCE, hasty, hasty_builder, in_rounds, within};
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

#[tokio::test]
async fn renewals_that_a_frozen_server_does_not_answer_are_the_reason() {
    let server = Server::start(Flavor::from_env()).await;
    let client = hasty(&server.url()).await;
    in_rounds("the server answered no renewal", async || {
        let guard = acquired(&client).await;
        server.stop();
        let reason = lost(&guard).await;
        server.cont();
        match reason {
            LossReason::Unanswered(failure) if !failure.is_empty() => Ok(()),
            other => Err(other),
        }
    })
    .await;
}

#[tokio::test]
async fn data_that_the_server_lost_are_told_apart_from_another_holder() {
    let server = Server::start(Flavor::from_env()).await;
    let a = hasty_builder(&server.url())
        .timeout(PATIENCE)
        .build()
        .await
        .unwrap();
    let b = hasty_builder(&server.url())
        .timeout(PATIENCE)
        .build()
        .await
        .unwrap();
    let guard = within(PATIENCE, "the lock", a.lock("k").acquire()).await.unwrap();
    server.command(&["FLUSHALL"]).await;
    let ensured = within(PATIENCE, "an answer", guard.ensure(Duration::from_secs(90))).await;
    assert!(ensured.unwrap_err().is_lost());
    assert_eq!(guard.why_lost().await, Some(LossReason::Gone));
    let next = b.lock("k").acquire().await.unwrap();
    match guard.why_lost().await {
        Some(LossReason::Taken { holder }) => assert!(holder.starts_with(&b.id()), "{holder}"),
        other => panic!("{other:?}"),
    }
    next.release().await.unwrap();
}
