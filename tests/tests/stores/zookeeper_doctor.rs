//! The doctor on ZooKeeper, on servers that are set up wrongly on purpose.

use std::time::Duration;

use dlock::LockClient;
use dlock::store::doctor::Verdict::{Bad, Good, Unknown};
use dlock_tests::eventually;
use dlock_tests::zookeeper::{Ensemble, Zookeeper};
use dlock_zookeeper::ZookeeperLocks;
use tokio::net::{TcpSocket, TcpStream};

use crate::doctor_support::{are_good, found, is, read, tried};

const PATIENCE: Duration = Duration::from_secs(30);
/// Within the limits of the servers of the harness.
const SESSION: Duration = Duration::from_secs(8);

async fn store(servers: &str, session: Duration) -> ZookeeperLocks {
    let builder = ZookeeperLocks::builder(servers).session(session).root("/doctor");
    builder
        .timeout(PATIENCE)
        .connect()
        .await
        .expect("a server is there")
}

async fn client(servers: &str, session: Duration) -> LockClient {
    let store = store(servers, session).await;
    let client = LockClient::builder().store(store).timeout(PATIENCE).build();
    client.await.expect("a client")
}

#[tokio::test]
async fn healthy_server_is_good_and_keeps_nothing_of_the_doctor() {
    let server = Zookeeper::start().await;
    let client = client(&server.addr().to_string(), SESSION).await;
    let before = nodes(&server).await;
    let diagnosis = tried(&client).await;
    are_good(
        &diagnosis,
        &[
            "lease-budget",
            "members",
            "replicas",
            "session",
            "stalls",
            "connections",
            "request-times",
        ],
    );
    is(&diagnosis, "persistence", Unknown, "forceSync");
    // The installed one may be old.
    let versions = found(&diagnosis, "versions");
    assert!(versions.why.contains("ZooKeeper 3."), "{versions:?}");
    assert_eq!(nodes(&server).await, before, "no node stays");
    is(&read(&client).await, "request-times", Unknown, "only reads");
}

/// Three connections from this address.
async fn from(address: &str, server: &Zookeeper) -> [TcpStream; 3] {
    let connect = async || {
        let socket = TcpSocket::new_v4().expect("a socket");
        let local = format!("{address}:0").parse().expect("an address");
        socket.bind(local).expect("an address of this machine");
        socket.connect(server.addr()).await.expect("a connection")
    };
    [connect().await, connect().await, connect().await]
}

/// How many nodes the server has.
async fn nodes(server: &Zookeeper) -> String {
    let said = server.said("srvr").await.expect("it answers");
    let line = said.lines().find(|line| line.starts_with("Node count"));
    line.expect("the number of nodes").to_owned()
}

#[tokio::test]
async fn session_that_the_servers_shorten_and_a_low_limit_of_connections_are_told() {
    let server = Zookeeper::start_with("maxSessionTimeout=5000\nmaxClientCnxns=6\n").await;
    let address = server.addr().to_string();
    let asks = client(&address, SESSION).await;
    let diagnosis = read(&asks).await;
    is(&diagnosis, "session", Bad, "5s at most");
    // What it expects is of the session that the servers give, half of which is the lease of a hold.
    let expected = |event: &str| {
        let row = diagnosis.what_if.iter().find(|row| row.event.contains(event));
        row.expect("a row for it").clone()
    };
    assert!(expected("killed").waits.contains("up to 5s"));
    assert!(expected("restarted").lost.contains("within 1.7s"));
    assert!(expected("network").lost.contains("the lease of 2.5s"));
    assert!(expected("clock").lost.starts_with("none"));
    is(&read(&asks).await, "connections", Good, "each address may have 6");
    // Many all together, of which each address has few.
    eventually("others are connected from elsewhere", async || {
        let _elsewhere = [from("127.0.0.2", &server).await, from("127.0.0.3", &server).await];
        let connections = found(&read(&asks).await, "connections").clone();
        connections.verdict == Good && connections.why.contains("3 of 8 connections are from")
    })
    .await;
    let mut others = Vec::new();
    for _ in 0..4 {
        others.push(store(&address, Duration::from_secs(4)).await);
    }
    is(&read(&asks).await, "connections", Bad, "are from 127.0.0.1");
    let long = Zookeeper::start_with("minSessionTimeout=20000\nmaxSessionTimeout=40000\n").await;
    let asks = client(&long.addr().to_string(), SESSION).await;
    is(&read(&asks).await, "session", Bad, "20s at least");
}

#[tokio::test]
async fn words_that_a_server_does_not_answer_are_unknown() {
    let server = Zookeeper::start_with("4lw.commands.whitelist=srvr\n").await;
    let client = client(&server.addr().to_string(), SESSION).await;
    let diagnosis = read(&client).await;
    for check in ["session", "connections"] {
        is(&diagnosis, check, Unknown, "not in the whitelist");
    }
}

#[tokio::test]
async fn server_that_is_down_or_not_named_is_told() {
    let ensemble = Ensemble::start().await;
    let addresses: Vec<String> = ensemble
        .servers()
        .iter()
        .map(|server| server.addr().to_string())
        .collect();
    let all = client(&addresses.join(","), SESSION).await;
    eventually("all are in step", async || {
        found(&read(&all).await, "replicas").verdict == Good
    })
    .await;
    let diagnosis = read(&all).await;
    is(&diagnosis, "members", Good, "3 servers serve, 1 may fail");
    is(&diagnosis, "lease-budget", Unknown, "syncLimit");
    let one = client(&addresses[0], SESSION).await;
    is(&read(&one).await, "members", Bad, "names 1 of 3 servers");
    let follower = (ensemble.leader().await + 1) % 3;
    ensemble.servers()[follower].kill();
    eventually("the leader knows", async || {
        found(&read(&all).await, "replicas").verdict == Bad
    })
    .await;
    let diagnosis = read(&all).await;
    is(&diagnosis, "members", Bad, &addresses[follower]);
    is(&diagnosis, "replicas", Bad, "1 of 2 followers");
}
