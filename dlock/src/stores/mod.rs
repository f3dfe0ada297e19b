//! The built-in stores.

pub mod memory;
mod opening;
pub mod quorum;
#[cfg(feature = "redis")]
pub(crate) mod redis;

use std::sync::Arc;

use tokio::runtime;

use self::memory::MemoryStore;
use self::opening::opened_on;
#[cfg(feature = "redis")]
use self::redis::RedisStore;
use crate::Error;
use crate::store::options::Common;
use crate::store::url::{RegisteredUrl, StoreUrl, Topology};
use crate::store::{OpenRequest, Scheme, Store, StoreError};

/// Opens the store of a URL.
#[cfg_attr(not(feature = "redis"), allow(unused_variables, clippy::unused_async))]
pub(crate) async fn open(
    url: StoreUrl,
    common: Common,
    runtime: &runtime::Handle,
) -> Result<Arc<dyn Store>, Error> {
    match url.topology {
        Topology::Registered(RegisteredUrl {
            scheme,
            name,
            address,
            parameters,
        }) => {
            let request = OpenRequest {
                scheme: name,
                address: address.0,
                timeout: common.timeout,
                prefix: common.prefix,
                service_name: common.service_name,
                client: common.uuid.as_u128(),
                parameters: parameters.0,
                known: Vec::new(),
            };
            open_registered(scheme, request, runtime).await
        }
        Topology::Memory { name: None } => Ok(Arc::new(MemoryStore::new())),
        Topology::Memory { name: Some(name) } if common.prefix.is_empty() => {
            Ok(Arc::new(MemoryStore::named(&name)))
        }
        // No name and no prefix has a line break.
        Topology::Memory { name: Some(name) } => Ok(Arc::new(MemoryStore::named(&format!(
            "{name}\n{}",
            common.prefix
        )))),
        #[cfg(feature = "redis")]
        Topology::Server(server) => Ok(Arc::new(RedisStore::on_server(server, common, runtime).await?)),
        #[cfg(feature = "redis")]
        Topology::Sentinel(sentinels) => Ok(Arc::new(
            RedisStore::by_sentinels(sentinels, common, runtime).await?,
        )),
        #[cfg(feature = "redis")]
        Topology::Cluster(cluster) => Ok(Arc::new(RedisStore::in_cluster(cluster, common, runtime).await?)),
        #[cfg(feature = "redis")]
        Topology::Quorum(quorum) => Ok(Arc::new(self::redis::quorum(quorum, common, runtime).await?)),
        #[cfg(not(feature = "redis"))]
        Topology::Server(_) | Topology::Sentinel(_) | Topology::Cluster(_) | Topology::Quorum(_) => {
            Err(Error::Unsupported {
                what: "a Redis URL".to_owned(),
                reason: "dlock was built without its feature \"redis\"".to_owned(),
            })
        }
    }
}

/// Opens the store of a registered scheme.
async fn open_registered(
    scheme: Scheme,
    request: OpenRequest,
    runtime: &runtime::Handle,
) -> Result<Arc<dyn Store>, Error> {
    let opened = opened_on(runtime, async move { scheme.open(request).await }).await?;
    opened.map_err(StoreError::into_connect_error)
}
