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
    let of_shop = open("toy://a?prefix=shop:").await.unwrap();
    let guard = a.lock("k").acquire().await.unwrap();
    let of_shop_guard = of_shop.lock("k").acquire().await.unwrap();
    for (client, names) in [(&a, ["k", "shop:k"].as_slice()), (&of_shop, &["k"])] {
        let mut listed: Vec<_> = client
            .list("")
            .await
            .unwrap()
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        listed.sort();
        assert_eq!(listed, names);
        assert!(client.inspect("k").await.unwrap().is_some());
    }
    guard.release().await.unwrap();
    assert!(of_shop.lock("k").try_acquire().await.unwrap_err().is_busy());
    of_shop_guard.release().await.unwrap();
    let error = a.fair_lock("k").acquire().await.unwrap_err().to_string();
    assert!(error.contains("the toy store has lock"), "{error}");
}
