//! `#[distributed_lock]` with several keys and with other kinds: what is taken, what nested calls enter, and what the
//! loss of one does.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use dlock::store::Kind;
use dlock::testing::TestStore;
use dlock::{Error, LockClient, LockKey, LockKind, distributed_lock};
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

const MS: Duration = Duration::from_millis(1);

async fn holder(client: &LockClient, key: &str) -> Option<Kind> {
    client.inspect(key).await.unwrap().map(|holder| holder.kind)
}

struct Bank {
    locks: LockClient,
    accounts: Vec<AtomicI64>,
}

impl Bank {
    fn new(accounts: usize) -> Bank {
        Bank {
            locks: LockClient::memory(),
            accounts: (0..accounts).map(|_| AtomicI64::new(100)).collect(),
        }
    }

    #[distributed_lock(keys = ["account:{from}", "account:{to}"], lock = self.locks, wait = "1m")]
    async fn transfer(&self, from: usize, to: usize, amount: i64) -> Result<(), Error> {
        // Both are held, and each is entered by what takes it alone.
        let taken = self.add(from, -amount).await?;
        sleep(MS).await;
        let given = self.add(to, amount).await?;
        assert_ne!(taken, given, "each account has a token of its own");
        Ok(())
    }

    #[distributed_lock(key = "account:{account}", lock = self.locks, wait = "1m")]
    async fn add(&self, account: usize, amount: i64) -> Result<u64, Error> {
        let before = self.accounts[account].load(Ordering::SeqCst);
        sleep(MS).await;
        self.accounts[account].store(before + amount, Ordering::SeqCst);
        Ok(dlock::current().unwrap().fencing_token())
    }
}

#[tokio::test(start_paused = true)]
async fn transfers_in_both_directions_take_turns_and_lose_nothing() {
    let bank = Bank::new(3);
    let pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)];
    let transfers = (0..60).map(|i| {
        let (from, to) = pairs[i % pairs.len()];
        bank.transfer(from, to, 1 + i as i64 % 7)
    });
    // One task, whose branches enclose each other in nothing.
    let outcomes = timeout(Duration::from_secs(3600), join_all(transfers)).await;
    for outcome in outcomes.expect("they wait for each other for ever") {
        outcome.unwrap();
    }
    let sum: i64 = bank.accounts.iter().map(|a| a.load(Ordering::SeqCst)).sum();
    assert_eq!(sum, 300);
    assert_eq!(bank.locks.held(), 0);
}

#[distributed_lock(keys = [first, format!("{second}!"), "third:{n}"], lock = client)]
async fn mixed(client: &LockClient, first: LockKey, second: &str, n: u32) -> Result<Vec<String>, Error> {
    drop(first);
    let held = dlock::current().unwrap();
    Ok(held.keys().map(ToString::to_string).collect())
}

#[distributed_lock(keys = names, lock = client, wait = try)]
async fn listed(client: &LockClient, names: Vec<String>) -> Result<usize, Error> {
    assert_eq!(client.held(), names.len());
    Ok(names.len())
}

#[tokio::test]
async fn each_of_a_list_is_a_key_as_for_one_and_an_expression_may_have_them_all() {
    let client = LockClient::memory();
    let names = mixed(&client, "b".into(), "a", 3).await.unwrap();
    assert_eq!(names, ["a!", "b", "third:3"]);

    let names: Vec<_> = ["x", "y", "z"].map(String::from).into();
    assert_eq!(listed(&client, names.clone()).await.unwrap(), 3);
    let busy = client.lock("y").acquire().await.unwrap();
    let error = listed(&client, names).await.unwrap_err();
    assert!(
        matches!(&error, Error::NotAcquired { key, .. } if key.as_str() == "y"),
        "{error}"
    );
    drop(busy);
    let error = listed(&client, Vec::new()).await.unwrap_err();
    assert!(
        matches!(error, Error::InvalidOption { option: "keys", .. }),
        "{error}"
    );
    assert_eq!(client.held(), 0);
}

#[distributed_lock(keys = ["a", "b"], lock = client)]
async fn until_lost(client: &LockClient) -> Result<(), Error> {
    std::future::pending().await
}

#[distributed_lock(keys = ["a", "b"], lock = client, on_lost = ignore)]
async fn asks(client: &LockClient) -> Result<bool, Error> {
    let held = dlock::current().unwrap();
    held.lost().await;
    Ok(held.is_held())
}

#[tokio::test(start_paused = true)]
async fn the_loss_of_one_ends_the_body_or_is_seen_by_it() {
    let store = TestStore::new();
    let (client, other) = (store.client(), store.client());
    let lost = async {
        sleep(MS).await;
        assert!(store.lose("b"));
    };
    let (outcome, ()) = tokio::join!(until_lost(&client), lost);
    let error = outcome.unwrap_err();
    assert!(
        matches!(&error, Error::Lost { key, .. } if key.as_str() == "b"),
        "{error}"
    );
    drop(other.multi(["a", "b"]).try_acquire().await.unwrap());

    let lost = async {
        sleep(MS).await;
        assert!(store.lose("b"));
    };
    let (outcome, ()) = tokio::join!(asks(&client), lost);
    assert!(
        !outcome.unwrap(),
        "the whole is lost, though the first of them is held"
    );
    drop(other.multi(["a", "b"]).try_acquire().await.unwrap());
}

#[distributed_lock(key = "page", lock = client, kind = read, wait = try)]
async fn read(client: &LockClient) -> Result<(), Error> {
    assert_eq!(holder(client, "page").await, Some(Kind::Read));
    sleep(MS).await;
    Ok(())
}

#[distributed_lock(keys = ["page", "index"], lock = client, kind = write, wait = try)]
async fn write(client: &LockClient) -> Result<(), Error> {
    assert_eq!(holder(client, "page").await, Some(Kind::Write));
    assert_eq!(holder(client, "index").await, Some(Kind::Write));
    assert!(read(&other_process().await).await.unwrap_err().is_busy());
    Ok(())
}

#[distributed_lock(key = "page", lock = client, kind = lock)]
async fn plain(client: &LockClient) -> Result<(), Error> {
    assert_eq!(holder(client, "page").await, Some(Kind::Mutex));
    Ok(())
}

/// Outside of all frames, for those hold locks by client.
async fn other_process() -> LockClient {
    LockClient::connect("memory://macro_keys").await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn kinds_are_passed_on_for_one_key_and_for_several() {
    let client = LockClient::connect("memory://macro_keys").await.unwrap();
    let (one, other) = tokio::join!(read(&client), read(&client));
    one.and(other).unwrap();
    write(&client).await.unwrap();
    plain(&client).await.unwrap();
    let reading = client.lock("index").kind(LockKind::Read).acquire().await.unwrap();
    assert!(write(&client).await.unwrap_err().is_busy());
    drop(reading);
    write(&client).await.unwrap();
    assert_eq!(client.held(), 0);
}

#[distributed_lock(key = "page", kind = write, prefer_writers = true, lock = client)]
async fn edit(client: &LockClient) -> Result<(), Error> {
    assert_eq!(
        client.inspect("page").await?.map(|holder| holder.kind),
        Some(Kind::Write)
    );
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn readers_stand_back_for_a_call_that_waits_to_write_and_prefers_it() {
    let client = LockClient::memory();
    let inside = client.rw_lock("page").read().acquire().await.unwrap();
    let edits = tokio::spawn({
        let client = client.clone();
        async move { edit(&client).await }
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(
        client
            .rw_lock("page")
            .read()
            .try_acquire()
            .await
            .unwrap_err()
            .is_busy()
    );
    drop(inside);
    edits.await.unwrap().unwrap();
    drop(client.rw_lock("page").read().try_acquire().await.unwrap());
}
