//! The accounts, and the transaction that pays.

use std::error::Error;
use std::time::Duration;

use dlock::LockClient;
use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, RecordKey, Records};
use dlock_postgres::{HoldError, PostgresLocks, PostgresRecords};
use sha2::{Digest, Sha256};
use tokio_postgres::{Client, Config, NoTls};

use crate::args::Args;

/// How long a payment is not repeated.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// The outcome of a payment.
pub(crate) enum Outcome {
    Paid(String),
    /// A payment was made under this key before.
    Before(String),
    Refused(String),
}

pub(crate) struct Bank {
    locks: PostgresLocks,
    records: PostgresRecords,
    client: LockClient,
    db: Client,
    lease: Duration,
}

impl Bank {
    pub(crate) async fn open(url: &str, lease: Duration) -> Result<Bank, Box<dyn Error>> {
        let config: Config = url.parse()?;
        let (db, connection) = config.connect(NoTls).await?;
        tokio::spawn(connection);
        let locks = PostgresLocks::connect(config.clone(), NoTls).await?;
        let records = PostgresRecords::connect(config, NoTls).await?;
        locks.create_table().await?;
        records.create_table().await?;
        let client = LockClient::builder()
            .store(locks.clone())
            .lease(lease)
            .build()
            .await?;
        Ok(Bank {
            locks,
            records,
            client,
            db,
            lease,
        })
    }

    pub(crate) async fn create(&self, account: &str, balance: i64) -> Result<(), Box<dyn Error>> {
        self.db
            .batch_execute(
                "CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, balance int8 NOT NULL)",
            )
            .await?;
        let sql = "INSERT INTO accounts VALUES ($1, $2) ON CONFLICT DO NOTHING";
        self.db.execute(sql, &[&account, &balance]).await?;
        Ok(())
    }

    pub(crate) async fn pay(&mut self, args: &Args) -> Result<Outcome, Box<dyn Error>> {
        let key = RecordKey::new(&args.key)?;
        let token = ClaimToken::new();
        let asked = Sha256::digest(format!("{} {}", args.account, args.amount)).into();
        let claim = ClaimRequest::new(key.clone(), token.clone(), asked, self.lease, RETENTION);
        match Records::new(self.records.clone()).claim(claim).await? {
            ClaimReply::Claimed { .. } => {}
            ClaimReply::Completed { response } => {
                return Ok(Outcome::Before(String::from_utf8_lossy(&response).into_owned()));
            }
            other => return Ok(Outcome::Refused(format!("the key is taken: {other:?}"))),
        }

        let guard = self
            .client
            .lock(format!("account:{}", args.account))
            .acquire()
            .await?;
        let tx = self.db.transaction().await?;
        // From here to the commit no other client holds the lock of the account.
        match self.locks.hold_in(&tx, &guard).await {
            Ok(()) => {}
            Err(HoldError::Lost { .. }) => return Ok(Outcome::Refused("the lock was lost".to_owned())),
            Err(error) => return Err(error.into()),
        }
        let sql = "SELECT balance FROM accounts WHERE name = $1";
        let balance: i64 = tx.query_one(sql, &[&args.account]).await?.get(0);
        if let Some(stall) = args.stall {
            eprintln!("standing still for {stall:?}");
            std::thread::sleep(stall);
        }
        // The balance that was read is still valid: a concurrent payment would be lost here.
        let left = balance - args.amount;
        let sql = "UPDATE accounts SET balance = $2 WHERE name = $1";
        tx.execute(sql, &[&args.account, &left]).await?;
        let receipt = format!("paid {}, {left} left", args.amount);
        let claim = self.records.owned(&key, &token, RETENTION);
        claim.complete_in(&tx, receipt.as_bytes()).await?;
        tx.commit().await?;
        // After the commit, so that woken waiters can go on. A lease that is over by now is not a failure.
        if let Err(error) = guard.release().await
            && !error.is_lost()
        {
            return Err(error.into());
        }
        Ok(Outcome::Paid(receipt))
    }
}
