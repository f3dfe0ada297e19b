//! Records in this process.
//!
//! The mutex makes a single step atomic, as the server does on Redis. It does not make a sale correct: a sale reads
//! in one step and writes in another, and other sales may happen in between.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Stamp, StoreError};

#[derive(Default)]
pub(crate) struct MemoryStore {
    records: Mutex<HashMap<String, String>>,
}

impl MemoryStore {
    fn records(&self) -> MutexGuard<'_, HashMap<String, String>> {
        // No step leaves the map half changed, so a panic elsewhere does not spoil it.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn read(&self, key: &str) -> Option<String> {
        self.records().get(key).cloned()
    }

    pub(super) fn claim(
        &self,
        key: &str,
        token: u64,
        initial: Option<String>,
    ) -> Result<Option<String>, StoreError> {
        let mut records = self.records();
        match records.get_mut(key) {
            Some(record) => {
                admit(key, record, token)?;
                *record = with_token(key, record, token)?;
            }
            None => records.extend(initial.map(|record| (key.to_owned(), record))),
        }
        Ok(records.get(key).cloned())
    }

    pub(super) fn write(&self, key: &str, record: String, token: Option<u64>) -> Result<(), StoreError> {
        let mut records = self.records();
        if let (Some(token), Some(there)) = (token, records.get(key)) {
            admit(key, there, token)?;
        }
        records.insert(key.to_owned(), record);
        Ok(())
    }

    pub(super) fn add(&self, key: &str, more: u64) -> Result<u64, StoreError> {
        let mut records = self.records();
        let number = records.entry(key.to_owned()).or_insert_with(|| "0".to_owned());
        let now = number
            .parse::<u64>()
            .map_err(|_| StoreError::Foreign(key.to_owned()))?
            .saturating_add(more);
        *number = now.to_string();
        Ok(now)
    }
}

fn admit(key: &str, record: &str, ours: u64) -> Result<(), StoreError> {
    let Stamp { token: last } =
        serde_json::from_str(record).map_err(|_| StoreError::Foreign(key.to_owned()))?;
    if last > ours {
        Err(StoreError::Fenced { ours, last })
    } else {
        Ok(())
    }
}

fn with_token(key: &str, record: &str, token: u64) -> Result<String, StoreError> {
    let mut value: serde_json::Value =
        serde_json::from_str(record).map_err(|_| StoreError::Foreign(key.to_owned()))?;
    value["token"] = token.into();
    Ok(value.to_string())
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
        store.write(KEY, &item(10, 7), Some(7)).await.unwrap();
        store.write(KEY, &item(9, 7), Some(7)).await.unwrap();
        let refused = store.write(KEY, &item(5, 6), Some(6)).await;
        assert!(matches!(refused, Err(StoreError::Fenced { ours: 6, last: 7 })));
        assert_eq!(stored(&store).await, item(9, 7));
    }

    #[tokio::test]
    async fn a_claim_excludes_older_tokens_before_its_holder_has_written() {
        let store = Store::Memory(MemoryStore::default());
        store.write(KEY, &item(10, 6), Some(6)).await.unwrap();
        let claimed = store.claim(KEY, 7, None::<&Item>).await.unwrap();
        assert_eq!(claimed, Some(item(10, 7)));
        assert!(matches!(
            store.write(KEY, &item(9, 6), Some(6)).await,
            Err(StoreError::Fenced { .. })
        ));
        assert!(matches!(
            store.claim(KEY, 6, None::<&Item>).await,
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
        assert_eq!(store.claim(KEY, 7, Some(&first)).await.unwrap(), Some(first));
        assert_eq!(stored(&store).await, first);
    }

    #[tokio::test]
    async fn without_a_token_anything_goes() {
        let store = Store::Memory(MemoryStore::default());
        store.write(KEY, &item(10, 7), Some(7)).await.unwrap();
        store.write(KEY, &item(3, 0), None).await.unwrap();
        assert_eq!(stored(&store).await, item(3, 0));
    }
}
