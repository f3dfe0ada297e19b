//! What users do while they hold something.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dlock::store::Kind;
use dlock::{Held, LockClient, LockGuard};
use futures_util::FutureExt;
use futures_util::future::join_all;

use super::hold::{Waits, hold};
use super::holder::{Holder, keys_of, kind_of, lock_of};
use super::{AtWork, Me, OnPurpose, sleep, threads};
use crate::check::{Begins, Frame};
use crate::plan::{Call, End, Lock, Millis, Work};
use crate::words;
use crate::world::{if_any, with};

/// The sections of a hold, one for each of its keys, until it is dropped: before the guard is.
pub(super) struct Inside(Vec<u64>);

impl Inside {
    fn begin(begins: Begins, task: &Lock, held: &Held, around: &mut Vec<Frame>) -> Inside {
        let frames = with(|world| {
            let begin = |key| world.section_begins(begins, key, held.clone(), around);
            keys_of(task).map(begin).collect::<Vec<_>>()
        });
        Inside::of(frames, around)
    }

    fn of(frames: Vec<Frame>, around: &mut Vec<Frame>) -> Inside {
        let all = frames.iter().map(|frame| frame.section).collect();
        around.extend(frames);
        Inside(all)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        for section in self.0.drain(..) {
            if_any(|world| world.section_ends(section));
        }
    }
}

/// A user inside of its lock.
struct Worker<'a> {
    me: Me,
    client: &'a LockClient,
    task: &'a Lock,
    kind: Kind,
    /// The token of the write lock that this read replaces.
    stands_for: Option<u64>,
    holder: &'a Holder,
    sections: &'a [u64],
    /// With its own.
    frames: &'a [Frame],
}

fn begins(me: Me, task: &Lock, kind: Kind, stands_for: Option<u64>) -> Begins {
    Begins {
        who: me.both(),
        kind,
        amount: 1 + task.more_permits,
        stands_for,
        is_second: false,
    }
}

/// Works, and releases its holds.
pub(super) async fn work(
    me: Me,
    client: LockClient,
    task: Arc<Lock>,
    holder: Holder,
    mut frames: Vec<Frame>,
) {
    let around = frames.len();
    let begins = begins(me, &task, kind_of(task.kind), None);
    let inside = Inside::begin(begins, &task, &holder.held(), &mut frames);
    if let Holder::One(_) = &holder {
        with(|world| {
            inside
                .0
                .iter()
                .for_each(|id| world.has_limits(*id, task.min_hold, task.max_hold));
        });
    }
    let worker = Worker {
        me,
        client: &client,
        task: &task,
        kind: kind_of(task.kind),
        stands_for: None,
        holder: &holder,
        sections: &inside.0,
        frames: &frames,
    };
    worker.steps(&task.work).await;
    me.says(|| words::end(holder.held().key(), task.end));
    match (task.end, holder) {
        (End::Panic, _holder) => {
            drop(inside);
            std::panic::panic_any(OnPurpose)
        }
        (_, Holder::Frame(_)) => drop(inside),
        (End::Downgrade, Holder::One(guard)) if guard_writes(&task) => {
            frames.truncate(around);
            reads_on(me, &client, &task, (guard, inside), frames).await;
        }
        (End::GivenAway, Holder::One(guard)) => {
            with(|world| world.counts.sometimes("a guard that another thread dropped"));
            let task = waits_a_second(&task);
            let waits = Waits::begin(me, &task, &frames);
            let again = guard.frame().wrap(lock_of(&client, &task).acquire());
            let given = threads::give(inside, guard);
            drop(waits.end(Some(again.await)));
            drop(given);
        }
        (End::ReleaseTwice, Holder::One(guard)) => {
            let second = guard.reenter();
            release(me, Holder::One(guard)).await;
            drop(inside);
            if let Ok(second) = second {
                with(|world| world.counts.sometimes("a lock that was released twice"));
                release(me, Holder::One(second)).await;
            }
        }
        (End::Elsewhere(after), holder) => {
            with(|world| world.counts.sometimes("a guard that another task dropped"));
            let at_work = AtWork::begin();
            tokio::spawn(async move {
                let _at_work = at_work;
                sleep(after).await;
                drop(inside);
                drop(holder);
            });
        }
        (End::ReleaseUnawaited, holder) => {
            drop(inside);
            drop(holder.release().now_or_never());
        }
        (End::Drop, holder) => {
            drop(inside);
            drop(holder);
        }
        (_, holder) => {
            drop(inside);
            release(me, holder).await;
        }
    }
}

/// Replaces a write lock by a read lock, and works on under that.
async fn reads_on(
    me: Me,
    client: &LockClient,
    task: &Lock,
    (guard, writes): (LockGuard, Inside),
    mut frames: Vec<Frame>,
) {
    let write = guard.fencing_token();
    let guard = match guard.downgrade().await {
        Ok(guard) => guard,
        Err(error) => return me.says(|| format!("does not read on: {error}")),
    };
    let begins = begins(me, task, Kind::Read, Some(write));
    let reads = Inside::begin(begins, task, &guard.held(), &mut frames);
    drop(writes);
    let holder = Holder::One(guard);
    let worker = Worker {
        me,
        client,
        task,
        kind: Kind::Read,
        stands_for: Some(write),
        holder: &holder,
        sections: &reads.0,
        frames: &frames,
    };
    worker.steps(&task.reading).await;
    drop(reads);
    release(me, holder).await;
}

/// The lock of a task, for a call that waits a second for that alone.
fn waits_a_second(task: &Lock) -> Lock {
    Lock {
        also: Vec::new(),
        once: false,
        habit: None,
        wait: Some(1_000),
        ..task.clone()
    }
}

fn guard_writes(task: &Lock) -> bool {
    kind_of(task.kind) == Kind::Write
}

async fn release(me: Me, holder: Holder) {
    let (key, left) = match &holder {
        Holder::One(guard) => (Some(guard.key().clone()), guard.remaining()),
        _ => (None, Duration::ZERO),
    };
    let (began, held) = (with(|world| world.now), holder.held());
    let outcome = holder.release().await;
    if outcome.is_ok() {
        crate::check::grants::released(me.both(), &held);
    }
    if let Err(error) = outcome {
        me.says(|| format!("learns that its release failed: {error}"));
        if let Some(key) = key.filter(|_| error.is_lost()) {
            with(|world| world.release_lost(me.both(), &key, (began, left)));
        }
    }
}

impl Worker<'_> {
    /// Does one after the other.
    fn steps<'a>(&'a self, all: &'a [Work]) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        Box::pin(async move {
            for work in all {
                self.step(work).await;
            }
        })
    }

    fn hold(&self, lock: &Lock) -> impl Future<Output = ()> + Send + 'static + use<> {
        hold(self.me, self.client.clone(), lock.clone(), self.frames.to_vec())
    }

    async fn step(&self, work: &Work) {
        match work {
            Work::Sleep(time) => sleep(*time).await,
            Work::Write => with(|world| {
                for section in self.sections {
                    world.writes(*section);
                }
            }),
            Work::Ensure(least) => {
                let _ = self.holder.held().ensure(Duration::from_millis(*least)).await;
            }
            Work::Ask => {
                let held = self.holder.held();
                let was_lost = with(|world| world.is_lost(self.me.process, &held));
                let state = held.state();
                with(|world| world.answered(self.me.both(), &held, was_lost, state));
            }
            Work::Nest(lock) => {
                self.holder.scope(self.hold(lock)).await;
            }
            Work::Join(locks) => {
                let branches = locks.iter().map(|lock| self.hold(lock));
                self.holder.scope(join_all(branches)).await;
            }
            Work::Spawn(lock) => {
                let spawned = hold(self.me, self.client.clone(), Lock::clone(lock), Vec::new());
                self.holder.scope(async { spawn(spawned) }).await;
            }
            Work::Carry(lock) => {
                with(|world| world.counts.sometimes("a frame that was carried into a task"));
                // Permits have none of their own.
                let carried = self.hold(lock);
                self.holder
                    .scope(async { spawn(dlock::scope::current().wrap(carried)) })
                    .await;
            }
            Work::Run(works) => {
                let outcome = self.holder.run(self.steps(works)).await;
                if let Some(Err(_)) = outcome {
                    with(|world| world.counts.sometimes("work that was dropped with its lock"));
                }
            }
            Work::Reenter(lasts) => self.reenter(*lasts),
            Work::Cross(lock) => self.cross(lock).await,
        }
    }

    /// A second lock, inside; and concurrently a task that wants the second lock too, and is only in the frame of the
    /// first lock.
    async fn cross(&self, lock: &Lock) {
        let Holder::One(guard) = self.holder else { return };
        let task = waits_a_second(lock);
        let waits = Waits::begin(self.me, &task, self.frames);
        let outcome = self.holder.scope(lock_of(self.client, &task).acquire()).await;
        let Some(inner) = waits.end(outcome) else { return };
        let Ok(second) = guard.reenter() else { return };
        with(|world| world.counts.sometimes("a task in one of two frames"));
        let begins = Begins {
            who: self.me.both(),
            kind: kind_of(lock.kind),
            amount: 1,
            stands_for: None,
            is_second: false,
        };
        let mut frames = self.frames.to_vec();
        let simple = Lock {
            also: Vec::new(),
            habit: None,
            call: Call::Acquire,
            // Limits are those of the first hold where the keys are the same.
            min_hold: None,
            max_hold: None,
            wait: Some(1_000),
            work: vec![Work::Sleep(3)],
            end: End::Release,
            ..lock.clone()
        };
        let inside = Inside::begin(begins, &simple, &inner.held(), &mut frames);
        let other = self.hold(&simple);
        let inside_second = self.inside_second(&second.held());
        inner
            .scope(async {
                let framed = second.scope(other);
                spawn(async move {
                    framed.await;
                    drop(inside_second);
                    drop(second);
                });
            })
            .await;
        sleep(5).await;
        drop(inside);
        let _ = inner.release().await;
    }

    /// A second guard, in another task.
    fn reenter(&self, lasts: Millis) {
        let Holder::One(guard) = self.holder else { return };
        let Ok(second) = guard.reenter() else { return };
        with(|world| world.counts.sometimes("a second guard in another task"));
        let inside = self.inside_second(&second.held());
        spawn(async move {
            sleep(lasts).await;
            drop(inside);
            drop(second);
        });
    }

    /// The sections of a second guard, which another task has.
    fn inside_second(&self, held: &Held) -> Inside {
        let begins = Begins {
            who: self.me.both(),
            kind: self.kind,
            amount: 1,
            stands_for: self.stands_for,
            is_second: true,
        };
        Inside::begin(begins, self.task, held, &mut self.frames.to_vec())
    }
}

/// In a task of its own, which is waited for by the world alone.
fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    let at_work = AtWork::begin();
    tokio::spawn(async move {
        let _at_work = at_work;
        future.await;
    });
}
