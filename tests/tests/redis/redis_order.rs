//! Steps of one key take effect in the order in which they were asked for, also where the server turns a call
//! away that others follow already.

use std::time::Duration;

use dlock::Error;
use dlock_tests::faults::{in_rounds, patient, setting, step};
use dlock_tests::{Flavor, Proxy, Server, Store, eventually};
use tokio::time::sleep;

const MS: Duration = Duration::from_millis(1);

// One thread, so that what is asked for in one go is sent in one call.
#[tokio::test]
async fn an_acquire_does_not_overtake_a_release_that_has_to_be_sent_again_with_the_script() {
    in_rounds("the acquire is behind the release in the network", async || {
        let (store, proxy, _a, b) = setting().await;
        let a = patient(&proxy.url()).await;
        let guard = a.rw_lock("k").write().acquire().await.unwrap();
        proxy.forget();
        let release = proxy.hold(1, step("release_write"));
        let acquire = proxy.hold(1, step("write"));
        drop(guard);
        release.caught().await;
        store.as_server().script_flush().await;
        let next = tokio::spawn(a.rw_lock("k").write().try_acquire());
        // Behind the release in the network.
        sleep(20 * MS).await;
        release.release();
        acquire.caught().await;
        // Another client loads the script again in between.
        let other = b.lock("other").try_acquire().await.unwrap();
        other.release().await.unwrap();
        acquire.release();
        let guard = next.await.unwrap().expect("the release came first");
        let times = proxy.count(step("write"));
        guard.release().await.unwrap();
        store.assert_clean(&[&a, &b]).await;
        if times == 2 {
            Ok(())
        } else {
            Err("the acquire was not too early: this shows nothing")
        }
    })
    .await;
}

#[tokio::test]
async fn an_acquire_does_not_overtake_a_release_whose_call_was_refused_for_the_sake_of_another() {
    in_rounds("the acquire is behind the release in the network", async || {
        let store = Store::Server(Box::new(
            Server::builder(Flavor::from_env())
                .acl("svc on >pw ~dlock:fence ~shop:* ~{shop:* &* +@all")
                .start()
                .await,
        ));
        let proxy = Proxy::start(store.as_server().addr());
        let a = patient(&proxy.url_as("svc", "pw")).await;
        let guard = a.rw_lock("shop:k").write().acquire().await.unwrap();
        let other = a.lock("shop:other").acquire().await.unwrap();
        proxy.forget();
        let held = proxy.hold(1, step("release_write"));
        drop(guard);
        let (forbidden, next) = tokio::join!(a.lock("private:k").try_acquire(), async {
            held.caught().await;
            // In a call of its own, behind the refused one.
            let next = tokio::spawn(a.rw_lock("shop:k").write().try_acquire());
            sleep(20 * MS).await;
            held.release();
            next.await.unwrap()
        });
        assert!(matches!(forbidden, Err(Error::Refused { .. })), "{forbidden:?}");
        let next = next.expect("the release came first");
        let times = proxy.count(step("write"));
        drop(next);
        other.release().await.unwrap();
        store.assert_clean(&[&a]).await;
        if times >= 2 {
            Ok(())
        } else {
            Err("the acquire was not too early: this shows nothing")
        }
    })
    .await;
}

/// Told that the lock is busy, it stands in the queue.
#[tokio::test]
async fn a_waiter_behind_a_call_that_was_refused_joins_the_queue_of_a_fair_lock_once() {
    let rights = "~dlock:fence ~shop:* ~{shop:* ~redisson_lock_queue:{shop:* ~redisson_lock_timeout:{shop:*";
    let store = Store::Server(Box::new(
        Server::builder(Flavor::from_env())
            .acl(&format!("svc on >pw {rights} &* +@all"))
            .start()
            .await,
    ));
    let server = store.as_server();
    let proxy = Proxy::start(server.addr());
    let a = patient(&proxy.url_as("svc", "pw")).await;
    let b = patient(&server.url()).await;
    let held = b.fair_lock("shop:f").acquire().await.unwrap();
    let guard = a.rw_lock("shop:k").write().acquire().await.unwrap();
    let other = a.lock("shop:other").acquire().await.unwrap();
    let release = proxy.hold(1, step("release_write"));
    drop(guard);
    let (waits, waiting) = tokio::sync::oneshot::channel();
    let fair = a.fair_lock("shop:f");
    let waiter = tokio::spawn(async move {
        waiting.await.unwrap();
        fair.acquire().await
    });
    let (forbidden, ()) = tokio::join!(a.lock("private:k").try_acquire(), async {
        release.caught().await;
        // In a call of its own, behind the refused one.
        waits.send(()).unwrap();
        sleep(20 * MS).await;
        release.release();
    });
    assert!(matches!(forbidden, Err(Error::Refused { .. })), "{forbidden:?}");
    let queue = ["LRANGE", "redisson_lock_queue:{shop:f}", "0", "-1"];
    eventually("it waits", async || {
        !server.query::<Vec<String>>(&queue).await.is_empty()
    })
    .await;
    sleep(100 * MS).await;
    assert_eq!(server.query::<Vec<String>>(&queue).await.len(), 1);
    held.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
    other.release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test]
async fn an_acquire_does_not_overtake_a_release_that_was_refused_for_a_while() {
    let store = Store::Server(Box::new(
        Server::builder(Flavor::from_env())
            .acl("svc on >pw ~* &* +@all")
            .start()
            .await,
    ));
    let server = store.as_server();
    let proxy = Proxy::start(server.addr());
    let a = patient(&proxy.url_as("svc", "pw")).await;
    let guard = a.lock("k").acquire().await.unwrap();
    proxy.forget();
    let release = proxy.hold(1, step("release"));
    let acquire = proxy.hold(1, step("acquire"));
    drop(guard);
    release.caught().await;
    server.command(&["ACL", "SETUSER", "svc", "-hdel"]).await;
    let next = tokio::spawn(a.lock("k").try_acquire());
    // Behind the release in the network.
    sleep(20 * MS).await;
    release.release();
    acquire.caught().await;
    server.command(&["ACL", "SETUSER", "svc", "+hdel"]).await;
    acquire.release();
    let guard = next.await.unwrap().expect("the release came first");
    guard.release().await.unwrap();
    store.assert_clean(&[&a]).await;
}
