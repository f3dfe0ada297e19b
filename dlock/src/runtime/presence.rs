//! Publishes the presence of this client (its identity, what it holds and what it waits for) for the person on call,
//! and reads that of others.
//!
//! One task per client. It sleeps while nothing is held and nothing waits. Otherwise it checks once a second, and
//! writes when something older than a second has changed, and every few seconds besides. So a lock that is held for a
//! moment is never published, and no acquire or release waits for this.

pub(crate) mod mailbox;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use tokio::sync::OnceCell;
use tokio::task;
use uuid::Uuid;

use self::mailbox::Mailbox;
use crate::base::chance::{HashMap, HashSet};
use crate::base::clock;
use crate::base::moment::Moment;
use crate::base::report::{
    ClientReport, HoldReport, Intervention, LossReason, Place, WaitReport, host, shortened,
};
use crate::runtime::client::Shared;
use crate::runtime::emit::Event;
use crate::runtime::grants::Grant;
use crate::runtime::waits::WaitingCall;
use crate::store::operations::{Entry, EntryName, Operations};
use crate::store::{Holder, StoreError};
use crate::{HoldState, LockKey};

/// How often the tables are checked while they have entries, and the minimum age of a published entry.
const TICK: Duration = Duration::from_secs(1);
/// The longest time between two writes.
const EVERY: Duration = Duration::from_secs(5);
/// How long at least an entry is kept.
const KEPT: Duration = Duration::from_secs(60);
/// How many holds, and how many waits, are published.
const WRITTEN: usize = 32;
/// How many holds, and how many waits, are examined.
const LOOKED_AT: usize = 4096;
/// The pause after a store that panicked.
pub(crate) const AFTER_A_PANIC: Duration = Duration::from_secs(1);
/// How long a client without permission to write waits before it tries again.
const REFUSED: Duration = Duration::from_secs(60);

/// The identity of a client.
#[derive(Debug)]
pub(crate) struct Identity {
    service: String,
    host: String,
    started: SystemTime,
    place: Place,
    address: OnceCell<Option<String>>,
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
            place: Place::here(),
            address: OnceCell::new(),
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
            true => (LOOKED_AT, WRITTEN),
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
            place: identity.place.clone(),
        }
    }

    /// Reads what a client published.
    pub(crate) async fn presence_of(&self, client: Uuid) -> Result<Option<ClientReport>, StoreError> {
        let Some(operations) = self.store.clone().operations() else {
            return Ok(None);
        };
        let entry = operations.get(EntryName::of_client("client", client)).await?;
        Ok(entry.and_then(|entry| read(&entry)))
    }

    /// Returns all holders of a lock, with what their clients published.
    pub(crate) async fn holders(&self, key: LockKey) -> Result<Vec<Holder>, StoreError> {
        let holders = self.store.clone().inspect(key).await?;
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

    /// Why the store no longer has a hold, as far as the store can tell.
    pub(crate) async fn why_gone(&self, grant: &Grant) -> LossReason {
        let asking = async {
            if let Some(operations) = self.store.clone().operations() {
                let name = EntryName::of_grant("broken", grant.key.clone(), grant.id());
                if let Ok(Some(entry)) = operations.get(name).await
                    && let Some(intervention) = Intervention::read(&entry.value)
                {
                    return LossReason::Broken(intervention);
                }
            }
            let id = grant.id().to_string();
            let holders = self.store.clone().inspect(grant.key.clone()).await;
            let mut others = holders.unwrap_or_default().into_iter().map(|holder| holder.id);
            match others.find(|other| *other != id) {
                Some(holder) if grant.kind.is_exclusive() => LossReason::Taken { holder },
                _ => LossReason::Gone,
            }
        };
        let told = tokio::time::timeout(self.settings.timeout, asking).await;
        told.unwrap_or(LossReason::Gone)
    }

    /// Removes the entry of this client, at its end.
    pub(crate) async fn leave_presence(&self) {
        let identity = &self.identity;
        identity.left.store(true, Ordering::Relaxed);
        if identity.written.load(Ordering::Relaxed)
            && let Some(operations) = self.store.clone().operations()
        {
            let removed = operations.remove(EntryName::of_client("client", self.issuer().uuid));
            // Otherwise it expires.
            let _ = tokio::time::timeout(self.settings.timeout, removed).await;
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

/// Writes until `over` says so.
pub(crate) async fn attend(shared: &Arc<Shared>, over: impl Future<Output = ()>) {
    let Some(operations) = shared.store.clone().operations() else {
        return over.await;
    };
    let writes = async {
        let mut mailbox = Mailbox::of(shared, &operations);
        loop {
            tokio::select! {
                () = shared.watchdog.beat.roused() => {}
                () = mailbox.has_mail() => {
                    mailbox.read(shared, &operations).await;
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

/// Writes for as long as something is held or waited for.
async fn write(shared: &Arc<Shared>, operations: &Arc<dyn Operations>, mailbox: &mut Mailbox) {
    let name = EntryName::of_client("client", shared.issuer().uuid);
    let mut last: Option<(Moment, Vec<String>)> = None;
    let mut next = clock::now() + TICK;
    loop {
        tokio::select! {
            () = clock::sleep_until(next) => {}
            () = mailbox.has_mail() => {
                mailbox.read(shared, operations).await;
                continue;
            }
        }
        next = clock::now() + TICK;
        if !shared.is_active() {
            shared.watchdog.beat.sleeps();
            // Something may have begun in between.
            if !shared.is_active() {
                return;
            }
            shared.watchdog.beat.rouse();
        }
        look_up(shared).await;
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
        match tokio::time::timeout(shared.settings.timeout, put).await {
            Ok(Ok(())) => last = Some((now, content)),
            Ok(Err(error)) => {
                Event::NotWritten { error: Some(&error) }.emit();
                if !error.is_passing() {
                    next = clock::now() + REFUSED;
                }
            }
            Err(_) => Event::NotWritten { error: None }.emit(),
        }
        mailbox.read(shared, operations).await;
    }
}

/// Looks up the holder for the longest wait, if that has lasted a second.
async fn look_up(shared: &Arc<Shared>) {
    let now = Moment::of(clock::now());
    let mut calls = shared.waits.calls(LOOKED_AT);
    calls.retain(|(_, call)| now.since(call.since) >= TICK && !call.is_looked_up());
    let Some((_, first)) = calls.iter().min_by_key(|(_, call)| call.since) else {
        return;
    };
    let looked_up = shared.holders(first.key.clone());
    let Ok(Ok(holders)) = tokio::time::timeout(shared.settings.timeout, looked_up).await else {
        return;
    };
    if let Some(holder) = holders.into_iter().next().map(Arc::new) {
        let same = calls.iter().filter(|(_, call)| call.key == first.key);
        same.for_each(|(_, call)| call.set_holder(holder.clone()));
    }
}

/// Finds the address by which this machine reaches the store, once.
async fn know_address(shared: &Arc<Shared>, operations: &Arc<dyn Operations>) {
    let find = || async {
        let operations = operations.clone();
        // A name may have to be resolved.
        let found = task::spawn_blocking(move || operations.local_address()).await;
        found.unwrap_or_default()
    };
    let found = shared.identity.address.get_or_init(find);
    let _ = tokio::time::timeout(TICK, found).await;
}
