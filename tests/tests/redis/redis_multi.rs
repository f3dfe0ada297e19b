//! Several locks at once on a real server: one step on the wire, faults that strike it, and what stands in its way.

use dlock::{Error, LockClient, MultiLock};
use dlock_tests::faults::{is_free, patient};
use dlock_tests::{Proxy, Store};
const KEYS: [&str; 3] = ["a", "b", "c"];

fn all_of(client: &LockClient) -> MultiLock {
    client.multi(KEYS)
}

async fn are_free(client: &LockClient) {
    for key in KEYS {
        is_free(client, key).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_locks_are_one_step_that_declares_all_keys() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let client = patient(&proxy.url()).await;
    proxy.forget();
    let guard = all_of(&client).acquire().await.unwrap();
    let calls: Vec<_> = proxy.commands();
    assert_eq!(calls.len(), 1, "{calls:?}");
    // All names are declared, so that permissions and a cluster see them.
    let text = format!("{:?}", calls[0].command);
    for key in KEYS.iter().chain(&["dlock:fence"]) {
        assert!(text.contains(key), "{key}: {text}");
    }
    let keys = store.as_server().keys().await;
    assert_eq!(keys, ["a", "b", "c", "dlock:fence"]);
    for key in KEYS {
        let fields: Vec<String> = store.as_server().query(&["HGETALL", key]).await;
        assert_eq!((fields.len(), fields[1].as_str()), (2, "1"), "{key}: {fields:?}");
        assert!(store.as_server().ttl(key).await.is_some(), "{key} has no end");
    }
    guard.release().await.unwrap();
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_data_under_one_of_the_names_is_told_and_nothing_is_taken() {
    let store = Store::server().await;
    let client = patient(&store.as_server().url()).await;
    for (key, command) in [
        ("b", &["SET", "b", "x"][..]),
        ("c", &["HSET", "c", "mode", "read", "x", "1"]),
        ("a", &["RPUSH", "a", "1"]),
    ] {
        store.as_server().command(command).await;
        for outcome in [
            all_of(&client).try_acquire().await,
            all_of(&client).acquire().await,
        ] {
            let error = outcome.unwrap_err();
            let Error::KeyTaken { key: taken, .. } = &error else {
                panic!("{error}")
            };
            assert_eq!(taken.as_str(), key);
        }
        assert_eq!(client.held(), 0);
        let mut keys = store.as_server().keys().await;
        keys.retain(|key| key != "dlock:fence");
        assert_eq!(keys, [key]);
        store.as_server().command(&["DEL", key]).await;
    }
    store.assert_clean(&[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_name_that_is_out_of_bounds_keeps_the_whole_set_out_and_no_other_call() {
    let store = Store::server().await;
    let server = store.as_server();
    let rule = [
        "ACL",
        "SETUSER",
        "svc",
        "on",
        ">pw",
        "+@all",
        "&*",
        "~a",
        "~c",
        "~dlock:fence",
    ];
    server.command(&rule).await;
    let url = server.url_as("svc", "pw");
    let (a, b) = (patient(&url).await, patient(&server.url()).await);
    let (set, alone) = tokio::join!(all_of(&a).acquire(), a.lock("c").try_acquire());
    assert!(matches!(set, Err(Error::Refused { .. })), "{set:?}");
    alone.unwrap().release().await.unwrap();
    are_free(&b).await;
    let guard = a.multi(["a", "c"]).acquire().await.unwrap();
    guard.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}
