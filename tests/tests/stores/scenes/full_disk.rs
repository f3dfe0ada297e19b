//! A server whose disk is full: what it tells its clients, what they keep, and how they go on when there is space.

use std::sync::Arc;
use std::time::Duration;

use dlock::{Error, LockClient, Loss};
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
use dlock_tests::{Node, eventually};
use futures_util::future::join_all;
use tokio::time::sleep;

use super::{MS, SEC};
use crate::backend::Backend;

const LEASE: Duration = Duration::from_secs(6);
/// No test waits for its end.
const LONG: Duration = super::LEASE;

/// What a server does without space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// It refuses what needs more space, with an error that contains this.
    Refuses(&'static str),
    /// It refuses so, until it has to write to its log, and ends then.
    RefusesAndEnds(&'static str),
    /// It answers no writes.
    Hangs,
    Ends,
}

impl Full {
    /// Whether this failure shows it.
    fn is_shown_by(self, error: &Error, server: &impl Node) -> bool {
        match self {
            Full::Refuses(text) | Full::RefusesAndEnds(text) => error.to_string().contains(text),
            Full::Hangs => true,
            Full::Ends => !server.is_awake(),
        }
    }
}

/// The server has to be on a disk of its own. `writes` is what other clients of the server write. Where the lock is lost, it
/// lasts as long as its lease of six seconds.
pub(crate) async fn full_disk_is_told_and_grants_no_lock_twice<B: Backend>(
    server: B::Server,
    full: Full,
    writes: impl AsyncFn(&B::Server),
) {
    let server = Arc::new(server);
    let backend = B::on(server.clone()).await;
    let here = client(&backend, PATIENCE).await;
    let there = client(&backend, 2 * SEC).await;
    let keeps = matches!(full, Full::Refuses(_));
    let lock = here.lock("k").lease(if keeps { LONG } else { LEASE });
    let guard = lock.acquire().await.unwrap();
    server.fill_disk();
    let released = used_until(&there, |error| full.is_shown_by(error, &*server)).await;
    if keeps {
        is_confirmed(&guard).await;
    } else {
        let loss = async {
            while guard.is_held() {
                writes(&server).await;
                match there.lock("k").try_acquire().await {
                    Ok(_) => assert!(!guard.is_held(), "two clients hold it"),
                    Err(error) => assert!(error.is_busy() || is_told(&error), "{error:?}"),
                }
                sleep(100 * MS).await;
            }
        };
        within(LEASE, "the loss", loss).await;
        assert_eq!(within(SEC, "the loss", guard.lost()).await, Loss::Expired);
    }
    if matches!(full, Full::Ends | Full::RefusesAndEnds(_)) {
        eventually("it has ended", async || !server.is_awake()).await;
    } else {
        assert!(server.is_awake());
    }
    server.free_disk();
    if !keeps {
        server.restart().await;
    }
    let token = guard.fencing_token();
    let last = within(PATIENCE, "the release", guard.release()).await;
    assert_eq!(last.is_ok(), keeps, "{last:?}");
    let next = released.into_iter().chain([("k".to_owned(), token)]);
    let next = next.map(async |(key, token)| {
        let next = within(PATIENCE, &key, answered(|| there.lock(&*key).acquire())).await;
        let next = next.unwrap();
        let greater = next.fencing_token();
        assert!(greater > token, "{key}: {greater} after {token}");
        next.release().await.unwrap();
    });
    join_all(next).await;
}

async fn client(backend: &impl Backend, retry_for: Duration) -> LockClient {
    let builder = LockClient::builder().shared_store(backend.store(None, 2 * SEC).await);
    let built = builder.lease(LEASE).retry_for(retry_for).build().await;
    built.expect("the server is there")
}

/// Acquires and releases locks of new keys until it fails so: the keys of those that were released, and their tokens.
async fn used_until(client: &LockClient, so: impl Fn(&Error) -> bool) -> Vec<(String, u64)> {
    let mut released = Vec::new();
    for round in 0..100 {
        let mut is_over = false;
        for used in join_all((0..64).map(|n| used(client, format!("{round} {n}")))).await {
            match used {
                Ok(lock) => released.push(lock),
                Err(error) => {
                    assert!(is_told(&error), "{error:?}");
                    is_over |= so(&error);
                }
            }
        }
        if is_over {
            return released;
        }
    }
    panic!("the disk is not full: {} locks were released", released.len())
}

async fn used(client: &LockClient, key: String) -> Result<(String, u64), Error> {
    // A release that is lost would show.
    let guard = client.lock(&*key).lease(LONG).try_acquire().await?;
    let token = guard.fencing_token();
    guard.release().await?;
    Ok((key, token))
}

/// Whether it says that the store is to blame.
fn is_told(error: &Error) -> bool {
    matches!(
        error,
        Error::Refused { .. } | Error::Unreachable { .. } | Error::OutcomeUnknown { .. } | Error::Lost { .. }
    )
}
