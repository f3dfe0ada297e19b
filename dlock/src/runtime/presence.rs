//! Publishes the presence of this client (its identity, what it holds and what it waits for) for the person on call,
//! and reads that of others.
//!
//! One task per client. It sleeps while nothing is held and nothing waits. Otherwise it checks once a second, and
//! writes when something older than a second has changed, and every few seconds besides. So a lock that is held for a
//! moment is never published, and no acquire or release waits for this. Once a client has been idle for a few seconds, its
//! entry is removed.

pub(crate) mod mailbox;

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tokio::task;
use tokio::time::Instant;
use uuid::Uuid;

use self::mailbox::Mailbox;
use crate::base::chance::{HashMap, HashSet};
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::report::{
    ClientReport, HoldReport, Intervention, LossReason, PUBLISHED, ProcessIdentity, WaitReport, host,
    shortened,
};
use crate::runtime::calls::{called, caught, reply_of};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::grants::Grant;
use crate::runtime::outside::is_outside;
use crate::runtime::waits::WaitingCall;
use crate::store::operations::{Entry, EntryName, Operations};
use crate::store::{Holder, StoreError, timeout_anywhere};
use crate::{HoldState, LockKey, Loss};

/// How often the tables are checked while they have entries, and the minimum age of a published entry.
const TICK: Duration = Duration::from_secs(1);
/// The longest time between two writes.
const EVERY: Duration = Duration::from_secs(5);
/// How long at least an entry is kept.
const KEPT: Duration = Duration::from_secs(60);
/// How many holds, and how many waits, are examined for what is published. Where there are more, any of them.
const LOOKED_AT: usize = 4096;
/// The pause after a store that panicked.
pub(crate) const AFTER_A_PANIC: Duration = Duration::from_secs(1);
/// How long a client that may not write, or cannot for another lasting reason, waits before it tries again.
const REFUSED: Duration = Duration::from_secs(60);

/// The identity of a client.
#[derive(Debug)]
pub(crate) struct Identity {
    service: String,
    host: String,
    started: SystemTime,
    process_identity: ProcessIdentity,
    address: Arc<OnceLock<Option<String>>>,
    /// Whether the address is being looked up, or was.
    is_looked_up: AtomicBool,
    /// Whether an entry may exist.
    written: AtomicBool,
    left: AtomicBool,
}

/// What a client publishes, and whether it answers.
#[derive(Debug, Clone)]
pub(crate) struct Publicity {
    pub(crate) service: String,
    /// Whether it publishes its presence.
    pub(crate) presence: bool,
    /// Whether it answers requests.
    pub(crate) answers: bool,
}

impl Identity {
    pub(crate) fn new(service: &str) -> Identity {
        Identity {
            service: shortened(service),
            host: host(),
            started: SystemTime::now(),
            process_identity: ProcessIdentity::here(),
            address: Arc::default(),
            is_looked_up: AtomicBool::new(false),
            written: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }
    }
}

impl Shared {
    /// How often the client writes.
    fn written_every(&self) -> Duration {
        (self.settings.lease / 3).clamp(TICK, EVERY)
    }

    fn is_active(&self) -> bool {
        self.watchdog.len() > 0 || self.waits.len() > 0
    }

    /// Returns what this client holds and waits for: all of it, or the part that is published.
    pub(crate) fn report(&self, written: bool) -> ClientReport {
        let (most, shown) = match written {
            true => (LOOKED_AT, PUBLISHED),
            false => (usize::MAX, usize::MAX),
        };
        let now = Moment::of(clock::now());
        let is_old = |since: Moment| !written || now.since(since) >= TICK;
        let mut grants = self.watchdog.grants(most);
        grants.retain(|grant| is_old(grant.since));
        grants.sort_unstable_by_key(|grant| (grant.since, grant.number));
        let mut calls = self.waits.calls(most);
        calls.retain(|(_, call)| is_old(call.since));
        calls.sort_unstable_by_key(|(number, call)| (call.since, *number));
        let identity = &self.identity;
        ClientReport {
            client: self.issuer().uuid.to_string(),
            service: identity.service.clone(),
            host: identity.host.clone(),
            address: identity.address.get().cloned().flatten(),
            process: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started: identity.started,
            answers: self.settings.publicity.answers,
            holds: grants.iter().take(shown).map(|grant| hold(grant, now)).collect(),
            waits: calls
                .iter()
                .take(shown)
                .map(|(_, call)| wait(call, now))
                .collect(),
            held: self.watchdog.len(),
            waiting: self.waits.len(),
            age: Duration::ZERO,
            every: self.written_every(),
            // As long as the leases that it explains: it describes a killed client, too.
            kept: (self.settings.lease * 2).max(KEPT),
            process_identity: identity.process_identity.clone(),
        }
    }

    /// Reads what a client published.
    pub(crate) async fn presence_of(&self, client: Uuid) -> Result<Option<ClientReport>, StoreError> {
        let entry = async {
            let Some(operations) = self.store.clone().operations() else {
                return Ok(None);
            };
            let entry = operations.get(EntryName::of_client("client", client));
            self.noting(entry).await
        };
        Ok(caught(None, entry).await?.and_then(|entry| read(&entry)))
    }

    /// Returns all holders of a lock, with what their clients published.
    pub(crate) async fn holders(&self, key: LockKey) -> Result<Vec<Holder>, StoreError> {
        let holders = self.inspect(&key).await?;
        // One client may have many of them, as readers.
        let clients: HashSet<Uuid> = holders.iter().filter_map(Holder::client_id).collect();
        let reports = clients.into_iter().map(|client| async move {
            let report = match client == self.issuer().uuid {
                // About its own process this client knows more.
                true => Some(self.report(false)),
                // The holder is known without it.
                false => self.presence_of(client).await.unwrap_or_default(),
            };
            (client, report.map(Arc::new))
        });
        let reports: HashMap<Uuid, Option<Arc<ClientReport>>> = join_all(reports).await.into_iter().collect();
        let report_of = |holder: &Holder| reports.get(&holder.client_id()?)?.clone();
        let holders = holders.into_iter().map(|holder| {
            let report = report_of(&holder);
            holder.known(report)
        });
        Ok(holders.collect())
    }

    async fn inspect(&self, key: &LockKey) -> Result<Vec<Holder>, StoreError> {
        let inspected = reply_of(called(key, || self.store.clone().inspect(key.clone())), key);
        self.noting(inspected).await
    }

    /// Why the store no longer has a hold, as far as the store can tell.
    pub(crate) async fn why_gone(&self, grant: &Grant) -> LossReason {
        let asking = async {
            let broken = async {
                let Some(operations) = self.store.clone().operations() else {
                    return Ok(None);
                };
                let name = EntryName::of_grant("broken", grant.key.clone(), grant.id());
                operations.get(name).await
            };
            if let Ok(Some(entry)) = caught(Some(&grant.key), broken).await
                && let Some(intervention) = Intervention::read(&entry.value)
            {
                return LossReason::Broken(intervention);
            }
            let id = grant.id().to_string();
            let holders = self.inspect(&grant.key).await;
            let mut others = holders.unwrap_or_default().into_iter().map(|holder| holder.id);
            match others.find(|other| *other != id) {
                Some(holder) if grant.kind.is_exclusive() => LossReason::Taken { holder },
                _ => LossReason::Gone,
            }
        };
        let mut told = pin!(timeout_anywhere(Instant::now() + self.settings.timeout, asking));
        let told = std::future::poll_fn(|cx| {
            let is_outside = is_outside();
            if is_outside && (self.has_lost_its_runtime() || self.finished.is_cancelled()) {
                // There may be no timer to wait by.
                return Poll::Ready(None);
            }
            // The holder may have no runtime, and a step needs timers.
            let _entered = is_outside.then(|| self.runtime.enter());
            told.as_mut().poll(cx)
        });
        told.await.unwrap_or_else(|| grant.why_lost(Loss::Gone))
    }

    /// Removes the entry of this client, at its end.
    pub(crate) async fn leave_presence(&self) {
        self.identity.left.store(true, Ordering::Relaxed);
        let leaving = async {
            if let Some(operations) = self.store.clone().operations() {
                self.unpublish(&operations).await;
            }
            Ok(())
        };
        // A store that panics is logged: the entry expires.
        let _ = caught(None, leaving).await;
    }

    async fn unpublish(&self, operations: &Arc<dyn Operations>) {
        let written = &self.identity.written;
        if written.load(Ordering::Relaxed) {
            let name = EntryName::of_client("client", self.issuer().uuid);
            let removed = operations.clone().remove(name);
            // Otherwise it expires.
            if let Ok(Ok(())) = tokio::time::timeout(self.settings.timeout, removed).await {
                written.store(false, Ordering::Relaxed);
            }
        }
    }
}

/// Parses the report in an entry; its remaining time tells its age.
pub(crate) fn read(entry: &Entry) -> Option<ClientReport> {
    let report = ClientReport::read(&entry.value, Duration::ZERO)?;
    let age = report.kept.saturating_sub(entry.remaining);
    ClientReport::read(&entry.value, age)
}

fn number(task: Option<task::Id>) -> Option<u64> {
    task?.to_string().parse().ok()
}

fn hold(grant: &Grant, now: Moment) -> HoldReport {
    let mut lines = grant.lines().into_iter().map(ToString::to_string);
    let (state, deadline) = grant.peek_at(now);
    HoldReport {
        key: grant.key.clone(),
        kind: grant.kind,
        grant: grant.id().to_string(),
        token: grant.token,
        held: now.since(grant.since),
        lease_left: deadline.since(now),
        suspect: state == HoldState::Suspect,
        location: lines.next().unwrap_or_default(),
        reentered: lines.collect(),
        note: grant.note().map(|note| note.to_string()),
        task: number(grant.task),
    }
}

fn wait(call: &WaitingCall, now: Moment) -> WaitReport {
    WaitReport {
        key: call.key.clone(),
        kind: call.kind,
        waited: now.since(call.since),
        location: call.by.to_string(),
        note: call.note.as_ref().map(ToString::to_string),
        task: number(call.task),
        inside: call.inside.iter().map(ToString::to_string).collect(),
    }
}

/// Writes until `over` says so. The last call may have ended by a panic of the store, with mail that it had read.
pub(crate) async fn attend(shared: &Arc<Shared>, after_a_panic: bool, over: impl Future<Output = ()>) {
    let Some(operations) = shared.store.clone().operations() else {
        return over.await;
    };
    let writes = async {
        let mut mailbox = Mailbox::of(shared, &operations, after_a_panic);
        loop {
            tokio::select! {
                () = shared.watchdog.beat.roused() => {}
                () = mailbox.has_mail() => {
                    mailbox.read_told(shared, &operations).await;
                    continue;
                }
            }
            write(shared, &operations, &mut mailbox).await;
        }
    };
    tokio::select! {
        biased;
        () = over => {}
        () = writes => {}
    }
}

/// Writes until nothing has been held or waited for during the time between two writes. So the entry of a busy client
/// stays, and that of a client that became idle is removed before it is overdue.
async fn write(shared: &Arc<Shared>, operations: &Arc<dyn Operations>, mailbox: &mut Mailbox) {
    let name = EntryName::of_client("client", shared.issuer().uuid);
    let mut last: Option<(Moment, Vec<String>)> = None;
    let mut tried = HashMap::default();
    let mut busy = Moment::of(clock::now());
    let mut next = clock::now() + TICK;
    loop {
        tokio::select! {
            () = clock::sleep_until(next) => {}
            () = mailbox.has_mail() => {
                mailbox.read_told(shared, operations).await;
                continue;
            }
        }
        next = clock::now() + TICK;
        let now = Moment::of(clock::now());
        if shared.is_active() {
            busy = now;
        } else if last.is_none() || now.since(busy) >= shared.written_every() {
            shared.watchdog.beat.sleeps();
            // Something may have begun in between.
            if !shared.is_active() {
                shared.unpublish(operations).await;
                return;
            }
            shared.watchdog.beat.rouse();
        }
        look_up(shared, &mut tried).await;
        let report = shared.report(true);
        let grants = report.holds.iter().map(|hold| hold.grant.clone());
        let calls = report
            .waits
            .iter()
            .map(|wait| format!("{} {}", wait.location, wait.key));
        let content: Vec<_> = grants.chain(calls).collect();
        let now = Moment::of(clock::now());
        if let Some((at, before)) = &last {
            let is_due = now.since(*at) >= report.every;
            // A very busy process would do nothing else.
            let is_new = *before != content && report.held + report.waiting < LOOKED_AT;
            if !is_due && !is_new {
                continue;
            }
        }
        if shared.identity.left.load(Ordering::Relaxed) {
            continue;
        }
        know_address(shared, operations).await;
        shared.identity.written.store(true, Ordering::Relaxed);
        let report = shared.report(true);
        let (text, ttl) = (report.write(), report.kept);
        let put = operations
            .clone()
            .put(name.clone(), text.into_bytes(), ttl, false);
        match tokio::time::timeout(shared.settings.timeout, shared.noting(put)).await {
            Ok(Ok(())) => last = Some((now, content)),
            Ok(Err(error)) => {
                Event::NotWritten { error: Some(&error) }.emit();
                if !error.is_outlasted() {
                    next = clock::now() + REFUSED;
                }
            }
            Err(_) => Event::NotWritten { error: None }.emit(),
        }
        mailbox.read(shared, operations).await;
    }
}

/// Looks up the holder for the longest wait, if that has lasted a second. Where no holder is found, the other locks have
/// their turns first; `tried` has when each was tried.
async fn look_up(shared: &Arc<Shared>, tried: &mut HashMap<LockKey, Moment>) {
    let now = Moment::of(clock::now());
    let mut calls = shared.waits.calls(LOOKED_AT);
    calls.retain(|(_, call)| now.since(call.since) >= TICK && !call.is_looked_up());
    let still = calls.iter().filter_map(|(_, call)| tried.remove_entry(&call.key));
    *tried = still.collect();
    let first = calls
        .iter()
        .min_by_key(|(_, call)| (tried.get(&call.key).copied(), call.since));
    let Some((_, first)) = first else {
        return;
    };
    tried.insert(first.key.clone(), now);
    let looked_up = shared.holders(first.key.clone());
    let Ok(Ok(holders)) = tokio::time::timeout(shared.settings.timeout, looked_up).await else {
        return;
    };
    if let Some(holder) = holders.into_iter().next().map(Arc::new) {
        let same = calls.iter().filter(|(_, call)| call.key == first.key);
        same.for_each(|(_, call)| call.set_holder(holder.clone()));
    }
}

/// Looks up the address by which this machine reaches the store, once. A lookup that takes long goes on meanwhile, and a
/// later report has the address.
async fn know_address(shared: &Arc<Shared>, operations: &Arc<dyn Operations>) {
    if shared.identity.is_looked_up.swap(true, Ordering::Relaxed) {
        return;
    }
    let (address, operations) = (shared.identity.address.clone(), operations.clone());
    // A name may have to be resolved.
    let found = task::spawn_blocking(move || drop(address.set(operations.local_address())));
    let _ = tokio::time::timeout(TICK, found).await;
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    use parking_lot::Mutex;
    use tokio::time::sleep;

    use super::*;
    use crate::LockClient;
    use crate::store::{
        AcquireReply, AcquireRequest, Capabilities, GrantId, Kind, Reason, ReleaseReply, ReleaseRequest,
        RenewRequest, Renewal, Store, StoreFuture, Watch,
    };
    use crate::stores::memory::MemoryStore;

    const SEC: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);
    /// A lock whose holder the store does not tell.
    const UNSEEN: &str = "unseen";
    /// A lock at which the store does not look.
    const SILENT: &str = "silent";

    /// A store in memory that counts what is published.
    #[derive(Clone, Default)]
    struct Board {
        memory: Arc<MemoryStore>,
        puts: Arc<AtomicUsize>,
        removals: Arc<AtomicUsize>,
        /// Why the next puts are refused.
        refusals: Arc<Mutex<Vec<Reason>>>,
        removal_takes: Duration,
        lookups: Arc<AtomicUsize>,
        /// The end of this is that of the first lookup.
        lookup: Arc<Mutex<Option<mpsc::Receiver<()>>>>,
        /// The next step of this name panics.
        panics_in: Arc<Mutex<Option<&'static str>>>,
    }

    impl Board {
        async fn client(&self) -> LockClient {
            let builder = LockClient::builder().store(self.clone()).presence(true);
            builder.build().await.unwrap()
        }

        async fn entries(&self) -> usize {
            Operations::clients(self.memory.clone()).await.unwrap().len()
        }

        fn may_panic(&self, step: &'static str) {
            let panics = self.panics_in.lock().take_if(|in_step| *in_step == step);
            assert_eq!(panics, None, "the store's own");
        }

        fn puts(&self) -> usize {
            self.puts.load(Ordering::Relaxed)
        }

        fn removals(&self) -> usize {
            self.removals.load(Ordering::Relaxed)
        }
    }

    impl Store for Board {
        fn capabilities(&self) -> Capabilities {
            self.memory.capabilities()
        }

        fn acquire(self: Arc<Self>, request: AcquireRequest) -> StoreFuture<AcquireReply> {
            self.memory.clone().acquire(request)
        }

        fn release(self: Arc<Self>, request: ReleaseRequest) -> StoreFuture<ReleaseReply> {
            self.memory.clone().release(request)
        }

        fn renew(
            self: Arc<Self>,
            requests: Vec<RenewRequest>,
        ) -> StoreFuture<Vec<Result<Renewal, StoreError>>> {
            self.memory.clone().renew(requests)
        }

        fn inspect(self: Arc<Self>, key: LockKey) -> StoreFuture<Vec<Holder>> {
            match key.as_str() {
                UNSEEN => Box::pin(ready(Ok(Vec::new()))),
                SILENT => Box::pin(pending()),
                _ => self.memory.clone().inspect(key),
            }
        }

        fn watch(self: Arc<Self>, kind: Kind, key: &LockKey, grant: GrantId) -> Watch {
            Store::watch(self.memory.clone(), kind, key, grant)
        }

        fn operations(self: Arc<Self>) -> Option<Arc<dyn Operations>> {
            Some(self)
        }
    }

    impl Operations for Board {
        fn put(
            self: Arc<Self>,
            name: EntryName,
            value: Vec<u8>,
            ttl: Duration,
            tell: bool,
        ) -> StoreFuture<()> {
            self.puts.fetch_add(1, Ordering::Relaxed);
            match self.refusals.lock().pop() {
                Some(reason) => Box::pin(ready(Err(StoreError::not_done(reason, "no")))),
                None => self.memory.clone().put(name, value, ttl, tell),
            }
        }

        fn get(self: Arc<Self>, name: EntryName) -> StoreFuture<Option<Entry>> {
            self.may_panic("get");
            self.memory.clone().get(name)
        }

        fn remove(self: Arc<Self>, name: EntryName) -> StoreFuture<()> {
            self.may_panic("remove");
            self.removals.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                sleep(self.removal_takes).await;
                self.memory.clone().remove(name).await
            })
        }

        fn post(
            self: Arc<Self>,
            name: EntryName,
            id: String,
            message: Vec<u8>,
            ttl: Duration,
        ) -> StoreFuture<u64> {
            self.memory.clone().post(name, id, message, ttl)
        }

        fn mail(self: Arc<Self>, name: EntryName) -> StoreFuture<Vec<Vec<u8>>> {
            self.memory.clone().mail(name)
        }

        fn clients(self: Arc<Self>) -> StoreFuture<Vec<Uuid>> {
            self.memory.clone().clients()
        }

        fn watch(self: Arc<Self>, name: &EntryName) -> Watch {
            Operations::watch(self.memory.clone(), name)
        }

        fn audit(self: Arc<Self>, fields: Vec<(String, String)>) -> StoreFuture<()> {
            self.memory.clone().audit(fields)
        }

        fn end(self: Arc<Self>, key: LockKey, holder: String) -> StoreFuture<bool> {
            self.memory.clone().end(key, holder)
        }

        fn local_address(&self) -> Option<String> {
            self.lookups.fetch_add(1, Ordering::Relaxed);
            let lookup = self.lookup.lock().take();
            if let Some(lookup) = lookup {
                let _ = lookup.recv();
            }
            Some("10.1.2.3".to_owned())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn entry_of_an_idle_client_is_removed_before_it_is_overdue() {
        let board = Board::default();
        let client = board.client().await;
        for held in [2500, 4900, 5100, 9300] {
            let guard = client.lock("k").acquire().await.unwrap();
            sleep(held * MS).await;
            assert_eq!(board.entries().await, 1);
            guard.release().await.unwrap();
            while let [report] = &client.clients().await.unwrap()[..] {
                assert!(!report.is_overdue(), "{report:?}");
                sleep(100 * MS).await;
            }
        }
        // From then on it is silent.
        let before = (board.puts(), board.removals());
        assert_eq!(before.1, 4);
        sleep(100 * SEC).await;
        assert_eq!((board.puts(), board.removals()), before);
    }

    #[tokio::test(start_paused = true)]
    async fn entry_of_a_client_that_is_idle_for_moments_stays_and_is_written_as_seldom() {
        let board = Board::default();
        let client = board.client().await;
        for _ in 0..100 {
            let guard = client.lock("k").acquire().await.unwrap();
            sleep(330 * MS).await;
            guard.release().await.unwrap();
            sleep(400 * MS).await;
        }
        assert_eq!((board.entries().await, board.removals()), (1, 0));
        // In 73 s.
        assert!(board.puts() <= 15, "{}", board.puts());
    }

    #[tokio::test(start_paused = true)]
    async fn hold_that_begins_while_the_entry_is_removed_is_published() {
        let board = Board {
            removal_takes: SEC,
            ..Board::default()
        };
        let client = board.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        sleep(3 * SEC).await;
        guard.release().await.unwrap();
        let idle = clock::now();
        while board.removals() == 0 {
            assert!(idle.elapsed() < 20 * SEC);
            sleep(100 * MS).await;
        }
        let guard = client.lock("k").acquire().await.unwrap();
        sleep(4 * SEC).await;
        let reports = client.clients().await.unwrap();
        assert_eq!(reports[0].holds.len(), 1, "{reports:?}");
        drop(guard);
    }

    #[tokio::test(start_paused = true)]
    async fn client_publishes_again_at_once_after_a_refusal_that_passes() {
        for (reason, after) in [(Reason::RefusedForNow, SEC), (Reason::Refused, REFUSED)] {
            let board = Board::default();
            board.refusals.lock().push(reason);
            let client = board.client().await;
            let _guard = client.lock("k").acquire().await.unwrap();
            sleep(TICK + after / 2).await;
            assert_eq!(board.entries().await, 0);
            sleep(after).await;
            assert_eq!(board.entries().await, 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn call_learns_its_holder_though_that_of_another_lock_is_unknown() {
        let board = Board::default();
        let (a, b) = (board.client().await, board.client().await);
        let guards = (
            a.lock(UNSEEN).acquire().await.unwrap(),
            a.lock("k").acquire().await.unwrap(),
        );
        for _ in 0..2 {
            let lock = b.lock(UNSEEN).wait(100 * SEC);
            tokio::spawn(async move { lock.acquire().await.map(drop) });
        }
        sleep(10 * MS).await;
        let error = b.lock("k").wait(5 * SEC).acquire().await.unwrap_err();
        assert!(error.holder().is_some(), "{error}");
        drop(guards);
    }

    #[tokio::test(start_paused = true)]
    async fn holder_learns_that_it_is_asked_to_stop_though_the_store_panics_at_the_look() {
        let board = Board::default();
        let (a, b) = (board.client().await, board.client().await);
        let guard = a.lock("k").acquire().await.unwrap();
        sleep(3 * SEC).await;
        let holder = b.inspect("k").await.unwrap().unwrap();
        let why = Intervention::new("a deploy").by("anna");
        assert!(b.revoke("k", &holder.id, why).await.unwrap());
        *board.panics_in.lock() = Some("get");
        let revoked = tokio::time::timeout(20 * SEC, guard.revoked()).await;
        assert_eq!(revoked.expect("in time").unwrap().reason, "a deploy");
        assert_eq!(*board.panics_in.lock(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_ends_though_the_store_panics_at_the_removal_of_the_entry() {
        let board = Board::default();
        let client = board.client().await;
        let guard = client.lock("k").acquire().await.unwrap();
        sleep(3 * SEC).await;
        *board.panics_in.lock() = Some("remove");
        guard.release().await.unwrap();
        let report = client.shutdown(SEC).await;
        assert_eq!((report.lost, report.unconfirmed), (0, 0));
        assert_eq!(*board.panics_in.lock(), None);
        assert!(client.shared().finished.is_cancelled());
    }

    /// The clock stands still during the lookup, unless it is told to go on.
    #[tokio::test(start_paused = true)]
    async fn address_is_looked_up_once_however_long_it_takes() {
        let (end, lookup) = mpsc::channel();
        let board = Board::default();
        *board.lookup.lock() = Some(lookup);
        let client = board.client().await;
        let _guard = client.lock("k").acquire().await.unwrap();
        let lookups = || board.lookups.load(Ordering::Relaxed);
        for _ in 0..10_000 {
            if board.puts() >= 3 && lookups() > 0 {
                break;
            }
            // It is begun by another thread.
            std::thread::sleep(MS);
            tokio::time::advance(10 * MS).await;
        }
        assert!(board.puts() >= 3);
        drop(end);
        sleep(20 * SEC).await;
        let reports = client.clients().await.unwrap();
        assert_eq!(reports[0].address.as_deref(), Some("10.1.2.3"));
        assert_eq!(lookups(), 1);
    }

    /// After a suspend the clock of leases is ahead of that of tokio's timers.
    #[cfg(dlock_sim)]
    #[tokio::test(start_paused = true)]
    async fn why_lost_keeps_to_the_timeout_on_a_machine_that_was_suspended() {
        let process = crate::base::sim::Process::new(1, Instant::now().into_std());
        let _inside = process.enter();
        process.set_suspended(Duration::from_secs(8 * 60 * 60));
        let board = Board::default();
        let client = board.client().await;
        let guard = client.lock(SILENT).acquire().await.unwrap();
        assert!(board.memory.clone().force_release(SILENT.into()).await.unwrap());
        assert_eq!(guard.lost().await, Loss::Gone);
        let asked = Instant::now();
        assert_eq!(guard.why_lost().await, Some(LossReason::Gone));
        assert!(asked.elapsed() <= 10 * SEC, "{:?}", asked.elapsed());
    }
}
