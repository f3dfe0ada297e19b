//! Everything that the caller passed is dropped before the lock is released, and in the usual order.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use dlock::{Error, Held, LockClient, distributed_lock};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// What was dropped, and whether the lock was still held then.
#[derive(Clone, Default)]
struct Log {
    hold: Arc<Mutex<Option<Held>>>,
    drops: Arc<Mutex<Vec<(&'static str, bool)>>>,
}

impl Log {
    /// Called in the body: which hold to look at.
    fn watch(&self) {
        *self.hold.lock() = dlock::current();
    }

    fn witness(&self, name: &'static str) -> Witness {
        Witness {
            name,
            log: self.clone(),
        }
    }

    /// The names in the order of their drops. All of them have to be dropped under the lock.
    #[track_caller]
    fn names(&self) -> Vec<&'static str> {
        let drops = self.drops.lock();
        for (name, held) in &*drops {
            assert!(held, "{name} was dropped after the lock was released: {drops:?}");
        }
        drops.iter().map(|(name, _)| *name).collect()
    }
}

struct Witness {
    name: &'static str,
    log: Log,
}

impl Witness {
    fn look(&self) {}
}

impl Drop for Witness {
    fn drop(&mut self) {
        let held = self.log.hold.lock().as_ref().is_some_and(Held::is_held);
        self.log.drops.lock().push((self.name, held));
    }
}

#[distributed_lock(key = "k", lock = client)]
async fn named(client: &LockClient, log: Log, a: Witness, b: Witness) -> Result<(), Error> {
    let _local = log.witness("local");
    log.watch();
    tokio::task::yield_now().await;
    b.look();
    a.look();
    Ok(())
}

#[distributed_lock(key = "k", lock = client)]
async fn never_named(
    client: &LockClient,
    log: Log,
    a: Witness,
    _permit: Witness,
    _: Witness,
) -> Result<(), Error> {
    log.watch();
    a.look();
    Ok(())
}

struct Parts {
    id: u32,
    left: Witness,
    #[expect(dead_code, reason = "dropped, never read")]
    right: Witness,
}

#[distributed_lock(key = "{parts.id}", lock = client)]
async fn named_in_part(client: &LockClient, log: Log, parts: Parts) -> Result<(), Error> {
    log.watch();
    drop(parts.left);
    Ok(())
}

#[distributed_lock(key = "{id}", lock = client)]
async fn destructured(
    client: &LockClient,
    log: Log,
    Parts { id, left, .. }: Parts,
    (_, second): (Witness, Witness),
    ref third: Witness,
) -> Result<(), Error> {
    log.watch();
    left.look();
    second.look();
    third.look();
    Ok(())
}

struct Owner {
    client: LockClient,
    log: Log,
    _witness: Witness,
}

impl Owner {
    #[distributed_lock(key = "k", lock = self.client)]
    async fn consume(self) -> Result<(), Error> {
        self.log.watch();
        Ok(())
    }

    #[distributed_lock(key = "k", lock = self.client)]
    async fn consume_arc(self: Arc<Self>) -> Result<(), Error> {
        self.log.watch();
        Ok(())
    }

    #[distributed_lock(key = "k", lock = self.client)]
    async fn consume_in_part(self) -> Result<(), Error> {
        let log = self.log;
        log.watch();
        Ok(())
    }
}

#[tokio::test]
async fn arguments_are_dropped_in_the_usual_order_and_under_the_lock() {
    let (client, log) = (LockClient::memory(), Log::default());
    named(&client, log.clone(), log.witness("a"), log.witness("b"))
        .await
        .unwrap();
    assert_eq!(log.names(), ["local", "b", "a"]);
}

#[tokio::test]
async fn arguments_that_the_body_never_names_are_dropped_under_the_lock() {
    let (client, log) = (LockClient::memory(), Log::default());
    let call = never_named(
        &client,
        log.clone(),
        log.witness("a"),
        log.witness("_permit"),
        log.witness("_"),
    );
    call.await.unwrap();
    assert_eq!(log.names(), ["_", "_permit", "a"]);
}

#[tokio::test]
async fn fields_that_the_body_never_names_are_dropped_under_the_lock() {
    let (client, log) = (LockClient::memory(), Log::default());
    let parts = Parts {
        id: 1,
        left: log.witness("left"),
        right: log.witness("right"),
    };
    named_in_part(&client, log.clone(), parts).await.unwrap();
    assert_eq!(log.names(), ["left", "right"]);
}

#[tokio::test]
async fn what_a_pattern_leaves_out_is_dropped_under_the_lock() {
    let (client, log) = (LockClient::memory(), Log::default());
    let parts = Parts {
        id: 1,
        left: log.witness("left"),
        right: log.witness("right"),
    };
    let pair = (log.witness("first"), log.witness("second"));
    destructured(&client, log.clone(), parts, pair, log.witness("third"))
        .await
        .unwrap();
    let mut names = log.names();
    names.sort_unstable();
    assert_eq!(names, ["first", "left", "right", "second", "third"]);
}

#[tokio::test]
async fn a_receiver_by_value_is_dropped_under_the_lock() {
    let owner = |log: &Log| Owner {
        client: LockClient::memory(),
        log: log.clone(),
        _witness: log.witness("self"),
    };
    let log = Log::default();
    owner(&log).consume().await.unwrap();
    Arc::new(owner(&log)).consume_arc().await.unwrap();
    owner(&log).consume_in_part().await.unwrap();
    assert_eq!(log.names(), ["self", "self", "self"]);
}

#[derive(Clone, Copy)]
enum Way {
    Panic,
    Cancel,
    Lose,
}

#[distributed_lock(key = "k", lock = client, max_hold = "1m")]
async fn cut(
    client: &LockClient,
    log: Log,
    way: Way,
    named: Witness,
    _permit: Witness,
    (_, right): (Witness, Witness),
    _: Witness,
) -> Result<(), Error> {
    log.watch();
    named.look();
    right.look();
    match way {
        Way::Panic => panic!("on purpose"),
        Way::Cancel => std::future::pending().await,
        Way::Lose => tokio::time::sleep(Duration::from_secs(3600)).await,
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn arguments_are_dropped_under_the_lock_when_the_body_is_cut_short() {
    for way in [Way::Panic, Way::Cancel, Way::Lose] {
        let (client, log) = (LockClient::memory(), Log::default());
        let w = |name| log.witness(name);
        let pair = (w("left"), w("right"));
        let call = cut(&client, log.clone(), way, w("named"), w("_permit"), pair, w("_"));
        let patience = Duration::from_secs(if matches!(way, Way::Cancel) { 30 } else { 600 });
        let call = tokio::time::timeout(patience, AssertUnwindSafe(call).catch_unwind());
        match (way, call.await) {
            (Way::Panic, Ok(Err(_))) | (Way::Cancel, Err(_)) => {
                let mut names = log.names();
                names.sort_unstable();
                assert_eq!(names, ["_", "_permit", "left", "named", "right"]);
            }
            (Way::Lose, Ok(Ok(Err(error)))) => {
                assert!(error.is_lost(), "{error}");
                assert_eq!(
                    log.drops.lock().len(),
                    5,
                    "all are dropped before the caller is told"
                );
            }
            (_, outcome) => panic!("{outcome:?}"),
        }
    }
}

mod with_async_trait {
    use super::*;

    #[async_trait::async_trait]
    trait Consume {
        async fn consume(
            self: Box<Self>,
            a: Witness,
            pair: (Witness, Witness),
            b: Witness,
        ) -> Result<(), Error>;
    }

    #[async_trait::async_trait]
    impl Consume for Owner {
        #[distributed_lock(key = "k", lock = self.client)]
        async fn consume(
            self: Box<Self>,
            _a: Witness,
            (_left, right): (Witness, Witness),
            _: Witness,
        ) -> Result<(), Error> {
            right.look();
            self.log.watch();
            Ok(())
        }
    }

    #[tokio::test]
    async fn arguments_are_dropped_under_the_lock() {
        let log = Log::default();
        let w = |name| log.witness(name);
        let owner = Owner {
            client: LockClient::memory(),
            log: log.clone(),
            _witness: w("self"),
        };
        Box::new(owner)
            .consume(w("a"), (w("left"), w("right")), w("b"))
            .await
            .unwrap();
        let mut names = log.names();
        names.sort_unstable();
        assert_eq!(names, ["a", "b", "left", "right", "self"]);
    }
}

mod plain {
    //! The order to compare with: the same functions without the attribute.

    use super::*;

    async fn named(log: Log, a: Witness, b: Witness) {
        let _local = log.witness("local");
        tokio::task::yield_now().await;
        b.look();
        a.look();
    }

    #[expect(unused_variables)]
    async fn never_named(log: Log, a: Witness, _permit: Witness, _: Witness) {
        a.look();
    }

    #[tokio::test]
    async fn the_usual_order_is_the_one_expected_above() {
        let log = Log::default();
        named(log.clone(), log.witness("a"), log.witness("b")).await;
        let order = |log: &Log| {
            log.drops
                .lock()
                .drain(..)
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(order(&log), ["local", "b", "a"]);
        never_named(
            log.clone(),
            log.witness("a"),
            log.witness("_permit"),
            log.witness("_"),
        )
        .await;
        assert_eq!(order(&log), ["_", "_permit", "a"]);
    }
}

#[distributed_lock(key = "k", lock = client)]
async fn blocking(
    client: &LockClient,
    began: oneshot::Sender<()>,
    end: mpsc::Receiver<()>,
) -> Result<(), Error> {
    let guard = client.lock("k").acquire().await?;
    let work = tokio::task::spawn_blocking(move || {
        assert!(dlock::current().is_none());
        began.send(()).unwrap();
        end.recv().unwrap();
        drop(guard);
    });
    work.await.unwrap();
    Ok(())
}

/// As the attribute's documentation advises, under "Cancel safety".
#[tokio::test]
async fn guard_in_a_blocking_closure_keeps_the_lock_when_the_body_is_dropped() {
    let client = LockClient::memory();
    let ((began, has_begun), (end, ends)) = (oneshot::channel(), mpsc::channel());
    let mut call = Box::pin(blocking(&client, began, ends));
    tokio::select! {
        outcome = &mut call => panic!("{outcome:?}"),
        begun = has_begun => begun.unwrap(),
    }
    drop(call);
    let lock = client.lock("k");
    assert!(lock.try_acquire().await.unwrap_err().is_busy());
    end.send(()).unwrap();
    lock.acquire().await.unwrap().release().await.unwrap();
}
