//! The contract of stores (crate `dlock-conformance`) on real servers: one, with sentinels, in a Cluster, and three of which
//! a majority counts; and on one whose network and process have faults.

use std::sync::Arc;
use std::time::Duration;

use dlock::LockClient;
use dlock::store::Store;
use dlock_conformance::{Fixture, conform};
use dlock_tests::faults::{PATIENCE, answered};
use dlock_tests::{Command, Flavor, Proxy, Server, Swallow};

/// A store without faults but that it can lose its data.
struct Plain(dlock_tests::Store);

impl Fixture for Plain {
    async fn store(&self) -> Arc<dyn Store> {
        self.0.store().await
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }

    async fn forget(&self) -> bool {
        self.0.flush().await;
        true
    }
}

macro_rules! on {
    ($($name:ident)*) => {
        $(mod $name {
            use super::*;

            async fn fixture() -> Plain {
                Plain(dlock_tests::Store::$name().await)
            }

            conform!(fixture);
        })*
    };
}

on! { server cluster sentinel quorum }

mod faulty {
    use super::*;

    /// A server behind a proxy.
    struct Faulty {
        server: Server,
        proxy: Proxy,
    }

    impl Fixture for Faulty {
        async fn store(&self) -> Arc<dyn Store> {
            let builder = || {
                LockClient::builder()
                    .url(self.proxy.url())
                    .timeout(Duration::from_secs(2))
            };
            let store = answered(|| builder().build_store()).await;
            store.expect("the server is there")
        }

        fn patience(&self) -> Duration {
            PATIENCE
        }

        async fn forget(&self) -> bool {
            self.server.flush().await;
            true
        }

        async fn restart(&self) -> bool {
            self.server.restart().await;
            true
        }

        async fn cut(&self) -> bool {
            self.proxy.refuse();
            self.proxy.cut();
            true
        }

        async fn freeze(&self) -> bool {
            self.server.stop();
            true
        }

        async fn heal(&self) {
            self.server.cont();
            self.proxy.heal();
        }

        async fn lose_next_reply(&self) -> bool {
            self.proxy.swallow(1, Swallow::Cut, Command::carries_steps);
            true
        }
    }

    async fn fixture() -> Faulty {
        let server = Server::start(Flavor::from_env()).await;
        Faulty {
            proxy: Proxy::start(server.addr()),
            server,
        }
    }

    conform!(fixture);
}

/// The tests of the contract that need what a store does not say to have are left out, and nothing fails.
mod features {
    async fn are(store: dlock_tests::Store, words: &str) {
        assert_eq!(dlock_tests::features(&*store.store().await), words);
    }

    #[tokio::test]
    async fn server_has_what_its_tests_rely_on() {
        let words = "lock fair read write fenced permit unowned latch token_blocks fixed_lease min_hold prefer_writers \
                     restores_positions limits inspection sets Certain";
        are(dlock_tests::Store::server().await, words).await;
    }

    #[tokio::test]
    async fn quorum_has_what_its_tests_rely_on() {
        let words = "lock read write fixed_lease min_hold inspection Certain";
        are(dlock_tests::Store::quorum().await, words).await;
    }
}
