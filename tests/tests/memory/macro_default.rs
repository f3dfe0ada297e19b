//! `#[distributed_lock]` without `lock = …`: the client of the code around, of the runtime, or of the process.

use std::time::Duration;

use dlock::{
    Error, LockClient, default_client, distributed_lock, set_default, set_runtime_default, with_default,
};

#[distributed_lock(key = "report")]
async fn client_of_the_lock() -> Result<String, Error> {
    Ok(default_client()?.id())
}

#[distributed_lock(key = "order:{order_id}", wait = "3s")]
async fn pay(order_id: u64) -> Result<String, dlock::Error> {
    Ok(format!("paid {order_id}")) // one at a time for each order, in all processes of the service
}

/// The first example of the README, tested as in docs/testing.md.
#[tokio::test]
async fn paying_says_which_order() -> Result<(), dlock::Error> {
    let _default = dlock::set_runtime_default(dlock::LockClient::memory());
    assert_eq!(pay(7).await?, "paid 7");
    Ok(())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

#[test]
fn runtime_default_is_for_all_tasks_of_its_runtime_and_no_other() {
    let (one, two) = (runtime(), runtime());
    let both = [&one, &two].map(|runtime| {
        runtime.block_on(async {
            let client = LockClient::memory();
            let set = set_runtime_default(client.clone());
            (client.id(), set)
        })
    });
    for (runtime, (id, _)) in [&one, &two].into_iter().zip(&both) {
        let (here, spawned) = runtime.block_on(async {
            let spawned = tokio::spawn(client_of_the_lock());
            (
                client_of_the_lock().await.unwrap(),
                spawned.await.unwrap().unwrap(),
            )
        });
        assert_eq!((&here, &spawned), (id, id));
    }
}

#[tokio::test]
async fn runtime_default_ends_when_it_is_dropped() {
    let (outer, inner) = (LockClient::memory(), LockClient::memory());
    let set_outer = set_runtime_default(outer.clone());
    let set_inner = set_runtime_default(inner.clone());
    assert_eq!(client_of_the_lock().await.unwrap(), inner.id());
    // In whichever order they are dropped.
    drop(set_outer);
    assert_eq!(client_of_the_lock().await.unwrap(), inner.id());
    let set_outer = set_runtime_default(outer.clone());
    assert_eq!(client_of_the_lock().await.unwrap(), outer.id());
    drop(set_outer);
    assert_eq!(client_of_the_lock().await.unwrap(), inner.id());
    drop(set_inner);
    let left = default_client().map(|client| client.id());
    assert!(!left.is_ok_and(|id| id == inner.id() || id == outer.id()));
}

#[tokio::test]
async fn default_of_the_code_around_comes_first() {
    let (runtimes, outer, inner) = (LockClient::memory(), LockClient::memory(), LockClient::memory());
    let _set = set_runtime_default(runtimes.clone());
    let ids = with_default(outer.clone(), async {
        let here = client_of_the_lock().await.unwrap();
        let nested = with_default(inner.clone(), client_of_the_lock()).await.unwrap();
        let spawned = tokio::spawn(client_of_the_lock()).await.unwrap().unwrap();
        (here, nested, spawned)
    });
    assert_eq!(ids.await, (outer.id(), inner.id(), runtimes.id()));
}

/// The default client is one for the whole process.
mod alone {
    use super::*;

    /// The process-wide default is one for all tests, so a single test sets it.
    #[test]
    fn process_default_is_needed_and_replaced_only_when_it_is_closed() {
        let first = runtime();
        let of_first = first.block_on(async {
            let error = client_of_the_lock().await.unwrap_err();
            assert!(matches!(error, Error::NoDefaultClient), "{error}");
            assert!(error.to_string().contains("dlock::set_default"), "{error}");
            let client = LockClient::memory();
            set_default(client.clone()).unwrap();
            assert_eq!(client_of_the_lock().await.unwrap(), client.id());
            let error = set_default(LockClient::memory()).unwrap_err();
            assert!(matches!(error, Error::DefaultClientSet), "{error}");
            client.id()
        });
        drop(first);
        runtime().block_on(async {
            // The first client's runtime has ended.
            assert!(matches!(client_of_the_lock().await, Err(Error::ClientClosed)));
            let client = LockClient::memory();
            set_default(client.clone()).unwrap();
            assert_eq!(client_of_the_lock().await.unwrap(), client.id());
            assert_ne!(client.id(), of_first);
            client.shutdown(Duration::ZERO).await;
            let client = LockClient::memory();
            set_default(client.clone()).unwrap();
            assert_eq!(client_of_the_lock().await.unwrap(), client.id());
        });
    }
}
