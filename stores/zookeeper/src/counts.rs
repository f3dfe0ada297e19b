//! Counters: the total of a semaphore, which is Curator's `SharedCount`, and latches.
//!
//! A step reads the numbers and changes them in one `multi` that checks their versions, and that leaves a node with the id
//! and the reply. So a copy of it, whenever it comes, finds that node or other versions and changes nothing. The node
//! belongs to the session: once that has expired, the outcome of a step without a reply stays unknown.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::{Kind, Outcome, Reason, StoreError};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::core::{Core, data, key_taken, names};
use crate::grants::{Own, State};
use crate::layout::{DONE, done_of, latch_of, leases_of, queue_of, semaphore_of, total_of};
use crate::names::{Counter, Mark, family_beside};
use crate::permits::{Numbers, numbers};
use crate::session::{Answer, Epoch, NoReply, refused};
use crate::wire::{Change, Code, Mode, Reply, Request};

/// The most permits: those of a `SharedCount`.
const MOST: i64 = i32::MAX as i64;

/// The most leases that are deleted together with the semaphore.
const MOST_LEASES: usize = 1000;

/// The longest pause before a step that met another one is tried again.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// What a step reads.
struct Seen {
    numbers: Numbers,
    /// The names of the leases before the numbers were read, of a semaphore that is drained or deleted.
    leases: Vec<String>,
    /// The count of the latch and the version of its node.
    latch: Option<(u64, i32)>,
    /// The family of other data of the key.
    taken: Option<&'static str>,
}

/// What a step does.
struct Effect {
    reply: CounterReply,
    changes: Vec<Change>,
}

impl Effect {
    fn nothing(reply: CounterReply) -> Effect {
        let changes = Vec::new();
        Effect { reply, changes }
    }
}

/// A step on a counter.
struct Count<'a> {
    core: &'a Core,
    /// The node of the key.
    name: &'a str,
    request: &'a CounterRequest,
}

impl Core {
    /// Runs a step; its queue is that of the acquires of permits.
    pub(crate) async fn count(
        &self,
        queue: Arc<str>,
        request: CounterRequest,
    ) -> Result<CounterReply, StoreError> {
        let name = semaphore_of(&queue).unwrap_or(&queue);
        let count = Count {
            core: self,
            name,
            request: &request,
        };
        let until = Instant::now() + self.session.config().timeout;
        let mut pause = Duration::from_millis(1);
        loop {
            if let Some(reply) = count.once().await? {
                return Ok(reply);
            }
            if Instant::now() > until {
                let why = "others changed the counter again and again";
                return Err(StoreError::not_done(Reason::RefusedForNow, why));
            }
            sleep(pause.mul_f64(fastrand::f64())).await;
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

impl Count<'_> {
    fn path(&self, name: &str) -> String {
        self.core.path(name)
    }

    fn done(&self) -> String {
        self.path(&done_of(self.name, self.request.id))
    }

    /// Reads the numbers and changes them; `None` if others have changed them in between.
    async fn once(&self) -> Result<Option<CounterReply>, StoreError> {
        let seen = match self.look().await? {
            Ok(seen) => seen,
            Err(reply) => return Ok(Some(reply)),
        };
        let step = self.request.step;
        if let Some(family) = seen.taken.filter(|_| !step.is_look()) {
            return Err(key_taken(family));
        }
        if !self.is_prepared(&seen).await? {
            return Ok(None);
        }
        let Effect { reply, mut changes } = self.effect(&seen)?;
        if changes.is_empty() {
            self.tidies().await;
            return Ok(Some(reply));
        }
        if self
            .core
            .steps
            .began_before(self.request.id, self.core.session.epoch())
        {
            let why = "the session with ZooKeeper expired before it told whether this step was carried out";
            return Err(StoreError::unknown(why));
        }
        let creates = changes.iter().any(|change| {
            let mode = Mode::Persistent;
            matches!(change, Change::Create { mode: of, .. } if *of == mode)
        });
        changes.push(Change::Create {
            path: self.done(),
            data: written(reply),
            mode: Mode::Ephemeral,
        });
        if !self.change(changes).await? {
            return Ok(None);
        }
        if creates
            && self
                .core
                .other_family(self.name, self.counter())
                .await
                .is_ok_and(|family| family.is_some())
        {
            return self.undo().await;
        }
        self.tidies().await;
        Ok(Some(reply))
    }

    /// Removes what is empty of a semaphore that was deleted.
    async fn tidies(&self) {
        if self.request.step == CounterStep::DeletePermits {
            self.core.tidy_semaphore(self.name).await;
        }
    }

    /// Makes that one request can do the step. `false` if it must look again.
    async fn is_prepared(&self, seen: &Seen) -> Result<bool, StoreError> {
        let core = self.core;
        match self.request.step {
            CounterStep::DeletePermits if seen.leases.len() > MOST_LEASES => {
                let dir = self.path(&leases_of(self.name));
                let deletes = seen
                    .leases
                    .iter()
                    .map(|name| core.delete_path(format!("{dir}/{name}")));
                for deleted in join_all(deletes).await {
                    deleted?;
                }
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    fn counter(&self) -> Counter {
        match self.request.step.kind() {
            Kind::Latch => Counter::Latch,
            _ => Counter::Semaphore,
        }
    }

    /// Reads what the step depends on, or the reply of its first time.
    async fn look(&self) -> Result<Result<Seen, CounterReply>, StoreError> {
        let core = self.core;
        let read = |path| Request::Data { path, watch: false };
        let [leases, total] = core.number_requests(self.name);
        let sync = Request::Sync {
            path: self.path(self.name),
        };
        let requests = [sync, read(self.done()), core.children(self.name, false)];
        let [sync, done, beside] = core.session.send(requests);
        let lists = matches!(self.request.step, CounterStep::Drain | CounterStep::DeletePermits);
        let names_of_leases = lists.then(|| core.session.ask(core.children(&leases_of(self.name), false)));
        let [leases, total, latch] =
            core.session
                .send([leases, total, read(self.path(&latch_of(self.name)))]);
        if let Err(code) = sync.answer().await?.reply {
            return Err(refused(code, "to catch up"));
        }
        if let Some((reply, _)) = data(done).await? {
            let reply =
                read_reply(&reply).ok_or_else(|| StoreError::unknown("the reply of a step is garbled"))?;
            return Ok(Err(reply));
        }
        let taken = family_beside(&names(beside).await?, Some(self.counter()));
        let names_of_leases = match names_of_leases {
            Some(children) => names(children).await?,
            None => Vec::new(),
        };
        let numbers = numbers(leases, total).await?;
        let latch = match data(latch).await? {
            Some((count, stat)) => {
                let count = std::str::from_utf8(&count)
                    .ok()
                    .and_then(|count| count.parse().ok());
                let garbled = || StoreError::not_done(Reason::Refused, "the node of a latch has no count");
                Some((count.ok_or_else(garbled)?, stat.version))
            }
            None => None,
        };
        let is_in_use = match self.counter() {
            Counter::Latch => latch.is_some(),
            Counter::Semaphore => numbers.is_in_use(),
        };
        let taken = taken.filter(|_| !is_in_use);
        Ok(Ok(Seen {
            numbers,
            leases: names_of_leases,
            latch,
            taken,
        }))
    }

    fn effect(&self, seen: &Seen) -> Result<Effect, StoreError> {
        let Numbers { held, total, .. } = seen.numbers;
        let is = total.map_or(0, |(total, _)| total);
        let permits = |total: Option<i64>| CounterReply::Permits {
            free: total.map(|total| total - held),
            held: u64::try_from(held).unwrap_or(0),
        };
        let sets = |total: i64, reply| match i32::try_from(total) {
            Ok(total) => self.sets_total(seen, total, reply),
            Err(_) => Effect::nothing(CounterReply::TooMany),
        };
        Ok(match self.request.step {
            CounterStep::Permits => Effect::nothing(permits(total.map(|(total, _)| total))),
            CounterStep::SetPermits {
                total: new,
                only_unset,
            } => {
                let stays = total.is_some_and(|(total, _)| only_unset || total == i64::from(new));
                match stays {
                    true => Effect::nothing(CounterReply::Done(false)),
                    false => sets(i64::from(new), CounterReply::Done(true)),
                }
            }
            CounterStep::AddPermits { by, unowned: false } => {
                let new = is.saturating_add(by);
                if by < 0 && (total.is_none() || new < 0) {
                    let is = u64::try_from(is).unwrap_or(0);
                    return Ok(Effect::nothing(CounterReply::TooFew { is }));
                }
                match new > MOST {
                    true => Effect::nothing(CounterReply::TooMany),
                    false => sets(new, permits(Some(new))),
                }
            }
            CounterStep::Drain => {
                let free = (is - held).max(0);
                let reply = CounterReply::Number(u64::try_from(free).unwrap_or(0));
                match free {
                    0 => Effect::nothing(reply),
                    _ => {
                        let mut drains = sets(is - free, reply);
                        drains.changes.extend(self.no_acquire(seen));
                        drains
                    }
                }
            }
            CounterStep::DeletePermits => self.deletes_permits(seen),
            CounterStep::Count => {
                Effect::nothing(CounterReply::Number(seen.latch.map_or(0, |(count, _)| count)))
            }
            CounterStep::SetCount { count } => match seen.latch {
                Some(_) => Effect::nothing(CounterReply::Done(false)),
                None => Effect {
                    reply: CounterReply::Done(true),
                    changes: vec![Change::Create {
                        path: self.path(&latch_of(self.name)),
                        data: count.to_string().into_bytes(),
                        mode: Mode::Persistent,
                    }],
                },
            },
            CounterStep::CountDown => match seen.latch {
                None => Effect::nothing(CounterReply::TooFew { is: 0 }),
                Some((count, version)) if count > 1 => Effect {
                    reply: CounterReply::Number(count - 1),
                    changes: vec![Change::Set {
                        path: self.path(&latch_of(self.name)),
                        data: (count - 1).to_string().into_bytes(),
                        version,
                    }],
                },
                Some((_, version)) => self.deletes_latch(version, CounterReply::Number(0)),
            },
            CounterStep::DeleteLatch => match seen.latch {
                None => Effect::nothing(CounterReply::Done(false)),
                Some((_, version)) => self.deletes_latch(version, CounterReply::Done(true)),
            },
            _ => {
                let message = "ZooKeeper has no permits without a holder";
                return Err(StoreError::not_done(Reason::Unsupported, message));
            }
        })
    }

    fn sets_total(&self, seen: &Seen, total: i32, reply: CounterReply) -> Effect {
        let (path, data) = (self.path(&total_of(self.name)), total.to_be_bytes().to_vec());
        let change = match seen.numbers.total {
            Some((_, version)) => Change::Set { path, data, version },
            None => Change::Create {
                path,
                data,
                mode: Mode::Persistent,
            },
        };
        Effect {
            reply,
            changes: vec![change],
        }
    }

    /// Changes that cannot be made if an acquire comes in between, without one of the leases that were there. They remove
    /// the empty parent of the leases.
    fn no_lease(&self, seen: &Seen) -> Vec<Change> {
        let path = self.path(&leases_of(self.name));
        let create = Change::Create {
            path: path.clone(),
            data: Vec::new(),
            mode: Mode::Container,
        };
        let is_missing = seen.numbers.leases.is_none();
        let creates = is_missing.then_some(create).into_iter();
        creates.chain([Change::Delete { path, version: -1 }]).collect()
    }

    /// Changes that cannot be made if an acquire of dlock comes in between.
    fn no_acquire(&self, seen: &Seen) -> Vec<Change> {
        let (Some(version), Some(lease)) = (seen.numbers.leases, seen.leases.first()) else {
            return self.no_lease(seen);
        };
        let parent = leases_of(self.name);
        // With this lease the parent is the same: servers remove an empty one, and another one may have that version too.
        let lease = Change::Check {
            path: self.core.path_of(&parent, lease),
            version: -1,
        };
        let path = self.path(&parent);
        vec![lease, Change::Check { path, version }]
    }

    fn deletes_permits(&self, seen: &Seen) -> Effect {
        let dir = self.path(&leases_of(self.name));
        let leases = seen.leases.iter().map(|name| Change::Delete {
            path: format!("{dir}/{name}"),
            version: -1,
        });
        let total = seen.numbers.total.map(|(_, version)| Change::Delete {
            path: self.path(&total_of(self.name)),
            version,
        });
        let mut changes: Vec<Change> = leases.chain(total).collect();
        if changes.is_empty() {
            return Effect::nothing(CounterReply::Done(false));
        }
        changes.extend(self.no_lease(seen));
        let reply = CounterReply::Done(true);
        Effect { reply, changes }
    }

    fn deletes_latch(&self, version: i32, reply: CounterReply) -> Effect {
        let path = self.path(&latch_of(self.name));
        Effect {
            reply,
            changes: vec![Change::Delete { path, version }],
        }
    }

    /// Makes the changes; `false` if none was made, because others have changed what was read.
    async fn change(&self, changes: Vec<Change>) -> Result<bool, StoreError> {
        let core = self.core;
        let creates: Vec<bool> = (changes.iter())
            .map(|change| matches!(change, Change::Create { .. }))
            .collect();
        let begun = core.session.epoch();
        let answer = core.session.ask(Request::Multi(changes)).answer().await;
        let Answer { reply, epoch } = match answer {
            Ok(answer) => answer,
            Err(NoReply::NotSent(error)) => return Err(error),
            Err(NoReply::Lost(epoch, error)) => return Err(self.unknown(epoch, error)),
        };
        let codes = match reply {
            Ok(Reply::Multi(codes)) => codes,
            Ok(_) => {
                return Err(self.unknown(begun, StoreError::unknown("the answer of another request came")));
            }
            Err(code) if code.is_unknown() => {
                return Err(self.unknown(epoch, refused(code, "to change a counter")));
            }
            Err(code) => return Err(refused(code, "to change a counter")),
        };
        match codes
            .iter()
            .position(|code| *code != Code::OK && *code != Code::ROLLED_BACK)
        {
            None => {
                self.is_done(epoch);
                Ok(true)
            }
            Some(failed) => match codes[failed] {
                // A parent is missing.
                Code::NO_NODE if creates[failed] => {
                    core.make_below(self.name, DONE).await?;
                    Ok(false)
                }
                Code::NO_NODE | Code::BAD_VERSION | Code::NODE_EXISTS | Code::NOT_EMPTY => Ok(false),
                code => Err(refused(code, "to change a counter")),
            },
        }
    }

    /// Records that the node of the step may exist, which is deleted once the step can come no more.
    fn is_done(&self, epoch: Epoch) {
        let own = Own {
            lock: queue_of(self.name),
            mark: Mark::draw(),
            epoch,
            state: State::Done,
            deadline: Instant::now() + self.request.repeated_for,
        };
        self.core.grants.insert(self.request.id, own);
    }

    fn unknown(&self, epoch: Epoch, mut error: StoreError) -> StoreError {
        self.core
            .steps
            .began(self.request.id, epoch, self.request.repeated_for);
        self.is_done(epoch);
        error.outcome = Outcome::Unknown;
        error
    }

    /// Removes a counter again that was created while another kind took the key.
    async fn undo(&self) -> Result<Option<CounterReply>, StoreError> {
        let path = match self.counter() {
            Counter::Latch => latch_of(self.name),
            Counter::Semaphore => total_of(self.name),
        };
        let remove = [path, done_of(self.name, self.request.id)].map(|name| Change::Delete {
            path: self.path(&name),
            // Others have not used it.
            version: 0,
        });
        let removed = self
            .core
            .session
            .ask(Request::Multi(remove.to_vec()))
            .answer()
            .await;
        let epoch = self.core.session.epoch();
        match removed
            .map_err(|no_reply| self.unknown(epoch, no_reply.into()))?
            .reply
        {
            Ok(Reply::Multi(codes)) if codes.iter().all(|code| *code == Code::OK) => Err(key_taken("a lock")),
            _ => Ok(None),
        }
    }
}

/// The reply of a step in its node.
fn written(reply: CounterReply) -> Vec<u8> {
    let text = match reply {
        CounterReply::Permits { free, held } => format!("permits {} {held}", free.unwrap_or_default()),
        CounterReply::Done(done) => format!("done {}", u8::from(done)),
        CounterReply::Number(number) => format!("number {number}"),
        // Nothing was changed.
        _ => String::new(),
    };
    text.into_bytes()
}

fn read_reply(data: &[u8]) -> Option<CounterReply> {
    let words: Vec<&str> = std::str::from_utf8(data).ok()?.split(' ').collect();
    match words[..] {
        ["permits", free, held] => Some(CounterReply::Permits {
            free: Some(free.parse().ok()?),
            held: held.parse().ok()?,
        }),
        ["done", done] => Some(CounterReply::Done(done == "1")),
        ["number", number] => Some(CounterReply::Number(number.parse().ok()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_of_a_change_is_read_as_it_was_written() {
        for reply in [
            CounterReply::Permits {
                free: Some(-3),
                held: 7,
            },
            CounterReply::Done(true),
            CounterReply::Number(u64::MAX),
        ] {
            assert_eq!(read_reply(&written(reply)), Some(reply));
        }
        assert_eq!(read_reply(b"done"), None);
        assert_eq!(read_reply(b"\xff"), None);
    }
}
