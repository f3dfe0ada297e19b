//! The server is gone for a while: frozen, killed, restarted with its data or without, out of reach. Holders
//! learn the truth in time, and everything works again by itself.

use std::time::{Duration, Instant};

use dlock::{HoldState, LockClient, LockGuard, Loss};
use dlock_tests::faults::{LEASE, RETRY_FOR, SLACK, TIMEOUT, hasty, hasty_builder, is_free, setting, within};
use dlock_tests::{Direction, Flavor, Server, Store, eventually, settle};

const MS: Duration = Duration::from_millis(1);

/// When a guard says for the first time that it is lost, looking all the time.
async fn watch_loss(guard: &LockGuard) -> (Instant, Loss) {
    loop {
        if let HoldState::Lost(loss) = guard.state() {
            return (Instant::now(), loss);
        }
        tokio::time::sleep(MS).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_16_a_server_that_comes_back_empty_gives_greater_tokens_and_its_holders_are_told() {
    let store = Store::server().await;
    let server = store.as_server();
    let (a, b) = (hasty(&server.url()).await, hasty(&server.url()).await);
    let mut last = 0;
    for _ in 0..50 {
        last = a.lock("k").acquire().await.unwrap().fencing_token().max(last);
        settle_releases(&a).await;
    }
    let (guard, fixed) = (
        a.lock("k").acquire().await.unwrap(),
        a.lock("f").lease(LEASE).acquire().await.unwrap(),
    );
    let waiter = tokio::spawn({
        let lock = b.lock("k").wait(Duration::from_secs(20));
        async move { (lock.acquire().await, Instant::now()) }
    });
    settle().await;
    server.restart_empty().await;
    let back = Instant::now();
    let (told, loss) = watch_loss(&guard).await;
    assert_eq!((loss, watch_loss(&fixed).await.1), (Loss::Gone, Loss::Gone));
    assert!(told.saturating_duration_since(back) < 2 * TIMEOUT + SLACK + Duration::from_secs(1));
    let (next, woken) = waiter.await.unwrap();
    let next = next.unwrap();
    assert!(
        woken.saturating_duration_since(back) < Duration::from_secs(3),
        "the waiter looks again"
    );
    assert!(next.fencing_token() > guard.fencing_token() && guard.fencing_token() > last);
    assert!(guard.release().await.unwrap_err().is_lost());
    next.ensure(LEASE - 500 * MS).await.unwrap();
    next.release().await.unwrap();
    drop(fixed);
    store.assert_clean(&[&a, &b]).await;
}

async fn settle_releases(client: &LockClient) {
    let _ = client.inspect("nothing").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_12_holds_survive_a_restart_of_a_server_that_keeps_its_data() {
    let store = Store::Server(Box::new(
        Server::builder(Flavor::from_env())
            .persistence(true)
            .start()
            .await,
    ));
    let server = store.as_server();
    let (a, b) = (hasty(&server.url()).await, hasty(&server.url()).await);
    let guards = [
        a.lock("k").acquire().await.unwrap(),
        a.lock("f").lease(LEASE).acquire().await.unwrap(),
    ];
    let waiter = tokio::spawn(b.lock("k").wait(Duration::from_secs(20)).acquire());
    settle().await;
    server.kill();
    assert!(guards[0].ensure(LEASE).await.unwrap_err().is_unavailable());
    assert_eq!(guards[0].state(), HoldState::Suspect);
    server.restart().await;
    for guard in guards {
        eventually("it is held again", || async {
            assert!(guard.is_held());
            guard.state() == HoldState::Held
        })
        .await;
        assert!(guard.remaining() > LEASE / 2);
        guard.release().await.unwrap();
    }
    waiter.await.unwrap().unwrap().release().await.unwrap();
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_13_a_frozen_server_costs_every_holder_its_lock_before_the_lease_ends() {
    const SHORT: Duration = Duration::from_millis(1500);
    let store = Store::server().await;
    let server = store.as_server();
    let patient = || {
        hasty_builder(&server.url())
            .retry_for(Duration::from_secs(20))
            .build()
    };
    let (a, b) = (patient().await.unwrap(), patient().await.unwrap());
    let mut guards = Vec::new();
    for i in 0..6 {
        let lock = a.lock(format!("k{i}"));
        let lock = if i == 0 {
            lock.lease(SHORT)
        } else {
            lock.renewed_lease(SHORT)
        };
        guards.push(lock.acquire().await.unwrap());
    }
    let waiter = tokio::spawn(b.lock("k1").wait(Duration::from_secs(20)).acquire());
    let behind = tokio::spawn(a.lock("k2").wait(Duration::from_secs(20)).acquire());
    settle().await;
    // When each of them would be free by the server's own clock, counted from before it was asked. No
    // renewal comes in between: the next is far away.
    let ends = loop {
        let mut ends = Vec::new();
        for i in 0..6 {
            let before = Instant::now();
            ends.push(before + server.ttl(&format!("k{i}")).await.unwrap());
        }
        let asked = Instant::now();
        if ends[1..].iter().all(|end| *end - asked > SHORT - 200 * MS) {
            server.stop();
            break ends;
        }
        tokio::time::sleep(5 * MS).await;
    };
    let stopped = Instant::now();
    let losses = futures_util::future::join_all(guards.iter().map(watch_loss)).await;
    for (i, (told, loss)) in losses.iter().enumerate() {
        assert_eq!(*loss, Loss::Expired);
        assert!(*told < ends[i], "k{i} was told {:?} too late", *told - ends[i]);
        assert!(i == 0 || *told - stopped > SHORT / 2, "not before its time");
    }
    for guard in &guards {
        assert!(guard.held().lost().await == Loss::Expired && guard.remaining() == Duration::ZERO);
        assert!(guard.cancellation_token().is_cancelled());
    }
    // Acquires that a frozen server got into its buffers must not become ghosts.
    for i in 6..9 {
        assert!(a.lock(format!("k{i}")).try_acquire().await.is_err());
    }
    tokio::time::sleep((SHORT + 500 * MS).saturating_sub(stopped.elapsed())).await;
    server.cont();
    let back = Instant::now();
    let (next, behind) = (waiter.await.unwrap().unwrap(), behind.await.unwrap().unwrap());
    for i in 3..9 {
        let guard = a.lock(format!("k{i}")).acquire().await.unwrap();
        assert!(guard.fencing_token() > guards[5].fencing_token());
        guard.release().await.unwrap();
    }
    assert!(
        back.elapsed() < Duration::from_secs(3),
        "back after {:?}",
        back.elapsed()
    );
    for guard in guards {
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired), "Lost is final");
        assert!(guard.release().await.unwrap_err().is_lost());
    }
    for guard in [next, behind] {
        guard.ensure(LEASE - 2000 * MS).await.unwrap();
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_18_a_guard_dropped_while_the_server_is_away_frees_its_lock_soon_after() {
    let (store, proxy, a, b) = setting().await;
    for outage in [50 * MS, 800 * MS, 2100 * MS] {
        let guard = a.lock("k").acquire().await.unwrap();
        proxy.refuse();
        proxy.cut();
        drop(guard);
        tokio::time::sleep(outage).await;
        assert!(b.lock("k").try_acquire().await.unwrap_err().is_busy());
        proxy.accept();
        let back = Instant::now();
        b.lock("k")
            .wait(Duration::from_secs(10))
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        assert!(
            back.elapsed() < Duration::from_secs(2),
            "free {:?} after {outage:?}",
            back.elapsed()
        );
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rule_18_a_client_that_is_back_never_finds_its_own_dropped_lock_busy() {
    let (store, proxy, a, _b) = setting().await;
    // Whatever the release is at just then, in line or between two attempts.
    for outage in (0..10).map(|n| 700 * MS + n * 90 * MS) {
        let guard = a.lock("k").acquire().await.unwrap();
        proxy.refuse();
        proxy.cut();
        drop(guard);
        tokio::time::sleep(outage).await;
        proxy.accept();
        let again = loop {
            match a.lock("k").try_acquire().await {
                Err(error) if error.is_unavailable() => continue,
                other => break other,
            }
        };
        again
            .unwrap_or_else(|error| panic!("after {outage:?}: {error}"))
            .release()
            .await
            .unwrap();
    }
    store.assert_clean(&[&a]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_while_the_server_is_away_ends_in_time_and_says_what_is_left() {
    let (store, proxy, a, b) = setting().await;
    let guard = a.lock("k").acquire().await.unwrap();
    proxy.block(Direction::Both);
    let report = within(200 * MS + RETRY_FOR, "shutdown", a.shutdown(200 * MS)).await;
    assert_eq!((report.lost, report.unconfirmed), (1, 1));
    assert_eq!(guard.state(), HoldState::Lost(Loss::Shutdown));
    proxy.unblock(Direction::Both);
    b.lock("k")
        .wait(Duration::from_secs(10))
        .acquire()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    is_free(&b, "k").await;
    drop(guard);
    store.assert_clean(&[&b]).await;
}
