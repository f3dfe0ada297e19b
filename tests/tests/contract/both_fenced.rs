//! What a fenced lock does, on memory and on a server: a plain lock whose tokens are out of a counter of its own.

use std::time::{Duration, Instant};

use dlock::{Error, HoldState, LockClient, LockKind, Loss};
use dlock_tests::faults::{PATIENCE, SLACK, SOON, in_rounds, is_confirmed, within};
use dlock_tests::{Store, on_every_store, settle};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A lease that no test waits out.
async fn long(store: &Store) -> LockClient {
    store.client_with(|builder| builder.lease(90 * SECOND)).await
}

async fn token(client: &LockClient) -> u64 {
    let guard = client.fenced_lock("k").acquire().await.unwrap();
    let token = guard.fencing_token();
    guard.release().await.unwrap();
    token
}

on_every_store! {
    async fn each_acquisition_has_a_greater_token(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let mut tokens = Vec::new();
        for i in 0..20 {
            tokens.push(token(if i % 3 == 0 { &a } else { &b }).await);
        }
        assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
        if let Store::Server(server) = store {
            // One more each time, as for Java, also where several wait in one process.
            assert!(tokens.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{tokens:?}");
            let all = futures_util::future::join_all((0..10).map(|_| token(&a))).await;
            let counted: u64 = server.query(&["GET", "redisson_lock_token:{k}"]).await;
            assert_eq!(counted, tokens[19] + 10);
            assert_eq!(all.iter().max(), Some(&counted));
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn re_entering_call_shares_the_token(store: &Store) {
        let client = long(store).await;
        let lock = client.fenced_lock("k");
        let inner = lock.clone();
        lock.run(async |held| {
            let again = inner.acquire().await.unwrap();
            assert_eq!(again.fencing_token(), held.fencing_token());
        })
        .await
        .unwrap();
        store.assert_clean(&[&client]).await;
    }

    async fn try_acquire_asks_once(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let guard = a.fenced_lock("k").try_acquire().await.unwrap();
        let asking = b.fenced_lock("k").try_acquire();
        let error = within(MS, "asking once", asking).await.unwrap_err();
        let Error::NotAcquired { waited, remaining, .. } = error else { panic!("{error}") };
        assert_eq!(waited, Duration::ZERO);
        assert!(remaining.unwrap() > 30 * SECOND, "{remaining:?}");
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }

    async fn fixed_lease_ends_its_lock_and_no_other(store: &Store) {
        in_rounds("it is held before its lease is over", async || {
            let (a, b) = (long(store).await, long(store).await);
            let guard = a.fenced_lock("k").fixed_lease(300 * MS).acquire().await.unwrap();
            let held = guard.is_held() && !guard.is_renewed();
            let next = b.fenced_lock("k").wait(PATIENCE).acquire().await.unwrap();
            assert_eq!(guard.state(), HoldState::Lost(Loss::Expired));
            assert!(next.fencing_token() > guard.fencing_token());
            assert!(guard.release().await.unwrap_err().is_lost());
            is_confirmed(&next).await;
            assert!(next.remaining() > 60 * SECOND);
            next.release().await.unwrap();
            store.assert_clean(&[&a, &b]).await;
            if held { Ok(()) } else { Err("it was over at once") }
        })
        .await;
    }

    async fn a_release_wakes_who_waits(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        for _ in 0..3 {
            let guard = a.fenced_lock("k").acquire().await.unwrap();
            let token = guard.fencing_token();
            let waiter = tokio::spawn(b.fenced_lock("k").acquire());
            settle().await;
            guard.release().await.unwrap();
            let next = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
            assert!(next.fencing_token() > token);
            next.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn max_hold_and_min_hold_are_kept(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let begun = Instant::now();
        let guard = a.fenced_lock("k").min_hold(600 * MS).acquire().await.unwrap();
        guard.release().await.unwrap();
        let next = b.fenced_lock("k").wait(PATIENCE).max_hold(700 * MS).acquire().await.unwrap();
        assert!(begun.elapsed() >= 599 * MS && begun.elapsed() < SLACK, "{:?}", begun.elapsed());
        assert_eq!(next.lost().await, Loss::MaxHold);
        drop(next);
        store.assert_clean(&[&a, &b]).await;
    }

    async fn several_are_had_together_or_not_at_all(store: &Store) {
        let (a, b) = (long(store).await, long(store).await);
        let all = |client: &LockClient| client.multi(["x", "y", "z"]).kind(LockKind::Fenced);
        let guard = all(&a).try_acquire().await.unwrap();
        assert!(b.fenced_lock("y").try_acquire().await.unwrap_err().is_busy());
        guard.release().await.unwrap();
        let busy = b.fenced_lock("z").acquire().await.unwrap();
        assert!(all(&a).try_acquire().await.unwrap_err().is_busy());
        for key in ["x", "y"] {
            let free = b.fenced_lock(key).wait(PATIENCE).acquire();
            let free = within(SOON, "nothing stays of those that were free", free).await;
            free.unwrap().release().await.unwrap();
        }
        busy.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
    }
}
