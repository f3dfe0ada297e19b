//! How connections to servers are opened: their name, their login, and their transport.
//!
//! A connection takes as few round trips as possible: one for the socket, one or two for TLS, one for the login. Each
//! may take as long as a step, so that a distant server can be reached and a silent one is reported soon.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::dial::{Dialer, Trial};
use super::lent::{BoxStream, Lent};
use super::login::{Logins, Session};
#[cfg(feature = "tls")]
use super::tls::Encryption;
use crate::store::credentials::Provider;
use crate::store::options::{MinReplicas, Tls};
use crate::store::url::{Address, Login};
use crate::store::{Reason, StoreError};

/// The maximum number of bytes that a server may send until a connection is ready: the replies to a login and to `INFO`,
/// which has a line for each database and, before Redis 7.2, for each error that scripts of others have made up. The
/// library would keep reading for as long as data arrives.
const MOST_AT_LOGIN: usize = 8 * 1024 * 1024;

/// The connection settings of a store's servers, or of its sentinels.
pub(super) struct ConnectSettings {
    tls: bool,
    #[cfg(feature = "tls")]
    encryption: Option<Encryption>,
    dialer: Dialer,
    settings: RedisConnectionInfo,
    /// The source of credentials that change.
    logins: Option<Logins>,
    /// The name of the connections in the servers' lists of clients.
    client_name: String,
    /// The timeout of one step, and of each round trip of connecting.
    pub(super) timeout: Duration,
    /// The replicas that must acknowledge acquires and renewals.
    pub(super) replicas: Option<MinReplicas>,
    /// The buffer of a connection before it has sent anything, in requests.
    buffer: Option<usize>,
}

/// Pushes of the server.
pub(super) type Pushes = mpsc::UnboundedReceiver<PushInfo>;

/// Drives the I/O of a connection; completes when the connection ends.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A named connection that makes progress while its driver is polled.
pub(super) struct Driven {
    pub(super) connection: MultiplexedConnection,
    pub(super) driver: Driver,
    /// Its transport.
    pub(super) stream: Lent,
    /// Marks the address as useful.
    pub(super) trial: Trial,
    /// Keeps the login valid, if it expires, with its validity.
    pub(super) login: Option<(Logins, Duration)>,
}

/// A named connection that runs by itself.
pub(super) struct Open {
    pub(super) connection: MultiplexedConnection,
    pub(super) pushes: Pushes,
    _tasks: [Option<AbortOnDropHandle<()>>; 2],
}

impl ConnectSettings {
    pub(super) fn new(
        login: Login,
        client_name: String,
        timeout: Duration,
        certificates: &Tls,
    ) -> Result<ConnectSettings, StoreError> {
        #[cfg(not(feature = "tls"))]
        if login.tls {
            let _ = certificates;
            return Err(StoreError::not_done(
                Reason::Unsupported,
                "dlock was built without its feature \"tls\"",
            ));
        }
        #[cfg(feature = "tls")]
        let encryption = login.tls.then(|| Encryption::new(certificates)).transpose();
        // RESP3, to learn that a connection closes while nothing is sent.
        let mut settings = RedisConnectionInfo::default()
            .set_db(login.database)
            .set_protocol(ProtocolVersion::RESP3);
        // A user without a password must still be that user, not the default one.
        let password = login
            .password
            .or_else(|| login.user.as_ref().map(|_| String::new()));
        if let Some(user) = login.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = password {
            settings = settings.set_password(password);
        }
        Ok(ConnectSettings {
            tls: login.tls,
            #[cfg(feature = "tls")]
            encryption: encryption.map_err(|why| StoreError::not_done(Reason::Refused, why))?,
            dialer: Dialer::default(),
            settings,
            logins: None,
            client_name,
            timeout,
            replicas: None,
            buffer: None,
        })
    }

    /// Sets how many requests the connection buffers.
    pub(super) fn with_buffer(mut self, requests: usize) -> ConnectSettings {
        self.buffer = Some(requests);
        self
    }

    /// To be asked whether replicas have received it.
    pub(super) fn with_replicas(mut self, replicas: Option<MinReplicas>) -> ConnectSettings {
        self.replicas = replicas;
        self
    }

    /// With credentials that are asked for at each connection.
    pub(super) fn with_credentials(mut self, provider: Option<Provider>) -> ConnectSettings {
        let user = self.settings.username().map(str::to_owned);
        self.logins = provider.map(|provider| Logins { provider, user });
        self
    }

    /// The timeout of a step, which may have to wait behind others that wait for replicas.
    pub(super) fn patience(&self) -> Duration {
        self.timeout + self.replicas.map_or(Duration::ZERO, |replicas| replicas.within)
    }

    /// The URL prefix of a Cluster with these settings.
    pub(super) fn scheme_of_cluster(&self) -> &'static str {
        match self.tls {
            true => "rediss+cluster",
            false => "redis+cluster",
        }
    }

    /// A connection that runs by itself.
    pub(super) async fn open(&self, address: &Address) -> Result<Open, RedisError> {
        let (sender, pushes) = mpsc::unbounded_channel();
        let Driven {
            connection,
            driver,
            mut trial,
            login,
            ..
        } = self.connect(address, Some(sender), usize::MAX).await?;
        trial.passed();
        let login = login
            .map(|(logins, valid_for)| logins.keep(Session::Of(connection.clone()), valid_for, self.timeout));
        let driver = AbortOnDropHandle::new(tokio::spawn(driver));
        Ok(Open {
            connection,
            pushes,
            _tasks: [Some(driver), login],
        })
    }

    /// A connection that is driven by its user.
    pub(super) async fn open_driven(&self, address: &Address) -> Result<Driven, RedisError> {
        self.connect(address, None, MOST_AT_LOGIN).await
    }

    async fn connect(
        &self,
        address: &Address,
        pushes: Option<mpsc::UnboundedSender<PushInfo>>,
        readable: usize,
    ) -> Result<Driven, RedisError> {
        let (mut settings, mut valid_for) = (self.settings.clone(), None);
        if let Some(logins) = &self.logins {
            let login = logins.fresh().await?;
            (settings, valid_for) = (login.apply(settings), login.valid_for);
        }
        let (stream, trial) = self.reach(address).await?;
        let stream = Lent::new(stream, readable);
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(None);
        if let Some(pushes) = pushes {
            config = config.set_push_sender(pushes);
        }
        if let Some(buffer) = self.buffer {
            config = config.set_pipeline_buffer_size(buffer);
        }
        let login = MultiplexedConnection::new_with_config(&settings, stream.clone(), config);
        let logged_in = self.in_time(login).await;
        let (mut connection, driver) = match logged_in {
            Err(error) if error.is_connection_dropped() => return Err(self.why_dropped(error, &stream)),
            logged_in => logged_in?,
        };
        let mut set_name = redis::cmd("CLIENT");
        set_name.arg("SETNAME").arg(&self.client_name);
        // It may be forbidden, and is not worth a round trip.
        set_name.set_no_response(true);
        connection.send_packed_command(&set_name).await?;
        Ok(Driven {
            connection,
            driver: lasting(driver),
            stream,
            trial,
            login: self.logins.clone().zip(valid_for),
        })
    }

    /// The server has closed the connection instead of a login. Where it has said why, the library waits for the answers to
    /// its other commands all the same, and reports their loss.
    fn why_dropped(&self, error: RedisError, stream: &Lent) -> RedisError {
        match stream.refusal() {
            Some(said) => io::Error::new(io::ErrorKind::ConnectionReset, said).into(),
            None if self.tls => error,
            None => with_advice(
                &error,
                "if the server speaks TLS, use rediss:// instead of redis://",
            ),
        }
    }

    async fn reach(&self, address: &Address) -> Result<(BoxStream, Trial), RedisError> {
        match address {
            Address::Tcp { host, port } => {
                let (stream, trial) = self.in_time(self.dialer.dial(host, *port)).await?;
                #[cfg(feature = "tls")]
                if let Some(encryption) = &self.encryption {
                    let wrapped = self.in_time(encryption.wrap(host, stream)).await;
                    let stream = wrapped.map_err(failed_handshake)?;
                    return Ok((Box::pin(stream), trial));
                }
                Ok((Box::pin(stream), trial))
            }
            #[cfg(unix)]
            Address::Unix(path) => {
                let stream = self.in_time(tokio::net::UnixStream::connect(path)).await?;
                Ok((Box::pin(stream), Trial::none()))
            }
            #[cfg(not(unix))]
            Address::Unix(_) => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
        }
    }

    /// Runs an operation of one round trip.
    pub(super) async fn in_time<T, E: Into<RedisError>>(
        &self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, RedisError> {
        match tokio::time::timeout(self.timeout, work).await {
            Ok(outcome) => outcome.map_err(Into::into),
            Err(_) => {
                let message = format!("it did not answer within {:?}", self.timeout);
                Err(io::Error::new(io::ErrorKind::TimedOut, message).into())
            }
        }
    }
}

/// Adds what to do to the failure of a connection.
fn with_advice(error: &RedisError, advice: &str) -> RedisError {
    let kind = match error.is_timeout() {
        true => io::ErrorKind::TimedOut,
        false => io::ErrorKind::ConnectionReset,
    };
    io::Error::new(kind, format!("{error}: {advice}")).into()
}

/// A server without TLS does not answer the handshake, or not with TLS. With TLS it may refuse the certificate.
#[cfg(feature = "tls")]
fn failed_handshake(error: RedisError) -> RedisError {
    let is_silent = error.is_timeout() || error.is_connection_dropped();
    match is_silent || error.to_string().contains("corrupt message") {
        true => with_advice(
            &error,
            "the TLS handshake failed; if the server does not speak TLS, use redis:// instead of rediss://, \
             or the server takes no more connections (maxclients)",
        ),
        false => error,
    }
}

/// A driver that may be polled again after its end: the last reply of the server, before it closed the connection, must
/// still be read, and the next poll reports the end.
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

/// Runs `work` on a connection without a task. When the connection ends, `work` ends with an error.
pub(super) async fn driven<T>(
    driver: &mut Driver,
    work: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, RedisError> {
    tokio::pin!(work);
    tokio::select! {
        biased;
        result = &mut work => result,
        () = driver => work.await,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn end_of_a_connection_is_seen_by_each_of_its_drivers_in_turn() {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let mut driver = lasting(async move { answer.send(7).unwrap() });
        // The last answer arrives together with the end.
        let work = async move { Ok(answered.await.unwrap()) };
        assert_eq!(driven(&mut driver, work).await.unwrap(), 7);
        // Later work polls the driver too, and a check for the end finds it.
        let work = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(8)
        };
        assert_eq!(driven(&mut driver, work).await.unwrap(), 8);
        driver.await;
    }
}
