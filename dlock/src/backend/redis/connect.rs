//! How a connection to one server is made, and what is looked at when it stands.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, RedisError, ServerErrorKind, Value,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::node::classify;
use super::script;
use crate::backend::{BackendError, Reason};
use crate::builder::Tls;
use crate::clock;
use crate::url::{Address, ServerUrl};

/// Makes connections to one server.
#[derive(Clone)]
pub(super) struct Connector {
    /// Where, for messages; without credentials.
    pub(super) address: Address,
    info: ConnectionInfo,
    /// What the connections are called in the server's list of clients.
    client_name: String,
    /// For one step, and for connecting.
    pub(super) timeout: Duration,
    warned: Arc<Once>,
}

/// What moves the bytes of a connection; over when the connection is.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection that stands.
pub(super) struct Connected {
    pub(super) connection: MultiplexedConnection,
    /// `None` where it runs by itself.
    pub(super) driver: Option<Driver>,
    pub(super) disconnected: Disconnected,
    /// The server's clock in µs, read after `asked_at`.
    pub(super) server_time: u64,
    pub(super) asked_at: Instant,
    /// What tells the server process from one that was started anew; empty where it may not be asked.
    pub(super) run_id: String,
}

/// Tells when the connection is gone, also while nothing is sent.
pub(super) struct Disconnected(mpsc::UnboundedReceiver<PushInfo>);

impl Disconnected {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match std::task::ready!(self.0.poll_recv(cx)) {
                Some(push) if push.kind != PushKind::Disconnection => {}
                _ => return Poll::Ready(()),
            }
        }
    }
}

impl Connector {
    pub(super) fn new(
        url: ServerUrl,
        client_name: String,
        timeout: Duration,
        tls: Tls,
    ) -> Result<Connector, BackendError> {
        let invalid = |error: RedisError| BackendError::not_done(Reason::Unsupported, error.to_string());
        let address = match (&url.address, url.tls) {
            (Address::Unix(path), _) => ConnectionAddr::Unix(path.into()),
            (Address::Tcp { host, port }, false) => ConnectionAddr::Tcp(host.clone(), *port),
            #[cfg(feature = "tls")]
            (Address::Tcp { host, port }, true) => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            #[cfg(not(feature = "tls"))]
            (Address::Tcp { .. }, true) => {
                return Err(BackendError::not_done(
                    Reason::Unsupported,
                    "dlock was built without its feature \"tls\"",
                ));
            }
        };
        // RESP3, for its notice of a connection that closes while nothing is sent.
        let mut settings = RedisConnectionInfo::default()
            .set_db(url.database)
            .set_protocol(ProtocolVersion::RESP3);
        // A user without a password is still to be that user, and not the default one.
        let password = url.password.or_else(|| url.user.as_ref().map(|_| String::new()));
        if let Some(user) = url.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password);
        }
        let info = address
            .into_connection_info()
            .map_err(invalid)?
            .set_tcp_settings(TcpSettings::default().set_nodelay(true))
            .set_redis_settings(settings);
        let info = if url.tls {
            tls_info(info, tls).map_err(invalid)?
        } else {
            info
        };
        Ok(Connector {
            address: url.address,
            info,
            client_name,
            timeout,
            warned: Arc::new(Once::new()),
        })
    }

    fn config() -> (AsyncConnectionConfig, mpsc::UnboundedReceiver<PushInfo>) {
        let (pushes, pushed) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(pushes);
        (config, pushed)
    }

    /// A connection by our name, and what the server sends on it without being asked.
    pub(super) async fn open(
        &self,
    ) -> Result<(MultiplexedConnection, mpsc::UnboundedReceiver<PushInfo>), RedisError> {
        let (config, pushed) = Self::config();
        let mut connection = redis::Client::open(self.info.clone())?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        self.set_name(&mut connection).await?;
        Ok((connection, pushed))
    }

    /// The same, driven by whoever uses it: a task between the two would cost each call two wake-ups.
    async fn open_driven(
        &self,
    ) -> Result<
        (
            MultiplexedConnection,
            Option<Driver>,
            mpsc::UnboundedReceiver<PushInfo>,
        ),
        RedisError,
    > {
        let stream: Pin<Box<dyn Stream>> = match self.info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                Box::pin(stream)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Box::pin(tokio::net::UnixStream::connect(path).await?),
            // The library has its driver run by itself there.
            _ => {
                let (connection, pushed) = self.open().await?;
                return Ok((connection, None, pushed));
            }
        };
        let (config, pushed) = Self::config();
        let (mut connection, driver) =
            MultiplexedConnection::new_with_config(self.info.redis_settings(), stream, config).await?;
        let mut driver: Option<Driver> = Some(Box::pin(driver));
        let name = self.set_name(&mut connection);
        driven(&mut driver, name).await?;
        Ok((connection, driver, pushed))
    }

    /// Connects and looks at the server, within the timeout.
    pub(super) async fn connect(&self) -> Result<Connected, BackendError> {
        let attempt = tokio::time::timeout(self.timeout, self.try_connect());
        match attempt.await {
            Ok(Ok(connected)) => Ok(connected),
            Ok(Err(error)) => Err(self.explain(error)),
            Err(_) => Err(BackendError::not_done(
                Reason::Unreachable,
                format!("{} did not answer within {:?}", self.address, self.timeout),
            )),
        }
    }

    async fn try_connect(&self) -> Result<Connected, RedisError> {
        let (mut connection, mut driver, disconnected) = self.open_driven().await?;
        let asked_at = clock::now();
        let look = async {
            let time: (u64, u64) = redis::cmd("TIME").query_async(&mut connection).await?;
            // Only to save the first call a round trip.
            ask(&mut connection, &script::load()).await?;
            let run_id = self.look_at_server(&mut connection).await?;
            Ok::<_, RedisError>((time, run_id))
        };
        let (time, run_id) = driven(&mut driver, look).await?;
        Ok(Connected {
            connection,
            driver,
            disconnected: Disconnected(disconnected),
            server_time: time.0 * 1_000_000 + time.1,
            asked_at,
            run_id,
        })
    }

    async fn set_name(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        ask(
            connection,
            redis::cmd("CLIENT").arg("SETNAME").arg(&self.client_name),
        )
        .await
        .map(drop)
    }

    /// Warns once of what would hurt later. The server's run id.
    async fn look_at_server(&self, connection: &mut MultiplexedConnection) -> Result<String, RedisError> {
        let info = ask(connection, redis::cmd("INFO").arg("default")).await?;
        let address = &self.address;
        let info = match &info {
            Some(Value::BulkString(bytes)) => String::from_utf8_lossy(bytes).into_owned(),
            Some(Value::VerbatimString { text, .. }) => text.clone(),
            Some(Value::SimpleString(text)) => text.clone(),
            _ => String::new(),
        };
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(str::trim)
        };
        self.warned.call_once(|| {
            match field("maxmemory_policy") {
                Some("noeviction") => {}
                Some(policy) if field("maxmemory") == Some("0") => {
                    tracing::debug!(%address, policy, "eviction is set up, but memory has no limit");
                }
                Some(policy) => tracing::warn!(
                    %address, policy,
                    "this server may evict locks when its memory is full: set maxmemory-policy noeviction"
                ),
                None => tracing::warn!(
                    %address,
                    "this server cannot be asked whether it may evict locks: see that maxmemory-policy is noeviction"
                ),
            }
            if matches!(field("role"), Some("slave" | "replica")) {
                tracing::warn!(%address, "this server is a replica: locks need its master");
            }
        });
        Ok(field("run_id").unwrap_or_default().to_owned())
    }

    fn explain(&self, error: RedisError) -> BackendError {
        let mut explained = classify(&error);
        // Nothing of ours was sent on a connection that did not come to stand.
        explained.outcome = crate::backend::Outcome::NotDone;
        // What is no Redis makes the parser speak in several lines.
        let message: Vec<_> = explained.message.split_whitespace().collect();
        explained.message = format!("{}: {}", self.address, message.join(" "));
        if error.kind() == ErrorKind::AuthenticationFailed || error.code() == Some("NOAUTH") {
            explained.reason = Reason::Refused;
        }
        match error.kind() {
            // No such database, say.
            ErrorKind::Server(ServerErrorKind::ResponseError) => explained.reason = Reason::Refused,
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => {
                explained
                    .message
                    .push_str(" (this does not answer like a Redis or Valkey server)");
            }
            _ if error.code() == Some("NOAUTH") => {
                explained
                    .message
                    .push_str(" (give the password, as in redis://:password@host)");
            }
            _ => {}
        }
        explained
    }
}

trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

/// Does `work` on a connection that has no task of its own. When the connection ends, so does the work, with
/// an error.
async fn driven<T>(
    driver: &mut Option<Driver>,
    work: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, RedisError> {
    let Some(driver) = driver else { return work.await };
    tokio::pin!(work);
    tokio::select! {
        biased;
        result = &mut work => result,
        () = driver => work.await,
    }
}

/// With the certificates that were given.
#[cfg(feature = "tls")]
fn tls_info(info: ConnectionInfo, tls: Tls) -> Result<ConnectionInfo, RedisError> {
    // The one of the program, if it chose one; otherwise this one for everybody.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client_tls = tls
        .client
        .map(|(client_cert, client_key)| redis::ClientTlsConfig {
            client_cert,
            client_key,
        });
    let certificates = redis::TlsCertificates {
        client_tls,
        root_cert: tls.root,
    };
    Ok(redis::Client::build_with_tls(info, certificates)?
        .get_connection_info()
        .clone())
}

#[cfg(not(feature = "tls"))]
fn tls_info(info: ConnectionInfo, _tls: Tls) -> Result<ConnectionInfo, RedisError> {
    Ok(info)
}

/// Asks for something that a managed server or a narrow user may refuse: then `None`.
async fn ask(connection: &mut MultiplexedConnection, cmd: &Cmd) -> Result<Option<Value>, RedisError> {
    match connection.send_packed_command(cmd).await {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_io_error() => Err(error),
        Err(_) => Ok(None),
    }
}
