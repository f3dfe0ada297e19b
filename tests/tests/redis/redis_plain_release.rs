//! Releases of plain locks by commands, and what happens if one of the commands fails.

use dlock::{Error, Loss};
use dlock_tests::faults::{SOON, patient, setting_of_faults, step, within};
use dlock_tests::{Command, Flavor, Proxy, Server, Store, eventually};
use futures_util::future::join_all;

fn publishes(command: &Command) -> bool {
    command.is("PUBLISH")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_elsewhere_are_told_though_the_connection_breaks_between_the_commands() {
    let store = Store::server().await;
    let proxy = Proxy::start(store.as_server().addr());
    let (behind, beside) = (
        patient(&proxy.url()).await,
        patient(&store.as_server().url()).await,
    );
    let guard = behind.lock("k").acquire().await.unwrap();
    let waiter = tokio::spawn(beside.lock("k").acquire());
    eventually("the waiter listens", || async {
        store.as_server().pubsub_channels().await.len() == 1
    })
    .await;
    let held = proxy.hold(1, publishes);
    let release = tokio::spawn(guard.release());
    held.caught().await;
    proxy.cut();
    let waiter = within(SOON, "the waiter is told", waiter).await;
    // The repeated release finds nothing, and the caller learns that the lock was released.
    within(SOON, "release", release).await.unwrap().unwrap();
    drop(waiter.unwrap().unwrap());
    store.assert_clean(&[&behind, &beside]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_lock_is_found_out_by_its_release() {
    let (store, proxy, behind, beside) = setting_of_faults().await;
    let guard = behind.lock("k").acquire().await.unwrap();
    assert!(beside.force_release("k").await.unwrap());
    let next = beside.lock("k").acquire().await.unwrap();
    proxy.forget();
    let lost = guard.release().await.unwrap_err();
    assert!(matches!(lost, Error::Lost { loss: Loss::Gone, .. }), "{lost:?}");
    let sent: Vec<_> = proxy.commands().iter().map(|sent| sent.command.name()).collect();
    assert_eq!(sent, ["HDEL", "PUBLISH", "EVALSHA"]);
    assert!(
        beside.lock("k").try_acquire().await.is_err(),
        "the next holder keeps the lock"
    );
    next.release().await.unwrap();
    store.assert_clean(&[&behind, &beside]).await;
}

#[tokio::test]
async fn each_of_many_releases_is_answered() {
    let (store, proxy, behind, beside) = setting_of_faults().await;
    let keys: Vec<_> = (0..300).map(|n| format!("k{n}")).collect();
    let guards = join_all(keys.iter().map(|key| behind.lock(&**key).acquire())).await;
    let guards: Vec<_> = guards.into_iter().collect::<Result<_, _>>().unwrap();
    for key in keys.iter().step_by(7) {
        assert!(beside.force_release(&**key).await.unwrap());
    }
    proxy.forget();
    let outcomes = join_all(guards.into_iter().map(|guard| guard.release())).await;
    for (n, outcome) in outcomes.into_iter().enumerate() {
        match n % 7 {
            0 => assert!(matches!(outcome, Err(Error::Lost { .. })), "{n}: {outcome:?}"),
            _ => outcome.unwrap(),
        }
    }
    let releases = proxy.count(|command| command.is("HDEL"));
    assert_eq!((releases, proxy.count(publishes)), (300, 300));
    store.assert_clean(&[&behind, &beside]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_of_an_acquire_that_was_given_up_stays_behind_it() {
    let (store, proxy, behind, beside) = setting_of_faults().await;
    for _ in 0..50 {
        // The first poll queues the acquire, and dropping it the release.
        let mut acquire = Box::pin(behind.lock("k").try_acquire());
        drop(futures_util::poll!(&mut acquire));
    }
    eventually("it is free", || async {
        beside.lock("k").try_acquire().await.is_ok()
    })
    .await;
    assert!(proxy.count(step("acquire")) > 0);
    // Where it was refused, a notification would wake waiters for nothing.
    let undone = (proxy.count(publishes), proxy.count(|command| command.is("HDEL")));
    assert_eq!(undone, (0, 0));
    store.assert_clean(&[&behind, &beside]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_notifications_releases_at_once() {
    let server = Server::builder(Flavor::from_env()).config("rename-command", "PUBLISH \"\"");
    let store = Store::Server(Box::new(server.start().await));
    let proxy = Proxy::start(store.as_server().addr());
    let client = patient(&proxy.url()).await;
    let guard = client.lock("k").acquire().await.unwrap();
    proxy.forget();
    guard.release().await.unwrap();
    let sent: Vec<_> = proxy.commands().iter().map(|sent| sent.command.name()).collect();
    assert_eq!(sent, ["HDEL", "PUBLISH"]);
    store.assert_clean(&[&client]).await;
}
