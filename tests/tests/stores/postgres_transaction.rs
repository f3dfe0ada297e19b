//! Completion in the owner's own transaction: effect and record commit together, or neither does, whatever dies.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dlock::record::{
    ClaimReply, ClaimRequest, ClaimState, ClaimToken, OwnerReply, RecordKey, RecordState, Records,
    SlotOutcome, SlotRequest,
};
use dlock::store::{Outcome, Reason, StoreError};
use dlock_postgres::{CompleteError, PostgresClaim, PostgresRecords};
use dlock_tests::Swallow;
use dlock_tests::faults::{PATIENCE, answered, in_rounds, within};
use dlock_tests::postgres::{PgProxy, Postgres, fresh_table};
use dlock_tests::records::{ask, ask_for, claimed, fresh_key, leaving};
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, IsolationLevel, NoTls};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// What a step that waits for a transaction waits at most.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A shop: a table of records, and one in which each sale of a record's key is a row.
struct Shop {
    server: Arc<Postgres>,
    table: String,
    store: PostgresRecords,
    records: Records,
    /// The same by steps that give up soon.
    hasty: Records,
    client: Client,
}

async fn shop() -> Shop {
    let (server, table) = (Postgres::shared().await, fresh_table());
    let builder = || PostgresRecords::builder(server.config(), NoTls).table(&table);
    let store = builder().timeout(PATIENCE).connect().await.unwrap();
    let hasty = answered(|| builder().timeout(TIMEOUT).connect()).await.unwrap();
    store.create_table().await.unwrap();
    let client = server.client().await;
    client
        .batch_execute(&format!("CREATE TABLE {table}_sales (key text)"))
        .await
        .unwrap();
    Shop {
        server,
        records: Records::new(store.clone()),
        hasty: Records::new(hasty),
        store,
        client,
        table,
    }
}

impl Shop {
    /// A claim for so long.
    async fn claim(&self, lease: Duration) -> PostgresClaim {
        let key = fresh_key();
        let (token, _) = claimed(&self.records, ask_for(&key, lease, DAY), 1).await;
        self.store.owned(&key, &token, DAY)
    }

    fn sale(&self, key: &RecordKey) -> String {
        format!("INSERT INTO {}_sales VALUES ('{}')", self.table, key.as_str())
    }

    async fn sales(&self, key: &RecordKey) -> i64 {
        let sql = format!("SELECT count(*) FROM {}_sales WHERE key = $1", self.table);
        self.client
            .query_one(&sql, &[&key.as_str()])
            .await
            .unwrap()
            .get(0)
    }

    async fn read(&self, claim: &PostgresClaim) -> ClaimState {
        self.records.read(claim.key(), claim.token()).await.unwrap()
    }

    async fn ask(&self, claim: &PostgresClaim) -> ClaimReply {
        self.records.claim(ask(claim.key())).await.unwrap()
    }
}

/// Sees that the step is given up by the server, for another client has the row, and is not done.
async fn is_undecided<T: Debug, F>(step: impl Fn() -> F)
where
    F: Future<Output = Result<T, StoreError>>,
{
    // Where even that comes too late, the outcome is unknown.
    in_rounds("the server gives it up in time", async || {
        let error = step().await.unwrap_err();
        assert_eq!(error.reason, Reason::Unreachable, "{error:?}");
        match error.outcome {
            Outcome::NotDone => Ok(()),
            Outcome::Unknown => Err(error),
        }
    })
    .await;
}

fn completed(with: &[u8]) -> ClaimReply {
    ClaimReply::Completed {
        response: with.to_vec(),
    }
}

fn became(with: &[u8]) -> ClaimState {
    ClaimState::Completed {
        response: with.to_vec(),
    }
}

#[tokio::test]
async fn effect_and_record_commit_together() {
    let shop = shop().await;
    let claim = shop.claim(SEC).await;
    let mut client = shop.server.client().await;
    let tx = client.transaction().await.unwrap();
    tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
    claim.complete_in(&tx, b"sold").await.unwrap();
    assert!(matches!(
        shop.ask(&claim).await,
        ClaimReply::InProgress { attempt: 1, .. }
    ));
    assert_eq!(shop.sales(claim.key()).await, 0);
    tx.commit().await.unwrap();
    assert_eq!(shop.ask(&claim).await, completed(b"sold"));
    assert_eq!(shop.sales(claim.key()).await, 1);
    assert_eq!(shop.read(&claim).await, became(b"sold"));
    // The layer's own completion changes nothing; a renewal that comes late takes the claim for no loss.
    let (key, token) = (claim.key(), claim.token());
    assert_eq!(
        shop.records
            .complete(key, token, b"other".to_vec(), MS)
            .await
            .unwrap(),
        OwnerReply::Done
    );
    assert_eq!(
        shop.records.extend(key, token, SEC, MS).await.unwrap(),
        OwnerReply::Done
    );
    sleep(20 * MS).await;
    assert_eq!(shop.ask(&claim).await, completed(b"sold"));
}

#[tokio::test]
async fn a_rollback_leaves_neither() {
    let shop = shop().await;
    for dropped in [true, false] {
        let claim = shop.claim(200 * MS).await;
        let mut client = shop.server.client().await;
        let tx = client.transaction().await.unwrap();
        tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
        claim.complete_in(&tx, b"sold").await.unwrap();
        match dropped {
            true => drop(tx),
            false => tx.rollback().await.unwrap(),
        }
        assert_eq!(shop.read(&claim).await, ClaimState::Open);
        assert_eq!(shop.sales(claim.key()).await, 0);
        sleep(200 * MS).await;
        claimed(&shop.records, ask(claim.key()), 2).await;
    }
}

#[tokio::test]
async fn owner_that_lost_the_claim_cannot_complete_and_rolls_back() {
    let shop = shop().await;
    let lost = async |claim: &PostgresClaim| {
        let mut client = shop.server.client().await;
        let tx = client.transaction().await.unwrap();
        tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
        for failed in [claim.hold_in(&tx).await, claim.complete_in(&tx, b"sold").await] {
            let error = failed.unwrap_err();
            assert!(error.is_claim_lost(), "{error}");
            let text = error.to_string();
            assert!(
                text.contains(claim.key().as_str()) && text.contains("roll the transaction back"),
                "{text}"
            );
        }
        drop(tx);
        client.batch_execute("SELECT 1").await.unwrap();
        assert_eq!(shop.sales(claim.key()).await, 0);
    };
    // Taken over, and so completed by another.
    let claim = shop.claim(MS).await;
    sleep(20 * MS).await;
    let (next, _) = claimed(&shop.records, ask(claim.key()), 2).await;
    lost(&claim).await;
    shop.records
        .complete(claim.key(), &next, b"other".to_vec(), DAY)
        .await
        .unwrap();
    lost(&claim).await;
    assert_eq!(shop.ask(&claim).await, completed(b"other"));
    // Released, by its owner, as a first attempt and as a later one.
    let claim = shop.claim(SEC).await;
    shop.records.release(claim.key(), claim.token()).await.unwrap();
    lost(&claim).await;
    let first = shop.claim(MS).await;
    sleep(20 * MS).await;
    let (token, _) = claimed(&shop.records, ask(first.key()), 2).await;
    shop.records.release(first.key(), &token).await.unwrap();
    lost(&shop.store.owned(first.key(), &token, DAY)).await;
    // Completed with another result, and never claimed.
    let claim = shop.claim(SEC).await;
    shop.records
        .complete(claim.key(), claim.token(), b"other".to_vec(), DAY)
        .await
        .unwrap();
    lost(&claim).await;
    lost(&shop.store.owned(&fresh_key(), &ClaimToken::new(), DAY)).await;
}

#[tokio::test]
async fn lease_may_be_over_as_long_as_no_other_claim_took_over() {
    let shop = shop().await;
    let claim = shop.claim(MS).await;
    sleep(20 * MS).await;
    let mut client = shop.server.client().await;
    let tx = client.transaction().await.unwrap();
    claim.complete_in(&tx, b"late").await.unwrap();
    // Twice is fine, another result is not.
    claim.complete_in(&tx, b"late").await.unwrap();
    assert!(claim.complete_in(&tx, b"else").await.unwrap_err().is_claim_lost());
    tx.commit().await.unwrap();
    assert_eq!(shop.ask(&claim).await, completed(b"late"));
}

#[tokio::test]
async fn times_are_those_of_the_completion_and_not_of_the_transactions_start() {
    let shop = shop().await;
    let mut client = shop.server.client().await;
    // Kept for a moment, and forgotten while the transaction went on.
    let key = fresh_key();
    let (token, _) = claimed(&shop.records, ask_for(&key, MS, 100 * MS), 1).await;
    let tx = client.transaction().await.unwrap();
    tx.batch_execute("SELECT 1").await.unwrap();
    sleep(200 * MS).await;
    let forgotten = shop.store.owned(&key, &token, DAY);
    assert!(
        forgotten
            .complete_in(&tx, b"sold")
            .await
            .unwrap_err()
            .is_claim_lost()
    );
    drop(tx);
    // Kept from the completion on.
    in_rounds("it is asked for while it is kept", async || {
        let mut client = shop.server.client().await;
        let claim = shop.claim(SEC).await;
        let claim = shop.store.owned(claim.key(), claim.token(), 400 * MS);
        let tx = client.transaction().await.unwrap();
        tx.batch_execute("SELECT 1").await.unwrap();
        sleep(500 * MS).await;
        claim.complete_in(&tx, b"sold").await.unwrap();
        tx.commit().await.unwrap();
        let kept = shop.ask(&claim).await;
        if kept != completed(b"sold") {
            return Err(kept);
        }
        sleep(500 * MS).await;
        claimed(&shop.records, ask(claim.key()), 1).await;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_commit_whose_reply_is_lost_is_found_by_reading() {
    let shop = shop().await;
    for then in [Swallow::Cut, Swallow::Hang] {
        let claim = shop.claim(SEC).await;
        let proxy = PgProxy::start(shop.server.addr());
        let mut client = shop.server.client_at(proxy.addr()).await;
        let tx = client.transaction().await.unwrap();
        tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
        claim.complete_in(&tx, b"sold").await.unwrap();
        let fault = proxy.swallow(1, then, |request| request.runs("COMMIT"));
        let committed = timeout(200 * MS, tx.commit()).await;
        assert!(!matches!(committed, Ok(Ok(()))), "its reply is lost");
        fault.swallowed().await;
        assert_eq!(shop.read(&claim).await, became(b"sold"));
        assert_eq!(shop.sales(claim.key()).await, 1);
    }
}

#[tokio::test]
async fn a_commit_that_never_arrives_has_no_effect_and_is_found_by_reading() {
    let shop = shop().await;
    let claim = shop.claim(SEC).await;
    let proxy = PgProxy::start(shop.server.addr());
    let mut client = shop.server.client_at(proxy.addr()).await;
    let tx = client.transaction().await.unwrap();
    tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
    claim.complete_in(&tx, b"sold").await.unwrap();
    proxy.lose(1, |request| request.runs("COMMIT"));
    assert!(tx.commit().await.is_err());
    assert_eq!(shop.read(&claim).await, ClaimState::Open);
    assert_eq!(shop.sales(claim.key()).await, 0);
}

#[tokio::test]
async fn a_commit_that_is_under_way_leaves_the_claim_undecided_until_it_arrives() {
    let shop = shop().await;
    let claim = shop.claim(MS).await;
    let proxy = PgProxy::start(shop.server.addr());
    let mut client = shop.server.client_at(proxy.addr()).await;
    let held = proxy.hold(1, |request| request.runs("COMMIT"));
    let committing = tokio::spawn({
        let (claim, sale) = (claim.clone(), shop.sale(claim.key()));
        async move {
            let tx = client.transaction().await.unwrap();
            tx.batch_execute(&sale).await.unwrap();
            claim.complete_in(&tx, b"sold").await.unwrap();
            tx.commit().await
        }
    });
    held.caught().await;
    // Its handler gives up, and the bytes are on their way.
    committing.abort();
    let (key, token) = (claim.key(), claim.token());
    is_undecided(|| shop.hasty.read(key, token)).await;
    is_undecided(|| shop.hasty.release(key, token)).await;
    let reading = tokio::spawn({
        let (records, key, token) = (shop.records.clone(), key.clone(), token.clone());
        async move { records.read(&key, &token).await }
    });
    sleep(50 * MS).await;
    held.release();
    assert_eq!(reading.await.unwrap().unwrap(), became(b"sold"));
    assert_eq!(shop.sales(key).await, 1);
}

#[tokio::test]
async fn open_transaction_keeps_its_claim_and_blocks_no_caller() {
    let shop = shop().await;
    for commits in [true, false] {
        let claim = shop.claim(MS).await;
        let mut client = shop.server.client().await;
        let tx = client.transaction().await.unwrap();
        claim.hold_in(&tx).await.unwrap();
        sleep(20 * MS).await;
        for request in [ask(claim.key()), leaving(ask(claim.key()))] {
            let reply = within(MS, "a claim", shop.records.claim(request)).await.unwrap();
            assert!(
                matches!(reply, ClaimReply::InProgress { attempt: 1, remaining } if remaining > MS),
                "{reply:?}"
            );
        }
        claim.complete_in(&tx, b"sold").await.unwrap();
        assert!(matches!(
            shop.ask(&claim).await,
            ClaimReply::InProgress { attempt: 1, .. }
        ));
        if commits {
            tx.commit().await.unwrap();
            assert_eq!(shop.ask(&claim).await, completed(b"sold"));
        } else {
            tx.rollback().await.unwrap();
            assert_eq!(
                shop.records.claim(leaving(ask(claim.key()))).await.unwrap(),
                ClaimReply::Orphan { attempt: 1 }
            );
            claimed(&shop.records, ask(claim.key()), 2).await;
        }
    }
}

#[tokio::test]
async fn an_extension_does_not_wait_for_the_owners_transaction() {
    let shop = shop().await;
    let claim = shop.claim(DAY).await;
    let (key, token) = (claim.key(), claim.token());
    let mut client = shop.server.client().await;
    let tx = client.transaction().await.unwrap();
    claim.complete_in(&tx, b"sold").await.unwrap();
    for _ in 0..3 {
        let extend = within(MS, "an extension", shop.records.extend(key, token, SEC, DAY)).await;
        assert_eq!(extend.unwrap(), OwnerReply::Held);
        let stranger = ClaimToken::new();
        assert_eq!(
            shop.records.extend(key, &stranger, SEC, DAY).await.unwrap(),
            OwnerReply::NotOwner
        );
    }
    // Completing from outside waits within bounds, and comes to the same.
    is_undecided(|| shop.hasty.complete(key, token, b"sold".to_vec(), DAY)).await;
    let (completing, _) = tokio::join!(shop.records.complete(key, token, b"sold".to_vec(), DAY), async {
        sleep(50 * MS).await;
        tx.commit().await.unwrap();
    });
    assert_eq!(completing.unwrap(), OwnerReply::Done);
}

/// Others could take it over right after.
#[tokio::test]
async fn claim_lasts_on_after_the_rollback_of_a_transaction_that_was_longer_than_its_lease() {
    let shop = shop().await;
    let (server, store, records, lease) = (&shop.server, &shop.store, &shop.records, 3 * SEC);
    let once = records.once("long").lease(lease);
    let ran = once.run(async |claim| {
        let owned = store.owned(claim.record_key(), claim.token(), claim.keep());
        let mut client = server.client().await;
        let tx = client.transaction().await.unwrap();
        owned.hold_in(&tx).await.unwrap();
        sleep(2 * lease + SEC / 2).await;
        assert!(claim.is_held());
        tx.rollback().await.unwrap();
        in_rounds("its lease is there again", async || {
            sleep(20 * MS).await;
            let look = records.inspect(claim.record_key(), false).await.unwrap();
            match look.record.expect("it is claimed").state {
                RecordState::Claimed { remaining, .. } if remaining > SEC => Ok(()),
                state => Err(state),
            }
        })
        .await;
        assert!(claim.is_held());
        Ok::<_, String>(())
    });
    assert!(matches!(ran.await, Ok(dlock::OnceReply::Ran(()))));
}

/// With the lease over, the transaction that has the row locked may be another claim.
#[tokio::test]
async fn an_extension_of_an_expired_claim_waits_for_another_claim() {
    let shop = shop().await;
    let claim = shop.claim(MS).await;
    let (key, token) = (claim.key(), claim.token());
    sleep(20 * MS).await;
    let mut client = shop.server.client().await;
    // That of its owner keeps it, and is not waited for to its end.
    let tx = client.transaction().await.unwrap();
    claim.hold_in(&tx).await.unwrap();
    let extending = shop.records.extend(key, token, 400 * MS, DAY);
    let extended = within(5 * SEC, "the extension", extending).await.unwrap();
    assert_eq!(extended, OwnerReply::Held);
    tx.rollback().await.unwrap();
    let tx = client.transaction().await.unwrap();
    let taken_over = format!(
        "UPDATE {} SET token = 'other', attempt = 2, lease_until = now() + interval '1 h' WHERE key = $1",
        shop.table
    );
    assert_eq!(tx.execute(&taken_over, &[&key.as_str()]).await.unwrap(), 1);
    let (extended, committed) = tokio::join!(shop.records.extend(key, token, DAY, DAY), async {
        sleep(300 * MS).await;
        tx.commit().await
    });
    committed.unwrap();
    assert_eq!(extended.unwrap(), OwnerReply::NotOwner);
}

/// As where the server was away for longer than the lease of the first copy.
#[tokio::test]
async fn a_claim_that_is_repeated_after_its_lease_is_not_granted_beside_another_claim() {
    let shop = shop().await;
    for slot in [None, Some(SlotRequest::at(SystemTime::now() - SEC))] {
        let claim = async |request: ClaimRequest| match slot {
            None => shop.records.claim(request).await.unwrap(),
            Some(slot) => match shop.records.claim_slot(request, slot).await.unwrap().outcome {
                SlotOutcome::Claim(reply) => reply,
                other => panic!("{other:?}"),
            },
        };
        let request = ask_for(&fresh_key(), MS, DAY);
        let first = claim(request.clone()).await;
        assert!(
            matches!(first, ClaimReply::Claimed { attempt: 1, .. }),
            "{first:?}"
        );
        sleep(20 * MS).await;
        // The claim of another process, while it is being committed.
        let mut client = shop.server.client().await;
        let tx = client.transaction().await.unwrap();
        let taken_over = format!(
            "UPDATE {} SET token = 'other', attempt = 2, lease_until = now() + interval '1 h' WHERE key = $1",
            shop.table
        );
        let key = request.key.as_str();
        assert_eq!(tx.execute(&taken_over, &[&key]).await.unwrap(), 1);
        let beside = claim(request.clone()).await;
        assert!(matches!(beside, ClaimReply::InProgress { .. }), "{beside:?}");
        tx.commit().await.unwrap();
        let after = claim(request.clone()).await;
        assert!(
            matches!(after, ClaimReply::InProgress { attempt: 2, .. }),
            "{after:?}"
        );
    }
}

#[tokio::test]
async fn a_handler_that_forgets_to_commit_has_its_result_stored_by_the_layer() {
    let shop = shop().await;
    let claim = shop.claim(SEC).await;
    let mut client = shop.server.client().await;
    let tx = client.transaction().await.unwrap();
    claim.complete_in(&tx, b"sold").await.unwrap();
    drop(tx);
    let done = shop
        .records
        .complete(claim.key(), claim.token(), b"sold".to_vec(), DAY)
        .await;
    assert_eq!(done.unwrap(), OwnerReply::Done);
    assert_eq!(shop.ask(&claim).await, completed(b"sold"));
}

#[tokio::test]
async fn waiter_is_told_when_the_owner_reads_or_completes_once_more() {
    let shop = shop().await;
    let (_, elsewhere) = shop.server.records(&shop.table).await;
    for reads in [true, false] {
        let claim = shop.claim(DAY).await;
        let (key, token) = (claim.key(), claim.token());
        let (mut here, mut there) = (shop.records.watch(key), elsewhere.watch(key));
        here.changed().await;
        there.changed().await;
        let mut client = shop.server.client().await;
        let tx = client.transaction().await.unwrap();
        claim.complete_in(&tx, b"sold").await.unwrap();
        tx.commit().await.unwrap();
        if reads {
            assert_eq!(shop.read(&claim).await, became(b"sold"));
        } else {
            shop.records
                .complete(key, token, b"sold".to_vec(), DAY)
                .await
                .unwrap();
        }
        for watch in [&mut here, &mut there] {
            within(SEC, "the notification", watch.changed()).await;
        }
        assert_eq!(elsewhere.claim(ask(key)).await.unwrap(), completed(b"sold"));
    }
}

#[tokio::test]
async fn strict_isolation_takes_a_hold_at_the_beginning() {
    let shop = shop().await;
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for hold in [false, true] {
            let claim = shop.claim(SEC).await;
            let mut client = shop.server.client().await;
            let tx = client
                .build_transaction()
                .isolation_level(level)
                .start()
                .await
                .unwrap();
            if hold {
                claim.hold_in(&tx).await.unwrap();
            }
            tx.batch_execute(&shop.sale(claim.key())).await.unwrap();
            let extended = shop.records.extend(claim.key(), claim.token(), SEC, DAY).await;
            let expected = if hold { OwnerReply::Held } else { OwnerReply::Done };
            assert_eq!(extended.unwrap(), expected);
            match claim.complete_in(&tx, b"sold").await {
                Ok(()) => assert!(hold, "{level:?}"),
                Err(CompleteError::Failed { source, .. }) => {
                    assert!(
                        !hold && source.code() == Some(&SqlState::T_R_SERIALIZATION_FAILURE),
                        "{source:?}"
                    );
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            tx.commit().await.unwrap();
            assert_eq!(shop.ask(&claim).await, completed(b"sold"));
        }
    }
}
