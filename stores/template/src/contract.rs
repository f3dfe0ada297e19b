//! The contract of stores on this one.

use std::sync::Arc;

use crate::{Database, ToyStore};
use dlock::store::Store;
use dlock_conformance::{Fixture, conform};

struct Toy(Database);

impl Fixture for Toy {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(ToyStore::new(&self.0))
    }
}

async fn toy() -> Toy {
    Toy(Database::default())
}

conform!(toy);
