//! What the locks are on, as a worker is told.

use std::sync::Arc;
use std::time::Duration;

use dlock::store::Store;
use dlock::stores::quorum::Quorum;
use dlock::{Error, LockClient, LockClientBuilder};
use serde::{Deserialize, Serialize};

use super::broken::{Break, Broken};

/// The keys that all tasks fight for, see [`Sort`](super::wanted::Sort).
pub(crate) const KEYS: usize = 9;
/// Those of them that are often held for seconds, so that there is always a holder and a waiter.
pub(crate) const LONG_KEYS: usize = 2;
/// The lease of most acquisitions.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The longest lease that a worker asks for; in whole seconds, as some stores count them.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(3);
/// What one step may take.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(400);
/// How long a call goes on through failures.
const RETRY_FOR: Duration = Duration::from_millis(1200);

/// The name of a key; in a Cluster they are on different shards.
pub(crate) fn key_name(key: usize) -> String {
    format!("chaos:{key}")
}

/// How a client is opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum StoreSpec {
    Url(String),
    Quorum(Vec<String>),
}

impl StoreSpec {
    /// Opens it; goes on until it is there.
    ///
    /// # Errors
    /// When it can never be opened.
    pub(crate) async fn open(&self, broken: Option<Break>) -> Result<LockClient, Error> {
        loop {
            match self.try_open(broken).await {
                Err(error) if error.is_unavailable() => tokio::time::sleep(Duration::from_millis(50)).await,
                outcome => return outcome,
            }
        }
    }

    async fn try_open(&self, broken: Option<Break>) -> Result<LockClient, Error> {
        match self {
            StoreSpec::Url(url) => client(member(url).await?, broken).await,
            StoreSpec::Quorum(urls) => {
                let mut members = Vec::new();
                for (at, url) in urls.iter().enumerate() {
                    let member = member(url).await?.quorum_member().expect("a single server");
                    members.push((format!("member {at}"), member));
                }
                client(Arc::new(Quorum::new(members).max_lease(LONGEST_LEASE)), broken).await
            }
        }
    }
}

async fn member(url: &str) -> Result<Arc<dyn Store>, Error> {
    let builder = LockClient::builder().url(url).timeout(TIMEOUT);
    let builder = builder
        .scheme(dlock_postgres::scheme())
        .scheme(dlock_mysql::scheme())
        .scheme(dlock_etcd::scheme())
        .scheme(dlock_zookeeper::scheme());
    builder.service_name("chaos").build_store().await
}

async fn client(store: Arc<dyn Store>, broken: Option<Break>) -> Result<LockClient, Error> {
    let options = |builder: LockClientBuilder| builder.lease(LEASE).retry_for(RETRY_FOR);
    match broken {
        None => options(LockClient::builder().shared_store(store)).build().await,
        Some(how) => {
            options(LockClient::builder().store(Broken::new(store, how)))
                .build()
                .await
        }
    }
}
