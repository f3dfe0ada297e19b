//! Records in memory by a paused clock: leases and retention to the millisecond, nothing that stays, and
//! what a million of them cost.

use std::time::Duration;

use dlock::LockClient;
use dlock::record::{ClaimReply, OnOrphan, OwnerReply, Records};
use dlock::stores::memory::MemoryStore;
use dlock_tests::paused_for;
use dlock_tests::records::{ask, ask_for, ask_other, by, claimed, fresh_key, leaving};
use tokio::time::sleep;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
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
fn a_claim_lasts_for_its_lease_to_the_millisecond() {
    paused(async {
        let store = MemoryStore::new();
        let (a, b) = (on(&store).await, on(&store).await);
        for lease in [MS, 100 * MS, SEC, 15 * SEC, HOUR] {
            let key = fresh_key();
            claimed(&a, ask_for(&key, lease, DAY), 1).await;
            sleep(lease - MS).await;
            let reply = b.claim(ask(&key)).await.unwrap();
            assert_eq!(
                reply,
                ClaimReply::InProgress {
                    remaining: MS,
                    attempt: 1
                }
            );
            sleep(MS).await;
            let reply = b.claim(leaving(ask(&key))).await.unwrap();
            assert_eq!(reply, ClaimReply::Orphan { attempt: 1 });
            claimed(&b, ask(&key), 2).await;
        }
    });
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
fn an_old_record_is_gone_for_all_also_while_many_wait_to_be_removed() {
    paused(async {
        let store = MemoryStore::new();
        let records = on(&store).await;
        let mut keys = Vec::new();
        for _ in 0..5000 {
            let key = fresh_key();
            let (token, _) = claimed(&records, ask_for(&key, SEC, HOUR), 1).await;
            keys.push((key, token));
        }
        sleep(HOUR).await;
        for (key, token) in keys.iter().rev() {
            assert_eq!(
                records.extend(key, token, HOUR, HOUR).await.unwrap(),
                OwnerReply::NotOwner
            );
            claimed(&records, ask_other(key), 1).await;
            assert_eq!(
                records.complete(key, token, Vec::new(), HOUR).await.unwrap(),
                OwnerReply::NotOwner
            );
        }
        assert_eq!(store.kept_records(), 5000);
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

#[test]
fn a_policy_counts_when_it_is_asked_for() {
    paused(async {
        let store = MemoryStore::new();
        let records = on(&store).await;
        let key = fresh_key();
        let mut left = ask_for(&key, SEC, DAY);
        left.on_orphan = OnOrphan::Leave;
        claimed(&records, left, 1).await;
        sleep(SEC).await;
        // The claim's owner did not say what happens to it; the next caller does.
        assert_eq!(
            records.claim(leaving(ask(&key))).await.unwrap(),
            ClaimReply::Orphan { attempt: 1 }
        );
        claimed(&records, ask(&key), 2).await;
    });
}
