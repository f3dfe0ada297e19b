//! What a fenced lock does, on memory and on a server: a plain lock whose tokens are out of a counter of its own.

use std::time::Duration;

use dlock::{LockClient, LockKind};
use dlock_tests::faults::{SOON, within};
use dlock_tests::{Store, on_every_store};

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
            const COUNTER: &str = "redisson_lock_token:{k}";
            let all = futures_util::future::join_all((0..10).map(|_| token(&a))).await;
            let counted: u64 = server.query(&["GET", COUNTER]).await;
            assert_eq!(all.iter().max(), Some(&counted));
            // As after a fail-over to a replica that had not received the last of them.
            let before = tokens[10].to_string();
            let _: String = server.query(&["SET", COUNTER, &before]).await;
            let next = token(&b).await;
            assert!(next > counted, "{next} after {counted}");
            // A counter that Java began has one more each time, also where several wait in one process.
            let _: String = server.query(&["SET", COUNTER, "7"]).await;
            let mut all = futures_util::future::join_all((0..10).map(|_| token(&a))).await;
            all.sort_unstable();
            assert_eq!(all, (8..18).collect::<Vec<_>>());
        }
        store.assert_clean(&[&a, &b]).await;
    }

    async fn the_token_of_a_fenced_lock_outlives_a_set_with_a_lease(store: &Store) {
        let (a, b) = (store.client().await, store.client().await);
        let mut last = a.fenced_lock("x").acquire().await.unwrap().fencing_token();
        for _ in 0..2 {
            let set = a.multi(["x", "y"]).kind(LockKind::Fenced).fixed_lease(150 * MS).wait(SOON).acquire().await.unwrap();
            assert!(set.fencing_token_of("x").unwrap() > last);
            last = set.fencing_token_of("x").unwrap();
            // It ends by itself, and the counter does not end with it.
            let next = within(SOON, "the end of the lease", b.fenced_lock("x").acquire()).await.unwrap();
            assert!(next.fencing_token() > last, "{} after {last}", next.fencing_token());
            last = next.fencing_token();
            assert!(set.release().await.unwrap_err().is_lost());
            next.release().await.unwrap();
        }
        store.assert_clean(&[&a, &b]).await;
    }
}
