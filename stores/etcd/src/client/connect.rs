//! Connects to one server.

use dlock::store::{Outcome, Reason, StoreError};

use super::config::Config;
use super::failure;
use super::proto::{AuthenticateRequest, StatusRequest};
use super::rpc::{Rpc, Trouble};
use super::version;

impl Config {
    /// Connects to this server and checks that it can serve locks.
    pub(crate) async fn connect(&self, server: &str) -> Result<Rpc, StoreError> {
        let Config {
            login,
            allow_old_server,
            tls,
            ..
        } = self;
        let failed = |trouble: Trouble| {
            let is_cut = tls.is_none() && !trouble.is_answer();
            let mut error = match trouble {
                Trouble::NotSent(message) => StoreError::unknown(format!("{server}: {message}")),
                Trouble::Status(status) => failure::of(status, server, login.is_some()).error(),
            };
            if is_cut {
                error.message += ": if the server speaks TLS, use etcds:// instead of etcd://";
            }
            // No operation on a lock was sent.
            error.outcome = Outcome::NotDone;
            error
        };
        let channel = self.endpoint(server)?.connect().await.map_err(|error| {
            let advice = match tls.is_some() && failure::is_failed_handshake(&error) {
                true => {
                    ": the server does not speak TLS, or it closed the connection; without TLS use etcd://"
                }
                false => "",
            };
            let message = format!("etcd at {server}: {}{advice}", failure::describe(&error));
            StoreError::not_done(Reason::Unreachable, message).caused_by(error)
        })?;
        let mut rpc = Rpc::new(channel);
        if let Some(login) = login {
            let message = AuthenticateRequest {
                name: login.user.clone(),
                password: login.password.clone(),
            };
            let token = match rpc.call(message).await {
                Ok(reply) => reply.token,
                // The server has no authentication: no token is needed.
                Err(Trouble::Status(status))
                    if status.message().contains("authentication is not enabled") =>
                {
                    String::new()
                }
                Err(trouble) => return Err(failed(trouble)),
            };
            if !token.is_empty() {
                rpc = rpc
                    .logged_in(&token)
                    .map_err(|status| failed(Trouble::Status(status)))?;
            }
        }
        let status = match rpc.call(StatusRequest {}).await {
            Ok(status) => status,
            // Servers that tell this to administrators alone are new enough: etcd 3.6.
            Err(Trouble::Status(status)) if status.code() == tonic::Code::PermissionDenied => return Ok(rpc),
            Err(trouble) => return Err(failed(trouble)),
        };
        if status.is_learner {
            let message = format!("{server} is a learner, which serves no locks until it is promoted");
            return Err(StoreError::not_done(Reason::Unreachable, message));
        }
        match version::check(&status.version) {
            Err(reason) if !allow_old_server => Err(StoreError::not_done(
                Reason::Refused,
                format!("{server}: {reason}. Update it, or accept that with allow_old_server=true"),
            )),
            _ => Ok(rpc),
        }
    }
}
