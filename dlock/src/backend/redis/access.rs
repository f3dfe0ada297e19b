//! How connections to servers are opened: by which name, with which rights, and what moves their bytes.

use std::future::Future;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion,
    PushInfo, RedisConnectionInfo, RedisError, Value,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::backend::{BackendError, Reason};
use crate::builder::{MinReplicas, Tls};
use crate::url::{Address, Login};

/// How the servers of one store are spoken to, or its sentinels.
pub(super) struct Access {
    tls: bool,
    settings: RedisConnectionInfo,
    certificates: Tls,
    /// What the connections are called in the servers' lists of clients.
    client_name: String,
    /// For one step, and for connecting.
    pub(super) timeout: Duration,
    /// Who is to have heard of what was acquired or renewed.
    pub(super) replicas: Option<MinReplicas>,
    /// Requests that fit into a connection before it has sent any.
    buffer: Option<usize>,
}

/// What the server sends on a connection without being asked.
pub(super) type Pushes = mpsc::UnboundedReceiver<PushInfo>;

/// What moves the bytes of a connection; over when the connection is.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection by our name.
pub(super) struct Open {
    pub(super) connection: MultiplexedConnection,
    /// `None` where it runs by itself.
    pub(super) driver: Option<Driver>,
    pub(super) pushes: Pushes,
}

impl Access {
    pub(super) fn new(
        login: Login,
        client_name: String,
        timeout: Duration,
        certificates: Tls,
    ) -> Result<Access, BackendError> {
        if login.tls && cfg!(not(feature = "tls")) {
            return Err(BackendError::not_done(
                Reason::Unsupported,
                "dlock was built without its feature \"tls\"",
            ));
        }
        // RESP3, for its notice of a connection that closes while nothing is sent.
        let mut settings = RedisConnectionInfo::default()
            .set_db(login.database)
            .set_protocol(ProtocolVersion::RESP3);
        // A user without a password is still to be that user, and not the default one.
        let password = login
            .password
            .or_else(|| login.user.as_ref().map(|_| String::new()));
        if let Some(user) = login.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password);
        }
        Ok(Access {
            tls: login.tls,
            settings,
            certificates,
            client_name,
            timeout,
            replicas: None,
            buffer: None,
        })
    }

    /// With room for so many requests in a connection.
    pub(super) fn with_buffer(mut self, requests: usize) -> Access {
        self.buffer = Some(requests);
        self
    }

    /// To be asked whether replicas have heard of it.
    pub(super) fn with_replicas(mut self, replicas: Option<MinReplicas>) -> Access {
        self.replicas = replicas;
        self
    }

    /// What a step may take, which may have to stand behind others for which replicas are asked.
    pub(super) fn patience(&self) -> Duration {
        self.timeout + self.replicas.map_or(Duration::ZERO, |replicas| replicas.within)
    }

    /// What the `redis` crate wants to know to connect there.
    pub(super) fn info(&self, address: &Address) -> Result<ConnectionInfo, BackendError> {
        let invalid = |error: RedisError| BackendError::not_done(Reason::Unsupported, error.to_string());
        let to = match address {
            Address::Unix(path) => ConnectionAddr::Unix(path.into()),
            Address::Tcp { host, port } if self.tls => ConnectionAddr::TcpTls {
                host: host.clone(),
                port: *port,
                insecure: false,
                tls_params: None,
            },
            Address::Tcp { host, port } => ConnectionAddr::Tcp(host.clone(), *port),
        };
        let info = to
            .into_connection_info()
            .map_err(invalid)?
            .set_tcp_settings(TcpSettings::default().set_nodelay(true))
            .set_redis_settings(self.settings.clone());
        match self.tls {
            true => tls_info(info, self.certificates.clone()).map_err(invalid),
            false => Ok(info),
        }
    }

    fn config(&self) -> (AsyncConnectionConfig, Pushes) {
        let (pushes, pushed) = mpsc::unbounded_channel();
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(pushes);
        if let Some(buffer) = self.buffer {
            config = config.set_pipeline_buffer_size(buffer);
        }
        (config, pushed)
    }

    /// A connection that runs by itself.
    pub(super) async fn open(&self, info: &ConnectionInfo) -> Result<Open, RedisError> {
        let (config, pushes) = self.config();
        let mut connection = redis::Client::open(info.clone())?
            .get_multiplexed_async_connection_with_config(&config)
            .await?;
        self.set_name(&mut connection).await?;
        Ok(Open {
            connection,
            driver: None,
            pushes,
        })
    }

    /// A connection that is driven by whoever uses it: a task between the two would cost each call two wake-ups.
    pub(super) async fn open_driven(&self, info: &ConnectionInfo) -> Result<Open, RedisError> {
        let stream: Pin<Box<dyn Stream>> = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                Box::pin(stream)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Box::pin(tokio::net::UnixStream::connect(path).await?),
            // The library has its driver run by itself there.
            _ => return self.open(info).await,
        };
        let (config, pushes) = self.config();
        let (mut connection, driver) =
            MultiplexedConnection::new_with_config(info.redis_settings(), stream, config).await?;
        let mut driver = Some(lasting(driver));
        let name = self.set_name(&mut connection);
        driven(&mut driver, name).await?;
        Ok(Open {
            connection,
            driver,
            pushes,
        })
    }

    async fn set_name(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let mut set = redis::cmd("CLIENT");
        set.arg("SETNAME").arg(&self.client_name);
        ask(connection, &set).await.map(drop)
    }
}

/// A driver that may be looked at again when it is over: the answer that the server sent last, before it closed the
/// connection, still has to be read, and whoever drives it next learns of the end.
fn lasting(driver: impl Future<Output = ()> + Send + 'static) -> Driver {
    let mut driver = Some(Box::pin(driver));
    Box::pin(std::future::poll_fn(move |cx| {
        if let Some(running) = &mut driver {
            ready!(running.as_mut().poll(cx));
            driver = None;
        }
        Poll::Ready(())
    }))
}

trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

/// Does `work` on a connection that has no task of its own. When the connection ends, so does the work, with
/// an error.
pub(super) async fn driven<T>(
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

/// Asks for something that a managed server or a narrow user may refuse: then `None`.
pub(super) async fn ask(
    connection: &mut MultiplexedConnection,
    cmd: &Cmd,
) -> Result<Option<Value>, RedisError> {
    match connection
        .send_packed_command(cmd)
        .await
        .and_then(Value::extract_error)
    {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_io_error() => Err(error),
        Err(_) => Ok(None),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_end_of_a_connection_is_seen_by_all_who_drive_it_one_after_the_other() {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let mut driver = Some(lasting(async move { answer.send(7).unwrap() }));
        // The last answer comes together with the end.
        let work = async move { Ok(answered.await.unwrap()) };
        assert_eq!(driven(&mut driver, work).await.unwrap(), 7);
        // What begins after that is driven too, and whoever looks for the end finds it.
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(8)
        };
        assert_eq!(driven(&mut driver, work).await.unwrap(), 8);
        driver.unwrap().await;
    }
}
