//! Runs the contract of stores on this one.

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

#[tokio::test]
async fn urls_open_it() {
    let database = Database::default();
    let open = |url: &'static str| {
        let builder = dlock::LockClient::builder().scheme(crate::scheme(&database));
        builder.url(url).build()
    };
    let (a, b) = (
        open("toy://a").await.unwrap(),
        open("toy://a?lease=10s").await.unwrap(),
    );
    let guard = a.lock("k").acquire().await.unwrap();
    assert!(b.lock("k").try_acquire().await.unwrap_err().is_busy());
    guard.release().await.unwrap();
    let error = open("toy://a?leese=10s").await.unwrap_err().to_string();
    assert!(error.contains("\"leese\""), "{error}");
    let error = a.fair_lock("k").acquire().await.unwrap_err().to_string();
    assert!(error.contains("the toy store has lock"), "{error}");
}
