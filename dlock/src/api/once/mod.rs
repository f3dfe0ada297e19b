//! Work that is done once, however many processes ask for it.

mod claim;
mod error;
mod run;
mod slot;
mod slots;
mod stored;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

pub use self::claim::OnceClaim;
pub use self::error::{NotRun, OnceError};
use self::run::{Admitted, Carried};
pub use self::slot::{OnceEvery, OnceSlot, SlotReply};
pub use self::slots::Slots;
use crate::api::builder::DEFAULT_LEASE;
use crate::runtime::client::Handle;
use crate::runtime::options::{check_duration, check_lease};
use crate::store::records::{OnOrphan, RecordKey, Records};
use crate::{Error, LockClient, LockKey};

/// How long a result is kept by default: a day. [`Once::keep`] sets it.
const DEFAULT_KEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Named work that is done once in a fleet; created by [`LockClient::once`] or [`Records::once`].
///
/// A lock lets one process at a time do the work; short work is then done by each of them in turn. `Once` remembers
/// that the work was done: the first call runs it, and each later call gets the result from the store, in one round
/// trip.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::OnceError<String>> {
/// use dlock::{LockClient, OnceReply};
/// use std::time::Duration;
///
/// let client = LockClient::memory();
/// let send = async |user: u64| {
///     let welcome = client.once(format!("welcome:{user}")).keep(Duration::from_secs(30 * 24 * 60 * 60));
///     welcome.run(async |_claim| Ok::<_, String>(format!("sent to {user}"))).await
/// };
/// assert!(matches!(send(7).await?, OnceReply::Ran(_)));
/// assert!(matches!(send(7).await?, OnceReply::Earlier(sent) if sent == "sent to 7"));
/// # Ok(()) }
/// ```
///
/// # What is promised
///
/// While the work runs, its process holds a claim with a lease, renewed every third of it. When a process crashes, the
/// next attempt may begin when the lease is over, or none may ([`on_orphan`](Self::on_orphan)). A process that is
/// stopped for longer learns of the loss, and its work is dropped, before another attempt can begin, as with a lock. So
/// no two attempts run at the same time, under the assumptions of a lock; and if the resource checks the [fencing
/// token](OnceClaim::fencing_token), a late attempt does no harm even without these assumptions. **A kept result is
/// never computed again** until [`keep`](Self::keep) is over. The effects of a crashed attempt are not undone: by
/// default the work is done at least once, with [`OnOrphan::Leave`] and [`OnFailure::Keep`] at most once. For exactly
/// once, put effect and result into one transaction (`dlock-postgres`).
///
/// Stores without records, such as a quorum, refuse it with [`Error::Unsupported`].
#[derive(Clone)]
#[must_use = "nothing is done until it runs"]
pub struct Once {
    source: Source,
    key: LockKey,
    lease: Option<Duration>,
    keep: Option<Duration>,
    wait: Option<Duration>,
    on_failure: OnFailure,
    on_orphan: OnOrphan,
}

#[derive(Clone)]
enum Source {
    Client(Arc<Handle>),
    Records(Records),
}

/// What later calls do after work that failed.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use dlock::{LockClient, OnFailure, OnceError};
///
/// let client = LockClient::memory();
/// let import = client.once("import").on_failure(OnFailure::AtMost(2));
/// for _ in 0..2 {
///     let failed = import.run(async |_| Err::<(), _>("no such file")).await;
///     assert!(matches!(failed, Err(OnceError::Work(_))));
/// }
/// let given_up = import.run(async |_| Ok::<(), &str>(())).await;
/// assert!(matches!(given_up, Err(OnceError::Failed { attempts: 2, .. })));
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnFailure {
    /// The next call does the work again. The default.
    #[default]
    RunAgain,
    /// The failure is kept like a result: later calls return [`OnceError::Failed`].
    Keep,
    /// Like `RunAgain`, but with a limit on attempts in all, at least 1; crashed attempts count too. So work that kills
    /// its process does not do so for ever.
    AtMost(u32),
}

/// The outcome of a call.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::OnceError<String>> {
/// use dlock::{LockClient, OnceReply};
///
/// let client = LockClient::memory();
/// match client.once("report").run(async |_| Ok::<_, String>(42)).await? {
///     OnceReply::Ran(rows) | OnceReply::Earlier(rows) => println!("{rows} rows"),
///     OnceReply::Elsewhere { remaining, .. } => println!("another process is at it: ask in {remaining:?}"),
///     OnceReply::Unrecorded(rows, error) => println!("{rows} rows, but it may be done again: {error}"),
///     _ => {}
/// }
/// # Ok(()) }
/// ```
///
/// A consumer that acknowledged its message without a look at the reply would lose it where the process that does the work
/// crashes:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # async fn consume(client: dlock::LockClient) -> Result<(), dlock::OnceError<String>> {
/// client.once("message-7").run(async |_| Ok::<_, String>(())).await?; // it may be done elsewhere
/// # Ok(()) }
/// ```
///
/// ```
/// #![deny(unused_must_use)]
/// # async fn consume(client: dlock::LockClient) -> Result<(), dlock::OnceError<String>> {
/// let reply = client.once("message-7").run(async |_| Ok::<_, String>(())).await?;
/// if let dlock::OnceReply::Elsewhere { .. } = reply {
///     // the message stays
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
#[must_use = "`Elsewhere` means that the work is not done yet"]
pub enum OnceReply<T> {
    /// The work ran here, and its result is kept.
    Ran(T),
    /// The work was done before: this is its result.
    Earlier(T),
    /// Another process does the work now, or another task of this one. A consumer that acknowledges its message now
    /// loses that message if the other attempt fails.
    #[non_exhaustive]
    Elsewhere {
        /// The number of that attempt.
        attempt: u32,
        /// The rest of its lease, unless it is renewed.
        remaining: Duration,
    },
    /// The work ran here, but the store did not confirm its result in time. The client keeps sending it in the
    /// background, unless the store refuses it for good; if the lease ends before it arrives, another process may do the
    /// work again.
    Unrecorded(T, Error),
}

impl<T> OnceReply<T> {
    /// Returns the result, if there is one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::OnceError<String>> {
    /// # let client = dlock::LockClient::memory();
    /// let reply = client.once("report").run(async |_| Ok::<_, String>(42)).await?;
    /// assert_eq!(reply.into_result(), Some(42));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn into_result(self) -> Option<T> {
        match self {
            OnceReply::Ran(value) | OnceReply::Earlier(value) | OnceReply::Unrecorded(value, _) => {
                Some(value)
            }
            OnceReply::Elsewhere { .. } => None,
        }
    }

    /// Returns whether the work ran here.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::OnceError<String>> {
    /// # let client = dlock::LockClient::memory();
    /// let report = client.once("report");
    /// assert!(report.run(async |_| Ok::<_, String>(42)).await?.ran_here());
    /// assert!(!report.run(async |_| Ok::<_, String>(42)).await?.ran_here()); // it was done before
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn ran_here(&self) -> bool {
        matches!(self, OnceReply::Ran(_) | OnceReply::Unrecorded(..))
    }
}

impl LockClient {
    /// Returns the work of this name, done once; see [`Once`]. Nothing is sent until it runs. These names are separate
    /// from those of locks. The client's [`shutdown`](Self::shutdown) waits for the work.
    pub fn once(&self, key: impl Into<LockKey>) -> Once {
        Once::new(Source::Client(self.handle().clone()), key.into())
    }
}

impl Records {
    /// Returns the work of this name on records without a client, such as those of `dlock-postgres`. No shutdown of a client
    /// waits for it, also where the records are those of a [client](LockClient::records). The tokio
    /// runtime in which a call is polled renews its claim: outside of one the call panics, before it claims the name.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let records = dlock::LockClient::memory().records()?;
    /// let reply = records.once("report").run(async |_| Ok::<_, String>(42)).await?;
    /// assert_eq!(reply.into_result(), Some(42));
    /// # Ok(()) }
    /// ```
    pub fn once(&self, key: impl Into<LockKey>) -> Once {
        Once::new(Source::Records(self.clone()), key.into())
    }
}

impl Once {
    fn new(source: Source, key: LockKey) -> Once {
        Once {
            source,
            key,
            lease: None,
            keep: None,
            wait: None,
            on_failure: OnFailure::default(),
            on_orphan: OnOrphan::default(),
        }
    }

    /// Sets how long other processes wait to do the work after this one crashed during it. The lease is renewed every
    /// third of it. The client's by default ([`LockClientBuilder::lease`](crate::LockClientBuilder::lease), 30 s).
    pub fn lease(mut self, lease: Duration) -> Once {
        self.lease = Some(lease);
        self
    }

    /// Sets how long the result is kept, from the end of the work on: a day by default. After that the next call does
    /// the work again. At least two leases, and at most a year.
    pub fn keep(mut self, keep: Duration) -> Once {
        self.keep = Some(keep);
        self
    }

    /// Waits at most this long for the result of work that another process does, instead of returning
    /// [`OnceReply::Elsewhere`] at once. If that process fails or crashes in that time, this one does the work.
    pub fn wait(mut self, most: Duration) -> Once {
        self.wait = Some(most);
        self
    }

    /// Sets what later calls do after failed work: by default the next call does it again.
    pub fn on_failure(mut self, on_failure: OnFailure) -> Once {
        self.on_failure = on_failure;
        self
    }

    /// Sets what later calls do after an attempt whose process crashed, was cut off, or dropped the work, so that it is
    /// unknown how far the work got: by default the next call takes it over, as the next attempt.
    pub fn on_orphan(mut self, on_orphan: OnOrphan) -> Once {
        self.on_orphan = on_orphan;
        self
    }

    /// Returns the name of the work.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Checks name, options and store, as each call does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`] or [`Error::InvalidOption`]; [`Error::Unsupported`] if the store has no records.
    pub fn check(&self) -> Result<(), Error> {
        LockKey::new(self.key.clone())?;
        let lease = self.lease_or_default();
        check_lease("lease", Some(lease))?;
        let keep = self.keep_or_default();
        check_duration("keep", Some(keep))?;
        check_duration("wait", self.wait)?;
        if keep < 2 * lease {
            let reason = format!("{keep:?} is less than two leases of {lease:?}");
            return Err(Error::InvalidOption {
                option: "keep",
                reason,
            });
        }
        let reason = match self.on_failure {
            OnFailure::AtMost(0) => "no attempt at all is not work that is done once",
            OnFailure::AtMost(_) if self.on_orphan == OnOrphan::Leave => {
                "attempts are counted by taking over, which OnOrphan::Leave forbids"
            }
            _ => return self.records().map(drop),
        };
        Err(Error::invalid_option("on_failure", reason))
    }

    /// Does the work, unless it was done before: runs the closure's future under a claim and keeps its result, or
    /// returns the kept result. A result is kept as JSON of at most 1 MiB; if it is larger, later calls learn only that
    /// there was one.
    ///
    /// **Values that JSON does not distinguish come back as one of them**: `Some(())` and `Some(None)` are both `null`,
    /// and later calls get `None`. A NaN is `null` as well, which is not a number: [`OnceError::Unreadable`]. Where
    /// this matters, return a `bool` or an enum:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::OnceError<String>> {
    /// let find = dlock::LockClient::memory().once("find");
    /// let ran = find.run(async |_| Ok::<_, String>(Some(()))).await?;
    /// assert_eq!(ran.into_result(), Some(Some(())));
    /// let earlier = find.run(async |_| Ok::<_, String>(Some(()))).await?;
    /// assert_eq!(earlier.into_result(), Some(None)); // not what the first call got
    /// # Ok(()) }
    /// ```
    ///
    /// The future is polled in the caller's task. It is dropped when the claim is lost. Any thread can wait for a call, also
    /// outside tokio: then the timers are those of the client's runtime, and the work itself has none.
    ///
    /// # Errors
    ///
    /// See [`OnceError`].
    ///
    /// # Cancel safety
    ///
    /// Dropped before the work began, it leaves nothing behind. Dropped during the work, it gives up the claim at once,
    /// and [`on_orphan`](Self::on_orphan) decides what follows. Dropped after the work is done, the result is still
    /// kept.
    pub fn run<T, E, W, Fut>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<OnceReply<T>, OnceError<E>>> + use<T, E, W, Fut>
    where
        T: Serialize + DeserializeOwned,
        W: FnOnce(OnceClaim) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let this = self.clone();
        async move {
            this.check()?;
            let target = Arc::new(this.target()?);
            let (admitted, _) = this.admitted(&target, None).await?;
            let claim = match admitted {
                Admitted::Claimed(claim) => claim,
                Admitted::Done(bytes) => return stored::earlier(&bytes).map(OnceReply::Earlier),
                Admitted::Elsewhere { attempt, remaining } => {
                    return Ok(OnceReply::Elsewhere { attempt, remaining });
                }
                Admitted::Orphaned { attempt } => return Err(OnceError::Orphaned { attempt }),
                Admitted::NotNow => return Err(this.told(run::strange()).into()),
            };
            Ok(match this.carried_out(&target, claim, work).await? {
                Carried::Ran(value) => OnceReply::Ran(value),
                Carried::Unrecorded(value, error) => OnceReply::Unrecorded(value, error),
            })
        }
    }

    /// Returns the name of the record in which the result is kept: for [`Records::inspect`] and [`Records::forget`].
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = dlock::LockClient::memory();
    /// let report = client.once("report");
    /// assert_eq!(report.run(async |_| Ok::<_, String>(42)).await?.into_result(), Some(42));
    /// client.records()?.forget(&report.record_key()?).await?; // the report was wrong: make it anew
    /// # Ok(()) }
    /// ```
    pub fn record_key(&self) -> Result<RecordKey, Error> {
        record_of(&LockKey::new(self.key.clone())?)
    }

    fn records(&self) -> Result<Records, Error> {
        match &self.source {
            Source::Client(handle) => handle.shared().records(),
            Source::Records(records) => Ok(records.clone()),
        }
    }

    fn keep_or_default(&self) -> Duration {
        self.keep.unwrap_or(DEFAULT_KEEP)
    }

    fn lease_or_default(&self) -> Duration {
        self.lease.unwrap_or_else(|| match &self.source {
            Source::Client(handle) => handle.shared().settings.lease,
            Source::Records(_) => DEFAULT_LEASE,
        })
    }
}

impl std::fmt::Debug for Once {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Once")
            .field("key", &self.key)
            .field("lease", &self.lease_or_default())
            .field("keep", &self.keep_or_default())
            .field("wait", &self.wait)
            .field("on_failure", &self.on_failure)
            .field("on_orphan", &self.on_orphan)
            .finish_non_exhaustive()
    }
}

/// Returns the name of the record. It is separate from those of idempotent requests, and legible where the key allows.
fn record_of(key: &LockKey) -> Result<RecordKey, Error> {
    const LEGIBLE: usize = 100;
    let text = key.as_str();
    let is_plain = text
        .bytes()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_'));
    if is_plain && text.len() <= LEGIBLE {
        return RecordKey::new(format!("once-{text}"));
    }
    let digest = Sha256::digest(text.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    RecordKey::new(format!("once_{hex}"))
}
