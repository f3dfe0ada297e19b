//! Records in this process.
//!
//! The mutex makes a single step atomic, as the server does on Redis. It does not make a sale correct: a sale reads
//! in one step and writes in another, and other sales may happen in between.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Record, StoreError};

#[derive(Default)]
pub(crate) struct MemoryStore {
    records: Mutex<HashMap<String, Record>>,
}

impl MemoryStore {
    fn records(&self) -> MutexGuard<'_, HashMap<String, Record>> {
        // No step leaves the map half changed, so a panic elsewhere does not spoil it.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read(&self, key: &str) -> Option<Record> {
        self.records().get(key).copied()
    }

    pub(super) fn claim(
        &self,
        key: &str,
        token: u64,
        initial: Option<Record>,
    ) -> Result<Option<Record>, StoreError> {
        let mut records = self.records();
        if let Some(record) = records.get_mut(key) {
            *admit(key, record, token)? = token;
            return Ok(Some(*record));
        }
        records.extend(initial.map(|record| (key.to_owned(), record)));
        Ok(initial)
    }

    pub(super) fn write(&self, key: &str, record: Record, token: Option<u64>) -> Result<(), StoreError> {
        let mut records = self.records();
        let Some(there) = records.get_mut(key) else {
            records.insert(key.to_owned(), record);
            return Ok(());
        };
        if let Some(token) = token {
            admit(key, there, token)?;
        }
        *there = record;
        Ok(())
    }

    pub(super) fn add(&self, key: &str, more: u64) -> Result<u64, StoreError> {
        let mut records = self.records();
        let count = records.entry(key.to_owned()).or_insert(Record::Count(0));
        let Record::Count(count) = count else {
            return Err(StoreError::Foreign(key.to_owned()));
        };
        *count = count.saturating_add(more);
        Ok(*count)
    }
}

/// The token of a record's last writer, unless ours is older.
fn admit<'a>(key: &str, record: &'a mut Record, ours: u64) -> Result<&'a mut u64, StoreError> {
    match record.token() {
        Some(last) if *last > ours => Err(StoreError::Fenced { ours, last: *last }),
        Some(last) => Ok(last),
        None => Err(StoreError::Foreign(key.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Item, Store};
    use super::*;

    const KEY: &str = "checkout:item:sneaker";

    fn item(stock: u64, token: u64) -> Item {
        Item {
            stock,
            sold: 0,
            token,
        }
    }

    async fn stored(store: &Store) -> Item {
        store.read(KEY).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn an_older_token_writes_nothing() {
        let store = Store::Memory(MemoryStore::default());
        store.write(KEY, item(10, 7), Some(7)).await.unwrap();
        store.write(KEY, item(9, 7), Some(7)).await.unwrap();
        let refused = store.write(KEY, item(5, 6), Some(6)).await;
        assert!(matches!(refused, Err(StoreError::Fenced { ours: 6, last: 7 })));
        assert_eq!(stored(&store).await, item(9, 7));
    }

    #[tokio::test]
    async fn a_claim_excludes_older_tokens_before_its_holder_has_written() {
        let store = Store::Memory(MemoryStore::default());
        store.write(KEY, item(10, 6), Some(6)).await.unwrap();
        let claimed = store.claim(KEY, 7, None::<Item>).await.unwrap();
        assert_eq!(claimed, Some(item(10, 7)));
        assert!(matches!(
            store.write(KEY, item(9, 6), Some(6)).await,
            Err(StoreError::Fenced { .. })
        ));
        assert!(matches!(
            store.claim(KEY, 6, None::<Item>).await,
            Err(StoreError::Fenced { .. })
        ));
        assert_eq!(stored(&store).await, item(10, 7));
    }

    #[tokio::test]
    async fn a_claim_makes_a_record_only_when_told_to() {
        let store = Store::Memory(MemoryStore::default());
        assert_eq!(store.claim::<Item>(KEY, 7, None).await.unwrap(), None);
        assert_eq!(store.read::<Item>(KEY).await.unwrap(), None);
        let first = item(0, 7);
        assert_eq!(store.claim(KEY, 7, Some(first)).await.unwrap(), Some(first));
        assert_eq!(stored(&store).await, first);
    }

    #[tokio::test]
    async fn without_a_token_anything_goes() {
        let store = Store::Memory(MemoryStore::default());
        store.write(KEY, item(10, 7), Some(7)).await.unwrap();
        store.write(KEY, item(3, 0), None).await.unwrap();
        assert_eq!(stored(&store).await, item(3, 0));
    }
}
