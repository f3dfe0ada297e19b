//! Opening a store.

use std::future::Future;
use std::sync::Arc;

use tokio::runtime::Handle;
use uuid::Uuid;

use super::RedisStore;
use super::cluster::Cluster;
use super::connect::Connector;
use super::endpoint::Endpoint;
use super::fence::Fence;
use super::node::Part;
use super::sentinel::Master;
use super::servers::Servers;
use super::settings::ConnectSettings;
use crate::Error;
use crate::base::observed::log;
use crate::store::DoubtSender;
use crate::store::member::QuorumMember;
use crate::store::options::Common;
use crate::store::url::{Address, ClusterUrl, Login, QuorumUrl, SentinelUrl, ServerUrl};
use crate::store::{Lane, Reason, StoreError};
use crate::stores::opening::opened_on;
use crate::stores::quorum::{Member, Quorum};

impl RedisStore {
    /// Opens one server; fails if it cannot be reached now.
    pub(crate) async fn on_server(
        url: ServerUrl,
        common: Common,
        runtime: &Handle,
    ) -> Result<RedisStore, Error> {
        let access = server_access(url.login, &common);
        let peer = Some(url.address.clone());
        let opening = |part, runtime: Handle| async move {
            let endpoint = Endpoint::fixed(url.address);
            let connector = Connector::new(Arc::new(access?), endpoint);
            Servers::one(connector, part, &runtime).await
        };
        RedisStore::open(opening, common, peer, runtime).await
    }

    /// Opens the master that sentinels name; fails if none is named, or cannot be reached now.
    pub(crate) async fn by_sentinels(
        url: SentinelUrl,
        common: Common,
        runtime: &Handle,
    ) -> Result<RedisStore, Error> {
        let of_sentinels = access(url.sentinel_login, &common);
        let access = server_access(url.login, &common);
        let peer = url.sentinels.first().cloned();
        let opening = |part, runtime: Handle| async move {
            let master = Master::of(of_sentinels?, url.sentinels, url.service, &runtime);
            let connector = Connector::new(Arc::new(access?), Endpoint::Master(master));
            Servers::one(connector, part, &runtime).await
        };
        RedisStore::open(opening, common, peer, runtime).await
    }

    /// Opens a Cluster; fails if none of the named servers can be reached now.
    pub(crate) async fn in_cluster(
        url: ClusterUrl,
        common: Common,
        runtime: &Handle,
    ) -> Result<RedisStore, Error> {
        let access = server_access(url.login, &common);
        let peer = url.seeds.first().cloned();
        let opening = |part, runtime: Handle| async move {
            let cluster = Cluster::connect(access?, url.seeds, part, &runtime).await?;
            Ok(Servers::Cluster(cluster))
        };
        RedisStore::open(opening, common, peer, runtime).await
    }

    /// Opens a member of a quorum, which may be unreachable now; then also returns the trouble.
    async fn member(
        url: ServerUrl,
        common: Common,
        runtime: &Handle,
    ) -> Result<(RedisStore, Option<StoreError>), Error> {
        let part = part(&common);
        let peer = Some(url.address.clone());
        let access = server_access(url.login, &common).map_err(StoreError::into_connect_error)?;
        let spawner = runtime.clone();
        let doubts = part.doubts.clone();
        let connector = Connector::new(Arc::new(access), Endpoint::fixed(url.address));
        let opening = async move { Servers::one_or_later(connector, part, &spawner).await };
        let (servers, trouble) = opened_on(runtime, opening).await?;
        let prefix = common.prefix;
        let member = RedisStore {
            servers,
            doubts,
            prefix,
            peer,
        };
        Ok((member, trouble))
    }

    async fn open<F>(
        opening: impl FnOnce(Part, Handle) -> F,
        common: Common,
        peer: Option<Address>,
        runtime: &Handle,
    ) -> Result<RedisStore, Error>
    where
        F: Future<Output = Result<Servers, StoreError>> + Send + 'static,
    {
        let part = part(&common);
        let doubts = part.doubts.clone();
        let servers = opened_on(runtime, opening(part, runtime.clone())).await?;
        Ok(RedisStore {
            servers: servers.map_err(StoreError::into_connect_error)?,
            doubts,
            prefix: common.prefix,
            peer,
        })
    }
}

/// Opens a quorum of servers; fails if a majority of them cannot be reached now, or one refuses the client permanently.
pub(crate) async fn quorum(url: QuorumUrl, common: Common, runtime: &Handle) -> Result<Quorum, Error> {
    let QuorumUrl {
        members,
        login,
        max_lease,
        trust_fresh,
    } = url;
    let majority = members.len() / 2 + 1;
    let opening = members.into_iter().map(|address| {
        let (login, common) = (login.clone(), common.clone());
        async move {
            let name: Arc<str> = address.to_string().into();
            let (member, trouble) = RedisStore::member(ServerUrl { address, login }, common, runtime).await?;
            let store: Arc<dyn QuorumMember> = Arc::new(member);
            Ok((Member { name, store }, trouble))
        }
    });
    let opened: Vec<Result<_, Error>> = futures_util::future::join_all(opening).await;
    let (mut members, mut away) = (Vec::new(), Vec::new());
    for member in opened {
        let (member, trouble) = member?;
        match trouble {
            Some(error) if !error.is_passing() => return Err(StoreError::into_connect_error(error)),
            Some(error) => {
                log!(warn, server = %member.name, %error, "a member of the quorum is not there yet");
                away.push(error.to_string());
            }
            None => {}
        }
        members.push(member);
    }
    if members.len() - away.len() < majority {
        let (missing, all, why) = (away.len(), members.len(), away.join("; "));
        return Err(StoreError::into_connect_error(StoreError::not_done(
            Reason::Unreachable,
            format!("{missing} of the {all} servers of the quorum are not there: {why}"),
        )));
    }
    let quorum = Quorum::of(members, runtime.clone());
    let quorum = quorum.trust_fresh_servers(trust_fresh.unwrap_or(false));
    Ok(match max_lease {
        Some(max_lease) => quorum.max_lease(max_lease),
        None => quorum,
    })
}

fn part(common: &Common) -> Part {
    Part {
        lane: Lane::default(),
        limit: common.max_queued,
        fence: Fence::of(&common.prefix),
        doubts: DoubtSender::new(),
        steps: Arc::default(),
        cluster: None,
    }
}

/// To a server that has locks.
fn server_access(login: Login, common: &Common) -> Result<ConnectSettings, StoreError> {
    let access = access(login, common)?.with_credentials(common.credentials.clone());
    Ok(access.with_replicas(common.replicas))
}

/// To any server, with what stands in the URL.
fn access(login: Login, common: &Common) -> Result<ConnectSettings, StoreError> {
    let name = client_name(&common.service_name, common.uuid);
    ConnectSettings::new(login, name, common.timeout, &common.tls)
}

/// `dlock:<service>:<uuid>`, where the holders of locks have the same uuid. The server allows no spaces or
/// control characters.
fn client_name(service: &str, uuid: Uuid) -> String {
    let service: String = service
        .chars()
        .map(|c| if c.is_ascii_graphic() { c } else { '-' })
        .take(64)
        .collect();
    format!("dlock:{service}:{uuid}")
}
