//! How a connection to the server is made, whatever the user takes for TLS.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::config::Host;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Config, Error, Notification, Socket};

use super::failure;
use crate::backend::{BackendError, Reason};

/// Makes connections to one server, or to the one of several that the configuration prefers.
pub(super) struct Connector {
    opener: Box<dyn Open>,
    /// Where, for messages; without credentials.
    pub(super) address: String,
    /// For one step, and for connecting.
    pub(super) timeout: Duration,
}

/// A connection that stands. Dropping it closes it.
pub(super) struct Session {
    pub(super) client: Client,
    /// Ends when the connection does.
    pub(super) news: mpsc::UnboundedReceiver<Notification>,
    pub(super) driver: Driver,
}

/// Moves the bytes of a connection until this is dropped.
pub(super) struct Driver(Option<JoinHandle<()>>);

impl Driver {
    /// Lets it run until its client is gone and the server was told.
    pub(super) fn detach(mut self) {
        self.0.take();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

type Opening<'a> = Pin<Box<dyn Future<Output = Result<Session, Error>> + Send + 'a>>;

/// A configuration with its TLS, without type parameters.
trait Open: Send + Sync {
    fn open(&self) -> Opening<'_>;
}

struct Opener<T> {
    config: Config,
    tls: T,
}

impl<T> Open for Opener<T>
where
    T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
    <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
{
    fn open(&self) -> Opening<'_> {
        Box::pin(async move {
            let (client, mut connection) = self.config.connect(self.tls.clone()).await?;
            let (told, news) = mpsc::unbounded_channel();
            let driver = tokio::spawn(async move {
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
                news,
                driver: Driver(Some(driver)),
            })
        })
    }
}

impl Connector {
    pub(super) fn new<T>(mut config: Config, tls: T, timeout: Duration) -> Connector
    where
        T: MakeTlsConnect<Socket, Stream: Send, TlsConnect: Send> + Clone + Send + Sync + 'static,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        if config.get_application_name().is_none() {
            config.application_name("dlock");
        }
        Connector {
            address: address(&config),
            opener: Box::new(Opener { config, tls }),
            timeout,
        }
    }

    /// Connects within the timeout.
    pub(super) async fn connect(&self) -> Result<Session, BackendError> {
        match tokio::time::timeout(self.timeout, self.try_connect()).await {
            Ok(Ok(session)) => Ok(session),
            Ok(Err(error)) => Err(failure::of_connecting(error, &self.address)),
            Err(_) => Err(BackendError::not_done(
                Reason::Unreachable,
                format!("{} did not answer within {:?}", self.address, self.timeout),
            )),
        }
    }

    async fn try_connect(&self) -> Result<Session, Error> {
        let session = self.opener.open().await?;
        // The statements judge a row as it is, not as it was when they began; and the server gives a statement up
        // a little before we do, so that its outcome is known.
        let limit = (self.timeout.as_millis() * 4 / 5).max(1);
        let settings = format!(
            "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; SET statement_timeout = {limit}"
        );
        session.client.batch_execute(&settings).await?;
        Ok(session)
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

fn address(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts: Vec<String> = config
        .get_hosts()
        .iter()
        .enumerate()
        .map(|(i, host)| {
            let port = ports.get(i).or(ports.first()).copied().unwrap_or(5432);
            match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                #[cfg(unix)]
                Host::Unix(path) => format!("{}:{port}", path.display()),
            }
        })
        .collect();
    match hosts.is_empty() {
        true => "PostgreSQL".to_owned(),
        false => hosts.join(", "),
    }
}
