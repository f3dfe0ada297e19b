//! Users of `LockClient::once`: work that is done once, and once in each slot of time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use dlock::record::OnOrphan;
use dlock::{LockClient, OnFailure, Once, OnceClaim, OnceError, OnceReply, SlotReply};

use super::habit::with_habit;
use super::record::{Asks, Effect};
use super::{Me, OnPurpose, sleep};
use crate::plan::record::{self, OnceEnd, Slots};
use crate::plan::{Habit, Millis};
use crate::store::BEGINS;
use crate::world::with;

/// Between two tries.
const PAUSE: Millis = 20;

/// What a call came to.
enum Told {
    /// By the work of this very call.
    First(String),
    Again(String),
    Failed,
    /// The work was dropped.
    Lost,
    Nothing,
}

struct Caller<'a> {
    me: Me,
    task: &'a record::Once,
    name: String,
    once: Once,
    period: Millis,
    /// The effect that its work has, while there is one.
    effect: AtomicU64,
}

pub(super) async fn once(me: Me, client: &LockClient, task: &record::Once) {
    let Some(common) = with(|world| world.plan.records) else {
        return;
    };
    let letter = if task.slots.is_some() { "e" } else { "o" };
    let name = format!("{letter}{}", task.key);
    let once = configured(client, &name, &common, task);
    let record = once.record_key().expect("a letter and digits");
    with(|world| world.checks.records.name(&record, &name));
    let caller = Caller {
        me,
        task,
        name,
        once,
        period: common.period,
        effect: AtomicU64::new(0),
    };
    match task.slots {
        Some(Slots::Next(many)) => caller.loops(many).await,
        _ => caller.asks().await,
    }
}

/// All callers of one name agree on what is done with failures.
fn configured(client: &LockClient, name: &str, common: &record::Records, task: &record::Once) -> Once {
    let millis = Duration::from_millis;
    let keep = common.retention.max(2 * common.lease).max(2 * common.period);
    let mut once = client.once(name).lease(millis(common.lease)).keep(millis(keep));
    if let Some(wait) = task.wait {
        once = once.wait(millis(wait));
    }
    if common.leaves_orphans {
        once = once.on_orphan(OnOrphan::Leave);
    }
    once.on_failure(match task.key % 3 {
        0 => OnFailure::RunAgain,
        1 if !common.leaves_orphans => OnFailure::AtMost(2),
        _ => OnFailure::Keep,
    })
}

impl Caller<'_> {
    /// Asks until there is an answer.
    async fn asks(&self) {
        for _ in 0..=self.task.retries {
            let waits = self.task.wait.is_some() && self.task.slots.is_none() && self.polls();
            let asks = Asks::begin(self.me, self.name.clone(), waits);
            self.me.says(|| format!("asks for the work of {}", self.name));
            let told = with_habit(|| self.call(asks.id), self.task.habit).await;
            let since = asks.since;
            drop(asks);
            match told {
                Some(told) => {
                    if self.is_answer(told, since) {
                        return;
                    }
                }
                None => with(|world| world.counts.sometimes("a call for work that was dropped")),
            }
            sleep(PAUSE).await;
        }
    }

    fn polls(&self) -> bool {
        !matches!(self.task.habit, Some(Habit::PollsNot { .. }))
    }

    async fn call(&self, asks: u64) -> Told {
        self.effect.store(0, Ordering::Relaxed);
        let period = Duration::from_millis(self.period);
        let work = async |claim| self.work(asks, claim).await;
        match self.task.slots {
            None => of_once(self.once.run(work).await),
            Some(Slots::Named(periods)) => {
                let begun = u64::try_from(BEGINS.as_millis()).unwrap_or_default() + with(|world| world.now);
                let slot = (begun / self.period).saturating_add_signed(periods) * self.period;
                let slot = UNIX_EPOCH + Duration::from_millis(slot);
                of_slot(self.once.clone().slot(slot).run(work).await)
            }
            Some(_) => of_slot(self.once.clone().every(period).run(work).await),
        }
    }

    /// By the loop of the library.
    async fn loops(&self, many: u32) {
        let period = Duration::from_millis(self.period);
        let mut slots = self.once.clone().every(period).slots();
        for _ in 0..many {
            let asks = Asks::begin(self.me, self.name.clone(), false);
            let told = of_slot(slots.next(async |claim| self.work(asks.id, claim).await).await);
            let since = asks.since;
            drop(asks);
            self.is_answer(told, since);
        }
    }

    /// Judges an answer; whether there is nothing more to ask for.
    fn is_answer(&self, told: Told, since: Millis) -> bool {
        let who = self.me.both();
        with(|world| match told {
            Told::First(result) => {
                let own = self.effect.load(Ordering::Relaxed);
                world.is_told_first(who, &self.name, own, result.as_bytes());
                true
            }
            Told::Again(result) => {
                world.is_told_again(who, &self.name, since, result.as_bytes());
                true
            }
            Told::Failed => {
                world.counts.sometimes("work that has failed for good");
                true
            }
            Told::Lost => {
                world.counts.sometimes("work that was dropped with its claim");
                // Without polls it may come too late to renew the claim.
                if self.polls() {
                    world.once_lost(who, &self.name, since);
                }
                false
            }
            Told::Nothing => false,
        })
    }

    async fn work(&self, asks: u64, claim: OnceClaim) -> Result<String, &'static str> {
        let Me { process, user } = self.me;
        let effect = with(|world| {
            world.asker_works(asks);
            let told = (claim.attempt(), claim.fencing_token());
            let effect =
                world.effect_begins((process, user), (claim.record_key(), claim.token()), told, true);
            world.once_begins(effect, claim.slot());
            world.counts.sometimes(match claim.slot() {
                Some(_) => "a slot that was begun",
                None => "work that is done once, begun",
            });
            Effect(effect)
        });
        self.effect.store(effect.0, Ordering::Relaxed);
        sleep(self.task.work).await;
        with(|world| world.once_goes_on(effect.0));
        match self.task.end {
            OnceEnd::Fails => return Err("it failed"),
            OnceEnd::Panics => std::panic::panic_any(OnPurpose),
            OnceEnd::Returns => {}
        }
        let result = format!("{} {} by p{process}/u{user}", effect.0, self.name);
        with(|world| world.effect_brings(effect.0, result.as_bytes()));
        Ok(result)
    }
}

fn of_once(reply: Result<OnceReply<String>, OnceError<&'static str>>) -> Told {
    match reply {
        Ok(OnceReply::Ran(result) | OnceReply::Unrecorded(result, _)) => Told::First(result),
        Ok(OnceReply::Earlier(result)) => Told::Again(result),
        Ok(_) => Told::Nothing,
        Err(OnceError::Failed { .. }) => Told::Failed,
        Err(OnceError::Lost { .. }) => Told::Lost,
        Err(_) => Told::Nothing,
    }
}

fn of_slot(reply: Result<SlotReply<String>, OnceError<&'static str>>) -> Told {
    match reply {
        Ok(SlotReply::Ran(result) | SlotReply::Unrecorded(result, _)) => Told::First(result),
        Ok(SlotReply::Earlier(result)) => Told::Again(result),
        Ok(_) => Told::Nothing,
        Err(OnceError::Failed { .. }) => Told::Failed,
        Err(OnceError::Lost { .. }) => Told::Lost,
        Err(_) => Told::Nothing,
    }
}
