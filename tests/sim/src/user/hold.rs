//! How users acquire locks and permits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dlock::store::Kind;
use dlock::{Error, Held, LockClient, LockKey, Loss};

use super::Me;
use super::attribute::locked;
use super::habit::with_habit;
use super::holder::{Holder, acquire, key_of, keys_of, kind_of, lock_of, post_of, semaphore_of, set_of};
use super::work::work;
use crate::check::{Frame, Waiter};
use crate::plan::{self, Call, Habit, Lock};
use crate::words;
use crate::world::{World, if_any, with};

pub(super) type Boxed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Acquires a lock, works and releases it. `around` are the frames in which this happens.
pub(super) fn hold(me: Me, client: LockClient, task: Lock, around: Vec<Frame>) -> Boxed {
    let task = Arc::new(task);
    Box::pin(async move {
        let waits = Waits::begin(me, &task, &around);
        match task.call {
            Call::Acquire => {
                let outcome = with_habit(|| acquire(&client, &task), task.habit).await;
                if let Some(holder) = waits.end(outcome) {
                    work(me, client, task, holder, around).await;
                }
            }
            _ => {
                let outcome = {
                    let waits = &waits;
                    let make = || run(me, client.clone(), task.clone(), waits, around.clone());
                    with_habit(make, task.habit).await
                };
                waits.end(outcome);
            }
        }
    })
}

/// Works through a call that acquires a lock, runs a future, and releases the lock.
fn run(
    me: Me,
    client: LockClient,
    task: Arc<Lock>,
    waits: &Waits,
    around: Vec<Frame>,
) -> impl Future<Output = Result<(), Error>> + use<> {
    let waits = waits.clone();
    let begin = {
        let (client, task) = (client.clone(), task.clone());
        move |held: Held| -> Boxed {
            waits.is_served();
            let (client, task) = (client.clone(), task.clone());
            Box::pin(work(me, client, task, Holder::Frame(held), around.clone()))
        }
    };
    async move {
        match task.call {
            Call::Attribute | Call::AttributeRunsOn => {
                dlock::with_default(client, locked(&task, begin)).await
            }
            _ => match task.kind {
                plan::Kind::Permit => semaphore_of(&client, &task).run(begin).await,
                plan::Kind::Leader => post_of(&client, &task).lead(begin).await,
                _ if !task.also.is_empty() => set_of(&client, &task).run(begin).await,
                _ => lock_of(&client, &task).run(begin).await,
            },
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
        Error::WouldDeadlock { .. } => "a reader that asked to write",
        _ => "an acquire with another error",
    }
}

/// Counted among those that wait, until it is served or the last of its clones is dropped.
#[derive(Clone)]
pub(super) struct Waits(Arc<Wait>);

struct Wait {
    me: Me,
    task: WaitsFor,
    id: u64,
    /// It is still counted.
    is_open: AtomicBool,
}

struct WaitsFor {
    key: LockKey,
    /// It reads inside of a frame, and asks to write.
    upgrades: Option<u64>,
}

impl Waits {
    pub(super) fn begin(me: Me, task: &Lock, around: &[Frame]) -> Waits {
        let kind = kind_of(task.kind);
        let key = key_of(task.kind, task.key);
        me.says(|| format!("wants {key}: {}{}", words::kind(kind), words::wish(task)));
        with(|world| {
            let mut waiter = Waiter::new(me.both(), (kind, key.clone()), world.now);
            waiter.once = task.once;
            waiter.calls = if task.habit == Some(Habit::Races) { 2 } else { 1 };
            waiter.until = match task.once {
                true => Some(world.now),
                false => task.wait.map(|wait| world.now + wait),
            };
            if let Some(Habit::DropsAfter(after)) = task.habit {
                let drops = world.now + after;
                waiter.until = Some(waiter.until.map_or(drops, |until| until.min(drops)));
            }
            waiter.attentive = !matches!(task.habit, Some(Habit::PollsNot { .. }));
            waiter.nested = !around.is_empty();
            waiter.also = keys_of(task).skip(1).collect();
            waiter.is_leader = task.kind == plan::Kind::Leader;
            waiter.preferred = task.preferred;
            // The attribute of these functions has none.
            let has_options = !matches!(task.call, Call::Attribute | Call::AttributeRunsOn);
            waiter.max_waiters = task.max_waiters.filter(|_| has_options);
            waiter.amount = 1 + task.more_permits;
            let upgrades = (kind == Kind::Write && task.also.is_empty())
                .then(|| world.reads_around(&key, around))
                .flatten();
            let id = world.begins_to_wait(waiter);
            Waits(Arc::new(Wait {
                me,
                task: WaitsFor { key, upgrades },
                id,
                is_open: AtomicBool::new(true),
            }))
        })
    }

    fn leave(&self, world: &mut World) -> Option<Waiter> {
        let is_open = self.0.is_open.swap(false, Ordering::Relaxed);
        is_open.then(|| world.waits_no_longer(self.0.id)).flatten()
    }

    /// It has what it waited for.
    fn is_served(&self) {
        with(|world| {
            if let Some(waiter) = self.leave(world) {
                world.served(&waiter);
                if let Some(reads) = self.0.task.upgrades {
                    world.upgraded(reads, &waiter, None);
                }
            }
        });
    }

    /// It waits no longer, with this outcome; `None` where it gave up.
    pub(super) fn end<T>(&self, outcome: Option<Result<T, Error>>) -> Option<T> {
        let Wait { me, task, .. } = &*self.0;
        let WaitsFor { key, upgrades } = task;
        match outcome {
            None => {
                me.says(|| format!("drops the future of its acquire of {key}"));
                with(|world| {
                    world.counts.sometimes("an acquire that was dropped");
                    self.leave(world);
                });
                None
            }
            Some(Ok(value)) => {
                self.is_served();
                Some(value)
            }
            Some(Err(error)) => {
                me.says(|| format!("does not get or keep {key}: {error}"));
                with(|world| {
                    let Some(waiter) = self.leave(world) else {
                        world.counts.sometimes("work that was dropped with its lock");
                        return;
                    };
                    if let Some(reads) = upgrades {
                        world.upgraded(*reads, &waiter, Some(&error));
                    }
                    match &error {
                        Error::Lost {
                            key,
                            loss: Loss::Released,
                            ..
                        } => world.told_released(me.both(), key),
                        Error::NotAcquired { key, .. } => {
                            world
                                .counts
                                .sometimes("an acquire that found the lock held to its end");
                            world.told_busy(&waiter, key);
                        }
                        error => {
                            world.counts.sometimes(name_of(error));
                            world.gave_up(&waiter, error);
                        }
                    }
                });
                None
            }
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if_any(|world| world.calls_end(self.id));
    }
}
