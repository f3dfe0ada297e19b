//! Steps on counters without grants.

use std::time::Duration;

use dlock::{LockClient, LockKey};

use super::habit::with_habit;
use super::holder::key_of;
use super::{Me, sleep};
use crate::plan::{Change, Habit, Kind, LatchStep, Millis};
use crate::words;
use crate::world::{if_any, with};

/// Takes permits without an owner, and releases them.
pub(super) async fn unowned(
    me: Me,
    client: &LockClient,
    (number, amount): (u32, u32),
    (wait, lasts): (Millis, Millis),
    habit: Option<Habit>,
) {
    let key = LockKey::from(format!("u{number}"));
    let total = with(|world| world.plan.unowned.get(number as usize).copied());
    let semaphore = client
        .unowned_semaphore(key.clone())
        .permits(total.unwrap_or(1))
        .wait(Duration::from_millis(wait));
    me.says(|| format!("wants {amount} unowned permits of {key}"));
    match with_habit(|| semaphore.acquire_many(amount), habit).await {
        None => return me.says(|| format!("drops the future of its acquire of {key}")),
        Some(Err(error)) => return me.says(|| format!("does not get {key}: {error}")),
        Some(Ok(())) => {}
    }
    me.says(|| format!("has taken {amount} of {key}"));
    with(|world| {
        world.counts.acquisitions += 1;
        world.counts.sometimes("unowned permits that were taken");
        world.took(me.both(), &key, amount);
    });
    sleep(lasts).await;
    with(|world| world.gives(&key, amount));
    let outcome = semaphore.release_many(amount).await;
    with(|world| world.gave(&key, amount, &outcome));
    if let Err(error) = outcome {
        me.says(|| format!("does not know that it gave {key} back: {error}"));
    }
}

/// Counted among those that wait for a latch, until it is dropped.
struct Waits(u64);

impl Drop for Waits {
    fn drop(&mut self) {
        if_any(|world| world.latch_waited(self.0, false));
    }
}

/// A step on a latch.
pub(super) async fn latch(me: Me, client: &LockClient, number: u32, step: LatchStep) {
    let key = LockKey::from(format!("c{number}"));
    let latch = client.latch(key.clone());
    let outcome = match step {
        LatchStep::SetCount(count) => {
            me.says(|| format!("sets latch {key} to {count}"));
            latch.try_set_count(count).await.map(drop)
        }
        LatchStep::CountDown => {
            me.says(|| format!("counts latch {key} down"));
            latch.count_down().await.map(drop)
        }
        LatchStep::Wait(most) => {
            me.says(|| format!("waits for latch {key}, for up to {}", words::millis(most)));
            let waits = Waits(with(|world| world.waits_for_latch(me.both(), key.clone())));
            let opened = latch.wait_for(Duration::from_millis(most)).await;
            if let Ok(is_open) = opened {
                with(|world| {
                    world.counts.sometimes("a wait for a latch");
                    world.latch_waited(waits.0, is_open);
                });
            }
            opened.map(drop)
        }
    };
    if let Err(error) = outcome {
        me.says(|| format!("fails at latch {key}: {error}"));
    }
}

/// Changes how many permits a semaphore has.
pub(super) async fn change(me: Me, client: &LockClient, semaphore: u32, change: Change) {
    let key = key_of(Kind::Permit, semaphore);
    me.says(|| words::change(&key, change));
    let semaphore = client.semaphore(key);
    let outcome = match change {
        Change::Set(total) => semaphore.set_permits(total).await.map(drop),
        Change::Add(permits) => semaphore.add_permits(permits).await.map(drop),
        Change::Remove(permits) => semaphore.remove_permits(permits).await.map(drop),
    };
    match outcome {
        Ok(()) => with(|world| world.counts.sometimes("a semaphore whose permits were changed")),
        Err(error) => me.says(|| format!("cannot: {error}")),
    }
}
