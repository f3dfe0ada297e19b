//! A fixed address that leads to another server now, while open connections still go to the former one, which is not
//! always so kind as to say that it is read-only.

use std::time::Duration;

use dlock::LockKind;
use dlock_tests::faults::{PATIENCE, SOON, answered, hasty, is_confirmed, patient, within};
use dlock_tests::{Flavor, Proxy, Server, ServerBuilder, eventually};

/// A master, its replica, and the address of the service, behind which the master is.
struct Service {
    master: Server,
    replica: Server,
    address: Proxy,
}

impl Service {
    async fn start() -> Service {
        Service::start_with(|builder| builder).await
    }

    async fn start_with(options: impl Fn(ServerBuilder) -> ServerBuilder) -> Service {
        let builder = || {
            let builder = Server::builder(Flavor::from_env());
            options(builder.config("replica-serve-stale-data", "no"))
        };
        let master = builder().start().await;
        let replica = builder().replica_of(master.addr()).start().await;
        let address = Proxy::start(master.addr());
        let service = Service {
            master,
            replica,
            address,
        };
        eventually("the replica is linked", || async {
            let info: String = service.replica.query(&["INFO", "replication"]).await;
            info.contains("master_link_status:up")
        })
        .await;
        service
    }

    /// Waits until the replica has these keys.
    async fn has_copied(&self, keys: &[&str]) {
        eventually("the replica has the locks", || async {
            let known = self.replica.keys().await;
            keys.iter().all(|key| known.iter().any(|one| one == key))
        })
        .await;
    }

    /// The replica is the master from now on, and new connections go to it.
    async fn promote(&self) {
        self.replica.command(&["REPLICAOF", "NO", "ONE"]).await;
        self.address.retarget(self.replica.addr());
    }

    async fn assert_left(&self) {
        eventually("no connection stays at the former master", || async {
            let clients = self.master.client_list().await;
            clients.iter().all(|client| !client["name"].starts_with("dlock:"))
        })
        .await;
    }
}

/// Locks of each kind go on at the new master, and what it has stays held.
async fn go_on(service: &Service, demote: impl AsyncFnOnce()) {
    let client = hasty(&service.address.url()).await;
    let held = client.lock("held").acquire().await.unwrap();
    let busy = client.lock("busy").acquire().await.unwrap();
    let waiter = tokio::spawn(client.lock("busy").local_handoffs(0).wait(PATIENCE).acquire());
    service.has_copied(&["held", "busy"]).await;
    service.promote().await;
    demote().await;
    for kind in [LockKind::Mutex, LockKind::Fair, LockKind::Read] {
        let lock = client.lock(format!("next:{kind}")).kind(kind);
        let guard = within(SOON, format!("an acquire ({kind})"), answered(|| lock.acquire()))
            .await
            .unwrap();
        guard.release().await.unwrap();
    }
    is_confirmed(&held).await;
    busy.release().await.unwrap();
    drop(within(SOON, "the waiter", waiter).await.unwrap().unwrap());
    held.release().await.unwrap();
    service.assert_left().await;
}

/// The former master is a replica without a link to the new one, and serves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_master_without_a_link_to_the_new_one_is_left() {
    let service = Service::start().await;
    go_on(&service, async || {
        let nobody = Proxy::start(service.replica.addr());
        nobody.refuse();
        let port = nobody.port().to_string();
        service.master.command(&["REPLICAOF", "127.0.0.1", &port]).await;
    })
    .await;
}

/// The former master takes very long to load the data of the new one, and serves nothing meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_master_that_loads_the_data_of_the_new_one_is_left() {
    if Flavor::from_env() == Flavor::Redis62 {
        // It cannot be told to load so little at a time, and does not answer meanwhile.
        return;
    }
    let service = Service::start_with(|builder| {
        builder
            .config("rdbcompression", "no")
            .config("loading-process-events-interval-bytes", "1024")
    })
    .await;
    let fill = "for i = 1, 3000 do redis.call('SET', 'data' .. i, string.rep('x', 2000)) end";
    service.master.command(&["EVAL", fill, "0"]).await;
    go_on(&service, async || {
        // A minute in all.
        service
            .master
            .command(&["CONFIG", "SET", "key-load-delay", "20000"])
            .await;
        // It knows nothing of the past of the new master, and copies everything.
        service.replica.command(&["SET", "later", "1"]).await;
        service.master.command(&["SET", "earlier", "1"]).await;
        let port = service.replica.port().to_string();
        service.master.command(&["REPLICAOF", "127.0.0.1", &port]).await;
        eventually("it loads", || async {
            let info: String = service.master.query(&["INFO", "persistence"]).await;
            info.contains("loading:1")
        })
        .await;
    })
    .await;
}

/// Only the connection of the requests broke: that of the notifications still leads to the former server, which does not
/// learn of releases any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_follows_the_requests_to_another_server() {
    let service = Service::start().await;
    let client = hasty(&service.address.url()).await;
    let holder = patient(&service.master.url()).await;
    // Waiters look when a part of the lease is over.
    let held = holder
        .lock("k")
        .lease(Duration::from_secs(900))
        .acquire()
        .await
        .unwrap();
    let waiter = tokio::spawn(client.lock("k").wait(PATIENCE).acquire());
    eventually("the waiter listens", || async {
        !service.master.pubsub_channels().await.is_empty()
    })
    .await;
    service.has_copied(&["k"]).await;
    service.promote().await;
    for connection in service.address.connections() {
        if !connection.subscriber {
            service.address.cut_connection(connection.id);
        }
    }
    eventually("the requests go to the new server", || async {
        let clients = service.replica.client_list().await;
        clients.iter().any(|client| client["name"].starts_with("dlock:"))
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let there = patient(&service.replica.url()).await;
    assert!(
        there.force_release("k").await.unwrap(),
        "the new server has the lock"
    );
    drop(within(SOON, "the waiter", waiter).await.unwrap().unwrap());
    drop(held);
}
