//! TLS with sentinels, in a Cluster and for a quorum: every connection is encrypted and both sides are known, and what is
//! wrong with that is told at once.
//!
//! On Redis alone: the pinned Valkey is built without TLS.

use std::time::Duration;

use dlock::{Error, LockClient, LockClientBuilder, LockGuard};
use dlock_tests::faults::{PATIENCE, SOON, TIMEOUT, answered, built, hasty_builder, is_confirmed, within};
use dlock_tests::{Certificates, Cluster, Flavor, Independent, Replicas, Server, eventually, settle};

/// Servers that all speak TLS, or none.
enum Topology {
    Sentinel(Replicas),
    Cluster(Cluster),
    Quorum(Independent),
}

impl Topology {
    async fn all(certificates: Option<&Certificates>) -> [Topology; 3] {
        let (mut replicas, mut cluster) = (Replicas::builder(Flavor::Redis), Cluster::builder(Flavor::Redis));
        let mut server = Server::builder(Flavor::Redis);
        if let Some(certificates) = certificates {
            replicas = replicas.tls(certificates);
            cluster = cluster.tls(certificates);
            server = server.tls(certificates);
        }
        let (replicas, cluster, quorum) = tokio::join!(
            replicas.start(),
            cluster.start(),
            Independent::start_as(server, 3)
        );
        [
            Topology::Sentinel(replicas),
            Topology::Cluster(cluster),
            Topology::Quorum(quorum),
        ]
    }

    fn url(&self) -> String {
        match self {
            Topology::Sentinel(replicas) => replicas.url(),
            Topology::Cluster(cluster) => cluster.url(),
            Topology::Quorum(quorum) => quorum.url(),
        }
    }

    fn servers(&self) -> Vec<&Server> {
        match self {
            Topology::Sentinel(replicas) => replicas.servers().iter().chain(replicas.sentinels()).collect(),
            Topology::Cluster(cluster) => cluster.servers().collect(),
            Topology::Quorum(quorum) => quorum.servers().iter().collect(),
        }
    }

    /// The server of this key is replaced in good order; of a quorum one is gone.
    async fn fail_over(&self, key: &str, guard: &LockGuard) {
        match self {
            Topology::Sentinel(replicas) => {
                let before = replicas.master().await.port();
                for replica in replicas.servers().iter().filter(|server| server.port() != before) {
                    has(replica, key).await;
                }
                replicas.fail_over().await;
            }
            Topology::Cluster(cluster) => cluster.fail_over(cluster.owner_of(key).await).await,
            Topology::Quorum(quorum) => {
                quorum.all_have(key, guard).await;
                quorum.servers()[0].kill();
            }
        }
    }
}

async fn has(server: &Server, key: &str) {
    eventually("the replica has it", || async {
        server.keys().await.iter().any(|have| have == key)
    })
    .await;
}

/// All connections of lock clients came by the port for TLS.
async fn all_are_encrypted(topology: &Topology) {
    let mut seen = 0;
    for server in topology.servers() {
        let port = format!(":{}", server.announced().port());
        for client in server.client_list().await {
            if client["name"].starts_with("dlock:") {
                assert!(client["laddr"].ends_with(&port), "{client:?}");
                seen += 1;
            }
        }
    }
    assert!(seen > 1, "no server is there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_are_acquired_waited_for_and_kept_through_a_fail_over() {
    let certificates = Certificates::new();
    for topology in Topology::all(Some(&certificates)).await {
        let url = topology.url();
        assert!(url.contains("rediss"), "{url}");
        let client = || built(|| certificates.given_to(hasty_builder(&url)));
        let (a, b) = (client().await, client().await);
        let guard = answered(|| a.lock("k").acquire()).await.unwrap();
        let waiter = tokio::spawn(b.lock("k").wait(PATIENCE).acquire());
        settle().await;
        all_are_encrypted(&topology).await;
        guard.release().await.unwrap();
        let guard = within(SOON, "the wake-up", waiter).await.unwrap().unwrap();
        let waiter = tokio::spawn(a.lock("k").wait(PATIENCE).acquire());
        settle().await;
        topology.fail_over("k", &guard).await;
        is_confirmed(&guard).await;
        guard.release().await.unwrap();
        let guard = within(PATIENCE, "the next one", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

/// It cannot be built, and that is told in time, with the reason, in which these words are, and without the password.
async fn is_refused(builder: LockClientBuilder, wrong: &str, words: &str) {
    let error = within(SOON, wrong, builder.build()).await.unwrap_err();
    println!("{wrong}: {error}");
    assert!(
        matches!(
            error,
            Error::Unreachable { .. } | Error::Refused { .. } | Error::InvalidOption { .. }
        ),
        "{wrong}: {error:?}"
    );
    let text = format!("{error} {error:?}");
    assert!(text.contains("127.0.0.1:"), "{wrong}: {text}");
    assert!(text.contains(words), "{wrong}: {text}");
    assert!(!text.contains("hunter2"), "{wrong}: {text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_without_a_certificate_or_tls_is_told_at_once() {
    let certificates = Certificates::new();
    let strangers = Certificates::new();
    for topology in Topology::all(Some(&certificates)).await {
        let url = topology.url().replacen("://", "://:hunter2@", 1);
        // What is told only when that is over is not told at once.
        let builder = || LockClient::builder().url(&url).timeout(PATIENCE);
        let anonymous = builder().root_certificate(certificates.root.clone());
        let plain = builder().url(url.replacen("rediss", "redis", 1));
        // The servers accept the certificate of these, so that only the client can refuse.
        let shown = || certificates.shown_by(builder());
        let betrayed = shown().root_certificate(strangers.root.clone());
        for (wrong, builder, words) in [
            ("an authority that is not the system's", shown(), "UnknownIssuer"),
            ("another authority", betrayed, "BadSignature"),
            ("no certificate of the client", anonymous, ""),
            ("plain text", plain, ""),
        ] {
            is_refused(builder, &format!("{wrong} at {}", topology.url()), words).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificate_without_the_name_of_the_server_is_refused_also_at_addresses_that_servers_announce() {
    let certificates = Certificates::naming(&["localhost"]);
    for topology in Topology::all(Some(&certificates)).await {
        let url = topology.url();
        let client = |url: &str| {
            let builder = LockClient::builder().url(url).timeout(PATIENCE);
            certificates.given_to(builder)
        };
        is_refused(
            client(&url),
            &format!("another name at {url}"),
            "not valid for name",
        )
        .await;
        let named = url.replace("127.0.0.1", "localhost");
        // The servers that the URL names are accepted, but those that they announce by their addresses are not.
        match &topology {
            Topology::Sentinel(_) => {
                let wrong = format!("another name behind {named}");
                is_refused(client(&named), &wrong, "not valid for name").await;
            }
            Topology::Cluster(_) => {
                // Until the timeout it hopes for a better connection.
                let hasty = || client(&named).timeout(SOON);
                let client = answered(|| hasty().build())
                    .await
                    .expect("the nodes that are named");
                eventually("it is refused for the name", || async {
                    let error = client.lock("k").try_acquire().await.unwrap_err();
                    error.to_string().contains("not valid for name")
                })
                .await;
            }
            Topology::Quorum(_) => drop(client(&named).build().await.expect("it is the name")),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_speak_no_tls_are_told_within_the_timeout() {
    let certificates = Certificates::new();
    for topology in Topology::all(None).await {
        let url = topology.url().replacen("redis", "rediss", 1);
        // They wait for the end of a command that never comes.
        let builder = LockClient::builder().url(&url).timeout(TIMEOUT);
        let builder = certificates.given_to(builder).retry_for(Duration::from_secs(1));
        is_refused(builder, &format!("no TLS at {}", topology.url()), "").await;
    }
}
