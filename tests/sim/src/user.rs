//! What users do with locks, well and badly.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use dlock::backend::Kind;
use dlock::{Error, LockClient, LockGuard, LockKey};
use futures_util::FutureExt;
use futures_util::future::join_all;

use crate::check::Waiter;
use crate::plan::{self, End, Habit, Lock, Millis, Task, Work};
use crate::trace::Who;
use crate::words;
use crate::world::{if_any, with};

/// What a user panics with on purpose.
pub(crate) struct OnPurpose;

/// Which user it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Me {
    pub(crate) process: usize,
    pub(crate) user: usize,
}

impl Me {
    fn both(self) -> (usize, usize) {
        (self.process, self.user)
    }

    fn says(self, what: impl FnOnce() -> String) {
        with(|world| {
            if world.trace.is_on() {
                let what = what();
                world
                    .trace
                    .write(world.now, Who::User(self.process, self.user), what);
            }
        });
    }
}

/// Counted among those that are at work, until it is dropped.
struct AtWork;

impl AtWork {
    fn begin() -> AtWork {
        with(|world| world.at_work += 1);
        AtWork
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if_any(|world| world.at_work -= 1);
    }
}

/// Whatever a user does, one task after the other. `done` of them were done in an earlier life of the process.
pub(crate) async fn user(me: Me, client: LockClient, plan: plan::User, done: usize) {
    // Counted by the world from its beginning.
    let _at_work = AtWork;
    let begins = plan.begins.saturating_sub(with(|world| world.now));
    sleep(begins).await;
    for task in plan.tasks.into_iter().skip(done) {
        let done = AssertUnwindSafe(async {
            match task {
                Task::Pause(pause) => sleep(pause).await,
                Task::Lock(lock) => hold(me, client.clone(), lock, Vec::new()).await,
            }
        });
        if let Err(panic) = done.catch_unwind().await
            && !panic.is::<OnPurpose>()
        {
            std::panic::resume_unwind(panic);
        }
        with(|world| world.progress[me.process][me.user] += 1);
    }
}

async fn sleep(time: Millis) {
    if time > 0 {
        tokio::time::sleep(Duration::from_millis(time)).await;
    }
}

fn key_of(number: u32) -> LockKey {
    LockKey::from(format!("k{number}"))
}

fn kind_of(kind: plan::Kind) -> Kind {
    match kind {
        plan::Kind::Plain => Kind::Lock,
        plan::Kind::Fair => Kind::Fair,
        plan::Kind::Fenced => Kind::Fenced,
        plan::Kind::Read => Kind::Read,
        plan::Kind::Write => Kind::Write,
    }
}

fn lock_of(client: &LockClient, task: &Lock) -> dlock::Lock {
    let mut lock = client.lock(key_of(task.key)).kind(kind_of(task.kind));
    let millis = Duration::from_millis;
    if let Some(wait) = task.wait {
        lock = lock.wait(millis(wait));
    }
    if let Some(lease) = task.fixed_lease {
        lock = lock.lease(millis(lease));
    }
    if let Some(min_hold) = task.min_hold {
        lock = lock.min_hold(millis(min_hold));
    }
    if let Some(max_hold) = task.max_hold {
        lock = lock.max_hold(millis(max_hold));
    }
    if let Some(most) = task.max_waiters {
        lock = lock.max_waiters(most);
    }
    if task.preferred {
        lock = lock.prefer_writers();
    }
    lock
}

type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Takes a lock, works and gives it back. `inside` are the sections of the frames around.
fn hold(me: Me, client: LockClient, task: Lock, inside: Vec<u64>) -> Boxed {
    Box::pin(async move {
        let lock = lock_of(&client, &task);
        let acquire = async {
            match task.once {
                true => lock.try_acquire().await,
                false => lock.acquire().await,
            }
        };
        let Some(guard) = acquired(me, &task, !inside.is_empty(), acquire).await else {
            return;
        };
        work(me, client, &task, guard, inside).await;
    })
}

/// Waits for a lock as its user has the habit to.
async fn acquired(
    me: Me,
    task: &Lock,
    nested: bool,
    acquire: impl Future<Output = Result<LockGuard, Error>>,
) -> Option<LockGuard> {
    let kind = kind_of(task.kind);
    let key = key_of(task.key);
    me.says(|| format!("wants {key}: {}{}", words::kind(kind), words::wish(task)));
    let waits = Waits::begin(me, kind, key.clone(), task, nested);
    let outcome = with_habit(acquire, task.habit).await;
    match outcome {
        None => {
            me.says(|| format!("drops the future of its acquire of {key}"));
            with(|world| world.counts.sometimes("an acquire that was dropped"));
            None
        }
        Some(Ok(guard)) => {
            let waiter = waits.end();
            with(|world| world.served(&waiter));
            Some(guard)
        }
        Some(Err(error)) => {
            let waiter = waits.end();
            me.says(|| format!("does not get {key}: {error}"));
            with(|world| match &error {
                Error::NotAcquired { .. } => {
                    world
                        .counts
                        .sometimes("an acquire that found the lock held to its end");
                    world.told_busy(&waiter);
                }
                error => world.counts.sometimes(name_of(error)),
            });
            None
        }
    }
}

fn name_of(error: &Error) -> &'static str {
    match error {
        Error::Lost { .. } => "an acquire that ended with Lost",
        Error::OutcomeUnknown { .. } => "an acquire with an unknown outcome",
        Error::Unreachable { .. } => "an acquire that found no store",
        Error::Refused { .. } => "an acquire that was refused",
        Error::TooManyWaiters { .. } => "an acquire with too many before it",
        Error::ClientClosed => "an acquire of a closed client",
        _ => "an acquire with another error",
    }
}

/// Counted among those that wait, until it is dropped.
struct Waits(u64);

impl Waits {
    fn begin(me: Me, kind: Kind, key: LockKey, task: &Lock, nested: bool) -> Waits {
        with(|world| {
            let mut waiter = Waiter::new(me.both(), (kind, key), world.now);
            waiter.once = task.once;
            waiter.until = match task.once {
                true => Some(world.now),
                false => task.wait.map(|wait| world.now + wait),
            };
            if let Some(Habit::DropsAfter(after)) = task.habit {
                waiter.until = Some(world.now + after);
            }
            waiter.attentive = !matches!(task.habit, Some(Habit::PollsNot { .. }));
            waiter.nested = nested;
            Waits(world.begins_to_wait(waiter))
        })
    }

    fn end(self) -> Waiter {
        let id = self.0;
        std::mem::forget(self);
        with(|world| world.waits_no_longer(id)).expect("a waiter that waits")
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        if_any(|world| drop(world.waits_no_longer(self.0)));
    }
}

/// Polls a future as somebody with this habit does; `None` where it was dropped.
async fn with_habit<T>(future: impl Future<Output = T>, habit: Option<Habit>) -> Option<T> {
    match habit {
        None => Some(future.await),
        Some(Habit::DropsAfter(after)) => tokio::time::timeout(Duration::from_millis(after), future)
            .await
            .ok(),
        Some(Habit::DropsAfterPolls(most)) => {
            let mut future = pin!(future);
            let mut polls = 0;
            std::future::poll_fn(|cx| {
                if let Poll::Ready(outcome) = future.as_mut().poll(cx) {
                    return Poll::Ready(Some(outcome));
                }
                polls += 1;
                if polls >= most {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            })
            .await
        }
        Some(Habit::PollsNot { after, lasts }) => {
            let mut future = pin!(future);
            let mut polls = 0;
            let early = std::future::poll_fn(|cx| {
                if polls >= after {
                    return Poll::Ready(None);
                }
                polls += 1;
                future.as_mut().poll(cx).map(Some)
            })
            .await;
            if early.is_some() {
                return early;
            }
            with(|world| world.counts.sometimes("an acquire that was kept unpolled"));
            sleep(lasts).await;
            Some(future.await)
        }
    }
}

/// A section, until it is dropped: before the guard is.
struct Inside(u64);

impl Drop for Inside {
    fn drop(&mut self) {
        if_any(|world| world.section_ends(self.0));
    }
}

async fn work(me: Me, client: LockClient, task: &Lock, guard: LockGuard, around: Vec<u64>) {
    let kind = kind_of(task.kind);
    let key = guard.key().clone();
    let section = with(|world| Inside(world.section_begins(me.both(), (kind, &key), guard.held(), &around)));
    let mut inside = around;
    inside.push(section.0);
    for work in &task.work {
        match work {
            Work::Sleep(time) => sleep(*time).await,
            Work::Write => with(|world| world.writes(section.0)),
            Work::Ensure(least) => {
                let _ = guard.ensure(Duration::from_millis(*least)).await;
            }
            Work::Nest(lock) => {
                let nested = hold(me, client.clone(), Lock::clone(lock), inside.clone());
                guard.scope(nested).await;
            }
            Work::Join(locks) => {
                let branch = |lock: &Lock| hold(me, client.clone(), lock.clone(), inside.clone());
                guard.scope(join_all(locks.iter().map(branch))).await;
            }
            Work::Spawn(lock) => {
                let at_work = AtWork::begin();
                let spawned = hold(me, client.clone(), Lock::clone(lock), Vec::new());
                let spawns = async {
                    tokio::spawn(async move {
                        let _at_work = at_work;
                        spawned.await;
                    })
                };
                drop(guard.scope(spawns).await);
            }
        }
    }
    me.says(|| words::end(&key, task.end));
    drop(section);
    match task.end {
        End::Release => match guard.release().await {
            Ok(()) => {}
            Err(error) => me.says(|| format!("learns that its release failed: {error}")),
        },
        End::ReleaseUnawaited => drop(guard.release().now_or_never()),
        End::Drop => drop(guard),
        End::Panic => std::panic::panic_any(OnPurpose),
    }
}
