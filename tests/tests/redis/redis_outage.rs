//! The server is gone for a while: frozen, killed, restarted with its data or without, out of reach. Holders
//! learn the truth in time, and everything works again by itself.

use std::time::{Duration, Instant, SystemTime};

use dlock::{Error, HoldState, LockClient, LockGuard, Loss};
use dlock_tests::faults::{
    LEASE, PATIENCE, RETRY_FOR, SOON, TIMEOUT, answered, hasty, hasty_builder, in_rounds, is_confirmed,
    is_free, is_free_soon, setting, setting_of_faults, within,
};
use dlock_tests::{Direction, Flavor, Server, Store, eventually, settle};
use futures_util::FutureExt;
use futures_util::future::join_all;

const MS: Duration = Duration::from_millis(1);

/// What a guard says that ended its hold, looking all the time.
async fn watch_loss(guard: &LockGuard) -> Loss {
    loop {
        if let HoldState::Lost(loss) = guard.state() {
            return loss;
        }
        tokio::time::sleep(MS).await;
    }
}

/// Its port refuses connections: whatever the client does, nothing was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acquires_while_the_server_is_down_are_known_not_to_have_been_carried_out() {
    let server = Server::start(Flavor::from_env()).await;
    let client = hasty(&server.url()).await;
    client.lock("k").acquire().await.unwrap().release().await.unwrap();
    server.kill();
    eventually("the client knows", async || {
        let tried = client.lock("k").try_acquire().await;
        matches!(tried, Err(Error::Unreachable { .. }))
    })
    .await;
    for wait in [None, Some(RETRY_FOR / 3), Some(2 * RETRY_FOR)] {
        let locks = (0..6).flat_map(|number| {
            [
                client.lock(number.to_string()),
                client.fair_lock(format!("fair {number}")),
                client.rw_lock(format!("shared {number}")).read(),
            ]
        });
        let acquired = locks.map(|lock| match wait {
            Some(wait) => lock.wait(wait).acquire(),
            None => lock.acquire(),
        });
        for acquired in join_all(acquired).await {
            let error = acquired.unwrap_err();
            assert!(matches!(error, Error::Unreachable { .. }), "{wait:?}: {error:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_server_gives_greater_tokens_and_its_holders_learn_of_the_loss() {
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
        a.lock("f").fixed_lease(LEASE).acquire().await.unwrap(),
    );
    let waiter = tokio::spawn({
        let lock = b.lock("k").wait(PATIENCE);
        async move { lock.acquire().await }
    });
    settle().await;
    server.restart_empty().await;
    for guard in [&guard, &fixed] {
        let loss = within(
            2 * TIMEOUT + SOON,
            "the notification of the loss",
            watch_loss(guard),
        )
        .await;
        assert_eq!(loss, Loss::Gone);
    }
    let next = within(SOON, "the waiter's look", waiter).await.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token() && guard.fencing_token() > last);
    assert!(guard.release().await.unwrap_err().is_lost());
    is_confirmed(&next).await;
    next.release().await.unwrap();
    drop(fixed);
    store.assert_clean(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_learns_of_an_early_lease_end_at_its_next_renewal_when_the_server_clock_steps_forward() {
    let (server, clock) = Server::with_clock(Flavor::from_env()).await;
    let store = Store::Server(Box::new(server));
    let server = store.as_server();
    // It is renewed soon.
    let a = hasty_builder(&server.url()).lease(Duration::from_secs(12));
    let (a, b) = (a.build().await.unwrap(), hasty(&server.url()).await);
    let guard = a.lock("k").fixed_lease(LEASE).acquire().await.unwrap();
    let renewed = a.lock("r").acquire().await.unwrap();
    let day = Duration::from_secs(24 * 3600);
    clock.set(day).unwrap();
    // The holder of a fixed lease is not told, and cannot be: only the token distinguishes the two.
    let next = within(SOON, "the lock", b.lock("k").wait(PATIENCE).acquire())
        .await
        .unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    let loss = within(PATIENCE, "the notification of the loss", watch_loss(&renewed)).await;
    assert_eq!(loss, Loss::Gone);
    drop(guard);
    let last = next.fencing_token();
    next.release().await.unwrap();
    // It goes back, and tokens do not.
    clock.set(Duration::ZERO).unwrap();
    let again = answered(|| b.lock("k").wait(PATIENCE).acquire()).await.unwrap();
    assert!(again.fencing_token() > last);
    again.release().await.unwrap();
    drop(renewed);
    store.assert_clean(&[&a, &b]).await;
}

async fn settle_releases(client: &LockClient) {
    let _ = client.inspect("nothing").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_survive_a_restart_of_a_server_that_keeps_its_data() {
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
        a.lock("f").fixed_lease(LEASE).acquire().await.unwrap(),
    ];
    let waiter = tokio::spawn(b.lock("k").wait(PATIENCE).acquire());
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
async fn holders_lose_their_locks_before_the_lease_ends_when_the_server_freezes() {
    in_rounds(
        "the server is frozen between two renewals",
        frozen_between_renewals,
    )
    .await;
}

/// When the hold ends as its guard has it, at the earliest and at the latest.
fn deadline(guard: &LockGuard) -> (Instant, Instant) {
    let before = Instant::now();
    let remaining = guard.remaining();
    (before + remaining, Instant::now() + remaining)
}

/// One round on a server of its own; what was missed where the machine was too slow for it.
async fn frozen_between_renewals() -> Result<(), &'static str> {
    const SHORT: Duration = Duration::from_millis(1500);
    /// What a lease ends earlier for its holder, and some rounding.
    const MARGIN: Duration = Duration::from_millis(25);
    let clocks = (Instant::now(), SystemTime::now());
    let store = Store::server().await;
    let server = store.as_server();
    let (a, b) = (hasty(&server.url()).await, hasty(&server.url()).await);
    let mut guards = Vec::new();
    for i in 0..6 {
        let lock = a.lock(format!("k{i}"));
        let lock = if i == 0 {
            lock.fixed_lease(SHORT)
        } else {
            lock.lease(SHORT)
        };
        let asked = Instant::now();
        guards.push((lock.acquire().await.unwrap(), asked));
    }
    let waiter = tokio::spawn(b.lock("k1").wait(2 * PATIENCE).acquire());
    let behind = tokio::spawn(a.lock("k2").wait(2 * PATIENCE).acquire());
    settle().await;
    // When each of them would be free by the server's own clock, counted from before it was asked: good for as long
    // as no renewal comes after the question, which the deadlines of the guards tell.
    let mut ends = Vec::new();
    for (i, (guard, _)) in guards.iter().enumerate() {
        let (early, late) = deadline(guard);
        if late - early > 20 * MS {
            return Err("a pause before the question");
        }
        let before = Instant::now();
        let Some(ttl) = server.ttl(&format!("k{i}")).await else {
            return Err("a lease ended before the question");
        };
        // The server may have answered as late as that, and the end would seem so much earlier.
        if before.elapsed() > 10 * MS {
            return Err("a pause in the question");
        }
        ends.push((before + ttl, late + MS));
    }
    server.stop();
    let stopped = Instant::now();
    if ends.iter().any(|(end, _)| *end <= stopped) {
        return Err("a lease ended before the server stood still");
    }
    let watch = guards
        .iter()
        .zip(&ends)
        .map(async |((guard, asked), (end, deadline_then))| {
            let mut late = None;
            loop {
                let now = Instant::now();
                match guard.state() {
                    HoldState::Lost(loss) => {
                        return Ok((loss, Instant::now() >= *asked + SHORT - MARGIN, late));
                    }
                    // The guard was asked at this moment, or later: it must not say that it is held.
                    _ if now >= *end => late = Some(now - *end),
                    _ => {}
                }
                if deadline(guard).0 > *deadline_then {
                    return Err("a renewal after the question");
                }
                tokio::time::sleep(MS).await;
            }
        });
    let lost = futures_util::future::join_all(watch).await;
    let (elapsed, by_the_clock) = (clocks.0.elapsed(), clocks.1.elapsed());
    if !by_the_clock.is_ok_and(|by_the_clock| by_the_clock.abs_diff(elapsed) < 5 * MS) {
        return Err("the clock that the server goes by was set");
    }
    for (i, lost) in lost.into_iter().enumerate() {
        let (loss, in_its_time, late) = lost?;
        assert_eq!(loss, Loss::Expired);
        assert_eq!(late, None, "k{i} was held on when the server had given it away");
        assert!(in_its_time, "k{i} was lost before its time");
    }
    let guards: Vec<_> = guards.into_iter().map(|(guard, _)| guard).collect();
    for guard in &guards {
        assert!(guard.held().lost().await == Loss::Expired && guard.remaining() == Duration::ZERO);
        assert_eq!(guard.lost().now_or_never(), Some(Loss::Expired));
    }
    // Acquires that a frozen server got into its buffers must not become ghosts.
    for i in 6..9 {
        assert!(a.lock(format!("k{i}")).try_acquire().await.is_err());
    }
    tokio::time::sleep((SHORT + 500 * MS).saturating_sub(stopped.elapsed())).await;
    server.cont();
    let next = within(SOON, "the waiter elsewhere", waiter)
        .await
        .unwrap()
        .unwrap();
    let behind = within(SOON, "the waiter here", behind).await.unwrap().unwrap();
    for i in 3..9 {
        let acquire = a.lock(format!("k{i}")).acquire();
        let guard = within(SOON, "an acquire afterwards", acquire).await.unwrap();
        assert!(guard.fencing_token() > guards[5].fencing_token());
        guard.release().await.unwrap();
    }
    for guard in guards {
        assert_eq!(guard.state(), HoldState::Lost(Loss::Expired), "Lost is final");
        assert!(guard.release().await.unwrap_err().is_lost());
    }
    for guard in [next, behind] {
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
    }
    store.assert_clean(&[&a, &b]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_guard_frees_its_lock_soon_after_the_server_returns() {
    let (store, proxy, a, b) = setting().await;
    for outage in [50 * MS, 800 * MS, 2100 * MS] {
        let guard = a.lock("k").acquire().await.unwrap();
        proxy.refuse();
        proxy.cut();
        drop(guard);
        tokio::time::sleep(outage).await;
        assert!(b.lock("k").try_acquire().await.unwrap_err().is_busy());
        proxy.accept();
        is_free_soon(&b, "k").await;
        store.assert_clean(&[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reconnected_client_never_finds_its_own_dropped_lock_busy() {
    let (store, proxy, a, _b) = setting().await;
    // Whatever the release is at just then, in line or between two attempts.
    for outage in (0..10).map(|n| 700 * MS + n * 90 * MS) {
        let guard = a.lock("k").acquire().await.unwrap();
        proxy.refuse();
        proxy.cut();
        drop(guard);
        tokio::time::sleep(outage).await;
        proxy.accept();
        let again = answered(|| a.lock("k").try_acquire()).await;
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
    let (store, proxy, a, b) = setting_of_faults().await;
    let guard = answered(|| a.lock("k").acquire()).await.unwrap();
    proxy.block(Direction::Both);
    let report = within(200 * MS + RETRY_FOR, "shutdown", a.shutdown(200 * MS)).await;
    assert_eq!((report.lost, report.unconfirmed), (1, 1));
    assert_eq!(guard.state(), HoldState::Lost(Loss::Shutdown));
    proxy.unblock(Direction::Both);
    is_free_soon(&b, "k").await;
    is_free(&b, "k").await;
    drop(guard);
    store.assert_clean(&[&b]).await;
}

/// "Busy" is said only by the store: a server that is stopped, or was killed, is at fault, also for the callers that
/// wait behind the head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_or_killed_server_is_never_reported_as_busy() {
    for kills in [false, true] {
        let store = Store::server().await;
        let server = store.as_server();
        // No step fails by itself in the time that is waited.
        let builder = || hasty_builder(&server.url()).timeout(PATIENCE);
        let client = dlock_tests::faults::built(builder).await;
        drop(client.lock("k").acquire().await.unwrap());
        settle_releases(&client).await;
        match kills {
            true => server.kill(),
            false => server.stop(),
        }
        for wait in [50, 300, 900] {
            let mut calls = tokio::task::JoinSet::new();
            for _ in 0..4 {
                let lock = client.lock("k").wait(wait * MS);
                calls.spawn(async move { lock.acquire().await.map(drop) });
                let read = client.rw_lock("r").read().wait(wait * MS);
                calls.spawn(async move { read.acquire().await.map(drop) });
                let fair = client.fair_lock("f").wait(wait * MS);
                calls.spawn(async move { fair.acquire().await.map(drop) });
                let permit = client.semaphore("s").permits(1).wait(wait * MS);
                calls.spawn(async move { permit.acquire().await.map(drop) });
                let multi = client.multi(["a", "b"]).wait(wait * MS);
                calls.spawn(async move { multi.acquire().await.map(drop) });
            }
            for outcome in calls.join_all().await {
                let error = outcome.unwrap_err();
                assert!(error.is_unavailable(), "killed {kills}, {wait} ms: {error}");
                assert_eq!(error.problem().status, 503);
            }
        }
        if !kills {
            server.cont();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_counts_a_release_that_failed_before_it_while_the_lease_may_last() {
    for (rest, unconfirmed) in [(Duration::ZERO, 1), (4 * TIMEOUT, 0)] {
        // It goes on until the lease is over.
        let (_store, proxy, a, _b) = setting().await;
        let fixed = a.lock("k").fixed_lease(2 * TIMEOUT);
        let guard = answered(|| fixed.acquire()).await.unwrap();
        proxy.block(Direction::Both);
        let released = guard.release().await;
        assert!(
            matches!(released, Err(Error::OutcomeUnknown { .. })),
            "{released:?}"
        );
        tokio::time::sleep(rest).await;
        let report = a.shutdown(Duration::ZERO).await;
        assert_eq!(
            (report.lost, report.unconfirmed),
            (0, unconfirmed),
            "after {rest:?}"
        );
    }
}
