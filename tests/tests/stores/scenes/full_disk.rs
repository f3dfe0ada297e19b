//! A server whose disk is full: what it tells its clients, what they keep, and how they go on when there is space.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dlock::{Error, LockClient, Loss};
use dlock_tests::Node;
use dlock_tests::faults::{PATIENCE, answered, is_confirmed, within};
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
    fn says(self) -> &'static str {
        match self {
            Full::Refuses(text) | Full::RefusesAndEnds(text) => text,
            Full::Hangs | Full::Ends => "",
        }
    }

    fn ends(self) -> bool {
        matches!(self, Full::RefusesAndEnds(_) | Full::Ends)
    }
}

/// The server has to be on a disk of its own. `writes` is what other clients of the server write. It lasts longer than a
/// lease of six seconds.
pub(crate) async fn full_disk_is_told_and_grants_no_lock_twice<B: Backend>(
    server: B::Server,
    full: Full,
    writes: impl AsyncFn(&B::Server),
) {
    let server = Arc::new(server);
    let backend = B::on(server.clone()).await;
    let (here, there) = (client(&backend).await, client(&backend).await);
    let guard = here.lock("k").acquire().await.unwrap();
    server.fill_disk();
    let (released, error) = used_until_it_fails(&here).await;
    assert!(error.to_string().contains(full.says()), "{error}");
    let began = Instant::now();
    while began.elapsed() < LEASE + SEC {
        writes(&server).await;
        let error = within(PATIENCE, "the acquire", there.lock("k").try_acquire()).await;
        let error = error.map(drop).expect_err("nobody acquires it");
        assert!(error.is_busy() || is_told(&error), "{error:?}");
        sleep(100 * MS).await;
    }
    assert_eq!(server.is_awake(), !full.ends());
    if matches!(full, Full::Refuses(_)) {
        is_confirmed(&guard).await;
    } else {
        assert!(!guard.is_held());
        assert_eq!(within(SEC, "the loss", guard.lost()).await, Loss::Expired);
    }
    server.free_disk();
    if !matches!(full, Full::Refuses(_)) {
        server.restart().await;
    }
    // Where it is lost, that is what is said.
    let token = guard.fencing_token();
    let _ = within(PATIENCE, "the release", guard.release()).await;
    let held = [("k".to_owned(), token)];
    let next = released.into_iter().chain(held).map(async |(key, token)| {
        let next = within(PATIENCE, &key, answered(|| there.lock(&*key).acquire())).await;
        let next = next.unwrap();
        assert!(
            next.fencing_token() > token,
            "{key}: {} after {token}",
            next.fencing_token()
        );
        next.release().await.unwrap();
    });
    join_all(next).await;
}

async fn client(backend: &impl Backend) -> LockClient {
    let builder = LockClient::builder().shared_store(backend.store(None, 2 * SEC).await);
    let built = builder.lease(LEASE).retry_for(2 * SEC).build().await;
    built.expect("the server is there")
}

/// Acquires and releases locks of new keys. The keys of those that were released, and their tokens; and the failure.
async fn used_until_it_fails(client: &LockClient) -> (Vec<(String, u64)>, Error) {
    let mut released = Vec::new();
    for round in 0..100 {
        let mut failed = None;
        for used in join_all((0..64).map(|n| used(client, format!("{round} {n}")))).await {
            match used {
                Ok(lock) => released.push(lock),
                Err(error) => {
                    assert!(is_told(&error), "{error:?}");
                    failed = Some(error);
                }
            }
        }
        if let Some(error) = failed {
            return (released, error);
        }
    }
    panic!("the disk is not full: {} locks were granted", released.len())
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
