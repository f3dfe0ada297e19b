//! For the person on call: which client holds a lock, what a client does, and how to end a hold.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use crate::base::chance;
use crate::base::holder::Holder;
use crate::base::report::{ClientReport, Intervention};
use crate::runtime::calls::caught;
use crate::runtime::emit::events::{LockEventKind, LockEvents};
use crate::runtime::outside::is_outside;
use crate::runtime::presence;
use crate::runtime::presence::mailbox::Message;
use crate::store::operations::{Connection, EntryName, Operations};
use crate::store::records::{ForgetReply, RecordKey, RecordLook};
use crate::store::timeout_anywhere;
use crate::store::{GrantId, Kind, Outcome, Reason, ReleaseReply, ReleaseRequest, Store, StoreError};
use crate::{Error, LockClient, LockKey};

/// How long to wait for an answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// How long a question is kept.
const KEPT: Duration = Duration::from_secs(30);
/// How long a holder is asked to look: a client that may not write its presence reads once a minute.
const HINTED: Duration = Duration::from_secs(90);
const BREAKING: &str = "breaking a lock";
/// How long the store remembers which operator broke a hold, or asked its holder to stop.
const REMEMBERED: Duration = Duration::from_secs(600);

impl LockClient {
    /// Returns what this client holds and waits for now: since when, where in the code, with which note, and for how
    /// long each hold is certain. Work under claims of `once` is not in it. Sends nothing.
    #[must_use]
    pub fn active(&self) -> ClientReport {
        self.shared().report(false)
    }

    /// Returns the events of this client's locks from now on: acquired, waited for, renewed late, suspect, lost and
    /// why, released. Events never wait for the listener: a listener that is more than 1,024 events behind misses the
    /// oldest, and [`dropped`](LockEvents::dropped) counts them. Events are created only while there is a listener. Claims of
    /// `once` cause none.
    ///
    /// Of a busy client these are several for each acquire: [`events_where`](Self::events_where) returns only some.
    #[must_use]
    pub fn events(&self) -> LockEvents {
        self.events_where(|_, _| true)
    }

    /// Returns the events for which `filter` returns `true`, from now on; the others wake no listener and cost next to
    /// nothing.
    ///
    /// What causes an event runs the filter: the calls that acquire and release, and the task that renews. It should only look at
    /// the event: what it waits for, they wait for. It must not acquire or release this client's locks, and must not own the
    /// client or a guard: these live until the returned events are dropped.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::operations::LockEventKind;
    ///
    /// let client = dlock::LockClient::memory();
    /// let mut losses = client.events_where(|_, what| matches!(what, LockEventKind::Lost { .. }));
    /// let alarm = tokio::spawn(async move {
    ///     while let Some(event) = losses.next().await {
    ///         println!("{} was lost: {:?}", event.key, event.what);
    ///     }
    /// });
    /// client.lock("report").acquire().await?.release().await?;
    /// # drop(client); alarm.await.unwrap();
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn events_where(
        &self,
        filter: impl Fn(&LockKey, &LockEventKind) -> bool + Send + Sync + 'static,
    ) -> LockEvents {
        self.shared().issuer().listeners.listen(Box::new(filter))
    }

    /// Returns the clients of the same store and prefix that hold or wait for something, as they published it. A client
    /// that is gone, or cannot reach the store, is listed for another minute, or two of its leases if that is longer,
    /// and is [overdue](ClientReport::is_overdue). Clients that have been idle for a few seconds, and clients without
    /// [presence](crate::LockClientBuilder::presence), are not listed. The store scans all of its keys for this: meant
    /// for people and tools. In a Redis Cluster an entry whose slot moves during the scan may be missing.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the store keeps no such entries, or a failure of the store. Cancel safe.
    pub async fn clients(&self) -> Result<Vec<ClientReport>, Error> {
        const WHAT: &str = "the list of clients";
        let operations = self.operations(WHAT)?;
        let reports = self.shared().noting(caught(None, reports(operations)));
        let reports = self.handle().with_timers(reports).await;
        reports.map_err(|error| failed(error, WHAT))
    }

    /// Returns what a client published about itself, by its [id](Self::id); `None` if it published nothing.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for a malformed client id, or a failure of the store. Cancel safe.
    pub async fn client(&self, client: &str) -> Result<Option<ClientReport>, Error> {
        let report = self.shared().presence_of(client_id(client)?);
        let report = self.handle().with_timers(report).await;
        report.map_err(|error| failed(error, "the look at a client"))
    }

    /// Asks a client what it holds and waits for at this moment, by its [id](Self::id); `None` if it did not answer
    /// within a second: it hangs, is stopped, cannot reach the store, or does not
    /// [answer](crate::LockClientBuilder::control). A client answers at most ten times a second.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for a malformed client id, [`Error::Refused`] also if the client has not read its last 64
    /// questions, or a failure of the store. Cancel safe.
    pub async fn ask(&self, client: &str) -> Result<Option<ClientReport>, Error> {
        const WHAT: &str = "the question to a client";
        let client = client_id(client)?;
        let operations = self.operations(WHAT)?;
        if self.shared().has_lost_its_runtime() && is_outside() {
            // There is no timer to wait by.
            return Err(Error::ClientClosed);
        }
        let within = Instant::now() + ANSWERS_WITHIN;
        let answer = self.shared().noting(caught(None, asked(operations, client)));
        let answer = timeout_anywhere(within, answer);
        match self.handle().with_timers(answer).await {
            Some(answer) => answer.map_err(|error| failed(error, WHAT)),
            None => Ok(None),
        }
    }

    /// Returns the connections of a client as the servers see them, by its [id](Self::id); `None` if the store cannot
    /// tell, as where a client that published nothing may be one whose user may not name its connections. Each server lists all of its clients for this: meant for people, where [`client`](Self::client) knows
    /// nothing.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidOption`] for a malformed client id, [`Error::Refused`] if this user lacks a permission, with its
    /// name, or a failure of the store. Cancel safe.
    pub async fn connections(&self, client: &str) -> Result<Option<Vec<Connection>>, Error> {
        const WHAT: &str = "the list of connections";
        let client = client_id(client)?;
        let connections = self.operations(WHAT)?.connections(client);
        let connections = self.handle().with_timers(self.shared().noting(connections)).await;
        connections.map_err(|error| failed(error, WHAT))
    }

    /// Ends a hold by the id of its [holder](Holder::id), if it still holds the lock, and wakes the waiters; returns
    /// whether it did. The holder is asked to check, and its guard reports the loss. Its work continues until it checks
    /// the guard: until then only the fencing token protects what it writes.
    ///
    /// It breaks the hold of that id, whichever caller of its process has it by now: a lock that is handed off inside a
    /// process keeps its id. A writer that also reads loses its write lock; its reads have ids of their own and go on.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for permits, and for holders that are not dlock's on locks with several holders, or
    /// [`Error::Refused`] if another holder came in meanwhile; [`Error::InvalidOption`] without a reason; or a failure of
    /// the store, also when the audit log cannot be written.
    /// Nothing was changed then, except perhaps with [`Error::OutcomeUnknown`].
    ///
    /// Cancel safe: once it has begun to change anything, it goes on in the background.
    pub async fn break_hold(
        &self,
        key: impl Into<LockKey>,
        holder: &str,
        intervention: Intervention,
    ) -> Result<bool, Error> {
        let key = LockKey::new(key)?;
        let holders = self.holders(key.clone()).await?;
        let is_alone = holders.len() == 1;
        let Some(found) = holders.into_iter().find(|other| other.id == holder) else {
            return Ok(false);
        };
        let operations = self.operations(BREAKING)?;
        let intervention = self.signed(intervention)?;
        let grant = GrantId::parse(holder);
        let by_grant = match (found.kind, grant) {
            // A writer may have readers beside it: its own.
            (Kind::Read | Kind::Write, Some(grant)) if !grant.is_of_redisson() => Some(grant),
            (kind, _) if kind.is_exclusive() && is_alone => None,
            (kind, _) => {
                return Err(Error::Unsupported {
                    what: format!("breaking a {kind} by the id of its holder"),
                    reason: "its store does not find it by that".to_owned(),
                });
            }
        };
        let breaking = Breaking {
            store: self.shared().store.clone(),
            operations,
            key,
            holder: holder.to_owned(),
            grant,
            by_grant: by_grant.map(|grant| (found.kind, grant)),
        };
        // Dropped half way, it would leave a cause without its effect, or a holder that is not told.
        let done = self.handle().run_to_completion(breaking.run(intervention));
        self.handle().with_timers(done).await
    }

    /// Asks the holder of a lock to stop, by the id of the [holder](Holder::id); returns whether it holds the lock. Its
    /// [`revoked`](crate::LockGuard::revoked) completes within a few seconds if its client publishes its
    /// [presence](crate::LockClientBuilder::presence), and at once if it [answers](crate::LockClientBuilder::control);
    /// other clients do not look for requests. From then on its process does not hand the lock off. A holder that does not
    /// watch `revoked` goes on.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for holders that are not dlock's and for permits, [`Error::InvalidOption`] without a
    /// reason, or a failure of the store, also when the audit log cannot be written.
    pub async fn revoke(
        &self,
        key: impl Into<LockKey>,
        holder: &str,
        intervention: Intervention,
    ) -> Result<bool, Error> {
        const WHAT: &str = "asking a holder to stop";
        let key = LockKey::new(key)?;
        if self.holder(&key, holder).await?.is_none() {
            return Ok(false);
        }
        let operations = self.operations(WHAT)?;
        let intervention = self.signed(intervention)?;
        let unsupported = |reason: &str| Error::Unsupported {
            what: WHAT.to_owned(),
            reason: reason.to_owned(),
        };
        let Some(grant) = GrantId::parse(holder) else {
            return Err(unsupported("only the holder of a lock is found by its id"));
        };
        if grant.is_of_redisson() {
            return Err(unsupported("a Redisson client does not look for requests"));
        }
        let revoking = async {
            audits(&operations, "revoke", (&key, holder), &intervention).await?;
            let name = EntryName::of_grant("revoked", key.clone(), grant);
            let text = intervention.write().into_bytes();
            let put = operations.clone().put(name, text, REMEMBERED, false).await;
            put.map_err(|error| error.into_error(WHAT, &key))?;
            hint(&operations, grant).await;
            Ok(true)
        };
        self.handle().with_timers(revoking).await
    }

    /// Returns the state of the work of a record, with its result if `response` is set. See
    /// [`forget_record`](Self::forget_record) for its name.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the store has no records, or a failure of the store. Cancel safe.
    pub async fn inspect_record(&self, record: &RecordKey, response: bool) -> Result<RecordLook, Error> {
        let records = self.records()?;
        let look = records.inspect(record, response);
        let look = self.handle().with_timers(look).await;
        look.map_err(|error| error.into_error("the look at a record", &LockKey::raw(record.as_str())))
    }

    /// Forgets a record, so that the next request does its work again. Writes an entry to the audit log first. An
    /// attempt that is in progress is not forgotten. See `Once::record_key` (feature `once`), and
    /// `KeyedRequest` of `dlock-tower` for the record of an HTTP request.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the store has no records or no audit log, [`Error::InvalidOption`] without a reason,
    /// or a failure of the store: then the record may or may not have been forgotten. If the audit log cannot be
    /// written, nothing was changed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use dlock::operations::Intervention;
    /// use dlock::record::{ForgetReply, RecordKey};
    ///
    /// let client = dlock::LockClient::memory();
    /// let why = Intervention::new("the answer was wrong").by("ops");
    /// let reply = client.forget_record(&RecordKey::new("once-report")?, why).await?;
    /// assert_eq!(reply, ForgetReply::Missing);
    /// # Ok(()) }
    /// ```
    pub async fn forget_record(
        &self,
        record: &RecordKey,
        intervention: Intervention,
    ) -> Result<ForgetReply, Error> {
        const WHAT: &str = "forgetting a record";
        let records = self.records()?;
        let intervention = self.signed(intervention)?;
        let name = LockKey::raw(record.as_str());
        let forgetting = async {
            if intervention.audited {
                let operations = self.operations(WHAT)?;
                audits(&operations, "forget", (&name, ""), &intervention).await?;
            }
            let reply = records.forget(record).await;
            reply.map_err(|error| error.into_error(WHAT, &name))
        };
        self.handle().with_timers(forgetting).await
    }

    async fn holder(&self, key: &LockKey, id: &str) -> Result<Option<Holder>, Error> {
        let holders = self.holders(key.clone()).await?;
        Ok(holders.into_iter().find(|holder| holder.id == id))
    }

    /// Checks that a reason is given, and adds the name of the actor.
    fn signed(&self, mut intervention: Intervention) -> Result<Intervention, Error> {
        if intervention.reason.trim().is_empty() {
            return Err(Error::invalid_option(
                "reason",
                "it is empty: say why, for the holder and for the audit log",
            ));
        }
        if intervention.by.is_empty() {
            let report = self.shared().report(true);
            intervention.by = format!("{} on {}", report.service, report.host);
        }
        Ok(intervention)
    }

    fn operations(&self, what: &str) -> Result<Arc<dyn Operations>, Error> {
        let operations = self.shared().store.clone().operations();
        operations.ok_or_else(|| Error::Unsupported {
            what: what.to_owned(),
            reason: "this store keeps no entries of its clients".to_owned(),
        })
    }
}

/// What all clients have published.
async fn reports(operations: Arc<dyn Operations>) -> Result<Vec<ClientReport>, StoreError> {
    let names = operations.clone().clients().await?;
    // Reads them in few calls.
    let entries: Vec<_> = names
        .into_iter()
        .map(|client| operations.clone().get(EntryName::of_client("client", client)))
        .collect();
    let mut reports = Vec::with_capacity(entries.len());
    for entry in entries {
        reports.extend(entry.await?.as_ref().and_then(presence::read));
    }
    Ok(reports)
}

/// Asks a client, and waits for its answer for ever.
async fn asked(operations: Arc<dyn Operations>, client: Uuid) -> Result<Option<ClientReport>, StoreError> {
    let reply = chance::uuid();
    let name = EntryName::of_client("reply", reply);
    let mut watch = operations.clone().watch(&name);
    let message = Message::Ask { reply }.write();
    let mailbox = EntryName::of_client("ask", client);
    let posted = operations
        .clone()
        .post(mailbox, reply.to_string(), message.into_bytes(), KEPT);
    posted.await?;
    loop {
        // The notification may be forbidden or lost.
        let _ = tokio::time::timeout(ANSWERS_WITHIN / 5, watch.changed()).await;
        if let Some(entry) = operations.clone().get(name.clone()).await? {
            return Ok(ClientReport::read(&entry.value, Duration::ZERO));
        }
    }
}

/// Writes the entry before the action: an action that cannot be logged is not taken.
async fn audits(
    operations: &Arc<dyn Operations>,
    what: &str,
    (key, holder): (&LockKey, &str),
    intervention: &Intervention,
) -> Result<(), Error> {
    if !intervention.audited {
        return Ok(());
    }
    let fields = [
        ("what", what),
        ("key", key.as_str()),
        ("holder", holder),
        ("by", &intervention.by),
        ("reason", &intervention.reason),
    ];
    let fields = fields.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let audited = caught(None, async { operations.clone().audit(fields.to_vec()).await }).await;
    audited.map_err(|error| match error.reason {
        // It is not the record's key that holds something else.
        Reason::KeyTaken(_) => error.into_error("the audit log", &LockKey::raw("the audit log")),
        _ => error.into_error("the entry in the audit log about", key),
    })
}

/// A hold that is being broken.
struct Breaking {
    store: Arc<dyn Store>,
    operations: Arc<dyn Operations>,
    key: LockKey,
    holder: String,
    /// The holder, where it is one of dlock.
    grant: Option<GrantId>,
    /// How it is found where the lock may have several holders.
    by_grant: Option<(Kind, GrantId)>,
}

impl Breaking {
    async fn run(self, intervention: Intervention) -> Result<bool, Error> {
        let (operations, key) = (&self.operations, &self.key);
        audits(operations, "break", (key, &self.holder), &intervention).await?;
        let failed = |error: StoreError| error.into_error(BREAKING, key);
        let name = self
            .grant
            .map(|grant| EntryName::of_grant("broken", key.clone(), grant));
        if let Some(name) = &name {
            let text = intervention.write().into_bytes();
            let put = operations.clone().put(name.clone(), text, REMEMBERED, false);
            put.await.map_err(failed)?;
        }
        let ended = self.end().await;
        // With an unknown outcome the holder may be gone, and is told so. The name is never that of another.
        let nothing_changed = match &ended {
            Ok(ended) => !ended,
            Err(error) => error.outcome == Outcome::NotDone,
        };
        match (nothing_changed, name, self.grant) {
            (true, Some(name), _) => drop(operations.clone().remove(name).await),
            (false, _, Some(grant)) => hint(operations, grant).await,
            _ => {}
        }
        ended.map_err(failed)
    }

    /// Ends the hold; returns whether it was there.
    async fn end(&self) -> Result<bool, StoreError> {
        let key = self.key.clone();
        let Some((kind, grant)) = self.by_grant else {
            return self.operations.clone().end(key, self.holder.clone()).await;
        };
        let request = ReleaseRequest::new(kind, key, grant);
        let reply = self.store.clone().release(request).await?;
        // It was there a moment ago: a copy of this request has ended it.
        let ended_before = matches!(reply, ReleaseReply::NotHeld { repeated: true });
        Ok(ended_before || matches!(reply, ReleaseReply::Released { .. }))
    }
}

/// Asks the holder to check at once, if its client listens; otherwise the holder checks soon by itself.
async fn hint(operations: &Arc<dyn Operations>, grant: GrantId) {
    let mailbox = EntryName::of_client("ask", grant.client());
    let message = Message::Look { grant }.write().into_bytes();
    let posted = operations
        .clone()
        .post(mailbox, grant.to_string(), message, HINTED);
    let _ = timeout_anywhere(Instant::now() + ANSWERS_WITHIN, posted).await;
}

fn client_id(client: &str) -> Result<Uuid, Error> {
    Uuid::try_parse(client)
        .map_err(|_| Error::invalid_option("client", "it is not a client id, as LockClient::id returns it"))
}

fn failed(error: StoreError, what: &str) -> Error {
    error.into_error(what, &LockKey::raw("*"))
}
