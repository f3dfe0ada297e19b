//! The servers of the stores that are crates of their own.

use std::net::SocketAddr;

use anyhow::Context;
use dlock_postgres::PostgresLocks;
use mysql_async::prelude::Queryable;
use tokio_postgres::NoTls;

use super::topology::Topology;
use super::way::Way;
use crate::Clock;
use crate::Node;
use crate::etcd::{EtcdCluster, EtcdProxy};
use crate::mysql::{Mysql, MysqlProxy};
use crate::postgres::{PgProxy, Postgres};
use crate::zookeeper::{Ensemble, TICK, ZkProxy};

/// For how long ZooKeeper keeps the locks of a client that it does not hear of.
pub(crate) const SESSION_MS: u64 = 3000;

/// The servers of such a store.
#[derive(Debug)]
pub(crate) enum Stores {
    Postgres(Postgres),
    /// And the table.
    Mysql(Mysql, String),
    Etcd(EtcdCluster),
    Zookeeper(Ensemble),
}

impl Stores {
    /// Starts them.
    ///
    /// # Errors
    /// When it is a topology of Redis, or a table cannot be made.
    pub(crate) async fn start(topology: Topology, clock: Option<&Clock>) -> anyhow::Result<Stores> {
        Ok(match topology {
            Topology::Postgres => {
                let server = Postgres::start_by(clock).await;
                let locks = PostgresLocks::connect(server.config(), NoTls).await?;
                locks.create_table().await?;
                Stores::Postgres(server)
            }
            Topology::Mysql => {
                let server = Mysql::start_with(&[], clock).await;
                let table = server.table().await;
                Stores::Mysql(server, table)
            }
            Topology::Etcd => Stores::Etcd(EtcdCluster::start().await),
            Topology::Zookeeper => Stores::Zookeeper(Ensemble::start().await),
            _ => anyhow::bail!("{} has other servers", topology.name()),
        })
    }

    pub(crate) fn nodes(&self) -> Vec<&dyn Node> {
        fn all<N: Node>(nodes: &[N]) -> Vec<&dyn Node> {
            nodes.iter().map(|node| node as &dyn Node).collect()
        }
        match self {
            Stores::Postgres(server) => vec![server],
            Stores::Mysql(server, _) => vec![server],
            Stores::Etcd(cluster) => all(&cluster.members),
            Stores::Zookeeper(ensemble) => all(ensemble.servers()),
        }
    }

    /// A network before a server.
    pub(crate) fn way(&self, server: SocketAddr) -> Box<dyn Way> {
        match self {
            Stores::Postgres(_) => Box::new(PgProxy::start(server)),
            Stores::Mysql(..) => Box::new(MysqlProxy::start(server)),
            Stores::Etcd(_) => Box::new(EtcdProxy::start(server)),
            Stores::Zookeeper(_) => Box::new(ZkProxy::start(server)),
        }
    }

    /// The URL of the store at these addresses.
    pub(crate) fn url(&self, addresses: &[SocketAddr]) -> String {
        let all: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        let (first, all) = (addresses[0], all.join(","));
        match self {
            Stores::Postgres(server) => server.url_at(first),
            Stores::Mysql(server, table) => format!("{}?table={table}", server.url_at(first)),
            // Debian's is older than those that are accepted.
            Stores::Etcd(_) => format!("etcd://{all}/?allow_old_server=true"),
            Stores::Zookeeper(_) => {
                let tick = TICK.as_millis();
                format!("zookeeper://{all}/locks?session={SESSION_MS}ms&tick={tick}ms")
            }
        }
    }

    /// Closes the connections of clients at the server, where it can.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) async fn disconnect(&self) -> anyhow::Result<()> {
        match self {
            Stores::Postgres(server) => {
                let client = crate::postgres::connect(&server.config()).await?;
                let all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
                client.execute(all, &[]).await?;
            }
            Stores::Mysql(server, _) => {
                let mut conn = mysql_async::Conn::new(server.opts()).await?;
                let all: Vec<u64> = conn
                    .query(
                        "SELECT id FROM information_schema.processlist \
                         WHERE user = 'dlock' AND id <> CONNECTION_ID()",
                    )
                    .await?;
                for id in all {
                    // It may have ended.
                    let _ = conn.query_drop(format!("KILL CONNECTION {id}")).await;
                }
                conn.disconnect().await?;
            }
            Stores::Etcd(_) | Stores::Zookeeper(_) => {}
        }
        Ok(())
    }

    /// A member that may stand still in place of this one. Before 3.4.31 and 3.5.13 a leader of etcd's that wakes up may end
    /// leases that its successor has renewed (etcd-io/etcd#15247), and Debian's is older.
    pub(crate) async fn may_stop(&self, server: usize) -> usize {
        match self {
            Stores::Etcd(cluster) if cluster.leader().await == server => (server + 1) % cluster.members.len(),
            _ => server,
        }
    }

    /// Freezes what a follower and its leader say to each other, until it is thawed. Their numbers.
    ///
    /// # Errors
    /// When it is not ZooKeeper.
    pub(crate) async fn cut_follower(&self, by: usize) -> anyhow::Result<(usize, usize)> {
        let ensemble = self.ensemble()?;
        let leader = ensemble.leader().await;
        let others = ensemble.servers().len() - 1;
        let follower = (leader + 1 + by % others) % ensemble.servers().len();
        ensemble.freeze(follower, leader, true);
        Ok((follower, leader))
    }

    /// Ends that.
    ///
    /// # Errors
    /// When it is not ZooKeeper.
    pub(crate) fn thaw(&self, (follower, leader): (usize, usize)) -> anyhow::Result<()> {
        self.ensemble()?.freeze(follower, leader, false);
        Ok(())
    }

    fn ensemble(&self) -> anyhow::Result<&Ensemble> {
        match self {
            Stores::Zookeeper(ensemble) => Some(ensemble),
            _ => None,
        }
        .context("only ZooKeeper's followers can be cut off")
    }
}
