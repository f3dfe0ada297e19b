//! Options of a client, and how it opens the store that a URL names.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime;
use uuid::Uuid;

use crate::base::key::OWN;
use crate::runtime::client::{Handle, Settings};
use crate::runtime::options::{check_duration, check_lease};
use crate::runtime::presence::Publicity;
use crate::store::credentials::{Credentials, Provider};
use crate::store::options::{Common, DEFAULT_MAX_QUEUED, DEFAULT_TIMEOUT, MinReplicas, Tls};
use crate::store::url::{StoreUrl, Topology, UrlOptions};
use crate::store::{GrantId, Kind, Scheme, Store};
use crate::stores;
use crate::{Error, LockClient, LockKey};

/// The default lease, which the watchdog renews.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// How long a call keeps retrying through store failures by default.
pub const DEFAULT_RETRY_FOR: Duration = Duration::from_secs(3);

/// Options of a [`LockClient`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
/// use std::time::Duration;
///
/// let client = dlock::LockClient::builder()
///     .url("memory://shop") // in production: rediss://user@redis.internal
///     .lease(Duration::from_secs(10))
///     .retry_for(Duration::from_secs(1))
///     .prefix("shop:")
///     .build()
///     .await?;
/// assert_eq!(client.lease(), Duration::from_secs(10));
/// # Ok(()) }
/// ```
#[must_use = "a builder does nothing until it is built"]
#[derive(Default)]
pub struct LockClientBuilder {
    url: Option<String>,
    store: Option<Arc<dyn Store>>,
    schemes: Vec<Scheme>,
    lease: Option<Duration>,
    timeout: Option<Duration>,
    retry_for: Option<Duration>,
    max_queued: Option<usize>,
    prefix: Option<String>,
    service_name: Option<String>,
    runtime: Option<runtime::Handle>,
    tls: Tls,
    sentinel: SentinelLogin,
    credentials: Option<Provider>,
    max_lease: Option<Duration>,
    trust_fresh: Option<bool>,
    replicas: Option<MinReplicas>,
    presence: Option<bool>,
    control: Option<bool>,
    required: Vec<Kind>,
}

impl LockClientBuilder {
    /// Sets the store by its URL; see [`LockClient::connect`]. Options of the builder override those of the URL's
    /// query.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Registers the URL schemes of a store that is not part of dlock. May be called several times; for a scheme that
    /// is registered twice the first registration counts, and it overrides a scheme of dlock.
    pub fn scheme(mut self, scheme: Scheme) -> Self {
        self.schemes.push(scheme);
        self
    }

    /// Sets the store instead of a URL: a store of your own, or a shared
    /// [`MemoryStore`](crate::stores::memory::MemoryStore). `prefix` then has no effect. `timeout` does not bound the
    /// store's own steps, but still decides when a missing reply is logged, how long presence and `why_lost` wait, and
    /// which request times the doctor finds too long.
    pub fn store(self, store: impl Store) -> Self {
        self.shared_store(Arc::new(store))
    }

    /// Sets a store that other clients use as well, such as that of [`build_store`](Self::build_store).
    pub fn shared_store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sets the lease of renewed locks; the watchdog renews every third of it. 30 s by default. After its holder
    /// crashes, a lock becomes available when its lease expires.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets the timeout of one store operation; 1 s by default. Connecting takes several round trips (socket, TLS,
    /// login, a check of the server), and the timeout applies to each.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how long an acquire or an awaited release keeps retrying through store failures before it gives up; 3 s by
    /// default.
    pub fn retry_for(mut self, retry_for: Duration) -> Self {
        self.retry_for = Some(retry_for);
        self
    }

    /// Limits how many acquires, claims and inspections may wait to be sent to a server that does not keep up; 65,536
    /// by default. Further requests fail at once with [`Error::Unreachable`] (a waiting acquire retries until
    /// `retry_for` is over). Releases and renewals are never refused: there are never more of them than holds.
    ///
    /// For Redis, Valkey and quorums of them; other stores ignore it.
    pub fn max_queued(mut self, requests: usize) -> Self {
        self.max_queued = Some(requests);
        self
    }

    /// Sets the prefix of every lock name on the store; none by default. It does not begin with `dlock:`. All clients of a lock need the same prefix:
    /// each prefix has its own fencing tokens, which start from the server's clock. In memory each prefix is a store of its
    /// own.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = Some(prefix.into());
        self
    }

    /// Sets the name of this service, shown in the server's list of clients and in the client's
    /// [presence](Self::presence) entry; the program's name by default.
    pub fn service_name(mut self, name: impl Into<String>) -> Self {
        self.service_name = Some(name.into());
        self
    }

    /// Sets whether this client publishes its presence: service, machine, address, process and version, and for each of
    /// the 32 oldest holds and the 32 oldest waits of more than a second the name, file and line, and
    /// [note](crate::Lock::note); of more than 4,096 of them, the oldest of any 4,096. `false` by default; in a URL
    /// `presence=on`.
    ///
    /// Presence is one entry per client, at most 16 KiB, written at most once a second and at least every 5 s. It
    /// expires one minute or two leases after the last write, whichever is later. A client that has been idle for a few
    /// seconds removes it, and writes nothing; no acquire or release waits for a write. Presence is for the person on
    /// call, see [`LockClient::clients`]. No lock depends on it: a client that is not permitted to write it works
    /// without. In memory, on Redis, Valkey and quorums; other stores keep no such entries, and [`build`](Self::build)
    /// refuses it there.
    pub fn presence(mut self, presence: bool) -> Self {
        self.presence = Some(presence);
        self
    }

    /// Sets whether this client answers [`LockClient::ask`] with what it holds and waits for at that moment, at most
    /// ten times a second. `false` by default; in a URL `control=on`. It keeps a subscription open while the client
    /// lives, and switches [`presence`](Self::presence) on, for the same stores.
    ///
    /// Such a request carries no authority: a process that can ask learns what the client would publish anyway, and
    /// cannot change a lock.
    pub fn control(mut self, control: bool) -> Self {
        self.control = Some(control);
        self
    }

    /// Trusts the certificate authority with this certificate (PEM), instead of the system's authorities. For
    /// `rediss://`.
    #[cfg(feature = "tls")]
    pub fn root_certificate(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.tls.root = Some(pem.into());
        self
    }

    /// Sets the certificate and the key (PEM) that identify this client to the server; none by default. For
    /// `rediss://`.
    #[cfg(feature = "tls")]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.tls.client = Some((pem.into(), key.into()));
        self
    }

    /// Asks `provider` for user and password for each connection to a server that has locks, instead of taking them
    /// from the URL: for tokens that change, such as those of a cloud's identity service. If the credentials expire
    /// ([`Credentials::valid_for`]), open connections log in again after three quarters of that time.
    ///
    /// The function is called once for each connection and each new login, by several tasks at the same time, and may
    /// take 10 s. If it fails or panics, the connection attempt fails and is retried. The text of its error appears in
    /// errors and in the log, so it must not contain a password. The sentinels have a separate login
    /// ([`sentinel_password`](Self::sentinel_password)).
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn token_from_the_cloud() -> std::io::Result<String> { Ok(String::new()) }
    /// # async fn example() -> Result<(), dlock::Error> {
    /// use std::time::Duration;
    ///
    /// use dlock::{Credentials, LockClient};
    ///
    /// let client = LockClient::builder()
    ///     .url("rediss+cluster://cache.example:6379")
    ///     .credentials(|| async {
    ///         let token = token_from_the_cloud().await?;
    ///         let credentials = Credentials::new("svc", token);
    ///         Ok::<_, std::io::Error>(credentials.valid_for(Duration::from_secs(900)))
    ///     })
    ///     .build()
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn credentials<P, F, E>(mut self, provider: P) -> Self
    where
        P: Fn() -> F + Send + Sync + 'static,
        F: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        self.credentials = Some(Provider::new(provider));
        self
    }

    /// Sets the user for the sentinels, where they require a login; none by default. Only for `redis+sentinel://`; the
    /// servers' user and password stand in the URL before its hosts.
    pub fn sentinel_user(mut self, user: impl Into<String>) -> Self {
        self.sentinel.user = Some(user.into());
        self
    }

    /// Sets the password for the sentinels, which never receive the servers' password; none by default. Only for
    /// `redis+sentinel://`.
    pub fn sentinel_password(mut self, password: impl Into<String>) -> Self {
        self.sentinel.password = Some(password.into());
        self
    }

    /// Sets the runtime for the background work; by default the runtime that calls [`build`](Self::build).
    pub fn runtime(mut self, runtime: runtime::Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Sets the longest lease on a quorum of servers, which is also how long a server that may have lost its data does
    /// not vote; 60 s by default. Use the same value for all clients. Only for `quorum+redis://`.
    pub fn max_lease(mut self, max_lease: Duration) -> Self {
        self.max_lease = Some(max_lease);
        self
    }

    /// Lets the servers of a quorum vote at once, without proof that they kept their data: for a first installation and
    /// for tests, while no lock can be held. `false` by default. Only for `quorum+redis://`.
    pub fn trust_fresh_servers(mut self, trust: bool) -> Self {
        self.trust_fresh = Some(trust);
        self
    }

    /// Counts a lock as acquired or renewed only when `replicas` of its server's replicas have acknowledged it `within`
    /// this time; none by default. For one server with replicas, for `redis+sentinel://` and `redis+cluster://`; in a
    /// URL `min_replicas=1&min_replicas_within=500ms` (500 ms by default).
    ///
    /// It narrows the window in which a fail-over loses locks, but does not close it. If fewer replicas are required
    /// than exist, a replica without the lock may be promoted; and a master that is cut off from all other servers
    /// keeps granting locks that no replica has. A majority of independent servers (`quorum+redis://`) has no such
    /// window.
    ///
    /// - An acquire that too few replicas acknowledge is undone and fails with [`Error::NotReplicated`], at once and
    ///   without another attempt, however long its wait time is. Nothing stays behind.
    /// - A renewal that too few replicas acknowledge fails: the hold becomes suspect
    ///   ([`HoldState::Suspect`](crate::HoldState::Suspect)), and the renewal is retried more often as the end of the
    ///   lease approaches. Without enough replicas the lock is lost when the last acknowledged lease ends.
    /// - A lock that is handed off inside the process is as safe as before; a suspect one is not handed off.
    /// - Releases, semaphore totals, latches and records are not acknowledged: if a fail-over loses a release, the lock
    ///   ends with its lease.
    ///
    /// Each server gets a third connection for this, because `WAIT` blocks later commands on its connection. The user
    /// needs `+wait`. An operation may take `within` longer than [`timeout`](Self::timeout), an acquire twice that. The
    /// wait for replicas is part of the lease, so `within` is at most a third of it: the client's lease is checked, a shorter
    /// one of a single lock is not, and is lost where replicas take that long.
    pub fn min_replicas(mut self, replicas: u32, within: Duration) -> Self {
        self.replicas = Some(MinReplicas {
            count: replicas,
            within,
        });
        self
    }

    /// Names the kinds of locks that the program needs, so that [`build`](Self::build) refuses a store that does not have
    /// them; none by default. May be called several times. Without it such a store is noticed at the first acquire, which
    /// may be long after the start.
    ///
    /// Records are not a kind: [`LockClient::records`] refuses a store that keeps none.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), dlock::Error> {
    /// use dlock::store::Kind;
    ///
    /// let client = dlock::LockClient::builder()
    ///     .url("memory://") // from the configuration
    ///     .require([Kind::Fair, Kind::Permit])
    ///     .build()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn require<K: Into<Kind>>(mut self, kinds: impl IntoIterator<Item = K>) -> Self {
        self.required.extend(kinds.into_iter().map(Into::into));
        self
    }

    /// Connects.
    ///
    /// # Errors
    ///
    /// As for [`LockClient::connect`], and [`Error::Unsupported`] for a [required](Self::require) kind that the store does
    /// not have.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, unless [`runtime`](Self::runtime) was given, and where that runtime has no timers
    /// (`enable_time`) or, for servers, no I/O (`enable_io`).
    pub async fn build(mut self) -> Result<LockClient, Error> {
        let required = std::mem::take(&mut self.required);
        let (store, settings, uuid, runtime) = self.open().await?;
        let capabilities = store.capabilities();
        required
            .into_iter()
            .try_for_each(|kind| capabilities.require(kind))?;
        Ok(Handle::start(store, settings, uuid, &runtime).into())
    }

    /// Connects, and returns the store itself: to wrap it in a store of your own that counts, restricts or injects
    /// failures, or to build a [quorum](crate::stores::quorum::Quorum) of several. [`shared_store`](Self::shared_store)
    /// builds a client on it. The options for locks (`lease`, `retry_for`, `require`) belong to that client and have no
    /// effect here.
    ///
    /// Each client on the store has an id of its own, which its connections do not have: without presence, `dlock show`
    /// cannot tell whether a holder that is such a client is connected.
    ///
    /// # Errors
    ///
    /// As for [`LockClient::connect`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, unless [`runtime`](Self::runtime) was given, and for servers where that runtime has no
    /// timers (`enable_time`) or no I/O (`enable_io`).
    pub async fn build_store(self) -> Result<Arc<dyn Store>, Error> {
        let (store, ..) = self.open().await?;
        Ok(store)
    }

    async fn open(self) -> Result<(Arc<dyn Store>, Settings, Uuid, runtime::Handle), Error> {
        let opened = self.open_store().await?;
        let (store, settings, ..) = &opened;
        check_presence(&settings.publicity, store)?;
        Ok(opened)
    }

    async fn open_store(mut self) -> Result<(Arc<dyn Store>, Settings, Uuid, runtime::Handle), Error> {
        let uuid = GrantId::new_client();
        match (self.url.take(), self.store.take()) {
            (Some(url), None) => {
                let mut url = StoreUrl::parse_with(&url, &self.schemes)?;
                let resolved = self.resolve(Some(&mut url))?;
                let common = Common {
                    timeout: resolved.timeout,
                    max_queued: resolved.max_queued,
                    prefix: resolved.prefix,
                    service_name: resolved.settings.publicity.service.clone(),
                    tls: self.tls,
                    credentials: self.credentials,
                    replicas: resolved.replicas,
                    uuid,
                };
                let runtime = self.runtime.unwrap_or_else(runtime::Handle::current);
                let store = stores::open(url, common, &runtime).await?;
                Ok((store, resolved.settings, uuid, runtime))
            }
            (None, Some(store)) => {
                let settings = self.resolve(None)?.settings;
                Ok((
                    store,
                    settings,
                    uuid,
                    self.runtime.unwrap_or_else(runtime::Handle::current),
                ))
            }
            (Some(_), Some(_)) => {
                let reason = "a URL was given as well, choose one of the two";
                Err(Error::invalid_option("store", reason))
            }
            (None, None) => Err(Error::invalid_option(
                "url",
                "neither a URL nor a store was given",
            )),
        }
    }

    /// Checks the options of the builder and of the URL, and writes the builder's own into the URL.
    fn resolve(&self, mut url: Option<&mut StoreUrl>) -> Result<Resolved, Error> {
        self.sentinel.overrule(url.as_deref_mut())?;
        overrule_quorum(url.as_deref_mut(), self.max_lease, self.trust_fresh)?;
        let url = url.as_deref();
        if self.credentials.is_some() {
            check_credentials(url)?;
        }
        #[cfg(feature = "tls")]
        if self.tls.root.is_some() || self.tls.client.is_some() {
            check_certificates(url)?;
        }
        let in_url = url.map(|url| url.options.clone()).unwrap_or_default();
        let mut settings = self.settings(&in_url)?;
        check_longest(settings.lease, url.and_then(StoreUrl::longest_lease))?;
        let replicas = match self.replicas {
            Some(replicas) => Some(replicas),
            None => MinReplicas::in_url(&in_url)?,
        };
        let timeout = settings.timeout;
        if let Some(replicas) = replicas {
            replicas.check(url.map(|url| &url.topology), settings.lease)?;
            settings.timeout = timeout.saturating_add(replicas.within * 2);
        }
        let max_queued = self.max_queued.unwrap_or(DEFAULT_MAX_QUEUED);
        if max_queued == 0 {
            return Err(Error::invalid_option("max_queued", "it must be at least 1"));
        }
        let prefix = self.prefix.clone().or(in_url.prefix).unwrap_or_default();
        check_prefix(&prefix)?;
        Ok(Resolved {
            settings,
            timeout,
            max_queued,
            prefix,
            replicas,
        })
    }

    /// The settings of the client, those of the builder before those in the URL.
    fn settings(&self, in_url: &UrlOptions) -> Result<Settings, Error> {
        let service = self.service_name.clone().or_else(|| in_url.name.clone());
        let answers = self.control.or(in_url.control).unwrap_or(false);
        let presence = self.presence.or(in_url.presence);
        if answers && presence == Some(false) {
            let reason = "it needs presence, which is off";
            return Err(Error::invalid_option("control", reason));
        }
        let settings = Settings {
            publicity: Publicity {
                service: service.unwrap_or_else(program_name),
                presence: presence.unwrap_or(answers),
                answers,
            },
            lease: self.lease.or(in_url.lease).unwrap_or(DEFAULT_LEASE),
            retry_for: self.retry_for.or(in_url.retry_for).unwrap_or(DEFAULT_RETRY_FOR),
            timeout: self.timeout.or(in_url.timeout).unwrap_or(DEFAULT_TIMEOUT),
        };
        check_lease("lease", Some(settings.lease))?;
        check_duration("retry_for", Some(settings.retry_for))?;
        check_duration("timeout", Some(settings.timeout))?;
        Ok(settings)
    }
}

/// The options of the builder and the URL, checked.
struct Resolved {
    settings: Settings,
    /// How long the store waits for a reply; the client's own `timeout` may be longer.
    timeout: Duration,
    max_queued: usize,
    prefix: String,
    replicas: Option<MinReplicas>,
}

impl fmt::Debug for LockClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        f.debug_struct("LockClientBuilder")
            .field("lease", &self.lease)
            .field("timeout", &self.timeout)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Credentials for the sentinels.
#[derive(Default)]
struct SentinelLogin {
    user: Option<String>,
    password: Option<String>,
}

impl SentinelLogin {
    /// Overrides those of the URL.
    fn overrule(&self, url: Option<&mut StoreUrl>) -> Result<(), Error> {
        if self.user.is_none() && self.password.is_none() {
            return Ok(());
        }
        let Some(Topology::Sentinel(sentinels)) = url.map(|url| &mut url.topology) else {
            return Err(Error::invalid_option(
                "sentinel_user or sentinel_password",
                "the store is not named by sentinels, as in redis+sentinel://a,b,c/mymaster",
            ));
        };
        let login = &mut sentinels.sentinel_login;
        login.user = self.user.clone().or(login.user.take());
        login.password = self.password.clone().or(login.password.take());
        Ok(())
    }
}

/// A credentials function needs a store with a login, and a URL without a password.
fn check_credentials(url: Option<&StoreUrl>) -> Result<(), Error> {
    let reason = match url.map(|url| url.topology.login()) {
        Some(Some(login)) if login.password.is_none() => return Ok(()),
        Some(Some(_)) => "the URL has a password as well: choose one of the two",
        Some(None) => "the store asks for none while it is in use: only servers of Redis and Valkey do",
        None => "they go with a URL, not with a store of your own",
    };
    Err(Error::invalid_option("credentials", reason))
}

/// Certificates that are not used must not seem to be.
#[cfg(feature = "tls")]
fn check_certificates(url: Option<&StoreUrl>) -> Result<(), Error> {
    let reason = match url.map(|url| url.topology.login()) {
        Some(Some(login)) if login.tls => return Ok(()),
        Some(Some(_)) => {
            "the connection is not encrypted: use rediss://, or its like for the other servers of Redis"
        }
        Some(None) => {
            "they are for servers of Redis and Valkey: other stores have options for theirs in the URL"
        }
        None => "they go with a URL, not with a store of your own",
    };
    Err(Error::invalid_option(
        "root_certificate or client_certificate",
        reason,
    ))
}

/// A client publishes its presence where its store keeps such reports.
fn check_presence(publicity: &Publicity, store: &Arc<dyn Store>) -> Result<(), Error> {
    if !publicity.presence || store.clone().operations().is_some() {
        return Ok(());
    }
    let option = if publicity.answers { "control" } else { "presence" };
    Err(Error::invalid_option(
        option,
        "this store keeps no reports of its clients: memory, Redis, Valkey and quorums do",
    ))
}

/// Overrides the quorum options of the URL with those of the builder.
fn overrule_quorum(
    url: Option<&mut StoreUrl>,
    max_lease: Option<Duration>,
    trust_fresh: Option<bool>,
) -> Result<(), Error> {
    let option = "max_lease or trust_fresh_servers";
    match url.map(|url| &mut url.topology) {
        Some(Topology::Quorum(quorum)) => {
            quorum.max_lease = max_lease.or(quorum.max_lease);
            quorum.trust_fresh = trust_fresh.or(quorum.trust_fresh);
            check_lease("max_lease", quorum.max_lease)
        }
        _ if max_lease.is_none() && trust_fresh.is_none() => Ok(()),
        _ => Err(Error::invalid_option(
            option,
            "the store is no quorum of servers, as in quorum+redis://a,b,c",
        )),
    }
}

/// Refuses a lease that is longer than the longest that the store may give.
fn check_longest(lease: Duration, longest: Option<Duration>) -> Result<(), Error> {
    match longest.filter(|longest| lease > *longest) {
        None => Ok(()),
        Some(longest) => Err(Error::InvalidOption {
            option: "lease",
            reason: format!("{lease:?} is longer than max_lease, which is {longest:?}"),
        }),
    }
}

/// A prefix is the beginning of a name, so the rules for names apply; braces are up to the user.
fn check_prefix(prefix: &str) -> Result<(), Error> {
    if prefix.starts_with(OWN) {
        return Err(Error::InvalidOption {
            option: "prefix",
            reason: format!("it begins with `{OWN}`, as the keys of clients without a prefix do"),
        });
    }
    match LockKey::raw(prefix).check() {
        Err(Error::InvalidKey { reason, .. }) if !prefix.is_empty() => Err(Error::InvalidOption {
            option: "prefix",
            reason,
        }),
        _ => Ok(()),
    }
}

/// The name of this program; empty if unknown.
pub(crate) fn program_name() -> String {
    std::env::args_os()
        .next()
        .and_then(|path| {
            std::path::Path::new(&path)
                .file_stem()
                .map(|name| name.to_string_lossy().into_owned())
        })
        .unwrap_or_default()
}
