//! Frames: what a wrapper adds to those in which its future is polled, the order inside a frame, and the cost.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use dlock::{Error, Lock, LockClient, LockKind, distributed_lock, scope};
use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::task::yield_now;
use tokio::time::timeout;

/// What a wrapper may add to the future that it wraps.
const MOST: usize = 1024;
const BODY: usize = 8 << 10;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The ways to wrap a future into the frame of `a`; each guard lives as long as its frame.
async fn wrappers<T: Send + 'static>(
    client: &LockClient,
    future: impl Fn() -> Boxed<T>,
) -> Vec<(&'static str, Boxed<Option<T>>, Boxed<()>)> {
    let lock = client.lock("a").acquire().await.unwrap();
    let scoped = lock.scope(future());
    let guard = client.lock("b").acquire().await.unwrap();
    let run = guard.run(future());
    let multi = client.multi(["c", "d"]).acquire().await.unwrap();
    let multi_scoped = multi.scope(future());
    let multi_run = multi.run(future());
    let permit = client.semaphore("e").permits(1).acquire().await.unwrap();
    let permit_run = permit.run(future());
    let term = client.leader("f").campaign().await.unwrap();
    let term_run = term.run(future());
    let wrapped = lock.frame().wrap(future());
    let framed = multi.frame().wrap(future());
    let keep = Box::pin(async move { drop((lock, guard, multi, permit, term)) });
    let none = || Box::pin(async {}) as Boxed<()>;
    vec![
        (
            "LockGuard::scope",
            Box::pin(async { Some(scoped.await) }) as Boxed<Option<T>>,
            none(),
        ),
        ("LockGuard::run", Box::pin(async { run.await.ok() }), none()),
        (
            "MultiGuard::scope",
            Box::pin(async { Some(multi_scoped.await) }),
            none(),
        ),
        (
            "MultiGuard::run",
            Box::pin(async { multi_run.await.ok() }),
            none(),
        ),
        ("Permit::run", Box::pin(async { permit_run.await.ok() }), none()),
        ("Term::run", Box::pin(async { term_run.await.ok() }), none()),
        (
            "LockGuard::frame",
            Box::pin(async { Some(wrapped.await) }),
            none(),
        ),
        ("MultiGuard::frame", Box::pin(async { Some(framed.await) }), keep),
    ]
}

/// A wrapper that is made in a frame and polled by another task is in its own frame alone. Were it in that one too,
/// the task would be inside beside the holder.
#[tokio::test]
async fn wrapped_future_leaves_behind_the_frames_in_which_it_was_made() {
    let client = LockClient::memory();
    let (outer, asked) = (client.lock("outer"), client.lock("outer"));
    let made = client.clone();
    outer
        .run(|_| async move {
            let ask = || {
                let asked = asked.clone();
                Box::pin(async move { asked.try_acquire().await.is_err_and(|error| error.is_busy()) })
                    as Boxed<bool>
            };
            let mut all = wrappers(&made, ask).await;
            for (name, future, _keep) in &mut all {
                let future = std::mem::replace(future, Box::pin(async { None }));
                assert_eq!(tokio::spawn(future).await.unwrap(), Some(true), "{name}");
            }
        })
        .await
        .unwrap();
}

/// A wrapper that is made outside of a frame and polled inside is in both. Were it in its own alone, a nested call
/// would wait for itself.
#[tokio::test]
async fn wrapped_future_is_in_the_frames_in_which_it_is_polled() {
    let client = LockClient::memory();
    let (outer, asked) = (client.lock("outer"), client.lock("outer"));
    let ask = || {
        let asked = asked.clone();
        Box::pin(async move { asked.try_acquire().await.is_ok() }) as Boxed<bool>
    };
    for (name, future, _keep) in wrappers(&client, ask).await {
        assert_eq!(outer.run(|_| future).await.unwrap(), Some(true), "{name}");
    }
    // A handle carries on purpose the frames of its caller, and adds its own.
    let guard = client.lock("g").acquire().await.unwrap();
    let handle = guard.scope(async { scope::current() }).await;
    let both = async { client.lock("g").try_acquire().await.is_ok() && ask().await };
    assert!(outer.run(|_| handle.wrap(both)).await.unwrap());
    assert!(outer.run(|_| scope::Scope::default().wrap(ask())).await.unwrap());
}

async fn body() -> usize {
    let bytes = [1_u8; BODY];
    yield_now().await;
    bytes.len()
}

/// Measures eight futures, each of which wraps the one before; the first of them is the body.
macro_rules! nested {
    ($name:literal, $body:expr, $wrap:expr) => {{
        let mut sizes = Vec::new();
        let future = $body;
        sizes.push(size_of_val(&future));
        nested!(@ sizes, future, $wrap, 1 2 3 4 5 6 7 8);
        let added: Vec<_> = sizes.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        assert!(added.iter().all(|added| *added <= MOST), "{} adds {added:?} bytes", $name);
    }};
    (@ $sizes:ident, $inner:ident, $wrap:expr, $level:literal $($more:literal)*) => {
        let future = $wrap($inner);
        $sizes.push(size_of_val(&future));
        nested!(@ $sizes, future, $wrap, $($more)*);
    };
    (@ $sizes:ident, $inner:ident, $wrap:expr,) => { drop($inner) };
}

/// Futures that wrap each other add up: each level costs at most [`MOST`], whatever it wraps. When they multiply, a few
/// nested calls overflow a stack.
#[test]
fn wrapper_adds_at_most_a_kilobyte_at_any_depth() {
    // All futures that it measures stand on one stack.
    let test = std::thread::Builder::new()
        .stack_size(64 << 20)
        .spawn(measure_wrappers);
    test.unwrap().join().unwrap();
}

#[tokio::main(flavor = "current_thread")]
async fn measure_wrappers() {
    let client = LockClient::memory();
    let lock = client.lock("a");
    let multi = client.multi(["b", "c"]);
    let semaphore = client.semaphore("d").permits(1);
    let guard = lock.acquire().await.unwrap();
    let guards = multi.acquire().await.unwrap();
    let permit = semaphore.acquire().await.unwrap();
    let term = client.leader("e").campaign().await.unwrap();
    let scope = scope::current();
    macro_rules! each {
        ($body:expr) => {
            nested!("Lock::run", $body, |inner| lock.run(|_| inner));
            nested!("MultiLock::run", $body, |inner| multi.run(|_| inner));
            nested!("Semaphore::run", $body, |inner| semaphore.run(|_| inner));
            nested!("LockGuard::scope", $body, |inner| guard.scope(inner));
            nested!("LockGuard::run", $body, |inner| guard.run(inner));
            nested!("MultiGuard::scope", $body, |inner| guards.scope(inner));
            nested!("MultiGuard::run", $body, |inner| guards.run(inner));
            nested!("Permit::run", $body, |inner| permit.run(inner));
            nested!("Term::run", $body, |inner| term.run(inner));
            nested!("Scope::wrap", $body, |inner| scope.wrap(inner));
        };
    }
    each!(body());
    each!(async {});
    // Called anew for each term, so the body is not in the closure.
    let leader = client.leader("f");
    assert!(size_of_val(&leader.lead(|_| body())) <= size_of_val(&body()) + MOST);
    assert!(size_of_val(&leader.lead(|_| async {})) <= MOST);
}

macro_rules! locked {
    ($name:ident, $inner:ident) => {
        #[distributed_lock(key = "k", lock = client)]
        async fn $name(client: &LockClient) -> Result<usize, Error> {
            let sum = $inner(client).await?;
            Ok(sum)
        }
    };
}

async fn innermost(_client: &LockClient) -> Result<usize, Error> {
    Ok(body().await)
}

async fn nothing(_client: &LockClient) -> Result<usize, Error> {
    Ok(0)
}

locked!(one, innermost);
locked!(two, one);
locked!(three, two);
locked!(four, three);
locked!(five, four);
locked!(six, five);
locked!(seven, six);
locked!(eight, seven);
locked!(small, nothing);

#[distributed_lock(key = "k", lock = client)]
async fn argument(client: &LockClient, argument: [u8; BODY]) -> Result<usize, Error> {
    yield_now().await;
    Ok(argument.len())
}

async fn plain(client: &LockClient, argument: [u8; BODY]) -> Result<usize, Error> {
    yield_now().await;
    let _ = client;
    Ok(argument.len())
}

/// The same for `#[distributed_lock]`, also where the arguments are large.
#[tokio::test]
async fn attribute_adds_at_most_a_kilobyte_at_any_depth() {
    let client = LockClient::memory();
    let sizes = [
        size_of_val(&innermost(&client)),
        size_of_val(&one(&client)),
        size_of_val(&two(&client)),
        size_of_val(&three(&client)),
        size_of_val(&four(&client)),
        size_of_val(&five(&client)),
        size_of_val(&six(&client)),
        size_of_val(&seven(&client)),
        size_of_val(&eight(&client)),
    ];
    let added: Vec<_> = sizes.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(added.iter().all(|added| *added <= MOST), "{added:?}");
    assert!(
        size_of_val(&small(&client)) <= MOST,
        "{}",
        size_of_val(&small(&client))
    );
    let sizes = [
        size_of_val(&plain(&client, [0; BODY])),
        size_of_val(&argument(&client, [0; BODY])),
    ];
    assert!(sizes[1] <= sizes[0] + MOST, "{sizes:?}");
    assert_eq!(eight(&client).await.unwrap(), BODY);
}

/// Takes its turns inside a frame, without a pause.
async fn branch(lock: &Lock, turns: &Cell<usize>, end: &Cell<usize>) {
    while end.get() > 0 {
        let guard = lock.acquire().await.unwrap();
        end.set(end.get().saturating_sub(1));
        turns.set(turns.get() + 1);
        yield_now().await;
        drop(guard);
    }
}

/// Branches that exclude each other inside a frame are served in the order in which they ask, so none starves,
/// though each asks again the moment it has left.
#[tokio::test]
async fn branches_of_a_frame_take_turns() {
    let client = LockClient::memory();
    for kind in [LockKind::Mutex, LockKind::Fair, LockKind::Fenced, LockKind::Write] {
        let lock = client.lock("k").kind(kind);
        let turns: [Cell<usize>; 4] = Default::default();
        let end = Cell::new(400);
        let all = turns.iter().map(|turns| branch(&lock, turns, &end));
        lock.run(|_| async { join_all(all).await }).await.unwrap();
        assert!(
            turns.iter().all(|turns| (100..=101).contains(&turns.get())),
            "{kind}: {turns:?}"
        );
    }
}

async fn nested_reads(many: usize) -> Duration {
    let client = LockClient::memory();
    let lock = client.rw_lock("k").read();
    let outer = lock.acquire().await.unwrap();
    let asking = async {
        let mut guards = Vec::new();
        for _ in 0..many {
            guards.push(lock.acquire().await.unwrap());
        }
        guards
    };
    let mut guards = outer.scope(asking).await;
    // Out of order, as branches leave.
    fastrand::shuffle(&mut guards);
    let began = Instant::now();
    drop(guards);
    began.elapsed()
}

/// Leaving costs the same, however many others are inside.
#[tokio::test]
async fn leaving_of_many_nested_reads_is_not_quadratic() {
    let mut ratios = Vec::new();
    for _ in 0..5 {
        let few = nested_reads(2_000).await;
        let many = nested_reads(32_000).await;
        ratios.push(many.as_secs_f64() / few.as_secs_f64());
        // 16 by their number; 256 where each of them looks at all others.
        if ratios.last().is_some_and(|ratio| *ratio < 64.0) {
            return;
        }
    }
    panic!("{ratios:?}");
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
    future.now_or_never()
}

/// A branch that was called and is not polled, as in a `select!` that works on another one, excludes no other, and comes in
/// when it is polled.
#[tokio::test(start_paused = true)]
async fn branch_that_is_not_polled_blocks_no_other_branch() {
    let client = LockClient::memory();
    let lock = client.lock("k");
    let asking = lock.clone();
    lock.run(|_| async move {
        let inside = asking.acquire().await.unwrap();
        let mut unpolled: Vec<_> = (0..3).map(|_| Box::pin(asking.acquire())).collect();
        for waiter in &mut unpolled {
            assert!(poll_once(waiter.as_mut()).is_none());
        }
        // An earlier waiter, and a later one.
        let before = async { asking.acquire().await.map(drop) };
        let later = async {
            drop(inside);
            assert!(asking.try_acquire().await.is_err_and(|error| error.is_busy()));
            asking.acquire().await.map(drop)
        };
        let both = async { tokio::join!(before, later) };
        let (before, later) = timeout(Duration::from_secs(30), both).await.unwrap();
        before.and(later).unwrap();
        for waiter in unpolled {
            drop(timeout(Duration::from_secs(1), waiter).await.unwrap().unwrap());
        }
        // One that was dropped is gone.
        let inside = asking.acquire().await.unwrap();
        let mut dropped = Box::pin(asking.acquire());
        assert!(poll_once(dropped.as_mut()).is_none());
        drop((dropped, inside));
        assert!(asking.try_acquire().await.is_ok());
    })
    .await
    .unwrap();
}

/// A frame whose guard is released at the moment at which it asks has no lock: the acquire is an ordinary one, and no
/// loss is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frame_whose_guard_is_released_meanwhile_asks_anew() {
    let client = LockClient::memory();
    for round in 0..1500 {
        let asking = match round % 4 {
            0 => client.lock("k"),
            1 => client.rw_lock("k").write(),
            2 => client.rw_lock("k").read(),
            _ => client.lock("k").kind(LockKind::Fair),
        };
        let guard = asking.acquire().await.unwrap();
        // Some read in the frame of a writer, and some write in that of a reader.
        let asked = match asking.clone() {
            _ if round % 8 < 4 => asking,
            _ if round % 4 == 1 => client.rw_lock("k").read(),
            _ if round % 4 == 2 => client.rw_lock("k").write(),
            lock => lock,
        };
        let pause = round % 50;
        let asks = tokio::spawn(guard.scope(async move {
            for _ in 0..pause {
                std::hint::spin_loop();
            }
            asked.acquire().await.map(drop)
        }));
        drop(guard);
        match asks.await.unwrap() {
            Ok(()) | Err(Error::WouldDeadlock { .. }) => {}
            Err(error) => panic!("{round}: {error}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn bare_guard_encloses_no_code() {
    let client = LockClient::memory();
    let guard = client.lock("k").acquire().await.unwrap();
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    let again = guard.reenter().unwrap();
    assert_eq!(again.fencing_token(), guard.fencing_token());
    drop(guard);
    assert!(client.lock("k").try_acquire().await.unwrap_err().is_busy());
    let scoped = again.scope(client.lock("k").try_acquire()).await.unwrap();
    drop(again);
    assert!(scoped.is_held());
    scoped.release().await.unwrap();
}

/// A plain, a fair and a fenced lock of one name are one lock, and a read-write lock cannot be beside it.
#[tokio::test(start_paused = true)]
async fn lock_inside_of_itself_as_another_kind_is_told_instead_of_waiting() {
    let client = LockClient::memory();
    let kinds = [
        LockKind::Mutex,
        LockKind::Fair,
        LockKind::Fenced,
        LockKind::Read,
        LockKind::Write,
    ];
    let pairs = kinds
        .into_iter()
        .flat_map(|outer| kinds.map(|inner| (outer, inner)));
    for (outer, inner) in pairs {
        let inside = client.lock("k").kind(inner);
        let lock = client.lock("k").kind(outer);
        let outcome = lock.run(|_| async move { inside.acquire().await.map(drop) });
        let outcome = timeout(Duration::from_secs(60), outcome).await;
        match outcome.expect("it does not wait").unwrap() {
            Ok(()) => assert!(
                outer == inner || (outer, inner) == (LockKind::Write, LockKind::Read),
                "{outer} {inner}"
            ),
            Err(Error::WouldDeadlock { reason, .. }) => {
                let why = match (outer, inner) {
                    (LockKind::Read, LockKind::Write) => "inside a read lock",
                    _ => "another kind",
                };
                assert!(
                    outer != inner && reason.contains(why),
                    "{outer} {inner}: {reason}"
                );
            }
            Err(error) => panic!("{outer} {inner}: {error:?}"),
        }
    }
}
