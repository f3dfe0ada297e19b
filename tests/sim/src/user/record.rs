//! Users that claim records themselves.

use std::time::Duration;

use dlock::LockClient;
use dlock::record::{ClaimReply, ClaimRequest, ClaimToken, OnOrphan, OwnerReply, RecordKey, Records};
use dlock::store::StoreError;
use futures_util::FutureExt;
use tokio::time::{Instant, timeout};

use super::habit::with_habit;
use super::{Me, OnPurpose, sleep};
use crate::check::record::Asker;
use crate::plan::{Habit, Millis, record};
use crate::world::{if_any, with};

/// How often a step is sent that has no reply.
const TRIES: u32 = 4;
/// Between two tries.
const PAUSE: Millis = 20;

/// A caller, until it is dropped.
pub(super) struct Asks {
    pub(super) id: u64,
    pub(super) since: Millis,
}

impl Asks {
    pub(super) fn begin(me: Me, record: String, waits: bool) -> Asks {
        with(|world| {
            let asker = Asker {
                process: me.process,
                user: me.user,
                record,
                waits,
                since: world.now,
            };
            let since = world.now;
            let id = world.begins_to_ask(asker);
            Asks { id, since }
        })
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        if_any(|world| world.asks_no_longer(self.id));
    }
}

/// Work under a claim, until it is dropped.
pub(super) struct Effect(pub(super) u64);

impl Drop for Effect {
    fn drop(&mut self) {
        if_any(|world| world.effect_ends(self.0));
    }
}

/// The outcome of a claim.
enum Asked {
    Owned {
        attempt: u32,
        fence: u64,
        /// The lease counts from then at the latest.
        sent: Instant,
    },
    Told(Vec<u8>),
    Nothing,
}

/// A record that one user asks for.
struct Asking<'a> {
    me: Me,
    records: &'a Records,
    task: &'a record::Record,
    lease: Duration,
    retention: Duration,
    name: String,
    request: ClaimRequest,
}

pub(super) async fn record(me: Me, client: &LockClient, task: &record::Record) {
    let (Ok(records), Some(common)) = (client.records(), with(|world| world.plan.records)) else {
        return;
    };
    let name = format!("r{}", task.key);
    let key = RecordKey::new(&name).expect("a letter and digits");
    let (lease, retention) = (
        Duration::from_millis(common.lease),
        Duration::from_millis(common.retention),
    );
    for _ in 0..=task.retries {
        // Each time with a new token: an old one was released.
        let token = ClaimToken::new();
        let mut request = ClaimRequest::new(key.clone(), token, [task.variant; 32], lease, retention);
        if common.leaves_orphans {
            request.on_orphan = OnOrphan::Leave;
        }
        let asking = Asking {
            me,
            records: &records,
            task,
            lease,
            retention,
            name: name.clone(),
            request,
        };
        let waits = task.wait.is_some() && !matches!(task.habit, Some(Habit::PollsNot { .. }));
        let asks = Asks::begin(me, name.clone(), waits);
        let asked = with_habit(|| asking.ask(), task.habit).await;
        let since = asks.since;
        drop(asks);
        match asked {
            Some(Asked::Owned { attempt, fence, sent }) => return asking.work((attempt, fence), sent).await,
            Some(Asked::Told(result)) => {
                return with(|world| world.is_told_again((me.process, me.user), &name, since, &result));
            }
            Some(Asked::Nothing) => {}
            None => {
                with(|world| world.counts.sometimes("a claim that was dropped"));
                // Taken back, or left to its lease.
                if task.retries.is_multiple_of(2) {
                    let _ = records.release(&asking.request.key, &asking.request.token).await;
                }
            }
        }
        sleep(PAUSE).await;
    }
}

impl Asking<'_> {
    async fn ask(&self) -> Asked {
        let until = Instant::now() + Duration::from_millis(self.task.wait.unwrap_or_default());
        let mut watch = None;
        let mut failures = 0;
        loop {
            let sent = Instant::now();
            match self.records.claim(self.request.clone()).await {
                Ok(ClaimReply::Claimed { attempt, fence }) => return Asked::Owned { attempt, fence, sent },
                Ok(ClaimReply::Completed { response }) => return Asked::Told(response),
                Ok(ClaimReply::InProgress { remaining, .. }) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Asked::Nothing;
                    }
                    let watch = watch.get_or_insert_with(|| self.records.watch(&self.request.key));
                    let look = remaining.min(self.lease).max(Duration::from_millis(10));
                    let _ = timeout(look.min(left), watch.changed()).await;
                }
                Ok(_) => return Asked::Nothing,
                Err(error) => {
                    failures += 1;
                    if failures >= TRIES {
                        self.me
                            .says(|| format!("does not get record {}: {error}", self.name));
                        let ClaimRequest { key, token, .. } = &self.request;
                        let _ = self.records.release(key, token).await;
                        return Asked::Nothing;
                    }
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn work(&self, claimed: (u32, u64), sent: Instant) {
        let ClaimRequest { key, token, .. } = &self.request;
        let end = self.task.end;
        if end == record::RecordEnd::Release {
            let released = self.settle(|| self.records.release(key, token)).await;
            return self
                .me
                .says(|| format!("gives record {} back: {released:?}", self.name));
        }
        let careless = self.task.careless;
        let effect = with(|world| {
            let me = (self.me.process, self.me.user);
            world.checks.records.name(key, &self.name);
            // An owner that learns of its claim late may have no time left to extend it.
            let extended = !careless && sent.elapsed() <= self.lease / 3;
            Effect(world.effect_begins(me, (key, token), claimed, extended))
        });
        let work = sleep(self.task.work);
        if careless {
            work.await;
        } else {
            let lost = tokio::select! {
                biased;
                () = self.extend(sent) => true,
                () = work => false,
            };
            if lost {
                with(|world| world.counts.sometimes("an owner that heard of its loss"));
                return;
            }
        }
        if end == record::RecordEnd::Panic {
            self.me.says(|| "panics".to_owned());
            std::panic::panic_any(OnPurpose);
        }
        let result = format!(
            "{} {} by p{}/u{}",
            effect.0, self.name, self.me.process, self.me.user
        );
        let result = result.into_bytes();
        with(|world| world.effect_brings(effect.0, &result));
        drop(effect);
        let complete = |response: Vec<u8>| {
            let step = move || {
                self.records
                    .complete(key, token, response.clone(), self.retention)
            };
            self.settle(step)
        };
        match end {
            record::RecordEnd::Complete => drop(complete(result).await),
            record::RecordEnd::CompleteTwice => {
                if complete(result).await.is_some() {
                    let _ = complete(b"another result".to_vec()).await;
                }
            }
            record::RecordEnd::CompleteLate => {
                tokio::time::sleep(self.lease * 2).await;
                let _ = complete(result).await;
            }
            record::RecordEnd::Abandon => drop(self.settle(|| self.records.abandon(key, token)).await),
            record::RecordEnd::Leave => drop(
                self.records
                    .complete(key, token, result, self.retention)
                    .now_or_never(),
            ),
            record::RecordEnd::Release | record::RecordEnd::Panic => {}
        }
    }

    /// Extends the claim, which was sent at `claimed`, until it is lost.
    async fn extend(&self, claimed: Instant) {
        let ClaimRequest { key, token, .. } = &self.request;
        let third = self.lease / 3;
        let mut pause = third.saturating_sub(claimed.elapsed());
        loop {
            tokio::time::sleep(pause).await;
            let sent = Instant::now();
            let step = self.records.extend(key, token, self.lease, self.retention);
            pause = match timeout(third, step).await {
                Ok(Ok(OwnerReply::NotOwner)) => return,
                Ok(Ok(_)) => third.saturating_sub(sent.elapsed()),
                Ok(Err(_)) | Err(_) => Duration::from_millis(PAUSE),
            };
        }
    }

    /// Sends a step until there is a reply.
    async fn settle<F>(&self, step: impl Fn() -> F) -> Option<OwnerReply>
    where
        F: Future<Output = Result<OwnerReply, StoreError>>,
    {
        for _ in 0..TRIES {
            match step().await {
                Ok(reply) => return Some(reply),
                Err(_) => sleep(PAUSE).await,
            }
        }
        None
    }
}
