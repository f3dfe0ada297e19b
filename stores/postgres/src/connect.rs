//! Opens connections to the server, with any TLS implementation.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::try_join;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Error, Notification, Socket};

use super::failure;
use super::greeting::is_greeted_by;
use super::hosts::{Candidate, candidates};
use dlock::store::{Reason, StoreError};

/// Opens connections to the primary, which is one of the configured hosts, and may change.
pub(crate) struct Connector {
    opener: Box<dyn Open>,
    hosts: Vec<Candidate>,
    /// The hosts' addresses, for messages, without credentials.
    pub(crate) address: String,
    /// The time limit of an operation, and of connecting.
    pub(crate) timeout: Duration,
}

/// An open connection. Dropping it closes it.
pub(crate) struct Session {
    pub(crate) client: Client,
    /// Closed when the connection ends.
    pub(crate) notifications: mpsc::UnboundedReceiver<Notification>,
    pub(crate) driver: Driver,
}

/// The task that does the I/O of a connection. When it is dropped, the connection closes: at once if no reply is missing, and
/// else after the server was told to cancel the statement, unless a pooler is in between. A server that waits for a lock, or
/// for a standby, does not notice that its client is gone, and would keep the connection until the wait is over.
pub(crate) struct Driver(Option<Running>);

struct Running {
    /// Whether the server itself is at the other end. PgBouncer ends itself at some cancel requests (its issue 801).
    is_direct: AtomicBool,
    task: Aborted,
    cancel: Cancel,
    /// How long to wait for the replies to cancelled statements.
    limit: Duration,
    /// Where the task runs: the last owner may be dropped in another runtime.
    runtime: Handle,
}

/// Asks the server, on another connection, to cancel the statement that it executes.
type Cancel = Box<dyn Fn() -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// How long a connection that is no longer needed may take to close by itself, and how often the server is asked to cancel. Each
/// request cancels a single statement, and more of them may have been sent.
const CLOSING: Duration = Duration::from_millis(100);

/// The shortest and the longest time that a connection without replies may take to close.
const LINGERING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

impl Session {
    /// Finds out whether the server itself is at the other end, so that statements without a reply are cancelled.
    pub(crate) async fn find_server(&self) -> Result<(), Error> {
        let rows = self
            .client
            .query_typed("SELECT pid FROM pg_backend_pid() AS pid", &[])
            .await?;
        if let (Some(row), Some(running)) = (rows.first(), &self.driver.0) {
            let is_direct = is_greeted_by(&self.client, row.try_get(0)?).await;
            running.is_direct.store(is_direct, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether this connection gets the notifications of all holders; if not, why.
    pub(crate) async fn hears(&self) -> Result<Result<(), &'static str>, Error> {
        let rows = self.client.query_typed(HEARS, &[]).await?;
        let Some(row) = rows.first() else {
            return Ok(Ok(()));
        };
        Ok(match (row.try_get(0)?, row.try_get(1)?) {
            (true, _) => Err(ONLY_READS),
            (false, true) => Err(NO_ROOM),
            (false, false) => Ok(()),
        })
    }
}

/// Returns the reply, or why there is none within `limit`.
pub(crate) async fn answered<T>(
    limit: Duration,
    asking: impl Future<Output = Result<T, Error>>,
) -> Result<T, String> {
    match timeout(limit, asking).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {limit:?}")),
    }
}

/// Reads whether the server only reads, and whether its queue of notifications is full, or will be soon.
const HEARS: &str = "SELECT r.reads, CASE WHEN r.reads THEN false ELSE pg_notification_queue_usage() > 0.95 END \
                     FROM (SELECT current_setting('transaction_read_only')::bool AS reads) r";
/// Why a connection for notifications is unusable once its server no longer accepts writes.
const ONLY_READS: &str = "the server only reads, another one has the notifications";
/// Why notifications are not relied on: with a full queue, releases are carried out without them.
const NO_ROOM: &str = "the server has no room for notifications: a session that listens, in any database, is in a transaction \
                       that has to end";

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(running) = self.0.take() {
            running.runtime.clone().spawn(running.close());
        }
    }
}

impl Running {
    /// Waits for the end of the task. The client is dropped at about the same time, and then the task ends with the last reply.
    async fn close(self) {
        let Running {
            is_direct,
            mut task,
            cancel,
            limit,
            ..
        } = self;
        let closing = async {
            while timeout(CLOSING, &mut task.0).await.is_err() && is_direct.load(Ordering::Relaxed) {
                cancel().await;
            }
        };
        // Over a network that is broken there is neither.
        let _ = timeout(limit, closing).await;
    }
}

/// A task that is aborted when this is dropped.
struct Aborted(JoinHandle<()>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

type Opening<'a> = Pin<Box<dyn Future<Output = Result<Session, Error>> + Send + 'a>>;

/// Opens connections, without a type parameter for TLS.
trait Open: Send + Sync {
    fn open<'a>(&'a self, config: &'a Config) -> Opening<'a>;
}

struct Opener<T> {
    tls: T,
    /// How long a connection may take to close.
    limit: Duration,
}

impl<T> Open for Opener<T>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn open<'a>(&'a self, config: &'a Config) -> Opening<'a> {
        Box::pin(async move {
            let (client, mut connection) = config.connect(self.tls.clone()).await?;
            let (token, tls) = (client.cancel_token(), self.tls.clone());
            let (told, notifications) = mpsc::unbounded_channel();
            let task = tokio::spawn(async move {
                while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
                    if let AsyncMessage::Notification(notification) = message
                        && told.send(notification).is_err()
                    {
                        return;
                    }
                }
            });
            Ok(Session {
                client,
                notifications,
                driver: Driver(Some(Running {
                    is_direct: AtomicBool::new(false),
                    task: Aborted(task),
                    cancel: Box::new(move || {
                        let (token, tls) = (token.clone(), tls.clone());
                        Box::pin(async move {
                            if let Err(error) = token.cancel_query(tls).await {
                                tracing::debug!(%error, "a statement without a reply could not be cancelled");
                            }
                        })
                    }),
                    limit: self.limit,
                    runtime: Handle::current(),
                })),
            })
        })
    }
}

impl Connector {
    pub(crate) fn new<T>(config: &Config, tls: T, timeout: Duration) -> Connector
    where
        T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let hosts = candidates(config, timeout);
        let addresses: Vec<&str> = hosts.iter().map(|host| &*host.address).collect();
        Connector {
            address: addresses.join(", "),
            hosts,
            opener: Box::new(Opener {
                tls,
                limit: timeout.clamp(LINGERING.0, LINGERING.1),
            }),
            timeout,
        }
    }

    /// Connects to the first host that accepts writes. The timeout is divided among the hosts.
    pub(crate) async fn connect(&self) -> Result<Session, StoreError> {
        self.connect_with(true).await
    }

    /// Connects without changing settings of the session: behind a transaction pooler other clients would get them.
    pub(crate) async fn connect_plain(&self) -> Result<Session, StoreError> {
        self.connect_with(false).await
    }

    async fn connect_with(&self, settings: bool) -> Result<Session, StoreError> {
        let deadline = Instant::now() + self.timeout;
        let mut failed: Option<StoreError> = None;
        for (i, host) in self.hosts.iter().enumerate() {
            let rest = u32::try_from(self.hosts.len() - i).unwrap_or(u32::MAX);
            let share = deadline.saturating_duration_since(Instant::now()) / rest;
            let error = match timeout(share, self.try_connect(&host.config, settings)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(error)) => failure::of_connecting(error, &host.address),
                Err(_) => StoreError::not_done(
                    Reason::Unreachable,
                    format!("{} did not answer within {share:?}", host.address),
                ),
            };
            failed = Some(match failed {
                None => error,
                // If only one of the hosts refuses permanently, the other may come back.
                Some(before) => {
                    let passing = [&before, &error]
                        .iter()
                        .any(|each| each.reason != Reason::Refused);
                    let reason = if passing {
                        Reason::Unreachable
                    } else {
                        Reason::Refused
                    };
                    StoreError::not_done(reason, format!("{}; {}", before.message, error.message))
                }
            });
        }
        Err(failed.unwrap_or_else(|| StoreError::not_done(Reason::Unreachable, "no host is given")))
    }

    async fn try_connect(&self, config: &Config, settings: bool) -> Result<Session, Error> {
        let session = self.opener.open(config).await?;
        if settings {
            self.apply_settings(&session).await?;
        }
        Ok(session)
    }

    /// Applies the settings to a session that was connected without them.
    pub(crate) async fn set_up(&self, session: &Session) -> Result<(), StoreError> {
        match timeout(self.timeout, self.apply_settings(session)).await {
            Ok(changed) => changed.map_err(|error| failure::of_step(error).into()),
            Err(_) => Err(self.no_answer(self.timeout)),
        }
    }

    async fn apply_settings(&self, session: &Session) -> Result<(), Error> {
        let settings = self.settings();
        // In one round trip.
        try_join!(session.client.batch_execute(&settings), session.find_server()).map(|_| ())
    }

    fn settings(&self) -> String {
        // Statements must see a row as it is, not as it was when they began. To compile one takes longer than any of them, and
        // the server would where its statistics are old. Idle connections are kept.
        let limit = server_limit(self.timeout);
        format!(
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; SET statement_timeout = {limit}; \
             SET jit = off; SELECT set_config('idle_session_timeout', '0', false) \
             WHERE current_setting('idle_session_timeout', true) IS NOT NULL"
        )
    }

    /// Runs the SQL that creates a table. `IF NOT EXISTS` alone fails if two clients create it concurrently.
    pub(crate) async fn create(&self, schema: &str) -> Result<(), StoreError> {
        const ALONE: i64 = 0x646c_6f63_6b72_6563;
        let session = self.connect_plain().await?;
        // It takes longer than a step, and many processes that start together take turns.
        let within = self.timeout * 30;
        let (all, each) = (server_limit(within), server_limit(self.timeout));
        // A table is not waited for when the client has given up: all who use it would wait behind. Other clients that create
        // it are.
        let sql = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = {all}; \
             SET LOCAL lock_timeout = {all}; SELECT pg_advisory_xact_lock({ALONE}); \
             SET LOCAL lock_timeout = {each}; {schema} COMMIT"
        );
        match timeout(within, session.client.batch_execute(&sql)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(failure::of_step(error).into()),
            Err(_) => Err(self.no_answer(within)),
        }
    }

    fn no_answer(&self, within: Duration) -> StoreError {
        StoreError::unknown(format!("{} did not answer within {within:?}", self.address))
    }
}

/// The milliseconds after which the server gives up what a client waits for so long: a little before the client, so that the
/// outcome is known.
fn server_limit(within: Duration) -> u128 {
    const LONGEST: u128 = i32::MAX as u128;
    (within.as_millis() * 4 / 5).clamp(1, LONGEST)
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_gives_up_before_the_client_and_within_the_longest_limit_that_it_takes() {
        assert_eq!(server_limit(Duration::from_millis(1)), 1);
        assert_eq!(server_limit(Duration::from_secs(1)), 800);
        assert_eq!(
            server_limit(Duration::from_secs(365 * 24 * 60 * 60)),
            2_147_483_647
        );
    }
}
