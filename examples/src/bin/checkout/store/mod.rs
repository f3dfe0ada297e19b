//! The shop's own data: where stock and accounts are kept.
//!
//! A record has the token of its last writer in it, on Redis as JSON: `{"stock":99,"sold":1,"token":17}`. Value and
//! token are read and written together. Otherwise the check of the token would be useless: a write could pass the
//! check and arrive after a newer one.
//!
//! The stores know nothing about locks. For safety they only compare two numbers.

mod memory;
mod redis;

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What is known of an article.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Item {
    pub(crate) stock: u64,
    pub(crate) sold: u64,
    /// The fencing token of the last writer.
    pub(crate) token: u64,
}

/// What is known of an account.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Account {
    pub(crate) charged: u64,
    /// The fencing token of the last writer.
    pub(crate) token: u64,
}

/// What has a record of its own.
pub(crate) trait Recorded: Copy + Serialize + DeserializeOwned {
    fn into_record(self) -> Record;

    /// `None` for a record of another sort.
    fn of(record: Record) -> Option<Self>;
}

/// A record of any sort.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Record {
    Item(Item),
    Account(Account),
    /// A number that all may add to.
    Count(u64),
}

impl Record {
    /// The token of its last writer.
    fn token(&mut self) -> Option<&mut u64> {
        match self {
            Record::Item(item) => Some(&mut item.token),
            Record::Account(account) => Some(&mut account.token),
            Record::Count(_) => None,
        }
    }
}

macro_rules! recorded {
    ($($of:ident($inner:ty)),*) => {$(
        impl Recorded for $inner {
            fn into_record(self) -> Record {
                Record::$of(self)
            }

            fn of(record: Record) -> Option<$inner> {
                match record {
                    Record::$of(inner) => Some(inner),
                    _ => None,
                }
            }
        }
    )*};
}

recorded!(Item(Item), Account(Account), Count(u64));

/// A place for records.
pub(crate) enum Store {
    /// In this process.
    Memory(memory::MemoryStore),
    /// On a Redis server, for several processes.
    Redis(Box<redis::RedisStore>),
}

/// Why a record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreError {
    /// A holder with a newer token has changed the record. Nothing was changed.
    #[error("the record was taken over by a newer holder of the lock: token {ours} is older than {last}")]
    Fenced { ours: u64, last: u64 },
    /// The store does not answer.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// The store did not confirm a write, which may or may not have happened.
    #[error("the store did not confirm the write, which may have happened: {0}")]
    Unknown(String),
    /// The record was not written by this service.
    #[error("the store holds something else under \"{0}\"")]
    Foreign(String),
}

impl Store {
    /// Opens the store of a URL.
    pub(crate) async fn open(url: &str) -> Result<Store, String> {
        match url.split_once("://") {
            Some(("memory", _)) => Ok(Store::Memory(memory::MemoryStore::default())),
            Some(_) => redis::RedisStore::open(url)
                .await
                .map(|store| Store::Redis(Box::new(store))),
            // What has no scheme may be a password as well as a host: it is not repeated.
            None => Err("the URL has no scheme, as in redis://localhost:6379 or memory://".to_owned()),
        }
    }

    /// The record as it is.
    pub(crate) async fn read<T: Recorded>(&self, key: &str) -> Result<Option<T>, StoreError> {
        match self {
            Store::Memory(store) => typed(key, store.read(key)),
            Store::Redis(store) => decode(key, store.read(key).await?),
        }
    }

    /// Excludes holders of older tokens from a record and returns it: stores `token` in it, and changes nothing else.
    /// A missing record becomes `initial`, if that is given.
    ///
    /// Only to read it would leave a gap. A stopped holder may send its write after the next holder has read the
    /// record and before it has written the record; the record would still have the old token and accept the write.
    pub(crate) async fn claim<T: Recorded>(
        &self,
        key: &str,
        token: u64,
        initial: Option<T>,
    ) -> Result<Option<T>, StoreError> {
        match self {
            Store::Memory(store) => typed(key, store.claim(key, token, initial.map(T::into_record))?),
            Store::Redis(store) => {
                let initial = initial.map(|record| encode(key, &record)).transpose()?;
                let claimed = store.claim(key, token, initial.as_deref().unwrap_or_default());
                decode(key, claimed.await?)
            }
        }
    }

    /// Replaces the record. With a token only if no newer token has changed it; without one
    /// whatever is there.
    pub(crate) async fn write<T: Recorded>(
        &self,
        key: &str,
        record: T,
        token: Option<u64>,
    ) -> Result<(), StoreError> {
        match self {
            Store::Memory(store) => store.write(key, record.into_record(), token),
            Store::Redis(store) => store.write(key, &encode(key, &record)?, token).await,
        }
    }

    /// Adds to a number and returns the sum: one atomic step.
    pub(crate) async fn add(&self, key: &str, more: u64) -> Result<u64, StoreError> {
        match self {
            Store::Memory(store) => store.add(key, more),
            Store::Redis(store) => store.add(key, more).await,
        }
    }

    /// Whether other processes see what is written here.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Store::Redis(_))
    }
}

/// Where it is, without its password.
impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Store::Memory(_) => f.write_str("memory"),
            Store::Redis(store) => write!(f, "Redis at {}", store.address()),
        }
    }
}

fn typed<T: Recorded>(key: &str, record: Option<Record>) -> Result<Option<T>, StoreError> {
    record
        .map(|record| T::of(record).ok_or_else(|| StoreError::Foreign(key.to_owned())))
        .transpose()
}

fn decode<T: DeserializeOwned>(key: &str, text: Option<String>) -> Result<Option<T>, StoreError> {
    text.map(|text| serde_json::from_str(&text).map_err(|_| StoreError::Foreign(key.to_owned())))
        .transpose()
}

fn encode<T: Serialize>(key: &str, record: &T) -> Result<String, StoreError> {
    serde_json::to_string(record).map_err(|_| StoreError::Foreign(key.to_owned()))
}
