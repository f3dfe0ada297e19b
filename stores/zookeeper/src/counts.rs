//! Counters: the total of a semaphore, which is Curator's `SharedCount`, and latches.
//!
//! A step reads the numbers and changes them in one `multi` that checks their versions, and that leaves a node with the id
//! and the reply. So a copy of it, whenever it comes, finds that node or other versions and changes nothing. The node
//! belongs to the session: once that has expired, the outcome of a step without a reply stays unknown.

mod effect;
mod reply;

use std::sync::Arc;
use std::time::Duration;

use dlock::store::counter::{CounterReply, CounterRequest, CounterStep};
use dlock::store::{Kind, Outcome, Reason, StoreError};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use self::effect::{Effect, Seen};
use crate::core::{Core, data, key_taken, names};
use crate::gather::{MOST_BYTES, MOST_NODES};
use crate::grants::{Own, State};
use crate::layout::{CounterPaths, DONE, done_of, leases_of, queue_of, semaphore_of};
use crate::names::{Counter, Mark, family_beside};
use crate::permits::numbers;
use crate::session::{Answer, Epoch, NoReply, refused};
use crate::wire::{Change, Code, Mode, Reply, Request};

/// The longest pause before a step that met another one is tried again.
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

/// A step on a counter.
struct Count<'a> {
    core: &'a Core,
    /// The node of the key.
    name: &'a str,
    request: &'a CounterRequest,
    paths: &'a CounterPaths,
    /// Whether a deletion has ended permits before its last request.
    has_deleted: bool,
}

impl Core {
    /// Runs a step; its queue is that of the acquires of permits.
    pub(crate) async fn count(
        &self,
        queue: Arc<str>,
        request: CounterRequest,
    ) -> Result<CounterReply, StoreError> {
        let name = semaphore_of(&queue).unwrap_or(&queue);
        let mut count = Count {
            core: self,
            name,
            request: &request,
            paths: &CounterPaths::of(&self.path(name)),
            has_deleted: false,
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
    fn done(&self) -> String {
        self.core.path(&done_of(self.name, self.request.id))
    }

    /// Reads the numbers and changes them; `None` if others have changed them in between.
    async fn once(&mut self) -> Result<Option<CounterReply>, StoreError> {
        let seen = match self.look().await? {
            Ok(seen) => seen,
            Err(reply) => return Ok(Some(reply)),
        };
        let step = self.request.step;
        let epoch = self.core.session.epoch();
        if !step.is_look() && self.core.steps.began_before(self.request.id, epoch) {
            // What is there may be its own work.
            let why = "the session with ZooKeeper expired before it told whether this step was carried out";
            return Err(StoreError::unknown(why));
        }
        if let Some(family) = seen.taken {
            return Err(key_taken(family));
        }
        if !self.is_prepared(&seen).await? {
            return Ok(None);
        }
        let Effect { reply, mut changes } = seen.effect(step, self.paths)?;
        if changes.is_empty() {
            self.tidies().await;
            return Ok(Some(match self.has_deleted {
                true => CounterReply::Done(true),
                false => reply,
            }));
        }
        let creates_counter = changes.iter().any(Change::creates_persistent);
        changes.push(Change::Create {
            path: self.done(),
            data: reply::encode(reply),
            mode: Mode::Ephemeral,
        });
        if !self.change(changes).await? {
            return Ok(None);
        }
        if creates_counter
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
    async fn is_prepared(&mut self, seen: &Seen) -> Result<bool, StoreError> {
        let core = self.core;
        match self.request.step {
            CounterStep::DeletePermits if self.are_too_many(&seen.leases) => {
                // One stays for the request that records the reply.
                let leases = seen.leases.iter().skip(1).map(|name| self.paths.lease(name));
                let deletes = leases.map(|path| core.delete_path(path));
                for deleted in join_all(deletes).await {
                    deleted?;
                }
                self.has_deleted = true;
                Ok(false)
            }
            _ => Ok(true),
        }
    }

    /// Whether one request cannot delete these leases.
    fn are_too_many(&self, leases: &[String]) -> bool {
        let bytes = leases.iter().map(|name| self.paths.lease(name).len() + 20);
        leases.len() > MOST_NODES || bytes.sum::<usize>() > MOST_BYTES
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
            path: core.path(self.name),
        };
        let requests = [sync, read(self.done()), core.children(self.name, false)];
        let [sync, done, beside] = core.session.send(requests);
        let lists = matches!(self.request.step, CounterStep::Drain | CounterStep::DeletePermits);
        let names_of_leases = lists.then(|| core.session.ask(core.children(&leases_of(self.name), false)));
        let [leases, total, latch] = core.session.send([leases, total, read(self.paths.latch.clone())]);
        if let Err(code) = sync.answer().await?.reply {
            return Err(refused(code, "to catch up"));
        }
        if let Some((reply, _)) = data(done).await? {
            let reply =
                reply::decode(&reply).ok_or_else(|| StoreError::unknown("the reply of a step is garbled"))?;
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
            Counter::Latch => &self.paths.latch,
            Counter::Semaphore => &self.paths.total,
        };
        let remove = [path.clone(), self.done()].map(|path| Change::Delete {
            path,
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
