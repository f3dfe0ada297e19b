//! URLs of the store.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::{OpenRequest, Reason, Scheme, Store, StoreError};
use percent_encoding::percent_decode_str;

use crate::store::ZookeeperLocks;

/// Returns the scheme of `zookeeper://` URLs, for [`LockClientBuilder::scheme`](dlock::LockClientBuilder::scheme):
/// `zookeeper://[user:password@]host[:port][,host2[:port]…][/root]`. The port is 2181 by default, the root `/dlock`.
///
/// Parameters in addition to those of every store:
///
/// | parameter | default | |
/// |---|---|---|
/// | `session` | `30s` | see [`ZookeeperLocksBuilder::session`](crate::ZookeeperLocksBuilder::session) |
/// | `tick` | half of the session | see [`ZookeeperLocksBuilder::tick`](crate::ZookeeperLocksBuilder::tick) |
/// | `acl` | `creator` with a user, else `open` | the clients that have access to the nodes that are created |
///
/// ```no_run
/// # async fn example() -> Result<(), dlock::Error> {
/// let client = dlock::LockClient::builder()
///     .scheme(dlock_zookeeper::scheme())
///     .url("zookeeper://zk1,zk2,zk3/shop/locks?session=15s&tick=2s")
///     .build()
///     .await?;
/// # let _ = client; Ok(()) }
/// ```
#[must_use]
pub fn scheme() -> Scheme {
    Scheme::new(["zookeeper"], open)
}

async fn open(mut request: OpenRequest) -> Result<Arc<dyn Store>, StoreError> {
    let session = time(&mut request, "session")?;
    let tick = time(&mut request, "tick")?;
    let acl = request.take("acl");
    request.finish()?;
    let (user, address) = match request.address.rsplit_once('@') {
        Some((user, address)) => (Some(user), address),
        None => (None, request.address.as_str()),
    };
    let (servers, root) = match address.find('/') {
        Some(at) => address.split_at(at),
        None => (address, ""),
    };
    let mut builder = ZookeeperLocks::builder(servers)
        .prefix(&request.prefix)
        .timeout(request.timeout);
    if !matches!(root, "" | "/") {
        builder = builder.root(decoded(root, "path")?);
    }
    if let Some(session) = session {
        builder = builder.session(session);
    }
    if let Some(tick) = tick {
        builder = builder.tick(tick);
    }
    if let Some(user) = user {
        let Some((user, password)) = user.split_once(':') else {
            return Err(wrong(
                "a login is a user and a password: zookeeper://user:password@host",
            ));
        };
        builder = builder.credentials(decoded(user, "user")?, decoded(password, "password")?);
    }
    match (acl.as_deref(), user) {
        (None, _) | (Some("creator"), Some(_)) => {}
        (Some("open"), _) => builder = builder.open(),
        (Some("creator"), None) => {
            return Err(wrong("acl=creator needs a user: zookeeper://user:password@host"));
        }
        (Some(_), _) => return Err(wrong("its option acl must be open or creator")),
    }
    Ok(Arc::new(builder.open_by_url().await?))
}

fn time(request: &mut OpenRequest, name: &str) -> Result<Option<Duration>, StoreError> {
    let text = request.take(name);
    text.map(|text| {
        humantime::parse_duration(&text)
            .map_err(|error| wrong(format!("its option {name} is no time such as 15s: {error}")))
    })
    .transpose()
}

fn decoded(text: &str, what: &str) -> Result<String, StoreError> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| wrong(format!("its {what} is not UTF-8")))?;
    Ok(decoded.into_owned())
}

fn wrong(why: impl Into<String>) -> StoreError {
    StoreError::not_done(Reason::WrongUrl, why)
}
