//! Logging in with credentials that a function of the user returns, and staying logged in.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisConnectionInfo, RedisError};
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use super::node::Aside;
use crate::base::observed::log;
use crate::store::credentials::Provider;

/// The timeout of the function.
const PATIENCE: Duration = Duration::from_secs(10);
/// The shortest time between two logins on a connection.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);

/// The source of the credentials of each connection.
#[derive(Clone)]
pub(super) struct Logins {
    pub(super) provider: Provider,
    /// The user if the credentials name none.
    pub(super) user: Option<String>,
}

/// The connection that is logged in.
pub(super) enum Session {
    Of(MultiplexedConnection),
    /// Its user passes commands on.
    By(mpsc::UnboundedSender<Aside>),
}

impl Session {
    async fn run(&mut self, cmd: Cmd) -> Result<(), RedisError> {
        match self {
            Session::Of(connection) => cmd.exec_async(connection).await,
            Session::By(user) => {
                let (reply, replied) = oneshot::channel();
                let _ = user.send(Aside { cmd, reply });
                let gone = |_| RedisError::from((ErrorKind::Io, "the connection has ended"));
                replied.await.map_err(gone)?.map(drop)
            }
        }
    }
}

/// Returns the credentials to log in with now.
pub(super) struct Login {
    user: Option<String>,
    password: String,
    pub(super) valid_for: Option<Duration>,
}

impl Login {
    pub(super) fn apply(&self, mut settings: RedisConnectionInfo) -> RedisConnectionInfo {
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        settings.set_password(&self.password)
    }

    fn command(&self) -> Cmd {
        let mut cmd = redis::cmd("AUTH");
        cmd.arg(self.user.as_deref().unwrap_or("default"))
            .arg(&self.password);
        cmd
    }
}

impl Logins {
    /// Asks the function.
    pub(super) async fn fresh(&self) -> Result<Login, RedisError> {
        let failed = |why: String| RedisError::from((ErrorKind::Client, "no credentials were given", why));
        // A panic of the user's function must not end the task that keeps the connection.
        let asking = AssertUnwindSafe(async { self.provider.ask().await }).catch_unwind();
        let credentials = tokio::time::timeout(PATIENCE, asking)
            .await
            .map_err(|_| failed(format!("the provider took longer than {PATIENCE:?}")))?
            .map_err(|_| failed("the provider panicked".to_owned()))?
            .map_err(|error| failed(error.to_string()))?;
        let (user, password, valid_for) = credentials.into_parts();
        Ok(Login {
            user: user.or_else(|| self.user.clone()),
            password,
            valid_for,
        })
    }

    /// Logs in again on the connection before each login expires, until the handle is dropped.
    pub(super) fn keep(
        &self,
        session: Session,
        valid_for: Duration,
        timeout: Duration,
    ) -> AbortOnDropHandle<()> {
        AbortOnDropHandle::new(tokio::spawn(
            self.clone().keep_logged_in(session, valid_for, timeout),
        ))
    }

    async fn keep_logged_in(self, mut session: Session, mut valid_for: Duration, timeout: Duration) {
        // The last quarter allows for failed attempts.
        let mut pause = valid_for - valid_for / 4;
        loop {
            tokio::time::sleep(pause.max(SHORTEST_PAUSE)).await;
            match self.renew(&mut session, timeout).await {
                Ok(Some(next)) => {
                    valid_for = next;
                    pause = valid_for - valid_for / 4;
                }
                Ok(None) => return,
                Err(error) => {
                    log!(warn, %error, "login renewal failed: the connection may be closed when its credentials expire");
                    pause = valid_for / 16;
                }
            }
        }
    }

    /// How long the new login is valid, if it expires.
    async fn renew(&self, session: &mut Session, timeout: Duration) -> Result<Option<Duration>, RedisError> {
        let login = self.fresh().await?;
        let answer = tokio::time::timeout(timeout, session.run(login.command())).await;
        answer.map_err(|_| RedisError::from((ErrorKind::Io, "AUTH was not answered in time")))??;
        Ok(login.valid_for)
    }
}
