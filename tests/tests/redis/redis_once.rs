//! Work that is done once, where the network and the server fail: a lost reply makes nothing twice, and work whose claim
//! ran out is dropped before another process begins.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dlock::{Error, OnceError, OnceReply};
use dlock_tests::faults::{PATIENCE, SLACK, ordinary, patient, setting_of_faults, within};
use dlock_tests::{Direction, Flavor, Server, Swallow};
use futures_util::future::join_all;

const SEC: Duration = Duration::from_secs(1);

/// Each reply is lost once, and with it the connection or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_reply_makes_nothing_twice() {
    let (_server, proxy, faulty, other) = setting_of_faults().await;
    for how in [Swallow::Hang, Swallow::Cut] {
        for k in 1.. {
            let key = format!("{how:?}-{k}");
            let runs = AtomicU32::new(0);
            let fault = proxy.swallow(k, how, |command| command.is_script());
            let reply = within(
                PATIENCE,
                &key,
                faulty.once(&key).keep(3600 * SEC).run(async |claim| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, String>(claim.attempt())
                }),
            );
            let reply = reply.await.unwrap();
            assert!(matches!(reply, OnceReply::Ran(1)), "{key}: {reply:?}");
            let fired = fault.fired();
            proxy.heal();
            let later = other
                .once(&key)
                .run(async |_| Err("it was done".to_owned()))
                .await;
            assert!(matches!(later, Ok(OnceReply::Earlier(1))), "{key}: {later:?}");
            assert_eq!(runs.load(Ordering::SeqCst), 1, "{key}");
            if !fired {
                assert!(k > 2, "a claim and a result");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_lost_the_store_is_dropped_before_another_process_begins() {
    const LEASE: Duration = Duration::from_secs(3);
    let (_server, proxy, cut_off, other) = setting_of_faults().await;
    struct EndedAt(Arc<parking_lot::Mutex<Option<Instant>>>);
    impl Drop for EndedAt {
        fn drop(&mut self) {
            *self.0.lock() = Some(Instant::now());
        }
    }
    let ended = Arc::new(parking_lot::Mutex::new(None));
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let work = tokio::spawn({
        let ended_at = EndedAt(ended.clone());
        cut_off.once("w").lease(LEASE).run(async move |claim| {
            let _ended_at = ended_at;
            begun.send(claim.fencing_token()).unwrap();
            std::future::pending::<()>().await;
            Ok::<u8, String>(0)
        })
    });
    let first = has_begun.recv().await.unwrap();
    proxy.block(Direction::Both);
    let taken_over = other
        .once("w")
        .lease(LEASE)
        .wait(PATIENCE)
        .run(async |claim| {
            let ended = *ended.lock();
            let in_time = ended.is_some_and(|at| at <= Instant::now());
            Ok::<_, String>((in_time, claim.fencing_token(), claim.attempt()))
        })
        .await;
    match taken_over {
        Ok(OnceReply::Ran((in_time, token, attempt))) => {
            assert!(in_time, "the first attempt still ran");
            assert!(token > first && attempt == 2, "{token} {first} {attempt}");
        }
        other => panic!("{other:?}"),
    }
    proxy.heal();
    let lost = within(SLACK, "the end of the first", work).await.unwrap();
    assert!(
        matches!(lost, Err(OnceError::Lost { attempt: 1, .. })),
        "{lost:?}"
    );
    let later = other
        .once("w")
        .run(async |_| Err::<(bool, u64, u32), _>("done".to_owned()))
        .await;
    assert!(matches!(later, Ok(OnceReply::Earlier((true, _, 2)))), "{later:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_clients_one_does_the_work() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let clients = join_all((0..4).map(|_| ordinary(&url))).await;
    for round in 0..20 {
        let runs = AtomicU32::new(0);
        let calls = clients
            .iter()
            .flat_map(|client| std::iter::repeat_n(client, 4))
            .map(|client| {
                let once = client.once(format!("w:{round}")).wait(PATIENCE);
                let runs = &runs;
                async move {
                    let reply = once.run(async |_| {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        Ok::<_, String>(runs.fetch_add(1, Ordering::SeqCst))
                    });
                    reply.await.unwrap().into_result()
                }
            });
        assert_eq!(join_all(calls).await, vec![Some(0); 16]);
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn other_data_in_place_of_the_record_is_an_error_and_stays() {
    let server = Server::start(Flavor::from_env()).await;
    let client = patient(&server.url()).await;
    let ran = client.once("w").run(async |_| Ok::<_, String>(1)).await.unwrap();
    assert!(matches!(ran, OnceReply::Ran(1)));
    let keys: Vec<String> = server
        .keys()
        .await
        .into_iter()
        .filter(|key| key.contains("once-w"))
        .collect();
    let [key] = &keys[..] else { panic!("{keys:?}") };
    server.command(&["DEL", key]).await;
    server.command(&["SET", key, "mine"]).await;
    let reply = client.once("w").run(async |_| Ok::<_, String>(2)).await;
    assert!(
        matches!(reply, Err(OnceError::Store(Error::KeyTaken { .. }))),
        "{reply:?}"
    );
    let stays: String = server.query(&["GET", key]).await;
    assert_eq!(stays, "mine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_goes_on_when_its_client_is_shut_down() {
    let server = Server::start(Flavor::from_env()).await;
    let url = server.url();
    let (closed, other) = (ordinary(&url).await, ordinary(&url).await);
    let (begun, mut has_begun) = tokio::sync::mpsc::unbounded_channel();
    let work = tokio::spawn(closed.once("w").run(async move |_| {
        begun.send(()).unwrap();
        tokio::time::sleep(SEC).await;
        Ok::<_, String>(1)
    }));
    has_begun.recv().await.unwrap();
    within(SEC, "the shutdown", closed.shutdown(SEC / 10)).await;
    drop(closed);
    let reply = work.await.unwrap();
    assert!(matches!(reply, Ok(OnceReply::Ran(1))), "{reply:?}");
    let later = other
        .once("w")
        .run(async |_| Err::<u8, _>("it was done".to_owned()))
        .await;
    assert!(matches!(later, Ok(OnceReply::Earlier(1))), "{later:?}");
}
