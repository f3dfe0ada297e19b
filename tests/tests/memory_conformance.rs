//! The contract of stores (crate `dlock-conformance`) on stores in memory.

use std::sync::Arc;

use dlock::store::Store;
use dlock::stores::memory::MemoryStore;
use dlock_conformance::{Fixture, conform};

struct Memory(MemoryStore);

impl Fixture for Memory {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.0.clone())
    }

    async fn forget(&self) -> bool {
        self.0.clear();
        true
    }
}

mod memory {
    use super::*;

    async fn fixture() -> Memory {
        Memory(MemoryStore::new())
    }

    conform!(fixture);
}

mod quorum {
    use super::*;

    struct OfMemory(dlock_tests::Store);

    impl Fixture for OfMemory {
        async fn store(&self) -> Arc<dyn Store> {
            self.0.store().await
        }

        async fn forget(&self) -> bool {
            self.0.flush().await;
            true
        }
    }

    async fn fixture() -> OfMemory {
        OfMemory(dlock_tests::Store::memory_quorum())
    }

    conform!(fixture);
}
