//! URLs of the store.

use std::sync::Arc;

use dlock::store::{OpenRequest, Reason, Scheme, Store, StoreError};
use percent_encoding::percent_decode_str;

use super::{EtcdLocks, EtcdLocksBuilder};
use crate::client::Pem;

/// The default port.
const PORT: &str = "2379";

/// Returns the scheme of `etcd://` and `etcds://` URLs, for
/// [`LockClientBuilder::scheme`](dlock::LockClientBuilder::scheme). `etcds://` is encrypted and needs the feature
/// `tls`.
///
/// `etcd://user:password@a:2379,b:2379,c:2379/` names the members of one cluster; the client uses one that answers.
/// Parameters in addition to those of every store:
///
/// | parameter | default | |
/// |---|---|---|
/// | `namespace` | `dlock/` | see [`EtcdLocksBuilder::namespace`] |
/// | `allow_old_server` | `false` | see [`EtcdLocksBuilder::allow_old_server`] |
/// | `ca` | the system's | file with the certificate authority to trust, in PEM |
/// | `cert`, `key` | | files with the client's certificate and its private key, in PEM |
///
/// ```no_run
/// # async fn example() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::builder()
///     .scheme(dlock_etcd::scheme())
///     .url("etcd://a.internal,b.internal,c.internal?lease=10s")
///     .build()
///     .await?;
/// # let _ = client; Ok(()) }
/// ```
#[must_use]
pub fn scheme() -> Scheme {
    Scheme::new(["etcd", "etcds"], open)
}

async fn open(mut request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
    let mut builder = servers(&request.address)?
        .prefix(&request.prefix)
        .service_name(&request.service_name)
        .timeout(request.timeout)
        .tls(request.scheme == "etcds");
    if let Some(namespace) = request.take("namespace") {
        builder = builder.namespace(namespace);
    }
    if let Some(value) = request.take("allow_old_server") {
        let allow = value
            .parse()
            .map_err(|_| wrong("its option allow_old_server is neither true nor false"))?;
        builder = builder.allow_old_server(allow);
    }
    let (ca, cert, key) = (request.take("ca"), request.take("cert"), request.take("key"));
    request.finish()?;
    if request.scheme != "etcds" && (ca.is_some() || cert.is_some() || key.is_some()) {
        return Err(wrong("its certificates are for etcds://, which is encrypted"));
    }
    if let Some(ca) = ca {
        builder = builder.ca_certificate(file("ca", &ca, Pem::Authority).await?);
    }
    match (cert, key) {
        (Some(cert), Some(key)) => {
            let cert = file("cert", &cert, Pem::Certificate).await?;
            let key = file("key", &key, Pem::PrivateKey).await?;
            builder = builder.client_certificate(cert, key);
        }
        (None, None) => {}
        _ => return Err(wrong("its options cert and key go together")),
    }
    Ok(Arc::new(builder.open_by_url().await?))
}

/// Parses the servers and the login of an address.
fn servers(address: &str) -> Result<EtcdLocksBuilder, StoreError> {
    let (login, hosts) = match address.rsplit_once('@') {
        Some((login, hosts)) => (Some(login), hosts),
        None => (None, address),
    };
    let hosts = match hosts.split_once('/') {
        None | Some((_, "")) => hosts.trim_end_matches('/'),
        Some(_) => {
            return Err(wrong(
                "it has a path, which etcd:// does not have: see the option namespace",
            ));
        }
    };
    let mut servers = Vec::new();
    for host in hosts.split(',') {
        // A colon in brackets is part of an IPv6 address.
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => (name, port),
            _ => (host, PORT),
        };
        if name.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong(
                "it names no servers, as in etcd://localhost:2379 or etcd://a,b,c",
            ));
        }
        servers.push(format!("{name}:{port}"));
    }
    let builder = EtcdLocks::builder(servers);
    let Some(login) = login else { return Ok(builder) };
    let decode = |part: &str| {
        let decoded = percent_decode_str(part).decode_utf8();
        decoded
            .map(String::from)
            .map_err(|_| wrong("its user or password is no UTF-8"))
    };
    match login.split_once(':') {
        Some((user, password)) if !user.is_empty() => Ok(builder.user(decode(user)?, decode(password)?)),
        _ => Err(wrong(
            "a login is a user and a password, as in etcd://shop:secret@localhost",
        )),
    }
}

async fn file(option: &str, path: &str, pem: Pem) -> Result<Vec<u8>, StoreError> {
    let named = format!("its option {option} names the file \"{path}\", which cannot be");
    let text = tokio::fs::read(path)
        .await
        .map_err(|error| wrong(&format!("{named} read: {error}")))?;
    pem.check(&text)
        .map_err(|reason| wrong(&format!("{named} used: {reason}")))?;
    Ok(text)
}

fn wrong(reason: &str) -> StoreError {
    StoreError::not_done(Reason::WrongUrl, reason)
}
