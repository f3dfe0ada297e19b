//! Records in memory by a paused clock: what stays of them, and who shares them.

use std::time::Duration;

use dlock::LockClient;
use dlock::record::{ClaimReply, Records};
use dlock::stores::memory::MemoryStore;
use dlock_tests::paused_for;
use dlock_tests::records::{ask, ask_for, by, claimed, fresh_key};
use tokio::time::sleep;

const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The paused clock, and a virtual limit.
fn paused(test: impl Future<Output = ()>) {
    paused_for(10 * DAY, test);
}

async fn on(store: &MemoryStore) -> Records {
    let client = LockClient::builder().store(store.clone()).build().await.unwrap();
    client.records().unwrap()
}

#[test]
fn an_hour_of_work_keeps_no_more_than_the_retention_asks_for() {
    paused(async {
        let store = MemoryStore::new();
        let records = on(&store).await;
        let mut most = 0;
        for second in 0..3600 {
            for _ in 0..10 {
                let key = fresh_key();
                let (token, _) = claimed(&records, ask_for(&key, SEC, 10 * SEC), 1).await;
                records
                    .complete(&key, &token, vec![1; 10], 10 * SEC)
                    .await
                    .unwrap();
            }
            most = most.max(store.kept_records());
            if second % 7 == 0 {
                // Of a key that is used for ever there is one record.
                let key = dlock::record::RecordKey::new("again").unwrap();
                let request = ask_for(&key, SEC, 5 * SEC);
                let token = request.token.clone();
                claimed(&records, request, 1).await;
                records.complete(&key, &token, Vec::new(), 5 * SEC).await.unwrap();
            }
            sleep(SEC).await;
        }
        assert!(most <= 101, "{most} records of 10 s at 10 a second");
    });
}

#[test]
fn clones_and_stores_of_one_name_share_their_records() {
    paused(async {
        let client =
            |url: &'static str| async move { LockClient::connect(url).await.unwrap().records().unwrap() };
        let key = fresh_key();
        let a = client("memory://records-of-one-name").await;
        let (token, fence) = claimed(&a, ask(&key), 1).await;
        let b = client("memory://records-of-one-name").await;
        assert!(matches!(
            b.claim(ask(&key)).await.unwrap(),
            ClaimReply::InProgress { .. }
        ));
        // The records keep the store alive when its clients are gone.
        drop(a);
        let c = client("memory://records-of-one-name").await;
        assert_eq!(claimed(&c, by(&token, ask(&key)), 1).await.1, fence);
        claimed(&client("memory://").await, ask(&key), 1).await;
        claimed(&client("memory://another-name").await, ask(&key), 1).await;
    });
}
